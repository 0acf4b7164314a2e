import io
import json
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bundle_models import PASSED, edit_json, make_contents

from edgekit._files import digest_file
from edgekit._proc import run_process
from edgekit.bundle.archive import KINDS, Kind, Limits, list_files, unpack_archive, write_archive
from edgekit.bundle.checks import find_clash, find_fault
from edgekit.bundle.folder import Bundle, open_bundle, write_bundle
from edgekit.bundle.manifest import encode_json
from edgekit.bundle.multi import (
    find_bundles,
    join_bundles,
    open_index,
    opened_any,
    opened_bundle,
    sign_bundle,
)
from edgekit.bundle.sign import make_key
from edgekit.errors import BundleError, OutputError, UsageError
from edgekit.target import find_group, load_target

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
    assert unpack_archive(tmp_path / "a", tmp_path / "out") == tuple(sorted(entries))
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
    return entry.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


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


END = bytes(2 * tarfile.BLOCKSIZE)
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
    "checksum": (_zip("a", data=b"x" * 8).replace(b"xxxx", b"yxxx", 1), "damaged: Bad CRC"),
    "comment": (_zip("a")[:-2] + b"\x01\x00c", "comment"),
    "cut off zip": (_zip("a", data=bytes(999))[:-30], "cut off"),
    "folder that climbs": (_zip("../d/"), "no safe folder|folder"),
    "link in tar": (_tar("a", tarfile.SYMTYPE, linkname="/etc/passwd") + END, "link, a device"),
    "hard link": (_tar("a", tarfile.LNKTYPE, linkname="/etc/passwd") + END, "link, a device"),
    "device in tar": (_tar("a", tarfile.BLKTYPE) + END, "link, a device"),
    "fifo": (_tar("a", tarfile.FIFOTYPE) + END, "link, a device"),
    "sparse": (_tar("a", tarfile.GNUTYPE_SPARSE) + END, "link, a device"),
    "posix sparse": (_tar("p", tarfile.XHDTYPE, b"30 GNU.sparse.realsize=100000\n") + _tar("a") + END, "GNU.sparse"),
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


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("multi")
    contents = make_contents(folder)
    made = [
        write_bundle(msgspec.structs.replace(contents, target=load_target(name)), folder / f"tiny-{name}")
        for name in find_group("all")
    ]
    (made[0].folder / "verify.json").write_text("{}")
    return made


@pytest.fixture
def folder(bundles: list[Bundle], tmp_path: Path) -> Path:
    return join_bundles(bundles, tmp_path / "multi").folder


def test_variants_are_unpacked_unchanged(bundles: list[Bundle], folder: Path, tmp_path: Path) -> None:
    multi = open_index(folder)
    for bundle in bundles:
        target = bundle.manifest.target
        out = multi.nested[target].extract(multi.folder, tmp_path / target)
        assert (out.manifest, out.sha256) == (bundle.manifest, bundle.sha256)
    stored = [path.read_bytes() for path in list_files(folder).values()]
    assert len(stored) == len(set(stored))
    assert len([data for data in stored if data == (bundles[0].folder / "golden" / "inputs.npz").read_bytes()]) == 1
    assert (folder / open_index(folder).index.variants[0].model_file).is_file()


def test_the_order_of_the_bundles_changes_no_byte(bundles: list[Bundle], folder: Path, tmp_path: Path) -> None:
    other = join_bundles(bundles[::-1], tmp_path / "other").folder
    first, second = list_files(folder), list_files(other)
    assert {name: path.read_bytes() for name, path in first.items()} == {
        name: path.read_bytes() for name, path in second.items()
    }


def test_the_only_variant_need_not_be_named(bundles: list[Bundle], tmp_path: Path) -> None:
    folder = join_bundles(bundles[:1], tmp_path / "one").folder
    with opened_bundle(folder) as bundle:
        assert bundle.sha256 == bundles[0].sha256


def test_a_package_is_no_bundle_and_is_told_which_ones_it_holds(bundles: list[Bundle], tmp_path: Path) -> None:
    name = bundles[0].folder.name
    entries = {f"bundles/{name}/{file}": path for file, path in list_files(bundles[0].folder).items()}
    write_archive({**entries, "README.md": bundles[0].folder / "README.md"}, tmp_path / "p.zip", "zip")
    with pytest.raises(BundleError, match=f"p.zip' is a package of {name} "), opened_any(tmp_path / "p.zip"):
        pass
    shutil.unpack_archive(tmp_path / "p.zip", tmp_path / "unpacked")
    with pytest.raises(BundleError, match=f"it holds bundles/{name}: name one"), opened_any(tmp_path / "unpacked"):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_variant_is_opened_from_an_archive(bundles: list[Bundle], folder: Path, tmp_path: Path, kind: str) -> None:
    entries = {f"top/{name}": path for name, path in list_files(folder).items()}
    write_archive(entries, tmp_path / "archive", "zip" if kind == "zip" else "tar")
    with opened_bundle(tmp_path / "archive", target="qnn") as bundle:
        assert bundle.sha256 in {made.sha256 for made in bundles}
    with pytest.raises(UsageError, match=r"several targets .choose one: --target coreml or"), opened_bundle(folder):
        pass
    with pytest.raises(UsageError, match=r"no variant 'qn'.*did you mean 'qnn'"), opened_bundle(folder, target="qn"):
        pass
    with pytest.raises(UsageError, match="is for"), opened_bundle(bundles[0].folder, target="other"):
        pass


def test_one_signature_covers_every_variant(folder: Path, tmp_path: Path) -> None:
    public = make_key(tmp_path / "key")
    sign_bundle(folder, tmp_path / "key", PASSED)
    with opened_any(folder, key=public):
        pass
    for name, path in list_files(folder).items():
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        if name.endswith("verify.json"):
            continue
        with pytest.raises(BundleError), opened_any(folder, key=public):
            pass
        path.write_bytes(data)


def _edit_index(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "index.json", edit)


def _change_index(**fields: object) -> Callable[[Path], object]:
    return _edit_index(lambda raw: raw["variants"][0].update(fields))


def _drop_variants(folder: Path) -> None:
    """Leaves one variant with its folder: what it shared with the others is shared no more."""
    _edit_index(lambda raw: raw["variants"].__delitem__(slice(1, None)))(folder)
    (kept,) = json.loads((folder / "index.json").read_bytes())["variants"]
    for other in (folder / "variants").iterdir():
        if other.name != kept["target"]:
            shutil.rmtree(other)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda f: (f / "extra").touch(), "holds 'extra'", id="extra"),
        pytest.param(lambda f: shutil.rmtree(f / "shared"), "lacks the file 'shared/", id="no shared"),
        pytest.param(lambda f: (f / "variants/qnn/manifest.json").unlink(), "is missing", id="no manifest"),
        pytest.param(_change_index(folder="../x"), "no safe folder", id="folder climbs"),
        pytest.param(_change_index(target="../x", folder="variants/../x"), "no safe folder", id="target climbs"),
        pytest.param(_change_index(target="a/b", folder="variants/a/b"), "no safe folder", id="nested"),
        pytest.param(_change_index(model_file="variants/x"), "contradicts", id="other model"),
        pytest.param(_edit_index(lambda raw: next(iter(raw["shared"].values())).update(sha256="0" * 64)), "contradicts",
                     id="other digest of a shared file"),
        pytest.param(_edit_index(lambda raw: raw["shared"].clear()), "contradicts", id="nothing shared"),
        pytest.param(_edit_index(lambda raw: raw["variants"].append(raw["variants"][0])), "contradicts", id="twice"),
        pytest.param(_edit_index(lambda raw: raw["variants"].reverse()), "contradicts", id="other order"),
        pytest.param(_edit_index(lambda raw: raw["variants"].clear()), "contradicts", id="no variant"),
        pytest.param(_drop_variants, "contradicts", id="a variant less"),
        pytest.param(_change_index(more=1), "malformed", id="unknown key"),
        pytest.param(lambda f: (f / "index.json").write_bytes(b"[" * 10_000), "malformed", id="deep"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(BundleError, match=message), opened_any(folder):
        pass


def test_external_weights_stay_with_their_model(bundles: list[Bundle], tmp_path: Path) -> None:
    parts = []
    for bundle in bundles[:2]:
        manifest = bundle.manifest
        files = {**manifest.files, "tiny.onnx.data": manifest.files["tiny.onnx"]}
        out = Path(shutil.copytree(bundle.folder, tmp_path / manifest.target))
        shutil.copy(out / "tiny.onnx", out / "tiny.onnx.data")
        changed = msgspec.structs.replace(manifest, files=files, forms={"onnx": ("tiny.onnx", "tiny.onnx.data")})
        (out / "manifest.json").write_bytes(encode_json(changed))
        parts.append(open_bundle(out))
    index = join_bundles(parts, tmp_path / "multi").index
    assert [variant.model_file for variant in index.variants] == [
        f"variants/{variant.target}/tiny.onnx" for variant in index.variants
    ]


def test_only_one_bundle_of_a_target_and_model_is_joined(bundles: list[Bundle], tmp_path: Path) -> None:
    ancestry = msgspec.structs.replace(bundles[0].manifest.ancestry, source="0" * 64)
    stranger = msgspec.structs.replace(
        bundles[1], manifest=msgspec.structs.replace(bundles[1].manifest, ancestry=ancestry)
    )
    for chosen, message in (
        ([], "no bundle"),
        ([bundles[0], bundles[0]], "two bundles are for the target"),
        ([bundles[0], stranger], "different models"),
    ):
        with pytest.raises(UsageError, match=message):
            join_bundles(chosen, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_files_is_neither_replaced_nor_opened(bundles: list[Bundle], tmp_path: Path) -> None:
    for _ in range(2):  # the second replaces the first
        join_bundles(bundles[:1], tmp_path / "joined")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(OutputError, match="is a folder with other files"):
        join_bundles(bundles[:1], tmp_path / "other")
    with pytest.raises(BundleError, match="is no bundle and holds none"):
        find_bundles([tmp_path / "other"])
    with pytest.raises(BundleError, match="file' is a file"):
        sign_bundle(tmp_path / "other" / "file", tmp_path / "key", PASSED)


def test_the_index_lists_the_variants_in_the_order_to_try_and_where_each_runs(folder: Path) -> None:
    variants = {variant.target: variant for variant in open_index(folder).index.variants}
    assert list(variants) == ["qnn", "coreml", "xnnpack", "nnapi", "cpu"]
    assert "SM8750" in variants["qnn"].socs
    assert not variants["xnnpack"].socs
    assert variants["xnnpack"].systems.keys() >= {"android", "ios"}
    assert variants["coreml"].systems.keys() >= {"ios"}
    assert "android" not in variants["coreml"].systems
