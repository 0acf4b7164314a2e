"""Corrupts one layer of a deployed model and asks verify which layer it was, and whether it notices.

    python tools/bench/seeded_faults.py [MODEL]... [--layers 3] [--forms int8,fp16,fp32] [--zoo ../shared/zoo]

For each model, kind of fault and some layers: does `compare_layers` name the layer; does the bundle name it alone,
without the float model; does the gate (the target's limits, or a layer that stands out)
say no where at least 2 % of the first classes change; and does bisection on a device that gives nothing but outputs
name the layer in at most 2 log2(N) runs. A clean model must pass and name no layer. A fault that moves no output by
more than -60 dB and is not named is no fault that anybody could notice: it does not count.

The models of the zoo get the faults that the project promises to find; those of `held_out_models` get others too.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from held_out_models import MODELS, draw_inputs
from layer_faults import FAULTS, HELD_OUT, Fault, find_weight, list_subjects
from zoo_tasks import as_samples, read_inputs

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.devices.device import DeviceRun, Job, Missing, PlacedNode
from edgekit.evidence import Evidence
from edgekit.model import Model, load_model
from edgekit.prepare import fix_model, prepare_model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.halve import halve_model
from edgekit.samples import Samples, limit_samples, select_samples, spread_indices
from edgekit.target import Target, load_target
from edgekit.tensors import Tensors
from edgekit.verify.compare import compare_outputs
from edgekit.verify.fingerprints import find_changed_layer, fingerprint_layers
from edgekit.verify.layers import compare_layers
from edgekit.verify.locate import locate_on_device
from edgekit.verify.outliers import find_first_bad, judge_layers
from edgekit.verify.outputs import judge_output

DEFAULT = (
    "kws_dscnn_float", "mnist_cnn_pytorch", "vww_96_float", "squeezenet1.1_fp32", "superres_core_224",
    "mobilenetv2_1.0_224_fp32", "ultraface_rfb320", "fastestdet", "magika_v3_3", "silero_vad_micro_transformer",
    "ppocr_cls_mbv3", "mnist8_cntk",
)  # fmt: skip
_DRAWN = {"ppocr_cls_mbv3": (1, 3, 48, 192), "mnist8_cntk": (1, 1, 28, 28)}
"""Models that the zoo has no inputs for, with the shape of drawn ones."""
_UNNOTICEABLE_DB = 60.0


class Seeded(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fault on one layer."""

    kind: str
    layer: str
    seed: int


class Miscomputing(msgspec.Struct, frozen=True, kw_only=True):
    """A device that gives nothing but outputs, and has the fault wherever the layer is in what it runs."""

    fault: Seeded
    name: str = "miscomputing"
    evidence: Evidence = Evidence.EMULATED

    def find_missing(self) -> Missing | None:
        """Returns None."""
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs the samples on the model with the fault."""
        proto = onnx.load(str(job.model))
        if any(node.name == self.fault.layer for node in proto.graph.node):
            {**FAULTS, **HELD_OUT}[self.fault.kind](proto, self.fault.layer, np.random.default_rng(self.fault.seed))
        onnx.save(proto, str(work / "faulty.onnx"))
        session = CpuSession(work / "faulty.onnx", SessionSettings(level=Level.DISABLED))
        rows = [session.run(sample) for sample in job.samples]
        return DeviceRun(
            device=self.name, evidence=self.evidence, outputs=listed(rows), placement=tuple[PlacedNode, ...](),
            placement_source="predicted", load_ms=1.0, latency_ms=tuple(1.0 for _ in rows), peak_rss_bytes=1,
            versions={}, failure=None,
        )  # fmt: skip


def listed(rows: Sequence[Tensors]) -> Samples:
    """Returns rows as samples."""
    return Samples(source="rows", count=len(rows), read=lambda: iter(rows))


def run_all(model: Model, samples: Samples) -> list[Tensors]:
    """Returns the outputs of a model with every optimisation off."""
    session = CpuSession(model.path, SessionSettings(level=Level.DISABLED))
    return [session.run(sample) for sample in samples]


def count_changed(clean: Sequence[Tensors], got: Sequence[Tensors]) -> float:
    """Returns the share of samples whose first class changes, in the first output."""
    name = next(iter(clean[0]))
    changed = [
        not np.isfinite(now[name]).all() or int(now[name].argmax()) != int(before[name].argmax())
        for before, now in zip(clean, got, strict=True)
    ]
    return sum(changed) / len(changed)


def judge(reference: Sequence[Tensors], got: Sequence[Tensors], target: Target) -> list[str]:
    """Returns what the target's limits say against the outputs."""
    reports = compare_outputs(listed(reference), listed(got))
    return [line for report in reports for line in judge_output(report, target.thresholds)]


def seed_faults(model: Model, faults: Mapping[str, Fault], layers: int) -> Iterator[tuple[Seeded, onnx.ModelProto]]:
    """Yields each kind of fault on some layers, with the model that has it."""
    proto = onnx.load(str(model.path))
    rng = np.random.default_rng(5)
    for kind, corrupt in faults.items():
        names = list(list_subjects(proto, corrupt))
        for layer in rng.choice(names, min(layers, len(names)), replace=False) if names else ():
            broken = onnx.ModelProto()
            broken.CopyFrom(proto)
            seed = int(rng.integers(1 << 30))
            if corrupt(broken, str(layer), np.random.default_rng(seed)):
                yield Seeded(kind=kind, layer=str(layer), seed=seed), broken


def names_layer(found: str | None, fault: Seeded, proto: onnx.ModelProto) -> bool:
    """Returns True if the layer was named, or the node that the fault added to it, or one that shares its weight.

    Where two outputs are swapped either of their layers is right.
    """
    if found is None:
        return False
    if fault.kind == "outputs swapped":
        return True
    mine = find_weight(proto, fault.layer)
    other = find_weight(proto, found)
    is_shared = mine is not None and other is not None and mine[1].name == other[1].name
    return is_shared or found.removesuffix(".seeded") == fault.layer


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A float model made ready, with samples to learn from and to judge with."""

    name: str
    prepared: Model
    learn: Samples
    judge: Samples


def open_zoo(name: str, zoo: Path, work: Path) -> Subject:
    """Returns a model of the zoo; dimensions that are open become those of the first sample."""
    source = load_model(zoo / "models" / f"{name}.onnx")
    inputs = {} if name in _DRAWN else read_inputs(zoo, name)[0]
    shapes = {item.name: _DRAWN[name] if name in _DRAWN else inputs[item.name][0].shape for item in source.inputs}
    dims: dict[str, int] = {}
    for spec in source.inputs:
        shape = shapes[spec.name]
        shape = (1, *shape) if len(shape) < len(spec.shape or ()) else shape
        dims |= {
            str(dim or f"{spec.name}:{axis}"): shape[axis]
            for axis, dim in enumerate(spec.shape or ())
            if not isinstance(dim, int)
        }
    prepared = fix_model(prepare_model(source, work / "prepared.onnx", dims), work / "fixed.onnx").model
    if name in _DRAWN:
        learn, judge = draw_inputs(prepared, 32, 1), draw_inputs(prepared, 50, 2)
    else:
        learn, judge = (as_samples(inputs, prepared, start) for start in (0, 1))
    return Subject(name=name, prepared=prepared, learn=limit_samples(learn, 32), judge=limit_samples(judge, 50))


def open_held_out(name: str, work: Path) -> Subject:
    """Returns a model that no rule was made with."""
    source = MODELS[name](work / f"{name}.onnx")
    prepared = fix_model(prepare_model(source, work / "prepared.onnx", {}), work / "fixed.onnx").model
    return Subject(name=name, prepared=prepared, learn=draw_inputs(prepared, 48, 1), judge=draw_inputs(prepared, 50, 2))


def deploy(subject: Subject, form: str, work: Path) -> tuple[Model, Target]:
    """Returns the model as it is deployed, with the target whose limits count: int8, fp16 or fp32."""
    target = load_target("nnapi" if form == "int8" else "coreml")
    if form == "fp32":
        return subject.prepared, target
    if form == "fp16":
        left = [node.name for node in check_model(subject.prepared, target).node_list if not node.taken]
        return halve_model(subject.prepared, left, work / "half.onnx").model, target
    calibration = calibrate_model(subject.prepared, subject.learn, work=work / "calibration")
    plan = plan_quantization(subject.prepared, calibration, target, "int8")
    return quantize_model(subject.prepared, plan, work / "quantized.onnx").model, target


def measure_model(
    subject: Subject, form: str, faults: Mapping[str, Fault], layers: int, work: Path
) -> dict[str, list[tuple[bool, str]]]:
    """Returns right or wrong, with what was asked, under the names of the questions."""
    clean, target = deploy(subject, form, work)
    few = select_samples(subject.judge, spread_indices(subject.judge.count, 4))
    reference, right = run_all(subject.prepared, subject.judge), run_all(clean, subject.judge)
    said = (*judge_layers(compare_layers(subject.prepared, clean, few)), *judge(reference, right, target))
    known = f"{subject.name} {form}"
    found: dict[str, list[tuple[bool, str]]] = {"layer": [], "gate": [], "bundle": [], "bisection": [], "clean": []}
    built = fingerprint_layers(clean)
    found["clean"].append((not said, f"{known}: {' / '.join(said)}"))
    for fault, proto in seed_faults(clean, faults, layers):
        words = f"{known}: {fault.kind} in {fault.layer}"
        onnx.save(proto, str(work / "broken.onnx"))
        broken = load_model(work / "broken.onnx")
        named = find_first_bad(compare_layers(subject.prepared, broken, few))
        got = run_all(broken, subject.judge)
        changed = count_changed(right, got)
        moved = measure_move(right, got)
        if moved < _UNNOTICEABLE_DB or named is not None:
            told = find_changed_layer(built, fingerprint_layers(broken))
            found["bundle"].append(
                (told is not None and names_layer(told.layer, fault, proto), f"{words}: says {told}")
            )
            known_right = named is not None and names_layer(named.name, fault, proto)
            found["layer"].append((known_right, f"{words}: names {named and named.name} ({moved:.0f} dB)"))
        if changed >= 0.02 and subject.name != "superres_core_224":
            noticed = named is not None or bool(judge(reference, got, target))
            found["gate"].append((noticed, f"{words}: {changed:.0%} of the classes change ({moved:.0f} dB)"))
        if form == "int8" and fault.kind in FAULTS:
            found["bisection"].extend(bisect(clean, target, fault, subject.judge, words))
    return found


def measure_move(right: Sequence[Tensors], got: Sequence[Tensors]) -> float:
    """Returns the least SQNR of an output with the fault against the clean one, minus 200 where it is not finite."""
    reports = compare_outputs(listed(right), listed(got))
    return min((-200.0 if item.sqnr_db is None else item.sqnr_db for item in reports), default=-200.0)


def bisect(clean: Model, target: Target, fault: Seeded, samples: Samples, words: str) -> Iterator[tuple[bool, str]]:
    """Yields whether a device that gives nothing but outputs is found out in time, if its outputs show the fault."""
    job = Job(
        model=clean.path, target=target, precision="int8", outputs=clean.outputs, check=check_model(clean, target),
        samples=limit_samples(samples, 2),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        located = locate_on_device(Miscomputing(fault=fault), job, Path(folder), min_sqnr_db=60.0)
    if located.layer is not None:
        enough = located.runs <= 2 * math.log2(max(4, located.cuts))
        told = f"{words}: names {located.layer} in {located.runs} runs of {located.cuts} cuts"
        yield enough and names_layer(located.layer, fault, onnx.load(str(clean.path))), told


def main() -> int:
    """Prints the shares and what went wrong; 1 where a share is below what the project promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=(*DEFAULT, *MODELS))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--forms", default="int8,fp16,fp32")
    parser.add_argument("--zoo", type=Path, default=Path("../shared/zoo"))
    options = parser.parse_args()
    totals: dict[str, list[tuple[bool, str]]] = {}
    for name, form in ((name, form) for name in options.models for form in options.forms.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            subject = open_held_out(name, work) if name in MODELS else open_zoo(name, options.zoo, work)
            faults = {**FAULTS, **HELD_OUT} if name in MODELS else FAULTS
            found = measure_model(subject, form, faults, options.layers, work)
        for question, answers in found.items():
            totals.setdefault(question, []).extend(answers)
        counts = {key: f"{sum(ok for ok, _ in value)}/{len(value)}" for key, value in found.items()}
        print(name, form, counts, *(f"\n  wrong: {said}" for value in found.values() for ok, said in value if not ok),
              flush=True)  # fmt: skip
    shares = {key: sum(ok for ok, _ in value) / max(1, len(value)) for key, value in totals.items() if value}
    print({key: f"{share:.1%} of {len(totals[key])}" for key, share in shares.items()})
    least = {"layer": 0.95, "bundle": 0.95, "gate": 1.0, "bisection": 0.95, "clean": 1.0}
    return int(any(shares[key] < least[key] for key in shares))


if __name__ == "__main__":
    sys.exit(main())
