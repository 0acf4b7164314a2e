"""The guard that PyTorch's exporter writes around each Softmax of attention: 0 in place of NaN.

A row of a Softmax is NaN where all its scores are minus infinity, and nowhere else as long as scores are finite. So the
guard does nothing unless a mask can hide a whole row. No phone's accelerator has IsNaN.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from edgekit.graph.finite import add_up_huge
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import made_by
from edgekit.graph.rewrite import replace_nodes
from edgekit.model.tensors import Array

FIX_ID = "idle-nan-guard"


def drop_nan_guards(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Where(IsNaN(p), 0, p) of a Softmax that cannot be NaN as that Softmax, in place.

    Returns the names of the Where nodes. Products of finite numbers are taken to be finite.
    """
    return replace_nodes(graph, opset, {"Where"}, _unguard)


def find_guarded(graph: Graph, node: Node) -> Node | None:
    """Returns the Softmax whose NaN a Where replaces by 0, if nothing else reads it."""
    asked, softmax = made_by(graph, node.input[0], "IsNaN"), made_by(graph, node.input[2], "Softmax")
    if asked is None or softmax is None or asked.input[0] != softmax.output[0] or graph.number(node.input[1]) != 0:
        return None
    # A zero of more axes would give the result more axes.
    if len(graph.value(node.input[1]).shape or ()) > 1 or softmax.output[0] in graph.outputs | graph.captured:
        return None
    return softmax if set(graph.readers(softmax.output[0])) == {asked, node} else None


def _unguard(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    softmax = find_guarded(graph, node)
    if softmax is None or not _has_finite_rows(graph, softmax):
        return None
    plain = onnx.NodeProto()
    plain.CopyFrom(softmax.proto)
    plain.output[0] = node.output[0]
    return (plain,)


def _has_finite_rows(graph: Graph, softmax: Node) -> bool:
    """Returns True if at least one score of each row is finite, and none is infinity or NaN."""
    scores, axis = softmax.input[0], softmax.integer("axis", -1)
    if add_up_huge(graph, scores) in {0, 1}:
        return True
    added = made_by(graph, scores, "Add")
    for score, mask in (added.input, added.input[::-1]) if added is not None else ():
        array = graph.inline(mask)
        if array is not None and array.ndim == len(graph.value(scores).shape or ()) and _leaves_some(array, axis):
            return add_up_huge(graph, score) == 0
    return False


def _leaves_some(mask: Array, axis: int) -> bool:
    """Returns True if a mask of 0 and minus infinity hides no whole row."""
    hides = np.isneginf(mask)
    return bool(np.isfinite(mask[~hides]).all() and not hides.all(axis=axis).any())
