"""Compilers for static programs of the two 64-bit machines: the system's, else that of the wheel ziglang."""

import importlib.util
import platform
import shutil
import sys

import msgspec


class Compiler(msgspec.Struct, frozen=True, kw_only=True):
    """A C and a C++ compiler for one machine, as beginnings of commands."""

    machine: str
    c: tuple[str, ...]
    cpp: tuple[str, ...]


def find_compiler(machine: str) -> Compiler | None:
    """Returns a compiler for `x86_64` or `aarch64`, or None.

    The system's comes first: zig compiles its C++ library at first use, which takes minutes.
    """
    prefix = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    c, cpp = shutil.which(f"{prefix}gcc"), shutil.which(f"{prefix}g++")
    if c is not None and cpp is not None:
        return Compiler(machine=machine, c=(c,), cpp=(cpp,))
    return find_zig(machine)


def find_zig(machine: str) -> Compiler | None:
    """Returns the compilers of the wheel ziglang for `x86_64` or `aarch64`, which have libc++ and musl, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    zig = (sys.executable, "-m", "ziglang")
    target = ("-target", f"{machine}-linux-musl")
    return Compiler(machine=machine, c=(*zig, "cc", *target), cpp=(*zig, "c++", *target))
