"""Figures of outputs against values worked out by hand, and outputs that cannot be compared."""

import re
from typing import Any

import numpy as np
import pytest
from fixture_types import present
from msgspec.structs import replace
from verify_devices import breaking_after, from_list

from edgekit.data.intervals import bootstrap_share, wilson_interval
from edgekit.evidence import Evidence
from edgekit.model.tensors import Array, Tensors, ranks_classes
from edgekit.target import Thresholds
from edgekit.verify.metrics import tensor_metrics as metrics
from edgekit.verify.metrics.agreement import Agreement
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import ClassChange, OutputReport, weigh_output
from edgekit.verify.metrics.tensor_metrics import bootstrap_sqnr
from edgekit.verify.run_report import RunReport


def measure(reference: Array, got: Array) -> metrics.SampleErrors:
    return metrics.measure_samples(reference[None], got[None])[0]


def test_figures_are_those_worked_out_by_hand() -> None:
    errors = [measure(np.array([3.0, 6.0]), np.array([4.0, 4.0])), measure(np.array([2.0]), np.array([2.0]))]
    assert metrics.mean_abs(errors) == pytest.approx(3 / 3)
    assert metrics.rmse(errors) == pytest.approx((5 / 3) ** 0.5)
    assert metrics.sqnr_db(errors) == pytest.approx(10 * np.log10(49 / 5))
    assert metrics.cosine(errors) == pytest.approx((12 + 24 + 4) / (7 * 36**0.5))
    assert metrics.bias_share(errors) == pytest.approx(1 / (3 * 5))
    assert sum(each.matches for each in errors) == 1
    assert (errors[0].max_abs, errors[0].position) == (2.0, 1)


@pytest.mark.parametrize(
    ("signal", "noise", "ratio"),
    [(100.0, 1.0, 20.0), (1.0, 0.0, 200.0), (0.0, 1.0, -200.0), (0.0, 0.0, 200.0), (1e300, 1e-300, 200.0),
     (1e-300, 1e300, -200.0), (1.0, 1.0, 0.0)],
)  # fmt: skip
def test_ratios_in_decibels_are_clamped_to_200(signal: float, noise: float, ratio: float) -> None:
    assert metrics.decibels(signal, noise) == pytest.approx(ratio)


@pytest.mark.parametrize(("got", "top1"), [(0, True), (1, True), (2, False)])
def test_classes_agree_if_the_best_has_the_best_score_of_the_reference(got: int, top1: bool) -> None:
    wanted = np.array([[7.0, 7, 6, 5, 4, 3, 2, 1]])
    assert measure(wanted, np.eye(8)[[got]]).top1 == top1
    assert measure(wanted.reshape(2, 4), np.eye(8)[[got]].reshape(2, 4)).top1 is None
    assert measure(np.ones((1, 1)), np.ones((1, 1))).top1 is None


SUMS = ("abs_sum", "error_sum", "error_energy", "reference_energy", "energy", "dot", "max_abs")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_values_that_are_not_finite_are_counted(bad: float, side: int) -> None:
    pair = [np.ones(4, np.float32), np.ones(4, np.float32)]
    pair[side][1:3] = bad
    errors = measure(pair[0], pair[1])
    assert (errors.non_finite, errors.reference_non_finite, errors.position) == (2, 2 * (side == 0), 1)
    assert not any(getattr(errors, name) for name in SUMS)
    assert (errors.elements, errors.matches, errors.top1, errors.masks) == (4, 2, None, None)


def test_large_tensors_are_measured_in_parts_as_if_in_one() -> None:
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=100_000)
    found = wanted + rng.normal(size=wanted.size) / 100
    found[70_000] += 1
    errors, error = measure(wanted, found), found - wanted
    expected = {
        "abs_sum": abs(error).sum(), "error_sum": error.sum(), "error_energy": error @ error,
        "reference_energy": wanted @ wanted, "energy": found @ found, "dot": wanted @ found, "max_abs": error.max(),
        "position": 70_000,
    }  # fmt: skip
    assert {name: getattr(errors, name) for name in expected} == pytest.approx(expected)
    found[90_000] = np.nan
    lost = measure(wanted, found)
    assert (lost.non_finite, lost.position, any(getattr(lost, name) for name in SUMS)) == (1, 90_000, False)


@pytest.mark.parametrize(
    ("wanted", "found", "top1"),
    [
        pytest.param([0.1, 0.9, 0.3], [0.5, 0.5, 0.5], False, id="a constant does not win"),
        pytest.param([0.5, 0.5, 0.1], [0.1, 0.6, 0.1], True, id="ties of the reference count as right"),
    ],
)
def test_a_tie_is_right_in_the_reference_only(wanted: list[float], found: list[float], *, top1: bool) -> None:
    assert measure(np.array([wanted]), np.array([found])).top1 is top1
    # Quantized integers are measured like floats.
    integers = measure(np.array([[1, 0]], np.uint8), np.array([[0, 1]], np.uint8))
    assert (integers.max_abs, integers.top1) == (1.0, False)


@pytest.mark.parametrize("shape", [(1, 10), (1, 10, 1, 1), (10,), (1, 1), (2, 10), (), (0,)])
def test_only_one_axis_of_classes_is_ranked(shape: tuple[int, ...]) -> None:
    assert ranks_classes(np.zeros(shape, np.float32)) is (shape in {(1, 10), (1, 10, 1, 1), (10,)})


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.bool_, object])
def test_labels_are_counted_as_matches_and_not_measured(dtype: type) -> None:
    errors = measure(np.array([1, 0, 1], dtype), np.array([1, 1, 1], dtype))
    assert not errors.numeric
    assert errors.matches == 2


def test_wilson_knows_how_little_one_sample_says() -> None:
    assert wilson_interval(1, 1)[0] < 0.25
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)


def test_the_bootstrap_holds_the_figure_and_repeats_itself() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(1, 20)) for _ in range(50)]
    errors = [measure(row, row + rng.normal(scale=0.1, size=row.shape)) for row in rows]
    interval = present(bootstrap_sqnr(errors))
    assert interval[0] < metrics.sqnr_db(errors) < interval[1]
    assert bootstrap_sqnr(errors) == interval
    assert bootstrap_sqnr(errors[:1]) is None
    # Each alone in a quarter of draws.
    assert bootstrap_sqnr(errors[:2]) == pytest.approx(sorted(metrics.sqnr_db([one]) for one in errors[:2]))
    nothing = measure(np.zeros((1, 20)), np.ones((1, 20)))
    assert bootstrap_sqnr([nothing, nothing]) == (-metrics.DB_LIMIT, -metrics.DB_LIMIT)


@pytest.mark.parametrize(
    ("parts", "share", "interval"),
    [
        ([[1, 4]], 0.25, None),
        ([[0, 4], [4, 4]], 0.5, (0.0, 1.0)),  # each alone in a quarter of draws
        ([[3, 4], [3, 4]], 0.75, (0.75, 0.75)),
        ([[0, 0], [0, 0]], 1.0, (1.0, 1.0)),
    ],
)
def test_a_share_is_that_of_the_sums(parts: list[list[int]], share: float, interval: tuple[float, float]) -> None:
    assert bootstrap_share(np.array(parts)) == (share, interval)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_sums_beyond_the_largest_float_are_no_perfect_score(count: int) -> None:
    wanted, found = np.array([1e300, 1e300, 1e300]), np.array([1e300, -1e300, 5e299])
    errors = [measure(wanted, found)] * count
    assert metrics.sqnr_db(errors) <= 0.0
    assert metrics.cosine(errors) == 0.0
    assert metrics.cosine([measure(wanted, wanted)] * count) == pytest.approx(1.0)
    assert np.isfinite([metrics.rmse(errors), metrics.mean_abs(errors)]).all()
    interval = bootstrap_sqnr(errors)
    assert interval is None or interval[1] <= 0.0


def test_a_sketch_keeps_distances_and_counts_what_is_not_finite_as_zero() -> None:
    one, two = np.random.default_rng(0).normal(size=(2, 5000))
    first, second = metrics.sketch_samples(np.stack([one, two]))
    assert first.shape == (16,)
    assert ((first - second) ** 2).sum() == pytest.approx(((one - two) ** 2).sum(), rel=0.5)
    strange, plain = metrics.sketch_samples(np.array([[np.nan, np.inf, 1e300, 2.0], [0.0, 0.0, 1e15, 2.0]]))
    assert np.array_equal(strange, plain)
    assert np.abs(metrics.sketch_samples(np.array([[3e7, 1.0]]))).max() == 3e7


def test_arithmetic_is_exact_where_the_type_of_the_output_is_not() -> None:
    wanted = np.array([60000.0, -60000.0], np.float16)
    errors = [measure(wanted, -wanted)]
    assert errors[0].max_abs == 120000.0
    assert metrics.sqnr_db(errors) == pytest.approx(-6.02, abs=0.01)
    assert measure(np.full(4000, 100.0, np.float16), np.full(4000, 100.0, np.float16)).reference_energy == 4e7
    large = measure(np.array([2**53 + 1, 7]), np.array([2**53, 7]))
    assert (large.matches, large.position) == (1, 0)
    assert measure(np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64)).matches == 0


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (np.ones((1, 4)), np.ones((4, 1))),
        (np.ones((1, 4)), np.ones((1, 1))),
        (np.ones((2, 3)), np.ones((3, 2))),
        (np.ones(()), np.ones((1,))),
        (np.ones((1, 4), np.int64), np.ones((1, 1), np.int64)),
        (np.zeros((0, 4)), np.zeros((1, 4))),
        (np.array(["a", "a"]), np.array(["a"])),
    ],
)
def test_shapes_that_numpy_would_broadcast_do_not_match(wanted: Array, found: Array) -> None:
    errors = metrics.measure_errors(wanted, found)
    assert (errors.matches, errors.position, errors.reference_non_finite) == (0, 0, 0)
    assert errors.non_finite > 0
    assert not any(getattr(errors, name) for name in SUMS)


@pytest.mark.parametrize(
    ("wanted", "found", "matches"),
    [
        (np.array("a"), np.array("a"), 1),
        (np.array(["a", "\u00e9"]), np.array(["a", "e\u0301"]), 1),
        (np.array([True, False]), np.array([True, True]), 1),
        (np.array([1 + 2j]), np.array([1 + 2j]), 1),
        (np.array([], np.int64), np.array([], np.int64), 0),
    ],
)
def test_labels_of_any_kind_are_matched(wanted: Array, found: Array, matches: int) -> None:
    assert measure(wanted, found).matches == matches


def test_outputs_without_a_direction_are_defined() -> None:
    for got, cosine, sqnr in (([0.0, 0.0], 1.0, 200.0), ([1.0, 0.0], 0.0, -200.0)):
        errors = [measure(np.zeros(2), np.array(got))]
        assert (metrics.cosine(errors), metrics.sqnr_db(errors)) == (cosine, sqnr)
    errors = [measure(np.array([1.0, 0.0]), np.zeros(2))]
    assert (metrics.cosine(errors), metrics.sqnr_db(errors)) == (0.0, 0.0)
    assert metrics.bias_share([measure(np.ones(2), np.ones(2))]) == 0.0


def test_an_empty_output_is_no_evidence() -> None:
    errors = measure(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32))
    assert (errors.elements, errors.matches, errors.non_finite, errors.abs_sum) == (0, 0, 0, 0.0)
    labels = measure(np.zeros((0, 4), np.int64), np.zeros((0, 4), np.int64))
    assert (labels.elements, labels.matches, labels.position, labels.masks) == (0, 0, 0, None)


ROWS: list[Tensors] = [{"y": row} for row in np.random.default_rng(0).normal(size=(8, 1, 10)).astype(np.float32)]


def compare(got: list[Tensors], reference: list[Tensors] = ROWS) -> OutputReport:
    (report,) = compare_outputs(from_list(reference), from_list(got))
    return report


def change(sample: int, position: int, by: float) -> list[Tensors]:
    rows = [row["y"].copy() for row in ROWS]
    rows[sample][0, position] += by
    return [{"y": row} for row in rows]


def pick(*classes: int) -> list[Tensors]:
    return [{"y": np.eye(9)[[place]]} for place in classes]


@pytest.mark.parametrize(
    ("got", "figures"),
    [
        (ROWS, {"max_abs": 0.0, "sqnr_db": 200.0, "top1_agreement": 1.0, "mismatch": None, "samples": 8}),
        (change(5, 7, 3.0), {"worst_sample": 5, "worst_position": 7}),
        (change(3, 0, np.nan), {"worst_sample": 3, "worst_position": 0, "non_finite": 1, "sqnr_db": None}),
        (change(3, 4, np.inf), {"worst_sample": 3, "worst_position": 4, "non_finite": 1, "cosine": None}),
    ],
    ids=["the same", "one far", "NaN", "infinite"],
)
def test_the_figures_of_an_output_and_its_worst_sample(got: list[Tensors], figures: dict[str, object]) -> None:
    report = compare(got)
    assert {name: getattr(report, name) for name in figures} == figures


def test_the_answer_is_the_first_class_or_the_place_of_the_largest_error() -> None:
    best, least = int(ROWS[5]["y"].argmax()), int(ROWS[5]["y"].argmin())
    got = change(5, least, 30.0)
    tables: list[list[Tensors]] = [[{"y": row["y"].reshape(2, 5)} for row in rows] for rows in (got, ROWS)]
    for report, wanted in ((compare(got), best), (compare(*tables), least)):
        assert (present(report.worst_answers).wanted.place, present(report.worst_answers).got.place) == (wanted, least)
    assert compare(got).changes == (ClassChange(wanted=best, got=least, samples=1),)
    assert (compare(ROWS).changes, compare(ROWS).agreed) == ((), 1.0)
    changes = compare(pick(2, 4, 4), pick(1, 3, 3)).changes
    assert [(each.wanted, each.samples) for each in changes] == [(3, 2), (1, 1)]
    shared = Agreement(of="classes", share=0.5, samples=8)
    assert replace(compare(ROWS), agreements=(shared,)).agreed == 0.5


@pytest.mark.parametrize(
    ("got", "words"),
    [
        pytest.param(ROWS[:5], "came back for 5 of 8 samples", id="too few"),
        pytest.param([], "came back for 0 of 8 samples", id="nothing"),
        pytest.param([*ROWS, ROWS[0]], "came back for more than 8 samples", id="too many"),
        pytest.param([{"z": row["y"]} for row in ROWS], "is missing in sample 0", id="other name"),
        pytest.param([{"y": row["y"][:, :9]} for row in ROWS], r"has shape \[1, 9\] in sample 0", id="other shape"),
        pytest.param([{"y": row["y"].astype(np.float64)} for row in ROWS], "has dtype float64", id="other dtype"),
    ],
)
def test_outputs_that_do_not_fit_the_reference_are_a_mismatch_in_words(got: list[Tensors], words: str) -> None:
    report = compare(got)
    assert re.search(words, report.mismatch or "")
    # Shapes that are the same in every sample are not excused.
    assert report.shape_agreement is None


def test_a_broken_file_is_a_mismatch() -> None:
    (report,) = compare_outputs(from_list(ROWS), breaking_after(ROWS[:3]))
    assert (report.mismatch, report.samples) == ("cannot be read: 'out/3.npy' is cut off", 3)


def test_nothing_compared_is_no_evidence() -> None:
    assert compare_outputs(from_list([]), from_list([])) == ()
    rows: list[Tensors] = [{"y": row["y"], "boxes": np.zeros((0, 4), np.float32)} for row in ROWS]
    outputs = compare_outputs(from_list(rows), from_list(rows))
    limits = Thresholds(min_cosine=0.9, min_top1_agreement=0.9, min_sqnr_db=20.0)
    assert [weigh_output(output, limits).failures for output in outputs] == [(), ()]
    more: dict[str, Any] = {"device": "emulated", "evidence": Evidence.EMULATED, "provider": "P", "form": "onnx"}
    run = RunReport(outputs=outputs[1:], thresholds=limits, **more)
    assert run.failures == ("nothing was compared: every output is empty",)


def test_shapes_may_change_from_sample_to_sample_if_both_sides_agree() -> None:
    reference: list[Tensors] = [{"y": np.full((size, 4), 2.0, np.float32)} for size in (3, 0, 5)]
    report = compare([{"y": row["y"] * np.float32(1.1)} for row in reference], reference)
    assert (report.samples, report.elements, report.mismatch) == (3, 32, None)
    assert report.sqnr_db == pytest.approx(20.0, abs=1e-4)
    got: list[Tensors] = [{"y": np.zeros((1, 4), np.float32)}]
    assert "has shape [1, 4] in sample 0" in str(compare(got, [{"y": np.zeros((0, 4), np.float32)}]).mismatch)


def test_a_number_without_axes_and_halves_are_measured() -> None:
    reference: list[Tensors] = [{"y": np.array(value, np.float16)} for value in (1.0, 2.0, 4.0)]
    report = compare([{"y": np.array(float(row["y"]) * 1.5, np.float16)} for row in reference], reference)
    assert (report.max_abs, report.top1_agreement, report.mean_abs) == (2.0, None, 3.5 / 3)


def test_masks_have_an_intersection_over_union() -> None:
    wanted, found = np.zeros((1, 4, 4), np.int64), np.zeros((1, 4, 4), np.int64)
    wanted[0, :2], found[0, 1:3] = 1, 1
    report = compare([{"y": found}], [{"y": wanted}])
    assert report.iou == pytest.approx((4 / 12 + 4 / 12) / 2)
    assert (report.exact_match, report.worst_sample, report.worst_position) == (0.5, 0, 0)
    assert compare([{"y": 255 * found}], [{"y": 255 * wanted}]).iou == report.iou
    for factor in (256, -1):
        assert compare([{"y": found}], [{"y": factor * wanted}]).iou is None
        assert compare([{"y": factor * found}], [{"y": wanted}]).iou is None
    # Of booleans only True is a class: False would have two thirds.
    true: list[Tensors] = [{"y": np.array([True, True, False, False])}]
    assert compare([{"y": np.array([True, False, False, False])}], true).iou == 0.5
    for least, iou in ((np.eye(2, dtype=np.int64), 1.0), (np.array([True, True]), 1.0), (np.array([True]), None)):
        assert compare([{"y": least}], [{"y": least}]).iou == iou
