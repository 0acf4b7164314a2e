"""What quantizing will cost in accuracy, estimated without labels."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import msgspec

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.graph.graph import Graph, read_graph
from edgekit.machine import map_in_order
from edgekit.model.external import ArrayFile, FileArray
from edgekit.model.model import Model
from edgekit.model.state import State, find_fed_back, run_steps
from edgekit.model.tensors import Array, StatedOutput, Tensors
from edgekit.quantize.accuracy import head_search
from edgekit.quantize.accuracy.likeness import Compared, Likeness, Pair, Part, compare_sample, read_head, read_output
from edgekit.quantize.accuracy.loss import GOOD_DB, MEASURES, ONE_ANSWER, reach_without_labels
from edgekit.quantize.accuracy.output_kinds import KIND_SAMPLES, find_squash, read_output_kinds
from edgekit.quantize.effort import Effort, find_effort
from edgekit.quantize.graph.sessions import EXACT_PRODUCTS, open_quantized

MOST_SAMPLES = 256
"""The most samples that are compared. They resolve half a point, which is one changed answer of 200; more cost time."""
MOST_CHANGED = 0.1
"""The share of decisions that a plan may change if nothing else is to be said: a choice."""
WANTED_REACH = 0.005
"""How wide, to each side, the interval of a drop should be at most: half a point."""
# If the records of a model take more bytes, as those of long vectors do, those of the others are dropped: a choice.
_MOST_REMEMBERED_BYTES = 4 << 20
# The memory for the kept outputs of the float model, or their room on the disk. Outputs that do not fit are computed
# again. Chosen by hand.
_MEMORY_BYTES, _DISK_BYTES = 64 << 20, 1 << 30
# The first looks are at every 16th, eighth, fourth and second sample, if these are at least 8: a choice.
_STRIDES, _LEAST_LOOKED = (16, 8, 4, 2), 8
_SETTINGS = SessionSettings(threads=1, one_block=False, config=dict(EXACT_PRODUCTS))
SILENT = "hardly any sample shows an object, so detections are not judged; spread of the values (R2)"
"""The measure of the head of a detector that detects too little in the samples."""
_RunPairs = Callable[[Sequence[int]], Iterator[tuple[int, Pair]]]
LABELS = "labels"
"""The source of a drop that was measured with labels."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantized model will differ from the float one, on the CPU provider of this machine.

    `sqnr_db` is the lowest signal-to-noise ratio of a float output, as in `verify`. `measure` names the metric that
    falls, such as "top-1 accuracy", and is "" where none can be estimated. `drop_estimate` is its expected fall:
    absolute for metrics between 0 and 1 (0.005 is half a point), else relative to the float model's value (0.005 of
    36 dB is 0.18 dB). `drop_interval` is its 95 % confidence interval. `top1_agreement` is the share of decisions that
    stay the same, for embeddings that of nearest neighbours, and None where outputs decide nothing. `source` says what
    the drop was estimated from. `reference` and `got` are the values of the metric for both models, if there are
    labels. `outputs` names the outputs that lose most, if several are judged. `candidates` is the number of samples
    among which each sample's nearest neighbour is searched: with more, neighbours are closer, and change more often.
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
    outputs: tuple[str, ...] = ()
    candidates: int | None = None

    def loss(self, most_changed: float = MOST_CHANGED) -> float:
        """Returns the estimated drop, or minus the SQNR in dB where it is unknown: the smaller, the better the plan.

        Decisions that change count as lost beyond the share `most_changed`. For an uncertain model the drop alone would
        not tell a bad plan from a good one: a new decision is as likely to be right as the old one.
        """
        return -self.sqnr_db if self.drop_estimate is None else max(self.drop_estimate, self.changed() - most_changed)

    def changed(self) -> float:
        """Returns the share of decisions that change, 0 where nothing is decided."""
        return 0.0 if self.top1_agreement is None else 1 - self.top1_agreement

    def meets(self, max_drop: float) -> bool:
        """Returns True if the drop is at most `max_drop` (a share); where it is unknown, if outputs hardly differ."""
        return self.sqnr_db >= GOOD_DB if self.drop_estimate is None else self.drop_estimate <= max_drop


def name_unit(predicted: Prediction) -> str:
    """Returns the unit of a drop: points for a measure between 0 and 1, else % of the float model's value."""
    is_share = predicted.measure in {MEASURES["image"].name, MEASURES["values"].name} or (predicted.reference or 0) > 1
    return "%" if is_share else "points"


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


class _KeptOutputs:
    """The outputs of a model by the index of the sample, as far as memory, or a file in `folder`, has room for them."""

    def __init__(self, folder: Path | None) -> None:
        self._file, self._room, self._largest = None, _MEMORY_BYTES, 1
        if folder is not None:
            with tempfile.NamedTemporaryFile(dir=folder, prefix="outputs-", suffix=".data", delete=False) as file:
                self._file, self._room = ArrayFile(Path(file.name)), _DISK_BYTES
        self._known: dict[int, Tensors] = {}
        self._stored: dict[int, list[FileArray]] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._known

    def __getitem__(self, index: int) -> Tensors:
        return self._known[index]

    def missing(self, indices: Sequence[int]) -> list[int]:
        """Returns the samples whose outputs are not kept."""
        return [index for index in indices if index not in self._known]

    def fits(self, count: int) -> bool:
        """Returns True if the outputs of `count` more samples can be kept, judging by the largest so far."""
        return bool(self._known) and count * self._largest <= self._room

    def keep(self, index: int, outputs: Tensors) -> Tensors:
        """Keeps a copy of the outputs of a sample, if there is room; returns the copy, else the outputs themselves.

        Raises:
            OSError: the file cannot be written.
        """
        size = sum(value.nbytes for value in outputs.values())
        self._largest = max(self._largest, size)
        if index in self._known or size > self._room:
            return self._known.get(index, outputs)
        self._room -= size

        def copy(value: Array) -> Array:
            # An array that ONNX Runtime returns holds the memory of its whole session.
            if self._file is None or value.dtype.kind not in "biuf":
                return value.copy()
            stored = self._file.zeros(value.shape, value.dtype)
            stored.values[...] = value
            self._stored.setdefault(index, []).append(stored)
            return stored.values

        self._known[index] = {name: copy(value) for name, value in outputs.items()}
        self.release(index)
        return self._known[index]

    def release(self, *indices: int) -> None:
        """Frees the memory of outputs that lie in the file, of some samples or of all, until they are read again."""
        for index in indices or self._stored:
            for array in self._stored.get(index, ()):
                array.release()


class FloatReference:
    """The float model's outputs, with which several quantized models are compared: it runs once for all of them.

    `outputs` states what outputs are; the kinds of the others are guessed. At most `most` samples count, spread evenly:
    MOST_SAMPLES by default, and fewer for a large model (`find_effort`). Outputs for which memory is too small lie in a
    file in the folder `work`; without it they are computed again.

    The samples of a model with `state` are whole sequences, each with the float model's state of its step. A quantized
    model gets its own state, as in an app: then its errors add up. State itself is not judged if there are other
    outputs.
    """

    def __init__(
        self,
        model: Model,
        samples: Samples,
        outputs: Mapping[str, StatedOutput] | None = None,
        *,
        state: State | None = None,
        most: int | None = None,
        work: Path | None = None,
    ) -> None:
        self._model, self._samples, self._stated, self._most = model, samples, outputs or {}, most
        self._state = state or State()
        self._session: CpuSession | None = None
        self._kept = _KeptOutputs(work)
        self._compared: dict[str, dict[int, Compared]] = {}

    def keep(self, index: int, outputs: Tensors) -> None:
        """Stores the float model's outputs for a sample, so that it need not run; ignored if it is not read here."""
        names = [spec.name for spec in self._model.outputs]
        # Calibration reads tensors only: a sequence or map is not among them.
        if (index in self.indices or index in self._few) and outputs.keys() >= set(names):
            self._kept.keep(index, {name: outputs[name] for name in names})

    @cached_property
    def indices(self) -> Sequence[int]:
        """The samples that are compared: spread evenly, or the first whole sequences of a model with state."""
        most, steps = self._most or min(self._effort.predicting_samples, MOST_SAMPLES), self._state.steps
        if steps == 1:
            return spread_indices(self._samples.count, most)
        return range(min(self._samples.count, most if most < steps else most // steps * steps))

    @cached_property
    def _few(self) -> Sequence[int]:
        """The samples from which kinds of outputs are guessed."""
        return spread_indices(self._samples.count, KIND_SAMPLES)

    @cached_property
    def _effort(self) -> Effort:
        return find_effort(self._graph, self._samples.count)

    @cached_property
    def _graph(self) -> Graph:
        # Not read for a model that stays float.
        return read_graph(self._model)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The outputs and how they are judged: a detector's head as one part, each other output as one of its own.

        Their kinds are guessed from outputs of the float model for a few samples.
        """
        few = [self._kept.keep(index, self._run(index, sample)) for index, sample in self._read(self._few)]
        readings, (head, silent, is_coded) = read_output_kinds(self._graph, few, self._stated), self._find_head(few)
        shapes = {name: value.shape for name, value in few[0].items()}
        others = {name: reading for name, reading in readings.items() if head is None or name not in head.outputs}
        state = find_fed_back(self._state).values()
        others = {name: reading for name, reading in others.items() if name not in state} or others
        heads = () if head is None else read_head(head, shapes)
        self._kept.release()
        # Most rows of a detector's table show nothing, and so hardly vary: what differs between places is their scale.
        shown = few[:1] if is_coded else few
        known = {name for name in others if name in self._stated or find_squash(self._graph, name)}
        parts = [
            part
            for name, reading in others.items()
            for part in read_output(name, reading, [each[name] for each in shown], is_known=name in known)
        ]
        for place, part in enumerate(parts):
            if silent & part.shapes.keys():
                measure = msgspec.structs.replace(part.measure, name=SILENT)
                parts[place] = msgspec.structs.replace(part, measure=measure)
        return (*heads, *parts)

    def predict_drop(self, quantized: Model) -> Prediction:
        """Returns what a quantized model will cost; its records are kept for later comparisons.

        The float model's probabilities stand for the truth. Where a decision changes, the expected loss is the
        probability of the float model's class minus that of the new one (after D. Guillory et al., "Predicting with
        confidence on unseen distributions", 2021). `edgekit.quantize.accuracy.loss` says how other kinds of output are
        judged. Of several outputs, the one that loses most is reported.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        return _predict(self._judge(quantized), len(self.indices))

    def compare(self, first: Model, second: Model) -> float:
        """Returns how much more accuracy, as a share, the first of two quantized models loses than the second.

        It follows from how far all samples move (`Likeness.compare`), not only from decisions that change. 0 if no
        output can be judged.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        one, two = (self._judge(each) for each in (first, second))
        return float(one.compare(two).mean()) if one.is_whole and two.is_whole else 0.0

    def look(self, quantized: Model, *, rival: Model) -> Prediction:
        """Returns what a quantized model loses, over as few samples as show that the `rival` is clearly better.

        This is a group sequential test (`Likeness.is_clearly_better_than`). The first look is at a 16th of the samples,
        the next ones at an eighth, a quarter and a half, the last at all.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        run, parts = self._open_look(quantized), [self.indices[::stride] for stride in _STRIDES]
        for indices in parts if self._state.steps == 1 else ():
            if len(indices) >= _LEAST_LOOKED:
                seen = run(indices)
                if self._judge(rival, indices).is_clearly_better_than(seen):
                    return _predict(seen, len(indices))
        return _predict(run(self.indices), len(self.indices))

    def _judge(self, quantized: Model, indices: Sequence[int] | None = None) -> Likeness:
        return self._open_look(quantized)(indices or self.indices)

    def _open_look(self, quantized: Model) -> Callable[[Sequence[int]], Likeness]:
        """Returns a function that compares a quantized model over some samples; it runs over those not yet known."""
        found, opened = self._compared.setdefault(quantized.sha256, {}), list[_RunPairs]()

        def look(indices: Sequence[int]) -> Likeness:
            # The kinds of outputs are found first: it needs memory, and so does the session opened below.
            parts = self.parts
            if todo := [index for index in indices if index not in found]:
                opened[:] = opened or [self._open_pairs(quantized)]
                for index, pair in opened[0](todo):
                    found[index] = compare_sample(parts, pair)
                self._remember(quantized, found)
            return Likeness(parts, [found[index] for index in indices], self._state.steps)

        return look

    def run_pairs(self, quantized: Model) -> Iterator[Pair]:
        """Yields the outputs of both models for each sample, and stores their records.

        Raises:
            RuntimeRefusal: ONNX Runtime refuses a model.
        """
        parts, found = self.parts, self._compared.setdefault(quantized.sha256, {})
        for index, pair in self._open_pairs(quantized)(self.indices):
            found[index] = compare_sample(parts, pair)
            yield pair
        self._remember(quantized, found)

    def _remember(self, quantized: Model, found: dict[int, Compared]) -> None:
        """Stores the records of a model; if they are large, those of other models are dropped."""
        is_large = sum(each.size_bytes for each in found.values()) > _MOST_REMEMBERED_BYTES
        # Named again: storing a rival's records may have dropped these.
        self._compared = {**({} if is_large else self._compared), quantized.sha256: found}

    def _open_pairs(self, quantized: Model) -> _RunPairs:
        """Returns a function that yields the outputs of both models for some samples."""
        todo = self._kept.missing(self.indices)
        if todo and self._kept.fits(len(todo)):
            # All outputs of the float model can be kept: it is closed before the other is opened.
            float_session = self._open()
            for (index, _), outputs in map_in_order(
                lambda sample: float_session.run(sample[1]), self._read(todo), self._effort.at_once
            ):
                self._kept.keep(index, outputs)
        self._close()
        session = open_quantized(quantized.path)

        def run(sample: tuple[int, Tensors]) -> Pair:
            return Pair(expected=self._run(*sample), found=session.run(sample[1]))

        def run_pairs(indices: Sequence[int]) -> Iterator[tuple[int, Pair]]:
            if self._kept.missing(indices):
                # Threads that run side by side must find it open.
                self._open()
            samples, is_stepped = self._read(indices), self._state.steps > 1
            together = map_in_order(run, samples, self._effort.at_once)
            for (index, _), pair in self._run_sequences(session, samples) if is_stepped else together:
                self._kept.keep(index, pair.expected)
                yield index, pair
                self._kept.release(index)
            self._close()

        return run_pairs

    def _run_sequences(
        self, session: CpuSession, samples: Iterator[tuple[int, Tensors]]
    ) -> Iterator[tuple[tuple[int, Tensors], Pair]]:
        """Yields each sample with the outputs of both models; in a sequence the session gets its own state."""
        specs, steps = {spec.name: spec for spec in self._model.inputs}, self._state.steps
        current = list[tuple[int, Tensors]]()

        def read_sequence() -> Iterator[list[Tensors]]:
            for sample in islice(samples, steps):
                current[:] = [sample]
                yield [sample[1]]

        def run(given: Sequence[Tensors]) -> list[Tensors]:
            return [session.run(given[0])]

        for _ in range(0, len(self.indices), steps):
            for _, (found,) in run_steps(read_sequence(), self._state.feeds, specs, run):
                yield current[0], Pair(expected=self._run(*current[0]), found=found)

    def _open(self) -> CpuSession:
        self._session = self._session or CpuSession(self._model.path, _SETTINGS)
        return self._session

    def _close(self) -> None:
        if not self._kept.missing(self.indices):
            self._session = None

    def _read(self, indices: Sequence[int]) -> Iterator[tuple[int, Tensors]]:
        return zip(indices, select_samples(self._samples, indices), strict=False)

    def _run(self, index: int, sample: Tensors) -> Tensors:
        return self._kept[index] if index in self._kept else self._open().run(sample)

    def _find_head(self, few: Sequence[Tensors]) -> tuple[head_search.Detector | None, frozenset[str], bool]:
        """Returns how the outputs of a detector are decoded, and those of one that detects too little in the samples.

        Outputs that are stated to be something else are left out. The last is True if they may be a detector's, but
        nothing says how to decode them.
        """
        other = {name for name, each in self._stated.items() if each.kind != "scores"}
        image = head_search.find_image(next(iter(self._samples)))
        # Anchors and strides follow from the sizes of image and outputs, which differ from sample to sample here.
        is_open = any(not isinstance(dim, int) for spec in self._model.inputs for dim in (spec.shape or ())[1:])
        if image is None or is_open:
            return None, frozenset(), False
        rows = [{name: each for name, each in outputs.items() if name not in other} for outputs in few]
        listed = head_search.find_list(rows, image)
        if listed is not None or not head_search.may_be_head(rows[0]):
            return listed, frozenset(), False
        head = head_search.find_head(rows, image)
        return head, frozenset() if head is not None else head_search.find_silent(rows, image), head is None


def _predict(likeness: Likeness, samples: int) -> Prediction:
    """Returns the worst loss of all outputs whose kind is known, over so many samples."""
    ratios, judged = likeness.ratios(), likeness.losses
    unknown = Prediction(
        samples=samples,
        sqnr_db=round(min(ratios, default=math.inf), 3),
        top1_agreement=None,
        drop_estimate=None,
        drop_interval=None,
        source="no output decides anything that is known",
    )
    if not judged:
        return unknown
    part, loss = max(judged, key=lambda each: each[1].estimate)
    low, high = loss.interval
    return msgspec.structs.replace(
        unknown,
        measure=part.measure.name,
        top1_agreement=loss.agreement,
        drop_estimate=round(loss.estimate, 6),
        drop_interval=(round(low, 6), round(high, 6)),
        source=ONE_ANSWER if loss.is_one_answer else part.measure.source,
        outputs=tuple(part.shapes) if len(judged) > 1 else (),
        candidates=samples - 1 if part.measure.name == MEASURES["embedding"].name else None,
    )
