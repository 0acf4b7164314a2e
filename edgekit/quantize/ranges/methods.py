"""The range of an activation that its integers should span, chosen from its histogram."""

import math
from collections.abc import Callable, Iterator
from functools import cache

import msgspec
import numpy as np
import onnx

from edgekit.model.tensors import Array
from edgekit.quantize.graph.graph import Graph
from edgekit.quantize.graph.raw_scores import FLOOR, are_raw_scores, find_raw_score_sources
from edgekit.quantize.ranges.histogram import Histogram

_BINS = 2048
_MOST_STEPS, _CLOSE = 3, 1e-5
_LARGEST = float(np.finfo(np.float32).max)
LEVELS = 255
"""Steps between the lowest and the highest of 256 integers."""

Nonlinearity = Callable[[Array], Array]
"""What the graph computes from a tensor at once, elementwise: errors count after it."""


class TensorRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lowest and highest value that the integers of a tensor stand for, before zero is made exact."""

    low: float
    high: float


def snap_range(span: TensorRange) -> TensorRange:
    """Returns a range with both ends rounded to 9 significant bits, which moves them by half a step of 255 at most.

    CPUs differ in the last bits of a sum, since their kernels add in other orders; the scale that follows from it, and
    so the bytes of the quantized model, should not.
    """
    return TensorRange(low=_snap(span.low), high=_snap(span.high))


def _snap(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return float(np.clip(math.ldexp(round(mantissa * 512), exponent - 9), -_LARGEST, _LARGEST))


class TensorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a tensor: its lowest and highest value, their means over the samples, and a histogram."""

    exact: TensorRange
    mean: TensorRange
    histogram: Histogram


def percentile_range(
    exact: TensorRange, histogram: Histogram, percent: float, reader: Nonlinearity | None = None
) -> TensorRange:
    """Returns the range that holds `percent` of the values, the rest cut off in equal parts at both ends.

    What lies where `reader` is flat, such as HardSwish below -3, is cut off too.
    """
    if not histogram.total:
        return exact
    cumulative = np.cumsum(histogram.counts) / histogram.total
    tail = (100 - percent) / 200
    low = histogram.centers[int(np.searchsorted(cumulative, tail))]
    high = histogram.centers[min(int(np.searchsorted(cumulative, 1 - tail)), len(cumulative) - 1)]
    exact = _cut_saturated(exact, reader)
    return TensorRange(low=max(exact.low, float(low)), high=min(exact.high, float(high)))


def _cut_saturated(span: TensorRange, reader: Nonlinearity | None) -> TensorRange:
    """Returns a range without what lies where `reader` is flat."""
    least, most = _SATURATION.get(reader, (-math.inf, math.inf)) if reader else (-math.inf, math.inf)
    return TensorRange(low=min(max(span.low, least), most), high=max(min(span.high, most), least))


def match_nonlinearity(reader: Nonlinearity | None, histogram: Histogram) -> Nonlinearity | None:
    """Returns what is done with values like these: raw scores are told by what they are, besides where they go."""
    return None if reader is _score and not are_raw_scores(histogram.centers, histogram.counts) else reader


def tail_error(percent: float, values: int) -> float:
    """Returns how far what is cut off at an end may be from the share wanted, with 95 % certainty, from so many values.

    This is the normal bound for values drawn at random; those picked one from each of equal parts of a tensor are
    never worse (W. Cochran, "Sampling Techniques", 1977, 5.6).
    """
    tail = (100 - percent) / 200
    return 1.96 * math.sqrt(tail * (1 - tail) / max(1, values))


def mse_range(exact: TensorRange, histogram: Histogram, reader: Nonlinearity | None = None) -> TensorRange:
    """Returns the range with the least mean squared rounding and clipping error at 8 bits, after `reader`.

    Both ends shrink together over 50 factors, then each by itself.
    """
    if not histogram.total or exact.high <= exact.low:
        return exact
    exact = _cut_saturated(exact, reader)
    factors = np.linspace(1.0, 0.02, 50).tolist()

    def best(candidates: list[tuple[float, float]]) -> tuple[float, float]:
        return min(candidates, key=lambda ends: quantization_error(ends[0], ends[1], histogram, reader))

    low, high = best([(exact.low * factor, exact.high * factor) for factor in factors])
    if exact.low < 0:
        low, high = best([(low, high), *((exact.low * factor, high) for factor in factors)])
    if exact.high > 0:
        low, high = best([(low, high), *((low, exact.high * factor) for factor in factors)])
    return TensorRange(low=low, high=high)


def entropy_range(exact: TensorRange, histogram: Histogram) -> TensorRange:
    """Returns the range whose clipped and quantized values diverge least from the float ones (Kullback-Leibler).

    Magnitudes lie in 2048 bins; every cut-off from the number of levels upward is tried at once (S. Migacz, "8-bit
    inference with TensorRT", GTC 2017). Exact zeros are left out: every range holds zero exactly.
    """
    top = max(-exact.low, exact.high)
    kept = histogram.centers != 0
    if top <= 0 or not kept.any():
        return exact
    edges = np.minimum((np.abs(histogram.centers[kept]) * (_BINS / top)).astype(np.int64), _BINS - 1)
    counts = np.bincount(edges, weights=histogram.counts[kept].astype(np.float64), minlength=_BINS)
    levels = 128 if exact.low < 0 < exact.high else 256
    cut = _least_divergent_cut(counts, levels) * top / _BINS
    return TensorRange(low=max(exact.low, -cut), high=min(exact.high, cut))


def _least_divergent_cut(counts: Array, levels: int) -> int:
    """Returns how many bins to keep so that they, quantized to `levels` groups, say most about all of them.

    With sums from the left every cut-off is one row: the divergence of a row is the sum of p log p over its bins less
    that of (sum of p in a group) log(mean of the group's used bins).
    """
    cuts = np.arange(levels, _BINS + 1)
    total = counts.sum()
    logs = counts * np.log(np.maximum(counts, 1))
    before, before_logs, before_used = (np.concatenate([[0.0], np.cumsum(part)]) for part in (counts, logs, counts > 0))
    masses, used = (_sums_of_runs(sums, -(-_BINS // levels)) for sums in (before, before_used))
    means = np.log(np.maximum(masses, 1) / np.maximum(used, 1))
    groups, kept = _group_runs(levels), before[cuts]
    cut_off, last = total - kept, counts[cuts - 1]
    heavy = last + cut_off
    own = before_logs[cuts] - logs[cuts - 1] + heavy * np.log(np.maximum(heavy, 1)) - total * np.log(total)
    of_groups = (masses * means).reshape(-1)[groups].sum(axis=1) + cut_off * means.reshape(-1)[groups[:, -1]]
    divergence = own - of_groups + total * np.log(np.maximum(kept, 1))
    divergence[(last == 0) & (cut_off > 0)] = np.inf
    return int(cuts[np.argmin(divergence)])


def _sums_of_runs(before: Array, longest: int) -> Array:
    """Returns the sums of 0 to `longest` bins from each bin on, [longest + 1, bins + 1], from the sums before each."""
    ends = np.arange(longest + 1)[:, None] + np.arange(_BINS + 1)
    return np.asarray(before[np.minimum(ends, _BINS)] - before)


@cache
def _group_runs(levels: int) -> Array:
    """Returns for each cut-off from `levels` bins on where each of its groups stands among flattened sums of runs.

    There are a hundred thousand groups and more, but few runs: taking their logarithms once is what makes this fast.
    """
    bounds = np.arange(levels, _BINS + 1)[:, None] * np.arange(levels + 1) // levels
    return np.asarray(np.diff(bounds, axis=1) * (_BINS + 1) + bounds[:, :-1])


def quantization_error(low: float, high: float, histogram: Histogram, reader: Nonlinearity | None = None) -> float:
    """Returns the summed squared error, after `reader`, of 8-bit integers over [low, high] made to include zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / LEVELS
    values = histogram.centers
    if step > 0:
        zero = round(-low / step)
        rounded = np.rint(values / step)
        np.maximum(rounded, -zero, out=rounded)
        np.minimum(rounded, LEVELS - zero, out=rounded)
        rounded *= step
    else:
        rounded = np.zeros_like(values)
    error = rounded - values if reader is None else reader(rounded) - reader(values)
    return float(np.dot(histogram.counts, error * error))


def find_nonlinearities(graph: Graph) -> dict[str, Nonlinearity]:
    """Returns the tensors that only an elementwise function reads, such as x * sigmoid(x), with that function."""
    readers: dict[str, Nonlinearity] = dict.fromkeys(find_raw_score_sources(graph), _score)
    for name, nodes in graph.consumers.items():
        if name in graph.outputs | graph.captured or name in graph.initializers:
            continue
        ops = sorted(node.op_type for node in nodes)
        if len(ops) == 1 and ops[0] in _NONLINEARITIES:
            readers[name] = _NONLINEARITIES[ops[0]]
        elif len(ops) == 2 and "Mul" in ops:
            readers.update((name, reader) for reader in _find_gates(graph, name, nodes))
    return readers


def _find_gates(graph: Graph, name: str, nodes: tuple[onnx.NodeProto, ...]) -> Iterator[Nonlinearity]:
    """Yields the function x * gate(x) that two nodes begin: one is the product, the other leads to it by itself."""
    for product, first in (nodes, nodes[::-1]):
        steps: list[onnx.NodeProto] = []
        node = first
        while product.op_type == "Mul" and node is not product and len(steps) < _MOST_STEPS:
            steps.append(node)
            readers = graph.consumers.get(node.output[0], ())
            node = readers[0] if len(readers) == 1 else product
        if steps and set(product.input) == {name, steps[-1].output[0]}:
            ops = tuple(step.op_type for step in steps)
            if ops == ("Sigmoid",):
                yield _swish
            elif _is_hard_gate(graph, ops, steps):
                yield _hard_swish


def _is_hard_gate(graph: Graph, ops: tuple[str, ...], steps: list[onnx.NodeProto]) -> bool:
    """Returns True for Clip(x + 3, 0, 6), scaled or not, and for HardSigmoid with a slope of one sixth."""
    if ops == ("HardSigmoid",):
        alpha = next((item.f for item in steps[0].attribute if item.name == "alpha"), 0.2)
        return abs(alpha - 1 / 6) < _CLOSE
    if ops[:2] != ("Add", "Clip") or not set(ops[2:]) <= {"Mul", "Div"}:
        return False
    constants = [graph.constant(name) for step in steps[:2] for name in step.input]
    return [value.item() for value in constants if value is not None and value.size == 1] == [3.0, 0.0, 6.0]


def sigmoid(values: Array) -> Array:
    """Returns the sigmoid of values, which does not overflow."""
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -80, 80))))


def _score(values: Array) -> Array:
    """What an app makes of a raw score; it counts only where the values look like scores."""
    return sigmoid(values)


def _hard_swish(values: Array) -> Array:
    return values * np.clip(values / 6 + 0.5, 0, 1)


def _swish(values: Array) -> Array:
    return values * sigmoid(values)


_NONLINEARITIES: dict[str, Nonlinearity] = {"Sigmoid": sigmoid, "Tanh": np.tanh, "HardSwish": _hard_swish}
_SATURATION: dict[Nonlinearity, tuple[float, float]] = {
    sigmoid: (-8.0, 8.0),
    _score: (FLOOR, math.inf),
    np.tanh: (-4.0, 4.0),
    _hard_swish: (-3.0, math.inf),
    _swish: (-8.0, math.inf),
}
"""Where a function does not change any more, or by less than a step of 8 bits: 3e-4, 7e-4, 0 and 3e-3."""

PLAIN_METHODS = ("minmax", "moving-average")
"""The range methods that need no histogram."""

PERCENTS = {"percentile-99.99": 99.99, "percentile-99.9": 99.9}

AUTO_METHODS = ("minmax", "mse", "percentile-99.99", "percentile-99.9")
"""The range methods that are judged against each other; entropy is left out, because it collapses on ReLU nets."""

RANGE_METHODS: dict[str, Callable[[TensorStatistics, Nonlinearity | None], TensorRange]] = {
    "minmax": lambda seen, _reader: seen.exact,
    "moving-average": lambda seen, _reader: seen.mean,
    "mse": lambda seen, reader: mse_range(seen.exact, seen.histogram, reader),
    "entropy": lambda seen, _reader: entropy_range(seen.exact, seen.histogram),
    "percentile-99.99": lambda seen, reader: percentile_range(seen.exact, seen.histogram, 99.99, reader),
    "percentile-99.9": lambda seen, reader: percentile_range(seen.exact, seen.histogram, 99.9, reader),
}
"""Every range method, by the name that plans and options use. "moving-average" is the mean over the samples of each
tensor's lowest and highest value: a moving average without decay, so that the order of the samples is of no matter."""

METHODS = ("auto", "best", *RANGE_METHODS)
"""What a user may ask for."""
