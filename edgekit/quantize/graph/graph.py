"""What calibration, planning and rounding need to know of a float graph."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.errors import ModelError
from edgekit.model.model import MOST_INLINE_BYTES, Model, find_integer_ops, iterate_captured, read_proto
from edgekit.model.tensors import Array
from edgekit.quantize.graph.attention_masks import clamp_masks
from edgekit.quantize.graph.names import avoid_name_collisions

MINIMUM_OPSET = 13
"""Q and DQ nodes take an axis (per-channel weights) from opset 13 on."""

_ASIDE_BYTES = 1 << 14
_MOVEMENT = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "MaxPool", "Split", "Gather"}
)
"""Operators whose output has the scale of their input (onnxruntime/quantization/operators/direct_q8.py and others)."""
_CONSTANT_FIELDS = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """The main graph of a model, with its weights as initializers and its types inferred.

    `shapes` holds a dimension that is not known as None and leaves out tensors of unknown rank. `captured` names the
    tensors that control-flow bodies read.
    """

    proto: onnx.ModelProto
    elem_types: dict[str, int]
    shapes: dict[str, tuple[int | None, ...]]
    initializers: dict[str, onnx.TensorProto]
    producers: dict[str, onnx.NodeProto]
    consumers: dict[str, tuple[onnx.NodeProto, ...]]
    captured: frozenset[str]

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators."""
        return max(entry.version for entry in self.proto.opset_import if entry.domain in {"", "ai.onnx"})

    @property
    def outputs(self) -> frozenset[str]:
        """The names of the graph's outputs."""
        return frozenset(value.name for value in self.proto.graph.output)

    def is_float(self, name: str) -> bool:
        """Returns True if a tensor is known to hold float32, which alone is quantized."""
        return self.elem_types.get(name) == onnx.TensorProto.FLOAT

    def is_float_constant(self, name: str) -> bool:
        """Returns True if a tensor is an initializer of float32."""
        return name in self.initializers and self.initializers[name].data_type == onnx.TensorProto.FLOAT

    def static_shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor, None where a dimension is not known."""
        shape = self.shapes.get(name)
        if shape is None:
            return None
        known = tuple(dim for dim in shape if dim is not None)
        return known if len(known) == len(shape) else None

    def constant(self, name: str) -> Array | None:
        """Returns the value of an initializer, None for what is computed or absent."""
        tensor = self.initializers.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)


def read_graph(model: Model) -> Graph:
    """Reads the graph of a float model.

    Raises:
        ModelError: the model is quantized already, older than opset 13, or too large, or names clash.
    """
    refuse_huge(model.path.name, model.size_bytes)
    proto = read_proto(model)
    _check_float(model, proto)
    _lift_constants(proto.graph)
    _fold_dequantized_weights(proto.graph)
    avoid_name_collisions(proto, model.path.name)
    clamp_masks(proto.graph)
    _spell_defaults(proto.graph)
    _infer_types(proto)
    return index_proto(proto)


def refuse_huge(name: str, size_bytes: int) -> None:
    """Refuses a model that is too large to be quantized: graphs are copied and judged as one protobuf.

    Raises:
        ModelError: it is.
    """
    if size_bytes > MOST_INLINE_BYTES:
        size, most = (f"{count / 1e9:.1f} GB" for count in (size_bytes, MOST_INLINE_BYTES))
        raise ModelError(
            f"'{name}' has {size}; quantizing ends at {most}, for it needs up to seven times as much memory",
            hint="build it with --precision fp32",
        )


def set_weights_aside(graph: Graph, path: Path) -> Graph:
    """Returns the graph without its weights, which are in a file beside `path`: a graph to run, in little memory.

    What is written to the folder of `path` may refer to them. `graph` must not be used any more.
    """
    onnx.save(
        graph.proto, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=_ASIDE_BYTES
    )
    return index_proto(onnx.load(str(path), load_external_data=False))


def index_proto(proto: onnx.ModelProto) -> Graph:
    """Returns the main graph of a model whose weights are initializers and whose types are in value_info."""
    graph = proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for value in [value for value in graph.input if value.name in initializers]:
        graph.input.remove(value)
    values = [*graph.input, *graph.output, *graph.value_info]
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            consumers.setdefault(name, []).append(node)
    return Graph(
        proto=proto,
        elem_types={value.name: value.type.tensor_type.elem_type for value in values},
        shapes={value.name: _dims(value) for value in values if value.type.tensor_type.HasField("shape")},
        initializers=initializers,
        producers={name: node for node in graph.node for name in node.output if name},
        consumers={name: tuple(nodes) for name, nodes in consumers.items()},
        captured=frozenset(name for node in graph.node for name in iterate_captured(node)),
    )


def float_activations(graph: Graph) -> Iterator[str]:
    """Yields the float tensors that are computed or fed, in graph order."""
    names = [value.name for value in graph.proto.graph.input]
    names += [name for node in graph.proto.graph.node for name in node.output]
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
    for node in graph.proto.graph.node:
        name = node.input[0] if node.input else ""
        if node.op_type in {"Relu", "Clip"} and name in graph.producers and graph.is_float(node.output[0]):
            alone = len(graph.consumers[name]) == 1 and name not in graph.outputs | graph.captured
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


def known_bounds(graph: Graph, node: onnx.NodeProto) -> tuple[float | None, float | None]:
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


def _lift_constants(graph: onnx.GraphProto) -> None:
    for node in [node for node in graph.node if node.op_type == "Constant"]:
        attribute = node.attribute[0]
        if attribute.name == "value":
            tensor = onnx.TensorProto()
            tensor.CopyFrom(attribute.t)
            tensor.name = node.output[0]
        elif attribute.name in _CONSTANT_FIELDS:
            value = onnx.helper.get_attribute_value(attribute)
            tensor = numpy_helper.from_array(np.array(value, _CONSTANT_FIELDS[attribute.name]), node.output[0])
        else:
            continue
        graph.initializer.append(tensor)
        graph.node.remove(node)


def _fold_dequantized_weights(graph: onnx.GraphProto) -> None:
    """Makes float weights of those that a model keeps as integers behind a DequantizeLinear."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "DequantizeLinear"]:
        if not all(name in initializers for name in node.input):
            continue
        graph.initializer.append(numpy_helper.from_array(dequantize_constant(node, initializers), node.output[0]))
        graph.node.remove(node)


def _spell_defaults(graph: onnx.GraphProto) -> None:
    """Says `onesided`, whose default is 1, of each STFT: onnx 1.23 infers the shape of a two-sided one without it."""
    for node in graph.node:
        if node.op_type == "STFT" and all(attribute.name != "onesided" for attribute in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))


def _infer_types(proto: onnx.ModelProto) -> None:
    """Infers types and shapes on a copy without large weights, of which inference would make several."""
    bare = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    graph = proto.graph
    bare.graph.name = graph.name or "graph"
    bare.graph.node.extend(graph.node)
    bare.graph.input.extend(graph.input)
    bare.graph.output.extend(graph.output)
    bare.graph.value_info.extend(graph.value_info)
    bare.graph.sparse_initializer.extend(graph.sparse_initializer)
    for tensor in graph.initializer:
        if tensor.ByteSize() > _ASIDE_BYTES:
            bare.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        else:
            bare.graph.initializer.append(tensor)
    inferred = onnx.shape_inference.infer_shapes(bare)
    known = {value.name for value in (*graph.input, *graph.output)}
    del graph.value_info[:]
    graph.value_info.extend(value for value in inferred.graph.value_info if value.name not in known)


def _dims(value: onnx.ValueInfoProto) -> tuple[int | None, ...]:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None
        for dim in value.type.tensor_type.shape.dim
    )
