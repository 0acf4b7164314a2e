"""The adapter to onnxruntime's float16 converter, the only module that imports it."""

import logging
from collections.abc import Sequence
from typing import cast

import onnx
from onnx import TensorProto, helper
from onnxruntime.transformers import float16

from edgekit.errors import ModelError
from edgekit.graph.inference import infer_model
from edgekit.model.model import order_nodes, refill, rename_tensors
from edgekit.model.soundness import find_captured, iterate_reads, list_bodies

_LOGGER = logging.getLogger(float16.__name__)
# The converter names the casts after and before a kept node by the tensor's name and these suffixes.
_TO_HALF, _TO_FLOAT = "_cast_to_fp16_node", "_cast_to_fp32_node"
# ONNX's schemas have no float16 for these, and the function body of MeanVarianceNormalization has float32 constants.
_FLOAT_ONLY = ("Celu", "IsInf", "MeanVarianceNormalization", "TfIdfVectorizer")


def convert_floats(proto: onnx.ModelProto, kept: Sequence[str], subject: str) -> onnx.ModelProto:
    """Returns a copy of a model that computes in float16, with float32 inputs and outputs and `kept` nodes in float32.

    Raises:
        ModelError: the converter cannot handle the model.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    # Around a kept node the converter casts tensors that it knows to be float, but onnx infers no types after ORT's own
    # operators.
    refill(copy.graph.value_info, infer_model(proto).graph.value_info)
    halves = _list_halves(copy.graph)
    # The converter would make an input or constant that is an output too once more.
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    given = stored.keys() | {value.name for value in copy.graph.input}
    refill(copy.graph.output, [value for value in copy.graph.output if value.name not in given])
    # The converter warns of each weight that it clamps; `convert_to_fp16` reports all of them at once.
    _LOGGER.disabled = True
    try:
        converted = float16.convert_float_to_float16(
            copy,
            keep_io_types=True,
            node_block_list=list(kept),
            op_block_list=[*float16.DEFAULT_OP_BLOCK_LIST, *_FLOAT_ONLY],
        )
        converted = cast("onnx.ModelProto", converted)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        words = f"'{subject}' cannot be converted to fp16: {error}"
        raise ModelError(words, hint="build it with --precision fp32") from error
    finally:
        _LOGGER.disabled = False
    made = _list_halves(converted.graph) - halves
    _widen_captured(converted.graph, made, kept)
    # onnxruntime/transformers/float16.py names a cast and its output only after the tensor: if two kept nodes read it,
    # two nodes have the same output name, and ONNX Runtime does not load the graph. One of them is kept.
    nodes: dict[tuple[str, ...], onnx.NodeProto] = {}
    for node in converted.graph.node:
        nodes.setdefault(tuple(node.output), node)
    refill(converted.graph.node, nodes.values())
    refill(converted.graph.node, order_nodes(converted.graph))
    _join_kept(converted.graph)
    rounded = made & {value.name for value in proto.graph.output} & stored.keys()
    rename_tensors(converted.graph, {name: f"{name}_half" for name in rounded})
    converted.graph.initializer.extend(stored[name] for name in sorted(rounded))
    refill(converted.graph.output, proto.graph.output)
    return converted


def _list_halves(graph: onnx.GraphProto) -> set[str]:
    typed = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    typed |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name for name, kind in typed.items() if kind == TensorProto.FLOAT16}


def _widen_captured(graph: onnx.GraphProto, halves: set[str], kept: Sequence[str]) -> None:
    """Casts to float32, in place, what bodies of kept nodes read from the graph: the converter casts only inputs."""
    for node in [node for node in graph.node if node.name in kept]:
        for body in list_bodies(node):
            names = {name: f"{name}_captured" for name in find_captured(body) if name in halves}
            rename_tensors(body, names, skip_inputs=True)
            for name, wide in names.items():
                graph.node.append(helper.make_node("Cast", [name], [wide], name=wide, to=TensorProto.FLOAT))


def _join_kept(graph: onnx.GraphProto) -> None:
    """Connects kept nodes directly: between them the converter casts to float16 and back.

    That would round values, and turn those that float16 cannot represent into infinity.
    """
    made = {node.name: node for node in graph.node}
    names: dict[str, str] = {}
    for name, restore in made.items():
        half = made.get(restore.input[0] + _TO_HALF) if name.endswith(_TO_FLOAT) else None
        if half is not None:
            names[restore.output[0]] = half.input[0]
    if not names:
        return
    restored = names.keys()
    read = {name for node in graph.node if node.output[0] not in restored for name in iterate_reads(node)}
    read |= {output.name for output in graph.output}
    # If nothing reads the float16 tensor, the float32 tensor takes its name, since layers are compared by tensor names.
    unread = {node.output[0]: node.input[0] for node in made.values() if node.name == node.output[0] + _TO_HALF}
    unread = {half: whole for half, whole in unread.items() if half not in read and whole in names.values()}
    renamed = {whole: half for half, whole in unread.items()}
    refill(graph.node, [node for node in graph.node if node.output[0] not in {*restored, *unread}])
    renaming = {**{old: renamed.get(new, new) for old, new in names.items()}, **renamed}
    refill(graph.value_info, [value for value in graph.value_info if value.name not in {*restored, *unread}])
    rename_tensors(graph, renaming)
