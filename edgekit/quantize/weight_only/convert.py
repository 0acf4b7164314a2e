"""Weights in fewer bits without any sample: fp16, dynamic INT8, and 8 or 4 bits in blocks."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import onnx

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.errors import ModelError, UsageError, suggest_name
from edgekit.model.model import Model, find_quantized_form, read_proto, save_proto
from edgekit.quantize._ort_quantizer import quantize_dynamically
from edgekit.quantize.weight_only.blocks import pack_weights
from edgekit.quantize.weight_only.fp16 import convert_to_fp16

WeightForm = Literal["fp16", "dynamic-int8", "int8", "int4"]
WEIGHT_FORMS: tuple[WeightForm, ...] = ("fp16", "dynamic-int8", "int8", "int4")
BLOCKS = (16, 32, 64, 128, 256)
"""The block sizes that ONNX Runtime's kernels take (onnxruntime/contrib_ops/cpu/quantization/matmul_nbits.cc)."""


class WeightOnlyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which form the weights get, the names of nodes that keep theirs, and how many values share a scale in blocks."""

    form: WeightForm
    kept: tuple[str, ...] = ()
    block: int = 32


class WeightOnlyModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with smaller weights, and the nodes whose weights changed; sizes are those of the files."""

    model: Model
    form: WeightForm
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    size_before: int
    size_after: int


def compress_weights(model: Model, options: WeightOnlyOptions, out: Path) -> WeightOnlyModel:
    """Writes a prepared float model with its weights in another form to `out`.

    "fp16" computes in half precision, inputs and outputs stay float32. "dynamic-int8" quantizes weights per channel and
    activations at each run: MatMul, LSTM, Attention and Gather, no Conv, whose kernel takes no signed weights. "int8"
    and "int4" store the weights of MatMul and Gemm in blocks and compute in float.

    Raises:
        UsageError: a kept node or a block size does not exist.
        ModelError: the model is quantized already, or has no weights that the form takes.
        RuntimeRefusal: ONNX Runtime does not load the result.
    """
    proto = read_proto(model)
    names = {node.name for node in proto.graph.node}
    if unknown := next((name for name in options.kept if name not in names), None):
        raise UsageError(f"there is no node '{unknown}' to keep", hint=suggest_name(unknown, names))
    if options.block not in BLOCKS:
        raise UsageError(f"there is no block of {options.block} weights", hint=f"one of {', '.join(map(str, BLOCKS))}")
    if form := find_quantized_form(proto):
        raise ModelError(f"'{model.name}' is quantized already ({form})", hint="give the float model, or no --weights")
    written, changed = _WRITERS[options.form](model, proto, options, out)
    if not changed:
        raise ModelError(f"'{model.name}' has no weights that {options.form} takes", hint="try another form of weights")
    return WeightOnlyModel(
        model=msgspec.structs.replace(written, custom_ops=model.custom_ops),
        form=options.form,
        changed=changed,
        kept=options.kept,
        size_before=model.size_bytes,
        size_after=written.size_bytes,
    )


_Written = tuple[Model, tuple[str, ...]]


def _convert_to_fp16(model: Model, proto: onnx.ModelProto, options: WeightOnlyOptions, out: Path) -> _Written:
    written = convert_to_fp16(model, options.kept, out).model
    return written, tuple(node.name for node in proto.graph.node if node.name not in options.kept)


def _quantize_dynamically(model: Model, proto: onnx.ModelProto, options: WeightOnlyOptions, out: Path) -> _Written:
    before = {node.name for node in proto.graph.node}
    written = save_proto(quantize_dynamically(proto, options.kept, model.path.name), out)
    left = {node.name for node in read_proto(written, weights=False).graph.node}
    changed = tuple(node.name for node in proto.graph.node if node.name in before - left)
    return _loaded(written, model), changed


def _pack(model: Model, proto: onnx.ModelProto, options: WeightOnlyOptions, out: Path) -> _Written:
    changed = pack_weights(proto, int(options.form.removeprefix("int")), options.block, options.kept)
    return _loaded(save_proto(proto, out), model), changed


def _loaded(written: Model, model: Model) -> Model:
    CpuSession(written.path, SessionSettings(level=Level.DISABLED, libraries=model.custom_ops))
    return written


_WRITERS: dict[WeightForm, Callable[[Model, onnx.ModelProto, WeightOnlyOptions, Path], _Written]] = {
    "fp16": _convert_to_fp16,
    "dynamic-int8": _quantize_dynamically,
    "int8": _pack,
    "int4": _pack,
}
