"""What this machine is, for reports whose figures depend on it, and its memory."""

import ctypes
import gc
import os
import platform
import resource
import sys
from pathlib import Path

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


def peak_bytes(usage: resource.struct_rusage) -> int:
    """Returns the peak of resident memory: the system counts bytes on macOS, kibibytes on Linux (getrusage(2))."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def release_memory() -> None:
    """Gives memory that is free again back to the system, where the C library can (`malloc_trim` of glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _name_cpu() -> str:
    lines = _CPU_INFO.read_text(errors="replace").splitlines() if _CPU_INFO.is_file() else []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or "unknown"
