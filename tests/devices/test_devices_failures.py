"""A device that refuses, dies, hangs or lies gives a run with a failure in words, never a silent pass."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import OUTPUTS, encode_report, float_conv, make_job, present, pretend, text_model
from onnx import helper

from edgekit.devices.find import find_device
from edgekit.devices.local.host import Host, qnn_options
from edgekit.devices.process.run import REPLAY_SAVED, describe_job
from edgekit.errors import DeviceError, TargetError, UsageError
from edgekit.target import load_target

QNN_OPTIONS = {"backend_type": "htp", "soc_model": "69"}


def test_a_crash_is_named_with_the_last_words(work: Path) -> None:
    run = pretend(work, after="print('the end', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)")
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
def test_only_an_emulator_whose_program_died_has_crashed(
    work: Path, program: str, status: str, emulates: bool, crashed: bool
) -> None:
    said = encode_report(status=status, latency_ms=[]) if status else b""
    run = pretend(work, said, program, emulates=emulates, timeout_s=20 if "sleep" not in program else 1)
    assert run.failure is not None
    assert run.crashed is crashed
    # That a session was made is known, also where it died then.
    assert run.load_ms == (1 if status else 0)


def test_a_crash_in_the_middle_keeps_what_came_back(work: Path) -> None:
    run = pretend(work, OUTPUTS * 2, "os.abort()")
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
def test_a_liar_fails(work: Path, change: dict[str, object], failure: str) -> None:
    assert pretend(work, encode_report(**change)).failure == failure


def test_a_model_that_the_runtime_refuses_is_a_failure(tmp_path: Path, work: Path) -> None:
    graph = onnx.load(str(float_conv(tmp_path / "f.onnx")))
    graph.graph.node[1].domain = "no.such.domain"
    graph.opset_import.append(helper.make_opsetid("no.such.domain", 1))
    onnx.save(graph, str(tmp_path / "f.onnx"))
    run = Host().run_job(make_job(tmp_path / "f.onnx", "nnapi"), work)
    assert str(run.failure).startswith("refused: ")
    assert "no.such.domain" in str(run.failure)


def test_an_output_that_is_no_tensor_comes_back_in_parts_that_must_be_expected(tmp_path: Path, work: Path) -> None:
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
    device = present("qnn-htp-sim:v73", "qnn")
    proto = onnx.load(str(float_conv(tmp_path / "f.onnx")))
    helper.set_model_props(proto, {"ep_compatibility_info.QNNExecutionProvider": "v2:6:2.51.0:5.51.0:0:69:0:0"})
    onnx.save(proto, str(tmp_path / "f.onnx"))
    with pytest.raises(TargetError, match="a context for soc_model 69, not 43"):
        device.run_job(make_job(tmp_path / "f.onnx", "qnn"), work)
    device = present("qnn-htp-sim", "qnn")
    job = msgspec.structs.replace(make_job(float_conv(tmp_path / "f.onnx"), "qnn"), model=tmp_path / "f.ort")
    assert "never takes" in str(device.run_job(job, work).failure)


@pytest.mark.skipif(sys.platform == "darwin", reason="says what is lacking off a Mac")
def test_core_ml_off_a_mac_is_an_error(tmp_path: Path, work: Path) -> None:
    device = find_device("coreml", load_target("coreml"))
    with pytest.raises(DeviceError, match="only on Apple hardware"):
        device.run_job(make_job(float_conv(tmp_path / "f.onnx"), "coreml"), work)


def test_what_a_failed_program_said_is_kept_without_what_steers_a_terminal(tmp_path: Path, work: Path) -> None:
    program = "print('loading\\x1b[2J', file=sys.stderr); print('no memory', file=sys.stderr); sys.exit(3)"
    assert pretend(work, after=program).log.splitlines() == ["loading[2J", "no memory"]
    (tmp_path / "empty").mkdir()
    assert Host().run_job(make_job(float_conv(tmp_path / "g.onnx"), "nnapi"), tmp_path / "empty").log == ""


def test_saved_optimizations_are_replayed_for_checked_files_only(tmp_path: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "nnapi")
    session = msgspec.structs.replace(job.target.session, config={REPLAY_SAVED: "1"})
    job = msgspec.structs.replace(job, target=msgspec.structs.replace(job.target, session=session))
    assert describe_job(job).session_config == {}
    assert describe_job(msgspec.structs.replace(job, digests_hold=True)).session_config == {REPLAY_SAVED: "1"}
