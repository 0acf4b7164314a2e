"""What passes by luck: a model that is truly below a limit passes on the bound in at most one draw in twenty."""

from functools import partial
from math import comb

import msgspec
import numpy as np
import pytest

from edgekit.data.wilson import wilson_interval
from edgekit.model.tensors import Array
from edgekit.target import TaskLimit, Thresholds
from edgekit.verify.metrics.intervals import bootstrap_pairs, interval_of_pairs
from edgekit.verify.metrics.outputs import OutputReport, judge_output
from edgekit.verify.tasks.scores import TaskReport, judge_task

BOUND = Thresholds(min_cosine=0.0, min_top1_agreement=0.9, min_sqnr_db=-200.0, gate="bound")
LUCK = 0.05
POINTS = 0.02


def passes(hits: int, total: int, limits: Thresholds) -> bool:
    report = OutputReport(
        name="y", samples=total, cosine=1.0, sqnr_db=50.0, top1_agreement=hits / total,
        top1_interval=wilson_interval(hits, total),
    )  # fmt: skip
    return not judge_output(report, limits)


def chance(total: int, share: float, limits: Thresholds) -> float:
    """Returns the exact chance that a model of this true agreement passes, by the binomial distribution."""
    return sum(
        comb(total, hits) * share**hits * (1.0 - share) ** (total - hits)
        for hits in range(total + 1)
        if passes(hits, total, limits)
    )


@pytest.mark.parametrize("least", [0.9, 0.97, 0.99])
@pytest.mark.parametrize("total", [8, 30, 100, 300, 900])
def test_agreement_two_points_too_low_seldom_passes_on_the_bound(least: float, total: int) -> None:
    limits = msgspec.structs.replace(BOUND, min_top1_agreement=least)
    assert chance(total, least - POINTS, limits) <= LUCK
    assert chance(total, least, limits) <= LUCK


def test_the_estimate_alone_lets_luck_pass() -> None:
    plain = msgspec.structs.replace(BOUND, gate="estimate", granted_samples=1)
    assert chance(100, 0.88, plain) > 0.2
    assert chance(100, 0.88, BOUND) < 0.01


def test_a_good_model_passes_on_the_bound_with_enough_samples() -> None:
    assert chance(100, 0.98, BOUND) > 0.9
    assert chance(900, 0.93, BOUND) > 0.85
    assert chance(8, 1.0, BOUND) == 0.0


@pytest.mark.parametrize("total", [100, 500])
def test_an_accuracy_that_truly_drops_two_points_too_far_seldom_passes(total: int) -> None:
    limit, rng, passed, draws = TaskLimit(name="top1", max_drop=1.0), np.random.default_rng(0), 0, 1500
    for _ in range(draws):
        before = rng.random(total) < 0.9
        now = np.where(rng.random(total) < np.where(before, 0.05, 0.15), ~before, before)  # 3 points lower in truth
        report = TaskReport(
            name="top1", output="y", samples=total, unit="share", higher_is_better=True,
            reference=float(before.mean()), got=float(now.mean()),
            interval=interval_of_pairs(before.tolist(), now.tolist()),
        )  # fmt: skip
        passed += not judge_task(report, limit)
    assert passed / draws <= LUCK


def weigh(rows: Array, weights: Array) -> float:
    return float(weights @ rows / weights.sum())


def test_a_bootstrapped_metric_that_truly_drops_too_far_seldom_passes() -> None:
    limit, rng, passed, draws = TaskLimit(name="psnr", max_drop=0.5), np.random.default_rng(1), 0, 200
    for _ in range(draws):
        before = rng.normal(loc=30.0, scale=3.0, size=100)
        now = before - rng.normal(loc=0.7, scale=1.0, size=100)
        interval, _ = bootstrap_pairs(partial(weigh, before), partial(weigh, now), 100, 200)
        report = TaskReport(
            name="psnr", output="y", samples=100, unit="dB", higher_is_better=True,
            reference=float(before.mean()), got=float(now.mean()), interval=interval,
        )  # fmt: skip
        passed += not judge_task(report, limit)
    assert passed / draws <= LUCK
