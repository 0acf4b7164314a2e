"""Canonical files: the same bytes always, the same results, and nothing unknown let through."""

import importlib
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from convert_models import ARM, RUNTIME, ZOO, make_branches, make_float, make_qdq, run_ort, write_form

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.convert.ort_form import OrtOptions
from edgekit.convert.ort_format import canonical, tables
from edgekit.convert.ort_format.canonical import canonicalize_file, is_canonical, repair_saved, sort_tables
from edgekit.convert.ort_format.report import inspect_ort
from edgekit.convert.ort_format.tables import (
    ROOT,
    SCHEMA,
    UNIONS,
    Record,
    Value,
    number,
    open_tables,
    records,
    table,
    text,
)
from edgekit.errors import ModelError

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
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
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
        fields = {field.name: field for field in SCHEMA[kind]}
        shuffled: Record = {}
        for name, item in value.items():
            field = fields[name]
            of = UNIONS[field.of][number(value, f"{name}_type")] if field.kind == "union" else field.of
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
        root = shuffle(file.root, ROOT, random.Random(seed))  # noqa: S311 - a test's order
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
def test_a_saved_optimization_gets_its_operator_and_the_types_of_its_kernel(
    action: str, outputs: int, opset: int, op: str | None
) -> None:
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
        tables.write_tables(sort_tables({**file.root, "ort_version": b"9"}, ROOT), tmp_path / "new.ort")
    before = (tmp_path / "new.ort").read_bytes()
    with pytest.raises(ModelError, match="format version '9', whose order is not known"):
        canonicalize_file(tmp_path / "new.ort")
    assert not is_canonical(tmp_path / "new.ort")
    assert (tmp_path / "new.ort").read_bytes() == before


def test_a_table_with_an_unknown_slot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write_raw(make_float(tmp_path / "m.onnx").path, tmp_path / "raw.ort", {})
    monkeypatch.setitem(SCHEMA, "Model", SCHEMA["Model"][:7])
    with pytest.raises(ModelError, match=r"tables that are not known: Model\.7"):
        canonicalize_file(raw)
    assert not is_canonical(raw)


def lose_name(graph: Record) -> Record:
    return {**graph, "nodes": [{**records(graph, "nodes")[0], "name": b""}, *records(graph, "nodes")[1:]]}


def lose_node(graph: Record) -> Record:
    return {**graph, "nodes": records(graph, "nodes")[:-1]}


def lose_field(graph: Record) -> Record:
    return {name: value for name, value in graph.items() if name != "outputs"}


def lose_byte(graph: Record) -> Record:
    def change(tensor: Record) -> Record:
        return {**tensor, "raw_data": memoryview(bytes(cast("memoryview", tensor["raw_data"]))[:-1] + b"?")}

    return {**graph, "initializers": [change(tensor) for tensor in records(graph, "initializers")]}


def lose_weight(graph: Record) -> Record:
    tensors = records(graph, "initializers")
    return {**graph, "initializers": [{**tensor, "raw_data": memoryview(b"")} for tensor in tensors]}


@pytest.mark.parametrize("lose", [lose_name, lose_node, lose_field, lose_byte, lose_weight])
def test_a_writer_that_loses_something_is_caught_and_the_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Record], Record]
) -> None:
    raw = write_raw(make_float(tmp_path / "m.onnx").path, tmp_path / "raw.ort", {})
    before = raw.read_bytes()

    def write_less(root: Record, out: Path) -> None:
        model = table(root, "model")
        tables.write_tables({**root, "model": {**model, "graph": lose(table(model, "graph"))}}, out)

    monkeypatch.setattr(canonical, "write_tables", write_less)
    with pytest.raises(ModelError, match="changed while it was put in order"):
        canonicalize_file(raw)
    assert raw.read_bytes() == before


def test_x64_files_with_blocked_layouts_are_canonical_too(tmp_path: Path) -> None:
    model = make_branches(tmp_path / "m.onnx")
    options = OrtOptions(style="full", cpu="x64")
    written = {write_form(model, tmp_path / f"{index}.ort", options) for index in range(5)}
    assert len(written) == 1
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
