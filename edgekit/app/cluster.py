"""Cells built on the workers of a Dask cluster: what they need and what they find goes through a store."""

import importlib
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from edgekit.app.cells import CACHE, build_cell, find_key, forget_cell
from edgekit.app.config import App, AppTable, Cell
from edgekit.app.keys import STORE, Digests, list_inputs
from edgekit.app.parcels import Parcel, fetch_cell, name_cell, publish_cell, receive_parcel, send_parcel
from edgekit.app.result import CellResult, fail_cell
from edgekit.app.run import Spread
from edgekit.app.store import Store, open_store
from edgekit.devices.parallel import REMOTE
from edgekit.errors import DeviceError, EdgekitError, MissingExtraError, quote_error
from edgekit.progress import Progress, say_nothing

TOPIC = "edgekit"
"""Dask's topic of structured events: `begin` and `done` of each cell, with its key and its worker."""

_CONNECT_S = 10
_KEY = "edgekit-"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is asked for: a cell whose files lie in a store, and the key that its results must bear."""

    app: App
    cell: Cell
    inputs: dict[str, Parcel]
    key: str
    store: str
    devices: tuple[str, ...]
    again: bool


def spread_cluster(app: App, scheduler: str, store: Store, progress: Progress, *, again: bool = False) -> Spread:
    """Returns what builds cells on the workers that a scheduler has, for example `tcp://10.0.0.1:8786`.

    A finished cell lies in the store, so that no worker and no scheduler that dies loses it, and none builds it again
    (but with `again`). A cell that is verified on phones or boards runs only on workers whose resources list them
    (`dask worker --resources "adb:SERIAL=1"`), and one cell at a time has each of them.

    The `Spread` raises:
        MissingExtraError: Dask distributed is not installed.
        DeviceError: there is no scheduler, or it has gone.
    """

    def spread(cells: Sequence[Cell]) -> Iterator[CellResult]:
        if not cells:
            return
        digests = Digests(app.out / STORE)
        with _dask() as distributed, _connect(distributed, scheduler) as client:
            futures: dict[Any, Cell] = {}
            found: dict[str, CellResult] = {}
            for rank, cell in enumerate(cells):
                try:
                    order = _make_order(app, cell, store, digests, again=again)
                except EdgekitError as error:
                    found[cell.name] = fail_cell(cell, f"It cannot be built: {error}.")
                    continue
                futures[_submit(client, order, rank)] = cell
            for future in distributed.as_completed(futures, loop=client.loop):
                cell = futures[future]
                found[cell.name] = _land(app, cell, future, store, scheduler)
                progress(f"{len(found)} of {len(cells)} cells, the last one {cell.name}")
        yield from (found[cell.name] for cell in cells)

    return spread


def fill_order(order: Order) -> CellResult | None:
    """Builds a cell on a worker, and puts what was found into the store; None: the store has it already.

    A store that cannot be used, and a worker that would make something else, are findings.
    """
    try:
        return _fill(order)
    except EdgekitError as error:
        return fail_cell(order.cell, f"It cannot be built: {error}.")


def list_slots(app: App) -> tuple[str, ...]:
    """Returns the phones and boards that each cell of an app needs for itself."""
    verify = app.table.verify
    known = app.table.devices
    words = (*verify.on, *verify.require) if verify.enabled else ()
    named = dict.fromkeys(known[name].device if name in known else name for name in words)
    return tuple(name for name in named if name.partition(":")[0] in REMOTE)


def _fill(order: Order) -> CellResult | None:
    distributed = importlib.import_module("distributed")
    worker, store = distributed.get_worker(), open_store(order.store)
    place = Path(worker.local_directory) / "edgekit"
    cell = _place(order.cell, {what: receive_parcel(each, store, place) for what, each in order.inputs.items()})
    # A folder of its own: another app may have a cell of this name. The calibration serves them all.
    app = msgspec.structs.replace(order.app, path=place / order.key / "edgekit.toml")
    digests = Digests(place / "digests.json")
    key, _ = find_key(app, cell, digests)
    if key != order.key:
        raise DeviceError(
            f"worker '{worker.address}' would make something else: its versions or its data functions differ",
            hint="install there what is installed here",
        )
    if not order.again and store.has(name_cell(key)):
        return None
    with ExitStack() as held:
        for device in order.devices:
            # A lease ends by itself some seconds after its worker was killed.
            held.enter_context(distributed.Semaphore(max_leases=1, name=f"edgekit-{device}"))
        facts = {"cell": cell.name, "key": key, "worker": str(worker.address)}
        worker.log_event(TOPIC, {"what": "begin", **facts})
        result = build_cell(app, cell, digests, say_nothing, cache=place / CACHE)
        if result.bundle:
            publish_cell(app, cell, key, store)
        worker.log_event(TOPIC, {"what": "done", **facts, "seconds": result.seconds})
    forget_cell(app, cell)
    return result


def _connect(distributed: Any, scheduler: str) -> Any:
    try:
        return distributed.Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        hint = "dask scheduler starts one; its address looks like tcp://HOST:8786"
        raise DeviceError(f"no scheduler answers at '{scheduler}': {quote_error(error)}", hint=hint) from error


@contextmanager
def _dask() -> Generator[Any]:
    """Yields Dask distributed, silent: what it logs of a lost connection, with its traceback, is one line of ours."""
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        raise MissingExtraError("--scheduler needs Dask distributed", hint="pip install distributed") from error
    logger = logging.getLogger("distributed.client")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield distributed
    finally:
        logger.setLevel(level)


def _make_order(app: App, cell: Cell, store: Store, digests: Digests, *, again: bool) -> Order:
    key, beside = find_key(app, cell, digests)
    table = app.table
    # Only what a cell needs: a table of 10,000 models would go out 10,000 times.
    lean = AppTable(
        models={}, targets={}, verify=table.verify, devices=table.devices, time_budget_s=table.time_budget_s
    )
    inputs = {what: send_parcel(paths, store, digests) for what, paths in list_inputs(cell, beside).items()}
    return Order(
        app=App(path=Path(app.path.name), table=lean),
        cell=cell,
        inputs=inputs,
        key=key,
        store=store.place,
        devices=list_slots(app),
        again=again,
    )


def _submit(client: Any, order: Order, rank: int) -> Any:
    # By its content: two who ask for the same cell get one task.
    name, slots = f"{_KEY}{order.key}", dict.fromkeys(order.devices, 1)
    return client.submit(fill_order, order, key=name, resources=slots or None, priority=-rank, pure=False)


def _land(app: App, cell: Cell, future: Any, store: Store, scheduler: str) -> CellResult:
    if future.status in {"cancelled", "lost"}:
        hint = "start it again, then run again: what was finished is kept"
        raise DeviceError(f"the scheduler at '{scheduler}' has gone", hint=hint)
    if future.status == "error":
        return fail_cell(cell, f"It cannot be built: {quote_error(future.exception())}.")
    result: CellResult | None = future.result()
    if result is not None and not result.bundle:
        return msgspec.structs.replace(result, model=cell.model, target=cell.target)
    fetched = fetch_cell(app, cell, future.key.removeprefix(_KEY), store)
    if fetched is None:
        return fail_cell(cell, f"Store '{store.place}' does not hold what its worker found.")
    return msgspec.structs.replace(fetched, state="kept" if result is None else "built")


def _place(cell: Cell, found: Mapping[str, Path]) -> Cell:
    """Returns a cell whose files lie where a worker has put them."""
    data = cell.data
    data = msgspec.structs.replace(
        data,
        source=str(found.get("source", data.source)),
        evaluation=str(found["evaluation"]) if "evaluation" in found else data.evaluation,
        labels=found.get("labels", data.labels),
        golden=found.get("golden", data.golden),
    )
    recipe = cell.recipe
    if "target" in found:
        recipe = msgspec.structs.replace(recipe, targets=(str(found["target"]),))
    return msgspec.structs.replace(cell, path=found["model"], data=data, recipe=recipe)
