"""Estimates how much accuracy each kind of output loses by quantization, without labels, with a 95 % interval.

Each kind has a `Measure`: a function that records the two models' outputs for a sample, and one that estimates the loss
from all records. The float model's outputs and its confidence stand for the truth.

A record shows the decisions that changed, and how far each sample's decisions moved (`Measure.distances`): the
Hellinger distance between the probabilities p and q of the two models, the root of 1 - sum sqrt(p_k q_k). Few decisions
change, and whether one does depends on chance; but all of them move, so the mean distance distinguishes two plans with
fewer samples. Both are proportional to the error e of the logits. The share of changed decisions is, because margins
have about the same density on both sides of a decision boundary. The distance is, because its square is about an eighth
of the variance of e under p, which vanishes where one class is certain. (The mean of the squares would mostly show the
few samples with the largest errors.)
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from edgekit.data.intervals import Z95, student_95, wilson_interval
from edgekit.model.tensors import Array, MeasuredKind, Reading
from edgekit.quantize.accuracy.output_kinds import (
    IMAGE_CHANNELS,
    VISIBLE,
    read_decisions,
    read_probabilities,
    spread_maps,
)
from edgekit.quantize.ranges import softmax

# Below -20 dB nothing is left of a signal, and above 80 dB float32 itself rounds more: within these, no single output
# outweighs the others in a mean.
_WORST_DB, _BEST_DB = -20.0, 80.0
GOOD_DB = 30.0
"""From this signal-to-noise ratio on, where the error is 3 % of the signal, no more tensors get more than 8 bits, and
outputs of unknown kinds meet any goal: a choice."""
DEFAULT_MAX_DROP = 0.005
"""The drop that is accepted if the user gives no --max-drop: half a point, or 0.18 dB of 36 dB."""


# The values of a block: as float64 they take 512 kB, which stays in the processor's cache. A choice.
_BLOCK = 1 << 16


def ratio_db(signal: float, noise: float) -> float:
    """Returns the power of a signal over that of the noise in dB, from -20 to 80."""
    if not np.isfinite(noise):
        return _WORST_DB
    # A tensor that is empty or zero in both models, such as the past of a first step, has lost nothing.
    if noise == 0:
        return _BEST_DB
    tiny = np.finfo(np.float64).tiny
    return float(np.clip(10 * (np.log10(max(signal, tiny)) - np.log10(noise)), _WORST_DB, _BEST_DB))


def measure_powers(expected: Array, found: Array) -> Array:
    """Returns the power of a tensor and that of the other's error in it, float64 [2].

    In blocks, since to get memory for copies of a large tensor takes longer than the sums.
    """
    one, two, powers = expected.reshape(-1), found.reshape(-1), np.zeros(2)
    for start in range(0, one.size, _BLOCK):
        exact, other = (value[start : start + _BLOCK].astype(np.float64) for value in (one, two))
        other -= exact
        powers += [np.einsum("i,i->", each, each) for each in (exact, other)]
    return powers


def join_ratios(ratios: Sequence[float]) -> float:
    """Returns the ratio in dB of the mean of the noises of several ratios; the worst counts most."""
    return float(-10 * np.log10(np.mean(10 ** (-np.asarray(ratios) / 10))))


def discount_loss(share: float) -> float:
    """Returns the expected loss of a metric against the true labels, from its loss `share` against the float outputs.

    That is half of a small loss, and all of a total loss: an output that moves a little from that of the float model
    moves towards the truth as often as away from it. Over 46 plans of six detectors a computed loss of 0.10 was a true
    loss of 0.06; for 0.25, 0.44 and 0.65 the true losses were 0.2, 0.32 and 0.6 (measured once, the program is gone).
    """
    share = float(np.clip(share, -1.0, 1.0))
    return share * (1 + abs(share)) / 2


LEAST_PSNR_DB, _MOST_PSNR_DB = 36.0, 48.0
"""The least and the highest PSNR of the float model's images against the true ones that is assumed.

Fitted on three networks that enlarge images three times, with 180 images (docs/concepts/accuracy.md).
"""

# Draws of a bootstrap: a choice, for the time.
_RESAMPLES = 200
# Jeffreys' prior for a proportion adds half a changed decision; its cost is taken as half of the largest possible cost.
_PRIOR_CHANGES, _PRIOR_COST = 0.5, 0.5
# The standard deviation of the mean cost of a changed decision: the first if few decisions change, the second if all
# do. It is not zero, as a network may be overconfident in just those decisions that quantization changes. Fitted on
# an overconfident and an underconfident classifier, and on a MobileNetV2 that quantization had ruined (measured once,
# the program is gone). docs/reference/measured.md ("How far the estimates miss") says how often intervals hold.
_FEW_COST_DEVIATION, _ALL_COST_DEVIATION = 0.2, 0.1
# The expected cost of a changed label if the confidence is unknown: half way between 0 and 1.
_UNKNOWN_COST = 0.5
# A class with a smaller share of the pixels is left out of the mean IoU, in which it would add mostly chance.
_RARE_CLASS = 1e-3
# So many neighbouring pixels (4 x 4) are assumed to have the same true class: chosen by hand.
_SAME_TRUTH = 16
# The standard deviation of an estimated drop of the mean IoU, as a share of that drop. Fitted on one small segmentation
# network, which lost 1.2 to 1.8 times the estimate, because it is underconfident (measured once, the program is gone).
# Means over its plans (docs/reference/measured.md, "How far the estimates miss"): 1.35 points lost, 0.93 estimated.
_MAP_DEVIATION = 0.3
# A variance that is a smaller share of the power comes from rounding in sums of float64.
_ROUNDING_SHARE = 1e-12
# Channels whose deviation is a smaller share of the largest one form a second group, such as scores beside boxes.
_SMALL_CHANNEL = 0.01
# This share of an image's values, at each end, may be overshoots and is no part of its peak.
_OVERSHOOT = 0.01
# Quantization noise may by chance cancel errors of the float model, or add to them. If the float model misses a share
# u = 0.1 of the variance, this moves the loss by 2 x 1.96 sqrt(lost u / n). n = 107 independent values was fitted on a
# network for heatmaps of joints: with it, the intervals of all its plans that lose at most 5 points contain the true
# drop (docs/reference/measured.md, "How far the estimates miss", pose_heatmaps).
_CHANCE = 0.12
# Cosines of float32 vectors that differ by less are equal but for rounding.
_EQUALLY_NEAR = 1e-6
# A peak that moves by at most this share of the longer side of its heatmap stays. It is half a head, as in PCKh@0.5 of
# M. Andriluka et al. (CVPR 2014): a standing person is about 7.5 heads high, and fills four fifths of the crop.
_NEAR = 0.05
# Detail of an image is what is finer than so many pixels.
_FINE = 4


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """An estimated drop as a share, its interval of 95 %, and the share of decisions that are the same.

    `is_one_answer` is True if the float model's class is the same for all of several samples.
    """

    estimate: float
    interval: tuple[float, float]
    agreement: float | None = None
    is_one_answer: bool = False


class Measure(msgspec.Struct, frozen=True):
    """What the records of all samples say.

    `source` names what the loss is estimated from. `judge` takes samples as independent (`judge_records`). `distances`
    returns how far each sample moved, float64 [samples]: the Hellinger distance of its decisions, or its noise as a
    share of the signal. If each of a sample's decisions counts as one of its own, `row` of a record says how far each
    moved. `least` is the smallest loss that there can be: 0 for a share that is counted.
    """

    name: str
    source: str
    judge: Callable[[Sequence[Array]], Loss]
    distances: Callable[[Sequence[Array]], Array]
    row: int | None = None
    least: float = -1.0


class OutputMeasure(Measure, frozen=True, kw_only=True):
    """The measure of outputs of one kind; `record` returns what is stored of a sample."""

    record: Callable[[Array, Array, Reading], Array]


def measure_hellinger(one: Array, two: Array) -> Array:
    """Returns the Hellinger distance, 0 to 1, of distributions along the first axis."""
    return np.asarray(np.sqrt(np.maximum(1 - np.sqrt(one * two).sum(axis=0), 0.0)))


def _of_each(read: Callable[[Array], float]) -> Callable[[Sequence[Array]], Array]:
    """Returns a function of all records, which reads each by itself."""
    return lambda records: np.array([read(record) for record in records])


def _record_classes(expected: Array, found: Array, reading: Reading) -> Array:
    """Returns [expected cost of a changed decision, 1 if it changed else 0, old class, Hellinger distance].

    The old class is right with the float model's probability p: then 1 is lost. The new class is right with the float
    model's probability q: then 1 is gained. So the expected cost is p - q.
    """
    before, after = int(read_decisions(expected, reading)[0]), int(read_decisions(found, reading)[0])
    chances, others = (read_probabilities(value, reading, expected) for value in (expected, found))
    old, new = (float(chance) for chance in chances[[before, after], 0])
    moved = float(measure_hellinger(chances, others).mean())
    return np.array([old - new, float(before != after), before, moved])


def _record_sequence(expected: Array, found: Array, reading: Reading) -> Array:
    """Returns float64 [5 + classes, steps]: decisions, the float model's probability of each, how far a step moved.

    Then follow the float model's probabilities of every class that either model decides for, by rising class.
    """
    chances, others = (read_probabilities(value, reading, expected) for value in (expected, found))
    answers = [read_decisions(value, reading) for value in (expected, found)]
    steps, moved = np.arange(len(answers[0])), measure_hellinger(chances, others)
    return np.stack([*answers, *(chances[answer, steps] for answer in answers), moved, *chances[np.unique(answers)]])


def find_blank(answers: Collection[Array]) -> int | None:
    """Returns the blank of CTC (A. Graves et al., 2006): the class of most changes of class; None if there is none.

    CTC puts its letters as single steps between blanks (A. Zeyer et al., "Why does CTC result in peaky behavior?",
    2021). So the share of the changes from one step to the next that are from or to the blank is nearer to 1 than to
    2 / n, which it is for one of n classes alike; of two such classes the blank has more steps. How many steps it has
    tells less: few in a line of close letters. What fills up a short word has most steps, but takes part in one change.
    """
    steps = np.concatenate([*answers])
    pairs = np.concatenate([np.stack([each[:-1], each[1:]], axis=1) for each in answers])
    changes = pairs[pairs[:, 0] != pairs[:, 1]]
    counts, taken = (np.bincount(each.reshape(-1), minlength=int(steps.max()) + 1) for each in (steps, changes))
    blank, classes = int(np.lexsort((counts, taken))[-1]), np.count_nonzero(taken)
    return blank if 2 * classes * taken[blank] > (classes + 2) * len(changes) else None


def spell_answer(steps: Array, blank: int) -> list[int]:
    """Returns the letters of an answer [steps] as CTC spells it: repeats once, and no blanks."""
    starts = np.append(True, steps[1:] != steps[:-1])
    return [int(one) for one in steps[starts] if one != blank]


def find_probability(letters: Sequence[int], chances: Mapping[int, Array], blank: int) -> float:
    """Returns the probability that CTC spells some letters: the sum over all steps that do (A. Graves et al., 4.1).

    `chances` holds the probabilities of each class, float64 [steps].
    """
    labels = [blank, *chain.from_iterable((letter, blank) for letter in letters)]
    steps = np.stack([chances[label] for label in labels], axis=1)
    # From a letter to the next one, unless it is the same, the blank between them may be left out.
    skips = np.array([at > 1 and label != labels[at - 2] for at, label in enumerate(labels)])
    reached = np.where(np.arange(len(labels)) < 2, steps[0], 0.0)
    for step in steps[1:]:
        before, skipped = (np.append(np.zeros(count), reached)[: len(labels)] for count in (1, 2))
        reached = (reached + before + skips * skipped) * step
    return float(reached[-2:].sum())


def _judge_sequences(records: Sequence[Array]) -> Loss:
    """Judges whole answers as classes. With a blank of CTC, answers that spell the same are the same."""
    blank, table = find_blank([record[0].astype(np.int64) for record in records]), list[Array]()
    for place, record in enumerate(records):
        answers = record[:2].astype(np.int64)
        if blank is None:
            changed = not np.array_equal(*answers)
            # Steps are taken to be independent: the probability of an answer is the product of those of its steps.
            old, new = record[2:4].prod(axis=1)
        else:
            one, two = (spell_answer(each, blank) for each in answers)
            changed, old, new = one != two, 0.0, 0.0
            if changed:
                chances = {blank: np.zeros(len(record[0])), **dict(zip(np.unique(answers), record[5:], strict=True))}
                old, new = (find_probability(each, chances, blank) for each in (one, two))
        # Answers of many steps are hardly ever all the same: each counts as one of its own.
        table.append(np.array([old - new if changed else 0.0, float(changed), place]))
    return _judge_decisions(table)


def judge_records(measure: Measure, records: Sequence[Array], steps: int = 1) -> Loss:
    """Returns the loss with the interval that samples leave whose decisions resemble each other.

    What resembles each other are the decisions of a sample, or of a sequence of so many `steps`. A mean over such
    clusters has a variance that is larger by 1 + (size - 1) r, the design effect (L. Kish, "Survey sampling", 1965),
    with the correlation r within clusters as an analysis of variance finds it. That variance is itself known from a few
    clusters only, so the ends are those of Student's t with one degree of freedom less than there are clusters. Where
    clusters differ in size, parts of their mean size stand for them. A single one is cut in two halves: a mean over
    more and shorter parts (batch means) is more certain only if what comes next resembles the one that was seen.
    """
    loss, row = measure.judge(records), measure.row
    if row is None and steps == 1:
        return loss
    each = measure.distances(records) if row is None else np.concatenate([record[row] for record in records])
    count = max(len(records) // steps, 2)
    size = len(each) // count
    if size < 2:
        return loss
    moved = each[: count * size].reshape(count, size)
    between, within = size * moved.mean(axis=1).var(ddof=1), moved.var(axis=1, ddof=1).mean()
    likeness = max(0.0, float((between - within) / max(between + (size - 1) * within, 1e-12)))
    factor = math.sqrt(1 + (size - 1) * likeness) * student_95(count - 1) / Z95
    low, high = (loss.estimate + factor * (end - loss.estimate) for end in loss.interval)
    return msgspec.structs.replace(loss, interval=(max(low, measure.least), min(high, 1.0)))


def _judge_tokens(records: Sequence[Array]) -> Loss:
    """Judges each token as a decision of its own."""
    answers, old, new = (np.concatenate([record[row] for record in records]) for row in (0, 2, 3))
    changed = np.concatenate([record[0] != record[1] for record in records])
    return _judge_decisions([*np.stack([np.where(changed, old - new, 0.0), changed, answers], axis=1)])


def _judge_decisions(records: Sequence[Array]) -> Loss:
    """Judges decisions, each a record of its expected cost, 1 if it changed else 0, and the old class.

    The interval is that of the share of changes times the mean cost of one, by the variances of both (delta method).
    The variance of the share is that of Jeffreys' posterior (L. D. Brown, T. T. Cai and A. DasGupta, 2001). The
    variance of the mean cost is that of the observed costs, plus one for wrong confidences (`_cost_deviation`).
    """
    table = np.stack(records)
    total, changed = len(table), table[:, 1] > 0
    costs, estimate = table[changed, 0], float(table[:, 0].mean())
    count = len(costs) + _PRIOR_CHANGES
    rate, cost = count / (total + 2 * _PRIOR_CHANGES), (float(costs.sum()) + _PRIOR_CHANGES * _PRIOR_COST) / count
    rate_variance = rate * (1 - rate) / (total + 2 * _PRIOR_CHANGES + 1)
    cost_variance = float(((costs - cost) ** 2).sum()) / count**2 + _cost_deviation(rate) ** 2
    reach = Z95 * math.sqrt(rate_variance * cost**2 + rate**2 * cost_variance)
    low, high = min(estimate, rate * cost - reach), max(estimate, rate * cost + reach)
    return Loss(
        estimate=estimate,
        interval=(max(low, -1.0), min(high, 1.0)),
        agreement=float(1 - changed.mean()),
        is_one_answer=total > 1 and len(set(table[:, 2])) == 1,
    )


def _record_map(expected: Array, found: Array, reading: Reading) -> Array:
    """Returns sums over places for each class, float64 [8, classes]; the float model's probabilities are the truth.

    The rows are the expected intersection and union of the float model, the same of the quantized one, the places that
    the float model gives to the class, those of them that the quantized model gives to it too, the variance of the
    truth at places that changed from or to it, and the sum of the Hellinger distances of its places.
    """
    chances, others = (read_probabilities(value, reading, expected) for value in (expected, found))
    classes, places = chances.shape
    moved = np.bincount(chances.argmax(axis=0), measure_hellinger(chances, others), minlength=classes)
    before, after = read_decisions(expected, reading), read_decisions(found, reading)
    changed = np.flatnonzero(before != after)
    rows, variance = list[Array](), np.zeros(classes)
    for mask in (before, after):
        right = np.bincount(mask, chances[mask, np.arange(places)], minlength=classes)
        rows += [right, chances.sum(axis=1) + np.bincount(mask, minlength=classes) - right]
        chance = chances[mask[changed], changed]
        variance += np.bincount(mask[changed], chance * (1 - chance), minlength=classes)
    rows += [np.bincount(mask, minlength=classes) for mask in (before, before[before == after])]
    return np.stack([*rows, variance, moved]).astype(np.float64)


def _judge_map(records: Sequence[Array]) -> Loss:
    table = np.stack(records)
    total = table.sum(axis=0)
    counted = total[4] >= _RARE_CLASS * total[4].sum()

    def score(sums: Array) -> Array:
        sums = np.maximum(sums[..., counted], 1e-12)
        lost = sums[..., 0, :] / sums[..., 1, :] - sums[..., 2, :] / sums[..., 3, :]
        return np.asarray(lost.mean(axis=-1))

    # The truth at changed places is random too. One place more or less moves an overlap I / U by 1 / U or by I / U^2.
    overlaps, unions = total[0, counted] / total[1, counted], total[1, counted]
    variance = _SAME_TRUTH * (total[6, counted] * ((1 + overlaps) / unions) ** 2).sum() / len(unions) ** 2
    estimate = float(score(total))
    reach = Z95 * math.hypot(math.sqrt(variance), _MAP_DEVIATION * estimate)
    low, high = (math.hypot(end - estimate, reach) for end in bootstrap(table, score))
    agreement = float(total[5].sum() / total[4].sum())
    return Loss(estimate=estimate, interval=(max(estimate - low, -1.0), min(estimate + high, 1.0)), agreement=agreement)


def _record_labels(expected: Array, found: Array, reading: Reading) -> Array:
    same = read_decisions(expected, reading) == read_decisions(found, reading)
    return np.array([np.count_nonzero(~same), same.size], dtype=np.float64)


def _judge_labels(records: Sequence[Array]) -> Loss:
    """Returns half of the share of labels that changed, since the float model's confidence in them is unknown."""
    table = np.stack(records)
    count, total = (int(each) for each in table.sum(axis=0))
    # The bootstrap knows that labels of a sample change together, but finds nothing where none or all of them did.
    most = max(bootstrap(table, _divide)[1], wilson_interval(count, total)[1])
    return Loss(estimate=_UNKNOWN_COST * count / total, interval=(0.0, most), agreement=1 - count / total)


def record_heatmaps(expected: Array, found: Array, reading: Reading) -> Array:
    """Returns float64 [3, maps]: the height of the peak, how far it moved, and the Hellinger distance of both maps.

    The way is a share of the map's longer side. A map is taken as a distribution over its places.
    """
    both = [spread_maps(value.astype(np.float64), reading.axis) for value in (expected, found)]
    one, two = (each.reshape(len(each), -1) for each in both)
    way = np.hypot(*np.subtract(*map(_find_peaks, both))) / max(both[0].shape[1:])
    chances = [
        (kept := np.maximum(each, 0)) / np.maximum(kept.sum(axis=1, keepdims=True), 1e-12) for each in (one, two)
    ]
    return np.stack([one.max(axis=1), way, measure_hellinger(chances[0].T, chances[1].T)])


def _find_peaks(maps: Array) -> Array:
    """Returns where maps [maps, height, width] are highest, float64 [2, maps], between places too.

    Along each axis it is the peak of the Gaussian through the highest place and its two neighbours, as DARK reads
    heatmaps (F. Zhang et al., CVPR 2020, with a diagonal Hessian). Of a peak between four places, the least noise moves
    the highest place across: by 1.4 of the 24 places of a small map.
    """
    tops = np.stack(np.unravel_index(maps.reshape(len(maps), -1).argmax(axis=1), maps.shape[1:]))
    # At an edge its only neighbour stands for both, and the peak stays on its place.
    logs = np.pad(np.log(np.maximum(maps, 1e-12)), ((0, 0), (1, 1), (1, 1)), mode="reflect")
    steps, each = np.eye(2, dtype=np.int64)[:, :, None], np.arange(len(maps))
    before, middle, after = (np.stack([logs[each, *(tops + 1 + way * step)] for step in steps]) for way in (-1, 0, 1))
    curve = before + after - 2 * middle
    return np.asarray(tops + np.where(curve < 0, (before - after) / np.minimum(2 * curve, -1e-12), 0.0))


def count_peaks(records: Sequence[Array]) -> Array:
    """Returns for each sample how many peaks stay, and how many there are, float64 [samples, 2].

    A peak stays that moves by at most a twentieth of the map's longer side. Maps that show nothing have none.
    """
    heights, way, _ = np.stack(records, axis=1)
    shown = heights > VISIBLE * heights.max()
    return np.stack([(shown & (way <= _NEAR)).sum(axis=1), shown.sum(axis=1)], axis=1).astype(np.float64)


def _judge_heatmaps(records: Sequence[Array]) -> Loss:
    """Returns the share of peaks that moved: 1 - PCK, the correct keypoints of Y. Yang and D. Ramanan (2013).

    The interval is Wilson's, of a counted proportion.
    """
    stay, count = (int(each) for each in count_peaks(records).sum(axis=0))
    share = 1 - stay / max(count, 1)
    return Loss(estimate=share, interval=wilson_interval(count - stay, count), agreement=1 - share)


def _record_image(expected: Array, found: Array, _reading: Reading) -> Array:
    """Returns [mean square of the difference, mean square of the detail, 1 % quantile, 99 % quantile] of an image.

    The detail is what is finer than four pixels: the image minus its 4 x 4 means, enlarged linearly. Photographs have
    about equal power in each octave (D. J. Field, 1987), and the error of a network that enlarges them is about the
    power of the finest octave that it shows. The PSNR of three networks against the truth was as this predicts, or up
    to 2 dB higher; that of one network was up to 9 dB lower (measured once).
    """
    one, two = expected.astype(np.float64), found.astype(np.float64)
    first = 2 if one.shape[1] in IMAGE_CHANNELS else 1
    height, width = (side // _FINE for side in one.shape[first : first + 2])
    cut = np.moveaxis(one, (first, first + 1), (-2, -1))[..., : height * _FINE, : width * _FINE]
    means = cut.reshape(*cut.shape[:-2], height, _FINE, width, _FINE).mean((-3, -1))
    detail = ((cut - _enlarging(height) @ means @ _enlarging(width).T) ** 2).mean()
    return np.array([((one - two) ** 2).mean(), detail, *np.quantile(one, (_OVERSHOOT, 1 - _OVERSHOOT))])


def _enlarging(count: int) -> Array:
    """Returns the matrix of linear interpolation from `count` pixels to _FINE times as many, between their middles."""
    places = (np.arange(count * _FINE) + 0.5) / _FINE - 0.5
    return np.stack([np.interp(places, np.arange(count), unit) for unit in np.eye(count)], axis=1)


def _judge_image(records: Sequence[Array]) -> Loss:
    """Returns the share of the PSNR against the true image that is lost.

    The float model's own PSNR t is estimated from its detail: the less detail, the higher (`_record_image`). Squared
    errors add up: with a PSNR q between the two models' images, t - 10 log10(1 + t' / q') is left, with t' and q' as
    ratios of powers.
    """
    table = np.stack(records)
    peak = max(float(table[:, 3].max() - table[:, 2].min()), 1e-12)
    errors, detail = table[:, :2].T / peak**2
    before = -10 * np.log10(np.clip(detail, 10 ** (-_MOST_PSNR_DB / 10), 10 ** (-LEAST_PSNR_DB / 10)))
    pairs = np.stack([10 * np.log10(1 + errors * 10 ** (before / 10)), before], axis=1)
    lost, known = pairs.sum(axis=0)
    return Loss(estimate=float(lost / known), interval=bootstrap(pairs, _divide))


def find_offset(few: Sequence[Array]) -> Array | float:
    """Returns the mean of a few samples' values, float64, in the shape of each: it says nothing about any of them.

    It is 0 for a single sample, and where all samples are the same.
    """
    # One sample at a time: all of them together may be large.
    mean = np.zeros(few[0].shape)
    for value in few:
        mean += value / len(few)
    spread, power = np.sum([measure_powers(mean, value)[::-1] for value in few], axis=0)
    return mean if spread > _ROUNDING_SHARE * power else 0.0


def record_values(
    expected: Array, found: Array, reading: Reading, weights: Array | float = 1.0, offset: Array | float = 0.0
) -> Array:
    """Returns, for each channel, weighted sums over its places, float64 [4, channels].

    They are those of the values, of their squares, of the squared differences between the models, and of the weights
    themselves; `weights` is one number or one for each place. An `offset` is taken from the values before: without it
    what differs only between places, such as a grid of anchors, would count as information about the samples.
    """
    numbers = (np.atleast_1d(value.astype(np.float64) - offset) for value in (expected, found))
    one, error = (np.moveaxis(value, reading.axis, 0).reshape(value.shape[reading.axis], -1) for value in numbers)
    error -= one
    counts = np.broadcast_to(np.asarray(weights, np.float64), one.shape[1:])
    squares = (np.einsum("cn,cn,n->c", each, each, counts) for each in (one, error))
    return np.stack([np.einsum("cn,n->c", one, counts), *squares, np.full(len(one), counts.sum())])


def _judge_values(records: Sequence[Array]) -> Loss:
    """Returns the share of the variance that is lost, by which R2 falls where the values predict a number.

    The mean over channels is weighted by their standard deviation, a compromise, since it is unknown what channels
    mean: equal weights would be right if each is a quantity of its own, weights by variance if all are parts of one.
    The interval reaches down to the latter, in which small channels hardly count, such as most of the cell state of an
    LSTM. Channels a hundred times smaller than the largest, such as scores next to boxes in pixels, form a second
    group, and the group that loses more is reported. A constant output has no variance; its power is used instead.

    The interval allows for noise that by chance cancels errors of the float model, or adds to them (_CHANCE).
    """
    table = np.stack(records)
    total = table.sum(axis=0)
    if (_variance(total) <= _ROUNDING_SHARE * total[1] / total[3]).all():
        table[:, 0] = total[0] = 0.0
    deviation = np.sqrt(_variance(total))
    largest = float(deviation.max())
    # A vector has one value per channel, as an embedding has: its small channels need no group of their own.
    is_vector = total[3].max() <= len(table)
    is_large = deviation >= (0.0 if is_vector else _SMALL_CHANNEL) * largest
    groups = [is_large, ~is_large & (deviation >= _SMALL_CHANNEL**2 * largest)]

    def score(sums: Array) -> Array:
        lost = np.minimum(sums[..., 2, :] / sums[..., 3, :] / np.maximum(_variance(sums), 1e-30), 1.0)
        weights = [np.where(group, deviation, 0.0) for group in groups if group.any()]
        means = [(lost * each).sum(axis=-1) / max(float(each.sum()), 1e-30) for each in weights]
        return np.asarray(np.max(means, axis=0))

    lost, (low, high) = float(score(total)), bootstrap(table, score)
    low = min(low, float((total[2] / total[3]).sum() / max(float((deviation**2).sum()), 1e-30)))
    reach = _CHANCE * math.sqrt(lost)
    return Loss(estimate=lost, interval=(max(low - reach, -1.0), min(high + reach, 1.0)))


def _value_distances(records: Sequence[Array]) -> Array:
    table = np.stack(records)
    return np.asarray(table[:, 2].sum(axis=1) / max(float(table[:, 1].sum(axis=1).mean()), 1e-30))


def _variance(sums: Array) -> Array:
    means = sums[..., 0, :] / sums[..., 3, :]
    return np.asarray(np.maximum(sums[..., 1, :] / sums[..., 3, :] - means**2, 0.0))


def _judge_vectors(records: Sequence[Array]) -> Loss:
    """Returns the share of samples whose nearest neighbour among the others changed (1 - recall@1).

    The similarity is the cosine. A new neighbour that is as similar in the float model, such as a copy of the old one,
    counts as the same. The interval is Wilson's, of a counted proportion. It holds the true share in 93.5 to 98.5 % of
    draws of vectors in 8 or 50 clusters, or in none (tests/quantize/test_quantize_readouts.py).
    """
    vectors, others = np.stack(records, axis=1)
    cosines, theirs = _compare_all(vectors), _compare_all(others)
    chosen = cosines[np.arange(len(cosines)), theirs.argmax(axis=1)]
    changed = int(np.count_nonzero(chosen < cosines.max(axis=1) - _EQUALLY_NEAR))
    share = changed / len(cosines)
    return Loss(estimate=share, interval=wilson_interval(changed, len(cosines)), agreement=1 - share)


def _vector_distances(records: Sequence[Array]) -> Array:
    """Returns how far each sample's choice of its nearest neighbour moved, float64 [samples].

    The choice is a decision between the other samples, with their cosines as logits, divided by the median margin
    between the first and the second neighbour. So half of the decisions are close to their boundary.
    """
    both = [_compare_all(vectors) for vectors in np.stack(records, axis=1)]
    if len(records) < 3:
        return np.zeros(len(records))
    first = np.sort(both[0], axis=1)
    margin = max(float(np.median(first[:, -1] - first[:, -2])), _EQUALLY_NEAR)
    return measure_hellinger(*(softmax(cosines / margin, axis=1).T for cosines in both))


def _compare_all(vectors: Array) -> Array:
    """Returns the cosine of each pair of vectors, float64 [samples, samples], with minus infinity on the diagonal."""
    directions = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines = directions @ directions.T
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(cosines)


_CONFIDENCE, _DIFFERENCES = "the float model's confidence", "the differences"
ONE_ANSWER = "the float model's one answer for all samples"
"""The source of a drop if the float model's class is the same for all samples."""
_PEAKS = "the highest place of each map"
_NEIGHBOURS = "the neighbours of each sample among the others"
MEASURES: Mapping[MeasuredKind, OutputMeasure] = {
    "classes": OutputMeasure(
        "top-1 accuracy", _CONFIDENCE, _judge_decisions, _of_each(lambda record: record[3]), record=_record_classes
    ),
    "map": OutputMeasure(
        "mean overlap of classes (mIoU)", _CONFIDENCE, _judge_map,
        _of_each(lambda record: record[7].sum() / record[4].sum()), record=_record_map,
    ),
    "sequence": OutputMeasure(
        "whole answers (exact match)", _CONFIDENCE, _judge_sequences, _of_each(lambda record: record[4].mean()),
        record=_record_sequence,
    ),
    "tokens": OutputMeasure(
        "top-1 accuracy of tokens", _CONFIDENCE, _judge_tokens, _of_each(lambda record: record[4].mean()), 4,
        record=_record_sequence,
    ),
    "heatmaps": OutputMeasure(
        "peaks that stay (PCK at 5 %)", _PEAKS, _judge_heatmaps, _of_each(lambda record: record[2].mean()), 2, 0.0,
        record=record_heatmaps,
    ),
    "labels": OutputMeasure(
        "equal labels", "the changed labels", _judge_labels, _of_each(lambda record: record[0] / record[1]),
        record=_record_labels,
    ),
    "values": OutputMeasure(
        "spread of the values (R2)", _DIFFERENCES, _judge_values, _value_distances, record=record_values
    ),
    "embedding": OutputMeasure(
        "nearest neighbours (recall@1)", _NEIGHBOURS, _judge_vectors, _vector_distances, least=0.0,
        record=lambda expected, found, _: np.stack([expected.reshape(-1), found.reshape(-1)]).astype(np.float64),
    ),
    "image": OutputMeasure(
        "PSNR of images", _DIFFERENCES, _judge_image, _of_each(lambda record: record[0]), record=_record_image
    ),
}  # fmt: skip


def _cost_deviation(rate: float) -> float:
    """Returns the standard deviation of the mean cost of a changed decision, if this share of all decisions changes."""
    return _FEW_COST_DEVIATION + (_ALL_COST_DEVIATION - _FEW_COST_DEVIATION) * math.sqrt(rate)


def reach_without_labels(measure: str, estimate: float, changed: float) -> float:
    """Returns the half-width of an interval with infinitely many samples: the uncertainty because labels are missing.

    `measure` is the name of a `Measure`, `changed` the share of decisions that changed, whose true cost only labels
    could show.
    """
    if measure in {MEASURES[kind].name for kind in ("classes", "sequence", "tokens")}:
        return Z95 * changed * _cost_deviation(changed)
    if measure == MEASURES["map"].name:
        return Z95 * _MAP_DEVIATION * abs(estimate)
    return _UNKNOWN_COST * changed if measure == MEASURES["labels"].name else 0.0


def _divide(sums: Array) -> Array:
    return np.asarray(sums[..., 0] / sums[..., 1])


def bootstrap(table: Array, score: Callable[[Array], Array]) -> tuple[float, float]:
    """Returns the 95 % interval of a score of sums over samples: percentiles of a seeded bootstrap (B. Efron, 1979)."""
    count = len(table)
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_RESAMPLES)
    low, high = np.percentile(score(np.tensordot(weights.astype(np.float64), table, axes=1)), [2.5, 97.5])
    return float(low), float(high)
