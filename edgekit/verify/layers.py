"""Comparing two models layer by layer: the error that has piled up at each, and the error that each makes itself."""

from collections.abc import Sequence

import msgspec
import numpy as np

from edgekit._ort import CpuSession
from edgekit.errors import ModelError
from edgekit.model import Model, read_proto
from edgekit.samples import Samples
from edgekit.tensors import Array, Tensors
from edgekit.verify import metrics
from edgekit.verify.match import MatchedTensor, match_tensors
from edgekit.verify.metrics import SampleErrors
from edgekit.verify.trace import FED_PREFIX, adapt_sample, open_fed, open_traced
from edgekit.verify.weights import measure_weights

_NEGLIGIBLE_DB = 60.0
_OUTLIER_DB = 10.0
_OUTLIER_BIAS = 0.5
_OUTLIER_STEPS = 2.5
_OUTLIER_PEAK = 30.0
"""Measured: the layers of clean INT8 networks stay below 23, one weight with bit 6 flipped mostly gives above 100."""


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the output of a layer of model B lies from the tensor of the same name in model A.

    `sqnr_db` and `max_abs` measure the error that has piled up there; `own_sqnr_db` the error of this layer alone, fed
    with A's values. `own_bias` is the share of that error's energy that is a constant offset, which a wrong zero point
    makes large; `own_peak` how many times the error energy of the worst channel is that of the channel at the upper
    eighth, which one wrong weight makes large. `weight_steps` is the distance in steps of the worst quantized weight
    from its float weight, None where the layer has none; otherwise None stands for values that are not finite. `name`
    and `op` are those of B's node, `tensor` is the name in both models.
    """

    name: str
    op: str
    tensor: str
    sqnr_db: float | None
    max_abs: float | None
    own_sqnr_db: float | None
    own_bias: float | None
    own_peak: float | None
    weight_steps: float | None = None
    non_finite: int = 0


class _Sums(msgspec.Struct, frozen=True, kw_only=True):
    found: SampleErrors
    own: SampleErrors
    own_channels: metrics.Floats


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
    sums: dict[str, _Sums] = {}
    for sample in samples:
        wanted, found = traced_a.run(adapt_sample(sample, a)), traced_b.run(adapt_sample(sample, b))
        if fed is None:
            matched = _keep_comparable(matched, wanted, found)
            fed = open_fed(b, matched, {tensor.tensor: found[tensor.in_b].dtype for tensor in matched})
        feed = {FED_PREFIX + item.tensor: wanted[item.in_a].astype(found[item.in_b].dtype) for item in matched}
        own = fed.run({**adapt_sample(sample, b), **feed})
        for item in matched:
            measured = _measure(wanted[item.in_a], found[item.in_b], own[item.in_b])
            sums[item.tensor] = _add(sums[item.tensor], measured) if item.tensor in sums else measured
    if not sums:
        raise ModelError(f"'{b.path}' and '{a.path}' have no layer in common", hint="compare models of one origin")
    steps = measure_weights(a, b)
    return tuple(_report(item, sums[item.tensor], steps.get(item.layer)) for item in matched)


def find_first_bad(layers: Sequence[LayerReport]) -> LayerReport | None:
    """Returns the first layer whose own error stands out from that of the others, None if none does.

    A layer stands out if its own output is not finite; or if a weight is far from where it was rounded; or if its own
    SQNR is below 60 dB and either lies below the median by more than `_OUTLIER_DB` and four times the median distance
    from it (outliers by the median absolute deviation, Leys et al. 2013), or the error is mostly an offset, or sits in
    one channel.
    """
    known = [layer.own_sqnr_db for layer in layers if layer.own_sqnr_db is not None]
    if not known:
        return next(iter(layers), None)
    median = float(np.median(known))
    spread = float(np.median(np.abs(np.array(known) - median)))
    least = median - max(_OUTLIER_DB, 4.0 * spread)
    return next((layer for layer in layers if _stands_out(layer, least)), None)


def _stands_out(layer: LayerReport, least_db: float) -> bool:
    if layer.own_sqnr_db is None or layer.own_bias is None or layer.own_peak is None:
        return True
    if (layer.weight_steps or 0.0) > _OUTLIER_STEPS:
        return True
    if layer.own_sqnr_db > _NEGLIGIBLE_DB:
        return False
    return layer.own_sqnr_db < least_db or layer.own_bias > _OUTLIER_BIAS or layer.own_peak > _OUTLIER_PEAK


def _keep_comparable(matched: Sequence[MatchedTensor], wanted: Tensors, found: Tensors) -> tuple[MatchedTensor, ...]:
    return tuple(
        item
        for item in matched
        if wanted[item.in_a].dtype.kind == found[item.in_b].dtype.kind == "f"
        and wanted[item.in_a].shape == found[item.in_b].shape
        and wanted[item.in_a].size
    )


def _measure(wanted: Array, found: Array, own: Array) -> _Sums:
    return _Sums(
        found=metrics.measure_sample(wanted, found),
        own=metrics.measure_sample(wanted, own),
        own_channels=_sum_channels(wanted, own),
    )


def _sum_channels(wanted: Array, own: Array) -> metrics.Floats:
    """Returns the error energy of each channel: axis 1 of images and sequences, the last axis of matrices."""
    with np.errstate(over="ignore", invalid="ignore"):
        energy = np.square(own.astype(np.float64) - wanted)
        channels = np.moveaxis(energy, 1 if energy.ndim > 2 else -1, 0) if energy.ndim else energy.reshape(1)
        return np.asarray(channels.reshape(len(channels), -1).sum(axis=1), dtype=np.float64)


def _add(first: _Sums, second: _Sums) -> _Sums:
    return _Sums(
        found=metrics.add_errors(first.found, second.found),
        own=metrics.add_errors(first.own, second.own),
        own_channels=first.own_channels + second.own_channels,
    )


def _find_peak(channels: metrics.Floats) -> float:
    ranked = np.sort(channels)[::-1]
    typical = ranked[min(max(2, len(ranked) // 8), len(ranked) - 1)]
    return float(ranked[0] / typical) if typical > 0.0 else 1.0


def _report(item: MatchedTensor, sums: _Sums, weight_steps: float | None) -> LayerReport:
    found, own = sums.found, sums.own
    return LayerReport(
        name=item.layer,
        op=item.op,
        tensor=item.tensor,
        sqnr_db=None if found.non_finite else metrics.sqnr_db([found]),
        max_abs=None if found.non_finite else found.max_abs,
        own_sqnr_db=None if own.non_finite else metrics.sqnr_db([own]),
        own_bias=None if own.non_finite else metrics.bias_share([own]),
        own_peak=None if own.non_finite else _find_peak(sums.own_channels),
        weight_steps=weight_steps,
        non_finite=found.non_finite,
    )
