"""What quantizing will cost in accuracy, estimated without labels."""

import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.model.model import Model
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.accuracy.loss import MEASURES, Loss
from edgekit.quantize.accuracy.output_kinds import Reading, read_output_kinds
from edgekit.quantize.accuracy.sqnr import ratio_db
from edgekit.quantize.graph.float_graph import read_float_graph

MOST_SAMPLES = 256
"""So many tell half a point, which is one changed answer of 200; more cost time."""
FAITHFUL_DB = 30.0
"""From this ratio on outputs of no kind that is known are taken to meet any goal: an error of 3 %, a choice."""
# So many samples tell of which kind an output is: a choice, for the time.
_GUESSED_FROM = 4


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantized model will differ from the float one, on the CPU provider of this machine.

    `sqnr_db` is over the float outputs, the mean of each output's. `measure` names what is lost: "top-1 accuracy", a
    metric of the task, or "" where nothing can be told. `drop_estimate` is the expected loss of it: in shares of one
    for what lies between 0 and 1 (0.005 is half a point), else in shares of the float model's own figure (half a
    percent of 36 dB is 0.18 dB). `drop_interval` is a 95 % interval of it. `reference` and `got` are the figures
    themselves, where labels tell them. `top1_agreement` is the share of decisions that are the same, None where
    outputs decide nothing. `source` says where the drop comes from.
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


def predict_drop(
    model: Model, quantized: Model, samples: Samples, outputs: Mapping[str, StatedOutput] | None = None
) -> Prediction:
    """Runs both models over at most MOST_SAMPLES samples, spread evenly, and returns what the difference will cost.

    The float model's probabilities stand for the truth: where a decision changes, the expected loss is the
    probability of the float model's class less that of the other one (after D. Guillory et al., "Predicting with
    confidence on unseen distributions", 2021: difference of confidences). For maps of classes it is the loss of mean
    overlap. Images are held against a truth that the float model is taken to meet with 36 dB. Other values lose as
    much of their spread as the differences have. An output that makes one decision counts alone, else the worst does.
    `outputs` states what outputs are, which is guessed of the others.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses a model.
    """
    likeness = Likeness(model, samples, outputs or {})
    for pair in run_pairs(model, quantized, samples, MOST_SAMPLES):
        likeness.add(pair)
    return likeness.predict()


def run_pairs(model: Model, quantized: Model, samples: Samples, most: int) -> Iterator[Pair]:
    """Yields what two models give for at most `most` samples, spread evenly.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses a model.
    """
    floating, integer = CpuSession(model.path, SessionSettings()), CpuSession(quantized.path, SessionSettings())
    for sample in select_samples(samples, spread_indices(samples.count, most)):
        yield Pair(expected=floating.run(sample), found=integer.run(sample))


class Likeness:
    """Adds up how like two models are, output by output, in a memory that hardly grows with the samples."""

    def __init__(self, model: Model, samples: Samples, outputs: Mapping[str, StatedOutput]) -> None:
        session = CpuSession(model.path, SessionSettings())
        few = [session.run(sample) for sample in select_samples(samples, spread_indices(samples.count, _GUESSED_FROM))]
        self._readings = _choose_outputs(read_output_kinds(read_float_graph(model), few, outputs))
        self._shapes = {name: few[0][name].shape for name in self._readings}
        self._broken: set[str] = set()
        self._records: dict[str, list[Array]] = {name: [] for name in self._readings}
        self._powers: dict[str, Array] = {}
        self._count = 0

    def add(self, pair: Pair) -> None:
        """Adds one sample."""
        self._count += 1
        _add_powers(self._powers, pair.expected, pair.found)
        for name, reading in self._readings.items():
            expected, found = pair.expected[name], pair.found.get(name)
            if found is None or not found.shape == expected.shape == self._shapes[name]:
                continue
            if found.dtype.kind == "f" and not np.isfinite(found).all():
                self._broken.add(name)
                continue
            self._records[name].append(MEASURES[reading.kind].record(expected, found, reading))

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
            return _with_loss(prediction, lost, self._readings[min(self._broken)])
        whole = [name for name, records in self._records.items() if 0 < self._count == len(records)]
        if not whole or len(whole) < len(self._readings):
            return prediction
        losses = {name: MEASURES[self._readings[name].kind].judge(self._records[name]) for name in whole}
        worst = max(losses, key=lambda name: losses[name].estimate)
        return _with_loss(prediction, losses[worst], self._readings[worst])


def _with_loss(prediction: Prediction, loss: Loss, reading: Reading) -> Prediction:
    low, high = loss.interval
    return msgspec.structs.replace(
        prediction,
        measure=MEASURES[reading.kind].name,
        top1_agreement=loss.agreement,
        drop_estimate=round(loss.estimate, 6),
        drop_interval=(round(low, 6), round(high, 6)),
        source="the float model's confidence" if loss.agreement is not None else "the differences",
    )


def _choose_outputs(readings: dict[str, Reading]) -> dict[str, Reading]:
    """Returns the outputs that count: the first that makes one decision, else all."""
    first = next((name for name, reading in readings.items() if reading.kind == "classes"), None)
    return readings if first is None else {first: readings[first]}


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
