"""Converts weights to fewer bits: fp16, dynamic INT8, and 8 or 4 bits in blocks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._files import work_folder
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data.samples import Samples
from edgekit.errors import ModelError, UsageError, suggest_name
from edgekit.model.model import Model, drop_unread, find_quantized_form, list_element_types, read_proto, save_proto
from edgekit.model.tensors import MAX_HALF
from edgekit.prepare.interface import name_nodes
from edgekit.prepare.opset import read_opset
from edgekit.prepare.rewrites.float16 import store_float_weights
from edgekit.quantize._ort_float16 import convert_floats
from edgekit.quantize._ort_quantizer import quantize_dynamically
from edgekit.quantize.weight_blocks import BlockForm, learn_blocks, pack_weights

# float16 rounds numbers below 3e-8 to zero. The converter raises constants to the same.
_LEAST_EPSILON = 1e-7


class Fp16Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that computes in float16, the weights that were clamped to its range, and nodes with a raised epsilon."""

    model: Model
    clamped: tuple[str, ...]
    raised: tuple[str, ...]


def convert_to_fp16(model: Model, kept: Sequence[str], out: Path) -> Fp16Model:
    """Writes the fp16 form of a prepared float32 model; inputs and outputs stay float32, and so do the `kept` nodes.

    Keep in float32 the nodes that the provider leaves to the CPU, which has few fp16 kernels. An `epsilon` that float16
    rounds to zero becomes 1e-7: with it a provider divides a row of equal numbers, of which nothing is left, by zero.
    Weights that are stored as integers become floats, since a DequantizeLinear before opset 19 gives float32 alone.

    Raises:
        ModelError: the model cannot be converted.
        RuntimeRefusal: ONNX Runtime does not load the result.
    """
    proto = read_proto(model)
    if store_float_weights(proto.graph, read_opset(proto)):
        drop_unread(proto.graph)
    converted = convert_floats(proto, kept, model.path.name)
    name_nodes(converted.graph)
    raised = list[str]()
    for node in (node for node in converted.graph.node if node.name not in kept):
        for attribute in node.attribute:
            if attribute.name == "epsilon" and attribute.f < _LEAST_EPSILON:
                attribute.f = _LEAST_EPSILON
                raised.append(node.name)
    written = save_proto(converted, out)
    # A session without optimizers is quick to make, and shows whether ONNX Runtime loads the graph.
    CpuSession(written.path, SessionSettings(level=Level.DISABLED))
    float16 = {tensor.name for tensor in converted.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16}
    clamped = (
        tensor.name
        for tensor in proto.graph.initializer
        if tensor.name in float16 and (np.abs(numpy_helper.to_array(tensor)) > MAX_HALF).any()
    )
    return Fp16Model(model=written, clamped=tuple(clamped), raised=tuple(raised))


WeightForm = Literal["fp16", "dynamic-int8", "int8", "int4"]
BLOCKS = (16, 32, 64, 128, 256)
"""The block sizes that ONNX Runtime's kernels take (onnxruntime/contrib_ops/cpu/quantization/matmul_nbits.cc)."""


BlockRounding = Literal["nearest", "gptq"]
ACCURACY_LEVELS = (0, 1, 2, 3, 4)
"""The values of MatMulNBits' attribute `accuracy_level` (ContribOperators.md)."""


class WeightOnlyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the weights, and the names of nodes whose weights are not changed.

    In blocks `block` values share a scale, and `accuracy_level` is that of MatMulNBits (4 lets kernels quantize
    activations to int8 dynamically). `rounding` of 4-bit weights is to nearest, or by GPTQ with samples. With `lpbq`
    scales are restricted to those that Qualcomm's HTP can represent (low-power block quantization).
    """

    form: WeightForm
    kept: tuple[str, ...] = ()
    block: int = 32
    accuracy_level: int = 0
    rounding: BlockRounding = "nearest"
    lpbq: bool = False


class SmallWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes whose weights were compressed (`changed`) or kept by option, and the sizes of the model in bytes."""

    form: WeightForm
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    size_before: int
    size_after: int


class WeightOnlyModel(SmallWeights, frozen=True, kw_only=True):
    """A model with smaller weights, and what a report says of them."""

    model: Model


def compress_weights(
    model: Model, options: WeightOnlyOptions, out: Path, samples: Samples | None = None
) -> WeightOnlyModel:
    """Writes a prepared float model with its weights in another form to `out`.

    "fp16" computes in half precision, inputs and outputs stay float32. "dynamic-int8" quantizes weights per channel and
    activations at each run: MatMul, LSTM, Attention and Gather, no Conv, whose kernel takes no signed weights. "int8"
    and "int4" store the weights of MatMul and Gemm in blocks and compute in float. `samples` are used by roundings that
    learn from them.

    Raises:
        UsageError: a kept node, a block size or a level does not exist, or there are no samples to learn from.
        DataError: the samples do not fit the model.
        ModelError: the model is quantized already, computes in float16, or has no weights that the form takes.
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
    has_halves = onnx.TensorProto.FLOAT16 in list_element_types(proto.graph)
    if has_halves and options.form == "dynamic-int8":
        words = f"'{model.name}' computes in float16, and dynamic-int8 quantizes float32"
        raise ModelError(words, hint="give the float32 model")
    if options.accuracy_level not in ACCURACY_LEVELS:
        raise UsageError(f"there is no accuracy level {options.accuracy_level}", hint="0 to 4")
    if options.rounding != "nearest" and (options.form != "int4" or samples is None):
        raise UsageError(f"{options.rounding} rounds 4-bit weights by samples", hint="--weights int4 --data DATA")
    if options.lpbq and options.form != "int4":
        raise UsageError("LPBQ is a form of 4-bit weights", hint="--weights int4")
    if options.form == "fp16":
        written = convert_to_fp16(model, options.kept, out).model
        changed = tuple(node.name for node in proto.graph.node if node.name not in options.kept)
    elif options.form == "dynamic-int8":
        written = save_proto(quantize_dynamically(proto, options.kept, model.path.name), out)
        left = {node.name for node in read_proto(written, weights=False).graph.node}
        changed = tuple(node.name for node in proto.graph.node if node.name not in left)
    else:
        bits = int(options.form.removeprefix("int"))
        block = BlockForm(bits=bits, block=options.block, accuracy_level=options.accuracy_level, lpbq=options.lpbq)
        if options.rounding == "nearest" or samples is None:
            changed = pack_weights(proto, block, options.kept)
        else:
            with work_folder() as work:
                changed = pack_weights(proto, block, options.kept, learn_blocks(model, samples, work, block))
        written = save_proto(proto, out)
    if options.form != "fp16":  # which was loaded already
        CpuSession(written.path, SessionSettings(level=Level.DISABLED, libraries=model.custom_ops))
    if not changed:
        hint = "give the float32 model" if has_halves else "try another form of weights"
        raise ModelError(f"'{model.name}' has no weights that {options.form} takes", hint=hint)
    return WeightOnlyModel(
        model=msgspec.structs.replace(written, custom_ops=model.custom_ops),
        form=options.form,
        changed=changed,
        kept=options.kept,
        size_before=model.size_bytes,
        size_after=written.size_bytes,
    )
