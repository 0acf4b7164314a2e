"""Types and shapes of values, by onnx's shape inference.

onnx copies the model several times, so it is given a copy without large weights. A few operators may crash the process,
and are hidden from it; some models make its data propagation take hours, and do without.
"""

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from edgekit.errors import ModelError
from edgekit.graph.constants import MAIN_DOMAINS, ML_DOMAIN, is_small, list_constants
from edgekit.graph.contrib import restore_contrib, substitute_contrib
from edgekit.model.model import copy_without_weights, iterate_graphs, iterate_nodes, refill
from edgekit.model.soundness import list_bodies

# The inference functions of these operators in onnx 1.23 dereference the type of the first input without a check: the
# process crashes if it is not known. Found by fuzzing with nodes of every schema.
_UNTYPED = frozenset({("", "EyeLike"), ("", "RegexFullMatch")}) | {
    (ML_DOMAIN, name) for name in ("DictVectorizer", "LabelEncoder", "TreeEnsemble")
}
_HIDDEN = "edgekit.hidden"
# Data propagation keeps an entry for each element of a vector, at 0.4 us each: up to a tenth of a second for each node.
_LONGEST = 1 << 18


def hide_untyped(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Moves nodes that may crash inference into a domain unknown to it, in place, and returns those of graphs.

    `show_typed` moves back those whose input has got a type.
    """
    found = [node for node in iterate_nodes(model.graph) if _is_untyped(node)]
    bodies = [node for function in model.functions for node in function.node if _is_untyped(node)]
    for node in (*found, *bodies):
        node.domain = _HIDDEN
    if found or bodies:
        model.opset_import.append(onnx.OperatorSetIdProto(domain=_HIDDEN, version=1))
    for function in model.functions if bodies else ():
        function.opset_import.append(onnx.OperatorSetIdProto(domain=_HIDDEN, version=1))
    return found


def show_typed(model: onnx.ModelProto, inferred: onnx.ModelProto) -> bool:
    """Moves hidden nodes of the main graph back into their domain, in place, if their first input has a type now.

    Returns True if there are any. `inferred` is the model after inference without them.
    """
    found = {value.name for value in inferred.graph.value_info if value.type.WhichOneof("value")}
    typed = {value.name for value in model.graph.input if value.type.WhichOneof("value")}
    typed |= {tensor.name for tensor in model.graph.initializer}
    shown: list[onnx.NodeProto] = []
    for node in model.graph.node:
        # Inference takes the nodes in file order: the output of a later node has no type yet.
        if node.domain == _HIDDEN and node.input and node.input[0] in typed:
            shown.append(node)
        typed |= found.intersection(node.output)
    for node in shown:
        node.domain = next(domain for domain, name in sorted(_UNTYPED) if name == node.op_type)
    return bool(shown)


_ROUNDED = "edgekit.rounded"
# From this opset on, inference leaves out a window that would begin behind the input, as ONNX Runtime always does.
_ROUNDED_SINCE = 22


def _round_pools(model: onnx.ModelProto) -> bool:
    """Makes each pooling with a `ceil_mode` a call of a function with the operator of opset 22, in place.

    Returns True if there are any. Inference wants a function with as many outputs as its call has: their number is in
    the domain, and the name stays.
    """
    pools = (node for node in iterate_nodes(model.graph) if node.op_type in {"AveragePool", "LpPool", "MaxPool"})
    nodes = [
        node
        for node in pools
        if node.domain in MAIN_DOMAINS and any(each.name == "ceil_mode" and each.i for each in node.attribute)
    ]
    versions = [each.version for each in model.opset_import if each.domain in MAIN_DOMAINS]
    if not nodes or max(versions, default=1) >= _ROUNDED_SINCE:
        return False
    attributes: dict[tuple[str, int], dict[str, onnx.AttributeProto]] = {}
    for node in nodes:
        kinds = attributes.setdefault((node.op_type, len(node.output)), {})
        kinds.update((each.name, each) for each in node.attribute)
        node.domain = f"{_ROUNDED}.{len(node.output)}"
    for (op, count), kinds in attributes.items():
        outputs = [f"y{at}" for at in range(count)]
        call = helper.make_node(op, ["x"], outputs)
        for name, given in kinds.items():
            call.attribute.add(name=name, ref_attr_name=name, type=given.type)
        opsets = [helper.make_opsetid("", _ROUNDED_SINCE)]
        domain = f"{_ROUNDED}.{count}"
        model.functions.append(helper.make_function(domain, op, ["x"], outputs, [call], opsets, attributes=list(kinds)))
    for domain in sorted({node.domain for node in nodes}):
        model.opset_import.append(onnx.OperatorSetIdProto(domain=domain, version=1))
    return True


# The size that onnx infers behind a window larger than what it slides over is negative. For such an input the inference
# of Slice (onnx 1.23, and the copy in ONNX Runtime) fails an assertion of std::clamp, which ends the process.
_WINDOWS = frozenset({"AveragePool", "Conv", "ConvInteger", "LpPool", "MaxPool", "QLinearConv"})
_CUTTING = _WINDOWS | {"ConvTranspose", "Pad"}
_UNSLICED = "edgekit.unsliced"
# Each pass shows the slices whose input the one before has sized; more are made by hostile files only.
_MOST_PASSES = 16


def _find_large_windows(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Returns the nodes with a window that may find no place to stand, even once, and those that may cut off too much.

    A ConvTranspose cuts by pads that are wider than its window, a Pad by negative ones.
    """
    nodes = [node for node in iterate_nodes(model.graph) if node.op_type in _CUTTING and node.domain in MAIN_DOMAINS]
    if not nodes:
        return []
    # The constants with pads of which one is negative.
    read = {name for node in nodes if node.op_type == "Pad" for name in node.input[1:2]}
    constants = [each for part in iterate_graphs(model.graph) for each in list_constants(part).items()] if read else []
    inside = [(name, each) for name, each in constants if name in read and each.data_location != each.EXTERNAL]
    negative = {name for name, each in inside if min(numpy_helper.to_array(each).ravel(), default=0) < 0}
    # Large weights are inputs while a model is inferred.
    stored = _read_sizes(model)
    return [node for node in nodes if not negative.isdisjoint(node.input[1:2]) or _has_large_window(node, stored)]


def _has_large_window(node: onnx.NodeProto, stored: Mapping[str, list[int]]) -> bool:
    given = {each.name: list(each.ints) for each in node.attribute}
    if node.op_type == "Pad":
        return min(given.get("pads", []), default=0) < 0
    weight = "".join(node.input[3:4] if node.op_type == "QLinearConv" else node.input[1:2])
    kernel = given.get("kernel_shape") or stored.get(weight, [])[2:]
    rank, pads = len(kernel), given.get("pads", [])
    for axis, size in enumerate(kernel):
        dilation, stride = (given.get(key, [1] * rank)[axis : axis + 1] or [1] for key in ("dilations", "strides"))
        padding = sum(pads[axis::rank]) if len(pads) == 2 * rank else 0
        reach = (size - 1) * dilation[0] + 1
        # The division by the stride rounds towards zero, so that a window must lack two steps.
        if padding > reach if node.op_type == "ConvTranspose" else reach - padding >= 2 * stride[0]:
            return True
    return False


def _find_slices_behind(windows: Sequence[onnx.NodeProto], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Returns the slices that follow one of these windows, directly or not, in the order in which nodes are inferred.

    A node with bodies is one step: if a window is in it or before it, it is before all slices inside.
    """
    behind = {name for node in windows for name in node.output if name}
    found: list[onnx.NodeProto] = []
    for node in graph.node:
        inside = [node, *(each for body in list_bodies(node) for each in iterate_nodes(body))]
        if not behind.isdisjoint(name for each in inside for name in (*each.input, *each.output)):
            behind.update(filter(None, node.output))
            found += (each for each in inside if each.op_type == "Slice" and each.domain in MAIN_DOMAINS)
    return found


def _infer_past_windows(light: onnx.ModelProto, hidden: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    """Returns the model with inferred shapes; a Slice of something of negative size has none.

    `hidden` are the slices behind large windows.
    """
    if hidden and all(each.domain != _UNSLICED for each in light.opset_import):
        light.opset_import.append(onnx.OperatorSetIdProto(domain=_UNSLICED, version=1))
    for node in hidden:
        node.domain = _UNSLICED
    inferred = _infer(light)
    for _ in range(_MOST_PASSES if hidden else 0):
        sizes = _read_sizes(inferred)
        shown = [node for node in hidden if min(sizes.get(node.input[0], (-1,)), default=0) >= 0]
        if not shown:
            break
        for node in shown:
            node.domain = ""
        hidden = [node for node in hidden if node.domain]
        inferred = _infer(light)
    if not hidden:
        return inferred
    # Data propagation may lose a size; and where inference fails, nothing tells what is negative.
    tries = (inferred, _try_inference(light, data_prop=False))
    if inferred is light or any(each is None or _find_negative(each) is not None for each in tries):
        return inferred
    # What no pass can size is not negative either.
    for node in hidden:
        node.domain = ""
    return _infer(light)


def _read_sizes(model: onnx.ModelProto) -> dict[str, list[int]]:
    """Returns the dimensions of each tensor whose rank is known, 0 for one without a number."""
    found = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for graph in iterate_graphs(model.graph)
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    stored = (tensor for graph in iterate_graphs(model.graph) for tensor in graph.initializer)
    return found | {tensor.name: list(tensor.dims) for tensor in stored}


def _find_negative(inferred: onnx.ModelProto) -> tuple[onnx.NodeProto, list[int]] | None:
    """Returns the first node with an output of negative size, and this output's shape; None if there is none.

    A branch may never run at such a size: of its nodes only those before a Slice count, which ends the process.
    """
    sizes = _read_sizes(inferred)
    sliced = {name for node in iterate_nodes(inferred.graph) if node.op_type == "Slice" for name in node.input[:1]}
    for graph in iterate_graphs(inferred.graph):
        for node in graph.node:
            for name in node.output if graph is inferred.graph else sliced.intersection(node.output):
                if min(sizes.get(name, ()), default=0) < 0:
                    return node, sizes[name]
    return None


def find_empty_window(model: onnx.ModelProto) -> tuple[onnx.NodeProto, list[int]] | None:
    """Returns the first node whose window is larger than what it slides over, and the output's shape; None without one.

    ONNX Runtime may end the process on a model that has one.
    """
    return _find_negative(infer_model(model)) if _find_large_windows(model) else None


def refuse_empty_windows(model: onnx.ModelProto) -> None:
    """Checks that every window finds a place to stand.

    Raises:
        ModelError: a window is larger than what it slides over.
    """
    if (found := find_empty_window(model)) is not None:
        node, shape = found
        words = f"node '{node.name or node.output[0]}' ({node.op_type}) would make a tensor of shape {shape}"
        hint = "give larger sizes: --dim NAME=INT; where the model fixes them, export it with larger ones"
        raise ModelError(f"{words}: an input is too small for this network", hint=hint)


def has_long_vector(model: onnx.ModelProto) -> bool:
    """Returns True if a vector has so many elements that data propagation would take too long."""
    return any(
        len(dims) == 1 and dims[0].dim_value > _LONGEST
        for graph in iterate_graphs(model.graph)
        for value in (*graph.input, *graph.output, *graph.value_info)
        for dims in (value.type.tensor_type.shape.dim,)
    )


def may_have_long_vector(model: onnx.ModelProto) -> bool:
    """Returns True if the model has a constant integer so large that it may be the length of a long vector."""
    for tensor in (tensor for graph in iterate_graphs(model.graph) for tensor in list_constants(graph).values()):
        # Lengths come from int64 constants of one element or a few.
        if tensor.data_type != onnx.TensorProto.INT64 or len(tensor.dims) > 1 or not is_small(tensor):
            continue
        # Data that do not fit the shape are refused by `model.read_proto`.
        with contextlib.suppress(ValueError):
            inside = tensor.data_location != onnx.TensorProto.EXTERNAL
            if inside and (np.abs(numpy_helper.to_array(tensor)) > _LONGEST).any():
                return True
    return False


def _is_untyped(node: onnx.NodeProto) -> bool:
    domain = "" if node.domain in MAIN_DOMAINS else node.domain
    return (domain, node.op_type) in _UNTYPED


# Inference reads shapes, axes and indices, which are smaller.
_MOST_BYTES = 1 << 14


def open_negative(graph: onnx.GraphProto) -> None:
    """Opens, in place, dimensions of -1, unknown to ONNX Runtime: inference would make a size of 0 of half."""
    for part in iterate_graphs(graph):
        for value in (*part.value_info, *part.input, *part.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0:
                    dim.Clear()


def infer_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy with types and shapes that onnx can infer, without large initializers' data and lists of trees.

    Contrib operators of ONNX Runtime are inferred too (`substitute_contrib`). If inference fails, for example at
    contradictory shapes, the copy has those of the model.
    """
    light, large = copy_light(proto, _MOST_BYTES, lists=False)
    light.graph.name = proto.graph.name or "graph"
    # The default of `onesided` is stated: onnx 1.23 infers the whole spectrum without it.
    for node in iterate_nodes(light.graph):
        if node.op_type == "STFT" and all(each.name != "onesided" for each in node.attribute):
            node.attribute.append(helper.make_attribute("onesided", 1))
    open_negative(light.graph)
    substituted = substitute_contrib(light)
    slices = _find_slices_behind(_find_large_windows(light), light.graph)
    rounded, hidden = _round_pools(light), hide_untyped(light)
    inferred = _infer_past_windows(light, slices)
    if hidden and show_typed(light, inferred):
        inferred = _infer_past_windows(light, slices)
    if substituted or rounded or hidden or slices:
        restore_contrib(inferred, proto)
    if len(light.opset_import) != len(proto.opset_import):
        refill(inferred.opset_import, proto.opset_import)
        refill(inferred.functions, proto.functions)
    # Large initializers were inputs for inference; they become initializers again.
    del inferred.graph.input[len(proto.graph.input) :]
    for tensor in large:
        if is_small(tensor) or tensor.data_location == onnx.TensorProto.EXTERNAL:
            inferred.graph.initializer.append(tensor)
        else:
            inferred.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return inferred


def _infer(light: onnx.ModelProto) -> onnx.ModelProto:
    if may_have_long_vector(light):
        first = _try_inference(light, data_prop=False)
        if first is None or has_long_vector(first):
            return first or light
    # Data propagation follows shapes through Shape, Gather and Concat. On some models onnx raises with it and succeeds
    # without it.
    propagated = None if has_long_vector(light) else _try_inference(light, data_prop=True)
    return propagated or _try_inference(light, data_prop=False) or light


def _try_inference(light: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto | None:
    with contextlib.suppress(shape_inference.InferenceError, ValueError, RuntimeError, TypeError):
        return shape_inference.infer_shapes(light, data_prop=data_prop)
    return None


def copy_light(
    proto: onnx.ModelProto, most: int, *, lists: bool = True
) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """Returns a copy with inputs in place of the large initializers, and these initializers.

    Large are those of more than `most` bytes and those with external data: onnx's tools copy the whole model, and fail
    on an initializer without data. Small ones stay, since the tools read shapes and axes from them. Without `lists`,
    very long lists of tree ensembles are empty.
    """
    light, large = copy_without_weights(proto, lists=lists), list[onnx.TensorProto]()
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.ByteSize() > most:
            large.append(tensor)
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            light.graph.initializer.append(tensor)
    return light, large
