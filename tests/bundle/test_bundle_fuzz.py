"""Hostile manifests, indexes, signatures and archives: 700 cases in the tests, 17 500 in `make fuzz`."""

import io
import json
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from bundle_models import PASSED, make_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgekit.bundle.archive import Limits, list_files, unpack_archive, write_archive
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.manifest import encode_json
from edgekit.bundle.multi import MultiBundle, join_bundles, open_any, opened_any, sign_bundle
from edgekit.bundle.sign import make_key
from edgekit.errors import BundleError

pytestmark = pytest.mark.slow

NAMES = st.sampled_from((
    "../x", "/etc/passwd", "a\\b", "", ".", "..", "a\x00b", "x" * 5000, "golden", "golden/..", "./tiny.onnx",
    "TINY.onnx", "C:x", "nul", "é", "\ud800",
))  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | NAMES, inner, max_size=3),
    max_leaves=5,
)
FUZZ = settings(
    max_examples=100 if settings().max_examples <= 100 else 2500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FEW = Limits(files=50, size_bytes=1 << 20)


class Signed:
    """A signed bundle, a signed folder of two targets, and archives of them, in a sandbox that is watched."""

    def __init__(self, folder: Path) -> None:
        self.sandbox = folder / "sandbox"
        self.public = make_key(folder / "key")
        self.bundle = make_bundle(folder)
        (folder / "other").mkdir()
        other = make_bundle(folder / "other", target="qnn")
        self.multi = join_bundles([self.bundle, other], folder / "multi")
        for signed in (self.bundle, self.multi):
            sign_bundle(signed.folder, folder / "key", PASSED)
        write_archive(list_files(self.bundle.folder), folder / "a.zip", "zip")
        write_archive(list_files(self.bundle.folder), folder / "a.tar", "tar")
        self.archives = [(folder / name).read_bytes() for name in ("a.zip", "a.tar")]
        self.sandbox.mkdir()

    def opens_only_the_original(self, archive: bytes) -> bool:
        path = self.sandbox / "archive"
        path.write_bytes(archive)
        try:
            with opened_any(path, key=self.public) as found:
                return found.sha256 == self.bundle.sha256
        except BundleError as error:
            return "\n" not in error.message
        finally:
            path.unlink()
            assert not list(self.sandbox.iterdir())


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return Signed(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("plain"))


def encode_canonical(value: object) -> bytes:
    """Returns JSON in edgekit's format, if that can hold it, so that only the content is tested."""
    try:
        return encode_json(value)
    except (ValueError, UnicodeError):
        return json.dumps(value).encode()


def is_refused_or_passes(file: Path, data: bytes, check: Callable[[], bool]) -> bool:
    """Returns True if changed bytes of a file are refused in one line, or pass the check."""
    kept = file.read_bytes()
    try:
        file.write_bytes(data)
        return check()
    except BundleError as error:
        return "\n" not in error.message
    finally:
        file.write_bytes(kept)


def change_somewhere(tree: object, value: object, data: st.DataObject) -> None:
    node = tree
    while isinstance(node, dict | list) and node:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            node[key] = value
            return
        node = inner


def same_files(bundle: Bundle) -> Callable[[], bool]:
    return lambda: open_bundle(bundle.folder).manifest.files == bundle.manifest.files


@pytest.mark.fuzz
@FUZZ
@given(place=st.integers(0, 10_000), data=st.binary(max_size=4), length=st.integers(0, 4))
def test_changed_bytes_of_a_manifest_do_no_harm(bundle: Bundle, place: int, data: bytes, length: int) -> None:
    file = bundle.folder / "manifest.json"
    text = file.read_bytes()
    start = place % len(text)
    assert is_refused_or_passes(file, text[:start] + data + text[start + length :], same_files(bundle))


@pytest.mark.fuzz
@FUZZ
@given(value=JSON, data=st.data())
def test_changed_values_of_a_manifest_do_no_harm(bundle: Bundle, value: object, data: st.DataObject) -> None:
    manifest = json.loads((bundle.folder / "manifest.json").read_bytes())
    change_somewhere(manifest, value, data)
    assert is_refused_or_passes(bundle.folder / "manifest.json", encode_canonical(manifest), same_files(bundle))


@pytest.mark.fuzz
@FUZZ
@given(name=NAMES | st.text(max_size=12))
def test_changed_names_in_a_manifest_do_no_harm(bundle: Bundle, name: str) -> None:
    manifest = json.loads((bundle.folder / "manifest.json").read_bytes())
    manifest["files"][name] = manifest["files"]["tiny.onnx"]
    manifest["forms"] = {"onnx": [name]}
    assert is_refused_or_passes(bundle.folder / "manifest.json", encode_canonical(manifest), same_files(bundle))


@pytest.mark.fuzz
@FUZZ
@given(value=JSON, data=st.data())
def test_changed_values_of_an_index_do_no_harm(signed: Signed, value: object, data: st.DataObject) -> None:
    def opens() -> bool:
        found = open_any(signed.multi.folder)
        return isinstance(found, MultiBundle) and {v.folder for v in found.index.variants} <= {
            v.folder for v in signed.multi.index.variants
        }

    index = json.loads((signed.multi.folder / "index.json").read_bytes())
    change_somewhere(index, value, data)
    assert is_refused_or_passes(signed.multi.folder / "index.json", encode_canonical(index), opens)


@pytest.mark.fuzz
@FUZZ
@given(data=st.data(), change=st.integers(1, 255), is_multi=st.booleans())
def test_no_changed_byte_of_a_signature_passes(
    signed: Signed, data: st.DataObject, change: int, is_multi: bool
) -> None:
    folder = (signed.multi if is_multi else signed.bundle).folder
    file = data.draw(st.sampled_from(sorted(list_files(folder).values())))
    kept = file.read_bytes()
    changed = bytearray(kept)
    changed[data.draw(st.integers(0, len(kept) - 1))] ^= change
    assert is_refused_or_passes(file, bytes(changed), lambda: open_any(folder, key=signed.public) is None)


@pytest.mark.fuzz
@FUZZ
@given(data=st.data(), kind=st.integers(0, 1), insert=st.binary(max_size=8), length=st.integers(0, 8))
def test_changed_archives_are_harmless(
    signed: Signed, data: st.DataObject, kind: int, insert: bytes, length: int
) -> None:
    archive = signed.archives[kind]
    heads = [at for at in range(len(archive)) if (at % 512 == 0 if kind else archive[at : at + 2] == b"PK")]
    start = min(data.draw(st.sampled_from(heads)) + data.draw(st.integers(0, 160)), len(archive))
    assert signed.opens_only_the_original(archive[:start] + insert + archive[start + length :])


@pytest.mark.fuzz
@FUZZ
@given(
    members=st.lists(
        st.tuples(NAMES | st.text(max_size=6), st.sampled_from(["file", "link", "hard", "device", "folder"])),
        max_size=4,
    ),
    is_tar=st.booleans(),
)
def test_no_archive_writes_outside_its_folder(signed: Signed, members: list[tuple[str, str]], is_tar: bool) -> None:
    path, out = signed.sandbox / "archive", signed.sandbox / "out"
    try:
        data = (_tar if is_tar else _zip)(members)
    except (ValueError, UnicodeError, UserWarning):
        return
    path.write_bytes(data)
    try:
        names = unpack_archive(path, out, FEW)
        found = [place for place in out.rglob("*") if not place.is_dir()]
        assert sorted(place.relative_to(out).as_posix() for place in found) == sorted(names)
        assert all(place.is_file() and not place.is_symlink() for place in found)
        shutil.rmtree(out)
    except BundleError as error:
        refusal = error.message
        assert "\n" not in refusal
    path.unlink()
    assert not list(signed.sandbox.iterdir())


def _zip(members: list[tuple[str, str]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, kind in members:
            entry = zipfile.ZipInfo(name + "/" * (kind == "folder"))
            entry.external_attr = {"link": stat.S_IFLNK, "device": stat.S_IFBLK}.get(kind, stat.S_IFREG) << 16
            archive.writestr(entry, b"../../x" if kind == "link" else b"")
    return buffer.getvalue()


def _tar(members: list[tuple[str, str]]) -> bytes:
    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "device": tarfile.BLKTYPE, "folder": tarfile.DIRTYPE}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kinds.get(kind, tarfile.REGTYPE), "../../x"
            archive.addfile(entry)
    return buffer.getvalue()


def test_the_bundles_that_are_fuzzed_are_valid_before(signed: Signed, bundle: Bundle) -> None:
    assert open_bundle(bundle.folder) == bundle
    assert open_bundle(signed.bundle.folder, key=signed.public).sha256 == signed.bundle.sha256
    found = open_any(signed.multi.folder, key=signed.public)
    assert found == msgspec.structs.replace(signed.multi, attested=PASSED)
    assert all(signed.opens_only_the_original(archive) for archive in signed.archives)
