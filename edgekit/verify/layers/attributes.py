"""Operators whose attributes or small constants are not the float model's: put into it, do they change a result?"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.errors import RuntimeRefusal
from edgekit.model.scaling import SUFFIX
from edgekit.model.tensors import Array, Tensors
from edgekit.verify.layers.overflows import settle_infinities
from edgekit.verify.layers.weights import Initializers, pair_nodes
from edgekit.verify.matching.match import MatchedTensor
from edgekit.verify.matching.trace import adapt_sample, open_traced
from edgekit.verify.metrics import tensor_metrics as metrics

# Results closer than this are the same: nobody could notice the difference, and half precision cannot hold it.
_SAME_DB = 60.0
# Larger constants are weights, which are compared as such, in steps of their grid.
_MOST_ELEMENTS = 1 << 16
# Beyond it a constant of a mask is as good as minus infinity, and each exporter has its own.
_MASK = 1e4
# Rounding to half precision moves a constant by 2^-11 of itself at most; four times that is granted.
_ROUNDED = 2.0**-9
# The cosine of a weight and that weight quantized is near one, that of the same numbers in another order near 0.
_ALIKE = 0.3
_SHOWN = 60


class _Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A node of model B that reads the tensors of model A, its constants, A's outputs, the difference in words."""

    node: onnx.NodeProto
    constants: dict[str, Array]
    wanted: tuple[str, ...]
    words: str


class _Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two nodes that compute one tensor, the models they stand in, B's tensors in A, and the inputs of both."""

    nodes: tuple[onnx.NodeProto, onnx.NodeProto]
    floats: Initializers
    stored: Initializers
    opsets: tuple[Mapping[str, int], Mapping[str, int]]
    in_a: Mapping[str, MatchedTensor]
    inputs: frozenset[str]


def find_altered(
    floats: Initializers, stored: Initializers, matched: Sequence[MatchedTensor], sample: Tensors
) -> dict[str, str]:
    """Returns, by tensor, how the operator behind it differs from model A's, in words.

    Two nodes of one operator and version are compared by their attributes, defaults filled in, by what they read, and
    by their constants that are not quantized. Where they differ, B's node runs in float on A's tensors: only a
    difference that changes the result counts, so -1 for the last axis is none, nor is a Pad that became an attribute,
    and an epsilon is one, however small beside the steps of a grid. Float constants of nodes that also read quantized
    ones do not count, because a quantizer corrects them, nor do masks, and those of tensors that were scaled.
    """
    a, b = floats.model, stored.model
    in_a, opsets = {item.raw_b: item for item in matched}, (a.opsets, b.opsets)
    inputs = {spec.name for spec in a.inputs} & {spec.name for spec in b.inputs}
    differences: dict[str, _Difference] = {}
    for item in matched:
        nodes = pair_nodes(floats, stored, item)
        if nodes is not None:
            protos = nodes[0].proto, nodes[1].proto
            difference = _plan(
                _Pair(nodes=protos, floats=floats, stored=stored, opsets=opsets, in_a=in_a, inputs=frozenset(inputs))
            )
            differences |= {} if difference is None else {item.tensor: difference}
    if not differences:
        return {}
    given = adapt_sample(sample, a)
    names = {
        name for difference in differences.values() for name in (*difference.node.input, *difference.wanted) if name
    }
    constants = {name for difference in differences.values() for name in difference.constants}
    known = {**given, **open_traced(a, sorted(names - constants)).run(given)}
    return {
        tensor: difference.words
        for tensor, difference in differences.items()
        if _changes(difference, floats.proto, known)
    }


def fill_attributes(node: onnx.NodeProto, opsets: Mapping[str, int]) -> dict[str, Any]:
    """Returns the values of a node's attributes, with the defaults of its operator for those that it lacks."""
    filled: dict[str, Any] = {}
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain or "ai.onnx", 1), node.domain)
        defaults = [attribute.default_value for attribute in schema.attributes.values()]
    except onnx.defs.SchemaError:
        defaults = []
    for attribute in (*(default for default in defaults if default.name), *node.attribute):
        filled[attribute.name] = helper.get_attribute_value(attribute)
    return filled


def list_changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Returns the names of the attributes that are not the same; graphs are not looked at."""
    names = sorted(first.keys() | second.keys())
    pairs = [(name, first.get(name), second.get(name)) for name in names]
    return [name for name, one, other in pairs if not isinstance(one, onnx.GraphProto) and _plain(one) != _plain(other)]


def describe_changed(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Returns in words how an attribute differs from the float model's."""
    mine, theirs = (str(_plain(values[name]))[:_SHOWN] if name in values else "not set" for values in (second, first))
    return f"its attribute '{name}' is {mine}, in the float model {theirs}"


def is_same_version(node: onnx.NodeProto, first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    """Returns True if an operator means the same in both opsets."""
    domain = node.domain or "ai.onnx"
    if first.get(domain) == second.get(domain):
        return True
    try:
        versions = {
            onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), node.domain).since_version
            for opsets in (first, second)
        }
    except onnx.defs.SchemaError:
        return False
    return len(versions) == 1


def is_rounded(wanted: Array, found: Array) -> bool:
    """Returns True if constants are the same, or the same in half precision; what a mask becomes does not count."""
    if wanted.shape != found.shape or wanted.dtype.kind != found.dtype.kind:
        return False
    if wanted.dtype.kind != "f":
        return bool(np.array_equal(wanted, found))
    exact, held = wanted.astype(np.float64), found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.abs(held - exact) <= _ROUNDED * np.abs(exact) + float(np.finfo(np.float16).smallest_normal)
    return bool((near | ~(np.abs(exact) <= _MASK)).all())


def _plan(pair: _Pair) -> _Difference | None:
    """Returns the node of B as it would stand in A, None where nothing differs or it cannot stand there."""
    mine, theirs = pair.nodes
    if mine.domain != theirs.domain or not is_same_version(mine, *pair.opsets):
        return None
    first, second = (fill_attributes(node, opsets) for node, opsets in zip(pair.nodes, pair.opsets, strict=True))
    if any(isinstance(value, onnx.GraphProto) for value in first.values()):
        return None
    words = [describe_changed(name, first, second) for name in list_changed(first, second)]
    node = onnx.NodeProto(op_type=theirs.op_type, domain=theirs.domain, name=theirs.name, attribute=theirs.attribute)
    node.output.extend(f"edgekit.tried:{name}" if name else "" for name in mine.output)
    constants: dict[str, Array] = {}
    for place in range(len(theirs.input)):
        name, value, difference = _read_input(pair, place)
        if name is None:
            return None
        node.input.append(name)
        constants |= {} if value is None else {name: value}
        words += [difference] if difference else []
    if not words or not all(_is_alike(pair, place) for place in range(len(theirs.input))):
        return None
    return _Difference(node=node, constants=constants, wanted=tuple(mine.output), words=", ".join(words))


def _is_alike(pair: _Pair, place: int) -> bool:
    """Returns False for a weight that is stored in another order in B, so that A's cannot stand for it."""
    mine, theirs = pair.nodes
    if place >= len(mine.input) or mine.input[place] not in pair.floats.tensors:
        return True
    wanted, found = pair.floats.read(mine.input[place]), pair.stored.read_weight(theirs.input[place])
    if found is None or wanted.size < 2 or wanted.dtype.kind != "f":
        return True
    if wanted.shape != found.shape:
        return max(wanted.size, found.size) <= _MOST_ELEMENTS and theirs.input[place] in pair.stored.tensors
    flat = [value.astype(np.float64).reshape(-1) for value in (wanted, found)]
    sizes = [float(np.sqrt(np.einsum("i,i->", side, side))) for side in flat]
    return float(np.einsum("i,i->", *flat)) >= _ALIKE * sizes[0] * sizes[1]


def _read_input(pair: _Pair, place: int) -> tuple[str | None, Array | None, str]:
    """Returns what B's node reads at a place by its name in A, the value of a constant, and a difference in words.

    The name is None where A has no such tensor.
    """
    mine, theirs = pair.nodes
    own = mine.input[place] if place < len(mine.input) else ""
    name = theirs.input[place]
    if not name:
        return "", None, f"it does not read '{own}'" if own else ""
    source, wanted = pair.stored.find_source(name), pair.floats.find_source(own)
    if source in pair.stored.tensors:
        if wanted not in pair.floats.tensors:
            return None, None, ""
        value = _read_changed(pair, wanted, source) if wanted == own and source == name else None
        if value is not None:
            return f"edgekit.tried:{place}", value, f"its constant '{own}' is not the float model's"
        return own, pair.floats.read(own) if wanted == own else None, ""
    match = pair.in_a.get(source)
    tensor, read = (source, source) if source in pair.inputs else (match.tensor, match.in_a) if match else ("", None)
    return (own, None, "") if tensor == wanted else (read, None, f"it reads '{read}', in the float model '{own}'")


def _read_changed(pair: _Pair, wanted: str, found: str) -> Array | None:
    """Returns a constant of B that is not A's beyond rounding, None where it is, or where that is no fault."""
    theirs = pair.nodes[1]
    is_corrected = any(SUFFIX in name for name in (*theirs.input, *theirs.output)) or any(
        name in pair.stored.rounded and pair.stored.find_source(name) in pair.stored.tensors for name in theirs.input
    )
    sizes = (np.prod(pair.floats.tensors[wanted].dims), np.prod(pair.stored.tensors[found].dims))
    if max(sizes) > _MOST_ELEMENTS:
        return None
    exact, held = pair.floats.read(wanted), pair.stored.read(found)
    if exact.dtype.kind != held.dtype.kind or is_rounded(exact, held) or (exact.dtype.kind == "f" and is_corrected):
        return None
    return held.astype(exact.dtype)


def _changes(difference: _Difference, proto: onnx.ModelProto, known: Tensors) -> bool:
    """Returns True if B's node makes of A's tensors something else than A's node does."""
    node = difference.node
    dynamic = sorted({name for name in node.input if name and name not in difference.constants})
    if not dynamic:
        return False
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(known[name].dtype), None)
        for name in dynamic
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    constants = [numpy_helper.from_array(value, name) for name, value in difference.constants.items()]
    graph = helper.make_graph([node], "difference", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    try:
        settings = SessionSettings(level=Level.DISABLED, threads=1)
        session = CpuSession(model.SerializeToString(), settings, subject=node.name)
        found = session.run({name: known[name] for name in dynamic})
    except RuntimeRefusal:
        return False
    return any(
        not _is_same(known[name], found[given])
        for name, given in zip(difference.wanted, node.output, strict=True)
        if name
    )


def _is_same(wanted: Array, found: Array) -> bool:
    if wanted.shape != found.shape or wanted.dtype.kind != "f" or found.dtype.kind != "f":
        return bool(np.array_equal(wanted, found))
    errors = metrics.sum_errors(*settle_infinities(wanted, found))
    return not wanted.size or (not errors.non_finite and metrics.sqnr_db([errors]) >= _SAME_DB)


def _plain(value: Any) -> Any:
    """Returns the value of an attribute in a form that compares."""
    return value.SerializeToString(deterministic=True) if isinstance(value, onnx.TensorProto) else value
