"""Known traps of mobile runtimes, looked for where a run does not pass: the machine and the accelerator."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.folder import Bundle
from edgekit.devices.device import DeviceRun
from edgekit.devices.emulators.qnn_sim import ARCH_SOCS
from edgekit.evidence import Evidence
from edgekit.machine import VNNI
from edgekit.model.model import load_model, read_proto
from edgekit.verify.matching.match import DEQUANTIZE, QUANTIZE

_SOCS: Mapping[str, str] = {soc: arch for arch, soc in ARCH_SOCS.items()}
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
