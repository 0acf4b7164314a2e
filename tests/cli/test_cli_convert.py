"""`prepare`, `convert` and `operators` on the command line: their exit codes, JSON, and refusals."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from demo_paths import CALIBRATION, MODEL
from fixture_types import Answer, Refused, Shown
from tiny_models import save_net

from edgekit.cli.main import run_command
from edgekit.jobs.convert import ConvertOptions, _refuse_large
from edgekit.model.model import load_model
from edgekit.quantize.weight_only import WeightOnlyOptions

ZOO = Path(__file__).parents[3] / "shared/zoo"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convert") / "out"
    assert run_command(["convert", str(MODEL), "--out", str(out), "-q"]) == 0
    return out


def test_the_json_of_convert_lists_files_and_their_equality(tmp_path: Path, answer: Answer) -> None:
    arguments = ["convert", str(MODEL), "--target", "nnapi", "--data", str(CALIBRATION), "--out", str(tmp_path / "o")]
    report = answer(arguments)
    assert report["files"] == {"runtime": ["model.runtime.ort"], "onnx": ["model.onnx"]}
    assert (report["target"], report["quantized"]) == ("nnapi", "")
    assert "skip Transposes" in report["reason"]
    assert report["equality"]["runtime"]["passed"] is True
    assert report["equality"]["runtime"]["samples"] == 3
    assert {fate["op"] for fate in report["fates"]["runtime"]} >= {"Conv", "Gemm"}
    assert report["versions"]["ort-canonical-form"] == "1"


def test_the_text_of_convert_lists_files_and_their_equality(tmp_path: Path, shown: Shown) -> None:
    printed = shown(["convert", str(MODEL), "--style", "both", "--onnx", "--out", str(tmp_path / "o")])
    assert "Conv are FusedConv" in printed
    assert "against its source" in printed or "bit-equal to its source" in printed
    assert f"onnx: {tmp_path}/o/model.onnx" in printed
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"model.ort", "model.runtime.ort", "model.onnx"}


def test_operators_are_written_listed_compared(converted: Path, tmp_path: Path, shown: Shown, answer: Answer) -> None:
    full, runtime = str(converted / "model.ort"), str(converted / "model.runtime.ort")
    config = str(tmp_path / "required.config")
    assert run_command(["operators", full, runtime, "--types", "--out", config]) == 0
    assert "has all it needs" in shown(["operators", full, runtime, "--compare", config])
    (tmp_path / "small.config").write_text("ai.onnx;11;Conv\n")
    report = answer(["operators", full, "--compare", str(tmp_path / "small.config")], 1)
    assert "com.microsoft:FusedConv:1" in report["lacking"][full]
    assert "com.microsoft;1;FusedConv" in shown(["operators", full])
    assert run_command(["operators", full, "--types", "--compare", config]) == 2


def make_huge(tmp_path: Path, width: int) -> None:
    """Writes a MatMul whose weight is a hole in a file."""
    weight = onnx.TensorProto(name="w", data_type=1, dims=[width, width], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "w.data"), ("offset", "0"), ("length", str(width * width * 4))):
        weight.external_data.add(key=key, value=value)
    ends = [onnx.helper.make_tensor_value_info(name, 1, [1, width]) for name in "xy"]
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:], [weight])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), str(tmp_path / "m.onnx"))
    with (tmp_path / "w.data").open("wb") as file:
        file.truncate(width * width * 4)


@pytest.mark.parametrize(
    ("width", "weights", "told"),
    [
        (28_000, [], "has 3.1 GB, and the ORT format ends at 2 GB"),
        (72_000, ["--weights", "int4"], "with int4 weights has at least 2.6 GB, and the ORT format ends at 2 GB"),
        (34_000, ["--weights", "fp16"], "with fp16 weights has at least 2.3 GB, and the ORT format ends at 2 GB"),
    ],
)
def test_a_huge_model_is_refused(tmp_path: Path, refused: Refused, width: int, weights: list[str], told: str) -> None:
    make_huge(tmp_path, width)
    start = time.process_time()
    assert told in refused("convert", str(tmp_path / "m.onnx"), "--out", str(tmp_path / "o"), *weights)
    assert time.process_time() - start < 1.0
    assert not (tmp_path / "o").exists()


def test_a_float_model_above_2_gb_is_accepted_if_4_bit_weights_bring_it_below(tmp_path: Path) -> None:
    make_huge(tmp_path, 28_000)
    _refuse_large(tmp_path / "m.onnx", (), ConvertOptions(weights=WeightOnlyOptions(form="int4")))


def test_compare_formats_measures_each_quantization_format(refused: Refused, answer: Answer) -> None:
    arguments = ["compare", str(MODEL), "--formats", "--data", str(CALIBRATION), "--samples", "16"]
    report = answer([*arguments, "--cpu", "x64"])
    assert (report["calibrated"], report["judged"], report["apart"]) == (8, 8, True)
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["float"] + [
        f"{form}, {grain}"
        for grain in ("per channel", "per tensor")
        for form in ("QDQ, static", "QOperator, static", "QOperator, dynamic")
    ]
    for name, row in rows.items():
        assert row["median_ms"] > 0
        assert (row["ratio"] is None) == (name == "float")
        assert 0.9 <= row["agreement"] <= 1.0
    channel, tensor = (rows[f"QDQ, static, {grain}"] for grain in ("per channel", "per tensor"))
    assert channel["size_bytes"] > tensor["size_bytes"] < rows["float"]["size_bytes"] / 2
    # A scale for each channel costs bytes and brings accuracy; both forms of one grain compute the same.
    assert channel["sqnr_db"] > tensor["sqnr_db"] > 15
    assert rows["QOperator, static, per channel"]["sqnr_db"] == pytest.approx(channel["sqnr_db"], abs=2)
    assert run_command([*arguments[:2], "--data", str(CALIBRATION)]) == 2
    assert "give a second model, or --formats" in refused(*arguments, "--layers")


def _write_convolutions(path: Path) -> Path:
    rng = np.random.default_rng(3)
    shapes = {"u": (32, 3, 3, 3), "v": (64, 32, 3, 3), "w": (64, 64, 3, 3)}
    weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    text = """(float[1,3,16,16] x) => (float[1,64] y) {
      a = Conv(x, u)  b = Relu(a)  c = Conv(b, v)  d = Relu(c)  e = Conv(d, w)  p = GlobalAveragePool(e)  y = Flatten(p)
    }"""
    return save_net(text, path, **weights).path


@pytest.mark.parametrize("name", ["small", pytest.param("squeezenet1.1_fp32", marks=pytest.mark.long)])
def test_a_format_that_a_model_of_convolutions_cannot_have_says_why(name: str, tmp_path: Path, answer: Answer) -> None:
    model = ZOO / f"models/{name}.onnx" if name != "small" else _write_convolutions(tmp_path / "m.onnx")
    if not model.is_file():
        pytest.skip("needs ../shared/zoo")
    (spec,) = load_model(model).inputs
    shape = [size if isinstance(size, int) else 1 for size in spec.shape or ()]
    rng = np.random.default_rng(0)
    rows: dict[str, Any] = {spec.name: rng.random((2, *shape[1:]), np.float32)}
    np.savez(tmp_path / "x.npz", **rows)
    report = answer(["compare", str(model), "--formats", "--data", str(tmp_path / "x.npz")])
    rows = {row["name"]: row for row in report["rows"]}
    assert "has no MatMul, LSTM, Attention or Gather" in rows["QOperator, dynamic, per channel"]["note"]
    assert rows["QDQ, static, per channel"]["size_bytes"] < rows["float"]["size_bytes"] / 3


def test_prepare_changes_inputs_and_outputs_as_the_options_say(tmp_path: Path, answer: Answer) -> None:
    source = load_model(MODEL)
    name, output = source.inputs[0].name, source.outputs[0].name
    shape = [dim if isinstance(dim, int) else 1 for dim in source.inputs[0].shape or ()]
    (tmp_path / "p.toml").write_text('size = [24, 24]\ncolor = "L"\nmean = [0.5]\nstd = [0.25]\n')
    dims = [f"--dim={dim}=1" for dim in source.inputs[0].shape or () if isinstance(dim, str)]
    report = answer([
        "prepare", str(MODEL), *dims, "--embed-preprocess", str(tmp_path / "p.toml"), "--layout", f"{name}=nhwc",
        "--rename", f"{name}=pixels", "--rename", f"{output}=scores", "--opset", "18", "--external-data",
        "--out", str(tmp_path / "out.onnx"),
    ])  # fmt: skip
    given = report["model"]["inputs"][0]
    assert (given["name"], given["dtype"]) == ("pixels", "uint8")
    assert given["shape"] == [shape[0], shape[2], shape[3], shape[1]]
    assert (report["model"]["outputs"][0]["name"], report["model"]["opsets"]["ai.onnx"]) == ("scores", 18)
    assert report["model"]["external_files"] == ["out.onnx.data"]
    assert (report["preprocess"]["dtype"], report["preprocess"]["scale"]) == ("uint8", 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data", "p.toml"]
