"""What became of each node of a model: kept, fused into another, or folded away."""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import onnx

from edgekit.convert.ort_format.report import OrtNode

FOLDED = "folded"
"""What became of a node whose result is a constant, or is read by nobody, in the converted file."""

_TOKEN = re.compile(r"_token_\d+$")
_INSERTED = re.compile(r"^(InsertedPrecisionFreeCast_)+")
_MOST_LAYOUT_NODES = 4
# What ONNX Runtime puts around a node that it gives another layout or type.
_LAYOUT_OPS = frozenset({"Transpose", "ReorderOutput", "ReorderInput", "Cast"})


class OpFusion(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the nodes of one operator: `became` counts them by the operator that computes their result now."""

    op: str
    count: int
    became: dict[str, int]

    @property
    def sentence(self) -> str:
        """The same in words, such as "26 of 26 Conv are QLinearConv"."""
        parts = [f"{count} of {self.count} {self.op} are {name}" for name, count in self.became.items()]
        return ", ".join(parts)


def trace_fusions(source: onnx.GraphProto, nodes: Sequence[OrtNode]) -> tuple[OpFusion, ...]:
    """Returns what became of the nodes of the main graph, by operator, most frequent first.

    A node is found again by its name, which ONNX Runtime keeps or lengthens by `_token_N`, or by the tensor it gives.
    Where both are gone, the node that gives the next tensor on the way to the outputs has taken it in.
    """
    named = {_TOKEN.sub("", node.name): node for node in nodes if node.name}
    # Reversed, so that of two nodes that end up with one name, the first in the order of the graph stays.
    makers = {_INSERTED.sub("", name): node for node in reversed(nodes) for name in node.outputs}
    readers: dict[str, list[onnx.NodeProto]] = collections.defaultdict(list)
    for node in source.node:
        for name in node.input:
            readers[name].append(node)
    given = {node.name for node in source.node}
    fates: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for node in source.node:
        found = named.get(node.name) or _find_maker(node, makers, readers, given)
        fates[_qualified(node)][found.op.rpartition(".")[2] if found else FOLDED] += 1
    ranked = sorted(fates.items(), key=lambda item: (-item[1].total(), item[0]))
    return tuple(OpFusion(op=op, count=count.total(), became=_by_frequency(count)) for op, count in ranked)


def _find_maker(
    node: onnx.NodeProto,
    makers: Mapping[str, OrtNode],
    readers: Mapping[str, Sequence[onnx.NodeProto]],
    given: Iterable[str],
) -> OrtNode | None:
    seen: set[str] = set()
    waiting = collections.deque(name for name in node.output if name)
    while waiting:
        name = waiting.popleft()
        if name in makers:
            return _look_through(makers[name], makers, given)
        if name not in seen:
            seen.add(name)
            # The tensor is gone: whoever read it was fused with its maker, so what that reader gives is looked for
            # next.
            waiting.extend(made for reader in readers.get(name, ()) for made in reader.output if made)
    return None


def _look_through(node: OrtNode, makers: Mapping[str, OrtNode], given: Iterable[str]) -> OrtNode:
    """Returns the node that computes what a node of ONNX Runtime's own only lays out anew."""
    for _ in range(_MOST_LAYOUT_NODES):
        behind = makers.get(_INSERTED.sub("", node.inputs[0])) if node.inputs else None
        if behind is None or node.op.rpartition(".")[2] not in _LAYOUT_OPS or node.name in given:
            break
        node = behind
    return node


def _qualified(node: onnx.NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _by_frequency(count: collections.Counter[str]) -> dict[str, int]:
    return dict(sorted(count.items(), key=lambda item: (-item[1], item[0])))
