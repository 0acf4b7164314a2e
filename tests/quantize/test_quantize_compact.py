import numpy as np
import onnx
import pytest
from onnx import parser

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.quantize.qdq import compact_qdq

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[1,2,4,4] x, bool flag) => (float[1,2,4,4] y)
<float s = {0.5}, uint8 z = {3}, float s2 = {0.5}, uint8 z2 = {3}, int8[2,1,1,1] w = {5, -7}, float[2] ws = {0.1, 0.2},
 int8[2] wz = {0, 0}, int8[2,1,1,1] v = {2, 9}, float[2] vs = {0.3, 0.4}, int8[2] vz = {0, 0}, int32[2] b = {9, -8},
 float[2] bs = {0.05, 0.1}, int32[2] bz = {0, 0}>
{
  long_x = QuantizeLinear(x, s, z)
  long_dx = DequantizeLinear(long_x, s, z)
  long_w = DequantizeLinear<axis = 0>(w, ws, wz)
  long_b = DequantizeLinear<axis = 0>(b, bs, bz)
  first = Conv<group = 2, auto_pad = "NOTSET", dilations = [1, 1], strides = [1, 1], pads = [0, 0, 0, 0]>
    (long_dx, long_w, long_b)
  long_f = QuantizeLinear(first, s2, z2)
  long_df = DequantizeLinear(long_f, s2, z2)
  long_v = DequantizeLinear<axis = 0>(v, vs, vz)
  second = Conv<group = 2, pads = [1, 0, 1, 0], strides = [1, 1]>(long_df, long_v)
  y = If(flag) <
    then_branch = one () => (float[1,2,4,4] a) { b1 = Slice(second, i0, i4, i2) a = Add(b1, long_df) },
    else_branch = two () => (float[1,2,4,4] c) { c = Neg(long_df) }>
}
"""


def qdq_model() -> onnx.ModelProto:
    proto = parser.parse_model(TEXT)
    for name, value in (("i0", 0), ("i4", 4), ("i2", 2)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
    for index, node in enumerate(proto.graph.node):
        node.name, node.doc_string = f"node {index}", "where it was written"
    return proto


def run(proto: onnx.ModelProto, *, flag: bool) -> np.ndarray:
    session = CpuSession(proto.SerializeToString(), SessionSettings(level=Level.DISABLED))
    x = np.random.default_rng(0).normal(size=(1, 2, 4, 4)).astype(np.float32)
    return session.run({"x": x, "flag": np.array(flag)})["y"]


@pytest.fixture(scope="module")
def small() -> onnx.ModelProto:
    proto = qdq_model()
    compact_qdq(proto)
    return proto


def test_a_compact_model_is_smaller_and_computes_the_same_in_bodies_too(small: onnx.ModelProto) -> None:
    whole = qdq_model()
    for flag in (True, False):
        np.testing.assert_array_equal(run(whole, flag=flag), run(small, flag=flag))
    assert small.ByteSize() < 0.8 * whole.ByteSize()
    onnx.checker.check_model(small, full_check=True)


def test_attributes_with_their_default_and_doc_strings_are_left_out(small: onnx.ModelProto) -> None:
    first, second = ({item.name for item in node.attribute} for node in small.graph.node if node.op_type == "Conv")
    assert (first, second) == ({"group"}, {"group", "pads"})
    assert not any(node.doc_string for node in small.graph.node)


def test_activations_share_scales_and_zero_points_and_weights_do_not(small: onnx.ModelProto) -> None:
    stored = {tensor.name: tensor for tensor in small.graph.initializer}
    reads = [tuple(node.input) for node in small.graph.node if node.op_type.endswith("antizeLinear")]
    activations = {names[1:] for names in reads if names[0] not in stored}
    weights = {names for names in reads if names[0] in stored}
    assert len(activations) == 1
    assert len({names[2] for names in weights}) == len(weights) == 3


def test_short_names_do_not_hide_names_in_bodies(small: onnx.ModelProto) -> None:
    names = [tensor.name for tensor in small.graph.initializer]
    names += [name for node in small.graph.node for name in node.output]
    assert len(names) == len(set(names))
    assert {"a", "b1", "c"}.isdisjoint(names)
    assert {"first", "second", "long_df", "y"} <= set(names)
    assert {node.name for node in small.graph.node if node.op_type == "Conv"} == {"node 4", "node 8"}
