"""Range methods: they choose the range of an activation from its statistics (min-max, moving average, percentile, MSE).

The range is the interval that the integers cover; values outside are clipped. Histograms widen with their data, and do
not depend on its order. If only a nonlinearity reads a tensor, errors are measured after it. The inputs and the output
of an operator, such as a Concat, share one range if a provider requires that.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Array
from edgekit.quantize.graph.float_graph import range_source

# Bins on each side of zero. ONNX Runtime has as many in total (PercentileCalibrater in its quantization/calibrate.py).
HALF_BINS = 2048


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values at bin centres; bins without a value are left out.

    `centers` is ascending, with shape [B], as has `counts`; exact zeros have a bin of their own.
    """

    centers: Array
    counts: Array

    @property
    def total(self) -> int:
        """The number of counted values."""
        return int(self.counts.sum())


class HistogramCollector:
    """Counts values in bins whose width is a power of two and doubles when a value falls outside.

    Bins begin at multiples of their width, so doubling merges pairs of bins exactly, and the order of the values does
    not matter. The width ends between 1/2048 and 1/1024 of the largest magnitude.
    """

    def __init__(self) -> None:
        self._counts, self._zeros = np.zeros(2 * HALF_BINS, np.int32), np.zeros((), np.int32)
        # The exponent of the width of a bin minus that of the smallest normal float32.
        self._doublings = np.zeros((), np.uint8)

    @property
    def _exponent(self) -> int:
        return int(self._doublings) - 126

    def add(self, values: Array) -> None:
        """Counts finite floats."""
        if not values.size:
            return
        magnitude = max(float(values.max()), -float(values.min()))
        zeros = values.size - np.count_nonzero(values)
        self._zeros += zeros
        if not magnitude:
            return
        self._widen(magnitude)
        # If bins are wide, a small negative value would underflow to -0 in float32, and be counted as positive.
        scaled = values.astype(np.float64 if self._exponent > 0 else values.dtype) * 2.0**-self._exponent
        bins = np.floor(scaled, out=scaled).astype(np.intp) + HALF_BINS
        self._counts += np.bincount(bins.reshape(-1), minlength=self._counts.size).astype(np.int32)
        self._counts[HALF_BINS] -= zeros

    def arrays(self) -> dict[str, Array]:
        """Returns the arrays of the sums, not copies: who writes into them continues from others."""
        return {"counts": self._counts, "zeros": self._zeros, "doublings": self._doublings}

    def freeze(self) -> Histogram:
        """Returns the histogram of everything counted."""
        used = np.flatnonzero(self._counts)
        centers, counts = (used - HALF_BINS + 0.5) * 2.0**self._exponent, self._counts[used].astype(np.int64)
        if self._zeros:
            at = int(np.searchsorted(centers, 0.0))
            centers, counts = np.insert(centers, at, 0.0), np.insert(counts, at, self._zeros)
        return Histogram(centers=centers, counts=counts)

    def _widen(self, magnitude: float) -> None:
        needed = math.frexp(magnitude)[1] - (HALF_BINS.bit_length() - 1)
        is_empty = not self._counts.any()
        while self._exponent < needed:
            if not is_empty:
                self._counts[...] = np.pad(self._counts.reshape(-1, 2).sum(axis=1), HALF_BINS // 2)
            self._doublings += 1


Nonlinearity = Callable[[Array], Array]
"""An elementwise function of a tensor."""

# Files hold a rounded 1/6.
_CLOSE = 1e-5


def sigmoid(values: Array) -> Array:
    """Returns the sigmoid of values, which does not overflow."""
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -80, 80))))


def softmax(values: Array, axis: int | None = -1) -> Array:
    """Returns the softmax of values along an axis, or of all where that is None, which does not overflow."""
    powers = np.exp(values - values.max(axis=axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True))


def _hard_swish(values: Array) -> Array:
    return values * np.clip(values / 6 + 0.5, 0, 1)


def _silu(values: Array) -> Array:
    return values * sigmoid(values)


def _elu(values: Array) -> Array:
    return np.where(values > 0, values, np.expm1(np.minimum(values, 0)))


_BY_OP: dict[str, Nonlinearity] = {"Sigmoid": sigmoid, "Tanh": np.tanh, "HardSwish": _hard_swish}
# Beyond these ends a function is constant, or changes by less than a step of 8 bits: by 3e-4, 7e-4, 0, 3e-3 and 2e-3.
_SATURATION: dict[Nonlinearity | None, tuple[float, float]] = {
    sigmoid: (-8.0, 8.0),
    np.tanh: (-4.0, 4.0),
    _hard_swish: (-3.0, math.inf),
    _silu: (-8.0, math.inf),
    _elu: (-6.0, math.inf),
}


def find_nonlinearities(graph: Graph) -> dict[str, Nonlinearity]:
    """Returns the tensors that only an elementwise function reads, such as x * sigmoid(x), with that function."""
    readers: dict[str, Nonlinearity] = {}
    hidden = graph.outputs | graph.captured | graph.constants.keys()
    for name in (name for name in graph.consumers if name not in hidden):
        nodes = graph.readers(name)
        ops = sorted(node.op_type for node in nodes)
        if len(ops) == 1 and ops[0] in _BY_OP:
            readers[name] = _BY_OP[ops[0]]
        elif ops in (["Elu"], ["Max", "Min"]) and all(_is_elu(graph, name, node) for node in nodes):
            readers[name] = _elu
        elif len(ops) == 2 and "Mul" in ops:
            readers.update((name, reader) for reader in _find_silu(graph, name, nodes))
    return readers


def _is_elu(graph: Graph, name: str, node: Node) -> bool:
    """Returns True for an Elu that ends at -1, or the Max(x, 0) and Min(x, 0) that make one where a target has none."""
    if node.op_type == "Elu":
        return node.number("alpha", 1.0) == 1
    others = [graph.constant(other) for other in node.input if other != name]
    return len(others) == 1 and others[0] is not None and not others[0].any()


def _find_silu(graph: Graph, name: str, nodes: tuple[Node, ...]) -> Iterator[Nonlinearity]:
    """Yields SiLU or HardSwish if one of two readers is the product, and a chain from the other leads only to it."""
    for product, first in (nodes, nodes[::-1]):
        steps: list[Node] = []
        node = first
        while node is not product:
            steps.append(node)
            readers = graph.readers(node.output[0])
            node = readers[0] if len(readers) == 1 else product
        ops = [step.op_type for step in steps]
        if not steps or set(product.input) != {name, steps[-1].output[0]}:
            continue
        if ops == ["Sigmoid"]:
            yield _silu
        elif ops == ["HardSigmoid"]:
            if math.isclose(steps[0].number("alpha", 0.2), 1 / 6, abs_tol=_CLOSE):
                yield _hard_swish
        # Clip(x + 3, 0, 6), scaled or not.
        elif ops[:2] == ["Add", "Clip"] and set(ops[2:]) <= {"Mul", "Div"}:
            constants = [graph.constant(other) for step in steps[:2] for other in step.input]
            if [value.item() for value in constants if value is not None and value.size == 1] == [3.0, 0.0, 6.0]:
                yield _hard_swish


LEVELS = 255
"""The number of steps between the lowest and the highest of 256 integers."""
_LARGEST = float(np.finfo(np.float32).max)
# Shares of the range, from all to a fiftieth; chosen by hand.
_FACTORS = np.linspace(1.0, 0.02, 50).tolist()


class TensorRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lowest and highest value of a tensor's integers, before the range is adjusted to represent zero exactly."""

    low: float
    high: float


def snap_range(exact: TensorRange) -> TensorRange:
    """Returns a range with both ends rounded to 9 significant bits, which moves them by half a step of 255 at most."""
    # Kernels of different CPUs add in different orders, so sums differ in their last bits; the scales, and so the bytes
    # of the quantized model, should not.
    return TensorRange(low=_snap(exact.low), high=_snap(exact.high))


def scale_range(span: TensorRange, factor: float) -> TensorRange:
    """Returns a range `factor` times as wide, with ends as those of `snap_range`."""
    return snap_range(TensorRange(low=factor * span.low, high=factor * span.high))


def _snap(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return float(np.clip(math.ldexp(round(mantissa * 512), exponent - 9), -_LARGEST, _LARGEST))


def percentile_range(
    exact: TensorRange, histogram: Histogram, percent: float, reader: Nonlinearity | None = None
) -> TensorRange:
    """Returns the range that holds `percent` of the values; half of the others are clipped at each end.

    Values where `reader` is saturated, such as those of HardSwish below -3, are clipped too.
    """
    if not histogram.total:
        return exact
    # Bins are at most 1/1024 of the largest magnitude wide, a quarter of a step of 8 bits over the whole range: their
    # centres are precise enough.
    cumulative = np.cumsum(histogram.counts) / histogram.total
    tail = (100 - percent) / 200
    low = histogram.centers[int(np.searchsorted(cumulative, tail))]
    high = histogram.centers[int(np.searchsorted(cumulative, 1 - tail))]
    exact = clip_saturated(exact, reader)
    return TensorRange(low=max(exact.low, float(low)), high=min(exact.high, float(high)))


def clip_saturated(exact: TensorRange, reader: Nonlinearity | None) -> TensorRange:
    """Returns a range within the ends outside which the nonlinearity that reads it, if any, is saturated."""
    least, most = _SATURATION.get(reader, (-math.inf, math.inf))
    return TensorRange(low=min(max(exact.low, least), most), high=max(min(exact.high, most), least))


def mse_range(exact: TensorRange, histogram: Histogram, reader: Nonlinearity | None = None) -> TensorRange:
    """Returns the range with the least mean squared error of rounding and clipping at 8 bits, after `reader`.

    50 factors are tried for both ends together, then for each end by itself (a search as in OMSE, Y. Choukroun et al.,
    arXiv:1902.06822, for two ends).
    """
    exact, measure = clip_saturated(exact, reader), quantization_errors(histogram, reader)

    def choose(tried: Sequence[tuple[float, float]]) -> tuple[float, float]:
        errors = measure(tried)
        return tried[errors.index(min(errors))]

    low, high = choose([(exact.low * factor, exact.high * factor) for factor in _FACTORS])
    if exact.low < 0:
        low, high = choose([(low, high), *((exact.low * factor, high) for factor in _FACTORS)])
    if exact.high > 0:
        low, high = choose([(low, high), *((low, exact.high * factor) for factor in _FACTORS)])
    return TensorRange(low=low, high=high)


def quantization_errors(
    histogram: Histogram, reader: Nonlinearity | None = None
) -> Callable[[Sequence[tuple[float, float]]], list[float]]:
    """Returns a function of ranges by their ends, extended to zero: the summed squared error of 8-bit integers of each.

    The error is that of the histogram's values, after `reader`.
    """
    # A product of integers and floats would convert the integers each time.
    values, counts = histogram.centers, histogram.counts.astype(np.float64)
    wanted = values if reader is None else reader(values)

    def measure(ranges: Sequence[tuple[float, float]]) -> list[float]:
        ends = np.array(ranges)
        low, high = np.minimum(ends[:, :1], 0.0), np.maximum(ends[:, 1:], 0.0)
        step = (high - low) / LEVELS
        # A range of nothing but zero has no step.
        divisor = np.where(step > 0, step, 1.0)
        zero = np.rint(-low / divisor)
        rounded = values / divisor
        np.rint(rounded, out=rounded)
        np.maximum(rounded, -zero, out=rounded)
        np.minimum(rounded, LEVELS - zero, out=rounded)
        rounded *= step
        error = (rounded if reader is None else reader(rounded)) - wanted
        error *= error
        return [float(np.dot(counts, each)) for each in error]

    return measure


MOVING_AVERAGE = "moving-average"
"""The mean over the samples of a tensor's lowest and highest value: a moving average without decay.

So the order of the samples does not matter.
"""

RANGE_METHODS: dict[str, Callable[[TensorRange, Histogram, Nonlinearity | None], TensorRange]] = {
    "minmax": lambda exact, _histogram, _reader: exact,
    MOVING_AVERAGE: lambda mean, _histogram, _reader: mean,
    "mse": mse_range,
    "percentile-99.99": lambda exact, histogram, reader: percentile_range(exact, histogram, 99.99, reader),
    "percentile-99.9": lambda exact, histogram, reader: percentile_range(exact, histogram, 99.9, reader),
}
"""Every range method, by the name that plans and options use.

Each takes a tensor's lowest and highest value (the moving average their means), its histogram, and the nonlinearity
that alone reads it. The percentiles clip a ten-thousandth and a thousandth of the values: of the 4096 picked from one
sample, about 0.4 and 4.
"""
EXACT = ("minmax", MOVING_AVERAGE)
"""The range methods that need no histogram."""
AUTO_METHODS = tuple(name for name in RANGE_METHODS if name != MOVING_AVERAGE)
"""The range methods that "auto" compares: none is the best on every network of tools/bench/quantize_zoo.py."""

METHODS = ("auto", "best", *RANGE_METHODS)
"""The range methods that a user may choose."""


# These too give their output the scale of their input in ORT's quantizer (QDQDirect8BitOp in
# onnxruntime/quantization/registry.py).
_PASSING = frozenset({"AveragePool", "Resize"})


def share_ranges(
    graph: Graph, ranges: Mapping[str, TensorRange], ops: Collection[str], floats: Collection[str] = ()
) -> tuple[dict[str, TensorRange], frozenset[str]]:
    """Returns the ranges, with one shared range for inputs and output of each node of `ops` not in `floats`.

    The shared range covers the ranges of all these tensors, and of tensors before and after them that only move values.
    If two such nodes read one tensor, their groups are merged (union-find). Also returns the tensors that share a
    range, each as the tensor from which it takes its scale (`_find_source`).
    """
    parents: dict[str, str] = {}

    def find(name: str) -> str:
        while parents.setdefault(name, name) != name:
            name = parents[name]
        return name

    for node in graph.nodes:
        if node.op_type in ops and node.name not in floats:
            names = [name for name in (*node.output[:1], *node.input) if graph.is_float(name)]
            roots = [find(_find_source(graph, name)) for name in names if name not in graph.constants]
            parents.update((root, roots[0]) for root in roots)
    groups = {name: find(name) for name in list(parents)}
    leaders = {name: groups.get(_find_source(graph, name), name) for name in ranges}
    joined: dict[str, TensorRange] = {}
    for name, own in ranges.items():
        others = joined.get(leaders[name], own)
        joined[leaders[name]] = TensorRange(low=min(others.low, own.low), high=max(others.high, own.high))
    return {name: joined[leader] for name, leader in leaders.items()}, frozenset(groups)


def _find_source(graph: Graph, name: str) -> str:
    """Returns the tensor from which a tensor takes its scale."""
    while True:
        name = range_source(graph, name)
        if name not in graph.producers or graph.producers[name].op_type not in _PASSING:
            return name
        name = graph.producers[name].input[0]
