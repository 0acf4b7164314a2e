"""The Q and DQ nodes that ONNX Runtime adds to a graph before it asks a provider which nodes it takes.

ONNX Runtime's level 1 propagates Q and DQ through operators that only move elements, so that each of them becomes a QDQ
unit (core/optimizer/qdq_transformer/qdq_propagation.cc, run by every session of level basic and above). A provider sees
that graph, and not the one in the file.
"""

import itertools
from collections.abc import Sequence

import msgspec
import onnx

from edgekit.graph.graph import Graph, Node, Value, index_nodes

_Q, _DQ = "QuantizeLinear", "DequantizeLinear"

# The oldest version of each operator that ONNX Runtime propagates through (CanNodePropagate, 1.29 to 1.31).
_MOVING = {"MaxPool": 12, "Reshape": 5, "Transpose": 1, "Squeeze": 1, "Unsqueeze": 1, "Slice": 1}

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
    return not node.domain and node.op_type in _MOVING and node.since >= _MOVING[node.op_type]


def _has_scalars(graph: Graph, node: Node) -> bool:
    """Returns True for a Q or DQ whose parameters are constants of one element each."""
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


_Reader = tuple[_Part, int]
"""A node that reads a value, and the position of that input."""


class _Draft:
    """A graph while nodes are added to it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.parts = [
            _Part(op=node.op_type, name=node.name, like=node, input=list(node.input), output=list(node.output))
            for node in graph.nodes
        ]
        self._makers = {name: part for part in self.parts for name in part.output if name}
        self._readers: dict[str, list[_Reader]] = {}
        for part in self.parts:
            for at, name in enumerate(part.input):
                self._readers.setdefault(name, []).append((part, at))
        self._values: dict[str, Value] = {}
        self._taken = {*graph.values, *graph.constants, *(part.name for part in self.parts)}

    def make_unique(self, dq: _Part) -> None:
        """Gives each reader of a DQ its own copy, as ONNX Runtime does (ensure_unique_dq_for_node_unit.cc).

        The first reader keeps the existing DQ, unless that is also a graph output or read by a subgraph.
        """
        name = dq.output[0]
        readers = tuple(self._readers.get(name, ()))
        stays = name in self._graph.outputs or name in self._graph.captured
        for reader in readers if stays else readers[1:]:
            result = self._name(f"{name}/duplicated", self._value(name), self._value(name).dtype)
            copy = self._add(_DQ, f"{dq.name}/duplicated", dq, dq.input, result, before=reader[0])
            self._redirect(name, reader, copy.output[0])

    def propagate_back(self, quantizer: _Part) -> None:
        """Inserts a Q and a DQ before each element-moving operator on the path back from a Q."""
        last = quantizer
        while self._reads_alone(last):
            mover = self._makers.get(last.input[0])
            if mover is None or not _is_moving(mover.like) or not self._reads_alone(mover):
                break
            maker = self._makers.get(mover.input[0])
            if maker is not None and maker.op == _DQ:
                break
            last = self._insert(mover.input[0], [(mover, 0)], quantizer)

    def propagate_forward(self, quantizer: _Part) -> None:
        """Inserts a Q and DQs after each element-moving operator on the path from a DQ with one reader."""
        first = self._readers_of(quantizer)
        ahead = [reader[0] for reader in first if reader is not None and len(first) == 1]
        while ahead:
            mover = ahead.pop()
            after = self._readers_of(mover) if _is_moving(mover.like) else []
            if after and all(reader is None or reader[0].op != _Q for reader in after):
                ahead += [reader[0] for reader in after if reader is not None]
                self._insert(mover.output[0], after, quantizer)

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

    def _reads_alone(self, part: _Part) -> bool:
        """Returns True if a node alone reads its first input, or if that is an input or a constant of the graph."""
        name, graph = part.input[0], self._graph
        if name in self._makers:
            is_own = len(self._readers.get(name, ())) == 1 and name not in graph.outputs
        else:
            is_own = name in graph.inputs or name in graph.constants
        return is_own and name not in graph.captured

    def _readers_of(self, part: _Part) -> list[_Reader | None]:
        """Returns what reads a node's first output, None for an output of the graph; nothing if a subgraph reads it."""
        name = part.output[0]
        leaving = [None] if name in self._graph.outputs else []
        return [] if name in self._graph.captured else [*self._readers.get(name, ()), *leaving]

    def _insert(self, base: str, readers: Sequence[_Reader | None], like: _Part) -> _Part:
        """Inserts a Q, and a DQ for each reader (None: an output of the graph), after a value; returns the Q."""
        value, parameters = self._value(base), like.input[1:]
        dtype = self._graph.value(like.like.input[2]).dtype if like.like.has_input(2) else "uint8"
        quantized, source = self._name(f"{base}_q_to_dq", value, dtype), base
        if None in readers:
            # An output of the graph keeps its name, so that of its producer changes.
            maker = self._makers.pop(base)
            source = self._name(f"{base}_pre_q", value, value.dtype)
            maker.output[maker.output.index(base)] = source
            self._makers[source] = maker
        places = [None if reader is None else reader[0] for reader in readers]
        first = self._add(_Q, f"{base}_q", like, [source, *parameters], quantized, before=places[0])
        for reader, place in zip(readers, places, strict=True):
            result = base if reader is None else self._name(f"{base}_post_dq", value, value.dtype)
            self._add(_DQ, f"{base}_dq", like, [quantized, *parameters], result, before=place)
            if reader is not None:
                self._redirect(base, reader, result)
        return first

    def _redirect(self, name: str, reader: _Reader, result: str) -> None:
        part, at = reader
        part.input[at] = result
        self._readers[name].remove(reader)
        self._readers[result] = [reader]

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
            self._readers.setdefault(each, []).append((part, at))
        return part
