"""Corrupts one layer of a quantized zoo model in six ways and asks verify which layer it was, and whether it notices.

    python tools/bench/seeded_faults.py [MODEL]... [--layers 3] [--zoo ../shared/zoo]

For each model, kind of fault and some layers: does `compare_layers` name the layer; does the gate (the target's limits,
or a layer that stands out) say no where at least 2 % of the first classes change; and does bisection on a device that
gives nothing but outputs name the layer in at most 2 log2(N) runs. A clean model must pass and name no layer.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from zoo_tasks import as_samples, read_inputs

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.devices.device import DeviceRun, Job, Missing, PlacedNode
from edgekit.evidence import Evidence
from edgekit.model import Model, load_model
from edgekit.prepare import fix_model, prepare_model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.samples import Samples, limit_samples
from edgekit.target import Target, load_target
from edgekit.tensors import Array, Tensors
from edgekit.verify.compare import compare_outputs
from edgekit.verify.layers import compare_layers, find_first_bad
from edgekit.verify.locate import locate_on_device
from edgekit.verify.report import judge_output

DEFAULT = ("vww_96_float", "kws_dscnn_float", "squeezenet1.1_fp32", "mobilenetv2_1.0_224_fp32", "superres_core_224")

Fault = Callable[[onnx.ModelProto, str, np.random.Generator], bool]


class Seeded(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fault on one layer."""

    kind: str
    layer: str
    seed: int


def find_weight(proto: onnx.ModelProto, layer: str) -> tuple[onnx.NodeProto, onnx.TensorProto] | None:
    """Returns the DQ node of a layer's weight and its integers, None where it is not quantized."""
    producers = {name: node for node in proto.graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    node = next((node for node in proto.graph.node if node.name == layer), None)
    rounded = None if node is None or len(node.input) < 2 else producers.get(node.input[1])
    if rounded is None or rounded.op_type != "DequantizeLinear" or rounded.input[0] not in tensors:
        return None
    return rounded, tensors[rounded.input[0]]


def change_weight(proto: onnx.ModelProto, layer: str, change: Callable[[Array], Array | None]) -> bool:
    """Changes the integers of a layer's weight; False where it has none or they cannot be changed so."""
    found = find_weight(proto, layer)
    values = None if found is None else change(numpy_helper.to_array(found[1]).copy())
    if found is None or values is None or np.array_equal(values, numpy_helper.to_array(found[1])):
        return False
    found[1].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), found[1].name))
    return True


def double_scale(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Doubles the scale of the layer's weight."""
    found = find_weight(proto, layer)
    if found is None:
        return False
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    scale = numpy_helper.to_array(tensors[found[0].input[1]]) * np.float32(2)
    proto.graph.initializer.append(numpy_helper.from_array(scale, "seeded.scale"))
    found[0].input[1] = "seeded.scale"
    return True


def shift_zero_point(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Reads the layer's result with a zero point that is off by one."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    node = next(node for node in proto.graph.node if node.name == layer)
    follower = node
    for _ in range(3):
        follower = next((other for other in proto.graph.node if follower.output[0] in other.input), follower)
        if follower.op_type == "DequantizeLinear":
            break
    if follower.op_type != "DequantizeLinear" or len(follower.input) < 3:
        return False
    zero = numpy_helper.to_array(tensors[follower.input[2]])
    moved = (zero + 1 if zero.max() < np.iinfo(zero.dtype).max else zero - 1).astype(zero.dtype)
    proto.graph.initializer.append(numpy_helper.from_array(moved, "seeded.zero"))
    follower.input[2] = "seeded.zero"
    return True


def swap_channels(proto: onnx.ModelProto, layer: str, rng: np.random.Generator) -> bool:
    """Swaps two output channels of the weight."""

    def change(values: Array) -> Array | None:
        if values.ndim < 2 or values.shape[0] < 2:
            return None
        first, second = rng.choice(values.shape[0], 2, replace=False)
        values[[first, second]] = values[[second, first]]
        return values

    return change_weight(proto, layer, change)


def flip_bit(proto: onnx.ModelProto, layer: str, rng: np.random.Generator) -> bool:
    """Flips bit 6 of one weight: 64 steps."""

    def change(values: Array) -> Array | None:
        values.reshape(-1).view(np.uint8)[rng.integers(values.size)] ^= 64
        return values

    return change_weight(proto, layer, change)


def transpose_weight(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Writes the weight in another order of its axes."""

    def change(values: Array) -> Array | None:
        if values.ndim < 2:
            return None
        return np.ascontiguousarray(np.moveaxis(values, 0, -1)).reshape(values.shape)

    return change_weight(proto, layer, change)


def overflow_half(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Computes the layer's result in half precision, a thousand million times too large."""
    node = next(node for node in proto.graph.node if node.name == layer)
    name, graph = node.output[0], proto.graph
    place = list(graph.node).index(node)
    node.output[0] = "seeded.result"
    graph.initializer.append(numpy_helper.from_array(np.array(1e9, np.float32), "seeded.factor"))
    added = [
        helper.make_node("Mul", ["seeded.result", "seeded.factor"], ["seeded.large"]),
        helper.make_node("Cast", ["seeded.large"], ["seeded.half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["seeded.half"], ["seeded.float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["seeded.float", "seeded.factor"], [name], name=layer + ".seeded"),
    ]
    for offset, extra in enumerate(added):
        graph.node.insert(place + 1 + offset, extra)
    return True


FAULTS: dict[str, Fault] = {
    "scale x2": double_scale,
    "zero point +1": shift_zero_point,
    "channels swapped": swap_channels,
    "fp16 overflow": overflow_half,
    "bit flip": flip_bit,
    "wrong transpose": transpose_weight,
}


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
            FAULTS[self.fault.kind](proto, self.fault.layer, np.random.default_rng(self.fault.seed))
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


def passes(reference: Sequence[Tensors], got: Sequence[Tensors], target: Target) -> bool:
    """Returns the verdict of the target's limits."""
    reports = compare_outputs(listed(reference), listed(got))
    return not any(judge_output(report, target.thresholds) for report in reports)


def seed_faults(model: Model, layers: int) -> Iterator[tuple[Seeded, onnx.ModelProto]]:
    """Yields each kind of fault on some layers, with the model that has it."""
    proto = onnx.load(str(model.path))
    names = [node.name for node in proto.graph.node if find_weight(proto, node.name)]
    rng = np.random.default_rng(5)
    for kind, corrupt in FAULTS.items():
        for layer in rng.choice(names, min(layers, len(names)), replace=False):
            broken = onnx.ModelProto()
            broken.CopyFrom(proto)
            seed = int(rng.integers(1 << 30))
            if corrupt(broken, str(layer), np.random.default_rng(seed)):
                yield Seeded(kind=kind, layer=str(layer), seed=seed), broken


def names_layer(found: str | None, layer: str) -> bool:
    """Returns True if the layer was named, or the node that the fault itself added to it."""
    return found is not None and found.removesuffix(".seeded") == layer


def measure_model(name: str, zoo: Path, layers: int, work: Path) -> dict[str, list[tuple[bool, str]]]:
    """Returns right or wrong, with what was asked, under the names of the three questions."""
    inputs, _ = read_inputs(zoo, name)
    target = load_target("nnapi")
    source = load_model(zoo / "models" / f"{name}.onnx")
    dims = {
        str(dim or f"{spec.name}:{axis}"): 1
        for spec in source.inputs
        for axis, dim in enumerate(spec.shape or ())
        if not isinstance(dim, int)
    }
    prepared = prepare_model(source, work / "prepared.onnx", dims)
    prepared = fix_model(prepared, work / "fixed.onnx").model
    calibration = calibrate_model(
        prepared, limit_samples(as_samples(inputs, prepared, 0), 32), work=work / "calibration"
    )
    plan = plan_quantization(prepared, calibration, target, "int8")
    clean = quantize_model(prepared, plan, work / "quantized.onnx").model
    samples = limit_samples(as_samples(inputs, prepared, 1), 50)
    few = limit_samples(samples, 4)
    reference, right = run_all(prepared, samples), run_all(clean, samples)
    bad = find_first_bad(compare_layers(prepared, clean, few))
    found: dict[str, list[tuple[bool, str]]] = {"layer": [], "gate": [], "bisection": [], "clean": []}
    found["clean"].append((bad is None and passes(reference, right, target), f"{name}: names {bad and bad.name}"))
    check = check_model(clean, target)
    for fault, proto in seed_faults(clean, layers):
        words = f"{name}: {fault.kind} in {fault.layer}"
        onnx.save(proto, str(work / "broken.onnx"))
        broken = load_model(work / "broken.onnx")
        named = find_first_bad(compare_layers(prepared, broken, few))
        got = run_all(broken, samples)
        changed = count_changed(right, got) if name != "superres_core_224" else 0.0
        known = named is not None and names_layer(named.name, fault.layer)
        found["layer"].append((known, f"{words}: names {named and named.name}"))
        if changed >= 0.02:
            noticed = named is not None or not passes(reference, got, target)
            found["gate"].append((noticed, f"{words}: {changed:.0%} of the classes change"))
        job = Job(
            model=clean.path, target=target, precision="int8", outputs=clean.outputs, check=check,
            samples=limit_samples(samples, 2),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            located = locate_on_device(Miscomputing(fault=fault), job, Path(folder), min_sqnr_db=60.0)
        if located.layer is not None:
            enough = located.runs <= 2 * math.log2(max(4, located.cuts))
            said = f"{words}: names {located.layer} in {located.runs} runs of {located.cuts} cuts"
            found["bisection"].append((enough and names_layer(located.layer, fault.layer), said))
    return found


def main() -> int:
    """Prints the shares and what went wrong; 1 where a share is below what the project promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--zoo", type=Path, default=Path("../shared/zoo"))
    options = parser.parse_args()
    totals: dict[str, list[tuple[bool, str]]] = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            found = measure_model(name, options.zoo, options.layers, Path(folder))
        for question, answers in found.items():
            totals.setdefault(question, []).extend(answers)
        print(name, {key: f"{sum(ok for ok, _ in value)}/{len(value)}" for key, value in found.items()}, flush=True)
    shares = {key: sum(ok for ok, _ in value) / max(1, len(value)) for key, value in totals.items()}
    for answers in totals.values():
        print(*(f"  wrong: {words}" for ok, words in answers if not ok), sep="\n")
    print({key: f"{share:.1%} of {len(totals[key])}" for key, share in shares.items()})
    least = {"layer": 0.95, "gate": 1.0, "bisection": 0.95, "clean": 1.0}
    return int(any(shares[key] < least[key] for key in shares))


if __name__ == "__main__":
    sys.exit(main())
