"""What models name is text: no markup, no picture, no order to a terminal."""

from pathlib import Path

import onnx
import pytest
from tiny_models import parse_model

from edgekit.cli.main import run_command
from edgekit.cli.screen import print_table, showing_progress
from edgekit.report.tables import make_table
from edgekit.serialize import escape_controls

TAG, LOST, PICTURE, RED = "[/INST]", "blk[se]", ":key:", "\x1b[31m"


@pytest.fixture
def speaking(tmp_path: Path) -> Path:
    path = parse_model(
        "g (float[batch,3] x) => (float[batch,3] y) { a = Relu(x) b = Sigmoid(a) c = Tanh(b) y = Erf(c) }",
        tmp_path / "speaking.onnx",
    )
    model = onnx.load(path)
    for node, name in zip(model.graph.node, (TAG, LOST, PICTURE, RED), strict=True):
        node.name = name
    model.producer_name = f"{TAG} {RED}"
    onnx.helper.set_model_props(model, {"chat": f"{TAG} [bold]{LOST}"})
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["inspect"], [TAG, "[bold]blk[se]", "float32[batch,3]", "\\x1b[31m"]),
        (["inspect", "--sizes"], []),
        (["check", "--target", "xnnpack", "--dim", "batch=1"], [TAG, LOST, PICTURE, "\\x1b[31m"]),
    ],
)
def test_names_of_a_model_are_shown_literally_with_control_characters_escaped(
    speaking: Path, command: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_command([command[0], str(speaking), *command[1:]])
    printed = capsys.readouterr()
    assert [text for text in shown if text not in printed.out] == []
    assert RED not in printed.out + printed.err


def test_an_error_contains_no_terminal_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", str(tmp_path / f"{RED}.onnx")]) == 2
    shown = capsys.readouterr().err
    assert "\\x1b[31m.onnx" in shown
    assert RED not in shown


def test_progress_does_not_read_names_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with showing_progress(1) as progress:
        progress(f"{TAG} {LOST} {PICTURE} {RED}")
    assert f"{TAG} {LOST} {PICTURE} \\x1b[31m" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("volume", "quiet_s", "said"), [(0, 60.0, ""), (0, 0.0, "after 0 s: calibrate\n"), (-1, 0.0, "")]
)
def test_in_a_log_a_long_command_says_from_time_to_time_how_far_it_is(
    volume: int, quiet_s: float, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgekit.cli.screen.QUIET_S", quiet_s)
    with showing_progress(volume) as progress:
        progress("calibrate")
    assert capsys.readouterr().err == said


def test_a_spinner_reads_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with showing_progress(0) as progress:
        progress(f"{TAG} {LOST}")
    assert RED not in capsys.readouterr().err


def test_a_narrow_terminal_cuts_no_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    words = [f"agreement{number}" for number in range(6)]
    print_table(make_table(*words))
    shown = capsys.readouterr().out
    assert [word for word in words if word not in shown] == []


def test_printable_text_is_not_escaped() -> None:
    assert escape_controls("Größe → 3\t4\n") == "Größe → 3\t4\n"
    assert escape_controls("a\x00b\x9bc\u202ed") == "a\\x00b\\x9bc\\u202ed"
