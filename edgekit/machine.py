"""What this machine is, for reports whose figures depend on it; its memory, and work spread over its cores."""

import ctypes
import gc
import importlib
import os
import platform
import re
import sys
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits


def find_module(name: str) -> Any:
    """Returns a module of the standard library, None where this system has none: Windows lacks `fcntl`, `resource`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


resource = find_module("resource")


def spell_install(packages: str, prefix: Path = Path(sys.prefix)) -> str:
    """Returns the command that puts packages beside edgekit, which pip, pipx or `uv tool` installed."""
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx inject {prefix.name} {packages}"
    receipt = prefix / "uv-receipt.toml"
    if not receipt.is_file():
        return f"pip install {packages}"
    # uv makes the environment anew: what was put beside edgekit before is named again.
    own, *beside = tomllib.loads(receipt.read_text())["tool"]["requirements"]
    wanted = [*(f"{each['name']}{each.get('specifier', '')}" for each in beside), *packages.split()]
    return f"uv tool install {own.get('path', own['name'])} " + " ".join(f"--with {each}" for each in wanted)


_CPU_INFO = Path("/proc/cpuinfo")
# Each piece of work at a time needs memory of its own: chosen by hand.
_MOST_AT_ONCE = 4

VNNI = re.compile(r"\b(avx512_?vnni|avx_vnni)\b")
"""Found in the flags of an x86 CPU that multiplies 8 bits into 32."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def describe_machine() -> dict[str, str]:
    """Returns the operating system, the processor and its cores, and Python's version; no name of host or user."""
    lines = _CPU_INFO.read_text(errors="replace").splitlines() if _CPU_INFO.is_file() else []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cores": str(os.cpu_count() or 1),
        "cpu": found or platform.processor() or "unknown",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def read_cpu_flags() -> str:
    """Returns the flags of this machine's x86 CPU, "" where there are none."""
    lines = _CPU_INFO.read_text(errors="replace").splitlines() if _CPU_INFO.is_file() else []
    return next((line for line in lines if line.startswith("flags")), "")


def peak_bytes(usage: Any) -> int:
    """Returns the peak of resident memory: the system counts bytes on macOS, kibibytes on Linux (getrusage(2))."""
    peak: int = usage.ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def own_peak_bytes(*, with_child: bool = False) -> int:
    """Returns the peak memory of this process, also with that of its largest child; 0 where the system does not say."""
    if resource is None:
        return 0
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN) if with_child else (resource.RUSAGE_SELF,)
    return sum(peak_bytes(resource.getrusage(one)) for one in who)


def count_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_physical_cores() -> int:
    """Returns how many cores this process may use, those that share an execution unit counted once (hyper-threads)."""
    if not hasattr(os, "sched_getaffinity"):
        return count_cores()
    return len({_read_topology(cpu) for cpu in os.sched_getaffinity(0)})


def _read_topology(cpu: int) -> tuple[str, str]:
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (folder / "physical_package_id").read_text(), (folder / "core_id").read_text()
    except OSError:
        # A system that does not tell: each is taken for a core of its own.
        return "", str(cpu)


def single_blas_thread() -> AbstractContextManager[object]:
    """Returns a context in which numpy's products of matrices take one thread each.

    Those of OpenBLAS wait for each other in a loop, which beside other threads costs ten times the work itself; and
    what one thread sums up does not depend on the number of cores.
    """
    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], at_once: int | None = None
) -> Iterator[tuple[Item, Result]]:
    """Yields each item with its result, in order; `at_once` are worked on at a time, else as many as there are cores.

    Threads serve what leaves Python, such as a run of ONNX Runtime. Items are read as they are needed.

    Raises:
        Exception: whatever reading an item or the function raises, after the results of the items before.
    """
    at_once = min(count_cores(), _MOST_AT_ONCE) if at_once is None else at_once
    if at_once == 1:
        yield from ((item, function(item)) for item in items)
        return
    ahead: deque[tuple[Item, Future[Result]]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            yield from _run_ahead(pool, function, items, at_once, ahead)
        finally:
            for _, future in ahead:
                future.cancel()


def release_memory() -> None:
    """Gives memory that is free again back to the system, where the C library can (`malloc_trim` of glibc)."""
    gc.collect()
    # Windows opens no library without a name.
    trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _run_ahead(
    pool: ThreadPoolExecutor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    at_once: int,
    ahead: deque[tuple[Item, Future[Result]]],
) -> Iterator[tuple[Item, Result]]:
    source, failure = iter(items), None
    while True:
        try:
            item = next(source)
        except StopIteration:
            break
        except Exception as error:  # noqa: BLE001 # raised below, in its turn
            failure = error
            break
        ahead.append((item, pool.submit(function, item)))
        if len(ahead) > at_once:
            yield _take_first(ahead)
    while ahead:
        yield _take_first(ahead)
    if failure is not None:
        raise failure


def _take_first(ahead: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    # In a frame of its own: a generator that waits would hold each result until it gives the next.
    item, future = ahead.popleft()
    return item, future.result()
