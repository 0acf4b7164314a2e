"""Known traps of mobile runtimes, looked for where a run does not pass: the machine, the accelerator, the inputs."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.folder import Bundle
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun
from edgekit.devices.emulators.qnn_sim import ARCH_SOCS
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence
from edgekit.machine import VNNI
from edgekit.model.model import load_model, read_proto
from edgekit.model.tensors import Array, Tensors, is_numeric
from edgekit.verify.matching.match import DEQUANTIZE, QUANTIZE
from edgekit.verify.metrics import tensor_metrics as metrics

_SOCS: Mapping[str, str] = {soc: arch for arch, soc in ARCH_SOCS.items()}
# As in `suspects`: what is left once a mistake is undone is a quantized model's error, and much less than before.
_FIT_DB, _GAIN_DB, _SAMPLES = 20.0, 15.0, 3
# Fewer Q and DQ nodes may be those of the model's inputs and outputs.
_LEAST_ROUNDED = 4
# VPMADDUBSW adds two products of u8 and s8 in 16 bits with saturation: 2 * 255 * 64 = 32,640 still fits.
_SAFE = 64


def list_traps(bundle: Bundle, run: DeviceRun, model: Path, cpu_flags: str) -> Iterator[str]:
    """Yields each known trap that this run may have stepped into, in words that say what to do.

    `cpu_flags` is what the machine says of its CPU, "" where it says nothing or is not an x86.
    """
    yield from _find_saturation(run, model, cpu_flags)
    yield from _find_other_htp(bundle, run)


def find_ignored_optimisations(run: DeviceRun, wanted: Mapping[str, str]) -> str | None:
    """Returns a finding where a session left the optimisations unused that a file in runtime style holds.

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
    return (
        f"the saved runtime optimisations were ignored: {floats} layers ran in float between {rounded} Q and DQ nodes;"
        ' the session needs the config entry session.enable_saved_runtime_optimizations = "1"'
    )


def find_input_mistake(model: Path, inputs: Samples, got: Samples, output: str) -> str | None:
    """Returns the mistake in the inputs that explains an output: the float model makes it of inputs so changed.

    Tried are channels in the other order, another layout, and the usual scalings, on the first samples.
    """
    rows = _read_rows(inputs, got, output)
    if not rows:
        return None
    try:
        # A compiled context is an ONNX file too, and does not open on the CPU.
        session = CpuSession(model, SessionSettings(level=Level.DISABLED))
        plain = _fit(session, rows, output, lambda value: value)
        for words, change in _MISTAKES.items():
            fit = _fit(session, rows, output, change)
            if fit > _FIT_DB and fit > plain + _GAIN_DB:
                return f"is what the float model makes of inputs {words}: look at the preprocessing"
    except EdgekitError:
        return None
    return None


def _find_saturation(run: DeviceRun, model: Path, cpu_flags: str) -> Iterator[str]:
    """An x86 without VNNI adds pairs of u8 x s8 products in 16 bits, which saturate (VPMADDUBSW)."""
    own = run.evidence in {Evidence.EMULATED, Evidence.SAME_EP, Evidence.SIMULATOR}
    on_host = own and not run.device.startswith("arm64")
    older = run.device == "host:haswell"
    if not (older or (cpu_flags and not VNNI.search(cpu_flags))) or not on_host or not may_saturate(model):
        return
    where = "the emulated CPU" if older else "this machine's CPU"
    yield (
        f"{where} has no VNNI: ONNX Runtime's products of activations and s8 weights saturate here, not on Arm;"
        " verify on arm64, or run here with session.x64quantprecision = 1"
    )


def may_saturate(model: Path) -> bool:
    """Returns True if a quantized ONNX model has signed 8-bit weights that two products do not fit 16 bits with.

    Weights from -64 to 64 are safe, and so are unsigned ones; signed activations change nothing, because x64 kernels
    make them unsigned (observed: targets/cpu/NOTES.md). False for other forms of a model.
    """
    if model.suffix != ".onnx" or not model.is_file():
        return False
    graph = read_proto(load_model(model), weights=False).graph
    signed = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and tensor.data_location != onnx.TensorProto.EXTERNAL
    }
    weights = (signed.get(node.input[0]) for node in graph.node if node.op_type == "DequantizeLinear")
    return any(
        np.abs(numpy_helper.to_array(weight).astype(np.int16)).max(initial=0) > _SAFE for weight in weights if weight
    )


def _find_other_htp(bundle: Bundle, run: DeviceRun) -> Iterator[str]:
    """The HTP versions differ: v68 has no fp16 and rounds otherwise than v73, so each has results of its own."""
    wanted = _SOCS.get(bundle.manifest.settings.get("soc_model", ""))
    version = re.search(r":(v\d+)$", run.device)
    if wanted is not None and version is not None and version[1] != wanted:
        yield (
            f"the bundle was built for HTP {wanted}, the device is {version[1]}: their arithmetic differs;"
            f" build with --set soc_model=N for {version[1]}"
        )


def _read_rows(inputs: Samples, got: Samples, output: str) -> list[tuple[Tensors, Array]]:
    rows: list[tuple[Tensors, Array]] = []
    try:
        for _, sample, found in zip(range(_SAMPLES), inputs, got, strict=False):
            value = found.get(output)
            if value is None or not is_numeric(value) or not np.isfinite(value.astype(np.float64)).all():
                return []
            rows.append((sample, value))
    except EdgekitError:
        return []
    return rows


def _fit(
    session: CpuSession, rows: list[tuple[Tensors, Array]], output: str, change: Callable[[Array], Array]
) -> float:
    errors: list[metrics.SampleErrors] = []
    for sample, found in rows:
        changed = {name: change(value) if value.dtype.kind == "f" else value for name, value in sample.items()}
        made = session.run(changed)[output]
        if made.shape != found.shape:
            return -metrics.DB_LIMIT
        errors.append(metrics.measure_sample(made.astype(np.float64), found.astype(np.float64)))
    if any(error.non_finite for error in errors):
        return -metrics.DB_LIMIT
    return metrics.sqnr_db(errors)


def _reverse_channels(value: Array) -> Array:
    axis = _channel_axis(value)
    return value if axis is None else np.ascontiguousarray(np.flip(value, axis))


def _swap_layout(value: Array) -> Array:
    """Returns the values of an image in the shape that it has, but laid out as the other layout would be."""
    axis = _channel_axis(value)
    if axis is None:
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
