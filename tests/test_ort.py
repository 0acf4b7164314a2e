"""The door to ONNX Runtime: its errors become ours, all of them."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from tiny_models import parse_model

from edgekit._ort import REFUSALS, CpuSession, Level, SessionSettings, describe_untested, translated
from edgekit.cli.main import run_command
from edgekit.errors import RuntimeRefusal


def test_every_exception_of_onnxruntime_is_translated() -> None:
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    classes = {value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes == set(REFUSALS)


def test_a_refusal_is_one_line_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"junk")
    with pytest.raises(RuntimeRefusal, match=r"bad\.onnx") as caught:
        CpuSession(tmp_path / "bad.onnx", SessionSettings())
    assert "\n" not in str(caught.value)


def test_values_that_a_node_refuses_are_told_from_a_model_that_does_not_open(tmp_path: Path) -> None:
    text = "g (int64[1] i) => (float[1] y) <float[3] t = {1, 2, 3}> { y = Gather(t, i) }"
    path = parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}', tmp_path / "m.onnx")
    session = CpuSession(path, SessionSettings())
    with pytest.raises(RuntimeRefusal, match="out of data bounds") as caught:
        session.run({"i": np.array([3])})
    assert str(caught.value.hint).startswith("the inputs do not fit this node: give samples such as the app has")


BRANCHES = """g (bool c, float[2] x) => (y) {
    y = If(c) <then_branch = t () => (b) { b = Relu(x) }, else_branch = e () => (b) { b = Concat<axis = 3>(x, x) }>
}"""


@pytest.mark.parametrize(
    ("graph", "hint"),
    [
        ("g (float[2] x) => (float[2] y) { y = com.acme.Magic(x) }", "--custom-ops LIB.so"),
        ("g (float[2] x) => (float[2] y) { [n] a = Relu(x) [n] y = Abs(a) }", "edgekit prepare MODEL --out FILE"),
        ("g (bfloat16[2] x) => (bfloat16[2] y) { y = Relu(x) }", "or an element type of one, that this"),
        (BRANCHES, "--freeze INPUT=NUMBER"),
    ],
)
def test_a_refusal_says_what_to_do(graph: str, hint: str, tmp_path: Path) -> None:
    path = parse_model(f'<ir_version: 8, opset_import: ["" : 17, "com.acme" : 1]> {graph}', tmp_path / "m.onnx")
    with pytest.raises(RuntimeRefusal, match=hint):
        CpuSession(path, SessionSettings())


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), translated("x"):
        raise ZeroDivisionError


@pytest.mark.parametrize("level", list(Level))
def test_a_session_runs_at_every_level(relu_model: Path, level: Level) -> None:
    session = CpuSession(relu_model, SessionSettings(level=level))
    assert session.run({"x": np.array([[-1, 0, 2]], np.float32)})["y"].tolist() == [[0, 0, 2]]


def test_a_message_that_is_no_text_is_a_refusal_too(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { a = Relu(x) y = Relu(a) }'
    path = parse_model(text, tmp_path / "m.onnx")
    path.write_bytes(path.read_bytes().replace(b"\n\x01a\x12\x01y", b"\n\x01\x8e\x12\x01y"))
    with pytest.raises(RuntimeRefusal, match=r"m\.onnx"):
        CpuSession(path, SessionSettings())


@pytest.mark.parametrize(
    ("version", "is_told"),
    [("1.31.1", False), ("1.32.0", False), ("1.32.7", False), ("1.30.0", False), ("1.33.0", True), ("2.0.0rc1", True)],
)
def test_a_version_is_warned_of_that_is_newer_than_each_that_was_tested(version: str, is_told: bool) -> None:
    warning = describe_untested(version)
    assert (warning is not None) is is_told
    assert warning is None or warning.endswith(f"and this is {version}: its results may differ")


def test_an_untested_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("edgekit._ort.TESTED_VERSIONS", ("1.20.0",))
    assert run_command(["doctor", "--json"]) == 0
    assert capsys.readouterr().err.startswith("edgekit: warning: edgekit was tested with ONNX Runtime 1.20.0")
