"""What is installed of the device `ios-sim`, and installing it: a framework's object, and the program that opens it."""

import platform
import sys
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, digest_file, one_at_a_time, staged_folder, work_folder, write_file
from edgekit.devices.ios.framework import OBJECT, PINNED_SHA256, fetch_framework, open_framework, write_object
from edgekit.devices.ios.stand_in import compile_runner, ios_sources, link_runner
from edgekit.devices.local.runner import PROGRAM, runner_sources
from edgekit.devices.process.cache import cache_folder
from edgekit.devices.release.compilers import find_zig, is_made_by
from edgekit.errors import DeviceError
from edgekit.progress import Progress

_FACTS = "device.json"
_MACHINE = "x86_64"


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed: of which framework and version.

    `sources` is the digest of what its program was built from, `compiler` what built it.
    """

    framework: str
    sha256: str
    version: str
    sources: str
    compiler: str

    @property
    def is_pinned(self) -> bool:
        """True for the framework that edgekit fetches itself."""
        return self.sha256 == PINNED_SHA256

    @property
    def is_current(self) -> bool:
        """True if the compiler that is here now would build the same program."""
        return is_made_by({_MACHINE: self.compiler}, {_MACHINE: find_zig(_MACHINE)})

    @property
    def program(self) -> Path:
        """The program that opens the object."""
        return device_folder() / PROGRAM

    @property
    def library(self) -> Path:
        """ONNX Runtime's object."""
        return device_folder() / OBJECT


def device_folder() -> Path:
    """Returns where the device lies in the user's cache."""
    return cache_folder() / "ios-sim"


def find_installed() -> Installed | None:
    """Returns what is installed and was built from exactly these sources, or None."""
    try:
        facts = msgspec.json.decode((device_folder() / _FACTS).read_bytes(), type=Installed)
    except (OSError, msgspec.DecodeError):
        return None
    return facts if facts.sources == _digest_sources() else None


def explain_machine() -> str | None:
    """Returns why this machine cannot run the simulator's code, None where it can."""
    if sys.platform == "linux" and platform.machine() == _MACHINE:
        return None
    return "the simulator's code runs on x86-64 Linux only"


def install_ios(progress: Progress, framework: Path | None = None) -> Installed:
    """Installs the pinned framework, or that in the folder `framework`, and builds the program for it.

    Raises:
        DeviceError: this is no x86-64 Linux, the framework cannot be fetched, is not what it should be or imports what
            nothing stands for, there is no compiler, or it fails. Nothing half is left.
        UsageError: there is no such folder.
        OutputError: the cache cannot be written.
    """
    if reason := explain_machine():
        raise DeviceError(f"'ios-sim' cannot be installed here: {reason}", hint="use x86-64 Linux, or a Mac")
    compiler = find_zig(_MACHINE)
    if compiler is None:
        raise DeviceError("zig, which compiles the stand-in for iOS, is not installed", hint="pip install ziglang")
    with one_at_a_time(device_folder()), staged_folder(device_folder()) as staging, work_folder() as work:
        if framework is None:
            progress("fetching ONNX Runtime for the iOS simulator with npm: 150 MB")
        found = fetch_framework(work) if framework is None else open_framework(framework)
        write_object(found, staging)
        progress("compiling the stand-in for iOS with zig, which at first compiles its C++ library: minutes")
        objects = compile_runner(compiler, work / "objects")
        link_runner(compiler, objects, found.imports, staging / PROGRAM, name=found.name)
        facts = Installed(
            framework=found.name,
            sha256=found.sha256,
            version=found.version,
            sources=_digest_sources(),
            compiler=compiler.describe(),
        )
        write_file(staging / _FACTS, msgspec.json.encode(facts))
    return facts


def _digest_sources() -> str:
    files = [*runner_sources().rglob("*.cpp"), *runner_sources().rglob("*.h"), *ios_sources().iterdir()]
    return digest_bytes("\n".join(sorted(f"{path.name} {digest_file(path)}" for path in files)).encode())
