"""Writes an NNAPI network as a TFLite model, whose operations are equivalent."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flatbuffers
import msgspec
import numpy as np

from edgekit.devices.android.network import NUMPY_TYPES, Network, Operand, OperandType, name_operation
from edgekit.errors import DeviceError, MissingExtraError, reraised
from edgekit.machine import spell_install
from edgekit.model.tensors import Array

INSTALL_LITERT = spell_install("ai-edge-litert==2.3.0")
"""The command that installs LiteRT, which computes the models."""

# Operator versions that features need, such as per-channel weights and zero points of weights. All other operators get
# version 1, which LiteRT's kernels accept: they look at the types of tensors, not at the version.
_VERSIONS = {"CONV_2D": 5, "DEPTHWISE_CONV_2D": 6, "FULLY_CONNECTED": 7, "RESHAPE": 1, "CAST": 1}


class ModelBuilder:
    """A TFLite model under construction: tensors for the operands of a network, and operators on them."""

    def __init__(self, network: Network, constants: Mapping[int, Array]) -> None:
        with reraised(ImportError, MissingExtraError("ai-edge-litert is not installed", hint=INSTALL_LITERT)):
            from ai_edge_litert import schema_py_generated  # noqa: PLC0415 - an optional extra
        self.schema: Any = schema_py_generated
        self.operands = network.operands
        self.network = network
        self.constants = constants
        kinds = {operand.type for operand in network.operands}
        signed = {OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL, OperandType.TENSOR_QUANT8_ASYMM_SIGNED}
        self.is_signed = bool(kinds & signed)
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

    def number(self, place: int) -> float:
        """Returns a constant scalar.

        Raises:
            LookupError: the operand is not constant.
        """
        return float(self.constants[place].reshape(-1)[0])

    def whole(self, place: int) -> int:
        """Returns a constant scalar as an integer, as `number` does."""
        return int(self.number(place))

    def add(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **fields: Any) -> None:
        """Adds a TFLite operator on NNAPI operands."""
        # An optional operand of size 0 is omitted.
        read = [-1 if self.operands[place].size == 0 else self.tensor(place) for place in inputs]
        tensors = [self.tensor(place) for place in outputs]
        unrounded = [self._add_unrounded(tensor) if self.network.relaxed else tensor for tensor in tensors]
        self._add_operator(name, read, unrounded, options, **fields)
        for full, tensor in zip(unrounded, tensors, strict=True):
            if full != tensor:
                self._round(full, tensor)

    def tensor(self, place: int) -> int:
        """Returns the tensor of an operand."""
        if place not in self.places:
            self.places[place] = self.new_tensor(self.operands[place], self.constants.get(place))
        return self.places[place]

    def new_tensor(self, operand: Operand, value: Array | None) -> int:
        """Adds a tensor for an operand, with its value if it is constant."""
        # In a network with int8 tensors, uint8 ones are stored as int8 too, with 128 subtracted.
        as_int8 = operand.type == OperandType.TENSOR_QUANT8_ASYMM and self.is_signed
        if (kind := OperandType(operand.type)) not in NUMPY_TYPES:
            raise DeviceError(f"NNAPI's operands of kind {kind.name} are not computed here", hint="use another device")
        fields: dict[str, Any] = {}
        if value is not None:
            stored = (value.astype(np.int16) - 128).astype(np.int8) if as_int8 else value
            if self.network.relaxed and operand.type == OperandType.TENSOR_FLOAT32:
                with np.errstate(over="ignore"):
                    stored = value.astype(np.float16).astype(np.float32)
            self.buffers.append(self.schema.BufferT(data=np.frombuffer(stored.tobytes(), np.uint8)))
            fields["buffer"] = len(self.buffers) - 1
        if scales := operand.channel_scales or ((operand.scale,) if operand.scale else ()):
            fields["quantization"] = self.schema.QuantizationParametersT(
                scale=list(scales),
                zeroPoint=[operand.zero_point - (128 if as_int8 else 0)] * len(scales),
                quantizedDimension=operand.channel_dimension,
            )
        name = "INT8" if as_int8 else np.dtype(NUMPY_TYPES[kind]).name.upper()
        return self._add_tensor(operand.shape, getattr(self.schema.TensorType, name), **fields)

    def constant(self, value: Array) -> int:
        """Adds a constant int32 operand that the NNAPI network does not have, and returns its index."""
        operand = Operand(
            type=OperandType.TENSOR_INT32, shape=value.shape, scale=0.0, zero_point=0, size=value.nbytes,
            channel_dimension=0, channel_scales=(),
        )  # fmt: skip
        place = self.add_operand(operand)
        self.places[place] = self.new_tensor(operand, value.astype(np.int32))
        return place

    def add_operand(self, operand: Operand) -> int:
        """Adds an operand that the NNAPI network does not have, and returns its index."""
        self.operands = (*self.operands, operand)
        return len(self.operands) - 1

    def like(self, place: int, shape: tuple[int, ...]) -> int:
        """Adds an operand with the type and quantization parameters of another, and returns its index."""
        return self.add_operand(msgspec.structs.replace(self.operands[place], shape=shape, size=-1))

    def transpose(self, source: int, order: Sequence[int], target: int | None = None) -> int:
        """Adds a transposition, to a new operand if no target is given, and returns the index of its result."""
        shape = self.operands[source].shape
        result = self.like(source, tuple(shape[axis] for axis in order)) if target is None else target
        self.add("TRANSPOSE", (source, self.constant(np.array(order, np.int32))), (result,), "TransposeOptions")
        return result

    def finish(self) -> bytes:
        """Returns the serialized model."""
        outputs = [self.tensor(place) for place in self.network.outputs]
        graph = self.schema.SubGraphT(
            inputs=self.inputs, outputs=outputs, tensors=self.tensors, operators=self.operators
        )
        model = self.schema.ModelT(version=3, operatorCodes=self.codes, subgraphs=[graph], buffers=self.buffers)
        buffer: Any = flatbuffers.Builder(1 << 16)
        buffer.Finish(model.Pack(buffer), b"TFL3")
        return bytes(buffer.Output())

    def _add_tensor(self, shape: Sequence[int], element: int, **fields: Any) -> int:
        name = f"t{len(self.tensors)}".encode()
        self.tensors.append(self.schema.TensorT(shape=list(shape), type=element, name=name, **fields))
        return len(self.tensors) - 1

    def _add_operator(
        self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str, **fields: Any
    ) -> None:
        code, given = getattr(self.schema.BuiltinOperator, name), dict[str, Any]()
        if options:
            kind = getattr(self.schema.BuiltinOptions, options)
            given = {"builtinOptionsType": kind, "builtinOptions": getattr(self.schema, f"{options}T")(**fields)}
        self.operators.append(
            self.schema.OperatorT(opcodeIndex=len(self.codes), inputs=list(inputs), outputs=list(outputs), **given)
        )
        version = _VERSIONS.get(name, 1)
        self.codes.append(
            self.schema.OperatorCodeT(builtinCode=code, deprecatedBuiltinCode=min(code, 127), version=version)
        )

    def _add_unrounded(self, tensor: int) -> int:
        """Returns a new tensor for an output before rounding; a tensor that is not float32 is returned itself."""
        described = self.tensors[tensor]
        is_float = described.type == self.schema.TensorType.FLOAT32
        return self._add_tensor(described.shape, described.type) if is_float else tensor

    def _round(self, source: int, target: int | None = None) -> int:
        """Adds casts to half precision and back, and returns the resulting tensor."""
        rounded = self._add_unrounded(source) if target is None else target
        if rounded != source:
            half = self._add_tensor(self.tensors[source].shape, self.schema.TensorType.FLOAT16)
            self._add_operator("CAST", (source,), (half,), "CastOptions")
            self._add_operator("CAST", (half,), (rounded,), "CastOptions")
        return rounded


_SAME, _VALID = 0, 1
_TO_NHWC = (0, 2, 3, 1)


class _Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive outputs along an axis with windows of equal extent; they cover `size` inputs from `start` on."""

    start: int
    size: int
    extent: int
    outputs: int


def write_conv(builder: ModelBuilder, name: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Writes a convolution: plain, depthwise or grouped."""
    is_depthwise = name == "DEPTHWISE_CONV_2D"
    count = 3 if name == "CONV_2D" else 4
    scheme, pads, rest = _take_padding(builder, inputs[3:], count=count, flag=5 if is_depthwise else 4)
    numbers = [builder.whole(place) for place in rest]
    dilations = numbers[count + 1 : count + 3] or [1, 1]
    fields = {"strideW": numbers[0], "strideH": numbers[1], "fusedActivationFunction": numbers[count - 1]}
    fields |= {"dilationWFactor": dilations[0], "dilationHFactor": dilations[1]}
    fields |= {"depthMultiplier": numbers[2]} if is_depthwise else {}
    # TFLite's CONV_2D derives the number of groups from the channels of its filter.
    kernel_name, kind = (name, "DepthwiseConv2DOptions") if is_depthwise else ("CONV_2D", "Conv2DOptions")

    def write(source: int, target: int) -> None:
        if any(pads):
            # TFLite has no other pads than those of its schemes: zeros are put around height and width first.
            left, right, top, bottom = pads
            border = builder.constant(np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32))
            batch, height, width, channels = builder.operands[source].shape
            padded = builder.like(source, (batch, height + top + bottom, width + left + right, channels))
            builder.add("PAD", (source, border), (padded,), "PadOptions")
            source = padded
        builder.add(kernel_name, (source, *inputs[1:3]), (target,), kind, padding=scheme, **fields)

    write_in_order(builder, inputs[0], outputs[0], read_layout(builder, rest, count), write)


def write_pool(builder: ModelBuilder, name: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Writes a pooling; of a window that crosses the border, only the elements inside count, as in NNAPI."""
    scheme, pads, rest = _take_padding(builder, inputs[1:], count=5, flag=6)
    width, height, kernel_width, kernel_height, activation = (builder.whole(place) for place in rest[:5])

    def pool(source: int, target: int, scheme: int, extents: tuple[int, int]) -> None:
        builder.add(
            name, (source,), (target,), "Pool2DOptions", padding=scheme, strideW=width, strideH=height,
            filterHeight=extents[0], filterWidth=extents[1], fusedActivationFunction=activation,
        )  # fmt: skip

    def write(source: int, target: int) -> None:
        if not any(pads):
            pool(source, target, scheme, (kernel_height, kernel_width))
            return
        # Each piece by TFLite's own kernel, which is exact for integers too; the results are concatenated.
        sizes, wanted, bands = builder.operands[source].shape, builder.operands[target].shape, list[int]()
        batch, channels = sizes[0], sizes[3]
        for row in _split_windows(sizes[1], wanted[1], kernel_height, height, pads[2]):
            cells: list[int] = []
            for column in _split_windows(sizes[2], wanted[2], kernel_width, width, pads[0]):
                part = builder.like(source, (batch, row.size, column.size, channels))
                begin = builder.constant(np.array([0, row.start, column.start, 0], np.int32))
                size = builder.constant(np.array([batch, row.size, column.size, channels], np.int32))
                builder.add("SLICE", (source, begin, size), (part,), "SliceOptions")
                cells.append(builder.like(target, (batch, row.outputs, column.outputs, channels)))
                pool(part, cells[-1], _VALID, (row.extent, column.extent))
            bands.append(builder.like(target, (batch, row.outputs, wanted[2], channels)))
            builder.add("CONCATENATION", cells, (bands[-1],), "ConcatenationOptions", axis=2)
        builder.add("CONCATENATION", bands, (target,), "ConcatenationOptions", axis=1)

    write_in_order(builder, inputs[0], outputs[0], read_layout(builder, rest, 5), write)


def read_layout(builder: ModelBuilder, places: Sequence[int], at: int) -> Sequence[int]:
    """Returns the order of axes in TFLite's layout, NHWC: another if the optional operand at a position says NCHW."""
    is_nchw = len(places) > at and bool(builder.whole(places[at]))
    return _TO_NHWC if is_nchw else range(4)


def write_in_order(
    builder: ModelBuilder, source: int, target: int, order: Sequence[int], write: Callable[[int, int], None]
) -> None:
    """Writes an operation of one tensor with its axes in some order: it is transposed before, and back after it."""
    if list(order) == sorted(order):
        write(source, target)
        return
    shape = builder.operands[target].shape
    transposed = builder.like(target, tuple(shape[axis] for axis in order))
    write(builder.transpose(source, order), transposed)
    builder.transpose(transposed, sorted(range(len(order)), key=order.__getitem__), target)


def _take_padding(
    builder: ModelBuilder, places: Sequence[int], *, count: int, flag: int
) -> tuple[int, tuple[int, ...], Sequence[int]]:
    """Returns TFLite's padding scheme, explicit pads (left, right, top, bottom), and the operands that follow.

    The padding is explicit if at least `count` operands follow four pads, unless the operand at `flag` is a boolean:
    then it is the layout flag of the form with implicit padding.
    """
    if len(places) >= count + 4 and builder.operands[places[flag]].type != OperandType.BOOL:
        return _VALID, tuple(builder.whole(place) for place in places[:4]), places[4:]
    return {1: _SAME, 2: _VALID}[builder.whole(places[0])], (), places[1:]


def _split_windows(size: int, outputs: int, window: int, stride: int, before: int) -> list[_Piece]:
    """Splits a pooled axis into pieces without pads: one for all full windows, and one for each clipped window."""
    pieces: list[_Piece] = []
    for index in range(outputs):
        low = index * stride - before
        start, end = max(low, 0), min(low + window, size)
        if end <= start:
            raise DeviceError("pooling over nothing but pads is not computed here", hint="use smaller pads")
        if pieces and end - start == pieces[-1].extent == window:
            last = pieces.pop()
            pieces.append(msgspec.structs.replace(last, size=end - last.start, outputs=last.outputs + 1))
        else:
            pieces.append(_Piece(start=start, size=end - start, extent=end - start, outputs=1))
    return pieces


class _Kernel(msgspec.Struct, frozen=True):
    """The TFLite operator that is equivalent to an NNAPI operation.

    `inputs` is the number of NNAPI's inputs that it takes, from the first on, or a tuple of their positions. `fields`
    of the `options` are constant inputs in NNAPI: each field has the position of that input. `name` is TFLite's name,
    "" for the same as NNAPI's.
    """

    options: str = ""
    inputs: int | tuple[int, ...] = 1
    fields: Mapping[str, int] = {}
    name: str = ""


_ACTIVATION = {"fusedActivationFunction": 2}
_KERNELS = {
    "ADD": _Kernel("AddOptions", 2, _ACTIVATION), "DEQUANTIZE": _Kernel("DequantizeOptions"), "FLOOR": _Kernel(),
    "FULLY_CONNECTED": _Kernel("FullyConnectedOptions", 3, {"fusedActivationFunction": 3}),
    "LOGISTIC": _Kernel(), "MUL": _Kernel("MulOptions", 2, _ACTIVATION), "RELU": _Kernel(),
    "RELU1": _Kernel(name="RELU_N1_TO_1"), "RELU6": _Kernel(), "RESHAPE": _Kernel("ReshapeOptions", 2),
    "TANH": _Kernel(), "DIV": _Kernel("DivOptions", 2, _ACTIVATION),
    "MEAN": _Kernel("ReducerOptions", 2, {"keepDims": 2}), "PAD": _Kernel("PadOptions", 2),
    "STRIDED_SLICE": _Kernel("StridedSliceOptions", 4, {"beginMask": 4, "endMask": 5, "shrinkAxisMask": 6}),
    "SUB": _Kernel("SubOptions", 2, _ACTIVATION), "TRANSPOSE": _Kernel("TransposeOptions", 2),
    "ABS": _Kernel("AbsOptions"), "CAST": _Kernel("CastOptions"), "EXP": _Kernel("ExpOptions"),
    "GATHER": _Kernel("GatherOptions", (0, 2), {"axis": 1}), "LESS": _Kernel("LessOptions", 2), "LOG": _Kernel(),
    "MAXIMUM": _Kernel("MaximumMinimumOptions", 2), "MINIMUM": _Kernel("MaximumMinimumOptions", 2),
    "NEG": _Kernel("NegOptions"), "PAD_V2": _Kernel("PadV2Options", 3, name="PADV2"),
    "POW": _Kernel("PowOptions", 2), "PRELU": _Kernel(inputs=2), "QUANTIZE": _Kernel("QuantizeOptions"),
    "SELECT": _Kernel("SelectOptions", 3), "SIN": _Kernel(), "SLICE": _Kernel("SliceOptions", 3), "SQRT": _Kernel(),
    "ELU": _Kernel(),
}  # fmt: skip
"""The equivalent TFLite operators, by the names of the operations that ONNX Runtime's NNAPI provider writes."""


def write_model(network: Network, constants: Mapping[int, Array]) -> bytes:
    """Returns the TFLite model of a network with constants by operand, its inputs and outputs in the same order.

    Raises:
        DeviceError: it has an operation that TFLite lacks in this form.
        MissingExtraError: ai-edge-litert is not installed.
    """
    builder = ModelBuilder(network, constants)
    for operation in network.operations:
        name, inputs, outputs = name_operation(operation.type), operation.inputs, operation.outputs
        if kernel := _KERNELS.get(name):
            places = range(kernel.inputs) if isinstance(kernel.inputs, int) else kernel.inputs
            fields = {field: builder.whole(inputs[place]) for field, place in kernel.fields.items()}
            builder.add(kernel.name or name, [inputs[place] for place in places], outputs, kernel.options, **fields)
        elif name in {"CONV_2D", "DEPTHWISE_CONV_2D", "GROUPED_CONV_2D"}:
            write_conv(builder, name, inputs, outputs)
        elif name in {"AVERAGE_POOL_2D", "MAX_POOL_2D"}:
            write_pool(builder, name, inputs, outputs)
        else:
            _write_other(builder, name, inputs, outputs)
    return builder.finish()


def _write_other(builder: ModelBuilder, name: str, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Writes an operation whose inputs or layout differ between TFLite and NNAPI."""
    whole, source, target = builder.whole, inputs[0], outputs[0]
    match name:
        case "CONCATENATION":
            # NNAPI concatenates tensors with different quantization; TFLite's int8 kernel needs that of the output.
            wanted, parts = builder.operands[target], list(inputs[:-1])
            for index, place in enumerate(parts):
                own = builder.operands[place]
                if (own.scale, own.zero_point) != (wanted.scale, wanted.zero_point):
                    scaled = msgspec.structs.replace(own, scale=wanted.scale, zero_point=wanted.zero_point, size=-1)
                    parts[index] = builder.add_operand(scaled)
                    builder.add("QUANTIZE", (place,), (parts[index],), "QuantizeOptions")
            builder.add(name, parts, outputs, "ConcatenationOptions", axis=whole(inputs[-1]))
        case "SOFTMAX":
            axis, beta = whole(inputs[2]) if len(inputs) > 2 else -1, builder.number(inputs[1])
            _write_along_last(builder, source, target, axis, name, "SoftmaxOptions", beta=beta)
        case "LOCAL_RESPONSE_NORMALIZATION":
            fields = dict(zip(("bias", "alpha", "beta"), map(builder.number, inputs[2:5]), strict=True))
            axis, options = whole(inputs[5]) if len(inputs) > 5 else -1, "LocalResponseNormalizationOptions"
            _write_along_last(builder, source, target, axis, name, options, radius=whole(inputs[1]), **fields)
        case "DEPTH_TO_SPACE":

            def write_space(source: int, target: int) -> None:
                builder.add(name, (source,), (target,), "DepthToSpaceOptions", blockSize=whole(inputs[1]))

            write_in_order(builder, source, target, read_layout(builder, inputs, 2), write_space)
        case "RESIZE_BILINEAR" | "RESIZE_NEAREST_NEIGHBOR":
            flags = [bool(whole(place)) for place in inputs[4:6]] + [False, False]
            kind = "ResizeBilinearOptions" if name == "RESIZE_BILINEAR" else "ResizeNearestNeighborOptions"

            def write_resize(source: int, target: int) -> None:
                size = builder.constant(np.array(builder.operands[target].shape[1:3], np.int32))
                builder.add(name, (source, size), (target,), kind, alignCorners=flags[0], halfPixelCenters=flags[1])

            write_in_order(builder, source, target, read_layout(builder, inputs, 3), write_resize)
        case "SPLIT":
            axis = builder.constant(np.array(whole(inputs[1]), np.int32))
            builder.add(name, (axis, source), outputs, "SplitOptions", numSplits=whole(inputs[2]))
        case "SQUEEZE":
            # Without axes, LiteRT drops every axis of size 1, like NNAPI.
            given = (builder.constants.get(place) for place in inputs[1:])
            axes = [axis for value in given if value is not None for axis in value.tolist()]
            builder.add(name, (source,), outputs, "SqueezeOptions", squeezeDims=axes)
        case _:
            raise DeviceError(f"NNAPI's operation {name} is not computed here", hint="use another device")


def _write_along_last(
    builder: ModelBuilder, source: int, target: int, axis: int, name: str, options: str, **fields: float
) -> None:
    """Writes an operation along any axis by transposition, because TFLite has it only for the last one."""
    order = list(range(len(builder.operands[source].shape)))
    order[axis], order[-1] = order[-1], order[axis]

    def write(source: int, target: int) -> None:
        builder.add(name, (source,), (target,), options, **fields)

    write_in_order(builder, source, target, order, write)
