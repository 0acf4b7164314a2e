"""Devices for tests: one that runs the model on the CPU in this process, and lies that it can return."""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from devices_models import Altering
from fixture_types import present
from msgspec.structs import replace
from verify_models import turn_weights

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.archive import unpack_archive
from edgekit.bundle.folder import Bundle
from edgekit.data.samples import Samples, list_samples
from edgekit.devices.device import Device, DeviceRun, Job, Missing, PlacedNode
from edgekit.errors import DeviceError
from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors
from edgekit.package.package import package_bundles

Lie = Callable[[list[Tensors]], list[Tensors]]
Retell = Callable[[Job, DeviceRun], dict[str, Any]]


class InProcess(Device, frozen=True, kw_only=True):
    """Runs the model in this process, reports each node at its predicted place, and passes the outputs through `lie`.

    It reports `times`, if given. With `nodes` it reports that many nodes that do no work; with `provider` it reports
    that this provider took every node. `retell` returns what else it says otherwise of the run.
    """

    name: str = "emulated"
    evidence: Evidence = Evidence.SAME_EP
    lie: Lie = lambda outputs: outputs
    retell: Retell = lambda _job, _run: {}
    provider: str | None = None
    missing: Missing | None = None
    failure: str | None = None
    crashed: bool = False
    times: tuple[float, ...] = ()
    nodes: int | None = None
    stopped_early: bool = False

    def find_missing(self) -> Missing | None:
        return self.missing

    def run_job(self, job: Job, work: Path) -> DeviceRun:  # noqa: ARG002 - the seam
        session = CpuSession(job.model, SessionSettings(level=Level.DISABLED))
        truths, times = list[Tensors](), list[float]()
        for sample in job.samples:
            begun = time.perf_counter()
            truths.append(session.run(sample))
            times.append(1000.0 * (time.perf_counter() - begun))
            if job.on_outputs is not None:
                job.on_outputs(truths[-1])
        run = DeviceRun(
            device=self.name, evidence=self.evidence, outputs=from_list(self.lie(truths)),
            placement=self.report_placement(job), placement_source="session", load_ms=1.0,
            latency_ms=self.times or tuple(times), peak_rss_bytes=1, versions={"onnxruntime": "1.31.1"},
            failure=self.failure, crashed=self.crashed, stopped_early=self.stopped_early,
        )  # fmt: skip
        return replace(run, **self.retell(job, run))

    def report_placement(self, job: Job) -> tuple[PlacedNode, ...]:
        provider = self.provider or job.target.provider
        if self.nodes is not None:
            return tuple(PlacedNode(name=f"n{i}", op="Relu", domain="", provider=provider) for i in range(self.nodes))
        return tuple(
            PlacedNode(
                name=node.name, op=node.op, domain=node.domain,
                provider=provider if self.provider or node.taken else CPU_PROVIDER,
            )
            for node in job.check.node_list
        )  # fmt: skip


def turning(inner: Device, layer: str) -> Altering:
    """Returns a real device that gets the model with the sign of one layer's weights inverted."""
    return Altering(device=inner, change=lambda proto: turn_weights(proto, layer))


class Absent(InProcess, frozen=True, kw_only=True):
    """A device that claims to be available, but fails."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:  # noqa: ARG002 - the seam
        raise DeviceError("'phone' was unplugged", hint="adb devices")


def restate(bundle: Bundle, **said: Any) -> Bundle:
    """Returns a bundle whose manifest says something else, of which the files know nothing."""
    return replace(bundle, manifest=replace(bundle.manifest, **said))


def from_list(rows: Sequence[Tensors]) -> Samples:
    return list_samples(rows, "the device")


def breaking_after(rows: Sequence[Tensors]) -> Samples:
    """Samples whose iterator fails after the rows."""

    def read() -> Iterator[Tensors]:
        yield from rows
        raise DeviceError("'out/3.npy' is cut off", hint="run again")

    return Samples(source="the device", count=len(rows) + 1, read=read)


def open_loader(bundle: Bundle, folder: Path) -> tuple[Any, Any]:
    """Returns the Python loader of a bundle that was packaged as an archive, and its one variant."""
    package_bundles([bundle.folder], "tar", folder / "p.tar")
    unpack_archive(folder / "p.tar", folder / "p")
    place = present(importlib.util.spec_from_file_location("loader", folder / "p" / "python" / "edgekit_loader.py"))
    loader = importlib.util.module_from_spec(place)
    present(place.loader).exec_module(loader)
    (variant,) = loader.read_variants()
    return loader, variant
