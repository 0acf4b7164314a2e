from pathlib import Path

import msgspec
import numpy as np
from bundle_models import make_bundle, make_contents
from onnx import load, numpy_helper, save

from edgekit.bundle.expected import write_expected
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.model.model import load_model


def read(bundle: Bundle, name: str) -> np.ndarray:
    with np.load(bundle.folder / "golden" / name) as archive:
        rows: np.ndarray = archive[archive.files[0]]
        return rows


def test_each_chosen_sample_has_a_reason_and_an_expected_output(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    chosen = bundle.manifest.golden.chosen
    rows = [sample.row for sample in chosen]
    assert rows == sorted(set(rows))
    assert {sample.reason for sample in chosen} == {"typical", "extreme", "worst-error"}
    np.testing.assert_array_equal(read(bundle, "expected.npz"), read(bundle, "outputs.npz")[rows])


def test_the_tolerance_tells_a_device_that_answers_for_another_sample(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    expected, tolerance = read(bundle, "expected.npz"), bundle.manifest.golden.tolerance["y"]
    right = read(bundle, "outputs.npz")[[sample.row for sample in bundle.manifest.golden.chosen]]
    assert np.abs(right - expected).max() <= tolerance
    assert all(np.abs(right[index - 1] - expected[index]).max() > tolerance for index in range(len(expected)))


def test_the_tolerance_grows_with_the_error_of_the_built_model(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    exact = write_bundle(contents, tmp_path / "exact").manifest.golden.tolerance["y"]
    proto = load(contents.source.path)
    weight = numpy_helper.to_array(proto.graph.initializer[0])
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.round(weight * 4) / 4, "w"))
    save(proto, tmp_path / "coarse.onnx")
    files = {"onnx": (load_model(tmp_path / "coarse.onnx").path,)}
    bundle = write_bundle(msgspec.structs.replace(contents, files=files), tmp_path / "coarse")
    facts = bundle.manifest.golden
    worst = np.abs(read(bundle, "outputs.npz")[[s.row for s in facts.chosen]] - read(bundle, "expected.npz")).max()
    assert facts.tolerance["y"] > max(exact, worst)
    assert "worst-error" in {sample.reason for sample in facts.chosen}


def test_a_model_that_no_cpu_runs_has_no_self_test_and_says_so(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    proto = load(contents.source.path)
    proto.graph.node[0].domain = "com.example"
    proto.opset_import.add(domain="com.example", version=1)
    save(proto, tmp_path / "alien.onnx")
    facts = write_expected(contents.golden, {"onnx": [tmp_path / "alien.onnx"]}, "fp32", tmp_path / "out")
    assert (facts.chosen, facts.tolerance) == ((), {})
    assert facts.expected_from.startswith("nothing: ONNX Runtime refuses")
    assert write_expected(contents.golden, {}, "fp32", tmp_path).expected_from.startswith("nothing")
