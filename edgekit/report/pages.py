"""Renders self-contained HTML pages, in which only the page's own script may run.

The charts of all pages consist of marks (`Mark`), which `chart.html.j2` draws.
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
    """Renders the template `name` with `values`, which are escaped; the functions of `modules` are its filters.

    `script` is the template of the page's only script, the only one that its Content Security Policy allows.
    """
    templates = _environment(modules)
    text = templates.get_template(script).render()
    # The policy allows this script by its sha256 (Content Security Policy Level 3, script-src), so that no other text
    # in the page can run as a script.
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    given = {"digest": digest, "script": script, "evidence_kinds": list(Evidence), **values}
    page = templates.get_template(f"{name}.html.j2").render(given)
    # Names of files may hold lone surrogates (PEP 383), which UTF-8 cannot encode.
    return page.encode(errors="replace").decode()


@functools.lru_cache
def _environment(modules: tuple[ModuleType, ...]) -> jinja2.Environment:
    """Returns the templates. They are cached: compiling them can take longer than a small build."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("edgekit.report"),
        # Names of models, tensors and devices are untrusted: every value is escaped unless it is marked as HTML.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for module in modules:
        templates.filters.update({name: it for name, it in vars(module).items() if isinstance(it, FunctionType)})
    return templates


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A circle (if it has a radius), a box, a line (a box without width or height) or a label of a chart.

    `x` and `y` are the centre of a circle, or the upper left corner. `kind` holds CSS classes, `title` is the tooltip.
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
    """A chart 1000 units wide: marks, polylines (points by CSS class), and labelled grid lines.

    The grid lies between the `edges` (left, right, top, bottom); `columns` are x positions, `rows` y positions.
    """

    marks: tuple[Mark, ...]
    lines: Mapping[str, str] = {}
    columns: tuple[tuple[float, str], ...] = ()
    rows: tuple[tuple[float, str], ...] = ()
    edges: tuple[float, float, float, float] = (0.0, 1000.0, 0.0, 320.0)
    height: float = 320.0


class LogAxis(msgspec.Struct, frozen=True):
    """A logarithmic axis from position `begin` to `end`, where the values are 10 ** `low` and 10 ** `high`."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def fit(cls, values: Iterable[float], begin: float, end: float) -> "LogAxis":
        """Returns an axis for all values, with a margin, so that a single value has an axis too."""
        powers = [math.log10(value) for value in values]
        return cls(min(powers) - 0.05, max(powers) + 0.05, begin, end)

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        """The positions and labels of the values 1, 2, 5, 10, 20, ... on the axis."""
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = (step * 10.0**power for power in decades for step in (1, 2, 5))
        return tuple((self.place(it), f"{it:g}") for it in values if self.low <= math.log10(it) <= self.high)

    def place(self, value: float) -> float:
        """Returns the position of a value, clamped to the ends of the axis."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin), 1)
