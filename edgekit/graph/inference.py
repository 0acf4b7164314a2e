"""Types and shapes of values, by onnx's shape inference.

onnx copies the model several times, so it is given a copy without large weights. A few operators may crash the process,
and are hidden from it; some models make its data propagation take hours, and do without. It has no schemas of ONNX
Runtime's own operators: for inference alone, each is replaced by an ONNX operator whose outputs have the same types and
shapes.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from edgekit.errors import ModelError
from edgekit.graph.constants import MAIN_DOMAINS, ML_DOMAIN, is_own, is_small, list_constants
from edgekit.model.model import copy_without_weights, iterate_graphs, iterate_nodes, refill
from edgekit.model.soundness import list_bodies, read_opsets

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
    # Large weights are inputs while a model is inferred.
    stored, negative = _read_sizes(model), _find_negative_pads(model, nodes)
    return [node for node in nodes if not negative.isdisjoint(node.input[1:2]) or _has_large_window(node, stored)]


def _find_negative_pads(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Returns the names of the constants with pads of which one is negative."""
    read = {name for node in nodes if node.op_type == "Pad" for name in node.input[1:2]}
    stored = [each for graph in iterate_graphs(model.graph) for each in list_constants(graph).items()] if read else []
    inside = [(name, each) for name, each in stored if name in read and each.data_location != each.EXTERNAL]
    return {name for name, each in inside if min(numpy_helper.to_array(each).ravel(), default=0) < 0}


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


def _open_negative(model: onnx.ModelProto) -> None:
    """Opens, in place, the dimensions that the model says are -1: ONNX Runtime takes them for unknown too."""
    for graph in iterate_graphs(model.graph):
        for value in (*graph.value_info, *graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0:
                    dim.Clear()


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


def refuse_empty_windows(model: onnx.ModelProto) -> None:
    """Checks that every window finds a place to stand: ONNX Runtime may end the process on a model where one does not.

    Raises:
        ModelError: a window is larger than what it slides over.
    """
    if _find_large_windows(model) and (found := _find_negative(infer_model(model))) is not None:
        node, shape = found
        words = f"node '{node.name or node.output[0]}' ({node.op_type}) would make a tensor of shape {shape}"
        raise ModelError(f"{words}: an input is too small for this network", hint="give larger sizes: --dim NAME=INT")


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
        # Data that do not fit the shape are refused by `soundness.find_wrong_size`.
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
    _open_negative(light)
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


_ADDED = "edgekit: for inference only"

Shape = tuple[int, ...]


class _Stored(msgspec.Struct, frozen=True):
    dtype: int
    dims: Shape


class _Substitution(msgspec.Struct):
    """The replacement of one contrib node.

    `known` holds the types and shapes of the graph's inputs and initializers. `stubs` and `made` collect the graph
    inputs and the nodes that replace contrib nodes.
    """

    node: onnx.NodeProto
    known: Mapping[str, _Stored]
    stubs: dict[str, onnx.ValueInfoProto]
    made: list[onnx.NodeProto]

    def name(self, position: int) -> str:
        return self.node.input[position] if position < len(self.node.input) else ""

    def stored(self, position: int) -> _Stored | None:
        return self.known.get(self.name(position))

    def number(self, name: str, default: int) -> int:
        return next((item.i for item in self.node.attribute if item.name == name), default)

    def numbers(self, name: str) -> Shape:
        return next((tuple(item.ints) for item in self.node.attribute if item.name == name), ())

    def stub(self, dtype: int, dims: Sequence[int]) -> str:
        """Returns the name of a graph input of this type and shape, which replaces packed weights."""
        name = f"edgekit.stub.{dtype}.{'x'.join(map(str, dims))}"
        self.stubs[name] = helper.make_tensor_value_info(name, dtype, dims)
        return name

    def add(self, op: str, inputs: Sequence[str], output: int = 0, *, keeps: bool = False, **attributes: Any) -> None:
        """Adds an ONNX node that makes this output, unless the node lacks that output or one of the inputs.

        With `keeps` it has the attributes of the node that it replaces.
        """
        names = self.node.output
        if output >= len(names) or not names[output] or not all(inputs):
            return
        self.made.append(helper.make_node(op, inputs, [names[output]], doc_string=_ADDED, **attributes))
        self.made[-1].attribute.extend(self.node.attribute if keeps else ())


def substitute_contrib(proto: onnx.ModelProto) -> bool:
    """Replaces contrib operators by ONNX operators whose outputs have the same types and shapes, in place.

    Returns True if there were any; `restore_contrib` undoes it. An output for which no ONNX operator fits stays
    unknown.
    """
    opset = read_opsets(proto.opset_import).get("", 1)
    if not any(is_own(node, opset) for node in iterate_nodes(proto.graph)):
        return False
    known = {
        value.name: _Stored(
            value.type.tensor_type.elem_type, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        )
        for value in proto.graph.input
    } | {tensor.name: _Stored(tensor.data_type, tuple(tensor.dims)) for tensor in proto.graph.initializer}
    stubs: dict[str, onnx.ValueInfoProto] = {}
    for graph in iterate_graphs(proto.graph):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if not is_own(node, opset):
                nodes.append(node)
            elif rule := _SUBSTITUTES.get(node.op_type):
                rule(_Substitution(node, known, stubs, nodes))
        refill(graph.node, nodes)
    proto.graph.input.extend(stubs.values())
    return True


def restore_contrib(inferred: onnx.ModelProto, proto: onnx.ModelProto) -> None:
    """Puts the original nodes back into a graph that `substitute_contrib` changed and onnx inferred, in place."""
    opset = read_opsets(proto.opset_import).get("", 1)
    for substituted, given in zip(iterate_graphs(inferred.graph), iterate_graphs(proto.graph), strict=True):
        # The bodies of a contrib node that came back are the given ones, with their own contrib nodes.
        kept = iter([node for node in substituted.node if node.doc_string != _ADDED and not is_own(node, opset)])
        nodes = [node if is_own(node, opset) else next(kept) for node in given.node]
        for node, source in zip(nodes, given.node, strict=True):
            node.domain = source.domain
        refill(substituted.node, nodes)


def _same(op: str, *positions: int) -> Callable[[_Substitution], None]:
    """Returns a rule: the first output has the type and shape that this ONNX operator gives."""
    return lambda of: of.add(op, [of.name(at) for at in positions if at < len(of.node.input)], keeps=op != "Identity")


def _skip_norm(of: _Substitution) -> None:
    of.add("Identity", [of.name(0)])
    # The sum before the norm, which the next layer adds to.
    of.add("Identity", [of.name(0)], output=3)


def _nbits(of: _Substitution) -> None:
    if (scales := of.stored(2)) is not None:
        of.add("MatMul", [of.name(0), of.stub(scales.dtype, (of.number("K", 0), of.number("N", 0)))])


def _gather_blocks(of: _Substitution) -> None:
    data, scales = of.stored(0), of.stored(2)
    if data is None or scales is None or not data.dims:
        return
    # A byte holds several values; a tensor of a 4-bit type counts them one by one in its shape.
    packed = 8 // of.number("bits", 4) if data.dtype == onnx.TensorProto.UINT8 else 1
    table = of.stub(scales.dtype, (*data.dims[:-1], data.dims[-1] * packed))
    of.add("Gather", [table, of.name(1)], axis=of.number("gather_axis", 0))


def _packed_attention(of: _Substitution) -> None:
    weight, sizes = of.stored(1), of.numbers("qkv_hidden_sizes")
    if weight is not None and len(weight.dims) == 2:
        width = sizes[2] if len(sizes) == 3 else weight.dims[1] // 3
        of.add("MatMul", [of.name(0), of.stub(weight.dtype, (weight.dims[0], width))])


def _lstm(of: _Substitution) -> None:
    # The weights are transposed and in integers; shapes come from the attributes.
    of.made.append(helper.make_node("LSTM", of.node.input[:3], of.node.output, doc_string=_ADDED))
    of.made[-1].attribute.extend(of.node.attribute)


def _attention(of: _Substitution) -> None:
    # Without a bias for values or keys of another size, what comes out is as wide as the queries.
    if of.name(1):
        of.add("Identity", [of.name(0)])
        return
    heads, keys, past = of.number("num_heads", 0), of.number("kv_num_heads", 0), of.stored(3)
    if past is not None and len(past.dims) == 4 and past.dims[3]:
        # Queries, keys and values side by side.
        size = past.dims[3]
        of.add("MatMul", [of.name(0), of.stub(past.dtype, ((heads + 2 * keys) * size, heads * size))])


def _float_matmul(of: _Substitution) -> None:
    weight = of.stored(1)
    if weight is not None and len(weight.dims) == 2:
        of.add("MatMul", [of.name(0), of.stub(onnx.TensorProto.FLOAT, weight.dims)])


def _fused_matmul(of: _Substitution) -> None:
    left, right, weight = of.number("transA", 0), of.number("transB", 0), of.stored(1)
    if of.number("transBatchA", 0) or of.number("transBatchB", 0):
        return
    if not left and not right:
        of.add("MatMul", [of.name(0), of.name(1)])
    elif not left and weight is not None and len(weight.dims) == 2 and all(weight.dims):
        of.add("MatMul", [of.name(0), of.stub(weight.dtype, weight.dims[::-1])])
    else:
        # onnx infers it for equal ranks.
        equation = f"...{'ji' if left else 'ij'},...{'kj' if right else 'jk'}->...ik"
        of.add("Einsum", [of.name(0), of.name(1)], equation=equation)


_SUBSTITUTES: Mapping[str, Callable[[_Substitution], None]] = {
    **dict.fromkeys(
        (
            "Gelu", "QuickGelu", "FastGelu", "BiasGelu", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax",
            "RotaryEmbedding", "LayerNormalization", "SimplifiedLayerNormalization",
        ),
        _same("Identity", 0),
    ),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_norm),
    **{op: _same(op, 0, 1, 2) for op in ("QuantizeLinear", "DequantizeLinear")},
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _same("Add", 0, 3)),
    "QLinearWhere": _same("Where", 0, 1, 4),
    "QLinearConcat": lambda of: of.add("Concat", [of.name(at) for at in range(2, len(of.node.input), 3)], keeps=True),
    "QLinearAveragePool": _same("AveragePool", 0),
    "QLinearGlobalAveragePool": _same("GlobalAveragePool", 0),
    "EmbedLayerNormalization": lambda of: of.add("Gather", [of.name(2), of.name(0)]),
    "FusedConv": _same("Conv", 0, 1),
    "FusedGemm": _same("Gemm", 0, 1),
    "FusedMatMul": _fused_matmul,
    "MatMulNBits": _nbits,
    "GatherBlockQuantized": _gather_blocks,
    **dict.fromkeys(("Attention", "QAttention"), _packed_attention),
    "MultiHeadAttention": _attention,
    "GroupQueryAttention": _attention,
    "DynamicQuantizeLSTM": _lstm,
    "DynamicQuantizeMatMul": _float_matmul,
    "MatMulIntegerToFloat": _float_matmul,
}  # fmt: skip
"""The replacement of each operator; only types and shapes matter, not values."""
