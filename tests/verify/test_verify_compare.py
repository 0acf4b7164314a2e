import re

import numpy as np
import pytest
from verify_devices import breaking_after, from_list

from edgekit.tensors import Tensors
from edgekit.verify.compare import compare_outputs
from edgekit.verify.report import OutputReport

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
        pytest.param([ROWS[0], *ROWS[:-1]], "follows the sample before", id="late by one"),
        pytest.param([ROWS[0]] * 8, "is the same for every sample", id="constant"),
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
    assert compare(empty, empty).samples == 0


def test_strings_are_matched() -> None:
    reference: list[Tensors] = [{"label": np.array(["cat"], dtype=object)}, {"label": np.array(["dog"], dtype=object)}]
    report = compare([{"label": np.array(["cat"], dtype=object)}] * 2, reference)
    assert (report.exact_match, report.sqnr_db) == (0.5, None)
