"""Graphs that take pixels from 0 to 255 are told from those that want them scaled."""

import numpy as np
import onnx.parser
import pytest

from edgekit.graph.graph import view_model
from edgekit.graph.spatial import takes_raw_pixels
from edgekit.model.tensors import Array

CONV = "y = Conv(p, w, b)"


def takes(nodes: str, *, weight: float, bias: Array | float = 1.0) -> bool:
    """Asks a graph of eight filters of 3 x 3 x 3 weights that are drawn with this deviation."""
    numbers = "float big = {127.5}, float small = {0.0078125}, float two = {2.0}, float wide = {255.0}"
    constants = f"<{numbers}, float[3] three = {{1.0, 1.0, 1.0}}>"
    graph = f"g (float[1,3,8,8] x) => (float[1,8,6,6] y) {constants} {{ {nodes} }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {graph}')
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(0, weight, (8, 3, 3, 3)), "b": np.broadcast_to(bias, (8,)) * rng.choice([-1.0, 1.0], 8)}
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return takes_raw_pixels(view_model(model), "x")


@pytest.mark.parametrize(
    "nodes",
    ["d = Sub(x, big) p = Mul(d, small)", "p = Div(x, wide)", "p = InstanceNormalization(x, three, three)"],
)
def test_a_graph_that_scales_takes_raw_pixels(nodes: str) -> None:
    assert takes(f"{nodes} {CONV}", weight=0.2)


def test_weights_of_the_first_layer_tell() -> None:
    """As those of YuNet, YOLOX and OpenNSFW do, which take raw pixels; nothing else in their graphs says so."""
    assert takes(f"p = Identity(x) {CONV}", weight=0.004)
    assert not takes(f"p = Identity(x) {CONV}", weight=0.2)
    # The graph doubles what it gets: scaled pixels.
    assert not takes(f"d = Mul(x, two) p = Sub(d, two) {CONV}", weight=0.2)
    assert not takes(f"p = Identity(x) {CONV}", weight=0.004, bias=0.0)
    assert not takes("p = Sigmoid(x) y = Conv(p, w)", weight=0.004)


def test_numbers_that_choose_rows_of_a_table_are_no_pixels() -> None:
    """As the codes of letters that deepcut and nakdimon take as floats."""
    text = """g (float[1,3] x) => (float[1,3,2] y) <float[300,2] table = {ZEROS}>
      { c = Cast<to = 7>(x) y = Gather(table, c) }""".replace("ZEROS", ",".join(["0.0"] * 600))
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    assert takes_raw_pixels(view_model(model), "x")
