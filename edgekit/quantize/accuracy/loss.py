"""What the difference of two outputs costs, by the kind of output, and how sure that is.

Each kind of output has a measure: what is recorded of each sample, and what all records say about the loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from edgekit.data.wilson import Z95, wilson_interval
from edgekit.model.outputs import MeasuredKind, Reading
from edgekit.model.tensors import Array
from edgekit.quantize.accuracy.output_kinds import IMAGE_CHANNELS, read_decisions, read_probabilities

# Past -20 dB nothing is left of a signal, past 80 dB float32 itself errs: one such output must not decide a mean.
_WORST_DB, _BEST_DB = -20.0, 80.0


def ratio_db(signal: float, noise: float) -> float:
    """Returns signal over noise in dB, within -20 and 80."""
    if not np.isfinite(noise):
        return _WORST_DB
    # What is silent or empty in both, such as the past of a first step, has lost nothing.
    if noise == 0:
        return _BEST_DB
    tiny = np.finfo(np.float64).tiny
    return float(np.clip(10 * (np.log10(max(signal, tiny)) - np.log10(max(noise, tiny))), _WORST_DB, _BEST_DB))


def join_ratios(ratios: Sequence[float]) -> float:
    """Returns the ratio in dB that stands for several: that of their mean noise, so that the worst counts most."""
    return float(-10 * np.log10(np.mean(10 ** (-np.asarray(ratios) / 10))))


def discount_loss(share: float) -> float:
    """Returns the loss to expect of a figure where the float model's own outputs, taken for the truth, lose `share`.

    Half of a small loss counts, and all of it where all is lost: what moves a little moves towards the real truth as
    often as away from it. 46 plans of six detectors lost 0.06 where 0.10 was computed, 0.2 for 0.25, 0.32 for 0.44 and
    0.6 for 0.65.
    """
    share = float(np.clip(share, -1.0, 1.0))
    return share * (1 + abs(share)) / 2


LEAST_PSNR_DB, _MOST_PSNR_DB = 36.0, 48.0
"""How near the images of a float model are taken to come to the truth: a good one loses more by the same noise.

By three nets that enlarge three times and 180 images (docs/concepts/accuracy.md).
"""

# Of a bootstrap: a choice, for the time.
_RESAMPLES = 200
# Half a change is added to those that are seen, Jeffreys' prior of a share, and costs half of what it may.
_PRIOR_CHANGES, _PRIOR_LOSS = 0.5, 0.5
# How far the mean cost of a change may be off, as a deviation, where few answers change and where all do: a net may be
# sure, and wrong, of just what changes. By two nets of tools/bench/interval_coverage.py, one much too sure, one too
# little, and for all of them by a ruined MobileNetV2 of predict_coverage.py.
_FEW_COST_DEVIATION, _ALL_COST_DEVIATION = 0.2, 0.1
# What a changed label costs where no confidence is seen: half way from nothing to all.
_UNKNOWN_LOSS = 0.5
# Classes with a smaller share of the places are left out of a mean overlap, which they would decide by chance.
_RARE = 1e-3
# So many places around a border share what is true of them: 4 x 4, chosen by hand.
_ALIKE = 16
# How sure the estimate of maps is, as a share of the drop: the net of tools/bench/interval_coverage.py lost 1.2 to 1.8
# times as much as was expected, as its probabilities are unsure where it is right.
_MAP_DOUBT = 0.3
# Past what float32 can tell, so that logarithms stay finite.
_DB_LIMIT = 200.0
# What is smaller than this share of the power comes from rounding float64 sums.
_ROUNDING_SHARE = 1e-12
# Channels with less than this share of the largest deviation are a group of their own, such as scores beside boxes.
_SMALL = 0.01
# The share of an image's values at each end that may be overshoots, and are no part of its peak.
_OVERSHOOT = 0.01
_TABLE_VALUES, _TABLE_PLACES = 5, 16
"""From so many values at so many places on, decisions are made of the values later: heads of detectors have them."""
# Of what the differences have to do with what the float model misses, by chance: 2 x 1.96 sqrt(lost u / n) of a model
# that misses u = 0.1 of the variance, where differences are as alike as those of n = 107 independent values; n is taken
# from the pose net of tools/bench/interval_coverage.py: then all of its plans that lose at most 5 points are held.
_CHANCE = 0.12
# Cosines of float32 vectors that differ by less are equal but for rounding.
_EQUALLY_NEAR = 1e-6
# Detail is what is finer than so many pixels.
_FINE = 4


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """An expected drop as a share, its interval of 95 %, and the share of decisions that are the same."""

    estimate: float
    interval: tuple[float, float]
    agreement: float | None = None


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """How outputs of one kind are compared: what is recorded of a sample, and what all records say.

    `source` names what the loss is estimated from.
    """

    name: str
    source: str
    record: Callable[[Array, Array, Reading], Array]
    judge: Callable[[Sequence[Array]], Loss]


def _record_classes(expected: Array, found: Array, reading: Reading) -> Array:
    """Returns the expected cost of a change of the first class, by the float model's confidence.

    A change costs 1, -1 or 0: the old class was right, the new one is, or neither. The second number says if there is
    a change at all.
    """
    before, after = int(read_decisions(expected, reading)[0]), int(read_decisions(found, reading)[0])
    if before == after:
        return np.zeros(2)
    old, new = (float(chance) for chance in read_probabilities(expected, reading)[[before, after], 0])
    return np.array([old - new, 1.0])


def _record_sequence(expected: Array, found: Array, reading: Reading) -> Array:
    """Returns the expected cost of a change of the whole answer, as for classes: it is right if every step is.

    Where one class is at most steps it is the blank of CTC (A. Graves et al., 2006): then answers are compared as
    these are read, repeats once and blanks not at all, so that a letter a step later is no change.
    """
    chances = read_probabilities(expected, reading)
    before, after = read_decisions(expected, reading), read_decisions(found, reading)
    counts = np.bincount(before)
    blank = int(counts.argmax()) if 2 * counts.max() > len(before) else None
    if (before == after).all() or (blank is not None and _read_answer(before, blank) == _read_answer(after, blank)):
        return np.zeros(2)
    # Steps are taken to be independent, so that a long answer is the less sure.
    steps = np.arange(len(before))
    old, new = (float(np.prod(chances[answer, steps])) for answer in (before, after))
    return np.array([old - new, 1.0])


def _read_answer(decisions: Array, blank: int) -> list[int]:
    starts = np.append(True, decisions[1:] != decisions[:-1])
    return [int(one) for one in decisions[starts] if one != blank]


def _judge_classes(records: Sequence[Array]) -> Loss:
    table = np.stack(records)
    changed = table[:, 1] > 0
    interval = _interval_of_losses(table[changed, 0], len(table))
    return Loss(estimate=float(table[:, 0].mean()), interval=interval, agreement=float(1 - changed.mean()))


def _record_map(expected: Array, found: Array, reading: Reading) -> Array:
    """Returns the expected intersections and unions of each class, before and after, and the places it got.

    The float model's probabilities stand for the truth. Float64 [7, classes]; the last rows count equal places, and
    add up the variances of what is true where a place changed from or to a class.
    """
    chances = read_probabilities(expected, reading)
    classes, places = chances.shape
    masses = chances.sum(axis=1)
    before, after = read_decisions(expected, reading), read_decisions(found, reading)
    rows: list[Array] = []
    for mask in (before, after):
        own = np.bincount(mask, chances[mask, np.arange(places)], minlength=classes)
        size = np.bincount(mask, minlength=classes)
        rows += [own, masses + size - own]
    counts = np.bincount(before, minlength=classes)
    same = np.bincount(before[before == after], minlength=classes)
    changed = np.flatnonzero(before != after)
    doubt = np.zeros(classes)
    for mask in (before, after):
        own = chances[mask[changed], changed]
        doubt += np.bincount(mask[changed], own * (1 - own), minlength=classes)
    return np.stack([*rows, counts, same, doubt]).astype(np.float64)


def _judge_map(records: Sequence[Array]) -> Loss:
    table = np.stack(records)
    total = table.sum(axis=0)
    kept = total[4] >= _RARE * total[4].sum()

    def score(sums: Array) -> Array:
        sums = np.maximum(sums[..., kept], 1e-12)
        lost = sums[..., 0, :] / sums[..., 1, :] - sums[..., 2, :] / sums[..., 3, :]
        return np.asarray(lost.mean(axis=-1))

    agreement = float(total[5].sum() / total[4].sum())
    # Where a place changed, what is true there is drawn too, and with it that of the places around it. A place more or
    # less moves an overlap of I / U by 1 / U or I / U^2.
    overlaps, unions = total[0, kept] / total[1, kept], total[1, kept]
    variance = _ALIKE * (total[6, kept] * ((1 + overlaps) / unions) ** 2).sum() / len(unions) ** 2
    estimate = float(score(total))
    doubt = Z95 * math.hypot(math.sqrt(variance), _MAP_DOUBT * estimate)
    low, high = (math.hypot(end - estimate, doubt) for end in _bootstrap(table, score))
    return Loss(estimate=estimate, interval=(max(estimate - low, -1.0), min(estimate + high, 1.0)), agreement=agreement)


def _record_labels(expected: Array, found: Array, reading: Reading) -> Array:
    same = read_decisions(expected, reading) == read_decisions(found, reading)
    return np.array([np.count_nonzero(~same), same.size], dtype=np.float64)


def _judge_labels(records: Sequence[Array]) -> Loss:
    """A change costs half of one: how sure the float model was is not to be seen, and at worst it was right."""
    table = np.stack(records)
    changed = float(table[:, 0].sum() / table[:, 1].sum())
    _, most = _bootstrap(table, lambda sums: np.asarray(sums[..., 0] / sums[..., 1]))
    if table[:, 1].max() == 1:
        most = wilson_interval(int(table[:, 0].sum()), len(table))[1]
    return Loss(estimate=_UNKNOWN_LOSS * changed, interval=(0.0, most), agreement=1 - changed)


def _record_image(expected: Array, found: Array, _reading: Reading) -> Array:
    """Returns mean squares of differences and of detail, and the darkest and brightest value less 1 %: overshoots."""
    one, two = expected.astype(np.float64), found.astype(np.float64)
    return np.array([((one - two) ** 2).mean(), _detail(one), *np.quantile(one, (_OVERSHOOT, 1 - _OVERSHOOT))])


def _detail(images: Array) -> float:
    """Returns the mean square of what is finer than four pixels: the images less their means over 4 x 4, made large.

    Pictures have about as much power in each octave (D. J. Field, 1987), and what a net makes of less than it shows
    misses about as much as the finest octave that it has. The images of three nets that enlarge three times came as
    near to the truth as this says, up to 2 dB nearer, or, of one of them, up to 9 dB less near.
    """
    first = 2 if images.shape[1] in IMAGE_CHANNELS else 1
    sides = images.shape[first : first + 2]
    height, width = (side // _FINE * _FINE for side in sides)
    cut = np.moveaxis(images, (first, first + 1), (-2, -1))[..., :height, :width]
    small = cut.reshape(*cut.shape[:-2], height // _FINE, _FINE, width // _FINE, _FINE).mean((-3, -1))
    return float(((cut - _enlarge(_enlarge(small, -1), -2)) ** 2).mean())


def _enlarge(values: Array, axis: int) -> Array:
    """Returns values _FINE times as many along an axis, on straight lines between the middles of the old ones."""
    count = values.shape[axis]
    places = np.array([min(max((index + 0.5) / _FINE - 0.5, 0.0), count - 1.0) for index in range(count * _FINE)])
    below = np.minimum(places.astype(np.int64), max(0, count - 2))
    shape = [1] * values.ndim
    shape[axis] = -1
    above = (places - below).reshape(shape)
    low, high = np.take(values, below, axis), np.take(values, np.minimum(below + 1, count - 1), axis)
    return np.asarray(low * (1 - above) + high * above)


def _judge_image(records: Sequence[Array]) -> Loss:
    """Errors add up: an image with PSNR t against the truth and q against the float one has t - 10 log10(1 + t'/q').

    An image with little detail is easy, so the net may come nearer to its truth than 36 dB.
    """
    table = np.stack(records)
    peak = max(float(table[:, 3].max() - table[:, 2].min()), 1e-12)
    errors, detail = np.maximum(table[:, :2].T / peak**2, 10 ** (-_DB_LIMIT / 10))
    before = np.clip(-10 * np.log10(detail), LEAST_PSNR_DB, _MOST_PSNR_DB)
    pairs = np.stack([10 * np.log10(1 + errors * 10 ** (before / 10)), before], axis=1)

    def score(sums: Array) -> Array:
        return np.asarray(sums[..., 0] / sums[..., 1])

    return Loss(estimate=float(score(pairs.sum(axis=0))), interval=_bootstrap(pairs, score))


def _record_values(expected: Array, found: Array, reading: Reading) -> Array:
    """Returns sums of each channel: of the values, their squares and those of the differences, float64 [4, channels].

    The last row counts.
    """
    numbers = (np.atleast_1d(value.astype(np.float64)) for value in (expected, found))
    one, two = (np.moveaxis(value, reading.axis, 0) for value in numbers)
    one, two = one.reshape(len(one), -1), two.reshape(len(two), -1)
    count = np.full(len(one), float(one.shape[1]))
    return np.stack([one.sum(axis=1), (one**2).sum(axis=1), ((one - two) ** 2).sum(axis=1), count])


def _judge_values(records: Sequence[Array]) -> Loss:
    """Returns how much of the spread of the values is lost: what R2 falls by where they predict a number.

    Channels count by their standard deviation. Those a hundred times smaller than the largest are a group of their
    own, such as scores beside boxes in pixels, and the group that loses most counts. Where many places have many values
    each, as in the raw head of a detector, decisions are made of them later, and half of it counts as long as it is
    small: over 26 good and bad plans of two detectors the mean AP fell by 0 to 0.42 points for each point of R2, unless
    more than half of R2 was lost. What is the same number everywhere has no spread, and is held against zero.

    Differences add what is lost only on average: by chance they make up for what the float model misses, or add to it.
    The interval says so.
    """
    table = np.stack(records)
    total = table.sum(axis=0)
    if (_variance(total) <= _ROUNDING_SHARE * total[1] / total[3]).all():
        table[:, 0] = total[0] = 0.0
    deviation = np.sqrt(_variance(total))
    share = deviation / max(float(deviation.max()), 1e-30)
    # A vector has one value a channel: an embedding, whose small ones count for little.
    is_vector = total[3].max() <= len(table)
    groups = [share >= 0] if is_vector else [share >= _SMALL, (share < _SMALL) & (share >= _SMALL**2)]

    def score(sums: Array) -> Array:
        lost = np.minimum(sums[..., 2, :] / sums[..., 3, :] / np.maximum(_variance(sums), 1e-30), 1.0)
        each = [_weigh(lost[..., group], deviation[group]) for group in groups if group.any()]
        return np.asarray(np.max(each, axis=0))

    lost, (low, high) = float(score(total)), _bootstrap(table, score)
    reach = _CHANCE * math.sqrt(lost)
    is_table = len(deviation) >= _TABLE_VALUES and total[3].max() >= _TABLE_PLACES * len(table)
    if is_table:
        low, estimate = 0.0, discount_loss(lost)
    else:
        estimate = lost
    return Loss(estimate=estimate, interval=(max(low - reach, -1.0), min(high + reach, 1.0)))


def _record_vectors(expected: Array, found: Array, _reading: Reading) -> Array:
    return np.stack([expected.reshape(-1), found.reshape(-1)]).astype(np.float64)


def _judge_vectors(records: Sequence[Array]) -> Loss:
    """Returns the share of samples whose nearest neighbour among the others is another one (one less recall@1).

    Similarity is the cosine. A neighbour that is as near in the float model, such as the copy of a sample, counts as
    the same. The interval is Wilson's, of a share that was counted: over vectors drawn around 8 or 50 middles or
    around none it holds the true share in 94 to 98 % of draws (tests/quantize/test_quantize_retrieval.py).
    """
    vectors, others = np.stack(records, axis=1)
    cosines, theirs = _compare_all(vectors), _compare_all(others)
    chosen = cosines[np.arange(len(cosines)), theirs.argmax(axis=1)]
    changed = int(np.count_nonzero(chosen < cosines.max(axis=1) - _EQUALLY_NEAR))
    share = changed / len(cosines)
    return Loss(estimate=share, interval=wilson_interval(changed, len(cosines)), agreement=1 - share)


def _compare_all(vectors: Array) -> Array:
    """Returns the cosine of each pair of vectors, float64 [samples, samples], minus infinity of one with itself."""
    directions = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines = directions @ directions.T
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(cosines)


def _variance(sums: Array) -> Array:
    means = sums[..., 0, :] / sums[..., 3, :]
    return np.asarray(np.maximum(sums[..., 1, :] / sums[..., 3, :] - means**2, 0.0))


def _weigh(values: Array, weights: Array) -> Array:
    return np.asarray((values * weights).sum(axis=-1) / max(float(weights.sum()), 1e-30))


_CONFIDENCE, _DIFFERENCES = "the float model's confidence", "the differences"
MEASURES: Mapping[MeasuredKind, Measure] = {
    "classes": Measure(name="top-1 accuracy", source=_CONFIDENCE, record=_record_classes, judge=_judge_classes),
    "map": Measure(name="mean overlap of classes (mIoU)", source=_CONFIDENCE, record=_record_map, judge=_judge_map),
    "sequence": Measure(
        name="whole answers (exact match)", source=_CONFIDENCE, record=_record_sequence, judge=_judge_classes
    ),
    "labels": Measure(
        name="equal labels", source="the labels that changed", record=_record_labels, judge=_judge_labels
    ),
    "values": Measure(
        name="spread of the values (R2)", source=_DIFFERENCES, record=_record_values, judge=_judge_values
    ),
    "embedding": Measure(
        name="nearest neighbours (recall@1)",
        source="the neighbours of each sample among the others",
        record=_record_vectors,
        judge=_judge_vectors,
    ),
    "image": Measure(name="PSNR of images", source=_DIFFERENCES, record=_record_image, judge=_judge_image),
}


def _interval_of_losses(costs: Array, total: int) -> tuple[float, float]:
    """Returns the interval of the share of changes times what one costs, by the variances of both (delta method).

    That of the share is of Jeffreys' posterior (L. D. Brown, T. T. Cai and A. DasGupta, 2001), that of the cost is what
    these costs tell of their mean, and what confidences may be wrong by.
    """
    count = len(costs) + _PRIOR_CHANGES
    rate, cost = count / (total + 2 * _PRIOR_CHANGES), (float(costs.sum()) + _PRIOR_CHANGES * _PRIOR_LOSS) / count
    rate_variance = rate * (1 - rate) / (total + 2 * _PRIOR_CHANGES + 1)
    cost_variance = float(((costs - cost) ** 2).sum()) / count**2 + _doubt_cost(rate) ** 2
    reach = Z95 * math.sqrt(rate_variance * cost**2 + rate**2 * cost_variance)
    estimate = float(costs.sum()) / total
    return max(min(estimate, rate * cost - reach), -1.0), min(max(estimate, rate * cost + reach), 1.0)


def _doubt_cost(rate: float) -> float:
    return _FEW_COST_DEVIATION + (_ALL_COST_DEVIATION - _FEW_COST_DEVIATION) * math.sqrt(rate)


def lasting_reach(measure: str, estimate: float, changed: float) -> float:
    """Returns how far the end of an interval stays from the estimate however many samples there are.

    `changed` is the share of decisions that changed. What a change costs only labels tell.
    """
    if measure in {MEASURES["classes"].name, MEASURES["sequence"].name}:
        return Z95 * changed * _doubt_cost(changed)
    if measure == MEASURES["map"].name:
        return Z95 * _MAP_DOUBT * abs(estimate)
    return _UNKNOWN_LOSS * changed if measure == MEASURES["labels"].name else 0.0


def _bootstrap(table: Array, score: Callable[[Array], Array]) -> tuple[float, float]:
    """Returns the interval of a score of sums over samples (B. Efron, 1979, percentiles), seeded."""
    count = len(table)
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    low, high = np.percentile(score(np.tensordot(weights.astype(np.float64), table, axes=1)), [2.5, 97.5])
    return float(low), float(high)
