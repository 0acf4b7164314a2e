"""`edgekit prepare --fix --target`: what check finds a gain in is applied, and check agrees afterwards."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from tiny_models import parse_model

from edgekit.cli.main import run_command

PADDED = (
    '<ir_version: 8, opset_import: ["" : 17]> g (float[1,2,6,6] x) => (float[1,2,8,8] y) '
    '<int64[8] p = {0,0,1,1,0,0,1,1}> { [act] a = Tanh(x) [pad] b = Pad<mode="reflect">(a, p) [hs] y = HardSwish(b) }'
)


def _run(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    capsys.readouterr()
    assert run_command([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_rewrites_that_a_target_gains_by_are_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = parse_model(PADDED, tmp_path / "m.onnx"), tmp_path / "out.onnx"
    advice = _run(["check", str(model), "--target", "nnapi"], capsys, code=1)["targets"]["nnapi"]["advice"]
    gains = {entry["id"]: (entry["nodes"], entry["gain_nodes"]) for entry in advice if entry["fix"] == "automatic"}
    assert gains == {"pad-reflect": (["pad"], 1), "split-hard-swish": (["hs"], 1)}
    done = _run(["prepare", str(model), "--fix", "--target", "nnapi", "--out", str(out)], capsys)
    assert {fix["id"] for fix in done["fixes"]} == set(gains)
    assert (done["gain"]["before"]["taken"], done["gain"]["after"]["verdict"]) == (1, "yes")
    assert done["gain"]["after"]["taken"] == done["gain"]["after"]["nodes"] == len(onnx.load(str(out)).graph.node)
    again = _run(["check", str(out), "--target", "nnapi"], capsys)["targets"]["nnapi"]
    assert (again["verdict"], again["advice"]) == ("yes", [])


def test_what_gains_nothing_on_a_target_is_not_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = parse_model(PADDED, tmp_path / "m.onnx"), tmp_path / "out.onnx"
    done = _run(["prepare", str(model), "--target", "qnn", "--out", str(out)], capsys)
    assert done["fixes"] == []
    assert done["gain"]["before"] == done["gain"]["after"]


def test_the_gain_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = parse_model(PADDED, tmp_path / "m.onnx"), tmp_path / "out.onnx"
    assert run_command(["prepare", str(model), "--target", "nnapi", "--set", "api_level=30", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "- pad-reflect: 1 nodes" in told
    assert "before: nnapi: no; 1/3" in told
    assert "after: nnapi: yes" in told


@pytest.mark.parametrize("extra", [["--target", "nosuch"], ["--target", "nnapi", "--set", "api_level=x"]])
def test_a_wrong_target_is_a_usage_error(tmp_path: Path, extra: list[str]) -> None:
    model, out = parse_model(PADDED, tmp_path / "m.onnx"), tmp_path / "out.onnx"
    assert run_command(["prepare", str(model), *extra, "--out", str(out)]) == 2
    assert not out.exists()
