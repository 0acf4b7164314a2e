"""Finding the node inside a branch or loop that is not the float model's: subgraphs are compared node by node."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import onnx
from onnx import numpy_helper

from edgekit.graph.constants import list_constants
from edgekit.model.model import order_nodes
from edgekit.model.tensors import Array
from edgekit.verify.layers.attributes import (
    describe_changed,
    fill_attributes,
    is_rounded,
    is_same_version,
    list_changed,
)
from edgekit.verify.layers.weights import Initializers, pair_nodes
from edgekit.verify.matching.match import MatchedTensor
from edgekit.verify.matching.order import DEQUANTIZE, QUANTIZE

# Operators that two forms of one subgraph may have more or fewer of.
_PASSED = frozenset({"Cast", "Constant", "Identity", QUANTIZE, DEQUANTIZE})
_EITHER_WAY = frozenset({"Add", "Mul", "Max", "Min", "Sum", "Mean", "And", "Or", "Xor", "Equal"})

_Opsets = tuple[Mapping[str, int], Mapping[str, int]]
_Constants = tuple[Mapping[str, onnx.TensorProto], Mapping[str, onnx.TensorProto]]


class InnerNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node inside a subgraph that is not the float model's, and how."""

    name: str
    op: str
    words: str


def find_inner_differences(
    floats: Initializers, stored: Initializers, matched: Sequence[MatchedTensor]
) -> dict[str, InnerNode]:
    """Returns, by the tensor of a control-flow node, the first node in its subgraphs that is not model A's.

    Subgraphs are compared where they hold the same operators in the same order: attributes, with defaults filled in,
    and constants, beyond rounding to half precision.
    """
    opsets = floats.model.opsets, stored.model.opsets
    found: dict[str, InnerNode] = {}
    for item in matched:
        pair = pair_nodes(floats, stored, item)
        if pair is not None and pair[0].bodies:
            inner = next(_compare_nodes(pair[0].proto, pair[1].proto, (floats.tensors, stored.tensors), opsets), None)
            found |= {} if inner is None else {item.tensor: inner}
    return found


def _compare_nodes(
    mine: onnx.NodeProto, theirs: onnx.NodeProto, constants: _Constants, opsets: _Opsets
) -> Iterator[InnerNode]:
    first, second = ({item.name: item.g for item in node.attribute if item.HasField("g")} for node in (mine, theirs))
    for name in sorted(first.keys() & second.keys()):
        yield from _compare_subgraphs(first[name], second[name], constants, opsets)


def _compare_subgraphs(
    first: onnx.GraphProto, second: onnx.GraphProto, outer: _Constants, opsets: _Opsets
) -> Iterator[InnerNode]:
    constants = ({**outer[0], **list_constants(first)}, {**outer[1], **list_constants(second)})
    nodes = [[node for node in order_nodes(graph) if node.op_type not in _PASSED] for graph in (first, second)]
    known = {node.name: node.op_type for node in first.node if node.name}
    for node in second.node:
        if known.get(node.name, node.op_type) != node.op_type:
            words = f"it is a {node.op_type}, in the float model a {known[node.name]}"
            yield InnerNode(name=node.name, op=node.op_type, words=words)
    if [node.op_type for node in nodes[0]] != [node.op_type for node in nodes[1]]:
        return
    for mine, theirs in zip(*nodes, strict=True):
        words = _describe(mine, theirs, constants, opsets)
        if words:
            yield InnerNode(name=theirs.name or theirs.output[0], op=theirs.op_type, words=words)
        yield from _compare_nodes(mine, theirs, constants, opsets)


def _describe(mine: onnx.NodeProto, theirs: onnx.NodeProto, constants: _Constants, opsets: _Opsets) -> str:
    if is_same_version(mine, *opsets):
        values = fill_attributes(mine, opsets[0]), fill_attributes(theirs, opsets[1])
        changed = list_changed(*values)
        if changed:
            return describe_changed(changed[0], *values)
    if mine.input != theirs.input and sorted(mine.input) == sorted(theirs.input) and mine.op_type not in _EITHER_WAY:
        return f"it reads {list(theirs.input)}, in the float model {list(mine.input)}"
    for wanted, found in zip(mine.input, theirs.input, strict=False):
        exact, held = _read(constants[0], wanted), _read(constants[1], found)
        if exact is not None and held is not None and not is_rounded(exact, held):
            return f"its constant '{wanted}' is not the float model's"
    return ""


def _read(constants: Mapping[str, onnx.TensorProto], name: str) -> Array | None:
    """Returns a constant that lies in the model file itself."""
    tensor = constants.get(name)
    return None if tensor is None or tensor.external_data else numpy_helper.to_array(tensor)
