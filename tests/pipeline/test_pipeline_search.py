"""The search for a plan that meets a goal: stops early, goes on from its state, and says no."""

import json
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from demo_paths import CALIBRATION, MODEL
from tiny_models import write_small_net

from edgekit.errors import EdgekitError, UsageError
from edgekit.jobs.quantize import QuantizeOptions, plan_for, quantize_for
from edgekit.quantize import QuantPlan
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.mixed_precision.plan_search import Goal, Trial, choose_trial
from edgekit.recipe import Data, Recipe
from edgekit.report.html import render_page
from edgekit.report.summary import QuantizeReport

pytestmark = pytest.mark.slow

DATA = Data(source=str(CALIBRATION))
RECIPE = Recipe(targets=("nnapi",), samples=32)
GOAL = Goal(max_drop=0.005, is_given=True)
SEARCHED = msgspec.structs.replace(RECIPE, max_drop=20.0)


@pytest.fixture(scope="module")
def plan() -> QuantPlan:
    return plan_for(MODEL, DATA, RECIPE, QuantizeOptions(method="minmax"))


def trial(plan: QuantPlan, step: str, drop: float, taken: float) -> Trial:
    prediction = Prediction(
        samples=9, sqnr_db=20, top1_agreement=0.9, drop_estimate=drop, drop_interval=(0, 1), source="labels"
    )
    return Trial(step=step, plan=plan, prediction=prediction, taken_macs=taken)


# Each trial with its drop, the work on the target, and the work in integers.
NEAR, FAR, FLOAT = ("a", 0.008, 1.0, 1.0), ("b", 0.02, 1.0, 1.0), ("c", 0.001, 1.0, 0.1)
CHOICES = {
    "work on the target counts more than a smaller drop": (
        [("a", 0.1, 1.0, 1.0), ("b", 0.001, 0.6, 1.0), ("c", 0.004, 0.9, 1.0)], True, "c",
    ),
    "none meets the goal": ([("a", 0.1, 1.0, 1.0), ("b", 0.05, 0.6, 1.0)], False, "b"),
    "one that stays float gains less than the sampling error": ([NEAR, FLOAT], True, "a"),
    "one that stays float gains more": ([FAR, FLOAT], True, "c"),
    "none meets the goal, and one in integers is hardly worse": (
        [("a", 0.014, 1.0, 1.0), ("c", 0.01, 1.0, 0.1)], False, "a",
    ),
    "none meets the goal, and one in integers is worse": (
        [("b", 0.016, 1.0, 1.0), ("c", 0.01, 1.0, 0.1)], False, "c",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_a_trial_is_chosen_by_its_drop_and_the_work_that_stays_on_the_target(name: str, plan: QuantPlan) -> None:
    given, met, step = CHOICES[name]
    trials = [msgspec.structs.replace(trial(plan, *row[:3]), integer_macs=row[3]) for row in given]
    found = choose_trial(trials, GOAL)
    assert (found.met, found.chosen.step) == (met, step)
    told = "within the sampling error; 'c' leaves 10% of the work in integers"
    assert found.note == (told if given == [NEAR, FLOAT] else "")


@pytest.mark.parametrize(("drop", "step"), [(0.0019, "a"), (0.0021, "c")])
def test_where_nothing_may_be_lost_two_tenths_of_a_point_are_worth_the_integers(
    drop: float, step: str, plan: QuantPlan
) -> None:
    trials = [trial(plan, "a", drop, 1.0), msgspec.structs.replace(trial(plan, "c", 0.0, 1.0), integer_macs=0.1)]
    assert choose_trial(trials, Goal(max_drop=0.0, is_given=True)).chosen.step == step


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, QuantizeReport]:
    """A folder with a net, its samples, the model that a search found, and the state of that search."""
    folder = tmp_path_factory.mktemp("searched")
    write_small_net(folder / "small.onnx", folder / "small.npz")
    return folder, _search(folder)


def _search(folder: Path, recipe: Recipe | None = None, said: list[str] | None = None) -> QuantizeReport:
    data, options = Data(source=str(folder / "small.npz")), QuantizeOptions(state=folder / "state.json")
    told = [] if said is None else said
    return quantize_for(folder / "small.onnx", data, folder / "q.onnx", recipe or SEARCHED, options, told.append)


def test_a_search_stops_at_the_first_plan_that_is_good_enough(searched: tuple[Path, QuantizeReport]) -> None:
    report = searched[1]
    assert report.met
    headroom = "all, as the target takes it, ranges 1.4 times as wide"
    assert {entry.step for entry in report.trials} == {"all", "minmax", "all, as the target takes it", headroom}
    assert report.predicted.drop_estimate is not None
    assert report.predicted.drop_estimate <= 0.2


def test_a_search_goes_on_from_its_own_state(searched: tuple[Path, QuantizeReport], tmp_path: Path) -> None:
    folder = shutil.copytree(searched[0], tmp_path / "again")
    steps: list[str] = []
    (folder / "q.onnx").unlink()
    _search(folder, said=steps)
    assert "nnapi: try 1 of 7 (all), known" in steps
    assert (folder / "q.onnx").read_bytes() == (searched[0] / "q.onnx").read_bytes()
    with pytest.raises(UsageError, match=r"state\.json' is of a search for another target"):
        _search(folder, msgspec.structs.replace(SEARCHED, targets=("xnnpack",)))
    (folder / "state.json").write_text("{}")
    with pytest.raises(UsageError, match=r"state\.json' is no state of a search"):
        _search(folder)


@pytest.mark.parametrize("how", ["drop", "version", "range", "pipe"])
def test_a_changed_state_is_refused(searched: tuple[Path, QuantizeReport], tmp_path: Path, how: str) -> None:
    path = shutil.copytree(searched[0], tmp_path / "changed") / "state.json"
    stored = json.loads(path.read_text())
    if how == "drop":
        stored["done"][0]["prediction"]["drop_estimate"] = 0.0
    elif how == "version":
        stored["key"]["edgekit"] = "0.0.1"
    else:
        stored["done"][0]["plan"]["ranges"]["input"] = {"low": 5, "high": -5}
    path.write_text(json.dumps(stored))
    if how == "pipe":
        path.unlink()
        os.mkfifo(path)
    message = {"version": "another edgekit", "pipe": "it is a device or a pipe"}.get(how, "was changed")
    steps: list[str] = []
    with pytest.raises(EdgekitError, match=message):
        _search(path.parent, said=steps)
    assert not any("calibrate" in step for step in steps)


def test_a_state_of_other_labels_is_refused(small: tuple[Path, Data], tmp_path: Path) -> None:
    model, data = small
    labels = tmp_path / "labels.txt"
    recipe, options = Recipe(targets=("nnapi",), max_drop=50.0), QuantizeOptions(state=tmp_path / "state.json")
    labelled = msgspec.structs.replace(data, labels=labels)
    with np.load(data.source) as archive:
        count = len(archive[archive.files[0]])
    labels.write_text("0\n" * count)
    quantize_for(model, labelled, tmp_path / "q.onnx", recipe, options)
    labels.write_text("1\n" * count)
    with pytest.raises(UsageError, match="another labels"):
        quantize_for(model, labelled, tmp_path / "q.onnx", recipe, options)


def test_an_applied_plan_gives_the_same_bytes(small: tuple[Path, Data], tmp_path: Path) -> None:
    planned = plan_for(*small, RECIPE)
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(planned))
    quantize_for(*small, tmp_path / "one.onnx", RECIPE)
    quantize_for(*small, tmp_path / "two.onnx", RECIPE, QuantizeOptions(plan=tmp_path / "plan.json"))
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    assert planned.rounding != "nearest" or planned.method != "minmax"


def test_a_plan_of_other_samples_or_another_target_is_refused(plan: QuantPlan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    with pytest.raises(UsageError, match="made with other samples"):
        fewer = msgspec.structs.replace(RECIPE, samples=16)
        quantize_for(MODEL, DATA, tmp_path / "q.onnx", fewer, QuantizeOptions(plan=tmp_path / "plan.json"))
    with pytest.raises(UsageError, match="the plan is for target 'nnapi'"):
        other = msgspec.structs.replace(RECIPE, targets=("xnnpack",))
        quantize_for(MODEL, DATA, tmp_path / "q.onnx", other, QuantizeOptions(plan=tmp_path / "plan.json"))
    (tmp_path / "plan.json").write_text('{"model_sha256": 3}')
    with pytest.raises(UsageError, match=r"plan\.json' is no plan"):
        quantize_for(MODEL, DATA, tmp_path / "q.onnx", RECIPE, QuantizeOptions(plan=tmp_path / "plan.json"))
    assert not (tmp_path / "q.onnx").exists()


def test_labels_give_the_true_drop(tmp_path: Path) -> None:
    with np.load(CALIBRATION) as archive:
        count = len(archive[archive.files[0]])
    (tmp_path / "labels.txt").write_text("0\n" * count)
    data = Data(source=str(CALIBRATION), labels=tmp_path / "labels.txt")
    recipe = Recipe(targets=("nnapi",))
    report = quantize_for(MODEL, data, tmp_path / "q.onnx", recipe, QuantizeOptions(method="minmax"))
    assert report.predicted.source == "labels"
    with pytest.raises(UsageError, match="--labels with --samples"):
        quantize_for(MODEL, data, tmp_path / "q.onnx", RECIPE)


def test_a_page_shows_each_layer_and_which_one_hurts(tmp_path: Path) -> None:
    report = quantize_for(MODEL, DATA, tmp_path / "q.onnx", RECIPE, QuantizeOptions(method="minmax", layers=True))
    assert len(report.layers) > 20
    assert all(layer.sqnr_db is not None and layer.bits == 8 for layer in report.layers)
    assert not any(layer.clips for layer in report.layers)
    page = render_page(report)
    bars = page.index('<div class="bars"')
    assert page.count("<i class=", bars, page.index("</div>", bars)) == len(report.layers)
    worst = min(report.layers, key=lambda layer: layer.sqnr_db or 0)
    assert page.index("<table", bars) < page.index(f"<code>{worst.tensor}</code>")
    hostile = msgspec.structs.replace(report, layers=(msgspec.structs.replace(worst, tensor="<script>alert(1)"),))
    assert "<script>alert" not in render_page(hostile)
