"""Hostile input to the runner: words, never a crash. `make fuzz` builds it with sanitizers and tries more."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices_models import float_conv, noise_samples, require_runner
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekit._files import work_folder
from edgekit._proc import run_process
from edgekit.devices.local.runner import LIBRARIES, PROGRAM, host_abi, write_unit
from edgekit.devices.process.exchange import encode_tensors

pytestmark = [pytest.mark.fuzz, pytest.mark.slow]

HEADER = {"name": "x", "dtype": "float32", "shape": [1, 4, 8, 8], "size_bytes": 1024}
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
IS_LONG = settings().max_examples > 1000
BRIEFLY = settings(max_examples=400 if IS_LONG else 12, deadline=None)
KEYS = (
    "model", "provider", "library", "provider_options", "session_config", "level", "threads", "budget_s", "profile",
    "runtime", "repeat", "concurrency", "io_binding", "least_samples",
)  # fmt: skip


@pytest.fixture(scope="module")
def sanitized() -> Iterator[Path]:
    runner = require_runner(host_abi())
    if not IS_LONG:
        yield runner.program
        return
    with work_folder() as work:
        sources = write_unit(work / "runner.cpp")
        flags = ["-std=c++17", "-Os", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *LIBRARIES]
        done = run_process(["c++", str(sources), "-o", str(work / PROGRAM), *flags], timeout_s=600)
        assert done.succeeded, done.stderr
        yield work / PROGRAM


def serve(program: Path, data: bytes) -> None:
    """Gives the bytes to the runner, which must end by itself with 0 or 2 and no word of a sanitizer."""
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=0"}
    done = subprocess.run([program, "--pipe"], input=data, capture_output=True, timeout=60, check=False, env=env)
    assert done.returncode in {0, 2}, (data[:400], done.stderr[-2000:])
    assert b"Sanitizer" not in done.stderr
    if done.returncode == 0:
        assert json.loads(done.stdout[done.stdout.rindex(b'{"status"') :])["status"] in {"done", "refused", "stopped"}


@BRIEFLY
@given(data=st.binary(max_size=300))
def test_bytes_for_a_job(sanitized: Path, data: bytes) -> None:
    serve(sanitized, data)


@BRIEFLY
@given(job=st.dictionaries(st.sampled_from(KEYS), JSON))
def test_json_for_a_job(sanitized: Path, job: dict[str, object]) -> None:
    job.pop("runtime", None)
    serve(sanitized, json.dumps(job).encode() + b"\n")


@pytest.fixture(scope="module")
def job_line(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = float_conv(tmp_path_factory.mktemp("fuzz") / "f.onnx")
    library = str(require_runner(host_abi()).library)
    return json.dumps({"model": str(model), "runtime": library, "threads": 1}).encode() + b"\n"


@BRIEFLY
@given(change=st.dictionaries(st.sampled_from(tuple(HEADER)), JSON), payload=st.binary(max_size=64))
def test_a_header_that_is_changed(sanitized: Path, job_line: bytes, change: dict[str, object], payload: bytes) -> None:
    serve(sanitized, job_line + json.dumps([{**HEADER, **change}]).encode() + b"\n" + payload)


@BRIEFLY
@given(
    places=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=8), cut=st.integers(0)
)
def test_samples_with_changed_bytes(sanitized: Path, job_line: bytes, places: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(b"".join(encode_tensors(sample) for sample in noise_samples(3)))
    for place, value in places:
        data[place % len(data)] = value
    serve(sanitized, job_line + bytes(data[: cut % (len(data) + 1)]))
