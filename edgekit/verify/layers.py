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
from edgekit.verify.grids import find_grids
from edgekit.verify.match import MatchedTensor, match_tensors
from edgekit.verify.metrics import SampleErrors
from edgekit.verify.trace import FED_PREFIX, adapt_sample, open_fed, open_traced
from edgekit.verify.weights import FAR_STEPS, measure_weights

_NEGLIGIBLE_DB = 60.0
_OUTLIER_DB = 12.0
_OUTLIER_BIAS = 0.8
_OUTLIER_ROUNDING_DB = 5.0
_OUTLIER_ROUNDING_BIAS = 0.2
_WEIGHTS_DB = 35.0
"""tools/bench/seeded_faults.py measures what they find: on clean networks rounding explained all but 3.1 dB, and the
largest share of an offset was 0.03."""


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the output of a layer of model B lies from the tensor of the same name in model A.

    `sqnr_db` and `max_abs` measure the error that has piled up there; `own_sqnr_db` the error of this layer alone, fed
    with A's values. `own_bias` is the share of that error's energy that is a constant offset, which a wrong zero point
    makes large. `weight_steps` is the distance in steps of the worst single weight from its float weight, None where
    the layer has none; otherwise None stands for values that are not finite. `name` and `op` are those of B's node,
    `tensor` is the name in both models.
    """

    name: str
    op: str
    tensor: str
    sqnr_db: float | None
    max_abs: float | None
    own_sqnr_db: float | None
    own_bias: float | None
    weight_steps: float | None = None
    rounding_sqnr_db: float | None = None
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
    grids, ideal = find_grids(b), dict[str, SampleErrors]()
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
                rounded = metrics.measure_sample(wanted[item.in_a], grids[item.tensor].round_values(wanted[item.in_a]))
                ideal[item.tensor] = _add(ideal.get(item.tensor), rounded)
    if not sums:
        raise ModelError(f"'{b.path}' and '{a.path}' have no layer in common", hint="compare models of one origin")
    steps = measure_weights(a, b)
    return tuple(_report(item, sums[item.tensor], ideal.get(item.tensor), steps.get(item.layer)) for item in matched)


def find_first_bad(layers: Sequence[LayerReport]) -> LayerReport | None:
    """Returns the first layer whose own error stands out from that of the others, None if none does.

    A layer stands out if its own output is not finite; or if a weight is far from where it was rounded; or if its own
    SQNR is below 60 dB and the error is mostly an offset, or more than what rounding explains. Where the result is
    rounded to a grid, that is the SQNR of the float values rounded to it, with weights of 8 bits at `_WEIGHTS_DB` (a
    range of eight deviations, rounded to 255 steps), less `_OUTLIER_ROUNDING_DB`. Where it is not, it is the median
    less `_OUTLIER_DB` and four times the median distance from it (Leys et al. 2013).
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
    if layer.own_bias > _OUTLIER_BIAS:
        return True
    if layer.rounding_sqnr_db is None:
        return layer.own_sqnr_db < least_db
    result_noise, weight_noise = 10.0 ** (-layer.rounding_sqnr_db / 10.0), 10.0 ** (-_WEIGHTS_DB / 10.0)
    explained_db = metrics.decibels(1.0, result_noise + weight_noise)
    is_offset = layer.own_bias > _OUTLIER_ROUNDING_BIAS and layer.own_sqnr_db < layer.rounding_sqnr_db - 1.0
    return is_offset or layer.own_sqnr_db < explained_db - _OUTLIER_ROUNDING_DB


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


def _report(
    item: MatchedTensor,
    sums: tuple[SampleErrors, SampleErrors],
    ideal: SampleErrors | None,
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
        rounding_sqnr_db=None if ideal is None or ideal.non_finite else metrics.sqnr_db([ideal]),
        non_finite=found.non_finite,
    )
