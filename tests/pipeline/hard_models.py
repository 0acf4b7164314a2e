"""Models that are difficult to quantize, each with its samples."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper
from tiny_models import parse_net

from edgekit.model.tensors import Array

COUNT = 12
_RANDOM = np.random.default_rng(3)


class Hard(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its samples, and the sizes of its dynamic dimensions."""

    proto: onnx.ModelProto
    data: dict[str, Array]
    dims: dict[str, int] = {}


def _normal(*shape: int, scale: float = 1.0) -> Array:
    return _RANDOM.normal(0, scale, shape).astype(np.float32)


def _kernel(outputs: int, inputs: int) -> Array:
    return _normal(outputs, inputs, 3, 3, scale=1 / np.sqrt(9 * inputs))


X = {"x": _normal(COUNT, 1, 3, 12, 12)}
W1, W2 = _kernel(8, 3), _kernel(4, 8)
IMAGE = "float[1,3,12,12] x"
NET = "c = Conv<pads=[1,1,1,1]>(x, w, b) r = Relu(c) y = Conv(r, w2)"


def _hard(
    nodes: str, inputs: str = IMAGE, outputs: str = "float y", *, data: dict[str, Array] | None = None, opset: int = 17,
    ir: int = 8, dims: dict[str, int] | None = None, **weights: Array,
) -> Hard:  # fmt: skip
    """A graph from onnx's text form, whose nodes are named after their outputs; `float y` is of no known shape."""
    proto = parse_net(f"({inputs}) => ({outputs}) {{ {nodes} }}", weights, opset=opset, ir_version=ir)
    for node in proto.graph.node:
        node.name = node.output[0]
    for value in proto.graph.output:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.shape.dim:
            value.type.tensor_type.ClearField("shape")
    return Hard(proto=proto, data=X if data is None else data, dims=dims or {})


def _net(
    weight: Array = W1, bias: Array | None = None, *, batch: str = "1", opset: int = 17, ir: int = 8,
    data: dict[str, Array] | None = None, dims: dict[str, int] | None = None,
) -> Hard:  # fmt: skip
    return _hard(
        NET, f"float[{batch},3,12,12] x", f"float[{batch},4,10,10] y", data=data, opset=opset, ir=ir, dims=dims,
        w=weight, b=_normal(8, scale=0.1) if bias is None else bias, w2=W2,
    )  # fmt: skip


def _conv(nodes: str, outputs: str = "float y", **more: Any) -> Hard:
    return _hard(f"c = Conv(x, w) {nodes}", outputs=outputs, w=W1, **more)


def _edited(edit: Callable[[onnx.GraphProto], object], *, opset: int = 17, ir: int = 8) -> Hard:
    hard = _net(opset=opset, ir=ir)
    edit(hard.proto.graph)
    return hard


def _name_all(graph: onnx.GraphProto, name: str) -> None:
    for node in graph.node:
        node.name = name


def _list_weights(graph: onnx.GraphProto) -> None:
    graph.input.extend(
        helper.make_tensor_value_info(tensor.name, onnx.TensorProto.FLOAT, tensor.dims) for tensor in graph.initializer
    )


def _lift_weights(graph: onnx.GraphProto) -> None:
    made = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in graph.initializer]
    nodes = list(graph.node)
    del graph.node[:], graph.initializer[:]
    graph.node.extend([*made, *nodes])


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)


def _renamed(**names: str) -> Hard:
    """The network with other names of its tensors, which the text form may not allow."""
    return _edited(lambda graph: _rename(graph, names))


def _spoilt(value: float) -> Array:
    weight = W1.copy()
    weight[0, 0, 0, 0] = value
    return weight


def _picked(limit: float) -> Hard:
    """Values above a limit; their number depends on the input."""
    nodes = "g = Greater(c, limit) i = NonZero(g) j = Transpose(i) v = GatherND(c, j) y = Mul(v, v)"
    return _conv(nodes, limit=np.array(limit, np.float32))


def _rows(*shape: int) -> dict[str, Array]:
    return {"x": _normal(COUNT, *shape)}


def _words(words: Array) -> Hard:
    weights: dict[str, Any] = {"table": _normal(20, 8), "w": _normal(8, 4)}
    return _hard("e = Gather(table, x) y = MatMul(e, w)", "int64[1,6] x", data={"x": words}, **weights)


BRANCHES = """r = Relu(c) m = ReduceMean<keepdims=0>(x) if_so = Greater(m, zero)
  i = If(if_so) <then_branch = then () => (float[1,4,8,8] t) { t = Conv(r, w2) },
                 else_branch = else () => (float[1,4,8,8] e) { e = Conv(r, w3) }> y = Conv(i, w4)"""
LOOP = """y = Loop(n, , c) <body = body (int64 turn, bool go, float[1,8,10,10] s) => (bool on, float[1,8,10,10] u)
  { t = Conv<pads=[1,1,1,1]>(s, w2) u = Relu(t) on = Identity(go) }>"""
LISTED = "q = SplitToSequence<axis=1, keepdims=1>(c)"

TAKEN: dict[str, Hard] = {
    "double model": _hard(
        "y = MatMul(x, w)", "double[1,8] x", "double[1,4] y", w=_normal(8, 4).astype(np.float64),
        data={"x": _normal(COUNT, 1, 8).astype(np.float64)},
    ),
    "names of scales": _renamed(c="x_scale", r="w_scale"),
    "names of integers": _renamed(c="x_QuantizeLinear_Output", r="w_quantized"),
    "names of biases": _renamed(c="w_quantized_scale", r="b_quantized", b="x_zero_point"),
    "names of ours": _renamed(c="edgekit.flat", r="edgekit.1", w="edgekit.axes.2.3"),
    "a factor named as a scale": _conv(
        "r = Relu(c) m = Mul(r, r_scale) y = Conv(m, w2)", r_scale=np.array(3, np.float32), w2=W2
    ),
    "an output named as a scale": _conv("c_scale = Relu(c)", "float c_scale"),
    "unnamed nodes": _edited(lambda graph: _name_all(graph, "")),
    "nodes of one name": _edited(lambda graph: _name_all(graph, "same")),
    "shared weights": _hard(
        "a = Conv<pads=[1,1,1,1]>(x, w) r = Relu(a) y = Conv<pads=[1,1,1,1]>(r, w)", "float[1,8,6,6] x",
        data=_rows(1, 8, 6, 6), w=_kernel(8, 8),
    ),
    "weights shared crosswise": _hard(
        "a = MatMul(x, w) y = Gemm<transB=1>(a, w)", "float[4,8] x", data=_rows(4, 8), w=_normal(8, 8)
    ),
    "weights as inputs, opset 7, IR 3": _edited(_list_weights, opset=7, ir=3),
    "opset 7": _net(opset=7),
    "opset 25": _net(opset=25, ir=11),
    "constant nodes": _edited(_lift_weights),
    "weight of zeros": _net(np.zeros_like(W1)),
    "channel of zeros": _net(W1 * (np.arange(8) != 2).reshape(8, 1, 1, 1).astype(np.float32)),
    "tiny channel with a bias": _net(W1 * np.float32(1e-9), np.full(8, 5, np.float32)),
    "denormal weights": _net((W1 * 1e-40).astype(np.float32)),
    "huge biases": _net(bias=np.full(8, 1e9, np.float32)),
    "one huge bias": _net(bias=np.array([1e6, *[0.0] * 7], np.float32)),
    "samples of zeros": _net(data={"x": np.zeros_like(X["x"])}),
    "scalars": _conv("z = Mul(c, s) m = ReduceMax<keepdims=0>(z) y = Add(z, m)", s=np.array(0.5, np.float32)),
    "If whose bodies read a Relu": _conv(
        BRANCHES, w2=W2, w3=_kernel(4, 8), w4=_kernel(2, 4), zero=np.array(0, np.float32)
    ),
    "Loop": _conv(LOOP, w2=_kernel(8, 8), n=np.array(2)),
    "int64 input": _words(_RANDOM.integers(0, 20, (COUNT, 1, 6))),
    "strings": _hard(
        "y = Conv(x, w) so = Identity(s)", f"{IMAGE}, string[1] s", "float y, string[1] so", w=W1,
        data={**X, "s": np.array([["a"]] * COUNT)},
    ),
    "sequence inside": _conv(f"{LISTED} y = ConcatFromSequence<axis=1>(q)"),
    "sequence output": _conv(LISTED, "seq(float) q"),
    "fp16 weights": _hard("f = Cast<to=1>(w) c = Conv(x, f) y = Relu(c)", w=W1.astype(np.float16)),
    "fp16 model": _hard(
        "c = Conv(x, w) y = Relu(c)", "float16[1,3,12,12] x", "float16 y", w=W1.astype(np.float16),
        data={"x": X["x"].astype(np.float16)},
    ),
    "an output that a Relu reads": _conv("y = Relu(c)", "float y, float c"),
    "a weight as output": _conv("y = Relu(c)", "float y, float[8,3,3,3] w"),
    "unused output": _conv("a, b = Split<axis=1>(c) y = Relu(a)"),
    "no optional inputs": _conv(
        'k = Clip(c, , six) y = Resize<mode="nearest">(k, , two)',
        six=np.array(6, np.float32), two=np.array([1, 1, 2, 2], np.float32),
    ),
    "dynamic batch of 4": _net(batch="N", data={"x": X["x"].reshape(3, 4, 3, 12, 12)}, dims={"N": 4}),
    "as many values as there are": _picked(-1e9),
    "as many values as are not zero": _conv("i = NonZero(c) j = Transpose(i) v = GatherND(c, j) y = Mul(v, v)"),
    "no values at all": _picked(1e9),
}  # fmt: skip
"""Models that must become a correct INT8 model."""

_STRANGE_WORD = np.zeros((COUNT, 1, 6), np.int64)
_STRANGE_WORD[7, 0, 2] = 20
REFUSED: dict[str, tuple[Hard, str]] = {
    "an index that the table does not have": (_words(_STRANGE_WORD), r"sample 7 of .*d.npz' does not run: .* 'm.onnx'"),
    "an input named as the scale of another": (
        _hard("c = Conv(x, w) y = Mul(c, x_scale)", f"{IMAGE}, float[1] x_scale", w=W1,
              data={**X, "x_scale": np.ones((COUNT, 1), np.float32)}),
        "--rename x_scale=NEW",
    ),
    "NaN in a weight": (_net(_spoilt(np.nan)), r"weight 'w' of Conv 'c' holds NaN"),
    "infinity in a weight": (_net(_spoilt(np.inf)), r"weight 'w' of Conv 'c' holds infinity"),
    "integers only": (
        _hard("y = Neg(x)", "int64[1,4] x", "int64[1,4] y", data={"x": np.ones((COUNT, 1, 4), np.int64)}),
        "nothing in it computes in float32",
    ),
    "nothing to quantize": (
        _hard("y = Erf(x)", "float[1,4] x", "float[1,4] y", data=_rows(1, 4)),
        "no node of 'm.onnx' can be quantized: no rule of this target quantizes Erf",
    ),
    "sequence input": (
        _hard("c = Conv(x, w) s = SequenceAt(q, i) y = Add(c, s)", f"{IMAGE}, seq(float) q", w=W1, i=np.array(0)),
        "'q' is a sequence",
    ),
    "dynamic batch": (_net(batch="N"), "--dim N=1, as in the samples"),
    "an input as output": (_conv("y = Relu(c)", f"float y, {IMAGE}"), "'x' .* is an input of it"),
    "a tensor nobody makes": (_edited(lambda graph: graph.node.pop(0)), "reads 'c', which nothing makes"),
}  # fmt: skip
"""Models that must be refused in one line."""
