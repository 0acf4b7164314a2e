"""Logits of many decisions: the surest classes do not tie, and interpolated maps are not rounded again."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.objective import find_enlarged
from edgekit.target import load_target

HEAD = "g (float[1,5,16,16] x)"


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


@pytest.mark.parametrize("target", ["qnn", "xnnpack"])
@pytest.mark.parametrize("tail", ["Identity(l)", "Softmax<axis=1>(l)"])
def test_the_rare_class_wins_where_it_did(tail: str, target: str, tmp_path: Path) -> None:
    """No rule spares logits: the objective refuses ranges in which the surest classes tie."""
    text = HEAD + f" => (float[1,5,16,16] y) {{ l = Conv(x, w) y = {tail} }}"
    model = make_model(text, tmp_path / "m.onnx", constants={"w": np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1)})
    samples = make_samples([{"x": image} for image in scenes()])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    assert calibration.ranges["percentile-99.9"]["l"].high < 8
    plan = plan_quantization(model, calibration, load_target(target), "int8")
    path = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model.path
    (found,) = CpuSession(path, SessionSettings()).run({"x": scenes()[0]}).values()
    assert found[0, :, 0, 0].argmax() == 4


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
