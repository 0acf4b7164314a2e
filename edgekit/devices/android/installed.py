"""Reads ONNX Runtime's archive for Android (`.aar`) and its libraries, and installs it.

The archive is the pinned one, or one that the user names. For each library, a program that runs it is built from
edgekit's runner and a stand-in for Android.
"""

import re
import struct
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from edgekit._files import digest_file
from edgekit.app_runtime import AppRuntime, NativeLibrary
from edgekit.devices.local.runner import find_sources
from edgekit.devices.release import Loader, Release, fetch_members, find_compiler, write_member
from edgekit.errors import DeviceError, UsageError, reraised
from edgekit.machine import spell_install
from edgekit.progress import Progress
from edgekit.serialize import fill
from edgekit.target import read_version

ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
MAX_BYTES = 1 << 30

_LOAD, _DYNAMIC = 1, 2
_STRTAB, _SYMTAB, _STRSZ, _GNU_HASH = 5, 6, 10, 0x6FFFFEF5
_WEAK = 2
_SYMBOL = struct.Struct("<IBBHQQ")


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library: its machine as `uname -m` names it, its imports, and the names in its tables.

    `imports` are the symbols without which it does not load, sorted. `words` are all names in its symbol and version
    tables.
    """

    machine: str
    imports: tuple[str, ...]
    words: frozenset[str]


def read_library(path: Path) -> Library:
    """Reads the machine, imports and names of a library.

    Raises:
        DeviceError: it is no 64-bit ELF library, or is truncated.
    """
    data = path.read_bytes()
    # ELF class 2 is 64-bit, data encoding 1 is little-endian; the offsets below are those of Elf64_Ehdr, Elf64_Phdr and
    # Elf64_Sym.
    if data[:6] != b"\x7fELF\x02\x01":
        raise DeviceError(f"'{path.name}' is no 64-bit ELF library", hint="give ONNX Runtime's archive for Android")
    damaged = DeviceError(f"'{path.name}' is cut off or damaged", hint="fetch it again")
    with reraised((struct.error, LookupError, ValueError), damaged):
        return _read(data)


def _read(data: bytes) -> Library:
    (machine,) = struct.unpack_from("<H", data, 18)
    headers = _read_headers(data)
    loads = [header for header in headers if header[0] == _LOAD]
    if any(offset + held > len(data) for _, _, offset, _, _, held, _, _ in loads):
        raise ValueError("a segment lies behind the end")
    dynamic = next(header for header in headers if header[0] == _DYNAMIC)
    tags = dict(struct.iter_unpack("<QQ", data[dynamic[2] : dynamic[2] + dynamic[5]]))
    names_at = _file_offset(loads, tags[_STRTAB])
    names = data[names_at : names_at + tags[_STRSZ]]
    # The undefined symbols precede the defined ones: the GNU hash table says where those start.
    _, first = struct.unpack_from("<II", data, _file_offset(loads, tags[_GNU_HASH]))
    symbols, imports = _file_offset(loads, tags[_SYMTAB]), list[str]()
    for index in range(1, first):
        name, info, _, section, _, _ = _SYMBOL.unpack_from(data, symbols + index * _SYMBOL.size)
        # Section 0 is SHN_UNDEF. A weak symbol may stay undefined: the loader sets it to zero.
        if section == 0 and info >> 4 != _WEAK:
            imports.append(names[name : names.index(b"\0", name)].decode())
    kind = ELF_MACHINES.get(machine, f"machine {machine}")
    words = frozenset(word.decode(errors="replace") for word in names.split(b"\0"))
    return Library(machine=kind, imports=tuple(sorted(imports)), words=words)


def _read_headers(data: bytes) -> list[tuple[int, ...]]:
    """Returns the program headers of a little-endian ELF file of 32 or 64 bits."""
    wide = data[4] == 2
    # e_phoff, and e_phentsize with e_phnum, of Elf32_Ehdr and Elf64_Ehdr.
    (start,) = struct.unpack_from("<Q" if wide else "<I", data, 32 if wide else 28)
    size, count = struct.unpack_from("<HH", data, 54 if wide else 42)
    return [struct.unpack_from("<IIQQQQQQ" if wide else "<8I", data, start + size * at) for at in range(count)]


def _file_offset(loads: list[tuple[int, ...]], address: int) -> int:
    for _, _, offset, start, _, held, _, _ in loads:
        if start <= address < start + held:
            return address - start + offset
    raise LookupError(address)


LIBRARY = "libonnxruntime.so"
MACHINES = {"arm64-v8a": "aarch64", "x86_64": "x86_64"}
"""The machine of each ABI that can run here."""
OLDEST = (1, 17)
"""The oldest ONNX Runtime whose API edgekit's runner supports."""

_MEMBER = "package/Plugins/Android/onnxruntime.aar"
_KEPT = re.compile(rf"classes\.jar|headers/[\w.]+\.(?:h|inc)|jni/(?:{'|'.join(MACHINES)})/libonnxruntime4j_jni\.so")
_NATIVE = re.compile(r"jni/([\w-]+)/([\w.+-]+\.so)")
# The ELF header and the program headers are at the beginning of a file.
_ELF_HEADERS_BYTES = 1 << 13

_VERSION = re.compile(r"VERS_(\d+)\.(\d+)\.(\d+)$")
_PROVIDERS = {
    "NnapiExecutionProvider": b"OrtSessionOptionsAppendExecutionProvider_Nnapi\0",
    "XnnpackExecutionProvider": b"XnnpackExecutionProvider\0",
    "WebGpuExecutionProvider": b"WebGpuExecutionProvider\0",
}


def list_native_libraries(archive: Path) -> tuple[NativeLibrary, ...]:
    """Returns every shared library of an archive, for each ABI, with the smallest alignment of its loaded segments.

    Raises:
        DeviceError: one is no little-endian ELF file, or is truncated.
    """
    found: list[NativeLibrary] = []
    with zipfile.ZipFile(archive) as file:
        for match in filter(None, map(_NATIVE.fullmatch, sorted(file.namelist()))):
            with file.open(match[0]) as member:
                data = member.read(_ELF_HEADERS_BYTES)
            if data[:6] not in {b"\x7fELF\x01\x01", b"\x7fELF\x02\x01"}:
                raise DeviceError(f"'{match[0]}' of '{archive}' is damaged: no ELF file", hint="fetch it again")
            cut_off = DeviceError(f"'{match[0]}' of '{archive}' is damaged: cut off", hint="fetch it again")
            with reraised(struct.error, cut_off):
                # p_align is the last field of both program headers.
                alignments = [header[7] for header in _read_headers(data) if header[0] == _LOAD]
            found.append(NativeLibrary(abi=match[1], name=match[2], alignment=min(alignments, default=0)))
    return tuple(found)


def unpack_archive(given: Path | None, folder: Path, work: Path, progress: Progress) -> Release:
    """Unpacks the libraries of an archive for the ABIs that can run here, each into `folder/ABI`.

    The archive's Java classes, their JNI library and the headers are unpacked into `folder` too. Without an archive the
    pinned one is fetched into the folder `work`.

    Raises:
        DeviceError: the archive cannot be fetched or is damaged, or has no library of an ONNX Runtime that can run
            here.
        UsageError: there is no such file.
        OutputError: a folder cannot be written.
    """
    archive = given
    if archive is None:
        progress("fetching ONNX Runtime for Android with npm: 150 MB")
        (archive,) = fetch_members(work, {_MEMBER: LOADER.pinned_sha256}, instead=LOADER.option)
    if not archive.is_file():
        raise UsageError(f"there is no file '{archive}'", hint="--library onnxruntime-android-VERSION.aar")
    damage = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
    damaged = DeviceError(f"'{archive}' is no whole .aar", hint="fetch it again")
    with reraised(damage, damaged, quote=True), zipfile.ZipFile(archive) as file:
        sizes = {info.filename: info.file_size for info in file.infolist()}
        if sum(sizes.values()) > MAX_BYTES:
            raise DeviceError(f"'{archive}' unpacks to more than a GiB", hint="give ONNX Runtime's own archive")
        if not (found := [abi for abi in MACHINES if f"jni/{abi}/{LIBRARY}" in sizes]):
            libraries = (name.split("/") for name in sizes if re.fullmatch(rf"jni/.*/{LIBRARY}", name))
            has = ", ".join(sorted(words[1] for words in libraries))
            message = f"'{archive}' holds no {LIBRARY} for {' or '.join(MACHINES)}{f', only for {has}' * bool(has)}"
            hint = "give ONNX Runtime's archive for Android, onnxruntime-android-VERSION.aar"
            raise DeviceError(message, hint=hint)
        kept = {name: folder / name.removeprefix("jni/") for name in sizes if _KEPT.fullmatch(name)}
        kept |= {f"jni/{abi}/{LIBRARY}": folder / abi / LIBRARY for abi in found}
        for name, path in kept.items():
            with file.open(name) as member:
                write_member(member, path)
    imports, version = dict[str, tuple[str, ...]](), ""
    for abi in found:
        elf = read_library(folder / abi / LIBRARY)
        where = f"the {abi} library of '{archive.name}'"
        if elf.machine != MACHINES[abi]:
            raise DeviceError(f"{where} is for {elf.machine}", hint="give ONNX Runtime's own archive")
        versions = [match for word in elf.words if (match := _VERSION.match(word))]
        if "OrtGetApiBase" not in elf.words or len(versions) != 1:
            raise DeviceError(f"{where} is no ONNX Runtime", hint="give ONNX Runtime's own archive")
        version = ".".join(versions[0].groups())
        if read_version(version) < OLDEST:
            hint = f"{OLDEST[0]}.{OLDEST[1]} is the oldest"
            raise DeviceError(f"'{archive.name}' is ONNX Runtime {version}", hint=hint)
        imports[abi] = elf.imports
    data = (folder / found[0] / LIBRARY).read_bytes()
    return Release(
        archive=archive.name,
        sha256=digest_file(archive),
        version=version,
        providers=tuple(provider for provider, trace in _PROVIDERS.items() if trace in data),
        imports=imports,
        libraries=list_native_libraries(archive),
    )


_DEFINED = re.compile(r"^[\w ]*?[ *](?:bionic_(\w+)|(ANeuralNetworks\w+))(?:\(|\[| =)", re.MULTILINE)


def list_stand_ins() -> dict[str, str]:
    """Returns the stand-ins that the sources define for Android's functions: symbols by Android's names."""
    stand_ins: dict[str, str] = {}
    for source in sorted(find_sources("android").glob("*.c")):
        for bionic, neural in _DEFINED.findall(source.read_text()):
            stand_ins[bionic or neural] = f"bionic_{bionic}" if bionic else neural
    return stand_ins


def map_imports(imports: Collection[str]) -> dict[str, str]:
    """Returns the symbol for each import: the stand-in if there is one, else the C library's.

    NNAPI's functions are added, because the library looks them up by name at run time.
    """
    stand_ins = list_stand_ins()
    found_by_name = {name for name in stand_ins if name.startswith(("ANeuralNetworks", "ASharedMemory"))}
    return {name: stand_ins.get(name, name) for name in {*imports, *found_by_name}}


LOADER = Loader(
    system="android",
    title="Android",
    device="android",
    machines=MACHINES,
    find_compiler=find_compiler,
    needs={
        "arm64-v8a": f"apt-get install g++-aarch64-linux-gnu, or {spell_install('ziglang')}",
        "x86_64": f"apt-get install g++, or {spell_install('ziglang')}",
    },
    library=LIBRARY,
    option="--library FILE.aar",
    unpack=unpack_archive,
    pinned_sha256="98cddbac92640b4a6af72a03c42e0491851f366d3da66bbaeb5dd66310946cf2",
    header="imports.h",
    map_imports=map_imports,
    # The runner reports CPU features: it must read those of the emulated phone, like the library.
    runner_flags=("-Dgetauxval=bionic_getauxval",),
)


def find_app_runtime() -> AppRuntime | None:
    """Returns the installed archive as an app ships it, or None."""
    if (installed := LOADER.find_installed()) is None:
        return None
    return fill(AppRuntime, installed, classes=LOADER.folder / "classes.jar")
