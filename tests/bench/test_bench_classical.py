"""Pipelines as skl2onnx writes them: text and numbers go in, a map of classes for each row comes out."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgekit.cli.main import run_command


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A text and two numbers, the text as a number beside them, a linear classifier, and ZipMap with class names."""
    ml = "ai.onnx.ml"
    encode = helper.make_node(
        "LabelEncoder", ["city"], ["code"], domain=ml, keys_strings=["a", "b"], values_floats=[0.5, -0.5]
    )
    join = helper.make_node("Concat", ["code", "numbers"], ["features"], axis=1)
    classify = helper.make_node(
        "LinearClassifier", ["features"], ["label", "scores"], domain=ml, classlabels_strings=["no", "yes"],
        coefficients=[1.0, -1.0, 0.5, -1.0, 1.0, -0.5], intercepts=[0.1, -0.1], post_transform="SOFTMAX",
    )  # fmt: skip
    zipped = helper.make_node("ZipMap", ["scores"], ["probabilities"], domain=ml, classlabels_strings=["no", "yes"])
    scores = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    graph = helper.make_graph(
        [encode, join, classify, zipped],
        "pipeline",
        [
            helper.make_tensor_value_info("city", TensorProto.STRING, ["N", 1]),
            helper.make_tensor_value_info("numbers", TensorProto.FLOAT, ["N", 2]),
        ],
        [
            helper.make_tensor_value_info("label", TensorProto.STRING, ["N"]),
            helper.make_value_info("probabilities", helper.make_sequence_type_proto(scores)),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ml, 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "pipeline.onnx")
    rows = np.random.default_rng(0).normal(size=(12, 1, 2)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", city=np.array([[["a"]], [["b"]]] * 6), numbers=rows)
    return tmp_path / "pipeline.onnx"


def test_text_numbers_and_maps_are_timed_in_batches(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", str(pipeline), "--runs", "3", "--batch", "1,8", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["batch"], run["failure"], run["median_ms"] > 0) for run in runs] == [(1, None, True), (8, None, True)]


def test_maps_are_profiled_converted_and_compared(
    pipeline: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipeline.parent)
    assert run_command(["profile", pipeline.name, "--seconds", "1", "--json"]) == 0
    assert "ZipMap" in capsys.readouterr().out
    assert run_command(["convert", pipeline.name, "--style", "full", "--out", "converted"]) == 0
    assert "bit-equal to its source" in capsys.readouterr().out
    assert run_command(["compare", pipeline.name, pipeline.name, "--data", "rows.npz", "--json"]) == 0
    names = [output["name"] for output in json.loads(capsys.readouterr().out)["outputs"]]
    assert names == ["label", "probabilities.keys", "probabilities.values"]
    # Another classifier is told from it by what its maps hold.
    other = onnx.load(pipeline)
    (weights,) = (item for item in other.graph.node[2].attribute if item.name == "coefficients")
    weights.floats[0] = -3.0
    onnx.save(other, "other.onnx")
    assert run_command(["compare", pipeline.name, "other.onnx", "--data", "rows.npz", "--min-sqnr", "40"]) == 1
