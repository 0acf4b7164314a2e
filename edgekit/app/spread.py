"""A run where the app says: here, in processes side by side (each an `edgekit run --only CELL...`), or on a cluster."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from edgekit._proc import Finished, run_process
from edgekit.app.cluster import spread_cluster
from edgekit.app.config import App, Cell
from edgekit.app.parcels import cell_folder
from edgekit.app.result import RESULT, AppReport, CellResult, fail_cell, read_result
from edgekit.app.run import Spread, run_app
from edgekit.app.store import open_store
from edgekit.devices.parallel import run_together
from edgekit.progress import Progress, say_nothing

# Days: planning has a budget of its own, and what hangs in a device has a limit there.
_TIMEOUT_S = 7 * 24 * 3600.0
_TRIES = 3
# A process starts in the time of a small cell: it builds some of them, but so few that all end at the same time.
_SHARE, _SHARES = 16, 4
SHARED = ".store"
"""The store of a sweep that names none, below the app's results: for workers that see the same folders."""
# Exit codes of a child that came to its end: pass, fail, not proven.
_VERDICTS = frozenset({0, 1, 3})


class _Answer(msgspec.Struct, frozen=True):
    cells: tuple[CellResult, ...]


def run_anywhere(
    app: App, *, only: Sequence[str] = (), again: bool = False, bare: bool = False, progress: Progress | None = None
) -> AppReport:
    """Runs an app as `run_app`, with the workers, the scheduler and the store of its `[sweep]`.

    Raises:
        EdgekitError: as `run_app` and `open_store`; or the scheduler does not answer.
    """
    sweep, progress = app.table.sweep, progress or say_nothing
    place = sweep.store
    if place is not None and "://" not in place:
        place = str(app.path.parent.absolute() / place)
    elif place is None and sweep.scheduler is not None:
        place = str(app.out.absolute() / SHARED)
    store = None if place is None else open_store(place)
    spread: Spread | None = None
    if sweep.scheduler is not None and store is not None:
        spread = spread_cluster(app, sweep.scheduler, store, progress, again=again)
    elif sweep.workers > 1:
        spread = spread_processes(app, sweep.workers, progress, store=place)
    return run_app(app, only=only, again=again, bare=bare, spread=spread, store=store, progress=progress)


def spread_processes(app: App, workers: int, progress: Progress, *, store: str | None = None) -> Spread:
    """Returns what builds cells in so many processes at a time, each some cells one after the other.

    A process that is killed, or dies of a native library, loses nothing that was finished. The others of its cells are
    built in processes of their own, which are started again, three times in all.
    """

    def spread(cells: Sequence[Cell]) -> Iterator[CellResult | None]:
        size = max(1, min(_SHARE, len(cells) // (workers * _SHARES)))
        shares = [cells[start : start + size] for start in range(0, len(cells), size)]
        build = partial(_build_share, app, progress=progress, store=store)
        for found in run_together([partial(build, share) for share in shares], at_once=workers):
            yield from found

    return spread


def _build_share(app: App, cells: Sequence[Cell], *, progress: Progress, store: str | None) -> list[CellResult]:
    for cell in cells:
        # Out of date, or it would not be here: what lies there after a death is new.
        (cell_folder(app, cell) / RESULT).unlink(missing_ok=True)
    if len(cells) > 1:
        progress(f"build {cells[0].name} and {len(cells) - 1} more")
        done = run_process(_command(app, cells, store), timeout_s=_TIMEOUT_S)
        if done.status in _VERDICTS:
            return list(_read_answer(done))
    return [read_result(cell_folder(app, cell)) or _build(app, cell, progress, store) for cell in cells]


def _build(app: App, cell: Cell, progress: Progress, store: str | None) -> CellResult:
    progress(f"{cell.name}: build")
    said = ""
    for _ in range(_TRIES):
        done = run_process(_command(app, [cell], store), timeout_s=_TIMEOUT_S)
        if done.status in _VERDICTS:
            return _read_answer(done)[0]
        # It may have been killed after its result was written.
        kept = read_result(cell_folder(app, cell))
        if kept is not None:
            return kept
        said = f"{done.ending}; {done.stderr.strip()[-300:]}"
    return fail_cell(cell, f"Its process died {_TRIES} times: {said}.")


def _command(app: App, cells: Sequence[Cell], store: str | None) -> list[str]:
    only = [word for cell in cells for word in ("--only", cell.name)]
    shared = [] if store is None else ["--store", store]
    return [sys.executable, "-m", "edgekit", "run", str(app.path), *only, "--bare", "--json", "--quiet", *shared]


def _read_answer(done: Finished) -> tuple[CellResult, ...]:
    return msgspec.json.decode(done.stdout, type=_Answer).cells
