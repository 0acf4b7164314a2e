"""What runs is what was digested, whatever happens to the bundle after it was opened."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_models import make_bundle

from edgekit.bundle.folder import Bundle, open_bundle, read_target, snapshot_bundle
from edgekit.bundle.golden import read_inputs
from edgekit.errors import BundleError


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


ALTERATIONS: dict[str, Callable[[Path], object]] = {
    "a byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "emptied": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a link": replace_by_link,
    "a pipe": replace_by_pipe,
    "a folder": replace_by_folder,
}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(make_bundle(tmp_path).folder)


def test_a_snapshot_holds_what_a_run_needs(bundle: Bundle, tmp_path: Path) -> None:
    private = snapshot_bundle(bundle, ["onnx", "onnx"], tmp_path / "private")
    assert private.find_model("onnx").read_bytes() == bundle.find_model("onnx").read_bytes()
    assert private.find_model("onnx").parent == tmp_path / "private"
    assert read_target(private) == read_target(bundle)
    assert read_inputs(private.golden).count == bundle.manifest.golden.samples


@pytest.mark.parametrize("name", ["tiny.onnx", "target.json", "golden/inputs.npz"])
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_a_bundle_altered_after_it_was_opened_is_refused(
    bundle: Bundle, tmp_path: Path, name: str, alteration: str
) -> None:
    ALTERATIONS[alteration](bundle.folder / name)
    with pytest.raises(BundleError, match=r"altered after|cannot read|leads out"):
        snapshot_bundle(bundle, ["onnx"], tmp_path / "private")
    assert not (tmp_path / "private" / name).exists()


def test_a_form_that_the_bundle_lacks_is_an_error(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no model in the form 'context'"):
        snapshot_bundle(bundle, ["context"], tmp_path / "private")
