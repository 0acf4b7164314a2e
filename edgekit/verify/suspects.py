"""The usual causes of wrong outputs, and the known traps of mobile runtimes.

Each usual mistake is made on purpose in the outputs or inputs of the float model. A mistake with which the float model
gives what the device gave is named as the cause.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.folder import Bundle
from edgekit.data.samples import Samples
from edgekit.devices.bundled import OF_THIS_MACHINE
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.local.host import ARCH_SOCS
from edgekit.devices.process.run import find_exact_sums
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence
from edgekit.machine import may_saturate, read_cpu_flags
from edgekit.model.model import load_model, read_proto
from edgekit.model.tensors import Array, Tensors, is_numeric
from edgekit.verify.layers.matching import DEQUANTIZE, QUANTIZE
from edgekit.verify.layers.overflows import HALF_MAX
from edgekit.verify.metrics.changes import describe_pairs, explains
from edgekit.verify.metrics.compare import read_first

_SAMPLES = 4
_OVERFLOW = (
    "overflows in half precision, where the float model does not: a value inside lies beyond 65504, or one below 3e-8,"
    " which becomes 0, divides;"
    " edgekit compare SOURCE MODEL --layers names the layer; scale its values, or leave it in float32 where the target"
    " computes that: build again with samples that reach as far, or with --precision fp32"
)


def find_suspects(reference: Samples, got: Samples, names: Sequence[str], *, is_half: bool = False) -> dict[str, str]:
    """Returns, for those outputs of `names` that a usual mistake explains, that mistake in words.

    Only the first samples are used. An output that cannot be read or measured has no suspect. `is_half` means that the
    target computes in half precision.
    """
    rows, suspects = read_first(_SAMPLES, reference, got), dict[str, str]()
    for name in names if rows else ():
        pairs = _pair(rows, name, name)
        swapped = (other for other in rows[0][1] if explains(_pair(rows, name, other), pairs))
        # The likeliest mistake first.
        if is_half and any(_overflows(*pair) for pair in pairs):
            suspects[name] = _OVERFLOW
        elif change := describe_pairs(pairs):
            suspects[name] = change
        elif (other := next(swapped, None)) is not None:
            suspects[name] = f"came back as '{other}': the outputs are swapped"
    return suspects


def find_input_mistake(model: Path, inputs: Samples, got: Samples, output: str) -> str | None:
    """Returns the mistake in the inputs that explains an output, or None: with it, the float model gives that output.

    The mistakes tried, on the first samples, are channels in reverse order, another layout, and the usual scalings.
    """
    rows = read_first(_SAMPLES, inputs, got)
    try:
        # A compiled context is an ONNX file too, but does not open on the CPU.
        session = CpuSession(model, SessionSettings(level=Level.DISABLED))

        def run(change: Callable[[Array], Array]) -> list[tuple[Array, Array]]:
            made = (session.run({name: change(value) if value.dtype.kind == "f" else value
                                 for name, value in sample.items()}) for sample, _ in rows)  # fmt: skip
            return _pair([(one, found) for one, (_, found) in zip(made, rows, strict=True)], output, output)

        unchanged = run(lambda value: value)
        words = next((words for words, change in _MISTAKES.items() if explains(run(change), unchanged)), None)
    except EdgekitError:
        return None
    return None if words is None else f"is what the float model makes of inputs {words}: look at the preprocessing"


def _overflows(wanted: Array, found: Array) -> bool:
    """Returns True if an output is not finite, or at the limit of half precision, while the reference is neither."""
    if wanted.dtype.kind != "f" or found.dtype.kind != "f":
        return False
    # NaN compares as not below the limit, so it counts too.
    return bool((np.abs(wanted) < HALF_MAX).all()) and not (np.abs(found) < HALF_MAX).all()


def _pair(rows: Sequence[tuple[Tensors, ...]], name: str, other: str) -> list[tuple[Array, Array]]:
    """Returns the output `name` of the reference beside the output `other` that came back, where both are numbers."""
    there = [(wanted[name], found[other]) for wanted, found in rows if name in wanted and other in found]
    return [pair for pair in there if all(map(is_numeric, pair))]


def _reverse_channels(value: Array) -> Array:
    axis = _channel_axis(value)
    return value if axis is None else np.ascontiguousarray(np.flip(value, axis))


def _swap_layout(value: Array) -> Array:
    """Returns an image with its shape unchanged, but its values laid out as in the other layout."""
    if (axis := _channel_axis(value)) is None:
        return value
    other = np.moveaxis(value, 1, -1) if axis == 1 else np.moveaxis(value, -1, 1)
    return np.ascontiguousarray(other).reshape(value.shape)


def _channel_axis(value: Array) -> int | None:
    if value.ndim != 4 or 3 not in {value.shape[1], value.shape[3]}:
        return None
    return 1 if value.shape[1] == 3 else 3


def _whiten(value: Array) -> Array:
    spread = float(value.std())
    return ((value - value.mean()) / spread).astype(value.dtype) if spread else value


_MISTAKES: dict[str, Callable[[Array], Array]] = {
    "whose channels are in the other order (RGB and BGR)": _reverse_channels,
    "in the other layout (NCHW and NHWC)": _swap_layout,
    "times 255, not normalised": lambda value: (value * 255.0).astype(value.dtype),
    "divided by 255, normalised twice": lambda value: (value / 255.0).astype(value.dtype),
    "from -1 to 1 instead of 0 to 1": lambda value: (value * 2.0 - 1.0).astype(value.dtype),
    "from 0 to 1 instead of -1 to 1": lambda value: ((value + 1.0) / 2.0).astype(value.dtype),
    "with their mean and deviation taken out once more": _whiten,
}


_SOCS: Mapping[str, str] = {soc: arch for arch, soc in ARCH_SOCS.items()}
# A model with fewer Q and DQ nodes may be float inside: they may be those of its inputs and outputs.
_LEAST_ROUNDED = 4
# VPMADDUBSW adds two products of u8 and s8 in 16 bits with saturation: 2 * 255 * 64 = 32,640 still fits.
_SAFE = 64


def list_traps(bundle: Bundle, run: DeviceRun, job: Job) -> Iterator[str]:
    """Yields each known trap that this run of a job may have met, in words that say what to do."""
    # An x86 CPU without VNNI adds pairs of u8 x s8 products in 16 bits, which saturate (VPMADDUBSW).
    own = run.evidence in {Evidence.EMULATED, Evidence.SAME_EP, Evidence.SIMULATOR}
    on_host = own and not run.device.startswith("arm64")
    older = run.device == "host:haswell"
    provider = CPU_PROVIDER if run.device in OF_THIS_MACHINE else job.target.provider
    here = bool(read_cpu_flags()) and may_saturate() and not find_exact_sums(job, provider)
    if on_host and (older or here) and has_large_weights(job.model):
        where = "the emulated CPU" if older else "this machine's CPU"
        remedy = "verify on Arm" if job.target.is_for_phones else "run here with session.x64quantprecision = 1"
        if job.target.settings.get("arch", "").startswith("x64"):
            remedy = "for PCs without VNNI build with --set arch=x64"
        yield (
            f"{where} has no VNNI: ONNX Runtime's products of activations and s8 weights saturate here, not on Arm;"
            f" {remedy}"
        )
    # HTP versions differ: v68 has no fp16 and rounds differently from v73, so each gives results of its own.
    wanted = _SOCS.get(bundle.manifest.settings.get("soc_model", ""))
    version = re.search(r":(v\d+)$", run.device)
    if wanted is not None and version is not None and version[1] != wanted:
        versions = f"the bundle was built for HTP {wanted}, the device is {version[1]}"
        yield f"{versions}: their arithmetic differs; build with --set soc_model=N for {version[1]}"


def find_ignored_optimisations(run: DeviceRun, wanted: Mapping[str, str]) -> str | None:
    """Returns a finding if a session did not use the optimisations saved in a file of the runtime style.

    ONNX Runtime replays them only if `session.enable_saved_runtime_optimizations` is "1", and logs nothing otherwise:
    the integer operators then run as float between Q and DQ nodes (measured: 4 to 14 times slower).
    """
    if wanted.get("session.enable_saved_runtime_optimizations") != "1":
        return None
    ops = [node.op for node in run.placement if node.provider == CPU_PROVIDER]
    rounded = sum(op in {QUANTIZE, DEQUANTIZE} for op in ops)
    floats = sum(op in {"Conv", "MatMul", "Gemm"} for op in ops)
    fused = any(op.startswith(("QLinear", "QGemm", "MatMulInteger", "ConvInteger")) for op in ops)
    if rounded < _LEAST_ROUNDED or not floats or fused:
        return None
    ignored = f"{floats} layers ran in float between {rounded} Q and DQ nodes"
    remedy = 'the session needs the config entry session.enable_saved_runtime_optimizations = "1"'
    return f"the saved runtime optimisations were ignored: {ignored}; {remedy}"


def has_large_weights(model: Path) -> bool:
    """Returns True if a quantized ONNX model has signed 8-bit weights whose products, added in pairs, exceed 16 bits.

    Weights from -64 to 64 are safe, and so are unsigned ones; signed activations change nothing, because x64 kernels
    make them unsigned (observed: targets/cpu/NOTES.md). False for other forms of a model.
    """
    if model.suffix != ".onnx" or not model.is_file():
        return False
    graph = read_proto(load_model(model), weights=False).graph
    inside = (tensor for tensor in graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL)
    signed = {tensor.name: tensor for tensor in inside if tensor.data_type == onnx.TensorProto.INT8}
    weights = (signed.get(node.input[0]) for node in graph.node if node.op_type == "DequantizeLinear")
    arrays = (numpy_helper.to_array(weight).astype(np.int16) for weight in weights if weight)
    return any((np.abs(array) > _SAFE).any() for array in arrays)
