"""Our own arithmetic in place of a provider: 8-bit grids through Q and DQ nodes, half precision by rounding."""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import onnx

from edgekit._ort import CPU_PROVIDER, VERSION, CpuSession
from edgekit.devices.device import DeviceRun, Job, Missing, PlacedNode
from edgekit.devices.local.half import HALF, UNOPTIMIZED, find_float_types, round_to_half
from edgekit.devices.process.child import Runner, describe_stop, refuse_run
from edgekit.devices.process.exchange import open_outputs, tensors_name, write_tensors
from edgekit.errors import EdgekitError, ModelError
from edgekit.evidence import Evidence
from edgekit.machine import own_peak_bytes
from edgekit.model.model import MAX_PROTOBUF_BYTES, Model, load_model, read_proto


class Emulated(msgspec.Struct, frozen=True, kw_only=True):
    """The target's arithmetic in this process, on the CPU provider with every optimisation off.

    A model with Q and DQ nodes runs as it is: each of its quantized units computes in float and is then rounded onto
    its grid. A model of precision fp16, whether its file says float32 or float16, is rounded to half around each node
    that the check says the provider takes, but for those that a file with float16 values leaves in float32. The peak
    of memory is that of this process, with all it did before.
    """

    name: str = "emulated"
    evidence: Evidence = Evidence.EMULATED

    def find_missing(self) -> Missing | None:
        """Returns None: nothing but onnxruntime is needed."""
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job, one in memory at a time."""
        if job.concurrency > 1 or job.io_binding:
            runner = Runner(device=self.name, evidence=self.evidence)
            return refuse_run(runner, "imitated arithmetic is run once at a time, without bound outputs")
        placement: tuple[PlacedNode, ...] = ()
        load_ms, latency_ms, stopped, failure = 0.0, list[float](), False, None
        try:
            model = load_model(job.model)
            proto = read_proto(model, weights=False)
            placement = _predict_placement(proto, job)
            emulation = _emulate(model, proto, job, work)
            start = time.perf_counter()
            session = CpuSession(emulation, UNOPTIMIZED)
            load_ms = (time.perf_counter() - start) * 1e3
            stopped = _run_samples(session, job, work / "out", latency_ms)
        except EdgekitError as error:
            failure = error.message.replace(f"{work}/", "")
        outputs, wrong = open_outputs(work / "out", job.outputs, self.name)
        return DeviceRun(
            device=self.name,
            evidence=self.evidence,
            outputs=outputs,
            placement=placement,
            placement_source="predicted",
            load_ms=load_ms,
            latency_ms=tuple(latency_ms[: outputs.count * job.repeat]),
            peak_rss_bytes=own_peak_bytes(),
            versions={"onnxruntime": VERSION},
            notes=describe_stop(outputs.count, job) if stopped else (),
            stopped_early=stopped,
            failure=failure or wrong or None,
        )


def _run_samples(session: CpuSession, job: Job, out: Path, latency_ms: list[float]) -> bool:
    """Runs the samples in order, and returns True if the time was over before the last."""
    begin = time.perf_counter()
    for index, sample in enumerate(job.samples):
        if index >= job.least_samples and time.perf_counter() - begin > job.budget_s:
            return True
        for turn in range(job.repeat):
            start = time.perf_counter()
            values = session.run(sample)
            latency_ms.append((time.perf_counter() - start) * 1e3)
            if turn == 0:
                write_tensors(out / tensors_name(index), values)
                if job.answered is not None:
                    job.answered(values)
    return False


def _predict_placement(proto: onnx.ModelProto, job: Job) -> tuple[PlacedNode, ...]:
    taken = _taken_names(job)
    # A check of another model would round the wrong nodes, and nothing would tell.
    stray = taken - {node.name for node in proto.graph.node}
    if stray:
        raise ModelError(
            f"the check is of another model than '{job.model.name}': it has no node '{min(stray)}'",
            hint="check it again",
        )
    return tuple(
        PlacedNode(
            name=node.name,
            op=node.op_type,
            domain=node.domain,
            provider=job.target.provider if node.name in taken else CPU_PROVIDER,
        )
        for node in proto.graph.node
    )


def _taken_names(job: Job) -> frozenset[str]:
    return frozenset(node.name for node in job.check.node_list if node.taken)


def _emulate(model: Model, proto: onnx.ModelProto, job: Job, work: Path) -> Path:
    """Returns the file to run: the model, or for a float model in fp16 a copy that rounds to half."""
    is_quantized = any(node.op_type == "DequantizeLinear" for node in proto.graph.node)
    if is_quantized or job.precision != "fp16":
        return model.path
    # The copy holds its weights inside, rounded ones beside the others until those are dropped.
    if model.size_bytes > MAX_PROTOBUF_BYTES // 2:
        raise ModelError(f"'{model.path.name}' is too large to emulate in fp16", hint="verify it on a device")
    full = read_proto(model)
    types = find_float_types(full)
    round_to_half(full, _taken_names(job) & _list_halved(full, types), types)
    rounded = work / "half.onnx"
    onnx.save(full, str(rounded))
    return rounded


def _list_halved(proto: onnx.ModelProto, types: Mapping[str, int]) -> frozenset[str]:
    """Returns the nodes that compute in half: all in a file that says float32, in another those that read or make it.

    A file with float16 values leaves nodes in float32 on purpose, and providers compute these so.
    """
    every = frozenset(node.name for node in proto.graph.node)
    halved = {name for name, dtype in types.items() if dtype == HALF}
    if not halved:
        return every
    return frozenset(node.name for node in proto.graph.node if halved & {*node.input, *node.output})
