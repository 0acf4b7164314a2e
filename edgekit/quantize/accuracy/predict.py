"""What quantizing will cost in accuracy, estimated without labels."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.graph.graph import Graph, read_graph
from edgekit.machine import map_in_order
from edgekit.model.external import skim_model
from edgekit.model.model import Model
from edgekit.model.outputs import Reading, StatedOutput
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.constants import LAYOUT, find_cubics
from edgekit.quantize.accuracy.detections import estimate_drop, record_detections, soften_detections
from edgekit.quantize.accuracy.head_search import DetectionList, find_head, find_image, find_list, may_be_head
from edgekit.quantize.accuracy.heads import Head
from edgekit.quantize.accuracy.kept_outputs import KeptOutputs
from edgekit.quantize.accuracy.loss import GOOD_DB, MEASURES, Loss, ratio_db, reach_without_labels
from edgekit.quantize.accuracy.output_kinds import read_output_kinds
from edgekit.quantize.effort import count_side_by_side, find_effort
from edgekit.quantize.graph.sessions import EXACT_PRODUCTS

MOST_SAMPLES = 256
"""The most samples that are compared. They resolve half a point, which is one changed answer of 200; more cost time."""
WANTED_REACH = 0.005
"""How wide, to each side, the interval of a drop should be at most: half a point."""
# The number of samples from which the kind of an output is guessed: a choice, to save time.
_KIND_SAMPLES = 4
# The number for the head of a detector: more, since not every image shows an object. A choice, to save time.
_HEAD_SAMPLES = 16
# Larger records, such as those of long vectors, are not remembered together: a choice.
_MOST_REMEMBERED_BYTES = 4 << 20
# The samples are dealt to so many groups, each of which is left out in turn.
_GROUPS = 8
# A race looks at every eighth, fourth and second sample, if these are enough to tell a standard error: a choice.
_STRIDES, _LEAST_RACED = (8, 4, 2), 8
# The bound of a test that is looked at four times, each time over twice as many samples, in standard errors: with it,
# all looks together find a difference where there is none in 5 % of cases. For steps of equal size it is 2.361 (S. J.
# Pocock, "Group sequential methods in the design and analysis of clinical trials", 1977); for these it was computed
# with a million draws.
_RACE_Z = 2.41
_SETTINGS = SessionSettings(threads=1, one_block=False, config=dict(EXACT_PRODUCTS))
LABELS = "labels"
"""The source of a drop that was measured with labels."""
AP = "mean AP of detections"
"""The measure of detectors whose outputs can be read as detections."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantized model will differ from the float one, on the CPU provider of this machine.

    `sqnr_db` is the mean of the ratios of all float outputs. `measure` names what is lost, such as "top-1 accuracy" or
    a metric of the task, and is "" where nothing can be estimated. `drop_estimate` is its expected loss: a share of one
    for figures between 0 and 1 (0.005 is half a point), else a share of the float model's own figure (half a percent of
    36 dB is 0.18 dB). `drop_interval` is its interval of 95 %. `top1_agreement` is the share of decisions that are the
    same, for embeddings that of nearest neighbours, and None where outputs decide nothing. `source` says what the drop
    was estimated from. `reference` and `got` are the figures themselves, where labels tell them.
    """

    samples: int
    sqnr_db: float
    top1_agreement: float | None
    drop_estimate: float | None
    drop_interval: tuple[float, float] | None
    source: str
    measure: str = ""
    reference: float | None = None
    got: float | None = None

    def meets(self, max_drop: float) -> bool:
        """Returns True if the drop is at most `max_drop` (a share); where it is unknown, if outputs hardly differ."""
        return self.sqnr_db >= GOOD_DB if self.drop_estimate is None else self.drop_estimate <= max_drop


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of the float and of the quantized model for one sample."""

    expected: Tensors
    found: Tensors


def wanted_samples(prediction: Prediction) -> float | None:
    """Returns how many samples would narrow the interval to half a point to each side, None if these are enough.

    The width of an interval falls with the square root of the number of samples, or with the number itself if no answer
    changed. A part of it does not fall without labels (`reach_without_labels`). The result is infinity if no number of
    unlabelled samples is enough; at most MOST_SAMPLES of them are used.
    """
    ends, estimate, agreement = prediction.drop_interval, prediction.drop_estimate, prediction.top1_agreement
    if ends is None or estimate is None or agreement is None:
        return None
    reach = (ends[1] - ends[0]) / 2
    if reach <= WANTED_REACH or estimate - reach > WANTED_REACH:
        return None
    has_labels = prediction.source == LABELS
    lasting = 0.0 if has_labels else reach_without_labels(prediction.measure, estimate, 1 - agreement)
    if lasting >= WANTED_REACH:
        return math.inf
    factor = math.sqrt(max(reach**2 - lasting**2, 0.0) / (WANTED_REACH**2 - lasting**2))
    wanted = math.ceil(round(prediction.samples * factor ** (1 if agreement == 1 else 2) / 10, 6)) * 10
    return wanted if has_labels or wanted <= MOST_SAMPLES else math.inf


def predict_drop(
    model: Model, quantized: Model, samples: Samples, outputs: Mapping[str, StatedOutput] | None = None
) -> Prediction:
    """Runs both models over at most MOST_SAMPLES samples, spread evenly, and returns what the difference will cost.

    For several quantized models of one float model use one `FloatReference`.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses a model.
    """
    return FloatReference(model, samples, outputs).predict_drop(quantized)


class FloatReference:
    """The float model's outputs, with which several quantized models are compared: it runs once for all of them.

    `outputs` states what outputs are; the kinds of the others are guessed. At most `most` samples count, spread evenly:
    MOST_SAMPLES by default, and fewer for a large model (`find_effort`). Outputs for which memory is too small lie in a
    file in the folder `work`; without it they are computed again.
    """

    def __init__(
        self,
        model: Model,
        samples: Samples,
        outputs: Mapping[str, StatedOutput] | None = None,
        *,
        most: int | None = None,
        work: Path | None = None,
    ) -> None:
        self._model, self._samples, self._stated, self._most = model, samples, outputs or {}, most
        self._session: CpuSession | None = None
        self._kept = KeptOutputs(work)
        self._likenesses: dict[str, Likeness] = {}

    def keep(self, index: int, outputs: Tensors) -> None:
        """Keeps what the model gave for a sample, if that counts: the model does not run for it again."""
        if index in self.indices:
            self._kept.keep(index, {spec.name: outputs[spec.name] for spec in self._model.outputs})

    @cached_property
    def indices(self) -> Sequence[int]:
        """The samples that count."""
        most = self._most or find_effort(self._graph, self._samples.count).predicting or MOST_SAMPLES
        return spread_indices(self._samples.count, most)

    @cached_property
    def _at_once(self) -> int | None:
        """How many samples run in parallel: fewer where activations take much memory."""
        return count_side_by_side(self._graph)

    @property
    def _settings(self) -> SessionSettings:
        """Without an arena where activations take much memory: one in each of the two sessions would keep theirs."""
        return msgspec.structs.replace(_SETTINGS, arena=self._at_once is None)

    @cached_property
    def _graph(self) -> Graph:
        # Read when it is first needed, which is never for a model that stays float; without weights, which the session
        # holds already.
        return read_graph(self._model)

    @cached_property
    def parts(self) -> tuple["Part", ...]:
        """The outputs that count, and how: a detector's head, and the first other output that makes one decision.

        If no output makes one decision, all others count. The kinds are guessed from outputs of the float model for a
        few samples.
        """
        few = self._run_few(_KIND_SAMPLES)
        readings, head = read_output_kinds(self._graph, few, self._stated), self._find_head(few[0])
        shapes = _shapes(few[0])
        others = {name: reading for name, reading in readings.items() if head is None or name not in head.outputs}
        first = next((name for name, reading in others.items() if reading.kind == "classes"), None)
        chosen = others if first is None else {first: others[first]}
        heads = () if head is None else (_as_part(head, shapes),)
        return (*heads, *(_read_part(name, reading, shapes[name]) for name, reading in chosen.items()))

    def predict_drop(self, quantized: Model) -> Prediction:
        """Returns what a quantized model will cost; its likeness is remembered.

        The float model's probabilities stand for the truth. Where a decision changes, the expected loss is the
        probability of the float model's class less that of the new one (after D. Guillory et al., "Predicting with
        confidence on unseen distributions", 2021). How other kinds of output are judged stands in
        `edgekit.quantize.accuracy.loss`; of several outputs, the one that loses most is reported.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        return self._like(quantized).predict()

    def compare(self, first: Model, second: Model) -> "Difference":
        """Returns whether a second quantized model of the float one loses less than the first.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        return self._like(first).compare(self._like(second))

    def race(self, first: Model, second: Model) -> Prediction | None:
        """Returns what a second quantized model loses over a part of the samples that shows that it is clearly worse.

        The result is None if no part shows it: then the second model ran over all samples, and its likeness is
        remembered. The parts are an eighth, a fourth and a half of the samples, spread evenly.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        known, other = self._like(first), Likeness(self.parts)
        if second.sha256 in self._likenesses:
            return None
        run = self._open_pairs(second)
        for stride in _STRIDES:
            part = self.indices[::stride]
            if len(part) < _LEAST_RACED:
                continue
            for index, pair in run(other.missing(part)):
                other.add(index, pair)
            if known.over(part).outruns(other):
                return other.predict()
        for index, pair in run(other.missing(self.indices)):
            other.add(index, pair)
        self._remember(second, other)
        return None

    def _like(self, quantized: Model) -> "Likeness":
        if quantized.sha256 not in self._likenesses:
            for _ in self.run_pairs(quantized):
                pass
        return self._likenesses[quantized.sha256]

    def run_pairs(self, quantized: Model) -> Iterator[Pair]:
        """Yields the outputs of both models for each sample, and remembers how alike they are.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        likeness = Likeness(self.parts)
        for index, pair in self._open_pairs(quantized)(self.indices):
            likeness.add(index, pair)
            yield pair
        self._remember(quantized, likeness)

    def _remember(self, quantized: Model, likeness: "Likeness") -> None:
        if likeness.size_bytes > _MOST_REMEMBERED_BYTES:
            self._likenesses.clear()
        self._likenesses[quantized.sha256] = likeness

    def _open_pairs(self, quantized: Model) -> Callable[[Sequence[int]], Iterator[tuple[int, Pair]]]:
        """Returns a function that yields the outputs of both models for some samples."""
        todo = self._kept.missing(self.indices)
        if todo and self._kept.fits(len(todo)):
            # All outputs of the float model can be kept: it is closed before the other is opened.
            float_session = self._open()
            for (index, _), outputs in map_in_order(
                lambda sample: float_session.run(sample[1]), self._read(todo), self._at_once
            ):
                self._kept.keep(index, outputs)
        self._close()
        harmful = (LAYOUT,) if find_cubics(skim_model(quantized.path).graph) else ()
        session = CpuSession(quantized.path, msgspec.structs.replace(self._settings, disabled_optimizers=harmful))

        def run(sample: tuple[int, Tensors]) -> Pair:
            return Pair(expected=self._run(*sample), found=session.run(sample[1]))

        def run_pairs(indices: Sequence[int]) -> Iterator[tuple[int, Pair]]:
            if self._kept.missing(indices):
                # Threads that run side by side must find it open.
                self._open()
            for (index, _), pair in map_in_order(run, self._read(indices), self._at_once):
                self._kept.keep(index, pair.expected)
                yield index, pair
                self._kept.release(index)
            self._close()

        return run_pairs

    def _open(self) -> CpuSession:
        self._session = self._session or CpuSession(self._model.path, self._settings)
        return self._session

    def _close(self) -> None:
        if not self._kept.missing(self.indices):
            self._session = None

    def _read(self, indices: Sequence[int]) -> Iterator[tuple[int, Tensors]]:
        return zip(indices, select_samples(self._samples, indices), strict=False)

    def _run(self, index: int, sample: Tensors) -> Tensors:
        return self._kept[index] if index in self._kept else self._open().run(sample)

    def _run_few(self, count: int) -> list[Tensors]:
        few = list[Tensors]()
        for index, sample in self._read(spread_indices(self._samples.count, count)):
            few.append(self._run(index, sample))
            self._kept.keep(index, few[-1])
        return few

    def _find_head(self, first: Tensors) -> Head | DetectionList | None:
        """Returns how the outputs of a detector are decoded, but for those that are stated to be something else."""
        stated = self._stated

        def drop_stated(outputs: Tensors) -> dict[str, Array]:
            return {name: each for name, each in outputs.items() if name not in stated or stated[name].kind == "scores"}

        image = find_image(next(iter(self._samples)))
        # Anchors and strides follow from the sizes of image and outputs, which differ from sample to sample here.
        is_open = any(not isinstance(dim, int) for spec in self._model.inputs for dim in (spec.shape or ())[1:])
        if image is None or is_open:
            return None
        find = find_list if find_list([drop_stated(first)], image) is not None else find_head
        if find is find_head and not may_be_head(drop_stated(first)):
            return None
        return find([drop_stated(outputs) for outputs in self._run_few(_HEAD_SAMPLES)], image)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How much more one quantized model loses than another, over the same samples.

    `chance` is the standard error of the difference between their estimated drops. `moved` is by how much farther the
    first moves the decisions, which decides between models whose drops differ by chance.
    """

    chance: float
    moved: float


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """An output that is judged, or the outputs of a detector's head together, with their shapes by name.

    `record` gives what is kept of a sample, `judge` the loss that all records show, and `soften` how far each sample
    moved; `measure` and `source` are those of the `Prediction`.
    """

    shapes: dict[str, tuple[int, ...]]
    measure: str
    source: str
    record: Callable[[Tensors, Tensors], Array]
    judge: Callable[[Sequence[Array]], Loss]
    soften: Callable[[Sequence[Array]], Array]


def _as_part(head: Head | DetectionList, shapes: Mapping[str, tuple[int, ...]]) -> Part:
    return Part(
        shapes={name: shapes[name] for name in sorted(head.outputs)},
        measure=AP,
        source="the float model's detections",
        record=partial(record_detections, head),
        judge=partial(estimate_drop, centred=head.centred),
        soften=soften_detections,
    )


def _read_part(name: str, reading: Reading, shape: tuple[int, ...]) -> Part:
    measure = MEASURES[reading.kind]
    return Part(
        shapes={name: shape},
        measure=measure.name,
        source=measure.source,
        record=lambda expected, found: measure.record(expected[name], found[name], reading),
        judge=measure.judge,
        soften=measure.soften,
    )


class _Compared(NamedTuple):
    """The powers of each output and of its noise in one sample; what is recorded of each part, None if it is broken."""

    powers: dict[str, Array]
    records: tuple[Array | None, ...]
    broken: frozenset[int]


class Likeness:
    """Adds up how alike the outputs of two models are, in memory that hardly grows with the samples."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._samples: dict[int, _Compared] = {}

    def add(self, index: int, pair: Pair) -> None:
        """Adds the sample at a position."""
        records, broken = list[Array | None](), set[int]()
        for place, part in enumerate(self._parts):
            found = {name: pair.found[name] for name in part.shapes if name in pair.found}
            shapes = (
                {name: side[name].shape for name in part.shapes if name in side} for side in (pair.expected, found)
            )
            fits = all(each == part.shapes for each in shapes)
            if fits and any(value.dtype.kind == "f" and not np.isfinite(value).all() for value in found.values()):
                broken.add(place)
            is_sound = fits and place not in broken
            records.append(part.record(pair.expected, pair.found) if is_sound else None)
        powers = _find_powers(pair.expected, pair.found)
        self._samples[index] = _Compared(powers, tuple(records), frozenset(broken))

    def missing(self, indices: Sequence[int]) -> list[int]:
        """Returns the samples that were not added."""
        return [index for index in indices if index not in self._samples]

    def over(self, indices: Sequence[int]) -> "Likeness":
        """Returns the likeness over some of the samples."""
        part = Likeness(self._parts)
        part._samples = {index: self._samples[index] for index in indices}
        return part

    @property
    def size_bytes(self) -> int:
        """The memory of the records."""
        return sum(record.nbytes for records in self._records for record in records)

    @property
    def _in_order(self) -> list[_Compared]:
        return [self._samples[index] for index in sorted(self._samples)]

    @property
    def _count(self) -> int:
        return len(self._samples)

    @property
    def _records(self) -> list[list[Array]]:
        """What was recorded of each part, in the order of the samples."""
        samples = self._in_order
        return [
            [record for each in samples if (record := each.records[place]) is not None]
            for place in range(len(self._parts))
        ]

    def outruns(self, other: "Likeness") -> bool:
        """Returns True if another model is clearly worse over the same samples: a test that is made for `race`.

        It is worse if it saves no decision, and moves all of them farther by more than chance: decisions change in
        proportion to how far they move. For few samples the bound is Student's at the same level, to the second order
        (Abramowitz and Stegun, "Handbook of mathematical functions", 26.7.5).
        """
        if not (self.is_whole and other.is_whole and self._count > 1):
            return False
        farther, every = other.moves() - self.moves(), range(self._count)
        error, z, freedom = float(np.std(farther, ddof=1)) / math.sqrt(self._count), _RACE_Z, self._count - 1
        bound = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        return float(farther.mean()) > bound * error and self.estimate(every) <= other.estimate(every)

    def compare(self, other: "Likeness") -> Difference:
        """Returns the difference to the likeness of another model, over the same samples.

        The error of the difference of two estimated drops is that of a jackknife (B. Efron and C. Stein, "The jackknife
        estimate of variance", 1981): groups of samples are left out in turn, from both models alike, since a sample
        that is hard for one is hard for the other.
        """
        if not (self.is_whole and other.is_whole and self._count > 1):
            return Difference(chance=0.0, moved=0.0)
        groups = min(_GROUPS, self._count)
        kept = [[index for index in range(self._count) if index % groups != each] for each in range(groups)]
        gaps = [self.estimate(each) - other.estimate(each) for each in kept]
        return Difference(chance=math.sqrt(groups - 1) * float(np.std(gaps)), moved=self.moved() - other.moved())

    def predict(self) -> Prediction:
        """Returns the worst loss of all outputs whose kind is known."""
        powers = dict[str, Array]()
        for each in self._in_order:
            for name, power in each.powers.items():
                powers[name] = powers.get(name, np.zeros(2)) + power
        ratios, worst = [ratio_db(*power) for power in powers.values()], self._find_worst()
        unknown = Prediction(
            samples=self._count,
            sqnr_db=round(float(np.mean(ratios)), 3) if ratios else math.inf,
            top1_agreement=None,
            drop_estimate=None,
            drop_interval=None,
            source="no output decides anything that is known",
        )
        if worst is None:
            return unknown
        part, loss = worst
        low, high = loss.interval
        return msgspec.structs.replace(
            unknown,
            measure=part.measure,
            top1_agreement=loss.agreement,
            drop_estimate=round(loss.estimate, 6),
            drop_interval=(round(low, 6), round(high, 6)),
            source=part.source,
        )

    @property
    def is_whole(self) -> bool:
        """True if every part has a record of each sample."""
        return bool(self._parts and self._count) and all(len(records) == self._count for records in self._records)

    def estimate(self, kept: Sequence[int]) -> float:
        """Returns the estimated drop over some samples."""
        pairs = zip(self._parts, self._records, strict=True)
        return max(part.judge([records[index] for index in kept]).estimate for part, records in pairs)

    def moved(self) -> float:
        """Returns how far the outputs of a sample moved on average, summed over the parts."""
        return float(self.moves().mean())

    def moves(self) -> Array:
        """Returns how far the outputs of each sample moved, summed over the parts."""
        pairs = zip(self._parts, self._records, strict=True)
        return np.asarray(np.sum([part.soften(records) for part, records in pairs], axis=0))

    def _find_worst(self) -> tuple[Part, Loss] | None:
        # Of an output that is not finite all is lost, whatever its finite samples say.
        broken = {place for each in self._samples.values() for place in each.broken}
        if broken:
            return self._parts[min(broken)], Loss(estimate=1.0, interval=(1.0, 1.0), agreement=0.0)
        if not self.is_whole:
            return None
        judged = [(part, part.judge(records)) for part, records in zip(self._parts, self._records, strict=True)]
        return max(judged, key=lambda each: each[1].estimate)


def _shapes(outputs: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in outputs.items()}


def _find_powers(expected: Tensors, found: Tensors) -> dict[str, Array]:
    """Returns the powers of float outputs and of their differences; an output of another shape is all noise."""
    powers = dict[str, Array]()
    for name, value in expected.items():
        if value.dtype.kind != "f":
            continue
        other = found.get(name)
        if other is None or other.shape != value.shape:
            powers[name] = np.array([0.0, np.inf])
            continue
        one, two = value.astype(np.float64), other.astype(np.float64)
        powers[name] = np.array([(one**2).sum(), ((one - two) ** 2).sum()])
    return powers
