"""Golden samples: what they hold, which outputs a bundle expects for them, and those of an earlier build."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bundle_models import make_bundle, make_contents, make_samples, make_scenes, save_classifier, save_detector
from onnx import load, numpy_helper, save
from tiny_models import parse_model

from edgekit._files import digest_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.describe import Contents
from edgekit.bundle.expected import Recorded, adopt_reference, write_expected
from edgekit.bundle.folder import Bundle, open_bundle, write_bundle
from edgekit.bundle.golden import make_golden, read_inputs, read_labels, read_outputs, write_rows
from edgekit.bundle.manifest import BundledFile, encode_json
from edgekit.bundle.multi import open_recorded
from edgekit.data.npz import read_rows
from edgekit.data.samples import Samples, list_samples
from edgekit.errors import DataError, ModelError, UsageError
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Tensors


def save_text(graph: str, folder: Path) -> Model:
    """Writes a graph in onnx's text form, of the operators of ONNX and of ONNX-ML."""
    return load_model(
        parse_model(f'<ir_version: 9, opset_import: ["" : 17, "ai.onnx.ml" : 1]> g {graph}', folder / "m.onnx")
    )


def test_samples_that_run_in_parallel_keep_their_order(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m.onnx")
    one = make_golden(model, make_samples(40), tmp_path / "one")
    two = make_golden(model, make_samples(40), tmp_path / "two", at_once=2)
    assert [path.read_bytes() for path in one.files] == [path.read_bytes() for path in two.files]
    with zipfile.ZipFile(one.folder / "outputs.npz") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_labels_and_counts_come_back_and_wrong_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m.onnx")
    golden = make_golden(model, make_samples(3), tmp_path, labels=[4, 0, 2])
    assert read_labels(golden) == (4, 0, 2)
    with pytest.raises(DataError, match="2 labels for 3 samples"):
        make_golden(model, make_samples(3), tmp_path, labels=[1, 2])
    (tmp_path / "labels.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(DataError, match=r"labels\.npy' is malformed"):
        read_labels(golden)
    golden = make_golden(save_classifier(tmp_path / "m.onnx"), make_samples(2), tmp_path)
    with pytest.raises(DataError, match=r"outputs\.npz' holds 2 samples, not 3"):
        read_outputs(msgspec.structs.replace(golden, samples=3))


def test_the_reference_drops_nothing_out(tmp_path: Path) -> None:
    text = "{ r = Relu(x) d = Dropout(r, p, t) y = Neg(d) }"
    graph = f"(float[99] x) => (float[99] y) <float p = {{0.5}}, bool t = {{1}}> {text}"
    samples = Samples(source="ones", count=1, read=lambda: iter([{"x": np.ones(99, np.float32)}]))
    (outputs,) = read_outputs(make_golden(save_text(graph, tmp_path), samples, tmp_path / "g"))
    assert outputs["y"].tolist() == [-1] * 99


def test_strings_scalars_and_empty_outputs_survive(tmp_path: Path) -> None:
    model = save_text("(string[2] s) => (string[2] t) { t = Identity(s) }", tmp_path)
    words = [np.array(["a", "eins"], dtype=object), np.array(["zwei und drei", ""], dtype=object)]
    samples = Samples(source="words", count=2, read=lambda: ({"s": word} for word in words))
    golden = make_golden(model, samples, tmp_path)
    assert [row["t"].tolist() for row in read_outputs(golden)] == [word.tolist() for word in words]
    text = """(float[1,8] x) => (float scalar, float[0,8] empty) <int64[1] zero = {0}> {
      scalar = ReduceSum<keepdims = 0>(x)
      empty = Slice(x, zero, zero) }"""
    golden = make_golden(save_text(text, tmp_path), make_samples(), tmp_path)
    assert [(row["scalar"].shape, row["empty"].shape) for row in read_outputs(golden)] == [((), (0, 8))] * 6


def test_an_output_of_changing_shape_is_kept(tmp_path: Path) -> None:
    golden = make_golden(save_detector(tmp_path / "m.onnx"), make_scenes(), tmp_path)
    shapes = {spec.name: spec.shape for spec in golden.outputs}
    assert shapes == {"found": (None, 4), "kept": (None, 3), "best": (1, 2)}
    session = CpuSession(tmp_path / "m.onnx", SessionSettings(level=Level.DISABLED))
    counts: list[int] = []
    for sample, row in zip(make_scenes(), read_outputs(golden), strict=True):
        for name, value in session.run(sample).items():
            assert np.array_equal(row[name], value)
            assert row[name].dtype == value.dtype
        counts.append(len(row["found"]))
    assert counts[1] == 0
    assert len(set(counts)) > 2
    with np.load(tmp_path / "outputs.npz") as archive:
        assert sorted(archive.files) == ["best", "found", "found.shapes", "kept", "kept.shapes"]
        assert archive["found"].size == 4 * sum(counts)


def test_texts_of_changing_number_are_kept(tmp_path: Path) -> None:
    rows = [{"y": np.array(words, dtype=object)} for words in (["a", "bcd"], [], ["ef"])]
    specs, count = write_rows(tmp_path / "t.npz", rows, ragged=True)
    assert (specs[0].dtype, specs[0].shape, count) == ("string", (None,), 3)
    assert [list(row["y"]) for row in read_rows(tmp_path / "t.npz")] == [["a", "bcd"], [], ["ef"]]


@pytest.mark.parametrize(
    ("rows", "ragged", "message"),
    [
        pytest.param([{"y": np.zeros(2)}, {"y": np.zeros((2, 1))}], True, "in sample 1", id="rank"),
        pytest.param([{"y": np.zeros(2)}, {"y": np.zeros(3, np.float32)}], True, "in sample 1", id="type"),
        pytest.param([{"y": np.zeros(size), "y.shapes": np.zeros(1)} for size in (1, 2)], True,
                     "two tensors of one name", id="names that collide"),
        pytest.param([{"x": np.zeros(1)}, {"x": np.zeros(2)}], False, "'x' is", id="inputs of changing shape"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, rows: list[Tensors], ragged: bool, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_rows(tmp_path / "t.npz", rows, ragged=ragged)


@pytest.mark.parametrize(
    ("values", "shapes"),
    [
        pytest.param(np.zeros(5), [[2], [4]], id="too short"),
        pytest.param(np.zeros(9), [[2], [4]], id="too long"),
        pytest.param(np.zeros(6), [[-2], [8]], id="negative"),
        pytest.param(np.zeros(6), [[1 << 40], [4]], id="huge"),
    ],
)
def test_shapes_unlike_the_data_are_refused(tmp_path: Path, values: np.ndarray, shapes: list[list[int]]) -> None:
    np.savez(tmp_path / "t.npz", **{"y": values, "y.shapes": np.array(shapes)})  # type: ignore[arg-type] # numpy
    with pytest.raises(DataError):
        list(read_rows(tmp_path / "t.npz"))


def test_sequences_and_maps_become_tensors(tmp_path: Path) -> None:
    model = save_text("(float[1,8] x) => (seq(float[1,8]) list) { list = SequenceConstruct(x) }", tmp_path)
    golden = make_golden(model, make_samples(2), tmp_path)
    for sample, row in zip(read_inputs(golden), read_outputs(golden), strict=True):
        assert (sorted(row), int(row["list.length"])) == (["list.length", "list[0]"], 1)
        np.testing.assert_array_equal(row["list[0]"], sample["x"])
    text = """(float[1,8] x) => (seq(map(int64, float)) maps) {
      maps = ai.onnx.ml.ZipMap<classlabels_int64s = [3, 4, 5, 6, 7, 8, 9, 10]>(x) }"""
    golden = make_golden(save_text(text, tmp_path), make_samples(2), tmp_path)
    for sample, row in zip(read_inputs(golden), read_outputs(golden), strict=True):
        assert row["maps.keys"].tolist() == list(range(3, 11))
        np.testing.assert_array_equal(row["maps.values"], sample["x"])


def test_an_optional_output_is_refused(tmp_path: Path) -> None:
    model = save_text("(float[1,8] x) => (optional(float[1,8]) maybe) { maybe = Optional(x) }", tmp_path)
    with pytest.raises(ModelError, match=r"output 'maybe' .* cannot be compared"):
        make_golden(model, make_samples(), tmp_path)


def read(bundle: Bundle, name: str) -> np.ndarray:
    with np.load(bundle.folder / "golden" / name) as archive:
        rows: np.ndarray = archive[archive.files[0]]
        return rows


def test_each_chosen_sample_has_a_reason_and_an_output_that_no_other_sample_has(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    chosen = bundle.manifest.golden.chosen
    rows = [sample.row for sample in chosen]
    assert rows == sorted(set(rows))
    assert {sample.reason for sample in chosen} == {"typical", "extreme", "worst-error"}
    np.testing.assert_array_equal(read(bundle, "expected.npz"), read(bundle, "outputs.npz")[rows])
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


@pytest.mark.parametrize(("kind", "tolerance"), [("uint16", 3.5), ("uint8", 0.07)])
def test_the_tolerance_of_a_product_knows_factors_of_8_bits(kind: str, tolerance: float, tmp_path: Path) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[1,8] x) => (float[1,8] y)
      <float[1,1] one = {{1}}, float s = {{0.03}}, {kind} m = {{0}}> {{
      q = QuantizeLinear(x, s, m) d = DequantizeLinear(q, s, m) y = MatMul(one, d) }}"""
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    rows: list[Tensors] = [{"x": np.full((1, 8), number, np.float32)} for number in range(8)]
    golden = make_golden(model, list_samples(rows, "rows"), tmp_path)
    facts = write_expected(golden, {"onnx": [model.path]}, "int16", tmp_path)
    # Half a step of 8 bits of a range of 16, but at most half of the largest value, which is 7; or the least tolerance.
    assert facts.tolerance["y"] == pytest.approx(tolerance)


def test_a_float32_file_has_the_tolerance_of_the_precision_in_which_its_provider_computes(tmp_path: Path) -> None:
    found = {}
    for target in ("nnapi", "qnn"):
        bundle = write_bundle(make_contents(tmp_path, target=target), tmp_path / target)
        found[target] = bundle.manifest.golden.tolerance["y"] / float(np.abs(read(bundle, "outputs.npz")).max())
    assert found == pytest.approx({"nnapi": 0.001, "qnn": 0.15}, rel=0.05)


def test_an_output_of_infinite_or_undefined_values_has_no_tolerance(tmp_path: Path) -> None:
    text = """(float[1,8] x) => (float[1,8] y, float[1,8] infinite, float[1,8] undefined) <float zero = {0.0}> {
      y = Identity(x) infinite = Div(x, zero) undefined = Sqrt(x) }"""
    model = save_text(text, tmp_path)
    golden = make_golden(model, make_samples(), tmp_path)
    facts = write_expected(golden, {"onnx": [model.path]}, "fp32", tmp_path)
    assert (list(facts.tolerance), len(facts.chosen)) == (["y"], 3)


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


def record_elsewhere(bundle: Bundle, change: Callable[[np.ndarray], np.ndarray]) -> Bundle:
    """What a machine whose kernels add in another order would have made."""
    rows = [{name: change(value) for name, value in sample.items()} for sample in read_outputs(bundle.golden)]
    file = bundle.folder / "golden" / "outputs.npz"
    write_rows(file, rows)
    entry = BundledFile(sha256=digest_file(file), size_bytes=file.stat().st_size)
    low = min(float(np.nan_to_num(value).min()) for row in rows for value in row.values())
    high = max(float(np.nan_to_num(value).max()) for row in rows for value in row.values())
    outputs = (msgspec.structs.replace(bundle.manifest.outputs[0], value_range=(low, high)),)
    files = {**bundle.manifest.files, "golden/outputs.npz": entry}
    manifest = msgspec.structs.replace(bundle.manifest, files=files, outputs=outputs)
    (bundle.folder / "manifest.json").write_bytes(encode_json(manifest))
    return open_bundle(bundle.folder)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Bundle:
    (tmp_path / "there").mkdir()
    return make_bundle(tmp_path / "there")


@pytest.fixture
def contents(tmp_path: Path) -> Contents:
    (tmp_path / "here").mkdir()
    return make_contents(tmp_path / "here")


def test_a_build_elsewhere_is_repeated_to_the_byte(tmp_path: Path, contents: Contents, elsewhere: Bundle) -> None:
    there = record_elsewhere(elsewhere, lambda value: value * np.float32(1 + 1e-6))
    assert write_bundle(contents, tmp_path / "plain").sha256 != there.sha256
    recorded = open_recorded(tmp_path / "there", "tiny", ["nnapi", "qnn"])
    assert list(recorded) == ["nnapi"]
    adopt_reference(contents.golden, recorded["nnapi"])
    again = write_bundle(msgspec.structs.replace(contents, recorded=recorded["nnapi"]), tmp_path / "again")
    assert again.sha256 == there.sha256


def test_an_expected_output_that_the_model_does_not_give_is_refused(contents: Contents, elsewhere: Bundle) -> None:
    for change in (lambda value: value * np.float32(1.1), lambda value: value * np.float32("nan")):
        wrong = record_elsewhere(elsewhere, change)
        with pytest.raises(UsageError, match="is not what the model gives here"):
            adopt_reference(contents.golden, Recorded(folder=wrong.folder, manifest=wrong.manifest))


def test_expected_outputs_of_other_samples_are_refused(tmp_path: Path, contents: Contents, elsewhere: Bundle) -> None:
    entry = msgspec.structs.replace(elsewhere.manifest.files["golden/inputs.npz"], sha256="0" * 64)
    manifest = msgspec.structs.replace(
        elsewhere.manifest, files={**elsewhere.manifest.files, "golden/inputs.npz": entry}
    )
    with pytest.raises(UsageError, match="other golden samples"):
        adopt_reference(contents.golden, Recorded(folder=elsewhere.folder, manifest=manifest))
    with pytest.raises(UsageError, match=r"holds no bundle .* tiny-nnapi or tiny-cpu"):
        open_recorded(tmp_path, "tiny", ["nnapi", "cpu"])


def test_a_self_test_of_changed_model_files_is_computed_again(tmp_path: Path, contents: Contents) -> None:
    bundle = write_bundle(contents, tmp_path / "first")
    (tmp_path / "other").mkdir()
    other = save_classifier(tmp_path / "other" / "tiny.onnx", classes=7)
    changed = msgspec.structs.replace(
        contents, files={"onnx": (other.path,)}, recorded=Recorded(folder=bundle.folder, manifest=bundle.manifest)
    )
    assert write_bundle(changed, tmp_path / "second").manifest.golden.chosen
