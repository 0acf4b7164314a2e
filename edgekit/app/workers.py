"""Builds cells in turn, in parallel in several processes of this machine, or on the workers of a Dask cluster.

Each process runs `edgekit run --bare --only CELL...`. Workers of a cluster read their inputs from a store, and write
their results to it.
"""

import importlib
import logging
import os
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import digest_bytes, list_below, staged_entries, work_folder
from edgekit._proc import run_process
from edgekit.app.cells import CACHE, LIMITS, Store, build_cell, cell_folder, fetch_cell, find_key, name_cell, open_store
from edgekit.app.config import App, AppTable, Cell
from edgekit.app.result import DIGESTS_FILE, RESULT, CellResult, Digests, fail_cell, list_inputs, read_result
from edgekit.bundle.archive import list_files, unpack_archive, write_archive
from edgekit.bundle.manifest import encode_json
from edgekit.devices.find import REMOTE
from edgekit.devices.parallel import run_together
from edgekit.errors import DataError, DeviceError, EdgekitError, MissingExtraError, quote_error, reraised
from edgekit.jobs.build_inputs import BuildCache
from edgekit.machine import spell_install
from edgekit.progress import Progress, say_nothing
from edgekit.recipe import Data
from edgekit.serialize import ready_type

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
    # The cells of a model are adjacent, and share its intermediate results, which are then removed.
    for _, group in groupby(cells, key=lambda cell: cell.model):
        with work_folder() as work:
            kept = BuildCache(folder=app.out / CACHE, work=work)
            yield from (build_cell(app, cell, digests, progress, kept, store) for cell in group)


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
    table, digests = app.table, Digests(app.out / DIGESTS_FILE)
    # Only what a cell needs: otherwise a table of 10,000 models would be sent 10,000 times.
    worker_table = AppTable(targets={}, verify=table.verify, devices=table.devices, time_budget_s=table.time_budget_s)
    slots = dict.fromkeys(list_slots(app), 1)
    with _connected(scheduler) as (distributed, client):
        futures, found = dict[Any, Cell](), dict[str, CellResult]()
        for rank, cell in enumerate(cells):
            try:
                key, external = find_key(app, cell, digests)
                places = list_inputs(cell, external).items()
                inputs = {what: store_files(paths, store, digests) for what, paths in places}
            except EdgekitError as error:
                found[cell.name] = fail_cell(cell, error)
                continue
            task = partial(build_on_worker, worker_table, cell, inputs, key, store.place, again=again)
            # The task is named by its content: two apps with the same cell share one task.
            future = client.submit(task, key=f"{_KEY}{key}", resources=slots or None, priority=-rank, pure=False)
            futures[future] = cell
        for future in distributed.as_completed(futures, loop=client.loop):
            cell = futures[future]
            found[cell.name] = _collect_result(app, cell, future, store, scheduler)
            progress(f"{len(found)} of {len(cells)} cells, the last one {cell.name}")
    yield from (found[cell.name] for cell in cells)


class StoredFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one folder in a store: the digest of their names and contents, and the name of the first file."""

    sha256: str
    name: str

    @property
    def archive(self) -> str:
        """The name of the object that holds them."""
        return f"inputs/{self.sha256[:2]}/{self.sha256}.tar"


def store_files(paths: tuple[Path, ...], store: Store, digests: Digests) -> StoredFiles:
    """Puts files, or a folder with all its files, into a store unless it has them; returns the key to fetch them by.

    Raises:
        EdgekitError: they cannot be read, lie outside the folder of the first, or the store cannot be written.
    """
    first, entries = paths[0], dict[str, Path]()
    for path in paths:
        for file in list_below(path):
            # From the paths alone: links are not followed.
            name = Path(os.path.relpath(file, first.parent)).as_posix()
            if name.startswith("../"):
                words = f"'{file}' lies outside of the folder of '{first.name}', and a store has only what is inside"
                raise DataError(words, hint="put it there, or run without --scheduler")
            entries[name] = file
    files = StoredFiles(sha256=_digest(entries, digests), name=first.name)
    if not store.has(files.archive):
        with work_folder() as work:
            write_archive(entries, work / "inputs.tar", "tar")
            store.put(files.archive, work / "inputs.tar")
    return files


def fetch_files(files: StoredFiles, store: Store, place: Path) -> Path:
    """Unpacks stored files below `place`, unless they are there already, and returns the path of the first one.

    Raises:
        DataError: the store does not hold them, or holds something else under their name.
    """
    if not (place / files.sha256).is_dir():
        with work_folder() as work, staged_entries(place) as staging:
            if not store.get(files.archive, work / "inputs.tar"):
                raise DataError(f"store '{store.place}' has lost '{files.name}'", hint="run again")
            unpack_archive(work / "inputs.tar", staging / files.sha256, LIMITS)
            if _digest(list_files(staging / files.sha256), Digests(work / "digests")) != files.sha256:
                raise DataError(f"store '{store.place}' holds another '{files.name}'", hint="empty it, then run again")
    return place / files.sha256 / files.name


def _digest(entries: Mapping[str, Path], digests: Digests) -> str:
    return digest_bytes(encode_json({name: digests.digest(path) for name, path in entries.items()}))


def build_on_worker(
    table: AppTable, cell: Cell, inputs: Mapping[str, StoredFiles], key: str, place: str, *, again: bool
) -> CellResult | None:
    """Builds a cell on a worker, from files in the store at `place`, puts the results there, and returns the result.

    It is None if the store has it already, and a failed one if the store cannot be used, or if this worker computes
    another content key.
    """
    try:
        distributed = importlib.import_module("distributed")
        worker, store = distributed.get_worker(), open_store(place)
        folder = Path(worker.local_directory) / "edgekit"
        paths = {what: fetch_files(each, store, folder) for what, each in inputs.items()}
        data = msgspec.structs.replace(
            cell.data, **{what: path for what, path in paths.items() if what in Data.__struct_fields__}
        )
        targets = (str(paths["target"]),) if "target" in paths else cell.recipe.targets
        recipe = msgspec.structs.replace(cell.recipe, targets=targets)
        cell = msgspec.structs.replace(cell, path=paths["model"], data=data, recipe=recipe)
        # A folder for each key, because another app may have a cell of this name. All keys share the calibration cache.
        app, digests = App(path=folder / key / "edgekit.toml", table=table), Digests(folder / "digests.json")
        if find_key(app, cell, digests)[0] != key:
            words = f"worker '{worker.address}' would make something else: its versions or its data functions differ"
            raise DeviceError(words, hint="install there what is installed here")
        if not again and store.has(name_cell(key)):
            return None
        with ExitStack() as leases:
            for device in list_slots(app):
                # The lease of a worker that was killed expires after some seconds.
                leases.enter_context(distributed.Semaphore(max_leases=1, name=f"edgekit-{device}"))
            facts = {"cell": cell.name, "key": key, "worker": str(worker.address)}
            worker.log_event(TOPIC, {"what": "begin", **facts})
            result = build_cell(app, cell, digests, say_nothing, BuildCache(folder=folder / CACHE), store)
            worker.log_event(TOPIC, {"what": "done", **facts, "seconds": result.seconds})
        shutil.rmtree(folder / key, ignore_errors=True)
        return result
    except EdgekitError as error:
        return fail_cell(cell, error)


def list_slots(app: App) -> tuple[str, ...]:
    """Returns the phones and boards that each cell of an app needs exclusively."""
    verify = app.table.verify
    known = app.table.devices
    names = (*verify.on, *verify.require) if verify.enabled else ()
    devices = dict.fromkeys(known[name].device if name in known else name for name in names)
    return tuple(name for name in devices if name.partition(":")[0] in REMOTE)


@contextmanager
def _connected(scheduler: str) -> Generator[tuple[Any, Any]]:
    """Yields Dask distributed and a client, without its log, which would show a traceback for a lost connection.

    Raises:
        MissingExtraError: Dask distributed is not installed.
        DeviceError: there is no scheduler.
    """
    absent = MissingExtraError("--scheduler needs Dask distributed", hint=spell_install("distributed"))
    with reraised(ImportError, absent):
        distributed = importlib.import_module("distributed")
    logger = logging.getLogger("distributed.client")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        hint = "dask scheduler starts one; its address looks like tcp://HOST:8786"
        silent = DeviceError(f"no scheduler answers at '{scheduler}'", hint=hint)
        with reraised((OSError, ValueError), silent, quote=True):
            client = distributed.Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
        with client:
            yield distributed, client
    finally:
        logger.setLevel(level)


def _collect_result(app: App, cell: Cell, future: Any, store: Store, scheduler: str) -> CellResult:
    if future.status in {"cancelled", "lost"}:
        hint = "start it again, then run again: what was finished is kept"
        raise DeviceError(f"the scheduler at '{scheduler}' has gone", hint=hint)
    if future.status == "error":
        return fail_cell(cell, quote_error(future.exception()))
    result: CellResult | None = future.result()
    if result is not None and not result.bundle:
        return msgspec.structs.replace(result, model=cell.model, target=cell.target)
    if (fetched := fetch_cell(app, cell, future.key.removeprefix(_KEY), store)) is None:
        return fail_cell(cell, f"store '{store.place}' does not hold what its worker found")
    return msgspec.structs.replace(fetched, state="kept" if result is None else "built")


# A week: planning has a time budget of its own, and so has each device.
_TIMEOUT_S = 7 * 24 * 3600.0
_TRIES = 3
# Starting a process takes as long as a small cell, so each process builds several cells, at most 16. Each worker gets
# at least four such shares, so that all workers end at about the same time.
_MAX_SHARE, _SHARES_PER_WORKER = 16, 4
# Exit codes of a child that finished: pass, fail, not proven.
_VERDICTS = frozenset({0, 1, 3})


class _Answer(msgspec.Struct, frozen=True):
    cells: tuple[CellResult, ...]


def use_processes(
    app: App, cells: Sequence[Cell], workers: int, progress: Progress, *, store: str | None = None
) -> Iterator[CellResult]:
    """Yields the results of cells, built in `workers` processes at a time; each process builds several cells in turn.

    If a process is killed, or crashes in a native library, the results of its finished cells are used. Each of its
    other cells is then built in a process of its own, which is started up to three times.
    """
    size = max(1, min(_MAX_SHARE, len(cells) // (workers * _SHARES_PER_WORKER)))
    shares = [cells[start : start + size] for start in range(0, len(cells), size)]
    build = partial(_build_share, app, progress=progress, store=store)
    for found in run_together([partial(build, share) for share in shares], at_once=workers):
        yield from found


def _build_share(app: App, cells: Sequence[Cell], *, progress: Progress, store: str | None) -> list[CellResult]:
    results: dict[str, CellResult] = {}

    def run_process_for(part: Sequence[Cell]) -> str:
        """Builds cells in one process, and returns how it ended."""
        only = [word for cell in part for word in ("--only", cell.name)]
        shared = [] if store is None else ["--store", store]
        argv = [sys.executable, "-m", "edgekit", "run", str(app.path), *only, "--bare", "--json", "--quiet"]
        done = run_process([*argv, *shared], timeout_s=_TIMEOUT_S)
        if done.status in _VERDICTS:
            answer = msgspec.json.decode(done.stdout, type=ready_type(_Answer)).cells
        else:
            # It may have been killed after it wrote some results.
            answer = tuple(filter(None, (read_result(cell_folder(app, cell)) for cell in part)))
        results.update({f"{result.model}/{result.target}": result for result in answer})
        return f"{done.ending}; {done.stderr.strip()[-300:]}"

    for cell in cells:
        # The outdated result is removed, so that a result that is there after a process died is a new one.
        (cell_folder(app, cell) / RESULT).unlink(missing_ok=True)
    if len(cells) > 1:
        progress(f"build {cells[0].name} and {len(cells) - 1} more")
        run_process_for(cells)
    for cell in cells:
        ending = ""
        for _ in range(0 if cell.name in results else _TRIES):
            progress(f"{cell.name}: build")
            ending = run_process_for([cell])
            if cell.name in results:
                break
        results.setdefault(cell.name, fail_cell(cell, f"its process died {_TRIES} times: {ending}"))
    return [results[cell.name] for cell in cells]
