"""Bundles for ONNX Runtime's own kernels, on this x64 and on an emulated one without VNNI."""

from pathlib import Path

import numpy as np
import pytest
from demo_paths import CALIBRATION, MODEL

from edgekit.bundle.folder import open_bundle
from edgekit.devices.find import find_device
from edgekit.devices.register import DeviceChoice
from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe
from edgekit.target import load_target
from edgekit.verify.on_devices import verify_on

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def haswell() -> None:
    missing = find_device("host:haswell", load_target("cpu")).find_missing()
    if missing is not None:
        pytest.skip(f"{missing.reason}: {missing.command}")


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Calibration as in the demo, and few samples to judge by: wrong sums show in them, and each takes long there."""
    with np.load(CALIBRATION) as samples:
        np.savez(tmp_path / "few.npz", **{name: samples[name][:8] for name in samples})
    return Data(source=str(CALIBRATION), evaluation=str(tmp_path / "few.npz"))


def test_a_bundle_for_any_x64_passes_without_vnni(data: Data, tmp_path: Path) -> None:
    recipe = Recipe(targets=("cpu",), settings={"arch": "x64"}, samples=24)
    (summary,) = build(MODEL, data, tmp_path / "out", recipe).bundles
    assert summary.verify is not None
    assert [(run.device, run.passed, run.evidence.value) for run in summary.verify.runs] == [
        ("host", True, "same-ep"),
        ("host:haswell", True, "same-ep"),
    ]


def test_a_bundle_for_vnni_fails_without_it_and_is_told_why(data: Data, tmp_path: Path) -> None:
    recipe = Recipe(targets=("cpu",), settings={"arch": "x64-vnni"}, samples=24)
    build(MODEL, data, tmp_path / "out", recipe, verify=False)
    report = verify_on(open_bundle(tmp_path / "out" / f"{MODEL.stem}-cpu"), DeviceChoice(names=("host:haswell",)))
    assert not report.passed
    (run,) = report.runs
    assert any("the emulated CPU has no VNNI" in line for line in (*run.failures, *run.notes))
