"""ONNX Runtime's optimizers that some quantized graphs must not meet: one rounds float weights, one turns a Resize."""

from collections.abc import Mapping

import msgspec
import onnx

from edgekit.graph.graph import Graph, Node, view_part
from edgekit.target import Target

OPTIMIZER = "WeightBiasQuantization"
LAYOUT = "NhwcTransformer"
DISABLED = "optimization.disable_specified_optimizers"
KEEP_FLOAT_WEIGHTS: Mapping[str, str] = {DISABLED: OPTIMIZER}
"""The session entry that switches this off; without it the results are wrong and nothing says so."""

_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm"})
_PASSED = frozenset({"Relu", "Clip"})


def find_float_weights(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Returns the names of the nodes whose float weights ONNX Runtime would round, in graph order.

    Those are layers that read a DQ of one scale, have a constant float weight, and feed a Q alone, directly or through
    Relu and Clip (core/optimizer/qdq_transformer/weight_bias_quantization.cc).
    """
    view = view_part(graph)

    def feeds_quantizer(node: Node) -> bool:
        while len(node.output) == 1 and node.output[0] not in view.outputs:
            following = view.consumers.get(node.output[0], ())
            if len(following) != 1:
                return False
            node = following[0]
            if node.op_type not in _PASSED:
                return node.op_type == "QuantizeLinear"
        return False

    return tuple(
        node.proto.name
        for node in view.nodes
        if node.op_type in _WEIGHTED
        and view.is_float_constant(node.input[1])
        and _has_one_scale(view.producers.get(node.input[0]), view)
        and feeds_quantizer(node)
    )


def find_cubics(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Returns the names of the cubic Resize nodes of a quantized graph, in graph order.

    Behind an integer convolution, which it has in NHWC, ONNX Runtime moves the Transpose past them; their kernel then
    refuses to make a map smaller (`ScalesValidation` of core/providers/cpu/tensor/upsamplebase.h).
    """
    if not any(node.op_type == "QuantizeLinear" for node in graph.node):
        return ()
    resizes = (node for node in graph.node if node.op_type == "Resize")
    return tuple(node.name for node in resizes if any(item.s == b"cubic" for item in node.attribute))


def find_harmful(graph: onnx.GraphProto) -> dict[str, tuple[str, ...]]:
    """Returns the optimizers that a graph must not meet, and the nodes because of which."""
    found = {OPTIMIZER: find_float_weights(graph), LAYOUT: find_cubics(graph)}
    return {name: nodes for name, nodes in found.items() if nodes}


_REASONS = {
    OPTIMIZER: "{} layers keep float weights between Q and DQ nodes ({}): ONNX Runtime would round them to 8 bits per"
    " tensor",
    LAYOUT: "{} cubic Resize nodes ({}) stand between integers: ONNX Runtime would give them NHWC, which they refuse",
}


def disable_harmful(target: Target, graph: onnx.GraphProto) -> tuple[Target, tuple[str, ...]]:
    """Returns a target whose session does without the optimizers that harm a graph, and what to tell of it."""
    found = find_harmful(graph)
    if not found:
        return target, ()
    off = target.session.config.get(DISABLED, "").split(";")
    value = ";".join([*(name for name in off if name and name not in found), *found])
    session = msgspec.structs.replace(target.session, config={**target.session.config, DISABLED: value})
    told = (
        _REASONS[name].format(len(nodes), ", ".join(f"'{each}'" for each in nodes[:3]))
        + f", so the session needs {DISABLED} = {value}"
        for name, nodes in found.items()
    )
    return msgspec.structs.replace(target, session=session), tuple(told)


def _has_one_scale(node: Node | None, graph: Graph) -> bool:
    if node is None or node.op_type != "DequantizeLinear":
        return False
    scale = graph.constants.get(node.input[1])
    # A scale that is computed may be one number: it is taken for one, since rounding in silence is worse than a key too
    # many.
    return scale is None or list(scale.dims) in ([], [1])
