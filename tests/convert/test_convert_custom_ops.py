"""Custom operators, those of onnxruntime-extensions, all the way: prepare, convert, inspect, the host device."""

from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import onnx
import pytest
from convert_models import ARM, RUNTIME, all_forms, make_float, make_qdq, save_text, write_form
from demo_paths import MODEL
from onnx import helper, parser
from tiny_models import parse_net

from edgekit._ort import CpuSession, Level, SessionSettings, optimize_graph
from edgekit.convert.convert import convert_model, describe_traits
from edgekit.convert.ort_form import MAX_SAMPLES, Equality, OrtOptions, compare_onnx, compare_with_source, write_level
from edgekit.convert.ort_format.report import inspect_ort, read_graph
from edgekit.convert.ort_format.tables import open_tables, records, table, write_tables
from edgekit.data.samples import Samples, draw_samples
from edgekit.devices.local.host import Host
from edgekit.devices.observe import open_job
from edgekit.errors import RuntimeRefusal, UsageError
from edgekit.inspect.inspect import OnnxReport, inspect_model
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, TensorSpec
from edgekit.prepare import fix_model, prepare_model
from edgekit.target import load_target

extensions = pytest.importorskip(
    "onnxruntime_extensions", reason="needs onnxruntime-extensions: pip install onnxruntime-extensions"
)
LIBRARY = Path(extensions.get_library_path())
DOMAIN = "ai.onnx.contrib"


def make_inverse(path: Path) -> Model:
    """Writes a model that inverts a matrix with a custom operator, with a node before and one behind it."""
    text = f"""<ir_version: 8, opset_import: ["" : 17, "{DOMAIN}" : 1]> g (float[n,3] x) => (float[?,3] y) {{
      [add] a = Add(x, x) [inverse] i = {DOMAIN}.Inverse(a) [relu] y = Relu(i) }}"""
    onnx.save(parser.parse_model(text), path)
    return load_model(path, custom_ops=[LIBRARY])


SAMPLE = {"x": np.diag([1.0, 2.0, 4.0]).astype(np.float32)}


def test_a_custom_operator_goes_all_the_way(tmp_path: Path) -> None:
    prepared = fix_model(prepare_model(make_inverse(tmp_path / "m.onnx"), tmp_path / "p.onnx", {"n": 3}),
                         tmp_path / "f.onnx").model  # fmt: skip
    converted = convert_model(prepared, all_forms(), tmp_path / "out")
    assert {form: found.bit_equal for form, found in converted.equality.items()} == {"runtime": True, "full": True}
    assert f"{DOMAIN}:Inverse:1" in inspect_ort(tmp_path / "out/model.ort").kernels
    settings = SessionSettings(libraries=(LIBRARY,))
    got = CpuSession(tmp_path / "out/model.ort", settings).run(SAMPLE)["y"]
    assert np.allclose(got, np.diag([0.5, 0.25, 0.125]))


def test_without_the_library_it_is_refused_and_a_missing_one_named(tmp_path: Path) -> None:
    make_inverse(tmp_path / "m.onnx")
    with pytest.raises(RuntimeRefusal, match="Inverse"):
        prepare_model(load_model(tmp_path / "m.onnx"), tmp_path / "p.onnx", {"n": 3})
    with pytest.raises(UsageError, match=r"no custom-op library 'none\.so'"):
        load_model(tmp_path / "m.onnx", custom_ops=[Path("none.so")])
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(RuntimeRefusal, match="ONNX Runtime refuses"):
        prepare_model(load_model(tmp_path / "m.onnx", custom_ops=[tmp_path / "text.so"]), tmp_path / "p.onnx", {"n": 3})


def test_inspect_names_custom_operators_and_says_whether_they_load(tmp_path: Path) -> None:
    path = make_inverse(tmp_path / "m.onnx").path
    report = inspect_model(path)
    assert isinstance(report, OnnxReport)
    assert (report.custom_ops, report.runs) == ((f"{DOMAIN}.Inverse",), None)
    with_library = inspect_model(path, custom_ops=[LIBRARY])
    assert isinstance(with_library, OnnxReport)
    assert with_library.runs is True


def test_the_host_device_loads_the_library(tmp_path: Path) -> None:
    prepared = prepare_model(make_inverse(tmp_path / "m.onnx"), tmp_path / "p.onnx", {"n": 3})
    samples = Samples(source="one", count=1, read=lambda: iter([SAMPLE]))
    job = open_job(prepared, load_target("xnnpack"), samples)
    for name, custom_ops in (("with", job.custom_ops), ("without", ())):
        (tmp_path / name).mkdir()
        run = Host().run_job(msgspec.structs.replace(job, custom_ops=custom_ops), tmp_path / name)
        assert (run.failure is None) is (name == "with"), run.failure


def test_operators_that_another_model_loaded_leave_no_trace(tmp_path: Path) -> None:
    CpuSession(make_inverse(tmp_path / "inverse.onnx").path, SessionSettings(libraries=(LIBRARY,)))
    model = load_model(MODEL)
    optimize_graph(model.path, tmp_path / "own.onnx", SessionSettings())
    assert DOMAIN in {entry.domain for entry in onnx.load(tmp_path / "own.onnx").opset_import}
    write_form(model, tmp_path / "model.ort", ARM)
    domains = set(inspect_ort(tmp_path / "model.ort").opsets)
    assert "com.microsoft" in domains
    assert DOMAIN not in domains
    row = write_level(model, Level.EXTENDED, "arm", tmp_path, checked=False)
    nodes = onnx.load(tmp_path / row.file)
    assert {entry.domain for entry in nodes.opset_import} == {node.domain for node in nodes.graph.node}


# Each file is run against its source: one that is wrong is refused, and its first wrong node named.

X64 = OrtOptions(style="full", cpu="x64")


def corrupt(path: Path, weight: str) -> None:
    """Changes the sign of each value of a weight in a file."""
    with open_tables(path) as file:
        graph = table(table(file.root, "model"), "graph")
        tensor = next(item for item in records(graph, "initializers") if item["name"] == weight.encode())
        data = bytes(cast("memoryview", tensor["raw_data"]))
        dtype = np.int8 if len(data) < 16 else np.float32
        tensor["raw_data"] = memoryview((-np.frombuffer(data, dtype)).tobytes())
        write_tables(file.root, path.with_suffix(".bad"))
    path.with_suffix(".bad").replace(path)


@pytest.mark.parametrize(
    ("error", "skipped", "passed"),
    [(0.0, "", True), (1e-4, "", True), (1.01e-4, "", False), (np.inf, "", False), (np.inf, "it draws", True)],
)
def test_a_file_passes_within_the_tolerance(error: float, skipped: str, *, passed: bool) -> None:
    found = Equality(samples=1, bit_equal=False, error=error, tolerance=1e-4, skipped=skipped)
    assert found.passed is passed


def giving(path: Path, value: Any) -> Model:
    """Returns a model that gives a value, or a list of float32, whatever it reads."""
    value = np.array(value, np.float32) if isinstance(value, list) else value
    model = save_text(path, "(float[1] x) => (float y) { y = Identity(c) }", {"c": value})
    proto = onnx.load(str(model.path))
    proto.graph.output[0].CopyFrom(onnx.ValueInfoProto(name="y"))
    proto.graph.output[0].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(value.dtype)
    onnx.save(proto, str(path))
    return load_model(path)


@pytest.mark.parametrize(
    ("wanted", "got", "error", "bit_equal"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0, True),
        ([1.0, -4.0], [1.002, -4.0], 0.0005, False),
        ([1.0, -4.0], [1.0, -4.004], 0.001, False),
        ([0.0, 0.0], [-0.0, 0.0], 0.0, False),
        ([0.0, 0.0], [0.0, 1e-6], 1.0, False),
        ([1e-3, 0.0], [1e-3, 1e-6], 1e-3, False),
        ([np.nan, 2.0], [np.nan, 2.0], 0.0, True),
        ([np.nan, 2.0], [np.nan, 2.002], 0.001, False),
        ([np.nan, 2.0], [2.0, 2.0], np.inf, False),
        ([2.0, 2.0], [np.nan, 2.0], np.inf, False),
        ([np.inf, 2.0], [np.inf, 2.002], 0.001, False),
        ([np.inf, 2.0], [-np.inf, 2.0], np.inf, False),
        ([1.0, 2.0], [[1.0, 2.0]], np.inf, False),
        ([1.0, 2.0], [1.0, 2.0, 3.0], np.inf, False),
        (np.array([5, 10]), np.array([5, 10]), 0.0, True),
        (np.array([5, 10]), np.array([5, 9]), 0.1, False),
        (np.array([5, 10]), np.array([5, 10], np.int32), np.inf, False),
        (np.array([True, False]), np.array([True, True]), 1.0, False),
        (np.array(["a", "b"], object), np.array(["a", "b"], object), 0.0, True),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), np.inf, False),
    ],
)
def test_the_worst_value_is_the_error(tmp_path: Path, wanted: Any, got: Any, error: float, *, bit_equal: bool) -> None:
    found = compare_onnx(giving(tmp_path / "a.onnx", wanted), giving(tmp_path / "b.onnx", got))
    assert found.error == pytest.approx(error, rel=1e-3)
    assert (found.bit_equal, found.samples, found.skipped) == (bit_equal, 1, "")
    assert found.passed is (found.error <= 1e-3)


@pytest.mark.parametrize("options", [ARM, RUNTIME], ids=["full", "runtime"])
@pytest.mark.parametrize("make", [make_float, make_qdq])
def test_a_right_file_is_bit_equal_on_arm_kernels(tmp_path: Path, make: type, options: OrtOptions) -> None:
    model: Model = make(tmp_path / "m.onnx")
    write_form(model, tmp_path / "m.ort", options)
    found = compare_with_source(model, tmp_path / "m.ort", options)
    assert (found.passed, found.bit_equal, found.samples, found.first_bad) == (True, True, 1, "")
    assert found.tolerance == (1e-4 if make is make_float else 0.05)


@pytest.mark.parametrize("options", [ARM, RUNTIME], ids=["full", "runtime"])
@pytest.mark.parametrize(("weight", "node"), [("w1", "conv1"), ("w2", "conv2")])
def test_the_node_of_a_wrong_weight_is_named(tmp_path: Path, options: OrtOptions, weight: str, node: str) -> None:
    model = make_float(tmp_path / "m.onnx")
    write_form(model, tmp_path / "m.ort", options)
    corrupt(tmp_path / "m.ort", weight)
    found = compare_with_source(model, tmp_path / "m.ort", options)
    assert not found.passed
    fused_with = {"conv1": "relu", "conv2": "sigmoid"}[node]
    assert found.first_bad == (fused_with if options is ARM else node)


def test_a_wrong_quantized_weight_is_found_too(tmp_path: Path) -> None:
    model = make_qdq(tmp_path / "m.onnx")
    write_form(model, tmp_path / "m.ort", RUNTIME)
    corrupt(tmp_path / "m.ort", "w2")
    found = compare_with_source(model, tmp_path / "m.ort", RUNTIME)
    assert not found.passed
    assert found.first_bad == "w2_dq"


HALF = "h = Cast<to = 10>(x) s = Add(h, w) f = Cast<to = 1>(s) y = Add(f, v)"
LINEAR = "q = Cast<to = 2>(x) s = QLinearMatMul(q, f, z, w, f, z, f, z) y = Cast<to = 1>(s)"


@pytest.mark.parametrize(
    ("nodes", "weights", "tolerance"),
    [
        ("y = Add(x, w)", {"w": np.eye(4, dtype=np.float32)}, 1e-4),
        (HALF, {"w": np.eye(4, dtype=np.float16), "v": np.eye(4, dtype=np.float32)}, 1e-2),
        (LINEAR, {"w": np.eye(4, dtype=np.uint8), "f": np.array(0.5, np.float32), "z": np.array(0, np.uint8)}, 0.05),
    ],
    ids=["float", "half", "QLinear"],
)
def test_the_source_sets_the_tolerance(tmp_path: Path, nodes: str, weights: dict[str, Array], tolerance: float) -> None:
    model = save_text(tmp_path / "m.onnx", f"(float[4,4] x) => (float[4,4] y) {{ {nodes} }}", weights)
    write_form(model, tmp_path / "m.ort", ARM)
    assert compare_with_source(model, tmp_path / "m.ort", ARM).tolerance == tolerance


def test_the_first_wrong_node_without_a_name_is_named_by_its_operator(tmp_path: Path) -> None:
    graph = "(float[16] x) => (float[16] y) { e = Exp(x) y = Add(e, w) }"
    model = save_text(tmp_path / "m.onnx", graph, {"w": np.arange(1, 17, dtype=np.float32)})
    write_form(model, tmp_path / "m.ort", ARM)
    corrupt(tmp_path / "m.ort", "w")
    assert compare_with_source(model, tmp_path / "m.ort", ARM).first_bad == "Add"


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    graph = "(float[1,4] x) => (float[1,4] y) { r = RandomNormalLike(x) y = Add(x, r) }"
    model = save_text(tmp_path / "m.onnx", graph, {})
    write_form(model, tmp_path / "m.ort", ARM)
    found = compare_with_source(model, tmp_path / "m.ort", ARM)
    assert found.passed
    assert found.skipped == "it draws random numbers: RandomNormalLike"
    assert (found.samples, found.bit_equal, found.error) == (0, False, 0.0)


def test_a_source_that_random_inputs_break_says_so_without_a_path(tmp_path: Path) -> None:
    graph = """(float[1,4] x) => (float[1,4] y) <float[1] far = {1000}, float[4] c = {1, 1, 1, 1}> {
      m = Add(x, far)
      i = Cast<to = 7>(m)
      y = Gather(c, i) }"""
    model = save_text(tmp_path / "m.onnx", graph, {})
    found = compare_onnx(model, model)
    assert found.skipped.startswith("the source does not run on inputs drawn at random, so give --data: ")
    assert "indices element out of data bounds" in found.skipped
    assert "m.onnx" not in found.skipped
    assert (found.samples, found.bit_equal, found.error) == (0, False, 0.0)
    with pytest.raises(RuntimeRefusal):
        compare_onnx(model, model, draw_samples(model.inputs))
    # Of two sizes of an open dimension only the first fits.
    model = save_text(
        tmp_path / "n.onnx", "(float[n] x) => (float[m] y) { y = Add(x, c) }", {"c": np.ones(2, np.float32)}
    )
    found = compare_onnx(model, model)
    assert (found.samples, found.bit_equal, found.skipped) == (1, True, "")


def test_a_sequence_is_compared_and_one_that_goes_in_is_not(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y, seq(float[2]) s) { y = Neg(x)  s = SequenceConstruct(x, y) }"
    proto = parse_net(text)
    onnx.save(proto, str(tmp_path / "m.onnx"))
    model = load_model(tmp_path / "m.onnx")
    assert compare_onnx(model, model).bit_equal
    proto.graph.node[0].op_type = "Identity"
    onnx.save(proto, str(tmp_path / "other.onnx"))
    assert not compare_onnx(model, load_model(tmp_path / "other.onnx")).passed
    text = "g (seq(float[2]) s) => (int64 n) { n = SequenceLength(s) }"
    onnx.save(parse_net(text), str(tmp_path / "s.onnx"))
    taken = load_model(tmp_path / "s.onnx")
    assert compare_onnx(taken, taken).skipped == "its inputs are no tensors"


def test_given_samples_are_run(tmp_path: Path) -> None:
    model = make_float(tmp_path / "m.onnx")
    samples = draw_samples(model.inputs, 5)
    converted = convert_model(model, all_forms(), tmp_path / "out", samples=samples)
    assert {form: found.samples for form, found in converted.equality.items()} == {
        "runtime": MAX_SAMPLES,
        "full": MAX_SAMPLES,
    }
    assert convert_model(model, load_target("nnapi"), tmp_path / "out", checked=False).equality == {}


def test_drawn_inputs_are_the_same_each_time_and_fit() -> None:
    specs = (
        TensorSpec(name="x", dtype="float16", shape=(2, None)),
        TensorSpec(name="i", dtype="int64", shape=(3,)),
        TensorSpec(name="s", dtype="string", shape=(1,)),
    )
    first, again = (next(iter(drawn)) for drawn in (draw_samples(specs), draw_samples(specs)) if drawn is not None)
    assert {name: (value.dtype.kind, value.shape) for name, value in first.items()} == {
        "x": ("f", (2, 1)), "i": ("i", (3,)), "s": ("O", (1,)),
    }  # fmt: skip
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert draw_samples((TensorSpec(name="q", dtype="sequence", shape=None),)) is None


def test_what_comes_from_this_machine_is_told(tmp_path: Path) -> None:
    text = """(float[4] x) => (float[4] y) <float[4] c = {1, 1, 1, 1}> {
      e = Exp(c)
      cc = Concat<axis = 0>(c, c)
      y = Mul(x, e) }"""
    graph = onnx.load(str(save_text(tmp_path / "m.onnx", text, {}).path)).graph
    assert describe_traits(graph, ()) == ("constants were computed by this CPU's float kernels: Exp",)
    floats = make_float(tmp_path / "f.onnx")
    write_form(floats, tmp_path / "f.ort", X64)
    nodes_x64 = read_graph(tmp_path / "f.ort").nodes
    assert describe_traits(onnx.load(str(floats.path)).graph, ()) == ()
    blocked = any(node.op.startswith("com.microsoft.nchwc") for node in nodes_x64)
    assert bool(describe_traits(onnx.load(str(floats.path)).graph, nodes_x64)) is blocked
