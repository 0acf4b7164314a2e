"""Reads the float graph that is calibrated and quantized, and finds properties of its tensors.

Reading renames tensors whose names quantization would use for others, splits a Gemm with a computed bias into MatMul
and Add, and raises attention masks, whose large negative numbers would widen ranges, to -10,000.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.errors import ModelError
from edgekit.graph.constants import MOVES, RESHAPES, lift_constants, read_array, read_dequantized
from edgekit.graph.graph import Graph, Node, view_file, view_model, view_part
from edgekit.graph.inference import infer_model
from edgekit.graph.rewrite import replace_nodes
from edgekit.model import model as models
from edgekit.model.external import MAX_DATA_BYTES, load_external, move_weight
from edgekit.prepare.clean import drop_initializer_inputs
from edgekit.prepare.rewrites.products import split_gemm

# What ONNX Runtime's quantizer appends to the name of a tensor (onnxruntime/quantization/quant_utils.py). If a name is
# taken, it adds no tensor (ONNXModel.add_initializer), so a model's own `x_scale` would be read as the scale of `x`.
_ORT_SUFFIX = re.compile(r"_(scale|zero_point|quantized|convert|QuantizeLinear|DequantizeLinear)(_|$)")
_OURS = "edgekit."  # the prefix of tensors that calibration adds


def avoid_name_collisions(proto: onnx.ModelProto, subject: str) -> None:
    """Renames tensors, in place, whose names quantization would use for others: `x_scale` if there is an `x`.

    Inputs and outputs keep their names: if `x_scale` is one, `x` is renamed.

    Raises:
        ModelError: both are inputs or outputs.
    """
    names = models.list_names(proto.graph)
    kept = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    renamed: dict[str, str] = {}
    for name in sorted(names):
        stems = (name[: match.start()] for match in _ORT_SUFFIX.finditer(name))
        stem = next((each for each in stems if each in names), None)
        if stem is None and not name.startswith(_OURS):
            continue
        other = next((each for each in (name, stem) if each is not None and each not in kept), None)
        if other is None:
            words = f"quantizing '{subject}' would give the quantized '{stem or name}' the name of tensor '{name}'"
            raise ModelError(words, hint=f"rename it: edgekit prepare MODEL --rename {name}=NEW --out FILE")
        renamed.setdefault(other, _free_name(other, names))
    if renamed:
        models.rename_tensors(proto.graph, renamed)


def _free_name(name: str, names: set[str]) -> str:
    new = f"own.{name}" if name.startswith(_OURS) else f"{name}.own"
    while new in names:
        new += ".own"
    return new


MINIMUM_OPSET = 13
"""From opset 13 on Q and DQ nodes have an axis, which weights with a scale per channel need."""

MASK_VALUE = -1e4
"""The value that masks are raised to: a Softmax turns it into 0, and float16 (down to -65504) can represent it."""

# exp(-12) is 6e-6: compared with 1/256, a step of 8 bits, even a thousand such scores are negligible. A bias matters
# farther down, since one far below the highest bias may be added to the highest scores. Chosen by hand:
# tests/quantize/test_quantize_attention_masks.py shows the effect.
SCORE_MARGIN, BIAS_MARGIN = 12.0, 32.0
"""How far below the highest score of a row a score still matters, and below the highest bias a bias."""

# Operators that may lie between a mask and a Softmax: they reshape or cast the mask, and join it with the scores.
_SHAPE_OPS = RESHAPES | {"Identity", "Expand", "Cast"}
_MASKING_OPS = frozenset({"Add", "Where", "Mul", "Sub"})
# Exporters put up to about ten nodes (Unsqueeze, Cast, Sub, Mul, Where ...) between a mask and its Softmax.
_MOST_STEPS = 12


class AttentionScores(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose rows a Softmax reads, directly or after additions.

    Values down to `margin` below the highest of a row matter.

    `added` are the tensors that are added to it before the Softmax. A mask must be further below zero than their values
    differ, or it hides nothing. If it `may_hide_rows`, a row without a value above MASK_VALUE / 10 is one that a mask
    hides. Where no mask is, as before the Softmax of a classifier, it is a row like the others, however low it lies.
    """

    tensor: str
    margin: float
    added: tuple[str, ...] = ()
    may_hide_rows: bool = True


def clamp_masks(graph: onnx.GraphProto, folder: Path) -> None:
    """Raises constants that mask the input of a Softmax, including minus infinity, to at least MASK_VALUE.

    Masks are added to scores, selected in their place (Where), or computed as the product of 0 or 1 and such a
    constant. External data are read from `folder`.
    """
    view, made = view_part(graph, folder=folder), set[str]()
    for node in _masking_nodes(view):
        for index, name in enumerate(node.input):
            value = view.constant(name) if view.is_float_constant(name) else None
            if value is None or not value.size or np.isnan(value).any():
                continue
            if value.min() >= MASK_VALUE or value.max() >= -MASK_VALUE:
                continue
            clamped = f"{name}.edgekit.bounded"
            if clamped not in made:
                made.add(clamped)
                clamped_value = np.maximum(value, np.float32(MASK_VALUE))
                graph.initializer.append(numpy_helper.from_array(clamped_value, clamped))
            node.proto.input[index] = clamped


def find_attention_scores(graph: Graph) -> tuple[AttentionScores, ...]:
    """Returns tensors that may be masked scores: the inputs of a Softmax over the last axis, and their summands."""
    found: dict[str, AttentionScores] = {}
    front = [
        AttentionScores(tensor=node.input[0], margin=SCORE_MARGIN)
        for node in graph.nodes
        if node.op_type == "Softmax" and node.integer("axis", -1) in {-1, len(graph.dims(node.input[0])) - 1}
    ]
    for _ in range(_MOST_STEPS):
        for each in front:
            known = found.get(each.tensor, each)
            found[each.tensor] = AttentionScores(
                tensor=each.tensor,
                margin=max(each.margin, known.margin),
                added=tuple(dict.fromkeys((*known.added, *each.added))),
            )
        made = [(graph.producers[each.tensor], each) for each in front if each.tensor in graph.producers]
        front = [
            msgspec.structs.replace(each, tensor=name)
            for node, each in made
            if node.op_type in _SHAPE_OPS | {"Concat"}
            # A Concat adds scores of other choices, such as an attention sink.
            for name in (node.input if node.op_type == "Concat" else node.input[:1])
        ]
        front += [
            AttentionScores(tensor=name, margin=BIAS_MARGIN, added=(*each.added, other))
            for node, each in made
            if node.op_type == "Add"
            for name, other in (tuple(node.input), tuple(node.input)[::-1])
        ]
    return tuple(
        msgspec.structs.replace(each, may_hide_rows=_may_hide_rows(graph, each.tensor)) for each in found.values()
    )


def _may_hide_rows(graph: Graph, tensor: str) -> bool:
    """Returns False if the tensor is made only of products with weights and of constants too small for a mask."""
    waiting, seen = [tensor], set[str]()
    while waiting:
        name = waiting.pop()
        node, value = graph.producers.get(name), graph.values.get(name)
        if name in seen or not name or (value is not None and value.dtype == "bool"):
            continue
        seen.add(name)
        if (constant := graph.constant(name)) is not None:
            # A mask is -10,000 * (1 - seen), or 10,000 * (seen - 1).
            if constant.dtype != np.bool_ and np.abs(constant.astype(np.float64)).max(initial=0) >= -MASK_VALUE / 10:
                return True
        elif node is not None and node.op_type in _SHAPE_OPS | _MASKING_OPS | {"Concat"}:
            waiting += node.input[:1] if node.op_type in _SHAPE_OPS else node.input
        elif node is None or node.op_type not in WITH_BIAS | {"MatMul"}:
            return True
    return False


def _masking_nodes(graph: Graph) -> Iterator[Node]:
    """Yields the nodes on paths from a mask to a Softmax, nearest to the Softmax first."""
    reached: set[Node] = set()
    front = [node.input[0] for node in graph.nodes if node.op_type == "Softmax"]
    for _ in range(_MOST_STEPS):
        nodes = dict.fromkeys(graph.producers[name] for name in front if name in graph.producers)
        new = [node for node in nodes if node not in reached]
        reached.update(new)
        yield from (node for node in new if node.op_type in _MASKING_OPS)
        front = [name for node in new if node.op_type in _MASKING_OPS | _SHAPE_OPS | {"Concat"} for name in node.input]


# The file name of a graph whose large weights lie in another file beside it.
STORED_GRAPH = "float.onnx"
WITH_BIAS = frozenset({"Conv", "ConvTranspose", "Gemm"})
_WITH_SHIFT = frozenset({"InstanceNormalization", "LayerNormalization"})
# Operators whose output keeps the scale of their input (onnxruntime/quantization/operators/direct_q8.py and others).
_MOVEMENT = MOVES | {"Gather", "MaxPool", "Slice", "Split"}


def read_float_graph(model: models.Model) -> Graph:
    """Reads the graph of a float model; large weights stay in their files.

    Raises:
        ModelError: the model is quantized already, or older than opset 13, or names clash.
    """
    proto, folder = models.read_with_weights_on_disk(model), model.path.parent
    load_external(proto.graph, folder, most=MAX_DATA_BYTES)
    _check_float(model, proto)
    lift_constants(proto.graph)
    _fold_dequantized_weights(proto.graph, folder)
    if replace_nodes(proto.graph, MINIMUM_OPSET, {"Gemm"}, split_gemm, folder=folder):
        models.drop_unread(proto.graph)
    _separate_biases(proto.graph)
    avoid_name_collisions(proto, model.path.name)
    clamp_masks(proto.graph, folder)
    known = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    inferred = infer_model(proto).graph.value_info
    models.refill(proto.graph.value_info, [value for value in inferred if value.name not in known])
    drop_initializer_inputs(proto.graph)
    return view_model(proto, folder)


def store_float_graph(graph: Graph, folder: Path) -> Graph:
    """Moves the large weights of a graph to a file in `folder`; returns the graph, which then takes little memory.

    Models written to the folder may refer to that file. `graph` must not be used any more.
    """
    path = folder / STORED_GRAPH
    with path.with_name(f"{STORED_GRAPH}.data").open("wb") as out:
        for tensor in graph.proto.initializer:
            move_weight(tensor, graph.folder, out)
    # Protobuf keeps the memory of cleared fields; only a new message frees it.
    path.write_bytes(graph.model.SerializeToString())
    return view_file(path)


def float_activations(graph: Graph) -> Iterator[str]:
    """Yields the float inputs and computed tensors, in graph order."""
    names = [*graph.inputs, *(name for node in graph.nodes for name in node.output)]
    yield from (name for name in names if name and graph.is_float(name))


def range_source(graph: Graph, name: str) -> str:
    """Returns the tensor whose scale a tensor shares because the operators between them only move values."""
    while name in graph.producers and graph.producers[name].op_type in _MOVEMENT:
        name = graph.producers[name].input[0]
    return name


def folded_activations(graph: Graph) -> dict[str, str]:
    """Returns the tensors that only a Relu or Clip reads, each with the output whose range it gets.

    A quantized producer clamps to its output range, so the range before the Relu or Clip is the range after it
    (onnxruntime/quantization/base_quantizer.py, adjust_tensor_ranges). A Reshape between a layer and its Relu gets that
    range too; with another one it would compute in float (targets/qnn/NOTES.md).
    """
    folded: dict[str, str] = {}
    kept = graph.outputs | graph.captured
    for node in graph.nodes:
        name = node.input[0] if node.op_type in {"Relu", "Clip"} and graph.is_float(node.output[0]) else ""
        while name in graph.producers and len(graph.readers(name)) == 1 and name not in kept:
            folded[name] = node.output[0]
            maker = graph.producers[name]
            name = maker.input[0] if maker.op_type in MOVES else ""
    return folded


def known_bounds(graph: Graph, node: Node) -> tuple[float | None, float | None]:
    """Returns the lower and upper bound of an operator's output, None if there is none."""
    if node.op_type in {"Sigmoid", "Softmax", "HardSigmoid"}:
        return 0.0, 1.0
    if node.op_type in {"Relu", "Abs", "Sqrt", "Exp"}:
        return 0.0, None
    if node.op_type == "Clip" and len(node.input) > 1:
        low = graph.constant(node.input[1])
        return (0.0 if low is not None and low.size == 1 and float(low.reshape(())) >= 0 else None), None
    return None, None


def _check_float(model: models.Model, proto: onnx.ModelProto) -> None:
    if found := models.find_integer_ops(proto):
        raise ModelError(
            f"'{model.path.name}' is quantized already: it has {', '.join(found)}",
            hint="give the float model, or make it float: edgekit prepare MODEL --dequantize --out FILE",
        )
    opset = model.opsets.get("ai.onnx", 1)
    if opset < MINIMUM_OPSET:
        words = f"'{model.path.name}' has opset {opset}, quantizing needs {MINIMUM_OPSET}"
        raise ModelError(words, hint="edgekit prepare MODEL --opset 17 --out FILE")
    # One that no node reads gets no Q and DQ.
    read = {name for node in models.iterate_nodes(proto.graph) for name in node.input}
    fed = {value.name for value in proto.graph.input if value.name in read}
    through = next((value.name for value in proto.graph.output if value.name in fed), None)
    if through is not None:
        words = f"output '{through}' of '{model.path.name}' is an input of it, with no node between for Q and DQ"
        raise ModelError(words, hint="leave it out: edgekit prepare MODEL --outputs NAMES --out FILE")


def _fold_dequantized_weights(graph: onnx.GraphProto, folder: Path) -> None:
    """Replaces weights that are stored as integers behind a DequantizeLinear by float weights."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "DequantizeLinear" or not initializers.keys() >= set(node.input):
            kept.append(node)
            continue
        weight = read_dequantized(node, lambda name: read_array(initializers[name], folder))
        graph.initializer.append(numpy_helper.from_array(weight, node.output[0]))
    models.refill(graph.node, kept)


def _separate_biases(graph: onnx.GraphProto) -> None:
    """Copies shared biases, so that each layer and norm has its own; its int32 scale follows from input and weight.

    The layers of ALBERT share biases, and exporters store equal tensors once. A bias that an Add reads too would get 8
    bits for the Add, and ONNX Runtime computes a Gemm with such a bias in float. ORT's quantizer would call the fourth
    copy of `val_17` `val_174`, the name of another tensor where PyTorch numbers them.
    """
    readers = Counter(name for node in graph.node for name in node.input)
    stored, names = {tensor.name: tensor for tensor in graph.initializer}, models.list_names(graph)
    for node in graph.node:
        bias = node.input[2] if node.op_type in WITH_BIAS | _WITH_SHIFT and len(node.input) > 2 else ""
        if bias not in stored or readers[bias] == 1:
            continue
        readers[bias] -= 1
        copy = graph.initializer.add()
        copy.CopyFrom(stored[bias])
        copy.name = node.input[2] = _free_name(bias, names)
        names.add(copy.name)
