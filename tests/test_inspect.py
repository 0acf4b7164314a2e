"""`edgekit inspect`: what is not known is said, and what a size makes known is counted."""

from pathlib import Path

import pytest
from rich.console import Console
from tiny_models import parse_model

from edgekit.cli.main import run_command
from edgekit.inspect.inspect import OnnxReport, inspect_model, list_fixed_axes
from edgekit.inspect.sizes import measure_layers
from edgekit.model.tensors import TensorSpec
from edgekit.report.tables import format_count
from edgekit.report.text import table_contents


@pytest.fixture
def any_batch(tmp_path: Path) -> Path:
    return parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[batch,3] x, float[3,5] w) => (float[batch,5] y)'
        "{ t = MatMul(x, w) y = Relu(t) }",
        tmp_path / "any.onnx",
    )


def _inspect(path: Path, **dims: int) -> OnnxReport:
    report = inspect_model(path, dims=dims)
    assert isinstance(report, OnnxReport)
    return report


def test_a_constant_node_is_no_layer_and_its_weights_are_those_of_its_reader(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y) { c = Constant<value_floats=[1.0, 2.0]>() [add] y = Add(x, c) }"
    path = parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}', tmp_path / "m.onnx")
    assert [(layer.name, layer.op, layer.weight_bytes) for layer in measure_layers(path)] == [("add", "Add", 8)]


def test_a_model_that_quantizes_as_it_runs_is_quantized(tmp_path: Path) -> None:
    body = "a, s, z = DynamicQuantizeLinear(x) y = MatMulInteger(a, w, z)"
    text = f"g (float[1,3] x, int8[3,5] w) => (int32[1,5] y) {{ {body} }}"
    report = _inspect(parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}', tmp_path / "m.onnx"))
    assert (report.is_quantized, report.quantized) == (True, "dynamic")


def test_work_of_unknown_size_is_said_with_what_to_do_and_a_size_makes_it_known(
    any_batch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown, known = _inspect(any_batch), _inspect(any_batch, batch=4)
    assert (unknown.macs, unknown.unsized_nodes) == (15, 1)
    assert (known.macs, known.unsized_nodes) == (60, 0)
    assert known.activation_bytes > unknown.activation_bytes
    Console(width=160).print(table_contents(_inspect(any_batch)))
    assert "1: each dimension without a number counts as one; give --dim NAME=INT" in capsys.readouterr().out
    assert run_command(["inspect", str(any_batch), "--dim", "bach=4"]) == 2
    assert "bach" in capsys.readouterr().err


def test_sizes_that_the_graph_of_a_static_model_computes_are_left_to_prepare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[1,3,4,4] x, float[5,3,1,1] w) => (float[1,5,8,8] y)'
        "{ two = Constant<value = int64[4] {1, 1, 2, 2}>() size = Shape(x) sizes = Mul(size, two)"
        '  big = Resize<mode = "nearest">(x, , , sizes) conv = Conv(big, w) y = Relu(conv) }',
        tmp_path / "static.onnx",
    )
    Console(width=160).print(table_contents(inspect_model(model)))
    shown = capsys.readouterr().out
    assert "1: each dimension without a number counts as one; edgekit prepare computes them" in shown
    assert run_command(["prepare", str(model), "--out", str(tmp_path / "prepared.onnx")]) == 0
    assert _inspect(tmp_path / "prepared.onnx").unsized_nodes == 0


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (999, "999"), (1200, "1.2 k"), (3_504_872, "3.5 M"), (301_000_000, "301 M")]
)
def test_counts_are_for_people(count: int, shown: str) -> None:
    assert format_count(count) == shown


def test_axes_that_an_export_fixed_are_named_with_what_opens_them() -> None:
    def spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, shape=shape)

    image, tokens = spec("image", "float32", 1, 3, 8, 8), spec("input_ids", "int64", 1, 128)
    first, second = list_fixed_axes((image, tokens), "pytorch")
    assert "axis 0 (batch) at 1, fixed by the export" in first
    assert "dynamic_axes={'image': {0: 'batch'}}), or dynamic_shapes={'image': {0: 'batch'}} with dynamo=True" in first
    assert "axis 0 (batch) at 1 and axis 1 (sequence) at 128" in second
    assert "{'input_ids': {0: 'batch', 1: 'sequence'}}" in second
    assert "initial_types" in list_fixed_axes((image,), "skl2onnx")[0]
    assert "its exporter's dynamic axes" in list_fixed_axes((image,), "")[0]
    # What is open, a length of one number, and rows that are no batch of one are left alone.
    free = (spec("x", "float32", "N", 3), spec("rate", "int64", 1), spec("table", "float32", 50, 4))
    assert list_fixed_axes(free, "pytorch") == ()
