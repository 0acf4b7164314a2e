"""Models with external data: written again without loading the weights."""

import shutil
from pathlib import Path

import onnx

from edgekit.model import Model, iterate_graphs, load_model

_PAGE_BYTES = 4096


def write_beside(proto: onnx.ModelProto, source: Model, path: Path) -> Model:
    """Writes a graph whose external weights still lie with `source`, copies them into `path` + ".data", and returns it.

    Weights of several files go into one, each file on a page of its own.
    """
    if source.external_files:
        _gather_data(proto, source, path.with_name(f"{path.name}.data"))
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return load_model(path)


def _gather_data(proto: onnx.ModelProto, source: Model, path: Path) -> None:
    starts: dict[str, int] = {}
    with path.open("wb") as out:
        for name in source.external_files:
            out.write(bytes(-out.tell() % _PAGE_BYTES))
            starts[name] = out.tell()
            with (source.path.parent / name).open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    for graph in iterate_graphs(proto.graph):
        attributes = [attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t")]
        for tensor in (*graph.initializer, *attributes):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                _repoint(tensor, path.name, starts)


def _repoint(tensor: onnx.TensorProto, name: str, starts: dict[str, int]) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    entries["offset"] = str(int(entries.get("offset", "0")) + starts[entries["location"]])
    entries["location"] = name
    del tensor.external_data[:]
    for key in ("location", "offset", "length"):
        if key in entries:
            tensor.external_data.add(key=key, value=entries[key])
