"""Emulates a provider's arithmetic on the CPU: 8-bit quantization by Q and DQ nodes, half precision by rounding."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.devices.device import Device, DeviceRun, Job, PlacedNode, refuse_run
from edgekit.devices.process.run import describe_job, run_python
from edgekit.errors import EdgekitError, ModelError
from edgekit.evidence import Evidence
from edgekit.model.model import MAX_PROTOBUF_BYTES, find_reads, load_model, read_proto, refill

FLOAT, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
UNOPTIMIZED = SessionSettings(level=Level.DISABLED)

_ELEMENT_TYPES: dict[str, int] = {"tensor(float)": FLOAT, "tensor(float16)": HALF}

# Inputs that determine the size of the output: a provider reads them in full precision when it builds its graph.
_EXACT_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}

# Operators that compute nothing, or whose attributes or subgraphs fix the type of their outputs.
_UNTOUCHED = frozenset({
    "Cast", "CastLike", "Constant", "ConstantOfShape", "EyeLike", "If", "Loop", "Scan", "RandomNormal",
    "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
})  # fmt: skip


def round_to_half(proto: onnx.ModelProto, taken: Collection[str], types: Mapping[str, int]) -> None:
    """Rewrites a graph in place so that the `taken` nodes read halves, compute in float32 and return halves.

    Outputs are rounded even if the whole graph is float16: ONNX Runtime's CPU provider keeps float16 values in float32
    between nodes, so that without it no value would be rounded, and none beyond 65504 would become infinity. `types`
    are the ONNX element types of the graph's values.
    """
    graph = proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in {FLOAT, HALF}}
    types = {**types, **{name: tensor.data_type for name, tensor in weights.items()}}
    nodes, added = list[onnx.NodeProto](), list[onnx.TensorProto]()
    # The rounded value, in float32, that taken nodes read in place of each.
    sources: dict[str, str] = {}
    for node in graph.node:
        if node.name not in taken or node.op_type in _UNTOUCHED:
            nodes.append(node)
            continue
        exact = _EXACT_INPUTS.get(node.op_type, ())
        for index, name in enumerate(node.input):
            if types.get(name) not in {FLOAT, HALF} or index in exact:
                continue
            if name in weights and name not in sources:
                # Values beyond 65504 become infinity, as on the target.
                with np.errstate(over="ignore"):
                    value = numpy_helper.to_array(weights[name]).astype(np.float16).astype(np.float32)
                added.append(numpy_helper.from_array(value, f"{name}/rounded"))
            elif name not in sources:
                half = f"{name}/half" if types[name] == FLOAT else name
                nodes += [_cast(name, half, HALF)] if types[name] == FLOAT else []
                nodes.append(_cast(half, f"{name}/rounded", FLOAT))
            node.input[index] = sources.setdefault(name, f"{name}/rounded")
        nodes.append(node)
        for index, name in enumerate(node.output):
            if (kind := types.get(name)) in {FLOAT, HALF}:
                # Rounded directly after the node, so that every reader gets the value that the target would pass on.
                node.output[index] = f"{name}/full"
                half = name if kind == HALF else f"{name}/half"
                nodes.append(_cast(node.output[index], half, HALF))
                if kind == FLOAT:
                    nodes.append(_cast(half, name, FLOAT))
                    # Taken nodes can read it directly, because it is already rounded.
                    sources[name] = name
    refill(graph.node, nodes)
    graph.initializer.extend(added)
    # Remove weights that were replaced by a rounded copy; in a file of IR version 3 they are graph inputs too.
    unused = set(weights).difference(find_reads(graph))
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in unused])
    refill(graph.input, [value for value in graph.input if value.name not in unused])


def find_float_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Returns the ONNX element types of the floating-point values of the main graph, by name; weights must be inside.

    ONNX Runtime infers them, because it also knows its own operators. It reports only the types of graph outputs, so
    every value is made one.

    Raises:
        RuntimeRefusal: ONNX Runtime does not load the model.
    """
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    del exposed.graph.output[:]
    made = (name for node in proto.graph.node for name in node.output if name)
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    session = CpuSession(exposed.SerializeToString(), UNOPTIMIZED)
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    words = zip(session.output_names, session.output_types, strict=True)
    return types | {name: _ELEMENT_TYPES[word] for name, word in words if word in _ELEMENT_TYPES}


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], f"{target}/rounded", to=kind)


class Emulated(Device, frozen=True, kw_only=True):
    """Emulates the target's arithmetic on this CPU, in the CPU provider with all optimisations off.

    A model with Q and DQ nodes runs unchanged: each quantized unit computes in float, and its output is then quantized.
    For precision fp16, values are rounded to half before and after each node that the provider takes according to the
    check. If the provider does not compute all floats in half (`Target.float_bits`), this holds only for nodes that
    read or make float16 in the file.
    """

    replaced: ClassVar[Mapping[str, str]] = {"NnapiExecutionProvider": "android", "XnnpackExecutionProvider": "android"}
    name: str = "emulated"
    evidence: Evidence = Evidence.EMULATED

    def run(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job; the placement is the predicted one."""
        taken = {node.name for node in job.check.node_list if node.taken}
        try:
            model = load_model(job.model)
            nodes, file = read_proto(model, weights=False).graph.node, model.path
            # A check of another model would round the wrong nodes, unnoticed.
            if stray := taken - {node.name for node in nodes}:
                words = f"the check is of another model than '{job.model.name}': it has no node '{min(stray)}'"
                raise ModelError(words, hint="check it again")
            if job.precision == "fp16" and not any(node.op_type == "DequantizeLinear" for node in nodes):
                # The copy has its weights inside, for a while both the rounded and the original ones.
                if model.size_bytes > MAX_PROTOBUF_BYTES // 2:
                    raise ModelError(f"'{file.name}' is too large to emulate in fp16", hint="verify it on a device")
                full, file = read_proto(model), work / "half.onnx"
                types = find_float_types(full)
                halves = {name for name, dtype in types.items() if dtype == HALF}
                of_halves = {node.name for node in full.graph.node if halves & {*node.input, *node.output}}
                # A provider that also computes in float32 does so for the nodes that the file keeps in it.
                round_to_half(full, taken & of_halves if job.target.float_bits > 16 else taken, types)
                onnx.save(full, str(file))
        except EdgekitError as error:
            return refuse_run(self, error.message.replace(f"{work}/", ""))
        request = describe_job(job, model=str(file.resolve()), session_config={}, level=Level.DISABLED)
        run = run_python(self, job, request, work)
        providers = {True: job.target.provider, False: CPU_PROVIDER}
        placement = tuple(
            PlacedNode(name=node.name, op=node.op_type, domain=node.domain, provider=providers[node.name in taken])
            for node in nodes
        )
        return msgspec.structs.replace(run, placement=placement, placement_source="predicted")
