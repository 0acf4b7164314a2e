"""What calibration, planning and rounding need to know of a float graph."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._files import read_chunks
from edgekit.errors import ModelError
from edgekit.graph.constants import bring_in, lift_constants, read_array
from edgekit.graph.graph import Graph, Node, view_file, view_model
from edgekit.graph.inference import infer_model
from edgekit.graph.rewrite import set_nodes
from edgekit.model.external import DataPlace, begin_page, point_to, read_place
from edgekit.model.model import MOST_INLINE_BYTES, Model, find_integer_ops
from edgekit.model.outside import read_outside
from edgekit.model.skim import MAX_DATA_BYTES
from edgekit.model.tensors import Array
from edgekit.prepare.tidy import drop_initializer_inputs
from edgekit.quantize.graph.attention_masks import clamp_masks
from edgekit.quantize.graph.gemms import split_gemms
from edgekit.quantize.graph.names import avoid_name_collisions

MINIMUM_OPSET = 13
"""Q and DQ nodes take an axis (per-channel weights) from opset 13 on."""

# The graph whose weights are set aside; these lie beside it.
_ASIDE_NAME = "float.onnx"
# Operators whose output has the scale of their input (onnxruntime/quantization/operators/direct_q8.py and others).
_MOVEMENT = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "MaxPool", "Split", "Gather"}
)


def read_float_graph(model: Model) -> Graph:
    """Reads the graph of a float model; large weights stay where they lie.

    Raises:
        ModelError: the model is quantized already, or older than opset 13, or names clash.
    """
    proto, folder = read_outside(model), model.path.parent
    bring_in(proto.graph, folder, most=MAX_DATA_BYTES)
    _check_float(model, proto)
    lift_constants(proto.graph)
    _fold_dequantized_weights(proto.graph, folder)
    split_gemms(proto.graph, folder)
    avoid_name_collisions(proto, model.path.name)
    clamp_masks(proto.graph, folder)
    _spell_defaults(proto.graph)
    known = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    inferred = [value for value in infer_model(proto).graph.value_info if value.name not in known]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(inferred)
    drop_initializer_inputs(proto.graph)
    return view_model(proto, folder)


def refuse_huge(name: str, size_bytes: int, does: str, hint: str) -> None:
    """Refuses a model that is too large for what a job `does` with copies of its float weights.

    Raises:
        ModelError: it is.
    """
    if size_bytes > MOST_INLINE_BYTES:
        size, most = (f"{count / 1e9:.1f} GB" for count in (size_bytes, MOST_INLINE_BYTES))
        raise ModelError(f"'{name}' has {size}; {does} up to {most}, for it takes several times as much", hint=hint)


def set_weights_aside(graph: Graph, folder: Path) -> Graph:
    """Returns the graph without its large weights, which are in a file of `folder`: a graph to run, in little memory.

    What is written to the folder may refer to them. `graph` must not be used any more.
    """
    path = folder / _ASIDE_NAME
    with path.with_name(f"{_ASIDE_NAME}.data").open("wb") as out:
        for tensor in graph.proto.initializer:
            move_weight(tensor, graph.folder, out)
    # Protobuf keeps the memory of fields that were cleared; only a new message is without it.
    path.write_bytes(graph.model.SerializeToString())
    return view_file(path)


def read_aside(folder: Path) -> Graph | None:
    """Returns the graph that `set_weights_aside` left in a folder, None where there is none."""
    path = folder / _ASIDE_NAME
    return view_file(path) if path.is_file() else None


def move_weight(tensor: onnx.TensorProto, folder: Path, out: IO[bytes]) -> None:
    """Moves the data of a large initializer, which may lie in `folder`, behind what is in an open file, in place."""
    place = read_place(tensor)
    length = place.length if place is not None else len(tensor.raw_data)
    if length <= MAX_DATA_BYTES:
        return
    start = begin_page(out)
    if place is None:
        out.write(tensor.raw_data)
    else:
        with (folder / place.file).open("rb") as file:
            file.seek(place.offset)
            for chunk in read_chunks(file, length):
                out.write(chunk)
    point_to(tensor, DataPlace(Path(out.name).name, start, length))


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


def dequantize_constant(node: onnx.NodeProto, initializers: Mapping[str, onnx.TensorProto], folder: Path) -> Array:
    """Returns what a DequantizeLinear makes of an initializer; external data lie in `folder`."""
    values, scale, *rest = (read_array(initializers[name], folder) for name in node.input if name)
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
            hint="give the float model it was made from; one trained so: export it without Q and DQ, or build it as is",
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


def _fold_dequantized_weights(graph: onnx.GraphProto, folder: Path) -> None:
    """Makes float weights of those that a model keeps as integers behind a DequantizeLinear."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and all(name in initializers for name in node.input):
            values = dequantize_constant(node, initializers, folder)
            graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        else:
            kept.append(node)
    set_nodes(graph, kept)


def _spell_defaults(graph: onnx.GraphProto) -> None:
    """Says `onesided`, whose default is 1, of each STFT: onnx 1.23 infers the shape of a two-sided one without it."""
    for node in graph.node:
        if node.op_type == "STFT" and all(attribute.name != "onesided" for attribute in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))
