"""Models that are difficult to quantize, each with its samples."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit.model.tensors import Array

FLOAT, FLOAT16, DOUBLE, INT64, BOOL, STRING = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
)  # fmt: skip
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


def _node(op: str, inputs: str, output: str, name: str | None = None, **attributes: Any) -> onnx.NodeProto:
    names = ["" if part == "-" else part for part in inputs.split()]
    return helper.make_node(op, names, output.split(), name=output if name is None else name, **attributes)


def _value(name: str, kind: int = FLOAT, shape: Sequence[int | str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


IMAGE = _value("x", FLOAT, [1, 3, 12, 12])


def _model(
    nodes: list[onnx.NodeProto],
    weights: dict[str, Array],
    *,
    inputs: Sequence[onnx.ValueInfoProto] = (IMAGE,),
    outputs: Sequence[onnx.ValueInfoProto] = (_value("y"),),
    opset: int = 17,
    ir: int = 8,
) -> onnx.ModelProto:
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", list(inputs), list(outputs), stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def _net(weight: Array = W1, bias: Array | None = None, *, opset: int = 17, ir: int = 8) -> onnx.ModelProto:
    nodes = [_node("Conv", "x w b", "c", pads=[1] * 4), _node("Relu", "c", "r"), _node("Conv", "r w2", "y")]
    weights = {"w": weight, "b": _normal(8, scale=0.1) if bias is None else bias, "w2": W2}
    return _model(nodes, weights, outputs=[_value("y", FLOAT, [1, 4, 10, 10])], opset=opset, ir=ir)


def _edited(edit: Callable[[onnx.GraphProto], object], *, opset: int = 17, ir: int = 8) -> onnx.ModelProto:
    proto = _net(opset=opset, ir=ir)
    edit(proto.graph)
    return proto


def _unname(graph: onnx.GraphProto, name: str) -> None:
    for node in graph.node:
        node.name = name


def _list_weights(graph: onnx.GraphProto) -> None:
    graph.input.extend(_value(tensor.name, FLOAT, tensor.dims) for tensor in graph.initializer)


def _lift_weights(graph: onnx.GraphProto) -> None:
    made = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in graph.initializer]
    nodes = list(graph.node)
    del graph.node[:], graph.initializer[:]
    graph.node.extend([*made, *nodes])


def _open_batch(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"


def _spoilt(value: float) -> Array:
    weight = W1.copy()
    weight[0, 0, 0, 0] = value
    return weight


def _conv(*nodes: onnx.NodeProto, outputs: Sequence[onnx.ValueInfoProto] = (_value("y"),), **more: Array) -> Hard:
    proto = _model([_node("Conv", "x w", "c"), *nodes], {"w": W1, **more}, outputs=outputs)
    return Hard(proto=proto, data=X)


def _branches() -> Hard:
    one = helper.make_graph([_node("Conv", "r w2", "t")], "then", [], [_value("t")])
    two = helper.make_graph([_node("Conv", "r w3", "e")], "else", [], [_value("e")])
    return _conv(
        _node("Relu", "c", "r"),
        _node("ReduceMean", "x", "m", keepdims=0),
        _node("Greater", "m zero", "if_so"),
        _node("If", "if_so", "i", then_branch=one, else_branch=two),
        _node("Conv", "i w4", "y"),
        w2=W2, w3=_kernel(4, 8), w4=_kernel(2, 4), zero=np.array(0, np.float32),
    )  # fmt: skip


def _loop() -> Hard:
    shape = [1, 8, 10, 10]
    body = helper.make_graph(
        [_node("Conv", "s w2", "t", pads=[1] * 4), _node("Relu", "t", "u"), _node("Identity", "go", "on")],
        "body",
        [_value("turn", INT64, []), _value("go", BOOL, []), _value("s", FLOAT, shape)],
        [_value("on", BOOL, []), _value("u", FLOAT, shape)],
    )
    return _conv(_node("Loop", "n - c", "y", body=body), w2=_kernel(8, 8), n=np.array(2))


def _picked(limit: float) -> Hard:
    """Values above a limit; their number depends on the input."""
    return _conv(
        _node("Greater", "c limit", "g"), _node("NonZero", "g", "i"), _node("Transpose", "i", "j"),
        _node("GatherND", "c j", "v"), _node("Mul", "v v", "y"), limit=np.array(limit, np.float32),
    )  # fmt: skip


def _shared() -> Hard:
    nodes = [_node("Conv", "x w", "a", pads=[1] * 4), _node("Relu", "a", "r"), _node("Conv", "r w", "y", pads=[1] * 4)]
    proto = _model(nodes, {"w": _kernel(8, 8)}, inputs=[_value("x", FLOAT, [1, 8, 6, 6])])
    return Hard(proto=proto, data={"x": _normal(COUNT, 1, 8, 6, 6)})


def _shared_crosswise() -> Hard:
    nodes = [_node("MatMul", "x w", "a"), _node("Gemm", "a w", "y", transB=1)]
    return Hard(proto=_model(nodes, {"w": _normal(8, 8)}, inputs=[_value("x", FLOAT, [4, 8])]), data=_rows(4, 8))


def _rows(*shape: int) -> dict[str, Array]:
    return {"x": _normal(COUNT, *shape)}


def _words() -> Hard:
    nodes = [_node("Gather", "table x", "e"), _node("MatMul", "e w", "y")]
    proto = _model(nodes, {"table": _normal(20, 8), "w": _normal(8, 4)}, inputs=[_value("x", INT64, [1, 6])])
    return Hard(proto=proto, data={"x": _RANDOM.integers(0, 20, (COUNT, 1, 6))})


def _strings() -> Hard:
    nodes = [_node("Conv", "x w", "y"), _node("Identity", "s", "so")]
    text = (_value("s", STRING, [1]), _value("so", STRING, [1]))
    proto = _model(nodes, {"w": W1}, inputs=[IMAGE, text[0]], outputs=[_value("y"), text[1]])
    return Hard(proto=proto, data={**X, "s": np.array([["a"]] * COUNT)})


def _sequence_input() -> Hard:
    nodes = [_node("Conv", "x w", "c"), _node("SequenceAt", "q i", "s"), _node("Add", "c s", "y")]
    listed = helper.make_tensor_sequence_value_info("q", FLOAT, None)
    return Hard(proto=_model(nodes, {"w": W1, "i": np.array(0)}, inputs=[IMAGE, listed]), data=X)


def _plain(op: str, kind: int, values: Array) -> Hard:
    shape = list(values.shape[1:])
    proto = _model([_node(op, "x", "y")], {}, inputs=[_value("x", kind, shape)], outputs=[_value("y", kind, shape)])
    return Hard(proto=proto, data={"x": values})


def _double() -> Hard:
    proto = _model(
        [_node("MatMul", "x w", "y")],
        {"w": _normal(8, 4).astype(np.float64)},
        inputs=[_value("x", DOUBLE, [1, 8])],
        outputs=[_value("y", DOUBLE, [1, 4])],
    )
    return Hard(proto=proto, data={"x": _normal(COUNT, 1, 8).astype(np.float64)})


def _half_model() -> Hard:
    nodes = [_node("Conv", "x w", "c"), _node("Relu", "c", "y")]
    inputs, outputs = [_value("x", FLOAT16, [1, 3, 12, 12])], [_value("y", FLOAT16)]
    proto = _model(nodes, {"w": W1.astype(np.float16)}, inputs=inputs, outputs=outputs)
    return Hard(proto=proto, data={"x": X["x"].astype(np.float16)})


def _half_weights() -> Hard:
    nodes = [_node("Cast", "w", "f", to=FLOAT), _node("Conv", "x f", "c"), _node("Relu", "c", "y")]
    return Hard(proto=_model(nodes, {"w": W1.astype(np.float16)}), data=X)


def _scalars() -> Hard:
    return _conv(_node("Mul", "c s", "z"), _node("ReduceMax", "z", "m", keepdims=0), _node("Add", "z m", "y"),
                 s=np.array(0.5, np.float32))  # fmt: skip


def _renamed(**names: str) -> Hard:
    """The network with other names of its tensors."""
    proto = _net()
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in proto.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    return Hard(proto=proto, data=X)


def _scaled_input() -> Hard:
    nodes = [_node("Conv", "x w", "c"), _node("Mul", "c x_scale", "y")]
    proto = _model(nodes, {"w": W1}, inputs=[IMAGE, _value("x_scale", FLOAT, [1])])
    return Hard(proto=proto, data={**X, "x_scale": np.ones((COUNT, 1), np.float32)})


TAKEN: dict[str, Hard] = {
    "names of scales": _renamed(c="x_scale", r="w_scale"),
    "names of integers": _renamed(c="x_QuantizeLinear_Output", r="w_quantized"),
    "names of biases": _renamed(c="w_quantized_scale", r="b_quantized", b="x_zero_point"),
    "names of ours": _renamed(c="edgekit.flat", r="edgekit.1", w="edgekit.axes.2.3"),
    "a factor named as a scale": _conv(
        _node("Relu", "c", "r"), _node("Mul", "r r_scale", "m"), _node("Conv", "m w2", "y"),
        r_scale=np.array(3, np.float32), w2=W2,
    ),
    "an output named as a scale": _conv(_node("Relu", "c", "c_scale"), outputs=[_value("c_scale")]),
    "unnamed nodes": Hard(proto=_edited(lambda graph: _unname(graph, "")), data=X),
    "nodes of one name": Hard(proto=_edited(lambda graph: _unname(graph, "same")), data=X),
    "shared weights": _shared(),
    "weights shared crosswise": _shared_crosswise(),
    "weights as inputs, opset 7, IR 3": Hard(proto=_edited(_list_weights, opset=7, ir=3), data=X),
    "opset 7": Hard(proto=_net(opset=7), data=X),
    "opset 25": Hard(proto=_net(opset=25, ir=11), data=X),
    "constant nodes": Hard(proto=_edited(_lift_weights), data=X),
    "weight of zeros": Hard(proto=_net(np.zeros_like(W1)), data=X),
    "channel of zeros": Hard(proto=_net(W1 * (np.arange(8) != 2).reshape(8, 1, 1, 1).astype(np.float32)), data=X),
    "tiny channel with a bias": Hard(proto=_net(W1 * np.float32(1e-9), np.full(8, 5, np.float32)), data=X),
    "denormal weights": Hard(proto=_net((W1 * 1e-40).astype(np.float32)), data=X),
    "huge biases": Hard(proto=_net(bias=np.full(8, 1e9, np.float32)), data=X),
    "one huge bias": Hard(proto=_net(bias=np.array([1e6, *[0.0] * 7], np.float32)), data=X),
    "samples of zeros": Hard(proto=_net(), data={"x": np.zeros_like(X["x"])}),
    "scalars": _scalars(),
    "If whose bodies read a Relu": _branches(),
    "Loop": _loop(),
    "int64 input": _words(),
    "strings": _strings(),
    "sequence inside": _conv(
        _node("SplitToSequence", "c", "q", axis=1, keepdims=1), _node("ConcatFromSequence", "q", "y", axis=1)
    ),
    "sequence output": _conv(
        _node("SplitToSequence", "c", "q", axis=1, keepdims=1),
        outputs=[helper.make_tensor_sequence_value_info("q", FLOAT, None)],
    ),
    "fp16 weights": _half_weights(),
    "fp16 model": _half_model(),
    "an output that a Relu reads": _conv(_node("Relu", "c", "y"), outputs=[_value("y"), _value("c")]),
    "a weight as output": _conv(
        _node("Relu", "c", "y"), outputs=[_value("y"), _value("w", FLOAT, list(W1.shape))]
    ),
    "unused output": _conv(_node("Split", "c", "a b", axis=1), _node("Relu", "a", "y")),
    "no optional inputs": _conv(
        _node("Clip", "c - six", "k"), _node("Resize", "k - two", "y", mode="nearest"),
        six=np.array(6, np.float32), two=np.array([1, 1, 2, 2], np.float32),
    ),
    "dynamic batch of 4": Hard(proto=_edited(_open_batch), data={"x": X["x"].reshape(3, 4, 3, 12, 12)}, dims={"N": 4}),
    "as many values as there are": _picked(-1e9),
    "as many values as are not zero": _conv(
        _node("NonZero", "c", "i"), _node("Transpose", "i", "j"), _node("GatherND", "c j", "v"),
        _node("Mul", "v v", "y"),
    ),
    "no values at all": _picked(1e9),
}  # fmt: skip
"""Models that must become a correct INT8 model."""


def _strange_word() -> Hard:
    hard, words = _words(), np.zeros((COUNT, 1, 6), np.int64)
    words[7, 0, 2] = 20
    return Hard(proto=hard.proto, data={"x": words})


REFUSED: dict[str, tuple[Hard, str]] = {
    "an index that the table does not have": (_strange_word(), r"sample 7 of .*d.npz' does not run: .* 'm.onnx'"),
    "an input named as the scale of another": (_scaled_input(), "--rename x_scale=NEW"),
    "NaN in a weight": (Hard(proto=_net(_spoilt(np.nan)), data=X), r"weight 'w' of Conv 'c' holds NaN"),
    "infinity in a weight": (Hard(proto=_net(_spoilt(np.inf)), data=X), r"weight 'w' of Conv 'c' holds infinity"),
    "integers only": (_plain("Neg", INT64, np.ones((COUNT, 1, 4), np.int64)), "nothing in it computes in float32"),
    "nothing to quantize": (_plain("Erf", FLOAT, _normal(COUNT, 1, 4)), "no node of 'm.onnx' can be quantized"),
    "double model": (_double(), "nothing in it computes in float32"),
    "sequence input": (_sequence_input(), "'q' is a sequence"),
    "dynamic batch": (Hard(proto=_edited(_open_batch), data=X), "--dim N=1, as in the samples"),
    "an input as output": (_conv(_node("Relu", "c", "y"), outputs=[_value("y"), IMAGE]), "'x' .* is an input of it"),
    "a tensor nobody makes": (
        Hard(proto=_edited(lambda graph: graph.node.pop(0)), data=X),
        "reads 'c', which nothing makes",
    ),
}
"""Models that must be refused in one line."""
