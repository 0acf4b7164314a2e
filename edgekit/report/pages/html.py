"""Builds, verifications and quantizations as one HTML page each."""

from collections.abc import Callable, Mapping, Sequence

from edgekit.evidence import Evidence
from edgekit.report.checked import describe_taken
from edgekit.report.headline import describe_verified, headline_build, headline_verify
from edgekit.report.pages.charts import Picture, place_bars, place_layers
from edgekit.report.pages.layer_chart import BAR_WIDTH, CHART_HEIGHT, draw_layers
from edgekit.report.pages.pages import make_page
from edgekit.report.pages.strip import draw_stages, draw_strip
from edgekit.report.quantization_text import describe_prediction
from edgekit.report.summary import BuildReport, QuantizeReport
from edgekit.report.tables import format_bytes
from edgekit.report.text import (
    describe_agreement,
    describe_evidence,
    describe_remarks,
    describe_size,
    list_comparison_remarks,
    list_located,
    list_metric,
    list_verify_remarks,
)
from edgekit.verify.report import VerifyReport
from edgekit.verify.two_models import ModelComparison, output_reaches

_FILTERS: Mapping[str, Callable[..., object]] = {
    "taken": describe_taken,
    "size": describe_size,
    "agreement": describe_agreement,
    "evidence": describe_evidence,
    "remarks": describe_remarks,
    "bytes": format_bytes,
    "prediction": describe_prediction,
    "bars": place_bars,
    "chart": place_layers,
    "located": list_located,
    "metric": list_metric,
    "strip": draw_strip,
    "stages": draw_stages,
}


def render_build(report: BuildReport, pictures: Mapping[str, Sequence[Picture]] | None = None) -> str:
    """Returns a build as an HTML page; `pictures` holds the worst samples by target."""
    return make_page(
        "build",
        _FILTERS,
        report=report,
        headline=headline_build(report),
        verified=describe_verified(report),
        pictures=pictures or {},
        evidence_kinds=list(Evidence),
    )


def render_verify(report: VerifyReport, pictures: Sequence[Picture] = ()) -> str:
    """Returns a verification as an HTML page."""
    return make_page(
        "verify",
        _FILTERS,
        report=report,
        headline=headline_verify(report),
        remarks=list(list_verify_remarks(report)),
        pictures=pictures,
        evidence_kinds=list(Evidence),
    )


def render_comparison(
    report: ModelComparison, pictures: Sequence[Picture] = (), *, min_sqnr_db: float | None = None
) -> str:
    """Returns a comparison of two models as an HTML page, judged by `min_sqnr_db` as the command judges it."""
    reaches = {output.name: output_reaches(output, min_sqnr_db) for output in report.outputs}
    remarks = list(list_comparison_remarks(report))
    return make_page(
        "compare",
        _FILTERS,
        report=report,
        reaches=reaches,
        verdict=report.judge(min_sqnr_db),
        min_sqnr_db=min_sqnr_db,
        remarks=remarks,
        pictures=pictures,
    )


def render_quantization(report: QuantizeReport) -> str:
    """Returns a quantization as an HTML page: what it costs, what was tried, and a chart of its layers."""
    bars = list(draw_layers(report.layers))
    return make_page("quantize", _FILTERS, report=report, bars=bars, bar_width=BAR_WIDTH, chart_height=CHART_HEIGHT)
