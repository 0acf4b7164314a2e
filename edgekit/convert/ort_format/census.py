"""Counting what a converted file will run, and finding INT8 nodes that stayed float."""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edgekit.convert.ort_format.report import ABSENT_NODE, OrtGraph, OrtNode, SavedOptimization, bare_op

# The order in which a session replays them (ORT's `graph_transformer_utils.cc`).
_REPLAY_ORDER = ("QDQSelectorActionTransformer", "ConvActivationFusion", "MatMulNBitsFusion")

# What ORT's CPU provider has 8-bit kernels for, and what nearly all the work is made of.
_FLOAT_OPS = {
    "Conv": "Conv", "com.microsoft.FusedConv": "Conv", "Gemm": "Gemm", "com.microsoft.FusedGemm": "Gemm",
    "MatMul": "MatMul", "com.microsoft.FusedMatMul": "MatMul",
}  # fmt: skip

_ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu"})


class UnfusedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that stands between DQ and Q nodes and will run in float all the same.

    `activation` names the operator between it and its Q node, or the fused operator that contains one; it is empty if
    there is none.
    """

    name: str
    op: str
    activation: str


def replay_saved(graph: OrtGraph) -> tuple[OrtNode, ...]:
    """Returns the nodes that are left once a session has replayed the saved optimisations.

    One whose nodes are gone is skipped, and a DQ node goes when nothing reads it any more (ORT's
    `selectors_actions/actions.cc`).
    """
    left = {node.index: node for node in graph.nodes}
    fresh = itertools.count(-1, -1)
    for saved in sorted(graph.saved, key=_replay_rank):
        indices = [index for index in dict.fromkeys(saved.nodes) if index != ABSENT_NODE]
        if not indices or any(index not in left for index in indices):
            continue
        members = [left[index] for index in indices]
        for index in indices:
            if left[index].op != "DequantizeLinear":
                del left[index]
        left.update((next(fresh), _fuse_nodes(members, op)) for op in saved.produces)
    read = {name for node in left.values() for name in node.inputs} | set(graph.outputs)
    return tuple(node for node in left.values() if node.op != "DequantizeLinear" or read & set(node.outputs))


def count_ops(nodes: Iterable[OrtNode]) -> dict[str, int]:
    """Returns how many nodes of each operator there are, without domains, most frequent first."""
    counter = collections.Counter(node.op.rpartition(".")[2] for node in nodes)
    return dict(sorted(counter.items(), key=lambda entry: (-entry[1], entry[0])))


def find_unfused(nodes: Iterable[OrtNode], outputs: Iterable[str]) -> tuple[UnfusedNode, ...]:
    """Returns the Conv, Gemm and MatMul nodes that read from DQ nodes, feed a Q node, and will run in float.

    `outputs` are those of the graph: a value that leaves the graph is wanted in float.
    """
    left = tuple(nodes)
    makers = {name: node for node in left for name in node.outputs}
    readers: dict[str, list[OrtNode]] = collections.defaultdict(list)
    for node in left:
        for name in node.inputs:
            readers[name].append(node)
    for name in outputs:
        readers[name] = []
    found: list[UnfusedNode] = []
    for node in left:
        if node.op not in _FLOAT_OPS or not all(
            _maker_op(name, makers) == "DequantizeLinear" for name in node.inputs[:2]
        ):
            continue
        reader = _only_reader(node, readers)
        activation = reader if reader is not None and reader.op in _ACTIVATIONS else None
        last = reader if activation is None else _only_reader(activation, readers)
        if last is not None and last.op == "QuantizeLinear":
            within = "" if node.op == _FLOAT_OPS[node.op] else node.op
            op = within if activation is None else activation.op
            found.append(UnfusedNode(name=node.name, op=_FLOAT_OPS[node.op], activation=op))
    return tuple(found)


def _replay_rank(saved: SavedOptimization) -> int:
    return _REPLAY_ORDER.index(saved.optimizer) if saved.optimizer in _REPLAY_ORDER else len(_REPLAY_ORDER)


def _fuse_nodes(members: list[OrtNode], op_id: str) -> OrtNode:
    """Returns a node that stands for its members, enough of one to be counted and connected."""
    made = {name for node in members for name in node.outputs}
    read = [name for node in members for name in node.inputs]
    return OrtNode(
        index=-1,
        name=next((node.name for node in members if node.op != "DequantizeLinear"), ""),
        op=bare_op(op_id),
        inputs=tuple(name for name in read if name not in made),
        outputs=tuple(name for node in members for name in node.outputs if name not in read),
    )


def _maker_op(name: str, makers: Mapping[str, OrtNode]) -> str:
    return makers[name].op if name in makers else ""


def _only_reader(node: OrtNode, readers: Mapping[str, Sequence[OrtNode]]) -> OrtNode | None:
    users = [user for name in node.outputs for user in readers.get(name, [])]
    return users[0] if len(users) == 1 else None
