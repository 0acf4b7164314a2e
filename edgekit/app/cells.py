"""Builds and verifies one cell of an app: one model, or group of models, on one target. The result is stored."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import digest_file, write_file
from edgekit.app.config import App, Cell, choose_for
from edgekit.app.result import RESULT, CellResult, Digests, fail_cell, make_key, read_result, write_result
from edgekit.app.store import Store, cell_folder, fetch_cell
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.group.group import GROUP, open_group
from edgekit.errors import EdgekitError
from edgekit.jobs.build import build
from edgekit.jobs.build_inputs import Kept
from edgekit.jobs.group import build_group, read_group_file
from edgekit.model.model import load_model
from edgekit.progress import Progress, name_steps
from edgekit.report.html import render_build
from edgekit.report.tables import headline_group
from edgekit.report.text import describe_agreement, describe_evidence, headline_build
from edgekit.serialize import to_json
from edgekit.verify.groups import choosing, verify_group
from edgekit.verify.on_devices import verify_on
from edgekit.verify.report import require_devices

CACHE = ".cache"


def find_kept(app: App, cell: Cell, digests: Digests, store: Store | None = None) -> CellResult | None:
    """Returns the result of an earlier run if its inputs have not changed and its bundle still exists.

    If there is none here, the result that the `store` has is put into the cell's folder.
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

    Raises:
        EdgekitError: the model cannot be read.
    """
    beside = _list_beside(cell.path) if cell.is_group else load_model(cell.path).external_files
    return make_key(app, cell, beside, digests), beside


def build_cell(app: App, cell: Cell, digests: Digests, progress: Progress, kept: Kept) -> CellResult:
    """Builds and verifies a cell and returns the result; a bundle is stored together with its result.

    Cells of one model share the intermediate results in `kept`. If a cell cannot be built, its result says why, and the
    next run tries again.
    """
    folder, start, say = cell_folder(app, cell), time.monotonic(), name_steps(progress, cell.name)
    try:
        # Computed before the build: if an input changes meanwhile, the result counts as out of date.
        key, beside = find_key(app, cell, digests)
        (folder / RESULT).unlink(missing_ok=True)
        if cell.is_group:
            bundle, report, facts = _build_group(app, cell, folder, say, beside)
        else:
            bundle, report, facts = _build_model(app, cell, folder, say, kept)
        result = CellResult(
            **facts,
            model=cell.model,
            target=cell.target,
            key=key,
            beside=beside,
            state="failed" if bundle is None else "built",
            bundle="" if bundle is None else bundle.relative_to(app.out).as_posix(),
            report=report.relative_to(app.out).as_posix(),
        )
    except EdgekitError as error:
        result = fail_cell(cell, error)
    result = msgspec.structs.replace(result, seconds=round(time.monotonic() - start, 2))
    if result.bundle:
        write_result(folder, result)
    return result


def forget_cell(app: App, cell: Cell) -> None:
    """Removes the result of a cell, so that it is built again."""
    shutil.rmtree(cell_folder(app, cell), ignore_errors=True)


_Built = tuple[Path | None, Path, dict[str, Any]]
"""The bundle, None if there is none, the report, and further fields of `CellResult`."""


def _build_model(app: App, cell: Cell, folder: Path, progress: Progress, kept: Kept) -> _Built:
    verify = app.table.verify
    report = build(
        cell.path,
        cell.data,
        folder,
        cell.recipe,
        verify=verify.enabled and not verify.names_devices,
        cache=kept,
        time_budget_s=app.table.time_budget_s,
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
        write_file(folder / "report.html", render_build(report).encode())
    placed = bundle.placed
    facts = {
        "verdict": report.verdict,
        "headline": headline_build(report),
        "sha256": bundle.sha256,
        "precision": bundle.precision or "",
        "size_before": bundle.size_before,
        "size_after": bundle.size_after,
        "taken_macs": 0.0 if placed is None else placed.taken_macs,
        "partitions": 0 if placed is None else placed.partitions,
        "agreement": describe_agreement(bundle.verify),
        "evidence": describe_evidence(bundle.verify),
    }
    return bundle.path, report.report, facts


def _list_beside(path: Path) -> tuple[str, ...]:
    """Returns the files that a `group.toml` names and their external data, relative to its folder.

    Raises:
        EdgekitError: the file or a model cannot be read.
    """
    names: list[str] = []
    for member in read_group_file(path).members.values():
        place = Path(member.model)
        weights = load_model(path.parent / place).external_files
        names += [place.as_posix(), *((place.parent / name).as_posix() for name in weights)]
    return tuple(dict.fromkeys(names))


def _build_group(app: App, cell: Cell, folder: Path, progress: Progress, beside: Sequence[str]) -> _Built:
    """Builds a group for one target into a folder, runs it on its devices, and returns the result.

    Raises:
        EdgekitError: the file, a model, the data or a device is wrong.
    """
    verify = app.table.verify
    here = verify.enabled and not (verify.names_devices or verify.require)
    report = build_group(cell.path, cell.data, folder, cell.recipe, verify=here, progress=progress)
    (target,) = report.targets
    if target.path is not None and verify.enabled and not here:
        found = verify_group(
            open_group(target.path), choosing(choose_for(app)), required=verify.require, progress=progress
        )
        target = msgspec.structs.replace(target, verify=found)
    runs = () if target.verify is None else target.verify.runs
    facts = {
        "verdict": target.verdict,
        "headline": headline_group(target),
        "sha256": "" if target.path is None else digest_file(target.path / GROUP),
        "precision": cell.recipe.precision,
        "size_before": sum((cell.path.parent / name).stat().st_size for name in beside),
        "size_after": target.size_bytes,
        "evidence": ", ".join(f"{run.evidence.value} ({run.device})" for run in runs),
    }
    return target.path, folder / "report.json", facts
