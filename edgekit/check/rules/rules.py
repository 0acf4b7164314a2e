"""What each kind of rule means: one function a kind, which returns a reason to refuse, or None.

Reasons are whole sentences with the offending value. A new kind is a struct in `kinds.py`, a function, and a line in
`JUDGES`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from edgekit.check.rules import kinds, operand_rules, quant_rules, shape_rules
from edgekit.check.rules.subject import Subject
from edgekit.check.rules.units import Unit


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
    kinds.Never: operand_rules.judge_never,
    kinds.Forms: operand_rules.judge_forms,
    kinds.Dtype: operand_rules.judge_dtype,
    kinds.SameDtype: operand_rules.judge_same_dtype,
    kinds.Rank: operand_rules.judge_rank,
    kinds.Static: operand_rules.judge_static,
    kinds.KnownShape: operand_rules.judge_known_shape,
    kinds.NonZero: operand_rules.judge_nonzero,
    kinds.DimLimit: operand_rules.judge_dim_limit,
    kinds.Constant: operand_rules.judge_constant,
    kinds.Computed: operand_rules.judge_computed,
    kinds.Inline: operand_rules.judge_inline,
    kinds.Count: operand_rules.judge_count,
    kinds.Values: operand_rules.judge_values,
    kinds.Attribute: operand_rules.judge_attribute,
    kinds.Length: operand_rules.judge_length,
    kinds.EqualEntries: operand_rules.judge_equal_entries,
    kinds.Mirrored: operand_rules.judge_mirrored,
    kinds.Setting: operand_rules.judge_setting,
    kinds.GraphEdge: operand_rules.judge_graph_edge,
    kinds.Between: operand_rules.judge_between,
    kinds.Readers: operand_rules.judge_readers,
    kinds.Internal: quant_rules.judge_internal,
    kinds.Traced: quant_rules.judge_traced,
    kinds.Quantized: quant_rules.judge_quantized,
    kinds.SameQuantization: quant_rules.judge_same_quantization,
    kinds.FiniteScale: quant_rules.judge_finite_scale,
    kinds.QuantizedOutput: quant_rules.judge_quantized_output,
    kinds.Bounds: shape_rules.judge_bounds,
    kinds.GemmBias: shape_rules.judge_gemm_bias,
    kinds.MatMulRanks: shape_rules.judge_matmul_ranks,
    kinds.ReshapeTarget: shape_rules.judge_reshape_target,
    kinds.SplitSizes: shape_rules.judge_split_sizes,
    kinds.ResizeScales: shape_rules.judge_resize_scales,
    kinds.SlopeShape: shape_rules.judge_slope_shape,
    kinds.ConvKernel: shape_rules.judge_conv_kernel,
    kinds.GroupedDilation: shape_rules.judge_grouped_dilation,
    kinds.PadReach: shape_rules.judge_pad_reach,
    kinds.AxisLast: shape_rules.judge_axis_last,
}
"""The meaning of each kind of rule."""
