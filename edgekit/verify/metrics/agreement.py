"""How far two runs agree, judged by what each output is for: a share of one, whatever the kind, with its interval.

| kind | what the share counts |
|---|---|
| classes, map, labels | equal decisions: of samples, of places, of entries |
| map of Sigmoids | the F1 score (Dice 1945) of the rarer of the answers yes and no: equal entries would be many even |
| | for a run that finds nothing |
| sequence | equal steps; or letters, by their edit distance, where most changes of class are to or from CTC's blank |
| embedding | the larger of two shares. How samples resemble each other: over all pairs of samples, the correlation |
| | (Kriegeskorte et al. 2008) of the cosine of both vectors of the float model with the cosine of the first one and |
| | the second vector of the other run. And the energy of the vectors that cannot be mistaken for another sample's: |
| | their error is less than half the distance to the nearest other vector |
| values, image | the variance between samples (R2), and the energy, which includes an offset common to all samples |

An output that may be of two kinds has a figure for each. All have the same limit: an output that agrees by more than
nine tenths for every kind passes, one that agrees by less for every kind fails, and if the kinds disagree nothing is
proven.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import comb
from typing import Annotated, Literal

import msgspec
import numpy as np

from edgekit.data.intervals import bootstrap_share, span_95, wilson_interval
from edgekit.data.samples import Samples
from edgekit.errors import EdgekitError
from edgekit.model.tensors import Array, MeasuredKind, Reading, Tensors, is_numeric, is_text
from edgekit.quantize.accuracy.loss import count_peaks, find_blank, record_heatmaps, spell_answer
from edgekit.quantize.accuracy.output_kinds import read_decisions, says_yes_or_no
from edgekit.verify.metrics.tensor_metrics import energy_of

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Of = Literal[
    "classes", "places", "findings", "steps", "letters", "peaks", "labels", "neighbours", "variance", "energy",
    "detections",
]  # fmt: skip
"""What the share counts."""
SHARED: Mapping[Of, str] = {
    "classes": "top-1 agreement", "places": "agreement of places", "steps": "agreement of steps",
    "letters": "agreement of letters", "peaks": "agreement of peaks", "labels": "agreement of labels",
    "detections": "detection agreement",
    "findings": "agreement of findings (F1)",
    "neighbours": "agreement of neighbours", "variance": "share of the variance", "energy": "share of the energy",
}  # fmt: skip
"""The name of a share in messages."""

_DECIDING: Mapping[MeasuredKind, Of] = {
    "classes": "classes", "map": "places", "sequence": "steps", "tokens": "steps", "labels": "labels"
}  # fmt: skip
# The number of pairs grows with the square of the samples, so pairs are drawn; and fewer samples than this have too few
# pairs.
_PAIR_DRAWS, _LEAST_VECTORS = 200, 4
# The edit distance of longer answers costs the square of their length: for them, steps count.
_MOST_LETTERS = 4096
# A variance below this share of the energy is only the rounding of float32: the output counts as constant.
_STILL = 1e-10
# The probability that an output which keeps its limit fails by chance (one side of a 95 % interval).
_DOUBT = 0.025


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The share on which two runs agree, and its 95 % interval, None for a single sample."""

    of: Of
    share: _Share
    interval: tuple[_Share, _Share] | None = None
    samples: Annotated[int, msgspec.Meta(ge=0)] = 0

    def is_below(self, least: float) -> bool:
        """Returns True if so low a share would seldom occur by chance with a true share of `least`.

        Shares of samples are tested by the binomial distribution itself (Clopper and Pearson 1934), because few samples
        are far from normal; others by their interval.
        """
        if self.of != "classes" or not self.samples:
            return (self.share if self.interval is None else self.interval[1]) < least - 1e-12
        total, hits = self.samples, round(self.share * self.samples)
        return sum(comb(total, n) * least**n * (1 - least) ** (total - n) for n in range(hits + 1)) < _DOUBT


def sum_shares(of: Of, parts: Array) -> Agreement:
    """Returns the sum of the first column over that of the second, with its interval.

    Each row of `parts` [samples, 2] holds how much of a sample agrees, and how much could.
    """
    share, interval = bootstrap_share(parts)
    if of == "classes":
        interval = wilson_interval(int(parts[:, 0].sum()), len(parts))
    return Agreement(of=of, share=share, interval=interval, samples=len(parts))


def measure_agreement(
    reference: Samples, got: Samples, readings: Mapping[str, Reading]
) -> dict[str, tuple[Agreement, ...]]:
    """Returns how far two runs agree on each output, with an agreement for each kind that the output may be of.

    An output that is missing, of another shape or not finite gets no agreement: other figures fail it.
    """
    found: dict[str, tuple[Agreement, ...]] = {}
    for name, reading in readings.items():
        pairs, shared = partial(_read_pairs, name, reference, got, reading.kind), list[Agreement]()
        other = Reading(kind=reading.other, axis=reading.other_axis) if reading.other else None
        try:
            for each in filter(None, (reading, other)):
                if says_yes_or_no(each):
                    shared += _share_findings(each, pairs)
                elif each.kind == "heatmaps":
                    records = [record_heatmaps(*pair, each) for pair in pairs()]
                    shared += [sum_shares("peaks", count_peaks(records))] if records else []
                elif each.kind in _DECIDING:
                    shared += _share_decisions(each, pairs)
                else:
                    shared += _share_vectors(pairs) if each.kind == "embedding" else _share_values(pairs)
        except (EdgekitError, _UnlikeError):
            continue
        if shared:
            found[name] = tuple(shared)
    return found


def count_edits(label: Sequence[object], found: Sequence[object]) -> int:
    """Returns how many insertions, deletions and substitutions turn one into the other (Levenshtein 1966)."""
    places, wanted = np.arange(len(label) + 1), np.array(list(label))
    row = places
    for index, entry in enumerate(found, start=1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (wanted != entry))
        row = np.minimum.accumulate(np.concatenate([[index], changed]) - places) + places
    return int(row[-1])


class _UnlikeError(Exception):
    """The two sides of an output cannot be compared."""


_Pairs = Callable[[], Iterator[tuple[Array, Array]]]
"""Both sides of an output, sample by sample; they can be read several times."""


def _read_pairs(name: str, reference: Samples, got: Samples, kind: MeasuredKind) -> Iterator[tuple[Array, Array]]:
    for wanted, found in zip(reference, got, strict=False):
        one, other = (_take(side, name, kind) for side in (wanted, found))
        if one.shape != other.shape or not one.size:
            raise _UnlikeError
        yield one, other


def _take(side: Tensors, name: str, kind: MeasuredKind) -> Array:
    value = side.get(name)
    if value is not None and kind == "labels" and is_text(value):
        return value
    if value is None or value.dtype.kind not in "biuf" or not np.isfinite(value).all():
        raise _UnlikeError
    return value


def _share_decisions(reading: Reading, pairs: _Pairs) -> Iterator[Agreement]:
    rows, answers = list[tuple[float, float]](), list[tuple[Array, Array]]()
    of = _DECIDING[reading.kind]
    for wanted, found in pairs():
        if not -wanted.ndim <= reading.axis < wanted.ndim:
            raise _UnlikeError
        before, after = read_decisions(wanted, reading), read_decisions(found, reading)
        if reading.kind == "sequence":
            answers.append((before, after))
        hits = float(np.sum(before == after))
        if of == "classes":
            # If several classes have the highest score, any of them agrees.
            flat, first, other = wanted.reshape(-1), before[0], after[0]
            hits = float(first == other or (flat.size > 1 and flat[other] >= flat[first]))
        rows.append((hits, float(before.size)))
    if not rows:
        return
    if answers:
        blank = find_blank([before for before, _ in answers])
        spelt = [[spell_answer(each, blank) for each in pair] for pair in answers] if blank is not None else []
        # If the float model reads less than one letter per sample, the samples hold no text, or the output is none.
        reads = bool(spelt) and sum(len(before) for before, _ in spelt) >= len(spelt)
        if reads and max(len(one) for pair in spelt for one in pair) <= _MOST_LETTERS:
            of, sizes = "letters", [(max(map(len, pair)), count_edits(*pair)) for pair in spelt]
            rows = [(float(size - edits), float(size)) for size, edits in sizes]
    yield sum_shares(of, np.array(rows))


def _share_findings(reading: Reading, pairs: _Pairs) -> Iterator[Agreement]:
    rows = list[tuple[int, int, int, int]]()
    for pair in pairs():
        one, two = (read_decisions(each, reading) for each in pair)
        both, said = int((one & two).sum()), int(one.sum() + two.sum())
        # For the answer yes, then for no: twice the number of entries where both sides give it, and the sum of both
        # numbers of entries where one side gives it.
        rows.append((2 * both, said, 2 * (one.size - said + both), 2 * one.size - said))
    if rows:
        table = np.array(rows, np.float64)
        rarer = min(table[:, :2], table[:, 2:], key=lambda answer: float(answer[:, 1].sum()))
        yield sum_shares("findings", rarer)


def _share_values(pairs: _Pairs) -> Iterator[Agreement]:
    total, count, shapes = np.zeros(()), 0, set[tuple[int, ...]]()
    for wanted, _ in pairs():
        if not is_numeric(wanted):
            raise _UnlikeError
        shapes.add(wanted.shape)
        count += 1
        total = total + wanted.astype(np.float64) if len(shapes) == 1 else np.zeros(())
    if not count:
        return
    mean = total / count
    rows = [
        (energy_of(found - wanted.astype(np.float64)), energy_of(wanted - mean), energy_of(wanted))
        for wanted, found in pairs()
    ]
    error, varying, energy = np.array(rows).T
    if not np.isfinite([error, energy]).all():
        raise _UnlikeError
    kept: list[tuple[Of, Array]] = [("energy", energy)]
    # A single sample has no variance, and samples of several sizes have no mean.
    if len(shapes) == 1 and varying.sum() > _STILL * energy.sum():
        kept.insert(0, ("variance", varying))
    yield from (sum_shares(of, np.stack([size - error, size], axis=1)) for of, size in kept)


def _share_vectors(pairs: _Pairs) -> Iterator[Agreement]:
    sides = [(wanted.reshape(-1).astype(np.float64), found.reshape(-1).astype(np.float64)) for wanted, found in pairs()]
    if len(sides) < _LEAST_VECTORS:
        return
    if len({wanted.size for wanted, _ in sides}) > 1:
        raise _UnlikeError
    stacked = (np.stack(side) for side in zip(*sides, strict=True))
    gallery, queries = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12) for rows in stacked)
    # If all samples are equally far apart, or nearly parallel, cosines of pairs contain little but rounding. Then the
    # vectors themselves are compared, unless they are all alike: then any constant output would agree too.
    # An app's gallery may hold vectors of the float model: a device that rotates all vectors alike finds nothing in it.
    wanted, found = np.asarray(gallery @ gallery.T), np.asarray(gallery @ queries.T)
    rng, count = np.random.default_rng(0), len(gallery)
    draws = [_correlate(wanted, found, rng.integers(0, count, count)) for _ in range(_PAIR_DRAWS)]
    share = _correlate(wanted, found, np.arange(count))
    neighbours = Agreement(of="neighbours", share=share, interval=span_95(draws), samples=count)
    # The energy in vectors that cannot be mistaken for another vector of the float model. That is certain if the error
    # is less than half the distance to the nearest other vector (the triangle inequality).
    error = np.square(queries - gallery).sum(axis=1)
    apart = 2.0 - 2.0 * wanted
    np.fill_diagonal(apart, np.inf)
    kept = np.where(4.0 * error < apart.min(axis=1), 1.0 - error, 0.0)
    energy = sum_shares("energy", np.stack([kept, np.ones_like(kept)], axis=1))
    yield max(neighbours, energy, key=lambda each: each.share)


def _correlate(wanted: Array, found: Array, drawn: Array) -> float:
    """Returns the correlation, 0 to 1, of the cosines of all pairs of different samples among the drawn ones."""
    first, second = (drawn[index] for index in np.triu_indices(len(drawn), 1))
    kept = first != second
    one, other = (side[first[kept], second[kept]] for side in (wanted, found))
    if np.array_equal(one, other):
        return 1.0
    one, other = one - one.mean(), other - other.mean()
    size = math.sqrt(energy_of(one) * energy_of(other))
    return min(1.0, max(0.0, float(np.einsum("i,i->", one, other)) / size)) if size else 0.0
