"""The Q and DQ nodes that ONNX Runtime adds to a graph before it asks a provider which nodes it takes.

ONNX Runtime's level 1 propagates Q and DQ through operators that only move elements, so that each of them becomes a QDQ
unit (core/optimizer/qdq_transformer/qdq_propagation.cc, run by every session of level basic and above). A provider sees
that graph, and not the one in the file.
"""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import onnx

from edgekit.graph.graph import Graph, Node, Value, index_nodes

_Q, _DQ = "QuantizeLinear", "DequantizeLinear"

# The newest operator versions that ONNX Runtime propagates through (CanNodePropagate, 1.29 to 1.31).
_MOVING: Mapping[str, tuple[int, ...]] = {
    "MaxPool": (12,), "Reshape": (5, 13, 14, 19), "Transpose": (1, 13), "Squeeze": (1, 11, 13),
    "Unsqueeze": (1, 11, 13), "Slice": (1, 10, 11, 13),
}  # fmt: skip

# ONNX Runtime repeats the optimisers of a level this often (InferenceSession, max_num_graph_transformation_steps).
_ROUNDS = 10


def propagate_quantization(graph: Graph) -> Graph:
    """Returns the graph with the nodes that ONNX Runtime adds before it places nodes; the same graph if there are none.

    Nodes of the given graph keep their names and their order; subgraphs do not change.
    """
    if not any(node.op_type == _DQ for node in graph.nodes):
        return graph
    draft = _Draft(graph)
    for _ in range(_ROUNDS):
        before = len(draft.parts)
        for part in tuple(draft.parts):
            if part.op == _DQ:
                draft.make_unique(part)
        for part in tuple(draft.parts):
            if part.op == _Q and _has_scalars(graph, part.like):
                draft.propagate_back(part)
        for part in tuple(draft.parts):
            if part.op == _DQ and _has_scalars(graph, part.like):
                draft.propagate_forward(part)
        if len(draft.parts) == before:
            break
    return draft.finish()


def _is_moving(node: Node) -> bool:
    return not node.domain and node.since in _MOVING.get(node.op_type, ())


def _has_scalars(graph: Graph, node: Node) -> bool:
    """Returns True for a Q or DQ whose parameters are constants of one element each."""
    if node.op_type not in {_Q, _DQ}:
        return False
    names = [name for name in node.input[1:3] if name]
    return bool(names) and all(name in graph.constants and graph.value(name).shape in {(), (1,)} for name in names)


class _Part(msgspec.Struct, kw_only=True, eq=False):
    """A node of the new graph.

    `like` is a node of the given graph: this node itself, or, for an added node, the Q or DQ whose scale and zero point
    it has.
    """

    op: str
    name: str
    like: Node
    input: list[str]
    output: list[str]


class _Edge(msgspec.Struct, frozen=True, kw_only=True):
    """An edge of the graph: a value and the node that reads it, at input `at`; None for an output of the graph."""

    value: str
    reader: _Part | None
    at: int = 0


class _Draft:
    """A graph while nodes are added to it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.parts = [
            _Part(op=node.op_type, name=node.name, like=node, input=list(node.input), output=list(node.output))
            for node in graph.nodes
        ]
        self._makers = {name: part for part in self.parts for name in part.output if name}
        self._edges: dict[str, list[_Edge]] = {}
        for part in self.parts:
            for at, name in enumerate(part.input):
                self._edges.setdefault(name, []).append(_Edge(value=name, reader=part, at=at))
        self._values: dict[str, Value] = {}
        self._taken = {*graph.values, *graph.constants, *(part.name for part in self.parts)}

    def make_unique(self, dq: _Part) -> None:
        """Gives each reader of a DQ its own copy, as ONNX Runtime does (ensure_unique_dq_for_node_unit.cc).

        The first reader keeps the existing DQ, unless that is also a graph output or read by a subgraph.
        """
        name = dq.output[0]
        edges = tuple(self._edges.get(name, ()))
        stays = name in self._graph.outputs or name in self._graph.captured
        for edge in edges if stays else edges[1:]:
            result = self._name(f"{name}/duplicated", self._value(name), self._value(name).dtype)
            copy = self._add(_DQ, f"{dq.name}/duplicated", dq, dq.input, result, before=edge.reader)
            self._redirect(edge, copy.output[0])

    def propagate_back(self, quantizer: _Part) -> None:
        """Inserts a Q and a DQ before each element-moving operator on the path back from a Q."""
        edge = self._edge_before(quantizer)
        while edge is not None:
            mover = self._makers.get(edge.value)
            edge = self._edge_before(mover) if mover is not None and _is_moving(mover.like) else None
            if edge is not None:
                maker = self._makers.get(edge.value)
                edge = None if maker is not None and maker.op == _DQ else self._insert([edge], quantizer)

    def propagate_forward(self, quantizer: _Part) -> None:
        """Inserts a Q and DQs after each element-moving operator on the path from a DQ with one reader."""
        first = self._edges_after(quantizer)
        ahead = [self._moved_after(first[0])] if len(first) == 1 and first[0].reader is not None else []
        while ahead:
            edges = ahead.pop()
            # An output of the graph keeps its name, so its producer's output is renamed: the following edges are found
            # first.
            ahead += [follow for edge in edges if (follow := self._moved_after(edge))]
            if edges:
                self._insert(edges, quantizer)

    def finish(self) -> Graph:
        """Returns the graph with the added nodes."""
        if len(self.parts) == len(self._graph.nodes):
            return self._graph
        nodes = [
            msgspec.structs.replace(
                part.like,
                index=index,
                op_type=part.op,
                name=part.name,
                input=tuple(part.input),
                output=tuple(part.output),
                proto=part.like.proto if part.name == part.like.name else onnx.NodeProto(),
            )
            for index, part in enumerate(self.parts)
        ]
        return index_nodes(msgspec.structs.replace(self._graph, values={**self._graph.values, **self._values}), nodes)

    def _edge_before(self, part: _Part) -> _Edge | None:
        """Returns the edge to a node's first input, or None if others read that value too or it is a graph output."""
        name, graph = part.input[0], self._graph
        if name in self._makers:
            is_own = len(self._edges.get(name, ())) == 1 and name not in graph.outputs
        else:
            is_own = name in graph.inputs or name in graph.constants
        return _Edge(value=name, reader=part) if is_own and name not in graph.captured else None

    def _edges_after(self, part: _Part) -> list[_Edge]:
        name = part.output[0]
        leaving = [_Edge(value=name, reader=None)] if name in self._graph.outputs else []
        return [] if name in self._graph.captured else [*self._edges.get(name, ()), *leaving]

    def _moved_after(self, edge: _Edge) -> list[_Edge]:
        if edge.reader is None or not _is_moving(edge.reader.like):
            return []
        after = self._edges_after(edge.reader)
        return [] if any(each.reader is not None and each.reader.op == _Q for each in after) else after

    def _insert(self, edges: Sequence[_Edge], like: _Part) -> _Edge:
        """Inserts a Q, and a DQ for each edge, after a value; returns the edge from the value to the Q."""
        base, parameters = edges[0].value, like.input[1:]
        value = self._value(base)
        dtype = self._graph.value(like.like.input[2]).dtype if like.like.has_input(2) else "uint8"
        quantized, source = self._name(f"{base}_q_to_dq", value, dtype), base
        if any(edge.reader is None for edge in edges):
            maker = self._makers.pop(base)
            source = self._name(f"{base}_pre_q", value, value.dtype)
            maker.output[maker.output.index(base)] = source
            self._makers[source] = maker
        first = self._add(_Q, f"{base}_q", like, [source, *parameters], quantized, before=edges[0].reader)
        for edge in edges:
            result = base if edge.reader is None else self._name(f"{base}_post_dq", value, value.dtype)
            self._add(_DQ, f"{base}_dq", like, [quantized, *parameters], result, before=edge.reader)
            self._redirect(edge, result)
        return _Edge(value=source, reader=first)

    def _redirect(self, edge: _Edge, result: str) -> None:
        if edge.reader is not None:
            edge.reader.input[edge.at] = result
            self._edges[edge.value].remove(edge)
            self._edges[result] = [_Edge(value=result, reader=edge.reader, at=edge.at)]

    def _value(self, name: str) -> Value:
        return self._values.get(name) or self._graph.value(name)

    def _name(self, wanted: str, value: Value, dtype: str | None) -> str:
        name = self._free(wanted)
        self._values[name] = msgspec.structs.replace(value, dtype=dtype)
        return name

    def _free(self, wanted: str) -> str:
        names = itertools.chain([wanted], (f"{wanted}_{count}" for count in itertools.count(1)))
        name = next(each for each in names if each not in self._taken)
        self._taken.add(name)
        return name

    def _add(
        self, op: str, name: str, like: _Part, inputs: Sequence[str], output: str, *, before: _Part | None
    ) -> _Part:
        part = _Part(op=op, name=self._free(name), like=like.like, input=list(inputs), output=[output])
        self.parts.insert(len(self.parts) if before is None else self.parts.index(before), part)
        self._makers[output] = part
        for at, each in enumerate(inputs):
            self._edges.setdefault(each, []).append(_Edge(value=each, reader=part, at=at))
        return part
