"""Stores weights of MatMul and Gemm, and tables of Gather, in 8 or 4 bits with a scale for each block.

Weights are rounded to nearest, or by GPTQ, which minimizes the error of the layer's output on samples.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.data.samples import Samples
from edgekit.errors import ModelError
from edgekit.graph.constants import ORT_DOMAIN
from edgekit.graph.match import need
from edgekit.graph.rewrite import Writer, replace_nodes
from edgekit.model.model import MOST_INLINE_BYTES, Model, drop_unread
from edgekit.model.tensors import Array
from edgekit.prepare.clean import import_contrib
from edgekit.prepare.opset import read_opset
from edgekit.prepare.rewrites.products import split_gemm
from edgekit.quantize import gptq
from edgekit.quantize.calibration.calibrate import calibrate_model
from edgekit.quantize.calibration.moments import InputMoments, StoredMoments
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.ranges import EXACT

_LPBQ_STEPS = 16


Blocks = tuple[Array, Array]
"""Unsigned values [N, blocks, block] and scales [N, blocks]."""


class BlockForm(msgspec.Struct, frozen=True, kw_only=True):
    """How weights are stored: their bits, and how many values along K share a scale.

    `accuracy_level` of MatMulNBits is the precision of products: 0 leaves it to the kernel, 1 is float32, 2 float16, 3
    bfloat16, 4 int8. With `lpbq` scales are restricted to those that Qualcomm's HTP can represent (`snap_scales`).
    """

    bits: int
    block: int
    accuracy_level: int = 0
    lpbq: bool = False


def pack_weights(
    proto: onnx.ModelProto,
    form: BlockForm,
    kept: Collection[str],
    learned: Callable[[str, bool], Blocks | None] | None = None,
) -> tuple[str, ...]:
    """Replaces nodes with constant float32 weights, in place, and returns the names of the nodes.

    MatMul and Gemm become MatMulNBits, with an Add after it where a Gemm adds a residual; a Gather of rows becomes
    GatherBlockQuantized. A weight that several nodes read is stored once, also if a head and its embedding share it,
    transposed or not.

    Args:
        proto: the model.
        form: how the weights are stored: 4 or 8 bits, in blocks of a power of two from 16 on.
        kept: names of nodes to leave as they are.
        learned: returns the blocks of a node's weight, rounded by samples, or None if only rounding to nearest is
            possible. Its second argument says whether the weight is also the table of a Gather, as with a tied head.
    """
    graph = proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}

    def split(writer: Writer) -> None:
        need(writer.node.name not in kept and _takes_blocks(writer.node.proto, weights))
        split_gemm(writer)

    replace_nodes(graph, read_opset(proto), {"Gemm"}, split)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    chosen = [node for node in graph.node if node.name not in kept]
    gathers = [node for node in chosen if _takes_rows(node, weights, form)]
    products = [node for node in chosen if _takes_blocks(node, weights)]
    tables = {node.input[0]: weights[node.input[0]] for node in gathers}
    # The tensor of each weight [K, N], and whether it is stored turned, as a table always is.
    stored = {id(node): (weights[node.input[0]], True) for node in gathers}
    stored |= {id(node): _find_stored(node, weights[node.input[1]], tables.values()) for node in products}
    heads = {stored[id(node)][0].name: node.name for node in products}
    packed: dict[tuple[str, bool], tuple[str, str]] = {}
    changed = [node for node in chosen if id(node) in stored]
    for node in changed:
        tensor, turned = stored[id(node)]
        weight = numpy_helper.to_array(tensor)
        weight = weight.T if turned else weight
        if (tensor.name, turned) not in packed:
            reader = heads.get(tensor.name)
            blocks = None if learned is None or reader is None else learned(reader, tensor.name in tables)
            blocks = blocks or quantize_blocks(weight, form.bits, form.block, lpbq=form.lpbq)
            packed[tensor.name, turned] = _add_packed(graph, tensor.name, blocks, form.bits, turned=turned)
        _replace(node, packed[tensor.name, turned], weight.shape, form, is_gather=node.op_type == "Gather")
    _flatten_tables(graph)
    drop_unread(graph)
    import_contrib(proto)
    return tuple(node.name for node in changed)


def write_product(
    graph: onnx.GraphProto, node: onnx.NodeProto, weight: str, blocks: Blocks, form: BlockForm, depth: int
) -> None:
    """Turns a MatMul into a MatMulNBits with the blocks of its own weight of `depth` rows."""
    _replace(node, _add_packed(graph, weight, blocks, form.bits), (depth, len(blocks[0])), form)


def quantize_blocks(weight: Array, bits: int, block: int, *, lpbq: bool = False) -> Blocks:
    """Returns unsigned values [N, blocks, block] and scales [N, blocks] of a weight [K, N]; K is padded with zeros.

    With `lpbq` scales are those of Qualcomm's low-power block quantization (`snap_scales`).
    """
    # Signed integers reach one step farther down than up. The scale, which may be negative, maps the value with the
    # largest magnitude to the lowest integer. With 4 bits that gives 8 steps instead of 7, as ONNX Runtime's own
    # quantizer does (onnxruntime/core/mlas/lib/q4_dq.cpp).
    parts = _split_rows(weight.T, block)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(-1, keepdims=True), -1)
    middle = 2 ** (bits - 1)
    scales = largest / np.float32(-middle)
    if lpbq:
        scales = snap_scales(np.abs(largest[..., 0]) / np.float32(middle - 1))[..., None]
    steps = np.divide(parts, scales, out=np.zeros_like(parts), where=scales != 0)
    values = np.clip(np.rint(steps) + middle, 0, 2**bits - 1).astype(np.uint8)
    return values, scales[..., 0]


def _split_rows(rows: Array, block: int) -> Array:
    """Returns rows [N, K] as blocks [N, blocks, block], the last one filled up with zeros."""
    filled = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, -rows.shape[1] % block))))
    return filled.reshape(len(rows), -1, block)


def snap_scales(scales: Array) -> Array:
    """Returns positive scales [N, blocks], each 1 to 16 sixteenths of the largest of its column.

    The HTP stores a float for each column and an integer of 4 bits for each block. With the option
    `enable_block_quant_weight_optimization` the QNN provider converts the scales of a MatMulNBits with 16-bit
    activations to this form, if none is negative. Scales of another form would be rounded: outputs in the simulator
    then err by 2.3 % of the largest one, instead of one step.
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
    # MatMulNBits has no alpha and beta.
    return not _attribute(node, "transA", 0) and _attribute(node, "alpha", 1.0) == _attribute(node, "beta", 1.0) == 1.0


def _takes_rows(node: onnx.NodeProto, weights: dict[str, onnx.TensorProto], form: BlockForm) -> bool:
    """Returns True for a Gather of rows whose length is a multiple of the block size."""
    tensor = weights.get(node.input[0]) if node.op_type == "Gather" and not node.domain else None
    if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) != 2:
        return False
    return _attribute(node, "axis", 0) in {0, -2} and tensor.dims[1] % form.block == 0


def _find_stored(
    node: onnx.NodeProto, tensor: onnx.TensorProto, tables: Iterable[onnx.TensorProto]
) -> tuple[onnx.TensorProto, bool]:
    """Returns the tensor that holds a product's weight [K, N], and True if it is stored turned: perhaps a table."""
    if _attribute(node, "transB", 0):
        return tensor, True
    # Exporters write a tied head as a Transpose of the embedding, which constant folding stores as another weight.
    for table in tables:
        is_alike = list(table.dims) == list(tensor.dims)[::-1]
        if is_alike and np.array_equal(numpy_helper.to_array(table).T, numpy_helper.to_array(tensor)):
            return table, True
    return tensor, False


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            return attribute.i if attribute.type == onnx.AttributeProto.INT else attribute.f
    return default


def _add_packed(
    graph: onnx.GraphProto, weight: str, blocks: Blocks, bits: int, *, turned: bool = False
) -> tuple[str, str]:
    values, scales = blocks
    packed = values[..., ::2] | (values[..., 1::2] << 4) if bits == 4 else values
    end = "t" if turned else ""
    names = f"{weight}_q{bits}{end}", f"{weight}_scales{end}"
    graph.initializer.extend(numpy_helper.from_array(*each) for each in zip((packed, scales), names, strict=True))
    return names


def _replace(
    node: onnx.NodeProto, names: tuple[str, str], shape: Sequence[int], form: BlockForm, *, is_gather: bool = False
) -> None:
    """Turns a product into MatMulNBits, or a Gather of rows into GatherBlockQuantized."""
    values, scales = names
    sizes: dict[str, Any] = {"bits": form.bits, "block_size": form.block}
    if is_gather:
        op, inputs = "GatherBlockQuantized", [values, node.input[1], scales]
        sizes |= {"gather_axis": 0, "quantize_axis": 1}
    else:
        # Between the weight and the bias are inputs that these products do not have.
        op, inputs = "MatMulNBits", [node.input[0], *names, *(("", "", bias) if (bias := (*node.input, "")[2]) else ())]
        sizes |= {"K": shape[0], "N": shape[1]}
        sizes |= {"accuracy_level": form.accuracy_level} if form.accuracy_level else {}
    node.CopyFrom(helper.make_node(op, inputs, list(node.output), name=node.name, domain=ORT_DOMAIN, **sizes))


def _flatten_tables(graph: onnx.GraphProto) -> None:
    """Gives tables the shape [rows, bytes] for GatherBlockQuantized, by a Reshape if MatMulNBits reads them too."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    multiplied = {node.input[1] for node in graph.node if node.op_type == "MatMulNBits"}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type == "GatherBlockQuantized" and node.input[0] in stored:
            readers.setdefault(node.input[0], []).append(node)
    for name, nodes in readers.items():
        tensor = stored[name]
        flat = [tensor.dims[0], math.prod(tensor.dims[1:])]
        if name not in multiplied:
            tensor.dims[:] = flat
            continue
        # The weight of MatMulNBits must be a constant, since it is packed; a Gather can read the output of a Reshape.
        shape = numpy_helper.from_array(np.array(flat), f"{name}_shape")
        graph.initializer.append(shape)
        graph.node.insert(0, helper.make_node("Reshape", [name, shape.name], [f"{name}_flat"], name=f"{name}_flat"))
        for node in nodes:
            node.input[0] = f"{name}_flat"


# Tried shares of the scale that clips no weight of a block. Chosen by hand.
_SHARES = np.linspace(1.0, 0.6, 9)
_MIDDLE = 8


def learn_blocks(model: Model, samples: Samples, work: Path, form: BlockForm) -> Callable[[str, bool], Blocks | None]:
    """Returns the argument `learned` of `pack_weights`: it rounds weights by samples of their layer's input.

    It returns None if several nodes read a weight, or if the size of the input is unknown.

    Raises:
        EdgekitError: the model cannot be calibrated with the samples.
    """
    # The float weights are copied several times.
    if model.size_bytes > MOST_INLINE_BYTES:
        size, most = (f"{count / 1e9:.1f} GB" for count in (model.size_bytes, MOST_INLINE_BYTES))
        words = f"'{model.path.name}' has {size}; weights are rounded by samples up to {most}, for it takes several"
        raise ModelError(f"{words} times as much", hint="leave --data out: weights are rounded to the nearest")
    graph = read_float_graph(model)
    layers = {layer.node: layer for layer in read_layers(graph) if layer.op in {"Gemm", "MatMul"}}
    calibrate_model(model, samples, work=work, methods=EXACT)
    stored = StoredMoments(work)

    def learn(node: str, is_table: bool) -> Blocks | None:  # noqa: FBT001 - a callback
        layer, moments = layers.get(node), stored(node)
        if layer is None or moments is None:
            return None
        matrix = layer.to_matrix(graph.weight(layer.weight))
        return round_blocks(matrix[0].T, moments, form, is_table=is_table)

    return learn


def round_blocks(weight: Array, moments: InputMoments, form: BlockForm, *, is_table: bool = False) -> Blocks:
    """Returns unsigned values [N, blocks, block] and scales [N, blocks] of a weight [K, N] in 4 bits.

    For each block the scale with the least error of rounding to nearest is searched. Then GPTQ finds the integers of
    all blocks (`round_gptq`), so that one block compensates for the errors of another. If the weight also `is_table` (a
    head tied to its embedding), the error of each single weight counts too, as if an input of mean energy read it.
    """
    depth, block = weight.shape[0], form.block
    _, whole = quantize_blocks(weight, 4, block, lpbq=form.lpbq)
    tried = [whole[..., None] * np.float32(share) for share in _SHARES]
    energy = _split_rows(moments.energy().reshape(1, -1), block)
    scales = gptq.pick_scale(_split_rows(weight.T, block), tried, energy)[..., 0]
    scales = snap_scales(scales) if form.lpbq else scales
    each = np.repeat(scales, block, axis=1)[:, :depth]
    # Blocks of zeros have a scale of 0. A tiny scale keeps them zero, and can be divided by.
    each = np.where(each, each, np.float32(1e-30))
    size = moments.size
    kept = gptq.shrink_moment(moments.second_moment(), moments.count)
    kept = gptq.add_spread(kept, moments.spread.reshape(-1, size), moments.count)
    if is_table:
        kept = kept + np.eye(size) * np.diagonal(kept, axis1=1, axis2=2).mean()
    matrix, scale = (gptq.split_pieces(part[None], 1, size) for part in (weight.T, each))
    found = gptq.join_pieces(gptq.round_gptq(matrix, kept, scale, limit=gptq.FOUR_LIMIT).integers, 1)[0]
    values = np.full((scales.shape[0], scales.shape[1] * block), _MIDDLE, np.uint8)
    values[:, :depth] = (found.astype(np.int16) + _MIDDLE).astype(np.uint8)
    values = values.reshape(*scales.shape, block)
    values[scales == 0] = _MIDDLE
    return values, scales
