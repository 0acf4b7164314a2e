"""Models: the facts read, and one tiny file per way to be wrong."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tiny_models import parse_model

from edgekit.errors import ModelError
from edgekit.model.model import load_model, order_nodes, read_proto, save_proto


def test_facts_are_read(relu_model: Path) -> None:
    model = load_model(relu_model)
    assert (model.name, model.opsets, model.ir_version, model.node_count) == ("relu", {"ai.onnx": 17}, 8, 1)
    assert [str(spec) for spec in (*model.inputs, *model.outputs)] == ["x: float32[1,3]", "y: float32[1,3]"]
    assert model.is_static


def test_initializers_that_are_inputs_are_no_inputs(tmp_path: Path) -> None:
    text = (
        '<ir_version: 3, opset_import: ["" : 9]> g (float[1] x, float[1] w) => (float[1] y) <float[1] w = {2}>'
        "{ y = Mul(x, w) }"
    )
    assert [spec.name for spec in load_model(parse_model(text, tmp_path / "m.onnx")).inputs] == ["x"]


def test_dynamic_and_unknown_shapes_are_told_apart(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N,?] x, float z) => (float[N,?] y) { y = Identity(x) }'
    inputs = load_model(parse_model(text, tmp_path / "m.onnx")).inputs
    assert inputs[0].shape == ("N", None)
    assert inputs[1].shape in {None, ()}
    assert not inputs[0].is_static


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<html>not found</html>", "is not an ONNX model"),
        (b"\x08\x08", "holds no ONNX graph"),
        (b"\xff" * 64, "is not an ONNX model"),
        (b"\x3a" + b"\xff" * 11, "is not an ONNX model"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_a_cut_off_model_is_refused(relu_model: Path) -> None:
    relu_model.write_bytes(relu_model.read_bytes()[:-7])
    with pytest.raises(ModelError, match="cut off"):
        load_model(relu_model)


def test_a_missing_file_a_folder_and_an_ort_file_are_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no.onnx", "no file"), (tmp_path, "cannot read"), (tmp_path / "m.ort", "final")):
        with pytest.raises(ModelError, match=message):
            load_model(path)


@pytest.mark.parametrize(("fields", "message"), [({"ir_version": 99}, "IR version 99"), ({}, "opset 99")])
def test_a_model_that_is_too_new_is_refused(tmp_path: Path, fields: dict[str, int], message: str) -> None:
    opset = 17 if fields else 99
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[1] x) => (float[1] y) {{ y = Relu(x) }}'
    with pytest.raises(ModelError, match=message):
        load_model(parse_model(text, tmp_path / "new.onnx", **fields))


def _external(path: Path, location: str) -> Path:
    weight = numpy_helper.from_array(np.ones(64, np.float32), "w")
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [64])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [64])
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [value], [result], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(proto, str(path), save_as_external_data=True, location="w.data", size_threshold=0)
    proto = onnx.load(str(path), load_external_data=False)
    next(entry for entry in proto.graph.initializer[0].external_data if entry.key == "location").value = location
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data_is_found_digested_and_counted(tmp_path: Path) -> None:
    path = _external(tmp_path / "m.onnx", "w.data")
    model = load_model(path)
    assert model.external_files == ("w.data",)
    assert model.size_bytes == path.stat().st_size + 256
    (tmp_path / "w.data").write_bytes(b"\0" * 256)
    assert load_model(path).sha256 != model.sha256


@pytest.mark.parametrize(
    ("location", "message"), [("gone.data", "missing"), ("../w.data", "outside"), ("/etc/passwd", "outside")]
)
def test_external_data_that_is_missing_or_outside_is_refused(tmp_path: Path, location: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(_external(tmp_path / "m.onnx", location))


def test_saving_is_deterministic_and_keeps_the_graph(relu_model: Path, tmp_path: Path) -> None:
    proto = read_proto(load_model(relu_model))
    first, second = save_proto(proto, tmp_path / "a.onnx"), save_proto(proto, tmp_path / "b.onnx")
    assert first.sha256 == second.sha256
    assert read_proto(first) == proto


@pytest.mark.fuzz
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_model_is_read_or_refused_never_worse(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,3] x) => (float[1,3] y) { y = Relu(x) }'
    path = parse_model(text, tmp_path_factory.mktemp("fuzz") / "m.onnx")
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(bytes(content))
    try:
        load_model(path)
    except ModelError:
        return


def test_nodes_come_behind_what_they_and_their_bodies_read() -> None:
    body = helper.make_graph([helper.make_node("Neg", ["b"], ["y"])], "body", [], [])
    nodes = [
        helper.make_node("If", ["c"], ["d"], then_branch=body, else_branch=body),
        helper.make_node("Abs", ["a"], ["b"]),
        helper.make_node("Abs", ["x"], ["a"]),
    ]
    graph = helper.make_graph(nodes, "g", [], [])
    assert [node.output[0] for node in order_nodes(graph)] == ["a", "b", "d"]


def test_nodes_of_a_cycle_are_all_returned() -> None:
    nodes = [helper.make_node("Abs", ["b"], ["a"]), helper.make_node("Abs", ["a"], ["b"])]
    assert len(order_nodes(helper.make_graph(nodes, "g", [], []))) == 2


def test_a_large_file_is_read_weight_by_weight_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [numpy_helper.from_array(np.full((300, 200), at, np.float32), f"w{at}") for at in range(3)]
    tensors.append(numpy_helper.from_array(np.array(2, np.float32), "small"))
    nodes = [helper.make_node("Add", ["x", "w0"], ["a"]), helper.make_node("Mul", ["a", "w1"], ["b"])]
    nodes += [helper.make_node("Sub", ["b", "w2"], ["c"]), helper.make_node("Mul", ["c", "small"], ["y"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [300, 200]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    monkeypatch.setattr("edgekit.model.model.LARGE_BYTES", 0)
    assert read_proto(load_model(path)) == onnx.load(str(path))
