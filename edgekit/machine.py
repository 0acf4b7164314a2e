"""What this machine is, for reports whose figures depend on it, and its memory."""

import ctypes
import gc
import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any


def find_module(name: str) -> Any:
    """Returns a module of the standard library, None where this system has none: Windows lacks `fcntl`, `resource`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


resource = find_module("resource")

_CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, str]:
    """Returns the operating system, the processor and its cores, and Python's version; no name of host or user."""
    return {
        "cores": str(os.cpu_count() or 1),
        "cpu": _name_cpu(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


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


def release_memory() -> None:
    """Gives memory that is free again back to the system, where the C library can (`malloc_trim` of glibc)."""
    gc.collect()
    # Windows opens no library without a name.
    trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _name_cpu() -> str:
    lines = _CPU_INFO.read_text(errors="replace").splitlines() if _CPU_INFO.is_file() else []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or "unknown"
