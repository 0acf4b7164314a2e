"""Open dimensions in `check`: they stay open where a provider takes them; work is counted at sizes that are told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from check_models import check_file, save_text

from edgekit.cli.main import run_command

PICTURE = (
    "g (float[batch,3,height,width] x) => (float[N,5,h,w] y) <float[8,3,3,3] a = {{{}}}, float[5,8,3,3] b = {{{}}}>"
    "{{ c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, a)  y = Conv<pads=[1,1,1,1], strides=[2,2]>(c, b) }}"
).format(",".join(["1"] * 216), ",".join(["1"] * 360))
# What sizes of 224 give: 112 x 112 and 56 x 56 places.
PICTURE_MACS = [112 * 112 * 8 * 27, 56 * 56 * 5 * 72]
CACHE = """g (float[batch,1,sequence,4] x, float[batch,2,total,4] k) => (float[batch,2,sequence,4] y)
    { t = Transpose<perm=[0,1,3,2]>(k)  z = MatMul(x, t)  y = MatMul(z, k) }"""
HIDDEN = """g (float[n,4] x, float[4,4] w) => (float[m,4] y) {
    axis = Constant<value_ints=[1]>()  four = Constant<value_ints=[1,4]>()
    i = NonZero(x)  t = Transpose(i)  r = GatherND(x, t)  u = Unsqueeze(r, axis)  e = Expand(u, four)
    y = MatMul(e, w) }"""


def check_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run_command(["check", *words, "--json"]) in {0, 1}
    return json.loads(capsys.readouterr().out)["targets"]


def test_sides_stay_open_on_the_cpu_and_convs_are_counted_at_a_size_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save_text(PICTURE, tmp_path / "p.onnx"))
    report = check_json(capsys, model, "--target", "cpu")["cpu"]
    assert (report["counted_at"], report["unsized_nodes"]) == ({"batch": 1, "height": 224, "width": 224}, 0)
    assert [node["macs"] for node in report["node_list"]] == PICTURE_MACS
    assert [node["macs"] for node in report["model_nodes"]] == PICTURE_MACS
    assert run_command(["check", model, "--target", "cpu", "--dim", "height=64"]) == 0
    said = capsys.readouterr().out
    counted = (
        "work is counted at batch=1, width=128; to check the model at your sizes, give --dim batch=INT --dim width="
    )
    assert f"- open dimensions: {counted}" in said
    fixed = check_json(capsys, model, "--target", "cpu", "--shape", "x=1,3,64,64")["cpu"]
    assert "counted_at" not in fixed


@pytest.mark.parametrize("target", ["nnapi", "coreml", "qnn"])
def test_a_provider_that_takes_nothing_without_sizes_is_asked_about_the_file_as_it_is(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save_text(PICTURE, tmp_path / "p.onnx"))
    found = check_json(capsys, model, "--target", target, "--target", "cpu")
    assert [(found[name]["taken"], found[name]["as_is"]["taken"]) for name in (target, "cpu")] == [(0, 0), (2, 2)]
    assert run_command(["check", model, "--target", target]) == 1
    assert "give --dim batch=INT --dim height=INT --dim width=INT" in capsys.readouterr().out
    assert check_json(capsys, model, "--target", target, "--shape", "x=1,3,64,64")[target]["taken"] == 2


def test_the_batch_of_a_state_is_one_and_the_length_of_a_sample_is_not(tmp_path: Path) -> None:
    text = "g (float[2,N,8] state, float[1,T,8] x) => (float[2,N,8] y, float[1,T,8] z) { y = Relu(state) z = Relu(x) }"
    assert check_file(save_text(text, tmp_path / "s.onnx"), "cpu").counted_at == {"N": 1, "T": 128}


def test_a_formula_is_counted_as_it_follows(tmp_path: Path) -> None:
    path = save_text(CACHE, tmp_path / "c.onnx")
    proto = onnx.load(str(path))
    # The text form has no formulas.
    proto.graph.input[1].type.tensor_type.shape.dim[2].dim_param = "past + sequence"
    onnx.save(proto, str(path))
    report = check_file(path, "cpu")
    assert report.counted_at == {"batch": 1, "sequence": 128, "past": 128}
    assert [node.macs for node in report.node_list] == [0, *[2 * 128 * 256 * 4] * 2]


def test_what_no_size_tells_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_text(HIDDEN, tmp_path / "n.onnx")
    report = check_file(model, "cpu")
    assert (report.verdict, report.unsized_nodes) == ("yes", 1)
    assert [node.macs for node in report.node_list if node.op == "MatMul"] == [4 * 4]
    assert run_command(["check", str(model), "--target", "cpu"]) == 0
    assert "- the work of 1 node that multiplies is not known even so" in capsys.readouterr().out


def test_unknown_work_behind_an_unknown_operator_is_no_reason_to_say_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """g (float[1,2,8,8] x) => (float[A,B,C,D] y) <float[2,2,1,1] w = {1, 2, 3, 4}>
        { a = Conv(x, w) b = other.Foo(a) y = Conv(b, w) }"""
    proto = onnx.load(str(save_text(text, tmp_path / "n.onnx")))
    proto.opset_import.add(domain="other", version=1)
    onnx.save(proto, str(tmp_path / "n.onnx"))
    report = check_file(tmp_path / "n.onnx", "coreml")
    assert (report.verdict, report.unsized_nodes) == ("maybe", 1)
    assert run_command(["check", str(tmp_path / "n.onnx"), "--target", "coreml"]) == 1
    assert "- the work of 1 node that multiplies is not known: each" in capsys.readouterr().out


def test_what_fixed_sizes_would_gain_is_counted_at_the_same_sizes(tmp_path: Path) -> None:
    report = check_file(save_text(PICTURE, tmp_path / "p.onnx"), "xnnpack")
    assert report.verdict == "no"
    (advice,) = report.advice
    assert (advice.gain_nodes, advice.gain_macs) == (2, sum(PICTURE_MACS))


@pytest.mark.parametrize(("target", "size", "told"), [("cpu", "1", True), ("cpu", "N", False), ("nnapi", "1", False)])
def test_a_batch_that_the_export_fixed_is_told_where_no_phone_wants_it(
    target: str, size: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_text(f"g (float[{size},4] x) => (float[{size},4] y) {{ y = Relu(x) }}", tmp_path / "p.onnx")
    proto = onnx.load(path)
    proto.producer_name = "pytorch"
    onnx.save(proto, path)
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(8, 1, 4)).astype(np.float32))
    line = "dynamic_axes={'x': {0: 'batch'}}"
    run_command(["check", str(path), "--target", target])
    assert (line in capsys.readouterr().out) is told
    run_command(["check", str(path), "--target", target, "--json"])
    assert any(line in each for each in json.loads(capsys.readouterr().out)["fixed_axes"]) is told
    build = ["--data", str(tmp_path / "d.npz"), "--no-verify", "--precision", "fp32", "--out", str(tmp_path / "out")]
    run_command(["build", str(path), "--target", target, *build])
    assert (line in capsys.readouterr().out) is told
