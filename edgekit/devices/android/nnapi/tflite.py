"""Writes an NNAPI network as a TFLite model, whose operations are equivalent."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flatbuffers
import msgspec
import numpy as np

from edgekit.devices.android.nnapi.network import Constants, Network, Operand, OperandType, name_operation
from edgekit.errors import DeviceError, MissingExtraError
from edgekit.machine import spell_install
from edgekit.model.tensors import Array

INSTALL_LITERT = spell_install("ai-edge-litert==2.3.0")
"""The command that installs LiteRT, which computes the models."""

# Operator versions that features need, such as per-channel weights and zero points of weights. All other operators get
# version 1, which LiteRT's kernels accept: they look at the types of tensors, not at the version.
_VERSIONS = {"CONV_2D": 5, "DEPTHWISE_CONV_2D": 6, "FULLY_CONNECTED": 7, "RESHAPE": 1, "CAST": 1}


class Draft:
    """A TFLite model under construction: tensors for the operands of a network, and operators on them."""

    def __init__(self, network: Network, constants: Constants) -> None:
        try:
            from ai_edge_litert import schema_py_generated  # noqa: PLC0415 - an optional extra
        except ImportError as error:
            raise MissingExtraError("ai-edge-litert is not installed", hint=INSTALL_LITERT) from error
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
        # In a relaxed network, inputs must be rounded to half explicitly; constants are rounded when they are written.
        self.inputs = [self.tensor(place) for place in network.inputs]
        if network.relaxed:
            for place in network.inputs:
                self.places[place] = self._round(self.places[place])

    def add(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **fields: Any) -> None:
        """Adds a TFLite operator on NNAPI operands."""
        read = [-1 if self.is_left_out(place) else self.tensor(place) for place in inputs]
        made = [self.tensor(place) for place in outputs]
        given = [self._twin(tensor) if self.network.relaxed else tensor for tensor in made]
        self._operate(name, read, given, options, **fields)
        for full, tensor in zip(given, made, strict=True):
            if full != tensor:
                self._round(full, tensor)

    def is_left_out(self, place: int) -> bool:
        """Returns True for an omitted optional operand."""
        return self.operands[place].size == 0

    def tensor(self, place: int) -> int:
        """Returns the tensor of an operand."""
        if place not in self.places:
            self.places[place] = self.new_tensor(self.operands[place], self.constants.values.get(place))
        return self.places[place]

    def new_tensor(self, operand: Operand, value: Array | None) -> int:
        """Adds a tensor for an operand, with its value if it is constant."""
        turned = operand.type == OperandType.TENSOR_QUANT8_ASYMM and self.is_signed
        tensor = self._describe(operand.shape, self.element_type(operand, is_turned=turned))
        if value is not None:
            held = (value.astype(np.int16) - 128).astype(np.int8) if turned else value
            if self.network.relaxed and operand.type == OperandType.TENSOR_FLOAT32:
                with np.errstate(over="ignore"):
                    held = value.astype(np.float16).astype(np.float32)
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
        return len(self.tensors) - 1

    def element_type(self, operand: Operand, *, is_turned: bool) -> int:
        """Returns TFLite's number of the element type of an operand."""
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
        """Adds a constant int32 operand that the NNAPI network does not have, and returns its index."""
        operand = Operand(
            type=OperandType.TENSOR_INT32, shape=value.shape, scale=0.0, zero_point=0, size=value.nbytes,
            channel_dimension=0, channel_scales=(),
        )  # fmt: skip
        place = self.place(operand)
        self.places[place] = self.new_tensor(operand, value.astype(np.int32))
        return place

    def place(self, operand: Operand) -> int:
        """Adds an operand that the NNAPI network does not have, and returns its index."""
        self.operands = (*self.operands, operand)
        return len(self.operands) - 1

    def like(self, place: int, shape: tuple[int, ...]) -> int:
        """Adds an operand with the type and quantization parameters of another, and returns its index."""
        return self.place(msgspec.structs.replace(self.operands[place], shape=shape, size=-1))

    def transpose(self, source: int, order: Sequence[int], target: int | None = None) -> int:
        """Adds a transposition, to a new operand if no target is given, and returns the index of its result."""
        shape = self.operands[source].shape
        made = self.like(source, tuple(shape[axis] for axis in order)) if target is None else target
        self.add("TRANSPOSE", (source, self.constant(np.array(order, np.int32))), (made,), "TransposeOptions")
        return made

    def finish(self) -> bytes:
        """Returns the serialized model."""
        graph = self.schema.SubGraphT()
        graph.inputs = self.inputs
        graph.outputs = [self.tensor(place) for place in self.network.outputs]
        graph.tensors, graph.operators = self.tensors, self.operators
        model = self.schema.ModelT()
        model.version = 3
        model.operatorCodes, model.subgraphs, model.buffers = self.codes, [graph], self.buffers
        builder: Any = flatbuffers.Builder(1 << 16)
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _describe(self, shape: Sequence[int], kind: int) -> Any:
        tensor = self.schema.TensorT()
        tensor.shape, tensor.type = list(shape), kind
        tensor.name = f"t{len(self.tensors)}".encode()
        self.tensors.append(tensor)
        return tensor

    def _operate(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str, **fields: Any) -> None:
        code = self.schema.OperatorCodeT()
        code.builtinCode = getattr(self.schema.BuiltinOperator, name)
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        code.version = _VERSIONS.get(name, 1)
        self.codes.append(code)
        operator = self.schema.OperatorT()
        operator.opcodeIndex = len(self.codes) - 1
        operator.inputs, operator.outputs = list(inputs), list(outputs)
        if options:
            operator.builtinOptionsType = getattr(self.schema.BuiltinOptions, options)
            operator.builtinOptions = getattr(self.schema, f"{options}T")()
            for key, value in fields.items():
                setattr(operator.builtinOptions, key, value)
        self.operators.append(operator)

    def _twin(self, tensor: int) -> int:
        """Returns a new tensor for an output before rounding; a tensor that is not float32 is returned itself."""
        described = self.tensors[tensor]
        if described.type != self.schema.TensorType.FLOAT32:
            return tensor
        self._describe(described.shape, described.type)
        return len(self.tensors) - 1

    def _round(self, source: int, target: int | None = None) -> int:
        """Adds casts to half precision and back, and returns the resulting tensor."""
        twin = self._twin(source)
        if twin == source:
            return source
        half = self.schema.TensorType.FLOAT16
        self._describe(self.tensors[source].shape, half)
        places = (source, len(self.tensors) - 1, twin if target is None else target)
        for start, end in itertools.pairwise(places):
            self._operate("CAST", (start,), (end,), "CastOptions")
        return places[-1]


_SAME, _VALID = 0, 1
_TO_NHWC, _TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
_DEPTHWISE, _GROUPED = 4, 55
_POOLS = {1: "AVERAGE_POOL_2D", 12: "L2_POOL_2D", 17: "MAX_POOL_2D"}

Pads = tuple[int, ...] | int
"""Explicit pads (left, right, top, bottom), or a padding scheme of TFLite (SAME or VALID)."""


class _Window(msgspec.Struct, frozen=True, kw_only=True):
    """The extent of a kernel along one axis, including dilation, and its stride."""

    extent: int
    stride: int


class _Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive outputs along an axis with windows of equal extent; they cover `size` inputs from `start` on."""

    start: int
    size: int
    extent: int
    outputs: int


def write_conv(draft: Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Writes a convolution: plain, depthwise or grouped."""
    count = 4 if code in {_DEPTHWISE, _GROUPED} else 3
    pads, rest = _take_padding(draft, inputs[3:], count=count, flag=5 if code == _DEPTHWISE else 4)
    width, height = (draft.constants.whole(place) for place in rest[:2])
    fields: dict[str, Any] = {"strideW": width, "strideH": height}
    if code == _DEPTHWISE:
        fields["depthMultiplier"] = draft.constants.whole(rest[2])
    fields["fusedActivationFunction"] = draft.constants.whole(rest[count - 1])
    dilations = tuple(draft.constants.whole(place) for place in rest[count + 1 : count + 3]) or (1, 1)
    fields |= {"dilationWFactor": dilations[0], "dilationHFactor": dilations[1]}
    kernel = draft.operands[inputs[1]].shape[1:3]
    extents = [(kernel[axis] - 1) * dilations[1 - axis] + 1 for axis in (0, 1)]
    windows = (_Window(extent=extents[0], stride=height), _Window(extent=extents[1], stride=width))
    # TFLite's CONV_2D derives the number of groups from the channels of its filter.
    name, kind = ("DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions") if code == _DEPTHWISE else ("CONV_2D", "Conv2DOptions")

    def write(source: int, target: int) -> None:
        scheme = _choose_padding(draft, pads, source, target, windows)
        if scheme is None and not isinstance(pads, int):
            scheme, source = _VALID, _pad(draft, source, pads)
        draft.add(name, (source, *inputs[1:3]), (target,), kind, padding=scheme, **fields)

    write_in_nhwc(draft, inputs[0], outputs[0], write, from_nchw=is_nchw(draft, rest, count))


def write_pool(draft: Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Writes a pooling; of a window that crosses the border, only the elements inside count, as in NNAPI."""
    pads, rest = _take_padding(draft, inputs[1:], count=5, flag=6)
    width, height, kernel_width, kernel_height, activation = (draft.constants.whole(place) for place in rest[:5])
    windows = (_Window(extent=kernel_height, stride=height), _Window(extent=kernel_width, stride=width))

    def pool(source: int, target: int, scheme: int, extents: tuple[int, int]) -> None:
        draft.add(
            _POOLS[code], (source,), (target,), "Pool2DOptions", padding=scheme, strideW=width, strideH=height,
            filterHeight=extents[0], filterWidth=extents[1], fusedActivationFunction=activation,
        )  # fmt: skip

    def write(source: int, target: int) -> None:
        scheme = _choose_padding(draft, pads, source, target, windows)
        if scheme is not None:
            pool(source, target, scheme, (kernel_height, kernel_width))
        elif not isinstance(pads, int):
            _pool_in_pieces(draft, source, target, _cut_both(draft, pads, source, target, windows), pool)

    write_in_nhwc(draft, inputs[0], outputs[0], write, from_nchw=is_nchw(draft, rest, 5))


def is_nchw(draft: Draft, places: Sequence[int], at: int) -> bool:
    """Returns True if the optional layout operand at that position is given and says NCHW."""
    return len(places) > at and bool(draft.constants.whole(places[at]))


def write_in_nhwc(
    draft: Draft, source: int, target: int, write: Callable[[int, int], None], *, from_nchw: bool
) -> None:
    """Writes an operation of one tensor in TFLite's layout, NHWC; NCHW tensors are transposed before and after it."""
    if not from_nchw:
        write(source, target)
        return
    shape = draft.operands[target].shape
    made = draft.like(target, tuple(shape[axis] for axis in _TO_NHWC))
    write(draft.transpose(source, _TO_NHWC), made)
    draft.transpose(made, _TO_NCHW, target)


def _take_padding(draft: Draft, places: Sequence[int], *, count: int, flag: int) -> tuple[Pads, list[int]]:
    """Returns four explicit pads or TFLite's scheme, and the operands that follow.

    The padding is explicit if at least `count` operands follow four pads, unless the operand at `flag` is a boolean:
    then it is the layout flag of the form with implicit padding.
    """
    explicit = len(places) >= count + 4
    if explicit and draft.operands[places[flag]].type == OperandType.BOOL:
        explicit = False
    if explicit:
        return tuple(draft.constants.whole(place) for place in places[:4]), list(places[4:])
    return {1: _SAME, 2: _VALID}[draft.constants.whole(places[0])], list(places[1:])


def _choose_padding(draft: Draft, pads: Pads, source: int, target: int, windows: Sequence[_Window]) -> int | None:
    """Returns TFLite's scheme that equals some pads, None if there is none; `windows` are those of height and width."""
    if isinstance(pads, int):
        return pads
    if not any(pads):
        return _VALID
    wanted: list[int] = []
    for axis, window in zip((1, 2), windows, strict=True):
        size, out = draft.operands[source].shape[axis], draft.operands[target].shape[axis]
        # SAME also determines the number of outputs.
        if out != -(-size // window.stride):
            return None
        total = max((out - 1) * window.stride + window.extent - size, 0)
        wanted = [total // 2, total - total // 2, *wanted]
    return _SAME if tuple(wanted) == pads else None


def _pad(draft: Draft, source: int, pads: Sequence[int]) -> int:
    """Adds zero padding around height and width, and returns the padded operand."""
    left, right, top, bottom = pads
    batch, height, width, channels = draft.operands[source].shape
    border = draft.constant(np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32))
    place = draft.like(source, (batch, height + top + bottom, width + left + right, channels))
    draft.add("PAD", (source, border), (place,), "PadOptions")
    return place


def _cut_both(
    draft: Draft, pads: Sequence[int], source: int, target: int, windows: Sequence[_Window]
) -> tuple[list[_Piece], list[_Piece]]:
    sizes, outputs = draft.operands[source].shape, draft.operands[target].shape
    rows = _cut(sizes[1], outputs[1], windows[0], pads[2])
    return rows, _cut(sizes[2], outputs[2], windows[1], pads[0])


def _cut(size: int, outputs: int, window: _Window, before: int) -> list[_Piece]:
    """Cuts an axis into poolings without pads: one piece for all full windows, and one for each clipped window."""
    pieces: list[_Piece] = []
    for index in range(outputs):
        low = index * window.stride - before
        start, end = max(low, 0), min(low + window.extent, size)
        if end <= start:
            raise DeviceError("pooling over nothing but pads is not computed here", hint="use smaller pads")
        if pieces and end - start == pieces[-1].extent == window.extent:
            last = pieces.pop()
            pieces.append(msgspec.structs.replace(last, size=end - last.start, outputs=last.outputs + 1))
        else:
            pieces.append(_Piece(start=start, size=end - start, extent=end - start, outputs=1))
    return pieces


def _pool_in_pieces(
    draft: Draft,
    source: int,
    target: int,
    pieces: tuple[list[_Piece], list[_Piece]],
    pool: Callable[[int, int, int, tuple[int, int]], None],
) -> None:
    """Pools each piece with TFLite's own kernel, which is exact for integers too, and concatenates the results."""
    batch, channels = draft.operands[source].shape[0], draft.operands[source].shape[3]
    width = draft.operands[target].shape[2]
    bands: list[int] = []
    for row in pieces[0]:
        cells: list[int] = []
        for column in pieces[1]:
            part = draft.like(source, (batch, row.size, column.size, channels))
            begin = draft.constant(np.array([0, row.start, column.start, 0], np.int32))
            size = draft.constant(np.array([batch, row.size, column.size, channels], np.int32))
            draft.add("SLICE", (source, begin, size), (part,), "SliceOptions")
            cells.append(draft.like(target, (batch, row.outputs, column.outputs, channels)))
            pool(part, cells[-1], _VALID, (row.extent, column.extent))
        bands.append(draft.like(target, (batch, row.outputs, width, channels)))
        draft.add("CONCATENATION", cells, (bands[-1],), "ConcatenationOptions", axis=2)
    draft.add("CONCATENATION", bands, (target,), "ConcatenationOptions", axis=1)


class _Kernel(msgspec.Struct, frozen=True):
    """The TFLite operator that is equivalent to an NNAPI operation.

    `inputs` is the number of NNAPI's inputs that it takes, from the first on, or a tuple of their positions. `fields`
    of the `options` are constant inputs in NNAPI: each field has the position of that input.
    """

    name: str
    options: str = ""
    inputs: int | tuple[int, ...] = 1
    fields: Mapping[str, int] = {}


_KERNELS = {
    0: _Kernel("ADD", "AddOptions", 2, {"fusedActivationFunction": 2}), 6: _Kernel("DEQUANTIZE", "DequantizeOptions"),
    8: _Kernel("FLOOR"), 9: _Kernel("FULLY_CONNECTED", "FullyConnectedOptions", 3, {"fusedActivationFunction": 3}),
    11: _Kernel("L2_NORMALIZATION", "L2NormOptions"), 14: _Kernel("LOGISTIC"),
    18: _Kernel("MUL", "MulOptions", 2, {"fusedActivationFunction": 2}), 19: _Kernel("RELU"),
    20: _Kernel("RELU_N1_TO_1"), 21: _Kernel("RELU6"), 22: _Kernel("RESHAPE", "ReshapeOptions", 2),
    28: _Kernel("TANH"), 30: _Kernel("DIV", "DivOptions", 2, {"fusedActivationFunction": 2}),
    31: _Kernel("MEAN", "ReducerOptions", 2, {"keepDims": 2}), 32: _Kernel("PAD", "PadOptions", 2),
    35: _Kernel("STRIDED_SLICE", "StridedSliceOptions", 4, {"beginMask": 4, "endMask": 5, "shrinkAxisMask": 6}),
    36: _Kernel("SUB", "SubOptions", 2, {"fusedActivationFunction": 2}),
    37: _Kernel("TRANSPOSE", "TransposeOptions", 2),
    38: _Kernel("ABS", "AbsOptions"), 45: _Kernel("CAST", "CastOptions"), 48: _Kernel("EQUAL", "EqualOptions", 2),
    49: _Kernel("EXP", "ExpOptions"), 51: _Kernel("GATHER", "GatherOptions", (0, 2), {"axis": 1}),
    53: _Kernel("GREATER", "GreaterOptions", 2), 54: _Kernel("GREATER_EQUAL", "GreaterEqualOptions", 2),
    58: _Kernel("LESS", "LessOptions", 2), 59: _Kernel("LESS_EQUAL", "LessEqualOptions", 2), 60: _Kernel("LOG"),
    61: _Kernel("LOGICAL_AND", "LogicalAndOptions", 2), 62: _Kernel("LOGICAL_NOT", "LogicalNotOptions"),
    63: _Kernel("LOGICAL_OR", "LogicalOrOptions", 2), 65: _Kernel("MAXIMUM", "MaximumMinimumOptions", 2),
    66: _Kernel("MINIMUM", "MaximumMinimumOptions", 2), 67: _Kernel("NEG", "NegOptions"),
    68: _Kernel("NOT_EQUAL", "NotEqualOptions", 2), 69: _Kernel("PADV2", "PadV2Options", 3),
    70: _Kernel("POW", "PowOptions", 2), 71: _Kernel("PRELU", "", 2), 72: _Kernel("QUANTIZE", "QuantizeOptions"),
    77: _Kernel("REDUCE_MAX", "ReducerOptions", 2, {"keepDims": 2}),
    78: _Kernel("REDUCE_MIN", "ReducerOptions", 2, {"keepDims": 2}),
    79: _Kernel("REDUCE_PROD", "ReducerOptions", 2, {"keepDims": 2}),
    80: _Kernel("SUM", "ReducerOptions", 2, {"keepDims": 2}), 83: _Kernel("RSQRT"),
    84: _Kernel("SELECT", "SelectOptions", 3), 85: _Kernel("SIN"), 86: _Kernel("SLICE", "SliceOptions", 3),
    88: _Kernel("SQRT"), 89: _Kernel("TILE", "TileOptions", 2), 98: _Kernel("ELU"),
    99: _Kernel("HARD_SWISH", "HardSwishOptions"),
    102: _Kernel("BATCH_MATMUL", "BatchMatMulOptions", 2, {"adjX": 2, "adjY": 3}),
}  # fmt: skip


def write_model(network: Network, constants: Constants) -> bytes:
    """Returns the TFLite model of a network, with its inputs and outputs in the same order.

    Raises:
        DeviceError: it has an operation that TFLite lacks in this form.
        MissingExtraError: ai-edge-litert is not installed.
    """
    draft = Draft(network, constants)
    for operation in network.operations:
        code, inputs, outputs = operation.type, operation.inputs, operation.outputs
        if kernel := _KERNELS.get(code):
            places = range(kernel.inputs) if isinstance(kernel.inputs, int) else kernel.inputs
            fields = {name: draft.constants.whole(inputs[place]) for name, place in kernel.fields.items()}
            draft.add(kernel.name, [inputs[place] for place in places], outputs, kernel.options, **fields)
        elif code in _WRITERS:
            _WRITERS[code](draft, code, inputs, outputs)
        else:
            name = name_operation(code)
            raise DeviceError(f"NNAPI's operation {name} is not computed here", hint="use another device")
    return draft.finish()


def _write_concat(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    axis = draft.constants.whole(inputs[-1])
    wanted = draft.operands[outputs[0]]
    draft.add(
        "CONCATENATION", [_requantize(draft, place, wanted) for place in inputs[:-1]], outputs,
        "ConcatenationOptions", axis=axis,
    )  # fmt: skip


def _requantize(draft: Draft, place: int, wanted: Operand) -> int:
    """Returns an operand with the quantization of another.

    NNAPI concatenates tensors with different quantization parameters; TFLite's int8 kernel needs equal ones.
    """
    operand = draft.operands[place]
    if (operand.scale, operand.zero_point) == (wanted.scale, wanted.zero_point):
        return place
    turned = draft.place(msgspec.structs.replace(operand, scale=wanted.scale, zero_point=wanted.zero_point, size=-1))
    draft.add("QUANTIZE", (place,), (turned,), "QuantizeOptions")
    return turned


def _write_softmax(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    beta = draft.constants.number(inputs[1])
    _write_along_last(draft, inputs[0], outputs[0], _axis(draft, inputs, 2), "SOFTMAX", "SoftmaxOptions", beta=beta)


def _axis(draft: Draft, inputs: Sequence[int], at: int) -> int:
    """Returns the axis in an optional input, by default the last."""
    return draft.constants.whole(inputs[at]) if len(inputs) > at else -1


def _write_along_last(
    draft: Draft, source: int, target: int, axis: int, name: str, options: str, **fields: float
) -> None:
    """Writes an operation along any axis by transposition, because TFLite has it only for the last one."""
    rank = len(draft.operands[source].shape)
    # Swapping two axes is its own inverse.
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


def _write_squeeze(draft: Draft, _code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    # Without axes, LiteRT drops every axis of size 1, like NNAPI.
    axes = [axis for place in inputs[1:] for axis in draft.constants.values.get(place, np.array([], np.int32)).tolist()]
    draft.add("SQUEEZE", inputs[:1], outputs, "SqueezeOptions", squeezeDims=axes)


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


_WRITERS: dict[int, Callable[[Draft, int, Sequence[int], Sequence[int]], None]] = {
    1: write_pool, 2: _write_concat, 3: write_conv, 4: write_conv, 5: _write_space, 12: write_pool,
    13: _write_norm, 17: write_pool, 23: _write_resize, 25: _write_softmax, 34: _write_squeeze,
    39: _write_argmax, 40: _write_argmax, 55: write_conv, 87: _write_split, 94: _write_resize,

}  # fmt: skip
