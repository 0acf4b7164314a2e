"""State that a model feeds back to itself: finds the tensors that hold it, and shortens their ranges."""

from collections.abc import Iterable, Mapping

import msgspec

from edgekit.graph.graph import Graph, Node
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.ranges import TensorRange

# Operators that pass state on without computing with it.
_PASSING = frozenset(
    {"Concat", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)


def find_state(graph: Graph, feeds: Mapping[str, str]) -> frozenset[str]:
    """Returns the tensors that hold state: fed back, or with the values of such a tensor moved or gated."""
    found = set[str]()
    left = [name for feed in feeds.items() for name in feed]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        maker = graph.producers.get(name)
        left += [each for node in graph.readers(name) if _passes(graph, node) for each in node.output]
        left += maker.input if maker is not None and maker.op_type in _PASSING else ()
    return frozenset(found)


def cut_ranges(plan: QuantPlan, names: Iterable[str], limit: float) -> QuantPlan:
    """Returns a plan in which the ranges of some tensors end at `limit` on both sides of zero."""
    own = frozenset(names)

    def cut(span: TensorRange) -> TensorRange:
        low, high = (min(max(end, -limit), limit) for end in (span.low, span.high))
        return TensorRange(low=low, high=high)

    ranges, wide = (
        {name: cut(span) if name in own else span for name, span in spans.items()} for spans in (plan.ranges, plan.wide)
    )
    return msgspec.structs.replace(plan, ranges=ranges, wide=wide)


def _passes(graph: Graph, node: Node) -> bool:
    """Returns True if a node moves values, or is a product with a gate, which lies between 0 and 1."""
    makers = [graph.producers.get(name) for name in node.input]
    is_gated = node.op_type == "Mul" and any(maker is not None and maker.op_type == "Sigmoid" for maker in makers)
    return node.op_type in _PASSING or is_gated
