"""What onnx's inference must not be asked: a few operators end the process, and some sizes never come to an end."""

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.graph.constants import MAIN_DOMAINS, is_small, read_constant
from edgekit.model.model import iterate_graphs
from edgekit.model.tensors import Array

# Their inference in onnx 1.23 reads the type of their first input where there is none, and the process dies of it.
# Found by drawing nodes of every schema.
_UNTYPED = frozenset({("", "EyeLike"), ("", "RegexFullMatch")}) | {
    ("ai.onnx.ml", name) for name in ("DictVectorizer", "LabelEncoder", "TreeEnsemble")
}
_HIDDEN = "edgekit.hidden"
# Following data makes an entry for each element of a vector, 0.4 us each: this is a tenth of a second a node.
_LONGEST = 1 << 18


def hide_untyped(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Gives nodes that may end the process a domain that inference does not know, in place, and returns them.

    Those of the main graph whose input has a type can be shown again with `show_typed`.
    """
    graphs = list(iterate_graphs(model.graph))
    found = [node for graph in graphs for node in graph.node if _is_untyped(node)]
    bodies = [node for function in model.functions for node in function.node if _is_untyped(node)]
    for node in (*found, *bodies):
        node.domain = _HIDDEN
    if found or bodies:
        model.opset_import.append(onnx.OperatorSetIdProto(domain=_HIDDEN, version=1))
    for function in model.functions if bodies else ():
        function.opset_import.append(onnx.OperatorSetIdProto(domain=_HIDDEN, version=1))
    return found


def show_typed(model: onnx.ModelProto, inferred: onnx.ModelProto) -> bool:
    """Gives hidden nodes of the main graph their domain back where the type of what they read is known now, in place.

    Returns True if there are any.
    """
    found = {value.name for value in inferred.graph.value_info if value.type.WhichOneof("value")}
    typed = {value.name for value in model.graph.input if value.type.WhichOneof("value")}
    typed |= {tensor.name for tensor in model.graph.initializer}
    shown: list[onnx.NodeProto] = []
    for node in model.graph.node:
        # Inference goes from node to node as they stand: what is made further down has no type yet.
        if node.domain == _HIDDEN and node.input and node.input[0] in typed:
            shown.append(node)
        typed |= found.intersection(node.output)
    for node in shown:
        node.domain = next(domain for domain, name in sorted(_UNTYPED) if name == node.op_type)
    return bool(shown)


def has_long_vector(model: onnx.ModelProto) -> bool:
    """Returns True if data must not be followed: a vector is known to be so long that this would not end."""
    return any(
        len(dims) == 1 and dims[0].dim_value > _LONGEST
        for graph in iterate_graphs(model.graph)
        for value in (*graph.input, *graph.output, *graph.value_info)
        for dims in (value.type.tensor_type.shape.dim,)
    )


def may_have_long_vector(model: onnx.ModelProto) -> bool:
    """Returns True if a constant of the model could make a vector so long, which inferring without data then tells."""
    return any(bool((np.abs(values) > _LONGEST).any()) for values in _list_whole_numbers(model))


def _list_whole_numbers(model: onnx.ModelProto) -> Iterator[Array]:
    for graph in iterate_graphs(model.graph):
        made = (read_constant(node) for node in graph.node if node.op_type == "Constant")
        for tensor in (*graph.initializer, *made):
            # Sizes and counts are whole numbers of 64 bits, one or a few.
            if tensor is None or tensor.data_type != onnx.TensorProto.INT64 or len(tensor.dims) > 1:
                continue
            if tensor.data_location != onnx.TensorProto.EXTERNAL and is_small(tensor):
                # Data that do not fit the shape are refused elsewhere.
                with contextlib.suppress(ValueError):
                    yield numpy_helper.to_array(tensor)


def _is_untyped(node: onnx.NodeProto) -> bool:
    domain = "" if node.domain in MAIN_DOMAINS else node.domain
    return (domain, node.op_type) in _UNTYPED
