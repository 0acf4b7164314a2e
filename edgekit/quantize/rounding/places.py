"""Where the parameters of layers are in a QDQ graph, and how they are written there."""

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.graph.graph import Graph
from edgekit.model.tensors import Array
from edgekit.quantize.graph.layers import Layer, read_layers
from edgekit.quantize.rounding.four_bits import pack_int4
from edgekit.quantize.rounding.gptq import FOUR_LIMIT

# A bias is int32 with the step of the input times that of the weight, which must be so large that the bias fits: ONNX
# Runtime's _adjust_weight_scale_for_int32_bias (qdq_quantizer.py) sees to it before weights are corrected, not after.
_INT32_MARGIN = 1.001 / (2**31 - 1)


class QdqLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a layer's parameters are in a QDQ graph: names of initializers, and the step of the quantized input.

    `limit` is the largest magnitude of its integers, `source` the tensor that the layer reads in the QDQ graph.
    """

    source: str
    weight: str
    weight_scale: str
    weight_zero: str
    bias: str | None
    bias_scale: str | None
    step: float
    per_channel: bool
    limit: int

    @property
    def has_four_bits(self) -> bool:
        """True if its weight gets 4 bits."""
        return self.limit == FOUR_LIMIT

    def least_scale(self, layer: Layer, bias: Array) -> Array:
        """Returns the least scale [groups, outputs, 1] of the weight with which the bias fits into int32."""
        return (np.abs(bias) * _INT32_MARGIN / self.step).reshape(layer.groups, layer.outputs, 1)


def find_places(
    qdq: onnx.GraphProto,
    initializers: dict[str, onnx.TensorProto],
    graph: Graph,
    limit: int,
    bits: Mapping[str, int],
) -> Iterator[tuple[str, tuple[Layer, QdqLayer]]]:
    """Yields, by node, layers of the float graph and where they are in its QDQ form."""
    places = _find_layers(qdq, initializers, limit)
    for layer in read_layers(graph):
        place = places.get(layer.node)
        if place is not None and (layer.bias is None) == (place.bias is None):
            is_few = layer.weight in bits and place.per_channel
            yield layer.node, (layer, msgspec.structs.replace(place, limit=FOUR_LIMIT) if is_few else place)


def _find_layers(graph: onnx.GraphProto, initializers: dict[str, onnx.TensorProto], limit: int) -> dict[str, QdqLayer]:
    """Returns the layers whose input, weight and bias if any come from DQ nodes, with a symmetric int8 weight."""
    dequantized = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, QdqLayer] = {}
    for node in (node for node in graph.node if node.op_type in {"Conv", "Gemm", "MatMul"}):
        source, weight, bias, *_ = (*(dequantized.get(name) for name in node.input), None)
        if source is None or weight is None:
            continue
        stored, zero = initializers.get(weight.input[0]), initializers.get(weight.input[2])
        if stored is None or zero is None or stored.data_type != onnx.TensorProto.INT8:
            continue
        scale = numpy_helper.to_array(initializers[weight.input[1]])
        if numpy_helper.to_array(zero).any() or scale.dtype != np.float32:
            continue
        found[node.name] = QdqLayer(
            source=node.input[0],
            weight=weight.input[0],
            weight_scale=weight.input[1],
            weight_zero=weight.input[2],
            bias=bias.input[0] if bias is not None else None,
            bias_scale=bias.input[1] if bias is not None else None,
            step=float(numpy_helper.to_array(initializers[source.input[1]])),
            per_channel=scale.ndim > 0,
            limit=limit,
        )
    return found


def write_layer(
    initializers: Mapping[str, onnx.TensorProto], place: QdqLayer, *, integers: Array, scale: Array, bias: Array
) -> None:
    """Writes integers, scale [channels] and bias [channels] of a layer into its QDQ graph."""

    def store(name: str, value: Array) -> None:
        initializers[name].CopyFrom(numpy_helper.from_array(value, name))

    if place.has_four_bits:
        initializers[place.weight].CopyFrom(pack_int4(integers, place.weight))
        initializers[place.weight_zero].CopyFrom(pack_int4(np.zeros(scale.shape, np.int8), place.weight_zero))
    else:
        store(place.weight, np.ascontiguousarray(integers))
    store(place.weight_scale, np.asarray(scale if place.per_channel else scale[0]))
    if place.bias is not None and place.bias_scale is not None:
        # Integer kernels take no scale of the bias (ONNX operator QLinearConv): it is the product of the other two.
        step = (np.float32(place.step) * scale).astype(np.float32)
        counts = np.clip(np.rint(bias / step.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32)
        store(place.bias, counts)
        store(place.bias_scale, step if place.per_channel else step[:1])
