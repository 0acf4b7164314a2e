"""QNN contexts, compiled by Qualcomm's own library in a child process."""

import importlib.util
from pathlib import Path

import msgspec
import onnx
import pytest
from convert_models import make_float, make_qdq, save_text

from edgekit.convert import context
from edgekit.convert.context import ContextOptions, compile_context
from edgekit.convert.convert import convert_model
from edgekit.errors import DeviceError, EdgekitError, MissingExtraError, RuntimeRefusal, UsageError
from edgekit.model.model import load_model
from edgekit.prepare.constants import DISABLED
from edgekit.target import load_target

pytestmark = pytest.mark.slow

needs_qnn = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_qnn") is None,
    reason="needs onnxruntime-qnn: pip install onnxruntime-qnn==2.7.0",
)


@needs_qnn
def test_a_context_says_what_it_fits_and_is_the_same_anywhere(tmp_path: Path) -> None:
    target = load_target("qnn", {"soc_model": "43"})
    converted = convert_model(make_qdq(tmp_path / "m.onnx"), target, tmp_path / "out")
    again = convert_model(make_qdq(tmp_path / "bb/other.onnx"), target, tmp_path / "bb/longer/out")
    assert converted.sha256 == again.sha256
    assert converted.files["context"] == ("model_ctx.onnx", "model_ctx_qnn.bin")
    assert converted.compatibility.split(":")[5] == "43"
    assert converted.versions["qairt"] == converted.compatibility.split(":")[2]
    (node,) = onnx.load(str(tmp_path / "out/model_ctx.onnx")).graph.node
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    assert (node.op_type, attributes["embed_mode"], attributes.get("is_multi_soc_ep_context", 0)) == ("EPContext", 0, 0)


@needs_qnn
@pytest.mark.parametrize(
    ("options", "at", "expected"),
    [
        pytest.param(ContextOptions(socs=("43", "69")), 5, "43,69", marks=pytest.mark.long),
        (ContextOptions(archs=("73", "79"), embedded=True), 4, "73,79"),
    ],
)
def test_a_context_serves_the_chips_asked_for(tmp_path: Path, options: ContextOptions, at: int, expected: str) -> None:
    converted = convert_model(make_qdq(tmp_path / "m.onnx"), load_target("qnn"), tmp_path / "out", context=options)
    assert converted.compatibility.split(":")[at] == expected
    beside = () if options.embedded else ("model_ctx_qnn.bin",)
    assert converted.files["context"] == ("model_ctx.onnx", *beside)
    node = onnx.load(str(tmp_path / "out/model_ctx.onnx")).graph.node[0]
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    assert (attributes["embed_mode"], attributes["is_multi_soc_ep_context"]) == (int(options.embedded), 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (ContextOptions(socs=("SM8550",)), UsageError, "'SM8550' is no number of a SoC"),
        (ContextOptions(archs=("v73",)), UsageError, "there is no HTP version 'v73'"),
        (ContextOptions(socs=("43",), archs=("73",)), UsageError, "not both"),
        (ContextOptions(socs=("43", "999")), RuntimeRefusal, "soc_model=43,999"),
    ],
)
@needs_qnn
def test_chips_that_do_not_exist_or_would_be_misread_are_refused(
    tmp_path: Path, options: ContextOptions, error: type[EdgekitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        convert_model(make_qdq(tmp_path / "m.onnx"), load_target("qnn"), tmp_path / "out", context=options)


@needs_qnn
def test_a_node_that_qnn_does_not_take_is_named(tmp_path: Path) -> None:
    graph = "(float[1,3,4,4] x) => (float[1,3] y) { [my_det] d = Det(x) [relu] y = Relu(d) }"
    model = save_text(tmp_path / "m.onnx", graph, {})
    with pytest.raises(RuntimeRefusal, match=r"soc_model=69 does not take the whole model.* 'my_det' \(Det\)"):
        convert_model(model, load_target("qnn"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_qnn
def test_a_constant_that_is_stored_in_integers_is_folded_before_qnn_sees_it(tmp_path: Path) -> None:
    """QNN refuses the Cast of a constant of 16 bits, as large constants in float are stored."""
    graph = """(float[1,4] x) => (float[1,3] y) <float[1,3] s = {1,2,3},
        int16[4,3] counts = {1,2,3,4,5,6,7,8,9,10,11,12}> { c = Cast<to = 1>(counts) w = Mul(c, s) y = MatMul(x, w) }"""
    converted = convert_model(save_text(tmp_path / "m.onnx", graph, {}), load_target("qnn"), tmp_path / "out")
    assert converted.files["context"][0] == "model_ctx.onnx"


@needs_qnn
def test_float_weights_between_quantized_tensors_are_not_rounded(tmp_path: Path) -> None:
    """ONNX Runtime rounds them to 8 bits with one scale, unless that is switched off: 33.5 dB are left of this Conv."""
    graph = """(float[1,2,4,4] x) => (float[1,2,4,4] y) <float s = {0.02}, uint8 z = {128}, float t = {2.0},
        float[2,2,1,1] w = {100, -70, 0.5, 0.3}> { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        c = Conv(d, w) r = QuantizeLinear(c, t, z) y = DequantizeLinear(r, t, z) }"""
    target = load_target("qnn")
    rounds = {**target.session.config, DISABLED: "none"}
    found: list[bytes] = []
    for place, session in enumerate((target.session, msgspec.structs.replace(target.session, config=rounds))):
        folder = tmp_path / str(place)
        save_text(folder / "m.onnx", graph, {})
        compile_context("m.onnx", msgspec.structs.replace(target, session=session), folder)
        found.append((folder / "model_ctx_qnn.bin").read_bytes())
    assert found[0] != found[1]


@needs_qnn
def test_a_model_of_which_qnn_takes_nothing_is_sent_to_the_cpu(tmp_path: Path) -> None:
    """As a forest of trees, of which ONNX Runtime says only that no node could be compiled."""
    model = save_text(tmp_path / "m.onnx", "(float[1,3,4,4] x) => (float[1,3] y) { y = Det(x) }", {})
    with pytest.raises(RuntimeRefusal, match="soc_model=69 takes no node of the model") as refused:
        convert_model(model, load_target("qnn"), tmp_path / "out")
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("build it for the CPU: --target cpu")


@needs_qnn
def test_a_compiler_that_takes_too_long_is_a_clear_error(tmp_path: Path) -> None:
    make_float(tmp_path / "m.onnx")
    with pytest.raises(DeviceError, match="QNN's compiler ran out of time"):
        compile_context("m.onnx", load_target("qnn"), tmp_path, timeout_s=0.01)


@needs_qnn
def test_a_compiler_that_crashes_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = tmp_path / "crash.py"
    crash.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr(context, "_PROGRAM", crash)
    with pytest.raises(DeviceError, match="QNN's compiler was ended by SIGSEGV"):
        convert_model(make_float(tmp_path / "m.onnx"), load_target("qnn"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_qnn
def test_external_data_is_compiled_in(tmp_path: Path) -> None:
    path = make_float(tmp_path / "m.onnx").path
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    converted = convert_model(load_model(path), load_target("qnn"), tmp_path / "out")
    assert converted.files["onnx"] == ("model.onnx", "model.onnx.data")
    assert converted.size_bytes["model_ctx_qnn.bin"] > 1000


def test_a_missing_wheel_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match="onnxruntime-qnn") as caught:
        convert_model(make_float(tmp_path / "m.onnx"), load_target("qnn"), tmp_path / "out")
    assert "onnxruntime-qnn==2.7.0" in caught.value.hint


@needs_qnn
def test_the_onnx_form_can_be_had_without_a_context(tmp_path: Path) -> None:
    target = load_target("qnn")
    conversion = msgspec.structs.replace(target.conversion, forms=("onnx",))
    converted = convert_model(
        make_float(tmp_path / "m.onnx"), msgspec.structs.replace(target, conversion=conversion), tmp_path / "out"
    )
    assert converted.files == {"onnx": ("model.onnx",)}
    assert converted.compatibility == ""
