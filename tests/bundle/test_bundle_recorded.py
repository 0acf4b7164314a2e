from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bundle_models import make_bundle, make_contents, save_classifier

from edgekit._files import digest_file
from edgekit.bundle.describe import Contents
from edgekit.bundle.expected import Recorded, adopt_reference
from edgekit.bundle.folder import Bundle, open_bundle, write_bundle
from edgekit.bundle.golden import read_outputs, write_rows
from edgekit.bundle.manifest import BundledFile, encode_json
from edgekit.bundle.multi import open_recorded
from edgekit.errors import UsageError


def record_elsewhere(bundle: Bundle, change: Callable[[np.ndarray], np.ndarray]) -> Bundle:
    """What a machine whose kernels add in another order would have made."""
    rows = [{name: change(value) for name, value in sample.items()} for sample in read_outputs(bundle.golden)]
    file = bundle.folder / "golden" / "outputs.npz"
    write_rows(file, rows)
    entry = BundledFile(sha256=digest_file(file), size_bytes=file.stat().st_size)
    low = min(float(np.nan_to_num(value).min()) for row in rows for value in row.values())
    high = max(float(np.nan_to_num(value).max()) for row in rows for value in row.values())
    outputs = (msgspec.structs.replace(bundle.manifest.outputs[0], value_range=(low, high)),)
    files = {**bundle.manifest.files, "golden/outputs.npz": entry}
    manifest = msgspec.structs.replace(bundle.manifest, files=files, outputs=outputs)
    (bundle.folder / "manifest.json").write_bytes(encode_json(manifest))
    return open_bundle(bundle.folder)


@pytest.fixture
def contents(tmp_path: Path) -> Contents:
    (tmp_path / "here").mkdir()
    return make_contents(tmp_path / "here")


def test_a_build_elsewhere_is_repeated_to_the_byte(tmp_path: Path, contents: Contents) -> None:
    (tmp_path / "there").mkdir()
    there = record_elsewhere(make_bundle(tmp_path / "there"), lambda value: value * np.float32(1 + 1e-6))
    assert write_bundle(contents, tmp_path / "plain").sha256 != there.sha256
    recorded = open_recorded(tmp_path / "there", "tiny", ["nnapi", "qnn"])
    assert list(recorded) == ["nnapi"]
    adopt_reference(contents.golden, recorded["nnapi"])
    again = write_bundle(msgspec.structs.replace(contents, recorded=recorded["nnapi"]), tmp_path / "again")
    assert again.sha256 == there.sha256


def test_what_this_model_does_not_give_is_refused(tmp_path: Path, contents: Contents) -> None:
    (tmp_path / "there").mkdir()
    bundle = make_bundle(tmp_path / "there")
    for change in (lambda value: value * np.float32(1.1), lambda value: value * np.float32("nan")):
        wrong = record_elsewhere(bundle, change)
        with pytest.raises(UsageError, match="is not what the model gives here"):
            adopt_reference(contents.golden, Recorded(folder=wrong.folder, manifest=wrong.manifest))


def test_other_samples_and_other_builds_are_refused(tmp_path: Path, contents: Contents) -> None:
    (tmp_path / "there").mkdir()
    bundle = make_bundle(tmp_path / "there")
    entry = msgspec.structs.replace(bundle.manifest.files["golden/inputs.npz"], sha256="0" * 64)
    files = {**bundle.manifest.files, "golden/inputs.npz": entry}
    with pytest.raises(UsageError, match="other golden samples"):
        adopt_reference(
            contents.golden,
            Recorded(folder=bundle.folder, manifest=msgspec.structs.replace(bundle.manifest, files=files)),
        )
    with pytest.raises(UsageError, match=r"holds no bundle .* tiny-nnapi or tiny-cpu"):
        open_recorded(tmp_path, "tiny", ["nnapi", "cpu"])


def test_a_self_test_of_other_model_files_is_made_anew(tmp_path: Path, contents: Contents) -> None:
    bundle = write_bundle(contents, tmp_path / "first")
    (tmp_path / "other").mkdir()
    other = save_classifier(tmp_path / "other" / "tiny.onnx", classes=7)
    changed = msgspec.structs.replace(
        contents, files={"onnx": (other.path,)}, recorded=Recorded(folder=bundle.folder, manifest=bundle.manifest)
    )
    assert write_bundle(changed, tmp_path / "second").manifest.golden.chosen
