"""What each kind of rule means: one function a kind, which returns a reason to refuse a node, or nothing.

The kinds themselves, as `targets/<name>/rules.toml` spells them, stand in `kinds.py`; `JUDGES` maps each to its
function.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import msgspec
import numpy as np

from edgekit.check.rules import kinds
from edgekit.check.rules.units import Operand, Unit, clip_bounds, read_parameters
from edgekit.graph.graph import Graph, Node, Shape
from edgekit.model.tensors import Array


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A unit in its graph, judged for a target with these settings."""

    graph: Graph
    unit: Unit
    settings: dict[str, str]

    def number(self, name: str) -> int:
        """Returns a parameter as a number; 0 if it is none."""
        text = self.settings.get(name, "")
        return int(text) if text.isdecimal() else 0

    def array(self, position: int) -> Array | None:
        """Returns the value of an input that is a small constant, else None."""
        return self.graph.array(self.unit.inputs[position].name) if self.unit.has_input(position) else None

    def shape(self, position: int) -> Shape | None:
        """Returns the shape of an input, None if it is absent or its rank unknown."""
        return self.unit.inputs[position].shape if self.unit.has_input(position) else None


def choose_operands(
    unit: Unit, at: tuple[int, ...], of: Literal["inputs", "outputs"] = "inputs"
) -> Iterator[tuple[int, Operand]]:
    """Yields the inputs or outputs at these positions that are present; no position means all of them."""
    for position, operand in enumerate(unit.inputs if of == "inputs" else unit.outputs):
        if operand.name and (not at or position in at):
            yield position, operand


def is_in_chain(graph: Graph, node: Node, ops: tuple[str, ...]) -> bool:
    """Returns True if the node is in a chain of these operators, each read by the next alone; Q and DQ do not count."""
    for place, op in enumerate(ops):
        if op != node.op_type:
            continue
        before = [found.op_type for found in _walk(graph, node, _previous, place)]
        after = [found.op_type for found in _walk(graph, node, _next, len(ops) - place - 1)]
        if (*reversed(before), node.op_type, *after) == ops:
            return True
    return False


def _walk(graph: Graph, node: Node, step: Callable[[Graph, Node], Node | None], count: int) -> list[Node]:
    found: list[Node] = []
    at = step(graph, node)
    while at is not None and len(found) < count:
        if at.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
            found.append(at)
        at = step(graph, at)
    return found


def _previous(graph: Graph, node: Node) -> Node | None:
    return graph.producers.get(node.input[0])


def _next(graph: Graph, node: Node) -> Node | None:
    readers = graph.consumers.get(node.output[0], ())
    return readers[0] if len(readers) == 1 else None


_NO_FORM = "it is quantized ({dtype}) and there is no quantized form of it"


def judge_never(rule: kinds.Never, _subject: Subject) -> str | None:
    """What is refused whenever the condition holds."""
    return rule.text


def judge_forms(rule: kinds.Forms, subject: Subject) -> str | None:
    """The element type that the unit computes in."""
    form = subject.unit.form
    if form not in rule.refused and (not rule.allowed or form in rule.allowed):
        return None
    if form == "unknown":
        return "the element type of its input is unknown"
    dtype = form.removeprefix("qdq-")
    quantized = [name.removeprefix("qdq-") for name in rule.allowed if name.startswith("qdq-")]
    if form == dtype:
        plain = [name for name in rule.allowed if not name.startswith("qdq-")]
        return f"its input is {dtype}" + (f"; only {_list(plain)} is taken" if plain else ", which is not taken")
    if quantized or not rule.allowed:
        return f"activations are {dtype}" + (f"; quantized, only {_list(quantized)} is taken" if quantized else "")
    return _NO_FORM.format(dtype=dtype)


def judge_dtype(rule: kinds.Dtype, subject: Subject) -> str | None:
    """The element types of some inputs or outputs."""
    for at, operand in choose_operands(subject.unit, rule.at, rule.of):
        if operand.dtype not in rule.allowed:
            return f"{rule.of[:-1]} {at} is {operand.dtype or 'of unknown type'}; only {_list(rule.allowed)} is taken"
    return None


def judge_same_dtype(rule: kinds.SameDtype, subject: Subject) -> str | None:
    """Inputs of one element type."""
    found = sorted({str(operand.dtype) for _, operand in choose_operands(subject.unit, rule.at)})
    return f"its inputs have different types: {_list(found)}" if len(found) > 1 else None


def judge_rank(rule: kinds.Rank, subject: Subject) -> str | None:
    """How many dimensions some inputs or outputs have."""
    for at, operand in choose_operands(subject.unit, rule.at, rule.of):
        reason = _rank_reason(rule, f"{rule.of[:-1]} {at}", operand.shape)
        if reason:
            chained = rule.unless_chain and is_in_chain(subject.graph, subject.unit.node, rule.unless_chain)
            return None if chained else reason
    return None


def _rank_reason(rule: kinds.Rank, what: str, shape: Shape | None) -> str | None:
    if shape is None:
        return f"the rank of {what} is unknown"
    rank = len(shape)
    if rule.allowed and rank not in rule.allowed:
        return f"rank {rank} of {what} is not {' or '.join(map(str, rule.allowed))}"
    if rank > rule.max:
        return f"rank {rank} of {what} is above {rule.max}"
    return f"rank {rank} of {what} is below {rule.min}" if rank < rule.min else None


def judge_static(rule: kinds.Static, subject: Subject) -> str | None:
    """Known dimensions."""
    for at, operand in choose_operands(subject.unit, rule.at, rule.of):
        if operand.shape is None:
            return f"the shape of {rule.of[:-1]} {at} is unknown"
        rank = len(operand.shape)
        for dim in rule.dims or range(rank):
            if -rank <= dim < rank and operand.shape[dim] is None:
                return f"dimension {dim % rank} of {rule.of[:-1]} {at} is dynamic"
    return None


def judge_known_shape(rule: kinds.KnownShape, subject: Subject) -> str | None:
    """A known number of dimensions."""
    for at, operand in choose_operands(subject.unit, rule.at):
        if operand.shape is None:
            return f"the shape of input {at} is unknown"
    return None


def judge_nonzero(rule: kinds.NonZero, subject: Subject) -> str | None:
    """No empty tensors."""
    for at, operand in choose_operands(subject.unit, rule.at, rule.of):
        if operand.shape is not None and 0 in operand.shape:
            return f"{rule.of[:-1]} {at} has a dimension of 0"
    return None


def judge_dim_limit(rule: kinds.DimLimit, subject: Subject) -> str | None:
    """The largest dimension."""
    operands = [(f"input {at}", operand) for at, operand in choose_operands(subject.unit, rule.at)]
    if rule.outputs:
        operands += [(f"output {at}", operand) for at, operand in choose_operands(subject.unit, (), "outputs")]
    for what, operand in operands:
        largest = max((dim or 0 for dim in operand.shape or ()), default=0)
        if largest > rule.max:
            return f"a dimension of {what} is {largest}, above {rule.max}"
    return None


def judge_constant(rule: kinds.Constant, subject: Subject) -> str | None:
    """Inputs that must be constants."""
    unit, graph = subject.unit, subject.graph
    for at in rule.at:
        if not unit.has_input(at):
            if rule.required:
                return f"input {at} is missing"
            continue
        name = unit.inputs[at].name
        made_by = graph.producers.get(name)
        # QNN looks through the DQ of a quantized constant.
        if rule.through_dq and made_by is not None and made_by.op_type == "DequantizeLinear":
            name = made_by.input[0]
        # A session folds the Cast of a constant before it asks the provider.
        if rule.through_cast and made_by is not None and made_by.op_type == "Cast":
            name = made_by.input[0]
        if name not in graph.constants:
            return f"input {at} is computed; it must be a constant"
    return None


def judge_computed(rule: kinds.Computed, subject: Subject) -> str | None:
    """Inputs that must not be constants."""
    for at, operand in choose_operands(subject.unit, rule.at):
        if operand.name in subject.graph.constants:
            return f"input {at} is a constant; it must be computed"
    return None


# NNAPI refuses what has an initializer in an external file.
def judge_inline(_rule: kinds.Inline, subject: Subject) -> str | None:
    """No constants in other files."""
    for operand in (*subject.unit.inputs, *subject.unit.outputs):
        for name in (operand.name, operand.scale, operand.zero_point):
            if name and subject.graph.is_external(name):
                return f"constant '{name}' lies in an external file"
    return None


def judge_count(rule: kinds.Count, subject: Subject) -> str | None:
    """How many inputs or outputs there are."""
    found = len(list(choose_operands(subject.unit, (), rule.of)))
    if found > rule.max:
        return f"it has {found} {rule.of}; at most {rule.max} can be taken"
    return f"it has {found} {rule.of}; at least {rule.min} are needed" if found < rule.min else None


def judge_values(rule: kinds.Values, subject: Subject) -> str | None:
    """What a constant input holds."""
    array = subject.array(rule.at)
    if array is None:
        return None
    if not rule.min_length <= array.size <= rule.max_length:
        return f"input {rule.at} has {array.size} entries; {rule.min_length} to {rule.max_length} are taken"
    for entry in array.reshape(-1).tolist():
        if not rule.min <= entry <= rule.max:
            return f"input {rule.at} holds {entry}, outside {rule.min:g} to {rule.max:g}"
    return None


def judge_attribute(rule: kinds.Attribute, subject: Subject) -> str | None:
    """The value of an attribute."""
    value = subject.unit.node.attributes.get(rule.name, rule.default)
    if rule.absent:
        return None if value is None else f"attribute '{rule.name}' is not taken"
    if value is None or (value not in rule.refused and (not rule.allowed or value in rule.allowed)):
        return None
    wanted = f"; it must be {' or '.join(map(_show, rule.allowed))}" if rule.allowed else ", which is not taken"
    return f"attribute '{rule.name}' is {_show(value)}{wanted}"


def judge_length(rule: kinds.Length, subject: Subject) -> str | None:
    """The length of a list attribute."""
    value = subject.unit.node.entries(rule.name)
    found = rule.default if value is None else len(value)
    return f"attribute '{rule.name}' has {found} entries; it must have {rule.equals}" if found != rule.equals else None


def judge_equal_entries(rule: kinds.EqualEntries, subject: Subject) -> str | None:
    """A list attribute of equal entries."""
    value = subject.unit.node.entries(rule.name)
    if value is None:
        return f"attribute '{rule.name}' is missing" if rule.required else None
    wanted = set(value[:1]) if rule.value is None else {rule.value}
    return f"attribute '{rule.name}' is {_show(value)}; its entries must be equal" if set(value) - wanted else None


def judge_mirrored(rule: kinds.Mirrored, subject: Subject) -> str | None:
    """A list attribute of two equal halves."""
    value = subject.unit.node.entries(rule.name) or ()
    half = len(value) // 2
    return (
        f"attribute '{rule.name}' is {_show(value)}; its halves must be equal" if value[:half] != value[half:] else None
    )


def judge_setting(rule: kinds.Setting, subject: Subject) -> str | None:
    """A parameter of the target."""
    found = subject.settings.get(rule.name, "")
    if rule.allowed:
        return None if found in rule.allowed else f"it needs {rule.name} {' or '.join(rule.allowed)}, not {found}"
    return f"it needs {rule.name} {rule.min} or newer, not {found}" if subject.number(rule.name) < rule.min else None


# What QNN does with `offload_graph_io_quantization`, which it has on unless told otherwise (targets/qnn/NOTES.md).
def judge_graph_edge(_rule: kinds.GraphEdge, subject: Subject) -> str | None:
    """Quantization at the edge of the graph."""
    graph, node = subject.graph, subject.unit.node
    if node.op_type == "QuantizeLinear" and node.input[0] not in graph.producers:
        return "it quantizes a graph input, which the provider leaves to the CPU"
    if node.op_type == "DequantizeLinear" and node.output[0] in graph.outputs:
        return "it makes a graph output, which the provider leaves to the CPU"
    return None


def judge_between(rule: kinds.Between, subject: Subject) -> str | None:
    """Operators that only a fusion takes."""
    graph, node = subject.graph, subject.unit.node
    before = {graph.producers[name].op_type for name in node.input if name in graph.producers}
    after = {reader.op_type for name in node.output for reader in graph.consumers.get(name, ())}
    # Without the pattern around it there is no builder for the operator: Core ML's Cast after ArgMax, QNN's Erf inside
    # Gelu.
    if (rule.producers and not before & set(rule.producers)) or (rule.consumers and not after & set(rule.consumers)):
        return f"{node.op_type} is taken only as part of {rule.pattern}"
    return None


# Core ML fuses ArgMax with the Cast behind it, which is not possible if others read the indices (argmax_op_builder.cc).
def judge_readers(rule: kinds.Readers, subject: Subject) -> str | None:
    """A result that others read beside a certain node."""
    graph = subject.graph
    readers = [reader for name in subject.unit.node.output for reader in graph.consumers.get(name, ())]
    for reader in readers if len(readers) > 1 else ():
        if reader.op_type == rule.op and all(reader.attributes.get(name) == it for name, it in rule.attribute.items()):
            return f"{rule.op} '{reader.name}' reads its result, and so do others"
    return None


def _show(value: object) -> str:
    return f"[{_list(cast('tuple[object, ...]', value))}]" if isinstance(value, tuple) else str(value)


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def judge_internal(rule: kinds.Internal, subject: Subject) -> str | None:
    """Integer inputs whose quantization only the node that made them can tell."""
    for at, operand in choose_operands(subject.unit, rule.at):
        made_by = subject.graph.producers.get(operand.name)
        if made_by is None or made_by.op_type == "QuantizeLinear":
            return f"input {at} is {operand.dtype}, and its quantization is not known inside the partition"
    return None


def judge_traced(rule: kinds.Traced, subject: Subject) -> str | None:
    """Quantized inputs whose quantization is known."""
    graph = subject.graph
    for at, operand in choose_operands(subject.unit, rule.at):
        made_by = graph.producers.get(operand.name) if operand.is_quantized else None
        if made_by is None or made_by.op_type in {"QuantizeLinear", *rule.through}:
            continue
        # In QNN an integer Reshape between Q and DQ loses the quantization: observed on three TFLite conversions
        # (targets/qnn/NOTES.md).
        if graph.value(made_by.input[0]).shape != operand.shape:
            return f"input {at} comes from {made_by.op_type} on plain integers, which loses its quantization"
    return None


def judge_quantized(rule: kinds.Quantized, subject: Subject) -> str | None:
    """The parameters of quantized inputs or outputs."""
    for at, operand in choose_operands(subject.unit, rule.at, rule.of):
        if operand.is_quantized:
            what = f"{rule.of[:-1]} {at}"
            reason = _spread_reason(rule, what, operand, subject.graph) or _value_reason(
                rule, what, operand, subject.graph
            )
            if reason:
                return reason
    return None


def _spread_reason(rule: kinds.Quantized, what: str, operand: Operand, graph: Graph) -> str | None:
    names = [name for name in (operand.scale, operand.zero_point) if name]
    if any(name not in graph.constants for name in names):
        return f"the scale or zero point of {what} is computed; it must be a constant"
    if rule.scalar and any(graph.value(name).shape != () for name in names):
        return f"the scale or zero point of {what} is a list; it must be a scalar"
    # Counted by shape: large constants are without their data here.
    scales = graph.value(names[0]).elements
    if scales == 1:
        return None
    if not rule.per_channel:
        return f"{what} is quantized per channel ({scales} scales); only per tensor is taken"
    if rule.axis is not None and operand.shape is not None and scales != operand.shape[rule.axis]:
        size = operand.shape[rule.axis]
        return f"{what} has {scales} scales; per channel they go along axis {rule.axis}, of size {size}"
    return None


def _value_reason(rule: kinds.Quantized, what: str, operand: Operand, graph: Graph) -> str | None:
    parameters = read_parameters(graph, operand)
    if parameters is None:
        return None
    scale, zero = (part.reshape(-1).tolist() for part in parameters)
    if rule.zero_point is not None and set(zero) - {rule.zero_point}:
        return f"the zero point of {what} is {zero[0]}; it must be {rule.zero_point}"
    if rule.scale is not None and any(abs(entry - rule.scale) > rule.tolerance for entry in scale):
        return f"the scale of {what} is {scale[0]:.6g}; it must be {rule.scale:g}"
    return None


def judge_same_quantization(_rule: kinds.SameQuantization, subject: Subject) -> str | None:
    """Equal parameters on both sides."""
    operands = [operand for operand in (*subject.unit.inputs, *subject.unit.outputs[:1]) if operand.is_quantized]
    found = {
        tuple(float(part.reshape(-1)[0]) for part in parameters)
        for operand in operands
        if (parameters := read_parameters(subject.graph, operand)) is not None
    }
    return "inputs and output have different scales or zero points; they must be equal" if len(found) > 1 else None


# QNN accepts an infinite scale and then fails to compose its graph (targets/qnn/NOTES.md, found on the simulator).
def judge_finite_scale(_rule: kinds.FiniteScale, subject: Subject) -> str | None:
    """Scales that no quantizer should write."""
    unit = subject.unit
    names = [operand.scale for operand in (*unit.inputs, *unit.outputs) if operand.scale]
    names += list(unit.node.input[1:2]) if unit.node.op_type in {"QuantizeLinear", "DequantizeLinear"} else []
    for name in names:
        scale = subject.graph.array(name)
        if scale is not None and not np.isfinite(scale).all():
            return f"the scale '{name}' is {float(scale.reshape(-1)[0]):g}, no finite number"
    return None


def judge_quantized_output(_rule: kinds.QuantizedOutput, subject: Subject) -> str | None:
    """A quantized unit whose result stays float."""
    return None if subject.unit.outputs[0].is_quantized else "its inputs are quantized but its output is not"


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


def judge_rule(rule: kinds.Rule, subject: Subject) -> str | None:
    """Returns why the rule refuses the unit, or None if it does not, or if its condition does not hold."""
    if not meets(rule.when, subject):
        return None
    reason = JUDGES[type(rule)](rule, subject)
    return f"{reason} ({rule.note})" if reason and rule.note else reason


def meets(when: kinds.When, subject: Subject) -> bool:
    """Returns True if every field of the condition holds for the unit."""
    return _node_fits(when, subject.unit) and _settings_fit(when, subject) and _operands_fit(when, subject)


def _node_fits(when: kinds.When, unit: Unit) -> bool:
    node = unit.node
    return (
        node.op_type not in when.except_ops
        and (not when.ops or node.op_type in when.ops)
        and when.since_min <= node.since <= when.since_max
        and (not when.forms or unit.form in when.forms)
        and all(node.attributes.get(name) in allowed for name, allowed in when.attribute.items())
        and not any(name in node.attributes for name in when.attribute_absent)
    )


def _settings_fit(when: kinds.When, subject: Subject) -> bool:
    return (
        all(subject.settings.get(name) in allowed for name, allowed in when.settings.items())
        and all(subject.number(name) < limit for name, limit in when.below.items())
        and all(subject.number(name) >= limit for name, limit in when.at_least.items())
    )


def _operands_fit(when: kinds.When, subject: Subject) -> bool:
    unit = subject.unit
    quantized = any(operand.is_quantized for operand in unit.inputs)
    return (
        when.quantized in {None, quantized}
        and len(unit.inputs) >= when.inputs_min
        and all(unit.has_input(at) for at in when.present)
        and not any(unit.has_input(at) for at in when.absent)
        and all(unit.dtype_of(int(at)) in dtypes for at, dtypes in when.dtypes.items())
        and all(unit.rank_of(int(at)) in ranks for at, ranks in when.ranks.items())
        # An unknown shape, and one of rank 0, is not known to be a single element here: (0,) never equals {1}.
        and all(unit.has_input(at) and set(unit.inputs[at].shape or (0,)) == {1} for at in when.single)
        and (not when.fed_by or _is_fed_by(when.fed_by, subject))
        and when.leaves in {None, any(operand.name in subject.graph.outputs for operand in unit.outputs)}
    )


def _is_fed_by(ops: tuple[str, ...], subject: Subject) -> bool:
    made = (subject.graph.producers.get(operand.name) for operand in subject.unit.inputs)
    return any(node is not None and node.op_type in ops for node in made)


JUDGES: Mapping[type, Callable[[Any, Subject], str | None]] = {
    kinds.Never: judge_never,
    kinds.Forms: judge_forms,
    kinds.Dtype: judge_dtype,
    kinds.SameDtype: judge_same_dtype,
    kinds.Rank: judge_rank,
    kinds.Static: judge_static,
    kinds.KnownShape: judge_known_shape,
    kinds.NonZero: judge_nonzero,
    kinds.DimLimit: judge_dim_limit,
    kinds.Constant: judge_constant,
    kinds.Computed: judge_computed,
    kinds.Inline: judge_inline,
    kinds.Count: judge_count,
    kinds.Values: judge_values,
    kinds.Attribute: judge_attribute,
    kinds.Length: judge_length,
    kinds.EqualEntries: judge_equal_entries,
    kinds.Mirrored: judge_mirrored,
    kinds.Setting: judge_setting,
    kinds.GraphEdge: judge_graph_edge,
    kinds.Between: judge_between,
    kinds.Readers: judge_readers,
    kinds.Internal: judge_internal,
    kinds.Traced: judge_traced,
    kinds.Quantized: judge_quantized,
    kinds.SameQuantization: judge_same_quantization,
    kinds.FiniteScale: judge_finite_scale,
    kinds.QuantizedOutput: judge_quantized_output,
    kinds.Bounds: judge_bounds,
    kinds.GemmBias: judge_gemm_bias,
    kinds.MatMulRanks: judge_matmul_ranks,
    kinds.ReshapeTarget: judge_reshape_target,
    kinds.SplitSizes: judge_split_sizes,
    kinds.ResizeScales: judge_resize_scales,
    kinds.SlopeShape: judge_slope_shape,
    kinds.ConvKernel: judge_conv_kernel,
    kinds.GroupedDilation: judge_grouped_dilation,
    kinds.PadReach: judge_pad_reach,
    kinds.AxisLast: judge_axis_last,
}
"""The meaning of each kind of rule."""
