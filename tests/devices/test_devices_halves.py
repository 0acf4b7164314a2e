"""A job in two halves is one run: in order, whole, and no longer than what is known to be right."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from devices_models import make_job, qdq_conv

from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.find import find_device
from edgekit.devices.process.child import can_halve, describe_stop, run_in_two_calls
from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors
from edgekit.target import load_target


def rows_of(values: Sequence[float]) -> Samples:
    rows: list[Tensors] = [{"x": np.array([value], np.float32)} for value in values]
    return Samples(source="rows", count=len(rows), read=lambda: iter(rows))


def job_of(tmp_path: Path, count: int) -> Job:
    return msgspec.structs.replace(
        make_job(qdq_conv(tmp_path / "conv.onnx", np.uint8), "nnapi"), samples=rows_of(range(count))
    )


def run_some(job: Job, most: int, failure: str | None = None) -> DeviceRun:
    """What a device that stops after so many samples gives back: each sample, and itself in milliseconds."""
    values = [float(sample["x"][0]) for sample in job.samples][:most]
    stopped = len(values) < job.samples.count and failure is None
    return DeviceRun(
        device="some",
        evidence=Evidence.SAME_EP,
        outputs=rows_of(values),
        placement=(),
        placement_source="log",
        load_ms=1.0,
        latency_ms=tuple(values),
        peak_rss_bytes=len(values),
        versions={},
        failure=failure,
        notes=("known", *(describe_stop(len(values), job) if stopped else ())),
        stopped_early=stopped,
    )


@pytest.mark.parametrize("count", [8, 9])
def test_samples_and_times_keep_their_order(count: int, tmp_path: Path) -> None:
    run = run_in_two_calls(job_of(tmp_path, count), tmp_path, lambda half, _: run_some(half, count))
    values = [float(sample["x"][0]) for sample in run.outputs]
    assert (values, run.latency_ms, run.outputs.count) == ([*range(count)], tuple(range(count)), count)
    assert (run.failure, run.stopped_early, run.notes) == (None, False, ("known",))


@pytest.mark.parametrize(("most", "whole"), [((2, 5), 4), ((5, 2), 5), ((0, 5), 0), ((5, 0), 1)])
@pytest.mark.parametrize("failure", [None, "it died"])
def test_the_outputs_end_at_the_first_that_is_missing(
    most: tuple[int, int], whole: int, failure: str | None, tmp_path: Path
) -> None:
    def run_half(half: Job, work: Path) -> DeviceRun:
        mine = most[work.name == "odd"]
        return run_some(half, mine, failure if mine < 5 else None)

    job = job_of(tmp_path, 10)
    run = run_in_two_calls(job, tmp_path, run_half)
    assert [float(sample["x"][0]) for sample in run.outputs] == [*range(whole)]
    assert (run.failure, run.stopped_early) == (failure, failure is None)
    assert run.notes == ("known", *(() if failure else describe_stop(whole, job)))


def test_only_runs_that_nobody_times_are_halved(tmp_path: Path) -> None:
    job = job_of(tmp_path, 8)
    assert can_halve(job)
    timed: list[dict[str, Any]] = [
        {"repeat": 2},
        {"trace": True},
        {"answered": print},
        {"concurrency": 2},
        {"samples": rows_of(range(7))},
    ]
    assert not any(can_halve(msgspec.structs.replace(job, **each)) for each in timed)


@pytest.mark.slow
def test_nnapi_computes_the_same_in_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = find_device("android:x86_64", load_target("nnapi", {}))
    if (missing := device.find_missing()) is not None:
        pytest.skip(f"android: {missing.reason}: {missing.command}")
    job = make_job(qdq_conv(tmp_path / "conv.onnx", np.uint8), "nnapi")
    job = msgspec.structs.replace(job, least_samples=1)
    for folder in ("whole", "halves"):
        (tmp_path / folder).mkdir()
    whole = device.run_job(job, tmp_path / "whole")
    monkeypatch.setattr("edgekit.devices.android.android.MOST_MACS", -1)
    halves = device.run_job(job, tmp_path / "halves")
    assert (halves.failure, len(halves.latency_ms)) == (None, job.samples.count)
    assert [(tmp_path / folder / "odd").is_dir() for folder in ("whole", "halves")] == [False, True]
    for one, other in zip(whole.outputs, halves.outputs, strict=True):
        np.testing.assert_equal(dict(one), dict(other))
