"""What the terminal says of a quantization: why nodes stay float, and which constants that leaves large."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tiny_models import parse_model

from edgekit.jobs.quantize import quantize_for
from edgekit.quantize.plan import FloatNode
from edgekit.recipe import Data, Recipe
from edgekit.report.summary import QuantizeReport
from edgekit.report.tables import describe_quantization

SPECTRUM = """g (float[1,64] x) => (float[1,16] y)
  <float[64,64] dft = {DFT}, float[64,16] w = {W}, float eps = {1e-6}> {
  s = MatMul(x, dft) p = Mul(s, s) e = Add(p, eps) l = Log(e) y = MatMul(l, w) }"""


@pytest.fixture
def report(tmp_path: Path) -> QuantizeReport:
    rng = np.random.default_rng(0)
    dft, w = (", ".join(f"{value:.3f}" for value in rng.normal(size=size)) for size in (64 * 64, 64 * 16))
    parse_model(SPECTRUM.replace("DFT", dft).replace("W", w), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(16, 1, 64)).astype(np.float32))
    recipe = Recipe(targets=("cpu",))
    return quantize_for(tmp_path / "m.onnx", Data(source=str(tmp_path / "data.npz")), tmp_path / "q.onnx", recipe)


def test_a_reason_is_said_once_and_large_constants_are_named(report: QuantizeReport) -> None:
    assert report.float_constants["dft"] == 64 * 64 * 2 + 64 * 4
    assert next(iter(report.float_constants)) == "dft"
    assert report.float_bytes == sum(report.float_constants.values())
    lines = list(describe_quantization(report))
    assert sum("magnifies rounding near 0" in line for line in lines) == 1
    assert f"- {len(report.float_nodes)} in float: it leads to the logarithm" in "\n".join(lines)
    assert (
        sum(line.startswith("- of these constants 1 in 16 bits: 8 kB less; that alone keeps ") for line in lines) == 1
    )


def test_a_recipe_keeps_large_constants_whole(report: QuantizeReport, tmp_path: Path) -> None:
    recipe, out = Recipe(targets=("cpu",), float_constants="float32"), tmp_path / "whole.onnx"
    whole = quantize_for(tmp_path / "m.onnx", Data(source=str(tmp_path / "data.npz")), out, recipe)
    assert (whole.float_constants["dft"], whole.narrow.bits) == (64 * 64 * 4, {})
    assert whole.size_after > report.size_after + 7_000
    assert "- large constants in float: 'dft' 16 kB" in list(describe_quantization(whole))


def test_many_reasons_and_constants_are_counted_and_few_are_left_out(report: QuantizeReport) -> None:
    nodes = tuple(FloatNode(name=f"n{index}", op="Mul", reason=f"reason {index % 7}") for index in range(9))
    sizes = {f"c{index}": 20_000 for index in range(8)} | {"small": 9_999}
    lines = list(describe_quantization(replace(report, float_nodes=nodes, float_constants=sizes)))
    assert [line for line in lines if " in float: reason" in line][:2] == [
        "- 2 in float: reason 0", "- 2 in float: reason 1",
    ]  # fmt: skip
    assert "- 9 in float for 7 reasons in all: --json lists them" in lines
    assert "- large constants in float: 'c0' 20 kB, 'c1' 20 kB, 'c2' 20 kB, 'c3' 20 kB, 'c4' 20 kB and 3 more" in lines
    none = replace(report, float_nodes=(), float_constants={"small": 9_999})
    assert not any("in float" in line for line in describe_quantization(none))
