"""Comparing two models layer by layer: the error that has piled up at each, and the error that each makes itself."""

from collections.abc import Sequence

import msgspec
import numpy as np

from edgekit._ort import CpuSession
from edgekit.errors import ModelError
from edgekit.model import Model, read_proto
from edgekit.samples import Samples
from edgekit.tensors import Tensors
from edgekit.verify import metrics
from edgekit.verify.grids import StepErrors, add_steps, find_grids, measure_steps
from edgekit.verify.match import MatchedTensor, match_tensors
from edgekit.verify.metrics import SampleErrors
from edgekit.verify.trace import FED_PREFIX, adapt_sample, open_fed, open_traced
from edgekit.verify.weights import FAR_STEPS, measure_weights

_NEGLIGIBLE_DB = 60.0
_OUTLIER_DB = 12.0
_OUTLIER_BIAS = 0.8
_FAR_CHANNEL_STEPS = 2.5
_FAR_OFFSET_STEPS = 0.5
"""Measured by tools/bench/seeded_faults.py: no channel of a clean layer was farther off than 0.71 steps, no clean layer
on the whole more than 0.03; a zero point off by one is 1.0, two swapped channels are 28 and more."""


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the output of a layer of model B lies from the tensor of the same name in model A.

    `sqnr_db` and `max_abs` measure the error that has piled up there; `own_sqnr_db` the error of this layer alone, fed
    with A's values. `own_bias` is the share of that error's energy that is a constant offset, which a wrong zero point
    makes large. `weight_steps` is the distance in steps of the worst single weight from its float weight, None where
    the layer has none; otherwise None stands for values that are not finite. `offset_steps` (the mean) and
    `channel_steps` (the root of the mean square of the worst channel and of the middle one) tell how many steps of its
    grid the layer's own result lies from the float values rounded to that grid, None where it has none. `name` and
    `op` are those of B's node, `tensor` is the name in both models.
    """

    name: str
    op: str
    tensor: str
    sqnr_db: float | None
    max_abs: float | None
    own_sqnr_db: float | None
    own_bias: float | None
    weight_steps: float | None = None
    offset_steps: float | None = None
    channel_steps: tuple[float, float] | None = None
    non_finite: int = 0


def compare_layers(a: Model, b: Model, samples: Samples) -> tuple[LayerReport, ...]:
    """Returns every float tensor that both models compute, in the order of computation, with its errors.

    Both models run with every optimisation off, so that no tensor is fused away. Memory holds the tensors of one
    sample.

    Raises:
        ModelError: no float tensor of `b` bears the name of one of `a`.
        UsageError: the samples do not fit a model.
    """
    matched = match_tensors(read_proto(a, weights=False).graph, read_proto(b, weights=False).graph)
    traced_a, traced_b = (
        open_traced(a, [tensor.in_a for tensor in matched]),
        open_traced(b, [tensor.in_b for tensor in matched]),
    )
    fed: CpuSession | None = None
    sums: dict[str, tuple[SampleErrors, SampleErrors]] = {}
    grids, stepped = find_grids(b), dict[str, StepErrors]()
    for sample in samples:
        wanted, found = traced_a.run(adapt_sample(sample, a)), traced_b.run(adapt_sample(sample, b))
        if fed is None:
            matched = _keep_comparable(matched, wanted, found)
            fed = open_fed(b, matched, {tensor.tensor: found[tensor.in_b].dtype for tensor in matched})
        feed = {FED_PREFIX + item.tensor: wanted[item.in_a].astype(found[item.in_b].dtype) for item in matched}
        own = fed.run({**adapt_sample(sample, b), **feed})
        for item in matched:
            measured = [metrics.measure_sample(wanted[item.in_a], side[item.in_b]) for side in (found, own)]
            before = sums.get(item.tensor, (None, None))
            sums[item.tensor] = (_add(before[0], measured[0]), _add(before[1], measured[1]))
            if item.tensor in grids:
                moved = measure_steps(grids[item.tensor], wanted[item.in_a], own[item.in_b])
                stepped[item.tensor] = add_steps(stepped.get(item.tensor), moved)
    if not sums:
        raise ModelError(f"'{b.path}' and '{a.path}' have no layer in common", hint="compare models of one origin")
    steps = measure_weights(a, b)
    return tuple(
        _add_steps(_report(item, sums[item.tensor], steps.get(item.layer)), stepped.get(item.tensor))
        for item in matched
    )


def find_first_bad(layers: Sequence[LayerReport]) -> LayerReport | None:
    """Returns the first layer whose own error stands out from that of the others, None if none does.

    A layer stands out if its own output is not finite; or if a weight is far from where it was rounded; or if its own
    SQNR is below 60 dB and a channel lies farther from the rounded float values than `_FAR_CHANNEL_STEPS`, or all of it
    farther than `_FAR_OFFSET_STEPS`: rounding and clipping are then no excuse. Where the result has no grid, its
    SQNR must not lie below the median by `_OUTLIER_DB` and four times the median distance from it (Leys et al. 2013),
    and its error must not be mostly an offset.
    """
    known = [layer.own_sqnr_db for layer in layers if layer.own_sqnr_db is not None]
    if not known:
        return next(iter(layers), None)
    median = float(np.median(known))
    spread = float(np.median(np.abs(np.array(known) - median)))
    least = median - max(_OUTLIER_DB, 4.0 * spread)
    return next((layer for layer in layers if _stands_out(layer, least)), None)


def _stands_out(layer: LayerReport, least_db: float) -> bool:
    if layer.own_sqnr_db is None or layer.own_bias is None:
        return True
    if (layer.weight_steps or 0.0) > FAR_STEPS:
        return True
    if layer.own_sqnr_db > _NEGLIGIBLE_DB:
        return False
    if layer.channel_steps is not None and layer.offset_steps is not None:
        return layer.channel_steps[0] > _FAR_CHANNEL_STEPS or layer.offset_steps > _FAR_OFFSET_STEPS
    return layer.own_sqnr_db < least_db or layer.own_bias > _OUTLIER_BIAS


def _keep_comparable(matched: Sequence[MatchedTensor], wanted: Tensors, found: Tensors) -> tuple[MatchedTensor, ...]:
    return tuple(
        item
        for item in matched
        if wanted[item.in_a].dtype.kind == found[item.in_b].dtype.kind == "f"
        and wanted[item.in_a].shape == found[item.in_b].shape
        and wanted[item.in_a].size
    )


def _add(before: SampleErrors | None, measured: SampleErrors) -> SampleErrors:
    return measured if before is None else metrics.add_errors(before, measured)


def _add_steps(layer: LayerReport, found: StepErrors | None) -> LayerReport:
    if found is None or layer.own_sqnr_db is None:
        return layer
    return msgspec.structs.replace(layer, offset_steps=found.offset_steps, channel_steps=found.channel_steps)


def _report(
    item: MatchedTensor,
    sums: tuple[SampleErrors, SampleErrors],
    weight_steps: float | None,
) -> LayerReport:
    found, own = sums
    return LayerReport(
        name=item.layer,
        op=item.op,
        tensor=item.tensor,
        sqnr_db=None if found.non_finite else metrics.sqnr_db([found]),
        max_abs=None if found.non_finite else found.max_abs,
        own_sqnr_db=None if own.non_finite else metrics.sqnr_db([own]),
        own_bias=None if own.non_finite else metrics.bias_share([own]),
        weight_steps=weight_steps,
        non_finite=found.non_finite,
    )
