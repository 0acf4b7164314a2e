"""Outputs are held against the float model by what they are for, and lists by what they name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_types import MakeOnce, present
from tiny_models import save_net
from verify_devices import InProcess, from_list, restate

from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.data.intervals import wilson_interval
from edgekit.jobs.build import build
from edgekit.model.tensors import Array, Column, ListColumns, Reading
from edgekit.quantize.accuracy.head_search import DetectionList
from edgekit.recipe import Data, Recipe
from edgekit.target import Thresholds
from edgekit.verify.metrics.agreement import Agreement, measure_agreement
from edgekit.verify.metrics.compare import compare_outputs, weigh_detections
from edgekit.verify.metrics.outputs import OutputReport, weigh_output
from edgekit.verify.run import verify_bundle

LIMITS = Thresholds(min_cosine=0.97, min_top1_agreement=0.9, min_sqnr_db=12, granted_samples=1)
RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(32, 1, 10)).astype(np.float32)


def compare(rows: Array, got: Array, reading: Reading) -> OutputReport:
    wanted, found = (from_list([{"y": row} for row in side]) for side in (rows, got))
    (report,) = compare_outputs(wanted, found, {"y": reading})
    return report


def judge(rows: Array, got: Array, reading: Reading) -> str:
    weighed = weigh_output(compare(rows, got, reading), LIMITS)
    return "fail" if weighed.failures else "not proven" if weighed.unproven else "pass"


@pytest.mark.parametrize(("equal", "samples", "verdict"), [
    (8, 8, "pass"), (7, 8, "not proven"), (3, 8, "fail"), (112, 128, "not proven"), (96, 128, "fail"),
])  # fmt: skip
def test_integers_that_are_read_as_nothing_else_may_differ_by_chance(equal: int, samples: int, verdict: str) -> None:
    places = np.arange(samples).reshape(-1, 1)
    wanted, found = ([{"at": row} for row in side] for side in (places, np.where(places < equal, places, 999)))
    (report,) = compare_outputs(from_list(wanted), from_list(found), {})
    weighed = weigh_output(report, LIMITS)
    assert verdict == ("fail" if weighed.failures else "not proven" if weighed.unproven else "pass")


def noisy(rows: Array, share: float) -> Array:
    return np.asarray(rows + share * RNG.normal(size=rows.shape), np.float32)


ROLL = np.asarray(RNG.random((32, 64, 88)) * np.where(RNG.random((32, 64, 88)) < 0.02, 1, 0.3), np.float32)
"""The probability that each of 88 notes sounds at 64 moments; 1 % do."""


@pytest.mark.parametrize(("rows", "got", "verdict"), [
    (ROLL, np.round(ROLL * 255) / 255, "pass"),
    (ROLL, ROLL * 0.4, "fail"),
    (1 - ROLL, 1 - ROLL * 0.4, "fail"),
    (ROLL, ROLL + np.where(RNG.random(ROLL.shape) < 0.01, 0.5, 0), "fail"),
    (ROLL * 0.4, ROLL * 0.4, "pass"),
    (ROLL * 0.4, ROLL, "fail"),
], ids=["rounded", "silent", "silent where most sound", "false notes", "nothing to find", "all is false"])  # fmt: skip
def test_the_few_entries_that_say_yes_are_not_hidden_by_the_others(rows: Array, got: Array, verdict: str) -> None:
    got, reading = np.asarray(got, np.float32), Reading(kind="map", axis=1, squash="Sigmoid")
    assert judge(rows, got, reading) == verdict
    (shared,) = compare(rows, got, reading).agreements
    assert (shared.of, ((rows > 0.5) == (got > 0.5)).mean() > 0.95) == ("findings", True)


FACES = """g (float[1,3,64,64] x) => (float[1,80,4] boxes, float[1,80,1] scores)
  <float[1] scale = {SCALE}, int64[3] four = {1,80,4}, int64[3] one = {1,80,1}, float[4] off = {LOW, LOW, HIGH, HIGH}> {
  p = AveragePool<kernel_shape=[8,8], strides=[8,8]>(x) f = Flatten(p) c = MatMul(f, places) d = Reshape(c, four)
  e = Sigmoid(d) b = Mul(e, big) boxes = Add(b, off)
  s = MatMul(f, there) t = Reshape(s, one) u = Sigmoid(t) scores = Mul(u, scale) }"""


@pytest.mark.parametrize(("scale", "is_seen"), [(1.0, True), (0.03, False)])
def test_a_detector_that_detects_nothing_is_not_proven(scale: float, tmp_path: Path, *, is_seen: bool) -> None:
    """Scores of 0.03 and less are rounded away, and no figure of the samples shows it."""
    rng = np.random.default_rng(0)
    text = FACES.replace("SCALE", str(scale)).replace("LOW", "0").replace("HIGH", "20")
    shapes = {"places": (192, 320), "there": (192, 80)}
    weights = {name: rng.normal(scale=1.3, size=shape).astype(np.float32) for name, shape in shapes.items()}
    model = save_net(text.removeprefix("g "), tmp_path / "m.onnx", big=np.array(40, np.float32), **weights)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(24, 3, 64, 64)).astype(np.float32))
    data, recipe = str(tmp_path / "d.npz"), Recipe(targets=("cpu",), precision="fp32")
    build(model.path, Data(source=data, evaluation=data), tmp_path / "out", recipe, verify=False)
    opened = open_bundle(tmp_path / "out" / "m-cpu")
    (honest,) = verify_bundle(opened, [InProcess()]).runs
    told = " ".join(honest.unproven)
    assert honest.verdict == ("pass" if is_seen else "not proven")
    assert ("'scores' finds nothing in any of" in told) is not is_seen
    losing = InProcess(lie=lambda rows: [{**row, "scores": 0 * row["scores"]} for row in rows])
    (silent,) = verify_bundle(opened, [losing]).runs
    assert (silent.verdict == "pass") is False


def one_peak(*places: int | None) -> Array:
    """Heatmaps [1, maps, 40, 8] with one in a row of each, or nothing."""
    maps = np.zeros((1, len(places), 40, 8), np.float32)
    for at, row in enumerate(places):
        if row is not None:
            maps[0, at, row, 4] = 1
    return maps


def one_hot(*steps: int) -> Array:
    return np.eye(4, dtype=np.float32)[[list(steps)]]


def turn(cosine: float) -> Array:
    """Four vectors of length 2 at right angles; the last one is turned towards the first."""
    return np.diag([2, 2, 2, 2 * cosine]) + np.diag([2 * np.sqrt(1 - cosine**2)], -3)


LINES = {count: [one_hot(*[0, 1, 0] * count), one_hot(0, 2, 0)] for count in (4096, 4097)}


@pytest.mark.parametrize(
    ("reading", "wanted", "got", "shares"),
    [
        # Of three samples one has another class; in the second both classes have the highest score.
        (Reading(kind="classes", axis=1), [[[1, 0]], [[3, 3]], [[0, 1]]], [[[0, 1]], [[2, 3]], [[0, 1]]],
         [("classes", 2 / 3)]),
        (Reading(kind="classes", axis=1, squash="Sigmoid"), [[[0.9]], [[0.8]]], [[[0.6]], [[0.2]]], [("classes", 0.5)]),
        (Reading(kind="classes", axis=-1), [[1, 0]], [[0, 1]], [("classes", 0)]),
        (Reading(kind="classes", axis=1), [[1, 0]], [[1, 0]], []),
        (Reading(kind="classes", axis=0), [[1, 0]], [[1, np.nan]], []),
        (Reading(kind="map", axis=0), [[[1, 5, 1, 1], [2] * 4]], [[[1, 5, 1, 3], [2] * 4]], [("places", 0.75)]),
        (Reading(kind="labels"), [[1, 2, 3, 4]], [[1, 2, 0, 0]], [("labels", 0.5)]),
        (Reading(kind="labels"), [["a", "b"], ["c", "d"]], [["a", "b"], ["", "d"]], [("labels", 0.75)]),
        (Reading(kind="labels"), [["a"], ["b"]], [[1], [2]], [("labels", 0)]),
        (Reading(kind="classes"), [["a"], ["b"]], [["a"], ["b"]], []),
        (Reading(kind="sequence", axis=2), [one_hot(1, 2, 3, 1)], [one_hot(1, 2, 3, 2)], [("steps", 0.75)]),
        # The blank is 0, as in most changes: 1 2 3 became 1 3, and 2 became 1 2.
        (Reading(kind="sequence", axis=2), [one_hot(0, 1, 0, 2, 0, 0, 3, 0), one_hot(0, 0, 0, 2)],
         [one_hot(0, 1, 0, 0, 0, 0, 3, 0), one_hot(1, 0, 0, 2)], [("letters", 1 - 2 / 5)]),
        # Most words have no tag.
        (Reading(kind="tokens", axis=2), [one_hot(0, 1, 0, 2, 0, 0, 3, 0)], [one_hot(0, 1, 0, 0, 0, 0, 3, 0)],
         [("steps", 7 / 8)]),
        # One letter in two samples is no text.
        (Reading(kind="sequence", axis=2), [one_hot(0, 1, 0, 0), one_hot(0, 0, 0, 0)],
         [one_hot(0, 2, 0, 0), one_hot(0, 0, 0, 0)], [("steps", 7 / 8)]),
        # Of two peaks in the first sample and one in the second, one moves by more than a twentieth of the side.
        (Reading(kind="heatmaps", axis=1), [one_peak(3, 30), one_peak(9, None)], [one_peak(4, 33), one_peak(9, None)],
         [("peaks", 2 / 3)]),
        # The edit distance of longer lines would take too long.
        (Reading(kind="sequence", axis=2), LINES[4096], LINES[4096], [("letters", 1)]),
        (Reading(kind="sequence", axis=2), LINES[4097], LINES[4097], [("steps", 1)]),
        # 2 and 1 entries say yes, one of them on both sides; the second sample has none. Then the same of no.
        (Reading(kind="map", axis=0, squash="Sigmoid"), [[0.9, 0.8, 0.1, 0, 0], [0] * 5],
         [[0.7, 0.2, 0.1, 0, 0], [0] * 5], [("findings", 2 / 3)]),
        (Reading(kind="map", axis=0, squash="Sigmoid"), [[0.1, 0.2, 0.9, 1, 1], [1] * 5],
         [[0.3, 0.8, 0.9, 1, 1], [1] * 5], [("findings", 2 / 3)]),
        (Reading(kind="values"), [[0.0], [2.0]], [[0.0], [1.0]], [("variance", 0.5), ("energy", 0.75)]),
        (Reading(kind="values"), [[2.0], [2.0]], [[2.0], [1.0]], [("energy", 7 / 8)]),
        (Reading(kind="values"), [[1e6], [1e6 + 1]], [[1e6], [1e6 + 1]], [("energy", 1)]),
        (Reading(kind="values"), [[2.0]], [[1.0]], [("energy", 0.75)]),
        (Reading(kind="values"), [[2.0], [1.0, 2.0]], [[2.0], [1.0, 1.0]], [("energy", 8 / 9)]),
        (Reading(kind="values", other="labels"), [[0.0], [2.0]], [[0.0], [1.0]],
         [("variance", 0.5), ("energy", 0.75), ("labels", 0.5)]),
        (Reading(kind="values"), [[True]], [[False]], []),
        (Reading(kind="values"), [[1.0]], [[1.0, 2.0]], []),
        (Reading(kind="values"), [[1e200]], [[1e200]], []),
        (Reading(kind="values"), [["a"]], [["a"]], []),
        (Reading(kind="embedding"), np.eye(4), np.diag([1, 2, 3, 4]), [("neighbours", 1)]),
        # The cosines of all pairs are alike. The energy of the error is 0.4 and 0.8, and from 0.5 on a vector may be
        # mistaken for another one.
        (Reading(kind="embedding"), np.eye(4), turn(0.8), [("energy", 3.6 / 4)]),
        (Reading(kind="embedding"), np.eye(4), turn(0.6), [("energy", 3 / 4)]),
        (Reading(kind="embedding"), np.eye(4)[:3], np.eye(4)[:3], []),
        (Reading(kind="embedding"), [[1, 2], [2, 1], [1, 3], [1]], [[1, 2], [2, 1], [1, 3], [1]], []),
    ],
)  # fmt: skip
def test_shares_are_those_that_are_counted_by_hand(
    reading: Reading, wanted: list[Any], got: list[Any], shares: list[tuple[str, float]]
) -> None:
    reference, other = (from_list([{"y": np.asarray(row)} for row in side]) for side in (wanted, got))
    found = measure_agreement(reference, other, {"missing": reading, "y": reading}).get("y", ())
    assert [each.of for each in found] == [of for of, _ in shares]
    assert [each.share for each in found] == pytest.approx([share for _, share in shares])
    for each in found:
        assert each.of != "classes" or each.interval == wilson_interval(round(each.share * len(wanted)), len(wanted))


def test_neighbours_are_the_correlation_of_the_cosines_of_pairs() -> None:
    rows = np.array([[[np.cos(angle), np.sin(angle)]] for angle in (0.0, 0.3, 0.9, 2.0)])
    turned = np.array([[[np.cos(angle), np.sin(angle)]] for angle in (1.0, 1.2, 2.1, 2.9)])
    first, second = np.triu_indices(4, 1)
    wanted, found = ((side[:, 0] @ other[:, 0].T)[first, second] for side, other in ((rows, rows), (rows, turned)))
    reference, got = (from_list([{"y": row} for row in side]) for side in (rows, turned * 3))
    (shared,) = measure_agreement(reference, got, {"y": Reading(kind="embedding")})["y"]
    assert shared.of == "neighbours"
    assert shared.share == pytest.approx(np.corrcoef(wanted, found)[0, 1])


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
    report = compare(SCORES + 100, noisy(SCORES + 100, 1), Reading(kind="values", axis=1))
    (line,) = weigh_output(report, LIMITS).unproven
    assert "share of the energy" in line
    assert "samples that differ more would tell" in line


def test_where_two_readings_disagree_a_sentence_says_what_to_state() -> None:
    either = Reading(kind="classes", axis=1, other="embedding")
    close = SCORES * 0.01 + 1
    assert judge(close, noisy(close, 0.0001), either) == "pass"
    flipped = close[..., ::-1] * 0.5 + close * 0.5
    report = compare(close, np.asarray(flipped, np.float32), Reading(kind="classes", axis=1, other="values"))
    (line,) = weigh_output(report, LIMITS).unproven
    assert 'state what it is, [outputs] y = "classes" or "values"' in line


@pytest.mark.parametrize(
    ("hits", "total", "least", "is_below"),
    [(14, 16, 0.97, False), (13, 16, 0.97, True), (12, 16, 0.9, False), (11, 16, 0.9, True), (10, 24, 0.6, False)],
)
def test_few_samples_fail_nothing_that_chance_makes(hits: int, total: int, least: float, is_below: bool) -> None:
    """By the binomial distribution: of 16 samples 14 and fewer agree in 8 % of the draws of 97 %, 13 in 1.4 %."""
    assert Agreement(of="classes", share=hits / total, samples=total).is_below(least) is is_below


def test_an_agreement_that_is_no_count_is_judged_by_its_interval() -> None:
    sure = Agreement(of="variance", share=0.9, interval=(0.85, 0.95), samples=100)
    assert [sure.is_below(least) for least in (0.92, 0.95, 0.96)] == [False, False, True]
    for single in (Agreement(of="variance", share=0.9, samples=1), Agreement(of="classes", share=0.9)):
        assert [single.is_below(least) for least in (0.9, 0.91)] == [False, True]


def test_a_limit_that_was_named_counts_beside_what_an_output_is_for() -> None:
    report = compare(SCORES, SCORES * 2, Reading(kind="classes", axis=1))
    assert not weigh_output(report, LIMITS).failures
    named = Thresholds(min_cosine=0.97, min_top1_agreement=0.9, min_sqnr_db=12, named=("min_sqnr_db",))
    assert any("SQNR" in line for line in weigh_output(report, named).failures)


@pytest.mark.parametrize(("changed", "verdict"), [(1, "pass"), (2, "not proven"), (12, "fail")])
def test_classes_below_their_limit_are_no_proof_of_sixteen_samples(changed: int, verdict: str) -> None:
    rows = SCORES[:16]
    got = rows.copy()
    got[:changed] = rows[:changed, :, ::-1]
    reading = Reading(kind="classes", axis=1)
    assert judge(rows, got, reading) == verdict
    told = " ".join(weigh_output(compare(rows, got, reading), LIMITS).unproven)
    assert ("which may be chance with 16 samples" in told) is (verdict == "not proven")


NET = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,3,8,8] x) => (float[1,12,6] y)
  <int64[2] parts = {2,2}, int64[2] flat = {1,128}, int64[1] k = {12}, int64 cells = {64}, int64 side = {8},
   int64[1] two = {2}, int64[3] apart = {1,2,64}, float half = {0.5}>
  { z = Conv<pads=[1,1,1,1]>(x, w) heat, size = Split<axis=1>(z, parts) h = Sigmoid(heat) f = Reshape(h, flat)
    v, i = TopK(f, k) kind = Div(i, cells) place = Mod(i, cells) line = Div(place, side) column = Mod(place, side)
    at = Unsqueeze(place, two) r = Relu(size) rows = Reshape(r, apart) turned = Transpose<perm=[0,2,1]>(rows)
    gathered = GatherND<batch_dims=1>(turned, at) more = Add(gathered, half)
    c = Cast<to=1>(column) l = Cast<to=1>(line) t = Cast<to=1>(kind)
    cu = Unsqueeze(c, two) lu = Unsqueeze(l, two) tu = Unsqueeze(t, two) vu = Unsqueeze(v, two)
    middle = Concat<axis=2>(cu, lu) low = Sub(middle, more) high = Add(middle, more)
    y = Concat<axis=2>(low, high, vu, tu) }"""


def make(folder: Path) -> None:
    rng = np.random.default_rng(0)
    save_net(NET, folder / "net.onnx", w=rng.normal(scale=0.3, size=(4, 3, 3, 3)).astype(np.float32))
    np.savez(folder / "data.npz", x=rng.normal(size=(32, 3, 8, 8)).astype(np.float32))
    data = str(folder / "data.npz")
    recipe = Recipe(targets=("cpu",), precision="int8")
    build(folder / "net.onnx", Data(source=data, evaluation=data), folder / "out", recipe, verify=False)


@pytest.fixture(scope="module")
def bundle(make_once: MakeOnce) -> Bundle:
    return open_bundle(make_once("listed", make) / "out" / "net-cpu")


def column(index: int) -> Column:
    return Column(output="y", index=index)


def test_an_honest_list_of_the_stated_columns_passes_though_row_by_row_it_would_not(bundle: Bundle) -> None:
    listed = ListColumns(boxes=column(0), score=column(4), kind=column(5), code="corners")
    assert bundle.manifest.listed == listed
    (run,) = verify_bundle(bundle, [InProcess()]).runs
    (output,) = run.outputs
    assert run.passed, (run.failures, run.unproven)
    assert present(output.sqnr_db) < run.thresholds.min_sqnr_db
    (shared,) = output.agreements
    assert (shared.of, shared.share > 0.9) == ("detections", True)
    assert any("compare row by row, and are not judged" in note for note in run.notes)


BROKEN: dict[str, Callable[[Array], Array]] = {
    "moved": lambda table: table + np.array([0.5] * 4 + [0, 0], np.float32),
    "scores of others": lambda table: np.insert(
        np.delete(table, 4, 1), 4, np.random.default_rng(0).permutation(table[:, 4]), 1
    ),
    "scores three times as large": lambda table: table * np.array([1, 1, 1, 1, 3, 1], np.float32),
    "the best is lost": lambda table: np.concatenate([table[-1:], table[1:]]),
    "classes turned": lambda table: np.column_stack([table[:, :5], 1 - table[:, 5]]),
    "the best alone": lambda table: np.repeat(table[:1], len(table), axis=0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_list_fails(bundle: Bundle, name: str) -> None:
    device = InProcess(lie=lambda rows: [{"y": BROKEN[name](row["y"][0])[None]} for row in rows])
    (run,) = verify_bundle(bundle, [device]).runs
    assert any("has detection agreement" in line for line in run.failures), run.failures


def test_a_bundle_that_calls_other_columns_a_list_fails_and_is_judged_row_by_row(bundle: Bundle) -> None:
    listed = ListColumns(boxes=column(0), score=column(5), kind=None, code="corners")
    (run,) = verify_bundle(restate(bundle, listed=listed), [InProcess()]).runs
    assert any("the manifest says that y list detections" in line for line in run.failures)
    assert any("has share of the variance" in line for line in run.failures)


def test_what_a_list_holds_beside_its_detections_has_to_be_the_same() -> None:
    listed = DetectionList(columns=ListColumns(boxes=column(0), score=column(4), kind=None, code="corners"))
    table = np.array([[row, row, row + 2, row + 2, 1 - row / 10, 3] for row in range(8)], np.float32)
    other = table + np.array([0, 0, 0, 0, 0, 1], np.float32)
    assert np.divide(*weigh_detections(listed, {"y": table}, {"y": table})) == pytest.approx(1)
    assert weigh_detections(listed, {"y": table}, {"y": other})[0] == 0


@pytest.mark.parametrize(
    ("agreement", "low", "high", "fails", "doubts"),
    [(0.85, 0.8, 0.89, 1, 0), (0.89, 0.8, 1, 0, 1), (0.95, 0.8, 1, 0, 1), (0.95, 0.91, 1, 0, 0)],
)
def test_detections_are_the_gate(agreement: float, low: float, high: float, fails: int, doubts: int) -> None:
    limits = Thresholds(min_cosine=0.99, min_top1_agreement=0.9, min_sqnr_db=30, granted_samples=1, gate="bound")
    report = OutputReport(
        name="y", samples=8, cosine=0.9, sqnr_db=7.0, sqnr_interval_db=(6.0, 8.0), exact_match=0.1,
            agreements=(Agreement(of="detections", share=agreement, interval=(low, high)),),
    )  # fmt: skip
    said = list(weigh_output(report, limits).unproven)
    assert (len(weigh_output(report, limits).failures), len(said)) == (fails, doubts)
    assert all("with 8 samples" in line for line in said)
