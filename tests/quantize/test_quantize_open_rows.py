"""What samples show of a layer whose input has another number of rows in each: as much as of one with fixed rows."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.quantize.calibration.calibrate import calibrate_model
from edgekit.quantize.calibration.moments import InputMoments, open_moments


def _write(path: Path, rows: str, opset: int) -> Model:
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
      g (float[1,{rows},6] x) => (float[1,{rows},4] y) {{ r = Relu(x)  y = MatMul(r, w) }}"""
    proto = parser.parse_model(text)
    weight = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    proto.graph.node[1].name = "layer"
    onnx.save(proto, str(path))
    return load_model(path)


def _measure(model: Model, lengths: list[int], work: Path) -> InputMoments:
    def draw(index: int) -> dict[str, np.ndarray]:
        return {"x": np.random.default_rng(index).normal(size=(1, lengths[index], 6)).astype(np.float32)}

    samples = Samples(source="drawn", count=len(lengths), read=lambda: map(draw, range(len(lengths))))
    calibrate_model(model, samples, work=work)
    with open_moments(work / "moments.npz") as stored:
        found = stored("layer")
    assert found is not None
    return found


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("rows", [5, 100])
def test_open_rows_give_the_moments_of_fixed_ones(tmp_path: Path, rows: int, opset: int) -> None:
    fixed = _measure(_write(tmp_path / "fixed.onnx", str(rows), opset), [rows] * 20, tmp_path / "a")
    free = _measure(_write(tmp_path / "open.onnx", "S", opset), [rows] * 20, tmp_path / "b")
    assert free.count == fixed.count > 0
    np.testing.assert_array_equal(free.covariance, fixed.covariance)
    np.testing.assert_array_equal(free.mean, fixed.mean)


def test_samples_give_as_many_rows_as_they_have(tmp_path: Path) -> None:
    every = _measure(_write(tmp_path / "open.onnx", "S", 17), [3] * 20, tmp_path / "a")
    mixed = _measure(load_model(tmp_path / "open.onnx"), [3, 4] * 10, tmp_path / "b")
    # Some samples are kept back, to judge by; no row is counted twice.
    assert every.count % 3 == 0
    assert every.count < mixed.count < every.count * 4 / 3


def test_inputs_that_hardly_vary_beside_their_mean_keep_a_covariance(tmp_path: Path) -> None:
    model = _write(tmp_path / "fixed.onnx", "40", 17)
    rng = np.random.default_rng(0)
    rows = [(3000 + 0.05 * rng.normal(size=(1, 40, 6))).astype(np.float32) for _ in range(20)]
    samples = Samples(source="drawn", count=20, read=lambda: iter([{"x": each} for each in rows]))
    calibrate_model(model, samples, work=tmp_path / "a")
    with open_moments(tmp_path / "a" / "moments.npz") as stored:
        found = stored("layer")
    assert found is not None
    # E[xx'] - E[x]E[x]' of sums in float32 is off by a hundred times the variance here, and has negative eigenvalues.
    assert np.diagonal(found.covariance[0]) == pytest.approx(0.05**2, rel=0.2)
    assert np.linalg.eigvalsh(found.covariance[0]).min() > 0
    assert found.second_moment()[0] == pytest.approx(np.full((6, 6), 9e6), rel=1e-3)
