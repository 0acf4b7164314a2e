"""Reports in a notebook: the page that a command writes, in a cell's output."""

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
    """A report as a page; notebooks call `_repr_html_` of what a cell ends with."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        return frame_page(self.page, self.height)


def frame_page(page: str, height: int) -> str:
    """Returns a page in a frame of so many pixels."""
    # Without rights: names of models are a stranger's text, and the page's own script may run alone.
    return (
        f'<iframe sandbox="allow-scripts" style="width: 100%; height: {height}px; border: 0"'
        f' srcdoc="{html.escape(page)}"></iframe>'
    )


def show(report: _Report, *, height: int = _HEIGHT) -> Page:
    """Returns a report as what a notebook shows: the same page as `--html`, in a frame of so many pixels."""
    return Page(page=_render(report), height=height)


def draw(report: _Report) -> str:
    """Returns what a notebook shows of a report that a cell ends with."""
    return frame_page(_render(report), _HEIGHT)


def show_progress() -> Progress:
    """Returns what shows in a notebook, in one line that renews itself, what is being done: `progress=` takes it.

    Where no notebook runs it shows nothing.
    """
    if find_module("IPython") is None or importlib.import_module("IPython").get_ipython() is None:
        return say_nothing
    # As plain text: steps name tensors and files, which are a stranger's words.
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
