"""Models: the facts read, where their weights lie, and one tiny file per way to be wrong."""

import mmap
from pathlib import Path

import numpy as np
import onnx
import pytest
from demo_paths import MODEL
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.backend.test import loader
from tiny_models import parse_model, parse_net, save_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import ModelError
from edgekit.model import external
from edgekit.model.external import DataPlace, count_bytes, list_files, point_into, point_to, read_place, skim_model
from edgekit.model.model import copy_without_weights, load_model, order_nodes, read_proto, save_proto
from edgekit.model.tensors import Array


def test_facts_are_read(relu_model: Path) -> None:
    model = load_model(relu_model)
    assert (model.name, model.opsets, model.ir_version, model.node_count) == ("relu", {"ai.onnx": 17}, 8, 1)
    assert [str(spec) for spec in (*model.inputs, *model.outputs)] == ["x: float32[1,3]", "y: float32[1,3]"]
    assert model.is_static


def test_initializers_that_are_inputs_are_no_inputs(tmp_path: Path) -> None:
    text = """<ir_version: 3, opset_import: ["" : 9]> g (float[1] x, float[1] w) => (float[1] y) <float[1] w = {2}>
        { y = Mul(x, w) }"""
    assert [spec.name for spec in load_model(parse_model(text, tmp_path / "m.onnx")).inputs] == ["x"]


def test_dynamic_and_unknown_shapes_are_told_apart(tmp_path: Path) -> None:
    text = "g (float[N,?] x, float z) => (float[N,?] y) { y = Identity(x) }"
    inputs = load_model(parse_model(text, tmp_path / "m.onnx")).inputs
    assert inputs[0].shape == ("N", None)
    assert inputs[1].shape in {None, ()}
    assert not inputs[0].is_static


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<html>not found</html>", "is not an ONNX model"),
        (b"\x08\x08", "holds no ONNX graph"),
        (parse_net("(float[1] x) => (float[1] x) { }").SerializeToString(), "no node of 'bad.onnx' computes anything"),
        (b"\xff" * 64, "is not an ONNX model"),
        (b"\x3a" + b"\xff" * 11, "is not an ONNX model"),
    ],
)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"\x1c\0\0\0TFL3" + bytes(40), "tf2onnx"),
        (b"PK\x03\x04" + bytes(40), "torch.onnx.export"),
        (b"\x80\x02}q\0" + bytes(40), "torch.onnx.export"),
        (b"{}", "or export it again"),
    ],
)
def test_a_file_of_another_kind_is_told_what_makes_a_model_of_it(tmp_path: Path, content: bytes, hint: str) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model(tmp_path / "m.onnx")
    assert hint in caught.value.hint


def test_a_cut_off_model_is_refused(relu_model: Path) -> None:
    relu_model.write_bytes(relu_model.read_bytes()[:-7])
    with pytest.raises(ModelError, match="cut off"):
        load_model(relu_model)


def test_a_missing_file_a_folder_and_an_ort_file_are_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no.onnx", "no file"), (tmp_path, "cannot read"), (tmp_path / "m.ort", "final")):
        with pytest.raises(ModelError, match=message):
            load_model(path)


@pytest.mark.parametrize(("fields", "message"), [({"ir_version": 99}, "IR version 99"), ({}, "opset 99")])
def test_a_model_that_is_too_new_is_refused(tmp_path: Path, fields: dict[str, int], message: str) -> None:
    opset = 17 if fields else 99
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[1] x) => (float[1] y) {{ y = Relu(x) }}'
    with pytest.raises(ModelError, match=message):
        load_model(parse_model(text, tmp_path / "new.onnx", **fields))


def _external(path: Path, location: str) -> Path:
    proto = onnx.load(
        save_net("(float[64] x) => (float[64] y) { y = Add(x, w) }", path, w=np.ones(64, np.float32)).path
    )
    onnx.save(proto, str(path), save_as_external_data=True, location="w.data", size_threshold=0)
    proto = onnx.load(str(path), load_external_data=False)
    next(entry for entry in proto.graph.initializer[0].external_data if entry.key == "location").value = location
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data_is_found_digested_and_counted(tmp_path: Path) -> None:
    path = _external(tmp_path / "m.onnx", "w.data")
    model = load_model(path)
    assert model.external_files == ("w.data",)
    assert model.size_bytes == path.stat().st_size + 256
    (tmp_path / "w.data").write_bytes(b"\0" * 256)
    assert load_model(path).sha256 != model.sha256


@pytest.mark.parametrize(
    ("location", "message"), [("gone.data", "missing"), ("../w.data", "outside"), ("/etc/passwd", "outside")]
)
def test_external_data_that_is_missing_or_outside_is_refused(tmp_path: Path, location: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(_external(tmp_path / "m.onnx", location))


def test_saving_is_deterministic_and_keeps_the_graph(relu_model: Path, tmp_path: Path) -> None:
    proto = read_proto(load_model(relu_model))
    first, second = save_proto(proto, tmp_path / "a.onnx"), save_proto(proto, tmp_path / "b.onnx")
    assert first.sha256 == second.sha256
    assert read_proto(first) == proto


@pytest.mark.fuzz
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_damage_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, position: int, value: int) -> None:
    text = "g (float[1,3] x) => (float[1,3] y) { y = Relu(x) }"
    path = parse_model(text, tmp_path_factory.mktemp("fuzz") / "m.onnx")
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(bytes(content))
    try:
        load_model(path)
    except ModelError:
        return


def test_nodes_come_behind_what_they_and_their_bodies_read_and_a_cycle_loses_none() -> None:
    body = "() => (float y) { y = Neg(b) }"
    text = f"d = If (c) <then_branch = t {body}, else_branch = e {body}> b = Abs(a) a = Abs(x)"
    graph = parser.parse_graph(f"g (float x, bool c) => (float d) {{ {text} }}")
    assert [node.output[0] for node in order_nodes(graph)] == ["a", "b", "d"]
    assert len(order_nodes(parser.parse_graph("g () => (float b) { a = Abs(b) b = Abs(a) }"))) == 2


def test_a_large_file_is_read_weight_by_weight_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """(float[300,200] x) => (float[300,200] y) <float small = {2}> {
      a = Add(x, w0) b = Mul(a, w1) c = Sub(b, w2) y = Mul(c, small) }"""
    path = tmp_path / "m.onnx"
    save_net(text, path, **{f"w{at}": np.full((300, 200), at, np.float32) for at in range(3)})
    monkeypatch.setattr("edgekit.model.model.LARGE_BYTES", 0)
    assert read_proto(load_model(path)) == onnx.load(str(path))


def test_a_place_is_read_as_it_was_written_and_without_a_length_holds_the_whole_tensor() -> None:
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32), "w")
    assert read_place(tensor) is None
    point_to(tensor, DataPlace("w.data", 4096, 24))
    assert not tensor.raw_data
    point_to(tensor, DataPlace("v.data", 0, 24))
    assert read_place(tensor) == DataPlace("v.data", 0, 24)
    assert list(list_files([tensor])) == ["v.data"]
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[3, 5], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.data")
    assert read_place(tensor) == DataPlace("w.data", 0, 60)


_BYTES = {"FLOAT": 28, "FLOAT16": 14, "BOOL": 7, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "STRING": None}


@pytest.mark.parametrize(("kind", "wanted"), _BYTES.items())
def test_bytes_are_counted_as_they_are_stored(kind: str, wanted: int | None) -> None:
    number = onnx.TensorProto.DataType.Value(kind)
    assert count_bytes(onnx.TensorProto(data_type=number, dims=[7])) == wanted
    if wanted is not None:
        values = np.asarray([1, 0, 1, 0, 1, 0, 1]).astype(onnx.helper.tensor_dtype_to_np_dtype(number))
        assert len(numpy_helper.from_array(values, "w").raw_data) == wanted


LIGHT = Path(loader.DATA_DIR) / "light"


@pytest.mark.parametrize("path", [LIGHT / "light_squeezenet.onnx", MODEL], ids=lambda path: path.stem)
def test_a_model_of_small_tensors_stays_as_it_is(path: Path) -> None:
    assert skim_model(path) == onnx.load(str(path))


def _save_big(path: Path, array: Array, *, raw: bool, said: bool = False) -> Path:
    """Writes the sum of a weight, stored raw or not, and the same as a constant."""
    tensor = helper.make_tensor("w", TensorProto.FLOAT, array.shape, array.tobytes() if raw else array.ravel(), raw=raw)
    if said:
        tensor.data_location = TensorProto.DEFAULT
    proto = parse_net("() => (float[300,400] y) { y = Add(w, c) }")
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(array, "c")))
    proto.graph.initializer.append(tensor)
    onnx.save(proto, str(path))
    return path


def test_skimming_reads_no_lists_of_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees have millions of numbers in attributes, each a field: 194 MB of them took minutes and gigabytes."""
    node = onnx.helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml",
        nodes_values=[0.5] * 300_000, nodes_featureids=[1] * 300_000,
    )  # fmt: skip
    graph = onnx.helper.make_graph([node], "g", [], [])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "m.onnx"))
    reads, read = list[int](), external._read_varint

    def count(data: mmap.mmap, at: int) -> tuple[int, int]:
        reads.append(at)
        return read(data, at)

    monkeypatch.setattr(external, "_read_varint", count)
    whole = onnx.load(str(tmp_path / "m.onnx"))
    assert point_into(tmp_path / "m.onnx") == whole
    for attribute in whole.graph.node[0].attribute:
        attribute.ClearField("floats" if attribute.type == onnx.AttributeProto.FLOATS else "ints")
    assert skim_model(tmp_path / "m.onnx") == whole
    assert len(reads) < 100
    assert skim_model(tmp_path / "m.onnx").ByteSize() < 200


@pytest.mark.parametrize(("op", "name"), [("Constant", "value_ints"), ("TfIdfVectorizer", "ngram_indexes")])
def test_a_long_list_on_which_a_shape_depends_stays(op: str, name: str, tmp_path: Path) -> None:
    node = onnx.helper.make_node(op, [], ["y"])
    node.attribute.append(onnx.helper.make_attribute(name, list(range(300_000))))
    whole = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], []))
    onnx.save(whole, str(tmp_path / "m.onnx"))
    assert skim_model(tmp_path / "m.onnx") == whole
    assert copy_without_weights(whole, lists=False) == whole


@pytest.mark.parametrize("raw", [True, False], ids=["raw_data", "float_data"])
def test_big_weights_go_and_their_shapes_stay(tmp_path: Path, *, raw: bool) -> None:
    skimmed = skim_model(_save_big(tmp_path / "m.onnx", np.ones((300, 400), np.float32), raw=raw))
    assert skimmed.ByteSize() < 400
    assert list(skimmed.graph.initializer[0].dims) == [300, 400]
    assert list(skimmed.graph.node[0].attribute[0].t.dims) == [300, 400]


# Of external data that were loaded the tensor says so: behind the data, where it hid that these lie outside again.
@pytest.mark.parametrize(
    ("raw", "said"),
    [(True, False), (True, True), (False, True)],
    ids=["raw_data", "raw_data_once_outside", "float_data"],
)
def test_big_weights_are_used_where_they_lie(tmp_path: Path, *, raw: bool, said: bool) -> None:
    array = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    pointing = point_into(_save_big(tmp_path / "m.onnx", array, raw=raw, said=said))
    assert (pointing.graph.initializer[0].data_location == TensorProto.EXTERNAL) is raw
    config = {"session.model_external_initializers_file_folder_path": str(tmp_path)}
    got = CpuSession(pointing.SerializeToString(), SessionSettings(config=config)).run({})["y"]
    assert np.array_equal(got, array + array)
