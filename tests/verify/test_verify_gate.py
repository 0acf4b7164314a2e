"""What passes by luck: a model that is truly below a limit passes on the bound in at most one draw in twenty."""

import contextlib
import json
import math
from functools import partial
from math import comb
from typing import Any

import msgspec
import numpy as np
import pytest
from fixture_types import present
from msgspec.structs import replace

from edgekit.data.intervals import (
    bootstrap_pairs,
    describe_enough,
    find_enough,
    find_enough_hits,
    find_enough_pairs,
    interval_of_pairs,
    wilson_interval,
)
from edgekit.evidence import Judgement
from edgekit.model.tensors import Array
from edgekit.target import TaskLimit, Thresholds
from edgekit.verify.metrics.outputs import OutputReport, format_near, weigh_output
from edgekit.verify.task_scores import (
    Accuracy,
    TaskReport,
    describe_accuracy,
    describe_difference,
    format_score,
    judge_task,
)

BOUND = Thresholds(min_cosine=0.0, min_top1_agreement=0.9, min_sqnr_db=-200.0, gate="bound")
LUCK = 0.05


def passes(hits: int, total: int, limits: Thresholds) -> bool:
    report = OutputReport(
        name="y", samples=total, cosine=1.0, sqnr_db=50.0, top1_agreement=hits / total,
        top1_interval=wilson_interval(hits, total),
    )  # fmt: skip
    return not weigh_output(report, limits).failures and not weigh_output(report, limits).unproven


def chance(total: int, share: float, limits: Thresholds) -> float:
    """Returns the exact chance that a model of this true agreement passes, by the binomial distribution."""
    return sum(
        comb(total, hits) * share**hits * (1.0 - share) ** (total - hits)
        for hits in range(total + 1)
        if passes(hits, total, limits)
    )


def test_the_bound_stops_luck_and_passes_a_good_model_with_enough_samples() -> None:
    assert chance(100, 0.88, replace(BOUND, gate="estimate", granted_samples=1)) > 0.2
    assert chance(100, 0.88, BOUND) < 0.01
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
            interval=interval_of_pairs(total, int((now & ~before).sum()), int((before & ~now).sum())),
        )  # fmt: skip
        passed += judge_task(report, limit).verdict == "pass"
    assert passed / draws <= LUCK


def weigh(rows: Array, weights: Array) -> float:
    return float(weights @ rows / weights.sum())


LIMITS = Thresholds(min_cosine=0.9, min_top1_agreement=0.8, min_sqnr_db=10.0, gate="estimate", granted_samples=1)
FIGURES: dict[str, Any] = {"cosine": 0.9, "sqnr_db": 10.0, "top1_agreement": 0.7, "shape_agreement": 0.8}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({}, ""),
        ({"cosine": 0.89}, "has cosine 0.89, below 0.9"),
        ({"sqnr_db": 9.99}, "has SQNR 9.99 dB, below 10 dB"),
        ({"top1_agreement": 0.69}, "has top-1 agreement 0.69, below 0.7"),
        ({"shape_agreement": 0.7}, "has shape agreement 0.7, below 0.73"),
        ({"exact_match": 0.8}, ""),
        ({"exact_match": 0.79}, "has exact match 0.79, below 0.8"),
        ({"mismatch": "is late"}, "is late"),
        ({"sqnr_db": 9.0, "suspect": "is scaled"}, "below 10 dB|is scaled"),
        ({"suspect": "is scaled"}, ""),
        ({"samples": 0}, "was compared with no sample"),
        ({"samples": 0, "mismatch": "is gone"}, "was compared with no sample: is gone"),
        ({"non_finite": 2, "worst_sample": 0}, "has 2 values that are NaN or infinite, the first in sample 0"),
        ({"non_finite": 2, "reference_non_finite": 1}, "infinite, 1 of them on the float model already"),
        ({"cosine": None}, "was not measured"),
        ({"cosine": None, "elements": 0}, ""),
        ({"cosine": None, "mismatch": "is late"}, "is late"),
        ({"cosine": None, "elements": 4}, "was not measured"),
        ({"cosine": None, "exact_match": 1.0}, ""),
        ({"cosine": float("nan")}, "has cosine nan, below 0.9"),
    ],
)
def test_an_output_is_refused_for_each_figure_below_its_limit(figures: dict[str, Any], words: str) -> None:
    report = OutputReport(**{"name": "y", "samples": 10, **FIGURES, **figures})
    lines = weigh_output(report, LIMITS).failures
    assert len(lines) == (words.count("|") + 1 if words else 0)
    assert all(word in line for word, line in zip(words.split("|"), lines, strict=False))


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"top1_agreement": 0.8, "top1_interval": (0.8, 0.9)}, ""),
        ({"top1_agreement": 0.79, "top1_interval": (0.7, 0.9)}, "has top-1 agreement 0.79, below 0.8"),
        ({"top1_agreement": 0.85, "top1_interval": (0.79, 0.9)}, "with 10 samples it could be 0.79, below 0.8"),
        ({"sqnr_db": 12.0, "sqnr_interval_db": (9.0, 14.0)}, "it could be 9 dB, below 10 dB"),
        ({"shape_agreement": 0.75}, "has shape agreement 0.75, below 0.8"),
        ({"sqnr_db": 12.0, "sqnr_interval_db": (10.0, 14.0)}, ""),
        ({"sqnr_db": 12.0, "sqnr_interval_db": None}, ""),
    ],
)
def test_on_the_bound_the_worst_end_of_an_interval_counts(figures: dict[str, Any], words: str) -> None:
    report = OutputReport(**{"name": "y", "samples": 10, "cosine": 0.9, **figures})
    limits = replace(LIMITS, gate="bound")
    failed, left_open = weigh_output(report, limits).failures, weigh_output(report, limits).unproven
    assert len(failed + left_open) == bool(words)
    assert words in "".join(failed + left_open)
    # What the figure itself misses fails; what only the interval misses is not proven.
    assert bool(left_open) == ("could be" in words)
    assert weigh_output(report, LIMITS).unproven == ()


@pytest.mark.parametrize(
    ("value", "limit", "text"),
    [(0.5, 0.9, "0.5"), (0.89996, 0.9, "0.89996"), (0.9, 0.9, "0.9"), (0.90004, 0.9, "0.9"), (1 / 3, 0.9, "0.3333")],
)
def test_a_figure_gets_as_many_digits_as_tell_it_from_its_limit(value: float, limit: float, text: str) -> None:
    assert format_near(value, limit) == text


def scored(**fields: Any) -> TaskReport:
    plain: dict[str, Any] = {
        "name": "m", "output": "y", "samples": 100, "unit": "share", "higher_is_better": True, "reference": 0.8,
        "got": 0.78, "interval": (-0.03, -0.01), "share_interval": (0.96, 0.99),
    }  # fmt: skip
    return TaskReport(**{**plain, **fields})


@pytest.mark.parametrize(
    ("limit", "fields", "words"),
    [
        ({"max_drop": 3.0}, {}, ""),
        ({"max_drop": 2.9}, {}, "with 100 samples it could be 3.00, more than 2.9: about 130 samples would tell"),
        ({"max_drop": 2.0}, {}, "could be 3.00, more than 2"),
        ({"max_drop": 2.0, "gate": "estimate"}, {}, ""),
        ({"max_drop": 1.9, "gate": "estimate"}, {}, "is 2.00 points worse than the float model, more than 1.9"),
        ({"max_drop": 2.0}, {"interval": None}, "has too few samples (100) for an interval"),
        ({"max_drop": 1.0}, {"interval": None}, "is 2.00 points worse than the float model, more than 1"),
        ({"max_drop": 0.03}, {"unit": "dB"}, ""),
        ({"max_drop": 0.01}, {"unit": "dB"}, "is 0.02 points worse"),
        ({"max_drop": 1.0}, {"higher_is_better": False, "interval": (-0.03, 0.01)}, ""),
        ({"max_drop": 0.9}, {"higher_is_better": False, "interval": (-0.03, 0.01)}, "it could be 1.00"),
        ({"min_share": 0.96}, {}, ""),
        ({"min_share": 0.97}, {}, "and with 100 samples it could be 96.0%, less than 97.0%"),
        ({"min_share": 0.98}, {}, "is 97.5% of the float model's, less than 98.0%"),
        ({"min_share": 0.97, "gate": "estimate"}, {}, ""),
        ({"min_share": 0.9}, {"share_interval": None}, "too few samples"),
        ({"min_share": 0.9}, {"higher_is_better": False}, "cannot be limited by min_share"),
        ({"min_share": 0.9}, {"reference": 0.0}, "cannot be limited by min_share"),
        ({"at_least": 0.78}, {}, ""),
        ({"at_least": 0.79}, {}, "is 78.0%, below 0.79"),
        ({"at_least": 0.9}, {"labelled": 400}, "is 78.0%, below 0.9, on 100 of 400"),
        ({"at_least": 0.78}, {"higher_is_better": False}, ""),
        ({"at_least": 0.77}, {"higher_is_better": False}, "is 78.0%, above 0.77"),
        ({"at_least": 0.5}, {"got": None, "mismatch": "it died"}, "was not measured on every sample: it died"),
    ],
)
def test_a_metric_keeps_its_limit_or_says_more(limit: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    found = judge_task(scored(**fields), TaskLimit(name="m", **limit))
    lines = found.failures + found.unproven
    assert len(lines) == bool(words)
    assert words in "".join(lines)
    is_open = any(part in words for part in ("could be", "too few", "of 400"))
    assert found.verdict == ("pass" if not words else "not proven" if is_open else "fail")


def test_no_limit_is_kept_by_all_and_another_metric_is_none() -> None:
    assert judge_task(scored(), None) == judge_task(None, None) == Judgement()
    for report in (None, scored(name="other")):
        assert "needs labels" in judge_task(report, TaskLimit(name="m", max_drop=9.0)).unproven[0]


def test_the_interval_of_pairs_is_that_of_agresti_and_min() -> None:
    centre, half = 1 / 12, 1.959964 * ((2 + 1 + 1 - 1 / 12) ** 0.5) / 12
    assert interval_of_pairs(10, 2, 1) == pytest.approx((centre - half, centre + half), abs=1e-6)
    assert interval_of_pairs(1, 0, 0)[0] < -0.5
    assert (interval_of_pairs(50, 0, 50)[0], interval_of_pairs(50, 50, 0)[1]) == (-1.0, 1.0)


def test_the_paired_bootstrap_draws_both_sides_alike() -> None:
    rows = np.random.default_rng(0).uniform(1, 9, 50)
    lower, halved = bootstrap_pairs(partial(weigh, rows), partial(weigh, rows - 0.5), 50, 100)
    assert lower == pytest.approx((-0.5, -0.5))
    assert halved is not None
    assert halved[0] < 1 - 0.5 / rows.mean() < halved[1] < 1
    half = bootstrap_pairs(partial(weigh, rows / 20), partial(weigh, rows / 40), 50, 100)[1]
    assert half == pytest.approx((0.5, 0.5))
    assert bootstrap_pairs(partial(weigh, 0 * rows), partial(weigh, rows), 50, 100)[1] is None
    spread = bootstrap_pairs(partial(weigh, 0 * rows + 1), partial(weigh, rows), 50, 5000)[0]
    far = 1.96 * rows.std() / 50**0.5
    assert spread == pytest.approx((rows.mean() - 1 - far, rows.mean() - 1 + far), abs=0.04)


def test_a_difference_is_told_in_points_with_its_interval() -> None:
    assert describe_difference(scored()) == "-2.00 (-3.00 to -1.00)"
    assert describe_difference(scored(unit="dB", interval=None, reference=30.0, got=31.5)) == "+1.50"
    assert describe_difference(scored(got=None)) == "not measured"
    assert [format_score(scored(unit=unit), 0.5) for unit in ("share", "dB", "value")] == ["50.0%", "0.5 dB", "0.5"]
    assert format_score(scored(), None) == "not measured"
    told = Accuracy(output="y", samples=4, reference=0.75, got=0.5)
    assert describe_accuracy(told) == "75.0% -> 50.0%, -25.0"
    assert describe_accuracy(replace(told, interval=(-0.5, 0.1))) == "75.0% -> 50.0%, -25.0 (-50.0 to +10.0)"


CHANGE = {"wanted": 0, "got": 0, "samples": 0}


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("samples", 0, -1), ("non_finite", 0, -1), ("max_abs", 0.0, -0.1), ("top1_agreement", 1.0, 1.1),
        ("exact_match", 0.0, -0.1), ("cosine", -1.0, -1.1), ("sqnr_db", -200.0, -201.0),
        ("rmse", 0.0, -1.0), ("changes", [CHANGE], [{**CHANGE, "got": -1}]),
    ],
)  # fmt: skip
def test_a_figure_that_cannot_be_is_not_read(field: str, good: object, bad: object) -> None:
    for value, reads in ((good, True), (bad, False)):
        text = json.dumps({"name": "y", "samples": 1, field: value})
        with contextlib.nullcontext() if reads else pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=OutputReport)


@pytest.mark.parametrize(
    ("total", "gained", "lost", "points"), [(24, 0, 0, 1.0), (100, 1, 1, 1.0), (100, 1, 2, 3.0), (8, 0, 0, 0.1)]
)
def test_as_many_samples_as_would_do_do(total: int, gained: int, lost: int, points: float) -> None:
    enough = present(find_enough_pairs(total, gained, lost, -points / 100))
    scale = enough / total
    assert interval_of_pairs(enough, math.floor(gained * scale), math.ceil(lost * scale))[0] >= -points / 100
    assert interval_of_pairs(int(0.7 * enough), *(round(0.7 * scale * n) for n in (gained, lost)))[0] < -points / 100


def test_where_no_number_of_samples_would_do_none_is_named() -> None:
    assert find_enough_pairs(100, 0, 5, -0.05) is None
    assert find_enough(100, 1.0, 0.0) is None
    assert find_enough(100, 1.0, -1.0) is None
    assert [find_enough(100, 2.0, 1.0), find_enough(100, 1.5, 1.1)] == [400, 186]
    assert [find_enough(count, 1.0, 1.0) for count in (10**7, 10**7 + 1)] == [10**7, None]
    told = [describe_enough(count).removesuffix(" samples would tell") for count in (None, 7, 99, 101, 1234)]
    assert told == ["", ": about 7", ": about 99", ": about 110", ": about 1300"]
    assert find_enough_hits(100, 0.9, 0.9) is None
    assert find_enough_hits(100, 1.0, 0.9) == 101
    part = present(find_enough_hits(30, 0.95, 0.9))
    assert wilson_interval(math.floor(0.95 * part), part)[0] >= 0.9
    enough = present(find_enough_hits(6, 1.0, 0.9))
    assert wilson_interval(enough, enough)[0] >= 0.9 > wilson_interval(enough - 1, enough - 1)[0]
