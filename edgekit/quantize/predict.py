"""What quantizing will cost in accuracy: measured with labels, estimated without."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model import Model
from edgekit.quantize.judge import ratio_db
from edgekit.samples import Samples, select_samples, spread_indices
from edgekit.tensors import Array, Tensors

MOST_SAMPLES = 256
FAITHFUL_DB = 30.0
"""From this ratio on a model whose outputs rank no classes is taken to meet any goal."""
_Z = 1.96
_PRIOR_LOSS, _PRIOR_SPREAD = 0.5, 0.5


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How a quantized model will differ from the float one, on the CPU provider of this machine.

    `sqnr_db` is over the float outputs, the mean of each output's. `top1_agreement` is the share of samples whose first
    class is the same, None where no output ranks classes; then there is no drop either. `drop_estimate` is the
    expected loss of top-1 accuracy as a share (0.005 is half a point), `drop_interval` a 95 % interval of it.
    `source` says where the drop comes from.
    """

    samples: int
    sqnr_db: float
    top1_agreement: float | None
    drop_estimate: float | None
    drop_interval: tuple[float, float] | None
    source: str

    def meets(self, max_drop: float) -> bool:
        """Returns True if the drop is at most `max_drop` (a share), or cannot be told and the outputs hardly differ."""
        return self.sqnr_db >= FAITHFUL_DB if self.drop_estimate is None else self.drop_estimate <= max_drop


def predict_drop(model: Model, quantized: Model, samples: Samples, labels: Sequence[int] | None = None) -> Prediction:
    """Runs both models over at most MOST_SAMPLES samples, spread evenly, and returns what the difference will cost.

    With labels the drop is that of the accuracy. Without, the float model's probabilities stand for the truth: where
    the first class changes, the expected loss is the probability of the float model's class less that of the other
    one (after D. Guillory et al., "Predicting with confidence on unseen distributions", 2021: difference of
    confidences). The interval is Wilson's for the share of changes, times that of the loss of one change, for
    which one change of loss 0.5 is assumed besides those seen.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses a model.
    """
    kept = spread_indices(samples.count, MOST_SAMPLES)
    floating, integer = CpuSession(model.path, SessionSettings()), CpuSession(quantized.path, SessionSettings())
    powers: dict[str, Array] = {}
    pairs: list[tuple[Array, int]] = []
    for sample in select_samples(samples, kept):
        expected, found = floating.run(sample), integer.run(sample)
        _add_powers(powers, expected, found)
        name = _ranking_output(expected)
        if name is not None and found[name].size == expected[name].size:
            pairs.append((_probabilities(expected[name].reshape(-1)), int(found[name].argmax())))
    sqnr_db = round(float(np.mean([ratio_db(*power) for power in powers.values()])), 3) if powers else math.inf
    if not pairs or len(pairs) < len(kept):
        return Prediction(
            samples=len(kept), sqnr_db=sqnr_db, top1_agreement=None, drop_estimate=None, drop_interval=None,
            source="no output ranks classes",
        )  # fmt: skip
    losses = _losses(pairs, None if labels is None else [labels[index] for index in kept])
    changed = np.array([probabilities.argmax() != other for probabilities, other in pairs])
    low, high = _interval(losses, changed)
    return Prediction(
        samples=len(pairs),
        sqnr_db=sqnr_db,
        top1_agreement=float(1 - changed.mean()),
        drop_estimate=round(float(losses.mean()), 6),
        drop_interval=(round(low, 6), round(high, 6)),
        source="the float model's confidence" if labels is None else "labels",
    )


def _losses(pairs: Sequence[tuple[Array, int]], labels: Sequence[int] | None) -> Array:
    """Returns for each sample what the change of its first class costs, from -1 to 1; 0 where it did not change."""
    if labels is None:
        return np.array([probabilities.max() - probabilities[other] for probabilities, other in pairs])
    rights = [
        (int(probabilities.argmax()) == label, other == label)
        for (probabilities, other), label in zip(pairs, labels, strict=True)
    ]
    return np.array([float(before) - float(after) for before, after in rights])


def _interval(losses: Array, changed: Array) -> tuple[float, float]:
    count, total = int(changed.sum()), len(changed)
    low, high = _wilson(count, total)
    own = losses[changed]
    loss = (own.sum() + _PRIOR_LOSS) / (count + 1)
    spread = math.sqrt((((own - loss) ** 2).sum() + _PRIOR_SPREAD**2) / (count + 1))
    reach = _Z * spread / math.sqrt(count + 1)
    ends = [rate * float(np.clip(loss + side * reach, -1, 1)) for rate in (low, high) for side in (-1, 1)]
    return min(ends), max(ends)


def _wilson(count: int, total: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share (E. B. Wilson, 1927)."""
    share, square = count / total, _Z**2 / total
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def _add_powers(powers: dict[str, Array], expected: Tensors, found: Tensors) -> None:
    for name, value in expected.items():
        if value.dtype.kind == "f" and found[name].shape == value.shape:
            one, two = value.astype(np.float64), found[name].astype(np.float64)
            powers.setdefault(name, np.zeros(2))
            powers[name] += np.array([(one**2).sum(), ((one - two) ** 2).sum()])


def _ranking_output(outputs: Tensors) -> str | None:
    """Returns the first output that holds one score for each of several classes."""
    return next(
        (
            name
            for name, value in outputs.items()
            if value.dtype.kind == "f" and value.size > 1 and max(value.shape) == value.size
        ),
        None,
    )


def _probabilities(scores: Array) -> Array:
    values = scores.astype(np.float64)
    if values.min() >= 0 and abs(values.sum() - 1) < 1e-2:
        return values
    powers = np.exp(values - values.max())
    return np.asarray(powers / powers.sum())
