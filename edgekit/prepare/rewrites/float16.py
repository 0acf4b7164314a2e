"""Graphs made to compute in float32: those in half or double precision, and those with weights stored as integers."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit.graph.constants import MAIN_DOMAINS, ML_DOMAIN, MOVES, ORT_DOMAIN, read_dequantized
from edgekit.graph.graph import Node, view_part
from edgekit.graph.match import known, need, walk
from edgekit.graph.rewrite import Writer, node_rewrite, rewrite
from edgekit.model import model as models
from edgekit.model.tensors import Array
from edgekit.prepare.external import is_absent

HALF_TO_FLOAT, DOUBLE_TO_FLOAT = "half-to-float", "double-to-float"
_HALF, _FLOAT, _DOUBLE, _BYTE = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.UINT8
TO_FLOAT = {HALF_TO_FLOAT: _HALF, DOUBLE_TO_FLOAT: _DOUBLE}
"""The rewrites that change the element type of weights, and the type that they replace."""
# Attributes that name the element type of an output.
_TYPE_NAMES = frozenset({"to", "dtype", "output_dtype"})
# An operator of another domain may exist in float16 only.
_KNOWN_DOMAINS = frozenset({*MAIN_DOMAINS, ML_DOMAIN, ORT_DOMAIN})
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@rewrite(HALF_TO_FLOAT)
def compute_in_float(graph: onnx.GraphProto, _opset: int) -> tuple[str, ...]:
    """Makes float16 tensors float32, in place, and returns the names of the nodes that read or write them.

    Inputs and outputs of the graph keep their types by a Cast. The model's own Casts between the two types are removed,
    and with them their rounding. Weights without data, or with external data, change only their type: enough for a
    check.
    """
    return _replace_type(graph, _HALF)


@rewrite(DOUBLE_TO_FLOAT)
def compute_double_in_float(graph: onnx.GraphProto, _opset: int) -> tuple[str, ...]:
    """Makes float64 tensors float32, in place, where a layer computes in float64, and returns the names of the nodes.

    scikit-learn's converter and exporters of numpy's numbers write such networks. Positions and seconds alone, which
    may need the digits, stay float64, as do trees, whose thresholds would be other numbers. Inputs and outputs of the
    graph keep their types by a Cast.
    """
    types = _list_types(graph)
    layers = (node for node in graph.node if node.op_type in _LAYERS and node.input)
    has_layer = any(types.get(node.input[0]) == _DOUBLE for node in layers)
    has_trees = any(node.domain == ML_DOMAIN and _DOUBLE in map(types.get, _list_ends(node)) for node in graph.node)
    return _replace_type(graph, _DOUBLE) if has_layer and not has_trees else ()


def _replace_type(graph: onnx.GraphProto, kind: int) -> tuple[str, ...]:
    """Makes tensors of this element type float32, in place, and returns the names of the nodes that have them."""
    if kind not in models.list_element_types(graph):
        return ()
    types, shown = _list_types(graph), {value.name for value in (*graph.input, *graph.output)}
    changed = [node for node in models.iterate_nodes(graph) if kind in map(types.get, _list_ends(node))]
    # This rewrite was applied before if all are Casts right after an input or before an output.
    is_done = all(node.op_type == "Cast" and not shown.isdisjoint(_list_ends(node)) for node in changed)
    if is_done or any(node.domain not in _KNOWN_DOMAINS for node in changed):
        return ()
    names = tuple(node.name for node in changed)
    _drop_casts(graph, types, kind)
    before, after = _keep_interface(graph, kind)
    for tensor in models.iterate_tensors(graph):
        if tensor.data_type == kind and is_absent(tensor):
            tensor.data_type = _FLOAT
        elif tensor.data_type == kind:
            values, most = numpy_helper.to_array(tensor), np.finfo(np.float32).max
            # The largest float64, as a mask has it, would become infinity.
            values = np.where(np.isfinite(values), values.clip(-most, most), values).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for node in models.iterate_nodes(graph):
        for attribute in node.attribute:
            if attribute.name in _TYPE_NAMES and attribute.i == kind:
                attribute.i = _FLOAT
    for part in models.iterate_graphs(graph):
        # Inputs and outputs of a subgraph change too.
        for value in (*part.value_info, *(() if part is graph else (*part.input, *part.output))):
            if value.type.tensor_type.elem_type == kind:
                value.type.tensor_type.elem_type = _FLOAT
    models.refill(graph.node, [*before, *graph.node, *after])
    return names


def _list_types(graph: onnx.GraphProto) -> dict[str, int]:
    types = dict[str, int]()
    for part in models.iterate_graphs(graph):
        types |= {tensor.name: tensor.data_type for tensor in part.initializer}
        values = (*part.value_info, *part.input, *part.output)
        types |= {value.name: value.type.tensor_type.elem_type for value in values}
    return types


def _list_ends(node: onnx.NodeProto) -> tuple[str, ...]:
    return (*node.input, *node.output)


def _drop_casts(graph: onnx.GraphProto, types: Mapping[str, int], kind: int) -> None:
    """Removes Casts between this type and float32 whose result is no output, in place: both will be float32."""
    shown = {value.name for part in models.iterate_graphs(graph) for value in part.output}
    sources: dict[str, str] = {}
    for part in models.iterate_graphs(graph):
        kept: list[onnx.NodeProto] = []
        for node in part.node:
            to = next((attribute.i for attribute in node.attribute if attribute.name == "to"), 0)
            ends = {types.get(node.input[0]) if node.input else None, to}
            if node.op_type == "Cast" and ends <= {kind, _FLOAT} and node.output[0] not in shown:
                sources[node.output[0]] = sources.get(node.input[0], node.input[0])
            else:
                kept.append(node)
        models.refill(part.node, kept)
        models.refill(part.value_info, [value for value in part.value_info if value.name not in sources])
    models.rename_tensors(graph, sources)


def _keep_interface(graph: onnx.GraphProto, kind: int) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """Renames inputs and outputs of a type inside the graph, in place; returns the Casts to add at its start and end.

    An output that is an input keeps its name.
    """
    taken, fed = models.list_names(graph), {value.name for value in graph.input}
    before, after = list[onnx.NodeProto](), list[onnx.NodeProto]()
    for casts, values in ((before, graph.input), (after, graph.output)):
        for value in values:
            name = value.name
            if value.type.tensor_type.elem_type != kind or (casts is after and name in fed):
                continue
            inner = next(free for at in range(len(taken) + 1) if (free := f"{name}.float32{at or ''}") not in taken)
            models.rename_tensors(graph, {name: inner}, skip_inputs=name in fed)
            value.name = name
            ends, to = ((name, inner), _FLOAT) if casts is before else ((inner, name), kind)
            casts.append(helper.make_node("Cast", ends[:1], ends[1:], name=f"{inner}/cast", to=to))
    return before, after


MOVED = MOVES | {"MaxPool", "Slice"}
"""Operators past which ONNX Runtime moves Q and DQ (qdq_propagation.cc), and Flatten, which becomes a Reshape."""


@rewrite("float-weights", {"DequantizeLinear"})
def store_float_weights(graph: onnx.GraphProto, _opset: int) -> tuple[str, ...]:
    """Replaces each DequantizeLinear of a constant by a float constant, where what reads it computes in float.

    In place; returns the names of the nodes. Weights without data become constants without data, which is enough for a
    check; those with external data stay.
    """
    stored = {tensor.name: tensor for tensor in graph.initializer}
    shown, readers = {value.name for value in graph.output}, view_part(graph).consumers
    found = [
        node
        for node in graph.node
        if node.op_type == "DequantizeLinear" and len(node.input) > 1 and any(node.output)
        if stored.keys() >= {*node.input} and shown.isdisjoint(node.output)
        if all(stored[name].data_location != TensorProto.EXTERNAL for name in node.input)
        if _is_plain([stored[name] for name in node.input], node) and not _is_quantized(readers, node)
    ]
    if not found:
        return ()
    for node in found:
        if not any(is_absent(stored[name]) for name in node.input):
            values = read_dequantized(node, lambda name: numpy_helper.to_array(stored[name]))
            graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        else:
            dims = stored[node.input[0]].dims
            graph.initializer.append(TensorProto(name=node.output[0], data_type=TensorProto.FLOAT, dims=dims))
    names = {node.output[0]: node.name for node in found}
    models.refill(graph.node, [node for node in graph.node if names.keys().isdisjoint(node.output)])
    return tuple(names.values())


@node_rewrite("float-blocks", {"GatherBlockQuantized", "MatMulNBits"})
def store_float_blocks(writer: Writer) -> None:
    """Rewrites ONNX Runtime's MatMulNBits and GatherBlockQuantized as MatMul and Gather of a float constant."""
    node, graph, is_product = writer.node, writer.graph, writer.node.op_type == "MatMulNBits"
    tensors = [known(graph.constants.get(node.input[at])) for at in (int(is_product), 2, 3) if node.has_input(at)]
    bits, block, data = node.integer("bits", 4), node.integer("block_size", 128), tensors[0]
    rows, columns = data.dims[0], data.dims[-1] * 8 // bits
    if is_product:
        rows, columns = node.integer("N", 0), node.integer("K", 0)
        need(not node.has_input(4))
    need(len(data.dims) == 2 + is_product and node.integer("gather_axis", 0) == 0)
    need(node.integer("quantize_axis", 1) in {1, -1} and [each.data_type for each in tensors[:2]] == [_BYTE, _FLOAT])
    need(all(each.data_location != TensorProto.EXTERNAL for each in tensors))

    def read(tensor: TensorProto, repeats: int = 1) -> Array:
        numbers = numpy_helper.to_array(tensor).reshape(rows, -1)
        if tensor.data_type == _BYTE:
            numbers = (numbers[..., None] >> np.arange(0, 8, bits).astype(np.uint8) & (2**bits - 1)).reshape(rows, -1)
        return np.repeat(numbers.astype(np.float32), repeats, 1)[:, :columns]

    dims = [columns, rows] if is_product else [rows, columns]
    if any(map(is_absent, tensors)):
        weight = writer.reshaped("weight", node.input[2], dims)
    else:
        zeros = read(tensors[2], block) if len(tensors) > 2 else 2 ** (bits - 1)
        value = (read(data) - zeros) * read(tensors[1], block)
        weight = writer.constant("weight", value.T if is_product else value, "float32")
    if is_product:
        made = writer.add("MatMul", [node.input[0], weight], "product" if node.has_input(5) else "")
        if node.has_input(5):
            writer.add("Add", [made, node.input[5]])
    else:
        writer.add("Gather", [weight, node.input[1]])


def _is_plain(tensors: Sequence[TensorProto], node: onnx.NodeProto) -> bool:
    """Returns True if a DequantizeLinear has one scale, of float32, or one for each index or block of its axis."""
    (weight, scale, *zeros), given = tensors, {item.name: item.i for item in node.attribute}
    axis, block, dims = given.get("axis", 1), given.get("block_size", 0), [*weight.dims]
    counts = [[], [1], dims[axis : axis + 1 or None]]
    if block and -len(dims) <= axis < len(dims):
        dims[axis] = -(-dims[axis] // block)
        counts = [dims]
    # ONNX Runtime's quantizer states one scale as a list and its zero point as a number.
    one: tuple[list[int], ...] = ([], [1])
    fits = all(zero.dims == scale.dims or ([*zero.dims] in one and [*scale.dims] in one) for zero in zeros)
    return scale.data_type == _FLOAT and [*scale.dims] in counts and fits


def _is_quantized(readers: Mapping[str, Sequence[Node]], node: onnx.NodeProto) -> bool:
    """Returns True if what a node makes gets to a QuantizeLinear through at most one operator that computes."""

    def after(place: tuple[str, bool]) -> Iterator[tuple[str, bool]]:
        name, may_compute = place
        for reader in readers.get(name, ()):
            moves = reader.op_type in {"Clip", *MOVED}
            yield from ((made, may_compute and moves) for made in reader.output if moves or may_compute)

    places = walk([(name, True) for name in node.output], after)
    return any(reader.op_type == "QuantizeLinear" for name, _ in places for reader in readers.get(name, ()))
