"""Runs an app: builds and verifies the cells that changed since the last run, packs bundles, and writes one report."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from edgekit._files import work_folder, write_file
from edgekit.app.cells import CACHE, build_cell, find_kept, find_key, forget_cell
from edgekit.app.config import App, Cell, list_cells
from edgekit.app.packages import pack_all, require_keys, sign_all
from edgekit.app.result import STORE, AppReport, CellResult, Digests, list_inputs, render_app
from edgekit.app.store import Store, fetch_cell, publish_cell
from edgekit.errors import DataError, EdgekitError, UsageError, suggest_name
from edgekit.jobs.build_inputs import Kept
from edgekit.progress import Progress, say_nothing
from edgekit.report.ci import render_junit, render_markdown
from edgekit.serialize import to_json
from edgekit.verify.report import VerifyReport, read_report

BuildElsewhere = Callable[[Sequence[Cell]], Iterator[CellResult | None]]
"""Builds cells elsewhere and yields the result of each, in their order; None means: build this one here."""


def run_app(
    app: App,
    *,
    only: Sequence[str] = (),
    again: bool = False,
    bare: bool = False,
    elsewhere: BuildElsewhere | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
    landed: Progress = say_nothing,
) -> AppReport:
    """Builds the cells of an app that are not up to date, and writes the packages and one report of all cells.

    `only` names cells (`model/target`), models or targets; only these are returned. The written report has the other
    cells as an earlier run left them, and packages whose cells are all up to date. Each cell is stored when it is
    finished, so that a run that is interrupted can be continued. With `again` no earlier result is used. `elsewhere`
    builds cells in other processes; such a process uses `bare`, for cells without packages and reports. Results that
    `store` holds are taken from there, and results that are built here are put there. `progress` is called with each
    step, `landed` with each cell that was built.

    Raises:
        UsageError: `only` names nothing.
        EdgekitError: a target or a preprocessing file cannot be read.
    """
    start, progress = time.monotonic(), progress or say_nothing
    if not bare:
        require_keys(app)
    every, digests = list_cells(app), Digests(app.out / STORE)
    cells = _choose(every, only)
    if again:
        for cell in cells:
            forget_cell(app, cell)
    found = {cell.name: find_kept(app, cell, digests) for cell in cells}
    if store is not None and not again:
        lost = [cell for cell in cells if found[cell.name] is None]
        found |= {cell.name: _find_stored(app, cell, digests, store) for cell in lost}
    waiting = [cell for cell in cells if found[cell.name] is None]
    built = iter([None] * len(waiting)) if elsewhere is None else elsewhere(waiting)
    began, kept = time.monotonic(), Kept()
    with ExitStack() as opened:
        for number, cell in enumerate(waiting, 1):
            # Cells of one model follow each other: intermediate results of another model would only take space.
            if number == 1 or waiting[number - 2].model != cell.model:
                opened.close()
                kept = Kept(folder=app.out / CACHE, work=opened.enter_context(work_folder()))
            result = next(built) or _build(app, cell, digests, kept, store, progress)
            found[cell.name] = result
            left_s = (time.monotonic() - began) / number * (len(waiting) - number)
            left = f", about {left_s:.0f} s left" if number < len(waiting) else ""
            landed(f"{number} of {len(waiting)}: {cell.name}: {result.verdict}, {result.seconds:.0f} s{left}")
    results = tuple(result for result in found.values() if result is not None)
    beside = {cell.name: found.get(cell.name) or find_kept(app, cell, digests) for cell in every if not bare}
    digests.save()
    if not bare:
        sign_all(app, results)
    whole = AppReport(
        app=app.path.name,
        out=app.out,
        cells=tuple(result for result in beside.values() if result is not None),
        packages=() if bare or None in beside.values() else pack_all(app, tuple(filter(None, beside.values()))),
        seconds=round(time.monotonic() - start, 2),
    )
    if bare:
        return msgspec.structs.replace(whole, cells=results)
    _write_reports(app, whole)
    return msgspec.structs.replace(whole, cells=results, packages=()) if only else whole


def list_watched(app: App) -> Iterator[Path]:
    """Yields the files and folders that a run depends on."""
    yield app.path
    for cell in list_cells(app):
        yield from itertools.chain.from_iterable(list_inputs(cell, ()).values())


def _build(app: App, cell: Cell, digests: Digests, kept: Kept, store: Store | None, progress: Progress) -> CellResult:
    result = build_cell(app, cell, digests, progress, kept)
    if store is not None and result.bundle:
        publish_cell(app, cell, result.key, store)
    return result


def _find_stored(app: App, cell: Cell, digests: Digests, store: Store) -> CellResult | None:
    try:
        key, _ = find_key(app, cell, digests)
    except EdgekitError:
        return None
    result = fetch_cell(app, cell, key, store)
    return None if result is None else msgspec.structs.replace(result, state="kept")


def _choose(cells: Sequence[Cell], only: Sequence[str]) -> tuple[Cell, ...]:
    for word in only:
        known = {name for cell in cells for name in (cell.name, cell.model, cell.target)}
        if word not in known:
            raise UsageError(f"--only '{word}': the app has no such model or target", hint=suggest_name(word, known))
    wanted = set(only)
    return tuple(cell for cell in cells if not only or wanted & {cell.name, cell.model, cell.target})


def _write_reports(app: App, report: AppReport) -> None:
    verified: list[VerifyReport] = []
    for cell in report.cells:
        # Of groups, and of bundles that were not verified, there is no such report.
        with suppress(DataError):
            verified += [read_report(app.out / cell.bundle / "verify.json")] if cell.bundle else []
    write_file(app.out / "report.json", to_json(report).encode())
    write_file(app.out / "report.html", render_app(report).encode())
    write_file(app.out / "junit.xml", render_junit(verified, accept_unproven=app.table.verify.accept_unproven))
    write_file(app.out / "summary.md", render_markdown(verified).encode())
