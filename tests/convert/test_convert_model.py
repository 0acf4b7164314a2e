"""Every form of a target: its files, digests, metadata, and the ways it can be refused."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from convert_models import all_forms, make_float, make_qdq, run_ort
from onnx import TensorProto, helper
from tiny_models import parse_model

from edgekit._files import digest_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.convert.convert import Source, convert_forms, convert_model
from edgekit.convert.ort_form import OrtOptions, write_ort
from edgekit.errors import ModelError, RuntimeRefusal, UsageError
from edgekit.jobs.convert import ConvertOptions, convert_for
from edgekit.model.model import load_model
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
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x, float[M,4] past) => (float[?,4] y)
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
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x, float[M,4] z) => (float[?,4] y)
      <int64[2] one = {1, 4}> { a = Reshape(z, one) y = Add(x, a) }"""
    parse_model(text, tmp_path / "m.onnx")
    report = convert_for(tmp_path / "m.onnx", tmp_path / "out", Recipe(targets=()), ConvertOptions())
    assert {(equality.samples, equality.skipped) for equality in report.equality.values()} == {(1, "")}
