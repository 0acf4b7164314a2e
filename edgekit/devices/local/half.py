"""The arithmetic of a provider that computes in half precision, written into a graph."""

from collections.abc import Collection, Mapping

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.graph.rewrite import set_nodes
from edgekit.model.model import find_reads

FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
UNOPTIMIZED = SessionSettings(level=Level.DISABLED)

_ELEMENT_TYPES: dict[str, int] = {"tensor(float)": FLOAT, "tensor(float16)": HALF}

# Inputs that say how large a result is: a provider reads them when it builds its graph, in full precision.
_EXACT_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}

# Operators that compute nothing, or whose attributes or bodies fix the type of their outputs.
_UNTOUCHED = frozenset({
    "Cast", "CastLike", "Constant", "ConstantOfShape", "EyeLike", "If", "Loop", "Scan", "RandomNormal",
    "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
})  # fmt: skip


class _Rounding(msgspec.Struct, kw_only=True):
    """A graph on its way; `types` are element types by name, `sources` what a taken node reads instead of a name."""

    types: Mapping[str, int]
    weights: dict[str, onnx.TensorProto]
    sources: dict[str, str]
    nodes: list[onnx.NodeProto]
    added: list[onnx.TensorProto]


def round_to_half(proto: onnx.ModelProto, taken: Collection[str], types: Mapping[str, int]) -> None:
    """Makes, in place, the nodes named in `taken` read halves, compute in float32 and give halves.

    What they give is rounded even where the graph is float16 throughout: the CPU provider of ONNX Runtime keeps such
    values in float32 from node to node, so that neither the rounding nor a value beyond 65504, which a target turns
    into infinity, would be seen. `types` are the ONNX element types of the graph's values.
    """
    graph = proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in {FLOAT, HALF}}
    types = {**types, **{name: tensor.data_type for name, tensor in weights.items()}}
    rounding = _Rounding(types=types, weights=weights, sources={}, nodes=[], added=[])
    for node in graph.node:
        if node.name in taken and node.op_type not in _UNTOUCHED:
            _round_node(rounding, node)
        else:
            rounding.nodes.append(node)
    set_nodes(graph, rounding.nodes)
    graph.initializer.extend(rounding.added)
    _drop_unused(graph, weights)


def find_float_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Returns the ONNX element types of the floating-point values of the main graph, by name; weights lie inside.

    ONNX Runtime is asked, which knows the types of its own operators too. It tells the types of graph outputs only, so
    every value is made one.

    Raises:
        RuntimeRefusal: ONNX Runtime does not load the model.
    """
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    known = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    inner = [name for node in proto.graph.node for name in node.output if name and name not in known]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    session = CpuSession(exposed.SerializeToString(), UNOPTIMIZED)
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    words = zip(session.output_names, session.output_types, strict=True)
    return types | {name: _ELEMENT_TYPES[word] for name, word in words if word in _ELEMENT_TYPES}


def _round_node(rounding: _Rounding, node: onnx.NodeProto) -> None:
    exact = _EXACT_INPUTS.get(node.op_type, ())
    for index, name in enumerate(node.input):
        if rounding.types.get(name) in {FLOAT, HALF} and index not in exact:
            if name not in rounding.sources:
                rounding.sources[name] = _add_source(rounding, name)
            node.input[index] = rounding.sources[name]
    rounding.nodes.append(node)
    for index, name in enumerate(node.output):
        kind = rounding.types.get(name)
        if kind in {FLOAT, HALF}:
            # Rounded right behind the node, so that every reader sees what the target would hand on.
            node.output[index] = f"{name}/full"
            half = name if kind == HALF else f"{name}/half"
            rounding.nodes.append(_cast(node.output[index], half, HALF))
            if kind == FLOAT:
                rounding.nodes.append(_cast(half, name, FLOAT))
                # Readers that are taken read it as it is: it was rounded when it was made.
                rounding.sources[name] = name


def _add_source(rounding: _Rounding, name: str) -> str:
    """Returns the name of a float32 copy of a value, rounded to half."""
    source = f"{name}/rounded"
    if name in rounding.weights:
        # Beyond 65504 half precision has infinity, which is what the target computes with.
        with np.errstate(over="ignore"):
            value = numpy_helper.to_array(rounding.weights[name]).astype(np.float16).astype(np.float32)
        rounding.added.append(numpy_helper.from_array(value, source))
        return source
    half = name
    if rounding.types[name] == FLOAT:
        half = f"{name}/half"
        rounding.nodes.append(_cast(name, half, HALF))
    rounding.nodes.append(_cast(half, source, FLOAT))
    return source


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], f"{target}/cast", to=kind)


def _drop_unused(graph: onnx.GraphProto, weights: Collection[str]) -> None:
    """Removes weights that have a rounded copy; in a file of IR version 3 they are graph inputs as well."""
    unused = set(weights).difference(find_reads(graph))
    tensors = [tensor for tensor in graph.initializer if tensor.name not in unused]
    inputs = [value for value in graph.input if value.name not in unused]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(tensors)
    graph.input.extend(inputs)
