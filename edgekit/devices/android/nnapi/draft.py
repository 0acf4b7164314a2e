"""A TFLite model on its way: what the operands of a network of NNAPI become.

Weights of s8 per channel want activations of s8 in TFLite, where NNAPI takes u8: then every u8 becomes s8 with its zero
point less 128, which is exact.

Where a network is relaxed, a driver may compute its float32 in half precision. Here each operation then reads halves
and gives halves, and adds up in float32, as units for half precision do.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import flatbuffers
import msgspec
import numpy as np

from edgekit.devices.android.nnapi.network import Constants, Network, Operand, OperandType
from edgekit.errors import DeviceError, MissingExtraError
from edgekit.model.tensors import Array

INSTALL_LITERT = "pip install ai-edge-litert==2.3.0"
"""The command that installs what computes the models."""

# Versions that say what is used: weights per channel, zero points of weights. Of all others LiteRT's kernels have the
# first, and look at the types of tensors, not at the version: PRELU has no other.
_VERSIONS = {"CONV_2D": 5, "DEPTHWISE_CONV_2D": 6, "FULLY_CONNECTED": 7, "RESHAPE": 1, "CAST": 1}


class Draft:
    """A model as far as it is written: tensors for the operands of a network, and operators of TFLite on them."""

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
        # What comes with a run is no constant, and so not rounded yet.
        self.inputs = [self.tensor(place) for place in network.inputs]
        if network.relaxed:
            for place in network.inputs:
                self.places[place] = self._round(self.places[place])

    def add(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **fields: Any) -> None:
        """Adds one operator of TFLite on operands of NNAPI."""
        read = [-1 if self.is_left_out(place) else self.tensor(place) for place in inputs]
        made = [self.tensor(place) for place in outputs]
        given = [self._twin(tensor) if self.network.relaxed else tensor for tensor in made]
        self._operate(name, read, given, options, **fields)
        for full, tensor in zip(given, made, strict=True):
            if full != tensor:
                self._round(full, tensor)

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

    def like(self, place: int, shape: tuple[int, ...]) -> int:
        """Adds an operand of the type and the grid of another, and returns its place."""
        return self.place(msgspec.structs.replace(self.operands[place], shape=shape, size=-1))

    def transpose(self, source: int, order: Sequence[int], target: int | None = None) -> int:
        """Adds a transposition, to a new operand where no target is given, and returns where its result is."""
        shape = self.operands[source].shape
        made = self.like(source, tuple(shape[axis] for axis in order)) if target is None else target
        self.add("TRANSPOSE", (source, self.constant(np.array(order, np.int32))), (made,), "TransposeOptions")
        return made

    def finish(self) -> bytes:
        """Returns the whole model."""
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
        """Returns a tensor for what an operation gives before it is rounded; of what is not float32, itself."""
        described = self.tensors[tensor]
        if described.type != self.schema.TensorType.FLOAT32:
            return tensor
        self._describe(described.shape, described.type)
        return len(self.tensors) - 1

    def _round(self, source: int, target: int | None = None) -> int:
        """Adds the way through half precision and back, and returns the tensor at its end."""
        twin = self._twin(source)
        if twin == source:
            return source
        half = self.schema.TensorType.FLOAT16
        self._describe(self.tensors[source].shape, half)
        places = (source, len(self.tensors) - 1, twin if target is None else target)
        for start, end in itertools.pairwise(places):
            self._operate("CAST", (start,), (end,), "CastOptions")
        return places[-1]
