"""What goes into an ORT-format file and what comes out."""

from pathlib import Path

from edgekit.convert.ort_format.tables import Record, number, open_tables, records, table, text, texts
from edgekit.model.model import tensor_dtype
from edgekit.model.tensors import TensorSpec

_TENSOR, _NAMED = 1, 2


def read_interface(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the inputs, without the initializers, and the outputs of an ORT-format file; nothing of it is run.

    Raises:
        ModelError: the file is missing, cut off, altered, or no ORT-format file.
    """
    with open_tables(path) as file:
        graph = table(table(file.root, "model"), "graph")
        values = {text(value, "name"): table(value, "type") for value in records(graph, "node_args")}
        stored = {text(tensor, "name") for tensor in records(graph, "initializers")}
        inputs = tuple(_spec(name, values.get(name, {})) for name in texts(graph, "inputs") if name not in stored)
        return inputs, tuple(_spec(name, values.get(name, {})) for name in texts(graph, "outputs"))


def _spec(name: str, kind: Record) -> TensorSpec:
    if number(kind, "value_type") != _TENSOR:
        return TensorSpec(name=name, dtype="sequence", shape=None)
    tensor = table(kind, "value")
    shape = tuple(_dim(table(dim, "value")) for dim in records(table(tensor, "shape"), "dim"))
    has_shape = "shape" in tensor
    return TensorSpec(name=name, dtype=tensor_dtype(number(tensor, "elem_type")), shape=shape if has_shape else None)


def _dim(value: Record) -> int | str | None:
    if number(value, "dim_type") == _NAMED:
        return text(value, "dim_param") or None
    return number(value, "dim_value") or None
