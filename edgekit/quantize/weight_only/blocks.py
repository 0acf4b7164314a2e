"""Weights of MatMul and Gemm in 8 or 4 bits, a scale for each block; activations stay float.

The operator is ONNX Runtime's `com.microsoft.MatMulNBits` (ContribOperators.md): B has the shape
[N, blocks, block bytes], two 4-bit values a byte, the lower half first; without zero points the middle of the range is
zero.
"""

from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.model.model import drop_unread
from edgekit.model.tensors import Array

_CONTRIB = "com.microsoft"
_LPBQ_STEPS = 16


Blocks = tuple[Array, Array]
"""Unsigned values [N, blocks, block] and scales [N, blocks]."""


class BlockForm(msgspec.Struct, frozen=True, kw_only=True):
    """How weights are stored: their bits, how many along K share a scale, and in which precision products are made.

    `accuracy_level` is that of MatMulNBits: 0 leaves it to the kernel, 1 is float32, 2 float16, 3 bfloat16, 4 int8.
    With `lpbq` scales are those that Qualcomm's HTP can hold.
    """

    bits: int
    block: int
    accuracy_level: int = 0
    lpbq: bool = False


def pack_weights(
    proto: onnx.ModelProto,
    form: BlockForm,
    kept: Collection[str],
    learned: Callable[[str], Blocks | None] = lambda _: None,
) -> tuple[str, ...]:
    """Replaces MatMul and Gemm with constant float32 weights by MatMulNBits, in place; returns the names of the nodes.

    Args:
        proto: the model.
        form: how the weights are stored: 4 or 8 bits, in blocks of a power of two from 16 on.
        kept: names of nodes to leave as they are.
        learned: returns the blocks of a node's weight where better ones than the nearest are known.
    """
    graph = proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    # Tied weights are packed once, but for each direction in which they are read.
    packed: dict[tuple[str, bool], tuple[str, str]] = {}
    changed: list[str] = []
    for node in graph.node:
        if node.name in kept or not _takes_blocks(node, weights):
            continue
        turned = bool(_attribute(node, "transB", 0))
        tensor = weights[node.input[1]]
        if (tensor.name, turned) not in packed:
            blocks = learned(node.name) or _round_plainly(tensor, form, turned=turned)
            packed[tensor.name, turned] = _add_packed(graph, tensor, blocks, form.bits, turned=turned)
        _replace(node, packed[tensor.name, turned], _shape(tensor, turned=turned), form)
        changed.append(node.name)
    drop_unread(graph)
    if changed and all(entry.domain != _CONTRIB for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(_CONTRIB, 1))
    return tuple(changed)


def quantize_blocks(weight: Array, bits: int, block: int, *, lpbq: bool = False) -> Blocks:
    """Returns unsigned values [N, blocks, block] and scales [N, blocks] of a weight [K, N]; K is padded with zeros.

    With `lpbq` scales are those of Qualcomm's low-power block quantization (`snap_scales`).
    """
    # Symmetric integers reach one step farther down than up. So the value of a block that is largest in magnitude falls
    # on the lowest, by a scale of either sign: at 4 bits 8 steps instead of 7 (as ONNX Runtime's own quantizer,
    # onnxruntime/core/mlas/lib/q4_dq.cpp).
    depth, columns = weight.shape
    blocks = -(-depth // block)
    filled = np.zeros((blocks * block, columns), np.float32)
    filled[:depth] = weight
    parts = np.ascontiguousarray(filled.T).reshape(columns, blocks, block)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(-1, keepdims=True), -1)
    middle = 2 ** (bits - 1)
    scales = largest / np.float32(-middle)
    if lpbq:
        scales = snap_scales(np.abs(largest[..., 0]) / np.float32(middle - 1))[..., None]
    steps = np.divide(parts, scales, out=np.zeros_like(parts), where=scales != 0)
    values = np.clip(np.rint(steps) + middle, 0, 2**bits - 1).astype(np.uint8)
    return values, scales[..., 0]


def snap_scales(scales: Array) -> Array:
    """Returns positive scales [N, blocks], each 1 to 16 sixteenths of the largest of its column.

    The HTP keeps a float a column and an integer of 4 bits a block. Where `enable_block_quant_weight_optimization` is
    set, the QNN provider turns the scales of a MatMulNBits with 16-bit activations into these, if none is negative:
    what is not of this form is rounded to it then (2.3 % of the largest output in the simulator, else one step).
    """
    steps = scales.max(axis=1, keepdims=True) / np.float32(_LPBQ_STEPS)
    counts = np.ceil(np.divide(scales, steps, out=np.zeros_like(scales), where=steps != 0) - np.float32(1e-4))
    return np.asarray(np.clip(counts, 1, _LPBQ_STEPS) * steps, np.float32)


def _takes_blocks(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> bool:
    if node.domain or node.op_type not in {"MatMul", "Gemm"} or node.input[1] not in weights:
        return False
    tensor = weights[node.input[1]]
    if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) != 2:
        return False
    if node.op_type == "MatMul":
        return True
    # MatMulNBits takes a bias of one dimension alone, and no factors.
    bias = _bias(node)
    columns = _shape(tensor, turned=bool(_attribute(node, "transB", 0)))[1]
    plain = not _attribute(node, "transA", 0) and _attribute(node, "alpha", 1.0) == _attribute(node, "beta", 1.0) == 1.0
    return plain and (not bias or (bias in weights and list(weights[bias].dims) == [columns]))


def _bias(node: onnx.NodeProto) -> str:
    return node.input[2] if len(node.input) > 2 else ""


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            return attribute.i if attribute.type == onnx.AttributeProto.INT else attribute.f
    return default


def _shape(tensor: onnx.TensorProto, *, turned: bool) -> tuple[int, int]:
    first, second = tensor.dims
    return (second, first) if turned else (first, second)


def _round_plainly(tensor: onnx.TensorProto, form: BlockForm, *, turned: bool) -> Blocks:
    weight = numpy_helper.to_array(tensor)
    return quantize_blocks(weight.T if turned else weight, form.bits, form.block, lpbq=form.lpbq)


def _add_packed(
    graph: onnx.GraphProto, tensor: onnx.TensorProto, blocks: Blocks, bits: int, *, turned: bool
) -> tuple[str, str]:
    values, scales = blocks
    packed = values[..., ::2] | (values[..., 1::2] << 4) if bits == 4 else values
    names = (f"{tensor.name}_q{bits}{'t' if turned else ''}", f"{tensor.name}_scales{'t' if turned else ''}")
    graph.initializer.append(numpy_helper.from_array(packed, names[0]))
    graph.initializer.append(numpy_helper.from_array(scales, names[1]))
    return names


def _replace(node: onnx.NodeProto, names: tuple[str, str], shape: tuple[int, int], form: BlockForm) -> None:
    inputs = [node.input[0], *names, *(("", "", bias) if (bias := _bias(node)) else ())]
    sizes: dict[str, Any] = {"K": shape[0], "N": shape[1], "bits": form.bits, "block_size": form.block}
    if form.accuracy_level:
        sizes["accuracy_level"] = form.accuracy_level
    node.CopyFrom(helper.make_node("MatMulNBits", inputs, list(node.output), name=node.name, domain=_CONTRIB, **sizes))
