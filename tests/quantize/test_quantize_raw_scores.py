from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.tensors import Tensors
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.predict import predict_drop
from edgekit.quantize.graph.compared_tensors import are_raw_scores
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.objective import find_objective
from edgekit.target import load_target

FLOOR = -8.0

HEAD = """g (float[1,64] near, float[1,64] far)
  => (float[1,64,1] y, float[1,64,4] boxes)
  <int64[3] one = {1, 64, 1}, int64[3] four = {1, 64, 4}> {
  s = Sub(near, far) y = Reshape(s, one) b = MatMul(near, wb) boxes = Reshape(b, four) }"""


def objects(count: int, *, reach: float) -> Samples:
    """Something is where `far` is zero, at 3 % of the places; elsewhere scores lie down to -reach."""
    rng = np.random.default_rng(0)
    rows = list[Tensors]()
    for _ in range(count):
        near = rng.normal(size=(1, 64)).astype(np.float32)
        far = (rng.uniform(0.2, 1, (1, 64)) * reach * (rng.random((1, 64)) > 0.03)).astype(np.float32)
        rows.append({"near": near, "far": far})
    return make_samples(rows)


@pytest.mark.parametrize("target", ["qnn", "xnnpack"])
def test_raw_scores_of_boxes_keep_what_a_sigmoid_tells_apart(target: str, tmp_path: Path) -> None:
    model = make_model(HEAD, tmp_path / "m.onnx", {"wb": (64, 256)})
    samples, graph = objects(48, reach=3000), read_float_graph(model)
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    assert "scores" in {each.family for each in find_objective(graph, calibration)}
    assert calibration.ranges["minmax"]["y"].low < -2000
    plan = plan_quantization(model, calibration, load_target(target), "int8")
    quantized = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model
    for sample in samples:
        wanted, found = (CpuSession(each.path, SessionSettings()).run(sample)["y"] for each in (model, quantized))
        near = wanted > FLOOR
        assert (np.abs(wanted[near] - found[near]) < 0.2).all()
        assert (found[~near] < FLOOR + 0.2).all()
    prediction = predict_drop(model, quantized, samples)
    assert prediction.drop_estimate is not None
    assert prediction.drop_estimate < 0.02


def test_numbers_that_are_predicted_are_no_raw_scores() -> None:
    rng = np.random.default_rng(0)
    assert not are_raw_scores(rng.normal(size=1000) * 30)
    assert not are_raw_scores(-rng.uniform(5, 900, 1000) * np.where(np.arange(1000) % 10, 1, -1))
    assert are_raw_scores(np.append(-rng.uniform(5, 900, 1000), 3.0))
