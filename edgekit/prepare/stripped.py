"""Models without their large weights and trees, for graph optimization.

Tools copy the whole model, so large weights are replaced by inputs while they run, or not read at all if nothing needs
their values; of large tree ensembles, one leaf is left. Operators without a kernel in ONNX Runtime's CPU provider are
replaced by others while it optimizes.
"""

import math

import onnx
from onnx import helper

from edgekit._ort import Level, SessionSettings, external_config, makes_session
from edgekit.graph.graph import Node, view_part
from edgekit.model.external import LISTS_OF_TREES, skim_model
from edgekit.model.model import Model, iterate_nodes, iterate_tensors, refill


def put_weights(graph: onnx.GraphProto, weights: list[onnx.TensorProto]) -> None:
    """Replaces inputs by the initializers of their names, in place."""
    names = {tensor.name for tensor in weights}
    refill(graph.input, [value for value in graph.input if value.name not in names])
    graph.initializer.extend(weights)


_LEAST_ELEMENTS = 1 << 15
_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_FOLDED_INTO = frozenset({"BatchNormalization", "Add", "Mul", "Sub", "Div", "Pad"})


def skim_weights(model: Model) -> onnx.ModelProto | None:
    """Returns a model without its large weights, or None if a rewrite may need the values of one.

    A large tree ensemble has one leaf; None too if ONNX Runtime refuses the model with its trees.
    """
    proto = skim_model(model.path)
    cut = [node for node in iterate_nodes(proto.graph) if any(map(_is_cut, node.attribute))]
    if cut and not (all(node.op_type in _ENSEMBLES for node in cut) and _loads(model)):
        return None
    kinds = onnx.AttributeProto
    for index, node in enumerate(cut):
        # One leaf, with a value of its own: nodes with different values are not merged.
        leaf = {kinds.INTS: [0], kinds.FLOATS: [float(index)], kinds.STRINGS: ["LEAF"]}
        for at, old in enumerate(node.attribute):
            if old.name.startswith(LISTS_OF_TREES):
                one = leaf.get(old.type) or helper.make_tensor(old.t.name, old.t.data_type, [1], [float(index)])
                node.attribute[at].CopyFrom(helper.make_attribute(old.name, one))
    absent = {tensor.name for tensor in proto.graph.initializer if is_absent(tensor)}
    is_inner = sum(map(is_absent, iterate_tensors(proto.graph))) > len(absent)
    return proto if not is_inner and absent <= set(_find_weights(proto.graph)) else None


# Types and shapes of their outputs do not depend on the trees.
_ENSEMBLES = frozenset({"TreeEnsembleClassifier", "TreeEnsembleRegressor"})


def _is_cut(attribute: onnx.AttributeProto) -> bool:
    has_entries = attribute.ints or attribute.floats or attribute.strings or not is_absent(attribute.t)
    return attribute.name.startswith(LISTS_OF_TREES) and not has_entries


# By digest: loading large trees takes seconds, and several sketches are made of a model.
_loaded: dict[str, bool] = {}


def _loads(model: Model) -> bool:
    """Returns True if ONNX Runtime loads a model; only then does it judge the trees."""
    if model.sha256 not in _loaded:
        config = external_config(model.path.parent)
        settings = SessionSettings(level=Level.DISABLED, config=config, libraries=model.custom_ops)
        # Bytes, because `CpuSession` would parse a large file to map its weights.
        _loaded[model.sha256] = makes_session(model.path.read_bytes(), settings)
    return _loaded[model.sha256]


def strip_weights(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Replaces large weights by inputs, in place, and returns them as tensors without data."""
    graph = proto.graph
    found = _find_weights(graph).values()
    shells = [onnx.TensorProto(name=each.name, data_type=each.data_type, dims=each.dims) for each in found]
    names = {shell.name for shell in shells}
    refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in names])
    graph.input.extend(helper.make_tensor_value_info(shell.name, shell.data_type, shell.dims) for shell in shells)
    return shells


def _find_weights(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Returns by name the large weights whose values no rewrite reads."""
    view = view_part(graph)
    hidden = view.outputs | view.captured

    def only_multiplies(node: Node, name: str) -> bool:
        # A rewrite may read the values of a first operand or a bias.
        if node.op_type not in _WEIGHTED or node.domain or node.input.index(name) != 1 or name in node.input[2:]:
            return False
        convolves = node.op_type in {"Conv", "ConvTranspose"}
        return not convolves or all(reader.op_type not in _FOLDED_INTO for reader in view.readers(node.output[0]))

    return {
        name: tensor
        for name, tensor in ((tensor.name, tensor) for tensor in graph.initializer)
        if math.prod(tensor.dims) >= _LEAST_ELEMENTS and name not in hidden and view.readers(name)
        if all(only_multiplies(node, name) for node in view.readers(name))
    }


def is_absent(tensor: onnx.TensorProto) -> bool:
    """Returns True if a tensor has no data, or external data."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return True
    fields = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
    return math.prod(tensor.dims) > 0 and not any(getattr(tensor, field) for field in fields)


# Elementwise operators, with the alpha of their substitutes: those of different operators must not be merged.
_ALPHAS = {"HardSwish": 2.0, "Mish": 3.0, "Swish": 4.0}
# The substitute has a kernel, keeps type and shape, and no basic optimizer changes it.
_STAND_IN = "Celu"


def replace_unsupported(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Replaces each node of `_ALPHAS` by its substitute, in place, and returns the originals by their unique names."""
    replaced: dict[str, onnx.NodeProto] = {}
    for node in iterate_nodes(graph):
        if node.op_type in _ALPHAS and not node.domain:
            replaced[node.name] = onnx.NodeProto()
            replaced[node.name].CopyFrom(node)
            refill(node.attribute, [helper.make_attribute("alpha", _ALPHAS[node.op_type])])
            node.op_type = _STAND_IN
    return replaced


def restore_nodes(graph: onnx.GraphProto, replaced: dict[str, onnx.NodeProto]) -> bool:
    """Restores the replaced nodes, in place; returns False if a substitute was folded or merged."""
    restored = 0
    for node in iterate_nodes(graph):
        if node.op_type == _STAND_IN and node.name in replaced:
            node.op_type = replaced[node.name].op_type
            refill(node.attribute, replaced[node.name].attribute)
            restored += 1
    return restored == len(replaced)
