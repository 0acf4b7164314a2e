"""What the flatbuffers library would cost in place of edgekit's own reader and writer of the ORT format.

`.venv/bin/python tools/bench/ort_flatbuffers.py FILE.ort` reads and writes a file in both ways, each in a process of
its own, and prints CPU seconds, peak memory and whether the library notices a file whose offsets lead outside.
"""

import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import flatbuffers

from edgekit.convert.ort_format.canonical import sort_tables
from edgekit.convert.ort_format.layout import write_tables
from edgekit.convert.ort_format.tables import (
    NUMBER_SIZES,
    ROOT,
    SCHEMA,
    UNIONS,
    Field,
    Record,
    Value,
    number,
    open_tables,
    records,
    table,
)
from edgekit.machine import own_peak_bytes


def read_own(path: Path) -> object:
    """Reads every table, each offset checked."""
    with open_tables(path) as file:
        graph = table(table(file.root, "model"), "graph")
        return (
            [(node.get("name"), node.get("op_type"), node.get("inputs")) for node in records(graph, "nodes")],
            [(value.get("name"), table(value, "type").get("value_type")) for value in records(graph, "node_args")],
            [len(tensor.get("raw_data", b"")) for tensor in records(graph, "initializers")],
        )


def read_library(path: Path) -> object:
    """Reads nodes, values and weights by the code that flatc generated for ONNX Runtime's wheel; it checks nothing."""
    importlib.import_module("onnxruntime.tools.ort_format_model")
    fbs: Any = importlib.import_module("ort_flatbuffers_py.fbs.InferenceSession")
    graph = fbs.InferenceSession.GetRootAs(path.read_bytes(), 0).Model().Graph()
    nodes = [graph.Nodes(index) for index in range(graph.NodesLength())]
    values = [graph.NodeArgs(index) for index in range(graph.NodeArgsLength())]
    return (
        [(node.Name(), node.OpType(), [node.Inputs(index) for index in range(node.InputsLength())]) for node in nodes],
        [(value.Name(), value.Type() and value.Type().ValueType()) for value in values],
        [graph.Initializers(index).RawDataLength() for index in range(graph.InitializersLength())],
    )


def write_own(path: Path) -> object:
    """Writes a file in canonical order, weights straight from where they lie."""
    with tempfile.TemporaryDirectory() as folder, open_tables(path) as file:
        write_tables(sort_tables(file.root, ROOT), Path(folder) / "own.ort")
        return (Path(folder) / "own.ort").stat().st_size


def write_library(path: Path) -> object:
    """Writes the same tables in the same order with the library's Builder, back to front."""
    with tempfile.TemporaryDirectory() as folder, open_tables(path) as file:
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(_build(builder, sort_tables(file.root, ROOT), ROOT), file_identifier=b"ORTM")
        (Path(folder) / "library.ort").write_bytes(builder.Output())
        with open_tables(Path(folder) / "library.ort") as written:
            if written.root.keys() != file.root.keys():
                raise ValueError("what the library wrote is read otherwise")
        return (Path(folder) / "library.ort").stat().st_size


def _build(builder: Any, record: Record, kind: str) -> int:
    fields = {field.name: (slot, field) for slot, field in enumerate(SCHEMA[kind])}
    links = {
        name: _build_value(builder, value, fields[name][1], record)
        for name, value in record.items()
        if fields[name][1].kind not in NUMBER_SIZES
    }
    builder.StartObject(len(SCHEMA[kind]))
    for name, value in record.items():
        slot = fields[name][0]
        if name in links:
            builder.PrependUOffsetTRelativeSlot(slot, links[name], 0)
        else:
            _put(builder, cast("bytes", value), align=len(value))
            builder.Slot(slot)
    return int(builder.EndObject())


def _put(builder: Any, data: bytes | memoryview, *, align: int) -> None:
    builder.Prep(align, len(data) - align)
    builder.head = builder.head - len(data)
    builder.Bytes[builder.head : builder.head + len(data)] = data


def _build_value(builder: Any, value: Value, field: Field, record: Record) -> int:
    if isinstance(value, bytes):
        return int(builder.CreateSharedString(value.decode()))
    if isinstance(value, dict):
        union = field.kind == "union"
        return _build(builder, value, UNIONS[field.of][number(record, f"{field.name}_type")] if union else field.of)
    if isinstance(value, memoryview):
        size = 1 if field.kind == "blob" else NUMBER_SIZES[field.kind[1:-1]]
        builder.StartVector(size, len(value) // size, 64 if field.kind == "blob" else min(size, 8) if size != 12 else 4)
        _put(builder, value, align=1)
        return int(builder.EndVector())
    items = [
        int(builder.CreateSharedString(item.decode())) if isinstance(item, bytes) else _build(builder, item, field.of)
        for item in value
    ]
    builder.StartVector(4, len(items), 4)
    for item in reversed(items):
        builder.PrependUOffsetTRelative(item)
    return int(builder.EndVector())


def count_unnoticed(path: Path, read: Callable[[Path], object]) -> str:
    """Returns of how many files with one offset changed nothing is noticed: what was read is then something else."""
    data = bytearray(path.read_bytes())
    places = range(8, min(len(data) - 4, 40_000), max(4, min(len(data), 40_000) // 200 // 4 * 4))
    whole, unnoticed = str(read(path)), 0
    with tempfile.TemporaryDirectory() as folder:
        for place in places:
            broken = Path(folder) / "broken.ort"
            broken.write_bytes(data[:place] + (0xFFFFFF00).to_bytes(4, "little") + data[place + 4 :])
            try:
                unnoticed += str(read(broken)) != whole
            except Exception:  # noqa: BLE001, S112 - each way to refuse counts
                continue
    return f"{unnoticed} of {len(places)} broken files read as something else"


WAYS: Mapping[str, Callable[[Path], object]] = {
    "read, edgekit": read_own,
    "read, flatbuffers": read_library,
    "write, edgekit": write_own,
    "write, flatbuffers": write_library,
}


def main() -> None:
    """Measures each way in a process of its own."""
    path = Path(sys.argv[1])
    if len(sys.argv) == 3:
        begin, held = time.process_time(), own_peak_bytes()
        WAYS[sys.argv[2]](path)
        seconds = time.process_time() - begin
        print(f"{sys.argv[2]:20} {seconds:8.3f} CPU s, {(own_peak_bytes() - held) / 1e6:7.1f} MB more")
        return
    print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    for way in WAYS:
        subprocess.run([sys.executable, __file__, str(path), way], check=True)
    for way in ("read, edgekit", "read, flatbuffers"):
        print(f"{way:20} {count_unnoticed(path, WAYS[way])}")


if __name__ == "__main__":
    main()
