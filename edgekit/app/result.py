"""The results of a run of an app, and the content key of a cell.

The key is a digest of everything that the result of a cell depends on: a cell is built again if its key changed.
"""

import importlib.util
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Literal, cast

import msgspec

from edgekit._files import digest_bytes, digest_file, list_below, read_kept, write_file
from edgekit.app.config import App, Cell
from edgekit.bundle.manifest import encode_json
from edgekit.evidence import Judged, Verdict, worst_verdict
from edgekit.report import tables
from edgekit.report.html import frame_page
from edgekit.report.pages import make_page
from edgekit.target import load_target

DIGESTS_FILE = "digests.json"
_PACKAGES = ("edgekit-onnx", "onnxruntime", "onnx", "numpy")


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """The state of a file when its digest was computed."""

    size_bytes: int
    mtime_ns: int
    sha256: str


class Digests:
    """The sha256 of files; a file is read again only if its size or time changed."""

    def __init__(self, place: Path) -> None:
        self._place, self._is_new = place, False
        self._known = read_kept(place, dict[str, Stamp]) or {}

    def digest(self, path: Path) -> str:
        """Returns the sha256 of a file, or of the files of a folder with their names; "" if there is none."""
        if path.is_dir():
            lines = (f"{self.digest(file)}  {file.relative_to(path).as_posix()}\n" for file in list_below(path))
            return digest_bytes("".join(lines).encode())
        if not path.is_file():
            return ""
        facts, name = path.stat(), str(path.absolute())
        known = self._known.get(name)
        if known is None or (known.size_bytes, known.mtime_ns) != (facts.st_size, facts.st_mtime_ns):
            self._known[name] = known = Stamp(facts.st_size, facts.st_mtime_ns, digest_file(path))
            self._is_new = True
        return known.sha256

    def save(self) -> None:
        """Writes the digests for the next run."""
        if self._is_new:
            write_file(self._place, encode_json(self._known))


def list_inputs(cell: Cell, external: Iterable[str]) -> dict[str, tuple[Path, ...]]:
    """Returns the input files and folders of a cell by kind; the `external` data files are among those of the model.

    Samples that a function makes are not included.
    """
    data, target = cell.data, cell.recipe.targets[0]
    paths_by_kind = {
        "source": Path(data.source),
        "evaluation": None if data.evaluation is None else Path(data.evaluation),
        "labels": data.labels,
        "golden": data.golden,
        "target": Path(target) if "/" in target else None,
    }
    model = (cell.path, *(cell.path.parent / name for name in sorted(external)))
    others = {what: (path,) for what, path in paths_by_kind.items() if path is not None and path.exists()}
    return {"model": model, **others}


def make_key(app: App, cell: Cell, external: Iterable[str], digests: Digests) -> str:
    """Returns the content key of a cell: a digest of model, data, settings, target and versions.

    `external` are the external data files of the model.
    """
    table, target = app.table, load_target(cell.recipe.targets[0])
    inputs = {**list_inputs(cell, external), "target": (target.folder,)}
    sources = [source for source in (cell.data.source, cell.data.evaluation) if source is not None]
    facts = {
        "files": {what: [digests.digest(path) for path in paths] for what, paths in inputs.items()},
        "functions": [_digest_module(source, digests) for source in sources if not Path(source).exists()],
        "name": cell.path.name,
        "recipe": msgspec.structs.replace(cell.recipe, targets=(target.name,)),
        "preprocess": cell.data.preprocess,
        "verify": msgspec.structs.replace(table.verify, accept_unproven=False),
        "devices": {name: table.devices[name] for name in table.verify.on if name in table.devices},
        "time_budget_s": table.time_budget_s,
        "versions": {name: version(name) for name in _PACKAGES},
    }
    return digest_bytes(encode_json(facts))


def _digest_module(source: str, digests: Digests) -> str:
    """Returns the digest of all files of a function's package, because it may use any of them."""
    found = importlib.util.find_spec(source.partition(":")[0].partition(".")[0])
    if found is None or found.origin is None:
        return source
    place = Path(found.origin)
    return digests.digest(place.parent if place.name == "__init__.py" else place)


RESULT = "cell.json"
State = Literal["built", "kept", "failed"]


class CellResult(Judged, msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cell: a model for a target, with the content key and the path of its bundle.

    `state` says whether it was built in this run, kept from an earlier one, or could not be built; `headline` is the
    verdict with its reason. `sha256` is that of the bundle's manifest, `beside` are the external data files of the
    model.
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


class PackageResult(msgspec.Struct, frozen=True, kw_only=True):
    """A package of an app; `failure` says why there is none, None if there is one."""

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


class AppReport(Judged, msgspec.Struct, frozen=True, kw_only=True):
    """The result of `edgekit run`; paths are relative to the results' folder. Keys are only added, never renamed."""

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
        """The worst verdict of the cells; "fail" if a package could not be made."""
        packed = ("fail" if package.failure is not None else "pass" for package in self.packages)
        return worst_verdict((*(cell.verdict for cell in self.cells), *cast("Iterable[Verdict]", packed)))


def headline_app(report: AppReport) -> str:
    """Returns how many cells passed, how many were built or kept, and why the first of the others did not pass."""
    passed = sum(cell.passed for cell in report.cells)
    counts = {state: sum(cell.state == state for cell in report.cells) for state in ("built", "kept", "failed")}
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    summary = f"{passed} of {len(report.cells)} bundles passed ({states})"
    if (not_passed := next((cell for cell in report.cells if not cell.passed), None)) is not None:
        return f"{summary}; {not_passed.model}/{not_passed.target}: {not_passed.headline}"
    failed_package = next((package for package in report.packages if package.failure is not None), None)
    if failed_package is None:
        return f"{summary}."
    return f"{summary}; package '{failed_package.name}': {failed_package.failure}"


def render_app(report: AppReport) -> str:
    """Returns a run as an HTML page, with links to the page of each bundle."""
    return make_page("app", tables, report=report, headline=headline_app(report))


def fail_cell(cell: Cell, why: object) -> CellResult:
    """Returns the result of a cell that could not be built, with the reason."""
    headline = f"It cannot be built: {why}."
    return CellResult(model=cell.model, target=cell.target, key="", state="failed", verdict="fail", headline=headline)


def read_result(folder: Path) -> CellResult | None:
    """Returns the stored result of a cell, None if there is none or its build did not finish."""
    return read_kept(folder / RESULT, CellResult)


def write_result(folder: Path, result: CellResult) -> None:
    """Writes the result of a cell, as the last file of its folder: a cell without one is unfinished."""
    write_file(folder / RESULT, encode_json(result))
