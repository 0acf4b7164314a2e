"""The CPU provider and openvino: what each takes, what it then runs in integers or cannot compile."""

import importlib.util
from pathlib import Path

import pytest
from check_models import check_file, check_text, conv_net, quantized_net, save_text
from onnxruntime.quantization import QuantType

from edgekit.convert.convert import find_integer_nodes
from edgekit.devices.find import find_device
from edgekit.devices.observe import Observed, observe_target
from edgekit.jobs.check import check_targets
from edgekit.model.model import load_model
from edgekit.recipe import Recipe
from edgekit.target import load_target

QDQ = (
    "<float s = {{0.1}}, uint8 z = {{0}}> {{ a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z) [n] c = {call}"
    " d = QuantizeLinear(c, s, z) y = DequantizeLinear(d, s, z) }}"
)
ANOTHER_STEP = QDQ.replace("QuantizeLinear(c, s, z)", "QuantizeLinear(c, t, z)").replace(
    "<float s", "<float t = {{0.2}}, float s"
)
CALLS = {
    "Sigmoid(b)": True,
    "Add(b, b)": True,
    "Softmax(b)": True,
    "Concat<axis=1>(b, b)": True,
    "Transpose<perm=[0,1,3,2]>(b)": True,
    "MaxPool<kernel_shape=[2,2]>(b)": True,
    "GlobalAveragePool(b)": True,
    "Sqrt(b)": False,
    "HardSigmoid(b)": False,
    "Sub(b, b)": False,
    "DepthToSpace<blocksize=2>(b)": True,
    "SpaceToDepth<blocksize=2>(b)": False,
    "ReduceMean<axes=[2,3]>(b)": False,
    "Tanh(b)": False,
}


def qdq_text(call: str, form: str = QDQ) -> str:
    return f"g (float[1,4,4,4] x) => (float y) {form.format(call=call)}"


@pytest.mark.parametrize("call", CALLS)
def test_an_operator_runs_in_integers_as_predicted(tmp_path: Path, call: str) -> None:
    path = save_text(qdq_text(call), tmp_path / "m.onnx")
    report = check_file(path, "cpu")
    (node,) = (node for node in report.node_list if node.name == "n")
    seen = find_integer_nodes(load_model(path), signed=True).get("n", False)
    assert (report.verdict, node.taken, node.integers, seen) == ("yes", True, CALLS[call], CALLS[call])
    assert bool(node.remarks) is not node.integers


@pytest.mark.parametrize("call", ["Transpose<perm=[0,1,3,2]>(b)", "MaxPool<kernel_shape=[2,2]>(b)"])
def test_what_moves_values_needs_one_scale_on_both_sides(tmp_path: Path, call: str) -> None:
    path = save_text(qdq_text(call, ANOTHER_STEP), tmp_path / "m.onnx")
    (node,) = (node for node in check_file(path, "cpu").node_list if node.name == "n")
    assert (node.integers, find_integer_nodes(load_model(path), signed=True)["n"]) == (False, False)
    assert "not all quantized as its 8-bit kernel wants them" in node.remarks[0]


@pytest.mark.parametrize("arch", ["arm64", "x64"])
def test_the_session_agrees_about_a_network(tmp_path: Path, arch: str) -> None:
    path = quantized_net(tmp_path / "q.onnx", QuantType.QUInt8)
    seen = observe_target(load_model(path), load_target("cpu", {"arch": arch}))
    assert isinstance(seen, Observed)
    assert (seen.device, seen.disagreements, seen.failure) == ("host", (), None)
    assert (seen.taken, check_file(path, "cpu", {"arch": arch}).integer_macs) == (seen.nodes, 1.0)


def test_signed_activations_run_in_integers_on_arm_alone(tmp_path: Path) -> None:
    path = quantized_net(tmp_path / "q.onnx", QuantType.QInt8)
    arm, x64 = (check_file(path, "cpu", {"arch": arch}) for arch in ("arm64", "x64"))
    assert (arm.integer_macs, round(x64.integer_macs, 2)) == (1.0, 0.0)
    assert (arm.verdict, x64.verdict) == ("yes", "yes")


def test_kernels_of_half_precision_are_for_arm() -> None:
    text = "g (float16[1,2,4,4] x, float16[2,2,1,1] w) => (float16[1,2,4,4] y) { y = Conv(x, w) }"
    (arm,), (x64,) = (check_text(text, "cpu", {"arch": arch}) for arch in ("arm64", "x64-vnni"))
    assert (arm.taken, arm.remarks, x64.taken) == (True, (), True)
    assert "no fp16 kernel for it on x64" in x64.remarks[0]
    (tanh,) = check_text("g (float16[4] x) => (float16[4] y) { y = Tanh(x) }", "cpu")
    assert "no fp16 kernel" in tanh.remarks[0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("g (float[4] x) => (float[4] y) { [n] y = ai.nowhere.Foo(x) }", "no kernel for ai.nowhere:Foo"),
        ("g (bfloat16[4] x) => (bfloat16[4] y) { [n] y = Tanh(x) }", "its input is bfloat16"),
    ],
)
def test_what_has_no_kernel_makes_no_session(body: str, reason: str) -> None:
    (node,) = check_text(body, "cpu")
    assert (node.taken, node.fatal) == (False, True)
    assert reason in node.reasons[0]


def test_a_session_that_is_refused_is_observed(tmp_path: Path) -> None:
    path = save_text("g (bfloat16[4] x) => (bfloat16[4] y) { [n] y = Tanh(x) }", tmp_path / "m.onnx")
    seen = observe_target(load_model(path), load_target("cpu"))
    assert isinstance(seen, Observed)
    assert seen.failure is not None


def test_the_cpu_is_recommended_only_where_no_accelerator_is_of_use(tmp_path: Path) -> None:
    accelerated = check_targets(conv_net(tmp_path / "net.onnx"), Recipe(targets=("all",)))
    assert accelerated.recommended.target not in {None, "cpu"}
    path = save_text("g (double[4] x) => (double[4] y) { y = Tanh(x) }", tmp_path / "m.onnx")
    assert check_targets(path, Recipe(targets=("all",))).recommended.target == "cpu"


UNARY = "g (float[2,4] x) => (float[2,4] y) {{ y = {} }}"
PAD = """g (uint8[1,3,4,4] x) => (uint8[1,3,4,5] y) <float s = {0.1}, uint8 z = {64}, int64[8] p = {0,0,0,0,0,0,0,1}>
    { a = DequantizeLinear(x, s, z) b = Pad(a, p) y = QuantizeLinear(b, s, z) }"""
FATAL = [
    (UNARY.format("Mod<fmod = 0>(x, x)"), "attribute 'fmod' is 0"),
    ("g (float[4] x, int64[1] a) => (float[1,4] y) { y = Unsqueeze(x, a) }", "input 1 is computed; it must be"),
    ("g (string[4] x) => (string[4] y) { y = Identity(x) }", "string"),
    (
        """g (float[1,1,4,4] x) => (float[1,1,8,8] y) <float[4] f = {1,1,2,2}>
            { y = Resize<coordinate_transformation_mode = "half_pixel_symmetric">(x, , f) }""",
        "half_pixel_symmetric",
    ),
    ("g (float[2] x) => (float[2] y) { y = Reshape<allowzero = 1>(x, x) }", "allowzero"),
]


def test_a_name_of_the_list_is_taken_whatever_its_types() -> None:
    for body in (UNARY.format("HardSwish(x)"), "g (float16[4] x) => (float16[4] y) { y = Erf(x) }"):
        (node,) = check_text(body, "openvino")
        assert node.taken
        assert node.risks == ()


def test_a_name_that_the_list_lacks_is_left_to_the_cpu() -> None:
    (node,) = check_text("g (float[3,3] x) => (float y) { y = Det(x) }", "openvino")
    assert not node.taken
    assert not node.fatal


@pytest.mark.parametrize(("body", "reason"), FATAL)
def test_what_openvino_cannot_compile_makes_no_session(body: str, reason: str) -> None:
    (node,) = check_text(body, "openvino", opset=19)
    assert node.fatal
    assert reason in "; ".join(node.reasons)


def test_a_pad_between_dq_and_q_and_signed_activations_are_risks(tmp_path: Path) -> None:
    report = check_file(save_text(PAD, tmp_path / "m.onnx"), "openvino")
    assert report.verdict == "maybe"
    assert any("fills in another value than zero" in risk for risk in report.risks)
    path = save_text(PAD.replace("uint8", "int8"), tmp_path / "signed.onnx")
    assert any("signed activations" in risk for risk in check_file(path, "openvino").risks)


@pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_openvino") is None,
    reason="onnxruntime-ep-openvino is not installed: pip install onnxruntime-ep-openvino==1.8.1",
)
@pytest.mark.parametrize("body", [FATAL[0][0], UNARY.format("HardSwish(x)")])
def test_the_plug_in_does_what_is_predicted(tmp_path: Path, body: str) -> None:
    target = load_target("openvino")
    assert find_device("openvino", target).find_missing() is None
    path = save_text(body, tmp_path / "m.onnx")
    observed = observe_target(load_model(path), target)
    assert isinstance(observed, Observed)
    assert (observed.failure is None) == (check_file(path, "openvino").verdict == "yes")
    assert observed.disagreements == ()
