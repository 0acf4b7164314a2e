"""Reports as one HTML page each: nothing is loaded from elsewhere, and no script runs but the page's own."""

import base64
import functools
import hashlib
from collections.abc import Callable, Mapping

import jinja2

from edgekit.evidence import Evidence


def make_page(
    name: str, filters: Mapping[str, Callable[..., object]], *, script: str = "page.js", **values: object
) -> str:
    """Returns the named template filled with values, which are escaped.

    `script` is the template of the page's only script; `digest` is its digest, the only one that the page's security
    policy allows.
    """
    templates = _environment(tuple(filters.items()))
    text = templates.get_template(script).render()
    # The page's policy names this script by its sha256 (Content Security Policy Level 3, script-src), so that no other
    # text in the page can run as a script.
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    given = {"digest": digest, "script": script, "evidence_kinds": list(Evidence), **values}
    page = templates.get_template(f"{name}.html.j2").render(given)
    # Names of files may hold lone surrogates (PEP 383), which UTF-8 cannot encode.
    return page.encode(errors="replace").decode()


@functools.lru_cache
def _environment(filters: tuple[tuple[str, Callable[..., object]], ...]) -> jinja2.Environment:
    """Returns the templates, compiled once: for a small bundle compiling takes longer than to build and verify it."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("edgekit.report"),
        # Names of models, tensors and devices come from strangers: every value of a template is escaped unless it is
        # marked as HTML.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(filters)
    return templates
