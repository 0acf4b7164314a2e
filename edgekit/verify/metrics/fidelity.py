"""Whether a device computes what the bundle's own model computes on this machine, or outputs of another origin.

A device that runs the same weights (called honest) errs by the rounding of its own kernels. The size of this noise
differs by orders of magnitude between devices (18 to 140 dB below the values on those of the zoo), so it is left to the
limits and to the self-test's tolerance, and only the structure of the error is judged here. The outputs are compared
with other origins: another sample, another element, a constant, the float model. An origin is reported if it fits much
better, and if it would fit as well by chance for less than `CHANCE` of honest outputs.
tests/verify/test_verify_honesty.py counts how often.
"""

import math
from collections.abc import Callable, Collection

import msgspec
import numpy as np

from edgekit.data.intervals import bootstrap_share
from edgekit.data.samples import Samples
from edgekit.model.tensors import Array, is_numeric
from edgekit.verify.metrics.compare import read_first
from edgekit.verify.metrics.tensor_metrics import Floats, decibels, energy_of, sketch_samples

CHANCE, _CHANCE_DEVIATES = 1e-4, 3.72
"""The probability of reporting an honest output, one in 10,000, and the same as a normal deviate."""
# Larger outputs are reduced to 16 sums; more samples than this add no information.
_MOST_ELEMENTS, _MOST_SAMPLES = 4096, 256
# Ratios of energies: an origin at half the distance (a quarter of the energy) is clearly closer; 20 dB are more than a
# change of kernels.
_CLOSER, _MUCH_CLOSER = 4.0, 100.0
# Other kernels of the same float32 operators differ by up to 100 dB below the values.
_ORDER = 1e-10
# With an error below half of the distance between samples (a quarter of the energy), it is clear which sample an output
# belongs to.
_LEAST_MOVE = 0.25
# If outputs vary from sample to sample by more than 20 dB below their energy, a constant output is no honest rounding;
# up to 25 dB below it, the variation is not hidden by rounding.
_STILL, _STEADY = 100.0, 300.0
# Values of one output that should be equal are equal within this share.
_SAME = 1e-5
_LEAST_CORRELATION, _HONEST_CORRELATION = 0.3, 0.7
"""A correlation of 0.7 (the root of a half) means that as much noise as signal varies: below it, a device does not
follow its inputs. Below 0.3 no number of samples makes it a device that does."""
# The least share of the sample before that is reported as a leak (up to 0.024 appears on honest devices of the zoo, if
# samples are similar), and the least number of samples less one.
_LEAST_LEAK, _LEAST_STEPS = 0.05, 5
# The smallest ratio of energies of a match: saturated values of different samples may be equal.
_NEAREST = 0.01
# An element matters if it varies by a twentieth of the largest value.
_LEAST_REACH = 0.05
# The share of the energy that must be left, as of the variance beside the float model's (`Thresholds.min_agreement`).
_LEAST_KEPT = 0.9
# At most this many values of a sample count as independent errors, because they come from the same layers.
_MOST_VALUES = 16
# How far probabilities may add up to something else than 1: 10,000 roundings of float32, and a few of fp16.
_SHARES = 1e-3


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """One output of the bundle's own model, of the float model, and of the device, with one sample per row.

    A row holds the elements or, if there are too many, a sketch of 16 sums, from which distances can be estimated.
    """

    own: Floats
    reference: Floats
    got: Floats
    is_whole: bool


def find_unfaithful(
    own: Samples, reference: Samples, got: Samples, *, may_be_equal: Collection[str] = ()
) -> dict[str, str]:
    """Finds outputs that do not come from the bundle's own model; returns by name what came back instead, in words.

    `own`, `reference` and `got` are the outputs of the bundle's own model, of the source model and of the device, for
    the same samples. An output that is missing, not finite or of another shape is left out: its figures fail it.

    `may_be_equal` names outputs that an honest device may compute exactly as the source model does, although the
    bundle's own model rounds them on this machine. There are two kinds. The source may compute in integers, as the
    device's kernels do. Or an output holds only elements of the inputs, and a compiler drops a Q and the DQ after it.
    """
    rows, found = read_first(_MOST_SAMPLES, own, reference, got), dict[str, str]()
    for name, first in (rows[0][0] if rows else dict[str, Array]()).items():
        values = [side.get(name) for row in rows for side in row]
        fitting = [value for value in values if value is not None and value.shape == first.shape and is_numeric(value)]
        if len(fitting) < len(values) or not first.size or not all(np.isfinite(value).all() for value in fitting):
            continue
        is_whole = first.size <= _MOST_ELEMENTS
        matrices = [
            np.stack([value.reshape(-1).astype(np.float64) for value in side])
            if is_whole
            else sketch_samples(np.stack(side))
            for side in (fitting[::3], fitting[1::3], fitting[2::3])
        ]
        sides = Sides(own=matrices[0], reference=matrices[1], got=matrices[2], is_whole=is_whole)
        if words := describe_origin(sides, may_be_equal=name in may_be_equal) or find_distance(sides):
            found[name] = words
    return found


def describe_origin(sides: Sides, *, may_be_equal: bool = False) -> str | None:
    """Returns, in words, where an output came from if not from the bundle's own model, else None."""
    own, got = sides.own, sides.got
    replay = None if may_be_equal else find_replay(sides)
    if replay is not None or len(own) < 2:
        return replay
    signal, error = energy_of(own), energy_of(got - own)
    if energy_of(np.diff(own, axis=0)) > signal / _STILL and not np.diff(got, axis=0).any():
        # Two samples may saturate to the same values, and a grid may be too coarse to show what varies: then equal
        # values lie within a step or two of the own model's outputs.
        step = _find_step(own)
        is_beyond = not math.isfinite(step) or float(np.abs(got - own).max()) > 2.0 * step
        return "is the same for every sample" if len(own) > 2 and is_beyond else None
    # Probabilities that saturate vary by less than kernels differ: nothing tells one sample's from another's.
    if energy_of(_centre(own)) <= signal * _ORDER:
        return None
    words = find_leak(own, got) or find_permutation(own, got)
    if words is None and sides.is_whole:
        words = find_swapped(own, got) or find_stuck(own, got)
    # If the figures are bad anyway, an honest device whose outputs are mostly noise may correlate as little as a false
    # one.
    return words if words or error * _CLOSER >= signal else find_independence(own, got, signal)


def _find_step(own: Floats) -> float:
    """Returns the least difference between values, that of neighbours on a grid of integers; infinity without one."""
    gaps = np.diff(np.unique(own))
    return float(gaps[gaps > _SAME * float(np.abs(own).max())].min(initial=math.inf))


def find_distance(sides: Sides) -> str | None:
    """Returns the words for outputs that are clearly not the own model's; None if rounding may explain them.

    Their error must be larger than rounding can make it, in two ways: it has more than a tenth of the energy of the own
    model's outputs, by more than chance explains, and it is larger than the error of the own model, whose only cause is
    the rounding of that model.
    """
    error, own = (np.square(side).sum(axis=1) for side in (sides.got - sides.own, sides.own))
    share, interval = bootstrap_share(np.stack([own - error, own], axis=1))
    highest = share if interval is None else interval[1]
    if highest >= _LEAST_KEPT or error.sum() <= energy_of(sides.own - sides.reference):
        return None
    return f"lies {decibels(float(own.sum()), float(error.sum())):.1f} dB from what the bundle's own model gives here"


def find_replay(sides: Sides) -> str | None:
    """Returns the words for outputs that are the float model's, if the bundle's own model gives others.

    Kernels differ by much less than quantization costs, so an honest device is seldom 20 dB nearer to the float model
    than the bundle's model is. Two cases are excluded: a few values may be so near by chance, and so may values whose
    type is as coarse as the bundle's model is accurate, such as the float16 outputs of a model in 16 bits. And most
    samples must be nearer: a TopK that picks another entry here than on the device moves one sample by far the most.
    """
    error, reference = sides.own - sides.reference, sides.reference
    each_apart, each_near = (np.einsum("ij,ij->i", side, side) for side in (error, sides.got - reference))
    apart, near = float(each_apart.sum()), float(each_near.sum())
    if 2 * np.count_nonzero(each_near * _MUCH_CLOSER < each_apart) <= np.count_nonzero(each_apart):
        return None
    # The distance of each value to the next in float16 if all values are such numbers, else in float32.
    with np.errstate(over="ignore", invalid="ignore"):
        halves, singles = reference.astype(np.float16), reference.astype(np.float32)
        spacing = np.spacing(np.abs(halves if (halves == reference).all() else singles)).astype(np.float64)
    least = energy_of((0.5 * spacing)[sides.own != reference])
    # A bundle in float32 gives the float model's outputs, except for differences by the order of sums.
    if not energy_of(reference) * _ORDER < apart < math.inf or not max(near, least) * _MUCH_CLOSER < apart:
        return None
    if near == 0.0:
        return "is the float model's to the bit, and the bundle's own model does not give it: another model ran"
    # The number of independent errors in the own model's distance. Probabilities add up to 1, so that one of them
    # follows from the others.
    shared = (reference.min(axis=1) >= 0.0) & (np.abs(reference.sum(axis=1) - 1.0) < _SHARES)
    bound = float(shared.sum()) if reference.shape[1] > 1 else 0.0
    independent = max(1.0, _count_carriers(error.reshape(-1)) * (1.0 - bound / error.size))
    if measure_chance(near, apart, min(independent, _MOST_VALUES * len(sides.own))) >= CHANCE:
        return None
    nearer = f"lies {decibels(apart, near):.0f} dB nearer to the float model's than the bundle's own model does"
    return f"{nearer}: the float model ran in its place, or the reference was replayed"


def find_leak(own: Floats, got: Floats) -> str | None:
    """Returns the words for outputs that contain a share of the sample before, or None.

    The error of each sample is regressed, by least squares, on the sample before, after the sample itself and the mean
    of all samples are taken out: a device that only scales or shifts does not leak. The certainty of the share follows
    from the samples, each taken as one draw (Liang and Zeger 1986), and is tested generously by Student's distribution.
    """
    if len(own) <= _LEAST_STEPS:
        return None
    mean = own.mean(axis=0)
    removed = np.stack([own[1:] - mean, np.broadcast_to(mean, own[1:].shape)], axis=-1)
    before, error = own[:-1] - mean, (got - own)[1:]
    basis = np.linalg.qr(removed.reshape(-1, 2))[0]

    def remove(values: Array) -> Array:
        flat = values.reshape(-1)
        return np.asarray(flat - basis @ (basis.T @ flat)).reshape(values.shape)

    left, rest = remove(before), remove(error)
    energy = energy_of(left)
    # If the sample before is much like the sample itself, it gives no information.
    if energy <= _SAME * energy_of(before):
        return None
    share = float(np.vdot(left, rest)) / energy
    draws = np.einsum("ij,ij->i", left, rest - share * left)
    deviation, freedom = math.sqrt(float(draws @ draws)) / energy, len(draws) - 3
    if share < _LEAST_LEAK or share < deviation * _CHANCE_DEVIATES * (1.0 + 20.0 / freedom):
        return None
    return "follows the sample before, not its own" if share > 0.5 else f"holds {share:.0%} of the sample before"


def find_permutation(own: Floats, got: Floats) -> str | None:
    """Returns the words for outputs that came back for other samples than they belong to, or None.

    With large errors, the outputs of an honest device may fall near those of another sample by chance; if the samples
    lie on a line, one of them is always near. So a match counts for more the nearer it is in comparison with the second
    nearest sample (Lowe 2004), and the more directions the samples vary in.
    """
    count, dims = len(own), count_dimensions(own)

    def weigh(_index: int, distances: Floats) -> float:
        # A match counts at most as much as one by chance among all pairs of samples: outputs that saturate coincide.
        first, second = np.sort(distances)[:2]
        return max(measure_chance(first, second, dims), 1.0 / count**2)

    if (moved := _find_moved(own, got, energy_of(_centre(own)) / count, weigh)) is None:
        return None
    return f"came back for other samples: that of the device's run {moved[0]} belongs to its run {moved[1]}"


def find_swapped(own: Floats, got: Floats) -> str | None:
    """Returns the words for elements, such as classes, that came back in another order in every sample, else None.

    As `find_permutation`, for elements instead of samples. The chance of a match is raised to half the number of
    samples that carry the difference (participation ratio), and is multiplied by the number of pairs of elements. On a
    coarse grid elements may coincide: one that is only a step or two from its own value may meet another by chance, and
    does not count as moved.
    """
    got = np.where(np.abs(got - own).max(axis=0) > 2.0 * _find_step(own), got, own)
    ours, error = own.T, np.square(got - own).sum(axis=0)

    def weigh(index: int, distances: Floats) -> float:
        place = int(distances.argmin())
        ratio = max(float(distances[place]) / float(error[index]), _NEAREST)
        return float(ratio ** (_count_carriers(ours[index] - ours[place]) / 2.0))

    moved = _find_moved(ours, got.T, energy_of(_centre(own)) / len(ours), weigh, pairs=len(ours) ** 2)
    if moved is None:
        return None
    return f"has its elements in another order: what belongs to {moved[1]} came back as {moved[0]}"


def _find_moved(
    own: Floats, got: Floats, apart: float, weigh: Callable[[int, Floats], float], pairs: int = 1
) -> tuple[int, int] | None:
    """Returns the first row that came back in another's place, and that place; None if chance may explain all matches.

    A row has moved if two things hold: it is four times nearer (in energy) to another row of the own model than to its
    own row, and its distance from its own row is more than half of that between rows (`apart` is the mean square of the
    latter). Only closed cycles of moved rows count, because an error that all rows share moves them in one direction.
    `weigh` returns the chance of a match, from the distances to all rows; `pairs` is how many matches could be found.
    """
    error = np.square(got - own).sum(axis=1)
    nearest, chances = np.arange(len(own)), np.ones(len(own))
    for index in np.flatnonzero(error > _LEAST_MOVE * apart):
        distances = np.square(own - got[index]).sum(axis=1)
        place = int(distances.argmin())
        if distances[place] * _CLOSER < error[index]:
            nearest[index], chances[index] = place, weigh(int(index), distances)
    # Each place is replaced by its nearest one until no more places drop out: those that are left lie on closed cycles.
    places = set(range(len(own)))
    while (reached := {int(nearest[place]) for place in places}) != places:
        places = reached
    moved = sorted(place for place in places if nearest[place] != place)
    if not moved or float(np.prod(chances[moved])) * pairs >= CHANCE:
        return None
    return moved[0], int(nearest[moved[0]])


def find_stuck(own: Floats, got: Floats) -> str | None:
    """Returns the words for an element that is constant over all samples, if the own model's varies, else None.

    Its error must be more than twice that of any other element: in a wrong sample, what one class loses another gains.
    """
    error = np.square(got - own).sum(axis=0)
    worst = int(error.argmax())
    others = float(np.delete(error, worst).max(initial=0.0))
    is_constant = float(np.ptp(got[:, worst])) <= _SAME * float(np.abs(got).max())
    moves = float(np.ptp(own[:, worst])) > _LEAST_REACH * float(np.abs(own).max())
    if len(own) < 3 or len(error) < 2 or not is_constant or not moves or error[worst] <= 2.0 * others:
        return None
    return f"has element {worst} the same for every sample"


def find_independence(own: Floats, got: Floats, energy: float) -> str | None:
    """Returns the words for outputs that do not vary with the inputs as they should, or None.

    `energy` is that of all of the own model's outputs. The variation from sample to sample on both sides must
    correlate, unless it is too small to be distinguished from rounding. The uncertainty of a correlation of few values
    is given by Fisher's transformation (Fisher 1915), atanh(r) with a deviation of 1 / sqrt(n - 3).
    """
    wanted, found = _centre(own), _centre(got)
    varying = energy_of(wanted)
    size = math.sqrt(varying * energy_of(found))
    values = 1.0 + (len(own) - 1) * min(count_dimensions(own), count_dimensions(got))
    if varying * _STEADY < energy or size == 0.0 or values <= 4.0:
        return None
    correlation = float(np.vdot(wanted, found)) / size
    least = math.tanh(math.atanh(_HONEST_CORRELATION) - _CHANCE_DEVIATES / math.sqrt(values - 3.0))
    if correlation >= min(least, _LEAST_CORRELATION):
        return None
    return f"does not follow its inputs: what varies from sample to sample correlates by {correlation:.2f} only"


def count_dimensions(rows: Floats) -> float:
    """Returns in how many directions the rows vary, at least 1: (sum of variances)^2 / sum of their squares.

    The participation ratio of the eigenvalues of the covariance matrix (Gao et al. 2017): 1 if all variance is along a
    line, however many values there are.
    """
    centred = _centre(rows)
    # Both products have the same eigenvalues: the smaller one is used.
    covariance = centred @ centred.T if len(centred) < centred.shape[1] else centred.T @ centred
    squares = energy_of(covariance)
    return max(1.0, float(np.trace(covariance)) ** 2 / squares) if squares > 0.0 else 1.0


def measure_chance(near: float, far: float, dims: float) -> float:
    """Returns how likely a point is so near by chance: the share of a ball's volume within a smaller radius.

    Both arguments are energies, squares of the radius.
    """
    return (near / far) ** (dims / 2.0) if far > 0.0 else 1.0


def _count_carriers(values: Floats) -> float:
    """Returns how many of the values, not all zero, carry their energy: (sum of squares)^2 / sum of their squares."""
    squares = np.square(values)
    return float(squares.sum()) ** 2 / float(np.square(squares).sum())


def _centre(rows: Floats) -> Floats:
    return np.asarray(rows - rows.mean(axis=0), dtype=np.float64)
