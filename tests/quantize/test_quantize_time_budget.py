"""A budget ends the planning: the best of what was tried is taken, and what was not is named."""

import math
import time
from pathlib import Path

import pytest
from quantize_models import random_samples

from edgekit.cli.main import run_command
from edgekit.model.model import Model
from edgekit.progress import Budget
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.target import load_target


class _Clock:
    """Time that moves on by one with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def measured(net: Model, tmp_path: Path) -> Calibration:
    return calibrate_model(net, random_samples(net, count=24), work=tmp_path / "measured")


def _plan(net: Model, measured: Calibration, budget: Budget, method: str = "best") -> QuantPlan:
    return plan_quantization(net, measured, load_target("nnapi"), "int8", method=method, memo=Memo(budget=budget))


def test_without_time_nothing_is_tried(net: Model, measured: Calibration) -> None:
    budget = Budget(end=time.monotonic())
    plan = _plan(net, measured, budget)
    assert (plan.method, plan.rounding, plan.judged) == ("minmax", "bias", ())
    assert budget.left_out == ["range methods and roundings"]


def test_with_all_the_time_nothing_is_left_out(net: Model, measured: Calibration) -> None:
    budget = Budget()
    assert _plan(net, measured, budget) == _plan(net, measured, Budget(end=math.inf))
    assert budget.left_out == []


def test_each_further_look_at_the_clock_brings_more_or_the_same(
    net: Model, measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, left = [], []
    for end in range(1, 14, 2):
        with monkeypatch.context() as patched:
            patched.setattr("edgekit.progress.time", _Clock())
            budget = Budget(end=end + 0.5)
            plan = _plan(net, measured, budget)
        tried.append(len(plan.judged))
        left.append(len(budget.left_out))
        best = max((candidate.sqnr_db for candidate in plan.judged if not candidate.relieved), default=0.0)
        assert not plan.judged or plan.judged[0].sqnr_db >= best
    assert tried == sorted(tried)
    assert left[0] > 1
    assert tried[-1] > tried[0] > 0


def test_what_was_cut_short_is_not_remembered(
    net: Model, measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo = Memo(budget=Budget(end=2.5))
    with monkeypatch.context() as patched:
        patched.setattr("edgekit.progress.time", _Clock())
        plan_quantization(net, measured, load_target("nnapi"), "int8", memo=memo)
    assert memo.budget.left_out
    assert memo.judged == {}


def test_the_time_that_is_left_is_told() -> None:
    said: list[str] = []
    began = time.monotonic() - 10.0
    Budget(progress=said.append).tell("rank", 20, 60, began)
    Budget(progress=said.append, end=time.monotonic() + 5.4).tell("rank", 20, 60, began)
    Budget(progress=said.append).tell("rank", 0, 60, began)
    assert said == ["rank: 20 of 60, 20 s left", "rank: 20 of 60, 5 s left", "rank: 0 of 60"]


@pytest.mark.parametrize("text", ["soon", "-5s", "5d", "", "1e3", "nan"])
def test_what_is_no_time_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["quantize", "m.onnx", "--data", "d", "--target", "nnapi", "--time-budget", text]) == 2
    assert "90s, 5m or 1h" in capsys.readouterr().err


def test_what_is_kept_back_for_the_end_is_no_time_of_the_search_and_what_it_leaves_out_is_told() -> None:
    whole = Budget(end=time.monotonic() + 60)
    search = whole.keep_back(90)
    assert whole.allows("a plan")
    assert not search.allows("another plan")
    assert whole.left_out == ["another plan"]
    assert Budget().keep_back(90).allows("a plan")
