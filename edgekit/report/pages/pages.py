"""Reports as one HTML page each: nothing is loaded from elsewhere, and no script runs but the page's own."""

import base64
import hashlib
from collections.abc import Callable, Mapping

import jinja2


def make_page(name: str, filters: Mapping[str, Callable[..., object]], **values: object) -> str:
    """Returns the template of this name filled; what the values hold is escaped.

    `digest` is that of the page's one script, which its security policy allows and no other.
    """
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("edgekit.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(filters)
    script = templates.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = templates.get_template(f"{name}.html.j2").render(digest=digest, **values)
    return page.encode(errors="replace").decode()
