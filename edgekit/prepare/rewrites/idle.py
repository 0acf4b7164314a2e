"""Nodes without effect, empty optional inputs and attributes that state a default: they are removed."""

from collections.abc import Mapping
from itertools import zip_longest

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node, view_part
from edgekit.graph.match import count_huge_terms, known, list_lent_constants, made_by, need
from edgekit.graph.rewrite import Writer, node_rewrite, rewrite
from edgekit.model.model import refill
from edgekit.model.soundness import find_captured, list_bodies

# The activation functions of each direction where a node names none (ONNX operators LSTM, GRU, RNN).
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}
# Inputs of Resize.
_ROI, _SCALES = 1, 2


_BROADCASTING = frozenset(
    {
        "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul",
        "Or", "Pow", "Sub", "Where", "Xor",
    }
)  # fmt: skip


@node_rewrite("idle-expand", _BROADCASTING, since=8)
def drop_idle_expand(writer: Writer) -> None:
    """Lets a node with broadcasting read what an Expand repeats, if its other inputs make the same shape."""
    graph, given, after = writer.graph, list(writer.node.input), writer.made
    for place, name in enumerate(given):
        if (expand := made_by(graph, name, "Expand")) is not None:
            tried = [*given[:place], expand.input[0], *given[place + 1 :]]
            shapes = [shape[::-1] for each in tried if (shape := graph.value(each).static_shape) is not None]
            # Along each axis the first size that is not 1.
            sizes = [next((size for size in axis if size != 1), 1) for axis in zip_longest(*shapes, fillvalue=1)]
            if len(shapes) == len(tried) and tuple(sizes[::-1]) == after:
                given = tried
    need(given != list(writer.node.input))
    writer.add(writer.node.op_type, given, **writer.node.attributes)


@node_rewrite("idle-add", {"Add"})
def drop_idle_add(writer: Writer) -> None:
    """Replaces Add(x, zeros) by Identity(x), if the zeros do not broadcast x to a larger shape.

    Only -0.0 changes: -0.0 + 0.0 is 0.0, and here it stays -0.0.
    """
    graph, node = writer.graph, writer.node
    for value, added in (node.input, node.input[::-1]):
        shape, zeros = graph.value(value).shape, graph.inline(added)
        # A bias of zeros stays: MatMul and bias become a Gemm, which more providers take.
        if zeros is None or zeros.ndim == 1 or value in graph.constants or shape is None or zeros.any():
            continue
        own = shape[::-1]
        if zeros.ndim <= len(own) and all(size in {1, own[at]} for at, size in enumerate(zeros.shape[::-1])):
            writer.add("Identity", [value])
            return


@node_rewrite("idle-nan-guard", {"Where"})
def drop_nan_guard(writer: Writer) -> None:
    """Replaces Where(IsNaN(p), 0, p) by p, if p is a Softmax that cannot be NaN.

    Products of finite numbers are assumed to be finite.
    """
    softmax = known(find_guarded(writer.graph, writer.node))
    need(_has_finite_rows(writer.graph, softmax))
    writer.copy(softmax).output[0] = writer.node.output[0]


def find_guarded(graph: Graph, node: Node) -> Node | None:
    """Returns the Softmax whose NaN a Where replaces by 0, if nothing else reads it."""
    is_nan, softmax = made_by(graph, node.input[0], "IsNaN"), made_by(graph, node.input[2], "Softmax")
    if is_nan is None or softmax is None or is_nan.input[0] != softmax.output[0] or graph.number(node.input[1]) != 0:
        return None
    # A zero of higher rank would broadcast the result to more axes.
    if len(graph.value(node.input[1]).shape or ()) > 1 or softmax.output[0] in graph.outputs | graph.captured:
        return None
    return softmax if set(graph.readers(softmax.output[0])) == {is_nan, node} else None


def _has_finite_rows(graph: Graph, softmax: Node) -> bool:
    """Returns True if at least one score of each row is finite, and none is infinity or NaN."""
    scores, axis = softmax.input[0], softmax.integer("axis", -1)
    if count_huge_terms(graph, scores) in {0, 1}:
        return True
    added = made_by(graph, scores, "Add")
    for score, mask in (added.input, added.input[::-1]) if added is not None else ():
        array = graph.inline(mask)
        if array is None or array.ndim != len(graph.value(scores).shape or ()):
            continue
        hides = np.isneginf(array)
        # A mask of finite numbers and -inf, with at least one finite number in each row.
        if np.isfinite(array[~hides]).all() and not hides.all(axis=axis).any():
            return count_huge_terms(graph, score) == 0
    return False


@rewrite("idle-relu", {"QuantizeLinear"})
def drop_idle_relus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Removes each Relu that only Q nodes with the lowest zero point read, in place, and returns the nodes' names."""
    view = view_part(graph, opset)

    def cuts_at_zero(node: Node) -> bool:
        if node.op_type != "QuantizeLinear" or not node.has_input(2):
            # Without a zero point the type is uint8 and the zero point 0, unless opset 21's attribute says otherwise.
            return node.op_type == "QuantizeLinear" and "output_dtype" not in node.attributes
        zero = view.array(node.input[2])
        return zero is not None and zero.dtype.kind in "iu" and bool(np.all(zero == np.iinfo(zero.dtype).min))

    dropped: dict[str, str] = {}
    for node in view.nodes:
        quantizers = view.readers(node.output[0]) if node.op_type == "Relu" and not node.domain else ()
        if quantizers and node.output[0] not in view.outputs and all(map(cuts_at_zero, quantizers)):
            for quantizer in quantizers:
                quantizer.proto.input[0] = node.input[0]
            dropped[node.output[0]] = node.proto.name
    refill(graph.node, [node for node in graph.node if not node.output or node.output[0] not in dropped])
    return tuple(dropped.values())


@node_rewrite("default-activations", _FUNCTIONS)
def drop_default_activations(writer: Writer) -> None:
    """Removes the attribute `activations` of LSTM, GRU and RNN where it states the default."""
    need(writer.node.attributes.get("activations") and has_default_activations(writer.node))
    made = writer.copy(writer.node)
    refill(made.attribute, [each for each in made.attribute if each.name != "activations"])


def has_default_activations(node: Node) -> bool:
    """Returns True if the activation functions of an LSTM, GRU or RNN are the default ones."""
    default = _FUNCTIONS.get(node.op_type, ())
    return tuple(name.lower() for name in node.attributes.get("activations", ())) in {(), default, 2 * default}


@rewrite("drop-copies", {"Concat", "Dropout", "Identity", "Transpose"})
def drop_copies(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Removes each Identity, Concat of one tensor, Transpose that moves nothing, and Dropout whose mask nothing reads.

    It does so in place, and returns their names. ONNX Runtime's GemmTransposeFusion takes a Transpose for one that
    swaps two axes, and 1.29.0 on phones makes no session.

    A node stays if it makes an output of the graph, if a subgraph reads its result, or if it is a Dropout in training
    mode; a Concat that stays becomes an Identity.
    """
    single = [node for node in graph.node if node.op_type == "Concat" and len(node.input) == 1 and not node.domain]
    for node in single:
        node.op_type = "Identity"
        del node.attribute[:]
    view = view_part(graph, opset)
    hidden = view.outputs | view.captured
    read = hidden | view.consumers.keys()

    def only_copies(node: Node) -> bool:
        perm = node.entries("perm")
        moves = perm is None or perm != (*range(len(perm)),)
        if node.domain or node.op_type not in {"Identity", "Dropout", *(() if moves else ("Transpose",))}:
            return False
        made, *others = node.output
        if not node.input[0] or not made or made in hidden or any(each in read for each in others if each):
            return False
        trains = view.array(node.input[2]) if node.has_input(2) else np.False_
        return trains is not None and not trains

    dropped = [node for node in view.nodes if only_copies(node)]
    source = {node.output[0]: node.input[0] for node in dropped}
    kept = [node for node in graph.node if not node.output or node.output[0] not in source]
    for node in kept:
        for at, name in enumerate(node.input):
            while name in source:
                name = source[name]  # noqa: PLW2901 - follows a chain of copies
            node.input[at] = name
    if dropped:
        refill(graph.node, kept)
    return tuple(sorted({node.name for node in single} | {node.proto.name for node in dropped}))


@rewrite("trailing-inputs")
def drop_trailing_inputs(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:  # noqa: ARG001 - as every rewrite
    """Removes empty names at the end of each node's inputs, in place, and returns the names of the nodes."""
    changed = [node for node in graph.node if node.input and not node.input[-1]]
    for node in changed:
        while node.input and not node.input[-1]:
            del node.input[-1]
    return tuple(node.name for node in changed)


@node_rewrite("plain-pad", {"Pad"})
def drop_pad_values(writer: Writer) -> None:
    """Removes the value of a Pad if it is zero.

    In 8 bits beside data in 16 QNN's provider refuses it, and onnx's converter adds one to each Pad of an old opset.
    """
    node = writer.node
    need(not writer.array(2).any())
    writer.add("Pad", [*node.input[:2], *(["", node.input[3]] if node.has_input(3) else [])], **node.attributes)


# The least of 8 bits.
_LEAST_INT8 = -128


@node_rewrite("zero-pad", {"Pad"}, since=13)
def write_pad_value(writer: Writer) -> None:
    """Writes the value of a Pad of int8 that has none, zero, if all quantized numbers are positive, for QNN.

    Beside a zero point of -128 the HTP pads with another number; with a stated value it is right
    (targets/qnn/NOTES.md).
    """
    node, read = writer.node, known(made_by(writer.graph, writer.x, "DequantizeLinear"))
    need(writer.graph.number(read.given(2)) == _LEAST_INT8 and not node.has_input(2))
    need(node.attributes.get("mode", "constant") == "constant")
    writer.add("Pad", [*node.input[:2], writer.constant("value", 0), *node.input[3:]], **node.attributes)


@node_rewrite("resize-empty-inputs", {"Resize"}, since=13)
def leave_out_empty_inputs(writer: Writer) -> None:
    """Replaces empty tensors for `roi` and `scales` of a Resize by "".

    Both inputs are optional from opset 13 on.
    """
    graph, node = writer.graph, writer.node
    given = {at: graph.constants.get(node.given(at)) for at in (_ROI, _SCALES)}
    found = [at for at, tensor in given.items() if tensor is not None and list(tensor.dims) == [0]]
    need(found)
    made = writer.copy(node)
    for at in found:
        made.input[at] = ""


@rewrite("own-constants", {"If"})
def own_constants(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Copies the constants that only bodies read into the bodies of an If."""
    view = view_part(graph, opset)
    lent = {node: list_lent_constants(view, node) for node in view.nodes if node.op_type == "If"}
    for node, names in lent.items():
        for body in list_bodies(node.proto):
            body.initializer.extend(view.constants[name] for name in find_captured(body) if name in names)
    return tuple(node.proto.name for node, names in lent.items() if names)
