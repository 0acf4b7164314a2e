"""Outputs that stand at other places: apps that read outputs by their place get another one."""

from pathlib import Path

import msgspec
import onnx
import pytest
from bundle_models import make_contents, make_samples, save_graph
from onnx import TensorProto, helper
from verify_devices import InProcess

from edgekit.bundle.folder import write_bundle
from edgekit.bundle.golden import make_golden
from edgekit.check.check import check_model
from edgekit.model.model import Model, load_model
from edgekit.target import load_target
from edgekit.verify.run import verify_bundle
from edgekit.verify.two_models import compare_models


@pytest.fixture
def model(tmp_path: Path) -> Model:
    nodes = [helper.make_node("Relu", ["x"], ["up"], name="up"), helper.make_node("Neg", ["x"], ["down"], name="down")]
    inputs, *outputs = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in ("x", "up", "down"))
    return save_graph(helper.make_graph(nodes, "two", [inputs], outputs), tmp_path / "two.onnx")


def reorder(model: Model, path: Path) -> Model:
    proto = onnx.load(str(model.path))
    outputs = list(proto.graph.output)[::-1]
    del proto.graph.output[:]
    proto.graph.output.extend(outputs)
    onnx.save(proto, str(path))
    return load_model(path)


def test_a_model_with_its_outputs_in_another_order_is_another_model(model: Model, tmp_path: Path) -> None:
    other = reorder(model, tmp_path / "other.onnx")
    found = compare_models(model, other, make_samples())
    assert not found.reaches(None)
    assert {output.name: output.mismatch for output in found.outputs} == {
        "up": "is output 1, in the reference 0",
        "down": "is output 0, in the reference 1",
    }
    assert compare_models(model, model, make_samples()).reaches(None)


def test_a_file_of_a_bundle_with_its_outputs_in_another_order_fails(model: Model, tmp_path: Path) -> None:
    other = reorder(model, tmp_path / "two.other.onnx")
    contents = msgspec.structs.replace(
        make_contents(tmp_path),
        source=model,
        files={"onnx": (other.path,)},
        golden=make_golden(model, make_samples(), tmp_path / "own"),
        check=check_model(model, load_target("nnapi")),
    )
    report = verify_bundle(write_bundle(contents, tmp_path / "two-nnapi"), [InProcess()])
    assert not report.passed
    assert "its outputs are in the order down, up, in the manifest up, down" in report.failures[0]
