"""Lists of detections are judged by what they name, not row by row; a broken list fails all the same."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from verify_devices import InProcess, Lie, restate

from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.jobs.build import build
from edgekit.model.outputs import Column, ListColumns
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.accuracy.head_search import DetectionList
from edgekit.recipe import Data, Recipe
from edgekit.target import Thresholds
from edgekit.verify.metrics.agreement import Agreement
from edgekit.verify.metrics.compare import weigh_detections
from edgekit.verify.metrics.outputs import OutputReport, doubt_output, judge_output
from edgekit.verify.run import verify_bundle

ROWS = 12
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
    model = parser.parse_model(NET)
    weight = rng.normal(scale=0.3, size=(4, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, str(folder / "net.onnx"))
    np.savez(folder / "data.npz", x=rng.normal(size=(32, 3, 8, 8)).astype(np.float32))
    data = str(folder / "data.npz")
    recipe = Recipe(targets=("cpu",), precision="int8")
    build(folder / "net.onnx", Data(source=data, evaluation=data), folder / "out", recipe, verify=False)


@pytest.fixture(scope="module")
def bundle(make_once: Callable[[str, Callable[[Path], object]], Path]) -> Bundle:
    return open_bundle(make_once("listed", make) / "out" / "net-cpu")


def change(by: Callable[[Array], None]) -> Lie:
    def lie(rows: list[Tensors]) -> list[Tensors]:
        tables = [row["y"].copy() for row in rows]
        for table in tables:
            by(table[0])
        return [{"y": table} for table in tables]

    return lie


def column(index: int) -> Column:
    return Column(output="y", index=index)


def test_an_honest_list_of_the_stated_columns_passes_though_row_by_row_it_would_not(bundle: Bundle) -> None:
    listed = ListColumns(boxes=column(0), score=column(4), kind=column(5), code="corners")
    assert bundle.manifest.listed == listed
    (run,) = verify_bundle(bundle, [InProcess()]).runs
    (output,) = run.outputs
    assert run.passed, (run.failures, run.unproven)
    assert output.sqnr_db is not None
    assert output.sqnr_db < run.thresholds.min_sqnr_db
    (shared,) = output.agreements
    assert (shared.of, shared.share > 0.9) == ("detections", True)
    assert any("compare row by row, and are not judged" in note for note in run.notes)


def move(table: Array) -> None:
    table[:, :4] += 0.5


def shuffle(table: Array) -> None:
    table[:, 4] = np.random.default_rng(0).permutation(table[:, 4])


def drop_best(table: Array) -> None:
    table[0] = table[-1]


def stretch(table: Array) -> None:
    table[:, 4] *= 3


def turn_classes(table: Array) -> None:
    table[:, 5] = 1 - table[:, 5]


def repeat_best(table: Array) -> None:
    table[1:] = table[0]


@pytest.mark.parametrize("broken", [move, shuffle, stretch, drop_best, turn_classes, repeat_best])
def test_a_broken_list_fails(bundle: Bundle, broken: Callable[[Array], None]) -> None:
    (run,) = verify_bundle(bundle, [InProcess(lie=change(broken))]).runs
    assert any("has detection agreement" in line for line in run.failures), run.failures


def test_a_bundle_that_calls_other_columns_a_list_fails_and_is_judged_row_by_row(bundle: Bundle) -> None:
    listed = ListColumns(boxes=column(0), score=column(5), kind=None, code="corners")
    stated = restate(bundle, listed=listed)
    (run,) = verify_bundle(stated, [InProcess()]).runs
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
def test_agreement_of_detections_is_the_gate(
    agreement: float, low: float, high: float, fails: int, doubts: int
) -> None:
    limits = Thresholds(min_cosine=0.99, min_top1_agreement=0.9, min_sqnr_db=30, granted_samples=1, gate="bound")
    report = OutputReport(
        name="y", samples=8, cosine=0.9, sqnr_db=7.0, sqnr_interval_db=(6.0, 8.0), exact_match=0.1,
            agreements=(Agreement(of="detections", share=agreement, interval=(low, high)),),
    )  # fmt: skip
    assert (len(judge_output(report, limits)), len(doubt_output(report, limits))) == (fails, doubts)
