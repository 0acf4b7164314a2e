"""`edgekit inspect` and `edgekit diff`: what a model or a bundle holds, its sizes, and the differences between two."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from bundle_models import make_bundle, make_contents, save_classifier
from fixture_types import Shown
from rich.console import Console
from tiny_models import parse_model

from edgekit.bundle.archive import list_files, write_archive
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.cli.main import run_command
from edgekit.convert.ort_form import OrtOptions, write_ort
from edgekit.errors import BundleError, ModelError, UsageError
from edgekit.inspect.diff import compare_versions
from edgekit.inspect.inspect import OnnxReport, inspect_model, list_fixed_axes, measure_layers, measure_sizes
from edgekit.model.tensors import TensorSpec
from edgekit.report.tables import format_count
from edgekit.report.text import table_contents


@pytest.fixture
def any_batch(tmp_path: Path) -> Path:
    return parse_model(
        "g (float[batch,3] x, float[3,5] w) => (float[batch,5] y){ t = MatMul(x, w) y = Relu(t) }",
        tmp_path / "any.onnx",
    )


def _inspect(path: Path, **dims: int) -> OnnxReport:
    report = inspect_model(path, dims=dims)
    assert isinstance(report, OnnxReport)
    return report


def test_a_constant_node_is_no_layer_and_its_weights_are_those_of_its_reader(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y) { c = Constant<value_floats=[1.0, 2.0]>() [add] y = Add(x, c) }"
    path = parse_model(f"{text}", tmp_path / "m.onnx")
    assert [(layer.name, layer.op, layer.weight_bytes) for layer in measure_layers(path)] == [("add", "Add", 8)]


def test_a_model_that_quantizes_as_it_runs_is_quantized(tmp_path: Path) -> None:
    body = "a, s, z = DynamicQuantizeLinear(x) y = MatMulInteger(a, w, z)"
    text = f"g (float[1,3] x, int8[3,5] w) => (int32[1,5] y) {{ {body} }}"
    report = _inspect(parse_model(f"{text}", tmp_path / "m.onnx"))
    assert (report.is_quantized, report.quantized) == (True, "dynamic")


def test_work_and_memory_of_subgraphs_count(tmp_path: Path) -> None:
    then = "then () => (float[8,4] t) { s = MatMul(x, w) t = Relu(s) }"
    other = "other () => (float[8,4] e) { u = Slice(x, zero, one) e = Expand(u, size) }"
    text = f"""g (bool c, float[8,2] x, float[2,4] w, int64[1] zero, int64[1] one, int64[2] size) => (float[8,4] y)
    {{ y = If(c) <then_branch = {then}, else_branch = {other}> }}"""
    report = _inspect(parse_model(f"{text}", tmp_path / "m.onnx"))
    # The sizes of a Slice by inputs are unknown, but it multiplies nothing.
    assert (report.macs, report.unsized_nodes) == (8 * 2 * 4, 0)
    # All inputs, the output of the If, and both values of the branch.
    assert report.activation_bytes == (1 + 64 + 32 + 8 + 8 + 16) + 128 + 2 * 128


def test_work_of_unknown_size_is_told_and_a_size_helps(any_batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown, known = _inspect(any_batch), _inspect(any_batch, batch=4)
    assert (unknown.macs, unknown.unsized_nodes, unknown.counted_at) == (15, 0, {"batch": 1})
    assert (known.macs, known.unsized_nodes, known.counted_at) == (60, 0, {})
    assert known.activation_bytes > unknown.activation_bytes
    Console(width=160).print(table_contents(_inspect(any_batch)))
    assert "batch 1: assumed, and given by --dim NAME=INT" in capsys.readouterr().out
    assert run_command(["inspect", str(any_batch), "--dim", "bach=4"]) == 2
    assert "bach" in capsys.readouterr().err


def test_sizes_that_a_graph_computes_are_left_to_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_counts_are_formatted_with_k_m_and_g(count: int, shown: str) -> None:
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


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Bundle, Bundle]:
    contents = make_contents(tmp_path)
    old = write_bundle(contents, tmp_path / "old" / "tiny-nnapi")
    (tmp_path / "more").mkdir()
    larger = save_classifier(tmp_path / "more" / "tiny.onnx", classes=7)
    nodes = contents.check.node_list
    moved = (msgspec.structs.replace(nodes[0], taken=not nodes[0].taken), *nodes[1:])
    changed = msgspec.structs.replace(
        contents,
        files={"onnx": (larger.path,)},
        check=msgspec.structs.replace(contents.check, node_list=moved),
        versions={"onnxruntime": "1.32.0"},
        golden=contents.golden,
    )
    return old, write_bundle(changed, tmp_path / "new" / "tiny-nnapi")


def test_a_bundle_is_the_same_as_itself_wherever_it_lies(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    write_archive(list_files(bundle.folder), tmp_path / "a.zip", "zip")
    delta = compare_versions(bundle.folder, tmp_path / "a.zip")
    assert delta.is_same
    assert delta.update_bytes == 0
    assert run_command(["diff", str(bundle.folder), str(tmp_path / "a.zip")]) == 0


def test_what_changed_is_named(pair: tuple[Bundle, Bundle], capsys: pytest.CaptureFixture[str], shown: Shown) -> None:
    old, new = (str(bundle.folder) for bundle in pair)
    assert run_command(["diff", old, new, "--json"]) == 1
    delta = json.loads(capsys.readouterr().out)
    assert {file["name"] for file in delta["files"]} == {
        "README.md",
        "check.json",
        "golden/expected.npz",
        "tiny.onnx",
    } | {name for name in pair[0].manifest.files if name.startswith("app/")} - {"app/ModelSession.kt"}
    assert {"key": "versions.onnxruntime", "old": "1.31.1", "new": "1.32.0"} in delta["facts"]
    assert [node["name"] for node in delta["nodes"]] == ["mul"]
    assert {layer["name"]: layer["new_bytes"] - layer["old_bytes"] for layer in delta["layers"]} == {
        "mul": 8 * 2 * 4, "add": 2 * 4,
    }  # fmt: skip
    assert delta["update_bytes"] == sum(file["new_bytes"] for file in delta["files"])
    text = shown(["diff", old, new], 1)
    assert "versions.onnxruntime: 1.31.1 -> 1.32.0" in text
    assert "layer mul (MatMul): 160 -> 224 bytes" in text


def test_accuracy_is_told_but_is_no_difference(tmp_path: Path) -> None:
    old = make_bundle(tmp_path)
    assert run_command(["verify", str(old.folder), "--on", "host"]) in {0, 1, 3}
    new = Path(shutil.copytree(old.folder, tmp_path / "new"))
    evidence = json.loads((new / "verify.json").read_bytes())
    evidence["runs"][0]["outputs"][0]["sqnr_db"] = 1.5
    (new / "verify.json").write_text(json.dumps(evidence))
    delta = compare_versions(old.folder, new)
    assert delta.is_same
    assert [(figure.device, figure.measure, figure.new) for figure in delta.accuracy] == [("host", "sqnr_db", 1.5)]


def test_two_models_are_compared_by_layers(tmp_path: Path, shown: Shown) -> None:
    old, new = save_classifier(tmp_path / "a.onnx").path, save_classifier(tmp_path / "b.onnx", classes=6).path
    assert "layer mul (MatMul): 160 -> 192 bytes" in shown(["diff", str(old), str(new)], 1)
    assert compare_versions(old, old).is_same


def test_what_cannot_be_compared_is_refused(tmp_path: Path, pair: tuple[Bundle, Bundle]) -> None:
    model = save_classifier(tmp_path / "a.onnx").path
    with pytest.raises(UsageError, match=r"nothing at '.*b\.onnx'"):
        compare_versions(model, tmp_path / "b.onnx")
    with pytest.raises(UsageError, match="and the other is none"):
        compare_versions(model, pair[0].folder)
    with pytest.raises(BundleError, match="cannot read"):
        compare_versions(tmp_path / "none", pair[0].folder)
    (tmp_path / "bad.onnx").write_bytes(b"\xff")
    with pytest.raises(ModelError):
        compare_versions(model, tmp_path / "bad.onnx")
    assert run_command(["diff", str(model), str(pair[0].folder)]) == 2


def test_every_weight_belongs_to_one_layer_in_both_formats(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "a.onnx")
    write_ort(model, tmp_path / "a.ort", OrtOptions(style="full", cpu="arm"))
    for path in (model.path, tmp_path / "a.ort"):
        assert sum(layer.weight_bytes for layer in measure_layers(path)) == (8 * 5 + 5) * 4
    sizes = measure_sizes(model.path)
    assert sizes.size_bytes == model.size_bytes == sizes.other_bytes + (8 * 5 + 5) * 4
    assert [layer.macs for layer in sizes.layers] == [40, 0]


def test_sizes_of_a_bundle_name_every_file(tmp_path: Path, shown: Shown) -> None:
    bundle = make_bundle(tmp_path)
    assert {file.name for file in measure_sizes(bundle.folder).files} == {*bundle.manifest.files, "manifest.json"}
    assert "golden/inputs.npz" in shown(["inspect", str(bundle.folder), "--sizes"])
