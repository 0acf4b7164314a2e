"""Compares the outputs of two models: the record of each sample, and the loss that the records of all samples show."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import msgspec
import numpy as np

from edgekit.model.tensors import Array, Reading, Tensors, is_numeric
from edgekit.quantize.accuracy import detections
from edgekit.quantize.accuracy.head_search import Detector
from edgekit.quantize.accuracy.loss import (
    MEASURES,
    Loss,
    Measure,
    find_offset,
    judge_records,
    measure_powers,
    ratio_db,
    record_values,
)

AP = "mean AP of detections"
"""The measure of detectors whose outputs can be read as detections."""
EXTRA_VALUES, MASKS, POINTS = "R2 of the numbers beside boxes", "overlap of masks (IoU)", "similarity of points (OKS)"
"""The measures of a detector's other predictions for each object."""
_EXTRAS = {
    "values": msgspec.structs.replace(MEASURES["values"], name=EXTRA_VALUES),
    "masks": Measure(MASKS, "the float model's masks", detections.judge_extra, detections.extra_distances),
    "points": Measure(POINTS, "the float model's points", detections.judge_extra, detections.extra_distances),
}
# The critical value of a group sequential test with five looks, each over twice as many samples as the one before, in
# standard errors: with it, all looks together find a difference where there is none in 5 % of cases. For steps of equal
# size it is 2.413 (S. J. Pocock, "Group sequential methods in the design and analysis of clinical trials", 1977); for
# these it was computed with a million draws.
_LOOKS_Z = 2.486
# The least loss of a part in `compare`, a hundredth of a point: smaller estimates are chance.
_LEAST_LOSS = 1e-4
_TINY = 1e-12


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of the float and of the quantized model for one sample."""

    expected: Tensors
    found: Tensors


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """An output that is judged, or the outputs of a detector's head together, with their shapes by name.

    `record` takes the outputs of both models for a sample and returns what `measure` judges. A part that `stands_in`
    counts in place of the one before it, which holds classes by a guess, where all samples are of one class.
    """

    shapes: dict[str, tuple[int, ...]]
    measure: Measure
    record: Callable[[Tensors, Tensors], Array]
    stands_in: bool = False


def read_head(head: Detector, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Part, ...]:
    """Returns a detector's boxes and classes as one part, and each of its other predictions, such as keypoints."""
    own = {name: shapes[name] for name in sorted(head.outputs)}
    judge = partial(detections.estimate_drop, centred=head.centred)
    distances = partial(detections.detection_distances, centred=head.centred)
    whole = Measure(AP, "the float model's detections", judge, distances)
    extras = [
        Part(shapes=own, measure=_EXTRAS[each.kind], record=partial(detections.record_extra, head, each))
        for each in head.extras
    ]
    return (Part(shapes=own, measure=whole, record=partial(detections.record_detections, head)), *extras)


def read_output(name: str, reading: Reading, few: Sequence[Array], *, is_known: bool) -> tuple[Part, ...]:
    """Returns an output as a part of its own, or as two if it may hold classes or be an embedding: neither is lost.

    `few` are the float model's values for a few samples. With `is_known` the user or the graph says that it holds
    classes. If they are a guess only, a second part with its values stands in for them: a class that never changes is
    no evidence for classes.
    """
    readings, note = [reading], ""
    is_guess = reading.kind == "classes" and not is_known and not reading.other
    if is_guess:
        note = "; its numbers are taken as classes, and [outputs] of a recipe states what they are"
        readings.append(Reading(kind="values", axis=reading.axis))
    elif reading.kind == "classes" and reading.other:
        readings.append(Reading(kind=reading.other, axis=reading.other_axis))
        note = "; it may hold classes or be an embedding, and [outputs] of a recipe states which"

    def read_as(reading: Reading) -> Part:
        measure = MEASURES[reading.kind]
        record = measure.record
        if reading.kind == "values":
            record = partial(record_values, offset=find_offset(few))
        return Part(
            shapes={name: few[0].shape},
            measure=msgspec.structs.replace(measure, source=measure.source + note),
            record=lambda expected, found: record(expected[name], found[name], reading),
            stands_in=is_guess and reading.kind == "values",
        )

    return tuple(map(read_as, readings))


class Compared(NamedTuple):
    """The comparison of a sample: the powers of each numeric output and of its noise, and the record of each part.

    Where an output has another shape, its noise is infinite and the record None. So is the record if values that are
    not finite make the part `broken`.
    """

    powers: dict[str, Array]
    records: tuple[Array | None, ...]
    broken: frozenset[int]

    @property
    def size_bytes(self) -> int:
        """The memory of the records."""
        return sum(record.nbytes for record in self.records if record is not None)


def compare_sample(parts: Sequence[Part], pair: Pair) -> Compared:
    """Returns the comparison of a sample."""
    records, broken = list[Array | None](), set[int]()
    for place, part in enumerate(parts):
        found = {name: pair.found[name] for name in part.shapes if name in pair.found}
        shapes = ({name: side[name].shape for name in part.shapes if name in side} for side in (pair.expected, found))
        fits = all(each == part.shapes for each in shapes)
        if fits and any(value.dtype.kind == "f" and not np.isfinite(value).all() for value in found.values()):
            broken.add(place)
        is_sound = fits and place not in broken
        records.append(part.record(pair.expected, pair.found) if is_sound else None)
    powers = dict[str, Array]()
    for name, value in pair.expected.items():
        if is_numeric(value):
            other = pair.found.get(name)
            fits = other is not None and other.shape == value.shape
            powers[name] = measure_powers(value, pair.found[name]) if fits else np.array([0.0, np.inf])
    return Compared(powers, tuple(records), frozenset(broken))


class Likeness:
    """The comparisons of all samples of one quantized model with the float model; `steps` in a row are a sequence."""

    def __init__(self, parts: Sequence[Part], samples: Sequence[Compared], steps: int = 1) -> None:
        self._parts, self._samples, self._steps = parts, samples, steps
        self._records = [
            [record for each in samples if (record := each.records[place]) is not None] for place in range(len(parts))
        ]

    @property
    def is_whole(self) -> bool:
        """True if every part has a record of each sample."""
        count = len(self._samples)
        return bool(self._parts and count) and all(len(records) == count for records in self._records)

    def is_clearly_better_than(self, other: "Likeness") -> bool:
        """Returns True if this model loses significantly less than another, over the same samples.

        Two conditions hold then. A paired t-test over the samples, or over whole sequences, shows that the other's
        outputs moved farther (decisions change in proportion to that), at the level of a group sequential test
        (`FloatReference.look`). And the loss estimated from changed decisions is not smaller for the other. The
        quantile of Student's t is computed from the normal one (Abramowitz and Stegun, "Handbook of mathematical
        functions", 26.7.5, to second order).
        """
        count = len(self._samples) // self._steps
        if not (self.is_whole and other.is_whole and count > 1):
            return False
        lost, others = (max(loss.estimate for _, loss in each.losses) for each in (self, other))
        farther = other.compare(self).reshape(count, self._steps).mean(axis=1)
        error = float(np.std(farther, ddof=1)) / math.sqrt(count)
        z, freedom = _LOOKS_Z, count - 1
        bound = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        return float(farther.mean()) > bound * error and lost <= others

    def compare(self, other: "Likeness") -> Array:
        """Returns how much more accuracy this model loses than another in each sample, as a share, float64 [samples].

        Each part has a distance in a unit of its own, such as Hellinger's or noise power. Losses are about proportional
        to distances, so the factor from distance to loss is the loss of both models in the part over the distance of
        both. A loss counts as at least _LEAST_LOSS.
        """
        ones, others = (each.distances() for each in (self, other))
        lost = np.sum([[max(loss.estimate, _LEAST_LOSS) for _, loss in each.losses] for each in (self, other)], axis=0)
        prices = lost / np.maximum((ones + others).mean(axis=1), _TINY)
        return np.asarray(prices @ (ones - others))

    def distances(self) -> Array:
        """Returns how far the outputs of each sample moved, float64 [parts, samples], in the units of each part."""
        return np.stack([self._parts[place].measure.distances(self._records[place]) for place, _ in self._counting])

    @cached_property
    def losses(self) -> list[tuple[Part, Loss]]:
        """Each part with its loss; only a broken one if there is one, and none if records are missing."""
        # An output with NaN or infinity is lost entirely, whatever its other samples show.
        broken = {place for each in self._samples for place in each.broken}
        if broken:
            return [(self._parts[min(broken)], Loss(estimate=1.0, interval=(1.0, 1.0), agreement=0.0))]
        return [(self._parts[place], loss) for place, loss in self._counting] if self.is_whole else []

    @cached_property
    def _counting(self) -> list[tuple[int, Loss]]:
        """The place and the loss of each part that counts: all, but one of two if the second `stands_in`."""
        found = list[tuple[int, Loss]]()
        for place, (part, records) in enumerate(zip(self._parts, self._records, strict=True)):
            if part.stands_in and not found[-1][1].is_one_answer:
                continue
            loss = judge_records(part.measure, records, self._steps)
            if part.stands_in:
                found.pop()
                loss = msgspec.structs.replace(loss, is_one_answer=True)
            found.append((place, loss))
        return found

    def ratios(self) -> list[float]:
        """Returns the signal-to-noise ratio in dB of each numeric output."""
        powers = dict[str, Array]()
        for each in self._samples:
            for name, power in each.powers.items():
                powers[name] = powers.get(name, np.zeros(2)) + power
        return [ratio_db(*power) for power in powers.values()]
