"""Finds the parts of a graph that 8 bits cannot represent, from the graph alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import walk

# Operators with weights: the layers of a network begin with the first of them.
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU"})
# Operators that compute a mean or a sum of squares.
_REDUCING = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "GlobalAveragePool", "AveragePool"})
# Others that make one number of several, or take one of them.
_TAKING = frozenset({"Gather", "ReduceL1", "ReduceMax", "ReduceMin", "Slice", "Split"})
_POLYNOMIAL = frozenset({"Add", "Div", "Mul", "Pow"})
# Exporters write a normalisation as about ten nodes. This bounds a walk; chosen by hand.
_MOST_NODES = 24
# Operators that rank positions, before the numbers of the best ones are gathered into a list.
_RANKING = frozenset({"ArgMax", "ArgMin", "Equal", "NonMaxSuppression", "NonZero", "TopK"})
_SPECTRAL = frozenset({"STFT", "DFT", "ReduceL2", "ReduceSumSquare"})
# Operators that may lie between the inputs of a graph and the power of their spectrum; networks use others too.
_LINEAR = frozenset({
    "Abs", "Add", "AveragePool", "Cast", "Clip", "Concat", "Constant", "Conv", "Div", "Expand", "Gather", "Gemm",
    "Identity", "MatMul", "Max", "Min", "Mul", "Neg", "Pad", "Pow", "ReduceMean", "ReduceSum", "Reshape", "Slice",
    "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Transpose", "Unsqueeze",
})  # fmt: skip


def find_float_regions(graph: Graph) -> dict[str, str]:
    """Returns the nodes, by name, that no integer width can compute, each with the reason to keep it float.

    - Before a Log a value that rounds to zero becomes minus infinity, with 16 bits as with 8. So a spectral front end
      stays float from the inputs to its Log. After a network, as with a Log of a Softmax, only the nodes between the
      last layer with weights and the Log stay float.
    - The root of a spectrum (its magnitude, or a power below one as in PCEN, Y. Wang et al., arXiv:1607.05666) behaves
      like its Log.
    - A constant that is not finite has no scale.
    - Nodes from a ranking to the outputs handle indices, and lists that mix boxes in pixels with scores.
    """
    reasons: dict[str, str] = {}
    for node in graph.nodes:
        constants = (graph.weight(name) for name in node.input if graph.is_float_constant(name))
        if not all(np.isfinite(value).all() for value in constants):
            reasons.setdefault(node.name, "a constant of it is not finite")
        if node.output and graph.is_float(node.output[0]):
            for member, kind in _amplifying(graph, node):
                reason = f"it leads to the {kind} '{node.name}', which magnifies rounding near 0"
                reasons.setdefault(member.name, reason)
    for node, listing in _find_lists(graph):
        for member in listing:
            reasons.setdefault(member.name, f"it lists what the {node.op_type} '{node.name}' picks")
    return reasons


def _amplifying(graph: Graph, node: Node) -> Iterator[tuple[Node, str]]:
    """Yields a Log or the root of a spectrum, and the nodes whose rounding errors it amplifies, each with its kind."""
    # The slopes 1/x and 1/(2 sqrt x) are unbounded near 0, and the power of a spectrum spans many decades: most of its
    # values lie far below the step of any integer grid. A transformer on a log mel spectrum fell from 93 to 47 % with
    # ONNX Runtime's quantizer (docs/reference/networks.md, "Nets that stock quantization ruins"). Roots in
    # normalisations, of which a network has many, are skipped without a walk back to the inputs.
    is_root = 0 < _exponent(graph, node) < 1 if node.op_type != "Sqrt" else not _normalisation(graph, node)
    if node.op_type != "Log" and not is_root:
        return
    before = _ancestors(graph, node)
    # The power of a spectrum: only linear operators with a square or a transform.
    is_spectrum = all(each.op_type in _LINEAR | _SPECTRAL for each in before) and any(
        each.op_type in _SPECTRAL or _exponent(graph, each) == 2 or _is_own_square(each) for each in before
    )
    if node.op_type == "Log":
        is_front = is_spectrum or _count_layers(before) <= _count_layers(_descendants(graph, node))
        for member in (node, *(before if is_front else _ancestors(graph, node, stop=_LAYERS))):
            yield member, "logarithm"
    elif is_spectrum:
        for member in (node, *before):
            yield member, "root of squares"


def find_list_sources(graph: Graph, output: str) -> tuple[str, ...]:
    """Returns the float tensors from which an output lists numbers, in graph order; () if it is not a list."""
    lists = (members for members in _find_lists(graph) if members[1])
    inside = {member.name: member for node, listing in lists for member in (node, *listing)}
    if output not in graph.producers or graph.producers[output].name not in inside:
        return ()
    made = {name for node in inside.values() for name in node.output}
    names = (name for node in sorted(inside.values(), key=lambda node: node.index) for name in node.input)
    return tuple(dict.fromkeys(name for name in names if name in graph.producers and name not in made))


def _find_lists(graph: Graph) -> Iterator[tuple[Node, list[Node]]]:
    """Yields each ranking node with all nodes after it, unless a layer with weights follows."""
    ranking = [node for node in graph.nodes if node.op_type in _RANKING]
    leading = _reach_layers(graph.nodes[::-1], partial(_readers, graph)) if ranking else ()
    for node in ranking:
        if node.name not in leading:
            yield node, _descendants(graph, node)


def _is_own_square(node: Node) -> bool:
    return node.op_type == "Mul" and len(set(node.input)) == 1


def _exponent(graph: Graph, node: Node) -> float:
    """Returns the exponent of a Pow; 0 if it is not a single number, or the node is not a Pow."""
    return (graph.number(node.input[1]) or 0.0) if node.op_type == "Pow" else 0.0


def find_high_precision_regions(graph: Graph) -> dict[str, str]:
    """Returns the nodes, by name, that need 16 bits or float, each with the reason.

    They are the nodes of normalisations, whose square root and quotient amplify rounding errors of the variance: the
    square, the reduction, the root, and the quotient or product with the normalised tensor. And the parts of a Gelu
    with Tanh, whose cube of x spans three times the decades of x, and those of an Elu with Exp, whose sum of two halves
    would be rounded three times. And what is as large as its sample (`find_sized_by_sample`).
    """
    sized = find_sized_by_sample(graph).items()
    reasons = {name: f"it is as large as its sample, as '{last}' makes its result" for name, last in sized}
    for node in graph.nodes:
        if node.op_type == "Tanh":
            for member in _tanh_gelu(graph, node):
                reasons.setdefault(member.name, f"it belongs to the Gelu around '{node.name}'")
        if node.op_type == "Exp":
            for member in _split_elu(graph, node):
                reasons.setdefault(member.name, f"it belongs to the Elu around '{node.name}'")
        if node.op_type == "Sqrt" and node.output and graph.is_float(node.output[0]):
            for member in _normalisation(graph, node):
                reasons.setdefault(member.name, f"it belongs to the normalisation around '{node.name}'")
    return reasons


def find_sized_by_sample(graph: Graph) -> dict[str, str]:
    """Returns the nodes, by name, that compute what is as large as its sample, each with the node that makes it so.

    A forecaster divides a series by its own size, or takes its level away, and multiplies the result by the size, or
    adds the level (RevIN, T. Kim et al., ICLR 2022; NLinear, A. Zeng et al., AAAI 2023): what layers made, and a number
    that was reduced or taken from the inputs without layers; no layer follows. Samples differ in size by decades, and
    errors count relative to it. On one grid of 8 bits nothing is left of the smallest, and a new sample may be many
    times as large as those of a calibration. Such are the nodes before the first layer and those from the last one on.
    """
    behind = _reach_layers(graph.nodes, partial(_producers, graph))
    leading = _reach_layers(graph.nodes[::-1], partial(_readers, graph))
    found = dict[str, str]()
    for last in (node for node in graph.nodes if node.op_type in {"Add", "Mul"} and node.name in behind - leading):
        for maker in _producers(graph, last):
            sizes = graph.static_shape(maker.output[0])
            is_number = sizes is not None and sum(size != 1 for size in sizes) <= 1 and maker.name not in behind
            # Numbers that are added to as many results, such as a state and its change, are no level of them.
            is_number = is_number and (last.op_type == "Mul" or sizes != graph.static_shape(last.output[0]))
            made = [maker, *_ancestors(graph, maker)] if is_number else []
            given = {name for node in made for name in node.input if name in graph.inputs and graph.is_float(name)}
            is_made = given and any(node.op_type in _REDUCING | _TAKING for node in made)
            if is_made and not _count_layers(made):
                front = walk((node for name in given for node in graph.readers(name)), partial(_readers, graph))
                sized = [node for node in front if node.name not in behind and node.op_type not in _LAYERS]
                found |= {node.name: last.name for node in (*sized, last, *_descendants(graph, last))}
    return found


def _reach_layers(nodes: Sequence[Node], step: Callable[[Node], Iterable[Node]]) -> set[str]:
    """Returns the nodes, by name, from which steps lead to a layer; each of `nodes` comes after those it leads to."""
    reached: set[str] = set()
    for node in nodes:
        if any(each.op_type in _LAYERS or each.name in reached for each in step(node)):
            reached.add(node.name)
    return reached


def _split_elu(graph: Graph, power: Node) -> list[Node]:
    """Returns the nodes of Max(x, 0) + a * Exp(Min(x, 0)) - a around its Exp; [] if it belongs elsewhere."""
    low = [node for node in _producers(graph, power) if node.op_type == "Min"]
    high = [node for made in low for node in graph.readers(made.input[0]) if node.op_type == "Max"]
    found, node = [*low, power, *high], power
    while len(high) == 1 and len(readers := graph.readers(node.output[0])) == 1 and len(found) < _MOST_NODES:
        node = readers[0]
        found.append(node)
        if high[0].output[0] in node.input:
            return found if node.op_type == "Add" else []
        if node.op_type not in {"Mul", "Sub"}:
            break
    return []


def _tanh_gelu(graph: Graph, bend: Node) -> list[Node]:
    """Returns the nodes of x / 2 * (1 + Tanh(a * (x + b * x^3))) around its Tanh; [] if it belongs elsewhere."""

    def walk_back(stop: str) -> list[Node]:
        """Returns the nodes of the polynomial in the tensor `stop`, back from the Tanh."""

        def before(node: Node) -> Iterator[Node]:
            makers = (maker for maker in _producers(graph, node) if stop not in maker.output)
            return (maker for maker in makers if maker.op_type in _POLYNOMIAL)

        return [*walk(before(bend), before)]

    powers = (node for node in walk_back("") if node.op_type == "Pow" or _is_own_square(node))
    source = next((node.input[0] for node in powers), "")
    found = [bend, *walk_back(source)] if source else []
    # 1 + Tanh, and the product with x and a half, in any order.
    last = bend
    for _ in range(3 if source else 0):
        readers = graph.readers(last.output[0])
        others = [maker for node in readers for maker in _producers(graph, node) if maker is not last]
        made = [maker for maker in others if source not in maker.output]
        is_part = len(readers) == 1 and all(node.op_type in _POLYNOMIAL for node in (*readers, *made))
        if not is_part or not all(source in maker.input for maker in made):
            break
        last = readers[0]
        found += [*made, last]
    return found


def _normalisation(graph: Graph, root: Node) -> list[Node]:
    """Returns the nodes of (x - mean) / sqrt(var) around its root; [] if the root belongs to something else."""
    before: dict[str, Node] = {}
    waiting = [root]
    while waiting and len(before) < _MOST_NODES:
        node = waiting.pop()
        for maker in _producers(graph, node):
            if maker.name in before or maker.op_type in _LAYERS:
                continue
            if node.op_type not in _REDUCING:
                waiting.append(maker)
            elif maker.op_type != "Pow" and not _is_own_square(maker):
                continue
            before[maker.name] = maker
    # Exporters write x / sqrt(v), x * (1 / sqrt(v)) or x * (scale / sqrt(v)): at most three nodes after the root.
    after: list[Node] = []
    name = root.output[0]
    for allowed in ({"Reciprocal", "Div"}, {"Mul", "Div"}, {"Mul", "Div"}):
        readers = [node for node in graph.readers(name) if node.op_type in allowed]
        if len(readers) != 1:
            break
        others = [node for node in _producers(graph, readers[0]) if name not in node.output]
        after += [readers[0], *(node for node in others if node.op_type == "Sub")]
        if others:
            break
        name = readers[0].output[0]
    has_mean = any(node.op_type in _REDUCING for node in before.values())
    return [root, *before.values(), *after] if has_mean and after else []


def _ancestors(graph: Graph, node: Node, stop: frozenset[str] = frozenset()) -> list[Node]:
    def before(current: Node) -> Iterator[Node]:
        return (maker for maker in _producers(graph, current) if maker.op_type not in stop)

    return [*walk(before(node), before)]


def _descendants(graph: Graph, node: Node) -> list[Node]:
    return [*walk(_readers(graph, node), partial(_readers, graph))]


def _readers(graph: Graph, node: Node) -> Iterator[Node]:
    return (reader for name in node.output for reader in graph.readers(name))


def _producers(graph: Graph, node: Node) -> Iterator[Node]:
    return (graph.producers[name] for name in node.input if name in graph.producers)


def _count_layers(nodes: list[Node]) -> int:
    return sum(node.op_type in _LAYERS for node in nodes)
