"""One model on one target: built, verified, and its result kept."""

import shutil
import time
from pathlib import Path

import msgspec

from edgekit._files import digest_file, write_file
from edgekit.app.config import App, Cell, choose_for
from edgekit.app.keys import Digests, make_key
from edgekit.app.parcels import cell_folder
from edgekit.app.result import RESULT, CellResult, fail_cell, read_result, write_result
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.errors import EdgekitError
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.plain import to_json
from edgekit.progress import Progress
from edgekit.report.headline import headline_build
from edgekit.report.pages.html import render_build
from edgekit.report.summary import BuildReport
from edgekit.report.text import describe_agreement, describe_evidence
from edgekit.verify.on_devices import verify_on
from edgekit.verify.report import require_devices

CACHE = ".cache"


def find_kept(app: App, cell: Cell, digests: Digests) -> CellResult | None:
    """Returns what an earlier run found, if nothing that it depends on has changed since and its bundle is there."""
    result = read_result(cell_folder(app, cell))
    if result is None or result.key != make_key(app, cell, result.beside, digests):
        return None
    manifest = app.out / result.bundle / MANIFEST
    if not manifest.is_file() or digest_file(manifest) != result.sha256:
        return None
    return msgspec.structs.replace(result, state="kept")


def find_key(app: App, cell: Cell, digests: Digests) -> tuple[str, tuple[str, ...]]:
    """Returns the content key of a cell as it is now, and the files with weights beside its model.

    Raises:
        EdgekitError: the model cannot be read.
    """
    beside = load_model(cell.path).external_files
    return make_key(app, cell, beside, digests), beside


def build_cell(app: App, cell: Cell, digests: Digests, progress: Progress, *, cache: Path | None = None) -> CellResult:
    """Builds and verifies a cell and returns what was found; a bundle that was made is kept with its result.

    What cannot be built is a finding, too, and is tried again the next time.
    """
    folder, start, verify = cell_folder(app, cell), time.monotonic(), app.table.verify
    try:
        # Taken before: what changes while it is built makes it out of date.
        key, beside = find_key(app, cell, digests)
        (folder / RESULT).unlink(missing_ok=True)
        report = build(
            cell.path,
            cell.data,
            folder,
            cell.recipe,
            verify=verify.enabled and not verify.names_devices,
            cache=cache or app.out / CACHE,
            time_budget_s=app.table.time_budget_s,
            progress=lambda step: progress(f"{cell.name}: {step}"),
        )
        if verify.enabled and (verify.names_devices or verify.require):
            report = _verify_on(app, report, folder)
    except EdgekitError as error:
        failed = fail_cell(cell, f"It cannot be built: {error}.")
        return msgspec.structs.replace(failed, seconds=round(time.monotonic() - start, 2))
    result = _describe(app, cell, report, key)
    result = msgspec.structs.replace(result, beside=beside, seconds=round(time.monotonic() - start, 2))
    if result.bundle:
        write_result(folder, result)
    return result


def forget_cell(app: App, cell: Cell) -> None:
    """Removes what was found of a cell, so that it is built again."""
    shutil.rmtree(cell_folder(app, cell), ignore_errors=True)


def _verify_on(app: App, report: BuildReport, folder: Path) -> BuildReport:
    """Returns the report with the verification on the app's own devices in it, written anew."""
    (summary,), verify = report.bundles, app.table.verify
    if summary.path is None:
        return report
    found = summary.verify
    if verify.names_devices:
        found = verify_on(open_bundle(summary.path), choose_for(app))
    if found is not None:
        found = require_devices(found, verify.require)
    bundles = (msgspec.structs.replace(summary, verify=found),)
    report = msgspec.structs.replace(report, bundles=bundles, verified=True)
    write_file(folder / "report.json", to_json(report).encode())
    write_file(folder / "report.html", render_build(report).encode())
    return report


def _describe(app: App, cell: Cell, report: BuildReport, key: str) -> CellResult:
    (bundle,) = report.bundles
    made = bundle.path is not None
    return CellResult(
        model=cell.model,
        target=cell.target,
        key=key,
        state="built" if made else "failed",
        verdict=report.verdict,
        headline=headline_build(report),
        bundle="" if bundle.path is None else bundle.path.relative_to(app.out).as_posix(),
        sha256=bundle.sha256,
        report=report.report.relative_to(app.out).as_posix(),
        precision=bundle.precision or "",
        size_before=bundle.size_before,
        size_after=bundle.size_after,
        taken_macs=0.0 if bundle.check is None else bundle.check.taken_macs,
        partitions=0 if bundle.check is None else bundle.check.partitions,
        agreement=describe_agreement(bundle.verify),
        evidence=describe_evidence(bundle.verify),
    )
