"""The reader of ORT-format files: agreement with ONNX Runtime's own, and files that lie."""

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from convert_models import RUNTIME, ZOO, make_float, make_qdq, write_form
from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs import InferenceSession as FbsSession

from edgekit.convert.ort_format.report import inspect_ort, read_graph
from edgekit.convert.ort_format.tables import Record, write_tables
from edgekit.errors import ModelError


def test_onnx_runtimes_own_reader_sees_the_same_nodes(tmp_path: Path) -> None:
    data = write_form(make_qdq(tmp_path / "m.onnx"), tmp_path / "m.ort", RUNTIME)
    session: Any = FbsSession.InferenceSession.GetRootAs(bytearray(data), 0)
    graph = session.Model().Graph()
    nodes = [graph.Nodes(index) for index in range(graph.NodesLength())]
    assert [(node.Name().decode(), node.OpType().decode(), node.Index()) for node in nodes] == [
        (node.name, node.op, node.index) for node in read_graph(tmp_path / "m.ort").nodes
    ]


def test_the_report_holds_the_facts(tmp_path: Path) -> None:
    write_form(make_qdq(tmp_path / "m.onnx"), tmp_path / "m.ort", RUNTIME)
    report = inspect_ort(tmp_path / "m.ort")
    assert (report.format_version, report.ir_version, report.opsets["ai.onnx"]) == ("6", 8, 17)
    assert (report.writer, report.canonical_form) == ("ONNX Runtime 1.16 or newer", 1)
    assert (report.inputs, report.outputs, report.metadata) == (("x",), ("y",), {"author": "me"})
    assert (report.ops["Conv"], report.nodes) == (2, sum(report.ops.values()))
    assert report.saved_optimizations == {"QLinearConv": 2}
    assert ":QLinearConv:10" in report.kernels
    assert (report.initializers, report.initializer_bytes) == (5, 4 + 1 + 1 + 9 + 9)


@pytest.mark.skipif(not ZOO.is_dir(), reason="needs ../shared/zoo")
def test_a_file_of_an_old_writer_is_read() -> None:
    report = inspect_ort(ZOO / "models/mnist8.ort")
    assert report.ops["MaxPool"] == 2
    assert int(report.format_version) < 6


def test_no_ort_file_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"ORTM", b"\0" * 64, b"<html>404</html>", b"\x08\0\0\0ORTM" + b"\xff" * 40):
        (tmp_path / "bad.ort").write_bytes(content)
        with pytest.raises(ModelError, match="is no whole ORT-format file"):
            inspect_ort(tmp_path / "bad.ort")
    with pytest.raises(ModelError, match="cannot read"):
        inspect_ort(tmp_path / "none.ort")


def test_a_cut_off_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    data = write_form(make_float(tmp_path / "m.onnx"), tmp_path / "m.ort", RUNTIME)
    for size in range(0, len(data) - 8, len(data) // 60):
        (tmp_path / "cut.ort").write_bytes(data[:size])
        with pytest.raises(ModelError):
            inspect_ort(tmp_path / "cut.ort")


def test_an_altered_file_is_refused_or_read_but_never_crashes(tmp_path: Path) -> None:
    data = write_form(make_qdq(tmp_path / "m.onnx"), tmp_path / "m.ort", RUNTIME)
    rng = random.Random(5)  # noqa: S311 - a test's choice
    refused = 0
    for _ in range(150):
        altered = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            altered[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        (tmp_path / "altered.ort").write_bytes(altered)
        try:
            inspect_ort(tmp_path / "altered.ort")
        except ModelError:
            refused += 1
    assert refused > 20


def test_tables_that_are_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    kind: Record = {"value_type": b"\x01", "value": {}}
    for _ in range(200):
        kind = {"value_type": b"\x02", "value": {"elem_type": kind}}
    values: list[Record] = [{"name": b"x", "type": kind}]
    root: Record = {"model": {"graph": {"node_args": values}}}
    write_tables(root, tmp_path / "deep.ort")
    with pytest.raises(ModelError, match="nested too deeply"):
        inspect_ort(tmp_path / "deep.ort")


def test_a_shape_of_too_many_dimensions_is_refused(tmp_path: Path) -> None:
    dims: list[Record] = [{"denotation": b""}] * 1024
    values: list[Record] = [{"name": b"x", "type": {"value_type": b"\x01", "value": {"shape": {"dim": dims}}}}]
    root: Record = {"model": {"graph": {"node_args": values}}}
    write_tables(root, tmp_path / "m.ort")
    inspect_ort(tmp_path / "m.ort")
    dims.append({})
    write_tables(root, tmp_path / "m.ort")
    with pytest.raises(ModelError, match="a tensor of 1025 dimensions"):
        inspect_ort(tmp_path / "m.ort")


def test_a_file_that_grows_on_reading_is_refused(tmp_path: Path) -> None:
    short, long = [b"a"], [b"a"] * 500
    values: list[Record] = [{"inputs": short if index < 40 else long} for index in range(41)]
    write_tables({"model": {"graph": {"nodes": values}}}, tmp_path / "m.ort")
    assert len(read_graph(tmp_path / "m.ort").nodes[40].inputs) == 500
    data = bytearray((tmp_path / "m.ort").read_bytes())
    long_list = data.index(struct.pack("<II", 4, 500)) + 4
    for at in range(8, long_list - 4, 4):
        if data[at : at + 8] == struct.pack("<II", 4, 1):
            data[at : at + 4] = (long_list - at).to_bytes(4, "little")
    (tmp_path / "m.ort").write_bytes(data)
    with pytest.raises(ModelError, match="its tables share parts"):
        inspect_ort(tmp_path / "m.ort")


def test_a_union_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    values: list[Record] = [{"type": {"value_type": b"\x01", "value": {}}}]
    root: Record = {"model": {"graph": {"node_args": values}}}
    write_tables(root, tmp_path / "m.ort")
    data = (tmp_path / "m.ort").read_bytes()
    (tmp_path / "m.ort").write_bytes(data.replace(b"\x01", b"\x09"))
    with pytest.raises(ModelError):
        inspect_ort(tmp_path / "m.ort")
