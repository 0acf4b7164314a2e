"""Unrolls recurrent layers into operators for each step, for a provider whose own kernel is too inaccurate."""

import math
from collections.abc import Sequence

from edgekit.graph.match import known, need
from edgekit.graph.rewrite import Writer, node_rewrite
from edgekit.prepare.rewrites.idle import has_default_activations

# The inputs of an LSTM (ONNX operators): the weights, the recurrent ones, the bias, the lengths of sequences, the first
# states, the peepholes.
_WEIGHTS, _RECURRENT, _BIAS, _LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = range(1, 8)
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_SCALING = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Each step has about eleven nodes. QNN unrolls an LSTM too, so that its compiled graph does not grow much.
_MOST_STEPS = 1024


@node_rewrite("step-lstm", {"LSTM"}, since=13)
def write_lstm_step(writer: Writer) -> None:
    """Rewrites an LSTM of one step, whose state the app keeps, to operators that NNAPI and Core ML have."""
    _write_steps(writer, most=1)


@node_rewrite("split-lstm", {"LSTM"}, since=13)
def split_lstm(writer: Writer) -> None:
    """Rewrites an LSTM with a fixed number of steps to Gemm, Sigmoid, Tanh, Mul and Add for each step, for QNN.

    QNN's HTP approximates Sigmoid and Tanh inside its LSTM piecewise linearly, with errors up to 0.006, which add up in
    the state. As single operators they are exact to half precision, and so is a GRU (targets/qnn/NOTES.md). The
    computation stays float, also between Q and DQ.
    """
    _write_steps(writer, _MOST_STEPS)


def _write_steps(writer: Writer, most: int) -> None:
    node, graph, source = writer.node, writer.graph, writer.x
    # Behind Q and DQ nodes the shape of the sequence may be unknown.
    while graph.static_shape(source) is None and (maker := graph.producers.get(source)) is not None:
        need(maker.op_type in _SCALING)
        source = maker.input[0]
    shape = known(graph.static_shape(source))
    need(len(shape) == len("SBI"))
    steps, rows, _ = shape
    turns, size = _DIRECTIONS.get(node.attributes.get("direction", "forward"), ()), node.integer("hidden_size", 0)
    need(not any(node.attributes.get(name) for name in ("clip", "input_forget", "layout")))
    need(has_default_activations(node) and size > 0 and bool(turns) and 0 < steps <= most)
    need(not node.has_input(_LENGTHS) and not node.has_input(_PEEPHOLES))

    def reshape(name: str, part: str, sizes: Sequence[int]) -> str:
        stored = graph.constants.get(name)
        if stored is None:
            return writer.reshape(name, f"{part}-shape", sizes, part)
        # Some providers want constants, and check folds none that a rewrite left.
        return writer.reshaped(part, name, [sizes[0], math.prod(stored.dims) // sizes[0]])

    # Of each input the matrix of each direction, "" if the input is absent.
    matrices, biases = list[list[str]](), graph.inline(node.given(_BIAS))
    for place, wide in ((_WEIGHTS, 4 * size), (_RECURRENT, 4 * size), (_BIAS, 2), (_HIDDEN, rows), (_CELL, rows)):
        name, part, whole = node.given(place), f"input-{place}", ("",) * len(turns)
        if name and (place != _BIAS or biases is None):
            whole = writer.cut(name, part, [1] * len(turns), 0) if len(turns) > 1 else (name,)
        matrices.append([each and reshape(each, f"{part}-{turn}", [wide, -1]) for turn, each in enumerate(whole)])
    returned: list[tuple[str, str, str]] = []
    for turn, (weights, recurrent, bias, hidden, cell) in enumerate(zip(*matrices, strict=True)):
        # Short names: a network of 160 steps has some ten thousand of them.
        part, state, made = f"{turn}-" if len(turns) > 1 else "", (hidden, cell), [""] * steps
        flat = reshape(writer.x, f"{part}rows", [steps * rows, -1])
        # Always with a bias: after two DQ nodes a Gemm without one would be an integer product, which QNN lacks in 16
        # bits.
        if biases is not None:
            both = biases.reshape(len(turns), 2, -1)[turn]
            added = writer.constant(f"{part}bias", both.sum(axis=0, keepdims=True), biases.dtype.name)
        elif bias:
            added = writer.add("Add", writer.cut(bias, f"{part}biases", [1, 1], 0), f"{part}bias")
        else:
            added = writer.constant(f"{part}bias", [[0.0] * 4 * size], writer.dtype or "float32")
        weighted = writer.add("Gemm", [flat, weights, added], f"{part}weighted", transB=1)
        sums = writer.cut(weighted, f"{part}steps", [rows] * steps, 0) if steps > 1 else [weighted]
        for step in reversed(range(steps)) if turns[turn] else range(steps):
            state = _write_step(writer, f"{part}{step}", sums[step], recurrent, state)
            made[step] = state[0]
        every = writer.add("Concat", made, f"{part}every", axis=0) if steps > 1 else made[0]
        returned.append((every, *state))
    # The hidden states of all steps, then the last hidden and the last cell state.
    for place, (name, values) in enumerate(zip(node.output, zip(*returned, strict=True), strict=False)):
        if name:
            sizes = [1, rows, size] if place else [steps, 1, rows, size]
            whole = tuple(reshape(each, f"output-{place}-{turn}", sizes) for turn, each in enumerate(values))
            if len(whole) > 1:
                writer.add("Concat", whole, f"output-{place}", axis=0 if place else 1)
            writer.nodes[-1].output[0] = name


def _write_step(writer: Writer, part: str, weighted: str, recurrent: str, state: tuple[str, str]) -> tuple[str, str]:
    """Returns the hidden and the cell state after a step; an initial state of "" is zero."""
    add, cut, (hidden, cell) = writer.add, writer.cut, state
    size = writer.node.integer("hidden_size", 0)
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
