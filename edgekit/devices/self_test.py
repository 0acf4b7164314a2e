"""Tests whether a device can be trusted, with a model whose outputs are known, and with models that must fail."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit._files import work_folder
from edgekit.data.samples import Samples
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence
from edgekit.model.model import load_model, save_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.progress import Progress, say_nothing
from edgekit.target import Target

TOLERANCE = 5e-3
"""The largest error of a half-precision convolution of these sizes, as a share of the largest output."""

Change = Literal["", "weight", "domain"]
_MODELS: dict[Change, str] = {
    "": "a convolution",
    "weight": "an altered convolution",
    "domain": "a model that cannot run",
}
_SHAPE = (1, 4, 8, 8)
_SAMPLES = 3


class SelfCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One check: its name, whether it passed, and what was observed."""

    name: str
    passed: bool
    detail: str


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a device's self-test; `skipped` says why it, or one of its providers, was not tried."""

    device: str
    evidence: Evidence
    checks: tuple[SelfCheck, ...] = ()
    versions: dict[str, str] = {}
    skipped: str | None = None
    command: str | None = None

    @property
    def passed(self) -> bool:
        """True if every provider of the device was tried, and every check passed."""
        return bool(self.checks) and self.skipped is None and all(check.passed for check in self.checks)


def try_device(served: Sequence[tuple[Device, Target]], progress: Progress | None = None) -> SelfTest:
    """Runs a small convolution, the same with an altered weight, and a model that no device can run; judges results.

    `served` has the device once for each target whose provider it runs: each is tested, and what a provider lacks is
    reported. The expected outputs come from numpy, not from ONNX Runtime. The last two models are negative controls: a
    device that returns the known outputs for the altered model, or any outputs for the impossible one, does not run the
    model that it is given.
    """
    report_progress = progress or say_nothing
    test = SelfTest(device=served[0][0].name, evidence=served[0][0].evidence)
    for device, target in served:
        if (missing := device.find_missing()) is not None:
            test = msgspec.structs.replace(test, skipped=missing.reason, command=missing.command)
            continue
        label = f"{target.name}: " if len(served) > 1 else ""
        for change, name in _MODELS.items():
            report_progress(f"{label}{name} on {device.name}")
            try:
                with work_folder() as work:
                    run = _run(device, target, _make_model(change), work)
                    checks, versions = tuple(_judge(change, run, device, target)), run.versions
            except EdgekitError as error:
                checks, versions = (SelfCheck(name=name, passed=False, detail=error.message),), {}
            named = (msgspec.structs.replace(check, name=label + check.name) for check in checks)
            all_versions = dict(sorted({**test.versions, **versions}.items()))
            test = msgspec.structs.replace(test, checks=(*test.checks, *named), versions=all_versions)
    return test


def _run(device: Device, target: Target, proto: onnx.ModelProto, work: Path) -> DeviceRun:
    model = load_model(save_proto(proto, work / "self-test.onnx").path)
    rows = _rows()
    job = Job(
        model=model.path,
        target=target,
        outputs=model.outputs,
        samples=Samples(source="the self-test", count=len(rows), read=lambda: iter(rows)),
        timeout_s=120.0,
    )
    run = device.run_job(job, work / "run")
    rows_back = [{name: value.copy() for name, value in row.items()} for row in run.outputs]
    outputs = Samples(source=run.device, count=len(rows_back), read=lambda: iter(rows_back))
    return msgspec.structs.replace(run, outputs=outputs)


def _judge(change: Change, run: DeviceRun, device: Device, target: Target) -> Iterator[SelfCheck]:
    """Yields the checks of a run of the known model, or of one that was changed to be a negative control."""
    error = _error(run) if run.failure is None else 0.0
    detail = run.failure or f"largest error {error:.2g} of the range"
    if change == "domain":
        passed = run.failure is not None and run.outputs.count == 0
        detail = run.failure or f"it gave {run.outputs.count} outputs"
        yield SelfCheck(name="a model that cannot run is refused", passed=passed, detail=detail[:200])
        return
    if change == "weight":
        # Ten times what rounding can cause: the difference must come from the altered weight, not from precision.
        yield SelfCheck(name="an altered weight is noticed", passed=error > 10 * TOLERANCE, detail=detail)
        return
    yield SelfCheck(name="outputs", passed=run.failure is None and error <= TOLERANCE, detail=detail)
    if run.failure is None:
        taken = [node.op for node in run.placement if node.provider == target.provider and "Conv" in node.op]
        seen = ", ".join(sorted({f"{node.op} on {node.provider}" for node in run.placement})) or "no node"
        is_seen = run.placement_source != "predicted" or device.evidence is Evidence.EMULATED
        yield SelfCheck(name="placement", passed=bool(taken) and is_seen, detail=f"{seen} ({run.placement_source})")
        is_timed = len(run.latency_ms) == run.outputs.count and min(run.latency_ms, default=0.0) > 0
        yield SelfCheck(name="times", passed=is_timed, detail=f"{len(run.latency_ms)} for {run.outputs.count} samples")


def _error(run: DeviceRun) -> float:
    """Returns the largest error relative to the largest known output, infinity if outputs are missing or not finite."""
    expected: list[Array] = []
    for row in _rows():
        # The convolution by numpy: max(0, w * x) with a border of one zero.
        padded = np.pad(row["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        expected.append(np.maximum(np.einsum("nchwij,ocij->nohw", windows, _weights()), 0))
    outputs = [row["y"] for row in run.outputs]
    if len(outputs) != len(expected) or not all(np.isfinite(value).all() for value in outputs):
        return float("inf")
    largest = max(float(np.abs(value).max()) for value in expected)
    return max(float(np.abs(a - b).max()) for a, b in zip(expected, outputs, strict=True)) / largest


def _weights() -> Array:
    """Returns multiples of 1/8, which are exact in every precision."""
    return np.random.default_rng(1).integers(-8, 9, (4, 4, 3, 3)).astype(np.float32) / 8


def _rows() -> list[Tensors]:
    rng = np.random.default_rng(2)
    return [{"x": rng.integers(-16, 17, _SHAPE).astype(np.float32) / 8} for _ in range(_SAMPLES)]


def _make_model(change: Change) -> onnx.ModelProto:
    """Returns a convolution; `change` alters one of its weights, or moves a node into a domain that nobody knows."""
    weights = _weights()
    weights[0, 0, 1, 1] += 4 * (change == "weight")
    # ONNX's checker accepts operators of an unknown domain, so that the device itself must refuse the model.
    domain = "edgekit.nowhere" if change == "domain" else ""
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
            helper.make_node("Relu", ["c"], ["y"], "relu", domain=domain),
        ],
        "self_test",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, _SHAPE)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, _SHAPE)],
        [numpy_helper.from_array(weights, "w")],
    )
    # Old versions, for every ONNX Runtime that a device may have: 1.16 reads at most IR 9 and opset 19.
    opsets = [helper.make_opsetid(name, version) for name, version in {"": 17, domain: 17}.items()]
    return helper.make_model(graph, ir_version=9, opset_imports=opsets)
