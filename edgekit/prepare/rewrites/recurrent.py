"""Unrolls recurrent layers into operators for each step, for a provider whose own kernel is too inaccurate."""

from collections.abc import Sequence

import msgspec

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import known, need
from edgekit.graph.rewrite import Writer, node_rewrite
from edgekit.prepare.rewrites.idle import has_default_activations

# The inputs of an LSTM (ONNX operators): the bias, the lengths of sequences, the first states, the peepholes.
_BIAS, _LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = 3, 4, 5, 6, 7
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_SCALING = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Each step has about eleven nodes. QNN unrolls an LSTM too, so that its compiled graph does not grow much.
_MOST_STEPS = 1024


@node_rewrite("split-lstm", {"LSTM"}, since=13)
def split_lstm(writer: Writer) -> None:
    """Rewrites an LSTM with a fixed number of steps to Gemm, Sigmoid, Tanh, Mul and Add for each step, for QNN.

    QNN's HTP approximates Sigmoid and Tanh inside its LSTM piecewise linearly, with errors up to 0.006, which add up in
    the state. As single operators they are exact to half precision, and so is a GRU (targets/qnn/NOTES.md). The
    computation stays float, also between Q and DQ.
    """
    node, (steps, rows, _) = writer.node, _static_shape(writer.graph, writer.x)
    turns, size = _DIRECTIONS.get(node.attributes.get("direction", "forward"), ()), node.integer("hidden_size", 0)
    need(not any(node.attributes.get(name) for name in ("clip", "input_forget", "layout")))
    need(has_default_activations(node) and size > 0 and 0 < steps * len(turns) <= _MOST_STEPS)
    need(not node.has_input(_LENGTHS) and not node.has_input(_PEEPHOLES))
    _Layer(writer=writer, steps=steps, rows=rows, size=size, turns=turns).write()


def _static_shape(graph: Graph, name: str) -> tuple[int, ...]:
    """Returns the shape of a sequence, if necessary from before Q and DQ nodes."""
    while graph.static_shape(name) is None and (maker := graph.producers.get(name)) is not None:
        if maker.op_type not in _SCALING:
            break
        name = maker.input[0]
    shape = known(graph.static_shape(name))
    need(len(shape) == len("SBI"))
    return shape


class _Layer(msgspec.Struct, frozen=True, kw_only=True):
    """An LSTM: its steps, its batch size (`rows`), its hidden size, and for each direction whether it is reversed."""

    writer: Writer
    steps: int
    rows: int
    size: int
    turns: tuple[bool, ...]

    def write(self) -> None:
        """Adds the nodes of all directions, and concatenates their outputs."""
        weights, recurrent, bias, hidden, cell = (self._part(place) for place in (1, 2, _BIAS, _HIDDEN, _CELL))
        returned: list[tuple[str, str, str]] = []
        for turn, is_reverse in enumerate(self.turns):
            # Short names: a network of 160 steps has some ten thousand of them.
            part = f"{turn}-" if len(self.turns) > 1 else ""
            sums = self._weigh_inputs(part, weights[turn], bias[turn] if bias else "")
            state = (hidden[turn] if hidden else "", cell[turn] if cell else "")
            made: dict[int, str] = {}
            order = range(self.steps)
            for step in reversed(order) if is_reverse else order:
                state = self._write_step(f"{part}{step}", sums[step], recurrent[turn], state)
                made[step] = state[0]
            hiddens = [made[step] for step in order]
            every = self.writer.add("Concat", hiddens, f"{part}every", axis=0) if self.steps > 1 else hiddens[0]
            returned.append((every, *state))
        for place, axis in enumerate((1, 0, 0)):
            self._return(place, [each[place] for each in returned], axis)

    def _part(self, place: int) -> tuple[str, ...]:
        """Returns an input's part for each direction, as a matrix; () if the input is absent."""
        if not self.writer.node.has_input(place):
            return ()
        name, part = self.writer.node.input[place], f"input-{place}"
        wide = 4 * self.size if place in {1, 2} else 2 if place == _BIAS else self.rows
        whole = self.writer.cut(name, part, [1] * len(self.turns), 0) if len(self.turns) > 1 else (name,)
        return tuple(self._reshape(each, f"{part}-{turn}", [wide, -1]) for turn, each in enumerate(whole))

    def _weigh_inputs(self, part: str, weights: str, bias: str) -> Sequence[str]:
        """Returns input @ weights + bias of each step, from one Gemm for all steps."""
        add, cut, dtype = self.writer.add, self.writer.cut, self.writer.dtype or "float32"
        rows = self._reshape(self.writer.node.input[0], f"{part}rows", [self.steps * self.rows, -1])
        # Always with a bias: after two DQ nodes a Gemm without one would be an integer product, which QNN lacks in 16
        # bits.
        if bias:
            bias = add("Add", cut(bias, f"{part}biases", [1, 1], 0), f"{part}bias")
        else:
            bias = self.writer.constant(f"{part}bias", [[0.0] * 4 * self.size], dtype)
        weighted = add("Gemm", [rows, weights, bias], f"{part}weighted", transB=1)
        return cut(weighted, f"{part}steps", [self.rows] * self.steps, 0) if self.steps > 1 else [weighted]

    def _write_step(self, part: str, weighted: str, recurrent: str, state: tuple[str, str]) -> tuple[str, str]:
        """Returns the hidden and the cell state after a step; an initial state of "" is zero."""
        add, cut, size, (hidden, cell) = self.writer.add, self.writer.cut, self.size, state
        if hidden:
            product = add("Gemm", [hidden, recurrent], f"{part}-recurrent", transB=1)
            weighted = add("Add", [weighted, product], f"{part}-sum")
        # ONNX's order of the gates: input, output, forget, cell.
        gates, candidate = cut(weighted, f"{part}-parts", [3 * size, size], 1)
        in_gate, out_gate, forget_gate = cut(add("Sigmoid", [gates], f"{part}-gates"), f"{part}-gate", [size] * 3, 1)
        added = add("Mul", [in_gate, add("Tanh", [candidate], f"{part}-fresh")], f"{part}-added")
        if cell:
            added = add("Add", [added, add("Mul", [forget_gate, cell], f"{part}-kept")], f"{part}-cell")
        return add("Mul", [out_gate, add("Tanh", [added], f"{part}-flat")], f"{part}-hidden"), added

    def _return(self, place: int, values: Sequence[str], axis: int) -> None:
        """Adds the node's output at this position, if it has one, from the values of all directions."""
        node: Node = self.writer.node
        if place >= len(node.output) or not node.output[place]:
            return
        shape = [self.steps, 1, self.rows, self.size] if axis else [1, self.rows, self.size]
        whole = [self._reshape(each, f"output-{place}-{turn}", shape) for turn, each in enumerate(values)]
        if len(whole) > 1:
            self.writer.add("Concat", whole, f"output-{place}", axis=axis)
        self.writer.nodes[-1].output[:] = [node.output[place]]

    def _reshape(self, name: str, part: str, shape: Sequence[int]) -> str:
        return self.writer.reshape(name, f"{part}-shape", shape, part)
