"""The fp16 form of a model: half the size, the same answers, float32 at its ends."""

from pathlib import Path

import numpy as np
import onnx
from demo_paths import MODEL
from tiny_models import parse_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.model.model import load_model, read_proto
from edgekit.prepare import prepare_model
from edgekit.quantize.weight_only.convert import convert_to_fp16

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g '


def test_nodes_stand_after_those_that_they_read_in_bodies_too(tmp_path: Path) -> None:
    """ONNX asks for it, and edgekit refuses a model where it is not so."""
    text = f"""{HEAD} (bool c, float[2,2] x) => (float[2,2] y) {{
        a = Relu(x) r = If(c) <then_branch = t () => (float[2,2] u) {{ u = Add(a, x) }},
        else_branch = e () => (float[2,2] v) {{ v = Abs(a) }}> y = Neg(r) }}"""
    for path in (MODEL, parse_model(text, tmp_path / "m.onnx")):
        model = prepare_model(load_model(path), tmp_path / f"p-{path.stem}.onnx", {})
        converted = convert_to_fp16(model, (), tmp_path / f"h-{path.stem}.onnx")
        onnx.checker.check_model(read_proto(converted.model))


def test_bodies_of_a_kept_node_read_floats(tmp_path: Path) -> None:
    text = f"""{HEAD} (bool c, float[2,2] x) => (float[2,2] y) <float[2,2] w = {{1, 2, 3, 4}}> {{
        a = Relu(x) b = Add(a, w) h = Cast<to=10>(x) s = Neg(h) r = If(c) <then_branch = t () => (float[2,2] u) {{
        q = Cast<to=10>(b) d = Add(s, q) k = Cast<to=1>(d) u = Mul(k, w) }},
        else_branch = e () => (float[2,2] v) {{ v = Sub(b, x) }}> y = Neg(r) }}"""
    prepared = prepare_model(load_model(parse_model(text, tmp_path / "m.onnx")), tmp_path / "p.onnx", {})
    kept = [node.name for node in read_proto(prepared).graph.node if node.op_type == "If"]
    converted = convert_to_fp16(prepared, kept, tmp_path / "h.onnx").model
    sessions = [CpuSession(model.path, SessionSettings()) for model in (prepared, converted)]
    for c in (True, False):
        feeds = {"c": np.array(c), "x": np.array([[1, -2], [3, -4]], np.float32)}
        wanted, made = (session.run(feeds)["y"] for session in sessions)
        np.testing.assert_array_equal(made, wanted)


def test_an_input_that_is_an_output_too_stays_float32(tmp_path: Path) -> None:
    text = f"{HEAD} (float[2] x, float[2] m) => (float[2] m, float[2] y) {{ y = Neg(x) }}"
    converted = convert_to_fp16(load_model(parse_model(text, tmp_path / "m.onnx")), (), tmp_path / "h.onnx").model
    values = {"x": np.array([1.0, -2.0], np.float32), "m": np.array([1e-9, 1e9], np.float32)}
    got = CpuSession(converted.path, SessionSettings()).run(values)
    assert [*got] == ["m", "y"]
    np.testing.assert_array_equal(got["m"], values["m"])
    np.testing.assert_array_equal(got["y"], -values["x"])


def test_two_kept_nodes_may_read_one_value(tmp_path: Path) -> None:
    text = f"{HEAD} (float[2,2] x) => (float[2,2] y) {{ a = Relu(x) b = Abs(a) c = Neg(a) y = Add(b, c) }}"
    prepared = prepare_model(load_model(parse_model(text, tmp_path / "m.onnx")), tmp_path / "p.onnx", {})
    kept = [node.name for node in read_proto(prepared).graph.node if node.op_type in {"Abs", "Neg"}]
    converted = convert_to_fp16(prepared, kept, tmp_path / "h.onnx")
    names = [node.name for node in read_proto(converted.model).graph.node]
    assert len(set(names)) == len(names)


def test_kept_nodes_hand_each_other_floats(tmp_path: Path) -> None:
    """What lies between them may be beyond half; where a half node reads it too, it reads a half."""
    text = """g (float[2] x) => (float[2] y, float[2] z, bool[2] n)
        { [a] h = Abs(x) [b] s = Mul(h, h) [c] r = Sqrt(s) [d] y = Neg(r) [e] z = Relu(r) [f] m = Sigmoid(r)
        [g] n = IsNaN(m) }"""
    sample = {"x": np.array([300.0, 1e-5], np.float32)}
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    kept = convert_to_fp16(model, ("b", "c", "f"), tmp_path / "k.onnx").model
    proto = read_proto(kept)
    (root,) = (node for node in proto.graph.node if node.name == "c")
    assert root.input[0] == "s"
    assert sum(node.op_type == "Cast" for node in proto.graph.node) == 6
    onnx.checker.check_model(proto, full_check=True)
    got = CpuSession(kept.path, SessionSettings(level=Level.DISABLED)).run(sample)
    np.testing.assert_allclose(got["y"], [-300.0, -1e-5], rtol=2e-3)
    np.testing.assert_array_equal(got["z"], -got["y"])


def test_kept_nodes_may_stand_behind_an_operator_of_onnx_runtimes_own(tmp_path: Path) -> None:
    """Nothing tells onnx that it gives floats, and no cast stood between it and the nodes behind it."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[2] x) => (float[2] y)
        { [a] h = Abs(x) [b] s = com.microsoft.Gelu(h) [c] r = Sqrt(s) [d] q = Neg(r) [e] p = Mul(r, q)
        [f] y = Neg(p) }"""
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    kept = convert_to_fp16(model, ("b", "d"), tmp_path / "k.onnx").model
    got = CpuSession(kept.path, SessionSettings(level=Level.DISABLED)).run({"x": np.array([9.0, 4.0], np.float32)})
    np.testing.assert_allclose(got["y"], [9.0, 4.0], rtol=2e-3)


def test_weights_beyond_the_largest_half_are_named(tmp_path: Path) -> None:
    text = f"{HEAD} (float[2] x) => (float[2] y) <float[2] w = {{1.0, 100000.0}}> {{ y = Mul(x, w) }}"
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    assert convert_to_fp16(model, (), tmp_path / "h.onnx").clamped == ("w",)
