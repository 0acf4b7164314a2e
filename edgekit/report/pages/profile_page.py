"""Profiles as an HTML page: time line, treemap and roofline of each, and what sets two apart."""

from collections.abc import Callable, Mapping

from edgekit.evidence import Evidence
from edgekit.profile.profile import ProfileRun
from edgekit.report.pages.pages import make_page
from edgekit.report.pages.profile_charts import HUES, draw_roof, draw_treemap, list_spans, number_hues
from edgekit.report.tables import format_bytes, format_count
from edgekit.report.timing.profile_text import (
    describe_cause,
    describe_comparison,
    describe_shapes,
    headline_profile,
    list_profile_remarks,
    list_report_remarks,
    rank_nodes,
    short_provider,
)

_FILTERS: Mapping[str, Callable[..., object]] = {
    "headline": headline_profile,
    "ranked": rank_nodes,
    "remarks": list_profile_remarks,
    "provider": short_provider,
    "shapes": describe_shapes,
    "treemap": draw_treemap,
    "roofline": draw_roof,
    "hues": number_hues,
    "spans": list_spans,
    "cause": describe_cause,
    "bytes": format_bytes,
    "count": format_count,
}


def render_profile(run: ProfileRun) -> str:
    """Returns profiles as an HTML page."""
    comparison = run.report.comparison
    return make_page(
        "profile",
        _FILTERS,
        script="profile.js",
        hues=HUES,
        report=run.report,
        profiled=run.profiled,
        compared=None if comparison is None else describe_comparison(comparison),
        remarks=list(list_report_remarks(run.report)),
        evidence_kinds=list(Evidence),
    )
