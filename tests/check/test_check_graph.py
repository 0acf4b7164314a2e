"""The view of a graph: constants, shapes, multiply-accumulates, and what is left unread."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from check_models import check_text, graph_of
from onnx import parser
from tiny_models import save_net

from edgekit.check.macs import count_macs
from edgekit.graph.graph import infer_graph, read_graph
from edgekit.model.model import load_model


def test_an_initializer_that_is_an_input_is_constant_in_ir_3_only() -> None:
    text = "(float[2] x, float[2] c) => (float[2] y) <float[2] c = {1,2}> { y = Add(x, c) }"
    for ir_version, constant in ((3, True), (8, False)):
        model = parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : 8]> g {text}')
        assert ("c" in infer_graph(model).constants) is constant


def test_a_shape_that_cannot_be_inferred_is_a_reason() -> None:
    nodes = check_text("g (float[2] x) => (float y) { a = com.microsoft.NoSuchOperator(x) y = Relu(a) }", "nnapi")
    assert "the shape of input 0 is unknown" in nodes[1].reasons


def test_wrong_shapes_in_the_file_do_not_stop_the_check() -> None:
    graph = graph_of("g (float[2,3] x, float[5,7] w) => (float[2,7] y) { y = MatMul(x, w) }")
    assert graph.nodes[0].op_type == "MatMul"


def test_weights_are_not_kept_and_external_files_not_read(tmp_path: Path) -> None:
    path, weight = tmp_path / "m.onnx", np.zeros((64, 64, 8, 8), np.float32)
    read = read_graph(save_net("(float[1,64,8,8] x) => (float[N,C,H,W] y) { [conv] y = Conv(x, w) }", path, w=weight))
    assert read.constants["w"].ByteSize() < 100
    assert (read.array("w"), read.value("w").shape, read.value("y").shape) == (None, (64, 64, 8, 8), (1, 64, 1, 1))
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="m.data")
    model = load_model(path)
    (tmp_path / "m.data").unlink()
    assert read_graph(model).is_external("w")


@pytest.mark.parametrize(
    ("body", "macs"),
    [
        ("(float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y) { y = Conv(x, w) }", 4 * 36 * 27),
        ("(float[1,4,8,8] x, float[4,1,3,3] w) => (float[1,4,6,6] y) { y = Conv<group=4>(x, w) }", 4 * 36 * 9),
        ("(float[1,3,8,8] x, float[3,4,2,2] w) => (float[1,4,9,9] y) { y = ConvTranspose(x, w) }", 3 * 64 * 16),
        ("(float[5,3] x, float[3,7] w) => (float[5,7] y) { y = Gemm(x, w) }", 5 * 3 * 7),
        ("(float[3,5] x, float[3,7] w) => (float[5,7] y) { y = Gemm<transA=1>(x, w) }", 5 * 3 * 7),
        ("(float[2,5,3] x, float[2,3,7] w) => (float[2,5,7] y) { y = MatMul(x, w) }", 2 * 5 * 3 * 7),
        ("(float[6,1,4] x, float[1,20,4] w, float[1,20,5] r) => (float[6,1,1,5] y) { y = LSTM(x, w, r) }",
         6 * (20 * 4 + 20 * 5)),
        ('(float[2,3] x, float[3,4] w) => (float[2,4] y) { y = Einsum<equation="ij,jk->ik">(x, w) }', 24),
        ("(float[N,3] x, float[3,7] w) => (float[N,7] y) { y = MatMul(x, w) }", 21),
        ("(float[9] x) => (float[9] y) { y = Relu(x) }", 0),
        (("(float[1,2,8] q, float[1,2,4] k, float[1,2,4] v, float[1,1,5,4] p) => (float[1,2,8] y) "
         "{ y = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1>(q, k, v, p) }"), 2 * 16 * 7),
        (("(float[1,5,8] x, float[8,24] w) => (float[1,5,8] y)"
         "{ y = com.microsoft.Attention<num_heads=2>(x, w) }"), 5 * 8 * 24 + 2 * 40 * 5),
        (("(float[1,5,8] x, int8[8,24] w, float s) => (y)"
         "{ y = com.microsoft.QAttention<num_heads=2>(x, w, b, s, s) }"), 5 * 8 * 24 + 2 * 40 * 5),
        (("(float[6,1,4] x, int8[1,4,20] w, int8[1,5,20] r) => (y) "
         "{ y, h = com.microsoft.DynamicQuantizeLSTM<hidden_size=5>(x, w, r) }"), 6 * (20 * 4 + 20 * 5)),
        (("(float[1,5,64] x, uint8[7,2,16] w, float[14] s) => (float[1,5,7] y) "
         "{ y = com.microsoft.MatMulNBits<K=64, N=7, bits=4, block_size=32>(x, w, s) }"), 5 * 64 * 7),
    ],
)  # fmt: skip
def test_multiply_accumulates_are_counted_by_operator(body: str, macs: int) -> None:
    graph = graph_of(f"g {body}")
    assert count_macs(graph, graph.nodes[0]) == macs
