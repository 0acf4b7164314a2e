"""Pipelines as skl2onnx writes them: text and numbers go in, a map of classes for each row comes out."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from fixture_types import Shown
from tiny_models import parse_model

from edgekit.cli.main import run_command


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A text and two numbers, the text as a number beside them, a linear classifier, and ZipMap with class names."""
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
      pipeline (string[N,1] city, float[N,2] numbers) => (string[N] label, seq(map(string, float)) probabilities) {
      code = ai.onnx.ml.LabelEncoder<keys_strings=["a", "b"], values_floats=[0.5, -0.5]>(city)
      features = Concat<axis=1>(code, numbers)
      label, scores = ai.onnx.ml.LinearClassifier<classlabels_strings=["no", "yes"], post_transform="SOFTMAX",
        coefficients=[1.0, -1.0, 0.5, -1.0, 1.0, -0.5], intercepts=[0.1, -0.1]>(features)
      probabilities = ai.onnx.ml.ZipMap<classlabels_strings=["no", "yes"]>(scores) }"""
    parse_model(text, tmp_path / "pipeline.onnx")
    rows = np.random.default_rng(0).normal(size=(12, 1, 2)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", city=np.array([[["a"]], [["b"]]] * 6), numbers=rows)
    return tmp_path / "pipeline.onnx"


def test_text_numbers_and_maps_are_timed_in_batches(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", str(pipeline), "--runs", "3", "--batch", "1,8", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["batch"], run["failure"], run["median_ms"] > 0) for run in runs] == [(1, None, True), (8, None, True)]


def test_maps_are_profiled_converted_and_compared(
    pipeline: Path, capsys: pytest.CaptureFixture[str], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipeline.parent)
    assert "ZipMap" in shown(["profile", pipeline.name, "--seconds", "1", "--json"])
    assert "bit-equal to its source" in shown(["convert", pipeline.name, "--style", "full", "--out", "converted"])
    assert run_command(["compare", pipeline.name, pipeline.name, "--data", "rows.npz", "--json"]) == 0
    names = [output["name"] for output in json.loads(capsys.readouterr().out)["outputs"]]
    assert names == ["label", "probabilities.keys", "probabilities.values"]
    # Another classifier is told from it by what its maps hold.
    other = onnx.load(pipeline)
    (weights,) = (item for item in other.graph.node[2].attribute if item.name == "coefficients")
    weights.floats[0] = -3.0
    onnx.save(other, "other.onnx")
    assert run_command(["compare", pipeline.name, "other.onnx", "--data", "rows.npz", "--min-sqnr", "40"]) == 1


@pytest.mark.long
def test_the_commands_of_the_page_about_time_measure_scikit_learn_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    linear = pytest.importorskip("sklearn.linear_model", reason="pip install scikit-learn")
    joblib = pytest.importorskip("joblib")
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(256, 1, 20)).astype(np.float32)
    np.savez("rows.npz", x=rows)
    model = linear.LogisticRegression().fit(rows[:, 0], rows[:, 0].argmax(1) % 3)
    joblib.dump(model, "classifier.joblib")
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
      classifier (float[N,20] x) => (int64[N] label, float[N,3] scores) {
      label, scores = ai.onnx.ml.LinearClassifier<classlabels_ints=[0, 1, 2], post_transform="SOFTMAX",
        coefficients=COEFFICIENTS, intercepts=INTERCEPTS>(x) }"""
    text = text.replace("COEFFICIENTS", str(model.coef_.ravel().tolist()))
    parse_model(text.replace("INTERCEPTS", str(model.intercept_.tolist())), Path("classifier.onnx"))
    # What is timed is one and the same computation.
    (scores,) = onnxruntime.InferenceSession("classifier.onnx").run(["scores"], {"x": rows[:, 0]})
    np.testing.assert_allclose(scores, model.predict_proba(rows[:, 0]), atol=1e-5)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "time.md").read_text()
    block = page.split("edgekit bench classifier.onnx", 1)[1].split("```", 1)[0].replace("\\\n", " ")
    bench, timeit = block.splitlines()
    assert run_command(["bench", "classifier.onnx", *shlex.split(bench), "--runs", "20", "--json"]) == 0
    assert [run["batch"] for run in json.loads(capsys.readouterr().out)["runs"]] == [1, 256]
    threads, _, *words = shlex.split(timeit)
    variable, _, count = threads.partition("=")
    said = subprocess.run(
        [sys.executable, *words[:2], "-n", "5", *words[2:]],
        env={**os.environ, variable: count},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "best of 5" in said.stdout


def test_a_model_with_maps_as_outputs_is_quantized(
    pipeline: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipeline.parent)
    command = ["quantize", pipeline.name, "--data", "rows.npz", "--target", "cpu", "--dim", "N=1", "--out", "int8.onnx"]
    assert "no rule of this target quantizes LinearClassifier" in shown(command)


def test_trees_are_not_quantized_and_the_reason_names_their_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]> trees (float[1,1] x) => (float[1,1] y) {
        y = ai.onnx.ml.TreeEnsembleRegressor <n_targets = 1, nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2],
            nodes_featureids = [0, 0, 0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values = [0.0, 0.0, 0.0],
            nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0], target_treeids = [0, 0],
            target_nodeids = [1, 2], target_ids = [0, 0], target_weights = [-1.0, 1.0]> (x) }"""
    parse_model(text, tmp_path / "trees.onnx")
    np.savez("rows.npz", x=np.linspace(-1, 1, 16, dtype=np.float32).reshape(16, 1, 1))
    assert run_command(["quantize", "trees.onnx", "--data", "rows.npz", "--target", "qnn", "--out", "int8.onnx"]) == 2
    assert "TreeEnsembleRegressor" in capsys.readouterr().err
    assert "build fp32 as full" in shown(["check", "trees.onnx", "--target", "cpu"])
