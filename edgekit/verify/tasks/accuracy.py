"""How often the first class is the label, on the float model and on the device."""

import contextlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.bundle.golden.golden import Golden, read_classes, read_outputs
from edgekit.data.samples import Samples
from edgekit.data.wilson import wilson_interval
from edgekit.errors import DataError, EdgekitError
from edgekit.model.tensors import Array, Tensors, ranks_classes
from edgekit.verify.metrics.intervals import interval_of_pairs

# Of fewer samples a good model may miss as many as chance does.
_LEAST_LABELLED = 20


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The share of samples whose first class is the label, on the float model and on the device.

    `interval` is that of 95 % of `got` minus `reference`, over the same samples.
    """

    output: str
    samples: int
    reference: float
    got: float
    interval: tuple[float, float] | None = None


def measure_accuracy(reference: Samples, got: Samples, labels: Sequence[int]) -> Accuracy | None:
    """Returns the top-1 accuracy of both sides on the first output that ranks classes, None if none does.

    A sample that did not come back, or came back with values that are not finite, counts as wrong.
    """
    first = next(iter(reference), dict[str, Array]())
    name = next((name for name, value in first.items() if ranks_classes(value)), None)
    if name is None:
        return None
    before, now = _list_right(reference, name, labels), _list_right(got, name, labels)
    return Accuracy(
        output=name,
        samples=len(labels),
        reference=float(before.mean()),
        got=float(now.mean()),
        interval=interval_of_pairs(len(labels), int((now & ~before).sum()), int((before & ~now).sum())),
    )


def describe_accuracy(found: Accuracy) -> str:
    """Returns both accuracies and the difference with its interval, in points."""
    words = f"{found.reference:.1%} -> {found.got:.1%}, {100 * (found.got - found.reference):+.1f}"
    if found.interval is None:
        return words
    return f"{words} ({100 * found.interval[0]:+.1f} to {100 * found.interval[1]:+.1f})"


def describe_chance(golden: Golden) -> str:
    """Returns in words that the float model is no better than chance on the labels, "" where it is or has none.

    Chance gets one sample of as many as there are classes. The float model is better if the lower end of Wilson's
    interval of its accuracy lies above that; fewer than 20 samples do not tell.
    """
    labels = read_classes(golden)
    outputs = read_outputs(golden)
    first = next(iter(outputs), dict[str, Array]())
    value = next((value for value in first.values() if ranks_classes(value)), None)
    found = None if labels is None else measure_accuracy(outputs, outputs, labels)
    if found is None or value is None:
        return ""
    chance, right = 1.0 / value.size, round(found.reference * found.samples)
    if found.samples < _LEAST_LABELLED or wilson_interval(right, found.samples)[0] > chance:
        return ""
    return (
        f"the float model is right on {right} of {found.samples} labelled samples ({found.reference:.1%}), no better"
        f" than chance among {value.size} classes ({chance:.1%}): the labels, their order or the inputs may be wrong"
    )


def check_class_labels(golden: Golden) -> None:
    """Refuses labels of a golden set that are no class of the first output that ranks classes.

    Raises:
        DataError: a label is below 0, or there are not that many classes.
    """
    labels = read_classes(golden) or ()
    first = next(iter(read_outputs(golden)), dict[str, Array]())
    size = next((value.size for value in first.values() if ranks_classes(value)), None)
    wrong = None if size is None else next((label for label in labels if not 0 <= label < size), None)
    if wrong is not None:
        raise DataError(f"label {wrong} is no class of an output of {size}", hint="classes count from 0")


def _list_right(samples: Samples, name: str, labels: Sequence[int]) -> npt.NDArray[np.bool_]:
    right = np.zeros(len(labels), dtype=np.bool_)
    with contextlib.suppress(EdgekitError):
        for index, (sample, label) in enumerate(zip(samples, labels, strict=False)):
            right[index] = _find_class(sample, name) == label
    return right


def _find_class(sample: Tensors, name: str) -> int | None:
    value = sample.get(name)
    if value is None or not value.size or value.dtype.kind not in "fiu" or not np.isfinite(value).all():
        return None
    return int(value.argmax())
