"""Recurrent layers as the operators of their steps, for a provider whose own kernel of them is too coarse."""

from collections.abc import Sequence

import msgspec

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, node_rewrite
from edgekit.prepare.rewrites.idle import has_default_activations

# The inputs of an LSTM (ONNX operators): the bias, the lengths of sequences, the first states, the peepholes.
_BIAS, _LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = 3, 4, 5, 6, 7
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_SCALING = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Each step is eleven nodes. QNN writes an LSTM step by step too, so its graph grows by a factor, not by an order.
_MOST_STEPS = 1024


@node_rewrite("split-lstm", {"LSTM"}, since=13)
def split_lstm(writer: Writer) -> None:
    """Writes an LSTM with a fixed number of steps as Gemm, Sigmoid, Tanh, Mul and Add of each step, for QNN.

    QNN's HTP draws Sigmoid and Tanh inside its LSTM as a few straight lines, up to 0.006 off, and the errors add up in
    the state. As operators of their own they are exact to half precision, and so is a GRU (targets/qnn/NOTES.md).
    The layer stays float: with Q and DQ around it, what lies between them is the same float computation.
    """
    node, shape = writer.node, _static_shape(writer.graph, writer.node.input[0])
    turns, size = _DIRECTIONS.get(node.attributes.get("direction", "forward"), ()), node.integer("hidden_size", 0)
    is_plain = not any(node.attributes.get(name) for name in ("clip", "input_forget", "layout"))
    is_plain &= has_default_activations(node)
    if shape is None or len(shape) != len("SBI") or not (is_plain and size > 0 and shape[0] * len(turns) > 0):
        return
    if shape[0] * len(turns) > _MOST_STEPS or node.has_input(_LENGTHS) or node.has_input(_PEEPHOLES):
        return
    _Layer(writer=writer, steps=shape[0], rows=shape[1], size=size, turns=turns).write()


def _static_shape(graph: Graph, name: str) -> tuple[int, ...] | None:
    """Returns the shape of a value, which a pair of Q and DQ does not change."""
    while graph.static_shape(name) is None and (maker := graph.producers.get(name)) is not None:
        if maker.op_type not in _SCALING:
            break
        name = maker.input[0]
    return graph.static_shape(name)


class _Layer(msgspec.Struct, frozen=True, kw_only=True):
    """An LSTM: its steps, its rows (the batch), its hidden size, and for each direction whether it runs backwards."""

    writer: Writer
    steps: int
    rows: int
    size: int
    turns: tuple[bool, ...]

    def write(self) -> None:
        """Writes all directions and joins what they return."""
        weights, recurrent, bias, hidden, cell = (self._part(place) for place in (1, 2, _BIAS, _HIDDEN, _CELL))
        returned: list[tuple[str, str, str]] = []
        for turn, is_reverse in enumerate(self.turns):
            # Short names: there are some ten thousand of them in a network of 160 steps.
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
        """Returns an input's part for each direction, as a matrix; () where the input is absent."""
        if not self.writer.node.has_input(place):
            return ()
        name, part = self.writer.node.input[place], f"input-{place}"
        wide = 4 * self.size if place in {1, 2} else 2 if place == _BIAS else self.rows
        whole = self.writer.cut(name, part, [1] * len(self.turns), 0) if len(self.turns) > 1 else (name,)
        return tuple(self._reshape(each, f"{part}-{turn}", [wide, -1]) for turn, each in enumerate(whole))

    def _weigh_inputs(self, part: str, weights: str, bias: str) -> Sequence[str]:
        """Returns the weighted input of each step, the bias included; one product serves all steps."""
        add, cut, dtype = self.writer.add, self.writer.cut, self.writer.dtype or "float32"
        rows = self._reshape(self.writer.node.input[0], f"{part}rows", [self.steps * self.rows, -1])
        # Behind two DQ nodes and without a third input it would be a product of integers, which QNN lacks for 16 bits.
        if bias:
            bias = add("Add", cut(bias, f"{part}biases", [1, 1], 0), f"{part}bias")
        else:
            bias = self.writer.constant(f"{part}bias", [[0.0] * 4 * self.size], dtype)
        weighted = add("Gemm", [rows, weights, bias], f"{part}weighted", transB=1)
        return cut(weighted, f"{part}steps", [self.rows] * self.steps, 0) if self.steps > 1 else [weighted]

    def _write_step(self, part: str, weighted: str, recurrent: str, state: tuple[str, str]) -> tuple[str, str]:
        """Returns the hidden state and the cell state after a step; "" as a state before it is zero."""
        add, cut, size, (hidden, cell) = self.writer.add, self.writer.cut, self.size, state
        if hidden:
            product = add("Gemm", [hidden, recurrent], f"{part}-recurrent", transB=1)
            weighted = add("Add", [weighted, product], f"{part}-sum")
        # ONNX's order of the gates: input, output, forget, cell.
        before, fresh = cut(weighted, f"{part}-parts", [3 * size, size], 1)
        let_in, let_out, kept = cut(add("Sigmoid", [before], f"{part}-gates"), f"{part}-gate", [size] * 3, 1)
        added = add("Mul", [let_in, add("Tanh", [fresh], f"{part}-fresh")], f"{part}-added")
        if cell:
            added = add("Add", [added, add("Mul", [kept, cell], f"{part}-kept")], f"{part}-cell")
        return add("Mul", [let_out, add("Tanh", [added], f"{part}-flat")], f"{part}-hidden"), added

    def _return(self, place: int, values: Sequence[str], axis: int) -> None:
        """Gives the values of all directions the shape of the node's output at this place, if it has one."""
        node: Node = self.writer.node
        if place >= len(node.output) or not node.output[place]:
            return
        shape = [self.steps, 1, self.rows, self.size] if axis else [1, self.rows, self.size]
        whole = [self._reshape(each, f"output-{place}-{turn}", shape) for turn, each in enumerate(values)]
        if len(whole) > 1:
            self.writer.add("Concat", whole, f"output-{place}", axis=axis)
        self.writer.nodes[-1].output[:] = [node.output[place]]

    def _reshape(self, name: str, part: str, shape: Sequence[int]) -> str:
        return self.writer.add("Reshape", [name, self.writer.constant(f"{part}-shape", shape, "int64")], part)
