"""Changing what goes into a model and what comes out: outputs left out, inputs frozen."""

from collections.abc import Collection, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.errors import UsageError, suggest_name
from edgekit.graph.rewrite import set_nodes
from edgekit.model.model import drop_unread, iterate_reads


def keep_outputs(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Leaves out every output that is not named, in place; the rest keep their order. No name means all.

    Raises:
        UsageError: a name that is no output.
    """
    valid = [value.name for value in graph.output]
    for name in names:
        if name not in valid:
            raise UsageError(f"the model has no output '{name}'", hint=suggest_name(name, valid))
    if names:
        kept = [value for value in graph.output if value.name in names]
        del graph.output[:]
        graph.output.extend(kept)


def drop_idle_nodes(graph: onnx.GraphProto) -> None:
    """Removes the nodes and the initializers that no output depends on, in place; ONNX Runtime keeps them."""
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed.update(iterate_reads(node))
    set_nodes(graph, reversed(kept))
    drop_unread(graph)


def freeze_inputs(graph: onnx.GraphProto, values: Mapping[str, float]) -> None:
    """Turns inputs into constants that hold one number everywhere, in place; their shapes must be known.

    Raises:
        UsageError: a name that is no input, an input that holds no numbers, or a number that its type cannot hold.
    """
    inputs = {value.name: value for value in graph.input}
    for name, number in values.items():
        if name not in inputs:
            raise UsageError(f"the model has no input '{name}'", hint=suggest_name(name, inputs))
        graph.initializer.append(_fill(inputs[name], number))
    kept = [value for value in graph.input if value.name not in values]
    del graph.input[:]
    graph.input.extend(kept)


def _fill(value: onnx.ValueInfoProto, number: float) -> onnx.TensorProto:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.elem_type == onnx.TensorProto.STRING:
        raise UsageError(f"input '{value.name}' holds no numbers", hint="freeze inputs of numbers only")
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    shape = [dim.dim_value for dim in tensor.shape.dim]
    with np.errstate(over="ignore", invalid="ignore"):
        filled = np.full(shape, number).astype(dtype)
    if dtype.kind in "iub" and not np.all(filled == number):
        raise UsageError(f"input '{value.name}' of {dtype} cannot hold {number}", hint="give a number of its type")
    return numpy_helper.from_array(filled, value.name)
