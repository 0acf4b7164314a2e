"""Saved optimisations that ONNX Runtime cannot replay are mended; without that it refuses its own file."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import parse_model

from edgekit._ort import CpuSession, SessionSettings, optimize_graph
from edgekit.convert.ort_form import REPLAY, OrtOptions, write_ort
from edgekit.convert.ort_format.report import read_graph
from edgekit.errors import RuntimeRefusal
from edgekit.model.model import load_model

GRID = "<float s = {0.1}, uint8 z = {128}, float t = {0.05}, uint8 u = {120}>"
HEAD = "g (float[2,4] x) => (float[2,4] y) "
WEIGHT = "k = Constant<value_ints=[{}]>() c = Cast<to=1>(k) f = Constant<value_ints=[4,4]>() w = Reshape(c, f)".format(
    ", ".join(str(index % 5 - 2) for index in range(16))
)
MATMUL = f"{{ {WEIGHT} wq = QuantizeLinear(w, s, z) wd = DequantizeLinear(wq, s, z) xq = QuantizeLinear(x, s, z) "
MATMUL += "xd = DequantizeLinear(xq, s, z) "
BODIES = {
    "a matmul": HEAD + GRID + MATMUL + "m = MatMul(xd, wd) q = QuantizeLinear(m, t, u) y = DequantizeLinear(q, t, u) }",
    "a float result": HEAD + GRID + MATMUL + "y = MatMul(xd, wd) }",
    "a split": HEAD + GRID + "{ xq = QuantizeLinear(x, s, z) d = DequantizeLinear(xq, s, z) "
    "p = Constant<value_ints=[2,2]>() a, b = Split<axis=1>(d, p) "
    "aq = QuantizeLinear(a, s, z) bq = QuantizeLinear(b, s, z) ad = DequantizeLinear(aq, s, z) "
    "bd = DequantizeLinear(bq, s, z) y = Concat<axis=1>(bd, ad) }",
}


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("name", BODIES)
def test_what_was_saved_is_replayed(name: str, opset: int, tmp_path: Path) -> None:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> {BODIES[name]}'
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    write_ort(model, tmp_path / "m.ort", OrtOptions(style="runtime", cpu="arm"))
    sample = {"x": np.linspace(-3, 3, 8, dtype=np.float32).reshape(2, 4)}
    want = CpuSession(model.path, SessionSettings()).run(sample)["y"]
    got = CpuSession(tmp_path / "m.ort", SessionSettings(config=REPLAY)).run(sample)["y"]
    np.testing.assert_array_equal(got, want)
    assert read_graph(tmp_path / "m.ort").saved


def test_onnxruntime_still_needs_the_mending(tmp_path: Path) -> None:
    path = parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {BODIES["a matmul"]}', tmp_path / "m.onnx")
    config = {"session.save_model_format": "ORT", "optimization.minimal_build_optimizations": "save"}
    optimize_graph(path, tmp_path / "raw.ort", SessionSettings(config=config))
    with pytest.raises(RuntimeRefusal, match="Not enough produced nodes"):
        CpuSession(tmp_path / "raw.ort", SessionSettings(config=REPLAY))
