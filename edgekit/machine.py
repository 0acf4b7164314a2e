"""This machine: its description for reports, its memory, the cache of its user, and work in parallel on its cores."""

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
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from threadpoolctl import threadpool_limits


def find_module(name: str) -> Any:
    """Returns a module of the standard library, None if this system lacks it: Windows lacks `fcntl` and `resource`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


resource = find_module("resource")


def spell_install(packages: str, prefix: Path = Path(sys.prefix)) -> str:
    """Returns the command that installs packages into edgekit's environment, which pip, pipx or `uv tool` made."""
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx inject {prefix.name} {packages}"
    receipt = prefix / "uv-receipt.toml"
    if not receipt.is_file():
        return f"pip install {packages}"
    # uv makes the environment anew, so that packages added earlier must be named again.
    own, *added = tomllib.loads(receipt.read_text())["tool"]["requirements"]
    wanted = [*(f"{each['name']}{each.get('specifier', '')}" for each in added), *packages.split()]
    return f"uv tool install {own.get('path', own['name'])} " + " ".join(f"--with {each}" for each in wanted)


_CPU_INFO = Path("/proc/cpuinfo")
MOST_AT_ONCE = 4
"""Chosen by hand: each concurrent piece of work needs memory of its own."""

_VNNI = re.compile(r"\b(avx512_?vnni|avx_vnni)\b")

Item = TypeVar("Item")
Result = TypeVar("Result")


def cache_folder() -> Path:
    """Returns `$EDGEKIT_CACHE`, or `edgekit` below `$XDG_CACHE_HOME` or `~/.cache`."""
    if folder := os.environ.get("EDGEKIT_CACHE", ""):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache").absolute() / "edgekit"


def describe_machine() -> dict[str, str]:
    """Returns the operating system, the processor, its cores and Python's version, but no host or user name."""
    return {
        "cores": str(os.cpu_count() or 1),
        "cpu": _read_cpu("model name").partition(":")[2].strip() or platform.processor() or "unknown",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


@cache
def read_cpu_flags() -> str:
    """Returns the flags of this machine's x86 CPU, "" where there are none."""
    return _read_cpu("flags")


def host_cpu() -> Literal["arm", "x64"]:
    """Returns the kind of this machine's CPU, whose kernels a file in ORT format is for."""
    return "arm" if platform.machine().lower() in {"arm64", "aarch64"} else "x64"


def has_vnni() -> bool:
    """Returns True for an x86 CPU with VNNI: instructions that multiply 8-bit values and accumulate in 32 bits."""
    return _VNNI.search(read_cpu_flags()) is not None


def may_saturate() -> bool:
    """Returns True for an x86 CPU that is not known to have VNNI.

    ONNX Runtime then adds pairs of u8 x s8 products in 16 bits, which saturate (VPMADDUBSW).
    """
    return platform.machine().lower() in {"x86_64", "amd64"} and not has_vnni()


def _read_cpu(begin: str) -> str:
    """Returns the first line of /proc/cpuinfo that starts with `begin`, "" without one."""
    lines = _CPU_INFO.read_text(errors="replace").splitlines() if _CPU_INFO.is_file() else []
    return next((line for line in lines if line.startswith(begin)), "")


def peak_bytes(usage: Any) -> int:
    """Returns the peak resident memory in bytes; `ru_maxrss` counts bytes on macOS, KiB on Linux (getrusage(2))."""
    peak: int = usage.ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def own_peak_bytes() -> int:
    """Returns the peak memory of this process, plus that of its largest child; 0 if the system does not tell."""
    if resource is None:
        return 0
    return sum(peak_bytes(resource.getrusage(who)) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def count_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_physical_cores() -> int:
    """Returns how many physical cores this process may use: hyper-threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return count_cores()
    return len({_read_topology(cpu) for cpu in os.sched_getaffinity(0)})


def _read_topology(cpu: int) -> tuple[str, str]:
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (folder / "physical_package_id").read_text(), (folder / "core_id").read_text()
    except OSError:
        # The system does not tell the topology: each logical core counts as a physical one.
        return "", str(cpu)


def single_blas_thread() -> AbstractContextManager[object]:
    """Returns a context in which each matrix product of numpy uses one thread.

    OpenBLAS's threads spin while they wait for each other, which costs ten times the work itself if other threads run
    too. Besides, with one thread the order of sums, and so the result, does not depend on the number of cores.
    """
    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], at_once: int | None = None
) -> Iterator[tuple[Item, Result]]:
    """Yields each item with its result, in order; items are read lazily.

    `at_once` threads run concurrently, by default one per core, at most four. This helps functions that release
    Python's lock, such as a run of ONNX Runtime.

    Raises:
        Exception: what reading an item or the function raises, after the results of the preceding items were yielded.
    """
    at_once = min(count_cores(), MOST_AT_ONCE) if at_once is None else at_once
    if at_once == 1:
        yield from ((item, function(item)) for item in items)
        return
    ahead: deque[tuple[Item, Future[Result]]] = deque()
    source, failure = iter(items), None
    with ThreadPoolExecutor(at_once) as pool:
        try:
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
        finally:
            for _, future in ahead:
                future.cancel()
    if failure is not None:
        raise failure


def release_memory() -> None:
    """Collects garbage, and returns freed memory to the system."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Returns freed memory to the system, if the C library can (`malloc_trim` of glibc); it takes milliseconds."""
    # On Windows ctypes cannot open the process itself as a library.
    trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _take_first(ahead: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    # A function of its own: local variables of a suspended generator would keep each result alive until the next one.
    item, future = ahead.popleft()
    return item, future.result()
