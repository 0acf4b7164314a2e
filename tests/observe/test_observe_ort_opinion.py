"""ONNX Runtime's own checker is asked in a child process, and its verdict is told apart from ours."""

import json
from pathlib import Path

import pytest
from demo_paths import MODEL
from tiny_models import parse_model

from edgekit.check.check import check_model
from edgekit.check.recommend import ask_ort_checker, explain_difference, find_opinion
from edgekit.cli.main import run_command
from edgekit.model.model import load_model
from edgekit.target import load_target

pytestmark = pytest.mark.slow


def test_the_demo_is_judged_for_three_providers() -> None:
    """A target that the checker does not know has no opinion."""
    found = ask_ort_checker(MODEL)
    assert find_opinion(found, check_model(load_model(MODEL), load_target("qnn"))) is None
    assert found.failure is None
    assert [(opinion.provider, opinion.verdict) for opinion in found.opinions] == [
        ("NNAPI", "yes"),
        ("CoreML NeuralNetwork", "yes"),
        ("CoreML MLProgram", "maybe"),
    ]


def test_a_crash_of_the_checker_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,4] x) => (float[4,1] y) { t = Relu(x) y = Transpose(t) }'
    )
    model = parse_model(text, tmp_path / "m.onnx")
    assert "IndexError" in str(ask_ort_checker(model).failure)
    assert run_command(["check", str(model), "--target", "nnapi", "--compare-ort"]) == 0
    assert "checker fails on this model: it ended with exit code 1" in capsys.readouterr().out


def test_a_false_yes_is_explained(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,4,4,4] x, float[1,1,4,4,4] z) => (float[1,1,4,4,4] y)'
        "<float[1,1,1,1,1] w = {1}> { t = Add(x, z) u = Conv(t, w) v = Relu(u) y = Add(v, z) }"
    )
    path = parse_model(text, tmp_path / "m.onnx")
    report = check_model(load_model(path), load_target("nnapi"))
    opinion = find_opinion(ask_ort_checker(path), report)
    assert opinion is not None
    assert (opinion.verdict, report.verdict) == ("yes", "no")
    assert any("operator names only" in reason and "Conv" in reason for reason in explain_difference(opinion, report))


def test_the_command_tells_both_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", str(MODEL), "--target", "coreml", "--compare-ort"]
    assert run_command(arguments) == 0
    shown = capsys.readouterr().out
    assert "ONNX Runtime's checker says maybe for CoreML MLProgram: 61 of 62 nodes in 2 partitions" in shown
    assert "check says yes for coreml, because" in shown
    assert run_command([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ort_checker"]["opinions"]) == 3
