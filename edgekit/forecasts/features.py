"""The features of a forecast: the work of a graph by kind, and the bytes that QNN's compiler plans to move.

The work is computed from shapes alone, for an NPU that computes in blocks of 32 channels. The compiler runs on a PC;
nothing runs on a device.
"""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Literal, get_args

import msgspec
import onnx

from edgekit.check.macs import count_macs, count_unsized
from edgekit.convert.context import plan_context
from edgekit.graph.graph import Graph, Node, infer_graph
from edgekit.prepare.fix import FIXES, apply_rewrites
from edgekit.prepare.rewrites.activations import join_hard_swish

Kind = Literal["matrix", "attention", "vector", "curve", "move", "weights", "spill", "outside", "nodes"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Hexagon's matrix unit multiplies tiles of 32 by 32 channels, and its memory holds activations in blocks of 32 channels
# (Qualcomm's HTP layouts): 33 channels cost as much as 64.
BLOCK = 32
"""Channels of a tile."""
# Vector memory (VTCM) of the flagships since the 8 Gen 1; a larger value goes to DRAM and back.
_VTCM_BYTES = 8 << 20
# A Reshape of at most this many elements counts as free.
_MAX_FREE_RESHAPE = 1 << 12

# Free operators: the compiler folds them into their neighbours, or computes them once.
_FREE = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "Identity", "Dropout", "Flatten", "Squeeze", "Unsqueeze", "Reshape",
     "Constant", "ConstantOfShape", "Shape", "Cast"}
)  # fmt: skip
# Operators that a convolution or a product applies as it writes its result.
_FUSED = frozenset({"Relu", "Clip"})
_PRODUCTS = frozenset({"Conv", "FusedConv", "ConvTranspose", "Gemm", "MatMul", "Add"})
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_CONVS = frozenset({"Conv", "FusedConv", "ConvTranspose", "QLinearConv", "ConvInteger"})
# Nonlinear functions and reductions: each element costs more than in an addition.
_CURVES = frozenset(
    {"Sigmoid", "Tanh", "Erf", "Exp", "Log", "Sqrt", "Pow", "HardSigmoid", "HardSwish", "Gelu", "Elu", "Softplus",
     "Mish", "Sin", "Cos", "Div", "Reciprocal", "LeakyRelu", "PRelu", "Swish", "Celu", "Selu", "Softmax", "LogSoftmax",
     "LayerNormalization", "InstanceNormalization", "GroupNormalization", "LpNormalization", "RMSNormalization",
     "SimplifiedLayerNormalization", "SkipLayerNormalization", "TopK", "ArgMax", "ArgMin", "CumSum",
     "NonMaxSuppression", "FastGelu", "BiasGelu"}
)  # fmt: skip
_MOVES = frozenset(
    {"Concat", "Slice", "Split", "Pad", "Expand", "Tile", "Where", "Transpose", "DepthToSpace", "SpaceToDepth",
     "Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "Resize", "Upsample", "GridSample",
     "Reshape"}
)  # fmt: skip


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a network in one inference, by kind, and its multiply-accumulates.

    `matrix` (convolutions and products with weights) and `attention` (products of two computed values) are in
    multiply-accumulates, with channels rounded up to blocks of 32. `vector` (sums, and depthwise convolutions by their
    multiply-accumulates), `curve` (nonlinear functions, norms, pools) and `move` (copies in another order) are in
    elements, in blocks of channels. `weights` and `outside` (inputs and outputs) are in elements, `spill` in elements
    of values that in 16 bits exceed the vector memory, `nodes` counts the operators that are left to run. `unsized`
    counts nodes of unknown size, `recurrent` layers that run step by step.
    """

    kinds: dict[Kind, float]
    macs: int
    unsized: int = 0
    recurrent: int = 0


def join_graph(model: onnx.ModelProto) -> Graph:
    """Joins nodes that an NPU runs as one operator (Gelu, HardSwish, RMS norm), and returns the model's graph.

    The prepared `model` is changed in place.
    """
    apply_rewrites(model, {*FIXES, join_hard_swish.id})
    return infer_graph(model)


def measure_work(graph: Graph) -> Work:
    """Returns the work of a graph. Q and DQ nodes are free, so a quantized graph has the work of the float one."""
    kinds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    macs = recurrent = 0
    for node in graph.nodes:
        count = count_macs(graph, node)
        macs += count
        if _is_free(graph, node):
            continue
        recurrent += node.op_type in _RECURRENT
        written = sum(_padded_elements(graph, name) for name in node.output if name)
        kinds["nodes"] += 1
        kinds["spill"] += written if 2 * written > _VTCM_BYTES else 0
        kind, amount = _classify_work(graph, node, count, written)
        kinds[kind] += amount
    kinds["weights"] = sum(prod(tensor.dims) for tensor in graph.constants.values() if len(tensor.dims) > 1)
    kinds["outside"] = sum(graph.value(name).elements for name in (*graph.fed, *sorted(graph.outputs)))
    return Work(kinds=kinds, macs=macs, unsized=count_unsized(graph), recurrent=recurrent)


def _is_free(graph: Graph, node: Node) -> bool:
    if all(_source(graph, name) in graph.constants for name in node.input if name):
        return True
    if node.op_type == "Reshape":
        before, after = graph.value(node.input[0]).sizes, graph.value(node.output[0])
        # A Reshape that changes the innermost axis is not free: blocks of channels have to be rewritten.
        return not before or not after.sizes or before[-1] == after.sizes[-1] or after.elements <= _MAX_FREE_RESHAPE
    if node.op_type in _FUSED:
        maker = graph.producers.get(_source(graph, node.input[0]))
        return maker is not None and maker.op_type in _PRODUCTS
    return node.op_type in _FREE


def _source(graph: Graph, name: str) -> str:
    """Follows QuantizeLinear and DequantizeLinear nodes back to the value that the first of them reads."""
    maker = graph.producers.get(name)
    while maker is not None and maker.op_type in {"QuantizeLinear", "DequantizeLinear"}:
        name = maker.input[0]
        maker = graph.producers.get(name)
    return name


def _classify_work(graph: Graph, node: Node, macs: int, written: float) -> tuple[Kind, float]:
    """Returns the kind and the amount of a node's work; `written` is the number of elements that it writes."""
    if not macs:
        if node.op_type in _CURVES or node.op_type.startswith("Reduce") or "Pool" in node.op_type:
            return "curve", max(written, _padded_elements(graph, node.input[0]))
        return ("move" if node.op_type in _MOVES else "vector"), written
    weight = _source(graph, node.input[1]) if node.has_input(1) else ""
    sizes = [size or 1 for size in graph.value(weight).sizes or ()]
    if node.op_type in _CONVS and len(sizes) >= 3:
        group = max(1, node.integer("group", 1))
        transposed = node.op_type == "ConvTranspose"
        in_channels, out_channels = (sizes[0] // group, sizes[1]) if transposed else (sizes[1], sizes[0] // group)
        # Depthwise (one input channel for each group): the vector unit computes it.
        if in_channels == 1 and group > 1:
            return "vector", macs * _padding_factor(group * out_channels)
        return "matrix", macs * _padding_factor(in_channels) * _padding_factor(out_channels)
    shape = [size or 1 for size in graph.value(node.output[0]).sizes or ()] or [1]
    padded = macs * _padding_factor(shape[-1]) * _padding_factor(macs / prod(shape))
    computed = weight not in graph.constants and node.op_type not in _RECURRENT
    return ("attention" if computed else "matrix"), padded


def _padded_elements(graph: Graph, name: str) -> float:
    """Returns the number of elements of a value with its channels padded to whole blocks.

    Channels are the second axis or the last, whichever needs less padding.
    """
    value = graph.value(name)
    sizes = [size or 1 for size in value.sizes or ()]
    if len(sizes) < 3:
        return value.elements
    return value.elements * min(_padding_factor(sizes[-1]), _padding_factor(sizes[1]))


def _padding_factor(channels: float) -> float:
    """Returns the factor by which work grows if channels are rounded up to whole blocks: 64 / 33 for 33."""
    return -(-channels // BLOCK) * BLOCK / channels if channels > 0 else 1.0


def list_amounts(kinds: Mapping[Kind, float]) -> list[float]:
    """Returns the amounts in the order of `KINDS`, and a 1 for the fixed cost of every inference."""
    return [*(kinds.get(kind, 0.0) for kind in KINDS), 1.0]


SOC = "69"
"""QNN's SoC number of the chip that plans are compiled for: that of the Galaxy S25, the fit's reference device."""
_NAMES = ("dram_read", "dram_write", "vtcm_read", "vtcm_write", "is_dma")
_MOVE = re.compile(r'\{"opid"\s*:\s*0x([0-9a-f]+)' + "".join(rf'\s*,\s*"{name}"\s*:\s*(\d+)' for name in _NAMES))


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The data traffic of one inference.

    `dram` are the bytes between DRAM and the NPU's vector memory (VTCM), `matrix` and `vector` those that its matrix
    unit and its vector units read from VTCM and write there. `operations` counts the tiles of work: a convolution on a
    large activation is many of them.
    """

    dram: int
    matrix: int
    vector: int
    operations: int


def compile_traffic(model: str, folder: Path, *, timeout_s: float) -> Traffic:
    """Compiles the prepared model of that name in `folder`, for the chip that the forecast was fitted on.

    Raises:
        MissingExtraError: onnxruntime-qnn is not installed.
        RuntimeRefusal: QNN takes no node of it.
        DeviceError: the compiler crashed or ran out of time, or reported no bytes.
    """
    return read_plan(plan_context(model, SOC, folder, timeout_s=timeout_s))


def read_plan(text: str) -> Traffic:
    """Returns the sums over the operations of a compiler's plan."""
    on_vector = {
        int(number, 16)
        for numbers in re.findall(r"runlist_vec = \[([^\]]*)\]", text)
        for number in re.findall("0x([0-9a-f]+)", numbers)
    }
    sums = {"dram": 0, "matrix": 0, "vector": 0}
    operations = 0
    for found in _MOVE.finditer(text):
        from_dram, to_dram, read, written, is_dma = map(int, found.groups()[1:])
        operations += 1
        sums["dram"] += from_dram + to_dram
        # The VTCM bytes of a DMA transfer are its DRAM bytes again.
        if not is_dma:
            sums["vector" if int(found[1], 16) in on_vector else "matrix"] += read + written
    return Traffic(**sums, operations=operations)
