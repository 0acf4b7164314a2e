"""What a machine reaches: a probe of four kernels, run once for each machine and stored in the user's cache."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit._files import digest_bytes, write_file
from edgekit._ort import VERSION, Level
from edgekit.data.samples import list_samples
from edgekit.devices.device import DeviceRun, Job, make_empty_check
from edgekit.devices.find import cpu_target
from edgekit.devices.process.files import cache_folder
from edgekit.errors import DeviceError, OutputError
from edgekit.machine import describe_machine
from edgekit.model.tensors import Array, Tensors, TensorSpec
from edgekit.profile.events import Step, read_trace
from edgekit.profile.nodes import count_work
from edgekit.profile.report import Roof

# A product of 512 x 512 is large enough for MLAS's best kernels and blocks, and takes 3 ms at 40 GMAC/s. 8 Mi floats
# read and as many written are 64 MiB: more than the last-level cache of phones, boards and most PCs. 32 Ki floats are
# 256 KiB in all, which a second-level cache holds.
_SIDE, _FLOATS, _NEAR = 512, 8 << 20, 32 << 10
_RUNS = 8
_COPY, _CACHE, _FLOAT, _INTEGER = "edgekit_memory", "edgekit_cache", "edgekit_float", "edgekit_integer"

# Of each kernel: its name and operator, its input, the size to which that is expanded, its other operand, its output.
_KERNELS = (
    (_FLOAT, "MatMul", "x", "square", "float_weight", "float_out", "float32"),
    (_INTEGER, "MatMulInteger", "u", "square", "integer_weight", "integer_out", "int32"),
    (_COPY, "Add", "x", "long", "x", "memory_out", "float32"),
    (_CACHE, "Add", "x", "near", "x", "cache_out", "float32"),
)

Runs = Callable[[Job, Path], DeviceRun]


def find_roof(device: str, threads: int, run: Runs, work: Path, *, afresh: bool = False) -> Roof:
    """Returns what a device reaches with so many threads, from an earlier measurement or from a probe that runs now.

    `run` runs a job on the device. The best call of each kernel counts, as every disturbance makes a call slower.

    Raises:
        DeviceError: the device failed, or its profile lacks a kernel.
    """
    key = msgspec.json.encode([device, threads, VERSION, sorted(describe_machine().items())])
    kept = cache_folder() / "roofline" / f"{digest_bytes(key)[:24]}.json"
    if not afresh:
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            known = msgspec.json.decode(kept.read_bytes(), type=Roof)
            if min(known.float_gmacs, known.integer_gmacs, known.gbytes, known.cache_gbytes) > 0:
                return known
    roof = _measure(device, threads, run, work)
    # Without a written cache, the next profile only has to run the probe again.
    with contextlib.suppress(OutputError):
        write_file(kept, msgspec.json.encode(roof))
    return roof


def _measure(device: str, threads: int, run: Runs, work: Path) -> Roof:
    model = work / "probe.onnx"
    write_file(model, make_probe().SerializeToString())
    target = cpu_target()
    sample: Tensors = {"x": np.array([0.5], np.float32), "u": np.array([3], np.uint8)}
    job = Job(
        model=model,
        target=target,
        precision=target.precision,
        outputs=tuple(TensorSpec(name=output, dtype=dtype, shape=()) for *_, output, dtype in _KERNELS),
        check=make_empty_check(target, "probe"),
        samples=list_samples([sample], "probe"),
        repeat=_RUNS,
        threads=threads,
        level=Level.BASIC,
        trace=True,
    )
    done = run(job, work / "run")
    if done.failure is not None or done.trace is None:
        reason = done.failure or "it gave no profile"
        raise DeviceError(f"'{device}' cannot run the probe: {reason}", hint="without it: --no-roofline")
    steps = [step for execution in read_trace(done.trace).executions[1:] for step in execution.steps]
    # The best call of each kernel comes last.
    best = {step.name: step for step in sorted(steps, key=lambda step: -step.duration_us)}
    if not best.keys() >= {_COPY, _CACHE, _FLOAT, _INTEGER}:
        raise DeviceError(f"the profile of '{device}' lacks kernels of the probe", hint="without it: --no-roofline")
    return Roof(
        float_gmacs=_rate(best, _FLOAT, count_work),
        integer_gmacs=_rate(best, _INTEGER, count_work),
        gbytes=_rate(best, _COPY, lambda _: 2 * 4 * _FLOATS),
        cache_gbytes=_rate(best, _CACHE, lambda _: 2 * 4 * _NEAR),
    )


def _rate(best: Mapping[str, Step], name: str, count: Callable[[Step], int]) -> float:
    return count(best[name]) / max(1, best[name].duration_us) / 1e3


def make_probe() -> onnx.ModelProto:
    """Returns a model with a matrix product in float32, one of uint8 with int8, and Adds on large and small data.

    Its inputs are two numbers, expanded inside the model, so that nothing can be folded before it runs.
    """
    rng = np.random.default_rng(0)
    shape = (_SIDE, _SIDE)
    weights: dict[str, Array] = {
        "float_weight": rng.normal(size=shape).astype(np.float32),
        "integer_weight": rng.integers(-127, 128, shape).astype(np.int8),
        "square": np.array(shape, np.int64),
        "long": np.array([_FLOATS], np.int64),
        "near": np.array([_NEAR], np.int64),
    }
    nodes: list[onnx.NodeProto] = []
    for name, op, source, size, other, output, _ in _KERNELS:
        wide, made = f"{name}_reads", f"{name}_gives"
        nodes.append(helper.make_node("Expand", [source, size], [wide]))
        nodes.append(helper.make_node(op, [wide, other], [made], name=name))
        nodes.append(helper.make_node("ReduceMax", [made], [output], keepdims=0))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("u", TensorProto.UINT8, [1]),
    ]
    outputs = [
        helper.make_tensor_value_info(output, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [])
        for *_, output, dtype in _KERNELS
    ]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "probe", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
