"""Models for the tests of fault detection, prepared and deployed as edgekit does it, and faults in their layers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from held_out_models import MODELS, draw_inputs
from layer_faults import Fault, list_layers, list_subjects
from zoo_tasks import ZOO, as_samples, read_inputs

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.data.samples import Samples, limit_samples
from edgekit.model.model import Model, iterate_graphs, load_model
from edgekit.model.tensors import Tensors
from edgekit.prepare import fix_model, prepare_model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.weight_only import convert_to_fp16
from edgekit.target import Target, load_target

_DRAWN = {"ppocr_cls_mbv3": (1, 3, 48, 192), "mnist8_cntk": (1, 1, 28, 28)}
"""Models for which the zoo has no inputs, with the shape of their random inputs."""
_UNPREPARED = frozenset({"silero_vad"})
"""Its whole graph is in the subgraphs of an If, and no input length suits both.

So ONNX Runtime refuses the model if its dimensions are fixed, and no model is prepared from it. Faults are put into the
subgraphs of the float model.
"""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared float model, with samples for calibration and for verification."""

    name: str
    prepared: Model
    learn: Samples
    judge: Samples
    forms: tuple[str, ...] = ("int8", "fp16", "fp32")


def open_zoo(name: str, work: Path) -> Subject:
    """Returns a model of the zoo; open dimensions get the sizes of the first sample."""
    source = load_model(ZOO / "models" / f"{name}.onnx")
    if name in _UNPREPARED:
        learn, judge = (as_samples(read_inputs(name), source, start) for start in (0, 1))
        return Subject(name=name, prepared=source, learn=learn, judge=judge, forms=("fp32",))
    inputs = {} if name in _DRAWN else read_inputs(name)
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
    """Returns one of the models of held_out_models.py, from which no rule of the verification was made."""
    source = MODELS[name](work / f"{name}.onnx")
    prepared = fix_model(prepare_model(source, work / "prepared.onnx", {}), work / "fixed.onnx").model
    return Subject(name=name, prepared=prepared, learn=draw_inputs(prepared, 48, 1), judge=draw_inputs(prepared, 50, 2))


def deploy(subject: Subject, form: str, work: Path) -> tuple[Model, Target]:
    """Returns the deployed model (int8, fp16 or fp32), and the target whose limits apply."""
    target = load_target("nnapi" if form == "int8" else "coreml")
    if form == "fp32":
        return subject.prepared, target
    if form == "fp16":
        left = [node.name for node in check_model(subject.prepared, target).node_list if not node.taken]
        return convert_to_fp16(subject.prepared, left, work / "half.onnx").model, target
    calibration = calibrate_model(subject.prepared, subject.learn, work=work / "calibration")
    plan = plan_quantization(subject.prepared, calibration, target, "int8")
    return quantize_model(subject.prepared, plan, calibration, work / "quantized.onnx").model, target


class Seeded(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fault in one layer of a graph; graph 0 is the main graph, others are subgraphs of control flow."""

    kind: str
    layer: str
    seed: int
    graph: int = 0


def seed_faults(model: Model, faults: Mapping[str, Fault], layers: int) -> Iterator[tuple[Seeded, onnx.ModelProto]]:
    """Yields each kind of fault in some layers, with the corrupted model."""
    proto = onnx.load(str(model.path))
    rng = np.random.default_rng(5)
    places = [place for place, _ in enumerate(iterate_graphs(proto.graph)) if place or list_layers(proto)]
    places = places[:1] if places[0] == 0 else places
    for kind in faults:
        known = [(place, name) for place in places for name in list_subjects(view_graph(proto, place), faults[kind])]
        chosen = rng.choice(len(known), min(layers, len(known)), replace=False) if known else ()
        for place, layer in (known[index] for index in chosen):
            broken = onnx.ModelProto()
            broken.CopyFrom(proto)
            fault = Seeded(kind=kind, layer=layer, seed=int(rng.integers(1 << 30)), graph=place)
            if put_fault(broken, fault, faults[kind]):
                yield fault, broken


def put_fault(proto: onnx.ModelProto, fault: Seeded, corrupt: Fault) -> bool:
    """Puts a fault into a model; returns False if the layer has nothing that this fault could corrupt."""
    view = view_graph(proto, fault.graph)
    if not corrupt(view, fault.layer, np.random.default_rng(fault.seed)):
        return False
    list(iterate_graphs(proto.graph))[fault.graph].CopyFrom(view.graph)
    return True


def view_graph(proto: onnx.ModelProto, place: int) -> onnx.ModelProto:
    """Returns the model, or a copy of a subgraph as a model, with its Constant nodes as initializers."""
    if place == 0:
        return proto
    view = onnx.ModelProto(opset_import=proto.opset_import)
    view.graph.CopyFrom(list(iterate_graphs(proto.graph))[place])
    held = [node for node in view.graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"]
    for node in held:
        view.graph.initializer.append(node.attribute[0].t)
        view.graph.initializer[-1].name = node.output[0]
        view.graph.node.remove(node)
    return view


def listed(rows: Sequence[Tensors]) -> Samples:
    """Returns rows as samples."""
    return Samples(source="rows", count=len(rows), read=lambda: iter(rows))


def run_all(model: Model, samples: Samples) -> list[Tensors]:
    """Returns the outputs of a model with every optimization off."""
    session = CpuSession(model.path, SessionSettings(level=Level.DISABLED))
    return [session.run(sample) for sample in samples]
