"""How often the first class is the label, on the float model and on the device."""

import contextlib
from collections.abc import Sequence

import msgspec
import numpy as np

from edgekit.bundle.golden.golden import Golden, read_classes, read_outputs
from edgekit.data.samples import Samples
from edgekit.errors import DataError, EdgekitError
from edgekit.model.tensors import Array, Tensors, ranks_classes


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The share of samples whose first class is the label, on the float model and on the device."""

    output: str
    samples: int
    reference: float
    got: float


def measure_accuracy(reference: Samples, got: Samples, labels: Sequence[int]) -> Accuracy | None:
    """Returns the top-1 accuracy of both sides on the first output that ranks classes, None if none does.

    A sample that did not come back, or came back with values that are not finite, counts as wrong.
    """
    first = next(iter(reference), dict[str, Array]())
    name = next((name for name, value in first.items() if ranks_classes(value)), None)
    if name is None:
        return None
    return Accuracy(
        output=name,
        samples=len(labels),
        reference=_share_right(reference, name, labels),
        got=_share_right(got, name, labels),
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


def _share_right(samples: Samples, name: str, labels: Sequence[int]) -> float:
    right = 0
    with contextlib.suppress(EdgekitError):
        for sample, label in zip(samples, labels, strict=False):
            right += _find_class(sample, name) == label
    return right / len(labels)


def _find_class(sample: Tensors, name: str) -> int | None:
    value = sample.get(name)
    if value is None or not value.size or value.dtype.kind not in "fiu" or not np.isfinite(value).all():
        return None
    return int(value.argmax())
