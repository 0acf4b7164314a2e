"""Child processes: how they end is a finding."""

import io
import os
import re
import sys
import time
from collections.abc import Iterable

import pytest

from edgekit._proc import ChildSetting, run_process, stream_process
from edgekit.errors import DeviceError


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
