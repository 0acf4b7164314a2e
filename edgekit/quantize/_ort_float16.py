"""The adapter to onnxruntime's float16 converter, the only module that imports it."""

import logging
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import cast

import onnx
from onnx import TensorProto, helper
from onnxruntime.transformers import float16

from edgekit.errors import ModelError
from edgekit.graph.inference import infer_model
from edgekit.model.model import order_nodes, refill, rename_tensors
from edgekit.model.soundness import find_captured, iterate_reads, list_bodies

_LOGGER = logging.getLogger(float16.__name__)
# ONNX's schemas have no float16 for these, and the function body of MeanVarianceNormalization has float32 constants.
_FLOAT_ONLY = ("Celu", "IsInf", "MeanVarianceNormalization", "TfIdfVectorizer")


def convert_floats(proto: onnx.ModelProto, kept: Sequence[str], subject: str) -> onnx.ModelProto:
    """Returns a copy of a model that computes in float16, with float32 inputs and outputs and `kept` nodes in float32.

    Raises:
        ModelError: the converter cannot handle the model.
    """
    copy = deepcopy(proto)
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
    # The converter casts only inputs: what bodies of kept nodes read from the graph is cast to float32 here.
    for body in [body for node in converted.graph.node if node.name in kept for body in list_bodies(node)]:
        names = {name: f"{name}_captured" for name in find_captured(body) if name in made}
        rename_tensors(body, names, skip_inputs=True)
        for name, wide in names.items():
            converted.graph.node.append(helper.make_node("Cast", [name], [wide], name=wide, to=TensorProto.FLOAT))
    # onnxruntime/transformers/float16.py names a cast and its output only after the tensor: if two kept nodes read it,
    # two nodes have the same output name, and ONNX Runtime does not load the graph. One of them is kept.
    nodes: dict[tuple[str, ...], onnx.NodeProto] = {}
    for node in converted.graph.node:
        nodes.setdefault(tuple(node.output), node)
    refill(converted.graph.node, nodes.values())
    refill(converted.graph.node, order_nodes(converted.graph))
    _join_kept(converted.graph, {node.name for node in proto.graph.node})
    rounded = made & {value.name for value in proto.graph.output} & stored.keys()
    rename_tensors(converted.graph, {name: f"{name}_half" for name in rounded})
    converted.graph.initializer.extend(stored[name] for name in sorted(rounded))
    refill(converted.graph.output, proto.graph.output)
    return converted


def _list_halves(graph: onnx.GraphProto) -> set[str]:
    typed = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    typed |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name for name, kind in typed.items() if kind == TensorProto.FLOAT16}


def _join_kept(graph: onnx.GraphProto, own: Collection[str]) -> None:
    """Connects kept nodes directly with each other and with the model's inputs and outputs.

    Between them the converter casts to float16 and back, which rounds values, and makes infinities of those that
    float16 cannot represent. `own` are the names of the nodes that are no casts of the converter.
    """
    casts = [node for node in graph.node if node.op_type == "Cast" and node.name not in own]
    halves = {
        node.output[0]: node.input[0] for node in casts if helper.get_node_attr_value(node, "to") == TensorProto.FLOAT16
    }
    restored = {node.output[0]: halves[node.input[0]] for node in casts if node.input[0] in halves}
    read = {name for node in graph.node if node.output[0] not in restored for name in iterate_reads(node)}
    inputs, outputs = ({value.name for value in values} for values in (graph.input, graph.output))
    unread = halves.keys() - read - outputs
    # If nothing reads the float16 tensor, the float32 tensor takes its name, since layers are compared by tensor names.
    names = {halves[half]: half for half in sorted(unread) if halves[half] not in inputs}
    names |= {whole: name for name, whole in restored.items() if name in outputs}
    names |= {name: names.get(whole, whole) for name, whole in restored.items() if name not in outputs}
    gone = restored.keys() | unread
    refill(graph.node, [node for node in graph.node if node.output[0] not in gone])
    refill(graph.value_info, [value for value in graph.value_info if value.name not in gone])
    rename_tensors(graph, names)
    refill(graph.value_info, [value for value in graph.value_info if value.name not in outputs])
