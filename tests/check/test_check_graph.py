"""The view of a graph: constants, shapes, and what is left unread."""

from pathlib import Path

import numpy as np
import onnx
from check_models import check_file
from onnx import TensorProto, helper, numpy_helper, parser
from tiny_models import parse_model

from edgekit.graph.graph import infer_graph, read_graph
from edgekit.model.model import load_model

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g'


def test_constant_nodes_are_constants() -> None:
    graph = infer_graph(
        parser.parse_model(
            f"{HEAD} (float[2] x) => (float[2] y) {{ c = Constant<value_floats=[1.0,2.0]>() y = Add(x, c) }}"
        )
    )
    assert [node.op_type for node in graph.nodes] == ["Add"]
    array = graph.array("c")
    assert array is not None
    assert array.tolist() == [1, 2]


def test_an_initializer_that_is_an_input_is_constant_in_ir_3_only() -> None:
    text = "(float[2] x, float[2] c) => (float[2] y) <float[2] c = {1,2}> { y = Add(x, c) }"
    for ir_version, constant in ((3, True), (8, False)):
        model = parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : 8]> g {text}')
        assert ("c" in infer_graph(model).constants) is constant


def test_shapes_are_inferred_through_operators_of_ort() -> None:
    text = (
        "(float[2,3] x) => (float[2,3] y) <float s = {0.1}, uint16 z = {0}> "
        "{ a = com.microsoft.QuantizeLinear(x, s, z) b = com.microsoft.DequantizeLinear(a, s, z) "
        "y = com.microsoft.QuickGelu(b) }"
    )
    graph = infer_graph(parser.parse_model(f"{HEAD} {text}"))
    assert (graph.value("a").shape, graph.value("a").dtype, graph.value("b").shape) == ((2, 3), "uint16", (2, 3))
    assert [node.domain for node in graph.nodes] == ["com.microsoft"] * 3


def test_a_shape_that_cannot_be_inferred_is_a_reason(tmp_path: Path) -> None:
    model = parse_model(
        f"{HEAD} (float[2] x) => (float y) {{ a = com.microsoft.NoSuchOperator(x) y = Relu(a) }}", tmp_path / "m.onnx"
    )
    reasons = check_file(model, "nnapi").node_list[1].reasons
    assert "the shape of input 0 is unknown" in reasons


def test_wrong_shapes_in_the_file_do_not_stop_the_check() -> None:
    model = parser.parse_model(f"{HEAD} (float[2,3] x, float[5,7] w) => (float[2,7] y) {{ y = MatMul(x, w) }}")
    assert infer_graph(model).nodes[0].op_type == "MatMul"


def test_weights_are_not_kept_and_external_files_not_read(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.zeros((64, 64, 8, 8), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], "conv")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    read = read_graph(load_model(path))
    assert read.constants["w"].ByteSize() < 100
    assert (read.array("w"), read.value("w").shape, read.value("y").shape) == (None, (64, 64, 8, 8), (1, 64, 1, 1))
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="m.data")
    model = load_model(path)
    (tmp_path / "m.data").unlink()
    assert read_graph(model).is_external("w")
