import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from edgekit._files import digest_file
from edgekit._proc import run_process
from edgekit.bundle.archive import KINDS, Kind, Limits, list_files, unpack_archive, write_archive
from edgekit.bundle.checks import find_clash, find_fault
from edgekit.errors import BundleError, OutputError

ENTRIES: Mapping[str, bytes] = {
    "manifest.json": b"{}",
    "golden/inputs.npz": bytes(3000),
    "é/ü 1.onnx": b"x" * 513,
    "empty": b"",
}
LONG = "folder-with-a-long-name/" * 6 + "n" * 120
SHA256 = {
    "zip": "7ec60efea878d9adfc60803a048a3272f13d5b907a8d097fbd5e0a18878e6c75",
    "tar": "f76f5a677dbe754cbfab26202479edcb078ad62a19e8d89bc6c409a8191a1e13",
}


@pytest.mark.parametrize("kind", KINDS)
def test_unpacking_an_archive_gives_the_packed_files(tmp_path: Path, kind: Kind) -> None:
    entries = {**ENTRIES, LONG: b"long"}
    write_archive(entries, tmp_path / "a", kind)
    names = unpack_archive(tmp_path / "a", tmp_path / "out")
    assert names == tuple(sorted(entries))
    assert {name: path.read_bytes() for name, path in list_files(tmp_path / "out").items()} == entries


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_depend_on_nothing_but_the_entries(tmp_path: Path, kind: Kind) -> None:
    files: dict[str, Path | bytes] = {}
    for index, (name, data) in enumerate(sorted(ENTRIES.items(), reverse=True)):
        files[name] = path = tmp_path / f"file{index}"
        path.write_bytes(data)
        path.chmod(0o600 + index)
        os.utime(path, (index, index))
    write_archive(ENTRIES, tmp_path / "one", kind)
    write_archive(files, tmp_path / "sub" / "two", kind)
    assert digest_file(tmp_path / "one") == digest_file(tmp_path / "sub" / "two") == SHA256[kind]


@pytest.mark.parametrize("form", ["gnu", "posix", "ustar"])
def test_archives_of_other_tools_are_opened(tmp_path: Path, form: str) -> None:
    name = "short" if form == "ustar" else "long-" * 25 + "name"
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / name).write_bytes(b"x" * 700)
    argv = ["tar", f"--format={form}", "-cf", str(tmp_path / "a.tar"), "-C", str(tmp_path / "in"), "."]
    assert run_process(argv, timeout_s=60).succeeded
    assert unpack_archive(tmp_path / "a.tar", tmp_path / "out") == (f"sub/{name}",)


def test_deflated_zips_are_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("sub")
        archive.writestr("sub/a", b"abc" * 30)
    assert unpack_archive(tmp_path / "a.zip", tmp_path / "out") == ("sub/a",)


def _zip(*names: str, data: bytes = b"x", attributes: int = 0, kind: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name)
            entry.external_attr, entry.compress_type = attributes << 16, kind
            archive.writestr(entry, data)
    return buffer.getvalue()


def _tar(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, len(data)
    for key, value in fields.items():
        setattr(entry, key, value)
    padding = bytes(-len(data) % tarfile.BLOCKSIZE)
    return entry.tobuf(tarfile.GNU_FORMAT) + data + padding


def _change(data: bytes, change: Callable[[bytearray], None]) -> bytes:
    changed = bytearray(data)
    change(changed)
    return bytes(changed)


def _encrypt(data: bytearray) -> None:
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1


def _grow(data: bytearray) -> None:
    place = data.index(b"PK\x01\x02") + 24
    data[place : place + 4] = (1 << 20).to_bytes(4, "little")


def _damage(data: bytearray) -> None:
    data[data.index(b"xxxx")] ^= 1


END = bytes(2 * tarfile.BLOCKSIZE)
PAX = b"30 GNU.sparse.realsize=100000\n"
BAD = {
    "climbs": (_zip("../x"), "climbs"),
    "climbs inside": (_zip("a/../../x"), "climbs"),
    "absolute": (_zip("/etc/x"), "absolute"),
    "drive": (_zip("C:/x"), "not allowed everywhere"),
    "backslash": (_zip("a\\..\\x"), "not allowed everywhere"),
    "control": (_zip("a\nb"), "not allowed everywhere"),
    "right to left": (_zip("a\u202egpj.exe"), "not allowed everywhere"),
    "device name": (_zip("golden/NUL.npz"), "device on Windows"),
    "final dot": (_zip("manifest.json."), "ends in a dot"),
    "duplicate": (_zip("one", "two").replace(b"two", b"one"), "one file on some systems"),
    "case": (_zip("Model.onnx", "model.ONNX"), "one file on some systems"),
    "unicode form": (_zip("\u00e9", "e\u0301"), "one file on some systems"),
    "file as folder": (_zip("a", "a/b"), "one file on some systems"),
    "link in zip": (_zip("a", attributes=stat.S_IFLNK | 0o777), "link or a device"),
    "device in zip": (_zip("a", attributes=stat.S_IFCHR | 0o777), "link or a device"),
    "bzip2": (_zip("a", kind=zipfile.ZIP_BZIP2), "neither stored nor deflated"),
    "bomb": (_zip("a", data=bytes(1 << 20), kind=zipfile.ZIP_DEFLATED), "would unpack to more"),
    "many": (_zip(*(f"f{index}" for index in range(101))), "would unpack to more than 100 files"),
    "encrypted": (_change(_zip("a"), _encrypt), "encrypted"),
    "longer than it is": (_change(_zip("a", data=b"x" * 30_000), _grow), "damaged"),
    "checksum": (_change(_zip("a", data=b"x" * 8), _damage), "damaged: Bad CRC"),
    "comment": (_zip("a")[:-2] + b"\x01\x00c", "comment"),
    "cut off zip": (_zip("a", data=bytes(999))[:-30], "cut off"),
    "folder that climbs": (_zip("../d/"), "no safe folder|folder"),
    "link in tar": (_tar("a", tarfile.SYMTYPE, linkname="/etc/passwd") + END, "link, a device"),
    "hard link": (_tar("a", tarfile.LNKTYPE, linkname="/etc/passwd") + END, "link, a device"),
    "device in tar": (_tar("a", tarfile.BLKTYPE) + END, "link, a device"),
    "fifo": (_tar("a", tarfile.FIFOTYPE) + END, "link, a device"),
    "sparse": (_tar("a", tarfile.GNUTYPE_SPARSE) + END, "link, a device"),
    "posix sparse": (_tar("p", tarfile.XHDTYPE, PAX) + _tar("a") + END, "GNU.sparse"),
    "odd header": (_tar("p", tarfile.XHDTYPE, b"99999 path=x\n") + _tar("a") + END, "malformed"),
    "cut off header": (_tar("p", tarfile.XHDTYPE, b"x") + END, "damaged"),
    "absolute in tar": (_tar("/etc/x") + END, "absolute"),
    "long name climbs": (_tar("l", tarfile.GNUTYPE_LONGNAME, b"../" * 10 + b"x\0") + _tar("a") + END, "climbs"),
    "cut off tar": (_tar("a", data=b"x" * 600)[:600], "cut off"),
    "no end": (_tar("a"), "damaged"),
    "tar checksum": (_change(_tar("a") + END, lambda data: data.__setitem__(0, 98)), "bad checksum"),
    "no archive": (b"nothing", "no zip and no tar"),
    "empty": (b"", "no zip and no tar"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_archive_is_refused_whole(tmp_path: Path, name: str) -> None:
    data, message = BAD[name]
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a"
    path.write_bytes(data)
    with pytest.raises(BundleError, match=message) as caught:
        unpack_archive(path, tmp_path / "in" / "out", Limits(files=100))
    assert "\n" not in caught.value.message
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "in", path]


@pytest.mark.parametrize("kind", KINDS)
def test_two_archives_in_one_file_are_refused(tmp_path: Path, kind: Kind) -> None:
    for name in ("one", "two"):
        write_archive({**ENTRIES, name: b""}, tmp_path / name, kind)
    (tmp_path / "both").write_bytes((tmp_path / "one").read_bytes() + (tmp_path / "two").read_bytes())
    with pytest.raises(BundleError, match="something stands"):
        unpack_archive(tmp_path / "both", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [("a", "A"), ("a/b", "a"), ("../a", "b"), ("nul", "b")])
def test_names_that_could_not_be_unpacked_are_not_packed(tmp_path: Path, names: tuple[str, ...]) -> None:
    for kind in KINDS:
        with pytest.raises(OutputError, match="archive"):
            write_archive(dict.fromkeys(names, b""), tmp_path / "a", kind)
    assert not list(tmp_path.iterdir())


def test_absent_files_and_links_are_not_packed(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot read"):
        unpack_archive(tmp_path / "a", tmp_path / "out")
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match="link"):
        list_files(tmp_path)


def test_ordinary_names_are_accepted() -> None:
    assert [name for name in (*ENTRIES, "a b (1).onnx", ".hidden", "CONSOLE", "a.nul") if find_fault(name)] == []
    assert find_clash(["a.b", "a/b", "a-b", "ab"]) is None
    assert find_clash(["a", "a-b", "a/b"]) == ("a", "a/b")
