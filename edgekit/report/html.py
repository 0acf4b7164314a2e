"""Reports as one HTML page: no script, nothing loaded from elsewhere."""

from collections.abc import Callable, Mapping

from edgekit.evidence import Evidence
from edgekit.report.checked import describe_taken
from edgekit.report.layer_chart import BAR_WIDTH, CHART_HEIGHT, draw_layers
from edgekit.report.pages import make_page
from edgekit.report.quantization_text import describe_prediction
from edgekit.report.summary import BuildReport, QuantizeReport
from edgekit.report.tables import format_bytes
from edgekit.report.text import (
    describe_agreement,
    describe_evidence,
    describe_remarks,
    describe_size,
    list_verify_remarks,
)
from edgekit.verify.report import VerifyReport

_FILTERS: Mapping[str, Callable[..., object]] = {
    "taken": describe_taken,
    "size": describe_size,
    "agreement": describe_agreement,
    "evidence": describe_evidence,
    "remarks": describe_remarks,
    "bytes": format_bytes,
    "prediction": describe_prediction,
}


def render_build(report: BuildReport) -> str:
    """Returns a build as an HTML page."""
    return make_page("build", _FILTERS, report=report, evidence_kinds=list(Evidence))


def render_verify(report: VerifyReport) -> str:
    """Returns a verification as an HTML page."""
    remarks = list(list_verify_remarks(report))
    return make_page("verify", _FILTERS, report=report, remarks=remarks, evidence_kinds=list(Evidence))


def render_quantization(report: QuantizeReport) -> str:
    """Returns a quantization as an HTML page: what it costs, what was tried, and a chart of its layers."""
    bars = list(draw_layers(report.layers))
    return make_page("quantize", _FILTERS, report=report, bars=bars, bar_width=BAR_WIDTH, chart_height=CHART_HEIGHT)
