"""Opens sessions for graphs in memory."""

import contextlib
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import onnx
from onnx import helper

from edgekit._ort import CpuSession, SessionSettings, external_config
from edgekit.graph.rewrite import Writer, replace_nodes
from edgekit.machine import has_vnni, trim_heap
from edgekit.model.external import move_weight, point_into
from edgekit.model.model import copy_without_weights, count_weight_bytes
from edgekit.prepare.constants import LAYOUT, OPTIMIZER, find_cubics
from edgekit.prepare.interface import name_nodes
from edgekit.prepare.opset import read_opset
from edgekit.prepare.rewrites.signs import FOUR_BITS, write_uint8_activations

EXACT_PRODUCTS: Mapping[str, str] = {"session.qdq_matmulnbits_accuracy_level": "1"}
"""Keeps the products of a MatMul with 8-bit weights and float activations exact.

ONNX Runtime 1.32 turns it into a MatMulNBits, which by default rounds the activations to 8 bits; no target with 16-bit
activations does that.
"""
# From this many bytes on, weights are mapped from a file: inside the protobuf they would be in memory three times while
# a session is made. Chosen by hand.
_LARGE_BYTES = 4 << 20

_INT8, _WIDE = onnx.TensorProto.INT8, frozenset({onnx.TensorProto.INT16, onnx.TensorProto.UINT16})
_CASTS_4 = 21  # the first opset with a Cast of 4 bits


def open_quantized(path: Path) -> CpuSession:
    """Returns a session for a QDQ file, in which the same numbers have forms that take this machine less time.

    ONNX Runtime computes products of int8 activations in float on x64; with uint8 YOLOv8n takes a third of the time.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses the model.
    """
    proto = point_into(path)
    graph, opset = proto.graph, read_opset(proto)
    name_nodes(graph)
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node if has_vnni() else ():
        if node.op_type == "QuantizeLinear" and types.get((*node.input, "")[2]) == _INT8:
            graph.value_info.append(helper.make_tensor_value_info(node.output[0], _INT8, None))
    write_uint8_activations(graph, opset)
    replace_nodes(graph, opset, {"DequantizeLinear"}, _write_product, folder=path.parent)
    trim_heap()
    return _open(proto.SerializeToString(), path.parent, (OPTIMIZER, *((LAYOUT,) if find_cubics(graph) else ())))


def _write_product(writer: Writer) -> None:
    """Dequantizes a constant beside activations of 16 bits by a Cast and a product.

    Nodes with such activations are computed in float in any case, but ONNX Runtime would dequantize their constants in
    each run: it folds a Cast and a product, and no DequantizeLinear. A Conv with a constant weight is faster, too.
    """
    graph, node = writer.graph, writer.node
    beside = (graph.producers.get(name) for each in graph.readers(node.output[0]) for name in each.input)
    zeros = (graph.constants.get((*each.input, "")[2]) for each in beside if each and each.op_type == node.op_type)
    is_wide = any(zero is not None and zero.data_type in _WIDE for zero in zeros)
    is_fixed = len(node.input) == 3 and graph.constants.keys() >= {*node.input}
    # A Cast takes 4 bits from opset 21 on; ONNX Runtime's own DequantizeLinear takes them before.
    is_castable = is_fixed and (graph.constants[node.input[0]].data_type not in FOUR_BITS or writer.opset >= _CASTS_4)
    if not is_wide or not is_castable or node.integer("block_size", 0) > 0:
        return
    scale, zero = (graph.weight(name) for name in node.input[1:])
    rank, axis = len(graph.constants[node.input[0]].dims), node.integer("axis", 1)
    shape = [-1 if scale.ndim and index == axis % rank else 1 for index in range(rank)]
    integers = writer.add("Cast", node.input[:1], "integers", to=onnx.TensorProto.FLOAT)
    shifted = writer.add("Sub", [integers, writer.constant("zero", zero.reshape(shape), "float32")], "shifted")
    writer.add("Mul", [shifted, writer.constant("scale", scale.reshape(shape), "float32")])


def open_graph(
    proto: onnx.ModelProto, folder: Path, *, keep_float_weights: bool, large_bytes: int = _LARGE_BYTES
) -> CpuSession:
    """Returns a session for a graph in memory, whose external weights lie in `folder`.

    If its own weights take `large_bytes` or more, they are written to a file there for the session.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses the graph.
        OSError: the folder cannot be written.
    """
    disabled = (*((OPTIMIZER,) if keep_float_weights else ()), *((LAYOUT,) if find_cubics(proto.graph) else ()))
    # Memory that quantization freed is still in the heap, between memory in use.
    trim_heap()
    if count_weight_bytes(proto) < large_bytes:
        return _open(proto.SerializeToString(), folder, disabled)
    copy = copy_without_weights(proto)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="session-", suffix=".data", delete=False) as out:
        path = Path(out.name)
        for tensor in proto.graph.initializer:
            moved = deepcopy(tensor)  # of its own: the model would keep the memory of cleared fields
            if moved.data_location != onnx.TensorProto.EXTERNAL:
                move_weight(moved, folder, out)
            copy.graph.initializer.append(moved)
    try:
        return _open(copy.SerializeToString(), folder, disabled)
    finally:
        # Windows cannot remove a file that a session has mapped: it is removed with the work folder.
        with contextlib.suppress(PermissionError):
            path.unlink()


def _open(source: bytes, folder: Path, disabled: tuple[str, ...]) -> CpuSession:
    config = {**EXACT_PRODUCTS, **external_config(folder)}
    settings = SessionSettings(threads=1, one_block=False, in_order=True, config=config, disabled_optimizers=disabled)
    return CpuSession(source, settings)
