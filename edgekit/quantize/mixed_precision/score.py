"""Measures how close a quantized candidate is to the float model on held-out samples.

Variants of a graph show where a loss comes from: a QDQ graph with float weights, and float graphs with a switch that
quantizes each activation, or each layer's weights.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import Graph
from edgekit.machine import map_in_order
from edgekit.model.model import copy_without_weights, find_reads, order_nodes, refill
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.clean import import_contrib
from edgekit.quantize.accuracy.loss import join_ratios, ratio_db
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.graph.compared_tensors import ComparedTensor
from edgekit.quantize.graph.float_graph import range_source
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.objective import measure_loss
from edgekit.quantize.rounding import Placed

SWITCHES = "edgekit.switches"
"""The graph input that says which activations (or weights) are quantized."""


def strip_weights(qdq: onnx.ModelProto, graph: Graph) -> onnx.ModelProto:
    """Returns a QDQ graph with the float weights and biases of `graph`.

    Load it with ONNX Runtime's optimizer WeightBiasQuantization off, which would quantize the weights again.
    """
    proto = copy_without_weights(qdq)
    floats = {node.name: node for node in graph.nodes}
    wanted: set[str] = set()
    for node in proto.graph.node:
        source = floats.get(node.name)
        # A product that stands for a normalization reads the gain alone (`multiply_gains`).
        for index, name in enumerate(source.input[: len(node.input)] if source is not None else ()):
            if graph.is_float_constant(name):
                node.input[index] = name
                wanted.add(name)
    present = {tensor.name for tensor in qdq.graph.initializer}
    made = {node.output[0] for node in proto.graph.node if node.output}
    clashing = wanted & made
    refill(proto.graph.node, [node for node in proto.graph.node if not clashing.intersection(node.output[:1])])
    # ONNX Runtime does not remove a DequantizeLinear without readers, and would compute it in every run.
    read = find_reads(proto.graph)
    refill(proto.graph.node, [node for node in proto.graph.node if not read.isdisjoint(node.output)])
    read = find_reads(proto.graph)
    proto.graph.initializer.extend(tensor for tensor in qdq.graph.initializer if tensor.name in read)
    proto.graph.initializer.extend(graph.constants[name] for name in sorted(wanted - present))
    return proto


def constants_to_inputs(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Turns some constants of a graph into inputs, in place."""
    # Deleted one by one: building a new list would copy every weight.
    for index in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[index]
        if tensor.name in names:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
            del graph.initializer[index]


def switch_activations(
    qdq: onnx.ModelProto,
    graph: Graph,
    *,
    only: Collection[str] | None = None,
    as_float16: bool = False,
    sources: bool = False,
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Returns the float graph with a switch for each activation, and the names of these activations.

    The added input SWITCHES, bool [N], says for each activation whether its readers get it quantized by the Q and DQ of
    `qdq` (rounded to float16, if `as_float16`) or as it is. `only` are the activations that get a switch, by default
    all that `qdq` quantizes. With `sources`, those that only hold values of another one get none: rounding a value
    twice to the same grid changes nothing.
    """
    proto, placed = deepcopy(graph.model), Placed(qdq.graph)
    sites = {name.removesuffix("_QuantizeLinear_Input"): node for name, node in placed.rounders.items()}
    made = {*graph.producers, *graph.inputs}
    names = tuple(name for name in sites if name in made and (only is None or name in only))
    if sources:
        names = tuple(name for name in names if range_source(graph, name) not in sites.keys() - {name})
    switched = set(names)
    for parameter in sorted({parameter for name in names for parameter in sites[name].input[1:]}):
        proto.graph.initializer.append(placed.stored[parameter])
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = f"{name}.edgekit.switched" if name in switched else name
    # A graph with switches is loaded and optimized once; a graph for each activation would be as often.
    for index, name in enumerate(names):
        site, new, switch = sites[name], f"{name}.edgekit", (SWITCHES, index, f"{name}.edgekit")
        fewer, rounded, grid = f"{new}.fewer", f"{new}.rounded", site.input[1:]
        through = [
            helper.make_node("QuantizeLinear", [name, *grid], [fewer], domain=site.domain),
            helper.make_node("DequantizeLinear", [fewer, *grid], [rounded], domain=site.domain),
        ]
        if as_float16:
            through = [
                helper.make_node("Cast", [name], [fewer], to=onnx.TensorProto.FLOAT16),
                helper.make_node("Cast", [fewer], [rounded], to=onnx.TensorProto.FLOAT),
            ]
        plain = [helper.make_node("Identity", [name], [f"{new}.plain"])], [f"{new}.plain"]
        proto.graph.node.extend(choose_branch(proto.graph, switch, [f"{new}.switched"], (through, [rounded]), plain))
    nodes = order_nodes(proto.graph)
    refill(proto.graph.node, nodes)
    # Without their number the graph is the same for a target that quantizes more, behind what is compared.
    proto.graph.input.append(helper.make_tensor_value_info(SWITCHES, onnx.TensorProto.BOOL, [None]))
    import_contrib(proto)
    return proto, names


def switch_weights(graph: Graph, rounded: Mapping[str, Mapping[int, Array]]) -> onnx.ModelProto:
    """Returns the float graph with a switch for the weight and bias of each layer in `rounded`.

    `rounded` holds the rounded constants of each layer by the index of the input (`list_rounded`). The added input
    SWITCHES, bool [N], says for each layer, in this order, whether it uses these or the float ones.
    """
    proto, nodes = deepcopy(graph.model), list[onnx.NodeProto]()
    places = {name: index for index, name in enumerate(rounded)}
    for node in proto.graph.node:
        if node.name not in places:
            nodes.append(node)
            continue
        for place, values in rounded[node.name].items():
            proto.graph.initializer.append(numpy_helper.from_array(values, f"{node.name}.edgekit.{place}.rounded"))
        # An If of two layers: ONNX Runtime prepares constant weights, which those that a Where chooses are not.
        copies = deepcopy(node), deepcopy(node)
        for number, each in enumerate(copies):
            refill(each.output, [name and f"{name}.edgekit.{number}" for name in node.output])
        for place in rounded[node.name]:
            copies[0].input[place] = f"{node.name}.edgekit.{place}.rounded"
        switch, made = (SWITCHES, places[node.name], f"{node.name}.edgekit"), [name for name in node.output if name]
        then, otherwise = (([each], [name for name in each.output if name]) for each in copies)
        nodes += choose_branch(proto.graph, switch, made, then, otherwise)
    refill(proto.graph.node, nodes)
    proto.graph.input.append(helper.make_tensor_value_info(SWITCHES, onnx.TensorProto.BOOL, [len(rounded)]))
    return proto


def list_rounded(qdq: onnx.ModelProto, graph: Graph) -> dict[str, dict[int, Array]]:
    """Returns, for each node with quantized constants in the QDQ form, these dequantized to float32, by input index."""
    placed, found = Placed(qdq.graph), dict[str, dict[int, Array]]()
    for node in (placed.nodes[each.name] for each in graph.nodes if each.name in placed.nodes):
        for index in range(1, len(node.input)):
            if (values := placed.dequantize(node, index)) is not None:
                found.setdefault(node.name, {})[index] = values
    return found


Branch = tuple[Sequence[onnx.NodeProto], Sequence[str]]
"""Nodes, and the tensors that they return."""


def choose_branch(
    graph: onnx.GraphProto, switch: tuple[str, int, str], outputs: Sequence[str], then: Branch, otherwise: Branch
) -> list[onnx.NodeProto]:
    """Returns nodes that compute some outputs by one of two branches: an If, as a Where would compute both.

    `switch` is a graph input, bool [N], the index in it, and a prefix for new names.
    """
    given, index, prefix = switch
    graph.initializer.append(numpy_helper.from_array(np.array(index), f"{prefix}.index"))
    choice = helper.make_node("If", [f"{prefix}.switch"], outputs)
    for branch, (nodes, names) in (("then_branch", then), ("else_branch", otherwise)):
        body = helper.make_graph(nodes, branch, [], [onnx.ValueInfoProto(name=name) for name in names])
        choice.attribute.append(helper.make_attribute(branch, body))
    return [helper.make_node("Gather", [given, f"{prefix}.index"], [f"{prefix}.switch"]), choice]


EQUAL_DB = 0.1
"""Ratios that differ by less, 2 % of the noise power, count as equal: a choice."""


def open_judge(
    qdq: onnx.ModelProto,
    compared: tuple[ComparedTensor, ...],
    statistics: Path,
    *,
    keep_float_weights: bool = True,
    whole: Tensors | None = None,
    most: int | None = None,
    at_once: int | None = None,
) -> Callable[..., float]:
    """Returns a function that judges a graph, in one session, by values for inputs that were added to it (if any).

    It takes the values and a wanted ratio in dB, and returns the signal-to-noise ratio over all held-out samples, or
    the first `most`; with several tensors it is the ratio of their mean noise. Noise only adds up: once the signal is
    known and the ratio is below the wanted one, no more samples are run, and the result is an upper bound. The outputs
    are compared with those of the float model, or, with `whole`, with those of this session for these values: then both
    round sums in the same way. The graph runs on the CPU provider, with products that do not saturate; weights that
    were set aside are read from the folder `statistics`. Without `keep_float_weights` ONNX Runtime quantizes float
    weights between Q and DQ nodes, as it does by default. `at_once` samples run in parallel.

    Raises:
        UsageError: the statistics are gone.
    """
    # A layer with a switch (`switch_weights`) lies in the branches of a nameless If, and reads the float tensor.
    nodes = {node.name: node for node in qdq.graph.node if node.name}
    names = {each: nodes[each.reader].input[0] if each.reader in nodes else each.tensor for each in compared}
    # The outputs are replaced only while the session is made: a copy of the graph would hold every weight twice.
    given = list(qdq.graph.output)
    refill(qdq.graph.output, [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names.values())])
    try:
        session = open_graph(qdq, statistics, keep_float_weights=keep_float_weights)
    finally:
        refill(qdq.graph.output, given)
    own, signals = list[tuple[Tensors, Tensors]](), list[Array]()

    def read() -> Iterable[tuple[Tensors, Tensors]]:
        return own or islice(read_held_out(statistics), most)

    if whole is not None:
        own += [(inputs, session.run({**inputs, **whole})) for inputs, _ in read()]

    def judge(values: Tensors = MappingProxyType({}), wanted: float = -math.inf) -> float:
        powers = np.zeros((len(compared), 2))
        for (_, expected), found in map_in_order(lambda pair: session.run({**pair[0], **values}), read(), at_once):
            lost = [measure_loss(each, expected[each.tensor])(found[name]) for each, name in names.items()]
            powers += np.stack(lost)
            if signals and (ratio := _join_powers(signals[0], powers[:, 1])) < wanted:
                return ratio
        if np.isfinite(powers).all():
            signals[:] = [powers[:, 0]]
        return _join_powers(*powers.T)

    return judge


def _join_powers(signal: Array, noise: Array) -> float:
    return join_ratios([ratio_db(*power) for power in zip(signal, noise, strict=True)])


def has_held_out(statistics: Path) -> bool:
    """Returns True if a calibration has held-out samples.

    Raises:
        UsageError: the statistics are gone.
    """
    return next(read_held_out(statistics), None) is not None
