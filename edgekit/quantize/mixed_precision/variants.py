"""Variants of a QDQ graph: with float weights, and with a switch for each activation."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import Graph
from edgekit.graph.rewrite import copy_fields, set_nodes
from edgekit.model.model import find_reads, order_nodes
from edgekit.model.tensors import Array
from edgekit.prepare.tidy import import_contrib

SWITCHES = "edgekit.switches"
"""The input that says which activations are quantized."""


def strip_weights(qdq: onnx.ModelProto, graph: Graph) -> onnx.ModelProto:
    """Returns a QDQ graph with the float weights and biases of `graph`.

    Load it with ONNX Runtime's optimizer WeightBiasQuantization switched off, which would quantize them again.
    """
    proto = _copy_bare(qdq)
    floats = {node.name: node for node in graph.nodes}
    wanted: set[str] = set()
    for node in proto.graph.node:
        source = floats.get(node.name)
        for index, name in enumerate(source.input if source is not None else ()):
            if graph.is_float_constant(name):
                node.input[index] = name
                wanted.add(name)
    present = {tensor.name for tensor in qdq.graph.initializer}
    made = {node.output[0] for node in proto.graph.node if node.output}
    clashing = wanted & made
    set_nodes(proto.graph, [node for node in proto.graph.node if not clashing.intersection(node.output[:1])])
    # ONNX Runtime folds no DequantizeLinear: what nobody reads would be computed in every run.
    read = find_reads(proto.graph)
    set_nodes(proto.graph, [node for node in proto.graph.node if not read.isdisjoint(node.output)])
    read = find_reads(proto.graph)
    proto.graph.initializer.extend(tensor for tensor in qdq.graph.initializer if tensor.name in read)
    proto.graph.initializer.extend(graph.constants[name] for name in sorted(wanted - present))
    return proto


def free_grids(qdq: onnx.ModelProto, known: Collection[str]) -> tuple[str, ...]:
    """Makes inputs of those scales and zero points of activations that are `known`, in place; returns their names.

    What is moved out of a constant, such as a row of an embedding, has the scale of that, whatever the ranges.
    """
    stored = {tensor.name: tensor for tensor in qdq.graph.initializer}
    sites = [node for node in qdq.graph.node if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]
    read = (name for node in sites if node.input[0] not in stored for name in node.input[1:])
    names = tuple(dict.fromkeys(name for name in read if name in stored and name in known))
    for name in names:
        qdq.graph.input.append(helper.make_tensor_value_info(name, stored[name].data_type, stored[name].dims))
    # One by one: a list that is written anew copies every weight.
    freed = set(names)
    for index in reversed(range(len(qdq.graph.initializer))):
        if qdq.graph.initializer[index].name in freed:
            del qdq.graph.initializer[index]
    return names


def switch_activations(qdq: onnx.ModelProto, graph: Graph) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Returns the float graph in which each activation can be quantized by itself, and the names of those.

    The extra input SWITCHES, bool [N], says for each whether its readers see it through the Q and DQ of `qdq`.
    """
    proto = _copy(graph.model)
    stored = {tensor.name: tensor for tensor in qdq.graph.initializer}
    sites = {
        node.input[0].removesuffix("_QuantizeLinear_Input"): node
        for node in qdq.graph.node
        if node.op_type == "QuantizeLinear"
    }
    made = {*graph.producers, *graph.inputs}
    names = tuple(name for name in sites if name in made)
    switched = set(names)
    for parameter in sorted({parameter for name in names for parameter in sites[name].input[1:]}):
        proto.graph.initializer.append(stored[parameter])
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = f"{name}.edgekit.switched" if name in switched else name
    # One graph with switches is loaded once; a graph for each activation would be optimized as often.
    for index, name in enumerate(names):
        proto.graph.initializer.append(numpy_helper.from_array(np.array(index), f"{name}.edgekit.index"))
        proto.graph.node.extend(_switch(name, sites[name]))
    nodes = order_nodes(proto.graph)
    set_nodes(proto.graph, nodes)
    proto.graph.input.append(helper.make_tensor_value_info(SWITCHES, onnx.TensorProto.BOOL, [len(names)]))
    import_contrib(proto)
    return proto, names


def switch_weights(graph: Graph, few: onnx.ModelProto, eight: onnx.ModelProto, nodes: Sequence[str]) -> onnx.ModelProto:
    """Returns the float graph with the rounded weights and biases of some layers, a switch between two forms for each.

    The extra input SWITCHES, bool [N], says for each of `nodes` whether it has the weight and bias of `few` or those of
    `eight`, both QDQ forms of the graph.
    """
    proto = _copy(graph.model)
    forms = [_dequantize_layers(qdq, set(nodes)) for qdq in (few, eight)]
    places = {name: index for index, name in enumerate(nodes)}
    for node in list(proto.graph.node):
        if node.name not in places:
            continue
        switch = f"{node.name}.edgekit.switch"
        index = numpy_helper.from_array(np.array(places[node.name]), f"{node.name}.edgekit.index")
        proto.graph.initializer.append(index)
        proto.graph.node.append(helper.make_node("Gather", [SWITCHES, index.name], [switch]))
        for place, values in forms[0][node.name].items():
            names = [f"{node.name}.edgekit.{place}.{form}" for form in ("few", "eight", "used")]
            for name, value in zip(names, (values, forms[1][node.name][place]), strict=False):
                proto.graph.initializer.append(numpy_helper.from_array(value, name))
            proto.graph.node.append(helper.make_node("Where", [switch, *names[:2]], names[2:]))
            node.input[place] = names[2]
    proto.graph.input.append(helper.make_tensor_value_info(SWITCHES, onnx.TensorProto.BOOL, [len(nodes)]))
    return proto


def _dequantize_layers(qdq: onnx.ModelProto, nodes: set[str]) -> dict[str, dict[int, Array]]:
    """Returns by node what its constant inputs stand for, float32, by the place of each."""
    stored = {tensor.name: tensor for tensor in qdq.graph.initializer}
    made = {node.output[0]: node for node in qdq.graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, dict[int, Array]] = {}
    for node in qdq.graph.node:
        if node.name in nodes:
            sources = {place: made[name] for place, name in enumerate(node.input) if name in made and place}
            found[node.name] = {place: _dequantize(source, stored) for place, source in sources.items()}
    return found


def _dequantize(node: onnx.NodeProto, stored: Mapping[str, onnx.TensorProto]) -> Array:
    """Returns what a constant behind a DequantizeLinear with a zero point of 0 stands for."""
    integers, scale = (numpy_helper.to_array(stored[name]) for name in node.input[:2])
    axis = next((item.i for item in node.attribute if item.name == "axis"), 1)
    shape = [-1 if index == axis else 1 for index in range(integers.ndim)] if scale.ndim else ()
    return np.asarray(integers.astype(np.float32) * scale.reshape(shape))


def _switch(name: str, site: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Returns an If between an activation through Q and DQ and as it is: a Where would compute both and read all."""
    integers, rounded, plain, switch = (f"{name}.edgekit.{part}" for part in ("integers", "rounded", "plain", "switch"))
    parameters = list(site.input[1:])
    through = [
        helper.make_node("QuantizeLinear", [name, *parameters], [integers], domain=site.domain),
        helper.make_node("DequantizeLinear", [integers, *parameters], [rounded], domain=site.domain),
    ]
    choice = helper.make_node("If", [switch], [f"{name}.edgekit.switched"])
    for branch, nodes in (("then", through), ("else", [helper.make_node("Identity", [name], [plain])])):
        body = helper.make_graph(nodes, branch, [], [onnx.ValueInfoProto(name=nodes[-1].output[0])])
        choice.attribute.append(helper.make_attribute(f"{branch}_branch", body))
    return [helper.make_node("Gather", [SWITCHES, f"{name}.edgekit.index"], [switch]), choice]


def _copy_bare(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy without initializers: with them it would hold every weight for a while."""
    copy = onnx.ModelProto()
    copy_fields(proto, copy, {"graph"})
    copy_fields(proto.graph, copy.graph, {"initializer"})
    return copy


def _copy(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return copy
