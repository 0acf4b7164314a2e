"""What each node of a model became in a converted file: kept, fused, removed, or folded into a constant.

Names of nodes are not reliable, because ONNX Runtime gives them to other nodes. Names of tensors are: the node that now
computes a tensor does the work of the nodes that computed it before. Both graphs are cut at the tensors that they
share; the nodes between the same cuts compute the same.
"""

import collections
import re
from collections.abc import Container, Iterator, Mapping, Sequence

import msgspec
import onnx

from edgekit.convert.ort_format.report import OrtNode
from edgekit.graph.constants import MOVES

FOLDED = "folded"
"""The fate of a node whose result is a constant, or is not read by any node, in the converted graph."""
GONE = "gone"
"""The fate of a node that was removed: its readers now read its input, or do its work themselves."""

_TOKEN = re.compile(r"_token_\d+$")
_INSERTED = re.compile(r"^(InsertedPrecisionFreeCast_)+")
_NCHWC = "com.microsoft.nchwc."
# Operators that ONNX Runtime inserts around a node whose layout or type it changes.
_LAYOUT_OPS = frozenset({"Transpose", "ReorderOutput", "ReorderInput", "Cast"})
_MOST_NAMED = 6
# The readers that `_follow_name` follows: for example the activation after a Conv, and its Q node.
_MOST_FOLLOWED = 2
# Operators that compute nothing: no other node replaces them.
_IDLE_OPS = frozenset({"Dropout", "Identity"})


class OpFusion(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes of one operator became: `became` counts them by the operator that does their work now."""

    op: str
    count: int
    became: dict[str, int]

    @property
    def sentence(self) -> str:
        """The same in words, such as "26 of 26 Conv are QLinearConv"."""
        return ", ".join(f"{count} of {self.count} {self.op} are {name}" for name, count in self.became.items())


class FusedKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fusion: `count` times the operators `ops`, in graph order, became one `into` node."""

    ops: tuple[str, ...]
    into: str
    count: int


class Fusions(msgspec.Struct, frozen=True, kw_only=True):
    """The fates of the nodes of a graph, by operator, and the kinds of fusion; both most frequent first."""

    fates: tuple[OpFusion, ...]
    kinds: tuple[FusedKind, ...]


_Region = tuple[tuple[OrtNode, ...], tuple[OrtNode, ...]]
"""Nodes of the source, and of the converted graph, between the same tensors; the last node comes first."""


def trace_fusions(source: onnx.GraphProto, nodes: Sequence[OrtNode]) -> Fusions:
    """Returns the fates of the nodes of the main graph of `source` in a graph with these `nodes`."""
    given = as_nodes(source)
    fates: dict[int, str] = {}
    kinds: collections.Counter[tuple[tuple[str, ...], str]] = collections.Counter()
    for sources, results in _cut_regions(given, nodes, _find_constants(source)):
        found = _judge_region(sources, results)
        for index, fate in found.items():
            # A node may be in several regions: the first decides, unless the node is gone there.
            if fates.get(index, GONE) == GONE:
                fates[index] = fate
        for name, count in collections.Counter(map(_short, results)).items():
            # Casts are no part of a pattern.
            members = [given[index].op for index in sorted(found) if found[index] == name]
            into = tuple(op for op in members if op != "Cast")
            # If the tensors between them have lost their names, a region holds the same pattern several times.
            times = count if all(into.count(op) % count == 0 for op in into) else 1
            if len(into) > times:
                kinds[into[: len(into) // times], name] += times
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for node in given:
        counts[node.op][fates.get(node.index, FOLDED)] += 1
    return Fusions(
        fates=tuple(
            OpFusion(
                op=op, count=count.total(), became=dict(sorted(count.items(), key=lambda item: (-item[1], item[0])))
            )
            for op, count in sorted(counts.items(), key=lambda item: (-item[1].total(), item[0]))
        ),
        kinds=tuple(
            FusedKind(ops=ops, into=into, count=count)
            for (ops, into), count in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
        ),
    )


def as_nodes(graph: onnx.GraphProto) -> tuple[OrtNode, ...]:
    """Returns the nodes of an ONNX graph as `OrtNode`; indices are positions."""
    return tuple(
        OrtNode(
            index=index,
            name=node.name,
            op=f"{node.domain}.{node.op_type}" if node.domain not in {"", "ai.onnx"} else node.op_type,
            inputs=tuple(node.input),
            outputs=tuple(node.output),
        )
        for index, node in enumerate(graph.node)
    )


def _judge_region(sources: Sequence[OrtNode], results: Sequence[OrtNode]) -> dict[int, str]:
    """Returns the fate of each source node of a region: a node of the same operator, else the region's other nodes."""
    left = list(results)
    fates = {node.index: GONE for node in sources if node.op in _IDLE_OPS}
    for node in sources:
        if (same := next((one for one in left if _bare(one.op) == _bare(node.op)), None)) is not None:
            left.remove(same)
            fates[node.index] = _short(same)
    names = [_short(one) for one in reversed(left) if _bare(one.op) not in _LAYOUT_OPS | MOVES]
    if names:
        unique = tuple(dict.fromkeys(names))
        rest = " + ".join(unique) if len(unique) <= _MOST_NAMED else f"{len(names)} nodes"
    else:
        # No node is new. If the last node kept its operator, the others were removed. Otherwise the node that now
        # gives the last result does their work too, as when Conv and BatchNormalization became Conv.
        last = next((one for one in results if _bare(one.op) not in _LAYOUT_OPS), results[0])
        rest = GONE if sources[0].index in fates else _short(last)
    # A convolution does not replace what only changes the shape or layout of its input.
    gone = MOVES if rest.endswith("Conv") else frozenset[str]()
    return {node.index: fates.get(node.index, GONE if node.op in gone else rest) for node in sources}


def _cut_regions(given: Sequence[OrtNode], nodes: Sequence[OrtNode], constants: Container[str]) -> Iterator[_Region]:
    """Yields the regions between tensors that both graphs have; constants and what follows from them are in none."""
    before = {name: node for node in given for name in node.outputs if name and name not in constants}
    now = {name: node for node in nodes for name in node.outputs if name}
    same = _match_tensors(given, nodes)
    makers: dict[str, OrtNode] = {}
    # A node inserted for a layout or a type gives a tensor its old name again, but the node that computes it counts.
    for node in sorted(nodes, key=lambda node: _bare(node.op) in _LAYOUT_OPS):
        for name in node.outputs:
            if name in same:
                makers.setdefault(same[name], node)
    alive = frozenset(same.values())
    for end in given:
        last = [makers[name] for name in end.outputs if name in makers and name in before]
        if last:
            results = {id(node): node for one in last for node in _walk_back(one, now, same)}
            yield _walk_back(end, before, alive), tuple(results.values())


def _walk_back(end: OrtNode, makers: Mapping[str, OrtNode], cuts: Container[str]) -> tuple[OrtNode, ...]:
    """Returns a node and those before it, up to the tensors of `cuts`."""
    found = {id(end): end}
    waiting = collections.deque([end])
    while waiting:
        for name in waiting.popleft().inputs:
            maker = None if name in cuts else makers.get(name)
            if maker is not None and id(maker) not in found:
                found[id(maker)] = maker
                waiting.append(maker)
    return tuple(found.values())


def _match_tensors(given: Sequence[OrtNode], nodes: Sequence[OrtNode]) -> dict[str, str]:
    """Returns by tensor of the result the same tensor of the source, whatever its layout or type."""
    names = {name for node in given for name in (*node.inputs, *node.outputs) if name}
    same = {name: name for node in nodes for name in (*node.inputs, *node.outputs) if name in names}
    named = {node.name: node.outputs[0] for node in given if node.name and node.outputs}
    readers: dict[str, list[OrtNode]] = collections.defaultdict(list)
    for reader in given:
        for name in reader.inputs:
            readers[name].append(reader)
    # A tensor that its own node still computes has kept its name: fusions give all their results one name with numbers.
    before = {name: node.name for node in given for name in node.outputs}
    kept = {name for node in nodes for name in node.outputs if node.name and before.get(name) == node.name}
    for node in nodes:
        for name in node.outputs:
            blocked = node.op.startswith(_NCHWC) and node.name.endswith("_nchwc")
            # A blocked node has the name of its tensor (nchwc_transformer.cc); other new names are that of the tensor
            # or of the node, with a token.
            stem = _INSERTED.sub("", node.name.removesuffix("_nchwc") if blocked else name)
            origin = stem if stem in names else _TOKEN.sub("", stem)
            origin = origin if origin in names else named.get(origin, "")
            origin = "" if origin != stem and origin in kept else origin
            if origin and name not in same:
                same[name] = _follow_name(node, origin, readers)
    return same


def _follow_name(node: OrtNode, tensor: str, readers: Mapping[str, Sequence[OrtNode]]) -> str:
    """Returns the tensor that a node computes; a node that fused an Add or Q node has the name of an earlier tensor."""
    blocked_sum = node.op == f"{_NCHWC}Conv" and len(node.inputs) > 3
    last = {"Add", "Sum"} if blocked_sum else {"QuantizeLinear"} if _bare(node.op).startswith("QLinear") else set[str]()
    found = tensor
    for _ in range(_MOST_FOLLOWED if last else 0):
        after = readers[found]
        if len(after) != 1:
            break
        found = after[0].outputs[0]
        if after[0].op in last:
            return found
    return tensor


def _find_constants(graph: onnx.GraphProto) -> frozenset[str]:
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        # A node with a subgraph may read tensors that are not among its inputs.
        is_plain = not any(attribute.HasField("g") for attribute in node.attribute)
        if is_plain and all(name in constants for name in node.input if name):
            constants |= set(node.output)
    return frozenset(constants)


def _bare(op: str) -> str:
    return op.rpartition(".")[2]


def _short(node: OrtNode) -> str:
    return node.op.removeprefix("com.microsoft.")
