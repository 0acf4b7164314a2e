"""A device that refuses, dies, hangs or lies gives a run with a failure in words, never a silent pass."""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import float_conv, make_job, text_model
from onnx import helper

from edgekit._proc import run_process
from edgekit.devices.device import DeviceRun
from edgekit.devices.emulators.qnn_sim import QnnSimulator, provider_options
from edgekit.devices.find import find_device
from edgekit.devices.local.host import Host
from edgekit.devices.process.child import REPLAY_SAVED, Runner, collect_run, describe_job
from edgekit.errors import DeviceError, TargetError, UsageError
from edgekit.evidence import Evidence
from edgekit.target import load_target

QNN_OPTIONS = {"backend_type": "htp", "soc_model": "69"}


def run_program(program: str, model: Path, work: Path, *, timeout_s: float = 20) -> DeviceRun:
    """Runs a program in the place of the far side, with a job of three samples."""
    finished = run_process([sys.executable, "-c", program], timeout_s=timeout_s, cwd=work)
    return collect_run(Runner(device="liar", evidence=Evidence.DEVICE), make_job(model, "nnapi"), finished, work)


def test_a_hang_is_ended_and_said(tmp_path: Path, work: Path) -> None:
    run = Host().run_job(make_job(float_conv(tmp_path / "f.onnx"), "nnapi", timeout_s=0.05), work)
    assert "ran out of time" in str(run.failure)
    assert run.outputs.count == 0


def test_a_crash_is_named_with_the_last_words(tmp_path: Path, work: Path) -> None:
    program = "import os, sys; print('the end', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"
    run = run_program(program, float_conv(tmp_path / "f.onnx"), work)
    assert run.failure == "the child process was ended by SIGSEGV: the end"


@pytest.mark.parametrize(
    ("program", "emulates", "crashed"),
    [
        ("os.kill(os.getpid(), 11)", True, True),
        ("os.kill(os.getpid(), 11)", False, False),
        ("time.sleep(60)", True, False),
        ("raise SystemExit(3)", True, False),
        ("os.replace('refused.json', 'run.json'); os.kill(os.getpid(), 11)", True, False),
    ],
    ids=["died", "no emulator", "hung", "ended", "refused, then died"],
)
def test_only_an_emulator_whose_program_died_has_crashed(
    tmp_path: Path, work: Path, program: str, emulates: bool, crashed: bool
) -> None:
    refused = msgspec.json.encode(
        {"status": "refused", "message": "no", "load_ms": 0, "latency_ms": [], "peak_rss_bytes": 1, "versions": {},
         "placement": [], "placement_source": "session"}
    )  # fmt: skip
    (work / "refused.json").write_bytes(refused)
    argv = [sys.executable, "-c", f"import os, time; {program}"]
    finished = run_process(argv, timeout_s=20 if "sleep" not in program else 1, cwd=work)
    runner = Runner(device="emulator", evidence=Evidence.SIMULATOR, emulates=emulates)
    run = collect_run(runner, make_job(float_conv(tmp_path / "f.onnx"), "nnapi"), finished, work)
    assert run.failure is not None
    assert run.crashed is crashed


def test_a_crash_in_the_middle_keeps_what_came_back(tmp_path: Path, work: Path) -> None:
    model = float_conv(tmp_path / "f.onnx")
    Host().run_job(make_job(model, "nnapi"), work)
    (work / "out/00002.tensors").unlink()
    run = run_program("import os; os.abort()", model, work)
    assert "SIGABRT" in str(run.failure)
    assert run.outputs.count == len(run.latency_ms) == 2


@pytest.mark.parametrize(
    ("run", "failure"),
    [
        ({"status": "refused", "message": "no\n\x1b[31mkernel"}, "refused: no [31mkernel"),
        ({"status": "running"}, "the child process ended before its work was done"),
        ({"latency_ms": [1.0, 1.0]}, "0 of 3 samples came back, with 2 times"),
        ({"status": "ok"}, "'run.json' from the device is malformed: Invalid enum value 'ok' - at `$.status`"),
    ],
)
def test_a_liar_fails(tmp_path: Path, work: Path, run: dict[str, object], failure: str) -> None:
    done = {
        "status": "done", "message": "", "load_ms": 1, "latency_ms": [1, 1, 1], "peak_rss_bytes": 1, "versions": {},
        "placement": [], "placement_source": "session", **run,
    }  # fmt: skip
    (work / "run.json").write_text(json.dumps(done))
    assert run_program("", float_conv(tmp_path / "f.onnx"), work).failure == failure


def test_a_program_that_does_nothing_fails(tmp_path: Path, work: Path) -> None:
    assert "run.json" in str(run_program("", float_conv(tmp_path / "f.onnx"), work).failure)


def test_a_wrong_output_among_right_ones_fails(tmp_path: Path, work: Path) -> None:
    model = float_conv(tmp_path / "f.onnx")
    assert Host().run_job(make_job(model, "nnapi"), work).failure is None
    (work / "out/00001.tensors").write_bytes(b"[]\n")
    run = run_program("", model, work)
    assert "'00001.tensors' from the device is malformed" in str(run.failure)
    assert run.outputs.count == 1


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
        provider_options({**QNN_OPTIONS, "soc_model": soc})


def test_an_option_that_the_provider_would_ignore_is_refused() -> None:
    with pytest.raises(TargetError, match="did you mean 'soc_model'"):
        provider_options({**QNN_OPTIONS, "soc_models": "69"})


def test_an_architecture_stands_for_its_soc() -> None:
    assert provider_options(QNN_OPTIONS, "v73")["soc_model"] == "43"
    with pytest.raises(UsageError, match="did you mean 'v7"):
        provider_options(QNN_OPTIONS, "v74")


def test_a_context_for_another_soc_is_refused(tmp_path: Path, work: Path) -> None:
    device = QnnSimulator(arch="v73")
    if (missing := device.find_missing()) is not None:
        pytest.skip(f"{missing.reason}: {missing.command}")
    proto = onnx.load(str(float_conv(tmp_path / "f.onnx")))
    helper.set_model_props(proto, {"ep_compatibility_info.QNNExecutionProvider": "v2:6:2.51.0:5.51.0:0:69:0:0"})
    onnx.save(proto, str(tmp_path / "f.onnx"))
    with pytest.raises(TargetError, match="a context for soc_model 69, not 43"):
        device.run_job(make_job(tmp_path / "f.onnx", "qnn"), work)


def test_qnn_never_takes_an_ort_file(tmp_path: Path, work: Path) -> None:
    device = find_device("qnn-htp-sim", load_target("qnn"))
    if (missing := device.find_missing()) is not None:
        pytest.skip(f"{missing.reason}: {missing.command}")
    job = msgspec.structs.replace(make_job(float_conv(tmp_path / "f.onnx"), "qnn"), model=tmp_path / "f.ort")
    assert "never takes" in str(device.run_job(job, work).failure)


@pytest.mark.skipif(sys.platform == "darwin", reason="says what is lacking off a Mac")
def test_core_ml_off_a_mac_is_an_error(tmp_path: Path, work: Path) -> None:
    device = find_device("coreml", load_target("coreml"))
    with pytest.raises(DeviceError, match="only on Apple hardware"):
        device.run_job(make_job(float_conv(tmp_path / "f.onnx"), "coreml"), work)


def test_what_a_failed_program_said_is_kept_without_what_steers_a_terminal(tmp_path: Path, work: Path) -> None:
    program = "import sys; print('loading\\x1b[2J'); print('no memory', file=sys.stderr); sys.exit(3)"
    run = run_program(program, float_conv(tmp_path / "f.onnx"), work)
    assert run.log.splitlines() == ["loading[2J", "no memory"]
    assert Host().run_job(make_job(float_conv(tmp_path / "g.onnx"), "nnapi"), empty(tmp_path)).log == ""


def test_saved_optimizations_are_replayed_for_checked_files_only(tmp_path: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "nnapi")
    session = msgspec.structs.replace(job.target.session, config={REPLAY_SAVED: "1"})
    job = msgspec.structs.replace(job, target=msgspec.structs.replace(job.target, session=session))
    assert describe_job(job).session_config == {}
    assert describe_job(msgspec.structs.replace(job, digests_hold=True)).session_config == {REPLAY_SAVED: "1"}


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"
