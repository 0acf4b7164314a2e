"""Outputs whose shape depends on the data: a detector with its NMS inside, from the golden file to the verdict."""

from pathlib import Path

import numpy as np
import pytest
from bundle_models import make_detector_bundle, make_scenes, save_detector
from devices_models import require_device
from fixture_types import present
from verify_devices import InProcess, Lie

from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.data.npz import read_rows
from edgekit.model.tensors import Tensors
from edgekit.package.variant import make_parts
from edgekit.prepare.clean import prepare_model
from edgekit.quantize.calibration.calibrate import calibrate_model
from edgekit.report.html import render_page
from edgekit.verify.run import verify_bundle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_detector_bundle(tmp_path_factory.mktemp("detector"))


def test_the_bundle_opens_and_tests_what_has_a_fixed_shape(bundle: Bundle) -> None:
    opened = open_bundle(bundle.folder)
    shapes = {tensor.name: tensor.shape for tensor in opened.manifest.outputs}
    assert shapes == {"found": (None, 4), "kept": (None, 3), "best": (1, 2)}
    assert set(opened.manifest.golden.tolerance) == {"best"}
    assert [row.keys() for row in read_rows(bundle.folder / "golden" / "expected.npz")] == [{"best"}] * 3
    assert "[depends on the data, 4]" in (bundle.folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "target"),
    [("host", "nnapi"), ("host:native", "nnapi"), ("emulated", "coreml"), ("android:x86_64", "xnnpack")],
)
def test_devices_give_what_the_data_asks_for(tmp_path: Path, name: str, target: str) -> None:
    device = require_device(name, target)
    (run,) = verify_bundle(make_detector_bundle(tmp_path, target), [device], layers=True).runs
    outputs = {output.name: output for output in run.outputs}
    assert run.failure is None
    figures = {name: (output.samples, output.shape_agreement) for name, output in outputs.items()}
    assert figures == {"found": (6, 1.0), "kept": (6, 1.0), "best": (6, None)}
    assert outputs["kept"].exact_match == 1.0
    assert (outputs["found"].sqnr_db or 0.0) > 100.0
    assert not [line for line in run.failures if "output" in line]
    assert present(run.located).layer is None


def lose_in(samples: set[int]) -> Lie:
    """Loses a detection in these samples, which run in the order 0, 4, 2, 1, 5, 3."""
    return lambda rows: [
        {name: value[:-1] if name != "best" and index in samples else value for name, value in row.items()}
        for index, row in zip((0, 4, 2, 1, 5, 3), rows, strict=False)
    ]


def test_a_detection_too_few_costs_agreement_in_shape(bundle: Bundle) -> None:
    (run,) = verify_bundle(bundle, [InProcess(lie=lose_in({4}))]).runs
    (found, _, best) = run.outputs
    assert (found.samples, best.shape_agreement) == (5, None)
    assert found.shape_agreement == pytest.approx(5 / 6)
    assert found.sqnr_db == 200.0
    assert run.passed == (run.thresholds.min_top1_agreement - run.thresholds.granted_samples / 6 <= 5 / 6)
    (run,) = verify_bundle(bundle, [InProcess(lie=lose_in({0, 2, 3}))]).runs
    assert "output 'found' has shape agreement 0.5, below 0.73" in " ".join(run.failures)
    assert "0.5" in render_page(verify_bundle(bundle, [InProcess(lie=lose_in({0, 2, 3}))]))


def test_the_worst_sample_is_counted_over_all_and_by_its_place_in_the_data(bundle: Bundle) -> None:
    """The fifth run is that of the sixth sample."""

    def blur(rows: list[Tensors]) -> list[Tensors]:
        lost = lose_in({2})(rows)
        return [*lost[:4], {**lost[4], "found": lost[4]["found"] + np.float32(0.1)}, lost[5]]

    (run,) = verify_bundle(bundle, [InProcess(lie=blur)]).runs
    assert run.outputs[0].worst_sample == 5


def test_a_package_tests_the_outputs_of_fixed_shape(bundle: Bundle, tmp_path: Path) -> None:
    variant = make_parts([bundle], (), tmp_path, platform="android")[0].variant
    assert [spec.name for spec in variant.outputs] == ["best"]


def test_tensors_that_may_be_empty_are_not_calibrated(tmp_path: Path) -> None:
    prepared = prepare_model(save_detector(tmp_path / "detector.onnx"), tmp_path / "prepared.onnx", {})
    calibration = calibrate_model(prepared, make_scenes(), work=tmp_path / "calibration")
    assert "boxes" in calibration.ranges["minmax"]
    assert "found" not in calibration.ranges["minmax"]
