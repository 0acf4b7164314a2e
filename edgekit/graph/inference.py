"""Types and shapes of values, inferred by onnx on a copy without weights, of which it would make several."""

import contextlib

import onnx
from onnx import helper, shape_inference

from edgekit.graph.caution import has_long_vector, hide_untyped, may_have_long_vector, show_typed
from edgekit.graph.constants import is_small
from edgekit.graph.contrib import write_alike, write_back

# Inference reads shapes, axes and indices, which are smaller.
_MOST_BYTES = 1 << 14


def infer_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy with the types and shapes that onnx can infer, without the data of large initializers.

    Operators of ORT are inferred by their likes. A graph that contradicts itself keeps the shapes that it has.
    """
    large = [tensor for tensor in proto.graph.initializer if _is_aside(tensor)]
    light = _copy_light(proto)
    alike = write_alike(light)
    hidden = hide_untyped(light)
    inferred = _infer(light)
    if hidden and show_typed(light, inferred):
        inferred = _infer(light)
    if alike or hidden:
        write_back(inferred, proto)
    if len(light.opset_import) != len(proto.opset_import):
        del inferred.opset_import[:], inferred.functions[:]
        inferred.opset_import.extend(proto.opset_import)
        inferred.functions.extend(proto.functions)
    # Large initializers went in as inputs at the end; they come back as what they were.
    del inferred.graph.input[len(proto.graph.input) :]
    inferred.graph.initializer.extend(tensor if is_small(tensor) else _empty(tensor) for tensor in large)
    return inferred


def _infer(light: onnx.ModelProto) -> onnx.ModelProto:
    if may_have_long_vector(light):
        first = _try_inference(light, data_prop=False)
        if first is None or has_long_vector(first):
            return first or light
    # With data propagation shapes are followed through Shape, Gather and Concat; onnx raises there on some models that
    # it can infer without.
    propagated = None if has_long_vector(light) else _try_inference(light, data_prop=True)
    return propagated or _try_inference(light, data_prop=False) or light


def _try_inference(light: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto | None:
    with contextlib.suppress(shape_inference.InferenceError, ValueError, RuntimeError, TypeError):
        return shape_inference.infer_shapes(light, data_prop=data_prop)
    return None


def _is_aside(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.ByteSize() > _MOST_BYTES


def _empty(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Returns a tensor without its data; one in an external file has none here."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return tensor
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)


def _copy_light(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy with inputs in place of large initializers: inference fails on an initializer without data."""
    # Built anew instead of copied: a copy of the whole would hold all weights once more before they could be dropped.
    light = onnx.ModelProto(
        ir_version=proto.ir_version,
        producer_name=proto.producer_name,
        opset_import=proto.opset_import,
        functions=proto.functions,
        metadata_props=proto.metadata_props,
    )
    graph, source = light.graph, proto.graph
    graph.name = source.name or "graph"
    graph.node.extend(source.node)
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    graph.sparse_initializer.extend(source.sparse_initializer)
    for tensor in source.initializer:
        if not _is_aside(tensor):
            graph.initializer.append(tensor)
        else:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return light
