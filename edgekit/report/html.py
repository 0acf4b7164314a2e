"""Builds, verifications and quantizations as one HTML page each, and any report as the output of a notebook's cell."""

import html
import importlib
from collections.abc import Mapping, Sequence

import msgspec

from edgekit.check.recommend import recommend_target
from edgekit.check.report import CheckReport
from edgekit.machine import find_module
from edgekit.progress import Progress, say_nothing
from edgekit.report import charts, checked, tables, text
from edgekit.report.charts import Picture
from edgekit.report.checked import CheckSummary, render_check
from edgekit.report.pages import Mark, make_page
from edgekit.report.summary import BuildReport, QuantizeReport
from edgekit.serialize import escape_controls
from edgekit.verify.report import VerifyReport
from edgekit.verify.two_models import ModelComparison

CHART_HEIGHT = 180
BAR_WIDTH = 9
# 20 dB is an error of a tenth of the signal; 35 dB one of less than a fiftieth.
_GOOD_DB, _BAD_DB, _BEST_DB = 35.0, 20.0, 60.0


# What the templates may call.
_MODULES = (charts, checked, tables, text)


def render_build(report: BuildReport, pictures: Mapping[str, Sequence[Picture]] | None = None) -> str:
    """Returns a build as an HTML page; `pictures` holds the images of the worst samples by target."""
    return make_page("build", *_MODULES, report=report, pictures=pictures or {})


def render_verify(report: VerifyReport, pictures: Sequence[Picture] = ()) -> str:
    """Returns a verification as an HTML page."""
    return make_page("verify", *_MODULES, report=report, pictures=pictures)


def render_comparison(
    report: ModelComparison, pictures: Sequence[Picture] = (), *, min_sqnr_db: float | None = None
) -> str:
    """Returns a comparison of two models as an HTML page, judged by `min_sqnr_db` as the command judges it."""
    return make_page("compare", *_MODULES, report=report, min_sqnr_db=min_sqnr_db, pictures=pictures)


def render_quantization(report: QuantizeReport) -> str:
    """Returns a quantization as an HTML page: its cost, what was tried, and a bar for each layer.

    The bar is higher if the SQNR is lower when this layer alone is quantized.
    """
    bars: list[Mark] = []
    for layer in report.layers:
        if layer.sqnr_db is not None:
            share = max(0.0, min(layer.sqnr_db, _BEST_DB)) / _BEST_DB
            height = round(max(2.0, CHART_HEIGHT * (1 - share)))
            span = f"{layer.low:.4g} to {layer.high:.4g}"
            bar = Mark(
                x=len(bars) * BAR_WIDTH,
                y=CHART_HEIGHT - height,
                height=height,
                # A tensor that alone gives less than 20 dB nearly always costs accuracy; above 35 dB it does not.
                kind="much" if layer.sqnr_db < _BAD_DB else "some" if layer.sqnr_db < _GOOD_DB else "none",
                title=f"{layer.tensor} ({layer.op}): {layer.sqnr_db:.1f} dB, {layer.bits} bits, {span}",
            )
            bars.append(bar)
    return make_page("quantize", tables, report=report, bars=bars, bar_width=BAR_WIDTH, chart_height=CHART_HEIGHT)


_Report = BuildReport | CheckReport | ModelComparison | QuantizeReport | VerifyReport
_HEIGHT = 700
_TEXT = "text/plain"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A report as an HTML page, `height` pixels high in a notebook, which calls `_repr_html_`."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        return frame_page(self.page, self.height)


def frame_page(page: str, height: int) -> str:
    """Returns a page in a frame of this height in pixels."""
    # The sandbox allows scripts only: names in the page come from untrusted models.
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def show(report: _Report, *, height: int = _HEIGHT) -> Page:
    """Returns a report for display in a notebook: the same page as `--html`, in a frame of this height in pixels."""
    return Page(page=_render(report), height=height)


def draw(report: _Report) -> str:
    """Returns the HTML that a notebook shows for a report at the end of a cell."""
    return frame_page(_render(report), _HEIGHT)


def show_progress() -> Progress:
    """Returns a function for `progress=` that shows the current step in a notebook, in one line.

    Outside a notebook the function shows nothing.
    """
    if find_module("IPython") is None or importlib.import_module("IPython").get_ipython() is None:
        return say_nothing
    # As plain text: names of tensors and files come from untrusted models.
    line = importlib.import_module("IPython.display").display({_TEXT: ""}, raw=True, display_id=True)
    return lambda step: line.update({_TEXT: escape_controls(step)}, raw=True)


def _render(report: _Report) -> str:
    match report:
        case BuildReport():
            return render_build(report)
        case CheckReport():
            found = {report.target: report}
            recommended = recommend_target(found, {})
            return render_check(
                CheckSummary(model=report.model, sha256=report.sha256, targets=found, recommended=recommended)
            )
        case VerifyReport():
            return render_verify(report)
        case QuantizeReport():
            return render_quantization(report)
        case ModelComparison():
            return render_comparison(report)
