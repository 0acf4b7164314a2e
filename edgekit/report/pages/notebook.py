"""Reports in a notebook: the page that a command writes with `--html`, as a cell's output."""

import html
import importlib

import msgspec

from edgekit.check.recommend import recommend_target
from edgekit.check.report import CheckReport
from edgekit.machine import find_module
from edgekit.progress import Progress, say_nothing
from edgekit.report.checked import CheckSummary
from edgekit.report.pages.check_page import render_check
from edgekit.report.pages.html import render_build, render_comparison, render_quantization, render_verify
from edgekit.report.summary import BuildReport, QuantizeReport
from edgekit.serialize import escape_controls
from edgekit.verify.report import VerifyReport
from edgekit.verify.two_models import ModelComparison

_Report = BuildReport | CheckReport | ModelComparison | QuantizeReport | VerifyReport
_HEIGHT = 700
_TEXT = "text/plain"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A report as a page; notebooks call `_repr_html_` of the last value of a cell."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        return frame_page(self.page, self.height)


def frame_page(page: str, height: int) -> str:
    """Returns a page in a frame of this height in pixels."""
    # A sandbox without rights: names of models come from strangers, and only the page's own script may run.
    return (
        f'<iframe sandbox="allow-scripts" style="width: 100%; height: {height}px; border: 0"'
        f' srcdoc="{html.escape(page)}"></iframe>'
    )


def show(report: _Report, *, height: int = _HEIGHT) -> Page:
    """Returns a report for display in a notebook: the same page as `--html`, in a frame of this height in pixels."""
    return Page(page=_render(report), height=height)


def draw(report: _Report) -> str:
    """Returns the HTML that a notebook shows for a report at the end of a cell."""
    return frame_page(_render(report), _HEIGHT)


def show_progress() -> Progress:
    """Returns a function for `progress=` that shows in a notebook what is being done, in one line that it renews.

    Outside a notebook the function shows nothing.
    """
    if find_module("IPython") is None or importlib.import_module("IPython").get_ipython() is None:
        return say_nothing
    # As plain text: steps name tensors and files, and these names come from strangers.
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
