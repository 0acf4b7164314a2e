"""Compilers for static programs of the two 64-bit machines: the system's, else that of the wheel ziglang."""

import importlib.util
import platform
import shutil
import sys
from collections.abc import Mapping

import msgspec

from edgekit._proc import run_process

_VERSION_TIMEOUT_S = 60.0


class Compiler(msgspec.Struct, frozen=True, kw_only=True):
    """A C and a C++ compiler for one machine, as beginnings of commands; `version` is the command that tells it."""

    name: str
    machine: str
    c: tuple[str, ...]
    cpp: tuple[str, ...]
    version: tuple[str, ...]

    def describe(self) -> str:
        """Returns the name and the version, for example "zig 0.17.1": what another compiler would not say.

        Raises:
            DeviceError: the compiler cannot be started.
        """
        said = run_process(self.version, timeout_s=_VERSION_TIMEOUT_S).stdout.split("\n", 1)[0]
        return f"{self.name} {said.strip()}"


def list_compilers(machine: str) -> tuple[Compiler, ...]:
    """Returns the compilers for `x86_64` or `aarch64` that are here, the one to be used first.

    The system's comes first: zig compiles its C++ library at first use, which takes minutes.
    """
    return tuple(found for found in (_find_gcc(machine), find_zig(machine)) if found is not None)


def find_compiler(machine: str) -> Compiler | None:
    """Returns the compiler to be used for `x86_64` or `aarch64`, or None."""
    return next(iter(list_compilers(machine)), None)


def _find_gcc(machine: str) -> Compiler | None:
    prefix = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    c, cpp = shutil.which(f"{prefix}gcc"), shutil.which(f"{prefix}g++")
    if c is None or cpp is None:
        return None
    return Compiler(name="gcc", machine=machine, c=(c,), cpp=(cpp,), version=(c, "--version"))


def find_zig(machine: str) -> Compiler | None:
    """Returns the compilers of the wheel ziglang for `x86_64` or `aarch64`, which have libc++ and musl, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    zig = (sys.executable, "-m", "ziglang")
    target = ("-target", f"{machine}-linux-musl")
    return Compiler(
        name="zig", machine=machine, c=(*zig, "cc", *target), cpp=(*zig, "c++", *target), version=(*zig, "version")
    )


def is_made_by(made: Mapping[str, str], found: Mapping[str, Compiler | None]) -> bool:
    """Returns True if the compilers that would be used now are those that made a program for each key.

    A compiler that is no longer here leaves what it made as it is.

    Raises:
        DeviceError: a compiler cannot be started.
    """
    return all(compiler is None or made.get(key) == compiler.describe() for key, compiler in found.items())
