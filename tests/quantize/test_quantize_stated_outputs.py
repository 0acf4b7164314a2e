"""What a recipe states of outputs counts more than what their values look like."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fixture_types import present
from quantize_models import make_model, make_samples
from test_quantize_image_headroom import as_samples, smooth_images

from edgekit.cli.main import run_command
from edgekit.errors import UsageError
from edgekit.model.outputs import OutputKind, StatedOutput, check_outputs
from edgekit.quantize import calibrate_model
from edgekit.quantize.accuracy.predict import predict_drop
from edgekit.quantize.calibration.image_headroom import add_image_headroom
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.objective import find_objective
from edgekit.recipe import load_recipe


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"z": "classes"}, r"\[outputs\] names 'z', which is no output of 'm.onnx'"),
        ({"y": "labels"}, r"'y' is labels, but it is float32"),
        ({"y": "image"}, r"'y' is image, but it has 2 axes"),
        ({"x": "embedding"}, r"'x' is embedding, but it is more than one vector"),
        ({"y": StatedOutput(kind="map", axis=2)}, r"'y' is map, but it has no axis 2"),
    ],
)
def test_a_statement_that_cannot_be_is_refused(
    tmp_path: Path, stated: dict[str, OutputKind | StatedOutput], message: str
) -> None:
    text = (
        "g (float[1,6] a) => (float[1,6] y, float[1,2,3] x)"
        "{ y = Mul(a, a)  s = Constant<value = int64[3] {1, 2, 3}>()  x = Reshape(a, s) }"
    )
    model = make_model(text, tmp_path / "m.onnx")
    assert check_outputs({"y": "values"}, model) == {"y": StatedOutput(kind="values")}
    with pytest.raises(UsageError, match=message):
        check_outputs(stated, model)


def test_a_recipe_holds_a_kind_or_a_kind_with_its_axis(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[outputs]\nface = "embedding"\nscores = {kind = "map", axis = 1}\n')
    assert load_recipe(tmp_path / "r.toml").outputs == {"face": "embedding", "scores": StatedOutput(kind="map", axis=1)}
    (tmp_path / "r.toml").write_text('[outputs]\nboxes = "box"\n')
    with pytest.raises(UsageError, match=r"r\.toml' is malformed"):
        load_recipe(tmp_path / "r.toml")


def test_the_drop_is_estimated_by_the_stated_kind(tmp_path: Path) -> None:
    """Six positive numbers look like ratings; stated to be classes, what counts is which of them is the largest."""
    text = "g (float[1,6] x) => (float[1,6] y) <float[6] w = {1, 1, 1, 1, 1, LAST}> { y = Mul(x, w) }"
    one, two = (make_model(text.replace("LAST", last), tmp_path / f"{last}.onnx") for last in ("1", "0.5"))
    rng = np.random.default_rng(0)
    samples = make_samples([{"x": rng.uniform(1, 9, (1, 6)).astype(np.float32)} for _ in range(40)])
    assert predict_drop(one, two, samples).measure == "spread of the values (R2)"
    found = predict_drop(one, two, samples, {"y": StatedOutput(kind="classes")})
    assert found.measure == "top-1 accuracy"
    assert 0.7 < present(found.top1_agreement) < 1


@pytest.mark.parametrize(("stated", "measure"), [("embedding", "nearest neighbours (recall@1)"), ("values", "spread")])
def test_a_vector_that_is_stated_to_be_an_embedding_needs_no_unit_length(
    tmp_path: Path, stated: OutputKind, measure: str
) -> None:
    model = make_model("g (float[1,16] x) => (float[1,16] y) { y = Neg(x) }", tmp_path / "m.onnx")
    rows = np.random.default_rng(0).normal(0, 9, (40, 1, 16)).astype(np.float32)
    samples = make_samples([{"x": row} for row in rows])
    predicted = predict_drop(model, model, samples, {"y": StatedOutput(kind=stated)})
    assert predicted.measure.startswith(measure)


def test_what_is_stated_to_be_no_image_gets_no_headroom(tmp_path: Path) -> None:
    text = """g (float[1,1,12,12] x) => (float[1,1,12,12] y) {
      c = Conv<pads=[1,1,1,1]>(x, w1, b1) r = Relu(c) y = Conv<pads=[1,1,1,1]>(r, w2) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 1, 3, 3), "b1": (8,), "w2": (1, 8, 3, 3)})
    samples, graph = as_samples(smooth_images(12, 0.85)), read_float_graph(model)
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    assert add_image_headroom(graph, calibration).ranges["minmax"]["c"] != calibration.ranges["minmax"]["c"]
    stated = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    assert add_image_headroom(graph, stated) == stated


def test_scores_are_compared_behind_a_sigmoid_where_one_is_stated(tmp_path: Path) -> None:
    model = make_model("g (float[1,32] x) => (float[1,32] y) { y = Mul(x, x2) }", tmp_path / "m.onnx", {"x2": (1, 32)})
    rng = np.random.default_rng(0)
    samples = make_samples([{"x": (rng.normal(size=(1, 32)) * 400).astype(np.float32)} for _ in range(24)])
    for outputs in ({}, {"y": StatedOutput(kind="scores")}):
        calibration = calibrate_model(model, samples, work=tmp_path / f"work{len(outputs)}", outputs=outputs)
        (compared,) = find_objective(read_float_graph(model), calibration)
        assert (compared.family == "scores") == bool(outputs)


def test_the_command_quantize_reads_stated_outputs_from_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """g (float[1,3,8,8] x) => (float[1,40] y) {
      c = Conv(x, w1, b1) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p) y = Gemm<transB=1>(f, w2) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (40, 8)})
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(1).normal(size=(12, 1, 3, 8, 8)).astype(np.float32))
    (tmp_path / "r.toml").write_text('samples = 10\n[outputs]\ny = "map"\n')
    argv = ["quantize", str(model.path), "--data", str(tmp_path / "x.npz"), "--target", "nnapi", "--method", "minmax"]
    argv += ["--recipe", str(tmp_path / "r.toml"), "--out", str(tmp_path / "q.onnx"), "--json"]
    assert run_command(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["predicted"]["measure"]) == (10, "mean overlap of classes (mIoU)")
    (tmp_path / "r.toml").write_text('[outputs]\nyy = "map"\n')
    assert run_command(argv) == 2
    assert "did you mean 'y'" in capsys.readouterr().err
