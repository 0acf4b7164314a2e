"""Verifies honest runs of random networks, and counts how often one is accused of lying.

    python tools/bench/false_alarms.py [--device host] [--networks 100] [--runs 10] [--seed 0] [--state DIR]

Each network (perceptrons and convolutions; outputs are logits, probabilities, scores or images, of one value to 256) is
built for a target and verified: first with its own golden samples, then with 2 to 64 others. `--device host` computes
in this process with ONNX Runtime at one of its optimization levels; `qnn-htp-sim`, `android:x86_64` and others are the
real devices, for their own targets. An accusation is a finding about a run, the statement that its output follows other
samples, a doubt about its times or precision, or the statement that a file of the bundle was altered. A figure below a
limit is no accusation, and a run that the device refuses does not count. At most one run in 1,000 may be accused.
"""

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from fault_subjects import listed
from net import Net
from row_state import resume_rows

from edgekit._ort import CPU_PROVIDER, VERSION, CpuSession, Level, SessionSettings
from edgekit.bundle.folder import Bundle, open_bundle, read_target
from edgekit.bundle.golden import make_golden
from edgekit.data.samples import Samples
from edgekit.devices.device import Device, DeviceRun, Job, PlacedNode
from edgekit.devices.find import find_device
from edgekit.evidence import Evidence
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.model.tensors import Tensors
from edgekit.recipe import Data, Recipe
from edgekit.target import Verification
from edgekit.verify.report import VerifyReport
from edgekit.verify.run import verify_bundle

MOST_SHARE = 1e-3
_TARGETS = {
    "host": ("nnapi", "coreml", "xnnpack", "cpu"),
    "qnn-htp-sim": ("qnn",),
    "android:x86_64": ("nnapi", "xnnpack", "cpu"),
}
_DOUBTS = ("its times are not believed", "holds only values of half precision")
_HEADS = ("logits", "Softmax", "Sigmoid", "Tanh", "image")
_SIZES = (2, 3, 4, 6, 8, 16, 32, 64)


class Honest(Device, frozen=True, kw_only=True):
    """An honest device: computes its inputs, and reports each node at its predicted place."""

    level: Level
    name: str = "honest"
    evidence: Evidence = Evidence.SAME_EP

    def run_job(self, job: Job, work: Path) -> DeviceRun:  # noqa: ARG002 - what a device is asked
        """Runs the samples in this process."""
        config = {"session.enable_saved_runtime_optimizations": "1"}
        session = CpuSession(job.model, SessionSettings(level=self.level, config=config, threads=1))
        rows, times = list[Tensors](), list[float]()
        for sample in job.samples:
            begun = time.perf_counter()
            rows.append(session.run(sample))
            times.append(1000.0 * (time.perf_counter() - begun))
        # In a file of ORT format the Q and DQ nodes have become part of integer operators.
        placement = tuple(
            PlacedNode(name=node.name, op=node.op, domain=node.domain, provider=_place(job, taken=node.taken))
            for node in job.check.node_list
            if job.model.suffix == ".onnx" or not node.is_quantizer
        )
        return DeviceRun(
            device=self.name, evidence=self.evidence, outputs=listed(rows), placement=placement,
            placement_source="session", load_ms=1.0, latency_ms=tuple(times), peak_rss_bytes=1,
            versions={"onnxruntime": VERSION}, failure=None,
        )  # fmt: skip


def _place(job: Job, *, taken: bool) -> str:
    return job.target.provider if taken else CPU_PROVIDER


def draw_network(rng: np.random.Generator, path: Path) -> tuple[int, ...]:
    """Saves a network with random weights, and returns the shape of its input."""
    head, classes = rng.choice(_HEADS), int(rng.choice([1, 1, 2, 2, 3, 10, 100, 256]))
    # A Softmax over one value is always 1, but ONNX Runtime's integer kernel returns 0: that finding would be true.
    classes = max(2, classes) if head == "Softmax" else classes
    is_image = head == "image" or rng.random() < 0.5
    width, shape = int(rng.integers(4, 33)), (1, 3, 12, 12) if is_image else (1, 16)
    net, last = Net("drawn", 17, 0), "x"

    def add(op: str, *sizes: int, **attributes: Any) -> str:
        inputs = [last]
        if sizes:
            fan, made = (int(np.prod(sizes[1:])), sizes[0]) if op == "Conv" else sizes
            inputs.append(net.constant(rng.normal(scale=(2.0 / fan) ** 0.5, size=sizes)))
            inputs.append(net.constant(rng.normal(scale=0.1, size=made)))
        return net.add(op, inputs, **attributes)

    before = 3 if is_image else 16
    for _ in range(int(rng.integers(1, 4))):
        last = add("Conv", width, before, 3, 3, pads=[1] * 4) if is_image else add("Gemm", before, width)
        last, before = add("Relu"), width
    if head == "image":
        add("Conv", 3, before, 3, 3, pads=[1] * 4)
    else:
        if is_image:
            last = add("GlobalAveragePool")
            last = add("Flatten")
        last = add("Gemm", before, classes)
        if head != "logits":
            add(str(head))
    net.nodes[-1].output[0] = "y"
    net.inputs["x"], net.outputs["y"] = shape[1:], (3, 12, 12) if head == "image" else (classes,)
    onnx.save(net.to_onnx(1, 9), str(path))
    return shape


def draw_samples(rng: np.random.Generator, shape: tuple[int, ...], count: int) -> Samples:
    """Returns inputs that vary around a common one, from nearly equal to completely different."""
    shared, spread = rng.normal(size=shape), float(rng.choice([0.1, 0.5, 1.0]))
    rows = [{"x": (shared + spread * rng.normal(size=shape)).astype(np.float32)} for _ in range(count)]
    return listed(rows)


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the runs of one network on one device: `told` are the accusations, one tuple for each run."""

    runs: int
    refused: int
    told: tuple[tuple[str, ...], ...]


def verify_network(rng: np.random.Generator, name: str, runs: int, work: Path) -> Iterator[VerifyReport]:
    """Yields the verifications of one random network."""
    shape = draw_network(rng, work / "drawn.onnx")
    np.savez(work / "data.npz", x=np.stack([row["x"][0] for row in draw_samples(rng, shape, 48)]))
    recipe = Recipe(targets=(str(rng.choice(_TARGETS[name])),))
    made = build(work / "drawn.onnx", Data(source=str(work / "data.npz")), work / "out", recipe, verify=False)
    path = made.bundles[0].path
    if path is None:
        return
    bundle, source = open_bundle(path), load_model(work / "drawn.onnx")
    for index in range(runs):
        samples = draw_samples(rng, shape, int(rng.choice(_SIZES)))
        golden = make_golden(source, samples, work / f"golden{index}") if index else None
        device = find_honest(name, bundle, Level(rng.choice(list(Level))))
        # If the target plans no run on this device, it gets the ONNX file, of which the provider takes what it can.
        plan = (*bundle.manifest.verification, Verification(device=device.name, form="onnx", samples=64))
        manifest = msgspec.structs.replace(bundle.manifest, verification=plan)
        yield verify_bundle(msgspec.structs.replace(bundle, manifest=manifest), [device], golden=golden)


def find_honest(name: str, bundle: Bundle, level: Level) -> Device:
    """Returns a device that is honest: ONNX Runtime in this process, or a real one."""
    return Honest(level=level) if name == "host" else find_device(name, read_target(bundle))


def list_accusations(report: VerifyReport) -> Iterator[str]:
    """Yields the accusations against an honest device or bundle."""
    yield from report.alterations
    for run in report.runs:
        yield from run.findings
        yield from (output.mismatch for output in run.outputs if output.mismatch and run.failure is None)
        yield from (note for note in run.notes if any(doubt in note for doubt in _DOUBTS))


def count_network(name: str, seed: int, runs: int) -> Iterator[Count]:
    """Yields how many runs of one network are accused; runs that the device refused are not counted."""
    done, refused, told = 0, 0, list[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as work:
        for report in verify_network(np.random.default_rng(seed), name, runs, Path(work)):
            is_refused = not report.runs or any(run.failure is not None for run in report.runs)
            done, refused = done + (not is_refused), refused + is_refused
            found = tuple(list_accusations(report))
            if found:
                told.append(found)
    yield Count(runs=done, refused=refused, told=tuple(told))


def main() -> int:
    """Prints the accusations, and returns 1 if there are too many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("networks", 100), ("runs", 10), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=sorted(_TARGETS), default="host")
    parser.add_argument("--state", type=Path)
    args = parser.parse_args()
    counts: list[Count] = []
    for seed in range(args.seed, args.seed + args.networks):
        make = functools.partial(count_network, args.device, seed, args.runs)
        for count in resume_rows(args.state, f"false_alarms {args.device} {seed} {args.runs}", Count, make):
            counts.append(count)
            for words in count.told:
                print(f"network {seed} on {args.device}: {' / '.join(words)}", flush=True)
    return 0 if show(args.device, counts) else 1


def show(name: str, counts: Sequence[Count]) -> bool:
    """Prints how many runs were accused, and returns True if they are few enough."""
    done, refused = (sum(values) for values in zip(*((count.runs, count.refused) for count in counts), strict=True))
    failed = sum(len(count.told) for count in counts)
    share = f"{failed / max(1, done):.2%}, at most {MOST_SHARE:.1%} may be"
    print(f"{name}: {failed} of {done} honest runs accused ({share}); {refused} were refused by the device")
    return bool(failed <= max(1, MOST_SHARE * done))


if __name__ == "__main__":
    sys.exit(main())
