"""Channels of unequal size: found, evened out without changing what is computed, and brought back to accuracy."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from onnx import numpy_helper
from quantize_models import make_model, random_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import UsageError
from edgekit.model import Model, load_model, save_proto
from edgekit.quantize import Calibration, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.equalize import choose_factors, equalize_calibration, equalize_graph
from edgekit.quantize.graph import float_activations, read_graph
from edgekit.quantize.seams import find_seams
from edgekit.target import Target, load_target
from edgekit.tensors import Array

SEPARABLE = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,3,12,12] x) => (float[1,40,12,12] y) {
  a = Conv<kernel_shape=[1,1]>(x, w1, b1) r = Relu(a)
  d = Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=24>(r, w2, b2) p = PRelu(d, slope)
  e = Conv<kernel_shape=[1,1]>(p, w3, b3) c = Clip(e, zero, six)
  f = Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=16>(c, w4, b4)
  y = Conv<kernel_shape=[1,1]>(f, w5, b5) }"""
SHAPES = {
    "w1": (24, 3, 1, 1), "b1": (24,), "w2": (24, 1, 3, 3), "b2": (24,), "w3": (16, 24, 1, 1), "b3": (16,),
    "w4": (16, 1, 3, 3), "b4": (16,), "w5": (40, 16, 1, 1), "b5": (40,),
}  # fmt: skip
UNEQUAL = (("w1", "b1", "w2", 24, 0), ("w2", "b2", "w3", 24, 1), ("w3", "b3", "w4", 16, 0))
"""Weight and bias of a producer, the weight that reads it, the channels, and the axis of these in the reader."""


def make_unequal(folder: Path, decades: float) -> Model:
    """A separable net whose channels differ as folded batch normalisation makes them: same function, other sizes."""
    model = make_model(SEPARABLE, folder / "m.onnx", SHAPES)
    proto = read_graph(model).proto
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    arrays |= {
        "slope": np.full((24, 1, 1), 0.25, np.float32),
        "zero": np.array(0, np.float32),
        "six": np.array(6, np.float32),
    }
    rng = np.random.default_rng(3)
    for weight, bias, reader, channels, axis in UNEQUAL:
        factors = (10 ** rng.uniform(-decades, 0, channels)).astype(np.float32)
        arrays[weight] = arrays[weight] * factors.reshape(-1, 1, 1, 1)
        arrays[bias] = arrays[bias] * factors
        arrays[reader] = arrays[reader] / factors.reshape((1, -1, 1, 1) if axis else (-1, 1, 1, 1))
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items())
    save_proto(proto, folder / "unequal.onnx")
    return load_model(folder / "unequal.onnx")


@pytest.fixture
def unequal(tmp_path: Path) -> tuple[Model, Calibration]:
    model = make_unequal(tmp_path, decades=2.0)
    return model, calibrate_model(model, random_samples(model, count=48), work=tmp_path / "work")


def per_tensor(name: str) -> Target:
    target = load_target(name)
    return msgspec.structs.replace(
        target, quantization=msgspec.structs.replace(target.quantization, per_channel_ops=())
    )


def sqnr_db(model: Model, other: Model) -> float:
    outputs: list[list[Array]] = [
        [CpuSession(each.path, SessionSettings()).run(sample)["y"] for sample in random_samples(model, count=8, seed=9)]
        for each in (model, other)
    ]
    one, two = (np.concatenate(rows).astype(np.float64) for rows in outputs)
    return float(10 * np.log10((one**2).sum() / ((one - two) ** 2).sum()))


def test_the_seams_are_behind_what_keeps_signs_and_factors(unequal: tuple[Model, Calibration]) -> None:
    seams = {seam.tensor: seam for seam in find_seams(read_graph(unequal[0]))}
    assert list(seams) == ["r", "p", "c", "f"]
    assert [step.tensor for step in seams["p"].steps] == ["d"]
    assert (seams["c"].ceiling, seams["r"].ceiling) == (6, None)


def test_a_normalisation_is_a_seam_through_the_reshapes_behind_it(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,6,32] x) => (float[1,6,40] y) {
      s = Constant<value_ints=[6,32]>() n = LayerNormalization<axis=-1>(x, gain, shift) one = Reshape(n, s)
      a = Gemm(one, wa) two = Reshape(n, s) b = Gemm(two, wb) m = Mul(a, b) y = MatMul(n, wc) z = Relu(m) }"""
    shapes: dict[str, tuple[int, ...]] = {
        "gain": (32,), "shift": (32,), "wa": (32, 8), "wb": (32, 8), "wc": (32, 40),
    }  # fmt: skip
    seams = find_seams(read_graph(make_model(text, tmp_path / "m.onnx", shapes)))
    assert [(seam.tensor, seam.copies, len(seam.readers)) for seam in seams] == [("n", ("one", "two"), 3)]


def test_the_float_model_computes_the_same_to_the_last_bit(unequal: tuple[Model, Calibration], tmp_path: Path) -> None:
    graph = read_graph(unequal[0])
    factors = choose_factors(graph, Path(unequal[1].statistics), ())
    assert set(factors) >= {"r", "p", "c"}
    evened = equalize_graph(graph, factors)
    save_proto(evened.proto, tmp_path / "evened.onnx")
    for sample in random_samples(unequal[0], count=4, seed=2):
        one, two = (
            CpuSession(path, SessionSettings()).run(sample)["y"] for path in (unequal[0].path, tmp_path / "evened.onnx")
        )
        assert np.array_equal(one, two)


def test_the_ranges_of_scaled_channels_are_those_that_calibrating_again_finds(
    unequal: tuple[Model, Calibration], tmp_path: Path
) -> None:
    model, calibration = unequal
    graph = read_graph(model)
    factors = choose_factors(graph, Path(calibration.statistics), ())
    evened = equalize_graph(graph, factors)
    save_proto(evened.proto, tmp_path / "evened.onnx")
    again = calibrate_model(load_model(tmp_path / "evened.onnx"), random_samples(model, count=48), work=tmp_path / "w")
    derived = equalize_calibration(graph, calibration, factors).ranges["minmax"]
    assert set(derived) == set(float_activations(evened))
    for name, span in again.ranges["minmax"].items():
        wide = span.high - span.low
        assert derived[name].low == pytest.approx(span.low, abs=0.01 * wide)
        assert derived[name].high == pytest.approx(span.high, abs=0.01 * wide)


@pytest.mark.parametrize(("target", "least_db"), [(load_target("qnn"), 25), (per_tensor("nnapi"), 22)])
def test_unequal_channels_come_back(
    unequal: tuple[Model, Calibration], tmp_path: Path, target: Target, least_db: float
) -> None:
    model, calibration = unequal
    stock = plan_quantization(model, calibration, target, "int8", method="minmax")
    plan = plan_quantization(model, calibration, target, "int8")
    ruined = quantize_model(model, stock, tmp_path / "stock.onnx").model
    saved = quantize_model(model, plan, tmp_path / "saved.onnx").model
    assert plan.factors
    assert not plan.wide
    assert sqnr_db(model, ruined) < least_db - 8
    assert sqnr_db(model, saved) > least_db
    again = quantize_model(model, msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)), tmp_path / "b.onnx")
    assert again.model.sha256 == saved.sha256


def test_factors_of_a_plan_are_checked(unequal: tuple[Model, Calibration]) -> None:
    graph = read_graph(unequal[0])
    for factors in ({"y": (1.0,) * 40}, {"r": (1.0,)}, {"r": (0.3,) * 24}, {"r": (0.0,) * 24}, {"r": (1e300,) * 24}):
        with pytest.raises(UsageError, match="the plan cannot scale"):
            equalize_graph(graph, factors)
