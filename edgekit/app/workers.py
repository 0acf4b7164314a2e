"""Builds cells in turn, in parallel in several processes of this machine, or on the workers of a Dask cluster.

Each process runs `edgekit run --only CELL...`. Workers of a cluster read their inputs from a store, and write their
results to it.
"""

import importlib
import logging
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import work_folder
from edgekit._proc import run_process
from edgekit.app.cells import (
    CACHE,
    Store,
    StoredFiles,
    build_cell,
    cell_folder,
    fetch_cell,
    fetch_files,
    find_key,
    forget_cell,
    name_cell,
    open_store,
    publish_cell,
    store_files,
)
from edgekit.app.config import App, AppTable, Cell
from edgekit.app.result import RESULT, STORE, CellResult, Digests, fail_cell, list_inputs, read_result
from edgekit.devices.parallel import run_together
from edgekit.devices.register import REMOTE
from edgekit.errors import DeviceError, EdgekitError, MissingExtraError, quote_error
from edgekit.jobs.build_inputs import Kept
from edgekit.machine import spell_install
from edgekit.progress import Progress, say_nothing
from edgekit.recipe import Data

TOPIC = "edgekit"
"""Dask's topic for structured events: `begin` and `done` of each cell, with its key and its worker."""

_CONNECT_S = 10
_KEY = "edgekit-"


def build_cells(
    app: App, cells: Sequence[Cell], digests: Digests, store: Store | None, progress: Progress, *, again: bool
) -> Iterator[CellResult]:
    """Yields the result of each cell in order, built with the workers or on the scheduler of the app's `[sweep]`.

    Raises:
        EdgekitError: as `use_cluster`; or the store cannot be written.
    """
    sweep = app.table.sweep
    if sweep.scheduler is not None and store is not None:
        yield from use_cluster(app, cells, sweep.scheduler, store, progress, again=again)
        return
    if sweep.workers > 1:
        yield from use_processes(app, cells, sweep.workers, progress, store=None if store is None else store.place)
        return
    # Cells of one model follow each other: intermediate results of another model would only take space.
    for _, group in groupby(cells, key=lambda cell: cell.model):
        with work_folder() as work:
            kept = Kept(folder=app.out / CACHE, work=work)
            for cell in group:
                result = build_cell(app, cell, digests, progress, kept)
                if store is not None and result.bundle:
                    publish_cell(app, cell, result.key, store)
                yield result


def use_cluster(
    app: App, cells: Sequence[Cell], scheduler: str, store: Store, progress: Progress, *, again: bool
) -> Iterator[CellResult]:
    """Yields the results of cells that the workers of a scheduler build, for example `tcp://10.0.0.1:8786`.

    A finished cell is in the store: it is not lost if a worker or the scheduler dies, and is built again only with
    `again`. A cell that is verified on phones or boards runs only on workers whose resources list them (`dask worker
    --resources "adb:SERIAL=1"`), and only one cell at a time uses each of them.

    Raises:
        MissingExtraError: Dask distributed is not installed.
        DeviceError: there is no scheduler, or it has gone.
    """
    if not cells:
        return
    table, digests = app.table, Digests(app.out / STORE)
    # Only what a cell needs: else a table of 10,000 models would be sent 10,000 times.
    lean = AppTable(targets={}, verify=table.verify, devices=table.devices, time_budget_s=table.time_budget_s)
    slots = dict.fromkeys(list_slots(app), 1)
    with _connected(scheduler) as (distributed, client):
        futures, found = dict[Any, Cell](), dict[str, CellResult]()
        for rank, cell in enumerate(cells):
            try:
                key, beside = find_key(app, cell, digests)
                inputs = {what: store_files(paths, store, digests) for what, paths in list_inputs(cell, beside).items()}
            except EdgekitError as error:
                found[cell.name] = fail_cell(cell, error)
                continue
            order = partial(fill_order, lean, cell, inputs, key, store.place, again=again)
            # Named by its content: two apps that ask for the same cell share one task.
            future = client.submit(order, key=f"{_KEY}{key}", resources=slots or None, priority=-rank, pure=False)
            futures[future] = cell
        for future in distributed.as_completed(futures, loop=client.loop):
            cell = futures[future]
            found[cell.name] = _land(app, cell, future, store, scheduler)
            progress(f"{len(found)} of {len(cells)} cells, the last one {cell.name}")
    yield from (found[cell.name] for cell in cells)


def fill_order(
    table: AppTable, cell: Cell, inputs: Mapping[str, StoredFiles], key: str, place: str, *, again: bool
) -> CellResult | None:
    """Builds a cell on a worker, from the files that lie in the store at `place`, and puts the result there.

    Returns None if the store has it already. If the store cannot be used, or this worker would build something else
    than the `key` names, the result says so.
    """
    try:
        distributed = importlib.import_module("distributed")
        worker, store = distributed.get_worker(), open_store(place)
        folder = Path(worker.local_directory) / "edgekit"
        cell = _place(cell, {what: fetch_files(each, store, folder) for what, each in inputs.items()})
        # A folder for each key: another app may have a cell of this name. The calibration cache serves them all.
        app, digests = App(path=folder / key / "edgekit.toml", table=table), Digests(folder / "digests.json")
        if find_key(app, cell, digests)[0] != key:
            raise DeviceError(
                f"worker '{worker.address}' would make something else: its versions or its data functions differ",
                hint="install there what is installed here",
            )
        if not again and store.has(name_cell(key)):
            return None
        with ExitStack() as leases:
            for device in list_slots(app):
                # A lock on a device expires by itself some seconds after its worker was killed.
                leases.enter_context(distributed.Semaphore(max_leases=1, name=f"edgekit-{device}"))
            facts = {"cell": cell.name, "key": key, "worker": str(worker.address)}
            worker.log_event(TOPIC, {"what": "begin", **facts})
            result = build_cell(app, cell, digests, say_nothing, Kept(folder=folder / CACHE))
            if result.bundle:
                publish_cell(app, cell, key, store)
            worker.log_event(TOPIC, {"what": "done", **facts, "seconds": result.seconds})
        forget_cell(app, cell)
        return result
    except EdgekitError as error:
        return fail_cell(cell, error)


def list_slots(app: App) -> tuple[str, ...]:
    """Returns the phones and boards that each cell of an app needs exclusively."""
    verify = app.table.verify
    known = app.table.devices
    words = (*verify.on, *verify.require) if verify.enabled else ()
    named = dict.fromkeys(known[name].device if name in known else name for name in words)
    return tuple(name for name in named if name.partition(":")[0] in REMOTE)


@contextmanager
def _connected(scheduler: str) -> Generator[tuple[Any, Any]]:
    """Yields Dask distributed and a client, with its log off: a lost connection is one line of edgekit, no traceback.

    Raises:
        MissingExtraError: Dask distributed is not installed.
        DeviceError: there is no scheduler.
    """
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        raise MissingExtraError("--scheduler needs Dask distributed", hint=spell_install("distributed")) from error
    logger = logging.getLogger("distributed.client")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        try:
            client = distributed.Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            hint = "dask scheduler starts one; its address looks like tcp://HOST:8786"
            raise DeviceError(f"no scheduler answers at '{scheduler}': {quote_error(error)}", hint=hint) from error
        with client:
            yield distributed, client
    finally:
        logger.setLevel(level)


def _land(app: App, cell: Cell, future: Any, store: Store, scheduler: str) -> CellResult:
    if future.status in {"cancelled", "lost"}:
        hint = "start it again, then run again: what was finished is kept"
        raise DeviceError(f"the scheduler at '{scheduler}' has gone", hint=hint)
    if future.status == "error":
        return fail_cell(cell, quote_error(future.exception()))
    result: CellResult | None = future.result()
    if result is not None and not result.bundle:
        return msgspec.structs.replace(result, model=cell.model, target=cell.target)
    fetched = fetch_cell(app, cell, future.key.removeprefix(_KEY), store)
    if fetched is None:
        return fail_cell(cell, f"store '{store.place}' does not hold what its worker found")
    return msgspec.structs.replace(fetched, state="kept" if result is None else "built")


def _place(cell: Cell, found: Mapping[str, Path]) -> Cell:
    """Returns a cell whose paths are those of the files that a worker unpacked."""
    of_data = {what: path for what, path in found.items() if what in Data.__struct_fields__}
    data, recipe = msgspec.structs.replace(cell.data, **of_data), cell.recipe
    if "target" in found:
        recipe = msgspec.structs.replace(recipe, targets=(str(found["target"]),))
    return msgspec.structs.replace(cell, path=found["model"], data=data, recipe=recipe)


# A week: planning has a time budget of its own, and so has each device.
_TIMEOUT_S = 7 * 24 * 3600.0
_TRIES = 3
# Starting a process takes as long as a small cell, so each process builds several; but few enough that all end at about
# the same time.
_SHARE, _SHARES = 16, 4
# Exit codes of a child that finished: pass, fail, not proven.
_VERDICTS = frozenset({0, 1, 3})


class _Answer(msgspec.Struct, frozen=True):
    cells: tuple[CellResult, ...]


def use_processes(
    app: App, cells: Sequence[Cell], workers: int, progress: Progress, *, store: str | None = None
) -> Iterator[CellResult]:
    """Yields the results of cells from so many processes at a time; each of them builds several cells in turn.

    If a process is killed, or crashes in a native library, its finished cells stay. Each of its other cells is then
    built in a process of its own, which is started up to three times.
    """
    size = max(1, min(_SHARE, len(cells) // (workers * _SHARES)))
    shares = [cells[start : start + size] for start in range(0, len(cells), size)]
    build = partial(_build_share, app, progress=progress, store=store)
    for found in run_together([partial(build, share) for share in shares], at_once=workers):
        yield from found


def _build_share(app: App, cells: Sequence[Cell], *, progress: Progress, store: str | None) -> list[CellResult]:
    found: dict[str, CellResult] = {}

    def start(some: Sequence[Cell]) -> str:
        """Builds cells in one process, and returns how it ended."""
        only = [word for cell in some for word in ("--only", cell.name)]
        shared = [] if store is None else ["--store", store]
        argv = [sys.executable, "-m", "edgekit", "run", str(app.path), *only, "--bare", "--json", "--quiet"]
        done = run_process([*argv, *shared], timeout_s=_TIMEOUT_S)
        if done.status in _VERDICTS:
            answer = msgspec.json.decode(done.stdout, type=_Answer).cells
        else:
            # It may have been killed after it wrote some results.
            answer = tuple(filter(None, (read_result(cell_folder(app, cell)) for cell in some)))
        found.update({f"{result.model}/{result.target}": result for result in answer})
        return f"{done.ending}; {done.stderr.strip()[-300:]}"

    for cell in cells:
        # The old result is out of date and is removed: a result that is there after a process died is a new one.
        (cell_folder(app, cell) / RESULT).unlink(missing_ok=True)
    if len(cells) > 1:
        progress(f"build {cells[0].name} and {len(cells) - 1} more")
        start(cells)
    for cell in cells:
        ended = ""
        for _ in range(0 if cell.name in found else _TRIES):
            progress(f"{cell.name}: build")
            ended = start([cell])
            if cell.name in found:
                break
        found.setdefault(cell.name, fail_cell(cell, f"its process died {_TRIES} times: {ended}"))
    return [found[cell.name] for cell in cells]
