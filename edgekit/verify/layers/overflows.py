"""Values that half precision cannot hold inside a model: which there are, and which are meant so, as masks are."""

import msgspec
import numpy as np

from edgekit.data.samples import Samples
from edgekit.graph.graph import Graph, read_graph
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.verify.matching.trace import adapt_sample, open_traced

HALF_MAX = 65504.0
"""The largest finite number of half precision (IEEE 754 binary16)."""
# Attention masks are minus infinity, the lowest float, or minus a thousand million: a softmax makes zero of all.
_MASK = -1e8
# Samples that nobody has seen reach farther than those that were looked at.
_HEADROOM = 2.0


def find_overflows(model: Model, samples: Samples) -> dict[str, float]:
    """Returns the nodes of a float model that read or make a value near or beyond `HALF_MAX`, with the largest.

    Small constants that a node reads count too where half precision would clamp them. Masks do not count. The order is
    that of computation. Memory holds the tensors of one sample; bodies of nodes are not looked into.

    Raises:
        RuntimeRefusal: ONNX Runtime does not run the model.
        UsageError: the samples do not fit it.
    """
    graph = read_graph(model)
    computed = [name for node in graph.nodes for name in node.output if name and graph.is_float(name)]
    reach = {name: _measure_constant(graph, name) for node in graph.nodes for name in node.input if name}
    traced = open_traced(model, computed)
    for sample in samples:
        given = adapt_sample(sample, model)
        for name, value in {**given, **traced.run(given)}.items():
            if value.dtype.kind == "f":
                reach[name] = max(reach.get(name, 0.0), _find_largest(value)[1])
    largest = {
        node.name: max((reach.get(name, 0.0) for name in (*node.input, *node.output)), default=0.0)
        for node in graph.nodes
    }
    return {name: value for name, value in largest.items() if value * _HEADROOM > HALF_MAX}


def _measure_constant(graph: Graph, name: str) -> float:
    """Returns the largest value of a small constant that half precision would clamp, else 0: a sample moves none."""
    constant = graph.array(name) if graph.is_float_constant(name) else None
    largest = 0.0 if constant is None else _find_largest(constant)[1]
    return largest if largest > HALF_MAX else 0.0


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The largest absolute value of a tensor and the root of its mean square: of what is finite and no mask.

    `is_plain` tells that all of it is.
    """

    largest: float
    rms: float
    is_plain: bool


def settle_infinities(wanted: Array, got: Array, size: Size | None = None) -> tuple[Array, Array]:
    """Returns both with zeros where neither is a number and they agree, and where both are a mask.

    What is left is not finite by mistake. `size` is that of `wanted`, where it is known.
    """
    is_plain = _is_plain(wanted, _MASK) if size is None else size.is_plain
    if is_plain and _is_plain(got, -HALF_MAX):
        return wanted, got
    masked = (_widen(wanted) < _MASK) & (got <= -HALF_MAX)
    both = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    meant = masked | (~np.isfinite(got) & both)
    return np.where(meant, wanted.dtype.type(0), wanted), np.where(meant, got.dtype.type(0), got)


def measure_size(value: Array) -> Size:
    """Returns the size of a tensor of floats."""
    is_plain, largest = _find_largest(value)
    kept = value.astype(np.float64, copy=False).reshape(-1) if is_plain else _keep_measurable(value)
    rms = float(np.sqrt(np.einsum("i,i->", kept, kept) / max(1, kept.size)))
    return Size(largest=largest, rms=rms, is_plain=is_plain)


def _find_largest(value: Array) -> tuple[bool, float]:
    """Returns whether all of a tensor is finite and no mask, and the largest absolute value of what is."""
    low, high = _find_ends(value)
    if low > _MASK and high < np.inf:
        return True, abs(max(-low, high, 0.0))
    return False, float(np.abs(_keep_measurable(value)).max(initial=0.0))


def _is_plain(value: Array, above: float) -> bool:
    """Returns True if all values are finite and none is as low as a mask."""
    low, high = _find_ends(value)
    return low > above and high < np.inf


def _find_ends(value: Array) -> tuple[float, float]:
    """Returns the least and the largest value, NaN where one is NaN or there is none: it is beyond no limit."""
    return (float(value.min()), float(value.max())) if value.size else (np.nan, np.nan)


def _keep_measurable(value: Array) -> Array:
    wide = _widen(value)
    return wide[np.isfinite(wide) & (wide > _MASK)].astype(np.float64)


def _widen(value: Array) -> Array:
    """Returns float32 for half precision, which cannot hold the mask's value: numpy warns of comparing them."""
    return value.astype(np.float32) if value.dtype == np.float16 else value
