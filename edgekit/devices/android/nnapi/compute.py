"""Computes the networks that NNAPI is given, with TFLite's reference kernels, in a process of its own."""

import contextlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekit.devices.android.nnapi.network import NUMPY_TYPES, Network, OperandType, name_operation, split_constants
from edgekit.devices.android.nnapi.tflite import write_model
from edgekit.devices.process.pipes import serve_pipes, serving

# Operations that TFLite's reference kernels lack (ELU) or compute wrong (LOCAL_RESPONSE_NORMALIZATION, whose window
# ends one channel early): networks with one run on its optimized kernels, as NNAPI's own path on the CPU runs the
# latter.
_OPTIMIZED = frozenset({13, 98})


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed: how many operations of each name the networks have, and whether one was relaxed."""

    operations: dict[str, int]
    relaxed: bool


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    shape: tuple[int, ...]


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    inputs: tuple[_Part, ...]
    outputs: tuple[_Part, ...]


class Computer:
    """The networks so far, each ready to run."""

    def __init__(self) -> None:
        self._networks: dict[int, tuple[Network, Any]] = {}

    def load(self, question: bytes, read: Callable[[int], bytes]) -> None:
        """Makes the network of a question ready, whose constants follow.

        Raises:
            EdgekitError: it cannot be computed here.
        """
        network = msgspec.json.decode(question, type=Network)
        self.take_network(network, read(sum(max(operand.size, 0) for operand in network.operands)))

    def compute(self, question: bytes, read: Callable[[int], bytes]) -> bytes:
        """Returns the outputs of a network for the inputs that follow the question."""
        run = msgspec.json.decode(question, type=_Run)
        return self.run(run.id, read(sum(part.size for part in run.inputs)))

    def take_network(self, network: Network, data: bytes) -> None:
        """Makes a network ready.

        Raises:
            DeviceError: it holds an operation that is not computed here.
            MissingExtraError: ai-edge-litert is not installed.
        """
        model = write_model(network, split_constants(network, data))
        from ai_edge_litert.interpreter import Interpreter, OpResolverType  # noqa: PLC0415 - an optional extra

        optimized = any(operation.type in _OPTIMIZED for operation in network.operations)
        kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if optimized else OpResolverType.BUILTIN_REF
        interpreter: Any = Interpreter(model_content=model, experimental_op_resolver_type=kernels, num_threads=1)
        interpreter.allocate_tensors()
        self._networks[network.id] = network, interpreter

    def describe(self) -> Facts:
        """Returns what the networks hold."""
        networks = [network for network, _ in self._networks.values()]
        counts = Counter(name_operation(operation.type) for network in networks for operation in network.operations)
        return Facts(operations=dict(sorted(counts.items())), relaxed=any(network.relaxed for network in networks))

    def run(self, number: int, data: bytes) -> bytes:
        """Returns the outputs of a network for the bytes of its inputs, one behind the other."""
        network, interpreter = self._networks[number]
        details = interpreter.get_input_details()
        at = 0
        for place, detail in zip(network.inputs, details, strict=True):
            operand = network.operands[place]
            dtype = np.dtype(NUMPY_TYPES[operand.type])
            count = int(np.prod(operand.shape)) * dtype.itemsize
            value = np.frombuffer(data[at : at + count], dtype).reshape(operand.shape)
            interpreter.set_tensor(detail["index"], _turn(value) if detail["dtype"] != dtype else value)
            at += count
        interpreter.invoke()
        found: list[bytes] = []
        for place, detail in zip(network.outputs, interpreter.get_output_details(), strict=True):
            value = interpreter.get_tensor(detail["index"])
            turned = network.operands[place].type == OperandType.TENSOR_QUANT8_ASYMM and value.dtype == np.int8
            found.append((_turn(value) if turned else value).tobytes())
        return b"".join(found)


def _turn(value: Any) -> Any:
    """Returns uint8 values as int8 ones that are lower by 128, and int8 values as the uint8 ones they came from."""
    return (value.view(np.uint8) ^ np.uint8(0x80)).view(np.int8 if value.dtype == np.uint8 else np.uint8)


# What NNAPI says it can since Android 12L, where it no longer counts as Android does (NeuralNetworksTypes.h).
_FEATURE_LEVELS = {32: 1_000_006, 33: 1_000_007}
_LAST_FEATURE_LEVEL = 1_000_008


class Service(msgspec.Struct, kw_only=True):
    """The process that computes: `pipes` is where the driver reaches it, `facts` what it did, known at its end."""

    pipes: Path | None = None
    facts: Facts | None = None


def find_feature_level(api: int) -> int:
    """Returns the feature level of NNAPI on a phone with that API level of Android, all its updates installed."""
    return api if api < min(_FEATURE_LEVELS) else _FEATURE_LEVELS.get(api, _LAST_FEATURE_LEVEL)


def can_compute() -> bool:
    """Returns True if TFLite's kernels are here, in the wheel ai-edge-litert."""
    return importlib.util.find_spec("ai_edge_litert") is not None


@contextlib.contextmanager
def computing(folder: Path, timeout_s: float) -> Generator[Service]:
    """Yields the process that computes for the driver, which ends with the block.

    Where nothing can compute, networks are built and not run.
    """
    service = Service()
    if not can_compute():
        yield service
        return
    with serving(folder, "edgekit.devices.android.nnapi.compute", timeout_s) as served:
        service.pipes = folder
        yield service
    with contextlib.suppress(msgspec.DecodeError):
        service.facts = msgspec.json.decode(served.said, type=Facts)


if __name__ == "__main__":
    serve_pipes(Computer(), Path(sys.argv[1]))
