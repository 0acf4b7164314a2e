"""Runs ONNX Runtime for the iOS simulator in a process of this machine, with the Core ML provider that an app links.

The object file of a framework for Apple's systems (`.xcframework`), the pinned one or one that the user names, is
linked with stand-ins for Apple's functions into a program, which is installed once.
"""

import os
import platform
import plistlib
import re
import struct
import sys
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, write_file
from edgekit.devices.device import Device, DeviceRun, Job, Missing, require_device
from edgekit.devices.local.host import COREML, coreml_options
from edgekit.devices.process.pipes import serving
from edgekit.devices.process.run import describe_job, run_program
from edgekit.devices.release import Loader, Release, fetch_members, find_zig
from edgekit.errors import DeviceError, UsageError, reraised
from edgekit.evidence import Evidence
from edgekit.machine import spell_install
from edgekit.progress import Progress
from edgekit.target import Target

# In the C and C++ sources, the stand-in for Apple's NAME is darwin_NAME; the pattern matches uses too, which does no
# harm.
_DEFINED = re.compile(r"\bdarwin_(\w+)")

_CLASS = "OBJC_CLASS_$_"


def map_imports(imports: Collection[str]) -> dict[str, str]:
    """Returns the symbol for each import, whose name starts with Apple's underscore.

    A suffix after `$` selects a variant of a function and is dropped. All Objective-C classes become the same object,
    which ignores every message.
    """
    stand_ins, places = set[str](), dict[str, str]()
    for source in LOADER.list_sources():
        stand_ins.update(_DEFINED.findall(source.read_text()))
    for name in imports:
        plain_name = name.removeprefix("_").partition("$")[0]
        place = f"darwin_{plain_name}" if plain_name in stand_ins else plain_name
        places[name] = "apple_object" if name.removeprefix("_").startswith(_CLASS) else place
    return places


PINNED_VERSION = "1.29.0"
PINNED_NAME = "onnxruntime.xcframework"
ABI = "simulator-x86_64"
"""The only slice of the framework whose code runs here."""

_SLICE = "ios-arm64_x86_64-simulator/onnxruntime.framework"
_MEMBER = f"package/Plugins/iOS~/{PINNED_NAME}/{_SLICE}/onnxruntime"
_HINT = "give ONNX Runtime's own onnxruntime.xcframework, onnxruntime-c-VERSION.zip unpacked"
_CPU_X86_64 = 0x01000007
_FAT, _OBJECT = b"\xca\xfe\xba\xbe", b"\xcf\xfa\xed\xfe"
_ARCHIVE = b"!<arch>\n"
_MEMBER_HEAD = 60
_LC_SYMTAB = 2
_KIND_MASK, _EXTERNAL = 0x0E, 0x01
_OLDEST = (1, 24)
"""The oldest version whose sessions report which provider took which node."""


def unpack_framework(given: Path | None, folder: Path, work: Path, progress: Progress) -> Release:
    """Writes the x86-64 object file of a framework `NAME.xcframework` into `folder`.

    Without a framework the pinned one is fetched into the folder `work`.

    Raises:
        UsageError: there is no such folder.
        DeviceError: the framework cannot be fetched, or it holds no library for the simulator, one that is damaged, or
            one that is too old.
        OutputError: a folder cannot be written.
    """
    name, version = PINNED_NAME, PINNED_VERSION
    if given is None:
        progress("fetching ONNX Runtime for the iOS simulator with npm: 150 MB")
        pinned = {_MEMBER: LOADER.pinned_sha256}
        (path,) = fetch_members(work, pinned, instead="--framework onnxruntime.xcframework")
    else:
        name, path = given.name, given / _SLICE / "onnxruntime"
        if not given.is_dir():
            raise UsageError(f"there is no folder '{given}'", hint="--framework onnxruntime.xcframework")
        if not path.is_file():
            raise DeviceError(f"'{name}' holds no {_SLICE}/onnxruntime", hint=_HINT)
        silent = DeviceError(f"'{name}' does not say its version", hint=_HINT)
        with reraised((OSError, KeyError, ValueError, TypeError), silent, quote=True):
            facts = plistlib.loads((path.parent / "Info.plist").read_bytes())
            version = str(facts["CFBundleShortVersionString"])
    numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise DeviceError(f"'{name}' is ONNX Runtime {version[:40]!r}", hint=f"{_OLDEST[0]}.{_OLDEST[1]} is the oldest")
    data = path.read_bytes()
    damaged = DeviceError(f"the library of '{name}' is damaged", hint=_HINT)
    with reraised((struct.error, ValueError, IndexError), damaged, quote=True):
        found = _find_object(data)
        imports = list_imports(found)
    write_file(folder / ABI / LOADER.library, found)
    return Release(
        archive=name, sha256=digest_bytes(data), version=version, providers=(COREML,), imports={ABI: imports}
    )


def _find_object(archive: bytes) -> bytes:
    """Returns the only object file of a static library, in a universal file that of its part for x86-64.

    ONNX Runtime links all its objects into one beforehand.
    """
    if archive[:4] == _FAT:
        (count,) = struct.unpack_from(">I", archive, 4)
        parts = [struct.unpack_from(">5I", archive, 8 + 20 * index) for index in range(count)]
        offset, size = next(((part[2], part[3]) for part in parts if part[0] == _CPU_X86_64), (0, 0))
        if offset + size > len(archive):
            raise ValueError("it is cut off")
        if not size:
            raise ValueError("it has no part for x86-64")
        archive = archive[offset : offset + size]
    if archive[: len(_ARCHIVE)] != _ARCHIVE:
        raise ValueError("it is no static library")
    at, objects = len(_ARCHIVE), list[bytes]()
    while at + _MEMBER_HEAD <= len(archive):
        head, start = archive[at : at + _MEMBER_HEAD], at + _MEMBER_HEAD
        size = int(head[48:58])
        if size < 0 or start + size > len(archive):
            raise ValueError("it is cut off")
        # BSD's format stores a long name before the data, and includes it in the size.
        skipped = int(head[3:16]) if head[:3] == b"#1/" else 0
        if archive[start + skipped : start + skipped + len(_OBJECT)] == _OBJECT:
            objects.append(archive[start + skipped : start + size])
        at = start + size + size % 2
    if len(objects) != 1:
        raise ValueError(f"it has {len(objects)} objects where one was expected")
    return objects[0]


def list_imports(data: bytes) -> tuple[str, ...]:
    """Returns the undefined symbols of an object file, with the leading underscore.

    Raises:
        ValueError: it is no object for x86-64, or damaged.
    """
    cpu, kind, commands = struct.unpack_from("<4xI4xII", data)
    if (cpu, kind) != (_CPU_X86_64, 1):
        raise ValueError("its object is not for x86-64")
    at = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, at)
        if command == _LC_SYMTAB:
            break
        at += size
    else:
        raise ValueError("its object has no symbols")
    offset, count, names_at, names_size = struct.unpack_from("<4I", data, at + 8)
    names, table = data[names_at : names_at + names_size], data[offset : offset + 16 * count]
    found = {
        names[name : names.index(b"\0", name)].decode()
        for name, kind, value in struct.iter_unpack("<IB3xQ", table)
        # Undefined, external and of value 0: otherwise the value is the size of a common symbol, a variable that
        # objects share.
        if kind & _KIND_MASK == 0 and kind & _EXTERNAL and value == 0
    }
    return tuple(sorted(found))


def explain_machine() -> str | None:
    """Returns why this machine cannot run the simulator's code, None if it can."""
    if sys.platform == "linux" and platform.machine() == LOADER.machines[ABI]:
        return None
    return "the simulator's code runs on x86-64 Linux only"


LOADER = Loader(
    system="ios",
    title="iOS",
    device="ios-sim",
    machines={ABI: "x86_64"},
    find_compiler=find_zig,
    needs={ABI: spell_install("ziglang")},
    library="onnxruntime.o",
    option="--framework FOLDER",
    unpack=unpack_framework,
    pinned_sha256="7bba75ff2cae219ee24cf499bc63ed48299f4a672ac10ee6f33319bd81af96da",
    header="image.h",
    map_imports=map_imports,
    # zig enables a sanitizer by default, but Apple's code was not compiled for it.
    flags=("-fno-sanitize=undefined",),
    archive_kind="framework",
    find_obstacle=explain_machine,
)

NAME = "ios-sim"

ML_PROGRAM = "MLProgram"

_INSTALL = f"edgekit devices install {NAME}"
_COMPUTE_MODULE = "edgekit.devices.ios.compute"
_LOG = "EDGEKIT_IOS_LOG"


class IosSimulator(Device, frozen=True, kw_only=True):
    """The release library for the iOS simulator: its real Core ML provider partitions the graph and writes the models.

    If `cache` is given, the provider uses that folder as its `ModelCacheDirectory`. `model_format` is the format that
    it writes: edgekit computes ML Programs; of other formats, models are only placed and built.
    """

    targets = ("coreml",)
    name: str = NAME
    providers: frozenset[str] = frozenset({COREML})
    cache: Path | None = None
    model_format: str = ML_PROGRAM
    evidence: Evidence = Evidence.SAME_EP

    def find_versions(self) -> dict[str, str]:
        """Returns the version of the library, and the name of its framework."""
        return LOADER.find_versions()

    def for_target(self, target: Target) -> "IosSimulator":
        """Returns the device with the format that a target asks the provider for."""
        return msgspec.structs.replace(self, model_format=target.settings.get("model_format", ML_PROGRAM))

    def as_seen(self, target: Target) -> Target:
        """Returns a target with the processor of the library that runs here."""
        return msgspec.structs.replace(target, settings={**target.settings, "processor": LOADER.machines[ABI]})

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine, or that models of this format cannot be computed."""
        if missing := self._find_absent():
            return missing
        if self.model_format == ML_PROGRAM:
            return None
        reason = f"it computes ML Programs alone, not the {self.model_format} format: check --observe places it"
        # No command: nothing that could be installed computes this format here.
        return Missing(reason=reason, command=None)

    def _find_absent(self) -> Missing | None:
        if reason := explain_machine():
            return Missing(reason=reason, command=None)
        if LOADER.find_installed() is None:
            return Missing(reason="ONNX Runtime for the iOS simulator is not installed", command=_INSTALL)
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the Core ML provider, as on the iOS release of the target.

        Raises:
            DeviceError: the device is not installed, or cannot run here.
            TargetError: the target has an option that the provider does not know.
        """
        require_device(self.name, self.find_missing() if job.samples.count else self._find_absent())
        session = job.target.session
        options = coreml_options(session.platforms.get("ios", session).provider_options)
        request = describe_job(
            job,
            provider=COREML,
            provider_options=options if self.cache is None else {**options, "ModelCacheDirectory": str(self.cache)},
            runtime=str(LOADER.find_library(ABI)),
            threads=job.threads or 1,
        )
        models, pipes = work / "models", work / "pipes"
        models.mkdir(parents=True)
        # The simulator's library has telemetry on by default.
        argv = ["env", f"EDGEKIT_IOS={job.target.settings.get('ios', '17')}", "ORT_DISABLE_TELEMETRY=1"]
        argv += [f"EDGEKIT_COREML_MODELS={models}", *([f"{_LOG}=1"] if os.environ.get(_LOG) else [])]
        # Without samples, ML Programs are only built, not computed.
        argv += [f"EDGEKIT_COREML_PIPES={pipes}"] if job.samples.count else []
        argv += [str(LOADER.find_program(ABI)), "--pipe"]
        with serving(pipes, _COMPUTE_MODULE, job.timeout_s) if job.samples.count else nullcontext() as served:
            run = run_program(self, argv, job, request, work, emulates=True)
        notes, facts = run.notes, served.read_facts() if served else None
        if facts and facts.operations:
            count = sum(facts.operations.values())
            note = f"Core ML's program was written by the provider; edgekit computed its {count} operations"
            notes = (*notes, f"{note}, {facts.halves} of them in half precision")
        return msgspec.structs.replace(run, versions={**LOADER.find_versions(), **run.versions}, notes=notes)
