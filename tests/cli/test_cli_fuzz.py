"""The fuzzer over every command: a few hundred cases here, `make fuzz` goes on; and what it must call a finding."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools/fuzz"))

from cases import PLANS, Case  # noqa: E402
from worker import Fence, Told, judge  # noqa: E402

from edgekit.cli.main import COMMANDS  # noqa: E402

FILE = (0o100644, 5, 1)


@pytest.mark.long
@pytest.mark.fuzz
@pytest.mark.slow
def test_hundreds_of_damaged_inputs_of_all_commands(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/fuzz/fuzz.py"), "--cases", "400", "--seed", "1", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=550, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "fuzz: 400 cases of seed 1" in done.stdout
    assert "no finding; the last 400 found nothing" in done.stdout


def test_the_fuzzer_knows_every_command() -> None:
    # `demo` builds what lies in the package.
    assert {name for name, _, _ in PLANS} == COMMANDS.keys() - {"demo"}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(1, 0, tmp_path / "subjects", tmp_path / "cases/0")
    case.command, case.arguments, case.writes = "inspect", ["inspect", "m.onnx", "--json"], {"out"}
    return case


GOOD = Told(code=2, trace="", shown="", words="edgekit: error: no (do this)\n")
TRACE = 'Traceback (most recent call last):\n  File "/x/edgekit/a.py", line 1, in f\n    g()\nKeyError: 1\n'
BAD = {
    "traceback": Told(code=None, trace=TRACE, shown="", words=""),
    "traceback in words": Told(code=1, trace="", shown="{}", words=TRACE),
    "exit code": Told(code=-11, trace="", shown="", words=""),
    "no one line": Told(code=2, trace="", shown="", words="warning\nedgekit: error: no (do this)\n"),
    "no hint, or too long": Told(code=2, trace="", shown="", words="edgekit: error: no\n"),
    "warning": Told(code=0, trace="", shown="{}", words="x.py:1: RuntimeWarning: overflow\n"),
    "control character": Told(code=0, trace="", shown='"\x1b]0;t\x07"', words=""),
    "json": Told(code=0, trace="", shown='{"a": NaN}', words=""),
}


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_of_misbehaviour_is_a_finding(case: Case, kind: str) -> None:
    assert next(judge(case, BAD[kind], {}, {}))[0] == kind


def test_findings_of_one_cause_share_their_key(case: Case) -> None:
    assert next(judge(case, BAD["traceback"], {}, {}))[1] == 'KeyError a.py", line 1, in f'


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("left behind", {"m.onnx": FILE, "tmp/edgekit-x": FILE}),
        ("unasked file", {"m.onnx": FILE, "loot": FILE}),
        ("half-written", {"m.onnx": FILE, "out": FILE}),
        ("changed input", {"m.onnx": (0o100644, 6, 2)}),
        ("changed input", {}),
    ],
)
def test_leftover_files_are_a_finding(case: Case, kind: str, after: dict[str, tuple[int, int, int]]) -> None:
    assert next(judge(case, GOOD, {"m.onnx": FILE}, after))[0] == kind


def test_a_clean_refusal_and_a_clean_result_are_no_findings(case: Case) -> None:
    assert list(judge(case, GOOD, {"m.onnx": FILE}, {"m.onnx": FILE})) == []
    done = Told(code=0, trace="", shown='{"nodes": 3}\n', words="")
    assert list(judge(case, done, {"m.onnx": FILE}, {"m.onnx": FILE, "out/model.ort": FILE})) == []


@pytest.fixture
def fence(tmp_path: Path) -> Iterator[Fence]:
    fence = Fence()
    for name in ("inside", "outside", "cache"):
        (tmp_path / name).mkdir()
        setattr(fence, name, str(tmp_path / name))
    yield fence
    fence.inside = ""


def test_the_fence_reports_files_processes_and_sockets_outside_its_folder(fence: Fence, tmp_path: Path) -> None:
    (tmp_path / "inside/link").symlink_to(tmp_path / "outside")
    for event, arguments in (
        ("open", (str(tmp_path / "loot"), "w", os.O_WRONLY)),
        ("open", (str(tmp_path / "outside/secret.bin"), "r", os.O_RDONLY)),
        ("open", (str(tmp_path / "inside/../loot"), "w", os.O_CREAT)),
        ("open", (str(tmp_path / "inside/link/x"), "r", os.O_RDONLY)),
        ("os.remove", (str(tmp_path / "x"), -1)),
        ("os.rename", (str(tmp_path / "inside/x"), str(tmp_path / "x"), -1, -1)),
        ("subprocess.Popen", ("/bin/sh", ["sh"], None, None)),
        ("os.system", (b"id",)),
        ("socket.connect", (None, ("example.org", 80))),
    ):
        fence.broken = []
        fence.watch(event, arguments)
        assert len(fence.broken) == 1, (event, arguments)


def test_the_fence_allows_what_a_command_needs(fence: Fence, tmp_path: Path) -> None:
    for event, arguments in (
        ("open", (str(tmp_path / "inside/out"), "w", os.O_WRONLY | os.O_CREAT)),
        ("open", (str(tmp_path / "elsewhere"), "r", os.O_RDONLY)),
        ("open", (str(tmp_path / "cache/x"), "w", os.O_WRONLY)),
        ("os.rename", (str(tmp_path / "inside/x"), str(tmp_path / "inside/y"), -1, -1)),
        ("subprocess.Popen", (sys.executable, [sys.executable], None, None)),
    ):
        fence.watch(event, arguments)
    assert fence.broken == []
