"""A job through a link: what comes back is that of files, and what a program refuses, breaks or lies about is told."""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import (
    OUTPUTS,
    Stub,
    encode_report,
    float_conv,
    make_job,
    noise_samples,
    require_device,
    run_fake_program,
    run_in,
    text_model,
)
from fixture_types import present
from onnx import helper
from other_machine.board import Board
from other_machine.fixtures import Phone

from edgekit._files import digest_files
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.find import find_device
from edgekit.devices.local.host import Host, qnn_options
from edgekit.devices.process.run import ORT_RUNNER, REPLAY_SAVED, describe_job, run_program
from edgekit.devices.remote.remote import SshDevice
from edgekit.errors import DataError, DeviceError, TargetError, UsageError
from edgekit.model.tensors import Tensors
from edgekit.profile.events import read_trace
from edgekit.target import load_target

PYTHON = (sys.executable, "-P", str(ORT_RUNNER), "--pipe")
RUN = encode_report()
HEAD = OUTPUTS[:-1024]


def run_piped(job: Job, work: Path, program: tuple[str, ...] = PYTHON, **changes: object) -> DeviceRun:
    """Runs a job through pipes, with changes in what the program is asked."""
    return run_program(Stub(), program, job, msgspec.structs.replace(describe_job(job), **changes), work)


def lie(work: Path, answer: bytes, after: str = "", *, timeout_s: float = 20) -> str | None:
    """Runs a program that reads everything and gives this answer, whatever the samples are."""
    return run_fake_program(work, answer, after, timeout_s=timeout_s, by_files=False).failure


def test_a_pipe_gives_what_files_give(tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "nnapi")
    direct, piped = run_in(Host(), job, work / "a"), run_piped(job, work)
    assert piped.failure is None
    assert piped.placement == direct.placement
    assert len(piped.latency_ms) == piped.outputs.count == 3
    for got, want in zip(piped.outputs, direct.outputs, strict=True):
        np.testing.assert_array_equal(got["y"], want["y"])


def test_an_ort_file_tells_its_placement_by_a_profile_that_is_gone_afterwards(tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "nnapi")
    run = run_piped(job, work, ("env", f"TMPDIR={tmp_path}", *PYTHON), profile=True)
    assert run.placement_source == "profile"
    assert {node.provider for node in run.placement} == {"CPUExecutionProvider"}
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == ["work"]


def test_a_budget_that_is_over_stops_the_run(tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "nnapi", noise_samples(400))
    run = run_piped(msgspec.structs.replace(job, budget_s=0.0), work)
    assert run.failure is None
    assert run.stopped_early
    assert run.outputs.count == 4
    # It said so of all that it was given, too: what is whole was not stopped.
    few = make_job(float_conv(tmp_path / "f.onnx"), "nnapi", noise_samples(4))
    whole = run_piped(few, work / "whole", budget_s=0.0)
    assert (whole.outputs.count, whole.stopped_early, whole.notes) == (4, False, ())


def test_a_refusal_is_told_in_its_words(tmp_path: Path, work: Path) -> None:
    run = run_piped(make_job(float_conv(tmp_path / "f.onnx"), "nnapi"), work, model=str(tmp_path / "none.onnx"))
    assert str(run.failure).startswith("'stub' before the first outputs: refused: ")
    assert "none.onnx" in str(run.failure)


@pytest.mark.parametrize(
    ("answer", "after", "failure"),
    [
        (b"", "", "before the first outputs: the program ended before its work was done"),
        (OUTPUTS, "", "at sample 2 of 3: the program ended before its work was done"),
        (OUTPUTS, "os.kill(os.getpid(), 11)", "at sample 2 of 3: the program was ended by SIGSEGV"),
        (OUTPUTS * 2, "print('oh', file=sys.stderr); sys.exit(3)", "the program ended with exit code 3: oh"),
        (OUTPUTS * 2 + RUN, "", "at sample 3 of 3: 2 of 3 samples came back, with 3 times"),
        (OUTPUTS * 4 + RUN, "", "after the last sample: it gave more outputs than it got samples"),
        (OUTPUTS * 3 + RUN + b"x", "", "after the last sample: it wrote more after its last line"),
        (OUTPUTS * 3 + RUN[:-9], "", "after the last sample: 'run.json' from the device is malformed"),
        (OUTPUTS + HEAD + b"12", "", "at sample 2 of 3: '00001.tensors' from the device is malformed: it ends early"),
        (b"Welcome to Debian", "", "'00000.tensors' from the device is malformed: its header has no end"),
        (b"[" * (2 << 20), "", "'00000.tensors' from the device is malformed: its header has no end"),
        (b"{" * (2 << 20) + b"\n", "", "'run.json' from the device is malformed"),
        (HEAD.replace(b'"y"', b'"z"'), "", "it holds 'z', the model gives 'y'"),
        (HEAD.replace(b"1024", b"9999999999999"), "", "not that of its shape"),
    ],
)  # fmt: skip
def test_a_device_with_a_malformed_answer_fails(work: Path, answer: bytes, after: str, failure: str) -> None:
    assert failure in str(lie(work, answer, after))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "after"),
    [
        *((answer, "time.sleep(60)") for answer in (b"", OUTPUTS, OUTPUTS[:1000], OUTPUTS * 3 + RUN)),
        # A child that left the session does not hold the run.
        (OUTPUTS, "pid = os.fork() or (os.setsid(), time.sleep(4), os._exit(0)); os._exit(0)"),
    ],
)
def test_a_device_that_hangs_is_stopped_in_time(work: Path, answer: bytes, after: str) -> None:
    start = time.monotonic()
    assert "ran out of time (1 s)" in str(lie(work, answer, after, timeout_s=1))
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("answer", [HEAD.replace(b'"y"', b'"z"'), OUTPUTS + b"hello\n", RUN + b"x"])
def test_a_malformed_answer_is_reported_without_waiting_for_the_process(work: Path, answer: bytes) -> None:
    start = time.monotonic()
    assert re.search("malformed|wrote more", str(lie(work, answer, "time.sleep(60)", timeout_s=60)))
    assert time.monotonic() - start < 30


def test_samples_that_cannot_be_read_are_the_callers_error(tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "nnapi")

    def read() -> Iterator[Tensors]:
        yield from noise_samples(2)
        raise DataError("the data is damaged", hint="mend it")

    with pytest.raises(DataError, match="damaged"):
        run_piped(msgspec.structs.replace(job, samples=Samples(source="s", count=3, read=read)), work)


def test_the_digest_of_a_set_of_files_covers_names_contents_and_modes(tmp_path: Path) -> None:
    """Names, contents and modes count; a file that was written again within its times does too."""
    (tmp_path / "a").write_text("one")
    digests = [digest_files({"m": tmp_path / "a"}), digest_files({"lib/m": tmp_path / "a"})]
    (tmp_path / "a").chmod(0o755)
    digests.append(digest_files({"m": tmp_path / "a"}))
    (tmp_path / "a").write_text("two")
    digests.append(digest_files({"m": tmp_path / "a"}))
    assert len(set(digests)) == 4
    assert digest_files({"m": tmp_path / "a"}) == digests[-1]


def traced(tmp_path: Path) -> Job:
    return msgspec.structs.replace(make_job(float_conv(tmp_path / "f.onnx"), "nnapi"), trace=True, repeat=2)


def ops(run: DeviceRun) -> list[list[str]]:
    assert run.failure is None
    return [[step.op for step in one.steps] for one in read_trace(present(run.trace)).executions]


@pytest.mark.slow
def test_a_folder_and_a_pipe_bring_the_trace_back(tmp_path: Path, work: Path) -> None:
    job = traced(tmp_path)
    direct, piped = run_in(Host(), job, work / "a"), run_piped(job, work)
    assert ops(direct) == ops(piped)
    assert len(ops(piped)) == 2 * job.samples.count
    assert direct.placement == piped.placement != ()


@pytest.mark.slow
def test_a_phone_and_a_board_bring_the_trace_back_and_keep_nothing(
    phone: Phone, board: Board, native_board: SshDevice, tmp_path: Path, work: Path
) -> None:
    for name, device, machine in (("adb", phone.device, phone.machine), ("ssh", native_board, board.machine)):
        assert "Conv" in ops(device.run_job(traced(tmp_path), work / name))[0]
        assert machine.left_running() == []
        assert not [name for name in machine.files() if "profile" in name or "run-" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "trace", "says"),
    [
        (9, b"short", "ends early"),
        (3, b"too long", "more after its last line"),
        (1 << 40, b"", "larger than"),
        (-1, b"", "malformed"),
    ],
)
def test_a_false_word_of_a_trace_is_found(size: int, trace: bytes, says: str, tmp_path: Path, work: Path) -> None:
    last = encode_report(latency_ms=[1] * 6, trace_bytes=size)
    failure = run_fake_program(work, OUTPUTS * 3 + last + trace, job=traced(tmp_path), by_files=False).failure
    assert says in present(failure)


@pytest.mark.slow
def test_a_trace_that_nobody_asked_for_is_refused(tmp_path: Path, work: Path) -> None:
    job = msgspec.structs.replace(traced(tmp_path), trace=False)
    assert run_piped(job, work, PYTHON).trace is None
    assert not list(work.rglob("trace.json"))


QNN_OPTIONS = {"backend_type": "htp", "soc_model": "69"}


def test_a_crash_is_named_with_the_last_words(work: Path) -> None:
    words = "the end\\n# LIB: no settings found, using its own"
    run = run_fake_program(work, after=f"print('{words}', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)")
    assert run.failure == "the program was ended by SIGSEGV: the end"


@pytest.mark.parametrize(
    ("program", "status", "emulates", "crashed"),
    [
        ("os.kill(os.getpid(), 11)", "", True, True),
        ("os.kill(os.getpid(), 11)", "", False, False),
        ("time.sleep(60)", "", True, False),
        ("raise SystemExit(3)", "", True, False),
        ("os.kill(os.getpid(), 11)", "refused", True, False),
        ("os.kill(os.getpid(), 11)", "running", True, True),
    ],
    ids=["died", "no emulator", "hung", "ended", "refused, then died", "died with the first sample"],
)
def test_only_an_emulator_can_crash(work: Path, program: str, status: str, emulates: bool, crashed: bool) -> None:
    said = encode_report(status=status, latency_ms=[]) if status else b""
    run = run_fake_program(work, said, program, emulates=emulates, timeout_s=20 if "sleep" not in program else 1)
    assert run.failure is not None
    assert run.crashed is crashed
    assert run.timed_out is ("sleep" in program)
    # That a session was made is known, also where it died then.
    assert run.load_ms == (1 if status else 0)


def test_a_crash_in_the_middle_keeps_what_came_back(work: Path) -> None:
    run = run_fake_program(work, OUTPUTS * 2, "os.abort()")
    assert "SIGABRT" in str(run.failure)
    assert run.outputs.count == 2


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"status": "refused", "message": "no\n\x1b[31mkernel"}, "refused: no [31mkernel"),
        ({"status": "running"}, "the program ended before its work was done"),
        ({"latency_ms": [1.0, 1.0]}, "0 of 3 samples came back, with 2 times"),
        ({"status": "ok"}, "'run.json' from the device is malformed: Invalid enum value 'ok' - at `$.status`"),
    ],
)
def test_a_report_that_does_not_fit_is_a_failure(work: Path, change: dict[str, object], failure: str) -> None:
    assert run_fake_program(work, encode_report(**change)).failure == failure


def test_a_model_that_the_runtime_refuses_is_a_failure(tmp_path: Path, work: Path) -> None:
    graph = onnx.load(str(float_conv(tmp_path / "f.onnx")))
    graph.graph.node[1].domain = "no.such.domain"
    graph.opset_import.append(helper.make_opsetid("no.such.domain", 1))
    onnx.save(graph, str(tmp_path / "f.onnx"))
    run = Host().run_job(make_job(tmp_path / "f.onnx", "nnapi"), work)
    assert str(run.failure).startswith("refused: ")
    assert "no.such.domain" in str(run.failure)


def test_an_output_that_is_no_tensor_comes_back_as_parts_and_fails_if_not_declared(tmp_path: Path, work: Path) -> None:
    body = "(float[2] x) => (seq(float[2]) y) { y = SequenceConstruct(x) }"
    run = Host().run_job(
        make_job(text_model(tmp_path / "s.onnx", body), "nnapi", [{"x": np.ones(2, np.float32)}]), work
    )
    assert "it holds 'y.length', 'y[0]', the model gives 'y'" in str(run.failure)


@pytest.mark.parametrize("soc", ["", "0", "99999", "foo", "SM8750", "44", "121", "43,69"])
def test_an_soc_that_the_simulator_would_not_question_is_refused(soc: str) -> None:
    with pytest.raises(TargetError, match="soc_model"):
        qnn_options({**QNN_OPTIONS, "soc_model": soc})


def test_an_architecture_stands_for_its_soc_and_unknown_options_are_refused() -> None:
    assert qnn_options(QNN_OPTIONS, "v73")["soc_model"] == "43"
    with pytest.raises(UsageError, match="did you mean 'v7"):
        qnn_options(QNN_OPTIONS, "v74")
    with pytest.raises(TargetError, match="did you mean 'soc_model'"):
        qnn_options({**QNN_OPTIONS, "soc_models": "69"})


def test_qnn_takes_neither_a_context_for_another_soc_nor_an_ort_file(tmp_path: Path, work: Path) -> None:
    device = require_device("qnn-htp-sim:v73", "qnn")
    proto = onnx.load(str(float_conv(tmp_path / "f.onnx")))
    helper.set_model_props(proto, {"ep_compatibility_info.QNNExecutionProvider": "v2:6:2.51.0:5.51.0:0:69:0:0"})
    onnx.save(proto, str(tmp_path / "f.onnx"))
    with pytest.raises(TargetError, match="a context for soc_model 69, not 43"):
        device.run_job(make_job(tmp_path / "f.onnx", "qnn"), work)
    device = require_device("qnn-htp-sim", "qnn")
    job = msgspec.structs.replace(make_job(float_conv(tmp_path / "f.onnx"), "qnn"), model=tmp_path / "f.ort")
    assert "never takes" in str(device.run_job(job, work).failure)


@pytest.mark.skipif(sys.platform == "darwin", reason="says what is lacking off a Mac")
def test_core_ml_off_a_mac_is_an_error(tmp_path: Path, work: Path) -> None:
    device = find_device("coreml", load_target("coreml"))
    with pytest.raises(DeviceError, match="only on Apple hardware"):
        device.run_job(make_job(float_conv(tmp_path / "f.onnx"), "coreml"), work)


def test_the_last_words_of_a_failed_program_are_kept_without_terminal_codes(tmp_path: Path, work: Path) -> None:
    program = "print('loading\\x1b[2J', file=sys.stderr); print('no memory', file=sys.stderr); sys.exit(3)"
    assert run_fake_program(work, after=program).log.splitlines() == ["loading[2J", "no memory"]
    assert run_in(Host(), make_job(float_conv(tmp_path / "g.onnx"), "nnapi"), tmp_path / "empty").log == ""


def test_saved_optimizations_are_replayed_for_checked_files_only(tmp_path: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "nnapi")
    session = msgspec.structs.replace(job.target.session, config={REPLAY_SAVED: "1"})
    job = msgspec.structs.replace(job, target=msgspec.structs.replace(job.target, session=session))
    assert describe_job(job).session_config == {}
    assert describe_job(msgspec.structs.replace(job, digests_hold=True)).session_config == {REPLAY_SAVED: "1"}
