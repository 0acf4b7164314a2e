"""The work and the time of each kernel, compared with the peak rates of the machine (roofline).

A probe of four kernels measures the peak rates, once for each machine; the user's cache keeps them.

Multiply-accumulates are counted from the types and shapes that the profiler saw. The graph is not enough: ONNX Runtime
fuses and rewrites nodes, and dynamic shapes are known only at run time.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import isqrt, prod
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit._files import digest_bytes, read_kept, write_file
from edgekit._ort import VERSION, Level
from edgekit.bench.latency import find_steady
from edgekit.check.macs import count_macs
from edgekit.data.samples import list_samples
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.find import cpu_target
from edgekit.errors import DeviceError, OutputError
from edgekit.graph.graph import Graph
from edgekit.machine import cache_folder, describe_machine
from edgekit.model.tensors import Array, Tensors, TensorSpec
from edgekit.profile.events import Execution, Step, Tensor, read_trace
from edgekit.profile.report import Bound, Kind, NodeTime, OperatorTime, Roof, Unasked

_INTEGERS = frozenset({"uint8", "int8", "uint16", "int16"})


def count_work(step: Step) -> int:
    """Returns the multiply-accumulates of a kernel, 0 if it does not multiply or its shapes are not sufficient."""
    counter = _COUNTERS.get(step.op)
    return counter(step) if counter and step.outputs else 0


def _elements(tensor: Tensor) -> int:
    return prod(tensor.shape)


def _conv(step: Step) -> int:
    # A weight is [M, C/group, kernel...], also after MLAS has reordered it: each output element is a sum over all axes
    # but the first. A ConvTranspose spreads each input element so. Scales and zero points are of lower rank.
    weight = next((tensor for tensor in step.inputs[1:] if len(tensor.shape) >= 3), None)
    side = step.inputs[0] if step.op == "ConvTranspose" else step.outputs[0]
    return 0 if weight is None else _elements(side) * prod(weight.shape[1:])


def _matmul(step: Step) -> int:
    return _elements(step.outputs[0]) * (step.inputs[0].shape or (1,))[-1] if step.inputs else 0


def _gemm(step: Step) -> int:
    # A is [M, K] and B [K, N], each of them perhaps transposed: the product of their sizes is M K N K, and the result
    # has M N elements.
    matrices = [tensor for tensor in step.inputs if len(tensor.shape) == 2]
    written = _elements(step.outputs[0])
    if len(matrices) < 2 or written == 0:
        return _matmul(step)
    return written * isqrt(_elements(matrices[0]) * _elements(matrices[1]) // written)


def _attention(step: Step) -> int:
    # Queries with keys, and weights with values. Attention of com.microsoft also projects its input [B, S, D] with a
    # weight [D, 3D].
    query = step.inputs[0].shape if step.inputs else ()
    if len(query) < 3:
        return 0
    other = step.inputs[1].shape if len(step.inputs) > 1 else ()
    if len(other) == 2:
        tokens, (depth, width) = prod(query[:-1]), other
        return tokens * depth * width + 2 * tokens * query[-2] * width // 3
    keys = other[-2] if len(other) >= 3 else query[-2]
    return 2 * prod(query) * keys


def _recurrent(step: Step) -> int:
    matrices = [tensor for tensor in step.inputs if len(tensor.shape) == 3]
    # X, W and R of [steps, rows, input], [directions, gates x hidden, input], [directions, gates x hidden, hidden].
    return prod(matrices[0].shape[:2]) * sum(map(_elements, matrices[1:3])) if len(matrices) >= 3 else 0


_COUNTERS: Mapping[str, Callable[[Step], int]] = {
    **dict.fromkeys(("Conv", "FusedConv", "NhwcFusedConv", "ConvInteger", "QLinearConv", "ConvTranspose"), _conv),
    **dict.fromkeys(("MatMul", "FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QLinearMatMul"), _matmul),
    **dict.fromkeys(("DynamicQuantizeMatMul", "MatMulNBits", "MatMulFpQ4"), _matmul),
    **dict.fromkeys(("Gemm", "FusedGemm", "QGemm"), _gemm),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _recurrent),
    **dict.fromkeys(("Attention", "QAttention", "MultiHeadAttention"), _attention),
}


_KINDS: Mapping[str, Kind] = {
    "QuantizeLinear": "quantize and dequantize", "DequantizeLinear": "quantize and dequantize",
    "DynamicQuantizeLinear": "quantize and dequantize", "Cast": "casts", "ReorderInput": "reorders",
    "ReorderOutput": "reorders", "Transpose": "transposes", "MemcpyFromHost": "copies between providers",
    "MemcpyToHost": "copies between providers",
}  # fmt: skip
# Suffixes that ONNX Runtime adds to the name of a node that it rewrites (nchwc_transformer.cc, nhwc_transformer.cc,
# selectors_actions/helpers.cc).
_SUFFIX = re.compile(r"(_nchwc|_nhwc|_token_\d+|/duplicated)$")
# The time of shorter kernels is mostly that of the call itself: chosen by hand, from an Add of one element.
_MIN_CALL_MS = 0.01
# The size of a second-level cache of phones and PCs.
_CACHED_BYTES = 1 << 20
_MIN_FOR_QUARTILES = 8


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The node of the model that a kernel comes from, and its multiply-accumulates by the shapes of the graph."""

    node: str = ""
    macs: int = 0


def choose_runs(executions: Sequence[Execution]) -> tuple[Execution, ...]:
    """Returns the runs to evaluate: the steady ones, or if these are many, those between the quartiles of their times.

    Runs that the system disturbed are left out so. All nodes are averaged over the same runs, so that their means add
    up to the mean of the run.
    """
    times = [run.duration_us / 1e3 for run in executions]
    steady = executions[find_steady(times, len(times) // 2) if len(times) > 1 else 0 :]
    if len(steady) < _MIN_FOR_QUARTILES:
        return tuple(steady)
    low, high = np.percentile([run.duration_us for run in steady], [25, 75])
    return tuple(run for run in steady if low <= run.duration_us <= high)


def list_nodes(executions: Sequence[Execution], sources: Mapping[str, Source]) -> tuple[NodeTime, ...]:
    """Returns the kernels of some runs in the order of their first run; `sources` come from `list_sources`."""
    steps: dict[tuple[str, str, int], list[Step]] = defaultdict(list)
    for run in executions:
        for step in run.steps:
            steps[step.name, step.op, step.depth].append(step)
    total_us = sum(step.self_us for calls in steps.values() for step in calls)
    runs, nodes = len(executions), list[NodeTime]()
    for calls in steps.values():
        first, self_us = calls[0], sum(step.self_us for step in calls)
        source = find_source(first.name, sources)
        macs, size = sum(map(count_work, calls)), sum(step.bytes for step in calls)
        if macs == 0 and first.op in _COUNTERS:
            # Prepacked weights are no input of the kernel any more, so their shape is missing: the graph still has it.
            macs = source.macs * len(calls)
        seconds = self_us / 1e6
        node = NodeTime(
            name=first.name,
            op=first.op,
            provider=first.provider,
            source=source.node,
            calls=len(calls) / runs,
            total_ms=sum(step.duration_us for step in calls) / runs / 1e3,
            self_ms=self_us / runs / 1e3,
            share=self_us / total_us if total_us else 0.0,
            inputs=tuple(map(str, first.inputs)),
            outputs=tuple(map(str, first.outputs)),
            macs=macs // runs,
            bytes=size // runs,
            gmacs_per_s=macs / seconds / 1e9 if seconds else 0.0,
            gbytes_per_s=size / seconds / 1e9 if seconds else 0.0,
            integers=bool(first.inputs) and first.inputs[0].dtype in _INTEGERS,
            spread=any(step.spread for step in calls),
            kind=_KINDS.get(first.op, ""),
            max_ms=max(step.self_us for step in calls) / 1e3,
        )
        nodes.append(node)
    return tuple(nodes)


def list_sources(graph: Graph) -> dict[str, Source]:
    """Returns the nodes of the model by their names and by the names of their outputs.

    A fused kernel has the name of a node, or of an output of the last fused node.
    """
    by_node = {node.name: Source(node=node.name, macs=count_macs(graph, node)) for node in graph.nodes}
    by_output = {name: by_node[node.name] for node in graph.nodes for name in node.output if name}
    # The name of a node has priority over that of a tensor.
    return by_output | by_node


def find_source(name: str, sources: Mapping[str, Source]) -> Source:
    """Returns the node of the model that a kernel stands for, an empty one if ONNX Runtime inserted the kernel."""
    while name not in sources:
        if (shorter := _SUFFIX.sub("", name)) == name:
            return Source()
        name = shorter
    return sources[name]


def list_operators(nodes: Sequence[NodeTime]) -> tuple[OperatorTime, ...]:
    """Returns the operators, the most expensive first; an operator counts separately for each provider."""
    groups: dict[tuple[str, str], list[NodeTime]] = defaultdict(list)
    for node in nodes:
        groups[node.op, node.provider].append(node)
    operators: list[OperatorTime] = []
    for (op, provider), members in groups.items():
        names = ("calls", "self_ms", "share", "macs", "bytes")
        sums = {name: sum(getattr(node, name) for node in members) for name in names}
        operator = OperatorTime(
            op=op,
            provider=provider,
            nodes=len(members),
            average_ms=sums["self_ms"] / max(1e-9, sums["calls"]),
            max_ms=max(node.max_ms for node in members),
            **sums,
        )
        operators.append(operator)
    return tuple(sorted(operators, key=lambda one: -one.self_ms))


def list_unasked(nodes: Sequence[NodeTime]) -> tuple[Unasked, ...]:
    """Returns the cost of conversions and copies (kernels with a `kind`) by kind, the most expensive first."""
    kinds: dict[Kind, list[NodeTime]] = {}
    for node in nodes:
        if node.kind:
            kinds.setdefault(node.kind, []).append(node)
    found = (
        Unasked(
            kind=kind,
            nodes=len(members),
            inserted=sum(not node.source for node in members),
            self_ms=sum(node.self_ms for node in members),
            share=sum(node.share for node in members),
        )
        for kind, members in kinds.items()
    )
    return tuple(sorted(found, key=lambda one: -one.self_ms))


def add_roof_shares(nodes: Sequence[NodeTime], roof: Roof) -> tuple[NodeTime, ...]:
    """Returns nodes with the share of the machine's peak rate that they reach: of compute or of memory, the larger.

    Kernels of less than 1 MiB a call are compared with the bandwidth of a cache, if that was measured. S. Williams, A.
    Waterman, D. Patterson: Roofline, Communications of the ACM 52 (2009).
    """
    found: list[NodeTime] = []
    for node in nodes:
        peak = roof.integer_gmacs if node.integers else roof.float_gmacs
        # A session reuses its memory: small data are still in a cache when they are read.
        fits_cache = node.bytes < _CACHED_BYTES * node.calls
        gbytes = max(roof.gbytes, roof.cache_gbytes) if fits_cache else roof.gbytes
        share = max(node.gmacs_per_s / peak if peak > 0 else 0.0, node.gbytes_per_s / gbytes if gbytes > 0 else 0.0)
        # The arithmetic intensity decides what limits a kernel at best, not the speed that it reached.
        compute_ms = node.macs / (peak * 1e6) if peak > 0 else 0.0
        memory_ms = node.bytes / (gbytes * 1e6) if gbytes > 0 else 0.0
        bound: Bound = "compute" if compute_ms > memory_ms else "memory"
        if node.self_ms < _MIN_CALL_MS * node.calls and share < 1.0:
            bound = "calls"
        found.append(msgspec.structs.replace(node, roof_share=share, bound=bound))
    return tuple(found)


# A product of 512 x 512 is large enough for MLAS's best kernels and blocks, and takes 3 ms at 40 GMAC/s. 8 Mi floats
# read and as many written are 64 MiB: more than the last-level cache of phones, boards and most PCs. 32 Ki floats are
# 256 KiB in all, which a second-level cache holds.
_MATRIX_SIZE, _MEMORY_FLOATS, _CACHE_FLOATS = 512, 8 << 20, 32 << 10
_PROBE_RUNS = 8
_COPY, _CACHE, _FLOAT, _INTEGER = "edgekit_memory", "edgekit_cache", "edgekit_float", "edgekit_integer"

# Of each kernel: its name and operator, its input, the size to which that is expanded, its other operand, its output.
_PROBE_KERNELS = (
    (_FLOAT, "MatMul", "x", "square", "float_weight", "float_out", "float32"),
    (_INTEGER, "MatMulInteger", "u", "square", "integer_weight", "integer_out", "int32"),
    (_COPY, "Add", "x", "memory_size", "x", "memory_out", "float32"),
    (_CACHE, "Add", "x", "cache_size", "x", "cache_out", "float32"),
)

Runs = Callable[[Job, Path], DeviceRun]


def find_roof(device: str, threads: int, run: Runs, work: Path, *, probe_again: bool = False) -> Roof:
    """Returns a device's peak rates with so many threads, from the cache, else (or with `probe_again`) from a probe.

    `run` runs a job on the device. The best call of each kernel counts, as every disturbance makes a call slower.

    Raises:
        DeviceError: the device failed, or its profile lacks a kernel.
    """
    key = msgspec.json.encode([device, threads, VERSION, sorted(describe_machine().items())])
    cached = cache_folder() / "roofline" / f"{digest_bytes(key)[:24]}.json"
    known = None if probe_again else read_kept(cached, Roof)
    if known is not None and min(known.float_gmacs, known.integer_gmacs, known.gbytes, known.cache_gbytes) > 0:
        return known
    model = work / "probe.onnx"
    write_file(model, make_probe().SerializeToString())
    sample: Tensors = {"x": np.array([0.5], np.float32), "u": np.array([3], np.uint8)}
    job = Job(
        model=model,
        target=cpu_target(),
        outputs=tuple(TensorSpec(name=output, dtype=dtype, shape=()) for *_, output, dtype in _PROBE_KERNELS),
        samples=list_samples([sample], "probe"),
        repeat=_PROBE_RUNS,
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
    amounts = {name: count_work(best[name]) for name in (_FLOAT, _INTEGER)}
    # Floats of four bytes are read, and as many written.
    amounts |= {_COPY: 2 * 4 * _MEMORY_FLOATS, _CACHE: 2 * 4 * _CACHE_FLOATS}
    rates = {name: amount / max(1, best[name].duration_us) / 1e3 for name, amount in amounts.items()}
    roof = Roof(
        float_gmacs=rates[_FLOAT], integer_gmacs=rates[_INTEGER], gbytes=rates[_COPY], cache_gbytes=rates[_CACHE]
    )
    # Without a written cache, the next profile only has to run the probe again.
    with contextlib.suppress(OutputError):
        write_file(cached, msgspec.json.encode(roof))
    return roof


def make_probe() -> onnx.ModelProto:
    """Returns a model with a matrix product in float32, one of uint8 with int8, and Adds on large and small data.

    Its inputs are two numbers, expanded inside the model, so that nothing can be folded before it runs.
    """
    rng = np.random.default_rng(0)
    shape = (_MATRIX_SIZE, _MATRIX_SIZE)
    weights: dict[str, Array] = {
        "float_weight": rng.normal(size=shape).astype(np.float32),
        "integer_weight": rng.integers(-127, 128, shape).astype(np.int8),
        "square": np.array(shape, np.int64),
        "memory_size": np.array([_MEMORY_FLOATS], np.int64),
        "cache_size": np.array([_CACHE_FLOATS], np.int64),
    }
    nodes: list[onnx.NodeProto] = []
    for name, op, source, size, other, output, _ in _PROBE_KERNELS:
        expanded, result = f"{name}_reads", f"{name}_gives"
        nodes.append(helper.make_node("Expand", [source, size], [expanded]))
        nodes.append(helper.make_node(op, [expanded, other], [result], name=name))
        nodes.append(helper.make_node("ReduceMax", [result], [output], keepdims=0))
    describe = helper.make_tensor_value_info
    inputs = [describe("x", TensorProto.FLOAT, [1]), describe("u", TensorProto.UINT8, [1])]
    types = {output: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for *_, output, dtype in _PROBE_KERNELS}
    outputs = [describe(output, kind, []) for output, kind in types.items()]
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "probe", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
