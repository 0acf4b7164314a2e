from pathlib import Path

import msgspec
import numpy as np
import pytest
from bundle_models import make_samples, make_scenes, save_classifier, save_detector
from tiny_models import parse_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.golden import make_golden, read_inputs, read_labels, read_outputs, write_rows
from edgekit.data.npz import read_rows
from edgekit.data.samples import Samples
from edgekit.errors import DataError, ModelError
from edgekit.model.model import Model, load_model


def save_text(graph: str, folder: Path) -> Model:
    """Writes a graph in onnx's text form, of the operators of ONNX and of ONNX-ML."""
    return load_model(
        parse_model(f'<ir_version: 9, opset_import: ["" : 17, "ai.onnx.ml" : 1]> g {graph}', folder / "m.onnx")
    )


def test_outputs_are_those_of_the_source_model(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m.onnx")
    golden = make_golden(model, make_samples(), tmp_path / "golden")
    session = CpuSession(model.path, SessionSettings())
    for sample, expected in zip(read_inputs(golden), read_outputs(golden), strict=True):
        np.testing.assert_allclose(session.run(sample)["y"], expected["y"], rtol=1e-5)
    with np.load(golden.folder / "inputs.npz") as archive:
        assert archive["x"].shape == (6, 1, 8)


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m.onnx")
    first, second = (make_golden(model, make_samples(), tmp_path / name) for name in ("a", "b"))
    assert [file.read_bytes() for file in first.files] == [file.read_bytes() for file in second.files]


def test_samples_that_run_at_a_time_keep_their_order(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m.onnx")
    one = make_golden(model, make_samples(40), tmp_path / "one")
    two = make_golden(model, make_samples(40), tmp_path / "two", at_once=2)
    assert [path.read_bytes() for path in one.files] == [path.read_bytes() for path in two.files]


def test_labels_come_back_and_wrong_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m.onnx")
    golden = make_golden(model, make_samples(3), tmp_path, labels=[4, 0, 2])
    assert read_labels(golden) == (4, 0, 2)
    with pytest.raises(DataError, match="2 labels for 3 samples"):
        make_golden(model, make_samples(3), tmp_path, labels=[1, 2])
    (tmp_path / "labels.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(DataError, match=r"labels\.npy' is malformed"):
        read_labels(golden)


def test_fewer_samples_than_promised_are_refused(tmp_path: Path) -> None:
    golden = make_golden(save_classifier(tmp_path / "m.onnx"), make_samples(2), tmp_path)
    with pytest.raises(DataError, match=r"outputs\.npz' holds 2 samples, not 3"):
        read_outputs(msgspec.structs.replace(golden, samples=3))


def test_string_outputs_survive(tmp_path: Path) -> None:
    model = save_text("(string[2] s) => (string[2] t) { t = Identity(s) }", tmp_path)
    words = [np.array(["a", "eins"], dtype=object), np.array(["zwei und drei", ""], dtype=object)]
    samples = Samples(source="words", count=2, read=lambda: ({"s": word} for word in words))
    golden = make_golden(model, samples, tmp_path)
    assert [row["t"].tolist() for row in read_outputs(golden)] == [word.tolist() for word in words]


def test_scalar_and_empty_outputs_survive(tmp_path: Path) -> None:
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
    ("rows", "message"),
    [
        pytest.param([np.zeros(2), np.zeros((2, 1))], "in sample 1", id="rank"),
        pytest.param([np.zeros(2), np.zeros(3, np.float32)], "in sample 1", id="type"),
    ],
)
def test_a_changing_rank_or_type_is_refused(tmp_path: Path, rows: list[np.ndarray], message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_rows(tmp_path / "t.npz", ({"y": row} for row in rows), ragged=True)


def test_names_that_would_meet_and_inputs_of_changing_shape_are_refused(tmp_path: Path) -> None:
    rows = [{"y": np.zeros(size), "y.shapes": np.zeros(1)} for size in (1, 2)]
    with pytest.raises(DataError, match="two tensors of one name"):
        write_rows(tmp_path / "t.npz", rows, ragged=True)
    with pytest.raises(DataError, match="'x' is"):
        write_rows(tmp_path / "t.npz", ({"x": np.zeros(size)} for size in (1, 2)))


@pytest.mark.parametrize(
    ("values", "shapes"),
    [
        pytest.param(np.zeros(5), [[2], [4]], id="too short"),
        pytest.param(np.zeros(9), [[2], [4]], id="too long"),
        pytest.param(np.zeros(6), [[-2], [8]], id="negative"),
        pytest.param(np.zeros(6), [[1 << 40], [4]], id="huge"),
    ],
)
def test_shapes_that_lie_are_refused(tmp_path: Path, values: np.ndarray, shapes: list[list[int]]) -> None:
    np.savez(tmp_path / "t.npz", **{"y": values, "y.shapes": np.array(shapes)})  # type: ignore[arg-type] # numpy
    with pytest.raises(DataError):
        list(read_rows(tmp_path / "t.npz"))


def test_a_sequence_becomes_tensors(tmp_path: Path) -> None:
    model = save_text("(float[1,8] x) => (seq(float[1,8]) list) { list = SequenceConstruct(x) }", tmp_path)
    golden = make_golden(model, make_samples(2), tmp_path)
    for sample, row in zip(read_inputs(golden), read_outputs(golden), strict=True):
        assert (sorted(row), int(row["list.length"])) == (["list.length", "list[0]"], 1)
        np.testing.assert_array_equal(row["list[0]"], sample["x"])


def test_a_sequence_of_maps_becomes_keys_and_values(tmp_path: Path) -> None:
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
