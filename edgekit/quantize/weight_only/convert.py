"""Weights alone in fewer bits: fp16, dynamic INT8, and 8 or 4 bits in blocks."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import onnx

from edgekit._files import work_folder
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data.samples import Samples
from edgekit.errors import ModelError, UsageError, suggest_name
from edgekit.model.model import Model, find_quantized_form, read_proto, save_proto
from edgekit.quantize._ort_quantizer import quantize_dynamically
from edgekit.quantize.weight_only.blocks import BlockForm, pack_weights
from edgekit.quantize.weight_only.fp16 import convert_to_fp16
from edgekit.quantize.weight_only.learned import learn_blocks
from edgekit.quantize.weight_only.lint import lint_blocks

WeightForm = Literal["fp16", "dynamic-int8", "int8", "int4"]
WEIGHT_FORMS: tuple[WeightForm, ...] = ("fp16", "dynamic-int8", "int8", "int4")
BLOCKS = (16, 32, 64, 128, 256)
"""The block sizes that ONNX Runtime's kernels take (onnxruntime/contrib_ops/cpu/quantization/matmul_nbits.cc)."""


BlockRounding = Literal["nearest", "comq"]
BLOCK_ROUNDINGS: tuple[BlockRounding, ...] = ("nearest", "comq")
ACCURACY_LEVELS = (0, 1, 2, 3, 4)
"""The values of MatMulNBits' attribute `accuracy_level` (ContribOperators.md)."""


class WeightOnlyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which form the weights get, and the names of nodes that keep theirs.

    In blocks `block` values share a scale, and `accuracy_level` is that of MatMulNBits (4 lets kernels quantize
    activations to int8 as they come). `rounding` of 4 bits is to the nearest, or by COMQ, from samples. With `lpbq`
    their scales are those that Qualcomm's HTP holds (low-power block quantization).
    """

    form: WeightForm
    kept: tuple[str, ...] = ()
    block: int = 32
    accuracy_level: int = 0
    rounding: BlockRounding = "nearest"
    lpbq: bool = False


class WeightOnlyModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with smaller weights, and the nodes whose weights changed; sizes are those of the files.

    `notes` name blocks that look wrong.
    """

    model: Model
    form: WeightForm
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    size_before: int
    size_after: int
    notes: tuple[str, ...] = ()


def compress_weights(
    model: Model, options: WeightOnlyOptions, out: Path, samples: Samples | None = None
) -> WeightOnlyModel:
    """Writes a prepared float model with its weights in another form to `out`.

    "fp16" computes in half precision, inputs and outputs stay float32. "dynamic-int8" quantizes weights per channel and
    activations at each run: MatMul, LSTM, Attention and Gather, no Conv, whose kernel takes no signed weights. "int8"
    and "int4" store the weights of MatMul and Gemm in blocks and compute in float. `samples` are for roundings that
    learn from them.

    Raises:
        UsageError: a kept node, a block size or a level does not exist, or there are no samples to learn from.
        DataError: the samples do not fit the model.
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
    if options.accuracy_level not in ACCURACY_LEVELS:
        raise UsageError(f"there is no accuracy level {options.accuracy_level}", hint="0 to 4")
    if options.rounding != "nearest" and (options.form != "int4" or samples is None):
        raise UsageError(f"{options.rounding} rounds 4-bit weights by samples", hint="--weights int4 --data DATA")
    if options.lpbq and options.form != "int4":
        raise UsageError("LPBQ is a form of 4-bit weights", hint="--weights int4")
    written, changed = _WRITERS[options.form](model, proto, options, out, samples)
    if not changed:
        raise ModelError(f"'{model.name}' has no weights that {options.form} takes", hint="try another form of weights")
    return WeightOnlyModel(
        model=msgspec.structs.replace(written, custom_ops=model.custom_ops),
        form=options.form,
        changed=changed,
        kept=options.kept,
        size_before=model.size_bytes,
        size_after=written.size_bytes,
        notes=tuple(lint_blocks(read_proto(written).graph)) if options.form == "int4" else (),
    )


_Written = tuple[Model, tuple[str, ...]]


def _convert_to_fp16(
    model: Model, proto: onnx.ModelProto, options: WeightOnlyOptions, out: Path, _: Samples | None
) -> _Written:
    written = convert_to_fp16(model, options.kept, out).model
    return written, tuple(node.name for node in proto.graph.node if node.name not in options.kept)


def _quantize_dynamically(
    model: Model, proto: onnx.ModelProto, options: WeightOnlyOptions, out: Path, _: Samples | None
) -> _Written:
    before = {node.name for node in proto.graph.node}
    written = save_proto(quantize_dynamically(proto, options.kept, model.path.name), out)
    left = {node.name for node in read_proto(written, weights=False).graph.node}
    changed = tuple(node.name for node in proto.graph.node if node.name in before - left)
    return _loaded(written, model), changed


def _pack(
    model: Model, proto: onnx.ModelProto, options: WeightOnlyOptions, out: Path, samples: Samples | None
) -> _Written:
    bits = int(options.form.removeprefix("int"))
    form = BlockForm(bits=bits, block=options.block, accuracy_level=options.accuracy_level, lpbq=options.lpbq)
    if options.rounding == "nearest" or samples is None:
        changed = pack_weights(proto, form, options.kept)
    else:
        with work_folder() as work, learn_blocks(model, samples, work, form) as learned:
            changed = pack_weights(proto, form, options.kept, learned)
    return _loaded(save_proto(proto, out), model), changed


def _loaded(written: Model, model: Model) -> Model:
    CpuSession(written.path, SessionSettings(level=Level.DISABLED, libraries=model.custom_ops))
    return written


_WRITERS: dict[WeightForm, Callable[[Model, onnx.ModelProto, WeightOnlyOptions, Path, Samples | None], _Written]] = {
    "fp16": _convert_to_fp16,
    "dynamic-int8": _quantize_dynamically,
    "int8": _pack,
    "int4": _pack,
}
