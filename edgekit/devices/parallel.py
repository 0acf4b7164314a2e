"""Runs several devices at the same time, without overloading this machine; results keep the order of the devices."""

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event, Lock, Semaphore
from typing import TypeVar

from edgekit._files import digest_bytes, one_at_a_time
from edgekit._proc import end_children
from edgekit.devices.device import Device
from edgekit.devices.find import address_of, is_remote
from edgekit.machine import cache_folder

_Item = TypeVar("_Item")
_T = TypeVar("_T")

BYTES_PER_RUN = 3 << 29
"""The memory that a run on this machine may need: for an emulator, a model and its tensors."""

_MEMORY = Path("/proc/meminfo")
# Devices on this machine are timed one at a time, because they would slow each other down.
_TIMING_LOCK = Lock()


def run_each(devices: Sequence[Device], run: Callable[[Device], _T], *, timed: bool = False) -> tuple[_T, ...]:
    """Calls `run` for every device at the same time, and returns the results in the order of the devices.

    Devices on this machine share its cores and memory, so that only a few of them run at once, or one at a time if the
    result is a time (`timed`). Runs on one remote device that is named twice follow each other. If a run raises, or the
    caller is interrupted, all others are ended.
    """
    queues: dict[str, list[int]] = {}
    for index, device in enumerate(devices):
        # Two names of the same phone share a queue, so that its runs do not compete for its cores and files.
        queues.setdefault(address_of(device) if is_remote(device) else str(index), []).append(index)
    results: dict[int, _T] = {}

    def work(queue: Sequence[int]) -> None:
        for index in queue:
            device = devices[index]
            lock: contextlib.AbstractContextManager[object] = _TIMING_LOCK if timed else _slots()
            if is_remote(device):
                # Another process or thread of this machine may use the same phone; the system releases the lock of a
                # process that dies.
                place = cache_folder() / "leases" / digest_bytes(address_of(device).encode()) / "lock"
                lock = one_at_a_time(place)
            with lock:
                results[index] = run(device)

    run_together([functools.partial(work, queue) for queue in queues.values()])
    return tuple(results[index] for index in range(len(devices)))


def run_together(calls: Sequence[Callable[[], _T]], *, at_once: int | None = None) -> tuple[_T, ...]:
    """Makes calls in threads, and returns their results in order.

    If one raises, or the caller is interrupted, the child processes of all are ended, and waiting calls are not made.
    """
    with in_background(operator.call, max(1, at_once or len(calls))) as begin:
        futures = [begin(call) for call in calls]
    return tuple(future.result() for future in futures)


@contextlib.contextmanager
def in_background(call: Callable[[_Item], _T], at_once: int, more: int = 0) -> Generator[Callable[[_Item], Future[_T]]]:
    """Yields a function that starts a call for an item in the background; the block ends when all calls have returned.

    While the block runs, `at_once` calls run at a time; once it has ended, `more` further ones do, in the order of the
    items. If a call or the block raises, the child processes of all are ended, and waiting calls are not made.
    """
    futures, turns, has_failed = list[Future[_T]](), Semaphore(at_once), Event()

    def wait_and_call(item: _Item) -> _T:
        with turns:
            if has_failed.is_set():
                raise CancelledError
            return call(item)

    def begin(item: _Item) -> Future[_T]:
        futures.append(pool.submit(wait_and_call, item))
        return futures[-1]

    with ThreadPoolExecutor(at_once + more) as pool:
        try:
            yield begin
            for _ in range(more):
                turns.release()
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            has_failed.set()
            for future in futures:
                future.cancel()
            # Repeatedly, because a thread may start its child just after the children of the others were ended.
            while wait(futures, timeout=0.1).not_done:
                end_children()
            raise


def count_slots(cores: int, free_bytes: int | None) -> int:
    """Returns how many runs this machine can do at once, by its cores and its free memory (None: unknown).

    Two per core, because programs start and models load while others compute.
    """
    by_memory = cores if free_bytes is None else free_bytes // BYTES_PER_RUN
    return max(1, min(2 * cores, by_memory))


@functools.cache
def _slots() -> Semaphore:
    lines = _MEMORY.read_text().splitlines() if _MEMORY.is_file() else []
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return Semaphore(count_slots(os.cpu_count() or 1, None if available is None else int(available) * 1024))
