"""Outputs are held against the float model's by what they are for: of each kind one agrees, and one does not."""

from collections.abc import Callable

import numpy as np
import pytest
from verify_devices import from_list

from edgekit.model.outputs import MeasuredKind, Reading
from edgekit.model.tensors import Array
from edgekit.target import Thresholds
from edgekit.verify.metrics.agreement import Agreement, count_edits
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport, doubt_output, judge_output

LIMITS = Thresholds(min_cosine=0.97, min_top1_agreement=0.9, min_sqnr_db=12, granted_samples=1)
RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(32, 1, 10)).astype(np.float32)
STEPS = RNG.normal(size=(32, 1, 12, 10)).astype(np.float32)
WORDS = STEPS + np.float32(6) * np.eye(10, dtype=np.float32)[0] * (RNG.random((32, 1, 12, 1)) < 0.7)


def compare(rows: Array, got: Array, reading: Reading) -> OutputReport:
    wanted, found = (from_list([{"y": row} for row in side]) for side in (rows, got))
    (report,) = compare_outputs(wanted, found, {"y": reading})
    return report


def judge(rows: Array, got: Array, reading: Reading) -> str:
    report = compare(rows, got, reading)
    return "fail" if judge_output(report, LIMITS) else "not proven" if doubt_output(report, LIMITS) else "pass"


def noisy(rows: Array, share: float) -> Array:
    return np.asarray(rows + share * RNG.normal(size=rows.shape), np.float32)


Change = Callable[[Array], Array]
CASES: list[tuple[MeasuredKind, int, Array, Change, Change]] = [
    ("classes", 1, SCORES, lambda y: y * 3 + 5, lambda y: y[..., ::-1]),
    ("map", 2, STEPS, lambda y: y - y.max(axis=3, keepdims=True), lambda y: noisy(y, 1)),
    ("sequence", 2, STEPS, lambda y: y * 9, lambda y: noisy(y, 1)),
    ("sequence", 2, WORDS, lambda y: y * 2, lambda y: np.eye(10, dtype=np.float32)[0] + 0 * y),
    ("embedding", 1, SCORES, lambda y: y * 7, lambda y: -y),
    ("values", 1, SCORES, lambda y: noisy(y, 0.1), lambda y: noisy(y, 1)),
    ("image", 0, SCORES, lambda y: noisy(y, 0.1), lambda y: 0 * y),
]


@pytest.mark.parametrize(("kind", "axis", "rows", "honest", "broken"), CASES)
def test_each_kind_is_judged_by_what_it_is_for(
    kind: MeasuredKind, axis: int, rows: Array, honest: Change, broken: Change
) -> None:
    reading = Reading(kind=kind, axis=axis)
    assert judge(rows, np.asarray(honest(rows), np.float32), reading) == "pass"
    assert judge(rows, np.asarray(broken(rows), np.float32), reading) == "fail"


def test_what_most_steps_say_does_not_hide_the_letters() -> None:
    blank = np.eye(10, dtype=np.float32)[0] + 0 * WORDS
    (shared,) = compare(WORDS, blank, Reading(kind="sequence", axis=2)).agreements
    assert (shared.of, shared.share < 0.5) == ("letters", True)
    assert float((WORDS.argmax(axis=3) == 0).mean()) > 0.6
    assert [count_edits("kitten", other) for other in ("sitting", "kitten", "")] == [3, 0, 6]


ONE = np.asarray(RNG.normal(size=(1, 256)), np.float32)
PARALLEL = np.asarray(ONE + 0.01 * RNG.normal(size=(32, 1, 256)), np.float32)
"""Vectors of an embedding that differ by a hundredth: all of their cosines are 0.9999."""


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        (noisy(PARALLEL, 0.003), "pass"),
        (PARALLEL + 0.006 * np.roll(ONE, 1), "pass"),
        (noisy(PARALLEL, 0.02), "fail"),
        (0 * PARALLEL + PARALLEL[:1], "fail"),
        (0 * PARALLEL + PARALLEL.mean(axis=0), "fail"),
        (np.roll(PARALLEL, 1, axis=0), "fail"),
    ],
    ids=["its own", "turned a little", "drowned", "stuck at the first", "stuck at the mean", "of the sample before"],
)
def test_vectors_that_are_nearly_parallel_are_proven_by_themselves(got: Array, verdict: str) -> None:
    """One vector that stands for all agrees by 40 dB: what counts is whether each can be taken for another."""
    report = compare(PARALLEL, np.asarray(got, np.float32), Reading(kind="embedding", axis=1))
    assert judge(PARALLEL, np.asarray(got, np.float32), Reading(kind="embedding", axis=1)) == verdict
    assert (report.sqnr_db or 0) > 33


def test_an_offset_that_all_samples_share_is_no_proof() -> None:
    assert judge(SCORES + 100, noisy(SCORES + 100, 1), Reading(kind="values", axis=1)) == "not proven"
    (line,) = doubt_output(compare(SCORES + 100, noisy(SCORES + 100, 1), Reading(kind="values", axis=1)), LIMITS)
    assert "share of the energy" in line
    assert "samples that differ more would tell" in line


def test_where_two_readings_disagree_a_sentence_says_what_to_state() -> None:
    either = Reading(kind="classes", axis=1, other="embedding")
    close = SCORES * 0.01 + 1
    assert judge(close, noisy(close, 0.001), either) == "pass"
    flipped = close[..., ::-1] * 0.5 + close * 0.5
    report = compare(close, np.asarray(flipped, np.float32), Reading(kind="classes", axis=1, other="values"))
    (line,) = doubt_output(report, LIMITS)
    assert 'state what it is, [outputs] y = "classes" or "values"' in line


@pytest.mark.parametrize(
    ("hits", "total", "least", "is_below"),
    [(14, 16, 0.97, False), (13, 16, 0.97, True), (12, 16, 0.9, False), (11, 16, 0.9, True), (10, 24, 0.6, False)],
)
def test_few_samples_fail_nothing_that_chance_makes(hits: int, total: int, least: float, is_below: bool) -> None:
    """By the binomial distribution: of 16 samples 14 and fewer agree in 8 % of the draws of 97 %, 13 in 1.4 %."""
    assert Agreement(of="classes", share=hits / total, samples=total).is_below(least) is is_below


def test_a_limit_that_was_named_counts_beside_what_an_output_is_for() -> None:
    report = compare(SCORES, SCORES * 2, Reading(kind="classes", axis=1))
    assert not judge_output(report, LIMITS)
    named = Thresholds(min_cosine=0.97, min_top1_agreement=0.9, min_sqnr_db=12, named=("min_sqnr_db",))
    assert any("SQNR" in line for line in judge_output(report, named))


@pytest.mark.parametrize(("changed", "verdict"), [(1, "pass"), (2, "not proven"), (12, "fail")])
def test_classes_below_their_limit_are_no_proof_of_sixteen_samples(changed: int, verdict: str) -> None:
    rows = SCORES[:16]
    got = rows.copy()
    got[:changed] = rows[:changed, :, ::-1]
    reading = Reading(kind="classes", axis=1)
    assert judge(rows, got, reading) == verdict
    told = " ".join(doubt_output(compare(rows, got, reading), LIMITS))
    assert ("which may be chance with 16 samples" in told) is (verdict == "not proven")
