"""The passes of a calibration over its samples: cached samples are skipped, and new results are cached."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import onnx

from edgekit._files import digest_bytes
from edgekit._ort import VERSION, CpuSession, Level, SessionSettings
from edgekit.data.data_check import digest_sample, find_missing
from edgekit.data.samples import Samples, select_samples
from edgekit.errors import DataError, EdgekitError, ModelError, RuntimeRefusal
from edgekit.graph.graph import Graph
from edgekit.graph.match import find_infinite_tensors
from edgekit.machine import map_in_order, release_memory
from edgekit.model.external import ArrayFile
from edgekit.model.model import Model, refill, write_proto
from edgekit.model.tensors import Array, StatedOutput, Tensors
from edgekit.progress import Progress, say_nothing
from edgekit.quantize.calibration.augment import HIGHS, LOWS, SCORES, AugmentedGraph, augment_graph
from edgekit.quantize.calibration.held_out import LEAST_BYTES, HeldOut
from edgekit.quantize.calibration.statistics import SUMMED_SAMPLES, ActivationStatistics
from edgekit.quantize.calibration.store import CacheSettings, CalibrationCache, Checkpoint, open_cache
from edgekit.quantize.effort import count_side_by_side
from edgekit.quantize.graph.float_graph import float_activations
from edgekit.quantize.ranges import AUTO_METHODS

_PART = "measured"
# Bytes that a checkpoint may hold besides its arrays: for names and shapes, and for the digest of each sample.
_SLACK_BYTES, _SAMPLE_BYTES = 1 << 24, 64
_PROGRESS_SECONDS = 2.0  # chosen by hand
# The minimum and maximum of an empty tensor are infinite. Those of others skip NaN in ONNX Runtime, but the sums among
# the values reveal it.
_OF_EMPTY = {LOWS: np.inf, HIGHS: -np.inf, SCORES: np.inf}


class CalibrationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `calibrate_model`, `keep` and `steps`.

    `keep` is called with the index and the outputs of each sample that runs (not of cached ones); it must copy arrays
    that it stores. `steps` samples in a row are one sequence.
    """

    work: Path
    methods: tuple[str, ...] = AUTO_METHODS
    fitting: bool = True
    cache: CacheSettings | None = None
    outputs: dict[str, StatedOutput] = {}
    progress: Progress = say_nothing
    keep: Callable[[int, Tensors], None] = lambda _index, _outputs: None
    steps: int = 1


class CalibrationTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: histograms, moments and extremes of the samples at `indices`, only extremes of `others`.

    For held-out samples the tensors `compared` are stored. `picked` and `patch_samples` are those of `augment_graph`.
    """

    model: Model
    graph: Graph
    samples: Samples
    how: CalibrationOptions
    indices: tuple[int, ...]
    compared: tuple[str, ...]
    picked: int
    patch_samples: int

    @property
    def others(self) -> tuple[int, ...]:
        """The indices of the samples of which only extremes are measured."""
        return tuple(sorted(set(range(self.samples.count)) - set(self.indices)))


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements so far.

    `seen` holds the sha256 of each measured sample by its index; `known` is how many samples came from a cache.
    """

    task: CalibrationTask
    cache: CalibrationCache
    augmented: AugmentedGraph
    statistics: ActivationStatistics
    held_out: HeldOut
    seen: dict[int, bytes]
    known: int = 0

    def arrays(self) -> dict[str, Array]:
        """Returns all measurements, with pending values added (`ActivationStatistics.arrays`)."""
        return self.statistics.arrays() | {f"held.{name}": array for name, array in self.held_out.arrays.items()}

    def fitted(self) -> list[int]:
        """Returns the indices of the fully measured samples that are not held out: the candidates for fitting."""
        held = self.held_out.positions()
        return [index for position, index in enumerate(self.task.indices) if position not in held]

    def restore(self, found: Checkpoint) -> bool:
        """Continues from a checkpoint; returns False if it does not fit, which makes these measurements unusable."""
        self.seen.clear()
        self.seen.update(found.seen)
        held = {name[5:]: array for name, array in found.arrays.items() if name.startswith("held.")}
        others = {name: array for name, array in found.arrays.items() if not name.startswith("held.")}
        return self.statistics.restore(others) and self.held_out.restore(held)


def measure_samples(task: CalibrationTask) -> Measurements:
    """Runs the augmented model over all samples that the cache does not know.

    Raises:
        DataError: a sample makes an activation infinite or NaN, or differs from the one read before.
        ModelError: nothing in the model computes in float32.
        OutputError: the cache cannot be written.
    """
    whole = augment_graph(task.graph, task.compared, picked=task.picked, patch_samples=task.patch_samples)
    whole, progress = _write(whole, task.how.work / "augmented.onnx"), task.how.progress
    if not (whole.highs or whole.bounds):
        graph, name = task.graph, task.model.path.name
        float32 = {each for each, value in graph.values.items() if value.dtype == "float32"}
        floats = [node.op_type for node in graph.nodes if not float32.isdisjoint((*node.input, *node.output))]
        if not floats:
            words = f"no node of '{name}' can be quantized: nothing in it computes in float32"
            raise ModelError(words, hint="export it in float32, or build it with --precision fp32")
        ops = ", ".join(dict.fromkeys(floats))
        words = f"no node of '{name}' can be quantized: no target computes {ops} in integers"
        raise ModelError(words, hint="build it with --precision fp32")
    # Histograms and patches cost several times as much as extremes (tools/bench/calibrate_ratio.py), so samples that
    # are not needed for them run without.
    with open_cache(task.how.cache, _key(task, whole), progress) as cache:
        run = _resume(task, whole, cache)
        known, count = len(run.seen), task.samples.count
        if known == count:
            progress(f"the calibration with {count} samples is read from the cache")
        else:
            progress(f"calibrate with {count} samples" + (f", {known} known from the cache" if known else ""))
        _measure(run, task.indices, learning=True)
        if task.indices and task.others and len(run.seen) < count:
            _write(augment_graph(task.graph), task.how.work / "augmented.onnx")
        _measure(run, task.others, learning=False)
    return msgspec.structs.replace(run, known=known)


def _key(task: CalibrationTask, whole: AugmentedGraph) -> str:
    """Returns a digest of all that a calibration depends on, except samples, whose digests are in its files."""
    layers = [(layer.node, layer.groups, layer.inputs) for layers, _ in whole.patches for layer in layers]
    facts = {
        "model": task.model.sha256,
        "versions": (version("edgekit-onnx"), VERSION, platform.machine()),
        "layout": (whole.lows, whole.highs, whole.picks, whole.scores, layers, whole.bounds, task.compared),
        "settings": (task.picked, task.patch_samples, SUMMED_SAMPLES, task.how.steps),
        "indices": task.indices,
    }
    return digest_bytes(msgspec.json.encode(facts, order="sorted"))


def _resume(task: CalibrationTask, whole: AugmentedGraph, cache: CalibrationCache) -> Measurements:
    """Returns measurements that start with the cached ones of these samples."""
    run = _begin(task, whole, cache)
    if task.how.cache is None:
        return run
    most_bytes = sum(array.nbytes for array in run.arrays().values()) + LEAST_BYTES + _SLACK_BYTES
    most_bytes += _SAMPLE_BYTES * task.samples.count
    found, order = cache.load(_PART, dict(enumerate(task.how.cache.digests)), most_bytes), (*task.indices, *task.others)
    if found is None or (tuple(found.seen) == order[: len(found.seen)] and run.restore(found)):
        return run
    cache.note("what is kept is not used: it does not fit this model")
    return _begin(task, whole, cache)


def _begin(task: CalibrationTask, whole: AugmentedGraph, cache: CalibrationCache) -> Measurements:
    statistics = ActivationStatistics(whole, task.how.work)
    held_out = HeldOut(len(task.indices), task.compared, ArrayFile(task.how.work / "held_out.data"))
    return Measurements(task=task, cache=cache, augmented=whole, statistics=statistics, held_out=held_out, seen={})


def _write(augmented: AugmentedGraph, path: Path) -> AugmentedGraph:
    """Writes an augmented graph; returns its description without the graph, whose weights would take memory."""
    write_proto(augmented.proto, path)
    return msgspec.structs.replace(augmented, proto=onnx.ModelProto())


def _measure(run: Measurements, indices: Sequence[int], *, learning: bool) -> None:
    """Measures the samples at some indices, except known ones; histograms and moments only if `learning`."""
    try:
        for _ in _pass(run, indices, learning=learning):
            ended = len(run.seen) == run.task.samples.count
            if ended or not len(run.seen) % SUMMED_SAMPLES:
                run.cache.save(_PART, run.seen, run.arrays(), now=ended)
    except EdgekitError:
        # Once the sample is repaired, the next run continues from here. Pending values must not be summed here.
        if not learning:
            run.cache.save(_PART, run.seen, run.arrays(), now=True)
        raise
    release_memory()


def _pass(run: Measurements, indices: Sequence[int], *, learning: bool) -> Iterator[None]:
    """Measures samples; yields after each, when the statistics hold exactly the samples in `seen`.

    Several run in parallel (`count_side_by_side`); their outputs are added in the order of the samples.
    """
    task = run.task
    todo = [index for index in indices if index not in run.seen]
    if not todo:
        return
    at_once = count_side_by_side(task.graph, run.augmented.output_bytes if learning else 0)
    # One block for all large tensors of a run is larger than what is in use at a time.
    settings = SessionSettings(threads=1, in_order=True, one_block=at_once is None)
    session = CpuSession(task.how.work / "augmented.onnx", settings, subject=task.model.path.name)

    def run_one(indexed: tuple[int, Tensors]) -> tuple[bytes, Tensors | RuntimeRefusal]:
        digest = digest_sample(indexed[1])
        try:
            return digest, session.run(indexed[1])
        except RuntimeRefusal as error:
            return digest, error

    began = told = time.monotonic()
    known = len(run.seen)
    # A `zip` or `enumerate` around the runs would keep one more result in memory.
    indexed = zip(todo, select_samples(task.samples, todo), strict=False)
    for (index, sample), (digest, values) in map_in_order(run_one, indexed, at_once):
        now, done = time.monotonic(), len(run.seen) - known
        if done and now >= told + _PROGRESS_SECONDS:
            left, told = (now - began) / done * (task.samples.count - len(run.seen)), now
            run.cache.progress(f"calibrate: {len(run.seen)} of {task.samples.count} samples, about {left:.0f} s left")
        # Both passes and the cache identify samples by position: a source that shuffles would mix them up.
        if task.how.cache is not None and task.how.cache.digests[index] != digest:
            words = f"sample {task.samples.place(index)} of '{task.samples.source}' is another one than before"
            raise DataError(words, hint="it must give the same at each pass")
        if isinstance(values, RuntimeRefusal):
            text = f"sample {task.samples.place(index)} of '{task.samples.source}' does not run: {values.message}"
            raise DataError(text, hint="mend the sample or the model") from values
        floats = ((name, value) for name, value in values.items() if value.dtype.kind == "f")
        if not all((np.isfinite(value) | (value == _OF_EMPTY.get(name, 0.0))).all() for name, value in floats):
            _refuse(task, index, sample, values)
        # If an axis is an input, as for a DFT, shapes depend on the sample.
        if not run.statistics.fits(values):
            raise DataError(
                f"sample {task.samples.place(index)} of '{task.samples.source}' gives a tensor another shape than"
                f" '{task.model.path.name}'",
                hint="give samples with the axes and sizes that the model's shapes were declared for",
            )
        task.how.keep(index, values)
        is_held = learning and run.held_out.offer(len(run.seen), sample, values)
        run.statistics.add(values, learn=not is_held, sequence=index // task.how.steps)
        run.seen[index] = digest
        del values
        yield


def _refuse(task: CalibrationTask, index: int, sample: Tensors, values: Tensors) -> NoReturn:
    """Raises an error that names the first input, weight or tensor that is not finite, in the order of the graph."""
    graph, work = task.graph, task.how.work
    subject = f"sample {task.samples.place(index)} of '{task.samples.source}' gives"
    hint = "mend or drop the sample"
    for name, value in sample.items():
        if name not in find_missing(graph) and (kind := _non_finite(value)):
            raise DataError(f"{subject} {kind} in input '{name}'", hint=hint)
    proto = deepcopy(graph.model)
    infinite = find_infinite_tensors(graph)
    computed = [name for name in float_activations(graph) if name in graph.producers and name not in infinite]
    refill(proto.graph.output, (onnx.ValueInfoProto(name=name) for name in computed))
    write_proto(proto, work / "located.onnx")
    for name, value in CpuSession(work / "located.onnx", SessionSettings(level=Level.ALL)).run(sample).items():
        if not (kind := _non_finite(value)):
            continue
        maker = graph.producers[name]
        for source in maker.input:
            weight = graph.constant(source)
            if weight is not None and (held := _non_finite(weight)):
                before = ",".join(each for each in maker.input[-2:] if each in graph.producers)
                # A Where may mark in an output what is missing.
                marks = maker.op_type == "Where" and maker.output[0] in graph.outputs and before
                ends = f"prepare --outputs {before} ends the model before it"
                hint = ends if marks else "export or train the model again"
                raise ModelError(f"weight '{source}' of {maker.op_type} '{maker.name}' holds {held}", hint=hint)
        raise DataError(f"{subject} {kind} in tensor '{name}' (made by {maker.op_type})", hint=hint)
    # What is left are tensors that constants make infinite, such as scores plus a mask of minus infinity.
    output = next((name for name in values if name in graph.outputs and _non_finite(values[name])), "")
    words = f"{subject} a value that is not finite in output '{output}'"
    raise DataError(words, hint="prepare --outputs A,B leaves outputs out")


def _non_finite(value: Array) -> str:
    """Returns "NaN" or "infinity" if a tensor holds it, else ""."""
    if value.dtype.kind != "f" or np.isfinite(value).all():
        return ""
    return "NaN" if np.isnan(value).any() else "infinity"
