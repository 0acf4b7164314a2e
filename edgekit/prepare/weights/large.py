"""Taking large weights out of a graph while a tool that copies the whole model works on it."""

import contextlib
from collections.abc import Generator

import onnx

from edgekit.model.external import LEAST_BYTES


@contextlib.contextmanager
def weights_aside(proto: onnx.ModelProto) -> Generator[list[onnx.TensorProto]]:
    """Yields the large initializers of the main graph, for which inputs stand in inside the block, in place.

    Small ones stay: tools read shapes and axes from them.
    """
    graph = proto.graph
    large = [tensor for tensor in graph.initializer if _is_large(tensor)]
    small = [tensor for tensor in graph.initializer if not _is_large(tensor)]
    del graph.initializer[:]
    graph.initializer.extend(small)
    graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in large
    )
    try:
        yield large
    finally:
        put_weights(graph, large)


def put_weights(graph: onnx.GraphProto, weights: list[onnx.TensorProto]) -> None:
    """Puts initializers back in place of the inputs that stand in for them."""
    names = {tensor.name for tensor in weights}
    inputs = [value for value in graph.input if value.name not in names]
    del graph.input[:]
    graph.input.extend(inputs)
    graph.initializer.extend(weights)


def _is_large(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.ByteSize() > LEAST_BYTES
