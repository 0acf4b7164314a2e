"""The plan of quantizing a model for a target: plain data, which a user can read and edit before it is applied."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import msgspec
import numpy as np

from edgekit.errors import DataError, ModelError, UsageError
from edgekit.graph.constants import ML_DOMAIN
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import find_infinite_tensors
from edgekit.model.model import Model
from edgekit.quantize._ort_model import GENERAL_OPS, QNN_EXCLUDED_OPS
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.gptq import LIMIT, REDUCED_LIMIT, Rounding
from edgekit.quantize.graph.float_graph import float_activations, folded_activations, known_bounds, range_source
from edgekit.quantize.graph.float_regions import (
    find_float_regions,
    find_high_precision_regions,
    find_sized_by_sample,
)
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.ranges import TensorRange, scale_range
from edgekit.serialize import fill
from edgekit.target import INTEGERS, IntegerScheme, Precision, Quantization, Target

# Operators that ORT's general rules quantize only after a quantized node (QDQDirect8BitOp and others).
_FOLLOWERS = frozenset({
    "AveragePool", "Clip", "Flatten", "MaxPool", "Relu", "Reshape", "Resize", "Slice", "Split", "Squeeze", "TopK",
    "Transpose", "Unsqueeze",
})  # fmt: skip

_PRODUCTS = frozenset({"Gemm", "MatMul"})
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
# Floating-point types that no provider quantizes.
_OTHER_FLOATS = {"float16": "float16", "float64": "double precision", "bfloat16": "bfloat16"}
# Constants with fewer bytes are not worth storing in fewer bits: a choice.
_LEAST_BYTES = 1 << 14


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fixed scale and zero point that a provider demands of a tensor."""

    scale: float
    zero_point: int


class FloatNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node that computes in float, and why."""

    name: str
    op: str
    reason: str


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One choice of range method and rounding, with its signal-to-noise ratio on held-out samples.

    `equalized` says whether channels were equalized. `eight_bit_share` is the share of weight values in 8 bits if the
    others have 4 bits, else 0.
    """

    method: str
    rounding: Rounding
    sqnr_db: float
    equalized: bool = False
    eight_bit_share: float = 0.0


class NarrowConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Float constants that are stored as integers: the bits of each, and the bytes saved.

    `ratio_db` is the signal-to-noise ratio of the float model with these constants, over the held-out samples.
    """

    bits: dict[str, Literal[8, 16]] = {}
    saved_bytes: int = 0
    ratio_db: float = 0.0


class QuantPlan(IntegerScheme, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All decisions about how a model is quantized.

    `method` is the range method. `ranges` holds the range of every float activation, and of constants whose largest
    number only multiplies zeros; `grids` the scales and zero points that operators demand whatever the range.
    `factors` holds the channel factors of each equalized tensor: its producer is multiplied by them, the weights of
    its readers are divided. `axes` holds the channel axis of each weight with a scale per channel.

    `bits` holds the bits of each weight that does not have 8: 4 or 16. In a MatMul with inputs of three dimensions,
    `block` weights of 4 bits share a scale (0: no blocks). A weight of 16 bits is the sum of two weights of 8 bits, and
    its layer reads and makes tensors of 16 bits. `wide` holds the tensors that get 16 bits although other activations
    get 8, with their range.

    `float_nodes` are the nodes kept float. `judged` lists the candidates that were tried, best first. `narrow` are the
    constants of float nodes that are stored as integers.
    """

    model_sha256: str
    samples_sha256: str
    target: str
    precision: Precision
    activation_symmetric: bool
    weight_symmetric: bool
    method: str
    rounding: Rounding
    op_types: tuple[str, ...]
    ranges: dict[str, TensorRange]
    grids: dict[str, Grid]
    factors: dict[str, tuple[float, ...]] = {}
    axes: dict[str, int]
    bits: dict[str, int] = {}
    block: int = 0
    float_nodes: tuple[FloatNode, ...]
    wide: dict[str, TensorRange]
    narrow: NarrowConstants = NarrowConstants()
    judged: tuple[Candidate, ...]

    def find_weight_limit(self) -> int:
        """Returns the largest magnitude of an 8-bit weight. No property: that would be a key of the plan's file."""
        return REDUCED_LIMIT if self.reduce_range else LIMIT


def draft_plan(model: Model, graph: Graph, calibration: Calibration, target: Target, precision: Precision) -> QuantPlan:
    """Returns a plan with min-max ranges and weights rounded to nearest.

    Raises:
        UsageError: the precision is no integer precision.
        DataError: the calibration is of another model.
        ModelError: no node of the model can be quantized.
    """
    if precision not in INTEGERS:
        raise UsageError(
            f"'{precision}' is no integer precision", hint=f"{', '.join(INTEGERS)}; others need no calibration"
        )
    if calibration.model_sha256 != model.sha256:
        raise DataError(
            f"the calibration was made with another model than '{model.path.name}'", hint="calibrate this model"
        )
    rules = target.quantization.at(precision)
    # Trees, scalers and maps of ai.onnx.ml are looked up or computed in float by every provider.
    present = {node.op_type for node in graph.nodes if node.domain != ML_DOMAIN} - set(rules.float_ops)
    allowed = present - QNN_EXCLUDED_OPS if rules.scheme == "qnn" else present & set(GENERAL_OPS)
    op_types = tuple(sorted(present & set(rules.op_types) if rules.op_types else allowed))
    # Tensors that need more than 8 bits get 16 if the target supports them, and stay float otherwise.
    widens = target.widens(precision)
    high_precision = {} if rules.activation == "uint16" else find_high_precision_regions(graph)
    exact, axes = calibration.ranges["minmax"], _find_channel_axes(graph, rules)
    roomy = add_headroom(graph, exact)
    float_nodes = tuple(_float_nodes(graph, op_types, {} if widens else high_precision, exact.keys()))
    # Layers that sum over several channels get 4 bits. A depthwise convolution has only a few weights per channel, too
    # few for their errors to average out.
    mixing = (layer for layer in read_layers(graph) if layer.outputs > 1 or layer.groups == 1)
    few = [each.weight for each in mixing if each.weight in axes and each.op != "ConvTranspose"]
    plan = fill(
        QuantPlan,
        rules,
        model_sha256=model.sha256,
        samples_sha256=calibration.samples_sha256,
        target=target.name,
        precision=precision,
        method="minmax",
        rounding="nearest",
        op_types=op_types,
        ranges=exact if rules.activation != "uint16" else roomy,
        grids=_grids(graph, rules.scheme, rules.activation, op_types),
        axes=axes,
        bits=dict.fromkeys(few if rules.weight_bits != 8 else (), rules.weight_bits),
        block=rules.weight_block if rules.weight_bits == 4 else 0,
        float_nodes=float_nodes,
        wide=_wide_tensors(graph, set(high_precision), {node.name for node in float_nodes}, roomy) if widens else {},
        judged=(),
    )
    if not quantizes_any(graph, plan):
        loops = [node for node in graph.nodes if node.bodies]
        inside = [f"nodes in the body of {node.op_type} '{node.name}' stay float" for node in loops]
        reasons = inside or [reason for reason, _ in Counter(node.reason for node in float_nodes).most_common()]
        why = f": {reasons[0]}" if reasons else ""
        raise ModelError(f"no node of '{model.path.name}' can be quantized{why}", hint="build it with --precision fp32")
    return plan


def is_relievable(plan: QuantPlan) -> bool:
    """Returns True if activations have 8 bits, so that sensitive ones may get more."""
    return plan.activation != "uint16"


def find_float_constants(graph: Graph, plan: QuantPlan) -> Iterator[tuple[str, int]]:
    """Yields the large float constants that only float nodes read, with the bytes of each."""
    floats = {node.name for node in plan.float_nodes}
    for name, tensor in graph.constants.items():
        readers, size = graph.readers(name), 4 * math.prod(tensor.dims)
        if size < _LEAST_BYTES or not graph.is_float_constant(name) or name in graph.captured | graph.outputs:
            continue
        is_apart = bool(readers) and all(node.name in floats for node in readers)
        if is_apart and np.isfinite(graph.weight(name)).all():
            yield name, size


def quantizes_any(graph: Graph, plan: QuantPlan) -> bool:
    """Returns True if ORT would quantize any node: with its general rules, `_FOLLOWERS` need a quantized producer."""
    idle = {node.name for node in plan.float_nodes}
    if plan.scheme == "ort":
        idle |= {node.name for node in graph.nodes if node.op_type in _FOLLOWERS}
    return any(node.name not in idle for node in _float_computing(graph))


def _float_computing(graph: Graph) -> list[Node]:
    return [
        node for node in graph.nodes if any(graph.is_float(name) and name not in graph.constants for name in node.input)
    ]


def _float_nodes(
    graph: Graph, op_types: tuple[str, ...], high_precision: dict[str, str], measured: Collection[str]
) -> Iterator[FloatNode]:
    infinite = find_infinite_tensors(graph)
    unmeasured = {name for name in float_activations(graph) if name not in measured}
    regions = high_precision | find_float_regions(graph)
    for node in graph.nodes:
        kinds = {graph.values[name].dtype for name in (*node.input, *node.output) if name in graph.values}
        other = next((text for kind, text in _OTHER_FLOATS.items() if kind in kinds), None)
        if other is not None:
            yield FloatNode(name=node.name, op=node.op_type, reason=f"it computes in {other}")
    # A constant that is repeated a computed number of times, which may be zero, is made without floats.
    computing = {node.name for node in _float_computing(graph)}
    for node in graph.nodes:
        if node.name not in computing and unmeasured.isdisjoint(node.output):
            continue
        if node.name in regions:
            yield FloatNode(name=node.name, op=node.op_type, reason=regions[node.name])
        elif infinite & {*node.input, *node.output}:
            yield FloatNode(name=node.name, op=node.op_type, reason="its input or output holds infinity by design")
        elif node.op_type not in op_types:
            yield FloatNode(name=node.name, op=node.op_type, reason=f"no rule of this target quantizes {node.op_type}")
        elif unmeasured & {*node.input, *node.output}:
            reason = "its input or output is empty for some samples, and ONNX Runtime's integer kernels crash on that"
            yield FloatNode(name=node.name, op=node.op_type, reason=reason)
        elif node.op_type in {"Relu", "Clip"} and {node.input[0], node.output[0]} & graph.captured:
            # ORT's quantizer folds it into the node before; the subgraph would then read the value before the clamp.
            yield FloatNode(name=node.name, op=node.op_type, reason="a control-flow body reads its input or output")


def _wide_tensors(
    graph: Graph, nodes: set[str], floats: set[str], roomy: dict[str, TensorRange]
) -> dict[str, TensorRange]:
    """Returns the ranges of the float activations that `nodes` not in `floats` read or make, in graph order.

    The constants of recurrent nodes are included: ORT's QNN rules treat them as activations, with one scale for all
    gates, and the 8-bit rounding errors of the state would add up over all time steps.
    """
    members = [node for node in graph.nodes if node.name in nodes - floats]
    touched = {name for node in members for name in (*node.input, *node.output)}
    wide = {name: roomy[name] for name in float_activations(graph) if name in touched and name in roomy}
    recurrent = [node for node in graph.nodes if node.op_type in _RECURRENT and node.name not in floats]
    constants = {name for node in recurrent for name in node.input if graph.is_float_constant(name)}
    return wide | {name: read_constant_range(graph, name, roomy) for name in sorted(constants)}


def add_headroom(graph: Graph, seen: Mapping[str, TensorRange]) -> dict[str, TensorRange]:
    """Returns the ranges of tensors in 16 bits: twice as wide as the samples show, where that costs little.

    A value beyond the extremes of all samples is clipped. The bit that this headroom takes costs 6 dB of the 80 to 90
    of 16 bits, while weights of 8 bits leave 40 to 60 (docs/reference/experiments.md, "What each mechanism gives"). The
    second factor of a product of two activations has none: QNN's HTP rounds it to 8 bits (targets/qnn/NOTES.md). What
    is as large as its sample has four times the range: samples differ in size by decades, the smallest ones too.
    """
    factors = {range_source(graph, node.input[1]) for node in graph.nodes if node.op_type in _PRODUCTS}
    nodes = find_sized_by_sample(graph)
    sized = {name for node in graph.nodes if node.name in nodes for name in (*node.input, *node.output)}
    roomy = widen_ranges(graph, seen, 2) | widen_ranges(graph, {name: seen[name] for name in sized & seen.keys()}, 4)
    return {name: span if range_source(graph, name) in factors else roomy[name] for name, span in seen.items()}


def widen_ranges(graph: Graph, seen: Mapping[str, TensorRange], factor: float) -> dict[str, TensorRange]:
    """Returns ranges `factor` times as wide, except those of tensors that their operators bound."""
    folded, ranges = folded_activations(graph), dict(seen)
    for name, span in seen.items():
        source = range_source(graph, name)
        maker = graph.producers.get(folded.get(source, source))
        # A Clip that is folded into the node before it is computed by the range alone.
        is_bounded = maker is not None and (maker.op_type == "Clip" or None not in known_bounds(graph, maker))
        if source not in graph.constants and not is_bounded:
            ranges[name] = scale_range(span, factor)
    return ranges


def cut_tails(plan: QuantPlan, calibration: Calibration) -> QuantPlan:
    """Returns a plan that loses over the samples of the calibration what the original plan loses over new ones.

    New samples reach beyond what a calibration saw, by about what its largest values tell of their tail. Each end of a
    range is reduced until the known samples lose as much (`Calibration.unseen_shares`): a cross-validation with one
    model, whose steps are a little finer than in the original plan. An end stays as it is where it has so much room
    that it would, reduced, still hold all known values.
    """
    exact = calibration.ranges["minmax"]

    def reduce(end: float, whole: float, share: float) -> float:
        filled = whole / end if end else 0.0
        # A range method may clip more than the extreme sample does.
        return end * min(1.0, share * max(1.0, filled)) if filled > share else end

    def cut(name: str, span: TensorRange) -> TensorRange:
        low, high = calibration.unseen_shares.get(name, (1.0, 1.0))
        whole = exact.get(name, span)
        return TensorRange(low=reduce(span.low, whole.low, low), high=reduce(span.high, whole.high, high))

    ranges, wide = ({name: cut(name, span) for name, span in own.items()} for own in (plan.ranges, plan.wide))
    return msgspec.structs.replace(plan, ranges=ranges, wide=wide)


def read_constant_range(graph: Graph, name: str, known: Mapping[str, TensorRange]) -> TensorRange:
    """Returns the range of a constant: the `known` one if its largest numbers only multiply zeros, else that of all."""
    if name in known:
        return known[name]
    values = graph.weight(name)
    return TensorRange(low=float(values.min()), high=float(values.max()))


def _grids(graph: Graph, scheme: str, activation: str, op_types: tuple[str, ...]) -> dict[str, Grid]:
    """Returns the scale 1/256 for Softmax and Sigmoid outputs: NNAPI demands it exactly, XNNPACK within 1e-4."""
    if scheme == "qnn" or activation == "uint16":
        return {}
    grid = Grid(scale=1 / 256, zero_point=-128 if activation == "int8" else 0)
    return {
        node.output[0]: grid
        for node in graph.nodes
        if node.op_type in {"Softmax", "Sigmoid"} and node.op_type in op_types and graph.is_float(node.output[0])
    }


def _find_channel_axes(graph: Graph, rules: Quantization) -> dict[str, int]:
    """Returns the output-channel axis of each constant weight that can have a scale for each channel.

    Groups of a ConvTranspose share an axis of the weight, so the int32 bias could not follow its scales. A Gemm whose
    bias does not have one value per column, on which ONNX Runtime's quantizer fails, was split (`split_gemm`).
    """
    axes: dict[str, int] = {}
    for node in graph.nodes if rules.weight_symmetric else ():
        if node.op_type not in rules.per_channel_ops or not graph.is_float_constant(node.input[1]):
            continue
        dims, attributes = graph.constants[node.input[1]].dims, node.attributes
        axis = {
            "Conv": 0,
            "ConvTranspose": 1 if attributes.get("group", 1) == 1 else None,
            "Gemm": 0 if attributes.get("transB", 0) else 1,
            "MatMul": 1 if len(dims) == 2 else None,
        }.get(node.op_type)
        # If a single number is multiplied by a per-channel weight, the HTP never finishes the graph
        # (targets/qnn/NOTES.md).
        is_single = math.prod(graph.static_shape(node.input[0]) or (0,)) == 1
        if axis is not None and 0 not in dims and not is_single and graph.readers(node.input[1]) == (node,):
            axes[node.input[1]] = axis
    return axes
