"""Where the change of the layout to NHWC leaves a Transpose at an output of the graph, as ONNX Runtime makes it."""

import pytest
from check_models import check_text, graph_of, why_not

from edgekit.graph.nhwc import find_orders

_HEAD = "<float[5,4,1,1] w = {1}, float half = {0.5}, int64[1] axis = {1}, int64[4] pads = {0,0,1,1}>"
_LAST, _MOVED = (0, 3, 1, 2), (0, 2, 1)

# What follows a Conv, and the Transpose that is left behind it: None where it cancels, or stays before the last node.
TAILS = {
    "a = Relu(c) y = Cast<to=2>(a)": _LAST,
    "a = Greater(c, half) y = Cast<to=2>(a)": _LAST,
    "a = Add(c, x1) y = Cast<to=2>(a)": _LAST,
    "a = Neg(c) b = Concat<axis=1>(a, c) y = Cast<to=2>(b)": _LAST,
    "a = Concat<axis=1>(c, x) y = Cast<to=2>(a)": None,
    "a = Softmax<axis=1>(c) y = Cast<to=2>(a)": _LAST,
    "a = ReduceMean<axes=[1]>(c) y = Cast<to=2>(a)": _LAST,
    "a = ReduceMean<axes=[1], keepdims=0>(c) y = Cast<to=2>(a)": None,
    "a = ArgMax<axis=2, keepdims=0>(c) y = Cast<to=2>(a)": _MOVED,
    "a = ArgMax<axis=1, keepdims=0>(c) y = Cast<to=2>(a)": None,
    "a = ArgMax<axis=1>(c) b = Squeeze(a, axis) y = Cast<to=2>(b)": None,
    "a = ArgMax<axis=1, keepdims=0>(c) b = Unsqueeze(a, axis) y = Cast<to=2>(b)": None,
    "a = ArgMax<axis=3, keepdims=0>(c) b = Unsqueeze(a, axis) y = Cast<to=2>(b)": (0, 1, 3, 2),
    "a = Transpose<perm=[0,2,3,1]>(c) y = Cast<to=2>(a)": None,
    "a = CumSum(c, axis) y = Cast<to=2>(a)": None,
    "a = GlobalAveragePool(x) y = Cast<to=2>(a)": _LAST,
    "y = Cast<to=2>(x)": None,
    "y = Add(half, half)": None,
}


@pytest.mark.parametrize("tail", TAILS)
def test_a_transpose_is_left_where_none_cancels_it(tail: str) -> None:
    body = f"g (float[1,4,8,6] x, float[1,1,8,6] x1) => (float[1,5,8,6] c) {_HEAD} {{ c = Conv(x, w) {tail} }}"
    assert find_orders(graph_of(body)).get("y") == TAILS[tail]


def test_integers_behind_a_quantizer_may_be_transposed() -> None:
    head = "<float[5,4,1,1] w = {1}, float s = {0.1}, uint8 z = {0}>"
    body = f"g (float[1,4,8,6] x) => (uint8[1,5,8,6] y) {head} {{ c = Conv(x, w) y = QuantizeLinear(c, s, z) }}"
    assert why_not(check_text(body, "qnn")) == ""
