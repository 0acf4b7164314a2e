"""How a tensor differs from the expected one: the simplest change that turns the expected values into its values.

Each kind of change is fitted to the values by least squares, and named if it explains nearly all of their variation.
Kinds with few parameters come first.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from edgekit.model.tensors import Array
from edgekit.quantize.ranges import softmax
from edgekit.verify.metrics.tensor_metrics import DB_LIMIT, Floats, decibels

# With the change made, the error must look like that of a quantized model (targets ask for 12 to 25 dB), and it must be
# clearly smaller than before.
_LEAST_FIT_DB, _LEAST_GAIN_DB = 20.0, 12.0
# A fit to fewer values for each of its parameters would explain noise.
_LEAST_VALUES = 4
# Larger tensors are compared with as many of their first samples as fit.
_MOST_VALUES = 1 << 22
# Every channel is compared with every other one.
_MOST_CHANNELS = 1024
# A picture or a sequence may be moved by at most this share of an axis, or have so many wrong elements at each border.
_MOST_MOVED, _MOST_BORDER = 0.25, 2
_LEAST_INSIDE, _LEAST_USED = 0.1, 0.9
_BINS = 256
_TINY = 1e-300

_HALF_MAX = float(np.finfo(np.float16).max)
_Pair = tuple[Array, Array]
"""What a tensor should be in a sample, and what it is."""
_Change = tuple[str, Floats, Floats]
"""A kind of change: its words, the values that it makes, and the values that came back for which it stands."""


def describe_pairs(pairs: Sequence[_Pair]) -> str:
    """Returns in what way the second arrays are not the first ones, over all samples of the first one's shape."""
    alike = [pair for pair in pairs if pair[0].shape == pair[1].shape == pairs[0][0].shape]
    join = np.concatenate if alike and alike[0][0].shape[:1] == (1,) else np.stack
    return describe_change(*(join([pair[side] for pair in alike]) for side in (0, 1))) if alike else ""


def describe_change(wanted: Array, found: Array) -> str:
    """Returns, in words that follow "it", how `found` differs from `wanted`, or "" if no usual change explains it.

    The first axis of both arrays is that of the samples.
    """
    # A scale and a constant are two parameters.
    if wanted.shape != found.shape or wanted.ndim < 2 or wanted.size < 2 * _LEAST_VALUES:
        return ""
    rows = max(1, _MOST_VALUES * len(wanted) // wanted.size)
    one, other = (side[:rows].astype(np.float64) for side in (wanted, found))
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return ""
    if not np.ptp(other):
        # The sum of -0 and 0 is 0.
        value = float(other.flat[0]) + 0.0
        return f"is {value:.3g} everywhere: look for weights or inputs of zero" if np.ptp(one) else ""
    changes, unchanged = _list_changes(one, other), _fit(one, other)
    return next((words for words, made, part in changes if _is_better(_fit(made, part), unchanged)), "")


def explains(made: Sequence[_Pair], before: Sequence[_Pair]) -> bool:
    """Returns True if each second array of `made` is nearly its first one, and much nearer than in `before`.

    Arrays that are not finite, of different shapes, of few values, or of one value only, are not explained.
    """
    return _is_better(_fit_pairs(made), _fit_pairs(before))


def _is_better(fit: float, unchanged: float) -> bool:
    return fit > max(_LEAST_FIT_DB, unchanged + _LEAST_GAIN_DB)


def _fit_pairs(pairs: Sequence[_Pair]) -> float:
    if not pairs or any(one.shape != two.shape for one, two in pairs):
        return -DB_LIMIT
    made, found = (np.concatenate([pair[side].astype(np.float64).ravel() for pair in pairs]) for side in (0, 1))
    is_known = found.size >= _LEAST_VALUES and np.isfinite(made).all() and np.isfinite(found).all() and np.ptp(found)
    return _fit(made, found) if is_known else -DB_LIMIT


def _fit(made: Floats, found: Floats) -> float:
    """Returns how much of the variation of `found` is explained, in dB: a constant must explain nothing."""
    return decibels(float(np.square(found - found.mean()).sum()), float(np.square(found - made).sum()))


def _list_changes(wanted: Floats, found: Floats) -> Iterator[_Change]:
    """Yields the usual changes of a tensor, the simplest first."""
    for words, made, result in (
        ("is the reference after one softmax too many", wanted, found),
        ("is the reference before its softmax", found, wanted),
    ):
        yield words, softmax(made.reshape(len(made), -1), axis=1).reshape(made.shape), result
    low, high = float(found.min()), float(found.max())
    # Clipped values say nothing about a scale or a constant; and values that a change moves beyond the limits are
    # clipped too.
    known = (wanted > wanted.min()) & (wanted < wanted.max())
    inside = known & (found > low) & (found < high)
    if not inside.mean() > _LEAST_INSIDE:
        known = inside = np.ones_like(inside)
    if ((wanted > low) & (wanted < high)).mean() > _LEAST_INSIDE:
        clip = "look for a scale that is too small, or a Clip"
        if max(-low, high) >= _HALF_MAX:
            clip = "half precision ends at 65504, so scale what comes before"
        yield f"is the reference limited to {low:.3g} and {high:.3g}: {clip}", wanted.clip(low, high), found
    ours, theirs = wanted[inside], found[inside]
    if len(ours) >= _LEAST_VALUES:
        mean, mean_found = float(ours.mean()), float(theirs.mean())
        factor = float(ours @ theirs) / max(float(ours @ ours), _TINY)
        slope = float((ours - mean) @ theirs) / max(float((ours - mean) @ (ours - mean)), _TINY)
        offset, both = mean_found - mean, mean_found - slope * mean
        part = found[known]
        limits = "look for an activation or a limit that only one side has"
        yield f"is the reference but for its least or largest values: {limits}", _clip(wanted[known], part), part
        for words, made in (
            (f"times a factor of {factor:.3g}: look at scales, or at inputs that are not normalised", wanted * factor),
            (f"plus a constant of {offset:.3g}: look at zero points and the mean of the inputs", wanted + offset),
            (f"times a factor of {slope:.3g} plus {both:.3g}: look at mean and deviation", wanted * slope + both),
        ):
            yield f"is the reference {words}", _clip(made[known], part), part
    for axis in dict.fromkeys((1, wanted.ndim - 1)):
        moved = [np.moveaxis(each, axis, 0).reshape(each.shape[axis], -1) for each in (wanted, found, known, inside)]
        yield from _order_channels(*moved[:2])
        yield from _list_channel_changes(*moved)
        # Behind the channels of a picture, and before its columns, which are the last axis.
        yield from _list_moves(wanted, found) if axis == 1 else ()
    yield from _order_channels(*(side.reshape(len(side), -1).T for side in (wanted, found)))
    activation = "look at activations, limits and casts"
    yield f"is a function of the reference: {activation}", _map_values(wanted, found), found
    yield f"is the reference before a function: {activation}", _map_values(found, wanted), wanted


def _clip(made: Floats, found: Floats) -> Floats:
    """Returns the values, limited as those found are where these lie at their limits."""
    low, high = found.min(initial=np.inf), found.max(initial=-np.inf)
    return np.where((found > low) & (found < high), made, made.clip(low, high))


def _list_channel_changes(ours: Floats, theirs: Floats, known: Array, inside: Array) -> Iterator[_Change]:
    """Yields the changes of single channels, which are the rows."""
    channels = len(ours)
    if channels < 2 or channels > _MOST_CHANNELS:
        return
    errors = np.square(theirs - ours).sum(axis=1)
    wrong = np.flatnonzero(errors > errors.sum() / (4.0 * channels))
    if len(wrong) <= channels // 4:
        kept, some = np.delete(np.arange(channels), wrong), ", ".join(map(str, wrong[:5]))
        words = f"is the reference but for {len(wrong)} of {channels} channels ({some}): look at their weights"
        yield words, ours[kept], theirs[kept]
    counts = inside.sum(axis=1)
    known = known & (counts >= _LEAST_VALUES)[:, None]
    if 4 * int(known.sum()) < known.size:
        return

    def add(values: Floats) -> Floats:
        return np.asarray((values * inside).sum(axis=1, keepdims=True) / np.maximum(counts, 1)[:, None])

    mean, mean_found = add(ours), add(theirs)
    slopes = add((ours - mean) * theirs) / np.maximum(add(np.square(ours - mean)), _TINY)
    middle = float(np.median(slopes[known.any(axis=1)]))
    bias, by_channel = "look at the bias", "look at scales by channel, or a normalization folded twice"
    for words, made in (
        (f"is the reference plus a constant in each channel: {bias}", ours - mean + mean_found),
        ("is a constant in each channel: look for weights of zero", np.broadcast_to(mean_found, ours.shape)),
        (
            f"is the reference times a factor of {middle:.3g} plus a constant in each channel: look at the weights",
            (ours - mean) * middle + mean_found,
        ),
        (
            f"is the reference times a factor in each channel: {by_channel}",
            ours * (add(ours * theirs) / np.maximum(add(ours * ours), _TINY)),
        ),
        (f"is the reference scaled and moved in each channel: {by_channel}", (ours - mean) * slopes + mean_found),
    ):
        yield words, _clip(made[known], theirs[known]), theirs[known]


def _order_channels(ours: Floats, theirs: Floats) -> Iterator[_Change]:
    """Yields the nearest row of one side for each of the other, if hardly one is used twice: rows may be equal."""
    if not 2 <= len(ours) <= _MOST_CHANNELS or ours.shape[1] < 2:
        return
    order = (np.square(ours).sum(axis=1)[:, None] - 2.0 * (ours @ theirs.T)).argmin(axis=0)
    if len(np.unique(order)) >= _LEAST_USED * len(np.unique(theirs, axis=0)):
        yield "holds the reference's values in another order: look at layout and channel order", ours[order], theirs


def _list_moves(wanted: Floats, found: Floats) -> Iterator[_Change]:
    """Yields changes of place along the axes of a picture, or of a sequence."""
    if not (axes := [axis for axis in range(1, wanted.ndim) if wanted.shape[axis] > 2 * _MOST_BORDER]):
        return
    for axis in axes:
        yield f"is the reference mirrored along axis {axis}", np.flip(wanted, axis), found
    for one, other in itertools.combinations(axes, 2):
        turned = np.swapaxes(wanted, one, other)
        words = f"is the reference with axes {one} and {other} exchanged: look at the layout"
        yield words, turned if turned.shape == found.shape else turned.reshape(found.shape), found
    for axis in (1, -1):
        turned = np.moveaxis(wanted, axis, -axis).reshape(found.shape)
        yield "is the reference in the other layout (NCHW and NHWC)", turned, found
    inside = tuple(slice(_MOST_BORDER, -_MOST_BORDER) if axis in axes else slice(None) for axis in range(wanted.ndim))
    yield "is the reference but for its borders: look at padding", wanted[inside], found[inside]
    # The cross-correlation of both is largest where they cover each other (its transform is a product).
    product = np.fft.rfftn(found - found.mean(), axes=axes) * np.conj(np.fft.rfftn(wanted - wanted.mean(), axes=axes))
    shape = [wanted.shape[axis] for axis in axes]
    others = tuple(axis for axis in range(wanted.ndim) if axis not in axes)
    peak = np.unravel_index(np.fft.irfftn(product, shape, axes).sum(axis=others).argmax(), shape)
    moves = [int(place) - size * (2 * int(place) > size) for place, size in zip(peak, shape, strict=True)]
    if any(moves) and all(abs(move) <= _MOST_MOVED * size for move, size in zip(moves, shape, strict=True)):
        shifts = dict(zip(axes, moves, strict=True))
        here, there = (tuple(_cut(sign * shifts.get(axis, 0)) for axis in range(wanted.ndim)) for sign in (-1, 1))
        told = ", ".join(f"{move} along axis {axis}" for axis, move in zip(axes, moves, strict=True) if move)
        words = f"is the reference moved by {told}: look at padding and cropping"
        yield words, wanted[here], found[there]


def _cut(move: int) -> slice:
    """Returns the part of an axis that stays inside if everything moves by this much."""
    return slice(max(0, move), min(0, move) or None)


def _map_values(given: Floats, result: Floats) -> Floats:
    """Returns the results as a function of the given values: the mean in each of some bins, joined by lines."""
    order = given.reshape(-1).argsort(kind="stable")
    x, y = given.reshape(-1)[order], result.reshape(-1)[order]
    bounds = np.linspace(0, len(x), min(_BINS, len(x) // (2 * _LEAST_VALUES)) + 1, dtype=int)
    if len(bounds) < 3:
        return np.full(result.shape, result.mean())
    counts = np.diff(bounds)
    places, means = (np.add.reduceat(side, bounds[:-1]) / counts for side in (x, y))
    return np.interp(given, places, means)
