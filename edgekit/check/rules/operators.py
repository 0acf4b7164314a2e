"""Rules for the meaning of single operators: the bias of a Gemm, the scales of a Resize, the parts of a Split.

The last two are about what ONNX Runtime's layout transformation to NHWC changes: Transposes at outputs, and axes that
were the last.
"""

import math
from collections.abc import Iterator
from string import ascii_lowercase
from typing import Literal

import numpy as np

from edgekit.check.rules.rules import BaseRule, Subject, only_reader
from edgekit.check.rules.units import LIMITED, clip_bounds, read_parameters
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import list_lent_constants
from edgekit.graph.nhwc import find_orders
from edgekit.graph.spatial import Modes, find_picks, has_windows, place_windows, read_modes

# Scales are float32, and quotients such as 2/3 are rounded in it.
_WHOLE_TOLERANCE = 1e-4


class Bounds(BaseRule, frozen=True, kw_only=True, tag="bounds"):
    """The bounds of a Clip must be constants, and one of the `allowed` pairs if there are any."""

    allowed: tuple[tuple[float, float], ...] = ()
    refuse_equal: bool = False

    def _reasons(self, subject: Subject) -> Iterator[str]:
        names = tuple(operand.name for operand in subject.unit.inputs)
        if (found := clip_bounds(subject.graph, names, subject.unit.node.attributes)) is None:
            yield "its bounds are computed; they must be constants"
        elif self.allowed and found not in self.allowed:
            pairs = " or ".join(f"{low:g} to {high:g}" for low, high in self.allowed)
            yield f"it clips to {found[0]:g} to {found[1]:g}; only {pairs} is taken"
        elif self.refuse_equal and found[0] == found[1]:
            yield f"both bounds are {found[0]:g}"


class AxisLast(BaseRule, frozen=True, kw_only=True, tag="axis_last"):
    """The axis must be the last one, or become it where the change to NHWC behind one of the `layers` permutes axes."""

    default: int = -1
    layers: tuple[str, ...] = ()

    def _reasons(self, subject: Subject) -> Iterator[str]:
        node, shape = subject.unit.node, subject.shape(0)
        if shape is None:
            yield "the rank of input 0 is unknown"
        elif (axis := node.integer("axis", self.default)) not in {-1, len(shape) - 1}:
            order = find_orders(subject.graph, self.layers).get(node.input[0]) if self.layers else None
            if order is None or not -len(order) <= axis < len(order) or order[axis] != len(shape) - 1:
                yield f"axis {axis} is not the last of {len(shape)}"


class AxisSize(BaseRule, frozen=True, kw_only=True, tag="axis_size"):
    """The axis, the last one if none is given, must have at least `min` elements."""

    min: int

    def _reasons(self, subject: Subject) -> Iterator[str]:
        axis, shape = subject.unit.node.integer("axis", -1), subject.shape(0) or ()
        if -len(shape) <= axis < len(shape) and (shape[axis] or self.min) < self.min:
            yield f"axis {axis} has {shape[axis]} element{'s' * (shape[axis] != 1)}"


class RowBytes(BaseRule, frozen=True, kw_only=True, tag="row_bytes"):
    """`least` indices or more must not pick computed data in rows of as many bytes as `refused` names."""

    refused: tuple[int, ...]
    least: int

    def _reasons(self, subject: Subject) -> Iterator[str]:
        data, shape, picks = subject.unit.inputs[0], subject.shape(0), subject.shape(1)
        axis = subject.unit.node.integer("axis", 0)
        if shape is None or picks is None or data.dtype is None or data.name in subject.graph.constants:
            return
        inner = shape[axis + 1 :] if axis != -1 else ()
        count, size = (math.prod(each or 0 for each in sizes) for sizes in (picks, inner))
        size *= np.dtype(data.dtype).itemsize
        if count >= self.least and size in self.refused:
            yield f"{count} indices pick rows of {size} bytes"


class Equation(BaseRule, frozen=True, kw_only=True, tag="equation"):
    """The equation of an Einsum must be an `allowed` one, but for the names of its letters."""

    allowed: tuple[str, ...]

    def _reasons(self, subject: Subject) -> Iterator[str]:
        given = str(subject.unit.node.attributes.get("equation", "")).replace(" ", "")
        letters = "".join(dict.fromkeys(filter(str.isalpha, given)))[: len(ascii_lowercase)]
        if given.translate(str.maketrans(letters, ascii_lowercase[: len(letters)])) not in self.allowed:
            yield f"the equation {given} is none of {', '.join(self.allowed)}"


class GemmBias(BaseRule, frozen=True, kw_only=True, tag="gemm_bias"):
    """The shapes allowed for input C of a Gemm with B [K, N].

    "row" is [N] or [1, N], "scalar" [], "one" [1], "column" [M, 1], "matrix" any of rank 2, and "first" XNNPACK's test:
    the first dimension equals one of B's.
    """

    shapes: tuple[Literal["row", "scalar", "one", "column", "matrix", "first"], ...]

    def _reasons(self, subject: Subject) -> Iterator[str]:
        bias, weight = subject.shape(2), subject.shape(1)
        if not subject.unit.has_input(2):
            return
        if bias is None or weight is None or len(weight) != 2:
            yield "the shape of input 2 is unknown"
            return
        columns = weight[0] if subject.unit.node.integer("transB", 0) else weight[1]
        fits = {
            "scalar": bias == (),
            "one": bias == (1,),
            "row": bias in {(columns,), (1, columns)},
            "column": len(bias) == 2 and bias[1] == 1,
            "matrix": len(bias) == 2,
            "first": bool(bias) and bias[0] in weight,
        }
        if not any(fits[shape] for shape in self.shapes):
            yield f"input 2 has shape {list(bias)}, which is not taken as a bias"


class MatMulRanks(BaseRule, frozen=True, kw_only=True, tag="matmul_ranks"):
    """Both operands must have rank 2, or, if `batched`, both a higher rank with equal leading dimensions."""

    batched: bool

    def _reasons(self, subject: Subject) -> Iterator[str]:
        one, other = subject.shape(0), subject.shape(1)
        if one is None or other is None:
            yield "the rank of an input is unknown"
        elif self.batched and len(one) == len(other) > 2:
            if one[:-2] != other[:-2]:
                yield f"leading dimensions {list(one[:-2])} and {list(other[:-2])} differ"
        elif not len(one) == len(other) == 2:
            more = ", nor equal and above 2" if self.batched else ""
            yield f"ranks {len(one)} and {len(other)} are not both 2{more}"


class Rescaled(BaseRule, frozen=True, kw_only=True, tag="rescaled"):
    """A MatMulInteger must be scaled as QNN fuses it; a DynamicQuantizeLinear needs one such reader, if any is one.

    A Cast and a Mul by the product of both scales follow, each the only reader of what is before it. If an Add alone
    reads their result, it must add a constant bias of [N] or [1, N] (dq_matmul_integer_fusion.cc).
    """

    def _reasons(self, subject: Subject) -> Iterator[str]:
        graph, node = subject.graph, subject.unit.node
        found = (node, *graph.readers(node.output[0]))
        reasons = [_find_misfit(graph, each) for each in found if each.op_type == "MatMulInteger"]
        if reasons and all(reasons):
            yield reasons[0]


def _find_misfit(graph: Graph, product: Node) -> str:
    """Returns why a MatMulInteger is not fused with the nodes that scale its result, "" if it is."""
    cast = _find_only_reader(graph, product.output[0], "Cast")
    scaled = _find_only_reader(graph, cast.output[0], "Mul") if cast is not None else None
    if cast is None or scaled is None:
        return "its result is not scaled by a Cast and a Mul that alone read it"
    scale = next(name for name in scaled.input if name != cast.output[0])
    if _find_only_reader(graph, scale, "Mul") is None:
        return f"others read '{scale}', the product of its scales"
    add = _find_only_reader(graph, scaled.output[0], "Add")
    bias = next((name for name in add.input if name != scaled.output[0]), "") if add is not None else ""
    weight, added = (graph.constants.get(name) for name in (product.input[1], bias))
    columns = weight.dims[-1] if weight is not None else 0
    if add is not None and (added is None or list(added.dims) not in ([columns], [1, columns])):
        return f"'{add.name}' adds no constant bias of {columns} numbers to its result"
    return ""


def _find_only_reader(graph: Graph, name: str, op_type: str) -> Node | None:
    reader = only_reader(graph, name)
    return reader if reader is not None and reader.op_type == op_type and name not in graph.outputs else None


class OwnConstants(BaseRule, frozen=True, kw_only=True, tag="own_constants"):
    """A constant of the graph that bodies of the node read must be read by a node of that graph too."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        for name in list_lent_constants(subject.graph, subject.unit.node)[:1]:
            yield f"only its bodies read the constant '{name}', which lies outside them"


class ReshapeTarget(BaseRule, frozen=True, kw_only=True, tag="reshape_target"):
    """A 0 in the shape must not be used with allowzero, nor stand for a dimension that is 0."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        shape, target = subject.shape(0) or (), subject.array(1)
        zeros = [at for at, entry in enumerate(target.reshape(-1).tolist()) if entry == 0] if target is not None else []
        if zeros and subject.unit.node.integer("allowzero", 0):
            yield "the shape holds a 0 and allowzero is 1"
        if any(shape[at : at + 1] == (0,) for at in zeros):
            yield "a 0 in the shape stands for a dimension of 0"


class SplitSizes(BaseRule, frozen=True, kw_only=True, tag="split_sizes"):
    """The sizes must add up to the axis; `equal` wants them all the same."""

    equal: bool = False
    min_parts: int = 1

    def _reasons(self, subject: Subject) -> Iterator[str]:
        node, shape = subject.unit.node, subject.shape(0)
        if shape is None:
            yield "the rank of input 0 is unknown"
            return
        axis = node.integer("axis", 0)
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if size is None:
            yield f"the size of axis {axis} is dynamic"
            return
        given = subject.array(1)
        sizes = given.reshape(-1).tolist() if given is not None else list(node.entries("split") or ())
        parts = len(sizes) or len(node.output)
        if parts < self.min_parts:
            yield f"it has {parts} part; at least {self.min_parts} are needed"
        if sizes and sum(sizes) != size:
            yield f"the sizes {sizes} do not add up to {size}"
        if self.equal and len(set(sizes)) > 1:
            yield f"the sizes {sizes} differ; they must be equal"
        # Without sizes the last part may be smaller since opset 18.
        if self.equal and not sizes and size % parts:
            yield f"axis {axis} of size {size} does not divide into {parts} parts"


class SlopeShape(BaseRule, frozen=True, kw_only=True, tag="slope_shape"):
    """PRelu's slope is [C,1,1] or has one element."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        slope, data = subject.shape(1), subject.shape(0)
        if slope is None or data is None:
            yield "the shape of an input is unknown"
        elif all(dim == 1 for dim in slope):
            if len(data) >= 3 and data[-3] == 1:
                yield "one slope for one channel is not taken"
        elif len(slope) != 3 or slope[1:] != (1, 1):
            yield f"the slope has shape {list(slope)}; it must be [C, 1, 1]"


class ConvKernel(BaseRule, frozen=True, kw_only=True, tag="conv_kernel"):
    """The attribute kernel_shape equals the weight's spatial dimensions."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        given, weight = subject.unit.node.entries("kernel_shape"), subject.shape(1)
        if given is not None and weight is not None and given != weight[2:]:
            yield f"kernel_shape {list(given)} is not the weight's {list(weight[2:])}"


class GroupedDilation(BaseRule, frozen=True, kw_only=True, tag="grouped_dilation"):
    """A grouped convolution must not be dilated, unless it is depthwise: then the weight's second axis is 1."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        dilations, weight = subject.unit.node.entries("dilations") or (), subject.shape(1)
        grouped = subject.unit.node.integer("group", 1) != 1 and weight is not None and weight[1:2] != (1,)
        if grouped and any(step != 1 for step in dilations):
            yield f"dilations {list(dilations)} of a grouped convolution"


class PadReach(BaseRule, frozen=True, kw_only=True, tag="pad_reach"):
    """Only the last `last` dimensions are padded, each by less than its size if `below_dim`."""

    last: int
    below_dim: bool = False

    def _reasons(self, subject: Subject) -> Iterator[str]:
        shape, pads = subject.shape(0), subject.array(1)
        # With input 3, axes, the pads are not in the order of the dimensions (Pad 18).
        if shape is None or pads is None or subject.unit.has_input(3) or pads.size != 2 * len(shape):
            return
        for at, (dim, pair) in enumerate(zip(shape, pads.reshape(2, -1).T.tolist(), strict=True)):
            if any(pair) and at < len(shape) - self.last:
                yield f"dimension {at} is padded; only the last {self.last} are"
            if self.below_dim and dim is not None and max(pair) >= dim:
                yield f"dimension {at} of size {dim} is padded by {max(pair)}"


class PadOnGrid(BaseRule, frozen=True, kw_only=True, tag="pad_on_grid"):
    """The value of a quantized Pad must lie in the range of its input's integers, with one of which it pads."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        data, array, node = subject.unit.inputs[0], subject.array(2), subject.unit.node
        grid = read_parameters(subject.graph, data) if data.is_quantized and data.dtype in LIMITED else None
        if array is None or array.size != 1 or grid is None or node.attributes.get("mode", "constant") != "constant":
            return
        own = read_parameters(subject.graph, subject.unit.inputs[2]) or (np.ones(1), np.zeros(1))
        value = (float(array.item()) - float(own[1].item())) * float(own[0].item())
        scale, zero = (float(part.reshape(-1)[0]) for part in grid)
        limits = np.iinfo(str(data.dtype))
        low, high = (limits.min - zero) * scale, (limits.max - zero) * scale
        if not low - scale / 2 <= value <= high + scale / 2:
            yield f"it pads with {value:.4g}, and its input has {low:.4g} to {high:.4g}"


class CentredPads(BaseRule, frozen=True, kw_only=True, tag="centred_pads"):
    """Pads of an average that do not count: at the ends only, or around windows that lie centred on each element."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        node, shape = subject.unit.node, subject.graph.static_shape(subject.unit.node.input[0])
        if shape is None or node.integer("count_include_pad", 0) or not has_windows(node, len(shape) - 2):
            return
        windows = place_windows(node, shape[2:], node.entries("kernel_shape") or ())
        stride, _, begin, end, sizes = windows
        centred = begin.all() and (begin == end).all() and (stride == 1).all() and sizes == shape[2:]
        if begin.any() and not centred:
            yield f"its pads {[*begin.tolist(), *end.tolist()]} do not count, and its windows are not centred"


class ResizeScales(BaseRule, frozen=True, kw_only=True, tag="resize_scales"):
    """Resize: only the last `spatial` axes may change, and the other fields limit how far.

    A scale below 1 must be one over a divisor of the axis (`divisor`), and one above 1 a whole number (`whole`); if one
    is below 1, all must be (not `mixed`), or none may be (not `shrinks`). Scales must be the quotients of the sizes
    (`exact`), the last axis must not change alone (`not_alone`), and each axis must have at least `least` elements
    afterwards.
    """

    spatial: int = 2
    least: int = 0
    divisor: bool = False
    whole: bool = False
    mixed: bool = True
    shrinks: bool = True
    exact: bool = False
    not_alone: bool = False

    def _reasons(self, subject: Subject) -> Iterator[str]:
        shape, factors = subject.shape(0), _find_factors(subject)
        # An open batch is not scaled.
        if shape is None or None in shape[-self.spatial :]:
            yield "the shape of input 0 is not fully known"
            return
        if factors is None:
            yield "neither scales nor sizes is a constant with one entry a dimension"
            return
        outer = len(shape) - self.spatial
        made = subject.unit.outputs[0].shape
        if self.exact and not (
            made is not None
            and all(
                abs(factor * (old or 1) - (new or 1)) < _WHOLE_TOLERANCE
                for factor, old, new in zip(factors, shape, made, strict=True)
            )
        ):
            yield f"its scales {factors} are not the quotients of the sizes"
        for axis, factor in enumerate(factors[:outer]):
            if factor != 1:
                yield f"axis {axis} is scaled by {factor:g}; only the last {self.spatial} axes may change"
        # NNAPI's second pass looks at NHWC shapes, except for the width, which it reads where the height now is
        # (targets/nnapi/NOTES.md; deduced, not run).
        if self.not_alone and factors[-1] != 1 and all(factor == 1 for factor in factors[outer:-1]):
            yield "only the last axis changes"
        changed = factors[outer:]
        if not self.mixed and min(changed, default=1) < 1 <= max(changed, default=1):
            yield "one axis shrinks and the other does not"
        if not self.shrinks and min(changed, default=1) < 1:
            yield "an axis shrinks"
        for factor, dim in zip(changed, shape[outer:], strict=True):
            if factor * (dim or 0) < self.least - _WHOLE_TOLERANCE:
                yield f"an axis of {dim} elements is left with fewer than {self.least}"
            if 0 < factor < 1 and self.divisor and subject.array(3) is None:
                step = 1 / factor
                if abs(step - round(step)) > _WHOLE_TOLERANCE or (dim or 0) % round(step):
                    yield f"scale {factor:g} is not one over a divisor of {dim}"
            if factor >= 1 and self.whole and abs(factor - round(factor)) > _WHOLE_TOLERANCE:
                yield f"scale {factor:g} is not a whole number"


class NearestKernel(BaseRule, frozen=True, kw_only=True, tag="nearest_kernel"):
    """A nearest Resize must pick the elements that the provider's kernel picks: the modes of this are in `kernels`.

    `kernels` has them by the coordinate mode of the Resize; one with another mode passes.
    """

    kernels: dict[str, Modes]

    def _reasons(self, subject: Subject) -> Iterator[str]:
        graph, node = subject.graph, subject.unit.node
        modes = read_modes(node)
        kernel = self.kernels.get(modes[0])
        picks = [kernel and find_picks(graph, node, each) for each in (modes, kernel or modes)]
        for axis, (wanted, made) in enumerate(zip(*(each or () for each in picks), strict=True)):
            if not np.array_equal(wanted, made):
                yield f"along axis {axis} it picks other elements than {' and '.join(modes)} say"


class Covered(BaseRule, frozen=True, kw_only=True, tag="covered"):
    """The kernel of a ConvTranspose must reach each element of the output: of the others its bias is all.

    With `whole_strides` the kernel is thought to be as long as the next multiple of its stride.
    """

    whole_strides: bool = False

    def _reasons(self, subject: Subject) -> Iterator[str]:
        node = subject.unit.node
        data, weight, made = (subject.graph.value(name).static_shape for name in (*node.input[:2], node.output[0]))
        if data is None or weight is None or made is None:
            return
        ones = (1,) * (len(weight) - 2)
        strides, dilations = (node.entries(name) or ones for name in ("strides", "dilations"))
        # Pads are computed where an output_shape is given.
        begins = (None if "output_shape" in node.attributes else node.entries("pads")) or (0,) * len(ones)
        rest: list[int] = []
        for axis, (stride, dilation, start) in enumerate(zip(strides, dilations, begins, strict=False), 2):
            reach = (weight[axis] - 1) * dilation + 1
            reach += -reach % stride if self.whole_strides else 0
            rest.append(max(made[axis] + start - (data[axis] - 1) * stride - reach, 0))
        if any(rest):
            yield f"it makes elements that its kernel does not reach, {rest} at the end of its axes"


class PaddedDepthwise(BaseRule, frozen=True, kw_only=True, tag="padded_depthwise"):
    """A depthwise ConvTranspose must have no output_padding."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        node, weight = subject.unit.node, subject.shape(1)
        added, group = node.entries("output_padding") or (), node.integer("group", 1)
        if any(added) and group > 1 and weight is not None and weight[:2] == (group, 1):
            yield f"output_padding {list(added)} of a depthwise layer"


def _find_factors(subject: Subject) -> list[float] | None:
    """Returns the factor by which a Resize scales each axis, or None if neither scales nor sizes are known."""
    # Resize 10 has X and scales; from 11 on they are X, roi, scales, sizes.
    shape, scales = subject.shape(0) or (), subject.array(1 if subject.unit.node.since < 11 else 2)
    sizes, made = subject.array(3), subject.unit.outputs[0].shape
    if scales is not None and scales.size == len(shape):
        return [float(factor) for factor in scales.reshape(-1)]
    if sizes is not None and sizes.size == len(shape):
        made = tuple(int(size) for size in sizes.reshape(-1))
    if made is None or len(made) != len(shape):
        return None
    return [(after or 1) / (before or 1) for after, before in zip(made, shape, strict=True)]


class LeftTransposed(BaseRule, frozen=True, kw_only=True, tag="left_transposed"):
    """The provider takes no node whose output is one of the graph, of these types, and gets a Transpose for NHWC.

    Quantized outputs are excepted.
    """

    dtypes: tuple[str, ...]

    def _reasons(self, subject: Subject) -> Iterator[str]:
        graph = subject.graph
        found = [
            (what, operand)
            for what, operand in subject.operands((), "outputs")
            if operand.name in graph.outputs and operand.dtype in self.dtypes and not operand.is_quantized
        ]
        orders = find_orders(graph) if found else {}
        for what, operand in found:
            if operand.name in orders:
                yield f"{what} is {operand.dtype}: the change to NHWC leaves a Transpose of it where the graph ends"


class LastInNhwc(BaseRule, frozen=True, kw_only=True, tag="last_in_nhwc"):
    """The axis must be the last one also where the change to NHWC stores the input with its axes permuted.

    `layers` are the operators that the provider takes and wants with channels last.
    """

    default: int
    layers: tuple[str, ...]

    def _reasons(self, subject: Subject) -> Iterator[str]:
        node, shape = subject.unit.node, subject.shape(0)
        order = find_orders(subject.graph, self.layers).get(node.input[0]) if shape and len(shape) > 2 else None
        if order is not None and shape is not None:
            axis = node.integer("axis", self.default) % len(shape)
            if order[axis] != len(shape) - 1:
                yield f"the change to NHWC behind a layer makes its axis {axis} axis {order[axis]}"
