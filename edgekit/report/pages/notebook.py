"""Reports in a notebook: the page that a command writes, in a cell's output."""

import html

import msgspec

from edgekit.report.pages.html import render_build, render_comparison, render_quantization, render_verify
from edgekit.report.summary import BuildReport, QuantizeReport
from edgekit.verify.report import VerifyReport
from edgekit.verify.two_models import ModelComparison

Shown = BuildReport | ModelComparison | QuantizeReport | VerifyReport


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A report as a page; notebooks call `_repr_html_` of what a cell ends with."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        # In a frame without rights: names of models are a stranger's text, and the page's own script may run alone.
        return (
            f'<iframe sandbox="allow-scripts" style="width: 100%; height: {self.height}px; border: 0"'
            f' srcdoc="{html.escape(self.page)}"></iframe>'
        )


def show(report: Shown, *, height: int = 700) -> Page:
    """Returns a report as what a notebook shows: the same page as `--html`, in a frame of so many pixels."""
    return Page(page=_render(report), height=height)


def _render(report: Shown) -> str:
    match report:
        case BuildReport():
            return render_build(report)
        case VerifyReport():
            return render_verify(report)
        case QuantizeReport():
            return render_quantization(report)
        case ModelComparison():
            return render_comparison(report)
