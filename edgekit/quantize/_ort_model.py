"""ONNX Runtime's quantizer and its model class, made faster by an index of tensors and by numpy arrays.

For each tensor that it quantizes, `onnxruntime.quantization` 1.31 searches all nodes or all initializers
(`ONNXModel.replace_input_of_all_nodes`, `find_by_name`, `initializer_extend`), so its time grows with the square of the
number of nodes; and it loops over the channels of each weight in Python. The classes here return the same bytes in less
time.
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import base_quantizer, qdq_quantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import find_by_name, tensor_proto_to_array
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from edgekit.graph.constants import read_array

GENERAL_OPS: tuple[str, ...] = tuple(sorted({*QDQRegistry, *QLinearOpsRegistry}))
"""The operators that ORT's general rules can quantize."""
QNN_EXCLUDED_OPS = frozenset({"Cast"})
"""The operators that ORT's QNN rules leave alone (execution_providers/qnn/quant_config.py, OP_TYPES_TO_EXCLUDE)."""

_folder: ContextVar[Path] = ContextVar("folder")


class _Initializers:
    """The initializers of a graph, in their order, with an index by name."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self._by_name: dict[str, onnx.TensorProto] = {}
        for tensor in stored:
            self._by_name.setdefault(tensor.name, tensor)

    def __iter__(self) -> Iterator[onnx.TensorProto]:
        return iter(self._stored)

    def find(self, name: str) -> onnx.TensorProto | None:
        return self._by_name.get(name)

    def add(self, tensor: onnx.TensorProto) -> None:
        self._stored.append(tensor)
        self._by_name.setdefault(tensor.name, self._stored[-1])

    def drop(self, tensor: onnx.TensorProto) -> None:
        self._stored.remove(tensor)
        self._by_name.pop(tensor.name, None)


class IndexedModel(ONNXModel):  # type: ignore[misc] # onnxruntime has no types
    """An ONNXModel with an index of the producers and readers of each tensor.

    The index is right as long as only the methods of this class change the model.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._initializers = _Initializers(model.graph.initializer)
        # A node is listed once for each of its inputs with that name, because the quantizer counts readers so.
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        self._makers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            self._enter(node)

    def _enter(self, node: onnx.NodeProto) -> None:
        for name in filter(None, node.input):
            self._readers.setdefault(name, []).append(node)
        for name in filter(None, node.output):
            self._makers.setdefault(name, []).append(node)

    def initializer(self) -> _Initializers:
        return self._initializers

    def get_initializer(self, name: str) -> onnx.TensorProto | None:
        return self._initializers.find(name)

    def initializer_extend(self, inits: Sequence[onnx.TensorProto]) -> None:
        for tensor in inits:
            self._initializers.add(self._check_init(tensor))

    def add_initializer(self, tensor: onnx.TensorProto) -> None:
        if self._initializers.find(tensor.name) is None:
            self.initializer_extend([tensor])

    def remove_initializer(self, tensor: onnx.TensorProto) -> None:
        # A float graph lists no initializer as an input (`read_float_graph`).
        self._initializers.drop(tensor)

    def add_node(self, node: onnx.NodeProto) -> None:
        super().add_node(node)
        # `super().add_node` appends a copy, and the index needs that copy.
        self._enter(self.model.graph.node[-1])

    def input_name_to_nodes(self) -> dict[str, list[onnx.NodeProto]]:
        return self._readers

    def replace_input_of_all_nodes(self, old_input_name: str, new_input_name: str) -> None:
        self._move(self._readers.get(old_input_name, []), old_input_name, new_input_name)

    def replace_input_of_nodes(self, old_input_name: str, new_input_name: str, node_names_set: set[str]) -> None:
        readers = [node for node in self._readers.get(old_input_name, ()) if node.name in node_names_set]
        self._move(readers, old_input_name, new_input_name)

    def _move(self, readers: Sequence[onnx.NodeProto], old: str, new: str) -> None:
        """Makes some readers of the tensor `old` read the tensor `new`."""
        for node in readers:
            ONNXModel.replace_node_input(node, old, new)
        # Protobuf messages are not hashable; their ids are unique while this list keeps them alive.
        moved = {id(node) for node in readers}
        kept = [node for node in self._readers.pop(old, ()) if id(node) not in moved]
        self._readers.setdefault(new, []).extend(readers)
        if kept:
            self._readers[old] = kept

    def replace_output_of_all_nodes(self, old_output_name: str, new_output_name: str) -> None:
        makers = self._makers.pop(old_output_name, [])
        for node in makers:
            ONNXModel.replace_node_output(node, old_output_name, new_output_name)
        self._makers.setdefault(new_output_name, []).extend(makers)


class ChannelQuantizer(QDQQuantizer):  # type: ignore[misc] # onnxruntime has no types
    """ORT's quantizer with the scales of all channels of a weight in one array, as `channel_overrides` returns them."""

    model: Any

    def adjust_tensor_ranges(self) -> None:
        # The constructor calls this first of all that searches the model.
        self.model = IndexedModel(self.model.model)
        super().adjust_tensor_ranges()

    def _calc_initializer_quant_params(self) -> dict[str, Any]:
        found: dict[str, Any] = super()._calc_initializer_quant_params()
        for name, parameters in found.items():
            if "axis" in (self.tensor_quant_overrides.get(name) or [{}])[0] and parameters["scale"].ndim > 1:
                parameters["scale"] = parameters["scale"].reshape(-1)
                parameters["zero_point"] = parameters["zero_point"].reshape(-1)
        return found


def channel_overrides(scales: Any, axis: int, quant_type: Any) -> list[dict[str, Any]]:
    """Returns the overrides of a weight for `ChannelQuantizer`: symmetric int8 with these scales [channels]."""
    return [{"quant_type": quant_type, "axis": axis, "scale": scales, "zero_point": np.zeros(len(scales), np.int8)}]


def _find(name: str, items: Any) -> Any:
    return items.find(name) if isinstance(items, _Initializers) else find_by_name(name, items)


@contextlib.contextmanager
def reading_from(folder: Path) -> Generator[None]:
    """Lets the quantizer read external weights from a folder, for which it has no argument."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def _read(tensor: onnx.TensorProto) -> Any:
    """Returns the values of an initializer; one without values has given scales, so only its shape matters."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return read_array(tensor, _folder.get())
    if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims and not (tensor.raw_data or tensor.float_data):
        return np.broadcast_to(np.float32(0), tuple(tensor.dims))
    return tensor_proto_to_array(tensor)


# The quantizer calls these as module functions, which a subclass cannot override; with other arguments they do what the
# originals do.
base_quantizer.find_by_name = _find
qdq_quantizer.find_by_name = _find
base_quantizer.tensor_proto_to_array = _read
qdq_quantizer.tensor_proto_to_array = _read
