"""Writing into a graph the types and shapes of values that can be inferred."""

import onnx

from edgekit.graph.inference import infer_model


def infer_types(proto: onnx.ModelProto) -> dict[str, int]:
    """Returns the element type of each tensor of the main graph, by name, as far as it can be inferred."""
    inferred = infer_model(proto).graph
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    types |= {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
    }
    return types


def infer_outputs(proto: onnx.ModelProto) -> None:
    """Gives the graph's outputs the shapes that follow from the inputs', where they are known, in place."""
    unknown = [value for value in proto.graph.output if _is_tensor(value) and not _is_static(value)]
    if not unknown:
        return
    for value in unknown:
        value.type.tensor_type.ClearField("shape")
    shapes = {value.name: value.type.tensor_type for value in infer_model(proto).graph.output}
    for value in unknown:
        if shapes[value.name].HasField("shape"):
            value.type.tensor_type.shape.CopyFrom(shapes[value.name].shape)


def infer_values(proto: onnx.ModelProto) -> None:
    """Gives the values of the main graph the types and shapes that can be inferred, in place."""
    inferred = infer_model(proto).graph.value_info
    values = [value for value in inferred if value.type.HasField("tensor_type")]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(values)


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type")


def _is_static(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
