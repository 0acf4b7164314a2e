"""Whether outputs depend on their inputs as the reference's do: of another sample, or of none."""

from collections.abc import Sequence

import numpy as np

from edgekit.verify.metrics.sketch import Floats

_CLOSER = 4.0
_LEAST_MOVE = 0.25
_LEAST_SAMPLES, _LEAST_CORRELATION, _STEADY = 6, 0.3, 300.0
"""A reference that varies by less than a 300th of its energy (25 dB) is steady: rounding may hide what varies."""


def find_order(reference: Sequence[Floats], got: Sequence[Floats]) -> str | None:
    """Returns the words for outputs that came back for other samples than they belong to, None where they did not.

    Both are sketches, one a sample. A sample has moved if what came back for it lies four times nearer (in energy) to
    the reference of another one, and farther from its own than half of what samples lie apart. Only closed circles of
    moved samples count: an error that all samples share moves them in one direction.
    """
    if len(reference) < 2 or len(reference) != len(got):
        return None
    wanted, found = np.stack(reference), np.stack(got)
    apart = float(((wanted - wanted.mean(axis=0)) ** 2).sum(axis=1).mean())
    own = ((found - wanted) ** 2).sum(axis=1)
    nearest = np.arange(len(wanted))
    for index in np.flatnonzero(own > _LEAST_MOVE * apart):
        distances = ((wanted - found[index]) ** 2).sum(axis=1)
        if distances.min() * _CLOSER < own[index]:
            nearest[index] = int(distances.argmin())
    moved = _list_circles(nearest.tolist())
    if not moved:
        return None
    return f"came back for other samples: that of sample {moved[0]} belongs to sample {nearest[moved[0]]}"


def find_deafness(reference: Sequence[Floats], got: Sequence[Floats], energy: float) -> str | None:
    """Returns the words for outputs that vary otherwise than the inputs make them, None where they do not.

    Both are sketches, one a sample; `energy` is that of the whole reference. What varies from sample to sample on both
    sides must correlate, unless it is too little to be told from rounding: then the figures of each output say nothing
    of whether the device looked at its inputs.
    """
    if len(reference) < _LEAST_SAMPLES or len(reference) != len(got):
        return None
    wanted, found = (_centre(np.stack(side)) for side in (reference, got))
    varying = float(np.vdot(wanted, wanted))
    size = float(np.sqrt(varying * np.vdot(found, found)))
    if varying * _STEADY < energy or size == 0.0:
        return None
    correlation = float(np.vdot(wanted, found)) / size
    if correlation >= _LEAST_CORRELATION:
        return None
    return f"does not follow its inputs: what varies from sample to sample correlates by {correlation:.2f} only"


def _centre(rows: Floats) -> Floats:
    return np.asarray(rows - rows.mean(axis=0), dtype=np.float64)


def _list_circles(nearest: Sequence[int]) -> list[int]:
    """Returns the samples that one comes back to by going from each to its nearest, others than those at home."""
    moved: list[int] = []
    for start in range(len(nearest)):
        place, steps = nearest[start], 1
        while place != start and steps <= len(nearest) and nearest[place] != place:
            place, steps = nearest[place], steps + 1
        if place == start and nearest[start] != start:
            moved.append(start)
    return moved
