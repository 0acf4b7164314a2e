"""What no model may be is refused when it is read; what ONNX Runtime takes is not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from tiny_models import parse_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.errors import ModelError, RuntimeRefusal
from edgekit.model.model import load_model, read_proto

LOOP = """<ir_version: 9, opset_import: ["" : 17]>
loop (float[1,4] x) => (float[1,4] y, float[K,1,4] all) <int64 n = {3}, bool go = {1}> {
  y, all = Loop <body = step (int64 i, bool c, float[1,4] before) => (bool again, float[1,4] after, float[1,4] seen)
    { again = Identity(c) after = Add(before, x) seen = Relu(after) }> (n, go, x) }"""
TWO = '<ir_version: 9, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y) { t = Relu(x) y = Neg(t) }'
SPLIT = (
    TWO.replace("17", "18").replace("t = Relu(x)", "t, c = Split<axis=1, num_outputs=2>(x)").replace("1,4] y", "1,2] y")
)
Change = Callable[[onnx.ModelProto], object]


def call_itself(proto: onnx.ModelProto) -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    for name, called in (("F", "G"), ("G", "F")):
        node = helper.make_node(called, ["a"], ["b"], domain="local")
        proto.functions.append(helper.make_function("local", name, ["a"], ["b"], [node], opsets))
    proto.opset_import.add(domain="local", version=1)
    proto.graph.node.append(helper.make_node("F", ["x"], ["f"], domain="local"))


def set_name(proto: onnx.ModelProto, node: int, side: str, name: str) -> None:
    getattr(proto.graph.node[node], side)[0] = name


def add_tensor(proto: onnx.ModelProto, data_type: int = 1, dim: int = 2) -> None:
    proto.graph.initializer.append(TensorProto(name="w", data_type=data_type, dims=[dim]))


def call_itself_twice(proto: onnx.ModelProto) -> None:
    call_itself(proto)
    proto.functions.append(proto.functions[0])


def point_out(proto: onnx.ModelProto, **where: str) -> None:
    add_tensor(proto)
    proto.graph.initializer[0].data_location = TensorProto.EXTERNAL
    for key, value in where.items():
        proto.graph.initializer[0].external_data.add(key=key, value=value)


def wait_in_a_body(proto: onnx.ModelProto) -> None:
    """The body of a node reads what is made of that node's output."""
    proto.graph.node[0].attribute[0].g.node[1].input[1] = "late"
    proto.graph.node.append(helper.make_node("Relu", ["y"], ["late"]))


FLAWS: dict[str, tuple[str, Change]] = {
    "calls itself": (TWO, call_itself),
    "two local functions": (TWO, call_itself_twice),
    "'t' is made twice": (TWO, lambda p: set_name(p, 1, "output", "t")),
    "reads 'nowhere'": (TWO, lambda p: set_name(p, 1, "input", "nowhere")),
    "its own output": (TWO, lambda p: set_name(p, 0, "input", "y")),
    "made of its own output": (LOOP, wait_in_a_body),
    "without a location": (TWO, lambda p: point_out(p, offset="0")),
    "unknown key 'x'": (TWO, lambda p: point_out(p, location="w.data", x="1")),
    "an invalid offset or length": (TWO, lambda p: point_out(p, location="w.data", offset="-2")),
    "an invalid equation": (
        TWO, lambda p: p.graph.node.append(helper.make_node("Einsum", ["x"], ["e"], equation="ssh:host"))
    ),
    "output 'gone'": (TWO, lambda p: setattr(p.graph.output[0], "name", "gone")),
    "has 2 inputs, the operator takes 1 to 1": (TWO, lambda p: p.graph.node[0].input.append("x")),
    "num_outputs says 2": (SPLIT, lambda p: p.graph.node[0].output.append("d")),
    "has 0 outputs": (TWO, lambda p: p.graph.node.add(op_type="Neg", input=["x"])),
    "has 1 inputs": (LOOP, lambda p: p.graph.node[0].input.__delitem__(slice(1, None))),
    "the same number of inputs": (LOOP, lambda p: p.graph.node[0].input.append("x")),
    "lacks the attribute 'body'": (LOOP, lambda p: p.graph.node[0].ClearField("attribute")),
    "of another type": (
        TWO, lambda p: p.graph.node.add(op_type="Softmax", input=["x"], output=["s"]).attribute.append(
            helper.make_attribute("axis", "one")
        )
    ),
    "from a function, but is in none": (
        TWO, lambda p: p.graph.node[0].attribute.add(name="alpha", ref_attr_name="a", type=1)
    ),
    "without a type": (TWO, lambda p: p.graph.node[0].attribute.add(name="odd")),
    "the invalid type 99": (TWO, lambda p: add_tensor(p, data_type=99)),
    r"shape \[-2\]": (TWO, lambda p: add_tensor(p, dim=-2)),
    "the shape": (TWO, lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 2**62)),
    "opset 0": (TWO, lambda p: setattr(p.opset_import[0], "version", 0)),
    "opset 9223372036854775807": (TWO, lambda p: p.opset_import.add(domain="x", version=2**63 - 1)),
}  # fmt: skip


@pytest.mark.parametrize("message", FLAWS)
def test_a_flaw_is_named_in_a_line(tmp_path: Path, message: str) -> None:
    text, change = FLAWS[message]
    proto = parser.parse_model(text)
    change(proto)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "m.onnx")


# ONNX Runtime takes these until somebody uses what is wrong.
UNUSED = {"the shape", "of another type", "without a type", r"shape \[-2\]", "two local functions"}
UNUSED |= {"opset 9223372036854775807", "without a location", "unknown key 'x'", "an invalid offset or length"}


# The process ends in these, with ONNX Runtime too.
DEADLY = {"num_outputs says 2"}


@pytest.mark.parametrize("message", [name for name in FLAWS if name not in UNUSED | DEADLY])
def test_onnx_runtime_refuses_it_too(message: str) -> None:
    text, change = FLAWS[message]
    proto = parser.parse_model(text)
    change(proto)
    with pytest.raises(RuntimeRefusal):
        CpuSession(proto.SerializeToString(), SessionSettings(level=Level.DISABLED))


def test_torn_weights_are_named_where_they_are_read(tmp_path: Path) -> None:
    proto = parser.parse_model(TWO)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "w"))
    proto.graph.initializer[0].raw_data = b"\0" * 15
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="'w' has 15 bytes, its type and shape want 16"):
        read_proto(load_model(tmp_path / "m.onnx"))


@pytest.mark.parametrize("text", [TWO, LOOP])
def test_sound_models_pass_in_any_order_of_their_nodes(tmp_path: Path, text: str) -> None:
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    proto = read_proto(model)
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    (tmp_path / "r.onnx").write_bytes(proto.SerializeToString())
    assert load_model(tmp_path / "r.onnx").node_count == model.node_count


def test_bodies_read_and_name_as_the_graph_around_them_and_contributed_operators_are_not_judged(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (float[1,4] x, bool c) => (float[1,4] z) { z = Relu(y) t = com.microsoft.Gelu(x)
      y = If (c) <then_branch = a () => (float[1,4] y) { q = Neg(t) y = Neg(q) },
        else_branch = b () => (float[1,4] y) { y = Neg(t) }> }"""
    assert load_model(parse_model(text, tmp_path / "m.onnx")).node_count == 3


@pytest.mark.parametrize("equation", ["ij", "ij->ji", "...j -> ...", " i j -> i", "ij,jk->ik", "b...,...->b"])
def test_equations_of_einsum_pass(tmp_path: Path, equation: str) -> None:
    proto = parser.parse_model(TWO)
    count = equation.count(",") + 1
    proto.graph.node.append(helper.make_node("Einsum", ["x"] * count, ["e"], equation=equation))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert load_model(tmp_path / "m.onnx").node_count == 3


@pytest.mark.parametrize("in_node", [False, True])
def test_where_weights_lie_is_told_in_text(tmp_path: Path, *, in_node: bool) -> None:
    proto = parser.parse_model(TWO)
    point_out(proto, location="w.data")
    if in_node:
        proto.graph.node.append(helper.make_node("Constant", [], ["c"], value=proto.graph.initializer.pop()))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString().replace(b"location", b"loca\xf4ion"))
    with pytest.raises(ModelError, match="no UTF-8"):
        load_model(tmp_path / "m.onnx")
