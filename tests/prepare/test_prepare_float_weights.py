"""ONNX Runtime rounds float weights between Q and DQ nodes; they are found, refused where we quantize, else kept."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import parser
from tiny_models import parse_model, save_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import RuntimeRefusal
from edgekit.prepare.constants import (
    DISABLED,
    OPTIMIZER,
    TURNING,
    disable_harmful,
    find_float_weights,
    find_turned,
    narrow_constants,
)
from edgekit.target import load_target

HEAD = """(float[1,4,4,4] x) => (float[1,4,4,4] y) <float s = {{0.02}}, uint8 z = {{128}}, float t = {{0.05}},
    float[1] s1 = {{0.02}}, float[4] s4 = {{0.02, 0.02, 0.02, 0.02}}, uint8[4] z4 = {{128, 128, 128, 128}}>
    {{ a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z) {body} y = DequantizeLinear(q, t, z) }}"""
OPEN = "[n] c = Conv(b, w) q = QuantizeLinear(c, t, z)"
BODIES = {
    OPEN: ("n",),
    "[n] c = Conv(b, w) r = Relu(c) q = QuantizeLinear(r, t, z)": ("n",),
    "[n] c = ConvTranspose(b, w) q = QuantizeLinear(c, t, z)": ("n",),
    "[n] c = Conv(b, w) r = Transpose<perm = [0, 1, 3, 2]>(c) q = QuantizeLinear(r, t, z)": ("n",),
    "m = Transpose<perm = [0, 1, 3, 2]>(b) [n] c = Conv(m, w) q = QuantizeLinear(c, t, z)": ("n",),
    "[n] c = Conv(x, w) q = QuantizeLinear(c, t, z)": (),
    "[n] c = Conv(b, w) r = Tanh(c) q = QuantizeLinear(r, t, z)": (),
    "[n] c = Conv(b, w) r = Add(c, c) q = QuantizeLinear(r, t, z)": (),
    "[n] c = Conv(b, w) q = QuantizeLinear(c, t, z) u = Relu(c)": (),
}


def write(body: str, path: Path) -> Path:
    weight = np.random.default_rng(0).normal(0, 1, (4, 4, 1, 1)).astype(np.float32)
    weight[0] *= 0.003
    return save_net(HEAD.format(body=body), path, w=weight).path


def run(path: Path, *, kept: bool) -> np.ndarray:
    sample = {"x": np.random.default_rng(1).normal(0, 1, (1, 4, 4, 4)).astype(np.float32)}
    return CpuSession(path, SessionSettings(config={DISABLED: OPTIMIZER} if kept else {})).run(sample)["y"]


@pytest.mark.parametrize("body", BODIES)
def test_what_is_found_is_what_a_session_rounds(tmp_path: Path, body: str) -> None:
    path = write(body, tmp_path / "m.onnx")
    found = find_float_weights(onnx.load(str(path)).graph)
    changes = bool(np.abs(run(path, kept=True) - run(path, kept=False)).max() > 0)
    assert (found, changes) == (BODIES[body], bool(BODIES[body]))


def test_float_weights_that_are_stored_as_integers_are_found_too(tmp_path: Path) -> None:
    path = write(OPEN, tmp_path / "m.onnx")
    proto = onnx.load(str(path))
    narrow_constants(proto.graph, {"w": 16})
    onnx.save(proto, str(path))
    assert find_float_weights(proto.graph) == ("n",)
    assert np.abs(run(path, kept=True) - run(path, kept=False)).max() > 0


def test_what_a_target_switches_off_itself_stays_off(tmp_path: Path) -> None:
    path = write(next(body for body in BODIES if BODIES[body]), tmp_path / "m.onnx")
    target = load_target("cpu", {})
    session = msgspec.structs.replace(target.session, config={DISABLED: "ConstantFolding"})
    target = msgspec.structs.replace(target, session=session)
    config = disable_harmful(target, onnx.load(str(path)).graph)[0].session.config
    assert config[DISABLED] == f"ConstantFolding;{OPTIMIZER}"
    sample = {"x": np.random.default_rng(1).normal(0, 1, (1, 4, 4, 4)).astype(np.float32)}
    got = CpuSession(path, SessionSettings(config=config)).run(sample)["y"]
    np.testing.assert_array_equal(got, run(path, kept=True))


SHRINKING = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,4,8,8] x) => (float[1,4,5,5] y)
  <float s = {0.05}, uint8 z = {128}, int8 t = {0}, int64[4] sizes = {1,4,5,5}, int8[4,4,1,1] w = {WEIGHTS}>
  { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s, t) c = Conv(d, v)
    e = QuantizeLinear(c, s, z) f = DequantizeLinear(e, s, z) r = Resize<mode="cubic">(f, , , sizes)
    g = QuantizeLinear(r, s, z) h = DequantizeLinear(g, s, z) i = DequantizeLinear(w, s, t) j = Conv(h, i)
    k = QuantizeLinear(j, s, z) y = DequantizeLinear(k, s, z) }""".replace("WEIGHTS", ",".join(map(str, range(16))))


def test_a_cubic_resize_between_integers_runs_where_its_layout_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(SHRINKING), str(path))
    sample = {"x": np.random.default_rng(1).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)}
    with pytest.raises(RuntimeRefusal, match="Cubic"):
        CpuSession(path, SessionSettings()).run(sample)
    target, told = disable_harmful(load_target("cpu", {}), onnx.load(str(path)).graph)
    got = CpuSession(path, SessionSettings(config=target.session.config)).run(sample)["y"]
    assert got.shape == (1, 4, 5, 5)
    assert "1 cubic Resize nodes" in told[0]


def test_xnnpack_s_products_of_a_transpose_are_kept_from_becoming_a_gemm_with_trans_a(tmp_path: Path) -> None:
    text = """g (float[4,2] x, float[1,2,4] u) => (float[2,3] y, float[2,3] z, float[1,4,3] t, float[2,3] v)
        <float[4,3] w = {1}, int64[2] k = {2,4}>
        { a = Transpose<perm=[1,0]>(x) y = Gemm(a, w) z = MatMul(a, w) b = Transpose<perm=[0,2,1]>(u)
        c = Transpose<perm=[0,2,1]>(b) s = Neg(c) t = MatMul(b, y)
        e = Reshape(a, k) v = Gemm(e, w) f = Reshape(x, k) g = Gemm(f, w) }"""
    graph = onnx.load(str(parse_model(text, tmp_path / "m.onnx"))).graph
    for index, node in enumerate(graph.node):
        node.name = f"n{index}"
    assert find_turned(graph) == ("n1", "n2", "n8")
    session = disable_harmful(load_target("xnnpack"), graph)[0].session
    assert session.config[DISABLED] == TURNING
    assert disable_harmful(load_target("nnapi"), graph) == (load_target("nnapi"), ())
