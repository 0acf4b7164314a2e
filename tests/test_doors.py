"""The three doors: files are whole or not there, the end of a child is a finding, and ONNX Runtime errs as we do."""

import importlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from tiny_models import parse_model

from edgekit._files import (
    one_at_a_time,
    replacing_file,
    require_place,
    safe_join,
    staged_entries,
    staged_folder,
    work_folder,
    write_file,
)
from edgekit._ort import REFUSALS, CpuSession, Level, SessionSettings, describe_untested, translated
from edgekit._proc import ChildSetting, run_process, stream_process
from edgekit.cli.main import run_command
from edgekit.errors import BundleError, DeviceError, OutputError, RuntimeRefusal


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="stop"), replacing_file(tmp_path / "file") as file:
        file.write_text("half")
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with staged_folder(tmp_path / "out") as folder:
            (folder / name).write_text(name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_second_process_waits_for_the_lock(tmp_path: Path) -> None:
    order: list[str] = []

    def come_second() -> None:
        with one_at_a_time(tmp_path / "shared"):
            order.append("second")

    second = Thread(target=come_second)
    with one_at_a_time(tmp_path / "shared"):
        second.start()
        second.join(0.05)
        order.append("first")
    second.join()
    assert order == ["first", "second"]
    assert not (tmp_path / "shared").exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"")
    with pytest.raises(OutputError, match="cannot write"):
        write_file(tmp_path / "file" / "below", b"")
    with pytest.raises(OutputError, match="is a file"), staged_folder(tmp_path / "file"):
        pass


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../up", "", "link/file", "a\\b"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    with pytest.raises(BundleError):
        safe_join(tmp_path / "root", name)


def test_a_place_where_nothing_can_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    require_place(tmp_path / "file")
    require_place(tmp_path / "new" / "folder" / "r.html")
    for place, reason in ((tmp_path, "it is a folder"), (tmp_path / "file" / "r.html", "file' is no folder")):
        with pytest.raises(OutputError, match=reason):
            require_place(place)


def test_no_file_takes_the_place_of_a_device_or_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for write in (partial(write_file, data=b"new"), require_place):
        with pytest.raises(OutputError, match="it is a device or a pipe"):
            write(pipe)
    assert pipe.is_fifo()


@pytest.mark.parametrize("way", [replacing_file, staged_folder, staged_entries, work_folder])
def test_empty_folders_of_a_failed_write_are_removed(tmp_path: Path, way: Callable[[Path], Any]) -> None:
    with pytest.raises(ValueError, match="stop"), way(tmp_path / "a/b/c"):
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []
    # What was there stays, and so does what somebody else put into a new one meanwhile.
    (tmp_path / "kept").mkdir()
    with pytest.raises(ValueError, match="stop"), way(tmp_path / "kept/b/c"):
        (tmp_path / "kept/b/theirs").write_bytes(b"")
        raise ValueError("stop")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "kept", "theirs"]


def _run(code: str, timeout_s: float = 30) -> str:
    finished = run_process([sys.executable, "-c", code], timeout_s=timeout_s)
    return f"{finished.stdout.strip()} {finished.ending} {finished.succeeded}"


def test_endings_are_told_apart() -> None:
    assert _run("print('hi')") == "hi ended with exit code 0 True"
    assert _run("raise SystemExit(3)") == " ended with exit code 3 False"
    assert _run("import os; os.abort()") == " was ended by SIGABRT False"


def test_a_child_that_hangs_ends_with_its_own_children() -> None:
    start = time.monotonic()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    assert _run(code, timeout_s=1) == " ran out of time False"
    assert time.monotonic() - start < 20


def test_long_output_keeps_its_tail_and_memory_is_measured() -> None:
    finished = run_process([sys.executable, "-c", "print('x' * 3_000_000 + 'end')"], timeout_s=30)
    assert len(finished.stdout) == 1 << 20
    assert finished.stdout.endswith("end\n")
    assert finished.peak_rss_bytes > 1_000_000


def test_a_child_may_be_kept_to_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("needs Linux")
    argv = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
    settings = [ChildSetting(one_core=one_core) for one_core in (True, False)]
    every = os.sched_getaffinity(0)
    cores = [run_process(argv, timeout_s=30, setting=setting).stdout.strip() for setting in settings]
    assert cores == ["1", str(len(every))]
    assert os.sched_getaffinity(0) == every
    # However late this process is, the child has its core from the start.
    real = os.sched_setaffinity

    def set_late(pid: int, mask: Iterable[int]) -> None:
        time.sleep(0.1)
        real(pid, mask)

    monkeypatch.setattr(os, "sched_setaffinity", set_late)
    status = run_process(["cat", "/proc/self/status"], timeout_s=30, setting=settings[0]).stdout
    assert re.search(r"Cpus_allowed_list:\s*\d+\n", status)
    said: list[bytes] = []

    def take(stream: io.BufferedReader) -> None:
        said.append(stream.read())

    # A session that is held over pipes, too.
    stream_process(argv, timeout_s=30, feed=[], take=take, setting=ChildSetting(one_core=True))
    assert said == [b"1\n"]


def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DeviceError, match="cannot start"):
        run_process(["edgekit-no-such-program"], timeout_s=1)


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
    path = parse_model(f"{text}", tmp_path / "m.onnx")
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
        ("g (float[2] x) => (float[2] y) { y = Erfc(x) }", "other operators of ONNX, or a newer opset: there is no"),
        ("g (float[2] x) => (float[2] y) { y = Gelu(x) }", "or a newer opset: there is no Gelu in 17"),
        ("g (float[2] x) => (float[2] y) { [n] a = Relu(x) [n] y = Abs(a) }", "edgekit prepare MODEL --out FILE"),
        ("g (bfloat16[2] x) => (bfloat16[2] y) { y = Relu(x) }", "export bfloat16 in float32"),
        ("g (bfloat16[2] x) => (bfloat16[2] y) { y = Sin(x) }", "export it in float32: ONNX"),
        (BRANCHES, "--freeze INPUT=NUMBER"),
    ],
)
def test_a_refusal_says_what_to_do(graph: str, hint: str, tmp_path: Path) -> None:
    path = parse_model(f'<ir_version: 8, opset_import: ["" : 17, "com.acme" : 1]> {graph}', tmp_path / "opset17.onnx")
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
    text = "g (float[2] x) => (float[2] y) { a = Relu(x) y = Relu(a) }"
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
