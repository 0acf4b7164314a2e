"""Tensors that 16 bits do not hold, as the powers of a spectrum, are in float where the target's float holds them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fixture_types import present
from quantize_models import make_model, make_samples, make_search

from edgekit.model.model import Model
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Tensors
from edgekit.quantize import calibrate_model
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.plan_search import Searched
from edgekit.target import Precision, Target, load_target

# Small powers count, where they pass a threshold, and large ones too.
POWERS = """g (float[1,24] x) => (float[1,16] y) <float gain = {GAIN}, float largest = {LARGEST}> {
  g = Mul(x, gain) t = Tanh(g) l = Div(x, largest) c = Concat<axis=1>(t, l)
  h = MatMul(c, w1) r = Relu(h) y = MatMul(r, w2) }"""


def search(folder: Path, target: Target, largest: float, decades: float, precision: Precision = "int8") -> Searched:
    """The search for a net whose inputs span some decades below the largest; the threshold lies at 0.6 of them."""
    folder.mkdir(exist_ok=True)
    text = POWERS.replace("GAIN", f"{10 ** (0.6 * decades) / largest}").replace("LARGEST", f"{largest}")
    model = make_model(text, folder / "m.onnx", {"w1": (48, 64), "w2": (64, 16)})
    drawn = np.random.default_rng(0).uniform(-decades, 0, (48, 1, 24))
    return find_searched(
        folder, model, [{"x": (largest * 10**row).astype(np.float32)} for row in drawn], target, precision
    )


def find_searched(
    folder: Path, model: Model, arrays: Sequence[Tensors], target: Target, precision: Precision = "int8"
) -> Searched:
    samples = make_samples(arrays)
    reference = FloatReference(model, samples, {"y": StatedOutput(kind="values")})
    calibration = calibrate_model(model, samples, work=folder / "work")
    search = make_search((model, calibration), reference, target, folder, precision)
    return present(find_plan(search, max_drop=None, narrow=False)[1])


def list_floats(searched: Searched) -> set[str]:
    return {node.op for node in searched.chosen.plan.float_nodes}


@pytest.mark.parametrize("precision", ["int8", "int16"])
def test_what_16_bits_do_not_hold_is_in_float(precision: Precision, tmp_path: Path) -> None:
    searched = search(tmp_path, load_target("qnn"), 100.0, 9, precision)
    assert searched.chosen.prediction.sqnr_db > 30 > searched.trials[0].prediction.sqnr_db
    assert "Mul" in list_floats(searched)
    assert "MatMul" not in list_floats(searched)
    assert "which 16 bits do not hold" in searched.chosen.plan.float_nodes[0].reason
    assert searched.wide_range == ()


def test_what_16_bits_hold_is_in_16_bits(tmp_path: Path) -> None:
    searched = search(tmp_path, load_target("qnn"), 100.0, 4)
    assert searched.chosen.plan.wide
    assert list_floats(searched) == set()


def test_what_half_precision_does_not_hold_is_named(tmp_path: Path) -> None:
    target = load_target("qnn")
    assert target.float_bits == 16
    searched = search(tmp_path / "half", target, 1e-5, 9)
    assert list_floats(searched) == set()
    assert "x" in searched.wide_range
    assert (
        "'x' loses most, in 16 bits as in fp16, in which qnn computes floats: it holds 6e-08 to 65504"
        in searched.advice
    )
    full = msgspec.structs.replace(target, float_bits=32)
    assert "Mul" in list_floats(search(tmp_path / "full", full, 1e-5, 9))


# Equalization does not scale inputs, so the first weight must hold what compensates their sizes.
UNEQUAL = """g (float[1,16] x) => (float[1,16] y) {
  h = MatMul(x, w1) r = Tanh(h) z = MatMul(r, w2) y = MatMul(z, w3) }"""


@pytest.mark.parametrize("ratio", [1.0, 60.0])
def test_a_layer_whose_weight_8_bits_do_not_hold_is_in_float(ratio: float, tmp_path: Path) -> None:
    rng, sizes = np.random.default_rng(3), np.where(np.arange(16) % 2, 1.0, ratio)
    first = (rng.normal(size=(16, 16)) / (4 * sizes[:, None])).astype(np.float32)
    model = make_model(UNEQUAL, tmp_path / "m.onnx", {"w2": (16, 64), "w3": (64, 16)}, {"w1": first})
    drawn = (rng.normal(size=(48, 1, 16)) * sizes).astype(np.float32)
    searched = find_searched(tmp_path, model, [{"x": row} for row in drawn], load_target("qnn"))
    reasons = [node.reason for node in searched.chosen.plan.float_nodes]
    assert reasons == ([] if ratio == 1 else ["8 bits do not hold its weight 'w1'"])
    assert ("1 layers in float" in searched.chosen.step) == (ratio > 1)
    assert searched.chosen.prediction.sqnr_db > 25
