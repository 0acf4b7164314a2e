"""What will run: the census agrees with ONNX Runtime's profile, and INT8 that did not stick is found."""

import collections
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort
import pytest
from convert_models import ARM, RUNTIME, all_forms, make_qdq, write_form

from edgekit.convert.convert import convert_model
from edgekit.convert.ort_form import OrtOptions
from edgekit.convert.ort_format.report import count_ops, find_unfused, read_graph, replay_saved
from edgekit.errors import ModelError
from edgekit.target import load_target

X64 = OrtOptions(style="full", cpu="x64")


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


@pytest.mark.parametrize("style", ["full", "runtime"])
def test_int8_that_cannot_stick_is_found(tmp_path: Path, style: Any) -> None:
    model = make_qdq(tmp_path / "m.onnx", activation="int8", weight="uint8")
    write_form(model, tmp_path / "m.ort", OrtOptions(style=style, cpu="arm"))
    graph = read_graph(tmp_path / "m.ort")
    assert [node.name for node in find_unfused(replay_saved(graph), graph.outputs)] == ["conv1", "conv2"]


def test_int8_that_did_not_stick_is_an_error_with_names(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx", activation="int8", weight="uint8")
    with pytest.raises(ModelError, match=r"2 nodes of 'model.runtime.ort' .* 'conv1' \(Conv\), 'conv2' \(Conv\)"):
        convert_model(model, all_forms(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_signed_activations_stick_on_arm_only(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx", activation="int8")
    for options, expected in ((ARM, 0), (X64, 2)):
        write_form(model, tmp_path / "m.ort", options)
        graph = read_graph(tmp_path / "m.ort")
        found = [node for node in find_unfused(graph.nodes, graph.outputs) if node.op == "Conv"]
        assert len(found) + count_ops(graph.nodes).get("QLinearConv", 0) == 2
        assert expected in {len(found), count_ops(graph.nodes).get("QLinearConv", 0)} or options is ARM


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
