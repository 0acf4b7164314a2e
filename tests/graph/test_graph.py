"""The one view of a graph: constants in all forms, who makes and reads what, bodies, and inference without weights."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fixture_types import present
from onnx import TensorProto, helper, numpy_helper
from tiny_models import parse_net, save_net

from edgekit.errors import ModelError
from edgekit.graph.constants import lift_constants, list_constants
from edgekit.graph.graph import Graph, view_model, view_part
from edgekit.graph.inference import infer_model, refuse_empty_windows
from edgekit.graph.match import list_moved
from edgekit.graph.spatial import takes_raw_pixels
from edgekit.model.model import iterate_nodes, load_model
from edgekit.model.soundness import iterate_reads
from edgekit.model.tensors import Array
from edgekit.prepare.clean import prepare_model
from edgekit.verify.layers.matching import sort_nodes

CONTRIB = ', "com.microsoft" : 1'
BODIES = """(float[2] x, bool c) => (float[2] y) {
    a = Relu(x)
    b = Abs(x)
    y = If (c) <
        then_branch = t () => (float[2] u) { k = Constant<value_float=2.0>() u = Mul(a, k) },
        else_branch = e () => (float[2] v) { v = Add(a, b) }
    >
}"""


def view(text: str) -> Graph:
    return view_model(infer_model(parse_net(text, imports=CONTRIB)))


def test_a_window_that_begins_behind_the_input_makes_no_element() -> None:
    graph = view("""(float[1,1,7,6] x) => (int64[N] f) {
        y, i = MaxPool<kernel_shape=[3,2], strides=[2,2], ceil_mode=1, pads=[1,0,1,1]>(x)
        z = AveragePool<kernel_shape=[1,1], strides=[2,2], ceil_mode=1>(x)
        w = MaxPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(z)
        v = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) f = Shape(w) }""")
    assert [graph.value(name).shape for name in "yizwv"] == [(1, 1, 4, 3)] * 3 + [(1, 1, 2, 2), (1, 1, 3, 3)]
    assert {node.domain for node in graph.nodes} == {""}
    assert (len(graph.model.functions), len(graph.model.opset_import)) == (0, 2)


def test_an_stft_is_one_sided_unless_it_says_otherwise() -> None:
    graph = view("""(float[1,800,1] x) => (int64[N] f) <int64 s = {160}, int64 l = {400}>
        { y = STFT(x, s, , l) z = STFT<onesided=0>(x, s, , l) f = Shape(y) }""")
    assert [graph.value(name).shape for name in "yz"] == [(1, 3, 201, 2), (1, 3, 400, 2)]


def test_an_output_is_moved_if_nothing_computes_on_its_way() -> None:
    graph = view("""(float[2] x, float[1] c) => (float[4] y, float[3] z, float[2] w)
        <float s = {0.1}, uint8 o = {3}, int64[2] p = {1,1}> { q = com.microsoft.QuantizeLinear(x, s, o)
        d = DequantizeLinear(q, s, o) y = Pad(d, p) z = Concat<axis=0>(d, c) r = Relu(x) w = Neg(r) }""")
    assert list_moved(graph) == {"y", "z"}


def sparse_node() -> onnx.NodeProto:
    values = numpy_helper.from_array(np.array([3.0, 4.0], np.float32), "v")
    places = numpy_helper.from_array(np.array([[0, 1], [1, 0]], np.int64), "i")
    return helper.make_node("Constant", [], ["c"], sparse_value=helper.make_sparse_tensor(values, places, [2, 2]))


@pytest.mark.parametrize(
    ("form", "given"),
    [
        ("value", numpy_helper.from_array(np.array([1, 2], np.int8))),
        ("value_float", 1.5),
        ("value_floats", [1.0, 2.0]),
        ("value_int", 7),
        ("value_ints", [7, 8]),
        ("value_string", "a"),
        ("value_strings", ["a", "b"]),
    ],
)
def test_every_form_of_a_constant_is_read_and_lifted(form: str, given: Any) -> None:
    node = helper.make_node("Constant", [], ["c"], **{form: given})
    expected = [1, 2] if form == "value" else given
    graph = helper.make_graph([node, helper.make_node("Identity", ["c"], ["y"])], "g", [], [])
    seen = view_part(graph, 17)
    assert [node.op_type for node in seen.nodes] == ["Identity"]
    lift_constants(graph)
    for array in (seen.array("c"), view_part(graph, 17).array("c")):
        assert present(array).tolist() == expected
    assert ([node.op_type for node in graph.node], graph.initializer[0].name) == (["Identity"], "c")


def test_a_sparse_constant_has_its_zeros_and_none_outside() -> None:
    graph = helper.make_graph([sparse_node(), helper.make_node("Identity", ["c"], ["y"])], "g", [], [])
    graph.sparse_initializer.add().CopyFrom(sparse_node().attribute[0].sparse_tensor)
    seen = view_part(graph, 17)
    for name in ("c", "v"):
        assert present(seen.array(name)).tolist() == [[0, 3], [4, 0]]
    graph.sparse_initializer[0].dims[:] = [1 << 20, 1 << 20]
    assert (view_part(graph, 17).array("v"), view_part(graph, 17).value("v").shape) == (None, (1 << 20, 1 << 20))
    node = sparse_node()
    node.attribute[0].sparse_tensor.dims[:] = [1, 1]
    assert view_part(helper.make_graph([node], "g", [], []), 17).array("c") is None


def test_a_body_reads_what_it_hands_on_and_owns_its_sparse_constants() -> None:
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    handing = helper.make_graph([], "t", [], [helper.make_tensor_value_info("a", TensorProto.FLOAT, [2])])
    adding = helper.make_graph([helper.make_node("Add", ["v", "b"], ["y"])], "e", [], [y])
    adding.sparse_initializer.add().CopyFrom(sparse_node().attribute[0].sparse_tensor)
    node = helper.make_node("If", ["c"], ["y"], then_branch=handing, else_branch=adding)
    assert view_part(helper.make_graph([node], "g", [], [y]), 17).captured == {"a", "b"}
    assert sorted(iterate_reads(node)) == ["a", "b", "c"]


def test_what_is_known_of_readers_constants_and_activations_is_told_apart() -> None:
    graph = view("(float[2] x) => (float[2] y) { y = Mul(x, x) }")
    assert (len(graph.consumers["x"]), len(graph.readers("x"))) == (2, 1)
    graph = view("(float[2,N] x) => (float[2,N] y) <float[2,1] w = {1,2}> { y = Add(x, w) }")
    assert (graph.value("w").static_shape, graph.static_shape("w"), graph.is_float("w")) == ((2, 1), None, False)
    assert (graph.dims("y"), graph.static_shape("y"), graph.value("y").elements) == ((2, None), None, 2)
    assert (graph.is_float("y"), graph.is_float_constant("w"), graph.is_float_constant("y")) == (True, True, False)
    assert (graph.opset, graph.inputs, set(graph.outputs)) == (17, ("x",), {"y"})


def external_model(path: Path, value: Array) -> onnx.ModelProto:
    proto = parse_net("() => (y) { y = Identity(w) }", {"before": np.ones(3, np.float32), "w": value})
    onnx.save(proto, path, save_as_external_data=True, location="data", size_threshold=0)
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int64, np.bool_])
def test_external_constants_are_mapped_not_copied(tmp_path: Path, kind: type) -> None:
    value: Array = np.arange(6).reshape(2, 3).astype(kind)
    graph = view_model(external_model(tmp_path / "m.onnx", value), tmp_path)
    assert (graph.is_external("w"), graph.array("w")) == (True, None)
    array = present(graph.constant("w"))
    assert (array.tolist(), array.dtype, array.flags.owndata) == (value.tolist(), value.dtype, False)


def test_an_external_scalar_and_an_empty_tensor_are_read(tmp_path: Path) -> None:
    scalar, empty = np.array(3, np.float32), np.zeros((0, 2), np.float32)
    for value in (scalar, empty):
        array = present(view_model(external_model(tmp_path / "m.onnx", value), tmp_path).constant("w"))
        assert array.tolist() == value.tolist()


def test_inference_leaves_weights_and_what_lies_around_them_as_they_are() -> None:
    text = "(float[1,32,8,8] x) => (float y) { c = Conv(x, w) y = com.microsoft.Gelu(c) }"
    proto = parse_net(text, {"w": np.zeros((64, 32, 8, 8), np.float32)}, imports=CONTRIB)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    before = proto.SerializeToString()
    inferred = infer_model(proto)
    assert proto.SerializeToString() == before
    assert [node.domain for node in inferred.graph.node] == ["", "com.microsoft"]
    assert ([value.name for value in inferred.graph.input], inferred.ByteSize() < 1000) == (["x"], True)
    seen = view_model(inferred)
    assert (seen.value("y").shape, seen.value("w").shape, seen.array("w")) == ((1, 64, 1, 1), (64, 32, 8, 8), None)


def test_what_dynamic_quantization_writes_has_types_and_shapes() -> None:
    lstm = 'l, , c = com.microsoft.DynamicQuantizeLSTM<hidden_size=5, direction="bidirectional">(x, w, r)'
    inputs = "float[6,1,4] x, int8[2,4,20] w, int8[2,5,20] r, float[1,6,8] e, int8[8,24] k, float[24] b, float s"
    read = view(f"({inputs}) => (l) {{ {lstm} a = com.microsoft.QAttention<num_heads=2>(e, k, b, s, s) }}")
    values = [read.value(name) for name in "lca"]
    assert [value.shape for value in values] == [(6, 2, 1, 5), (2, 1, 5), (1, 6, 8)]
    assert {value.dtype for value in values} == {"float32"}


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        ("com.microsoft.FusedMatMul(x, v)", (2, 3, 5)),
        ("com.microsoft.FusedMatMul<transA=1, transB=1>(v, x)", (2, 5, 3)),
        ("com.microsoft.FusedMatMul<transB=1>(x, z)", (2, 3, 7)),
        ("com.microsoft.FusedMatMul<transB=1>(x, w)", (2, 3, 6)),
        ("com.microsoft.FusedMatMul<transBatchB=1>(x, v)", None),
        ("com.microsoft.QGemm<transB=1>(q, s, o, r, s, o, , s, o)", (3, 6)),
        # Its result is not quantized, but float.
        ("com.microsoft.QGemm<transB=1>(q, s, o, r, s, o)", None),
    ],
)
def test_what_onnx_does_not_infer_has_a_shape(node: str, shape: tuple[int, ...] | None) -> None:
    floats, bytes_ = "float[2,3,4] x, float[2,4,5] v, float[2,7,4] z, float[6,4] w", "int8[3,4] q, int8[6,4] r"
    graph = view(f"({floats}, {bytes_}, float s, int8 o) => (y) {{ y = {node} }}")
    assert graph.value("y").shape == shape


@pytest.mark.parametrize("opset", [14, 17])
def test_a_layer_normalization_older_than_that_of_onnx_has_the_shape_of_its_input(opset: int) -> None:
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y"], domain="")
    vectors = [helper.make_tensor_value_info(name, 1, dims) for name, dims in (("x", [2, 3]), ("s", [3]))]
    graph = helper.make_graph([node], "g", vectors, [helper.make_empty_tensor_value_info("y")])
    inferred = infer_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))
    assert [dim.dim_value for dim in inferred.graph.output[0].type.tensor_type.shape.dim] == [2, 3]
    assert list(inferred.graph.node) == [node]


def test_contrib_nodes_in_the_body_of_a_contrib_node_stay_as_they_are() -> None:
    body = "b () => (float[2] u) { t = com.microsoft.Gelu(x) v = Abs(t) u = com.microsoft.QuickGelu(v) }"
    call = f"com.microsoft.GreedySearch <decoder = {body}> (x)"
    proto = parse_net(f"(float[2] x) => (y) {{ y = {call} }}", imports=CONTRIB)
    assert list(infer_model(proto).graph.node) == list(proto.graph.node)


def test_bodies_see_what_lies_around_them_and_count_as_readers() -> None:
    graph = view(BODIES)
    relu, absolute, branch = graph.nodes
    assert graph.captured == {"a", "b"}
    assert graph.consumers["a"] == (branch, branch)
    assert (graph.readers("a"), graph.readers("b"), graph.readers("y")) == ((branch,), (branch,), ())
    assert (graph.producers["a"], graph.producers["b"]) == (relu, absolute)
    then, other = branch.bodies
    assert (then.value("a").shape, other.value("b").dtype, then.number("k")) == ((2,), "float32", 2.0)
    assert "k" not in graph.constants
    assert then.producers.keys() == {"u"}
    assert view(BODIES.replace("v = Add(a, b)", "z = Relu(b) v = Add(z, z)")).captured == {"a", "b"}
    proto = parse_net(BODIES)
    assert list_constants(proto.graph) == {}
    assert set(list_constants(proto.graph.node[2].attribute[0].g)) == {"k"}


def test_the_order_of_the_file_is_kept() -> None:
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Abs", ["x"], ["a"])]
    graph = view_part(helper.make_graph(nodes, "g", [], []), 17)
    assert [node.op_type for node in graph.nodes] == ["Relu", "Abs"]
    assert [node.op_type for node in sort_nodes(graph)] == ["Abs", "Relu"]


@pytest.mark.parametrize(
    ("domain", "op", "given"),
    [
        ("", "EyeLike", {"dtype": 7}),
        ("", "RegexFullMatch", {"pattern": "a"}),
        ("ai.onnx.ml", "LabelEncoder", {"keys_int64s": [1], "values_floats": [1.0]}),
        ("ai.onnx.ml", "DictVectorizer", {"int64_vocabulary": [1]}),
    ],
)
def test_inference_outlives_operators_that_read_a_type_where_none_is(domain: str, op: str, given: Any) -> None:
    odd = helper.make_node("Odd", [], ["a"], domain="odd")
    node = helper.make_node(op, ["a"], ["y"], domain=domain, **given)
    graph = helper.make_graph([odd, node], "g", [], [])
    domains = [helper.make_opsetid(name, version) for name, version in (("", 22), ("ai.onnx.ml", 4), ("odd", 1))]
    model = helper.make_model(graph, opset_imports=domains)
    # Of what has no type nothing follows, and nothing is lost either: onnx alone ends the process here.
    inferred = infer_model(model)
    assert (list(inferred.graph.node), list(inferred.opset_import)) == (list(model.graph.node), domains)


def test_an_operator_that_needs_a_type_is_inferred_where_one_is_known_by_then() -> None:
    graph = view("(float[2,3] x) => (z) { y = Relu(x)  z = EyeLike<dtype=7>(y) }")
    assert (graph.values["z"].dtype, graph.values["z"].shape) == ("int64", (2, 3))
    assert {node.domain for node in graph.nodes} == {""}
    graph = view("(float[2,3] x) => (z) { z = EyeLike<dtype=7>(y)  y = Relu(x) }")
    assert graph.values["y"].shape == (2, 3)


@pytest.mark.parametrize(
    "text",
    [
        # Data of the input itself, and of a vector that only inference knows to be so long.
        "(int64[9999999999] x) => (z) { z = Cast<to=6>(x) }",
        "(int64[1] x) => (z) <int64[1] n = {9999999999}> { y = Expand(x, n) z = Cast<to=6>(y) }",
    ],
)
def test_data_of_very_long_vectors_are_not_followed(text: str) -> None:
    assert view(text).values["z"].shape == (9999999999,)


def test_data_are_followed_beside_large_numbers_that_make_no_vector() -> None:
    text = """(float[4,6] x) => (z) <int64[1] zero = {0}, int64[1] end = {9223372036854775807}, int64[1] one = {1}> {
        s = Shape(x) t = Slice(s, one, end) r = Concat<axis=0>(one, t) z = Expand(x, r) }"""
    assert view(text).values["z"].shape == (4, 6)


@pytest.mark.parametrize("kind", [float, int])
def test_the_lists_of_trees_are_not_read_number_by_number(kind: type[float]) -> None:
    numbers = [kind(number) for number in range(70_000)]
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", long=numbers, short=[1, 2, 3])
    (found,) = view_part(helper.make_graph([node], "g", [], [])).nodes
    assert found.attributes == {"long": "long list", "short": (1, 2, 3)}
    assert found.entries("long") is None


# Graphs that take pixels from 0 to 255 are told from those that want them scaled.

CONV = "y = Conv(p, w, b)"


def takes(nodes: str, *, weight: float, bias: Array | float = 1.0) -> bool:
    """Asks a graph of eight filters of 3 x 3 x 3 weights that are drawn with this deviation."""
    numbers = "float big = {127.5}, float small = {0.0078125}, float two = {2.0}, float wide = {255.0}"
    constants = f"<{numbers}, float[3] three = {{1.0, 1.0, 1.0}}>"
    rng = np.random.default_rng(0)
    drawn = {"w": rng.normal(0, weight, (8, 3, 3, 3)), "b": np.broadcast_to(bias, (8,)) * rng.choice([-1.0, 1.0], 8)}
    weights = {name: value.astype(np.float32) for name, value in drawn.items()}
    text = f"(float[1,3,8,8] x) => (float[1,8,6,6] y) {constants} {{ {nodes} }}"
    return takes_raw_pixels(view_model(parse_net(text, weights)), "x")


@pytest.mark.parametrize(
    "nodes", ["d = Sub(x, big) p = Mul(d, small)", "p = Div(x, wide)", "p = InstanceNormalization(x, three, three)"]
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
    text = "(float[1,3] x) => (float[1,3,2] y) { c = Cast<to = 7>(x) y = Gather(table, c) }"
    assert takes_raw_pixels(view_model(parse_net(text, {"table": np.zeros((300, 2), np.float32)})), "x")


# A window larger than its input, for which onnx infers a negative size: the inference of Slice ends the process on it.
_SMALL = "e = Conv(x, w) d = Slice(e, zero, two, two)"
_BEHIND = "b = Slice(x, zero, three, two) e = Conv(b, w) d = Slice(e, zero, two, two)"
_LATER = "e = Conv(x, w) r = Relu(e) d = Slice(r, zero, two, two)"
_THEN = "then_branch = t () => (float[g,h,i,j] s) {{ {} }}"
_BODY = "If<" + _THEN + ", else_branch = o () => (float[k,l,m,n] f) {{ f = Identity(e) }}>(yes)"
_INNER = "z = Constant<value_ints = [0]>() t = Constant<value_ints = [2]>() s = Slice(e, z, t, t)"
_INSIDE = "e = Conv(x, w) d = " + _BODY.format(_INNER)
_AFTER = "e = Conv(x, w) r = " + _BODY.format("s = Relu(e)") + " d = Slice(r, zero, two, two)"


@pytest.mark.parametrize(
    ("made", "shape"),
    [("Pad(x, cut)", "-2"), ("Pad(y, cut)", "-3"), ("ConvTranspose<pads=[5, 5]>(x, w)", "-5")],
)
def test_a_slice_behind_what_cuts_off_too_much_ends_no_process(made: str, shape: str, tmp_path: Path) -> None:
    model = save_net(
        f"(float[1,1,3] x) => (float[a,b,c] z) {{ y = MaxPool<kernel_shape=[2]>(x) e = {made} z = Slice(e, s, t, t) }}",
        tmp_path / "m.onnx",
        w=np.ones((1, 1, 3), np.float32), cut=np.array([0, 0, -2, 0, 0, -3]), s=np.array([0]), t=np.array([2]),
    )  # fmt: skip
    with pytest.raises(ModelError, match=rf"would make a tensor of shape \[1, 1, {shape}\]"):
        prepare_model(model, tmp_path / "p.onnx")


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (_SMALL, 3),
        (_BEHIND, 30),
        ("b = Slice(x, zero, two, zero) " + _SMALL, 3),
        (_LATER, 3),
        (_INSIDE, 3),
        (_AFTER, 3),
    ],
)
def test_a_slice_of_a_negative_size_ends_no_process(body: str, rows: int, tmp_path: Path) -> None:
    model = save_net(
        f"(float[1,1,{rows},8] x) => (float[a,b,c,d] y) {{ {body} y = Relu(d) }}", tmp_path / "m.onnx",
        w=np.ones((2, 1, 7, 3), np.float32), zero=np.array([0]), two=np.array([2]), three=np.array([3]),
        yes=np.array(True),
    )  # fmt: skip
    proto = onnx.load(model.path)
    inferred = infer_model(proto)
    assert [(node.domain, *node.output) for node in iterate_nodes(inferred.graph)] == [
        (node.domain, *node.output) for node in iterate_nodes(proto.graph)
    ]
    with pytest.raises(ModelError, match=r"\(Conv\) would make a tensor of shape \[1, 2, -3, 6\]"):
        prepare_model(model, tmp_path / "p.onnx")


def test_a_negative_size_that_data_propagation_loses_ends_no_process() -> None:
    """An Expand that data propagation refuses; a large constant has inference run without it first."""
    proto = parse_net(
        """(float[1,2,3,2] x) => (float[a,b,c,d] y) <int64[1] low = {-4}, int64[1] high = {-2}, int64[1] three = {3},
        int64[1] zero = {0}, int64[1] two = {2}, int64[1] big = {2147483647}> {
        none = Slice(x, low, high, three) size = Shape(x) wide = Expand(none, size) e = Conv(wide, w)
        y = Slice(e, zero, two, three) }""",
        {"w": np.ones((2, 2, 3, 3), np.float32)},
    )
    assert [each.op_type for each in infer_model(proto).graph.node] == [each.op_type for each in proto.graph.node]


@pytest.mark.parametrize(("name", "shape"), [("x", (1, 1, -1, 8)), ("y", (1, 2, -1, 6))])
def test_a_size_of_minus_one_is_an_open_one(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    weights = {"w": np.ones((2, 1, 7, 3), np.float32)}
    proto = parse_net("(float[1,1,n,8] x) => (float[1,2,c,6] y) { e = Conv(x, w) y = Relu(e) }", weights)
    (stated,) = (each for each in (*proto.graph.input, *proto.graph.output) if each.name == name)
    stated.CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    onnx.save(proto, tmp_path / "m.onnx")
    fixed = prepare_model(load_model(tmp_path / "m.onnx"), tmp_path / "p.onnx", {"x:2" if name == "x" else "n": 9})
    assert [spec.shape for spec in fixed.outputs] == [(1, 2, 3, 6)]
    # Nor is the model refused while its sizes are open.
    refuse_empty_windows(proto)


def test_a_slice_of_an_open_size_of_minus_one_ends_no_process() -> None:
    proto = parse_net(
        "(float[1,n] x) => (float[1,m] y) <int64[1] one = {1}, int64[1] two = {2}> { y = Slice(x, one, two, one) }"
    )
    proto.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, -1)))
    assert view_model(infer_model(proto)).value("y").shape == (1, None)


# ONNX Runtime runs the other branch of an If, but a Slice in either ends its process.
@pytest.mark.parametrize(("body", "fits"), [("e = Conv(x, w) d = Relu(e)", True), (_SMALL, False)])
def test_a_branch_that_may_never_run_can_have_too_large_a_window(body: str, fits: bool, tmp_path: Path) -> None:
    model = save_net(
        f"""(float[1,1,n,8] x, bool b) => (float[p,q,r,s] y) {{
            y = If<then_branch = t () => (float[a,c,g,h] d) {{ {body} }},
            else_branch = o () => (float[i,j,k,l] f) {{ f = Relu(x) }}>(b) }}""",
        tmp_path / "m.onnx", w=np.ones((2, 1, 7, 3), np.float32), zero=np.array([0]), two=np.array([2]),
    )  # fmt: skip
    with contextlib.nullcontext() if fits else pytest.raises(ModelError, match="too small for this network"):
        prepare_model(model, tmp_path / "p.onnx", {"n": 5})


def test_slices_behind_windows_that_fit_are_inferred(tmp_path: Path) -> None:
    model = save_net(
        """(float[1,1,30,8] x) => (float[a,b,c,d] y) {
            b = Slice(x, zero, nine, two) e = Conv(b, w) y = Slice(e, zero, two, two) }""",
        tmp_path / "m.onnx", w=np.ones((2, 1, 7, 3), np.float32), zero=np.array([0]), two=np.array([2]),
        nine=np.array([9]),
    )  # fmt: skip
    found = view_model(infer_model(onnx.load(model.path)))
    assert (found.value("e").shape, found.value("y").shape) == ((1, 2, 3, 6), (1, 2, 2, 6))
