"""A plan says which node is quantized, and how; that for the CPU is what its kernels compute."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from quantize_models import dequantized_constants, make_model, random_samples

from edgekit.check.check import check_model
from edgekit.convert.convert import find_integer_nodes
from edgekit.errors import DataError, EdgekitError, ModelError, UsageError
from edgekit.model.model import Model
from edgekit.quantize import Calibration, QuantizedModel, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.calibration.calibrate import assume_ranges
from edgekit.quantize.graph.float_graph import float_activations, read_float_graph
from edgekit.quantize.plan import cut_tails, draft_plan, widen_ranges
from edgekit.quantize.ranges import TensorRange
from edgekit.target import Precision, load_target


@pytest.mark.parametrize(
    ("digest", "precision", "method", "error", "message"),
    [
        ("", "fp16", "auto", UsageError, "'fp16' is no integer precision"),
        ("0" * 64, "int8", "auto", DataError, r"another model than 'conv_net\.onnx'"),
        ("", "int8", "minmx", UsageError, "did you mean 'minmax'"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    net: Model, calibration: Calibration, digest: str, precision: Precision, method: str, error: type[EdgekitError],
    message: str
) -> None:  # fmt: skip
    other = msgspec.structs.replace(calibration, model_sha256=digest or net.sha256)
    with pytest.raises(error, match=message):
        plan_quantization(net, other, load_target("qnn"), precision, method=method)


@pytest.mark.parametrize("api_level", ["28", "29"])
def test_old_devices_get_one_scale(net: Model, calibration: Calibration, tmp_path: Path, api_level: str) -> None:
    target = load_target("nnapi", {"api_level": api_level})
    plan = plan_quantization(net, calibration, target, "int8")
    assert (bool(plan.axes), plan.block) == (api_level == "29", 0)
    quantized = quantize_model(net, plan, calibration, tmp_path / "q.onnx").model
    assert [node.op for node in check_model(quantized, target).node_list if node.op == "Conv" and not node.taken] == []


def test_what_computes_in_double_precision_stays_as_it_is(tmp_path: Path) -> None:
    text = """g (float[1,8] x) => (float[1,4] y, double[1,4] p) {
      h = MatMul(x, w1) r = Relu(h) y = MatMul(r, w2) d = Cast<to = 11>(y) s = Softmax(d) p = Mul(s, d) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 16), "w2": (16, 4)})
    calibration = calibrate_model(model, random_samples(model), work=tmp_path / "work")
    for name in ("qnn", "nnapi", "xnnpack", "cpu"):
        plan = plan_quantization(model, calibration, load_target(name), "int8")
        reasons = {node.op: node.reason for node in plan.float_nodes}
        assert reasons["Softmax"] == reasons["Mul"] == "it computes in double precision"
        quantized = quantize_model(model, plan, calibration, tmp_path / f"{name}.onnx")
        assert quantized.quantized_nodes == 2


def draft(
    folder: Path, target: str, body: str, weights: dict[str, tuple[int, ...]] | None = None, *,
    precision: Precision = "int8", unseen: str = "", **rules: Any,
) -> QuantPlan:  # fmt: skip
    """Returns the draft of a plan, as if each tensor but one had been seen from -1 to 1."""
    model = make_model(f"g {body}", folder / "m.onnx", weights)
    graph, span = read_float_graph(model), TensorRange(low=-1.0, high=1.0)
    ranges = {name: span for name in float_activations(graph) if name != unseen}
    calibration = assume_ranges(model, ranges)
    chosen = load_target(target)
    quantization = msgspec.structs.replace(chosen.quantization, **rules)
    chosen = msgspec.structs.replace(chosen, quantization=quantization)
    return draft_plan(model, graph, calibration, chosen, precision)


def reasons(plan: QuantPlan) -> dict[str, str]:
    return {node.op: node.reason for node in plan.float_nodes}


@pytest.mark.parametrize(
    ("node", "shape", "weight", "bias", "axis", "bits"),
    [
        ("ConvTranspose(x, w)", "1,8,8,8", (8, 5, 1, 1), (), 1, 8),
        ("ConvTranspose<group=2>(x, w)", "1,8,8,8", (8, 5, 1, 1), (), None, 8),
        ("Conv<group=2>(x, w)", "1,8,8,8", (6, 4, 1, 1), (), 0, 4),
        ("Conv(x, w)", "1,8,8,8", (6, 8, 1, 1), (), 0, 4),
        ("Conv(x, w)", "1,8,8,8", (1, 8, 1, 1), (), 0, 4),
        ("Conv<group=8>(x, w)", "1,8,8,8", (8, 1, 1, 1), (), 0, 8),
        ("MatMul(x, w)", "1,8,8,8", (8, 6), (), 1, 4),
        ("MatMul(x, w)", "1,8,8,8", (8, 8, 6), (), None, 8),
        ("Gemm<transB=1>(x, w, b)", "2,8", (6, 8), (6,), 0, 4),
        ("Gemm(x, w, b)", "2,8", (8, 6), (6,), 1, 4),
        ("Gemm(x, w)", "2,8", (8, 6), (6,), 1, 4),
        ("Gemm(x, w, b)", "2,8", (8, 6), (1, 6), 1, 4),
        ("Gemm(x, w, b)", "2,8", (8, 6), (1,), 1, 4),
        ("Gemm(x, w, b)", "2,8", (8, 6), (), 1, 4),
    ],
)
def test_weights_get_a_scale_per_output_channel_where_their_bias_can_follow(
    tmp_path: Path, node: str, shape: str, weight: tuple[int, ...], bias: tuple[int, ...], axis: int | None, bits: int
) -> None:
    body, shapes = f"(float[{shape}] x) => (float y) {{ y = {node} }}", {"w": weight, "b": bias}
    assert draft(tmp_path, "cpu", body, shapes).axes == ({} if axis is None else {"w": axis})
    # Of few weights that are added up, as in a depthwise convolution, the errors do not average out in 4 bits.
    assert draft(tmp_path, "qnn", body, shapes, precision="w4a8").bits == ({"w": 4} if bits == 4 else {})


def test_a_node_without_an_integer_form_says_why_and_alone_is_refused(tmp_path: Path) -> None:
    body = "(float[1,4] x) => (float[1,4] y) { a = Erf(x) y = Add(a, x) }"
    assert reasons(draft(tmp_path, "nnapi", body)) == {"Erf": "no rule of this target quantizes Erf"}
    with pytest.raises(ModelError, match=r"no node of 'm\.onnx' can be quantized: no rule .* quantizes Erf"):
        draft(tmp_path, "nnapi", "(float[1,4] x) => (float[1,4] y) { y = Erf(x) }")
    loop = """(float[1,4] x) => (float[1,4] y) <int64 n = {3}, bool go = {1}> {
        [steps] s = Loop(n, go, x) <body = b (int64 i, bool c, float[1,4] a) => (bool d, float[1,4] e)
        { d = Identity(c) e = Neg(a) }> y = Erf(s) }"""
    with pytest.raises(ModelError, match="can be quantized: nodes in the body of Loop 'steps' stay float"):
        draft(tmp_path, "nnapi", loop)


NORMALISED = """(float[1,32] x) => (float[1,8] y) <float eps = {1e-5}> {
  m = ReduceMean<axes=[1]>(x) d = Sub(x, m) s = Mul(d, d) v = ReduceMean<axes=[1]>(s) e = Add(v, eps) r = Sqrt(e)
  n = Div(d, r) y = MatMul(n, w) }"""


@pytest.mark.parametrize(
    ("target", "precision", "kind"),
    [
        ("qnn", "int8", "wide"),
        ("qnn", "int16", "neither"),
        ("qnn", "w4a8", "wide"),
        ("qnn", "w4a16", "neither"),
        ("cpu", "int8", "float"),
    ],
)
def test_a_variance_gets_16_bits_beside_8(tmp_path: Path, target: str, precision: Precision, kind: str) -> None:
    plan = draft(tmp_path, target, NORMALISED, {"w": (32, 8)}, precision=precision, op_types=())
    why = {op for op, reason in reasons(plan).items() if "belongs to the" in reason}
    assert why == ({"ReduceMean", "Sub", "Mul", "Add", "Sqrt", "Div"} if kind == "float" else set())
    assert {"v", "e", "r", "n"} <= set(plan.wide) if kind == "wide" else not plan.wide
    assert "y" not in plan.wide


@pytest.mark.parametrize("op", ["Relu", "Clip", "Neg"])
@pytest.mark.parametrize(("read", "stays"), [("a", True), ("b", True), ("x", False)])
def test_what_is_clamped_beside_a_reader_in_a_body_stays_float(tmp_path: Path, op: str, read: str, stays: bool) -> None:
    body = f"""(bool c, float[1,4] x) => (float[1,4] y, float[1,4] z) {{ a = Mul(x, x) b = {op}(a) y = Mul(b, b)
      z = If(c) <then_branch = t () => (float[1,4] p) {{ p = Identity({read}) }},
                 else_branch = e () => (float[1,4] q) {{ q = Identity(x) }}> }}"""
    why = reasons(draft(tmp_path, "qnn", body)).get(op, "")
    assert ("a control-flow body reads its input or output" in why) is (stays and op != "Neg")


def test_what_makes_or_reads_a_tensor_without_a_range_stays_float(tmp_path: Path) -> None:
    body = "(float[1,4] x) => (float[1,4] y) { a = Mul(x, x) b = Add(a, x) c = Neg(b) y = Mul(a, a) }"
    plan = draft(tmp_path, "qnn", body, unseen="b")
    assert {op for op, reason in reasons(plan).items() if "empty for some samples" in reason} == {"Add", "Neg"}
    assert {node.name for node in plan.float_nodes} == {"n1_Add", "n2_Neg"}
    # A constant that is repeated is made without floats.
    body = """(float[1,4] x, int64[1] n) => (float[1,4] y, float[m] z) <float k = {2}>
        { y = Mul(x, x) e = Expand(k, n) z = Neg(e) }"""
    assert set(reasons(draft(tmp_path, "qnn", body, unseen="e"))) == {"Expand", "Neg"}


@pytest.mark.parametrize(
    ("target", "body", "quantizes"),
    [
        ("nnapi", "(float[1,4] x) => (float[1,4] y) { a = Relu(x) y = Relu(a) }", False),
        ("qnn", "(float[1,4] x) => (float[1,4] y) { a = Relu(x) y = Relu(a) }", True),
        ("qnn", "(int64[2] i) => (float[2,4] y) <float[1,4] k = {1,2,3,4}> { y = Gather(k, i) }", False),
    ],
)
def test_what_only_follows_is_quantized_for_qnn(tmp_path: Path, target: str, body: str, quantizes: bool) -> None:
    if quantizes:
        assert not draft(tmp_path, target, body).float_nodes
    else:
        with pytest.raises(ModelError, match="no node"):
            draft(tmp_path, target, body)


@pytest.mark.parametrize(
    ("body", "axes"),
    [
        ("y = MatMul(x, w)", {"w": 1}),
        ("h = MatMul(x, w) y = MatMul(h, w)", {}),
        ("h = MatMul(x, w) y = Add(h, w)", {}),
        ("v = Neg(w) y = MatMul(x, v)", {}),
        ("d = Cast<to=11>(x) e = MatMul(d, u) f = Cast<to=1>(e) y = Mul(f, f)", {}),
    ],
    ids=["its own", "shared with a layer", "read by a sum", "computed", "in double precision"],
)
def test_only_a_layers_constant_gets_scales_per_channel(tmp_path: Path, body: str, axes: dict[str, int]) -> None:
    text = f"(float[8,8] x) => (float[8,8] y) <double[1,1] u = {{2}}> {{ {body} }}"
    assert draft(tmp_path, "cpu", text, {"w": (8, 8)}).axes == axes
    assert draft(tmp_path, "cpu", text, {"w": (8, 8)}, per_channel_ops=("Conv",)).axes == {}
    assert draft(tmp_path, "cpu", text, {"w": (8, 8)}, weight_symmetric=False).axes == {}


def test_a_single_number_times_a_weight_has_one_scale(tmp_path: Path) -> None:
    one, two = (f"(float[{rows},1] x) => (float[{rows},4] y) {{ y = MatMul(x, w) }}" for rows in (1, 2))
    assert draft(tmp_path, "qnn", one, {"w": (1, 4)}).axes == {}
    assert draft(tmp_path, "qnn", two, {"w": (1, 4)}).axes == {"w": 1}


@pytest.mark.parametrize(
    ("target", "precision", "wide"),
    [("qnn", "int8", {"w", "r", "b"}), ("qnn", "int16", set[str]()), ("cpu", "int8", set[str]())],
)
def test_recurrent_constants_get_16_bits(tmp_path: Path, target: str, precision: Precision, wide: set[str]) -> None:
    text = """(float[5,1,3] x) => (float[5,1,1,2] z) {
      a = Neg(x) m = Mul(a, a) y = LSTM<hidden_size=2>(m, w, r, b) z = Neg(y) }"""
    shapes: dict[str, tuple[int, ...]] = {"w": (1, 8, 3), "r": (1, 8, 2), "b": (1, 16)}
    plan = draft(tmp_path, target, text, shapes, precision=precision)
    assert set(plan.wide) == wide
    assert all(span.low < 0 < span.high for span in plan.wide.values())
    assert not draft(tmp_path, target, text, shapes, precision=precision, unseen="y").wide


@pytest.mark.parametrize(
    ("target", "precision", "rules", "zero"),
    [
        ("nnapi", "int8", {}, 0),
        ("cpu", "int8", {"activation": "int8"}, -128),
        ("qnn", "int8", {}, None),
        ("cpu", "int8", {"op_types": ("Mul",)}, None),
    ],
)
def test_shares_between_0_and_1_get_all_256_steps_between_them(
    tmp_path: Path, target: str, precision: Precision, rules: dict[str, Any], zero: int | None
) -> None:
    body = "(float[1,4] x) => (float[1,4] y, float[1,4] z, double[1,4] w)"
    body += "{ a = Mul(x, x) y = Softmax(a) z = Sigmoid(a) d = Cast<to=11>(a) w = Softmax(d) }"
    grids = draft(tmp_path, target, body, precision=precision, **rules).grids
    assert {name: (grid.scale, grid.zero_point) for name, grid in grids.items()} == (
        {} if zero is None else {"y": (1 / 256, zero), "z": (1 / 256, zero)}
    )


pytestmark = pytest.mark.slow

SETTINGS = {
    "arm64": {"arch": "arm64"},
    "x64-vnni": {"arch": "x64-vnni"},
    "x64": {"arch": "x64"},
    "x64-7bit": {"arch": "x64", "weights": "7bit"},
}


def quantize(model: Model, calibration: Calibration, arch: str, folder: Path) -> QuantizedModel:
    plan = plan_quantization(model, calibration, load_target("cpu", SETTINGS[arch]), "int8", method="minmax")
    return quantize_model(model, plan, calibration, folder / f"{arch}.onnx")


@pytest.mark.parametrize("arch", SETTINGS)
def test_nodes_with_kernels_run_in_integers(net: Model, calibration: Calibration, arch: str, tmp_path: Path) -> None:
    quantized = quantize(net, calibration, arch, tmp_path)
    seen = find_integer_nodes(quantized.model, signed=arch == "arm64")
    assert (quantized.float_nodes, all(seen.values()), len(seen)) == ((), True, 9)


def test_unsigned_weights_stand_for_the_same_numbers(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    one, other = (quantize(net, calibration, arch, tmp_path).model for arch in ("x64-vnni", "x64"))
    for tensor in ("r1", "c2", "z"):
        (signed, scale, _), (unsigned, same, zero) = (dequantized_constants(model, tensor) for model in (one, other))
        assert (scale == same).all()
        assert (signed.astype(int) == unsigned.astype(int) - int(zero[0])).all()


@pytest.mark.parametrize("method", ["minmax", "auto"])
def test_seven_bits_hold_two_products(net: Model, calibration: Calibration, method: str, tmp_path: Path) -> None:
    plan = plan_quantization(net, calibration, load_target("cpu", SETTINGS["x64-7bit"]), "int8", method=method)
    model = quantize_model(net, plan, calibration, tmp_path / "q.onnx").model
    weights = [dequantized_constants(model, tensor)[0].astype(int) for tensor in ("r1", "c2", "c3", "z")]
    assert max(abs(weight).max() for weight in weights) == 64
    assert 2 * 255 * 64 < 2**15


@pytest.mark.parametrize(
    ("high", "left"),
    [
        # Exact, three that a range method clips, and three with headroom, of which two hold all values all the same.
        *((4.0, 1.0), (2.0, 1.0), (1.0, 1.0), (0.8, 0.8)),
        *((8.0, 2.0), (16.0, 16.0), (20.0, 20.0), (0.0, 0.0), (-1.0, -1.0)),
    ],
)
def test_a_range_is_reduced_to_what_other_samples_reach(
    net: Model, calibration: Calibration, high: float, left: float
) -> None:
    plan = plan_quantization(net, calibration, load_target("qnn"), "int8", method="minmax")
    other, wide = TensorRange(low=-1, high=3), TensorRange(low=-8, high=high)
    seen = calibration.ranges | {"minmax": {"x": TensorRange(low=-4, high=4), "other": other}}
    known = msgspec.structs.replace(calibration, ranges=seen, unseen_shares={"x": (0.5, 0.25)})
    plan = msgspec.structs.replace(
        plan, ranges={"x": TensorRange(low=-4, high=high), "other": other}, wide={"x": wide, "constant": other}
    )
    found = cut_tails(plan, known)
    assert found.ranges == {"x": TensorRange(low=-2, high=left), "other": other}
    assert found.wide == {"x": TensorRange(low=-8, high=left), "constant": other}
    assert msgspec.structs.replace(found, ranges=plan.ranges, wide=plan.wide) == plan


def test_what_an_operator_bounds_is_not_widened(tmp_path: Path) -> None:
    text = """(float[1,4] x) => (float[1,4] y, float[1,4] z) <float a = {0}, float b = {6}>
        { m = Mul(x, x) c = Clip(m, a, b) s = Sigmoid(x) r = Reshape(s, k) y = Add(c, r) z = Relu(y) }"""
    model = make_model(text, tmp_path / "m.onnx", constants={"k": np.array([1, 4])})
    graph = read_float_graph(model)
    seen = {name: TensorRange(low=0, high=1) for name in float_activations(graph)}
    found = widen_ranges(graph, seen, 3)
    assert {name for name, span in found.items() if span.high == 3} == {"x", "y", "z"}
    assert {name for name, span in found.items() if span.high == 1} == {"m", "c", "s", "r"}
