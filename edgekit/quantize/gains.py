"""Gains of normalizations for which 8 bits are too few, where activations have 16."""

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import Graph
from edgekit.model.model import drop_unread
from edgekit.quantize.graph.float_graph import read_dequantized

NORM = "LayerNormalization"
"""Its gain is positive: as uint8 it uses all steps above zero. Other uint8 weights keep their int8 values."""
# An 8-bit gain stays if the ratio of the median gain to its rounding error is at least this: a choice. The ratio is
# lower only if the largest gain is more than about five times the median.
_EXACT_DB = 45.0
_MOST_8, _MOST_16 = 255, 65535


def multiply_gains(qdq: onnx.GraphProto, graph: Graph) -> None:
    """Turns coarse gains of normalizations whose output has 16 bits into products, in place; nodes are not in order.

    Why: QNN accepts only 8-bit gains of LayerNormalization, and all channels share one scale. If one channel's gain is
    large, the scale is too coarse for the others.

    1. Nodes are selected whose output has 16 bits and whose 8-bit gain has a large rounding error compared with the
       median gain (below _EXACT_DB). Zero or computed gains, and a bias that
       would more than double the range, exclude a node.
    2. LayerNormalization(x, gain, bias) becomes LayerNormalization(x, 1, bias / gain) * gain, which is the same value.
       The gain of 1 is exact in 8 bits, and the factor of the Mul gets 16 bits.
    3. The new tensor between the two nodes gets a 16-bit scale without calibration: a value that is normalized over N
       channels lies within +-sqrt(N - 1), and the bias at most doubles that.
    4. The Mul takes over the node's name and output, and the old gain and bias are removed if nothing else reads them.
    """
    floats = {
        node.output[0]: node
        for node in graph.nodes
        if node.op_type == NORM and all(graph.is_float_constant(name) for name in node.input[1:])
    }
    if not floats:
        return
    stored = {tensor.name: tensor for tensor in qdq.initializer}
    makers = {name: node for node in qdq.node for name in node.output}
    rounders = {node.input[0]: node for node in qdq.node if node.op_type == "QuantizeLinear"}
    for node in [node for node in qdq.node if node.op_type == NORM]:
        rounder, read = rounders.get(node.output[0]), [makers[name] for name in node.input if name in makers]
        norm = floats.get(node.output[0].removesuffix("_QuantizeLinear_Input"))
        # A float normalization reads its constants directly.
        if norm is None or rounder is None or len(read) < len(node.input):
            continue
        if stored[rounder.input[2]].data_type != onnx.TensorProto.UINT16:
            continue
        gain, *rest = (graph.weight(name).astype(np.float64) for name in norm.input[1:])
        bias, reach = rest[0] if rest else np.zeros_like(gain), math.sqrt(max(gain.size - 1, 1))
        rounded = read_dequantized(read[1], lambda name: numpy_helper.to_array(stored[name]))
        noise = float(np.mean((rounded - gain) ** 2))
        is_exact = noise * 10 ** (_EXACT_DB / 10) <= float(np.median(gain**2))
        # The bias may at most double the range.
        if is_exact or gain.ndim != 1 or not np.all((gain != 0) & (np.abs(bias) <= reach * np.abs(gain))):
            continue
        made, name, prefix = node.output[0], node.name, f"{norm.output[0]}.edgekit"
        even = f"{prefix}.even"
        low, high = min(float(gain.min()), 0.0), max(float(gain.max()), 0.0)
        scale = (high - low) / _MOST_16
        zero = round(-low / scale)
        step = float(numpy_helper.to_array(stored[read[0].input[1]])) / _MOST_8
        parts = {
            "one": (np.full(gain.size, _MOST_8, np.uint8), 1 / _MOST_8, 0),
            "shift": (np.rint(bias / gain / step).astype(np.int32), step, 0),
            "gain": (np.clip(np.rint(gain / scale) + zero, 0, _MOST_16).astype(np.uint16), scale, zero),
        }
        for part, (values, each, offset) in parts.items():
            grid = _add_grid(qdq, f"{prefix}.{part}", each, values.dtype.type(offset))
            qdq.initializer.append(numpy_helper.from_array(values, f"{prefix}.{part}.integers"))
            qdq.node.append(_dequantizer([f"{prefix}.{part}.integers", *grid], f"{prefix}.{part}", rounder.domain))
        node.input[1:] = [f"{prefix}.one", f"{prefix}.shift"][: len(node.input) - 1]
        # The product takes the name, which stands for the node that makes the tensor and reads the gain.
        node.output[0], node.name = even, f"{prefix}.norm"
        grid = _add_grid(qdq, even, 4 * reach / _MOST_16, np.uint16(_MOST_16 // 2 + 1))
        qdq.node.append(helper.make_node("QuantizeLinear", [even, *grid], [f"{even}.integers"], domain=rounder.domain))
        qdq.node.append(_dequantizer([f"{even}.integers", *grid], f"{even}.rounded", rounder.domain))
        qdq.node.append(helper.make_node("Mul", [f"{even}.rounded", f"{prefix}.gain"], [made], name=name))
    drop_unread(qdq, ["DequantizeLinear"])


def _add_grid(qdq: onnx.GraphProto, name: str, scale: float, zero: np.generic) -> tuple[str, str]:
    """Adds a scale and a zero point; returns their names."""
    qdq.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), f"{name}.scale"))
    qdq.initializer.append(numpy_helper.from_array(np.array(zero), f"{name}.zero"))
    return f"{name}.scale", f"{name}.zero"


def _dequantizer(inputs: Sequence[str], output: str, domain: str) -> onnx.NodeProto:
    return helper.make_node("DequantizeLinear", inputs, [output], domain=domain)
