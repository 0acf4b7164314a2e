"""Reports as one HTML page each: nothing is loaded from elsewhere, and no script runs but the page's own.

The charts of all pages are made of the same marks, which `chart.html.j2` draws.
"""

import base64
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType

import jinja2
import msgspec

from edgekit.evidence import Evidence


def make_page(name: str, *modules: ModuleType, script: str = "page.js", **values: object) -> str:
    """Returns the named template filled with values, which are escaped; it may call any function of `modules` by name.

    `script` is the template of the page's only script; `digest` is its digest, the only one that the page's security
    policy allows.
    """
    templates = _environment(modules)
    text = templates.get_template(script).render()
    # The page's policy names this script by its sha256 (Content Security Policy Level 3, script-src), so that no other
    # text in the page can run as a script.
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    given = {"digest": digest, "script": script, "evidence_kinds": list(Evidence), **values}
    page = templates.get_template(f"{name}.html.j2").render(given)
    # Names of files may hold lone surrogates (PEP 383), which UTF-8 cannot encode.
    return page.encode(errors="replace").decode()


@functools.lru_cache
def _environment(modules: tuple[ModuleType, ...]) -> jinja2.Environment:
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
    for module in modules:
        templates.filters.update({name: it for name, it in vars(module).items() if isinstance(it, FunctionType)})
    return templates


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A circle (it has a radius), a box, a line (a box without width or height) or a label of a chart.

    `x` and `y` are its centre, or its upper left corner. `kind` names its classes in the style sheet, `title` is shown
    where one points at it.
    """

    x: float
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    radius: float = 0.0
    kind: str = ""
    label: str = ""
    title: str = ""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart 1000 units wide: its marks, polylines by their class, and the grid with the text at each of its lines.

    The grid lies between the `edges` (left, right, top, bottom); columns are positions across, rows positions down.
    """

    marks: tuple[Mark, ...]
    lines: Mapping[str, str] = {}
    columns: tuple[tuple[float, str], ...] = ()
    rows: tuple[tuple[float, str], ...] = ()
    edges: tuple[float, float, float, float] = (0.0, 1000.0, 0.0, 320.0)
    height: float = 320.0


class LogAxis(msgspec.Struct, frozen=True):
    """A logarithmic axis between two positions; `low` and `high` are the powers of ten at its ends."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def fit(cls, values: Iterable[float], begin: float, end: float) -> "LogAxis":
        """Returns an axis for all values, with a margin: a single value has an axis too."""
        powers = [math.log10(value) for value in values]
        return cls(min(powers) - 0.05, max(powers) + 0.05, begin, end)

    def place(self, value: float) -> float:
        """Returns the position of a value; one beyond an end is placed there."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin), 1)
