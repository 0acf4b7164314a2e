"""Computes NNAPI's networks with TFLite's reference kernels, in a separate process."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekit.devices.android.network import NUMPY_TYPES, Network, OperandType, name_operation
from edgekit.devices.android.tflite import write_model
from edgekit.devices.process.pipes import Facts, serve_pipes
from edgekit.errors import DeviceError
from edgekit.model.tensors import Array
from edgekit.serialize import ready_type

# Operations that TFLite's reference kernels lack (ELU) or compute wrong (LOCAL_RESPONSE_NORMALIZATION, whose window
# ends one channel early). Networks with one of them run on TFLite's optimized kernels, with which NNAPI's own CPU path
# also computes the latter.
_OPTIMIZED = frozenset({13, 98})


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    size: int


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    inputs: tuple[_Part, ...]
    outputs: tuple[_Part, ...]


class Computer:
    """Holds the networks loaded so far, and runs them."""

    def __init__(self) -> None:
        self._networks: dict[int, tuple[Network, Any]] = {}

    def load(self, question: bytes, read: Callable[[int], bytes]) -> None:
        """Loads the network of a question; the bytes of its constants follow, in the order of its operands.

        Raises:
            DeviceError: it has an operation that edgekit cannot compute.
            MissingExtraError: ai-edge-litert is not installed.
        """
        network = msgspec.json.decode(question, type=ready_type(Network))
        sizes = {place: operand.size for place, operand in enumerate(network.operands) if operand.size > 0}
        model = write_model(network, {place: _view(network, place, read(size)) for place, size in sizes.items()})
        from ai_edge_litert.interpreter import Interpreter, OpResolverType  # noqa: PLC0415 - an optional extra

        optimized = any(operation.type in _OPTIMIZED for operation in network.operations)
        kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if optimized else OpResolverType.BUILTIN_REF
        # With tensors that share memory, a RESHAPE whose input is read again later gives wrong numbers (LiteRT #8889).
        interpreter: Any = Interpreter(
            model_content=model,
            experimental_op_resolver_type=kernels,
            experimental_preserve_all_tensors=True,
            num_threads=1,
        )
        interpreter.allocate_tensors()
        self._networks[network.id] = network, interpreter

    def compute(self, question: bytes, read: Callable[[int], bytes]) -> bytes:
        """Returns the bytes of a network's outputs for those of its inputs, which follow the question.

        An axis of 0 is unknown to NNAPI: ONNX Runtime then gives a buffer for more than the output has, which is filled
        with zeros.

        Raises:
            DeviceError: an output has another size than is asked for. Whoever asks would wait for the rest.
        """
        run = msgspec.json.decode(question, type=ready_type(_Run))
        parts = [read(part.size) for part in run.inputs]
        network, interpreter = self._networks[run.id]
        for place, detail, data in zip(network.inputs, interpreter.get_input_details(), parts, strict=True):
            value = _view(network, place, data)
            interpreter.set_tensor(detail["index"], _flip_sign_bit(value) if detail["dtype"] != value.dtype else value)
        interpreter.invoke()
        found: list[bytes] = []
        for place, part, detail in zip(network.outputs, run.outputs, interpreter.get_output_details(), strict=True):
            value = interpreter.get_tensor(detail["index"])
            is_flipped = network.operands[place].type == OperandType.TENSOR_QUANT8_ASYMM and value.dtype == np.int8
            data = (_flip_sign_bit(value) if is_flipped else value).tobytes()
            if 0 in network.operands[place].shape:
                data = data.ljust(part.size, b"\0")
            if len(data) != part.size:
                what = f"an output has {len(data)} bytes, and {part.size} are asked for"
                raise DeviceError(what, hint="edgekit devices test android:x86_64")
            found.append(data)
        return b"".join(found)

    def describe(self) -> Facts:
        """Returns what the networks contain."""
        networks = [network for network, _ in self._networks.values()]
        counts = Counter(name_operation(operation.type) for network in networks for operation in network.operations)
        halves = sum(len(network.operations) for network in networks if network.relaxed)
        return Facts(operations=dict(sorted(counts.items())), halves=halves)


def _view(network: Network, place: int, data: bytes) -> Array:
    """Returns the bytes of an operand as an array; a scalar has one axis."""
    operand = network.operands[place]
    return np.frombuffer(data, NUMPY_TYPES[operand.type]).reshape(operand.shape or (-1,))


def _flip_sign_bit(value: Any) -> Any:
    """Converts uint8 values to int8 by subtracting 128, or int8 values to uint8 by adding 128."""
    return (value.view(np.uint8) ^ np.uint8(0x80)).view(np.int8 if value.dtype == np.uint8 else np.uint8)


def can_compute() -> bool:
    """Returns True if TFLite's kernels (the wheel ai-edge-litert) are installed."""
    return importlib.util.find_spec("ai_edge_litert") is not None


if __name__ == "__main__":
    serve_pipes(Computer(), Path(sys.argv[1]))
