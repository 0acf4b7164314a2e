"""Runs an app: builds and verifies the cells that changed since the last run, packs bundles, and writes one report."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, read_kept, staged_entries, write_file
from edgekit.app.cells import cell_folder, find_kept, open_store
from edgekit.app.config import App, KeyTable, list_cells
from edgekit.app.result import DIGESTS_FILE, AppReport, CellResult, Digests, PackageResult, render_app
from edgekit.app.workers import build_cells
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.group import GROUP, is_group
from edgekit.bundle.manifest import encode_json
from edgekit.bundle.sign import check_signature, require_private_key
from edgekit.errors import BundleError, DataError, EdgekitError, UsageError, require_known
from edgekit.evidence import Judgement, Verdict
from edgekit.jobs.release import Allowed, package_verified, sign_verified
from edgekit.package.package import FORMS
from edgekit.package.variant import Identity, name_package, sort_bundles
from edgekit.progress import Progress, say_nothing
from edgekit.report.ci import render_junit, render_markdown
from edgekit.serialize import to_json
from edgekit.verify.report import VerifyReport, read_report

SHARED = ".store"
"""The default store of a scheduler's workers: a folder below the app's results, which they must see too."""


def run_app(
    app: App,
    *,
    only: Sequence[str] = (),
    again: bool = False,
    bare: bool = False,
    progress: Progress | None = None,
    landed: Progress = say_nothing,
) -> AppReport:
    """Builds the cells of an app that are not up to date, and writes the packages and one report of all cells.

    `only` names cells (`model/target`), models or targets; only these are built and returned. The written report also
    has the other cells that are up to date, and packages are made only if all cells are up to date. Each cell is stored
    when it is finished, so that an interrupted run can be continued. With `again` no earlier result is used. The
    `[sweep]` of the app says where cells are built, and which store has the results of other machines. With `bare` no
    packages and reports are written: a worker process builds cells so. `progress` is called with each step, `landed`
    with a line for each cell that was built.

    Raises:
        UsageError: `only` names no cell, model or target of the app.
        EdgekitError: a target or a preprocessing file cannot be read, the store cannot be used, or the scheduler does
            not answer.
    """
    start, progress = time.monotonic(), progress or say_nothing
    if not bare and app.table.keys is not None:
        # A missing key is reported before anything is built.
        require_private_key(app.path.parent / app.table.keys.sign)
    all_cells, digests = list_cells(app), Digests(app.out / DIGESTS_FILE)
    names = {name for cell in all_cells for name in (cell.name, cell.model, cell.target)}
    for selector in only:
        require_known(selector, names, f"--only '{selector}': the app has no such model or target")
    cells = [cell for cell in all_cells if not only or {*only} & {cell.name, cell.model, cell.target}]
    if again:
        for cell in cells:
            shutil.rmtree(cell_folder(app, cell), ignore_errors=True)
    place = app.table.sweep.store
    if place is not None and "://" not in place:
        place = str(app.path.parent.absolute() / place)
    elif place is None and app.table.sweep.scheduler is not None:
        place = str(app.out.absolute() / SHARED)
    store = None if place is None else open_store(place)
    found = {cell.name: find_kept(app, cell, digests, None if again else store) for cell in cells}
    outdated = [cell for cell in cells if found[cell.name] is None]
    build_start = time.monotonic()
    built = build_cells(app, outdated, digests, store, progress, again=again)
    for number, (cell, result) in enumerate(zip(outdated, built, strict=True), 1):
        found[cell.name] = result
        left_s = (time.monotonic() - build_start) / number * (len(outdated) - number)
        left = f", about {left_s:.0f} s left" if number < len(outdated) else ""
        landed(f"{number} of {len(outdated)}: {cell.name}: {result.verdict}, {result.seconds:.0f} s{left}")
    results = tuple(result for result in found.values() if result is not None)
    shown = () if bare else all_cells
    results_by_cell = {cell.name: found.get(cell.name) or find_kept(app, cell, digests) for cell in shown}
    digests.save()
    if not bare:
        sign_all(app, results)
    known = tuple(result for result in results_by_cell.values() if result is not None)
    packages = pack_all(app, known) if not bare and len(known) == len(results_by_cell) else ()
    seconds = round(time.monotonic() - start, 2)
    whole = AppReport(app=app.path.name, out=app.out, cells=known, packages=packages, seconds=seconds)
    if bare:
        return msgspec.structs.replace(whole, cells=results)
    _write_reports(app, whole)
    return msgspec.structs.replace(whole, cells=results, packages=()) if only else whole


def _write_reports(app: App, report: AppReport) -> None:
    verified: list[VerifyReport] = []
    others: dict[str, Judgement] = {}
    for cell in report.cells:
        try:
            verified.append(read_report(app.out / cell.bundle / "verify.json"))
        except DataError:
            # Groups, and bundles that were not made or not verified, have no such report. A bundle that nobody verified
            # is in neither file, so that it is not counted as one that passed.
            lines: dict[Verdict, tuple[str, ...]] = {cell.verdict: (cell.headline,)}
            if not cell.passed:
                found = Judgement(failures=lines.get("fail", ()), unproven=lines.get("not proven", ()))
                others[f"{cell.model}-{cell.target}"] = found
    write_file(app.out / "report.json", to_json(report).encode())
    write_file(app.out / "report.html", render_app(report).encode())
    accepts = app.table.verify.accept_unproven
    write_file(app.out / "junit.xml", render_junit(verified, others=others, accept_unproven=accepts))
    write_file(app.out / "summary.md", render_markdown(verified, others).encode())


_PACKAGES_FOLDER, _PACKAGES_FILE = "packages", "packages.json"


def pack_all(app: App, cells: Sequence[CellResult]) -> tuple[PackageResult, ...]:
    """Returns the packages of an app; those whose bundles or table changed are made again."""
    known = read_kept(app.out / _PACKAGES_FOLDER / _PACKAGES_FILE, dict[str, PackageResult]) or {}
    results = tuple(_pack(app, name, cells, known.get(name)) for name in app.table.packages)
    if results:
        packed = {result.name: result for result in results}
        write_file(app.out / _PACKAGES_FOLDER / _PACKAGES_FILE, encode_json(packed))
    return results


def sign_all(app: App, cells: Sequence[CellResult]) -> None:
    """Signs the bundles that may be released, if the app has a key and they do not have its signature yet.

    Raises:
        EdgekitError: a key cannot be read, or a bundle is incomplete.
    """
    if (keys := app.table.keys) is None:
        return
    for cell in cells:
        if not cell.bundle or not _may_be_released(app, cell):
            continue
        folder = app.out / cell.bundle
        try:
            name = GROUP if is_group(folder) else MANIFEST
            check_signature((folder / name).read_bytes(), name, folder, _public_key(app, keys))
        except BundleError:
            allowed = Allowed(unproven=app.table.verify.accept_unproven)
            sign_verified(folder, app.path.parent / keys.sign, allowed=allowed)


def _public_key(app: App, keys: KeyTable) -> Path:
    return app.path.parent / (keys.check or f"{keys.sign}.pub")


def _pack(app: App, name: str, cells: Sequence[CellResult], known: PackageResult | None) -> PackageResult:
    table = app.table.packages[name]
    model = table.model or next(iter((*app.table.models, *app.table.groups)))
    selected = [cell for cell in cells if cell.model == model and cell.target in (table.targets or app.table.targets)]
    # A bundle that failed is left out; if the table names its target, the package fails.
    released = [cell for cell in selected if cell.bundle and (table.allow_failed or _may_be_released(app, cell))]
    left_out = tuple(cell.target for cell in selected if cell not in released)
    facts = {"package": table, "bundles": [cell.sha256 for cell in released], "keys": app.table.keys}
    key = digest_bytes(encode_json(facts))
    result = PackageResult(name=name, kind=table.kind, key=key, state="failed", left_out=left_out)
    if (missing := next((target for target in table.targets if target in left_out), None)) is not None:
        return msgspec.structs.replace(result, failure=f"{model}/{missing} did not pass, and is not packed")
    if known is not None and known.key == key and known.failure is None and (app.out / known.path).exists():
        return msgspec.structs.replace(known, state="kept")
    folders, form, is_group = [app.out / cell.bundle for cell in released], FORMS[table.kind], model in app.table.groups
    try:
        if is_group and len(folders) != 1:
            words = f"an archive holds the group {model} for one target, and it passed for {len(folders)}"
            raise UsageError(words, hint='say which: targets = ["NAME"]')
        if not is_group and not table.targets:
            # Without named targets: the bundles that fit, the NPU first. Named targets keep their order.
            fitting = sort_bundles([open_bundle(folder) for folder in folders])
            providers = form.providers or {bundle.manifest.provider for bundle in fitting}
            folders = [bundle.folder for bundle in fitting if bundle.manifest.provider in providers]
        if not folders:
            return msgspec.structs.replace(result, failure=f"no bundle of {model} passed that a {table.kind} can hold")
        # A group is packed under its own name.
        package_name = table.name or ("" if is_group else name_package(model))
        with staged_entries(app.out / _PACKAGES_FOLDER) as staging:
            place = staging / (f"{name}.{form.archive}" if form.archive else name)
            report, _ = package_verified(
                folders,
                table.kind,
                place,
                names=Identity(name=package_name, group=table.group, version=table.version),
                extras=table.extras,
                allowed=Allowed(unproven=app.table.verify.accept_unproven, failed=table.allow_failed),
                key=None if app.table.keys is None else _public_key(app, app.table.keys),
            )
    except EdgekitError as error:
        return msgspec.structs.replace(result, failure=str(error))
    return msgspec.structs.replace(
        result,
        state="built",
        path=f"{_PACKAGES_FOLDER}/{place.name}",
        sha256=report.sha256,
        size_bytes=report.size_bytes,
        bundles=tuple(variant.name for variant in report.bundles) or tuple(folder.name for folder in folders),
    )


def _may_be_released(app: App, cell: CellResult) -> bool:
    return cell.passed or (cell.verdict == "not proven" and app.table.verify.accept_unproven)
