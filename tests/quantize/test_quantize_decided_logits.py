"""Ranges of logits and scores that decide follow from what their decisions lose, whatever a method cuts elsewhere."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.model import Model
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array
from edgekit.quantize import Calibration, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.objective import find_enlarged, fit_ranges
from edgekit.target import load_target

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,5,16,16] x)'
RAW = HEAD + " => (float[1,5,16,16] y) { l = Conv(x, w) y = Identity(l) }"
TAILS = {
    "raw": RAW,
    "softmax": HEAD + " => (float[1,5,16,16] y) { l = Conv(x, w) y = Softmax<axis=1>(l) }",
    "bias": HEAD + " => (float[1,5,16,16] y) { l = Conv(x, w) s = Add(l, b) y = Softmax<axis=1>(s) }",
    "sum": HEAD + " => (float[1,5,16,16] y) { l = Conv(x, w) s = Add(l, x) y = Softmax<axis=1>(s) }",
    "labels": HEAD + " => (int64[1,1,16,16] y) { l = Conv(x, w) y = ArgMax<axis=1>(l) }",
    "pooled": HEAD + " => (float[1,5] y) { l = Conv(x, w) p = GlobalAveragePool(l) f = Flatten(p) y = Softmax(f) }",
    "sigmoid": HEAD + " => (float[1,5,16,16] y) { l = Conv(x, w) y = Sigmoid(l) }",
    "odds": HEAD + " => (float[1,5,16,16] y) { l = Conv(x, w) e = Exp(l) y = Sigmoid(e) }",
}
METHOD = "percentile-99.9"


def scenes(count: int = 24) -> list[Array]:
    """Returns logits of places that are sure of a class, a few of them of a rare one that is surer by far."""
    rng = np.random.default_rng(3)
    found = rng.normal(0, 0.5, (count, 1, 5, 16, 16)).astype(np.float32)
    kinds = rng.integers(0, 4, (count, 16, 16))
    for index, image in enumerate(found):
        np.put_along_axis(image[0], kinds[index][None], 6.0 + 0.1 * kinds[index][None], axis=0)
        if index % 6 == 0:
            image[0, 3, 0, 0], image[0, 4, 0, 0] = 13.0, 14.0
    return list(found)


def calibrated(text: str, folder: Path) -> tuple[Model, Calibration]:
    eye = np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1)
    model = make_model(text, folder / "m.onnx", constants={"w": eye, "b": np.full((5, 1, 1), 0.5, np.float32)})
    return model, calibrate_model(model, make_samples([{"x": image} for image in scenes()]), work=folder / "work")


@pytest.mark.parametrize(
    ("tail", "kept"),
    [
        ("raw", True),
        ("softmax", True),
        ("bias", True),
        ("sum", False),
        ("labels", True),
        ("pooled", False),
        ("sigmoid", True),
        ("odds", False),
    ],
)
def test_no_place_that_is_sure_is_cut(tail: str, kept: bool, tmp_path: Path) -> None:
    model, calibration = calibrated(TAILS[tail], tmp_path)
    before, after = calibration.ranges, fit_ranges(read_float_graph(model), calibration).ranges
    assert before[METHOD]["l"].high < 8 < before["minmax"]["l"].high
    # Behind a sigmoid 11 and 14 are the same, among logits of classes they are not.
    if kept:
        assert after[METHOD]["l"].high >= (11 if tail == "sigmoid" else before["minmax"]["l"].high)
    else:
        assert after[METHOD]["l"] == before[METHOD]["l"]
    assert after[METHOD]["x"] == before[METHOD]["x"]
    assert after["minmax"] == before["minmax"]


@pytest.mark.parametrize("tail", ["raw", "sigmoid"])
def test_what_is_stated_to_be_values_may_be_cut(tail: str, tmp_path: Path) -> None:
    model, calibration = calibrated(TAILS[tail], tmp_path)
    stated = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    assert fit_ranges(read_float_graph(model), stated) == stated


def test_without_held_out_samples_no_logits_are_known(tmp_path: Path) -> None:
    model, calibration = calibrated(RAW, tmp_path)
    nothing = msgspec.structs.replace(calibration, statistics="")
    assert fit_ranges(read_float_graph(model), nothing) == nothing


def test_the_rare_class_wins_where_it_did(tmp_path: Path) -> None:
    model, calibration = calibrated(RAW, tmp_path)
    kept = fit_ranges(read_float_graph(model), calibration)
    target, image = load_target("cpu"), scenes()[0]
    for own, winner in ((calibration, 3), (kept, 4)):
        # What is read is as wide as what is made, so that only the logits differ.
        ranges = {**own.ranges[METHOD], "x": own.ranges["minmax"]["x"]}
        plan = plan_quantization(model, own, target, "int8", method="minmax")
        plan = msgspec.structs.replace(plan, ranges=ranges)
        path = quantize_model(model, plan, own, tmp_path / "q.onnx").model.path
        (found,) = CpuSession(path, SessionSettings()).run({"x": image}).values()
        assert found[0, :, 0, 0].argmax() == winner


RESIZED = """ => (float[1,5,32,32] y) { l = Conv(x, w) r = Resize<mode = "MODE">(l, n, s) y = Identity(r) }"""
ENLARGED = {
    "map": HEAD + RESIZED,
    "softmax": HEAD + RESIZED.replace("Identity", "Softmax<axis = 1>"),
    "labels": HEAD + RESIZED.replace("Identity", "ArgMax<axis = 1>").replace("float[1,5,", "int64[1,1,"),
}


@pytest.mark.parametrize(("tail", "mode", "kind", "found"), [
    ("map", "linear", "", True), ("map", "cubic", "", True), ("map", "nearest", "", False),
    ("map", "linear", "values", False), ("softmax", "linear", "", True), ("labels", "linear", "", True),
    ("labels", "nearest", "", False),
])  # fmt: skip
def test_maps_of_classes_that_are_interpolated_are_not_rounded_to_8_bits_again(
    tail: str, mode: str, kind: str, found: bool, tmp_path: Path
) -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    constants = {"w": np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1), "s": scales, "n": np.zeros(0, np.float32)}
    model = make_model(ENLARGED[tail].replace("MODE", mode), tmp_path / "m.onnx", constants=constants)
    samples = make_samples([{"x": image} for image in scenes()])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    if kind:
        calibration = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    last = read_float_graph(model)
    assert bool(find_enlarged(last, calibration)) == found
    qnn, nnapi = (plan_quantization(model, calibration, load_target(name), "int8") for name in ("qnn", "nnapi"))
    assert bool(qnn.wide) == found
    assert "l" not in qnn.wide
    assert ("Resize" in {node.op for node in nnapi.float_nodes}) == found
    assert "Conv" not in {node.op for node in nnapi.float_nodes}
