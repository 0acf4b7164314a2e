"""What half precision costs inside a model: values that overflow, and nodes that lose too much accuracy."""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession
from edgekit.data.samples import Samples
from edgekit.devices.local.emulated import UNOPTIMIZED, find_float_types, round_to_half
from edgekit.graph.graph import read_graph
from edgekit.model.model import MAX_PROTOBUF_BYTES, Model, read_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.verify.layers.matching import adapt_sample, open_part
from edgekit.verify.metrics.tensor_metrics import SampleErrors, measure_errors, sqnr_db

HALF_MAX = 65504.0
"""The largest finite number of half precision (IEEE 754 binary16)."""
# Attention masks are minus infinity, the lowest float, or minus a thousand million: a softmax makes zero of all.
_MASK = -1e8
# Samples that were not measured reach farther than those that were.
_HEADROOM = 2.0


def find_overflows(model: Model, samples: Samples) -> dict[str, float]:
    """Returns the nodes of a float model that read or make a value near or beyond `HALF_MAX`, with the largest value.

    Small constants that a node reads count too if half precision would clamp them. Masks do not count. The nodes are in
    the order of computation. Only the tensors of one sample are in memory; subgraphs are not looked into.

    Raises:
        RuntimeRefusal: ONNX Runtime does not run the model.
        UsageError: the samples do not fit it.
    """
    graph = read_graph(model)
    computed = [name for node in graph.nodes for name in node.output if name and graph.is_float(name)]
    reach: dict[str, float] = {}
    for name in {name for node in graph.nodes for name in node.input if graph.is_float_constant(name)}:
        constant = graph.array(name)
        largest = 0.0 if constant is None else measure_size(constant)[0]
        # The margin for unseen samples does not apply, because constants do not vary.
        reach[name] = largest if largest > HALF_MAX else 0.0
    traced = open_part(model, computed)
    for sample in samples:
        given = adapt_sample(sample, model)
        for name, value in {**given, **traced.run(given)}.items():
            if value.dtype.kind == "f":
                reach[name] = max(reach.get(name, 0.0), measure_size(value)[0])
    values = {node.name: [reach.get(name, 0.0) for name in (*node.input, *node.output)] for node in graph.nodes}
    largest_of = {name: max(each, default=0.0) for name, each in values.items()}
    return {name: value for name, value in largest_of.items() if value * _HEADROOM > HALF_MAX}


def align_infinities(wanted: Array, got: Array) -> tuple[Array, Array]:
    """Returns both tensors with 0 where they hold the same non-finite value, or where a mask still hides.

    What masks is raised before a model is quantized, and clamped by a grid and by half precision: it hides as long as
    it is above no value that is not masked. Other values that are not finite are errors.
    """
    if _lies_above(wanted, _MASK) and _lies_above(got, -np.inf):
        return wanted, got
    masked = _widen(wanted) < _MASK
    hidden = masked & (got <= got[~masked & ~np.isnan(got)].min(initial=np.inf))
    both = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    meant = hidden | (~np.isfinite(got) & both)
    return np.where(meant, wanted.dtype.type(0), wanted), np.where(meant, got.dtype.type(0), got)


def measure_size(value: Array) -> tuple[float, float]:
    """Returns the largest absolute value and the RMS of a float tensor, over its finite elements that are no mask."""
    kept = _widen(value).reshape(-1)
    if not _lies_above(kept, _MASK):
        kept = kept[np.isfinite(kept) & (kept > _MASK)]
    exact = kept.astype(np.float64, copy=False)
    rms = float(np.sqrt(np.einsum("i,i->", exact, exact) / max(1, kept.size)))
    return float(max(kept.max(initial=0.0), -kept.min(initial=0.0))), rms


def _lies_above(value: Array, least: float) -> bool:
    """Returns True if all values are finite and above a limit; NaN is above none."""
    return bool(value.size) and float(value.min()) > least and float(value.max()) < np.inf


def _widen(value: Array) -> Array:
    """Converts float16 to float32, because it cannot hold the mask's value and numpy warns when comparing them."""
    return value.astype(np.float32) if value.dtype == np.float16 else value


# Chosen by hand: other samples may lose more, and a provider's kernels may differ.
_MARGIN_DB = 3.0


class LossyNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes to keep in float32, and the SQNR of the worst output.

    It is at least `kept_db` with these nodes in float32, and `sqnr_db` with all nodes in half precision.
    """

    nodes: tuple[str, ...]
    sqnr_db: float
    kept_db: float


def find_lossy(model: Model, halved: Collection[str], samples: Samples, least_db: float) -> LossyNodes | None:
    """Returns the nodes to keep in float32 for an SQNR of `least_db` on each output; None if no node needs it.

    `halved` are the nodes that would compute in half precision. The result is one contiguous run of nodes in the order
    of computation, found by two bisections: first its end, then its beginning. If half precision everywhere is enough,
    it is computed once for each sample, else about 2 log2(n) times more for the samples that lose most. A model that is
    too large to imitate is not measured.

    Raises:
        RuntimeRefusal: ONNX Runtime does not run the model.
        UsageError: the samples do not fit it.
    """
    if model.size_bytes > MAX_PROTOBUF_BYTES // 2:
        return None
    source = read_proto(model)
    names, types = [node.name for node in source.graph.node if node.name in halved], find_float_types(source)
    given = [adapt_sample(sample, model) for sample in samples]
    reference, least_db = list(map(CpuSession(model.path, UNOPTIMIZED).run, given)), least_db + _MARGIN_DB
    exact = [_measure_floats(each, each) for each in reference]

    def halve(begin: int, end: int) -> Callable[[int], Mapping[str, SampleErrors]]:
        """Returns a function that measures a sample, with the nodes from `begin` to `end` kept in float32."""
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
        round_to_half(proto, {*names[:begin], *names[end:]}, types)
        session = CpuSession(proto.SerializeToString(), UNOPTIMIZED)
        return lambda index: _measure_floats(reference[index], session.run(given[index]))

    lost = list(map(halve(0, 0), range(len(given))))
    if (lost_db := _find_worst_db(lost)) >= least_db:
        return None
    worst_first = sorted(range(len(given)), key=lambda index: _find_worst_db([lost[index]]))

    # The bisections return to some of the runs that they measured.
    @functools.cache
    def measure(begin: int, end: int) -> float:
        """Returns the SQNR in dB of the worst output, with the nodes from `begin` to `end` kept in float32.

        A sample loses at most what it loses with all nodes in half precision, as the bisections assume, and at least
        nothing. Once these bounds lie on the same side of `least_db`, no more samples are run; the result is the bound
        that is closer to it.
        """
        measure_sample, found = halve(begin, end), list[Mapping[str, SampleErrors]]()
        most, least = math.inf, lost_db
        for index in worst_first:
            found.append(measure_sample(index))
            rest = worst_first[len(found) :]
            most, least = (_find_worst_db([*found, *(each[other] for other in rest)]) for each in (exact, lost))
            if most < least_db or least >= least_db:
                break
        return most if most < least_db else least

    end = bisect_left(range(len(names)), x=True, key=lambda count: measure(0, count) >= least_db)
    # From the end backwards: the shortest run before `end` that is enough.
    length = bisect_left(range(end), x=True, key=lambda count: measure(end - count, end) >= least_db)
    nodes = tuple(names[end - length : end])
    return LossyNodes(nodes=nodes, sqnr_db=lost_db, kept_db=measure(end - length, end))


def _measure_floats(wanted: Tensors, found: Tensors) -> dict[str, SampleErrors]:
    floats = {name: value for name, value in wanted.items() if value.dtype.kind == "f"}
    return {name: measure_errors(*align_infinities(value, found[name])) for name, value in floats.items()}


def _find_worst_db(samples: Sequence[Mapping[str, SampleErrors]]) -> float:
    """Returns the SQNR in dB of the worst output over some samples: minus infinity if one is not finite."""
    if any(error.non_finite for sample in samples for error in sample.values()):
        return -math.inf
    return min((sqnr_db([each[name] for each in samples]) for name in next(iter(samples), {})), default=math.inf)


HALF_MIN = 2.0**-24
"""The smallest positive number of half precision, 6e-8."""


class HalfLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that half precision represents badly, and the SQNR of the worst output with all nodes in half precision.

    `share` of its values lie beyond `HALF_MAX`, or below `HALF_MIN` without being 0; `low` is the smallest magnitude
    above 0, `high` the largest.
    """

    name: str
    share: float
    low: float
    high: float
    sqnr_db: float


def find_half_loss(model: Model, halved: Collection[str], samples: Samples, least_db: float) -> HalfLoss | None:
    """Returns the tensor of some nodes that loses most in half precision; None if outputs keep `least_db` with all.

    It is the one with the largest share of values beyond float16, among the tensors of the nodes that `find_lossy`
    would keep in float32.

    Raises:
        RuntimeRefusal: ONNX Runtime does not run the model.
        UsageError: the samples do not fit it.
    """
    if (lossy := find_lossy(model, halved, samples, least_db)) is None:
        return None
    graph = read_graph(model)
    nodes = [node for node in graph.nodes if node.name in lossy.nodes]
    names = list(dict.fromkeys(name for node in nodes for name in (*node.input, *node.output) if graph.is_float(name)))
    traced = open_part(model, [name for name in names if name in graph.producers])
    found = {name: HalfLoss(name=name, share=0, low=math.inf, high=0, sqnr_db=lossy.sqnr_db) for name in names}
    for sample in samples:
        given = adapt_sample(sample, model)
        values = {name: value for name in names if (value := graph.array(name)) is not None}
        for name, value in {**given, **values, **traced.run(given)}.items():
            if name in found and value.size:
                size, before = np.abs(_widen(value)), found[name]
                lost = ((size > 0) & (size < HALF_MIN)) | (np.isfinite(size) & (size > HALF_MAX))
                found[name] = msgspec.structs.replace(
                    before,
                    share=before.share + float(lost.mean()) / samples.count,
                    low=min(before.low, float(size[size > 0].min(initial=np.inf))),
                    high=max(before.high, float(size[np.isfinite(size)].max(initial=0))),
                )
    return max(found.values(), key=lambda each: each.share, default=None)
