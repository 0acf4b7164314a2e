"""Types and shapes of ONNX Runtime's own operators (contrib operators), of which onnx has no schemas.

For shape inference alone each is replaced by an ONNX operator whose outputs have the same types and shapes. Example:
MatMulNBits becomes a MatMul with a float weight of K rows and N columns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import onnx
from onnx import helper

from edgekit.graph.constants import is_own
from edgekit.model.model import iterate_graphs, iterate_nodes, refill
from edgekit.model.soundness import read_opsets

_ADDED = "edgekit: for inference only"

Shape = tuple[int, ...]


class _Stored(msgspec.Struct, frozen=True):
    dtype: int
    dims: Shape


class _Substitution(msgspec.Struct):
    """The replacement of one contrib node.

    `known` holds the types and shapes of the graph's inputs and initializers. `stubs` and `made` collect the graph
    inputs and the nodes that replace contrib nodes.
    """

    node: onnx.NodeProto
    known: Mapping[str, _Stored]
    stubs: dict[str, onnx.ValueInfoProto]
    made: list[onnx.NodeProto]

    def name(self, position: int) -> str:
        return self.node.input[position] if position < len(self.node.input) else ""

    def stored(self, position: int) -> _Stored | None:
        return self.known.get(self.name(position))

    def number(self, name: str, default: int) -> int:
        return next((item.i for item in self.node.attribute if item.name == name), default)

    def numbers(self, name: str) -> Shape:
        return next((tuple(item.ints) for item in self.node.attribute if item.name == name), ())

    def stub(self, dtype: int, dims: Sequence[int]) -> str:
        """Returns the name of a graph input of this type and shape, which replaces packed weights."""
        name = f"edgekit.stub.{dtype}.{'x'.join(map(str, dims))}"
        self.stubs[name] = helper.make_tensor_value_info(name, dtype, dims)
        return name

    def add(self, op: str, inputs: Sequence[str], output: int = 0, *, keeps: bool = False, **attributes: Any) -> None:
        """Adds an ONNX node that makes this output, unless the node lacks that output or one of the inputs.

        With `keeps` it has the attributes of the node that it replaces.
        """
        names = self.node.output
        if output >= len(names) or not names[output] or not all(inputs):
            return
        self.made.append(helper.make_node(op, inputs, [names[output]], doc_string=_ADDED, **attributes))
        self.made[-1].attribute.extend(self.node.attribute if keeps else ())


def substitute_contrib(proto: onnx.ModelProto) -> bool:
    """Replaces contrib operators by ONNX operators whose outputs have the same types and shapes, in place.

    Returns True if there were any; `restore_contrib` undoes it. An output for which no ONNX operator fits stays
    unknown.
    """
    opset = read_opsets(proto.opset_import).get("", 1)
    if not any(is_own(node, opset) for node in iterate_nodes(proto.graph)):
        return False
    known = {
        value.name: _Stored(
            value.type.tensor_type.elem_type, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        )
        for value in proto.graph.input
    } | {tensor.name: _Stored(tensor.data_type, tuple(tensor.dims)) for tensor in proto.graph.initializer}
    stubs: dict[str, onnx.ValueInfoProto] = {}
    for graph in iterate_graphs(proto.graph):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if not is_own(node, opset):
                nodes.append(node)
            elif rule := _SUBSTITUTES.get(node.op_type):
                rule(_Substitution(node, known, stubs, nodes))
        refill(graph.node, nodes)
    proto.graph.input.extend(stubs.values())
    return True


def restore_contrib(inferred: onnx.ModelProto, proto: onnx.ModelProto) -> None:
    """Puts the original nodes back into a graph that `substitute_contrib` changed and onnx inferred, in place."""
    opset = read_opsets(proto.opset_import).get("", 1)
    for substituted, given in zip(iterate_graphs(inferred.graph), iterate_graphs(proto.graph), strict=True):
        # The bodies of a contrib node that came back are the given ones, with their own contrib nodes.
        kept = iter([node for node in substituted.node if node.doc_string != _ADDED and not is_own(node, opset)])
        nodes = [node if is_own(node, opset) else next(kept) for node in given.node]
        for node, source in zip(nodes, given.node, strict=True):
            node.domain = source.domain
        refill(substituted.node, nodes)


def _same(op: str, *positions: int) -> Callable[[_Substitution], None]:
    """Returns a rule: the first output has the type and shape that this ONNX operator gives."""
    return lambda of: of.add(op, [of.name(at) for at in positions if at < len(of.node.input)], keeps=op != "Identity")


def _skip_norm(of: _Substitution) -> None:
    of.add("Identity", [of.name(0)])
    # The sum before the norm, which the next layer adds to.
    of.add("Identity", [of.name(0)], output=3)


def _nbits(of: _Substitution) -> None:
    if (scales := of.stored(2)) is not None:
        of.add("MatMul", [of.name(0), of.stub(scales.dtype, (of.number("K", 0), of.number("N", 0)))])


def _gather_blocks(of: _Substitution) -> None:
    data, scales = of.stored(0), of.stored(2)
    if data is None or scales is None or not data.dims:
        return
    # A byte holds several values; a tensor of a 4-bit type counts them one by one in its shape.
    packed = 8 // of.number("bits", 4) if data.dtype == onnx.TensorProto.UINT8 else 1
    table = of.stub(scales.dtype, (*data.dims[:-1], data.dims[-1] * packed))
    of.add("Gather", [table, of.name(1)], axis=of.number("gather_axis", 0))


def _packed_attention(of: _Substitution) -> None:
    weight, sizes = of.stored(1), of.numbers("qkv_hidden_sizes")
    if weight is not None and len(weight.dims) == 2:
        width = sizes[2] if len(sizes) == 3 else weight.dims[1] // 3
        of.add("MatMul", [of.name(0), of.stub(weight.dtype, (weight.dims[0], width))])


def _lstm(of: _Substitution) -> None:
    # The weights are transposed and in integers; shapes come from the attributes.
    of.made.append(helper.make_node("LSTM", of.node.input[:3], of.node.output, doc_string=_ADDED))
    of.made[-1].attribute.extend(of.node.attribute)


def _attention(of: _Substitution) -> None:
    # Without a bias for values or keys of another size, what comes out is as wide as the queries.
    if of.name(1):
        of.add("Identity", [of.name(0)])
        return
    heads, keys, past = of.number("num_heads", 0), of.number("kv_num_heads", 0), of.stored(3)
    if past is not None and len(past.dims) == 4 and past.dims[3]:
        # Queries, keys and values side by side.
        size = past.dims[3]
        of.add("MatMul", [of.name(0), of.stub(past.dtype, ((heads + 2 * keys) * size, heads * size))])


def _float_matmul(of: _Substitution) -> None:
    weight = of.stored(1)
    if weight is not None and len(weight.dims) == 2:
        of.add("MatMul", [of.name(0), of.stub(onnx.TensorProto.FLOAT, weight.dims)])


def _fused_matmul(of: _Substitution) -> None:
    left, right, weight = of.number("transA", 0), of.number("transB", 0), of.stored(1)
    if of.number("transBatchA", 0) or of.number("transBatchB", 0):
        return
    if not left and not right:
        of.add("MatMul", [of.name(0), of.name(1)])
    elif not left and weight is not None and len(weight.dims) == 2 and all(weight.dims):
        of.add("MatMul", [of.name(0), of.stub(weight.dtype, weight.dims[::-1])])
    else:
        # onnx infers it for equal ranks.
        equation = f"...{'ji' if left else 'ij'},...{'kj' if right else 'jk'}->...ik"
        of.add("Einsum", [of.name(0), of.name(1)], equation=equation)


_SUBSTITUTES: Mapping[str, Callable[[_Substitution], None]] = {
    **dict.fromkeys(
        (
            "Gelu", "QuickGelu", "FastGelu", "BiasGelu", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax",
            "RotaryEmbedding", "LayerNormalization", "SimplifiedLayerNormalization",
        ),
        _same("Identity", 0),
    ),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_norm),
    **{op: _same(op, 0, 1, 2) for op in ("QuantizeLinear", "DequantizeLinear")},
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _same("Add", 0, 3)),
    "QLinearWhere": _same("Where", 0, 1, 4),
    "QLinearConcat": lambda of: of.add("Concat", [of.name(at) for at in range(2, len(of.node.input), 3)], keeps=True),
    "QLinearAveragePool": _same("AveragePool", 0),
    "QLinearGlobalAveragePool": _same("GlobalAveragePool", 0),
    "EmbedLayerNormalization": lambda of: of.add("Gather", [of.name(2), of.name(0)]),
    "FusedConv": _same("Conv", 0, 1),
    "FusedGemm": _same("Gemm", 0, 1),
    # Without a scale for its result it gives floats.
    "QGemm": lambda of: of.add("Gemm", [of.name(0), of.name(3)], keeps=True) if of.name(7) else None,
    "FusedMatMul": _fused_matmul,
    "MatMulNBits": _nbits,
    "GatherBlockQuantized": _gather_blocks,
    **dict.fromkeys(("Attention", "QAttention"), _packed_attention),
    "MultiHeadAttention": _attention,
    "GroupQueryAttention": _attention,
    "DynamicQuantizeLSTM": _lstm,
    "DynamicQuantizeMatMul": _float_matmul,
    "MatMulIntegerToFloat": _float_matmul,
}  # fmt: skip
"""The replacement of each operator; only types and shapes matter, not values."""
