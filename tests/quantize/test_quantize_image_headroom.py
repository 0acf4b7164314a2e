"""Nets that make images: white that no sample showed, and losses that only smooth images show."""

from pathlib import Path

import numpy as np
import pytest
from collapsing_models import SUBPIXEL, make_collapsing
from quantize_models import make_model, make_samples, make_search

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.quantize import Calibration, calibrate_model, quantize_model
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.calibration.image_headroom import add_image_headroom
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.plan_search import Goal, search_plan
from edgekit.target import load_target


def smooth_images(count: int, brightest: float) -> list[Array]:
    rng = np.random.default_rng(5)
    ramps = np.linspace(0, 1, 12, dtype=np.float32)
    images = (rng.uniform(0, 1) * ramps[:, None] + rng.uniform(0, 1) * ramps for _ in range(count))
    return [(image / image.max() * brightest).reshape(1, 1, 12, 12).astype(np.float32) for image in images]


def as_samples(images: list[Array]) -> Samples:
    return make_samples([{"x": image} for image in images])


@pytest.fixture(scope="module")
def dim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Samples, Calibration]:
    tmp_path = tmp_path_factory.mktemp("dim")
    model, samples = make_collapsing(SUBPIXEL, tmp_path), as_samples(smooth_images(24, 0.85))
    return model, samples, calibrate_model(model, samples, work=tmp_path / "work")


def test_ranges_reach_as_far_as_white_would(dim: tuple[Model, Samples, Calibration]) -> None:
    model, _, calibration = dim
    before, after = (each.ranges for each in (calibration, add_image_headroom(read_float_graph(model), calibration)))
    assert before["minmax"]["x"].high == pytest.approx(0.85, abs=0.01)
    assert {method: spans["x"].high for method, spans in after.items()} == dict.fromkeys(after, 1.0)
    assert after["minmax"]["n"].high == 1.0
    assert after["minmax"]["r"].high == pytest.approx(before["minmax"]["r"].high / 0.85, rel=0.01)


@pytest.mark.parametrize(("brightest", "shift"), [(0.5, 0.0), (1.0, 0.0), (0.9, -0.3)])
def test_values_that_are_no_pixels_or_reach_white_keep_their_ranges(
    tmp_path: Path, brightest: float, shift: float
) -> None:
    model = make_collapsing(SUBPIXEL, tmp_path)
    samples = as_samples([image + np.float32(shift) for image in smooth_images(24, brightest)])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    found = add_image_headroom(read_float_graph(model), calibration).ranges["minmax"]
    assert found["r"] == calibration.ranges["minmax"]["r"]


def test_a_classifier_of_images_keeps_its_ranges(tmp_path: Path) -> None:
    text = """g (float[1,1,12,12] x) => (float[1,5] y) {
      c = Conv(x, w1, b1) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p) y = Gemm<transB=1>(f, w2) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 1, 3, 3), "b1": (8,), "w2": (5, 8)})
    calibration = calibrate_model(model, as_samples(smooth_images(12, 0.85)), work=tmp_path / "work")
    assert add_image_headroom(read_float_graph(model), calibration) == calibration


@pytest.mark.parametrize("name", ["qnn", "nnapi"])
def test_quantizing_spares_smooth_images_but_leaves_most_of_the_work_in_integers(
    dim: tuple[Model, Samples, Calibration], tmp_path: Path, name: str
) -> None:
    model, samples, calibration = dim
    reference, goal = FloatReference(model, samples), Goal(max_drop=0.0005, is_given=True)
    search = make_search((model, calibration), reference, load_target(name), tmp_path)
    plan, searched = search_plan(search, goal)
    assert searched is not None
    assert not searched.trials[0].prediction.meets(goal.max_drop)
    assert searched.chosen.step == "relieve 3"
    assert searched.chosen.integer_macs > 0.75
    made = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model
    white = smooth_images(1, 1.0)[0]
    one, two = (CpuSession(path, SessionSettings()).run({"x": white})["y"] for path in (model.path, made.path))
    assert np.abs(one - two).max() < 0.05
