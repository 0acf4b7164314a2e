"""Writes a network of NNAPI as a TFLite model, whose operations have the same meaning and mostly the same numbers.

NNAPI's reference path on the CPU runs TFLite's reference kernels, so this is the same arithmetic.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from edgekit.devices.android.nnapi.draft import Draft
from edgekit.devices.android.nnapi.network import Constants, Network, Operand
from edgekit.devices.android.nnapi.operations import name_operation
from edgekit.devices.android.nnapi.windows import is_nchw, write_conv, write_in_nhwc, write_pool
from edgekit.errors import DeviceError

# Operations whose inputs, the first so many, mean the same in TFLite.
_PLAIN: dict[int, tuple[str, str, int]] = {
    6: ("DEQUANTIZE", "DequantizeOptions", 1), 8: ("FLOOR", "", 1),
    11: ("L2_NORMALIZATION", "L2NormOptions", 1), 14: ("LOGISTIC", "", 1), 19: ("RELU", "", 1),
    20: ("RELU_N1_TO_1", "", 1), 21: ("RELU6", "", 1), 22: ("RESHAPE", "ReshapeOptions", 2), 28: ("TANH", "", 1),
    32: ("PAD", "PadOptions", 2), 34: ("SQUEEZE", "SqueezeOptions", 1), 37: ("TRANSPOSE", "TransposeOptions", 2),
    38: ("ABS", "AbsOptions", 1), 45: ("CAST", "CastOptions", 1), 49: ("EXP", "ExpOptions", 1), 60: ("LOG", "", 1),
    65: ("MAXIMUM", "MaximumMinimumOptions", 2), 66: ("MINIMUM", "MaximumMinimumOptions", 2),
    67: ("NEG", "NegOptions", 1), 69: ("PADV2", "PadV2Options", 3), 70: ("POW", "PowOptions", 2),
    71: ("PRELU", "", 2), 72: ("QUANTIZE", "QuantizeOptions", 1), 83: ("RSQRT", "", 1), 85: ("SIN", "", 1),
    86: ("SLICE", "SliceOptions", 3), 88: ("SQRT", "", 1), 89: ("TILE", "TileOptions", 2), 98: ("ELU", "", 1),
    99: ("HARD_SWISH", "HardSwishOptions", 1), 48: ("EQUAL", "EqualOptions", 2), 53: ("GREATER", "GreaterOptions", 2),
    54: ("GREATER_EQUAL", "GreaterEqualOptions", 2), 58: ("LESS", "LessOptions", 2),
    59: ("LESS_EQUAL", "LessEqualOptions", 2), 68: ("NOT_EQUAL", "NotEqualOptions", 2),
    61: ("LOGICAL_AND", "LogicalAndOptions", 2), 62: ("LOGICAL_NOT", "LogicalNotOptions", 1),
    63: ("LOGICAL_OR", "LogicalOrOptions", 2), 84: ("SELECT", "SelectOptions", 3),
}  # fmt: skip
_ARITHMETIC = {0: "Add", 18: "Mul", 30: "Div", 36: "Sub"}
_REDUCTIONS = {31: "MEAN", 77: "REDUCE_MAX", 78: "REDUCE_MIN", 79: "REDUCE_PROD", 80: "SUM"}


def write_model(network: Network, constants: Constants) -> bytes:
    """Returns the TFLite model of a network, with its inputs and outputs in the same order.

    Raises:
        DeviceError: it holds an operation that TFLite lacks in this form.
        MissingExtraError: ai-edge-litert is not installed.
    """
    draft = Draft(network, constants)
    for operation in network.operations:
        _write(draft, operation.type, operation.inputs, operation.outputs)
    return draft.finish()


def _write(draft: Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Writes one operation of NNAPI."""
    if code in _PLAIN:
        name, options, count = _PLAIN[code]
        draft.add(name, inputs[:count], outputs, options)
    elif code in _ARITHMETIC:
        name = _ARITHMETIC[code]
        activation = draft.constants.whole(inputs[2])
        draft.add(name.upper(), inputs[:2], outputs, f"{name}Options", fusedActivationFunction=activation)
    elif code in _REDUCTIONS:
        keep = bool(draft.constants.whole(inputs[2]))
        draft.add(_REDUCTIONS[code], inputs[:2], outputs, "ReducerOptions", keepDims=keep)
    elif code in _WRITERS:
        _WRITERS[code](draft, code, inputs, outputs)
    else:
        raise DeviceError(f"NNAPI's operation {name_operation(code)} is not computed here", hint="use another device")


def _write_concat(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    axis = draft.constants.whole(inputs[-1])
    wanted = draft.operands[outputs[0]]
    draft.add(
        "CONCATENATION", [_requantize(draft, place, wanted) for place in inputs[:-1]], outputs,
        "ConcatenationOptions", axis=axis,
    )  # fmt: skip


def _requantize(draft: Draft, place: int, wanted: Operand) -> int:
    """Returns an operand on the grid of another: NNAPI joins tensors of several grids, TFLite's s8 kernel of one."""
    operand = draft.operands[place]
    if (operand.scale, operand.zero_point) == (wanted.scale, wanted.zero_point):
        return place
    turned = draft.place(msgspec.structs.replace(operand, scale=wanted.scale, zero_point=wanted.zero_point, size=-1))
    draft.add("QUANTIZE", (place,), (turned,), "QuantizeOptions")
    return turned


def _write_dense(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    activation = draft.constants.whole(inputs[3])
    draft.add("FULLY_CONNECTED", inputs[:3], outputs, "FullyConnectedOptions", fusedActivationFunction=activation)


def _write_softmax(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    beta = draft.constants.number(inputs[1])
    _write_along_last(draft, inputs[0], outputs[0], _axis(draft, inputs, 2), "SOFTMAX", "SoftmaxOptions", beta=beta)


def _axis(draft: Draft, inputs: Sequence[int], at: int) -> int:
    """Returns the axis that an optional input names: the last where it is left out."""
    return draft.constants.whole(inputs[at]) if len(inputs) > at else -1


def _write_along_last(
    draft: Draft, source: int, target: int, axis: int, name: str, options: str, **fields: float
) -> None:
    """Writes an operation along an axis, of which TFLite has that along the last only."""
    rank = len(draft.operands[source].shape)
    # Exchanging two axes is its own inverse.
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    if order == list(range(rank)):
        draft.add(name, (source,), (target,), options, **fields)
        return
    shape = draft.operands[target].shape
    made = draft.like(target, tuple(shape[place] for place in order))
    draft.add(name, (draft.transpose(source, order),), (made,), options, **fields)
    draft.transpose(made, order, target)


def _write_space(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    block = draft.constants.whole(inputs[1])

    def write(source: int, target: int) -> None:
        draft.add("DEPTH_TO_SPACE", (source,), (target,), "DepthToSpaceOptions", blockSize=block)

    write_in_nhwc(draft, inputs[0], outputs[0], write, from_nchw=is_nchw(draft, inputs, 2))


def _write_resize(draft: Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    flags = [bool(draft.constants.whole(place)) for place in inputs[4:6]] + [False, False]
    name, kind = (
        ("RESIZE_BILINEAR", "ResizeBilinearOptions")
        if code == 23
        else ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions")
    )

    def write(source: int, target: int) -> None:
        size = draft.constant(np.array(draft.operands[target].shape[1:3], np.int32))
        draft.add(name, (source, size), (target,), kind, alignCorners=flags[0], halfPixelCenters=flags[1])

    write_in_nhwc(draft, inputs[0], outputs[0], write, from_nchw=is_nchw(draft, inputs, 3))


def _write_split(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    axis = draft.constant(np.array(draft.constants.whole(inputs[1]), np.int32))
    draft.add("SPLIT", (axis, inputs[0]), outputs, "SplitOptions", numSplits=draft.constants.whole(inputs[2]))


def _write_slice(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    masks = dict(zip(("beginMask", "endMask", "shrinkAxisMask"), map(draft.constants.whole, inputs[4:7]), strict=True))
    draft.add("STRIDED_SLICE", inputs[:4], outputs, "StridedSliceOptions", **masks)


def _write_gather(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    axis = draft.constants.whole(inputs[1])
    draft.add("GATHER", (inputs[0], inputs[2]), outputs, "GatherOptions", axis=axis)


def _write_argmax(draft: Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    axis = draft.constant(np.array([draft.constants.whole(inputs[1])], np.int32))
    name = {39: "Max", 40: "Min"}[code]
    kind = f"Arg{name}Options"
    draft.add(f"ARG_{name.upper()}", (inputs[0], axis), outputs, kind, outputType=draft.schema.TensorType.INT32)


def _write_norm(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    fields = dict(zip(("bias", "alpha", "beta"), map(draft.constants.number, inputs[2:5]), strict=True))
    _write_along_last(
        draft, inputs[0], outputs[0], _axis(draft, inputs, 5), "LOCAL_RESPONSE_NORMALIZATION",
        "LocalResponseNormalizationOptions", radius=draft.constants.whole(inputs[1]), **fields,
    )  # fmt: skip


def _write_matmul(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    turned = [bool(draft.constants.whole(place)) for place in inputs[2:4]]
    draft.add("BATCH_MATMUL", inputs[:2], outputs, "BatchMatMulOptions", adjX=turned[0], adjY=turned[1])


_WRITERS: dict[int, Callable[[Draft, int, Sequence[int], Sequence[int]], None]] = {
    1: write_pool, 2: _write_concat, 3: write_conv, 4: write_conv, 5: _write_space, 9: _write_dense, 12: write_pool,
    13: _write_norm, 17: write_pool, 23: _write_resize, 25: _write_softmax, 35: _write_slice, 39: _write_argmax,
    40: _write_argmax, 51: _write_gather, 55: write_conv, 87: _write_split, 94: _write_resize, 102: _write_matmul,
}  # fmt: skip
