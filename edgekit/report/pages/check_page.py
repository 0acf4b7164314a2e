"""A check as one HTML page."""

from collections.abc import Callable, Mapping

from edgekit.evidence import Evidence
from edgekit.report.checked import (
    CheckSummary,
    describe_advice,
    describe_disagreement,
    describe_fates,
    describe_recommendation,
    describe_work,
    list_observed,
    list_ort_opinions,
    list_remarks,
)
from edgekit.report.pages.drawing import draw_blocks
from edgekit.report.pages.pages import make_page
from edgekit.report.pages.strip import draw_strip
from edgekit.report.tables import format_bytes

_FILTERS: Mapping[str, Callable[..., object]] = {
    "bytes": format_bytes,
    "work": describe_work,
    "disagreement": describe_disagreement,
    "observed": list_observed,
    "advice": describe_advice,
    "remarks": list_remarks,
    "fates": describe_fates,
    "blocks": draw_blocks,
    "strip": draw_strip,
}


def render_check(summary: CheckSummary) -> str:
    """Returns the checks of a model, by target, as an HTML page."""
    return make_page(
        "check",
        _FILTERS,
        summary=summary,
        reports=summary.targets,
        observed=summary.observed,
        recommendation=describe_recommendation(summary.recommended, summary.targets),
        opinions=[] if summary.ort is None else list(list_ort_opinions(summary.ort, summary.targets)),
        evidence_kinds=list(Evidence),
    )
