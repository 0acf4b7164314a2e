"""One streaming pass over the samples that measures every float activation, for all targets at once."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.errors import DataError, ModelError
from edgekit.model import Model, save_proto
from edgekit.quantize.graph import Graph, float_activations, read_graph
from edgekit.quantize.held_out import HeldOut, save_held_out
from edgekit.quantize.histogram import Histogram, HistogramGrower
from edgekit.quantize.judge import judge_points
from edgekit.quantize.moments import Moment, MomentGrower, block_sizes, save_moments
from edgekit.quantize.observe import HIGHS, LOWS, PICKS, VECTORS, Observation, observe_graph, picked_values
from edgekit.quantize.ranges import RANGE_METHODS, TensorRange, read_by
from edgekit.samples import Samples
from edgekit.tensors import Array, Tensors

_FLUSH_SAMPLES = 32


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the float activations of a model do over some samples: plain data, good for every target.

    `ranges` holds for each range method the range of each float activation of the main graph; "minmax" is exact, the
    others come from histograms of at most `picked` values a tensor and sample. `samples_sha256` covers every input.
    `statistics` is the folder with what is too big for plain data: moments of layer inputs, and the samples held out
    to judge by. It may go when all plans are applied; "" means it is gone.
    """

    model_sha256: str
    samples_sha256: str
    samples: int
    picked: int
    ranges: dict[str, dict[str, TensorRange]]
    statistics: str


def calibrate_model(model: Model, samples: Samples, *, work: Path) -> Calibration:
    """Measures every float activation of a prepared float model, streaming the samples once.

    Memory does not grow with the number of samples. `work` is a folder for the statistics and intermediate files.

    Raises:
        DataError: there is no sample, or a sample makes an activation infinite or NaN.
        ModelError: the model is quantized already, is older than opset 13, or has no float activation.
    """
    graph = read_graph(model)
    points = {point.tensor for point in judge_points(graph)}
    observation = observe_graph(graph, samples.count, points)
    if not (observation.highs or observation.bounds):
        raise ModelError(
            f"no node of '{model.path.name}' can be quantized: nothing in it computes in float32",
            hint="give the float32 model if this is a float16 one, or build it with --precision fp32",
        )
    work.mkdir(parents=True, exist_ok=True)
    session = _load(observation.proto, work / "observed.onnx")
    observation = msgspec.structs.replace(observation, proto=onnx.ModelProto())
    state, held_out, digest = _Pass(observation), HeldOut(samples.count, points), hashlib.sha256()
    for index, sample in enumerate(samples):
        digest.update(_digest_sample(sample))
        values = session.run(sample)
        if _has_non_finite(values):
            _refuse(graph, sample, samples.source, index, work)
        state.add(values, learn=not held_out.offer(index, sample, values))
    if not state.count:
        raise DataError(f"'{samples.source}' holds no sample", hint="give at least one, better 100")
    save_held_out(work, held_out)
    save_moments(work / "moments.npz", state.moments())
    return Calibration(
        model_sha256=model.sha256,
        samples_sha256=digest.hexdigest(),
        samples=state.count,
        picked=picked_values(samples.count),
        ranges=_all_ranges(graph, observation.aliases, state.exact_ranges(), state.histograms()),
        statistics=str(work),
    )


class _Pass:
    """What is kept between samples: running extremes, histograms and moments."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._lows = np.full(sum(count for _, count in observation.lows), np.inf)
        self._highs = np.full(sum(count for _, count in observation.highs), -np.inf)
        self._growers = [HistogramGrower() for _ in observation.picks]
        self._pending: list[Array] = []
        layers = tuple(layer for layer, _ in observation.cuts)
        sizes = block_sizes(layers)
        self._moments = [MomentGrower(layer, cut, sizes[layer.node]) for layer, cut in observation.cuts]
        self.count = 0

    def add(self, values: Tensors, *, learn: bool) -> None:
        """Takes in the outputs for one sample; its moments only where it is one to `learn` from."""
        self.count += 1
        if LOWS in values:
            self._lows = np.minimum(self._lows, values[LOWS])
        if HIGHS in values:
            self._highs = np.maximum(self._highs, values[HIGHS])
        if PICKS in values:
            self._pending.append(values[PICKS])
        if len(self._pending) == _FLUSH_SAMPLES:
            self._flush()
        if learn:
            for (layer, _), moment in zip(self._observation.cuts, self._moments, strict=True):
                moment.add(values[VECTORS + layer.node])

    def exact_ranges(self) -> dict[str, TensorRange]:
        lows, highs = self._channel_extremes()
        return {name: TensorRange(low=float(lows[name].min()), high=float(highs[name].max())) for name in lows}

    def histograms(self) -> dict[str, Histogram]:
        self._flush()
        return {name: grower.freeze() for (name, _), grower in zip(self._observation.picks, self._growers, strict=True)}

    def moments(self) -> dict[str, Moment]:
        lows, highs = self._channel_extremes()
        cuts = zip(self._observation.cuts, self._moments, strict=True)
        return {layer.node: moment.freeze(lows[layer.source], highs[layer.source]) for (layer, _), moment in cuts}

    def _channel_extremes(self) -> tuple[dict[str, Array], dict[str, Array]]:
        lows = _split(self._lows, self._observation.lows)
        highs = _split(self._highs, self._observation.highs)
        for name, (low, high) in self._observation.bounds.items():
            if low is not None:
                lows[name] = np.array([low])
            if high is not None:
                highs[name] = np.array([high])
        for name in lows:
            lows[name], highs[name] = np.broadcast_arrays(lows[name], highs[name])
        return lows, highs

    def _flush(self) -> None:
        if not self._pending:
            return
        block = np.stack(self._pending)
        self._pending = []
        ends = np.cumsum([count for _, count in self._observation.picks])
        for grower, part in zip(self._growers, np.split(block, ends[:-1], axis=1), strict=True):
            grower.add(part)


def _split(values: Array, parts: tuple[tuple[str, int], ...]) -> dict[str, Array]:
    ends = np.cumsum([count for _, count in parts])[:-1]
    return {name: part for (name, _), part in zip(parts, np.split(values, ends), strict=True)}


def _all_ranges(
    graph: Graph, aliases: dict[str, str], exact: dict[str, TensorRange], histograms: dict[str, Histogram]
) -> dict[str, dict[str, TensorRange]]:
    empty = HistogramGrower().freeze()
    readers = read_by(graph)
    ranges: dict[str, dict[str, TensorRange]] = {}
    for method, choose in RANGE_METHODS.items():
        chosen = {name: choose(span, histograms.get(name, empty), readers.get(name)) for name, span in exact.items()}
        for name in reversed(list(aliases)):
            chosen[name] = chosen[aliases[name]]
        ranges[method] = {name: chosen[name] for name in float_activations(graph) if name in chosen}
    return ranges


def _load(proto: onnx.ModelProto, path: Path) -> CpuSession:
    save_proto(proto, path)
    return CpuSession(path, SessionSettings(level=Level.ALL))


def _digest_sample(sample: Tensors) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(sample):
        value = sample[name]
        digest.update(f"{name}:{value.dtype}:{value.shape};".encode())
        digest.update(repr(value.tolist()).encode() if value.dtype.kind in "OU" else np.ascontiguousarray(value).data)
    return digest.digest()


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
