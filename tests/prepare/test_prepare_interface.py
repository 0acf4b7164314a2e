"""Outputs left out and inputs frozen."""

from pathlib import Path

import numpy as np
import pytest
from prepare_models import ZOO, make_inputs, make_model, op_names, run_model

from edgekit.errors import RuntimeRefusal, UsageError
from edgekit.model.model import load_model
from edgekit.prepare.clean import prepare_model

HEADS = (
    "g (float[2] x, int64 k, string s) => (float[2] y, float[2] z, string t)"
    "{ y = Abs(x)  c = Cast<to = 1>(k)  n = Neg(x)  z = Mul(n, c)  t = Identity(s) }"
)


def test_outputs_are_left_out_with_what_made_them(tmp_path: Path) -> None:
    model = make_model(HEADS, tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "out.onnx", {}, outputs=["y"])
    assert [spec.name for spec in prepared.outputs] == ["y"]
    assert op_names(prepared.path) == ["Abs"]
    with pytest.raises(UsageError, match="no output 'yy'"):
        prepare_model(model, tmp_path / "out.onnx", {}, outputs=["yy"])


def test_a_frozen_input_is_folded(tmp_path: Path) -> None:
    model = make_model(HEADS, tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "out.onnx", {}, constants={"k": 3})
    assert [spec.name for spec in prepared.inputs] == ["x", "s"]
    assert "Cast" not in op_names(prepared.path)
    inputs = {"x": np.array([1, -2], np.float32), "s": np.array("a", object)}
    assert run_model(prepared.path, inputs)["z"].tolist() == [-3, 6]


@pytest.mark.parametrize(
    ("constants", "message"),
    [({"kk": 1}, "no input 'kk'"), ({"k": 1.5}, "cannot hold 1.5"), ({"s": 1}, "input 's' holds no numbers")],
)
def test_what_cannot_be_frozen_is_refused(tmp_path: Path, constants: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare_model(make_model(HEADS, tmp_path / "m.onnx"), tmp_path / "out.onnx", {}, constants=constants)


@pytest.mark.skipif(not ZOO.is_dir(), reason="needs ../shared/zoo")
def test_a_branch_that_fits_no_static_shape_goes_with_its_condition(tmp_path: Path) -> None:
    model = load_model(ZOO / "models/silero_vad.onnx")
    dims = {"input:0": 1, "input:1": 576, "state:1": 1}
    with pytest.raises(RuntimeRefusal, match="If_0"):
        prepare_model(model, tmp_path / "out.onnx", dims)
    prepared = prepare_model(model, tmp_path / "out.onnx", dims, constants={"sr": 16000})
    assert "If" not in op_names(prepared.path)
    inputs = make_inputs(prepared)
    expected = run_model(model.path, inputs | {"sr": np.array(16000)})
    got = run_model(prepared.path, inputs)
    assert all(np.allclose(expected[name], got[name], atol=1e-5) for name in expected)
