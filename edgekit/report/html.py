"""Reports as one HTML page: no script, nothing loaded from elsewhere."""

from typing import Any

import jinja2

from edgekit.evidence import Evidence
from edgekit.report.drawing import draw_blocks
from edgekit.report.layer_chart import BAR_WIDTH, CHART_HEIGHT, draw_layers
from edgekit.report.quantization_text import describe_prediction
from edgekit.report.summary import BuildReport, CheckSummary, QuantizeReport
from edgekit.report.text import (
    describe_advice,
    describe_agreement,
    describe_disagreement,
    describe_evidence,
    describe_fates,
    describe_recommendation,
    describe_remarks,
    describe_size,
    describe_taken,
    describe_work,
    format_bytes,
    list_observed,
    list_ort_opinions,
    list_verify_remarks,
)
from edgekit.verify.report import VerifyReport

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("edgekit.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_FILTERS: dict[str, Any] = {
    "taken": describe_taken,
    "size": describe_size,
    "agreement": describe_agreement,
    "evidence": describe_evidence,
    "remarks": describe_remarks,
    "bytes": format_bytes,
    "work": describe_work,
    "disagreement": describe_disagreement,
    "observed": list_observed,
    "advice": describe_advice,
    "fates": describe_fates,
    "blocks": draw_blocks,
    "prediction": describe_prediction,
}
_TEMPLATES.filters.update(_FILTERS)


def render_build(report: BuildReport) -> str:
    """Returns a build as an HTML page."""
    return _TEMPLATES.get_template("build.html.j2").render(report=report, evidence_kinds=list(Evidence))


def render_verify(report: VerifyReport) -> str:
    """Returns a verification as an HTML page."""
    remarks = list(list_verify_remarks(report))
    return _TEMPLATES.get_template("verify.html.j2").render(
        report=report, remarks=remarks, evidence_kinds=list(Evidence)
    )


def render_quantization(report: QuantizeReport) -> str:
    """Returns a quantization as an HTML page: what it costs, what was tried, and a chart of its layers."""
    bars = list(draw_layers(report.layers))
    return _TEMPLATES.get_template("quantize.html.j2").render(
        report=report, bars=bars, bar_width=BAR_WIDTH, chart_height=CHART_HEIGHT
    )


def render_check(summary: CheckSummary) -> str:
    """Returns the checks of a model, by target, as an HTML page; it needs nothing but itself."""
    return _TEMPLATES.get_template("check.html.j2").render(
        summary=summary,
        reports=summary.targets,
        observed=summary.observed,
        recommendation=describe_recommendation(summary.recommended, summary.targets),
        opinions=[] if summary.ort is None else list(list_ort_opinions(summary.ort, summary.targets)),
        evidence_kinds=list(Evidence),
    )
