"""The kinds of rule that concern types, ranks, constants and attributes; each returns a reason to refuse, or None."""

from collections.abc import Iterable
from typing import cast

from edgekit.check.rules import kinds
from edgekit.check.rules.chains import is_in_chain
from edgekit.check.rules.subject import Subject, choose_operands
from edgekit.graph.graph import Shape

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
