"""What half precision costs inside a model: values that overflow, and nodes that lose too much."""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession
from edgekit.data.samples import Samples
from edgekit.devices.local.emulated import UNOPTIMIZED, find_float_types, round_to_half
from edgekit.graph.graph import Graph, read_graph
from edgekit.model.model import MAX_PROTOBUF_BYTES, Model, read_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.verify.layers.matching import adapt_sample, open_traced
from edgekit.verify.metrics.tensor_metrics import SampleErrors, measure_errors, sqnr_db

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


def align_infinities(wanted: Array, got: Array, size: Size | None = None) -> tuple[Array, Array]:
    """Returns both with zeros where they agree in what is not finite, and where both hold the value of a mask.

    What is not finite after that is an error. `size` is that of `wanted`, where it is known.
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


# Chosen by hand: samples that nobody has seen may lose more, and a provider has formulas of its own.
_MARGIN_DB = 3.0


class LossyNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that stay in float32 so that the outputs keep `kept_db`; with all in half precision they keep `sqnr_db`."""

    nodes: tuple[str, ...]
    sqnr_db: float
    kept_db: float


class _Search(msgspec.Struct, frozen=True, kw_only=True):
    """A float model, the nodes that half precision may have in the order of computation, and what it gives in float."""

    proto: onnx.ModelProto
    halved: Sequence[str]
    types: Mapping[str, int]
    samples: tuple[Tensors, ...]
    wanted: tuple[Mapping[str, Array], ...]


def find_lossy(model: Model, halved: Collection[str], samples: Samples, least_db: float) -> LossyNodes | None:
    """Returns the nodes that must stay in float32 for `least_db` of SQNR on each output, None where all may be halves.

    `halved` are the nodes that would compute in half precision. What is found is one run of nodes in the order of
    computation, by two bisections: first where it ends, then where it begins. With all of them in half precision as
    the provider has it the model is computed once, else some 2 log2(n) times. A model too large to imitate is not.

    Raises:
        RuntimeRefusal: ONNX Runtime does not run the model.
        UsageError: the samples do not fit it.
    """
    if model.size_bytes > MAX_PROTOBUF_BYTES // 2:
        return None
    search = _begin(model, halved, samples)
    # The bisections come back to some of the runs that they measured.
    measure = functools.cache(functools.partial(_measure, search))
    lost_db, least_db = measure(0, 0), least_db + _MARGIN_DB
    if lost_db >= least_db:
        return None
    end = _bisect(len(search.halved), lambda count: measure(0, count) >= least_db)
    # From the end backwards: the shortest run before `end` that is enough.
    length = _bisect(end, lambda count: measure(end - count, end) >= least_db)
    nodes = tuple(search.halved[end - length : end])
    return LossyNodes(nodes=nodes, sqnr_db=lost_db, kept_db=measure(end - length, end))


def _begin(model: Model, halved: Collection[str], samples: Samples) -> _Search:
    proto = read_proto(model)
    given = tuple(adapt_sample(sample, model) for sample in samples)
    session = CpuSession(model.path, UNOPTIMIZED)
    return _Search(
        proto=proto,
        halved=[node.name for node in proto.graph.node if node.name in halved],
        types=find_float_types(proto),
        samples=given,
        wanted=tuple(session.run(sample) for sample in given),
    )


def _bisect(most: int, is_enough: Callable[[int], bool]) -> int:
    """Returns the least count up to `most` that is enough; `most` is, and more is enough where less is."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _measure(search: _Search, begin: int, end: int) -> float:
    """Returns the SQNR of the worst float output, in dB, with the nodes from `begin` to `end` left in float32."""
    proto = onnx.ModelProto()
    proto.CopyFrom(search.proto)
    round_to_half(proto, {*search.halved[:begin], *search.halved[end:]}, search.types)
    session = CpuSession(proto.SerializeToString(), UNOPTIMIZED)
    errors: dict[str, list[SampleErrors]] = {}
    for sample, wanted in zip(search.samples, search.wanted, strict=True):
        found = session.run(sample)
        for name, value in wanted.items():
            if value.dtype.kind == "f":
                errors.setdefault(name, []).append(measure_errors(*align_infinities(value, found[name])))
    if any(error.non_finite for each in errors.values() for error in each):
        return -math.inf
    return min(map(sqnr_db, errors.values()), default=math.inf)
