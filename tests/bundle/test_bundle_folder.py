"""The folder of a bundle: written, opened, refused where it was altered, and copied before it runs."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx
import pytest
from bundle_models import flip_byte, make_bundle, make_contents

from edgekit._files import digest_file
from edgekit.bundle.checks import check_files, find_fault
from edgekit.bundle.folder import Bundle, open_bundle, read_check, read_target, snapshot_bundle, write_bundle
from edgekit.bundle.golden import read_inputs
from edgekit.bundle.manifest import BundledFile
from edgekit.errors import BundleError, OutputError
from edgekit.target import load_target


def test_a_bundle_opens_as_it_was_written(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    assert open_bundle(bundle.folder) == bundle
    assert bundle.sha256 == digest_file(bundle.folder / "manifest.json")
    (bundle.folder / "verify.json").write_text("{}")
    assert open_bundle(bundle.folder) == bundle
    with pytest.raises(BundleError, match="no model in the form 'context'"):
        bundle.find_model("context")
    with pytest.raises(BundleError, match="there is no bundle"):
        open_bundle(tmp_path / "nothing")


def test_a_bundle_contains_its_target_and_predicted_placement(tmp_path: Path) -> None:
    contents = make_contents(tmp_path, target="qnn")
    bundle = write_bundle(contents, tmp_path / "out")
    assert read_check(bundle) == contents.check
    assert read_target(bundle) == msgspec.structs.replace(load_target("qnn"), folder=Path())


def test_a_newer_opset_asks_for_a_newer_onnxruntime(tmp_path: Path) -> None:
    contents = make_contents(tmp_path, target="qnn")
    model = onnx.load(contents.files["onnx"][0])
    model.opset_import[0].version = 26
    onnx.save(model, tmp_path / "newer.onnx")
    newer = msgspec.structs.replace(contents, files={"onnx": (tmp_path / "newer.onnx",)})
    bundle = write_bundle(newer, tmp_path / "out")
    assert bundle.manifest.minimum_ort == read_target(open_bundle(bundle.folder)).minimum_ort == "1.26.0"
    assert write_bundle(contents, tmp_path / "older").manifest.minimum_ort == contents.target.minimum_ort == "1.24.2"


def test_the_same_contents_give_the_same_bytes(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    first, second = (write_bundle(contents, tmp_path / name).folder for name in ("one", "elsewhere/two"))
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert [(first / name).read_bytes() for name in names] == [(second / name).read_bytes() for name in names]
    assert str(tmp_path).encode() not in b"".join((first / name).read_bytes() for name in names)


def test_models_already_in_place_are_listed(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    placed = out / "model.onnx"
    shutil.copyfile(contents.files["onnx"][0], placed)
    bundle = write_bundle(msgspec.structs.replace(contents, files={"onnx": (placed,)}), out)
    assert open_bundle(out).find_model("onnx") == placed
    assert bundle.manifest.model_file == "model.onnx"


def test_no_model_and_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    with pytest.raises(BundleError, match="no model file"):
        write_bundle(msgspec.structs.replace(contents, files={}), tmp_path / "out")
    twin = tmp_path / "sub" / "TINY.onnx"
    twin.parent.mkdir()
    shutil.copyfile(contents.files["onnx"][0], twin)
    files = {**contents.files, "runtime": (twin,)}
    with pytest.raises(OutputError, match=r"want the name 'TINY\.onnx'"):
        write_bundle(msgspec.structs.replace(contents, files=files), tmp_path / "out")


def _rewrite(old: bytes, new: bytes) -> Callable[[Bundle], None]:
    def change(bundle: Bundle) -> None:
        file = bundle.folder / "manifest.json"
        data = file.read_bytes()
        assert old in data
        file.write_bytes(data.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda b: flip_byte(b.folder / "golden/outputs.npz"), r"'golden/outputs\.npz' .* was altered",
                     id="flipped byte"),
        pytest.param(lambda b: (b.folder / "manifest.json").unlink(), "'manifest.json' .* is missing", id="no list"),
        pytest.param(lambda b: (b.folder / "tiny.onnx").unlink(), "lacks the file 'tiny.onnx'", id="no model"),
        pytest.param(lambda b: (b.folder / "extra.so").touch(), "holds 'extra.so'", id="extra file"),
        pytest.param(lambda b: (b.folder / "lib").symlink_to("golden"), "holds 'lib'", id="link to a folder"),
        pytest.param(lambda b: os.truncate(b.folder / "tiny.onnx", 9), "'tiny.onnx' .* has 9 bytes", id="cut off"),
        pytest.param(_rewrite(b'"provider"', b'"providr"'), "missing required field|unknown field", id="misspelt key"),
        pytest.param(_rewrite(b'"schema_version": 2', b'"schema_version": 3'), "malformed", id="other schema"),
        pytest.param(_rewrite(b'"form": "onnx"', b'"form": "full"'), "no file for form 'full'", id="form without file"),
        pytest.param(_rewrite(b'"tiny.onnx"', b'"../tiny.onnx"'), "altered", id="climbs out"),
        pytest.param(_rewrite(b"{", b"["), "malformed", id="no object"),
        pytest.param(_rewrite(b"{", b'{"name":' + b"[" * 100_000), "malformed", id="deep"),
        pytest.param(_rewrite(b"{", b"\xff{"), "malformed", id="no text"),
    ],
)  # fmt: skip
def test_a_damaged_bundle_is_refused(tmp_path: Path, damage: Callable[[Bundle], None], message: str) -> None:
    bundle = make_bundle(tmp_path)
    damage(bundle)
    with pytest.raises(BundleError, match=message):
        open_bundle(bundle.folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.txt", "b/c.txt"], ""),
        (["aux.txt"], "'aux.txt' .* is the name of a device on Windows"),
        (["a.txt", "A.txt"], "are one file on some systems"),
    ],
)
def test_names_that_not_every_system_takes_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    (tmp_path / "b").mkdir()
    files = {}
    for name in names:
        (tmp_path / name).write_text("text")
        files[name] = BundledFile(sha256=digest_file(tmp_path / name), size_bytes=4)
    with pytest.raises(BundleError, match=message) if message else contextlib.nullcontext():
        check_files(tmp_path, files, ())


def test_a_path_in_a_bundle_has_at_most_sixteen_folders_and_512_bytes() -> None:
    assert find_fault("/".join(["a"] * 16)) is None
    assert find_fault("/".join(["a"] * 17)) == "is empty or too long"
    whole = "/".join(["a" * 254, "b" * 255, "cc"])
    assert [find_fault(whole[:length]) for length in (512, 513)] == [None, "is empty or too long"]
    assert find_fault(f"{whole[:511]}\u00e9") == "is empty or too long"
    assert "too long" in (find_fault("b" * 256) or "")


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns what puts something in the place of a file, which becomes one that may lie there unlisted."""

    def change(path: Path) -> None:
        path.rename(path.with_name("verify.json"))
        make(path)

    return change


ALTERATIONS: dict[str, Callable[[Path], object]] = {
    "a byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "emptied": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a link": instead(lambda path: path.symlink_to("verify.json")),
    "a link to nothing": instead(lambda path: path.symlink_to("nothing")),
    "a pipe": instead(os.mkfifo),
    "a folder": instead(Path.mkdir),
}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(make_bundle(tmp_path).folder)


@pytest.mark.parametrize("name", ["manifest.json", "tiny.onnx"])
@pytest.mark.parametrize("alteration", ["a link", "a link to nothing", "a pipe", "a folder"])
def test_links_and_pipes_in_a_bundle_are_refused(bundle: Bundle, name: str, alteration: str) -> None:
    ALTERATIONS[alteration](bundle.folder / name)
    with pytest.raises(BundleError, match=r"leads out of|no regular file|lacks the file"):
        open_bundle(bundle.folder)


def test_a_snapshot_contains_the_files_that_a_run_needs(bundle: Bundle, tmp_path: Path) -> None:
    private = snapshot_bundle(bundle, ["onnx", "onnx"], tmp_path / "private")
    assert private.find_model("onnx").read_bytes() == bundle.find_model("onnx").read_bytes()
    assert private.find_model("onnx").parent == tmp_path / "private"
    assert read_target(private) == read_target(bundle)
    assert read_inputs(private.golden).count == bundle.manifest.golden.samples


@pytest.mark.parametrize("name", ["tiny.onnx", "target.json", "golden/inputs.npz"])
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_a_bundle_altered_after_opening_is_refused(bundle: Bundle, tmp_path: Path, name: str, alteration: str) -> None:
    ALTERATIONS[alteration](bundle.folder / name)
    with pytest.raises(BundleError, match=r"altered after|cannot read|leads out"):
        snapshot_bundle(bundle, ["onnx"], tmp_path / "private")
    assert not (tmp_path / "private" / name).exists()


def test_a_form_that_the_bundle_lacks_is_an_error(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no model in the form 'context'"):
        snapshot_bundle(bundle, ["context"], tmp_path / "private")
