"""Turning an output into text: the decoders that a metric of the task names."""

from collections.abc import Callable

import numpy as np

from edgekit.errors import DataError, UsageError, suggest_name
from edgekit.model.tensors import Array
from edgekit.target import TaskLimit


def decode_text(value: Array, limit: TaskLimit) -> str:
    """Returns the text that an output stands for.

    Raises:
        UsageError: there is no such decoder.
        DataError: the output is nothing that the decoder reads.
    """
    name = limit.decoder or ("strings" if value.dtype.kind in "UO" else "ctc-greedy")
    decode = DECODERS.get(name)
    if decode is None:
        raise UsageError(f"there is no decoder '{name}'", hint=suggest_name(name, DECODERS))
    return decode(value, limit)


def decode_strings(value: Array, _limit: TaskLimit) -> str:
    """Returns the strings of an output, joined by spaces."""
    return " ".join(str(item) for item in value.flat)


def decode_ctc(value: Array, limit: TaskLimit) -> str:
    """Returns the best path of a [time, classes] output: the best class a step, repeats joined, blanks dropped.

    Graves et al. 2006, "Connectionist temporal classification", section 3.2 (best path decoding). Axes of one are left
    out. `blank` of the limit is the class that stands for nothing, counted from the end where it is negative.
    """
    dims = [dim for dim in value.shape if dim != 1]
    if len(dims) != 2 or value.dtype.kind != "f":
        raise DataError(f"ctc-greedy cannot read {value.dtype}{list(value.shape)}", hint="it reads [time, classes]")
    classes = dims[1]
    scores, blank = value.reshape(dims), limit.blank % classes
    path = scores.argmax(axis=1)
    first = np.concatenate([[True], path[1:] != path[:-1]])
    return _spell([int(step) for step in path[first & (path != blank)]], limit, blank, classes)


def decode_indices(value: Array, limit: TaskLimit) -> str:
    """Returns the letters of the alphabet at the indices that an output holds."""
    if value.dtype.kind not in "iu":
        raise DataError(f"the decoder 'indices' cannot read {value.dtype}", hint="it reads whole numbers")
    return _spell([int(item) for item in value.flat], limit, None, len(limit.alphabet))


def _spell(places: list[int], limit: TaskLimit, blank: int | None, classes: int) -> str:
    """Returns the letters of classes; the alphabet has a letter a class, or one for each but the blank."""
    letters = list(limit.alphabet)
    if blank is not None and len(letters) == classes - 1:
        letters.insert(blank, "")
    if len(letters) != classes or any(not 0 <= place < classes for place in places):
        raise DataError(
            f"an alphabet of {len(limit.alphabet)} letters does not fit {classes} classes",
            hint="alphabet has one letter a class, with or without the blank",
        )
    return "".join(letters[place] for place in places)


DECODERS: dict[str, Callable[[Array, TaskLimit], str]] = {
    "strings": decode_strings,
    "ctc-greedy": decode_ctc,
    "indices": decode_indices,
}
