"""What calibration, planning and rounding need to know of a float graph."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.errors import ModelError
from edgekit.graph.constants import lift_constants
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.graph.inference import infer_model
from edgekit.graph.rewrite import set_nodes
from edgekit.model.model import MOST_INLINE_BYTES, Model, find_integer_ops, read_proto
from edgekit.model.tensors import Array
from edgekit.prepare.tidy import drop_initializer_inputs
from edgekit.quantize.graph.attention_masks import clamp_masks
from edgekit.quantize.graph.gemms import split_gemms
from edgekit.quantize.graph.names import avoid_name_collisions

MINIMUM_OPSET = 13
"""Q and DQ nodes take an axis (per-channel weights) from opset 13 on."""

# Weights of this size and more leave the graph that is run; what is smaller may decide shapes. Chosen by hand.
_ASIDE_BYTES = 1 << 14
# Operators whose output has the scale of their input (onnxruntime/quantization/operators/direct_q8.py and others).
_MOVEMENT = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "MaxPool", "Split", "Gather"}
)


def read_float_graph(model: Model) -> Graph:
    """Reads the graph of a float model.

    Raises:
        ModelError: the model is quantized already, or older than opset 13, or names clash.
    """
    proto = read_proto(model)
    _check_float(model, proto)
    lift_constants(proto.graph)
    _fold_dequantized_weights(proto.graph)
    split_gemms(proto.graph)
    avoid_name_collisions(proto, model.path.name)
    clamp_masks(proto.graph)
    _spell_defaults(proto.graph)
    known = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    inferred = [value for value in infer_model(proto).graph.value_info if value.name not in known]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(inferred)
    drop_initializer_inputs(proto.graph)
    return view_model(proto, model.path.parent)


def refuse_huge(name: str, size_bytes: int, does: str, hint: str) -> None:
    """Refuses a model that is too large for what a job `does` with copies of its float weights.

    Raises:
        ModelError: it is.
    """
    if size_bytes > MOST_INLINE_BYTES:
        size, most = (f"{count / 1e9:.1f} GB" for count in (size_bytes, MOST_INLINE_BYTES))
        raise ModelError(f"'{name}' has {size}; {does} up to {most}, for it takes several times as much", hint=hint)


def set_weights_aside(graph: Graph, path: Path) -> Graph:
    """Returns the graph without its weights, which are in a file beside `path`: a graph to run, in little memory.

    What is written to the folder of `path` may refer to them. `graph` must not be used any more.
    """
    onnx.save(
        graph.model, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=_ASIDE_BYTES
    )
    return view_model(onnx.load(str(path), load_external_data=False), path.parent)


def float_activations(graph: Graph) -> Iterator[str]:
    """Yields the float tensors that are computed or fed, in graph order."""
    names = [*graph.inputs, *(name for node in graph.nodes for name in node.output)]
    yield from (name for name in names if name and graph.is_float(name))


def range_source(graph: Graph, name: str) -> str:
    """Returns the tensor whose scale a tensor shares because only movement lies between them."""
    while name in graph.producers and graph.producers[name].op_type in _MOVEMENT:
        name = graph.producers[name].input[0]
    return name


def folded_activations(graph: Graph) -> dict[str, str]:
    """Returns the tensors that only a Relu or Clip reads, each with the output that stands for it.

    A quantized producer clamps to its output range, so the range before the Relu or Clip is the range after it
    (onnxruntime/quantization/base_quantizer.py, adjust_tensor_ranges).
    """
    folded: dict[str, str] = {}
    for node in graph.nodes:
        name = node.input[0] if node.input else ""
        if node.op_type in {"Relu", "Clip"} and name in graph.producers and graph.is_float(node.output[0]):
            alone = len(graph.readers(name)) == 1 and name not in graph.outputs | graph.captured
            if alone:
                folded[name] = node.output[0]
    return folded


def dequantize_constant(node: onnx.NodeProto, initializers: Mapping[str, onnx.TensorProto]) -> Array:
    """Returns what a DequantizeLinear makes of an initializer."""
    values, scale, *rest = (numpy_helper.to_array(initializers[name]) for name in node.input if name)
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    shape = [-1 if scale.ndim == 1 and index == axis % values.ndim else 1 for index in range(values.ndim)]
    shift = rest[0].astype(np.float32) if rest else np.zeros_like(scale)
    return np.asarray((values.astype(np.float32) - shift.reshape(shape)) * scale.reshape(shape)).astype(scale.dtype)


def known_bounds(graph: Graph, node: Node) -> tuple[float | None, float | None]:
    """Returns the lower and upper bound that an operator alone gives its output; None where it gives none."""
    if node.op_type in {"Sigmoid", "Softmax", "HardSigmoid"}:
        return 0.0, 1.0
    if node.op_type in {"Relu", "Abs", "Sqrt", "Exp"}:
        return 0.0, None
    if node.op_type == "Clip" and len(node.input) > 1:
        low = graph.constant(node.input[1])
        return (0.0 if low is not None and low.size == 1 and float(low.reshape(())) >= 0 else None), None
    return None, None


def _check_float(model: Model, proto: onnx.ModelProto) -> None:
    found = find_integer_ops(proto)
    if found:
        raise ModelError(
            f"'{model.path.name}' is quantized already: it has {', '.join(found)}",
            hint="give the float model it was made from",
        )
    opset = model.opsets.get("ai.onnx", 1)
    if opset < MINIMUM_OPSET:
        raise ModelError(
            f"'{model.path.name}' has opset {opset}, quantizing needs {MINIMUM_OPSET}",
            hint="edgekit prepare MODEL --opset 17 --out FILE",
        )
    fed = {value.name for value in proto.graph.input}
    through = next((value.name for value in proto.graph.output if value.name in fed), None)
    if through is not None:
        raise ModelError(
            f"output '{through}' of '{model.path.name}' is an input of it, which Q and DQ nodes cannot stand between",
            hint="leave it out: edgekit prepare MODEL --outputs NAMES --out FILE",
        )


def _fold_dequantized_weights(graph: onnx.GraphProto) -> None:
    """Makes float weights of those that a model keeps as integers behind a DequantizeLinear."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and all(name in initializers for name in node.input):
            graph.initializer.append(numpy_helper.from_array(dequantize_constant(node, initializers), node.output[0]))
        else:
            kept.append(node)
    set_nodes(graph, kept)


def _spell_defaults(graph: onnx.GraphProto) -> None:
    """Says `onesided`, whose default is 1, of each STFT: onnx 1.23 infers the shape of a two-sided one without it."""
    for node in graph.node:
        if node.op_type == "STFT" and all(attribute.name != "onesided" for attribute in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))
