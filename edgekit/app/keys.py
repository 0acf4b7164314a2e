"""What a result depends on, as one digest: the same key, the same result, so that nothing is made twice."""

import importlib.util
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import digest_bytes, digest_file, write_file
from edgekit.app.config import App, Cell
from edgekit.bundle.manifest.manifest import encode_json
from edgekit.target import load_target

STORE = "digests.json"
_PACKAGES = ("edgekit-onnx", "onnxruntime", "onnx", "numpy")


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """A file as it was when it was digested."""

    size_bytes: int
    mtime_ns: int
    sha256: str


class Digests:
    """The sha256 of files, read again only where size or time changed."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._known = _read_stamps(place)
        self._used: dict[str, Stamp] = {}

    def digest(self, path: Path) -> str:
        """Returns the sha256 of a file, of a folder's files with their names, or "" of what is not there."""
        if path.is_dir():
            names = sorted(file for file in path.rglob("*") if file.is_file())
            lines = (f"{self.digest(file)}  {file.relative_to(path).as_posix()}\n" for file in names)
            return digest_bytes("".join(lines).encode())
        if not path.is_file():
            return ""
        facts, name = path.stat(), str(path.absolute())
        known = self._known.get(name)
        if known is None or (known.size_bytes, known.mtime_ns) != (facts.st_size, facts.st_mtime_ns):
            known = Stamp(facts.st_size, facts.st_mtime_ns, digest_file(path))
        self._used[name] = known
        return known.sha256

    def save(self) -> None:
        """Writes what was asked for, for the next run."""
        if self._used != self._known:
            write_file(self._place, encode_json({**self._known, **self._used}))


def list_inputs(cell: Cell, beside: Iterable[str]) -> dict[str, tuple[Path, ...]]:
    """Returns what a cell reads, by what it is: a file or a folder each; the model has its weights beside it.

    Data that a function makes are not among them.
    """
    data, target = cell.data, cell.recipe.targets[0]
    given = {
        "source": Path(data.source),
        "evaluation": None if data.evaluation is None else Path(data.evaluation),
        "labels": data.labels,
        "golden": data.golden,
        "target": Path(target) if "/" in target else None,
    }
    model = (cell.path, *(cell.path.parent / name for name in sorted(beside)))
    return {"model": model, **{what: (path,) for what, path in given.items() if path is not None and path.exists()}}


def make_key(app: App, cell: Cell, beside: Iterable[str], digests: Digests) -> str:
    """Returns the content key of a cell: model, data, settings, target and versions.

    `beside` names the files that hold weights beside the model.
    """
    data, target = cell.data, load_target(cell.recipe.targets[0])
    files: Mapping[str, Any] = {
        "model": digests.digest(cell.path),
        "weights": [digests.digest(cell.path.parent / name) for name in sorted(beside)],
        "data": _digest_data(data.source, digests),
        "evaluation": "" if data.evaluation is None else _digest_data(data.evaluation, digests),
        "labels": "" if data.labels is None else digests.digest(data.labels),
        "golden": "" if data.golden is None else digests.digest(data.golden),
        "target": digests.digest(target.folder),
    }
    settings = {
        "name": cell.path.name,
        "recipe": msgspec.structs.replace(cell.recipe, targets=(target.name,)),
        "preprocess": data.preprocess,
        "verify": msgspec.structs.replace(app.table.verify, accept_unproven=False),
        "devices": {name: app.table.devices[name] for name in app.table.verify.on if name in app.table.devices},
        "time_budget_s": app.table.time_budget_s,
        "versions": {name: version(name) for name in _PACKAGES},
    }
    return digest_bytes(encode_json({"files": files, "settings": settings}))


def _digest_data(source: str, digests: Digests) -> str:
    path = Path(source)
    if path.exists():
        return digests.digest(path)
    module = source.partition(":")[0]
    found = importlib.util.find_spec(module.partition(".")[0])
    # The whole package: the function may read anything in it. What it reads elsewhere no key can know.
    place = None if found is None or found.origin is None else Path(found.origin)
    if place is None:
        return source
    return digests.digest(place.parent if place.name == "__init__.py" else place)


def _read_stamps(place: Path) -> dict[str, Stamp]:
    try:
        return msgspec.json.decode(place.read_bytes(), type=dict[str, Stamp])
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return {}
