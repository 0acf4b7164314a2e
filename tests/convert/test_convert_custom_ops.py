"""Custom operators, those of onnxruntime-extensions, all the way: prepare, convert, inspect, the host device."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from convert_models import ARM, all_forms, write_form
from demo_paths import MODEL
from onnx import parser

from edgekit._ort import CpuSession, Level, SessionSettings, optimize_graph
from edgekit.convert.convert import convert_model
from edgekit.convert.ort_form import write_level
from edgekit.convert.ort_format.report import inspect_ort
from edgekit.data.samples import Samples
from edgekit.devices.local.host import Host
from edgekit.devices.observe import open_job
from edgekit.errors import RuntimeRefusal, UsageError
from edgekit.inspect.inspect import OnnxReport, inspect_model
from edgekit.model.model import Model, load_model
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
