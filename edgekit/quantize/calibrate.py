"""One streaming pass over the samples that measures every float activation, for all targets at once."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data_check import digest_sample
from edgekit.errors import DataError, ModelError, UsageError, suggest_name
from edgekit.model import MAX_PROTOBUF_BYTES, Model, save_proto
from edgekit.quantize.graph import Graph, float_activations, read_graph
from edgekit.quantize.held_out import HeldOut, save_held_out
from edgekit.quantize.histogram import HistogramGrower
from edgekit.quantize.judge import judge_points
from edgekit.quantize.moments import save_moments
from edgekit.quantize.observe import Observation, observe_graph, picked_values
from edgekit.quantize.ranges import (
    AUTO_METHODS,
    METHODS,
    PLAIN_METHODS,
    RANGE_METHODS,
    Seen,
    TensorRange,
    read_by,
    snap_range,
)
from edgekit.quantize.tally import Tally
from edgekit.samples import Samples, select_samples, spread_indices
from edgekit.tensors import Array, Tensors

MEASURED_SAMPLES = 64
"""From how many samples histograms and moments come, held-out ones among them."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the float activations of a model do over some samples: plain data, good for every target.

    `ranges` holds for each range method the range of each float activation of the main graph; "minmax" is exact,
    "mean" too, the others come from histograms of at most `picked` values a tensor and each of the `measured` samples.
    `samples_sha256` covers every input.
    `statistics` is the folder with what is too big for plain data: moments of layer inputs, and the samples held out
    to judge by. It may go when all plans are applied; "" means that there are none.
    """

    model_sha256: str
    samples_sha256: str
    samples: int
    measured: int
    picked: int
    ranges: dict[str, dict[str, TensorRange]]
    statistics: str


def calibrate_model(
    model: Model, samples: Samples, *, work: Path, methods: Sequence[str] = AUTO_METHODS, fitting: bool = True
) -> Calibration:
    """Measures every float activation of a prepared float model, streaming the samples.

    The lowest and highest values come from every sample. Histograms, for the range methods that want them, and with
    `fitting` the moments that rounding learns from come from MEASURED_SAMPLES samples, spread evenly; these are read
    in a pass of their own. Memory does not grow with the number of samples. `work` is a folder for the statistics and
    intermediate files.

    Raises:
        UsageError: there is no such range method.
        DataError: there is no sample, or a sample makes an activation infinite or NaN.
        ModelError: the model is quantized already, is older than opset 13, or has no float activation.
    """
    graph = read_graph(model)
    methods = _check_methods(methods)
    work.mkdir(parents=True, exist_ok=True)
    if not samples.count:
        raise DataError(f"'{samples.source}' holds no sample", hint="give at least one, better 100")
    indices = spread_indices(samples.count, MEASURED_SAMPLES) if fitting or methods != PLAIN_METHODS else ()
    picked = picked_values(len(indices)) if methods != PLAIN_METHODS else 0
    points = {point.tensor for point in judge_points(graph)} if fitting else set[str]()
    whole = _store(
        observe_graph(graph, points, picked=picked, vectors_from=len(indices) if fitting else 0), work / "observed.onnx"
    )
    _check_computes(whole, model)
    run = _Run(graph=graph, samples=samples, work=work, tally=Tally(whole), digests={})
    held_out = HeldOut(len(indices), points)
    others = sorted(set(range(samples.count)) - set(indices))
    if indices:
        _measure(run, work / "observed.onnx", indices, held_out)
    if others:
        if indices:
            _store(observe_graph(graph), work / "observed.onnx")
        _measure(run, work / "observed.onnx", others, HeldOut(0, ()))
    if fitting:
        save_held_out(work, held_out)
        save_moments(work / "moments.npz", run.tally.moments())
    return Calibration(
        model_sha256=model.sha256,
        samples_sha256=_join_digests(run.digests),
        samples=len(run.digests),
        measured=len(indices),
        picked=picked,
        ranges=_all_ranges(graph, whole.aliases, run.tally, methods),
        statistics=str(work) if fitting else "",
    )


def _check_computes(observation: Observation, model: Model) -> None:
    if not (observation.highs or observation.bounds):
        raise ModelError(
            f"no node of '{model.path.name}' can be quantized: nothing in it computes in float32",
            hint="give the float32 model if this is a float16 one, or build it with --precision fp32",
        )


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    """What the passes over the samples share; `digests` holds the sha256 of each sample by its position."""

    graph: Graph
    samples: Samples
    work: Path
    tally: Tally
    digests: dict[int, bytes]


def _store(observation: Observation, path: Path) -> Observation:
    """Writes an observed graph and returns the observation without it, so that its weights are not held in memory."""
    if observation.proto.ByteSize() < MAX_PROTOBUF_BYTES:
        path.write_bytes(observation.proto.SerializeToString())
    else:
        save_proto(observation.proto, path)
    return msgspec.structs.replace(observation, proto=onnx.ModelProto())


def _measure(run: _Run, observed: Path, indices: Sequence[int], held_out: HeldOut) -> None:
    session = CpuSession(observed, SessionSettings(level=Level.ALL))
    for place, (index, sample) in enumerate(zip(indices, select_samples(run.samples, indices), strict=False)):
        run.digests[index] = digest_sample(sample)
        values = session.run(sample)
        if _has_non_finite(values):
            _refuse(run.graph, sample, run.samples.source, index, run.work)
        run.tally.add(values, learn=not held_out.offer(place, sample, values))


def _check_methods(methods: Sequence[str]) -> tuple[str, ...]:
    for method in methods:
        if method not in RANGE_METHODS:
            raise UsageError(f"there is no range method '{method}'", hint=suggest_name(method, METHODS))
    return tuple(name for name in RANGE_METHODS if name in {*methods, *PLAIN_METHODS})


def _join_digests(digests: Mapping[int, bytes]) -> str:
    return hashlib.sha256(b"".join(digests[index] for index in sorted(digests))).hexdigest()


def _all_ranges(
    graph: Graph, aliases: dict[str, str], tally: Tally, methods: Sequence[str]
) -> dict[str, dict[str, TensorRange]]:
    exact, mean, histograms = tally.exact_ranges(), tally.mean_ranges(), tally.histograms()
    empty = HistogramGrower().freeze()
    readers = read_by(graph)
    ranges: dict[str, dict[str, TensorRange]] = {}
    for method in methods:
        choose = RANGE_METHODS[method]
        chosen = {
            name: choose(Seen(exact=span, mean=mean[name], histogram=histograms.get(name, empty)), readers.get(name))
            for name, span in exact.items()
        }
        for name in reversed(list(aliases)):
            chosen[name] = chosen[aliases[name]]
        ranges[method] = {name: snap_range(chosen[name]) for name in float_activations(graph) if name in chosen}
    return ranges


def _load(proto: onnx.ModelProto, path: Path) -> CpuSession:
    save_proto(proto, path)
    return CpuSession(path, SessionSettings(level=Level.ALL))


def _has_non_finite(values: Tensors) -> bool:
    return any(value.dtype.kind == "f" and not np.isfinite(value).all() for value in values.values())


def _refuse(graph: Graph, sample: Tensors, source: str, index: int, work: Path) -> None:
    for name in sample:
        _refuse_value(sample[name], f"input '{name}'", source, index)
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    del proto.graph.output[:]
    computed = [name for name in float_activations(graph) if name in graph.producers]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed)
    for name, value in _load(proto, work / "located.onnx").run(sample).items():
        _refuse_value(value, f"tensor '{name}' (made by {graph.producers[name].op_type})", source, index)
    raise DataError(f"sample {index} of '{source}' gives a value that is not finite", hint="mend or drop the sample")


def _refuse_value(value: Array, what: str, source: str, index: int) -> None:
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        kind = "NaN" if np.isnan(value).any() else "infinity"
        raise DataError(f"sample {index} of '{source}' gives {kind} in {what}", hint="mend or drop the sample")
