"""What quantizing will cost in accuracy, estimated without labels."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

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
from edgekit.quantize.accuracy.detections import estimate_drop, record_detections
from edgekit.quantize.accuracy.head_search import DetectionList, find_head, find_image, find_list, may_be_head
from edgekit.quantize.accuracy.heads import Head
from edgekit.quantize.accuracy.loss import MEASURES, Loss, lasting_reach, ratio_db
from edgekit.quantize.accuracy.output_kinds import read_output_kinds
from edgekit.quantize.effort import find_effort
from edgekit.quantize.graph.sessions import EXACT_PRODUCTS

MOST_SAMPLES = 256
"""So many tell half a point, which is one changed answer of 200; more cost time."""
TOLD_TO = 0.005
"""To how much, to each side, a drop should be told: half a point."""
FAITHFUL_DB = 30.0
"""From this ratio on outputs of no kind that is known are taken to meet any goal: an error of 3 %, a choice."""
# So many samples tell of which kind an output is: a choice, for the time.
_GUESSED_FROM = 4
# How a head is decoded is told by what is shown, and not every image shows something: a choice, for the time.
_DECODED_FROM = 16
# What the float model gave is kept up to so much, and computed anew beyond: a choice.
_MOST_KEPT_BYTES = 64 << 20
_SETTINGS = SessionSettings(threads=1, one_block=False, config=dict(EXACT_PRODUCTS))
LABELS = "labels"
"""The source of a drop that was measured."""
AP = "mean AP of detections"
"""What a detector loses whose raw head can be decoded."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantized model will differ from the float one, on the CPU provider of this machine.

    `sqnr_db` is over the float outputs, the mean of each output's. `measure` names what is lost: "top-1 accuracy", a
    metric of the task, or "" where nothing can be told. `drop_estimate` is the expected loss of it: in shares of one
    for what lies between 0 and 1 (0.005 is half a point), else in shares of the float model's own figure (half a
    percent of 36 dB is 0.18 dB). `drop_interval` is a 95 % interval of it. `reference` and `got` are the figures
    themselves, where labels tell them. `top1_agreement` is the share of decisions that are the same, of vectors that of
    nearest neighbours among the samples, None where outputs decide nothing. `source` says where the drop comes from.
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
        """Returns True if the drop is at most `max_drop` (a share), or cannot be told and the outputs hardly differ."""
        return self.sqnr_db >= FAITHFUL_DB if self.drop_estimate is None else self.drop_estimate <= max_drop


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """What the float and the quantized model gave for a sample."""

    expected: Tensors
    found: Tensors


def wanted_samples(prediction: Prediction) -> float | None:
    """Returns how many samples would tell a share of right answers to half a point, None where these do.

    An interval shrinks with the root of the number of samples, or where not one answer changed with the number itself.
    What labels alone tell stays, and no more than MOST_SAMPLES count without labels: infinity where these are too few.
    """
    ends, estimate, agreement = prediction.drop_interval, prediction.drop_estimate, prediction.top1_agreement
    if ends is None or estimate is None or agreement is None:
        return None
    half = (ends[1] - ends[0]) / 2
    if half <= TOLD_TO or estimate - half > TOLD_TO:
        return None
    has_labels = prediction.source == LABELS
    lasting = 0.0 if has_labels else lasting_reach(prediction.measure, estimate, 1 - agreement)
    if lasting >= TOLD_TO:
        return math.inf
    left = math.sqrt(max(half**2 - lasting**2, 0.0) / (TOLD_TO**2 - lasting**2))
    wanted = math.ceil(round(prediction.samples * left ** (1 if agreement == 1 else 2) / 10, 6)) * 10
    return wanted if has_labels or wanted <= MOST_SAMPLES else math.inf


def predict_drop(
    model: Model, quantized: Model, samples: Samples, outputs: Mapping[str, StatedOutput] | None = None
) -> Prediction:
    """Runs both models over at most MOST_SAMPLES samples, spread evenly, and returns what the difference will cost.

    For several quantized models of one float model keep a `FloatReference`.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses a model.
    """
    return FloatReference(model, samples, outputs).predict_drop(quantized)


class FloatReference:
    """What a float model gives for samples, to hold quantized models against: it runs once for all of them.

    `outputs` states what outputs are, which is guessed of the others. At most `most` samples count, spread evenly; by
    default MOST_SAMPLES, and of a large model fewer (`find_effort`).
    """

    def __init__(
        self,
        model: Model,
        samples: Samples,
        outputs: Mapping[str, StatedOutput] | None = None,
        *,
        most: int | None = None,
    ) -> None:
        self._model, self._samples, self._outputs, self._most = model, samples, outputs or {}, most
        self._session: CpuSession | None = None
        self._known: dict[int, Tensors] = {}
        self._room = _MOST_KEPT_BYTES

    @cached_property
    def indices(self) -> Sequence[int]:
        """The samples that count."""
        most = self._most or find_effort(self._graph, self._samples.count).predicting or MOST_SAMPLES
        return spread_indices(self._samples.count, most)

    @cached_property
    def _graph(self) -> Graph:
        # Without weights, which the session holds already; not read for what stays float.
        return read_graph(self._model)

    def predict_drop(self, quantized: Model) -> Prediction:
        """Returns what a quantized model will cost.

        The float model's probabilities stand for the truth: where a decision changes, the expected loss is the
        probability of the float model's class less that of the other one (after D. Guillory et al., "Predicting with
        confidence on unseen distributions", 2021: difference of confidences). For maps of classes it is the loss of
        mean overlap. Images are held against a truth that the float model is taken to meet with 36 dB. Other values
        lose as much of their spread as the differences have. An output that makes one decision counts alone, else the
        worst does.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        likeness = Likeness(self.parts)
        for pair in self.run_pairs(quantized):
            likeness.add(pair)
        return likeness.predict()

    def run_pairs(self, quantized: Model) -> Iterator[Pair]:
        """Yields what both models give for each sample.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        self._answer_ahead()
        self._close()
        harmful = (LAYOUT,) if find_cubics(skim_model(quantized.path).graph) else ()
        integer = CpuSession(quantized.path, msgspec.structs.replace(_SETTINGS, disabled_optimizers=harmful))

        def run(sample: tuple[int, Tensors]) -> Pair:
            return Pair(expected=self._run(*sample), found=integer.run(sample[1]))

        if not self._known.keys() >= {*self.indices}:
            self._open()
        for (index, _), pair in map_in_order(run, self._read(self.indices)):
            self._keep(index, pair.expected)
            yield pair
        self._close()

    def _answer_ahead(self) -> None:
        """Runs the float model over all samples and closes it, before another is open, where its answers can be kept.

        How large they are those say that are known.
        """
        missing = [index for index in self.indices if index not in self._known]
        each = max((_count_bytes(answers) for answers in self._known.values()), default=math.inf)
        if missing and each * len(missing) <= self._room:
            session = self._open()
            for (index, _), answers in map_in_order(lambda sample: session.run(sample[1]), self._read(missing)):
                self._keep(index, answers)

    def _close(self) -> None:
        if self._known.keys() >= {*self.indices}:
            self._session = None

    @cached_property
    def parts(self) -> tuple["Part", ...]:
        """What counts of the outputs, and how, from what the float model gives for a few samples."""
        few = self._run_few(_GUESSED_FROM)
        readings = read_output_kinds(self._graph, few, self._outputs)
        return _choose_parts(readings, self._find_head(few[0]), _shapes(few[0]))

    def _read(self, indices: Sequence[int]) -> Iterator[tuple[int, Tensors]]:
        return zip(indices, select_samples(self._samples, indices), strict=False)

    def _open(self) -> CpuSession:
        self._session = self._session or CpuSession(self._model.path, _SETTINGS)
        return self._session

    def _run(self, index: int, sample: Tensors) -> Tensors:
        return self._known[index] if index in self._known else self._open().run(sample)

    def _run_few(self, count: int) -> list[Tensors]:
        few = list[Tensors]()
        for index, sample in self._read(spread_indices(self._samples.count, count)):
            few.append(self._run(index, sample))
            self._keep(index, few[-1])
        return few

    def _keep(self, index: int, answers: Tensors) -> None:
        size = _count_bytes(answers)
        if index not in self._known and size <= self._room:
            self._room -= size
            # What ONNX Runtime returns keeps the memory of its whole session.
            self._known[index] = {name: value.copy() for name, value in answers.items()}

    def _find_head(self, first: Tensors) -> Head | DetectionList | None:
        """Returns how outputs of a detector are decoded, as far as they are not stated to be something else."""
        stated = self._outputs

        def keep(outputs: Tensors) -> dict[str, Array]:
            return {name: each for name, each in outputs.items() if name not in stated or stated[name].kind == "scores"}

        image = find_image(next(iter(self._samples)))
        # Anchors and strides are told by the sizes of a picture and of outputs, which one sample has of open ones.
        is_open = any(not isinstance(dim, int) for spec in self._model.inputs for dim in (spec.shape or ())[1:])
        if image is None or is_open:
            return None
        listed = find_list([keep(first)], image)
        if listed is None and not may_be_head(keep(first)):
            return None
        rows = [keep(outputs) for outputs in self._run_few(_DECODED_FROM)]
        return find_list(rows, image) if listed is not None else find_head(rows, image)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged as one: an output, or those of a detector's head. What is kept of a sample, and what all says.

    `shapes` are those of the outputs, by name.
    """

    shapes: dict[str, tuple[int, ...]]
    measure: str
    source: str
    record: Callable[[Tensors, Tensors], Array]
    judge: Callable[[Sequence[Array]], Loss]


class Likeness:
    """Adds up how like two models are, output by output, in a memory that hardly grows with the samples."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._broken: set[int] = set()
        self._records: list[list[Array]] = [[] for _ in self._parts]
        self._powers: dict[str, Array] = {}
        self._count = 0

    def add(self, pair: Pair) -> None:
        """Adds one sample."""
        self._count += 1
        _add_powers(self._powers, pair.expected, pair.found)
        for index, part in enumerate(self._parts):
            found = {name: pair.found[name] for name in part.shapes if name in pair.found}
            if not _shapes(found) == _shapes({name: pair.expected[name] for name in part.shapes}) == part.shapes:
                continue
            if any(value.dtype.kind == "f" and not np.isfinite(value).all() for value in found.values()):
                self._broken.add(index)
                continue
            self._records[index].append(part.record(pair.expected, pair.found))

    def predict(self) -> Prediction:
        """Returns the worst loss of all outputs whose kind is known."""
        powers = [ratio_db(*power) for power in self._powers.values()]
        prediction = Prediction(
            samples=self._count,
            sqnr_db=round(float(np.mean(powers)), 3) if powers else math.inf,
            top1_agreement=None,
            drop_estimate=None,
            drop_interval=None,
            source="no output decides anything that is known",
        )
        # An output that is not finite has lost all, whatever its finite samples would say.
        if self._broken:
            lost = Loss(estimate=1.0, interval=(1.0, 1.0), agreement=0.0)
            return _with_loss(prediction, lost, self._parts[min(self._broken)])
        if not self._parts or not self._count or any(len(records) < self._count for records in self._records):
            return prediction
        losses = [part.judge(records) for part, records in zip(self._parts, self._records, strict=True)]
        worst = max(range(len(losses)), key=lambda index: losses[index].estimate)
        return _with_loss(prediction, losses[worst], self._parts[worst])


def _count_bytes(answers: Tensors) -> int:
    return sum(value.nbytes for value in answers.values())


def _shapes(outputs: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in outputs.items()}


def _with_loss(prediction: Prediction, loss: Loss, part: Part) -> Prediction:
    low, high = loss.interval
    return msgspec.structs.replace(
        prediction,
        measure=part.measure,
        top1_agreement=loss.agreement,
        drop_estimate=round(loss.estimate, 6),
        drop_interval=(round(low, 6), round(high, 6)),
        source=part.source,
    )


def _choose_parts(
    readings: Mapping[str, Reading], head: Head | DetectionList | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Part, ...]:
    """Returns what counts: a detector's head, and of the other outputs the first that makes one decision, else all."""
    heads = () if head is None else (_as_part(head, shapes),)
    others = {name: reading for name, reading in readings.items() if head is None or name not in head.outputs}
    first = next((name for name, reading in others.items() if reading.kind == "classes"), None)
    chosen = others if first is None else {first: others[first]}
    return (*heads, *(_read_part(name, reading, shapes[name]) for name, reading in chosen.items()))


def _as_part(head: Head | DetectionList, shapes: Mapping[str, tuple[int, ...]]) -> Part:
    def judge(records: Sequence[Array]) -> Loss:
        found = estimate_drop(records, centred=head.centred)
        return Loss(estimate=found.drop, interval=found.interval)

    return Part(
        shapes={name: shapes[name] for name in sorted(head.outputs)},
        measure=AP,
        source="the float model's detections",
        record=lambda expected, found: record_detections(head, expected, found),
        judge=judge,
    )


def _read_part(name: str, reading: Reading, shape: tuple[int, ...]) -> Part:
    measure = MEASURES[reading.kind]
    return Part(
        shapes={name: shape},
        measure=measure.name,
        source=measure.source,
        record=lambda expected, found: measure.record(expected[name], found[name], reading),
        judge=measure.judge,
    )


def _add_powers(powers: dict[str, Array], expected: Tensors, found: Tensors) -> None:
    """Adds the powers of outputs and differences; what has another shape, where values decide it, is all wrong."""
    for name, value in expected.items():
        if value.dtype.kind != "f":
            continue
        powers.setdefault(name, np.zeros(2))
        other = found.get(name)
        if other is None or other.shape != value.shape:
            powers[name] += np.array([0.0, np.inf])
            continue
        one, two = value.astype(np.float64), other.astype(np.float64)
        powers[name] += np.array([(one**2).sum(), ((one - two) ** 2).sum()])
