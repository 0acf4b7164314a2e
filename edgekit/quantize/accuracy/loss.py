"""What the difference of two outputs costs, by the kind of output, and how sure that is.

Signal-to-quantization-noise ratios stand for values. Embeddings lose what retrieval loses: how well they find their
like, told without labels.
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


def soften(share: float | Array) -> Array:
    """Returns the share of a figure that is lost, of the one that truths drawn from the float model alone would lose.

    Half of it counts as long as it is small, and all where all is lost: what moves a little does so towards the truth
    as often as away from it. The law of raw heads (`loss`), found again by 46 plans of six detectors, which lost 0.06
    where 0.10 was drawn, 0.2 for 0.25, 0.32 for 0.44, 0.6 for 0.65; and by 13 of an embedding where little is lost,
    0.03 for 0.05 and 0.10 for 0.17; much was 0.50 for 0.44 there, of which this says 0.32.
    """
    share = np.clip(share, -1.0, 1.0)
    return np.asarray(share * (1 + np.abs(share)) / 2)


LEAST_VECTORS = 16
"""Fewer have too few pairs to tell two curves apart: a choice."""
# Of expectation maximization, which starts from the median and the top twentieth of all pairs: it settles by then.
_STEPS = 100
_START = (0.5, 0.95)
# How far the curves must lie apart, in deviations of their difference. Of vectors drawn around 8 or 40 middles, those
# below it lost up to six times as much as was expected, those above it 0.7 to 1.7 times.
_LEAST_APART = 1.5
# A curve is never narrower than this, so that equal vectors divide by no zero.
_NARROWEST = 1e-3
# How sure the estimate is, as a share of the drop: 12 plans of the embedding of tools/bench/interval_coverage.py lost a
# quarter more or less than expected, one a half less, and vectors drawn around middles up to six tenths more.
_DOUBT = 0.35


class Retrieval(msgspec.Struct, frozen=True, kw_only=True):
    """The mean average precision expected of the float model, its drop, and how far that may be off by chance."""

    reference: float
    drop: float
    reach: float


class _Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Two bell curves, of different things and of the same: their shares, means and deviations, float64 [2]."""

    shares: Array
    means: Array
    deviations: Array

    @property
    def apart(self) -> float:
        """How far the second mean lies above the first, in deviations of the difference."""
        return float((self.means[1] - self.means[0]) / np.hypot(*self.deviations))

    def weigh(self, values: Array) -> Array:
        """Returns how likely values are of the first and of the second, float64 [..., 2]."""
        apart = (values[..., None] - self.means) / self.deviations
        found = self.shares * np.exp(-0.5 * apart**2) / self.deviations
        return np.asarray(found / np.maximum(found.sum(axis=-1, keepdims=True), 1e-300))


def judge_retrieval(vectors: Array, others: Array) -> Retrieval | None:
    """Returns what a float model's vectors [samples, size] find of their like, and what a quantized model's lose.

    None where it cannot be told which are alike.
    """
    alike, theirs = _compare(vectors), _compare(others)
    curves = _fit_curves(alike[np.triu_indices(len(alike), 1)])
    if not curves.apart >= _LEAST_APART:
        return None
    chances = _same(alike, curves)
    before, after = _expect_precision(alike, chances), _expect_precision(theirs, chances)
    reference, drops = float(before.mean()), before - after
    drop = reference * float(soften(float(drops.mean()) / max(reference, 1e-12)))
    spread = float(drops.std()) / math.sqrt(len(drops))
    return Retrieval(reference=reference, drop=drop, reach=Z95 * math.hypot(spread, _DOUBT * drop))


def _compare(vectors: Array) -> Array:
    """Returns the cosine of each pair, float64 [samples, samples]."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.maximum(lengths, 1e-12)
    return np.asarray(directions @ directions.T)


def _same(alike: Array, curves: _Curves) -> Array:
    """Returns how likely pairs are the same thing, float64 [samples, samples], 0 for a sample and itself."""
    low, high = curves.means
    # Beyond both means the wider curve would win on either side.
    chances = np.where(alike <= low, 0.0, curves.weigh(np.minimum(alike, high))[..., 1])
    np.fill_diagonal(chances, 0)
    return chances


def _fit_curves(values: Array) -> _Curves:
    means, deviation = np.quantile(values, _START), max(float(values.std()) / 2, _NARROWEST)
    curves = _Curves(shares=np.array([0.9, 0.1]), means=means, deviations=np.full(2, deviation))
    for _ in range(_STEPS):
        weights = curves.weigh(values)
        total = np.maximum(weights.sum(axis=0), 1e-12)
        means = (weights * values[:, None]).sum(axis=0) / total
        spread = (weights * (values[:, None] - means) ** 2).sum(axis=0) / total
        curves = _Curves(shares=total / total.sum(), means=means, deviations=np.sqrt(np.maximum(spread, _NARROWEST**2)))
    return curves


def _expect_precision(alike: Array, chances: Array) -> Array:
    """Returns the average precision expected of each sample, which ranks all others, float64 [samples]."""
    ranked = np.where(np.eye(len(alike), dtype=np.bool_), -np.inf, alike)
    order = np.argsort(-ranked, axis=1, kind="stable")[:, :-1]
    found = np.take_along_axis(chances, order, axis=1)
    # One that is the same is so itself, besides those expected above it.
    precision = (1 + found.cumsum(axis=1) - found) / np.arange(1, len(alike))
    return np.asarray((precision * found).sum(axis=1) / np.maximum(found.sum(axis=1), 1e-12))


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
# The same of retrieval, whose precision counts what is alike together: by the embedding of
# tools/bench/interval_coverage.py, the only one there is.
_RANKED_CHANCE = 0.06
# Detail is what is finer than so many pixels.
_FINE = 4


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """An expected drop as a share, its interval of 95 %, and the share of decisions that are the same."""

    estimate: float
    interval: tuple[float, float]
    agreement: float | None = None


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """How outputs of one kind are compared: what is kept of a sample, and what all of it says."""

    name: str
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
        low, estimate = 0.0, float(soften(lost))
    else:
        estimate = lost
    return Loss(estimate=estimate, interval=(max(low - reach, -1.0), min(high + reach, 1.0)))


def _record_vectors(expected: Array, found: Array, _reading: Reading) -> Array:
    return np.stack([expected.reshape(-1), found.reshape(-1)]).astype(np.float64)


def _judge_vectors(records: Sequence[Array]) -> Loss:
    """Returns what retrieval loses; where vectors do not tell what is alike, half of the spread, or more of much.

    What agrees is the nearest neighbour of each sample among the others.
    """
    table = np.stack(records)
    found = judge_retrieval(table[:, 0], table[:, 1]) if len(table) >= LEAST_VECTORS else None
    if found is None:
        reading = Reading(kind="values", axis=1)
        loss = _judge_values([_record_values(one[None], two[None], reading) for one, two in table])
        drop, reach = float(soften(loss.estimate)), loss.interval[1]
    else:
        drop, reach = found.drop, math.hypot(found.reach, _RANKED_CHANCE * math.sqrt(abs(found.drop)))
    before, after = (_find_nearest(table[:, index]) for index in range(2))
    same = float((before == after).mean()) if len(table) > 1 else None
    return Loss(estimate=drop, interval=(max(drop - reach, -1.0), min(drop + reach, 1.0)), agreement=same)


def _find_nearest(vectors: Array) -> Array:
    alike = _compare(vectors)
    np.fill_diagonal(alike, -np.inf)
    return np.asarray(alike.argmax(axis=1))


def _variance(sums: Array) -> Array:
    means = sums[..., 0, :] / sums[..., 3, :]
    return np.asarray(np.maximum(sums[..., 1, :] / sums[..., 3, :] - means**2, 0.0))


def _weigh(values: Array, weights: Array) -> Array:
    return np.asarray((values * weights).sum(axis=-1) / max(float(weights.sum()), 1e-30))


MEASURES: Mapping[MeasuredKind, Measure] = {
    "classes": Measure(name="top-1 accuracy", record=_record_classes, judge=_judge_classes),
    "map": Measure(name="mean overlap of classes (mIoU)", record=_record_map, judge=_judge_map),
    "sequence": Measure(name="whole answers (exact match)", record=_record_sequence, judge=_judge_classes),
    "labels": Measure(name="equal labels", record=_record_labels, judge=_judge_labels),
    "values": Measure(name="spread of the values (R2)", record=_record_values, judge=_judge_values),
    "embedding": Measure(name="retrieval (mean AP of neighbours)", record=_record_vectors, judge=_judge_vectors),
    "image": Measure(name="PSNR of images", record=_record_image, judge=_judge_image),
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
