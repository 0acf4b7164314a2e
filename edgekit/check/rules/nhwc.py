"""What ONNX Runtime's layout transformation to NHWC changes: Transposes at outputs, and axes that were the last."""

from collections.abc import Iterator

from edgekit.check.rules.rules import BaseRule, Subject
from edgekit.graph.nhwc import find_orders


class LeftTransposed(BaseRule, frozen=True, kw_only=True, tag="left_transposed"):
    """The provider takes no node whose output is one of the graph, of these types, and gets a Transpose for NHWC.

    Quantized outputs are excepted.
    """

    dtypes: tuple[str, ...]

    def _reasons(self, subject: Subject) -> Iterator[str]:
        graph = subject.graph
        found = [
            (what, operand)
            for what, operand in subject.operands((), "outputs")
            if operand.name in graph.outputs and operand.dtype in self.dtypes and not operand.is_quantized
        ]
        orders = find_orders(graph) if found else {}
        for what, operand in found:
            if operand.name in orders:
                yield f"{what} is {operand.dtype}: the change to NHWC leaves a Transpose of it where the graph ends"


class LastInNhwc(BaseRule, frozen=True, kw_only=True, tag="last_in_nhwc"):
    """The axis must be the last one also where the change to NHWC stores the input with its axes permuted.

    `layers` are the operators that the provider takes and wants with channels last.
    """

    default: int
    layers: tuple[str, ...]

    def _reasons(self, subject: Subject) -> Iterator[str]:
        node, shape = subject.unit.node, subject.shape(0)
        order = find_orders(subject.graph, self.layers).get(node.input[0]) if shape and len(shape) > 2 else None
        if order is not None and shape is not None:
            axis = node.integer("axis", self.default) % len(shape)
            if order[axis] != len(shape) - 1:
                yield f"the change to NHWC behind a layer makes its axis {axis} axis {order[axis]}"
