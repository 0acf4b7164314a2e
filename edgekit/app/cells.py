"""Builds and verifies one cell of an app (one model, or group of models, for one target), and keeps its result.

Machines share the results of cells through a store, as one archive per cell. A store is a folder, or a URL that fsspec
opens (S3, GCS, HTTP).
"""

import importlib
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import digest_file, replace_file, staged_entries, work_folder, write_file
from edgekit.app.config import App, Cell, choose_for
from edgekit.app.result import RESULT, CellResult, Digests, fail_cell, make_key, read_result, write_result
from edgekit.bundle.archive import Limits, list_files, unpack_archive, write_archive
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.group import GROUP, open_group
from edgekit.errors import BundleError, DataError, DeviceError, EdgekitError, MissingExtraError, UsageError, quote_error
from edgekit.jobs.build import build
from edgekit.jobs.build_inputs import BuildCache
from edgekit.jobs.group import build_group, read_group_file
from edgekit.machine import spell_install
from edgekit.model.model import load_model
from edgekit.progress import Progress, name_steps
from edgekit.report.html import render_page
from edgekit.report.tables import headline_group
from edgekit.report.text import describe_agreement, describe_evidence, headline_build
from edgekit.serialize import to_json
from edgekit.verify.on_devices import choosing, verify_group, verify_on
from edgekit.verify.report import require_devices

_FILE = "file://"


class FolderStore(msgspec.Struct, frozen=True):
    """A store in a folder, which may be a network mount. Names of objects are relative paths."""

    folder: Path

    @property
    def place(self) -> str:
        """The absolute path of the folder, with which another process opens the same store."""
        return str(self.folder.absolute())

    def has(self, name: str) -> bool:
        """Returns True if there is such an object."""
        return (self.folder / name).is_file()

    def get(self, name: str, path: Path) -> bool:
        """Copies an object into a file; returns False if there is none."""
        if self.has(name):
            replace_file(self.folder / name, path)
        return self.has(name)

    def put(self, name: str, path: Path) -> None:
        """Copies a file into an object atomically; an existing object is replaced."""
        replace_file(path, self.folder / name)


class RemoteStore(msgspec.Struct, frozen=True):
    """A store that fsspec opens by its URL; over HTTP it is read-only.

    An upload becomes visible only when it is complete: S3 and GCS guarantee that for an object, and fsspec makes one
    upload.
    """

    place: str
    files: Any
    root: str

    def has(self, name: str) -> bool:
        """Returns True if there is such an object."""
        return bool(self._ask("look into", self.files.exists, f"{self.root}/{name}"))

    def get(self, name: str, path: Path) -> bool:
        """Copies an object into a file; returns False if there is none."""
        if not self.has(name):
            return False
        self._ask("read", self.files.get_file, f"{self.root}/{name}", str(path))
        return True

    def put(self, name: str, path: Path) -> None:
        """Copies a file into an object, or does nothing if the protocol cannot write (HTTP)."""
        place = f"{self.root}/{name}"
        with suppress(NotImplementedError):
            self._ask("write", self.files.makedirs, place.rpartition("/")[0], True)  # noqa: FBT003 - fsspec's exist_ok
            self._ask("write", self.files.put_file, str(path), place)

    def _ask(self, what: str, call: Any, *given: object) -> Any:
        try:
            return call(*given)
        except NotImplementedError:
            raise
        except Exception as error:
            words = f"cannot {what} store '{self.place}': {quote_error(error)}"
            raise DeviceError(words, hint="check that it is there, and that you may read and write it") from error


Store = FolderStore | RemoteStore


def open_store(place: str) -> Store:
    """Opens a store by the path of a folder or by a URL of fsspec, for example `s3://bucket/edgekit`.

    Raises:
        MissingExtraError: fsspec, or the package that it needs for this kind of URL, is not installed.
        UsageError: there is no such kind of URL.
    """
    if "://" not in place or place.startswith(_FILE):
        return FolderStore(Path(place.removeprefix(_FILE)))
    try:
        files, root = importlib.import_module("fsspec.core").url_to_fs(place)
    except ImportError as error:
        wanted = "fsspec" if error.name == "fsspec" else quote_error(error)
        raise MissingExtraError(f"store '{place}' needs {wanted}", hint=spell_install("fsspec s3fs")) from error
    except (ValueError, OSError) as error:
        words = f"cannot open store '{place}': {quote_error(error)}"
        raise UsageError(words, hint="a folder, or a URL that fsspec opens") from error
    return RemoteStore(place=place, files=files, root=str(root).rstrip("/"))


LIMITS = Limits(files=1_000_000, size_bytes=1 << 40)
"""Those of archives in a store: they are edgekit's own and uncompressed, and a result may be as large as its model."""
_REPORT = "report.json"


def cell_folder(app: App, cell: Cell) -> Path:
    """Returns the folder of a cell's results."""
    return app.out / cell.model / cell.target


def fetch_cell(app: App, cell: Cell, key: str, store: Store) -> CellResult | None:
    """Copies the result that a store holds for a key into the cell's folder, and returns it; None if none is usable.

    Raises:
        DeviceError: the store cannot be asked.
        OutputError: the folder cannot be written.
    """
    with work_folder() as work:
        if not store.get(name_cell(key), work / "cell.tar"):
            return None
        try:
            with staged_entries(app.out / cell.model) as staging:
                unpack_archive(work / "cell.tar", staging / cell.target, LIMITS)
                return _rewrite_paths(app, cell, key, staging / cell.target)
        except (BundleError, DataError, msgspec.MsgspecError, LookupError, TypeError):
            # The object is damaged: the cell is built again, and its result replaces the object.
            return None


def name_cell(key: str) -> str:
    """Returns the name of the object that holds the results of a key."""
    return f"cells/{key[:2]}/{key}.tar"


def _rewrite_paths(app: App, cell: Cell, key: str, folder: Path) -> CellResult:
    """Rewrites the paths in results from another machine, perhaps of a cell with another name; returns the result.

    Raises:
        DataError: they are not the results of `key`.
    """
    result = read_result(folder)
    if result is None or result.key != key:
        raise DataError("the results of another cell", hint="they are made again")
    own_folder, name = cell_folder(app, cell), Path(result.bundle).name
    opened = open_group(folder / name) if cell.is_group else open_bundle(folder / name)
    if opened.sha256 != result.sha256:
        raise DataError("the bundle of another cell", hint="they are made again")
    relative, page_name = own_folder.relative_to(app.out).as_posix(), Path(result.report).name
    result = msgspec.structs.replace(
        result, model=cell.model, target=cell.target, bundle=f"{relative}/{name}", report=f"{relative}/{page_name}"
    )
    write_result(folder, result)
    report: dict[str, Any] = msgspec.json.decode((folder / _REPORT).read_bytes())
    report["targets" if cell.is_group else "bundles"][0]["path"] = str(own_folder / name)
    if not cell.is_group:
        report["report"] = str(own_folder / page_name)
    write_file(folder / _REPORT, to_json(report).encode())
    return result


CACHE = ".cache"


def find_kept(app: App, cell: Cell, digests: Digests, store: Store | None = None) -> CellResult | None:
    """Returns the result of an earlier run if its inputs have not changed and its bundle still exists, else None.

    If there is none here, that of the `store` is copied into the cell's folder.
    """
    result = read_result(cell_folder(app, cell))
    if result is not None and result.key == make_key(app, cell, result.beside, digests):
        manifest = app.out / result.bundle / (GROUP if cell.is_group else MANIFEST)
        if manifest.is_file() and digest_file(manifest) == result.sha256:
            return msgspec.structs.replace(result, state="kept")
    if store is None:
        return None
    try:
        key, _ = find_key(app, cell, digests)
    except EdgekitError:
        return None
    result = fetch_cell(app, cell, key, store)
    return None if result is None else msgspec.structs.replace(result, state="kept")


def find_key(app: App, cell: Cell, digests: Digests) -> tuple[str, tuple[str, ...]]:
    """Returns the current content key of a cell, and the external data files of its model.

    For a group they are the files of its models, with their external data, relative to the folder of its `group.toml`.

    Raises:
        EdgekitError: the model cannot be read.
    """
    if cell.is_group:
        names: list[str] = []
        for member in read_group_file(cell.path).members.values():
            place = Path(member.model)
            weights = load_model(cell.path.parent / place).external_files
            names += [place.as_posix(), *((place.parent / name).as_posix() for name in weights)]
        external = tuple(dict.fromkeys(names))
    else:
        external = load_model(cell.path).external_files
    return make_key(app, cell, external, digests), external


def build_cell(
    app: App, cell: Cell, digests: Digests, progress: Progress, kept: BuildCache, store: Store | None
) -> CellResult:
    """Builds and verifies a cell and returns the result; a bundle and its result are put into the `store`, if any.

    Cells of one model share the intermediate results in `kept`. If a cell cannot be built, its result says why, and the
    next run tries again.

    Raises:
        EdgekitError: the result or the store cannot be written.
    """
    folder, start, report_step = cell_folder(app, cell), time.monotonic(), name_steps(progress, cell.name)
    try:
        # Computed before the build: if an input changes meanwhile, the result counts as out of date.
        key, external = find_key(app, cell, digests)
        (folder / RESULT).unlink(missing_ok=True)
        if cell.is_group:
            bundle, report, facts = _build_group(app, cell, folder, report_step, external)
        else:
            bundle, report, facts = _build_model(app, cell, folder, report_step, kept)
        result = CellResult(
            **facts,
            model=cell.model,
            target=cell.target,
            key=key,
            beside=external,
            state="failed" if bundle is None else "built",
            bundle="" if bundle is None else bundle.relative_to(app.out).as_posix(),
            report=report.relative_to(app.out).as_posix(),
        )
    except EdgekitError as error:
        result = fail_cell(cell, error)
    result = msgspec.structs.replace(result, seconds=round(time.monotonic() - start, 2))
    if result.bundle:
        write_result(folder, result)
        if store is not None:
            with work_folder() as work:
                write_archive(list_files(folder), work / "cell.tar", "tar")
                store.put(name_cell(result.key), work / "cell.tar")
    return result


_Built = tuple[Path | None, Path, dict[str, Any]]
"""The paths of the bundle (None if there is none) and of the report, and further fields of `CellResult`."""


def _build_model(app: App, cell: Cell, folder: Path, progress: Progress, kept: BuildCache) -> _Built:
    verify, budget_s = app.table.verify, app.table.time_budget_s
    by_build = verify.enabled and not verify.names_devices
    report = build(
        cell.path,
        cell.data,
        folder,
        cell.recipe,
        verify=by_build,
        cache=kept,
        time_budget_s=budget_s,
        progress=progress,
    )
    (bundle,) = report.bundles
    if verify.enabled and (verify.names_devices or verify.require) and bundle.path is not None:
        found = verify_on(open_bundle(bundle.path), choose_for(app)) if verify.names_devices else bundle.verify
        if found is not None:
            found = require_devices(found, verify.require)
        bundle = msgspec.structs.replace(bundle, verify=found)
        report = msgspec.structs.replace(report, bundles=(bundle,), verified=True)
        write_file(folder / "report.json", to_json(report).encode())
        write_file(folder / "report.html", render_page(report).encode())
    placement = bundle.placed
    facts = {
        "verdict": report.verdict,
        "headline": headline_build(report),
        "sha256": bundle.sha256,
        "precision": bundle.precision or "",
        "size_before": bundle.size_before,
        "size_after": bundle.size_after,
        "taken_macs": 0.0 if placement is None else placement.taken_macs,
        "partitions": 0 if placement is None else placement.partitions,
        "agreement": describe_agreement(bundle.verify),
        "evidence": describe_evidence(bundle.verify),
    }
    return bundle.path, report.report, facts


def _build_group(app: App, cell: Cell, folder: Path, progress: Progress, external: Sequence[str]) -> _Built:
    """Builds a group for one target into a folder, and verifies it as the app's `[verify]` says.

    Raises:
        EdgekitError: the file, a model, the data or a device is wrong.
    """
    verify = app.table.verify
    verified_by_build = verify.enabled and not (verify.names_devices or verify.require)
    report = build_group(cell.path, cell.data, folder, cell.recipe, verify=verified_by_build, progress=progress)
    (target,) = report.targets
    if target.path is not None and verify.enabled and not verified_by_build:
        devices = choosing(choose_for(app))
        found = verify_group(open_group(target.path), devices, required=verify.require, progress=progress)
        target = msgspec.structs.replace(target, verify=found)
    runs = () if target.verify is None else target.verify.runs
    facts = {
        "verdict": target.verdict,
        "headline": headline_group(target),
        "sha256": "" if target.path is None else digest_file(target.path / GROUP),
        "precision": cell.recipe.precision,
        "size_before": sum((cell.path.parent / name).stat().st_size for name in external),
        "size_after": target.size_bytes,
        "evidence": ", ".join(f"{run.evidence.value} ({run.device})" for run in runs),
    }
    return target.path, folder / "report.json", facts
