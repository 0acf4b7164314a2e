"""What both sides answer in a sample: the class where an output ranks classes, else the number that is furthest off."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from edgekit.model.tensors import Array
from edgekit.verify.metrics.tensor_metrics import SampleErrors

_MOST_CHANGES = 20

Place = Annotated[int, msgspec.Meta(ge=0)]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A place in an output, flat, and the number there: the largest where the output ranks classes."""

    place: Place
    value: float


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What the reference answers in a sample, and what came back."""

    wanted: Answer
    got: Answer


class ClassChange(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples of one class on the reference got another one."""

    wanted: Place
    got: Place
    samples: Place


def find_answers(wanted: Array, found: Array, errors: Sequence[SampleErrors]) -> list[Answers | None]:
    """Returns both answers in each sample of arrays `[samples, ...]`, None where nothing is a number or finite."""
    first, second = (side.reshape(len(errors), -1) for side in (wanted, found))
    return [
        _answer(one, other, sample) if sample.numeric and sample.elements and not sample.non_finite else None
        for one, other, sample in zip(first, second, errors, strict=True)
    ]


def count_changes(pairs: Iterable[tuple[SampleErrors, Answers | None]]) -> tuple[ClassChange, ...]:
    """Returns which class became which other one in how many samples, the most frequent first, 20 at most."""
    counts = Counter(
        (answers.wanted.place, answers.got.place)
        for errors, answers in pairs
        if answers is not None and errors.top1 is False
    )
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        ClassChange(wanted=wanted, got=got, samples=samples) for (wanted, got), samples in ranked[:_MOST_CHANGES]
    )


def _answer(wanted: Array, found: Array, errors: SampleErrors) -> Answers:
    ranks = errors.top1 is not None
    places = (int(np.argmax(side)) if ranks else errors.position or 0 for side in (wanted, found))
    one, other = (
        Answer(place=place, value=float(side[place])) for side, place in zip((wanted, found), places, strict=True)
    )
    return Answers(wanted=one, got=other)
