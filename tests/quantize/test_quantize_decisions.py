"""Range methods of maps: what their outputs decide comes before the power of their errors."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.model import Model
from edgekit.model.outputs import StatedOutput
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.mixed_precision.candidates import prefer_method
from edgekit.quantize.mixed_precision.score import Closeness, find_behind
from edgekit.target import load_target


@pytest.mark.parametrize(
    ("minmax", "mse", "present", "best"),
    [
        ((30.0, 0.04), (10.0, 0.01), None, "mse"),
        ((30.0, 0.04), (10.0, 0.01), "minmax", "mse"),
        ((30.0, 0.0105), (30.2, 0.01), None, "minmax"),  # about as few, about as near: a tie is minmax's
        ((30.0, 0.0105), (31.0, 0.01), None, "mse"),
        ((30.0, 0.0), (20.0, 0.0001), "mse", "minmax"),
        ((20.0, 0.0), (20.2, 0.0), "mse", "mse"),
    ],
)
def test_methods_that_change_fewer_decisions_come_first(
    minmax: tuple[float, float], mse: tuple[float, float], present: str | None, best: str
) -> None:
    judged = {
        "minmax": Closeness(ratio_db=minmax[0], changed=minmax[1]),
        "mse": Closeness(ratio_db=mse[0], changed=mse[1]),
    }
    assert prefer_method(judged, present) == best


def test_what_is_worse_but_changes_fewer_decisions_is_judged_to_the_end() -> None:
    judged = {
        "minmax": Closeness(ratio_db=30.0, changed=0.04),
        "mse": Closeness(ratio_db=28.0, changed=0.04),
        "percentile-99.9": Closeness(ratio_db=10.0, changed=0.01),
    }
    assert find_behind(judged) == {"mse": 2.0}
    undecided = {"minmax": Closeness(ratio_db=30.0), "mse": Closeness(ratio_db=28.0)}
    assert find_behind(undecided) == {"mse": 2.0}


@pytest.fixture
def rejected(tmp_path: Path) -> tuple[Model, Calibration]:
    """Logits of places with small margins; a few places are sure that they are not of one class."""
    head = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,5,16,16] x) => (float[1,5,16,16] y)'
    eye = np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1)
    model = make_model(head + " { l = Conv(x, w) y = Identity(l) }", tmp_path / "m.onnx", constants={"w": eye})
    rng = np.random.default_rng(5)
    rows = rng.normal(0, 1, (32, 1, 5, 16, 16)).astype(np.float32)
    rows[:, 0, 2:] -= 4
    rows[::2, 0, 4, 0, 0] = -120
    outputs = {"y": StatedOutput(kind="map", axis=1)}
    samples = make_samples([{"x": row} for row in rows])
    return model, calibrate_model(model, samples, work=tmp_path / "work", outputs=outputs)


def test_a_method_that_keeps_decisions_wins_over_one_that_keeps_power(
    rejected: tuple[Model, Calibration], tmp_path: Path
) -> None:
    model, calibration = rejected
    target = load_target("cpu")
    plan = plan_quantization(model, calibration, target, "int8", relieve=False)
    by_power = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    other = plan_quantization(model, by_power, target, "int8", relieve=False)
    assert (plan.method.split("-")[0], other.method) == ("percentile", "mse")
    assert {each.method for each in plan.judged} == {plan.method}

    def changed(chosen: QuantPlan) -> float:
        path = quantize_model(model, chosen, calibration, tmp_path / "q.onnx").model.path
        one, two = (
            np.stack([CpuSession(each, SessionSettings()).run(sample)["y"] for sample in scenes]).argmax(axis=2)
            for each in (model.path, path)
        )
        return float((one != two).mean())

    scenes = [{"x": np.random.default_rng(9).normal(0, 1, (1, 5, 16, 16)).astype(np.float32)}]
    assert changed(plan) < changed(other) / 2


def test_what_is_behind_in_every_sample_alike_is_judged_no_further_and_what_varies_is() -> None:
    best = Closeness(ratio_db=30.0, noise=(1.0e-3, 1.1e-3, 0.9e-3, 1.0e-3))
    steady = Closeness(ratio_db=29.5, noise=(1.12e-3, 1.23e-3, 1.01e-3, 1.12e-3))
    varying = Closeness(ratio_db=29.5, noise=(1.4e-3, 0.9e-3, 1.3e-3, 0.9e-3))
    nearly = Closeness(ratio_db=29.8, noise=(1.05e-3, 1.15e-3, 0.95e-3, 1.05e-3))
    judged = {"best": best, "steady": steady, "varying": varying, "nearly": nearly}
    assert find_behind(judged) == {"steady": 0.5}
