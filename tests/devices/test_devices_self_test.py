"""The self-test says yes to devices that compute, and no to those that lie in any of the ways it looks for."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import present

from edgekit.data.samples import Samples
from edgekit.devices.device import Device, DeviceRun, Job, Missing
from edgekit.devices.find import default_target, serve_device
from edgekit.devices.local.host import Host
from edgekit.devices.self_test import SelfTest, try_device
from edgekit.model.tensors import Tensors

pytestmark = pytest.mark.slow

HONEST: dict[bytes, tuple[DeviceRun, list[Tensors]]] = {}


EMULATED = [pytest.param(name, marks=pytest.mark.long) for name in ("arm64:native", "android")]


@pytest.mark.parametrize("name", ["host", "emulated", "qnn-htp-sim", "android:x86_64", "ios-sim", *EMULATED])
def test_every_emulator_that_is_here_passes(name: str) -> None:
    served = serve_device(name)
    for _, target in served:
        present(name, target)
    test = try_device(served)
    assert test.skipped is None
    assert [(check.name, check.detail) for check in test.checks if not check.passed] == []
    assert len(test.checks) == 5 * len(served)
    assert [check.name.startswith("nnapi: ") for check in test.checks][-5:] == [name.startswith("android")] * 5
    assert test.versions["onnxruntime"]


def try_alone(device: Device) -> SelfTest:
    return try_device([(device, default_target("host"))])


class Liar(Host, frozen=True, kw_only=True):
    """Runs a model once for all liars, and then says something else."""

    lie: str = ""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        model = job.model.read_bytes()
        if model not in HONEST:
            run = Host.run_job(self, job, work)
            HONEST[model] = run, [{"y": row["y"].copy()} for row in run.outputs]
        run, rows = HONEST[model]
        if self.lie == "zeros":
            rows = [{"y": np.zeros_like(row["y"])} for row in rows]
        elif self.lie == "swapped":
            rows = rows[::-1]
        elif self.lie == "NaN":
            rows = [{"y": np.full_like(row["y"], np.nan)} for row in rows]
        elif self.lie == "nowhere":
            run = msgspec.structs.replace(run, placement=())
        elif self.lie == "timeless":
            run = msgspec.structs.replace(run, latency_ms=())
        elif self.lie == "eager" and run.failure is not None:
            rows, run = [{"y": np.zeros((1, 4, 8, 8), np.float32)}] * 3, msgspec.structs.replace(run, failure=None)
        return msgspec.structs.replace(run, outputs=Samples(source="lie", count=len(rows), read=lambda: iter(rows)))


class Remembering(Host, frozen=True, kw_only=True):
    """Runs the first model that it was ever given, whatever comes after."""

    first: list[Path]

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        kept = work.parent.parent / f"edgekit-first-{id(self)}.onnx"
        if not self.first:
            kept.write_bytes(job.model.read_bytes())
            self.first.append(kept)
        return Host.run_job(self, msgspec.structs.replace(job, model=kept), work)


@pytest.mark.parametrize(
    ("lie", "check"),
    [
        ("zeros", "outputs"), ("swapped", "outputs"), ("NaN", "outputs"), ("nowhere", "placement"),
        ("timeless", "times"), ("eager", "a model that cannot run is refused"),
    ],
)  # fmt: skip
def test_a_liar_fails_the_check_that_looks_for_it(lie: str, check: str) -> None:
    test = try_alone(Liar(lie=lie))
    assert not test.passed
    assert check in [tried.name for tried in test.checks if not tried.passed]


def test_a_device_that_does_not_run_what_it_is_given_fails_the_negative_control() -> None:
    device = Remembering(first=[])
    test = try_alone(device)
    device.first[0].unlink()
    assert {check.name for check in test.checks if not check.passed} == {
        "an altered weight is noticed", "a model that cannot run is refused",
    }  # fmt: skip


def test_a_device_that_is_not_there_is_not_tried() -> None:
    class Absent(Host, frozen=True, kw_only=True):
        """Is not there."""

        def find_missing(self) -> Missing | None:
            return Missing(reason="unplugged", command="plug it in")

    test = try_alone(Absent())
    assert (test.passed, test.skipped, test.command, test.checks) == (False, "unplugged", "plug it in", ())
