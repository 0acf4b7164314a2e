"""The kinds of rule that concern scales and zero points; each returns a reason to refuse, or None."""

import numpy as np

from edgekit.check.rules import kinds
from edgekit.check.rules.subject import Subject, choose_operands
from edgekit.check.rules.units import Operand, read_parameters
from edgekit.graph.graph import Graph


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
