"""Every form of a target: its files, digests, metadata, lists of operators, refusals, and what a kill leaves."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from convert_models import ARM, RUNTIME, ZOO, all_forms, make_float, make_qdq, run_ort, write_form
from onnx import TensorProto, helper
from onnxruntime.tools.reduced_build_config_parser import parse_config
from tiny_models import parse_model

from edgekit._files import digest_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.convert.convert import Source, convert_forms, convert_model
from edgekit.convert.ort_form import OrtOptions, write_ort
from edgekit.convert.ort_format.operators import find_lacking, read_operators, write_operators
from edgekit.errors import ModelError, RuntimeRefusal, UsageError
from edgekit.graph.rewrite import Rewrite
from edgekit.jobs.convert import ConvertOptions, convert_for
from edgekit.model.model import load_model
from edgekit.prepare.rewrites.fused import complete_units, split_qlinear
from edgekit.recipe import Recipe
from edgekit.target import load_target


def test_each_form_is_there_and_loads(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx", activation="int8")
    converted = convert_model(model, all_forms(), tmp_path / "out")
    assert converted.files == {"runtime": ("model.runtime.ort",), "full": ("model.ort",), "onnx": ("model.onnx",)}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.onnx",
        "model.ort",
        "model.runtime.ort",
    ]
    assert converted.census["full"]["QLinearConv"] == converted.census["runtime"]["QLinearConv"] == 2
    expected = run_ort(tmp_path / "out/model.ort", (1, 3, 4, 4))
    assert np.array_equal(run_ort(tmp_path / "out/model.runtime.ort", (1, 3, 4, 4)), expected)
    assert np.allclose(run_ort(tmp_path / "out/model.onnx", (1, 3, 4, 4)), expected, atol=0.06)


def test_fusions_are_saved_of_a_model_that_leaves_zero_points_out(tmp_path: Path) -> None:
    proto = onnx.load(str(make_qdq(tmp_path / "m.onnx", activation="int8").path))
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear":
            del node.input[2]
    onnx.save(proto, str(tmp_path / "m.onnx"))
    report = convert_for(tmp_path / "m.onnx", tmp_path / "out", Recipe(targets=()), ConvertOptions())
    assert report.census["runtime"]["QLinearConv"] == 2
    # ONNX Runtime alone does not save them.
    with pytest.raises(RuntimeRefusal, match="input arg count"):
        write_ort(load_model(tmp_path / "m.onnx"), tmp_path / "m.ort", RUNTIME)


@pytest.mark.parametrize(
    ("rewrite", "conv"),
    [
        (split_qlinear, "r = QLinearConv(q, s, z, w, v, u, s, z, b)"),
        # Training for quantization leaves the bias float.
        (complete_units, """d = DequantizeLinear(q, s, z) e = DequantizeLinear<axis=0>(w, v, u) c = Conv(d, e, f)
            r = QuantizeLinear(c, s, z)"""),
    ],
)  # fmt: skip
def test_fusions_are_saved_of_biases_that_a_rewrite_made(tmp_path: Path, rewrite: Rewrite, conv: str) -> None:
    path = parse_model(
        f"""g (float[1,2,4,4] x) => (float[1,2,4,4] y)
        <float s = {{0.1}}, int8 z = {{3}}, int8[2,2,1,1] w = {{1,2,3,4}}, float[2] v = {{0.1,0.2}},
         int8[2] u = {{0,0}}, int32[2] b = {{5,-6}}, float[2] f = {{0.5,-0.6}}> {{
        q = QuantizeLinear(x, s, z) {conv} y = DequantizeLinear(r, s, z) }}""",
        tmp_path / "m.onnx",
    )
    proto = onnx.load(str(path))
    assert rewrite(proto.graph, 17)
    onnx.save(proto, str(tmp_path / "split.onnx"))
    converted = convert_model(load_model(tmp_path / "split.onnx"), all_forms(), tmp_path / "out")
    assert converted.census["runtime"]["QLinearConv"] == 1


def test_digests_ancestry_and_versions_are_recorded(tmp_path: Path) -> None:
    model = make_float(tmp_path / "m.onnx")
    converted = convert_model(model, load_target("nnapi"), tmp_path / "out")
    assert converted.sha256 == {
        name: digest_file(tmp_path / "out" / name) for name in ("model.runtime.ort", "model.onnx")
    }
    assert converted.size_bytes["model.onnx"] == (tmp_path / "out/model.onnx").stat().st_size
    assert (converted.source_sha256, converted.canonical_version) == (model.sha256, 1)
    assert set(converted.versions) == {"onnxruntime", "ort-canonical-form"}
    assert msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(converted, enc_hook=str)))["target"] == "nnapi"


def test_the_onnx_form_carries_metadata_and_changes_nothing(tmp_path: Path) -> None:
    model = make_float(tmp_path / "m.onnx")
    before = model.path.read_bytes()
    convert_model(model, load_target("coreml"), tmp_path / "out")
    written = onnx.load(str(tmp_path / "out/model.onnx"))
    props = {entry.key: entry.value for entry in written.metadata_props}
    assert props == {"author": "me", "edgekit.source_sha256": model.sha256, "COREML_CACHE_KEY": model.sha256[:32]}
    assert np.array_equal(run_ort(tmp_path / "out/model.onnx", (1, 3, 8, 8)), run_ort(model.path, (1, 3, 8, 8)))
    assert model.path.read_bytes() == before


def test_external_data_goes_into_one_file_beside_the_onnx_form(tmp_path: Path) -> None:
    path = make_float(tmp_path / "m.onnx").path
    proto = onnx.load(str(path))
    onnx.save(proto, str(path), save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    model = load_model(path)
    assert len(model.external_files) == 2
    converted = convert_model(model, load_target("nnapi"), tmp_path / "out")
    assert converted.files["onnx"] == ("model.onnx", "model.onnx.data")
    expected = run_ort(path, (1, 3, 8, 8))
    assert np.array_equal(run_ort(tmp_path / "out/model.onnx", (1, 3, 8, 8)), expected)
    assert np.allclose(run_ort(tmp_path / "out/model.runtime.ort", (1, 3, 8, 8)), expected, atol=1e-5)


def test_a_model_over_2_gb_is_refused_before_work_starts(tmp_path: Path) -> None:
    model = msgspec.structs.replace(make_float(tmp_path / "m.onnx"), size_bytes=3_000_000_000)
    with pytest.raises(ModelError, match=r"3\.0 GB, and the ORT format ends at 2 GB"):
        convert_model(model, load_target("nnapi"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("level", [Level.DISABLED, Level.BASIC])
def test_quantized_models_can_be_had_without_fusion_for_debugging(tmp_path: Path, level: Level) -> None:
    model = make_qdq(tmp_path / "m.onnx")
    options = OrtOptions(style="full", cpu="arm", level=level)
    source = Source(model=model, origin=model)
    converted = convert_forms(model, source, ("full",), {"full": options}, tmp_path / "out")
    assert converted.census["full"]["Conv"] == 2
    assert converted.equality["full"].passed
    assert [node.name for node in converted.unfused["full"]] == ["conv1", "conv2"]


def test_a_refused_conversion_leaves_nothing(tmp_path: Path) -> None:
    model = make_float(tmp_path / "m.onnx")
    model.path.write_bytes(b"")
    with pytest.raises(RuntimeRefusal):
        write_ort(model, tmp_path / "out/m.ort", OrtOptions(style="full", cpu="arm"))
    assert not (tmp_path / "out").exists()


def test_a_refusal_names_the_user_s_file_and_says_what_the_format_holds(tmp_path: Path) -> None:
    path, inner = tmp_path / "mine.onnx", helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    (x, y) = (
        helper.make_value_info(name, kind)
        for name, kind in (("x", inner), ("y", helper.make_optional_type_proto(inner)))
    )
    proto = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Optional", ["r"], ["y"])], "g", [x], [y]
    )
    onnx.save(helper.make_model(proto, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), str(path))
    with pytest.raises(RuntimeRefusal, match="We do not support type") as caught:
        convert_for(path, tmp_path / "out", Recipe(targets=()), ConvertOptions())
    assert f"refuses '{path}'" in caught.value.message
    assert "edgekit prepare --outputs" in str(caught.value.hint)


def test_dimensions_stay_open_where_the_target_takes_any(tmp_path: Path) -> None:
    parse_model(
        """g (float[N,4] x, float[M,4] past) => (float[?,4] y)
      <float[4,4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}>
      { a = MatMul(x, w) b = Concat<axis = 0>(a, past) y = Relu(b) }""",
        tmp_path / "m.onnx",
    )
    for name, recipe in (("free", Recipe(targets=())), ("cpu", Recipe(targets=("cpu",), dims={"M": 2}))):
        report = convert_for(tmp_path / "m.onnx", tmp_path / name, recipe, ConvertOptions())
        assert all(equality.bit_equal or equality.error < 1e-5 for equality in report.equality.values())
        assert {equality.samples for equality in report.equality.values()} == {2}
        session = CpuSession(tmp_path / name / "model.ort", SessionSettings())
        for rows in (1, 5):
            sample = {"x": np.ones((rows, 4), np.float32), "past": np.ones((2, 4), np.float32)}
            assert session.run(sample)["y"].shape == (rows + 2, 4)
    with pytest.raises(UsageError, match=r"'N'.*'M'"):
        convert_for(tmp_path / "m.onnx", tmp_path / "no", Recipe(targets=("nnapi",)), ConvertOptions())


def test_sizes_that_do_not_fit_together_leave_the_smallest_to_compare(tmp_path: Path) -> None:
    text = """g (float[N,4] x, float[M,4] z) => (float[?,4] y)
      <int64[2] one = {1, 4}> { a = Reshape(z, one) y = Add(x, a) }"""
    parse_model(text, tmp_path / "m.onnx")
    report = convert_for(tmp_path / "m.onnx", tmp_path / "out", Recipe(targets=()), ConvertOptions())
    assert {(equality.samples, equality.skipped) for equality in report.equality.values()} == {(1, "")}


def write_pair(folder: Path) -> tuple[Path, Path]:
    write_form(make_qdq(folder / "q.onnx"), folder / "q.ort", RUNTIME)
    write_form(make_float(folder / "f.onnx"), folder / "f.ort", ARM)
    return folder / "q.ort", folder / "f.ort"


def test_a_config_merges_models_and_is_read_by_onnx_runtime(tmp_path: Path) -> None:
    models = write_pair(tmp_path)
    write_operators(models, tmp_path / "ops.config", types=True)
    operators, types = parse_config(str(tmp_path / "ops.config"), True)
    assert (operators["ai.onnx"][11], operators["com.microsoft"][1]) == ({"Conv"}, {"FusedConv"})
    assert types.is_typed_registration_needed("ai.onnx", "Conv", "float")
    assert not types.is_typed_registration_needed("ai.onnx", "Conv", "double")
    read = read_operators(tmp_path / "ops.config")
    assert read is not None
    assert {key: set(names) for key, names in read[0].items()} == {
        (domain, opset): names for domain, opsets in operators.items() for opset, names in opsets.items()
    }
    assert all(find_lacking(model, tmp_path / "ops.config") == () for model in models)


@pytest.mark.parametrize("types", [False, True])
def test_the_order_and_the_folder_of_models_leave_no_trace(tmp_path: Path, types: bool) -> None:
    first, second = write_pair(tmp_path / "a"), write_pair(tmp_path / "bb")
    write_operators(first, tmp_path / "one.config", types=types)
    write_operators(tuple(reversed(second)), tmp_path / "two.config", types=types)
    content = (tmp_path / "one.config").read_text()
    assert content == (tmp_path / "two.config").read_text()
    assert str(tmp_path) not in content
    # What saved optimisations bring has no limit: no node tells its types.
    assert ("QLinearConv{" in content) is False
    assert ('Conv{"inputs": {"0": ["float"]}}' in content) is types


@pytest.mark.parametrize("name", ["kws_dscnn_int8_qdq", "silero_vad_micro_transformer", "mnist_cnn_pytorch"])
@pytest.mark.skipif(not ZOO.is_dir(), reason="needs ../shared/zoo")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of ONNX Runtime's tool
def test_types_are_those_of_onnx_runtime_s_own_tool(name: str, tmp_path: Path) -> None:
    write_form(load_model(ZOO / f"models/{name}.onnx"), tmp_path / "m.ort", ARM)
    own: Any = importlib.import_module("onnxruntime.tools.ort_format_model")
    own.create_config_from_models([tmp_path / "m.ort"], tmp_path / "own.config", True)
    write_operators([tmp_path / "m.ort"], tmp_path / "ours.config", types=True)

    def lines(path: Path) -> list[str]:
        return [line for line in path.read_text().splitlines() if not line.startswith("#")]

    assert lines(tmp_path / "ours.config") == lines(tmp_path / "own.config")
    assert any("{" in line for line in lines(tmp_path / "ours.config"))
    _, types = parse_config(str(tmp_path / "ours.config"), True)
    assert types.get_cpp_entries()
    assert find_lacking(tmp_path / "m.ort", tmp_path / "ours.config") == ()


def test_a_type_that_a_build_lacks_is_named(tmp_path: Path) -> None:
    quantized, floating = write_pair(tmp_path)
    write_operators([floating, quantized], tmp_path / "ops.config", types=True)
    assert find_lacking(floating, tmp_path / "ops.config") == ()
    limited = (
        (tmp_path / "ops.config")
        .read_text()
        .replace('Mul{"inputs": {"0": ["float"]}}', 'Mul{"inputs": {"0": ["double"]}}')
    )
    (tmp_path / "other.config").write_text(limited)
    assert find_lacking(floating, tmp_path / "other.config") == ("ai.onnx:Mul (input 0 float)",)
    (tmp_path / "bad.config").write_text('ai.onnx;11;Conv{"inputs": 3}\n')
    with pytest.raises(UsageError, match="limits an operator in no known way"):
        find_lacking(floating, tmp_path / "bad.config")


def test_what_a_build_lacks_is_named_and_one_with_all_operators_lacks_nothing(tmp_path: Path) -> None:
    quantized, floating = write_pair(tmp_path)
    write_operators([floating], tmp_path / "ops.config")
    lacking = find_lacking(quantized, tmp_path / "ops.config")
    assert ":QLinearConv:10" in "".join(lacking)
    assert "ai.onnx:DequantizeLinear:13" in lacking
    (tmp_path / "all.config").write_text("!no_ops_specified_means_all_ops_are_required\n")
    assert find_lacking(quantized, tmp_path / "all.config") == ()


def test_a_config_that_onnx_runtime_wrote_is_read(tmp_path: Path) -> None:
    content = 'ai.onnx;11,13;Conv{"inputs": {"0": ["float", "int8_t"]}},Relu\ncom.microsoft;1;QGemm\n'
    (tmp_path / "theirs.config").write_text("# a comment\n" + content)
    operators = {
        ("ai.onnx", 11): frozenset({"Conv", "Relu"}),
        ("ai.onnx", 13): frozenset({"Conv", "Relu"}),
        ("com.microsoft", 1): frozenset({"QGemm"}),
    }
    types = {("ai.onnx", "Conv"): frozenset({"input 0 float", "input 0 int8_t"})}
    assert read_operators(tmp_path / "theirs.config") == (operators, types)


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path)
    (tmp_path / "bad.config").write_text("ai.onnx;x;Conv\n")
    (tmp_path / "bad.ort").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"line 1 of .* is no line of a config"):
        find_lacking(quantized, tmp_path / "bad.config")
    with pytest.raises(UsageError, match="cannot read the config"):
        find_lacking(quantized, tmp_path / "none.config")
    with pytest.raises(ModelError, match="no whole ORT-format file"):
        write_operators([tmp_path / "bad.ort"], tmp_path / "ops.config")
    with pytest.raises(UsageError, match="no model"):
        write_operators([], tmp_path / "ops.config")


pytestmark = pytest.mark.slow

ATTEMPTS = 12
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from edgekit.convert.convert import convert_model
from edgekit.model.model import load_model
from edgekit.target import load_target

model, target, folder = load_model(Path(sys.argv[1])), load_target("nnapi"), Path(sys.argv[2])

def convert(out):
    pid = os.fork()
    if pid == 0:
        convert_model(model, target, out)
        os._exit(0)
    return pid

def read(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} if out.exists() else {}

start = time.perf_counter()
os.waitpid(convert(folder / "whole"), 0)
longest = (time.perf_counter() - start) * 1.5
expected, counts, damaged, attempts = read(folder / "whole"), [], [], int(sys.argv[3])
for attempt in range(attempts):
    out = folder / str(attempt)
    pid = convert(out)
    time.sleep(longest * attempt / (attempts - 1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = read(out)
    counts.append(len(found))
    longest *= 1.0 if found else 1.1  # the first run may have had the machine to itself
    damaged += [name for name, data in found.items() if data != expected[name]]
print(json.dumps({"expected": sorted(expected), "counts": counts, "damaged": damaged}))
"""
"""The children fork from one process that has done its imports, before it makes any session."""


def test_kill_9_leaves_whole_files_or_none(tmp_path: Path) -> None:
    model = str(make_float(tmp_path / "m.onnx").path)
    argv = [sys.executable, "-c", PROGRAM, model, str(tmp_path / "o"), str(ATTEMPTS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(argv, check=True, env=environment, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert (report["expected"], report["damaged"]) == (["model.onnx", "model.runtime.ort"], [])
    assert len(report["counts"]) == ATTEMPTS
    assert {0, 2} <= set(report["counts"]), "no child was killed before, or none after, its files were there"
