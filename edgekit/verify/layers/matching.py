"""Matches the tensors of one model to those of another, and makes models that output their inner tensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession, Level, SessionSettings, external_config
from edgekit.data.samples import Samples, map_samples
from edgekit.errors import UsageError
from edgekit.graph.constants import lift_constants
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.model.model import Model, order_nodes, read_with_weights_on_disk, refill
from edgekit.model.soundness import iterate_reads
from edgekit.model.tensors import DTYPES, Array, Tensors, shape_matches
from edgekit.quantize.channel_pairs import SUFFIX

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
ROUNDING = frozenset({QUANTIZE, DEQUANTIZE})


def sort_nodes(graph: Graph) -> list[Node]:
    """Returns the nodes in topological order: quantizers and converters append some out of order."""
    firsts = (next(filter(None, node.output), "") for node in order_nodes(graph.proto))
    return [graph.producers[name] for name in firsts if name in graph.producers]


def list_computing(graph: Graph) -> list[Node]:
    """Returns, in order, the nodes whose result depends on the inputs; the others are constants."""
    dynamic = set(graph.fed)
    computing: list[Node] = []
    for node in sort_nodes(graph):
        if not dynamic.isdisjoint(node.reads):
            computing.append(node)
            dynamic.update(name for name in node.output if name)
    return computing


# Exporters and quantizers add or remove these between operators that compute.
_PASSED_OVER = ROUNDING | {"Cast", "Identity", "Dropout"}


class _Sequence:
    """The computing nodes of a graph in order, with the key by which each is compared, and the readers of values."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = [node for node in list_computing(graph) if node.op_type not in _PASSED_OVER]
        self._passed = {name: node.input[0] for node in graph.nodes if node.op_type in _PASSED_OVER and node.input[0]
                        for name in node.output}  # fmt: skip
        shapes = {name: tuple(tensor.dims) for name, tensor in graph.constants.items()}
        self.keys = [self._describe(node, shapes) for node in self.nodes]
        self._given = {self._resolve(name) for name in graph.outputs} | graph.outputs
        self._readers: dict[str, list[int]] = {}
        for place, node in enumerate(self.nodes):
            for name in dict.fromkeys(self._resolve(name) for name in node.input if name):
                self._readers.setdefault(name, []).append(place)

    def find_ends(self, place: int, alone: frozenset[int]) -> Sequence[str]:
        """Returns the outputs of a node, or of the last of the nodes after it that only this graph has."""
        node = self.nodes[place]
        while len(node.output) == 1 and node.output[0] not in self._given:
            readers = self._readers.get(node.output[0], [])
            if len(readers) != 1 or readers[0] not in alone:
                break
            node = self.nodes[readers[0]]
        return tuple(node.output)

    def _resolve(self, name: str) -> str:
        while name in self._passed:
            name = self._passed[name]
        return name

    def _describe(self, node: Node, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        sizes = [shapes.get(self._resolve(name), ()) for name in node.input[1:]]
        return (node.op_type, *(str(sorted(size)) for size in sizes if len(size) > 1))


# Tensors are matched by name if that finds at least this share of what the order of operators finds. A quantizer keeps
# the names of all but a few; another exporter shares names such as `output` by accident.
_NAMES_COUNT = 0.8
_CONSTANT_OPS = frozenset({"Constant", "ConstantOfShape", "Shape"})


class MatchedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that both models compute.

    `tensor` is its name in the first model and `raw_b` that in the second. `in_a` and `in_b` name what the nodes after
    it read: the value after Q and DQ, if there are any. `copies_in_b` are all tensors of the second model that hold
    this value. `layer` and `op` are those of the node that computes it in the second model.
    """

    tensor: str
    layer: str
    op: str
    in_a: str
    raw_b: str
    in_b: str
    copies_in_b: frozenset[str]


def match_tensors(a: Graph, b: Graph) -> tuple[MatchedTensor, ...]:
    """Returns the tensors that both graphs compute, inputs included, in the order of computation of `a`.

    They are matched by name: ONNX Runtime's quantizer keeps the names of activations, gives a Conv whose Relu or Clip
    it folds the name of that node's output, and reads quantized tensors through Q and DQ
    (`onnxruntime.quantization.qdq_quantizer`); edgekit adds a word to the names of tensors that it scales. If the order
    of the operators matches more tensors than the names do, as after another export, the order counts.
    """
    made = b.producers
    scaled = {name: name + SUFFIX for name in ordered_tensors(a) if name not in made and name + SUFFIX in made}
    named = _match_pairs(a, b, [(name, scaled.get(name, name)) for name in ordered_tensors(a)])
    # No order matches more tensors than the second graph computes, and finding it takes cubic time in equal layers.
    settled = sum(item.op in _find_ops(item.tensor, a) for item in named)
    if settled >= _NAMES_COUNT * sum(len(node.output) for node in _Sequence(b).nodes):
        return named
    # The operators, with the shapes of their weights, are aligned like two texts. Those that only one graph has, such
    # as a Relu that the other folded, count as part of the one before.
    first, second = _Sequence(a), _Sequence(b)
    blocks = SequenceMatcher(None, first.keys, second.keys, autojunk=False).get_matching_blocks()
    pairs = [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]
    alone_a = frozenset(range(len(first.nodes))) - {pair[0] for pair in pairs}
    alone_b = frozenset(range(len(second.nodes))) - {pair[1] for pair in pairs}
    ends_in_order = list(zip(a.fed, b.fed, strict=False))
    for place_a, place_b in pairs:
        ends = zip(first.find_ends(place_a, alone_a), second.find_ends(place_b, alone_b), strict=False)
        ends_in_order.extend(pair for pair in ends if all(pair))
    aligned = _match_pairs(a, b, ends_in_order)
    return named if _count_alike(a, b, named) >= _NAMES_COUNT * _count_alike(a, b, aligned) else aligned


def _match_pairs(a: Graph, b: Graph, pairs: Iterable[tuple[str, str]]) -> tuple[MatchedTensor, ...]:
    known_b = b.producers.keys() | set(b.inputs)
    rounds_a, rounds_b = _find_rounding(a), _find_rounding(b) - b.outputs
    matched: list[MatchedTensor] = []
    seen: set[str] = set()
    for name, raw in pairs:
        if raw not in known_b or (name in rounds_a and raw in rounds_b):
            continue
        behind_a, behind_b = _look_behind(name, a), _look_behind(raw, b)
        node = _real_node(b.producers[raw], b) if raw in b.producers else None
        if (node is None and behind_b == (raw,)) or behind_b[0] in seen:
            continue
        seen.add(behind_b[0])
        matched.append(
            MatchedTensor(
                tensor=name,
                layer=raw if node is None else node.name or raw,
                op="Input" if node is None else node.op_type,
                in_a=behind_a[0],
                raw_b=raw,
                in_b=behind_b[0],
                copies_in_b=frozenset(behind_b),
            )
        )
    return tuple(matched)


def _find_rounding(graph: Graph) -> frozenset[str]:
    """Returns the outputs of Q and DQ nodes.

    They belong to the tensor that these round, or, for a weight, to the node that reads it.
    """
    return frozenset(name for node in graph.nodes if node.op_type in ROUNDING for name in node.output)


def _count_alike(a: Graph, b: Graph, matched: Sequence[MatchedTensor]) -> int:
    """Returns how many of the matched tensors come from the same operator in both graphs."""
    made = (item for item in matched if item.raw_b in b.producers and item.tensor in a.producers)
    return sum(_real_node(a.producers[item.tensor], a).op_type == item.op for item in made)


def _find_ops(name: str, graph: Graph) -> set[str]:
    """Returns the operator that makes a tensor; for a Relu or Clip also that of the layer that a quantizer folds it in.

    None for an input.
    """
    nodes = [graph.producers[name]] if name in graph.producers else []
    if nodes and nodes[0].op_type in {"Relu", "Clip"}:
        nodes += [graph.producers[each] for each in nodes[0].input[:1] if each in graph.producers]
    return {_real_node(node, graph).op_type for node in nodes}


def ordered_tensors(graph: Graph) -> Iterable[str]:
    """Yields the inputs and the results of nodes, in the order of computation."""
    yield from graph.fed
    for node in sort_nodes(graph):
        if node.op_type not in _CONSTANT_OPS:
            yield from (name for name in node.output if name)


def _look_behind(name: str, graph: Graph) -> tuple[str, ...]:
    """Returns the outputs of the DQ nodes of a tensor, or the tensor itself if it is not quantized."""
    quantized = [node.output[0] for node in _find_readers(name, graph) if node.op_type == QUANTIZE]
    dequantized = [node.output[0] for q in quantized for node in _find_readers(q, graph) if node.op_type == DEQUANTIZE]
    return tuple(dequantized) or (name,)


def _find_readers(name: str, graph: Graph) -> list[Node]:
    """Returns the nodes whose first input is this tensor, which for Q and DQ nodes is the one they round."""
    return [node for node in graph.readers(name) if node.input[0] == name]


def _real_node(node: Node, graph: Graph) -> Node:
    """Returns the node that computes a value, traced back through DQ, Q and casts."""
    while node.op_type in {QUANTIZE, DEQUANTIZE, "Cast"} and node.input[0] in graph.producers:
        node = graph.producers[node.input[0]]
    return node


ISOLATED_PREFIX = "edgekit.isolated:"
"""Begins the names of inputs that take the place of computed tensors, so that a layer runs alone."""

# Several sessions take turns: the threads of those that wait must not keep the cores busy.
_QUIET = {"session.intra_op.allow_spinning": "0"}


Given = Mapping[str, tuple[str, np.dtype[Any]]]
"""For tensors that are given, not computed: the name of the value that each gets, and its type."""


def open_part(
    model: Model, wanted: Iterable[str], given: Given = MappingProxyType({}), rounded: Collection[str] = ()
) -> CpuSession:
    """Returns a session, with every optimisation off, that computes the tensors `wanted`, from `given` ones if any.

    The given values are inputs with `ISOLATED_PREFIX` before their names. The Q nodes that round a tensor in `rounded`
    still read the computed one: they belong to the layer that computes it.
    """
    proto = read_with_weights_on_disk(model)
    for node in proto.graph.node:
        for place, name in enumerate(node.input):
            if name in given and not (node.op_type == QUANTIZE and name in rounded):
                node.input[place] = ISOLATED_PREFIX + given[name][0]
    proto.graph.input.extend(declare(ISOLATED_PREFIX + name, dtype) for name, dtype in dict(given.values()).items())
    extract_part(proto, wanted)
    config = {**_QUIET, **external_config(model.path.parent)}
    settings = SessionSettings(level=Level.DISABLED, config=config, arena=False, libraries=model.custom_ops)
    return CpuSession(proto.SerializeToString(), settings, subject=str(model.path))


def walk_back(graph: Graph, wanted: Iterable[str], stops: AbstractSet[str] = frozenset()) -> tuple[set[str], set[str]]:
    """Returns the tensors that `wanted` need, `wanted` included, and the `stops` at which the search ended."""
    kept, met = set[str](), set[str]()
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name in kept or name not in graph.producers:
            continue
        kept.add(name)
        reads = set(graph.producers[name].reads)
        met |= reads & stops
        waiting.extend(reads - stops)
    return kept, met


def extract_part(proto: onnx.ModelProto, wanted: Iterable[str]) -> None:
    """Removes the nodes of a model that the tensors `wanted` do not need; these, if any, become its only outputs."""
    graph, known = proto.graph, {value.name: value for value in proto.graph.output}
    names = tuple(dict.fromkeys(wanted)) or tuple(known)
    lift_constants(graph)
    kept, _ = walk_back(view_model(proto), names)
    nodes = [node for node in order_nodes(graph) if not kept.isdisjoint(node.output)]
    read = {name for node in nodes for name in iterate_reads(node)}.union(names)
    unread = {tensor.name for tensor in graph.initializer} - read
    refill(graph.node, nodes)
    refill(graph.input, [value for value in graph.input if value.name not in unread])
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])
    refill(graph.output, [known.get(name, onnx.ValueInfoProto(name=name)) for name in names])


def adapt_sample(sample: Tensors, model: Model) -> dict[str, Array]:
    """Returns the inputs of a model from a sample, with floats cast to the float type that the model has.

    Raises:
        UsageError: the sample lacks an input, or has it in another kind of type or of another shape.
    """
    adapted: dict[str, Array] = {}
    for spec in model.inputs:
        value = sample.get(spec.name)
        kinds = "UO" if spec.dtype == "string" else "f" if spec.dtype.startswith("float") else ""
        fits = value is not None and (value.dtype.name == spec.dtype or value.dtype.kind in kinds)
        if value is None or not fits or not shape_matches(value.shape, spec):
            has = ", ".join(f"{name}: {item.dtype}{list(item.shape)}" for name, item in sample.items())
            hint = f"the samples have {has}; edgekit prepare changes inputs"
            raise UsageError(f"'{model.path}' wants the input {spec}", hint=hint)
        adapted[spec.name] = value if spec.dtype == "string" else value.astype(DTYPES[spec.dtype], copy=False)
    return adapted


def run_unoptimized(model: Model, samples: Samples) -> Samples:
    """Returns a model's outputs for samples on this machine's CPU, with every optimisation off, as they are read."""
    session = CpuSession(model.path, SessionSettings(level=Level.DISABLED, libraries=model.custom_ops))
    return map_samples(samples, lambda sample: session.run(adapt_sample(sample, model)), source=str(model.path))


def declare(
    name: str, dtype: np.dtype[Any] | str, shape: Sequence[int | str | None] | None = None
) -> onnx.ValueInfoProto:
    """Returns the declaration of a tensor, for the inputs or outputs of a graph."""
    return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
