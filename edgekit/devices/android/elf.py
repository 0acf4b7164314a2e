"""What a shared library of a 64-bit machine says of itself, without running it.

The tables are found through the dynamic section, as a loader finds them: https://refspecs.linuxfoundation.org/elf/
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgekit._files import open_regular
from edgekit.errors import DeviceError

MACHINES = {62: "x86_64", 183: "aarch64"}
MAX_BYTES = 1 << 30

_LOAD, _DYNAMIC = 1, 2
_STRTAB, _SYMTAB, _STRSZ, _GNU_HASH = 5, 6, 10, 0x6FFFFEF5
_WEAK = 2
_SYMBOL = struct.Struct("<IBBHQQ")
_HEADER = struct.Struct("<IIQQQQQQ")


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library: its machine as `uname -m` names it, what it must find elsewhere, and the words of its tables.

    `imports` are the names without which it does not load, sorted. `words` are the names that its symbol and version
    tables hold.
    """

    machine: str
    imports: tuple[str, ...]
    words: frozenset[str]


def read_library(path: Path) -> Library:
    """Returns what a library says of itself.

    Raises:
        DeviceError: it is no such library, or is cut off.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES)
    except OSError as error:
        raise DeviceError(f"cannot read '{path}': {error.strerror}", hint="give a libonnxruntime.so") from error
    # Class 2 is 64-bit, data 1 little-endian; offsets below are those of Elf64_Ehdr, Elf64_Phdr and Elf64_Sym.
    if data[:6] != b"\x7fELF\x02\x01":
        raise DeviceError(f"'{path.name}' is no 64-bit ELF library", hint="give ONNX Runtime's archive for Android")
    try:
        return _read(data)
    except (struct.error, LookupError, ValueError) as error:
        raise DeviceError(f"'{path.name}' is cut off or damaged", hint="fetch it again") from error


def _read(data: bytes) -> Library:
    (machine,) = struct.unpack_from("<H", data, 18)
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [_HEADER.unpack_from(data, start + size * index) for index in range(count)]
    loads = [header for header in headers if header[0] == _LOAD]
    if any(offset + held > len(data) for _, _, offset, _, _, held, _, _ in loads):
        raise ValueError("a segment lies behind the end")
    dynamic = next(header for header in headers if header[0] == _DYNAMIC)
    tags = dict(struct.iter_unpack("<QQ", data[dynamic[2] : dynamic[2] + dynamic[5]]))
    names_at = _file_offset(loads, tags[_STRTAB])
    names = data[names_at : names_at + tags[_STRSZ]]
    return Library(
        machine=MACHINES.get(machine, f"machine {machine}"),
        imports=tuple(sorted(_imports(data, loads, tags, names))),
        words=frozenset(word.decode(errors="replace") for word in names.split(b"\0")),
    )


def read_alignment(data: bytes) -> int:
    """Returns the least alignment of the segments that a library of 32 or 64 bits maps, in bytes.

    Raises:
        ValueError: it is no ELF file of a little-endian machine, or is cut off.
    """
    if data[:4] != b"\x7fELF" or data[4:6] not in {b"\x01\x01", b"\x02\x01"}:
        raise ValueError("no ELF file")
    wide = data[4] == 2
    # e_phoff, and e_phentsize with e_phnum, of Elf32_Ehdr and Elf64_Ehdr; p_align is last in both program headers.
    try:
        (start,) = struct.unpack_from("<Q" if wide else "<I", data, 32 if wide else 28)
        size, count = struct.unpack_from("<HH", data, 54 if wide else 42)
        headers = [struct.unpack_from("<IIQQQQQQ" if wide else "<8I", data, start + size * at) for at in range(count)]
    except struct.error as error:
        raise ValueError("cut off") from error
    return min((header[7] for header in headers if header[0] == _LOAD), default=0)


def _imports(data: bytes, loads: list[tuple[int, ...]], tags: dict[int, int], names: bytes) -> Iterator[str]:
    """Yields what is not defined: GNU's hash table holds what is, and starts behind the last that is not."""
    _, first = struct.unpack_from("<II", data, _file_offset(loads, tags[_GNU_HASH]))
    symbols = _file_offset(loads, tags[_SYMTAB])
    for index in range(1, first):
        name, info, _, section, _, _ = _SYMBOL.unpack_from(data, symbols + index * _SYMBOL.size)
        # SHN_UNDEF; a weak symbol may stay undefined, and the loader sets it to zero.
        if section == 0 and info >> 4 != _WEAK:
            yield names[name : names.index(b"\0", name)].decode()


def _file_offset(loads: list[tuple[int, ...]], address: int) -> int:
    for _, _, offset, start, _, held, _, _ in loads:
        if start <= address < start + held:
            return address - start + offset
    raise LookupError(address)
