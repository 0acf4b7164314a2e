"""The range of an activation that its integers should span, chosen from its histogram."""

from collections.abc import Callable

import msgspec
import numpy as np

from edgekit.quantize.graph import Graph
from edgekit.quantize.histogram import Histogram
from edgekit.tensors import Array

LEVELS = 255
"""Steps between the lowest and the highest of 256 integers."""

Reader = Callable[[Array], Array]
"""What the graph computes from a tensor at once, elementwise: errors count after it."""


class TensorRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lowest and highest value that the integers of a tensor stand for, before zero is made exact."""

    low: float
    high: float


def percentile_range(exact: TensorRange, histogram: Histogram, percent: float) -> TensorRange:
    """Returns the range that holds `percent` of the values, the rest cut off in equal parts at both ends."""
    if not histogram.total:
        return exact
    cumulative = np.cumsum(histogram.counts) / histogram.total
    tail = (100 - percent) / 200
    low = histogram.centers[int(np.searchsorted(cumulative, tail))]
    high = histogram.centers[min(int(np.searchsorted(cumulative, 1 - tail)), len(cumulative) - 1)]
    return TensorRange(low=max(exact.low, float(low)), high=min(exact.high, float(high)))


def mse_range(exact: TensorRange, histogram: Histogram, reader: Reader | None = None) -> TensorRange:
    """Returns the range with the least mean squared rounding and clipping error at 8 bits, after `reader`.

    Both ends shrink together over 50 factors, then each by itself.
    """
    if not histogram.total or exact.high <= exact.low:
        return exact
    factors = np.linspace(1.0, 0.02, 50).tolist()

    def best(candidates: list[tuple[float, float]]) -> tuple[float, float]:
        return min(candidates, key=lambda ends: quantization_error(ends[0], ends[1], histogram, reader))

    low, high = best([(exact.low * factor, exact.high * factor) for factor in factors])
    if exact.low < 0:
        low, high = best([(low, high), *((exact.low * factor, high) for factor in factors)])
    if exact.high > 0:
        low, high = best([(low, high), *((low, exact.high * factor) for factor in factors)])
    return TensorRange(low=low, high=high)


def quantization_error(low: float, high: float, histogram: Histogram, reader: Reader | None = None) -> float:
    """Returns the summed squared error, after `reader`, of 8-bit integers over [low, high] made to include zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / LEVELS
    values = histogram.centers
    if step > 0:
        zero = round(-low / step)
        rounded = (np.clip(np.rint(values / step) + zero, 0, LEVELS) - zero) * step
    else:
        rounded = np.zeros_like(values)
    error = rounded - values if reader is None else reader(rounded) - reader(values)
    return float(np.dot(histogram.counts, error * error))


def read_by(graph: Graph) -> dict[str, Reader]:
    """Returns the tensors that only an elementwise function reads, such as x * sigmoid(x), with that function."""
    readers: dict[str, Reader] = {}
    for name, nodes in graph.consumers.items():
        if name in graph.outputs | graph.captured or name in graph.initializers:
            continue
        ops = sorted(node.op_type for node in nodes)
        if len(ops) == 1 and ops[0] in _READERS:
            readers[name] = _READERS[ops[0]]
        elif len(ops) == 2 and ops[0] == "Mul" and ops[1] in _GATES:
            gate = next(node for node in nodes if node.op_type != "Mul")
            product = next(node for node in nodes if node.op_type == "Mul")
            if set(product.input) == {name, gate.output[0]} and not gate.attribute:
                readers[name] = _GATES[ops[1]]
    return readers


def _sigmoid(values: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -80, 80))))


def _hard_swish(values: Array) -> Array:
    return values * np.clip(values / 6 + 0.5, 0, 1)


_READERS: dict[str, Reader] = {"Sigmoid": _sigmoid, "Tanh": np.tanh, "HardSwish": _hard_swish}
_GATES: dict[str, Reader] = {"Sigmoid": lambda values: values * _sigmoid(values)}

RANGE_METHODS: dict[str, Callable[[TensorRange, Histogram, Reader | None], TensorRange]] = {
    "minmax": lambda exact, _histogram, _reader: exact,
    "mse": mse_range,
    "percentile-99.99": lambda exact, histogram, _reader: percentile_range(exact, histogram, 99.99),
    "percentile-99.9": lambda exact, histogram, _reader: percentile_range(exact, histogram, 99.9),
}
"""Every range method, by the name that plans and options use."""
