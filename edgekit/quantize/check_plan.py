"""Checks a plan from a file against the model and the target before it is applied: anyone may have edited it."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from edgekit.errors import UsageError, reading, reraised, suggest_name
from edgekit.graph.graph import Graph
from edgekit.model.model import Model
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.finer_weights import SPLIT_BITS
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.mixed_precision.candidates import find_float_constants
from edgekit.quantize.plan import QuantPlan, draft_plan
from edgekit.quantize.qdq import plan_calibration, plan_graph
from edgekit.quantize.ranges import RANGE_METHODS
from edgekit.serialize import UNDECODABLE, ready_type
from edgekit.target import Target

MAX_PLAN_BYTES = 1 << 26
"""A larger file was not written by edgekit: a plan takes about 100 bytes a tensor."""
# Fields that only the target decides.
_GIVEN = (
    "scheme", "activation", "weight", "activation_symmetric", "weight_symmetric", "reduce_range", "shared_ops",
    "unsigned_ops", "float_bias",
)  # fmt: skip
_HINT = "correct it, or plan again: edgekit quantize --plan-only"
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def read_plan(path: Path) -> QuantPlan:
    """Returns the plan in a file.

    Raises:
        UsageError: the file cannot be read or holds no plan.
    """
    malformed = UsageError(f"'{path}' is no plan", hint="make one: edgekit quantize --plan-only")
    with reading(f"'{path}'", UsageError, "--plan takes a .json file"), path.open("rb") as stream:
        data = stream.read(MAX_PLAN_BYTES)
    with reraised(UNDECODABLE, malformed, quote=True):
        return msgspec.json.decode(data, type=ready_type(QuantPlan))


def require_origin(plan: QuantPlan, model: Model, samples_sha256: str, target: Target) -> None:
    """Refuses a plan that was made for another model, with other samples or for another target.

    Raises:
        UsageError: it was made for another.
    """
    again = "plan it again: edgekit quantize --plan-only"
    if plan.model_sha256 != model.sha256:
        raise UsageError("the plan was made for another model", hint=again)
    if plan.samples_sha256 != samples_sha256:
        raise UsageError("the plan was made with other samples", hint="give the same --data and --samples")
    if plan.target != target.name:
        raise UsageError(f"the plan is for target '{plan.target}'", hint=f"give --target {plan.target}")


def require_plan(plan: QuantPlan, model: Model, calibration: Calibration, target: Target) -> None:
    """Refuses a plan from a file that cannot be applied.

    A user may leave operators out, keep nodes float, change ranges and, where the target takes 16 bits, give them to
    tensors. Names must exist, ranges must yield valid scales, and what only the target decides must be unchanged.

    Raises:
        UsageError: the plan names something that does not exist, holds an impossible number, or asks for what the
            target does not take.
        ModelError: no node of the model can be quantized.
    """
    graph = plan_graph(model, plan, calibration)
    # A fresh plan for the target shows which names exist and what only the target decides.
    own = draft_plan(model, graph, plan_calibration(model, plan, calibration), target, plan.precision)
    complaint = next(_complaints(plan, own, graph, target), None)
    if complaint is not None:
        raise UsageError(f"the plan {complaint[0]}", hint=complaint[1])


_Complaint = tuple[str, str]


def _complaints(plan: QuantPlan, own: QuantPlan, graph: Graph, target: Target) -> Iterator[_Complaint]:
    for field in _GIVEN:
        if getattr(plan, field) != getattr(own, field):
            yield f"has {field} = {_show(plan, field)}, but target '{target.name}' takes {_show(own, field)}", _HINT
    if plan.method not in RANGE_METHODS:
        yield f"has the range method '{plan.method}'", suggest_name(plan.method, RANGE_METHODS)
    for op in sorted({*plan.op_types} - {*own.op_types}):
        yield f"quantizes '{op}', which this model or target does not have", suggest_name(op, own.op_types)
    ops = {node.name: node.op_type for node in graph.nodes}
    for node in plan.float_nodes:
        if node.name not in ops:
            yield f"keeps node '{node.name}' float, which does not exist", suggest_name(node.name, ops)
        elif ops[node.name] != node.op:
            yield f"takes node '{node.name}' for {node.op}; it is {ops[node.name]}", _HINT
    constants = dict(find_float_constants(graph, plan))
    for name in plan.narrow.bits:
        if name not in constants:
            yield f"narrows '{name}', which is no large constant of float nodes alone", suggest_name(name, constants)
    yield from _odd_ranges(plan, own, target)
    if plan.block not in {0, own.block}:
        takes = f"takes {own.block}" if own.block else "takes none"
        yield f"has blocks of {plan.block} weights, but {plan.precision} of target '{target.name}' {takes}", _HINT
    layers = {layer.weight for layer in read_layers(graph)} if "int16" in target.precisions and not own.bits else set()
    for weight, bits in plan.bits.items():
        if own.bits.get(weight) != bits and not (bits == SPLIT_BITS and weight in layers):
            takes = f"takes {own.bits[weight]}" if weight in own.bits else "has 8 for it"
            yield f"gives '{weight}' {bits} bits, but {plan.precision} of target '{target.name}' {takes}", _HINT
    for weight, axis in plan.axes.items():
        if own.axes.get(weight) != axis:
            takes = f"takes axis {own.axes[weight]}" if weight in own.axes else "has no scale per channel for it"
            yield f"gives '{weight}' a scale for each index of axis {axis}, but target '{target.name}' {takes}", _HINT


def _show(plan: QuantPlan, field: str) -> str:
    value = getattr(plan, field)
    return ", ".join(cast("tuple[str, ...]", value)) or "none" if isinstance(value, tuple) else f"{value}".lower()


def _odd_ranges(plan: QuantPlan, own: QuantPlan, target: Target) -> Iterator[_Complaint]:
    for tables in (plan.ranges, plan.wide, plan.grids):
        for name in sorted(set(tables) - set(own.ranges) - set(own.wide)):
            yield f"has numbers for '{name}', which is no float tensor of it", suggest_name(name, own.ranges)
    missing = next((name for name in own.ranges if name not in plan.ranges), None)
    if missing is not None:
        yield f"lacks the range of '{missing}'", _HINT
    if plan.wide and not target.widens(plan.precision):
        yield f"gives '{next(iter(plan.wide))}' 16 bits, which target '{target.name}' does not take", _HINT
    for name, span in (*plan.ranges.items(), *plan.wide.items()):
        if not (span.low <= span.high and max(span.high, 0.0) - min(span.low, 0.0) <= _MOST):
            yield f"gives '{name}' the range from {span.low:g} to {span.high:g}, which has no scale", _HINT
    limits = np.iinfo(plan.activation)
    for name, grid in plan.grids.items():
        if not _LEAST <= grid.scale <= _MOST or not limits.min <= grid.zero_point <= limits.max:
            what = f"scale {grid.scale:g} and the zero point {grid.zero_point}"
            yield f"gives '{name}' the {what}, which {plan.activation} cannot have", _HINT
