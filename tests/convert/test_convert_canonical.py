"""Canonical files: the same bytes always, the same results, and nothing unknown let through."""

import collections
import importlib
import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from convert_models import ARM, RUNTIME, ZOO, all_forms, make_branches, make_float, make_qdq, run_ort, write_form
from fixture_types import Shown
from onnx import helper
from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs import InferenceSession as FbsSession
from tiny_models import parse_model

from edgekit._ort import VERSION, CpuSession, Level, SessionSettings, optimize_graph
from edgekit.cli.main import run_command
from edgekit.convert.convert import convert_model, find_needed_ort
from edgekit.convert.ort_form import REPLAY, OrtOptions, write_ort
from edgekit.convert.ort_format import canonical, tables
from edgekit.convert.ort_format.canonical import canonicalize_file, is_canonical, repair_saved, sort_tables
from edgekit.convert.ort_format.report import count_ops, inspect_ort, read_graph, replay_saved
from edgekit.convert.ort_format.tables import Record, Value, number, open_tables, records, table, text
from edgekit.errors import ModelError, RuntimeRefusal
from edgekit.model.model import load_model
from edgekit.prepare.opset import MAX_IR_VERSION, MAX_OPSET, lower_model
from edgekit.target import load_target

STATE: Any = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
RAW = {"session.save_model_format": "ORT", "session.qdqisint8allowed": "1"}
SAVE = {"optimization.minimal_build_optimizations": "save"}


def write_raw(model: Path, out: Path, config: dict[str, str]) -> Path:
    settings = SessionSettings(level=Level.ALL, config={**RAW, **config}, disabled_optimizers=("NchwcTransformer",))
    optimize_graph(model, out, settings)
    return out


def test_another_process_seed_and_folder_give_the_same_bytes(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx")
    here = [write_form(model, tmp_path / "m.ort", options) for options in (ARM, RUNTIME)]
    program = (
        "import sys; from pathlib import Path; sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]\n"
        "from convert_models import *; folder = Path(sys.argv[2]); model = make_qdq(folder / 'other.onnx')\n"
        "for options in (ARM, RUNTIME): write_form(model, folder / f'{options.style}.ort', options)"
    )
    folder = tmp_path / "another" / "deeper"
    argv = [sys.executable, "-c", program, str(Path(__file__).parent), str(folder)]
    subprocess.run(argv, check=True, env={"PYTHONHASHSEED": "77", "PYTHONPATH": str(Path(__file__).parents[2])})
    assert [(folder / f"{style}.ort").read_bytes() for style in ("full", "runtime")] == here


@pytest.mark.parametrize("config", [{}, SAVE], ids=["full", "runtime"])
@pytest.mark.parametrize("saved", [True, False])
def test_results_do_not_change_by_a_bit(tmp_path: Path, config: dict[str, str], saved: bool) -> None:
    raw = write_raw(make_qdq(tmp_path / "m.onnx").path, tmp_path / "raw.ort", config)
    before = run_ort(raw, (1, 3, 4, 4), saved=saved)
    assert inspect_ort(raw).canonical_form is None
    canonicalize_file(raw)
    assert inspect_ort(raw).canonical_form == canonical.CANONICAL_VERSION
    assert np.array_equal(run_ort(raw, (1, 3, 4, 4), saved=saved), before)


def test_a_canonical_file_stays_as_it_is(tmp_path: Path) -> None:
    first = write_form(make_float(tmp_path / "m.onnx"), tmp_path / "m.ort", ARM)
    assert is_canonical(tmp_path / "m.ort")
    assert not is_canonical(write_raw(tmp_path / "m.onnx", tmp_path / "raw.ort", {}))
    canonicalize_file(tmp_path / "m.ort")
    assert (tmp_path / "m.ort").read_bytes() == first


def shuffle(value: Value, kind: str, rng: random.Random) -> Value:
    """Shuffles every list that has no order, all the way down."""
    if isinstance(value, dict):
        fields = {field.name: field for field in tables.SCHEMA[kind]}
        shuffled: Record = {}
        for name, item in value.items():
            field = fields[name]
            of = tables.UNIONS[field.of][number(value, f"{name}_type")] if field.kind == "union" else field.of
            shuffled[name] = shuffle(item, of, rng)
            if field.key and isinstance(shuffled[name], list):
                rng.shuffle(shuffled[name])  # type: ignore[arg-type]
        return shuffled
    return [shuffle(item, kind, rng) for item in value] if isinstance(value, list) and kind else value  # type: ignore[return-value]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shuffled_file_gives_the_same_results_and_the_same_bytes(tmp_path: Path, seed: int) -> None:
    canonical_bytes = write_form(make_qdq(tmp_path / "m.onnx"), tmp_path / "m.ort", RUNTIME)
    before = run_ort(tmp_path / "m.ort", (1, 3, 4, 4))
    with open_tables(tmp_path / "m.ort") as file:
        root = shuffle(file.root, tables.ROOT, random.Random(seed))  # noqa: S311 - a test's order
        tables.write_tables(root, tmp_path / "shuffled.ort")  # type: ignore[arg-type]
    assert (tmp_path / "shuffled.ort").read_bytes() != canonical_bytes
    assert np.array_equal(run_ort(tmp_path / "shuffled.ort", (1, 3, 4, 4)), before)
    canonicalize_file(tmp_path / "shuffled.ort")
    assert (tmp_path / "shuffled.ort").read_bytes() == canonical_bytes


def test_names_are_sorted_as_texts_and_numbers_by_their_value() -> None:
    tensors: list[Record] = [{"name": b"b1"}, {"name": b"a2"}]
    nodes: list[Record] = [{"index": (256).to_bytes(4, "little")}, {"index": (2).to_bytes(4, "little")}]
    given: Record = {"initializers": tensors, "nodes": nodes}
    assert sort_tables(given, "Graph") == {"initializers": tensors[::-1], "nodes": nodes[::-1]}


def read_arguments(op: str) -> dict[str, list[tuple[int, int]]]:
    """Returns the arguments of each type of an operator, by ONNX Runtime's own schema: (0, 2) is the third input."""
    domain, name, version = op.split(":")
    every = STATE.get_all_operator_schema()
    (schema,) = (s for s in every if (s.domain, s.name, s.since_version) == (domain, name, int(version)))
    found: dict[str, list[tuple[int, int]]] = {}
    for kind, arguments in enumerate((schema.inputs, schema.outputs)):
        for index, each in enumerate(arguments):
            # A type that is no parameter has the name of its argument.
            is_parameter = each.typeStr in {constraint.type_param_str for constraint in schema.type_constraints}
            found.setdefault(each.typeStr if is_parameter else each.name, []).append((kind, index))
    return found


@pytest.mark.parametrize(
    ("action", "outputs", "opset", "op"),
    [
        ("MatMul", 1, 17, ":QLinearMatMul:10"), ("MatMul", 1, 20, ":QLinearMatMul:10"),
        ("MatMul", 1, 21, ":QLinearMatMul:21"), ("MatMul", 0, 21, "com.microsoft:MatMulIntegerToFloat:1"),
        ("dropSplitQDQ", 1, 17, ":Split:13"), ("dropSplitQDQ", 1, 18, ":Split:18"), ("Conv", 1, 17, None),
    ],
)  # fmt: skip
def test_a_saved_optimization_gets_its_kernels_types(action: str, outputs: int, opset: int, op: str | None) -> None:
    saved: Record = {"action_id": action.encode(), "nodes_to_optimize_indices": {"num_outputs": bytes([outputs])}}
    entries: list[Record] = [{"runtime_optimization_records": [saved]}]
    imports: list[Record] = [{"domain": b"", "version": bytes([opset])}]
    kernels: Record = {"op_kernel_type_str_args": []}
    graph: Record = {"runtime_optimizations": {"records": entries}}
    repair_saved({"model": {"graph": graph, "opset_import": imports}, "kernel_type_str_resolver": kernels})
    assert saved.get("produced_op_ids") == (None if op is None else [op.encode()])
    for kernel in records(kernels, "op_kernel_type_str_args"):
        assert text(kernel, "op_id") == op
        assert read_arguments(op or "") == {
            text(each, "kernel_type_str"): [
                (number(argument, "arg_type"), number(argument, "index")) for argument in records(each, "args")
            ]
            for each in records(kernel, "kernel_type_str_args")
        }
    assert len(records(kernels, "op_kernel_type_str_args")) == (op is not None)


def test_an_unknown_format_version_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    raw = write_raw(make_float(tmp_path / "m.onnx").path, tmp_path / "raw.ort", {})
    with open_tables(raw) as file:
        tables.write_tables(sort_tables({**file.root, "ort_version": b"9"}, tables.ROOT), tmp_path / "new.ort")
    before = (tmp_path / "new.ort").read_bytes()
    with pytest.raises(ModelError, match="format version '9', whose order is not known"):
        canonicalize_file(tmp_path / "new.ort")
    assert not is_canonical(tmp_path / "new.ort")
    assert (tmp_path / "new.ort").read_bytes() == before


def test_a_table_with_an_unknown_slot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_raw(make_float(tmp_path / "m.onnx").path, tmp_path / "raw.ort", {})
    monkeypatch.setitem(tables.SCHEMA, "Model", tables.SCHEMA["Model"][:7])
    with pytest.raises(ModelError, match=r"tables that are not known: Model\.7"):
        canonicalize_file(raw)
    assert not is_canonical(raw)


def change_weights(graph: Record, change: Callable[[bytes], bytes]) -> Record:
    data = [bytes(cast("memoryview", tensor["raw_data"])) for tensor in records(graph, "initializers")]
    pairs = zip(records(graph, "initializers"), data, strict=True)
    return {**graph, "initializers": [{**tensor, "raw_data": memoryview(change(held))} for tensor, held in pairs]}


LOSSES: dict[str, Callable[[Record], Record]] = {
    "name": lambda it: {**it, "nodes": [{**records(it, "nodes")[0], "name": b""}, *records(it, "nodes")[1:]]},
    "node": lambda it: {**it, "nodes": records(it, "nodes")[:-1]},
    "field": lambda it: {name: value for name, value in it.items() if name != "outputs"},
    "byte": lambda it: change_weights(it, lambda data: data[:-1] + b"?"),
    "weight": lambda it: change_weights(it, lambda _: b""),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_a_writer_that_loses_something_is_caught_and_the_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    raw = write_raw(make_float(tmp_path / "m.onnx").path, tmp_path / "raw.ort", {})
    before, write = raw.read_bytes(), tables.write_tables

    def write_less(root: Record, out: Path) -> None:
        model = table(root, "model")
        write({**root, "model": {**model, "graph": LOSSES[lost](table(model, "graph"))}}, out)

    monkeypatch.setattr(tables, "write_tables", write_less)
    with pytest.raises(ModelError, match="changed while it was put in order"):
        canonicalize_file(raw)
    assert raw.read_bytes() == before


def test_x64_files_with_blocked_layouts_are_canonical_too(tmp_path: Path) -> None:
    model = make_branches(tmp_path / "m.onnx")
    options = OrtOptions(style="full", cpu="x64")
    assert len({write_form(model, tmp_path / f"{index}.ort", options) for index in range(5)}) == 1
    assert inspect_ort(tmp_path / "0.ort").ops["com.microsoft.nchwc.ReorderOutput"] == 6
    assert np.allclose(run_ort(tmp_path / "0.ort", (1, 16, 8, 8)), run_ort(model.path, (1, 16, 8, 8)), atol=1e-4)


@pytest.mark.skipif(not ZOO.is_dir(), reason="needs ../shared/zoo")
@pytest.mark.parametrize("name", ["silero_vad", "vww_96_int8_qdq", "scaler_logreg_breastcancer"])
def test_real_models_give_one_sequence_of_bytes(tmp_path: Path, name: str) -> None:
    model = ZOO / f"models/{name}.onnx"
    written = set()
    for index in range(3):
        path = write_raw(model, tmp_path / f"{index}.ort", SAVE)
        canonicalize_file(path)
        written.add(path.read_bytes())
    assert len(written) == 1


# The reader of ORT-format files: agreement with ONNX Runtime's own, and files that lie.


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
    tables.write_tables(root, tmp_path / "deep.ort")
    with pytest.raises(ModelError, match="nested too deeply"):
        inspect_ort(tmp_path / "deep.ort")


def test_a_shape_of_too_many_dimensions_is_refused(tmp_path: Path) -> None:
    dims: list[Record] = [{"denotation": b""}] * 1024
    values: list[Record] = [{"name": b"x", "type": {"value_type": b"\x01", "value": {"shape": {"dim": dims}}}}]
    root: Record = {"model": {"graph": {"node_args": values}}}
    tables.write_tables(root, tmp_path / "m.ort")
    inspect_ort(tmp_path / "m.ort")
    dims.append({})
    tables.write_tables(root, tmp_path / "m.ort")
    with pytest.raises(ModelError, match="a tensor of 1025 dimensions"):
        inspect_ort(tmp_path / "m.ort")


def test_a_file_that_grows_on_reading_is_refused(tmp_path: Path) -> None:
    short, long = [b"a"], [b"a"] * 500
    values: list[Record] = [{"inputs": short if index < 40 else long} for index in range(41)]
    tables.write_tables({"model": {"graph": {"nodes": values}}}, tmp_path / "m.ort")
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
    tables.write_tables(root, tmp_path / "m.ort")
    (tmp_path / "m.ort").write_bytes((tmp_path / "m.ort").read_bytes().replace(b"\x01", b"\x09"))
    with pytest.raises(ModelError):
        inspect_ort(tmp_path / "m.ort")


# What will run: the census agrees with ONNX Runtime's profile, INT8 that did not stick is found, and files mended.


def profile_ops(path: Path, folder: Path, shape: tuple[int, ...]) -> dict[str, int]:
    options: Any = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.add_session_config_entry("session.enable_saved_runtime_optimizations", "1")
    options.add_session_config_entry("session.qdqisint8allowed", "1")
    session: Any = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.zeros(shape, np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = (event for event in events if event["cat"] == "Node" and event["name"].endswith("kernel_time"))
    return dict(collections.Counter(event["args"]["op_name"] for event in ran))


@pytest.mark.parametrize("options", [ARM, RUNTIME], ids=["full", "runtime"])
@pytest.mark.parametrize("between", ["", "Relu"])
def test_the_census_is_what_runs(tmp_path: Path, options: OrtOptions, between: str) -> None:
    write_form(make_qdq(tmp_path / "m.onnx", between=between), tmp_path / "m.ort", options)
    counted = count_ops(replay_saved(read_graph(tmp_path / "m.ort")))
    ran = profile_ops(tmp_path / "m.ort", tmp_path, (1, 3, 4, 4))
    ran.pop("Transpose", None)
    counted.pop("Transpose", None)
    assert counted == ran


def test_int8_that_did_not_stick_is_an_error_with_names(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx", activation="int8", weights=("uint8", "uint8"))
    with pytest.raises(ModelError, match=r"2 nodes of 'model.runtime.ort' .* 'conv1' \(Conv\), 'conv2' \(Conv\)"):
        convert_model(model, all_forms(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_single_layer_without_a_kernel_runs_in_float_and_is_told(tmp_path: Path) -> None:
    """Models that other tools quantized have such layers."""
    model = make_qdq(tmp_path / "m.onnx", activation="int8", weights=("int8", "uint8"))
    converted = convert_model(model, all_forms(), tmp_path / "out")
    told = [node.sentence for node in converted.unfused["runtime"]]
    assert told == ["'conv2' (Conv) has quantized types that no kernel takes"]
    assert converted.census["runtime"]["QLinearConv"] == 1


def test_a_float_activation_in_between_is_told_apart(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx", between="LeakyRelu")
    converted = convert_model(model, all_forms(), tmp_path / "out")
    assert [(node.name, node.activation) for node in converted.unfused["runtime"]] == [
        ("conv1", "com.microsoft.FusedConv"),
        ("conv2", "com.microsoft.FusedConv"),
    ]


@pytest.mark.parametrize(("saves", "found"), [(False, "Conv"), (True, "QLinearConv")])
def test_a_target_whose_provider_changes_the_layout_saves_no_fusions(tmp_path: Path, saves: bool, found: str) -> None:
    target = load_target("nnapi")
    assert not target.conversion.saves_fusions
    conversion = msgspec.structs.replace(target.conversion, saves_fusions=saves)
    model = make_qdq(tmp_path / "m.onnx")
    converted = convert_model(model, msgspec.structs.replace(target, conversion=conversion), tmp_path / "out")
    assert converted.census["runtime"][found] == 2
    assert len(read_graph(tmp_path / "out/model.runtime.ort").saved) == (2 if saves else 0)


GRID = "<float s = {0.1}, uint8 z = {128}, float t = {0.05}, uint8 u = {120}>"
HEAD = "g (float[2,4] x) => (float[2,4] y) "
WEIGHT = "k = Constant<value_ints=[{}]>() c = Cast<to=1>(k) f = Constant<value_ints=[4,4]>() w = Reshape(c, f)".format(
    ", ".join(str(index % 5 - 2) for index in range(16))
)
MATMUL = f"{{ {WEIGHT} wq = QuantizeLinear(w, s, z) wd = DequantizeLinear(wq, s, z) xq = QuantizeLinear(x, s, z) "
MATMUL += "xd = DequantizeLinear(xq, s, z) "
BODIES = {
    "a matmul": HEAD + GRID + MATMUL + "m = MatMul(xd, wd) q = QuantizeLinear(m, t, u) y = DequantizeLinear(q, t, u) }",
    "a float result": HEAD + GRID + MATMUL + "y = MatMul(xd, wd) }",
    "a split": HEAD + GRID + "{ xq = QuantizeLinear(x, s, z) d = DequantizeLinear(xq, s, z) "
    "p = Constant<value_ints=[2,2]>() a, b = Split<axis=1>(d, p) "
    "aq = QuantizeLinear(a, s, z) bq = QuantizeLinear(b, s, z) ad = DequantizeLinear(aq, s, z) "
    "bd = DequantizeLinear(bq, s, z) y = Concat<axis=1>(bd, ad) }",
}


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("name", BODIES)
def test_what_was_saved_is_replayed(name: str, opset: int, tmp_path: Path) -> None:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> {BODIES[name]}'
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    write_ort(model, tmp_path / "m.ort", OrtOptions(style="runtime", cpu="arm"))
    sample = {"x": np.linspace(-3, 3, 8, dtype=np.float32).reshape(2, 4)}
    want = CpuSession(model.path, SessionSettings()).run(sample)["y"]
    got = CpuSession(tmp_path / "m.ort", SessionSettings(config=REPLAY)).run(sample)["y"]
    np.testing.assert_array_equal(got, want)
    assert read_graph(tmp_path / "m.ort").saved


@pytest.mark.parametrize("saturates", [False, True])
def test_onnxruntime_still_needs_the_mending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, saturates: bool
) -> None:
    # A CPU that must not add in 16 bits computes in float, but loads nothing that is refused otherwise.
    monkeypatch.setattr("edgekit._ort.may_saturate", lambda: saturates)
    path = parse_model(f"{BODIES['a matmul']}", tmp_path / "m.onnx")
    config = {"session.save_model_format": "ORT", "optimization.minimal_build_optimizations": "save"}
    optimize_graph(path, tmp_path / "raw.ort", SessionSettings(config=config))
    with pytest.raises(RuntimeRefusal, match="Not enough produced nodes"):
        CpuSession(tmp_path / "raw.ort", SessionSettings(config=REPLAY))


# Which ONNX Runtime a model file needs.


def relu_of(path: Path, ir_version: int, opset: int, domain: str = "") -> Path:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[1,3] x) => (float[1,3] y) {{ y = Relu(x) }}'
    model = onnx.load(parse_model(text, path))
    model.ir_version = ir_version
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 99))
    onnx.save(model, path)
    return path


def test_a_file_of_ort_format_tells_it_too(tmp_path: Path) -> None:
    for opset, needed in ((17, "1.18.0"), (22, "1.22.0")):
        source = load_model(relu_of(tmp_path / f"{opset}.onnx", 10, opset))
        write_ort(source, tmp_path / f"{opset}.ort", OrtOptions(style="runtime", cpu="arm"))
        assert find_needed_ort([tmp_path / f"{opset}.ort"]) == needed


@pytest.mark.parametrize(
    ("ir_version", "opset", "needed"),
    [(8, 17, ""), (9, 20, "1.17.0"), (10, 21, "1.18.0"), (10, 22, "1.22.0"), (11, 21, "1.23.0"), (12, 17, "1.24.0"),
     (13, 26, "1.26.0"), (14, 17, "1.32.0"), (8, 28, "1.32.0"), (99, 17, VERSION)],
)  # fmt: skip
def test_a_newer_opset_needs_a_newer_onnxruntime(tmp_path: Path, ir_version: int, opset: int, needed: str) -> None:
    assert find_needed_ort([relu_of(tmp_path / "m.onnx", ir_version, opset)]) == needed


def test_the_newest_of_several_files_counts_and_opsets_of_other_domains_do_not(tmp_path: Path) -> None:
    files = [relu_of(tmp_path / "a.onnx", 8, 17, domain="com.microsoft"), relu_of(tmp_path / "b.onnx", 10, 22)]
    assert find_needed_ort(files[:1]) == ""
    assert find_needed_ort(files) == find_needed_ort(reversed(files)) == "1.22.0"
    assert find_needed_ort([]) == ""


def test_what_is_newer_than_this_onnxruntime_is_lowered_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", x=np.ones((8, 1, 3), np.float32))
    for ir_version, opset in ((14, 17), (13, 28)):
        relu_of(tmp_path / "m.onnx", ir_version, opset)
        lowered = lower_model(load_model(Path("m.onnx")), tmp_path / "lowered")
        assert (lowered.ir_version <= MAX_IR_VERSION, lowered.opsets["ai.onnx"]) == (True, min(opset, MAX_OPSET))
        # Once lowered, it is left as it is.
        assert lower_model(lowered, tmp_path / "again") is lowered
    given = Path("m.onnx").read_bytes()
    build = ["build", "m.onnx", "--data", "d.npz", "--target", "cpu", "--no-verify", "--out", "out", "-q"]
    commands = (
        ["check", "m.onnx", "--target", "cpu"],
        build,
        ["bench", "m.onnx", "--runs", "1", "-q"],
        ["compare", "m.onnx", "m.onnx", "--data", "d.npz", "-q"],
    )
    for command in commands:
        assert run_command(command) == 0, (command, capsys.readouterr())
    assert Path("m.onnx").read_bytes() == given


def test_what_cannot_be_lowered_names_the_onnxruntime_that_reads_it(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[1,3] x) => (float[1,3] y) { y = Gelu(x) }'
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    with pytest.raises(ModelError, match=r"has opset 20, and ONNX Runtime 1.16.3 reads up to 19: .*Gelu") as caught:
        lower_model(model, tmp_path / "lowered", "1.16.3")
    assert "ONNX Runtime 1.18.0 reads it as it is" in caught.value.hint
    assert not (tmp_path / "lowered").exists()


def test_convert_lowers_to_the_devices_runtime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: Shown
) -> None:
    model, out = str(relu_of(tmp_path / "m.onnx", 11, 22)), tmp_path / "out"
    assert "loads from ONNX Runtime 1.18.0 on" in shown(
        ["convert", model, "--ort", "1.18.0", "--onnx", "--out", str(out)]
    )
    assert all(file.suffix in {".ort", ".onnx"} for file in out.iterdir())
    assert find_needed_ort(out.iterdir()) == "1.18.0"
    lowered = onnx.load(out / "model.onnx")
    assert (lowered.ir_version <= 10, lowered.opset_import[0].version) == (True, 21)
    for version, words in (("1.15.1", "full needs ONNX Runtime 1.1"), ("1.2", "no ONNX Runtime that was tried")):
        assert run_command(["convert", model, "--ort", version, "--out", str(tmp_path / "no")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert run_command(["convert", model, "--ort", "1.28.0", "--target", "nnapi", "--out", str(tmp_path / "no")]) == 2
    assert "target 'nnapi' needs ONNX Runtime 1.29.0, and --ort says 1.28.0" in capsys.readouterr().err


def test_check_says_which_onnxruntime_the_device_must_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(relu_of(tmp_path / "m.onnx", 8, 26))
    assert run_command(["check", model, "--target", "qnn", "--target", "directml"]) in {0, 1}
    shown = capsys.readouterr().out
    assert "ONNX Runtime on the device: 1.26.0 or newer for qnn, directml" in shown
