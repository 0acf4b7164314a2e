"""How well embeddings find their like, and what that loses, told without labels.

How alike two samples are is one of two bell curves, that of the same thing and that of different ones, so that the
float model says how likely a pair is the same (N. Brümmer and D. Garcia-Romero, "Generative Modelling for Unsupervised
Score Calibration", arXiv:1311.0707). Each sample looks for its like among the others, and its average precision is
expected from these chances, in the order in which either model ranks them.
"""

import math

import msgspec
import numpy as np

from edgekit.data.wilson import Z95
from edgekit.model.tensors import Array
from edgekit.quantize.accuracy.soften import soften

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
