"""The constants of a graph: initializers, sparse initializers, and all forms of Constant nodes.

The names of domains, from which its operators come, and groups of operators are here too.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper, helper, numpy_helper

from edgekit._files import safe_join
from edgekit.errors import ModelError, reraised
from edgekit.model.external import read_place
from edgekit.model.tensors import Array

MAIN_DOMAINS = ("", "ai.onnx")
ML_DOMAIN = "ai.onnx.ml"
"""The domain of trees, scalers and encoders, such as scikit-learn's."""
ORT_DOMAIN = "com.microsoft"
"""The domain of ONNX Runtime's contrib operators."""
NCHWC_DOMAIN = "com.microsoft.nchwc"
"""The operators on blocks of channels, as wide as the vectors of the processor for which a session was optimized."""
RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""The operators that change the shape of a tensor alone."""
MOVES = RESHAPES | {"Transpose"}
"""The operators that move the entries of a tensor, and change none of them."""
LAYER_NORM_SINCE = 17
"""The opset that has LayerNormalization; before, it is an operator of ONNX Runtime in ONNX's own domain."""
# The operators that ONNX Runtime defines in ONNX's own domain, with the opset from which on onnx knows them.
_OWN_BEFORE = {"LayerNormalization": LAYER_NORM_SINCE, "SimplifiedLayerNormalization": math.inf}
# Far more elements than shapes, axes, pads and bounds have, which rules and rewrites read.
_SMALL_ELEMENTS = 1 << 14
# Sparse constants of more elements are not made dense.
_MOST_DENSE = 1 << 24

# The types of the attributes of Constant that are neither a tensor nor sparse (ONNX operator Constant 13).
_FORMS = {
    **dict.fromkeys(("value_float", "value_floats"), np.float32),
    **dict.fromkeys(("value_int", "value_ints"), np.int64),
    **dict.fromkeys(("value_string", "value_strings"), object),
}


def is_own(node: onnx.NodeProto, opset: int) -> bool:
    """Returns True for an operator that ONNX Runtime defines and onnx does not know at this opset."""
    return node.domain == ORT_DOMAIN or (not node.domain and opset < _OWN_BEFORE.get(node.op_type, 0))


def read_constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Returns the tensor of a Constant node, None for any other node.

    The tensor's own name may differ from that of the node's output.
    """
    if node.op_type != "Constant" or node.domain not in MAIN_DOMAINS or not node.output:
        return None
    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name == "sparse_value":
            return _to_dense(attribute.sparse_tensor)
        if attribute.name in _FORMS:
            value = np.asarray(helper.get_attribute_value(attribute), _FORMS[attribute.name])
            return numpy_helper.from_array(value, node.output[0])
    return None


def list_constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Returns the constants of one graph by name, without those of the graphs around it."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    # The name of a sparse initializer is that of its values (onnx.proto).
    constants |= {tensor.values.name: _to_dense(tensor) for tensor in graph.sparse_initializer}
    made = ((node.output[0], read_constant(node)) for node in graph.node if node.op_type == "Constant" and node.output)
    return constants | {name: tensor for name, tensor in made if tensor is not None}


def lift_constants(graph: onnx.GraphProto) -> None:
    """Turns the Constant nodes of one graph into initializers, in place."""
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        if (tensor := read_constant(node)) is None:
            kept.append(node)
            continue
        lifted = graph.initializer.add()
        lifted.CopyFrom(tensor)
        # The tensor inside a Constant may have any name or none; readers know the node's output.
        lifted.name = node.output[0]
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)


def write_dense(graph: onnx.GraphProto) -> None:
    """Makes the sparse initializers of one graph dense, in place; too large and broken ones stay."""
    dense = [_to_dense(sparse) for sparse in graph.sparse_initializer]
    kept = [sparse for sparse, tensor in zip(graph.sparse_initializer, dense, strict=True) if not _has_data(tensor)]
    graph.initializer.extend(tensor for tensor in dense if _has_data(tensor))
    del graph.sparse_initializer[:]
    graph.sparse_initializer.extend(kept)


def _has_data(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.raw_data) or not math.prod(tensor.dims)


def read_dequantized(node: onnx.NodeProto, read: Callable[[str], Array]) -> Array:
    """Returns the output of a DequantizeLinear of constants, computed in float32, in the type of its scale.

    `read` returns the constant of a name. The scale is per tensor, per channel, or per block of an axis.

    Raises:
        ModelError: the numbers of scales, zero points and channels differ.
    """
    values, scale, *rest = map(read, filter(None, node.input))
    given = {attribute.name: attribute.i for attribute in node.attribute}
    axis, block = given.get("axis", 1) % max(values.ndim, 1), given.get("block_size", 0)

    def spread(part: Array) -> Array:
        if part.size == 1:
            part = part.reshape(())
        elif block:
            part = np.repeat(part, min(block, values.shape[axis]), axis)
            part = part[(slice(None),) * axis + (slice(values.shape[axis]),)]
        elif part.ndim == 1:
            part = part.reshape([-1 if index == axis else 1 for index in range(values.ndim)])
        return np.broadcast_to(part, values.shape)

    text = f"DequantizeLinear '{node.name}' has {scale.size} scales for the shape {list(values.shape)}"
    with reraised(ValueError, ModelError(text, hint="export it again")):
        scales, shift = spread(scale), spread(rest[0].astype(np.float32) if rest else np.zeros((), np.float32))
    # The constants of a damaged file may be infinite.
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray((values.astype(np.float32) - shift) * scales).astype(scale.dtype)


def is_small(tensor: onnx.TensorProto) -> bool:
    """Returns True for a constant that is small enough for rules and rewrites to read its values."""
    return math.prod(tensor.dims) <= _SMALL_ELEMENTS


def read_array(tensor: onnx.TensorProto, folder: Path) -> Array:
    """Returns the value of a constant; external data in `folder` are memory-mapped, or copied if they are misaligned.

    Raises:
        BundleError: the external file lies outside the folder.
        ValueError: the tensor holds no data, or not all.
    """
    if (place := read_place(tensor)) is None:
        return numpy_helper.to_array(tensor)
    dtype, count = helper.tensor_dtype_to_np_dtype(tensor.data_type), math.prod(tensor.dims)
    # Types of whole bytes can be mapped. Types of 4 bits are packed, strings are stored in another field, and mmap
    # refuses an empty range.
    if dtype.kind in "biufc" and count:
        file = safe_join(folder, place.file)
        mapped: Array = np.memmap(file, dtype=dtype, mode="r", offset=place.offset, shape=(count,))
        # Inside a protobuf, data may begin at any address. numpy adds misaligned arrays in another order, so that a sum
        # could differ in its last bits from that of an aligned copy.
        return np.require(np.asarray(mapped), requirements="A").reshape(tuple(tensor.dims))
    copy = deepcopy(tensor)
    external_data_helper.load_external_data_for_tensor(copy, str(folder))
    return numpy_helper.to_array(copy)


def _to_dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    """Returns a sparse tensor as a dense one, without data where it is too large or broken."""
    bare = onnx.TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
    size = math.prod(sparse.dims)
    if size > _MOST_DENSE or sparse.values.data_location == onnx.TensorProto.EXTERNAL:
        return bare
    try:
        values, places = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
        dense = np.zeros(size, values.dtype)
        # Indices are positions in the flattened tensor, or a row of coordinates for each value (onnx.proto,
        # SparseTensorProto).
        flat = places if places.ndim < 2 else np.ravel_multi_index(tuple(places.T), tuple(sparse.dims))
        dense[flat] = values
    except (ValueError, TypeError, IndexError):
        return bare
    return numpy_helper.from_array(dense.reshape(tuple(sparse.dims)), sparse.values.name)
