"""What will run: the census agrees with ONNX Runtime's profile, INT8 that did not stick is found, and files mended."""

import collections
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort
import pytest
from convert_models import ARM, RUNTIME, all_forms, make_qdq, write_form
from tiny_models import parse_model

from edgekit._ort import CpuSession, SessionSettings, optimize_graph
from edgekit.convert.convert import convert_model
from edgekit.convert.ort_form import REPLAY, OrtOptions, write_ort
from edgekit.convert.ort_format.report import count_ops, read_graph, replay_saved
from edgekit.errors import ModelError, RuntimeRefusal
from edgekit.model.model import load_model
from edgekit.target import load_target


def profile_ops(path: Path, folder: Path, shape: tuple[int, ...]) -> dict[str, int]:
    options: Any = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.add_session_config_entry("session.enable_saved_runtime_optimizations", "1")
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    session: Any = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.zeros(shape, np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = (event for event in events if event["cat"] == "Node" and event["name"].endswith("kernel_time"))
    return dict(collections.Counter(event["args"]["op_name"] for event in ran))


@pytest.mark.parametrize("options", [ARM, RUNTIME], ids=["full", "runtime"])
@pytest.mark.parametrize("between", ["", "Relu"])
def test_the_census_is_what_runs(tmp_path: Path, options: OrtOptions, between: str) -> None:
    write_form(make_qdq(tmp_path / "m.onnx", between=between), tmp_path / "m.ort", options)
    counted = count_ops(replay_saved(read_graph(tmp_path / "m.ort")))
    ran = profile_ops(tmp_path / "m.ort", tmp_path, (1, 3, 4, 4))
    ran.pop("Transpose", None)
    counted.pop("Transpose", None)
    assert counted == ran


def test_int8_that_did_not_stick_is_an_error_with_names(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx", activation="int8", weight="uint8")
    with pytest.raises(ModelError, match=r"2 nodes of 'model.runtime.ort' .* 'conv1' \(Conv\), 'conv2' \(Conv\)"):
        convert_model(model, all_forms(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_float_activation_in_between_is_told_apart(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx", between="LeakyRelu")
    converted = convert_model(model, all_forms(), tmp_path / "out")
    assert [(node.name, node.activation) for node in converted.unfused["runtime"]] == [
        ("conv1", "com.microsoft.FusedConv"),
        ("conv2", "com.microsoft.FusedConv"),
    ]


@pytest.mark.parametrize(("saves", "found"), [(False, "Conv"), (True, "QLinearConv")])
def test_a_target_whose_provider_changes_the_layout_saves_no_fusions(tmp_path: Path, saves: bool, found: str) -> None:
    target = load_target("nnapi")
    assert not target.conversion.saves_fusions
    conversion = msgspec.structs.replace(target.conversion, saves_fusions=saves)
    model = make_qdq(tmp_path / "m.onnx")
    converted = convert_model(model, msgspec.structs.replace(target, conversion=conversion), tmp_path / "out")
    assert converted.census["runtime"][found] == 2
    assert len(read_graph(tmp_path / "out/model.runtime.ort").saved) == (2 if saves else 0)


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
