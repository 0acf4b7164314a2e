"""Reports as one HTML page: no script, nothing loaded from elsewhere."""

from typing import Any

import jinja2

from edgekit.evidence import Evidence
from edgekit.report.summary import BuildReport
from edgekit.report.text import (
    describe_agreement,
    describe_evidence,
    describe_remarks,
    describe_size,
    describe_taken,
    format_bytes,
)

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
}
_TEMPLATES.filters.update(_FILTERS)


def render_build(report: BuildReport) -> str:
    """Returns a build as an HTML page."""
    return _TEMPLATES.get_template("build.html.j2").render(report=report, evidence_kinds=list(Evidence))
