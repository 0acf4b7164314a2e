"""The target openvino: which group it is of, its options, and the demo's model built and verified on the plug-in."""

from pathlib import Path

import numpy as np
import pytest
from demo_paths import CALIBRATION, MODEL
from devices_models import require_device

from edgekit.devices.local.provider import OPENVINO
from edgekit.jobs.build import build
from edgekit.recipe import Data, PrecisionChoice, Recipe, load_targets
from edgekit.target import find_group, load_target, target_names


@pytest.fixture
def openvino() -> None:
    require_device("openvino", "openvino")


def test_the_targets_of_pcs_are_a_group_and_no_part_of_all() -> None:
    assert "openvino" in find_group("pc")
    assert {*find_group("all"), *find_group("pc")} == set(target_names())
    assert "openvino" not in {target.name for target in load_targets(Recipe())}
    assert find_group("openvino") == ()


def test_the_precision_of_float_nodes_reaches_the_provider() -> None:
    options = load_target("openvino", {"precision_hint": "bf16"}).session.provider_options
    assert options == {"load_config": '{"CPU":{"INFERENCE_PRECISION_HINT":"bf16"}}'}


@pytest.mark.slow
@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_the_demo_passes_on_the_plug_in(tmp_path: Path, precision: PrecisionChoice) -> None:
    with np.load(CALIBRATION) as samples:
        np.savez(tmp_path / "few.npz", **{name: samples[name][:16] for name in samples})
    data = Data(source=str(CALIBRATION), evaluation=str(tmp_path / "few.npz"))
    recipe = Recipe(targets=("openvino",), precision=precision, samples=24)
    (summary,) = build(MODEL, data, tmp_path / "out", recipe).bundles
    assert summary.verify is not None
    run = next(run for run in summary.verify.runs if run.device == "openvino")
    assert (run.passed, run.evidence.value, run.provider) == (True, "same-ep", OPENVINO)
    assert all(provider == OPENVINO for provider in run.provider_nodes)
