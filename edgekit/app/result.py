"""What a run of an app found: a result for each cell and each package, the verdict computed from them, their page."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, cast

import msgspec

from edgekit._files import write_file
from edgekit.app.config import Cell
from edgekit.bundle.manifest.manifest import encode_json
from edgekit.evidence import Verdict, worst_verdict
from edgekit.report.pages.notebook import frame_page
from edgekit.report.pages.pages import make_page
from edgekit.report.tables import format_bytes

RESULT = "cell.json"
State = Literal["built", "kept", "failed"]


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a target: the key of what it was made of, where its bundle is, and what was found.

    `state` says if it was built in this run, kept from an earlier one, or could not be built; `headline` is the verdict
    with its reason. `sha256` is that of the bundle's manifest, `beside` the files with weights beside the model.
    """

    model: str
    target: str
    key: str
    state: State
    verdict: Verdict
    headline: str
    bundle: str = ""
    sha256: str = ""
    report: str = ""
    precision: str = ""
    size_before: int = 0
    size_after: int = 0
    taken_macs: float = 0.0
    partitions: int = 0
    agreement: str = ""
    evidence: str = ""
    seconds: float = 0.0
    beside: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if there is a bundle that passed."""
        return self.verdict == "pass"


class PackageResult(msgspec.Struct, frozen=True, kw_only=True):
    """A package of an app; `failure` says in one line why there is none."""

    name: str
    kind: str
    key: str
    state: State
    path: str = ""
    sha256: str = ""
    size_bytes: int = 0
    bundles: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    failure: str | None = None


class AppReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `edgekit run` found; paths are relative to the results' folder. Keys are only added, never renamed."""

    schema_version: Literal[1] = 1
    app: str
    out: Path
    cells: tuple[CellResult, ...]
    packages: tuple[PackageResult, ...]
    seconds: float

    def _repr_html_(self) -> str:
        return frame_page(render_app(self), 500)

    @property
    def verdict(self) -> Verdict:
        """Whether every cell has a bundle that passed, and every package was made."""
        packed = ("fail" if package.failure is not None else "pass" for package in self.packages)
        return worst_verdict((*(cell.verdict for cell in self.cells), *cast("Iterable[Verdict]", packed)))

    @property
    def passed(self) -> bool:
        """True if all passed."""
        return self.verdict == "pass"


def headline_app(report: AppReport) -> str:
    """Returns how many cells passed, what was built and what was kept, and why the first of the others did not pass."""
    good = sum(cell.passed for cell in report.cells)
    counts = {state: sum(cell.state == state for cell in report.cells) for state in ("built", "kept", "failed")}
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    said = f"{good} of {len(report.cells)} bundles passed ({states})"
    bad = next((cell for cell in report.cells if not cell.passed), None)
    if bad is not None:
        return f"{said}; {bad.model}/{bad.target}: {bad.headline}"
    lost = next((package for package in report.packages if package.failure is not None), None)
    return f"{said}." if lost is None else f"{said}; package '{lost.name}': {lost.failure}"


def render_app(report: AppReport) -> str:
    """Returns a run as an HTML page, with links to the page of each bundle."""
    return make_page("app", {"bytes": format_bytes}, report=report, headline=headline_app(report))


def fail_cell(cell: Cell, said: str) -> CellResult:
    """Returns the result of a cell of which there is no bundle, for the reason that is said."""
    return CellResult(model=cell.model, target=cell.target, key="", state="failed", verdict="fail", headline=said)


def read_result(folder: Path) -> CellResult | None:
    """Returns what was found of a cell, None where nothing was, or not to its end."""
    try:
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=CellResult)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None


def write_result(folder: Path, result: CellResult) -> None:
    """Writes the result of a cell, after all else in its folder: a cell that has none was not finished."""
    write_file(folder / RESULT, encode_json(result))
