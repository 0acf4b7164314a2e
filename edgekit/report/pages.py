"""Reports as one HTML page each: no script, nothing loaded from elsewhere."""

from collections.abc import Callable, Mapping

import jinja2


def make_page(name: str, filters: Mapping[str, Callable[..., object]], **values: object) -> str:
    """Returns the template of this name filled; what the values hold is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("edgekit.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(filters)
    return templates.get_template(f"{name}.html.j2").render(**values)
