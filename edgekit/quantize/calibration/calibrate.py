"""Measures every float activation of a model over streamed samples, once for all targets.

Image-to-image networks get headroom, since their inputs may be brighter than the samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from edgekit._files import AnyPath, as_path, digest_bytes
from edgekit.data.samples import Samples, spread_indices
from edgekit.errors import DataError, UsageError, suggest_name
from edgekit.graph.graph import Graph, view_file
from edgekit.graph.match import walk
from edgekit.machine import single_blas_thread
from edgekit.model.model import Model
from edgekit.model.tensors import StatedOutput
from edgekit.progress import Progress, say_nothing
from edgekit.quantize import ranges
from edgekit.quantize.accuracy.output_kinds import WHITES, may_be_image
from edgekit.quantize.calibration.augment import picked_values
from edgekit.quantize.calibration.held_out import HELD_OUT, save_fitted
from edgekit.quantize.calibration.moments import save_moments
from edgekit.quantize.calibration.passes import CalibrationOptions, CalibrationTask, measure_samples
from edgekit.quantize.calibration.statistics import ActivationStatistics
from edgekit.quantize.calibration.store import CacheSettings, save_arrays
from edgekit.quantize.effort import find_effort
from edgekit.quantize.graph import float_graph
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.ranges import TensorRange

_T = TypeVar("_T")
MEASURED_SAMPLES = 64
"""How many samples at most are measured in full, for histograms and moments, and as held-out samples.

Chosen by hand: tools/bench/calibrate_ratio.py shows the time that more would take.
"""


class CalibrationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics behind ranges: extremes over all `samples`, histograms and moments over `measured` of them.

    `known` samples were not run, because a cache had their results. `notes` are problems with a cache, and remarks if
    only few held-out samples judge plans, or if an output of a Sigmoid stays on one side of 0.5.
    """

    samples: int
    measured: int
    known: int
    notes: tuple[str, ...]


class Calibration(CalibrationReport, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranges of a model's float activations over some samples: plain data, valid for every target.

    Attributes:
        model_sha256: the digest of the model's file.
        samples_sha256: a digest of all inputs of all samples.
        ranges: by range method, the range of each float activation of the main graph, and of each constant whose
            largest number only multiplies zeros. "minmax" and "moving-average"
            come from every value of every sample, except masked scores before a Softmax; the others come from
            histograms.
        unseen_shares: for each float activation, the shares of its lowest and its highest value at which the samples
            would lose, by what is cut, as much as new samples lose beyond these values. A sequence counts as one
            sample.
        statistics: the folder with the data that are too large for this struct (moments of layer inputs and held-out
            samples), "" if there is none. It may be removed once all plans are applied.
        outputs: what the user stated about the outputs.
    """

    model_sha256: str
    samples_sha256: str
    ranges: dict[str, dict[str, TensorRange]]
    unseen_shares: dict[str, tuple[float, float]] = {}
    statistics: str
    outputs: dict[str, StatedOutput] = {}


def calibrate_model(
    model: Model,
    samples: Samples,
    *,
    work: AnyPath,
    methods: Sequence[str] = ranges.AUTO_METHODS,
    fitting: bool = True,
    cache: CacheSettings | None = None,
    outputs: Mapping[str, StatedOutput] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measures every float activation of a prepared float model, streaming the samples.

    The lowest and highest values come from every sample. Histograms (for the range methods that need them) and, with
    `fitting`, the moments for rounding come from MEASURED_SAMPLES evenly spread samples, in a separate pass. Memory
    does not grow with the number of samples. `work` is a folder for the statistics and intermediate files. With a
    `cache` an interrupted calibration continues, and a complete one is read: the result is the same to the last bit.
    `outputs` states the kinds of the outputs.

    Raises:
        UsageError: there is no such range method.
        DataError: there are no samples, or a sample makes an activation infinite or NaN.
        ModelError: the model is quantized already, is older than opset 13, or has no float activation.
        OutputError: the cache cannot be written.
    """
    how = CalibrationOptions(
        work=as_path(work), methods=tuple(methods), fitting=fitting, cache=cache, outputs=dict(outputs or {}),
        progress=progress or say_nothing,
    )  # fmt: skip
    return calibrate_for(model, samples, how)


def calibrate_for(model: Model, samples: Samples, how: CalibrationOptions) -> Calibration:
    """Does what `calibrate_model` does, and passes the outputs of the model to `how.keep`.

    Raises:
        EdgekitError: as for `calibrate_model`.
    """
    work, fitting = how.work, how.fitting
    for method in how.methods:
        if method not in ranges.RANGE_METHODS:
            raise UsageError(f"there is no range method '{method}'", hint=suggest_name(method, ranges.METHODS))
    methods = tuple(name for name in ranges.RANGE_METHODS if name in {*how.methods, *ranges.EXACT})
    work.mkdir(parents=True, exist_ok=True)
    graph = float_graph.store_float_graph(float_graph.read_float_graph(model), work)
    if not samples.count:
        raise DataError(f"'{samples.source}' holds no sample", hint="give at least one, better 100")
    with_histograms = methods != ranges.EXACT
    indices = spread_indices(samples.count, MEASURED_SAMPLES) if fitting or with_histograms else ()
    compared = {each.tensor for each in find_compared_tensors(graph)} if fitting else set[str]()
    task = CalibrationTask(
        model=model,
        graph=graph,
        samples=samples,
        how=how,
        indices=indices,
        compared=tuple(sorted(compared)),
        picked=picked_values(len(indices)) if with_histograms else 0,
        patch_samples=len(indices) if fitting else 0,
    )
    with single_blas_thread():
        found = measure_samples(task)
    judges: tuple[str, ...] = ()
    if fitting:
        save_arrays(work / HELD_OUT, found.held_out.arrays.items())
        save_fitted(work, samples, found.fitted())
        save_moments(work, found.statistics.moments())
        effort = find_effort(graph, len(found.seen))
        judges = (*found.held_out.describe_loss(), *effort.describe(len(found.held_out.positions())))
    shares, masked = found.statistics.unseen_shares(), found.statistics.masked()
    _fill_aliases(shares, found.augmented.aliases)
    return Calibration(
        model_sha256=model.sha256,
        samples_sha256=digest_bytes(b"".join(found.seen[index] for index in sorted(found.seen))),
        samples=len(found.seen),
        measured=len(task.indices),
        known=found.known,
        notes=(*found.cache.notes, *judges, *_list_one_sided(graph, found.statistics.exact_ranges())),
        ranges=_choose_ranges(graph, found.augmented.aliases, found.statistics, methods),
        unseen_shares={
            name: shares[name] for name in float_graph.float_activations(graph) if name in shares and name not in masked
        },
        statistics=str(work) if fitting else "",
        outputs=how.outputs,
    )


# Operators between a Sigmoid and the output that it decides: they move its numbers, or compare them with a threshold.
_BEHIND_SIGMOID = frozenset({
    "Cast", "Flatten", "Greater", "GreaterOrEqual", "Identity", "If", "Less", "LessOrEqual", "Reshape", "Squeeze",
    "Transpose", "Unsqueeze",
})  # fmt: skip


def _list_one_sided(graph: Graph, seen: Mapping[str, TensorRange]) -> Iterator[str]:
    """Yields a remark for each output of a Sigmoid that stays on one side of 0.5, where most of them decide.

    Ranges end where the samples end: a detector of a wake word that was calibrated without the word cannot hear it.
    """

    def before(at: str) -> tuple[str, ...]:
        node = graph.producers.get(at)
        return node.reads if node is not None and node.op_type in _BEHIND_SIGMOID else ()

    for name in sorted(graph.outputs):
        for node in map(graph.producers.get, walk([name], before)):
            # The Sigmoid itself has the range from 0 to 1, whatever the samples show.
            span = seen.get(node.input[0]) if node is not None and node.op_type == "Sigmoid" else None
            if span is not None and not span.low <= 0 <= span.high:
                low, high = ranges.sigmoid(np.array([span.low, span.high]))
                side = f"at most {high:.2g}" if span.high < 0 else f"at least {low:.2g}"
                advice = "if it decides at 0.5, add samples with the other answer, because ranges end with these"
                yield f"output '{name}' is {side} in all samples: {advice}"
                break


def assume_ranges(model: Model, spans: Mapping[str, TensorRange]) -> Calibration:
    """Returns a calibration with ranges that nobody measured: for a graph whose outputs do not matter."""
    return Calibration(
        model_sha256=model.sha256, samples_sha256="", samples=1, measured=1, known=0, notes=(),
        ranges={"minmax": dict(spans)}, statistics="",
    )  # fmt: skip


def open_float_graph(model: Model, calibration: Calibration) -> Graph:
    """Returns the float graph of a model: as its calibration stored it, or read again if that file is gone.

    Raises:
        ModelError: the model is quantized already, or older than opset 13, or names clash.
    """
    stored = Path(calibration.statistics, float_graph.STORED_GRAPH)
    is_its = calibration.statistics and calibration.model_sha256 == model.sha256
    return view_file(stored) if is_its and stored.is_file() else float_graph.read_float_graph(model)


def _choose_ranges(
    graph: Graph, aliases: dict[str, str], statistics: ActivationStatistics, methods: Sequence[str]
) -> dict[str, dict[str, TensorRange]]:
    # Histograms count masked values too, so for masked scores before a Softmax no method uses them.
    masked, empty = statistics.masked(), ranges.HistogramCollector().freeze()
    exact, mean = statistics.exact_ranges() | masked, statistics.mean_ranges() | masked
    histograms = statistics.histograms() | dict.fromkeys(masked, empty)
    readers = ranges.find_nonlinearities(graph)
    # Plans are judged by what a Sigmoid or Softmax reads: what it makes for an output would be cut at no cost, and the
    # rare high scores of a detector with it.
    judged = {each.reader for each in find_compared_tensors(graph)}
    squashing = (node for node in graph.nodes if node.name in judged)
    answers = {node.output[0] for node in squashing if None not in float_graph.known_bounds(graph, node)}
    names, factors = [*float_graph.float_activations(graph)], statistics.factor_ranges(graph)
    found: dict[str, dict[str, TensorRange]] = {}
    for method in methods:
        choose = ranges.RANGE_METHODS[method]
        chosen = {
            name: its if name in answers else choose(its, histograms.get(name, empty), readers.get(name))
            for name, its in (mean if method == ranges.MOVING_AVERAGE else exact).items()
        }
        _fill_aliases(chosen, aliases)
        found[method] = {name: ranges.snap_range(chosen[name]) for name in names if name in chosen} | factors
    return found


def _fill_aliases(found: dict[str, _T], aliases: Mapping[str, str]) -> None:
    """Gives each alias what was found for the tensor that it stands for, in place."""
    for name, source in reversed(list(aliases.items())):
        if source in found:
            found[name] = found[source]


# Samples whose brightest pixel is below 1 / 1.25 of white are not photographs, or have another scale; and widening a
# range by a quarter costs a third of a bit. Chosen by hand: tests/quantize/test_quantize_ranges.py.
_MOST_HEADROOM = 1.25


def makes_images(graph: Graph, outputs: Mapping[str, StatedOutput]) -> bool:
    """Returns True if an output of a graph is stated to be an image, or, if nothing is stated, may be one."""
    return any(_is_image(graph, name, outputs) for name in graph.outputs)


def add_image_headroom(graph: Graph, calibration: Calibration) -> Calibration:
    """Returns a calibration in which the ranges of an image-to-image network leave room for white.

    If the brightest pixel of all samples is 0.9, a white wall would be clipped and come out darker. Activations of such
    a network grow about in proportion to its input, so every range is multiplied by white / (brightest pixel), at most
    1.25, with every range method. This is done if pixels lie between 0 and 1, or 0 and 255, and the brightest one is
    at least white / 1.25.
    """
    seen = calibration.ranges["minmax"]
    fed = [value.name for value in graph.proto.input if _is_image(graph, value.name, {})]
    missing = [
        white / its.high
        for its in (seen[name] for name in fed if name in seen)
        for white in WHITES
        if its.low >= 0 and white / _MOST_HEADROOM <= its.high <= white
    ]
    if not makes_images(graph, calibration.outputs) or not fed or len(missing) < len(fed):
        return calibration
    growth = max(1.0, *missing)
    roomy = {
        method: {name: ranges.scale_range(its, growth) for name, its in own.items()}
        for method, own in calibration.ranges.items()
    }
    return msgspec.structs.replace(calibration, ranges=roomy)


def _is_image(graph: Graph, name: str, outputs: Mapping[str, StatedOutput]) -> bool:
    if name in outputs:
        return outputs[name].kind == "image"
    return graph.is_float(name) and may_be_image(graph.static_shape(name) or ())
