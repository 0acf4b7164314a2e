"""Sets of samples and their labels: those for calibration and those for verification, read and checked in one pass.

A label is the correct answer for a sample: a class, a text, a mask, an image, or boxes.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from edgekit.data.data_check import FEW_SAMPLES, SampleFacts, check_samples, refusing_bad
from edgekit.data.images import Preprocess
from edgekit.data.npz import MALFORMED, open_npy
from edgekit.data.samples import Samples, limit_samples, load_samples, select_samples, spread_sequences
from edgekit.errors import DataError, reading, reraised
from edgekit.model.state import State, first_state
from edgekit.model.tensors import Array, TensorSpec
from edgekit.serialize import ready_type

LabelKind = Literal["class", "text", "array", "boxes", "any"]
FOLDERS = Path("folders")
"""Given instead of a file of labels: the class of an image is then the folder that it lies in."""

_MAX_BYTES = 1 << 30


class Boxes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The objects in one image: boxes as [left, top, right, bottom] in the units of the model, and their classes."""

    boxes: tuple[tuple[float, float, float, float], ...]
    classes: tuple[int, ...]


Label = int | str | Array | Boxes


def read_labels(path: Path, samples: Samples) -> tuple[int, ...]:
    """Returns the class of each sample, from a `.npy`, a text file with one class a line, or the folders of images.

    If `path` is `folders`, folders stand for classes: their names if these are numbers, else their positions in sorted
    order.

    Raises:
        DataError: the file cannot be read, holds no whole numbers, or has another number of classes than samples.
    """
    if path == FOLDERS and samples.class_names:
        names = samples.class_names
        if all(name.isascii() and name.isdigit() for name in names):
            return tuple(int(name) for name in names)
        # In the order of names, as torchvision's ImageFolder numbers classes.
        order = {name: place for place, name in enumerate(sorted(set(names)))}
        return tuple(order[name] for name in names)
    unread = DataError(f"cannot read labels '{path}'", hint="give a .npy or one class a line")
    hint = "labels of another kind need a metric: --metric NAME, or [metric] in the --recipe of a build"
    malformed = DataError(f"'{path}' holds no classes, which are whole numbers, one a line", hint=hint)
    # NumPy warns of an empty file, which is refused below by its number of labels.
    with reraised(MALFORMED, malformed), reraised(OSError, unread), warnings.catch_warnings(action="ignore"):
        values = open_npy(path) if path.suffix == ".npy" else np.loadtxt(path, np.int64, ndmin=1)
    if values.ndim != 1 or values.dtype.kind not in "iu" or len(values) != samples.count:
        words = f"'{path}' has {values.dtype} of shape {list(values.shape)} as labels"
        raise DataError(words, hint=f"give {samples.count} whole numbers, one a sample of '{samples.source}'")
    return tuple(int(value) for value in values)


def read_task_labels(path: Path, kind: LabelKind, samples: Samples) -> Sequence[Label]:
    """Returns the label of each sample in the form that a metric needs.

    A class is read as by `read_labels`; a text is a line of a text file; an array is a row of a `.npy`; boxes are the
    entries of a JSON list of {"boxes": [[left, top, right, bottom]], "classes": [int]}. For "any" the file's form
    decides.

    Raises:
        DataError: the file cannot be read, is of another form, or has another number of labels than samples.
    """
    if kind == "any":
        kind = _KINDS.get(path.suffix, "class")
        with suppress(*MALFORMED):
            kind = "class" if path.suffix == ".npy" and open_npy(path, mapped=True).ndim == 1 else kind
    if kind == "class":
        return read_labels(path, samples)
    read, hint = _FORMS[kind]
    malformed = DataError(f"'{path}' is malformed", hint=hint)
    with reraised(MALFORMED, malformed, quote=True), reading(f"labels '{path}'", DataError, hint):
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"'{path}' has more than {_MAX_BYTES} bytes of labels", hint="verify with fewer samples")
        labels = read(path)
    if len(labels) != samples.count:
        message = f"'{path}' has {len(labels)} labels for {samples.count} samples of '{samples.source}'"
        raise DataError(message, hint=hint)
    return labels


def _read_arrays(path: Path) -> Sequence[Array]:
    # Mapped: masks of a validation set may be larger than the memory.
    values: Any = open_npy(path, mapped=True)
    if path.suffix != ".npy" or values.ndim < 2:
        raise ValueError("it holds no array with a row a sample")
    rows: Sequence[Array] = values
    return rows


def _read_boxes(path: Path) -> Sequence[Boxes]:
    labels = msgspec.json.decode(path.read_bytes(), type=ready_type(list[Boxes]))
    if any(len(label.boxes) != len(label.classes) for label in labels):
        raise ValueError("an entry has another number of classes than boxes")
    return labels


# A .npy with one number a sample holds classes.
_KINDS: dict[str, LabelKind] = {".json": "boxes", ".npy": "array", ".txt": "text"}
_BOXES_HINT = 'give a .json: [{"boxes": [[left, top, right, bottom]], "classes": [int]}, ...], one entry a sample'
_FORMS: dict[str, tuple[Callable[[Path], Sequence[Label]], str]] = {
    "text": (lambda path: path.read_text(encoding="utf-8").splitlines(), "give a text file with one line a sample"),
    "array": (_read_arrays, "give a .npy with one row a sample"),
    "boxes": (_read_boxes, _BOXES_HINT),
}


# Without separate data for verification, one sample in four is held out of calibration for it.
_GOLDEN_SHARE = 4
# The most golden samples: they go into the bundle, and each device of a verification runs them all.
_MAX_GOLDEN_SAMPLES = 64
_MAX_GOLDEN_BYTES = 256 << 20


class SampleSets(msgspec.Struct, frozen=True, kw_only=True):
    """Samples for calibration, whose `facts` are known, and samples for verification, with their `labels`.

    `given` are those for verification as the data hold them, before state or padding was added.
    """

    calibration: Samples
    facts: SampleFacts
    evaluation: Samples
    given: Samples
    labels: Sequence[Label] | None


class Sequences(msgspec.Struct, frozen=True, kw_only=True):
    """How samples form sequences, and how each step gets the state that the float model has at that point.

    `unroll` gets samples and a name for its result; it may also pad samples to a size. In the inputs `missing` NaN
    stands for a value that is not known.
    """

    state: State = State()
    missing: Collection[str] = ()
    unroll: Callable[[Samples, str], Samples] = lambda samples, _: samples

    @property
    def computed(self) -> Collection[str]:
        """The inputs that come from the float model and not from the data."""
        return self.state.feeds if self.state.steps > 1 else ()


def read_sample_sets(
    inputs: Sequence[TensorSpec],
    source: str,
    *,
    evaluation: str | None = None,
    labels: tuple[Path, LabelKind] | None = None,
    preprocess: Preprocess | None = None,
    most: int | None = None,
    idle: Collection[str] = (),
    sequences: Sequences | None = None,
) -> SampleSets:
    """Returns the samples of `source` for the inputs of a model, at most `most` of them for calibration.

    Without `evaluation` some of them are held out for verification. `labels` (a file, and the kind that a metric needs)
    belong to the samples for verification; a bad sample among these raises an error only when it is read. Arrays named
    in `idle` are ignored. With `sequences` samples stay together in whole sequences, and get their state.

    Raises:
        DataError: a file cannot be read, does not fit the inputs, holds part of a sequence, or has another number of
            labels than samples.
    """
    sequences = sequences or Sequences()
    steps = sequences.state.steps
    samples = load_sequences(source, inputs, sequences.state, preprocess, idle=idle)
    held_out = samples
    if evaluation is not None:
        held_out = load_sequences(evaluation, inputs, sequences.state, preprocess, idle=idle)
    # A single sequence serves for both.
    elif samples.count > steps:
        size_bytes = max(1, sum(value.nbytes for value in next(iter(samples)).values()))
        room = min(_MAX_GOLDEN_SAMPLES, max(1, _MAX_GOLDEN_BYTES // size_bytes))
        kept = spread_sequences(samples.count, min(room, max(1, samples.count // _GOLDEN_SHARE)), steps)
        others = sorted(set(range(samples.count)) - set(kept))
        samples, held_out = select_samples(samples, others), select_samples(samples, kept)
    limited = limit_samples(samples, most, steps)
    samples = sequences.unroll(limited, "calibration")
    # Held-out samples have the same source: nothing to compare. Padded samples, and those with state, differ from it.
    golden = limit_samples(held_out, FEW_SAMPLES, steps) if evaluation is not None and samples is limited else None
    return SampleSets(
        calibration=samples,
        facts=check_samples(samples, computed=sequences.computed, golden=golden, missing=sequences.missing),
        evaluation=refusing_bad(sequences.unroll(held_out, "evaluation"), sequences.missing),
        given=held_out,
        labels=None if labels is None else read_task_labels(*labels, held_out),
    )


def load_sequences(
    source: str,
    inputs: Sequence[TensorSpec],
    state: State,
    preprocess: Preprocess | None = None,
    *,
    idle: Collection[str] = (),
) -> Samples:
    """Opens samples that form whole sequences; state inputs that the data lack are zero.

    Raises:
        DataError: the source cannot be read, does not fit the inputs, or holds part of a sequence.
    """
    absent = {spec.name: first_state(spec) for spec in inputs if spec.name in state.feeds} if state.steps > 1 else {}
    samples = load_samples(source, inputs, preprocess, idle=idle, absent=absent)
    if samples.count % state.steps:
        words = f"'{source}' holds {samples.count} samples, which make no whole sequences of {state.steps} steps"
        fitting = samples.count // state.steps * state.steps or state.steps
        raise DataError(words, hint=f"give {fitting} samples, or other steps")
    return samples
