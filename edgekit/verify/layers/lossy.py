"""Which nodes of a float model lose too much in half precision: those that must stay in float32 for its limit.

Half precision has 11 bits and ends below at 6e-8: powers and logarithms of small values lose all of theirs, although
nothing overflows. Which nodes those are cannot be told from their values, for a later one may need the lost bits or
not; so parts of the model are left in float32 and its outputs measured.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import onnx

from edgekit._ort import CpuSession
from edgekit.data.samples import Samples
from edgekit.devices.local.half import UNOPTIMIZED, find_float_types, round_to_half
from edgekit.model.model import MAX_PROTOBUF_BYTES, Model, read_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.verify.layers.overflows import settle_infinities
from edgekit.verify.matching.trace import adapt_sample
from edgekit.verify.metrics.tensor_metrics import SampleErrors, measure_errors, sqnr_db

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
                errors.setdefault(name, []).append(measure_errors(*settle_infinities(value, found[name])))
    return min((_judge(each) for each in errors.values()), default=math.inf)


def _judge(errors: Sequence[SampleErrors]) -> float:
    return -math.inf if any(error.non_finite for error in errors) else sqnr_db(errors)
