"""The kinds of rule that concern one operator's shapes; each returns a reason to refuse, or None."""

from edgekit.check.rules import kinds
from edgekit.check.rules.subject import Subject
from edgekit.check.rules.units import clip_bounds
from edgekit.graph.graph import Shape
from edgekit.model.tensors import Array

# Scales are float32, and quotients such as 2/3 are rounded in it.
_WHOLE_TOLERANCE = 1e-4


def judge_bounds(rule: kinds.Bounds, subject: Subject) -> str | None:
    """Clip: its bounds."""
    names = tuple(operand.name for operand in subject.unit.inputs)
    found = clip_bounds(subject.graph, names, subject.unit.node.attributes)
    if found is None:
        return "its bounds are computed; they must be constants"
    if rule.allowed and found not in rule.allowed:
        pairs = " or ".join(f"{low:g} to {high:g}" for low, high in rule.allowed)
        return f"it clips to {found[0]:g} to {found[1]:g}; only {pairs} is taken"
    return f"both bounds are {found[0]:g}" if rule.refuse_equal and found[0] == found[1] else None


def judge_axis_last(rule: kinds.AxisLast, subject: Subject) -> str | None:
    """The last axis."""
    axis, shape = subject.unit.node.integer("axis", rule.default), subject.shape(0)
    if shape is None:
        return "the rank of input 0 is unknown"
    return f"axis {axis} is not the last of {len(shape)}" if axis not in {-1, len(shape) - 1} else None


def judge_gemm_bias(rule: kinds.GemmBias, subject: Subject) -> str | None:
    """Gemm's C: which of its shapes are taken, N being the columns of B."""
    bias, weight = subject.shape(2), subject.shape(1)
    if not subject.unit.has_input(2):
        return None
    if bias is None or weight is None or len(weight) != 2:
        return "the shape of input 2 is unknown"
    columns = weight[0] if subject.unit.node.integer("transB", 0) else weight[1]
    kinds = {
        "scalar": bias == (),
        "one": bias == (1,),
        "row": bias in {(columns,), (1, columns)},
        "column": len(bias) == 2 and bias[1] == 1,
        "matrix": len(bias) == 2,
        "first": bool(bias) and bias[0] in weight,
    }
    return (
        None
        if any(kinds[shape] for shape in rule.shapes)
        else f"input 2 has shape {list(bias)}, which is not taken as a bias"
    )


def judge_matmul_ranks(rule: kinds.MatMulRanks, subject: Subject) -> str | None:
    """MatMul: two matrices, or two stacks of matrices with equal leading dimensions."""
    one, other = subject.shape(0), subject.shape(1)
    if one is None or other is None:
        return "the rank of an input is unknown"
    if len(one) == len(other) == 2:
        return None
    if rule.batched and len(one) == len(other) > 2:
        return None if one[:-2] == other[:-2] else f"leading dimensions {list(one[:-2])} and {list(other[:-2])} differ"
    return f"ranks {len(one)} and {len(other)} are not both 2" + (", nor equal and above 2" if rule.batched else "")


def judge_reshape_target(_rule: kinds.ReshapeTarget, subject: Subject) -> str | None:
    """Reshape: what a 0 in the shape means."""
    shape, target = subject.shape(0), subject.array(1)
    if target is None or 0 not in target.reshape(-1).tolist():
        return None
    if subject.unit.node.integer("allowzero", 0):
        return "the shape holds a 0 and allowzero is 1"
    entries = target.reshape(-1).tolist()
    if shape is not None and any(entry == 0 and at < len(shape) and shape[at] == 0 for at, entry in enumerate(entries)):
        return "a 0 in the shape stands for a dimension of 0"
    return None


def judge_split_sizes(rule: kinds.SplitSizes, subject: Subject) -> str | None:
    """Split: the parts along the axis."""
    node, shape = subject.unit.node, subject.shape(0)
    if shape is None:
        return "the rank of input 0 is unknown"
    axis = node.integer("axis", 0)
    size = shape[axis] if -len(shape) <= axis < len(shape) else None
    if size is None:
        return f"the size of axis {axis} is dynamic"
    given = subject.array(1)
    sizes = given.reshape(-1).tolist() if given is not None else list(node.entries("split") or ())
    parts = len(sizes) or len(node.output)
    if parts < rule.min_parts:
        return f"it has {parts} part; at least {rule.min_parts} are needed"
    if sizes and sum(sizes) != size:
        return f"the sizes {sizes} do not add up to {size}"
    if rule.equal and sizes and len(set(sizes)) > 1:
        return f"the sizes {sizes} differ; they must be equal"
    # Without sizes the last part may be smaller, since opset 18.
    uneven = rule.equal and not sizes and size % parts
    return f"axis {axis} of size {size} does not divide into {parts} parts" if uneven else None


def judge_slope_shape(_rule: kinds.SlopeShape, subject: Subject) -> str | None:
    """PRelu: a slope per channel or one slope."""
    slope, data = subject.shape(1), subject.shape(0)
    if slope is None or data is None:
        return "the shape of an input is unknown"
    if all(dim == 1 for dim in slope):
        return "one slope for one channel is not taken" if len(data) >= 3 and data[-3] == 1 else None
    return (
        None if len(slope) == 3 and slope[1:] == (1, 1) else f"the slope has shape {list(slope)}; it must be [C, 1, 1]"
    )


def judge_conv_kernel(_rule: kinds.ConvKernel, subject: Subject) -> str | None:
    """Conv: kernel_shape agrees with the weight."""
    given, weight = subject.unit.node.entries("kernel_shape"), subject.shape(1)
    if given is None or weight is None or tuple(given) == tuple(weight[2:]):
        return None
    return f"kernel_shape {list(given)} is not the weight's {list(weight[2:])}"


def judge_grouped_dilation(_rule: kinds.GroupedDilation, subject: Subject) -> str | None:
    """Conv: groups, other than depthwise, with a dilation."""
    dilations, weight = subject.unit.node.entries("dilations") or (), subject.shape(1)
    # Depthwise where each group reads one channel: the weight's second axis is 1.
    grouped = subject.unit.node.integer("group", 1) != 1 and weight is not None and weight[1:2] != (1,)
    if grouped and any(step != 1 for step in dilations):
        return f"dilations {list(dilations)} of a grouped convolution"
    return None


def judge_pad_reach(rule: kinds.PadReach, subject: Subject) -> str | None:
    """Pad: which dimensions are padded and how far."""
    shape, pads = subject.shape(0), subject.array(1)
    # With input 3, axes, the pads are not in the order of the dimensions (Pad 18).
    if shape is None or pads is None or subject.unit.has_input(3) or pads.size != 2 * len(shape):
        return None
    entries = [int(entry) for entry in pads.reshape(-1)]
    for at, dim in enumerate(shape):
        before, after = entries[at], entries[at + len(shape)]
        if (before or after) and at < len(shape) - rule.last:
            return f"dimension {at} is padded; only the last {rule.last} are"
        if rule.below_dim and dim is not None and max(before, after) >= dim:
            return f"dimension {at} of size {dim} is padded by {max(before, after)}"
    return None


def judge_resize_scales(rule: kinds.ResizeScales, subject: Subject) -> str | None:
    """Resize: how far each axis is scaled."""
    shape = subject.shape(0)
    if shape is None or None in shape:
        return "the shape of input 0 is not fully known"
    factors = _find_factors(subject, shape)
    if factors is None:
        return "neither scales nor sizes is a constant with one entry a dimension"
    outer = len(shape) - rule.spatial
    if rule.exact and not _is_exact(factors, shape, subject.unit.outputs[0].shape):
        return f"its scales {factors} are not the quotients of the sizes"
    changed = [axis for axis, factor in enumerate(factors[:outer]) if factor != 1]
    if changed:
        return f"axis {changed[0]} is scaled by {factors[changed[0]]:g}; only the last {rule.spatial} axes may change"
    # NNAPI's second pass looks at NHWC shapes, but for the width where the height now is (targets/nnapi/NOTES.md;
    # deduced, not run).
    if rule.not_alone and factors[-1] != 1 and all(factor == 1 for factor in factors[outer:-1]):
        return "only the last axis changes"
    return _judge_factors(rule, factors[outer:], shape[outer:], subject.array(3))


def _is_exact(factors: list[float], before: Shape, after: Shape | None) -> bool:
    return after is not None and all(
        abs(factor * (old or 1) - (new or 1)) < _WHOLE_TOLERANCE
        for factor, old, new in zip(factors, before, after, strict=True)
    )


def _find_factors(subject: Subject, shape: Shape) -> list[float] | None:
    # Resize 10 has X and scales; from 11 on they are X, roi, scales, sizes.
    scales, sizes = subject.array(1 if subject.unit.node.since < 11 else 2), subject.array(3)
    made = subject.unit.outputs[0].shape
    if scales is not None and scales.size == len(shape):
        return [float(factor) for factor in scales.reshape(-1)]
    if sizes is not None and sizes.size == len(shape):
        made = tuple(int(size) for size in sizes.reshape(-1))
    if made is None or len(made) != len(shape):
        return None
    return [(after or 1) / (before or 1) for after, before in zip(made, shape, strict=True)]


def _judge_factors(rule: kinds.ResizeScales, factors: list[float], dims: Shape, sizes: Array | None) -> str | None:
    if not rule.mixed and min(factors, default=1) < 1 < max(factors, default=1):
        return "one axis grows and the other shrinks"
    for factor, dim in zip(factors, dims, strict=True):
        if factor * (dim or 0) < rule.least - _WHOLE_TOLERANCE:
            return f"an axis of {dim} elements is left with fewer than {rule.least}"
        if 0 < factor < 1 and rule.divisor and sizes is None:
            step = 1 / factor
            if abs(step - round(step)) > _WHOLE_TOLERANCE or (dim or 0) % round(step):
                return f"scale {factor:g} is not one over a divisor of {dim}"
        if factor >= 1 and rule.whole and abs(factor - round(factor)) > _WHOLE_TOLERANCE:
            return f"scale {factor:g} is not a whole number"
    return None
