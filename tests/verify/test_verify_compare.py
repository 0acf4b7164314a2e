import re

import numpy as np
import pytest
from verify_devices import breaking_after, from_list

from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors
from edgekit.target import Thresholds
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport, judge_output
from edgekit.verify.run_report import RunReport

ROWS: list[Tensors] = [
    {"y": row} for row in np.random.default_rng(0).normal(size=(8, 1, 10)).astype(np.float32)
]  # fmt: skip


def compare(got: list[Tensors], reference: list[Tensors] = ROWS) -> OutputReport:
    (report,) = compare_outputs(from_list(reference), from_list(got))
    return report


def test_the_same_is_perfect() -> None:
    report = compare(ROWS)
    assert (report.max_abs, report.sqnr_db, report.top1_agreement, report.mismatch) == (0.0, 200.0, 1.0, None)
    assert report.samples == 8


def test_the_worst_sample_and_position_are_named() -> None:
    got = [{"y": row["y"].copy()} for row in ROWS]
    got[5]["y"][0, 7] += 3.0
    report = compare(list(got))
    assert (report.worst_sample, report.worst_position) == (5, 7)


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
def test_what_is_wrong_is_said(got: list[Tensors], words: str) -> None:
    report = compare(got)
    assert report.mismatch is not None
    assert re.search(words, report.mismatch)


def test_a_broken_file_is_a_mismatch() -> None:
    (report,) = compare_outputs(from_list(ROWS), breaking_after(ROWS[:3]))
    assert report.mismatch == "cannot be read: 'out/3.npy' is cut off"
    assert report.samples == 3


def test_one_nan_leaves_nothing_measured() -> None:
    got = [{"y": row["y"].copy()} for row in ROWS]
    got[3]["y"][0, 0] = np.nan
    report = compare(list(got))
    assert (report.non_finite, report.sqnr_db, report.cosine) == (1, None, None)


def test_nan_of_the_reference_is_told_apart() -> None:
    bad: list[Tensors] = [{"y": np.array([[np.nan, np.inf, 1.0]])}]
    report = compare(bad, bad)
    assert (report.non_finite, report.reference_non_finite) == (2, 2)


def test_an_output_that_hardly_varies_may_stay_constant() -> None:
    reference: list[Tensors] = [{"y": np.array([[1.0, 1e-6 * index]])} for index in range(8)]
    assert compare([reference[3]] * 8, reference).mismatch is None


def test_no_reference_compares_nothing() -> None:
    assert compare_outputs(from_list([]), from_list([])) == ()


def test_an_empty_output_is_no_comparison() -> None:
    empty: list[Tensors] = [{"y": np.zeros((0, 4), np.float32)}] * 3
    report = compare(empty, empty)
    assert (report.samples, report.elements, report.cosine) == (3, 0, None)


def test_strings_are_matched() -> None:
    reference: list[Tensors] = [{"label": np.array(["cat"], dtype=object)}, {"label": np.array(["dog"], dtype=object)}]
    report = compare([{"label": np.array(["cat"], dtype=object)}] * 2, reference)
    assert (report.exact_match, report.sqnr_db) == (0.5, None)


def test_an_empty_output_passes_only_beside_one_that_is_measured() -> None:
    rows: list[Tensors] = [{"y": row["y"], "boxes": np.zeros((0, 4), np.float32)} for row in ROWS]
    outputs = compare_outputs(from_list(rows), from_list(rows))
    limits = Thresholds(min_cosine=0.9, min_top1_agreement=0.9, min_sqnr_db=20.0)
    assert [judge_output(output, limits) for output in outputs] == [(), ()]
    assert judge_run(outputs[1:]) == ("nothing was compared: every output is empty",)


def test_boxes_that_come_from_nowhere_are_a_mismatch() -> None:
    got: list[Tensors] = [{"y": np.zeros((1, 4), np.float32)}]
    assert "has shape [1, 4] in sample 0" in str(compare(got, [{"y": np.zeros((0, 4), np.float32)}]).mismatch)


def test_shapes_may_change_from_sample_to_sample() -> None:
    reference: list[Tensors] = [{"y": np.full((size, 4), 2.0, np.float32)} for size in (3, 0, 5)]
    report = compare([{"y": row["y"] * np.float32(1.1)} for row in reference], reference)
    assert (report.samples, report.elements, report.mismatch) == (3, 32, None)
    assert report.sqnr_db == pytest.approx(20.0, abs=1e-4)


def test_a_number_without_axes_and_halves_are_measured() -> None:
    reference: list[Tensors] = [{"y": np.array(value, np.float16)} for value in (1.0, 2.0, 4.0)]
    report = compare([{"y": np.array(float(row["y"]) * 1.5, np.float16)} for row in reference], reference)
    assert (report.max_abs, report.top1_agreement, report.relative_error) == (2.0, None, 0.5)


def test_masks_have_an_intersection_over_union() -> None:
    wanted, found = np.zeros((1, 4, 4), np.int64), np.zeros((1, 4, 4), np.int64)
    wanted[0, :2], found[0, 1:3] = 1, 1
    report = compare([{"y": found}], [{"y": wanted}])
    assert report.iou == pytest.approx((4 / 12 + 4 / 12) / 2)
    assert (report.exact_match, report.worst_sample, report.worst_position) == (0.5, 0, 0)
    true: list[Tensors] = [{"y": np.array([True, True, False])}]
    assert compare([{"y": np.array([True, False, False])}], true).iou == 0.5


def test_distributions_have_a_divergence_and_ranks_a_correlation() -> None:
    p, q = np.array([[0.5, 0.25, 0.25]]), np.array([[0.25, 0.5, 0.25]])
    report = compare([{"y": q}], [{"y": p}])
    assert report.kl_divergence == pytest.approx(0.5 * np.log(2) + 0.25 * np.log(0.5))
    assert report.rank_correlation == pytest.approx(stats_rank([2, 0.5, 0.5], [0.5, 2, 0.5]))
    assert compare(ROWS).kl_divergence is None
    assert compare(ROWS).rank_correlation == pytest.approx(1.0)


def test_the_first_value_that_is_not_finite_is_named() -> None:
    got = [{"y": row["y"].copy()} for row in ROWS]
    got[3]["y"][0, 4] = np.inf
    report = compare(list(got))
    assert (report.worst_sample, report.worst_position) == (3, 4)


def stats_rank(first: list[float], second: list[float]) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def judge_run(outputs: tuple[OutputReport, ...]) -> tuple[str, ...]:
    limits = Thresholds(min_cosine=0.9, min_top1_agreement=0.9, min_sqnr_db=20.0)
    return RunReport(
        device="emulated",
        evidence=Evidence.EMULATED,
        provider="P",
        form="onnx",
        samples=3,
        provider_nodes={},
        placement_source="predicted",
        outputs=outputs,
        accuracy=None,
        latency_ms=None,
        load_ms=1.0,
        peak_rss_bytes=1,
        versions={},
        thresholds=limits,
        failure=None,
    ).failures
