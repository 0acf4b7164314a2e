"""Writes a network of NNAPI as a TFLite model, whose operations have the same meaning and mostly the same numbers.

NNAPI's reference path on the CPU runs TFLite's reference kernels, so this is the same arithmetic. Weights of s8 per
channel want activations of s8 there, where NNAPI takes u8: then every u8 becomes s8 with its zero point less 128,
which is exact.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flatbuffers
import msgspec
import numpy as np

from edgekit.devices.android.network import Constants, Network, Operand, OperandType
from edgekit.errors import DeviceError, MissingExtraError
from edgekit.model.tensors import Array

_SAME, _VALID = 0, 1
# Operations whose inputs, the first so many, mean the same in TFLite.
_PLAIN: dict[int, tuple[str, str, int]] = {
    5: ("DEPTH_TO_SPACE", "DepthToSpaceOptions", 1), 6: ("DEQUANTIZE", "DequantizeOptions", 1), 8: ("FLOOR", "", 1),
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
# Versions that say what is used: weights per channel, zero points of weights. All others are the latest known.
_VERSIONS = {"CONV_2D": 5, "DEPTHWISE_CONV_2D": 6, "FULLY_CONNECTED": 7, "RESHAPE": 1}


def write_model(network: Network, constants: Constants) -> bytes:
    """Returns the TFLite model of a network, with its inputs and outputs in the same order.

    Raises:
        DeviceError: it holds an operation that TFLite lacks in this form.
        MissingExtraError: ai-edge-litert is not installed.
    """
    draft = _Draft(network, constants)
    for operation in network.operations:
        draft.write(operation.type, operation.inputs, operation.outputs)
    return draft.finish()


class _Draft:
    """A model as far as it is written."""

    def __init__(self, network: Network, constants: Constants) -> None:
        try:
            from ai_edge_litert import schema_py_generated  # noqa: PLC0415 - an optional extra
        except ImportError as error:
            raise MissingExtraError(
                "ai-edge-litert is not installed", hint="pip install ai-edge-litert==2.3.0"
            ) from error
        self.schema: Any = schema_py_generated
        self.operands = network.operands
        self.network = network
        self.constants = constants
        kinds = {operand.type for operand in network.operands}
        self.is_signed = bool(
            kinds & {OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_QUANT8_ASYMM_SIGNED}
        )
        self.buffers = [self.schema.BufferT()]
        self.tensors: list[Any] = []
        self.places: dict[int, int] = {}
        self.codes: list[Any] = []
        self.operators: list[Any] = []

    def write(self, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Writes one operation of NNAPI."""
        if code in _PLAIN:
            name, options, count = _PLAIN[code]
            fields = {"blockSize": self.constants.whole(inputs[1])} if code == 5 else {}
            self.add(name, inputs[:count], outputs, options, **fields)
        elif code in _ARITHMETIC:
            name = _ARITHMETIC[code]
            activation = self.constants.whole(inputs[2])
            self.add(name.upper(), inputs[:2], outputs, f"{name}Options", fusedActivationFunction=activation)
        elif code in _REDUCTIONS:
            keep = bool(self.constants.whole(inputs[2]))
            self.add(_REDUCTIONS[code], inputs[:2], outputs, "ReducerOptions", keepDims=keep)
        elif code in _WRITERS:
            _WRITERS[code](self, code, inputs, outputs)
        else:
            raise DeviceError(f"NNAPI's operation {code} is not computed here", hint="use a device that has it")

    def add(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **fields: Any) -> None:
        """Adds one operator of TFLite on operands of NNAPI."""
        code = self.schema.OperatorCodeT()
        code.builtinCode = getattr(self.schema.BuiltinOperator, name)
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        code.version = _VERSIONS.get(name, 2 if self.is_signed else 1)
        self.codes.append(code)
        operator = self.schema.OperatorT()
        operator.opcodeIndex = len(self.codes) - 1
        operator.inputs = [-1 if self.is_left_out(place) else self.tensor(place) for place in inputs]
        operator.outputs = [self.tensor(place) for place in outputs]
        if options:
            operator.builtinOptionsType = getattr(self.schema.BuiltinOptions, options)
            operator.builtinOptions = getattr(self.schema, f"{options}T")()
            for key, value in fields.items():
                setattr(operator.builtinOptions, key, value)
        self.operators.append(operator)

    def is_left_out(self, place: int) -> bool:
        """Returns True for an optional operand that is not given."""
        return self.operands[place].size == 0

    def tensor(self, place: int) -> int:
        """Returns the tensor of an operand."""
        if place not in self.places:
            self.places[place] = self.new_tensor(self.operands[place], self.constants.values.get(place))
        return self.places[place]

    def new_tensor(self, operand: Operand, value: Array | None) -> int:
        """Adds a tensor for an operand, with its value where it is constant."""
        tensor = self.schema.TensorT()
        tensor.shape = list(operand.shape)
        tensor.name = f"t{len(self.tensors)}".encode()
        turned = operand.type == OperandType.TENSOR_QUANT8_ASYMM and self.is_signed
        tensor.type = self.element_type(operand, is_turned=turned)
        if value is not None:
            held = (value.astype(np.int16) - 128).astype(np.int8) if turned else value
            buffer = self.schema.BufferT()
            buffer.data = np.frombuffer(held.tobytes(), np.uint8)
            self.buffers.append(buffer)
            tensor.buffer = len(self.buffers) - 1
        scales = operand.channel_scales or ((operand.scale,) if operand.scale else ())
        if scales:
            quantization = self.schema.QuantizationParametersT()
            quantization.scale = list(scales)
            quantization.zeroPoint = [operand.zero_point - (128 if turned else 0)] * len(scales)
            quantization.quantizedDimension = operand.channel_dimension
            tensor.quantization = quantization
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def element_type(self, operand: Operand, *, is_turned: bool) -> int:
        """Returns TFLite's number for the elements of an operand."""
        names = {
            OperandType.TENSOR_FLOAT32: "FLOAT32", OperandType.TENSOR_INT32: "INT32", OperandType.FLOAT32: "FLOAT32",
            OperandType.TENSOR_QUANT8_ASYMM: "INT8" if is_turned else "UINT8", OperandType.INT32: "INT32",
            OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: "INT8", OperandType.TENSOR_QUANT8_ASYMM_SIGNED: "INT8",
            OperandType.TENSOR_BOOL8: "BOOL", OperandType.TENSOR_FLOAT16: "FLOAT16",
        }  # fmt: skip
        kind = OperandType(operand.type)
        if kind not in names:
            raise DeviceError(f"NNAPI's operands of kind {kind.name} are not computed here", hint="use another device")
        return int(getattr(self.schema.TensorType, names[kind]))

    def constant(self, value: Array) -> int:
        """Adds a constant operand of int32 that NNAPI does not have, and returns its place."""
        operand = Operand(
            type=OperandType.TENSOR_INT32, shape=value.shape, scale=0.0, zero_point=0, size=value.nbytes,
            channel_dimension=0, channel_scales=(),
        )  # fmt: skip
        place = self.place(operand)
        self.places[place] = self.new_tensor(operand, value.astype(np.int32))
        return place

    def place(self, operand: Operand) -> int:
        """Adds an operand that NNAPI does not have, and returns its place."""
        self.operands = (*self.operands, operand)
        return len(self.operands) - 1

    def finish(self) -> bytes:
        """Returns the whole model."""
        graph = self.schema.SubGraphT()
        graph.inputs = [self.tensor(place) for place in self.network.inputs]
        graph.outputs = [self.tensor(place) for place in self.network.outputs]
        graph.tensors, graph.operators = self.tensors, self.operators
        model = self.schema.ModelT()
        model.version = 3
        model.operatorCodes, model.subgraphs, model.buffers = self.codes, [graph], self.buffers
        builder: Any = flatbuffers.Builder(1 << 16)
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def _take_padding(
    draft: _Draft, places: Sequence[int], *, count: int, flag: int
) -> tuple[tuple[int, ...] | int, list[int]]:
    """Returns four explicit pads or TFLite's scheme, and the numbers that follow.

    With `count` numbers behind the padding it is explicit, unless the one at `flag` is the layout of the implicit form.
    """
    explicit = len(places) >= count + 4
    if explicit and draft.operands[places[flag]].type == OperandType.BOOL:
        explicit = False
    if explicit:
        return tuple(draft.constants.whole(place) for place in places[:4]), list(places[4:])
    return {1: _SAME, 2: _VALID}[draft.constants.whole(places[0])], list(places[1:])


def _choose_padding(
    draft: _Draft, pads: tuple[int, ...] | int, source: int, target: int, windows: Sequence[tuple[int, int]]
) -> int | None:
    """Returns TFLite's scheme for pads left, right, top, bottom; None where there is none.

    `windows` are the extent of the kernel and the stride, of height and of width.
    """
    if isinstance(pads, int):
        return pads
    if not any(pads):
        return _VALID
    wanted: list[int] = []
    for axis, (extent, stride) in zip((1, 2), windows, strict=True):
        size, out = draft.operands[source].shape[axis], draft.operands[target].shape[axis]
        total = max((out - 1) * stride + extent - size, 0)
        wanted = [total // 2, total - total // 2, *wanted]
    return _SAME if tuple(wanted) == pads else None


def _write_conv(draft: _Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    is_depthwise = code == 4
    count = 4 if is_depthwise else 3
    pads, rest = _take_padding(draft, inputs[3:], count=count, flag=5 if is_depthwise else 4)
    width, height = (draft.constants.whole(place) for place in rest[:2])
    fields: dict[str, Any] = {"strideW": width, "strideH": height}
    if is_depthwise:
        fields["depthMultiplier"] = draft.constants.whole(rest[2])
    fields["fusedActivationFunction"] = draft.constants.whole(rest[count - 1])
    _refuse_nchw(draft, rest, count)
    dilations = tuple(draft.constants.whole(place) for place in rest[count + 1 : count + 3]) or (1, 1)
    fields |= {"dilationWFactor": dilations[0], "dilationHFactor": dilations[1]}
    kernel = draft.operands[inputs[1]].shape[1:3]
    extents = [(kernel[axis] - 1) * dilations[1 - axis] + 1 for axis in (0, 1)]
    windows = [(extents[0], height), (extents[1], width)]
    scheme, source = _choose_padding(draft, pads, inputs[0], outputs[0], windows), inputs[0]
    if scheme is None and not isinstance(pads, int):
        scheme, source = _VALID, _pad(draft, inputs[0], pads)
    kind = "DepthwiseConv2DOptions" if is_depthwise else "Conv2DOptions"
    name = "DEPTHWISE_CONV_2D" if is_depthwise else "CONV_2D"
    draft.add(name, (source, *inputs[1:3]), outputs, kind, padding=scheme, **fields)


def _pad(draft: _Draft, source: int, pads: Sequence[int]) -> int:
    """Adds a border of zeros around height and width, and returns the operand that has it."""
    operand = draft.operands[source]
    left, right, top, bottom = pads
    batch, height, width, channels = operand.shape
    shape = (batch, height + top + bottom, width + left + right, channels)
    border = draft.constant(np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32))
    place = draft.place(msgspec.structs.replace(operand, shape=shape, size=-1))
    draft.add("PAD", (source, border), (place,), "PadOptions")
    return place


def _refuse_nchw(draft: _Draft, places: Sequence[int], at: int) -> None:
    if len(places) > at and draft.constants.whole(places[at]):
        raise DeviceError("NNAPI's layout NCHW is not computed here", hint="leave out NNAPI_FLAG_USE_NCHW")


def _write_pool(draft: _Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    pads, rest = _take_padding(draft, inputs[1:], count=5, flag=6)
    width, height, kernel_width, kernel_height, activation = (draft.constants.whole(place) for place in rest[:5])
    _refuse_nchw(draft, rest, 5)
    windows = [(kernel_height, height), (kernel_width, width)]
    scheme = _choose_padding(draft, pads, inputs[0], outputs[0], windows)
    if scheme is None:
        raise DeviceError(f"pooling with pads {pads} is not computed here", hint="TFLite has SAME and VALID only")
    draft.add(
        {1: "AVERAGE_POOL_2D", 12: "L2_POOL_2D", 17: "MAX_POOL_2D"}[code], inputs[:1], outputs, "Pool2DOptions",
        padding=scheme, strideW=width, strideH=height, filterWidth=kernel_width, filterHeight=kernel_height,
        fusedActivationFunction=activation,
    )  # fmt: skip


def _write_concat(draft: _Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    axis = draft.constants.whole(inputs[-1])
    wanted = draft.operands[outputs[0]]
    draft.add(
        "CONCATENATION", [_requantize(draft, place, wanted) for place in inputs[:-1]], outputs,
        "ConcatenationOptions", axis=axis,
    )  # fmt: skip


def _requantize(draft: _Draft, place: int, wanted: Operand) -> int:
    """Returns an operand on the grid of another: NNAPI joins tensors of several grids, TFLite's s8 kernel of one."""
    operand = draft.operands[place]
    if (operand.scale, operand.zero_point) == (wanted.scale, wanted.zero_point):
        return place
    turned = draft.place(msgspec.structs.replace(operand, scale=wanted.scale, zero_point=wanted.zero_point, size=-1))
    draft.add("QUANTIZE", (place,), (turned,), "QuantizeOptions")
    return turned


def _write_dense(draft: _Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    activation = draft.constants.whole(inputs[3])
    draft.add("FULLY_CONNECTED", inputs[:3], outputs, "FullyConnectedOptions", fusedActivationFunction=activation)


def _write_softmax(draft: _Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    rank = len(draft.operands[inputs[0]].shape)
    if len(inputs) > 2 and draft.constants.whole(inputs[2]) not in {-1, rank - 1}:
        raise DeviceError("a Softmax over an axis that is not the last is not computed here", hint="transpose before")
    draft.add("SOFTMAX", inputs[:1], outputs, "SoftmaxOptions", beta=draft.constants.number(inputs[1]))


def _write_resize(draft: _Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    _refuse_nchw(draft, inputs, 3)
    flags = [bool(draft.constants.whole(place)) for place in inputs[4:6]] + [False, False]
    size = draft.constant(np.array(draft.operands[outputs[0]].shape[1:3], np.int32))
    name, kind = (
        ("RESIZE_BILINEAR", "ResizeBilinearOptions")
        if code == 23
        else ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions")
    )
    draft.add(name, (inputs[0], size), outputs, kind, alignCorners=flags[0], halfPixelCenters=flags[1])


def _write_slice(draft: _Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    masks = dict(zip(("beginMask", "endMask", "shrinkAxisMask"), map(draft.constants.whole, inputs[4:7]), strict=True))
    draft.add("STRIDED_SLICE", inputs[:4], outputs, "StridedSliceOptions", **masks)


def _write_gather(draft: _Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    axis = draft.constants.whole(inputs[1])
    draft.add("GATHER", (inputs[0], inputs[2]), outputs, "GatherOptions", axis=axis)


def _write_argmax(draft: _Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    axis = draft.constant(np.array([draft.constants.whole(inputs[1])], np.int32))
    name = {39: "Max", 40: "Min"}[code]
    kind = f"Arg{name}Options"
    draft.add(f"ARG_{name.upper()}", (inputs[0], axis), outputs, kind, outputType=draft.schema.TensorType.INT32)


def _write_norm(draft: _Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    fields = {"radius": draft.constants.whole(inputs[1])}
    named = zip(("bias", "alpha", "beta"), map(draft.constants.number, inputs[2:5]), strict=True)
    draft.add(
        "LOCAL_RESPONSE_NORMALIZATION", inputs[:1], outputs, "LocalResponseNormalizationOptions", **fields,
        **dict(named),
    )  # fmt: skip


def _write_matmul(draft: _Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    turned = [bool(draft.constants.whole(place)) for place in inputs[2:4]]
    draft.add("BATCH_MATMUL", inputs[:2], outputs, "BatchMatMulOptions", adjX=turned[0], adjY=turned[1])


_WRITERS: dict[int, Callable[[_Draft, int, Sequence[int], Sequence[int]], None]] = {
    1: _write_pool, 2: _write_concat, 3: _write_conv, 4: _write_conv, 9: _write_dense, 12: _write_pool,
    13: _write_norm, 17: _write_pool, 23: _write_resize, 25: _write_softmax, 35: _write_slice, 39: _write_argmax,
    40: _write_argmax, 51: _write_gather, 94: _write_resize, 102: _write_matmul,
}  # fmt: skip
