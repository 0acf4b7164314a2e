"""Automatic rewrites: what each changes, what it leaves, and that the results are the same."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from prepare_models import assert_near, make_inputs, make_model, op_names, run_model
from tiny_models import save_net

from edgekit.check.advice import ADVISERS
from edgekit.model.model import load_model
from edgekit.prepare.fix import REQUIRED_REWRITES, REWRITES, Fix, fix_model, list_required
from edgekit.target import load_target

SUM = "g (float[2,3] a, float[2,3] b, float[2,3] c) => (float[2,3] y) { s = Sum(a, b)  t = Sum(s)  y = Sum(t, c, a) }"
RESIZE = """
    g (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[0] roi = {}, float[0] none = {}, int64[4] sizes = {1, 1, 4, 4}>
    { y = Resize<mode = "nearest">(x, roi, none, sizes) }"""
FLATTEN = """g (float[2,3,4] x) => (float[2,12] y, float[1,24] a, float[6,4] b)
    { y = Flatten(x)  a = Flatten<axis = 0>(x)  b = Flatten<axis = 2>(x) }"""
RESHAPE = """g (float[2,3] x) => (float[3,2] y, float[2,3] z) <int64[2] turned = {3, -1}, int64[2] same = {2, 0}>
    { y = Reshape<allowzero = 1>(x, turned)  z = Reshape(x, same) }"""
ZERO = "g (float[0,3] x) => (float[0,4] y) <int64[2] none = {0, 4}> { y = Reshape<allowzero = 1>(x, none) }"
RELU = """g (float[4] x) => (float[4] y, float[4] w) <float s = {0.1}, uint8 low = {0}, uint8 mid = {128}>
    { a = Relu(x)  b = QuantizeLinear(a, s, low)  y = DequantizeLinear(b, s, low)
    c = Relu(x)  d = QuantizeLinear(c, s, mid)  w = DequantizeLinear(d, s, mid) }"""


@pytest.mark.parametrize(
    ("text", "fix", "ops"),
    [
        (SUM, "sum-to-add", ["Add", "Sum", "Add", "Add"]),
        (RESIZE, "resize-empty-inputs", ["Resize"]),
        (RELU, "idle-relu", ["QuantizeLinear", "DequantizeLinear", "Relu", "QuantizeLinear", "DequantizeLinear"]),
        (FLATTEN, "flatten-to-reshape", ["Reshape", "Reshape", "Flatten"]),
        (RESHAPE, "plain-reshape", ["Reshape", "Reshape"]),
    ],
    ids=["sum", "resize", "relu", "flatten", "reshape"],
)
def test_a_rewrite_changes_its_nodes_and_no_result(tmp_path: Path, text: str, fix: str, ops: list[str]) -> None:
    model = make_model(text, tmp_path / "m.onnx")
    fixed = fix_model(model, tmp_path / "out.onnx")
    assert [applied.id for applied in fixed.fixes] == [fix]
    assert op_names(fixed.model.path) == ops
    assert_near(model, fixed.model)


def test_a_gelu_in_parts_of_float16_is_joined_once_it_is_float32(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]> g (float16[2,9] x) => (float16[2,9] y)
        { c = Mul(r, x)  e = Erf(c)  p = Add(e, o)  q = Mul(p, h)  y = Mul(x, q) }"""
    numbers = {"r": np.float16(0.5**0.5), "o": np.float16(1), "h": np.float16(0.5)}
    model = save_net(text, tmp_path / "m.onnx", **{name: np.asarray(number) for name, number in numbers.items()})
    assert fix_model(model, tmp_path / "half.onnx").fixes == ()
    fixed = fix_model(model, tmp_path / "out.onnx", ["half-to-float", "join-gelu"])
    assert op_names(fixed.model.path) == ["Cast", "Gelu", "Cast"]


def test_a_fix_names_the_nodes_that_it_rewrote(tmp_path: Path) -> None:
    fixed = fix_model(make_model(SUM, tmp_path / "m.onnx"), tmp_path / "out.onnx")
    assert fixed.fixes == (Fix(id="sum-to-add", nodes=("Sum_s", "Sum_y")),)
    names = [node.name for node in onnx.load(str(fixed.model.path)).graph.node]
    assert names == ["Sum_s", "Sum_t", "Sum_y/add_1", "Sum_y"]


def test_a_resize_leaves_its_empty_inputs_out(tmp_path: Path) -> None:
    fixed = fix_model(make_model(RESIZE, tmp_path / "m.onnx"), tmp_path / "out.onnx")
    assert list(onnx.load(str(fixed.model.path)).graph.node[0].input) == ["x", "", "", "sizes"]


def test_a_relu_that_others_read_stays(tmp_path: Path) -> None:
    text = RELU.replace("float[4] w)", "float[4] w, float[4] a)")
    assert fix_model(make_model(text, tmp_path / "m.onnx"), tmp_path / "out.onnx").fixes == ()


def test_a_reshape_to_nothing_keeps_its_attribute(tmp_path: Path) -> None:
    """There a 0 is a dimension, and would else stand for that of the input."""
    fixed = fix_model(make_model(RESHAPE, tmp_path / "m.onnx"), tmp_path / "out.onnx")
    assert not any(node.attribute for node in onnx.load(str(fixed.model.path)).graph.node)
    fixed = fix_model(make_model(ZERO, tmp_path / "z.onnx"), tmp_path / "zero.onnx")
    assert fixed.fixes == ()


def test_external_data_is_copied_beside(tmp_path: Path) -> None:
    text = "g (float[2,3] x) => (float[2,3] y) <float[2,3] k = {1, 2, 3, 4, 5, 6}> { y = Sum(x, k) }"
    path = make_model(text, tmp_path / "m.onnx").path
    proto = onnx.load(str(path))
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((2, 3), np.float32), "k"))
    onnx.save(proto, str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    fixed = fix_model(load_model(path), tmp_path / "out" / "fixed.onnx")
    assert fixed.model.external_files == ("fixed.onnx.data",)
    inputs = make_inputs(fixed.model)
    assert np.array_equal(run_model(fixed.model.path, inputs)["y"], run_model(path, inputs)["y"])


def test_every_rewrite_has_advice() -> None:
    assert set(REWRITES) - set(REQUIRED_REWRITES) <= {adviser.id for adviser in ADVISERS}


def test_a_target_asks_for_the_rewrites_of_its_weights_in_blocks_and_of_its_float_kernels() -> None:
    qnn, xnnpack = load_target("qnn"), load_target("xnnpack")
    assert list_required(load_target("qnn", {"blocks": "32"})) == ("gemm-to-matmul", *list_required(qnn))
    assert {"half-to-float", "plain-pad"} <= {*list_required(qnn)} - {*list_required(qnn, stays_float=True)}
    assert {"bounded-exp", "split-lstm"} <= {*list_required(qnn, stays_float=True)} - {*list_required(qnn)}
    assert list_required(load_target("nnapi")) == ("half-to-float", "double-to-float")
    assert list_required(load_target("coreml")) == ()
    assert list_required(xnnpack, stays_float=True) == ("half-to-float", "exact-resize")
