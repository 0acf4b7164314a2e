"""Multiply-accumulates from shapes, against counts made by hand."""

import pytest
from check_models import graph_of

from edgekit.check.macs import count_macs


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
        (("(float[1,5,64] x, uint8[7,2,16] w, float[14] s) => (float[1,5,7] y) "
         "{ y = com.microsoft.MatMulNBits<K=64, N=7, bits=4, block_size=32>(x, w, s) }"), 5 * 64 * 7),
    ],
)  # fmt: skip
def test_counts(body: str, macs: int) -> None:
    graph = graph_of(f"g {body}")
    assert count_macs(graph, graph.nodes[0]) == macs
