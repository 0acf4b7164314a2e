"""Whether outputs depend on their inputs as the reference's do: of another sample, or of none.

Each accusation is a test of the hypothesis that the device is honest and errs by noise of its own. It is made only
where chance would do the same in less than `CHANCE` of such outputs; tests/verify/test_verify_false_alarms.py counts
how often it does.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from edgekit.data.samples import Samples
from edgekit.verify.metrics.compare import MeasuredSample, measure_outputs
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.metrics.sketch import BUCKETS, Floats

CHANCE, _CHANCE_DEVIATES = 1e-4, 3.72
"""How often chance may accuse an honest output, and the same as a normal deviate: a tenth of one run in a thousand."""
# An output that lies at half the distance (a quarter of the energy) is clearly nearer.
_CLOSER = 4.0
# An error below half of what samples lie apart does not hide whose output it is.
_LEAST_MOVE = 0.25
# A reference whose steps from sample to sample are 20 dB below its energy may be answered by a constant.
_STILL = 100.0
# Sums of float32 values that should be equal are, to this share.
_SAME = 1e-5
# A reference that varies by less than a 300th of its energy (25 dB) is steady: rounding may hide what varies.
_STEADY = 300.0
_LEAST_CORRELATION, _HONEST_CORRELATION = 0.3, 0.7
"""What varies correlates by 0.7 (the root of a half) where as much noise as signal varies: less is no device that
follows its inputs. Below 0.3 no number of samples makes it one."""


def compare_device_outputs(reference: Samples, got: Samples) -> tuple[OutputReport, ...]:
    """Returns `compare_outputs`, and in `mismatch` where outputs follow other samples than their own.

    Figures alone may let that pass: where samples are much alike, the output of another one lies near too.
    """
    return tuple(
        msgspec.structs.replace(output.report, mismatch=output.report.mismatch or find_dependence(output.samples))
        if output.report.sqnr_db is not None
        else output.report
        for output in measure_outputs(reference, got)
    )


def find_dependence(samples: Sequence[MeasuredSample]) -> str | None:
    """Returns in words that an output follows the sample before, another one or none, None where it follows its own."""
    later = [(row, row.errors) for row in samples if row.errors is not None and row.stale_energy is not None]
    if len(later) < 2:
        return None  # one step tells nothing: outputs that saturate are equal now and then
    sketches = [row.sketches for row in samples if row.sketches is not None]
    same_size = len({row.errors.elements for row in samples if row.errors is not None}) == 1
    if not sketches or not same_size:
        return None
    reference, got = (np.stack(side) for side in zip(*sketches, strict=True))
    error = sum(errors.error_energy for _, errors in later)
    moved = sum(row.reference_step for row, _ in later if row.reference_step is not None)
    signal = sum(errors.reference_energy for _, errors in later)
    # Where the figures are good, no grid is so coarse; where they are not, all values may lie near a step or two.
    if error * _CLOSER >= signal and may_be_rounded(reference, got, later[0][1].elements):
        return None
    if moved > signal / _STILL and not any(row.got_step for row, _ in later):
        return "is the same for every sample"
    stale = sum(row.stale_energy for row, _ in later if row.stale_energy is not None)
    dims = min(count_dimensions(reference), count_dimensions(got - reference))
    if stale * _CLOSER < error and measure_chance(stale, error, len(later) * dims) < CHANCE:
        return "follows the sample before, not its own"
    energy = sum(row.errors.reference_energy for row in samples if row.errors is not None)
    moved_to = find_permutation(reference, got)
    # Where the figures are bad, a model that clips or drowns in noise correlates no more than a device that lies.
    return moved_to if moved_to or error * _CLOSER >= signal else find_independence(reference, got, energy)


def count_dimensions(rows: Floats) -> float:
    """Returns in how many directions the rows vary, at least one: (sum of variances)^2 / sum of their squares.

    The participation ratio of the eigenvalues of the covariance matrix (Gao et al. 2017): one where all variance lies
    along a line, however many values there are.
    """
    centred = _centre(rows)
    covariance = centred.T @ centred
    squares = float(np.vdot(covariance, covariance))
    return max(1.0, float(np.trace(covariance)) ** 2 / squares) if squares > 0.0 else 1.0


def find_permutation(reference: Floats, got: Floats) -> str | None:
    """Returns the words for outputs that came back for other samples than they belong to, None where they did not.

    Both hold a sketch a row, one a sample. A sample has moved if what came back for it lies four times nearer (in
    energy) to the reference of another one, and farther from its own than half of what samples lie apart. Only closed
    cycles of moved samples count: an error that all samples share moves them in one direction. The output of an honest
    device that errs far falls anywhere among the references, and where they lie on a line some of them is always near:
    a match tells the more, the nearer it is beside the second nearest (Lowe 2004), and the more directions there are.
    """
    count = len(reference)
    if count < 2 or count != len(got):
        return None
    apart = float((_centre(reference) ** 2).sum(axis=1).mean())
    own = ((got - reference) ** 2).sum(axis=1)
    nearest, chances, dims = np.arange(count), np.ones(count), count_dimensions(reference)
    for index in np.flatnonzero(own > _LEAST_MOVE * apart):
        distances = ((reference - got[index]) ** 2).sum(axis=1)
        first, second = np.sort(distances)[:2]
        if first * _CLOSER < own[index]:
            nearest[index] = int(distances.argmin())
            # No match tells more than one of all pairs of samples would by chance: classes that saturate coincide.
            chances[index] = max(measure_chance(first, second, dims), 1.0 / count**2)
    moved = _list_cycles(nearest.tolist())
    if not moved or float(np.prod(chances[moved])) >= CHANCE:
        return None
    return f"came back for other samples: that of sample {moved[0]} belongs to sample {nearest[moved[0]]}"


def find_independence(reference: Floats, got: Floats, energy: float) -> str | None:
    """Returns the words for outputs that vary otherwise than the inputs make them, None where they do not.

    Both hold a sketch a row, one a sample; `energy` is that of the whole reference. What varies from sample to sample
    on both sides must correlate, unless it is too little to be told from rounding: then the figures of each output say
    nothing of whether the device looked at its inputs. How far a correlation of few values may lie from the true one is
    told by Fisher's transformation (Fisher 1915), atanh(r) with a deviation of 1 / sqrt(n - 3).
    """
    if len(reference) < 2 or len(reference) != len(got):
        return None
    wanted, found = _centre(reference), _centre(got)
    varying = float(np.vdot(wanted, wanted))
    size = float(np.sqrt(varying * np.vdot(found, found)))
    values = 1.0 + (len(reference) - 1) * min(count_dimensions(reference), count_dimensions(got))
    if varying * _STEADY < energy or size == 0.0 or values <= 4.0:
        return None
    correlation = float(np.vdot(wanted, found)) / size
    least = math.tanh(math.atanh(_HONEST_CORRELATION) - _CHANCE_DEVIATES / math.sqrt(values - 3.0))
    if correlation >= min(least, _LEAST_CORRELATION):
        return None
    return f"does not follow its inputs: what varies from sample to sample correlates by {correlation:.2f} only"


def may_be_rounded(reference: Floats, got: Floats, elements: int) -> bool:
    """Returns True if what came back is what a device makes of the reference that rounds it to a coarse grid.

    All that it gives are whole steps of the grid, and so are their sums in the buckets of a sketch: the step is no
    larger than the least distance of two of them, or of one and zero. Rounding moves a value by half a step.
    """
    levels = np.unique(np.append(got, 0.0))
    gaps = np.diff(levels)
    gaps = gaps[gaps > _SAME * np.abs(levels).max()]
    step = float(gaps.min()) if gaps.size else math.inf
    if elements == 1:
        # What lies beyond the range that was calibrated comes back as its end, which alone tells nothing of the step.
        reference = reference.clip(got.min(axis=0), got.max(axis=0))
    return float(np.abs(reference - got).max()) <= math.ceil(elements / BUCKETS) * step / 2.0


def measure_chance(near: float, far: float, dims: float) -> float:
    """Returns how likely a point falls that near by chance: the share of a ball's volume within a smaller radius.

    Both are energies, squares of the radius.
    """
    return (near / far) ** (dims / 2.0) if far > 0.0 else 1.0


def _centre(rows: Floats) -> Floats:
    return np.asarray(rows - rows.mean(axis=0), dtype=np.float64)


def _list_cycles(nearest: Sequence[int]) -> list[int]:
    """Returns the samples that one comes back to by going from each to its nearest, others than those at home."""
    moved: list[int] = []
    for start in range(len(nearest)):
        place, steps = nearest[start], 1
        while place != start and steps <= len(nearest) and nearest[place] != place:
            place, steps = nearest[place], steps + 1
        if place == start and nearest[start] != start:
            moved.append(start)
    return moved
