"""A bundle whose files were changed after the build is refused; digests made anew do not pass the self-test."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from verify_devices import InProcess
from verify_models import break_layer, find_weights

from edgekit._files import digest_file
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.manifest import encode_json
from edgekit.errors import BundleError
from edgekit.model.model import load_model
from edgekit.model.tensors import Array
from edgekit.verify.report import VerifyReport
from edgekit.verify.run import verify_bundle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["nnapi", "coreml"])
def built(request: pytest.FixtureRequest, network_build: Path) -> Path:
    return network_build / "out" / f"network-{request.param}"


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def make_digests_anew(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name, entry in manifest["files"].items():
        entry |= {"sha256": digest_file(folder / name), "size_bytes": (folder / name).stat().st_size}
    (folder / MANIFEST).write_bytes(encode_json(manifest))


def change(folder: Path, layer: str, corrupt: Callable[[Array], Array]) -> None:
    path = folder / "model.onnx"
    break_layer(load_model(path), path, layer, corrupt)


def verify(folder: Path) -> VerifyReport:
    return verify_bundle(open_bundle(folder), [InProcess()])


def swap(values: Array) -> Array:
    values[[2, 3]] = values[[3, 2]]
    return values


def test_a_bundle_as_it_was_built_passes(bundle: Path) -> None:
    report = verify(bundle)
    assert report.alterations == ()
    assert report.passed


def test_the_digest_is_the_first_gate(bundle: Path) -> None:
    change(bundle, "conv3", swap)
    with pytest.raises(BundleError, match=r"model\.onnx"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("layer", "corrupt"),
    [
        pytest.param("conv0", swap, id="swapped channels"),
        pytest.param("conv2", lambda values: values // np.array(2, values.dtype), id="scale"),
        pytest.param("conv4", lambda values: values.swapaxes(2, 3), id="wrong transpose"),
    ],
)
def test_a_changed_onnx_file_fails_the_self_test_though_the_digests_fit(
    bundle: Path, layer: str, corrupt: Callable[[Array], Array]
) -> None:
    change(bundle, layer, corrupt)
    make_digests_anew(bundle)
    report = verify(bundle)
    assert "'model.onnx' does not pass the bundle's self-test" in report.alterations[0]
    assert not report.passed


def test_a_changed_ort_file_does_not_fit_the_onnx_file_beside_it(bundle: Path, built: Path) -> None:
    path = bundle / "model.runtime.ort"
    data = path.read_bytes()
    # Made from the float32 model, where the bundle is of fp16.
    models = [onnx.load(str(each)) for each in (bundle / "model.onnx", built.parents[1] / "network.onnx")]
    stored = [numpy_helper.to_array(each) for model in models for each in find_weights(model, "conv3")]
    weight = next(each for each in stored if each.tobytes() in data)
    path.write_bytes(data.replace(weight.tobytes(), np.ascontiguousarray(weight[::-1]).tobytes()))
    make_digests_anew(bundle)
    report = verify(bundle)
    assert "'model.runtime.ort' does not pass the bundle's self-test" in report.alterations[0]
    assert not report.passed
