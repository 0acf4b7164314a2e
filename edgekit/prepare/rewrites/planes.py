"""Turns convolutions of lines, [N, C, L], into those of planes, [N, C, 1, L], and transposed ones into plain ones."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import known, made_by, need, reduced_axes
from edgekit.graph.rewrite import FLOATS, Writer, node_rewrite, replace_nodes, reshape_tensor, rewrite
from edgekit.model.model import drop_unread, find_reads, refill
from edgekit.model.tensors import Array
from edgekit.prepare.rewrites.layout import find_pads

# The shapes of Reshapes to [N, C, 1, L] and back; 0 keeps a dimension, -1 is the rest.
_PLANE, _LINE = (0, 0, 1, -1), (0, 0, -1)
_POOLS = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})
# Elementwise operators, and Concat along the channels: they may lie between two layers.
_ELEMENTWISE = frozenset(
    {"Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Tanh"}
)
_JOINING = frozenset({"Add", "Concat", "Div", "Mul", "PRelu", "Sub"})
# The first opset in which the shape of a Reshape is an input, and that in which the axes of a Squeeze are.
_SINCE, _AXES_AS_INPUT = 5, 13
_PLANE_RANK = 4
# The value of an attribute along the new axis.
_ALONG = {"dilations": 1, "kernel_shape": 1, "pads": 0, "strides": 1}


@rewrite("conv-to-planes", _POOLS | {"Conv"})
def conv_to_planes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Adds an axis of size 1 to Conv and pooling of [N, C, L], in place, and returns the names of the changed nodes.

    Elementwise operators between them, such as activations or residual sums, get it too, so that a network needs only
    two Reshapes.
    """
    if opset < _SINCE:
        return ()
    # The forms with four axes of tensors, and of constants, which layers may share.
    planes, stored = dict[str, str](), dict[str, str]()

    def write(writer: Writer) -> None:
        view, node, name = writer.graph, writer.node, writer.node.output[0]
        need(_is_line_layer(view, node) or _can_follow(view, node, planes))
        raised = node.input if node.op_type in _JOINING else node.input[: 2 if node.op_type == "Conv" else 1]
        for each in raised:
            tensor = view.constants.get(each)
            if tensor is None and each not in planes:
                planes[each] = f"{each}/plane"
                writer.reshape(each, f"{each}/plane/shape", _PLANE, f"{each}/plane", into=planes[each])
            elif tensor is not None and len(tensor.dims) > 1 and each not in stored:
                stored[each] = f"{each}/plane"
                shape = (*tensor.dims[:-1], 1, tensor.dims[-1])
                graph.initializer.append(reshape_tensor(tensor, stored[each], shape))
        new = writer.copy(node)
        new.input[: len(raised)] = [planes.get(each) or stored.get(each, each) for each in raised]
        planes[name] = new.output[0] = f"{name}/plane"
        for attribute in new.attribute:
            if attribute.name in _ALONG:
                # Before each value, that of the new axis; pads have a value for each end.
                attribute.ints[:] = [each for value in attribute.ints for each in (_ALONG[attribute.name], value)]
        writer.reshape(planes[name], "line/shape", _LINE, "line", into=name)

    changed = replace_nodes(graph, opset, _POOLS | _ELEMENTWISE | _JOINING | {"Conv"}, write)
    read, lines = find_reads(graph) if changed else set[str](), {f"{name}/line" for name in changed}
    refill(graph.node, [node for node in graph.node if node.name not in lines or node.output[0] in read])
    return changed


def _is_line_layer(view: Graph, node: Node) -> bool:
    value = view.value(node.input[0]) if node.input else None
    if value is None or node.domain or len(value.shape or ()) != 3 or value.dtype not in FLOATS:
        return False
    if node.op_type == "Conv":
        weight, bias = view.constants.get(node.input[1]), node.given(2)
        return weight is not None and len(weight.dims) == 3 and (not bias or bias in view.constants)
    return node.op_type in _POOLS and len(node.output) == 1 and not node.integer("storage_order", 0)


def _can_follow(view: Graph, node: Node, made: dict[str, str]) -> bool:
    if node.domain or not any(name in made for name in node.input):
        return False
    if node.op_type in _ELEMENTWISE:
        return node.input[0] in made
    if node.op_type not in _JOINING or (node.op_type == "Concat" and node.integer("axis", 0) != 1):
        return False
    # Constants of fewer axes are broadcast; with one of more axes, the output has more.
    wanted = [name for name in node.input if name not in view.constants]
    return all(len(view.value(name).shape or ()) == 3 for name in (*wanted, node.output[0]))


@rewrite("squeeze-late", {"Squeeze"})
def squeeze_late(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Moves a Squeeze of one axis of what a Conv made behind elementwise operators, in place; returns their names.

    An Unsqueeze that gives the axis back is left out. So tf2onnx writes each Conv1D of Keras: Conv, Squeeze, Add of the
    bias, Relu, Unsqueeze. ONNX Runtime folds the Add into the Conv, and providers fuse the Relu, only right behind it;
    quantized, each step would be rounded.
    """
    # For what lacks an axis, by name: the same with the axis, and which axis that is.
    planes = dict[str, tuple[str, int]]()

    def write(writer: Writer) -> None:
        view, node, name = writer.graph, writer.node, writer.node.output[0]
        if node.op_type in {"Squeeze", "Unsqueeze"}:
            axes = known(reduced_axes(view, node))
            need(len(axes) == 1)
            if node.op_type == "Unsqueeze":
                plane, axis = known(planes.get(writer.x))
                need(axes[0] in {axis, axis - _PLANE_RANK})
                writer.add("Identity", [plane])
                return
            weight = known(view.constants.get(known(made_by(view, writer.x, "Conv")).input[1]))
            # The last two axes are those of the plane, which may be counted from the end.
            need(len(weight.dims) == _PLANE_RANK and axes[0] in {-2, -1, 2, 3})
            planes[name] = writer.x, axes[0] % _PLANE_RANK
            return
        need(not node.domain and len(node.output) == 1 and (node.op_type != "Concat" or node.integer("axis", 0) == 1))
        raised = node.input if node.op_type in _JOINING else node.input[:1]
        found = {axis for _, axis in (planes[each] for each in raised if each in planes)}
        need(len(found) == 1 and all(each in planes or each in view.constants for each in raised))
        (axis,), new = found, [*node.input]
        for place, each in enumerate(raised):
            if each in planes:
                new[place] = planes[each][0]
                continue
            dims = view.constants[each].dims
            need(len(dims) < _PLANE_RANK)
            # Constants are broadcast from the last axis on: only one that reaches the new axis gets it.
            at = len(dims) - (_PLANE_RANK - 1 - axis)
            if at > 0:
                new[place] = writer.reshaped(f"plane{place}", each, [*dims[:at], 1, *dims[at:]])
        moved, plane = writer.copy(node), f"{name}/plane"
        moved.input[:], moved.output[:], planes[name] = new, [plane], (plane, axis)
        if opset < _AXES_AS_INPUT:
            writer.add("Squeeze", [plane], "line", into=name, axes=[axis])
        else:
            writer.add("Squeeze", [plane, writer.ints("axes", [axis])], "line", into=name)

    ops = _ELEMENTWISE | _JOINING | {"BatchNormalization", "Squeeze", "Unsqueeze"}
    if changed := replace_nodes(graph, opset, ops, write):
        drop_unread(graph, {"Squeeze"})
    return changed


@node_rewrite("pad-transposed", {"ConvTranspose"}, since=13)
def pad_transposed(writer: Writer) -> None:
    """Rewrites the output_padding of a ConvTranspose: its pads get smaller, and a Pad and Add make what is left.

    QNN computes a depthwise layer with an output_padding wrongly, and elements that the kernel does not reach.
    """
    node, given = writer.node, dict(writer.node.attributes)
    added = given.pop("output_padding", ())
    bias = writer.graph.constants.get(node.input[2]) if node.has_input(2) else None
    need(any(added) and "output_shape" not in given and given.get("auto_pad", "NOTSET") == "NOTSET")
    count = len(added)
    pads = node.entries("pads") or (0,) * 2 * count
    ends = [end - more for end, more in zip(pads[count:], added, strict=False)]
    given["pads"] = [*pads[:count], *(max(end, 0) for end in ends)]
    if all(end >= 0 for end in ends):
        writer.add("ConvTranspose", node.input, **given)
        return
    need(bias is not None or not node.has_input(2))
    # What the kernel does not reach may be all of a small output.
    shape = (writer.graph.value(node.output[0]).shape or ())[2:]
    need(all(size is None or size > -end for size, end in zip(shape, ends, strict=False)))
    reached = writer.add("ConvTranspose", node.input[:2], "reached", **given)
    amounts = writer.ints("amounts", [0] * (count + 4) + [max(-end, 0) for end in ends])
    padded = writer.add("Pad", [reached, amounts], "padded" if bias is not None else "")
    if bias is not None:
        writer.add("Add", [padded, writer.reshaped("bias", node.input[2], [bias.dims[0], *[1] * count])])


# Lines and planes, and the spatial axes of these.
_RANKS, _AXES = (3, 4), 2


@node_rewrite("transposed-to-conv", {"ConvTranspose"}, floats=True)
def transposed_to_conv(writer: Writer) -> None:
    """Rewrites a ConvTranspose of one or two axes and stride 1 as a Conv with the mirrored kernel.

    NNAPI has no ConvTranspose, others have more limits for it; of three axes Core ML has ConvTranspose alone.
    """
    graph, node, given = writer.graph, writer.node, dict(writer.node.attributes)
    weight = known(graph.constants.get(node.input[1]))
    # Weights that lie on the disk stay: they cannot be mirrored there.
    need(len(weight.dims) in _RANKS and not graph.is_external(node.input[1]))
    need(all(step == 1 for step in node.entries("strides") or ()) and not any(given.pop("output_padding", ())))
    need("output_shape" not in given and given.get("auto_pad", "NOTSET") == "NOTSET")
    group, count, (inputs, outputs, *kernel) = node.integer("group", 1), len(weight.dims) - 2, weight.dims
    reach = [step * (size - 1) for step, size in zip(node.entries("dilations") or (1,) * count, kernel, strict=False)]
    given["pads"] = [most - pad for most, pad in zip(reach * 2, node.entries("pads") or (0,) * 2 * count, strict=False)]
    # A file that is only checked may have any number of groups.
    need(min(given["pads"]) >= 0 and group >= 1 and inputs % group == 0)
    dims = (outputs * group, inputs // group, *kernel)

    def mirror(values: Array) -> Array:
        parts = values.reshape(group, -1, outputs, *kernel).swapaxes(1, 2).reshape(dims)
        return np.flip(parts, tuple(range(2, count + 2)))

    writer.add("Conv", [node.input[0], _write_kernel(writer, "mirrored", dims, mirror), *node.input[2:]], **given)


def _write_kernel(writer: Writer, part: str, dims: Sequence[int], make: Callable[[Array], Array]) -> str:
    """Writes what `make` makes of the node's weight; in a model that a check loaded without weights only its shape."""
    weight = writer.node.input[1]
    values = writer.graph.inline(weight)
    return writer.reshaped(part, weight, dims) if values is None else writer.constant(part, make(values))


@node_rewrite("transposed-to-subpixel", {"ConvTranspose"}, since=11, floats=True)
def transposed_to_subpixel(writer: Writer) -> None:
    """Rewrites a ConvTranspose of stride s along both axes of a plane as a Conv and a DepthToSpace of blocks s x s.

    Element s * q + r of a row is the sum of x[q - j] * w[r + s * j] over j: for each r a Conv with every s-th tap, in
    reverse order. Where the pads begin or end inside of a block, a Slice cuts it. NNAPI has no ConvTranspose.
    """
    graph, node, made = writer.graph, writer.node, writer.made
    weight, size = known(graph.constants.get(node.input[1])), writer.shape()
    given = node.attributes
    strides = node.entries("strides") or (1,)
    step = strides[0]
    need(len(size) == len(weight.dims) == len(made) == max(_RANKS))
    need(step > 1 and set(strides) == {step} and len(strides) == _AXES)
    need({*(node.entries("dilations") or (1,)), node.integer("group", 1)} == {1})
    fixed = find_pads(writer)
    need(fixed is not None or given.get("auto_pad", "NOTSET") == "NOTSET")
    need(not graph.is_external(node.input[1]) and 0 not in (*size, *made))
    inputs, outputs, *kernel = weight.dims
    taps = [-(-each // step) for each in kernel]
    # The blocks that are needed: the first, and the one behind the last.
    pads = fixed or node.entries("pads") or (0,) * 2 * _AXES
    need(len(pads) == 2 * _AXES)
    begin = pads[:_AXES]
    first = [each // step for each in begin]
    behind = [-(-(each + length) // step) for each, length in zip(begin, made[2:], strict=True)]
    before = [count - 1 - each for count, each in zip(taps, first, strict=True)]
    after = [each - length for each, length in zip(behind, size[2:], strict=True)]
    need(min(before) >= 0 and all(0 <= each < count for each, count in zip(after, taps, strict=True)))
    dims = (step * step * outputs, inputs, *taps)

    def split(values: Array) -> Array:
        whole = np.zeros((inputs, outputs, *(count * step for count in taps)), values.dtype)
        whole[:, :, : kernel[0], : kernel[1]] = values
        parts = whole.reshape(inputs, outputs, taps[0], step, taps[1], step).transpose(3, 5, 1, 0, 2, 4)
        return np.flip(parts, (4, 5)).reshape(dims)

    taken = [_write_kernel(writer, "taps", dims, split)]
    if node.has_input(2):
        taken.append(writer.constant("biases", np.tile(known(graph.inline(node.input[2])), step * step)))
    blocks = writer.add("Conv", [writer.x, *taken], "blocks", pads=[*before, *after])
    starts = [each - step * block for each, block in zip(begin, first, strict=True)]
    ends = [start + length for start, length in zip(starts, made[2:], strict=True)]
    is_cut = any(starts) or ends != [step * (last - block) for last, block in zip(behind, first, strict=True)]
    rows = writer.add("DepthToSpace", [blocks], "rows" if is_cut else "", blocksize=step, mode="DCR")
    if is_cut:
        limits = {"starts": starts, "ends": ends, "axes": [2, 3]}
        writer.add("Slice", [rows, *(writer.ints(part, each) for part, each in limits.items())])
