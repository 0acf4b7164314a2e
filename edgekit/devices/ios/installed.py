"""Installs the device `ios-sim`: the object file of a framework, and the program that runs it.

The framework for Apple's systems (`.xcframework`) is the pinned one, or one that the user names.
"""

import platform
import plistlib
import re
import struct
import sys
from collections.abc import Collection
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, write_file
from edgekit.devices.process.files import digest_sources
from edgekit.devices.release import FACTS, Installed, Loader, fetch_members, find_zig
from edgekit.errors import DeviceError, UsageError
from edgekit.machine import spell_install
from edgekit.progress import Progress

# In the C and C++ sources, the stand-in for Apple's NAME is darwin_NAME; the pattern matches uses too, which does no
# harm.
_DEFINED = re.compile(r"\bdarwin_(\w+)")
# Matches of the pattern that are structures, not stand-ins.
_NO_STAND_INS = frozenset({"stat_", "utsname_"})
_CLASS = "OBJC_CLASS_$_"


def list_stand_ins() -> frozenset[str]:
    """Returns Apple's names for which the sources define a stand-in."""
    return frozenset(name for source in LOADER.list_sources() for name in _DEFINED.findall(source.read_text()))


def place_imports(imports: Collection[str], without: Collection[str] = ()) -> dict[str, str]:
    """Returns the symbol for each import, whose name starts with Apple's underscore.

    A suffix after `$` selects a variant of a function and is dropped. All Objective-C classes become the same object,
    which ignores every message.
    """
    own, places = list_stand_ins() - set(without), dict[str, str]()
    for name in imports:
        bare = name.removeprefix("_").partition("$")[0]
        place = f"darwin_{bare}" if bare in own else bare
        places[name] = "apple_object" if name.removeprefix("_").startswith(_CLASS) else place
    return places


PINNED_VERSION = "1.29.0"
PINNED_NAME = "onnxruntime.xcframework"
ABI = "simulator-x86_64"
"""The only slice of the framework whose code runs here."""

LOADER = Loader(
    system="ios",
    title="iOS",
    device="ios-sim",
    machines={ABI: "x86_64"},
    find_compiler=find_zig,
    needs={ABI: spell_install("ziglang")},
    library="onnxruntime.o",
    pinned_sha256="7bba75ff2cae219ee24cf499bc63ed48299f4a672ac10ee6f33319bd81af96da",
    header="image.h",
    place=place_imports,
    # zig enables a sanitizer by default, but Apple's code was not compiled for it.
    flags=("-fno-sanitize=undefined",),
    archive_kind="framework",
)

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


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """The library of a framework for the simulator: `data` is its x86-64 object file, `imports` that file's imports."""

    name: str
    sha256: str
    version: str
    imports: tuple[str, ...]
    data: bytes


def open_framework(folder: Path) -> Framework:
    """Returns the framework in a folder `NAME.xcframework`.

    Raises:
        UsageError: there is no such folder.
        DeviceError: it holds no library for the simulator, one that is damaged, or one that is too old.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder '{folder}'", hint="--framework onnxruntime.xcframework")
    library = folder / _SLICE / "onnxruntime"
    if not library.is_file():
        raise DeviceError(f"'{folder.name}' holds no {_SLICE}/onnxruntime", hint=_HINT)
    try:
        facts = plistlib.loads((library.parent / "Info.plist").read_bytes())
        version = str(facts["CFBundleShortVersionString"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise DeviceError(f"'{folder.name}' does not say its version: {error}", hint=_HINT) from error
    return _read_library(library, folder.name, version)


def _read_library(path: Path, name: str, version: str) -> Framework:
    numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise DeviceError(f"'{name}' is ONNX Runtime {version[:40]!r}", hint=f"{_OLDEST[0]}.{_OLDEST[1]} is the oldest")
    data = path.read_bytes()
    try:
        found = _find_object(_find_cpu(data))
        imports = list_imports(found)
    except (struct.error, ValueError, IndexError) as error:
        raise DeviceError(f"the library of '{name}' is damaged: {error}", hint=_HINT) from error
    return Framework(name=name, sha256=digest_bytes(data), version=version, imports=imports, data=found)


def _find_cpu(data: bytes) -> bytes:
    """Returns the x86-64 part of a universal file; a file for a single CPU is returned whole."""
    if data[:4] != _FAT:
        return data
    (count,) = struct.unpack_from(">I", data, 4)
    for index in range(count):
        cpu, _, offset, size, _ = struct.unpack_from(">5I", data, 8 + 20 * index)
        if cpu == _CPU_X86_64:
            if offset + size > len(data):
                raise ValueError("it is cut off")
            return data[offset : offset + size]
    raise ValueError("it has no part for x86-64")


def _find_object(archive: bytes) -> bytes:
    """Returns the only object file of a static library; ONNX Runtime links all its objects into one beforehand."""
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


def install_ios(progress: Progress, framework: Path | None = None) -> Installed:
    """Installs the pinned framework, or that in the folder `framework`, and builds the program for it.

    Raises:
        DeviceError: this is no x86-64 Linux, the framework cannot be fetched, is not the pinned one or imports a
            function without a stand-in, there is no compiler, or it fails. No half-finished installation is left.
        UsageError: there is no such folder.
        OutputError: the cache cannot be written.
    """
    if reason := explain_machine():
        raise DeviceError(f"'ios-sim' cannot be installed here: {reason}", hint="use x86-64 Linux, or a Mac")
    if find_zig(LOADER.machines[ABI]) is None:
        raise DeviceError("zig, which compiles the stand-in for iOS, is not installed", hint=LOADER.needs[ABI])
    with LOADER.installing() as (staging, work):
        if framework is None:
            progress("fetching ONNX Runtime for the iOS simulator with npm: 150 MB")
            pinned = {_MEMBER: LOADER.pinned_sha256}
            (path,) = fetch_members(work, pinned, instead="--framework onnxruntime.xcframework")
            found = _read_library(path, PINNED_NAME, PINNED_VERSION)
        else:
            found = open_framework(framework)
        write_file(staging / ABI / LOADER.library, found.data)
        facts = Installed(
            archive=found.name,
            sha256=found.sha256,
            version=found.version,
            providers=("CoreMLExecutionProvider",),
            abis=(ABI,),
            sources=digest_sources(LOADER.system),
            compilers={ABI: LOADER.build(ABI, found.imports, staging, work, progress, name=found.name)},
        )
        write_file(staging / FACTS, msgspec.json.encode(facts))
    return facts
