"""The work of a graph whose inputs have open dimensions: counted at sizes that stand for them, and that are told."""

from collections.abc import Iterator

import msgspec
import onnx

from edgekit.check.macs import has_unknown_work
from edgekit.errors import UsageError
from edgekit.graph.graph import Graph, infer_graph
from edgekit.prepare.shapes.derived_dims import formula_names
from edgekit.prepare.shapes.dims import DynamicDim, find_dynamic_dims, fix_dims

# One sample; a side of a picture, which nets halve five times and more; a length, as of a text.
_SAMPLES, _SIDE, _LENGTH = 1, 224, 128
_PICTURE_RANK = 4


def choose_sizes(graph: onnx.GraphProto) -> dict[str, int]:
    """Returns a size for each open dimension of the inputs, by its name or as `INPUT:AXIS`; of a formula, the names.

    It is 1 for the samples, 224 for the sides of pictures, and 128 for every other length.
    """
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.input}
    dims = find_dynamic_dims(graph)
    sizes: dict[str, int] = {}
    # What a dimension of its own says comes first, then what formulas hold alone.
    for is_formula in (False, True):
        for dim in dims:
            names = formula_names(dim.name)
            if bool(names) == is_formula:
                for name in sorted(names) or [dim.name]:
                    sizes.setdefault(name, _choose_size(dim, ranks[dim.input], dims))
    return sizes


def count_open(graph: Graph) -> Graph:
    """Returns a graph whose values know at which sizes work is counted; the same one where no input is open."""
    sizes = choose_sizes(graph.proto)
    if not sizes or any(value.counted for value in graph.values.values()):
        return graph
    sized = onnx.ModelProto()
    sized.CopyFrom(graph.model)
    try:
        fix_dims(sized.graph, sizes, may_stay_open=True)
    # A formula comes to no size there.
    except UsageError:
        return graph
    known = infer_graph(sized).values
    values = {
        name: msgspec.structs.replace(value, counted=known[name].shape) if name in known else value
        for name, value in graph.values.items()
    }
    return msgspec.structs.replace(graph, values=values)


def count_unsized(graph: Graph) -> int:
    """Returns how many nodes multiply, those in bodies too, whose work is not known."""
    return sum(has_unknown_work(each, node) for each in _list_graphs(graph) for node in each.nodes)


def _choose_size(dim: DynamicDim, rank: int, dims: tuple[DynamicDim, ...]) -> int:
    if dim.axis == 0 and rank > 1:
        return _SAMPLES
    sides = [each for each in dims if each.input == dim.input and each.axis]
    return _SIDE if rank >= _PICTURE_RANK and len(sides) > 1 else _LENGTH


def _list_graphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.nodes:
        for body in node.bodies:
            yield from _list_graphs(body)
