"""The rules of openvino: what its list of operators takes, what OpenVINO then cannot compile, and what may go wrong."""

import importlib.util
from pathlib import Path

import pytest
from check_models import check_file, check_text, save_text

from edgekit.devices.find import find_device
from edgekit.devices.observe import Observed, observe_target
from edgekit.model.model import load_model
from edgekit.target import load_target

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
