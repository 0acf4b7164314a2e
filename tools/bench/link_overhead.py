"""Measures the cost of adb and ssh on loopback: 100 samples of 224x224x3, next to a plain copy and to inference.

    python tools/bench/link_overhead.py

The remote side is the daemon of the tests, with programs for this machine, so that the connection is measured and not
an emulator; the model is cheap for the same reason. "The inference" is the same job by the same runner on this machine
without a connection: starting, loading and running; the sum of only the runner's latencies is printed too. The variants
run in turn, several times, because this machine may be busy, and the least time of each counts. The files of the job
are already on the device, as from the second run on.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from net import Net

HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HERE / "tests" / "devices"), str(HERE / "tests")]

from devices_models import make_job  # noqa: E402 - the tests' own modules
from other_machine.board import ssh_board  # noqa: E402
from other_machine.client import adb_server  # noqa: E402
from other_machine.machine import start_machine  # noqa: E402

from edgekit._ort import CPU_PROVIDER  # noqa: E402
from edgekit.devices.device import Device, Job  # noqa: E402
from edgekit.devices.local.host import Native  # noqa: E402
from edgekit.devices.local.runner import build_runner, host_abi  # noqa: E402
from edgekit.devices.remote.remote import AdbDevice, SshDevice  # noqa: E402
from edgekit.model.model import save_proto  # noqa: E402

SAMPLES, ROUNDS, LIMIT = 100, 7, 1.5
SHAPE = (1, 3, 224, 224)


def main() -> int:
    """Prints the ratio for each connection, and returns 1 if one is above the limit."""
    with tempfile.TemporaryDirectory(prefix="edgekit-link-") as name:
        folder = Path(name)
        job = _make_job(folder)
        payload = folder / "payload"
        payload.write_bytes(os.urandom(SAMPLES * int(np.prod(SHAPE)) * 4))
        runner = build_runner(host_abi(), lambda _: None)
        with adb_server() as adb, start_machine(arm=False, adb=True) as machine, adb.connected(machine) as serial:
            os.environ.update({key: value for key, value in adb.environment.items() if value})
            phone = AdbDevice(serial=serial, runner=runner.program, library=runner.library, provider=CPU_PROVIDER)
            push = ["adb", "-s", serial, "push", str(payload), "/data/local/tmp/payload"]
            over_adb = _compare("adb", phone, job, push, folder)
        with ssh_board(arm=False) as board:
            os.environ["PATH"] = f"{board.programs}:{os.environ['PATH']}"
            computer = SshDevice(host="board", runner=runner.program, library=runner.library, provider=CPU_PROVIDER)
            copy = ["scp", "-q", "-F", str(board.folder / "ssh_config"), str(payload), "board:/data/home/payload"]
            over_ssh = _compare("ssh", computer, job, copy, folder)
    return 0 if over_adb <= LIMIT and over_ssh <= LIMIT else 1


def _make_job(folder: Path) -> Job:
    net = Net("g", 17, 0)
    net.inputs["x"], net.outputs[net.add("GlobalAveragePool", ["x"], "y")] = SHAPE[1:], (3, 1, 1)
    path = save_proto(net.to_onnx(1, 9), folder / "mean.onnx").path
    sample = {"x": np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)}
    return make_job(path, "xnnpack", [sample] * SAMPLES, precision="fp32", timeout_s=300)


def _compare(name: str, device: Device, job: Job, copy: list[str], folder: Path) -> float:
    latencies = [_run(device, job, folder / f"{name}-first")]
    seconds: dict[str, list[float]] = {"plain copy": [], "inference": [], "through the link": []}
    for index in range(ROUNDS):
        marks = [time.perf_counter()]
        subprocess.run(copy, check=True, capture_output=True)
        marks.append(time.perf_counter())
        _run(Native(), job, folder / f"{name}-here-{index}")
        marks.append(time.perf_counter())
        latencies.append(_run(device, job, folder / f"{name}-{index}"))
        marks.append(time.perf_counter())
        for kind, start, end in zip(seconds, marks, marks[1:], strict=False):
            seconds[kind].append(end - start)
    least = {kind: min(values) for kind, values in seconds.items()}
    ratio = least["through the link"] / (least["plain copy"] + least["inference"])
    strict = least["through the link"] / (least["plain copy"] + min(latencies))
    parts = ", ".join(f"{kind} {least[kind]:.2f} s (median {statistics.median(seconds[kind]):.2f})" for kind in seconds)
    print(f"{name}: {parts}; ratio {ratio:.2f}, at most {LIMIT}; against the copy and bare latencies {strict:.2f}")
    return ratio


def _run(device: Device, job: Job, place: Path) -> float:
    """Returns the seconds of inference in a run, which must succeed."""
    place.mkdir()
    run = device.run_job(job, place)
    if run.failure is not None:
        raise SystemExit(run.failure)
    return sum(run.latency_ms) / 1e3


if __name__ == "__main__":
    sys.exit(main())
