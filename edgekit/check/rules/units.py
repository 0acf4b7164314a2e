"""Node units: the groups of DequantizeLinear, operator and QuantizeLinear that a provider takes or leaves as one.

The grouping is ONNX Runtime's (core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc and shared/utils.cc).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from edgekit.graph.graph import Graph, Node, Shape
from edgekit.graph.match import attempt, need
from edgekit.model.tensors import Array
from edgekit.serialize import read_own_toml

Selector = Literal[
    "drop", "drop_dq", "unary", "binary", "variadic", "split", "conv", "matmul", "gemm", "norm", "batchnorm",
    "compare", "where", "pad", "topk", "any", "first",
]  # fmt: skip

_SELECTED = read_own_toml(Path(__file__).parent / "selectors.toml", dict[Selector, list[str]])
SELECTORS: dict[str, Selector] = {op: selector for selector, ops in _SELECTED.items() for op in ops}
"""Which of ORT's group selectors handles an operator (ORT 1.31)."""

# MaxPool supports 8-bit integers from opset 12 on (ONNX's operator changelog); before, no integer kernel exists.
SELECTED_SINCE: dict[str, tuple[int, ...]] = {"MaxPool": (12,)}
"""Operators that form a unit only in some versions."""

LIMITED = ("int8", "uint8", "int16", "uint16")
"""The element types of quantized activations."""
# The first input of Where is the condition, a bool; the second has the element type that it computes in.
_DATA_INPUTS = {"Where": 1}
_UNCLIPPED = ("drop", "drop_dq", "split", "topk")
# A Gemm may leave its result in float, and a comparison returns a bool, which has no scale.
_UNQUANTIZED_OUTPUT = ("gemm", "compare")
_DQ_COUNTS: dict[Selector, int] = {
    "drop": 1, "drop_dq": 1, "unary": 1, "split": 1, "topk": 1, "matmul": 2, "where": 2, "first": 1,
}  # fmt: skip
# A relative tolerance, ONNX Runtime's since 1.27 (pull request 28229).
_BIAS_TOLERANCE = 0.01
# A custom operator may have the name of one in the table; only these domains count.
_GROUP_DOMAINS = ("", "com.microsoft")


class Operand(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output of a unit. If quantized: the integer tensor, and the names of its scale and zero point."""

    name: str
    dtype: str | None
    shape: Shape | None
    scale: str | None = None
    zero_point: str | None = None
    axis: int = 1

    @property
    def is_quantized(self) -> bool:
        """True if the operand is quantized."""
        return self.scale is not None


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A node alone, or a node with its DQs, Qs and redundant activation.

    `members` are the positions of all its nodes in the graph. `inputs` and `outputs` are those of `node`, each with its
    quantization if a DQ or Q of the unit gives one.
    """

    node: Node
    members: tuple[int, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    is_qdq: bool = False

    def has_input(self, position: int) -> bool:
        """Returns True if the node has an input at this position."""
        return position < len(self.inputs) and bool(self.inputs[position].name)

    @property
    def form(self) -> str:
        """The element type that the unit computes in: "float32"; "qdq-uint8" if quantized; "unknown" if not known."""
        if not any(operand.name for operand in self.inputs):
            return self.outputs[0].dtype or "unknown"
        first = self.inputs[min(_DATA_INPUTS.get(self.node.op_type, 0), len(self.inputs) - 1)]
        quantized = self.is_qdq and any(operand.is_quantized for operand in self.inputs)
        if quantized and not first.is_quantized:
            first = next(operand for operand in self.inputs if operand.is_quantized)
        return f"qdq-{first.dtype}" if quantized else (first.dtype or "unknown")


def group_units(
    graph: Graph, selectors: Mapping[str, Selector] | None, *, absorb_clips: bool = True, fits_bias: bool = True
) -> tuple[Unit, ...]:
    """Returns the units of a graph in the order of their target nodes; with no selectors each node is one.

    Each node that reads a DQ must have its own copy of that DQ, as ONNX Runtime ensures (`propagate_quantization`).
    With `absorb_clips` a unit includes an activation that its Q makes redundant. With `fits_bias` the scale of a Conv's
    bias must be the product of input's and weight's.
    """
    grouped: dict[int, Unit] = {}
    for node in graph.nodes if selectors is not None else ():
        selector = selectors.get(node.op_type) if selectors is not None else None
        unit = attempt(_group, graph, node, selector, absorb_clips=absorb_clips) if selector else None
        if unit is not None and not (fits_bias and selector == "conv" and _has_other_bias(graph, unit)):
            grouped[node.index] = unit
    inside = {member for target, unit in grouped.items() for member in unit.members if member != target}
    units: list[Unit] = []
    for node in graph.nodes:
        if node.index in grouped:
            units.append(grouped[node.index])
        elif node.index not in inside:
            # QLinear operators get their parameters as operands, as in ORT's NodeUnit.
            inputs, outputs = _linear_operands(graph, node) or (
                tuple(_operand(graph, name) for name in node.input),
                tuple(_operand(graph, name) for name in node.output),
            )
            units.append(Unit(node=node, members=(node.index,), inputs=inputs, outputs=outputs))
    return tuple(units)


def narrow_operands(unit: Unit, graph: Graph, kinds: Mapping[str, str]) -> Unit:
    """Returns a unit with the element types that a provider computes in, by those of tensors inside the graph."""
    if not any(operand.dtype in kinds for operand in (*unit.inputs, *unit.outputs)):
        return unit

    def narrow(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(
            each if each.name in edges else msgspec.structs.replace(each, dtype=kinds.get(each.dtype or "", each.dtype))
            for each in operands
        )

    edges = {*graph.inputs, *graph.outputs}
    return msgspec.structs.replace(unit, inputs=narrow(unit.inputs), outputs=narrow(unit.outputs))


def _group(graph: Graph, node: Node, selector: Selector, *, absorb_clips: bool) -> Unit:
    """Returns a node with its DQ and Q nodes, and perhaps a redundant activation, if ONNX Runtime takes them as one.

    Raises:
        MisfitError: it does not.
    """
    need(node.domain in _GROUP_DOMAINS and node.since in SELECTED_SINCE.get(node.op_type, (node.since,)))
    made = ((at, graph.producers.get(name)) for at, name in enumerate(node.input))
    before = {at: dq for at, dq in made if dq is not None and dq.op_type == "DequantizeLinear" and dq.has_input(1)}
    # An activation that alone reads the result, and that one node alone reads.
    edges = [reader for name in node.output for reader in graph.readers(name)]
    passed = edges[0].output[0] if len(edges) == 1 and edges[0].op_type in {"Relu", "Clip"} else ""
    is_candidate = absorb_clips and before and passed not in graph.outputs and len(graph.readers(passed)) == 1
    clip = edges[0] if is_candidate else None
    quantizers = [
        (position, reader)
        for position, name in enumerate((clip or node).output)
        for reader in graph.consumers.get(name, ())
        if reader.op_type == "QuantizeLinear" and reader.input[0] == name and reader.has_input(1)
    ]
    need(clip is None or (len(quantizers) == 1 and _is_redundant(graph, clip, quantizers[0][1])))
    _need_group(graph, node, selector, [*before.values()], [q for _, q in quantizers], is_clipped=clip is not None)
    # The DQ makes a graph output, so it has to stay.
    need(not any(dq.output[0] in graph.outputs for dq in before.values()))
    after = dict(quantizers)
    middle = (node.index,) if clip is None else (node.index, clip.index)
    members = (*(dq.index for dq in before.values()), *middle, *(q.index for _, q in quantizers))
    return Unit(
        node=node,
        members=tuple(dict.fromkeys(members)),
        inputs=tuple(
            _quantized(graph, before[at], 0) if at in before else _operand(graph, name)
            for at, name in enumerate(node.input)
        ),
        outputs=tuple(
            _quantized(graph, after[at], 1) if at in after else _operand(graph, name)
            for at, name in enumerate(node.output)
        ),
        is_qdq=True,
    )


def _need_group(
    graph: Graph, node: Node, selector: Selector, before: Sequence[Node], after: Sequence[Node], *, is_clipped: bool
) -> None:
    """Ends the match unless a node between these DQ and Q nodes, and perhaps a redundant activation, is a group."""
    dtypes = [graph.value(dq.input[0]).dtype for dq in before]
    results = [graph.value(q.output[0]).dtype for q in after]
    # Optional inputs of these operators may be float, without a DQ.
    is_free = selector in {"any", "pad", "batchnorm"}
    wanted = len(dtypes) if is_free else _DQ_COUNTS.get(selector, sum(bool(name) for name in node.input))
    need(dtypes and len(dtypes) == wanted and not (selector in _UNCLIPPED and is_clipped))
    # ArgMax finds the same position in integers as in floats, and its result is an index: it needs no Q.
    if selector == "drop_dq":
        return
    if selector == "topk":
        need(dtypes == results)
        return
    # A result that is also read in float, or is a graph output, cannot exist in integers only.
    outputs = [name for name in node.output if name]
    edges = sum(len(graph.consumers.get(name, ())) for name in outputs)
    leaves = any(name in graph.outputs for name in outputs)
    is_covered = after and not leaves and len(after) == len(outputs) and (is_clipped or edges == len(after))
    need(is_covered or (selector in _UNQUANTIZED_OUTPUT and not results))
    # An operator that only moves elements can do so on the integers only if both sides have the same parameters.
    if selector == "drop":
        sides = [read_parameters(graph, _quantized(graph, each, at)) for at, each in enumerate((before[0], after[0]))]
        pairs = [[part.item() for part in each] for each in sides if each is not None and each[0].size == 1]
        need(len(pairs) == 2 and pairs[0] == pairs[1])
    if selector in {"binary", "variadic", "where", "pad", "compare"}:
        need(len({*dtypes, *results}) == 1)
        return
    need(all(result == dtypes[0] for result in results))
    biased = len(dtypes) == 3
    # Signed activations need signed weights; unsigned ones take either (qdq_selectors.cc).
    need(selector not in {"conv", "gemm", "matmul"} or dtypes[0] != "int8" or dtypes[1] == "int8")
    # ONNX defines the bias of a QLinearConv as int32 with the scale x_scale * w_scale; beta would scale it once more.
    need(selector not in {"conv", "gemm", "norm"} or not biased or dtypes[2] == "int32")
    need(selector != "gemm" or not biased or node.attributes.get("beta", 1.0) == 1.0)
    need(selector != "batchnorm" or len(dtypes) >= 3)


def _has_other_bias(graph: Graph, unit: Unit) -> bool:
    """Returns True if the scale of a bias is not the product of input's and weight's (CheckConvBiasScale)."""
    if not unit.has_input(2):
        return False
    names = [operand.scale or "" for operand in unit.inputs]
    if any(name not in graph.constants for name in names):
        return True
    scales = [graph.array(name) for name in names]
    if any(scale is None for scale in scales):
        # Too many scales to have been loaded; quantizers write the product here.
        return False
    x, w, b = (np.atleast_1d(np.asarray(scale, np.float64)) for scale in scales)
    product = x * w
    if b.size not in {1, product.size}:
        return True
    return bool((np.abs(b - product) > _BIAS_TOLERANCE * np.abs(product)).any())


def _is_redundant(graph: Graph, clip: Node, quantizer: Node) -> bool:
    """Returns True if the Q saturates at least where the activation does (qdq_util.cc, IsClipMadeRedundantByQ)."""
    result = _quantized(graph, quantizer, 1)
    parameters = read_parameters(graph, result)
    if parameters is None or parameters[0].ndim != 0 or result.dtype not in LIMITED:
        return False
    limits = np.iinfo(result.dtype)
    scale, zero = float(parameters[0]), int(parameters[1].reshape(-1)[0])
    if clip.op_type == "Relu":
        # Zero is then the smallest integer, so the Q itself saturates what lies below.
        return zero == limits.min
    bounds = clip_bounds(graph, clip.input, clip.attributes)
    if bounds is None or scale <= 0:
        return False
    # Half to even, as QuantizeLinear rounds.
    low, high = (float(np.rint(bound / scale)) + zero for bound in bounds)
    return low <= limits.min and limits.max <= high


_ENDLESS = (float("-inf"), float("inf"))


def clip_bounds(graph: Graph, inputs: Sequence[str], attributes: Mapping[str, object]) -> tuple[float, float] | None:
    """Returns the bounds of a Clip, infinite if it has none, or None if a bound is no constant."""
    # Clip has its bounds as attributes up to opset 10 and as inputs from 11 on (ONNX's changelog of operators).
    given = attributes.get("min"), attributes.get("max")
    pairs = zip(given, _ENDLESS, strict=True)
    bounds = [float(value) if isinstance(value, (int, float)) else end for value, end in pairs]
    for place, name in enumerate(inputs[1:3]):
        if name:
            array = graph.array(name)
            if array is None or array.size != 1:
                return None
            bounds[place] = float(array.reshape(-1)[0])
    return bounds[0], bounds[1]


def read_parameters(graph: Graph, operand: Operand) -> tuple[Array, Array] | None:
    """Returns the scale and zero point (0 if absent) of a quantized operand, or None if they are no constants."""
    scale = graph.array(operand.scale or "")
    if scale is None or scale.size == 0:
        return None
    zero = graph.array(operand.zero_point) if operand.zero_point else np.zeros(scale.shape, np.int32)
    return None if zero is None or zero.size == 0 else (scale, zero)


def _operand(graph: Graph, name: str, parameters: Sequence[str] = (), axis: int = 1) -> Operand:
    """Returns a tensor; if it is quantized, `parameters` are the names of its scale and zero point."""
    value, (scale, zero_point) = graph.value(name), (*parameters, "", "")[:2]
    return Operand(
        name=name, dtype=value.dtype, shape=value.shape, scale=scale or None, zero_point=zero_point or None, axis=axis
    )


def _quantized(graph: Graph, node: Node, side: int) -> Operand:
    """Returns the integer tensor of a DQ (side 0) or Q (side 1) with its parameters."""
    return _operand(graph, (node.input, node.output)[side][0], node.input[1:3], node.integer("axis", 1))


# Operators whose quantization parameters are inputs: tensor, scale and zero point of each operand, then the scale and
# zero point of the result.
_UNARY_LINEAR = (
    "QLinearSigmoid", "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearReduceMean",
)  # fmt: skip
_BINARY_LINEAR = ("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul")


def _linear_operands(graph: Graph, node: Node) -> tuple[tuple[Operand, ...], tuple[Operand, ...]] | None:
    def at(data: str, position: int) -> Operand:
        # Weights of a QLinearConv have a scale per output channel, which is their first axis; no attribute says so.
        axis = 0 if node.op_type == "QLinearConv" else node.integer("axis", 1)
        return _operand(graph, data, node.input[position : position + 2], axis)

    if node.op_type in _UNARY_LINEAR and len(node.input) >= 4:
        return (at(node.input[0], 1),), (at(node.output[0], 3),)
    if node.op_type in _BINARY_LINEAR and len(node.input) >= 8:
        bias = (_operand(graph, node.input[8]),) if node.has_input(8) else ()
        return (at(node.input[0], 1), at(node.input[3], 4), *bias), (at(node.output[0], 6),)
    if node.op_type == "DequantizeLinear" and len(node.input) >= 2:
        return (at(node.input[0], 1),), (_operand(graph, node.output[0]),)
    if node.op_type == "QuantizeLinear" and len(node.input) >= 2:
        return (_operand(graph, node.input[0]),), (at(node.output[0], 1),)
    return None
