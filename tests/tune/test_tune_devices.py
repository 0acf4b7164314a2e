"""Settings raced on phones, boards and emulators: told to their runners, held against the reference, then gone."""

import platform
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bundle_models import make_bundle
from devices_models import float_conv, make_job, noise_samples, qdq_conv, require_device, run_in
from other_machine.board import Board
from other_machine.client import Adb
from other_machine.machine import start_machine

from edgekit._ort import Level
from edgekit.bench.subject import Opening
from edgekit.bundle import checks
from edgekit.bundle.manifest import MachineClass, SessionSetting
from edgekit.devices.bundled import count_device_cores, read_class, set_job
from edgekit.devices.find import DeviceChoice, ListedDevice, find_device
from edgekit.devices.local.runner import NativeRunner
from edgekit.devices.process.run import describe_job
from edgekit.devices.remote.remote import AdbDevice, SshDevice
from edgekit.errors import DeviceError
from edgekit.evidence import Evidence
from edgekit.machine import count_cores
from edgekit.report.timing import list_tuning_remarks
from edgekit.target import load_target
from edgekit.tune.race import GATE, Decision, Entrant, RaceSetup, measure
from edgekit.tune.space import PROVIDER_CHANGES, PROVIDER_OPTIONS
from edgekit.tune.tune import TuneReport, Tuning, tune_on

pytestmark = pytest.mark.slow


def tune(path: Path, device: str, runner: NativeRunner, budget_s: float = 0.4) -> TuneReport:
    """Tunes on a device as a devices.toml lists it, with the runner of this machine."""
    entry = ListedDevice(name="it", device=device, runner=str(runner.program), library=str(runner.library))
    return tune_on(path, DeviceChoice(listed=(entry,)), Tuning(budget_s=budget_s), Opening())


def test_settings_are_compared_on_a_named_phone(adb: Adb, tmp_path: Path, host_runner: NativeRunner) -> None:
    bundle = make_bundle(tmp_path, target="cpu").folder
    with start_machine(arm=False, adb=True) as machine, adb.connected(machine) as serial:
        report = tune(bundle, f"adb:{serial}", host_runner)
        device = AdbDevice(serial=serial, runner=host_runner.program, library=host_runner.library)
        job = make_job(float_conv(tmp_path / "f.onnx"), "cpu", noise_samples(1))
        run = device.run_job(set_job(job, SessionSetting(level=Level.DISABLED)), tmp_path)
        assert (machine.left_running(), machine.left_files()) == ([], [])
    assert report.evidence is Evidence.DEVICE
    assert report.machine == MachineClass(system="android", machine="x86_64", cores=count_cores())
    assert report.cores == count_cores()
    tried = {one.entrant.name: one for one in report.tried}
    # Threads are raced first, and the first round is taken however little time there is.
    assert tried.keys() >= {"defaults", "no spinning"}
    assert all(one.fault is None and (one.sqnr_db or 0) > 100 for one in tried.values())
    # Unoptimised, the Relu is a node of its own.
    assert (run.failure, {node.op for node in run.placement}) == (None, {"Conv", "Relu"})


def test_a_phone_without_space_is_one_line(adb: Adb, tmp_path: Path, host_runner: NativeRunner) -> None:
    bundle = make_bundle(tmp_path, target="cpu").folder
    with start_machine(arm=False, adb=True, space_bytes=1 << 20) as machine, adb.connected(machine) as serial:
        with pytest.raises(DeviceError, match=r"kB are needed below .*, \d+ kB are free"):
            tune(bundle, f"adb:{serial}", host_runner)
        assert machine.left_files() == []


def test_a_board_applies_settings_and_tells_cores(board: Board, tmp_path: Path, host_runner: NativeRunner) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "cpu", noise_samples(1))
    setting = SessionSetting(level=Level.DISABLED, threads=1, io_binding=True)
    device = SshDevice(host="board", runner=host_runner.program, library=host_runner.library)
    run = device.run_job(set_job(job, setting), tmp_path)
    assert board.machine.left_running() == []
    assert run.failure is None
    # Unoptimised, the Relu is a node of its own.
    assert {node.op for node in run.placement} == {"Conv", "Relu"}
    assert read_class(run.versions) == MachineClass(system="linux", machine=platform.machine(), cores=count_cores())


def test_a_phone_that_goes_away_ends_the_search(adb: Adb, tmp_path: Path, host_runner: NativeRunner) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "cpu")
    with start_machine(arm=False, adb=True) as machine, adb.connected(machine) as serial:
        device = AdbDevice(serial=serial, runner=host_runner.program, library=host_runner.library)
        setup = RaceSetup(
            device=device, goal="load", job_for=lambda _: job, reference={}, gate=GATE, guess_ms=1e3, seconds=5.0
        )
        # A setting that fails on a device which is there is out, and the search goes on.
        refused = msgspec.structs.replace(setup, job_for=lambda _: msgspec.structs.replace(job, inter_threads=2000))
        assert "inter_threads" in str(measure(refused, Entrant(name="bad")).fault)
        machine.child.kill()
        machine.child.wait()
        with pytest.raises(DeviceError, match=r"is gone: (it is offline|adb knows no device)"):
            measure(setup, Entrant(name="defaults"))


def test_only_options_that_a_bundle_may_state_are_tried() -> None:
    for provider, changes in PROVIDER_CHANGES.items():
        words = ((key, value) for change in changes for key, value in change.provider_options.items())
        assert [key for key, value in words if not re.fullmatch(checks.PROVIDER_OPTIONS[provider][key], value)] == []


def test_the_simulator_gets_the_options_of_the_npu(tmp_path: Path) -> None:
    device = require_device("qnn-htp-sim", "qnn")
    job = make_job(qdq_conv(tmp_path / "q.onnx", np.uint8), "qnn", noise_samples(1))
    changes = [change.provider_options for change in PROVIDER_CHANGES["QNNExecutionProvider"]]
    options = {key: value for change in changes for key, value in change.items()}
    assert options.keys() >= {"htp_performance_mode", "rpc_control_latency", "vtcm_mb"}
    told = set_job(job, SessionSetting(provider_options=options))
    assert describe_job(told, provider=job.target.provider).provider_options.items() >= options.items()
    outputs: list[bytes] = []
    for number, one in enumerate((job, told)):
        run = run_in(device, one, tmp_path / str(number))
        assert run.failure is None
        outputs += [sample["y"].tobytes() for sample in run.outputs]
    assert outputs[0] == outputs[1]


def test_an_emulated_phone_has_the_xnnpack_threads_of_the_setting(tmp_path: Path) -> None:
    device = require_device("android:x86_64", "xnnpack")
    job = make_job(float_conv(tmp_path / "f.onnx"), "xnnpack", noise_samples(1), precision="fp32")
    told = set_job(job, SessionSetting(provider_options={"intra_op_num_threads": "4"}))
    assert job.target.session.platforms["android"].provider_options["intra_op_num_threads"] == "4"
    other = set_job(job, SessionSetting(provider_options={"intra_op_num_threads": "2"}))
    assert other.target.session.platforms["android"].provider_options["intra_op_num_threads"] == "2"
    assert any("XNNPACK had 1 of 4 threads" in note for note in run_in(device, job, tmp_path / "a").notes)
    assert not any("XNNPACK had" in note for note in run_in(device, told, tmp_path / "b").notes)


def test_the_cores_are_those_of_the_device() -> None:
    phone, host = AdbDevice(serial="x"), find_device("host", load_target("cpu"))
    versions = {"system": "Android aarch64", "cores": "8"}
    assert (count_device_cores(phone, versions), count_device_cores(phone, {})) == (8, 0)
    assert count_device_cores(host, versions) == count_cores()
    assert read_class({"system": "Linux aarch64", "cores": "many"}) == MachineClass(system="linux", machine="aarch64")
    assert read_class({"system": "Linux"}) is None


def test_a_report_says_that_times_of_a_simulator_prove_nothing() -> None:
    report = TuneReport(
        subject="m",
        device="qnn-htp-sim",
        evidence=Evidence.SIMULATOR,
        provider="QNNExecutionProvider",
        goal="latency",
        defaults=Entrant(name="defaults"),
        chosen=Entrant(name="defaults"),
        decisions=(Decision(group=PROVIDER_OPTIONS, holder="defaults", reason="no difference can be told"),),
    )
    assert any("no clock of its own" in line for line in list_tuning_remarks(report))
    other = msgspec.structs.replace(report, evidence=Evidence.DEVICE)
    assert not any("no clock of its own" in line for line in list_tuning_remarks(other))
