"""A bundle whose model was changed after the build is refused; one whose digests were made anew too names the layer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from verify_devices import InProcess
from verify_models import make_images, save_network

from edgekit._files import digest_file
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.golden.expected import LAYERS
from edgekit.bundle.manifest.manifest import encode_json
from edgekit.errors import BundleError
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.model.tensors import Array
from edgekit.recipe import Data, Recipe
from edgekit.verify.causes.fingerprints import fingerprint_layers
from edgekit.verify.report import VerifyReport
from edgekit.verify.run import verify_bundle


@pytest.fixture(scope="module", params=["nnapi", "coreml"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_network(folder / "network.onnx")
    np.savez(folder / "data.npz", x=np.stack([row["x"] for row in make_images(16)]))
    recipe = Recipe(targets=(request.param,))
    (made,) = build(model.path, Data(source=str(folder / "data.npz")), folder / "out", recipe, verify=False).bundles
    assert made.path is not None
    return made.path


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def make_digests_anew(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for name, entry in manifest["files"].items():
        entry |= {"sha256": digest_file(folder / name), "size_bytes": (folder / name).stat().st_size}
    (folder / MANIFEST).write_bytes(encode_json(manifest))


def read_weight(folder: Path, layer: str) -> tuple[onnx.ModelProto, onnx.TensorProto]:
    proto = onnx.load(str(folder / "model.onnx"))
    producers = {name: node for node in proto.graph.node for name in node.output}
    node = next(node for node in proto.graph.node if node.name == layer)
    maker = producers.get(node.input[1])
    wanted = node.input[1] if maker is None else maker.input[0]
    return proto, next(tensor for tensor in proto.graph.initializer if tensor.name == wanted)


def read_weight_of(path: Path, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in onnx.load(str(path)).graph.initializer if tensor.name == name)


def change(folder: Path, layer: str, corrupt: Callable[[Array], Array]) -> None:
    proto, tensor = read_weight(folder, layer)
    values = np.ascontiguousarray(corrupt(numpy_helper.to_array(tensor).copy()))
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, str(folder / "model.onnx"))


def verify(folder: Path) -> VerifyReport:
    return verify_bundle(open_bundle(folder), [InProcess()])


def swap(values: Array) -> Array:
    values[[2, 3]] = values[[3, 2]]
    return values


def flip_one(values: Array) -> Array:
    values.reshape(-1).view(np.uint8)[101] ^= 64
    return values


def test_a_bundle_as_it_was_built_passes(bundle: Path) -> None:
    report = verify(bundle)
    assert report.alterations == ()
    assert report.passed


def test_the_digest_is_the_first_gate(bundle: Path) -> None:
    change(bundle, "conv3", swap)
    with pytest.raises(BundleError, match=r"model\.onnx"):
        open_bundle(bundle)


@pytest.mark.parametrize("layer", ["conv0", "conv2", "conv4"])
@pytest.mark.parametrize(
    "corrupt",
    [
        pytest.param(swap, id="swapped channels"),
        pytest.param(flip_one, id="bit flip"),
        pytest.param(lambda values: values // np.array(2, values.dtype), id="scale"),
        pytest.param(lambda values: values.swapaxes(2, 3), id="wrong transpose"),
    ],
)
def test_a_changed_layer_is_named_though_the_digests_fit(
    bundle: Path, layer: str, corrupt: Callable[[Array], Array]
) -> None:
    change(bundle, layer, corrupt)
    make_digests_anew(bundle)
    report = verify(bundle)
    assert report.first_bad_layer == layer
    assert f"layer '{layer}' (Conv) is not as it was built" in report.alterations[0]
    assert not report.passed


def test_a_layer_that_is_gone_is_told_of(bundle: Path) -> None:
    proto = onnx.load(str(bundle / "model.onnx"))
    for node in proto.graph.node:
        node.input[:] = ["renamed" if name == "r1" else name for name in node.input]
        node.output[:] = ["renamed" if name == "r1" else name for name in node.output]
    onnx.save(proto, str(bundle / "model.onnx"))
    make_digests_anew(bundle)
    assert (
        "has no layer 'conv1'" in verify(bundle).alterations[0]
        or "has no layer 'relu1'" in verify(bundle).alterations[0]
    )


def test_a_changed_ort_file_does_not_fit_the_onnx_file_beside_it(bundle: Path, built: Path) -> None:
    _, tensor = read_weight(bundle, "conv3")
    path = bundle / "model.runtime.ort"
    weight = numpy_helper.to_array(tensor)
    data = path.read_bytes()
    if weight.tobytes() not in data:  # made from the float32 model, where the bundle is of fp16
        weight = numpy_helper.to_array(read_weight_of(built.parents[1] / "network.onnx", "w3"))
    assert weight.tobytes() in data
    path.write_bytes(data.replace(weight.tobytes(), np.ascontiguousarray(weight[::-1]).tobytes()))
    make_digests_anew(bundle)
    report = verify(bundle)
    assert "'model.runtime.ort' does not compute what 'model.onnx' beside it does" in report.alterations[0]
    assert not report.passed


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"[" * 100_000])
def test_malformed_fingerprints_are_refused(bundle: Path, content: bytes) -> None:
    (bundle / "golden" / LAYERS).write_bytes(content)
    make_digests_anew(bundle)
    with pytest.raises(BundleError, match="malformed"):
        verify(bundle)


def test_every_constant_and_attribute_has_its_part_in_a_fingerprint(bundle: Path) -> None:
    path = bundle / "model.onnx"
    before = {layer.tensor: layer.sha256 for layer in fingerprint_layers(load_model(path))}
    proto = onnx.load(str(path))
    conv = next(node for node in proto.graph.node if node.name == "conv2")
    next(attribute for attribute in conv.attribute if attribute.name == "pads").ints[:] = [2, 2, 0, 0]
    onnx.save(proto, str(path))
    after = {layer.tensor: layer.sha256 for layer in fingerprint_layers(load_model(path))}
    assert {name for name in before if before[name] != after[name]} <= {"r2", "c2", "x"}
    assert before != after
