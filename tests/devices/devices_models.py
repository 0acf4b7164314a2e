"""Tiny models, jobs that run them, devices that a test requires, and programs that only pretend to run a model."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from tiny_models import parse_net

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit._proc import ChildSetting
from edgekit.check.report import CheckedNode
from edgekit.data.samples import list_samples
from edgekit.devices.device import UNCHECKED, Device, DeviceRun, Job, Missing, WrappedDevice
from edgekit.devices.find import find_device
from edgekit.devices.local.runner import NativeRunner, build_runner, find_runner, host_abi
from edgekit.devices.process.run import describe_job, run_program
from edgekit.evidence import Evidence
from edgekit.model.model import load_model, save_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.target import Precision, Target, load_target

SHAPE = (1, 4, 8, 8)
ENDS = "(float[1,4,8,8] x) => (float[1,4,8,8] y)"


class Stub(Device, frozen=True, kw_only=True):
    """A device of which only the name is used; tests run a program in its place."""

    name: str = "stub"
    evidence: Evidence = Evidence.DEVICE

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        raise NotImplementedError


class Watched(WrappedDevice, frozen=True, kw_only=True):
    """A real device, and the jobs that it was given."""

    jobs: list[Job] = msgspec.field(default_factory=list)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        self.jobs.append(job)
        return self.device.run_job(job, work)


class Altering(WrappedDevice, frozen=True, kw_only=True):
    """A real device that is handed the model as `change` leaves it."""

    change: Callable[[onnx.ModelProto], None]

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        proto = onnx.load(str(job.model))
        self.change(proto)
        (work / "altered").mkdir(parents=True)
        onnx.save(proto, str(work / "altered" / job.model.name))
        (work / "inner").mkdir()
        altered = msgspec.structs.replace(job, model=work / "altered" / job.model.name)
        return self.device.run_job(altered, work / "inner")


def conv_weights() -> tuple[Array, Array]:
    rng = np.random.default_rng(7)
    return rng.normal(0, 0.2, (4, 4, 3, 3)).astype(np.float32), rng.normal(0, 0.2, 4).astype(np.float32)


def float_conv(path: Path, *, opset: int = 17) -> Path:
    """Conv and Relu."""
    weight, bias = conv_weights()
    body = "{ [conv] c = Conv<pads=[1,1,1,1], kernel_shape=[3,3]>(x, w, b) [relu] y = Relu(c) }"
    return text_model(path, f"{ENDS} {body}", opset=opset, w=weight, b=bias)


def qdq_conv(path: Path, activation: type[np.integer[Any]]) -> Path:
    """The same between Q and DQ: weights int8 per channel, bias int32, and both scales fit the values."""
    weight, bias = conv_weights()
    zero = np.array(0 if activation is np.int8 else 128, activation)
    x_scale, y_scale = np.float32(1 / 32), np.float32(1 / 16)
    scales = (np.abs(weight).max((1, 2, 3)) / 127).astype(np.float32)
    values = {
        "xs": np.array(x_scale), "ys": np.array(y_scale), "z": zero, "ws": scales, "wz": np.zeros(4, np.int8),
        "wq": np.round(weight / scales[:, None, None, None]).astype(np.int8), "bs": scales * x_scale,
        "bz": np.zeros(4, np.int32), "bq": np.round(bias / (scales * x_scale)).astype(np.int32),
    }  # fmt: skip
    body = """{ [x_q] xq = QuantizeLinear(x, xs, z) [x_dq] xd = DequantizeLinear(xq, xs, z)
      [w_dq] wd = DequantizeLinear<axis=0>(wq, ws, wz) [b_dq] bd = DequantizeLinear<axis=0>(bq, bs, bz)
      [conv] c = Conv<pads=[1,1,1,1], kernel_shape=[3,3]>(xd, wd, bd)
      [y_q] yq = QuantizeLinear(c, ys, z) [y_dq] y = DequantizeLinear(yq, ys, z) }"""
    return text_model(path, f"{ENDS} {body}", **values)


def text_model(path: Path, body: str, *, opset: int = 17, **weights: Array) -> Path:
    """Writes a graph in onnx's text form with these weights; nodes without a name are called n0, n1, ..."""
    model = parse_net(body, weights, opset=opset, ir_version=9)
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"n{index}"
    return save_proto(model, path).path


def make_job(
    path: Path,
    target: Target | str,
    samples: Sequence[Tensors] | None = None,
    *,
    precision: Precision = "int8",
    left: tuple[str, ...] = (),
    timeout_s: float = 60.0,
) -> Job:
    """A job whose check predicts that the provider takes every node except those of `left`."""
    model = load_model(path)
    nodes = tuple(
        CheckedNode(
            name=node.name, op=node.op_type, domain=node.domain, taken=node.name not in left, reasons=(), macs=0,
            bytes=0, partition=0,
        )
        for node in onnx.load(str(path)).graph.node
    )  # fmt: skip
    return Job(
        model=path, target=load_target(target) if isinstance(target, str) else target, precision=precision,
        outputs=model.outputs, check=msgspec.structs.replace(UNCHECKED, node_list=nodes),
        samples=list_samples(noise_samples() if samples is None else samples, "rows"), timeout_s=timeout_s,
    )  # fmt: skip


def noise_samples(count: int = 3) -> list[Tensors]:
    rng = np.random.default_rng(3)
    return [{"x": rng.normal(0, 1, SHAPE).astype(np.float32)} for _ in range(count)]


def round_to_half(value: Array) -> Array:
    """Returns float32 values as fp16 holds them."""
    return value.astype(np.float16).astype(np.float32)


def run_in(device: Device, job: Job, folder: Path) -> DeviceRun:
    """Runs a job in a new folder."""
    folder.mkdir()
    return device.run_job(job, folder)


def assert_same_as_cpu(run: DeviceRun, job: Job, atol: float) -> None:
    """Asserts that a run gave the outputs of ONNX Runtime's CPU provider without optimizations, within `atol`."""
    assert run.failure is None
    session = CpuSession(job.model, SessionSettings(level=Level.DISABLED))
    for sample, got in zip(job.samples, run.outputs, strict=True):
        for name, value in session.run(sample).items():
            np.testing.assert_allclose(got[name], value, atol=atol, rtol=0)


def require_device(name: str, target: Target | str = "cpu") -> Device:
    """Returns a device that can run here, with the C++ runner that it needs; skips the test if it cannot."""
    device = find_device(name, load_target(target) if isinstance(target, str) else target)
    missing = device.find_missing()
    if missing is not None and (missing.command or "").startswith("edgekit runner build"):
        require_runner("linux-arm64" if name.startswith("arm64") else host_abi())
        missing = device.find_missing()
    if missing is not None:
        pytest.skip(f"{name} is not installed: {missing.reason}: {missing.command}")
    return device


def require_runner(abi: str) -> NativeRunner:
    """The C++ runner for a kind of machine, which the cache stores; skips the test if it cannot be built."""
    found = find_runner(abi)
    if isinstance(found, Missing) and not (found.command or "edgekit runner build").startswith("edgekit runner build"):
        pytest.skip(f"{found.reason}: {found.command}")
    return build_runner(abi, lambda _: None)


def run_fake_program(
    work: Path,
    said: bytes = b"",
    after: str = "",
    *,
    job: Job | None = None,
    timeout_s: float = 20,
    by_files: bool = True,
    emulates: bool = False,
) -> DeviceRun:
    """Returns the run of a program that reads its input, prints `said`, and then executes the Python of `after`."""
    (work / "said").write_bytes(said)
    say = "sys.stdin.buffer.read(); sys.stdout.buffer.write(open('said', 'rb').read()); sys.stdout.flush()"
    argv = [sys.executable, "-c", f"import os, sys, time; {say}; {after}"]
    job = job or make_job(float_conv(work / "f.onnx"), "nnapi", timeout_s=timeout_s)
    setting = ChildSetting(cwd=work)
    return run_program(
        Stub(), argv, job, describe_job(job), work, setting=setting, by_files=by_files, emulates=emulates
    )


OUTPUTS = b'[{"name":"y","dtype":"float32","shape":[1,4,8,8],"size_bytes":1024}]\n' + bytes(1024)
"""The answer of a program for one sample of `float_conv`."""

REPORT = {
    "status": "done", "message": "", "load_ms": 1, "latency_ms": [1, 1, 1], "peak_rss_bytes": 1, "versions": {},
    "placement": [], "placement_source": "session",
}  # fmt: skip
"""The report of a program that ran three samples."""


def encode_report(**changes: object) -> bytes:
    return json.dumps({**REPORT, **changes}, separators=(",", ":")).encode() + b"\n"
