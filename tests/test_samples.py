"""Samples: every form they come in, and one way to be wrong each."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image, ImageOps

from edgekit.data.data_check import check_samples
from edgekit.data.images import Preprocess, load_preprocess, read_image
from edgekit.data.npz import read_rows
from edgekit.data.samples import fit_sample, list_samples, load_samples, order_for_runs, select_samples, spread_indices
from edgekit.data.sets import read_labels
from edgekit.errors import DataError, UsageError
from edgekit.model.tensors import TensorSpec

X = TensorSpec(name="x", dtype="float32", shape=(1, 2))
ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def _save(path: Path, **arrays: object) -> str:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's own annotation is narrower than what it takes
    return str(path)


def test_threads_read_archives_side_by_side(tmp_path: Path) -> None:
    _save(tmp_path / "d.npz", **{f"x{index}": ROWS for index in range(20)})
    wrong: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(30):
                list(read_rows(tmp_path / "d.npz"))
        except BaseException as error:  # noqa: BLE001 - whatever it is
            wrong.append(error)

    # As Dask's workers do: the collector calls Python, which hands over to another thread while numpy parses a header.
    def hand_over(*_words: object) -> None:
        time.sleep(0)

    gc.callbacks.append(hand_over)
    often = gc.get_threshold()
    gc.set_threshold(50)
    try:
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*often)
        gc.callbacks.remove(hand_over)
    assert wrong == []


@pytest.mark.parametrize("compressed", [False, True])
def test_npz_rows_are_samples_and_get_a_batch_axis(tmp_path: Path, compressed: bool) -> None:
    (np.savez_compressed if compressed else np.savez)(tmp_path / "d.npz", x=ROWS)
    samples = load_samples(str(tmp_path / "d.npz"), [X])
    assert samples.count == 3
    assert [sample["x"].tolist() for sample in samples] == [[row.tolist()] for row in ROWS]
    assert check_samples(samples) == check_samples(samples)


def test_the_digest_tells_content_apart(tmp_path: Path) -> None:
    one = load_samples(_save(tmp_path / "a.npz", x=ROWS), [X])
    other = load_samples(_save(tmp_path / "b.npz", x=ROWS + 1), [X])
    assert check_samples(one).sha256 != check_samples(other).sha256


def test_folders_of_npz_npy_and_data_sets_are_read(tmp_path: Path) -> None:
    for name in ("npz", "npy", "pb/test_data_set_0", "pb/test_data_set_10", "pb/test_data_set_2"):
        (tmp_path / name).mkdir(parents=True)
    for index, row in enumerate(ROWS):
        _save(tmp_path / "npz" / f"{index}.npz", x=row)
        np.save(tmp_path / "npy" / f"{index}.npy", row[None])
        folder = tmp_path / "pb" / f"test_data_set_{(0, 2, 10)[index]}"
        onnx.save_tensor(numpy_helper.from_array(row[None]), str(folder / "input_0.pb"))
    np.save(tmp_path / "all.npy", ROWS)
    for name in ("npz", "npy", "pb", "all.npy"):
        assert [sample["x"][0, 0] for sample in load_samples(str(tmp_path / name), [X])] == [0, 2, 4]


def test_a_function_gives_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_data.py").write_text(
        "import numpy as np\ndef give():\n    for i in range(4):\n        yield {'x': np.full(2, i, np.float32)}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [sample["x"][0, 0] for sample in load_samples("my_data:give", [X])] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="cannot load"):
        load_samples("my_data:gone", [X])


def test_images_become_tensors_as_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "cat" / "a.png")
    (tmp_path / "p.toml").write_text('size = [8, 8]\nresize = 8\ncolor = "BGR"\nmean = [0.5]\nstd = [0.5]\n')
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 3, 8, 8))
    samples = load_samples(str(tmp_path), [spec], load_preprocess(tmp_path / "p.toml"))
    image = next(iter(samples))["image"]
    assert samples.class_names == ("cat",)
    assert image[0, :, 0, 0].tolist() == [-1.0, -1.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "shape", "hint"),
    [
        ("float32", (1, 3, 16, 24), "write into the file: size = [24, 16]"),
        ("float32", (1, 8, 8, 3), 'write into the file: layout = "NHWC"'),
        ("float32", ("n", "h", "w", 3), 'write into the file: layout = "NHWC"'),
        ("uint8", (8, 16, 1), 'write into the file: size = [16, 8]; color = "L"; layout = "NHWC"; dtype = "uint8"'),
        ("float32", (1, 8, 8, 4), "no preprocessing makes that of one image: give a .npz"),
        ("float32", (2, 3, 8, 8), "no preprocessing makes that of one image: give a .npz"),
        ("int64", (1, 3, 8, 8), "no preprocessing makes that of one image: give a .npz"),
    ],
)
def test_a_wrong_preprocessing_is_told(tmp_path: Path, dtype: str, shape: tuple[int | str, ...], hint: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"makes float32\[3, 8, 8\] of an image, the model wants image: ") as refused:
        load_samples(str(tmp_path), [TensorSpec(name="image", dtype=dtype, shape=shape)], Preprocess(size=(8, 8)))
    assert refused.value.hint == hint


def test_images_as_int8_and_grey_nhwc(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 200).save(tmp_path / "a.png")
    preprocess = Preprocess(size=(4, 4), color="L", layout="NHWC", dtype="int8")
    image = read_image(tmp_path / "a.png", preprocess)
    assert (image.shape, image.dtype, int(image[0, 0, 0])) == ((4, 4, 1), np.dtype(np.int8), 72)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_upright(tmp_path: Path, orientation: int) -> None:
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as opened:
        upright = np.asarray(ImageOps.exif_transpose(opened))  # Pillow's own, as another's opinion
    size = (upright.shape[1], upright.shape[0])
    read = read_image(tmp_path / "a.png", Preprocess(size=size, color="L", layout="NHWC", dtype="uint8"))
    assert np.array_equal(read[..., 0], upright)


def test_a_photo_whose_exif_is_damaged_is_read(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    Image.new("RGB", (8, 4)).save(tmp_path / "a.jpg", exif=exif)
    data = bytearray((tmp_path / "a.jpg").read_bytes())
    # The second tag says that its text is of a type that there is not.
    place = data.index(b"\x01\x0f")
    data[place + 2 : place + 4] = b"\x00\xff"
    (tmp_path / "a.jpg").write_bytes(data)
    assert read_image(tmp_path / "a.jpg", Preprocess(size=(8, 8))).shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size = [8, 8]\nmeen = [1.0]", "meen"),
        ("size = [8, 8]\nstd = [0.0]", "std"),
        ("size = 8", "malformed"),
        ("size = [8, 8]\nlayout = 'CHW'", r"Invalid enum value 'CHW' - at `\$.layout` \(valid: NCHW, NHWC\)"),
        ("size = [8, 8]\nmean = [123.68, 116.78, 103.94]", "mean = 123.68 lies outside the pixels, which reach 1"),
    ],
)
def test_a_wrong_preprocessing_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(DataError, match=message):
        load_preprocess(tmp_path / "p.toml")


def test_labels_that_are_no_classes_are_told_of_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("66QB\nLHE3B\n")
    with pytest.raises(DataError, match="holds no classes") as refused:
        read_labels(tmp_path / "texts.txt", list_samples([{"x": ROWS[0]}, {"x": ROWS[1]}], "two"))
    assert "need a metric: --metric NAME, or [metric] in the --recipe of a build" in str(refused.value.hint)


def test_a_file_without_labels_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"'.*empty.txt' has int64 of shape \[0\] as labels"):
        read_labels(tmp_path / "empty.txt", list_samples([{"x": ROWS[0]}], "one"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": ROWS}, "'y', which is no model input"),
        ({"x": ROWS, "y": ROWS}, "'y', which is no model input"),
        ({"x": ROWS.astype(np.float64)}, "float64 for input 'x', the model wants float32"),
        ({"x": ROWS[:, :1]}, r"shape \[1\] for input 'x'"),
        ({"x": ROWS[:0]}, "no sample"),
        ({}, "no sample"),
        ({"x": np.float32(1)}, "is a scalar, and each sample needs its own"),
        ({"x": np.array([{}], object)}, "holds Python objects"),
        ({"x": np.asfortranarray(ROWS)}, "is in Fortran order"),
    ],
)
def test_npz_that_does_not_fit_is_refused(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_samples(_save(tmp_path / "d.npz", **arrays), [X])


@pytest.mark.parametrize(
    ("shape", "wanted", "hint"),
    [
        ((3, 8, 8), (1, 8, 8, 3), "numpy.transpose"),
        ((8, 8, 1), (1, 8, 8, 3), "a batch axis of one is added"),
        ((7, 8, 3), (1, 8, 8, 3), "a batch axis of one is added"),
        ((1, 5), (1, 8), "build with several sizes"),
    ],
)
def test_wrong_shapes_are_told(tmp_path: Path, shape: tuple[int, ...], wanted: tuple[int, ...], hint: str) -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=wanted)
    with pytest.raises(DataError) as caught:
        load_samples(_save(tmp_path / "d.npz", x=np.zeros((2, *shape), np.float32)), [spec])
    assert hint in caught.value.hint


def test_a_missing_input_and_unequal_lengths_are_refused(tmp_path: Path) -> None:
    other = TensorSpec(name="y", dtype="float32", shape=(1, 2))
    with pytest.raises(DataError, match="lacks the model input 'y'"):
        load_samples(_save(tmp_path / "d.npz", x=ROWS), [X, other])
    with pytest.raises(DataError, match="unequal length"):
        load_samples(_save(tmp_path / "e.npz", x=ROWS, y=ROWS[:2]), [X, other])


def test_a_cut_off_archive_and_other_files_are_refused(tmp_path: Path) -> None:
    path = Path(_save(tmp_path / "d.npz", x=ROWS))
    path.write_bytes(path.read_bytes()[:-30])
    (tmp_path / "d.txt").write_text("1 2 3")
    for source in (path, tmp_path / "d.txt", tmp_path / "none.npz", tmp_path):
        with pytest.raises(DataError):
            list(load_samples(str(source), [X]))


def test_selection_keeps_order_and_spreads_evenly(tmp_path: Path) -> None:
    samples = load_samples(_save(tmp_path / "d.npz", x=ROWS), [X])
    assert [sample["x"][0, 0] for sample in select_samples(samples, [1, 2, 0])] == [2, 4, 0]
    assert spread_indices(10, 4) == (0, 2, 5, 7)
    assert spread_indices(2, 4) == (0, 1)


@pytest.mark.parametrize("steps", [1, 3])
def test_each_part_of_a_run_from_its_begin_is_spread(steps: int) -> None:
    """Of 96 sequences sorted by class, each eighth of a run has as much of the first half as of the second."""
    order = order_for_runs(96 * steps, 96 * steps, steps)
    assert sorted(order) == list(range(96 * steps))
    for part in range(12, 97, 12):
        begun = order[: part * steps]
        assert sum(index < 48 * steps for index in begun) == part * steps // 2
        assert all(begun[place] == begun[place - 1] + 1 for place in range(len(begun)) if place % steps)


def test_batches_of_any_size_are_cut_into_samples(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 3, 2)).astype(np.float32)
    (tmp_path / "mixed").mkdir()
    for index, (start, end) in enumerate([(0, 1), (1, 4), (4, 6), (6, 7)]):
        np.savez(tmp_path / "mixed" / f"{index}.npz", x=rows[start:end], scale=np.array([index], np.float32))
    inputs = [
        TensorSpec(name="x", dtype="float32", shape=(1, 3, 2)),
        TensorSpec(name="scale", dtype="float32", shape=(1,)),
    ]
    mixed = load_samples(str(tmp_path / "mixed"), inputs)
    assert (mixed.count, mixed.batches) == (7, 4)
    assert [sample["x"].shape for sample in mixed] == [(1, 3, 2)] * 7
    assert np.array_equal(np.concatenate([sample["x"] for sample in mixed]), rows)
    assert [float(sample["scale"][0]) for sample in mixed] == [0, 1, 1, 1, 2, 2, 3]
    np.savez(tmp_path / "four.npz", x=rows[:4].reshape(2, 2, 3, 2))
    assert (load_samples(str(tmp_path / "four.npz"), inputs[:1]).count) == 4
    open_batch = [TensorSpec(name="x", dtype="float32", shape=("N", 3, 2))]
    assert load_samples(str(tmp_path / "four.npz"), open_batch).count == 2


def test_another_dtype_or_shape_among_the_samples_is_named(tmp_path: Path) -> None:
    for index, value in enumerate([ROWS[:1], ROWS[1:2].astype(np.float64)]):
        _save(tmp_path / f"{index}.npz", x=value)
    with pytest.raises(DataError, match=r"sample 1 of .* has float64 for input 'x', the model wants float32"):
        check_samples(load_samples(str(tmp_path), [X]))
    np.savez(tmp_path / "1.npz", x=np.zeros((1, 5), np.float32))
    with pytest.raises(DataError, match=r"sample 1 of .* has shape \[1, 5\] for input 'x'.*sample i is array\[i\]"):
        check_samples(load_samples(str(tmp_path), [X]))
    # One size was fixed, and a sample is shorter.
    np.savez(tmp_path / "1.npz", x=np.zeros((1, 1), np.float32))
    with pytest.raises(DataError, match="fill them, or build with several sizes, as --dim NAME=64,128"):
        check_samples(load_samples(str(tmp_path), [X]))


def test_a_number_of_no_axes_becomes_an_array() -> None:
    sample: dict[str, Any] = {"gain": np.float32(2)}
    found = fit_sample(sample, (TensorSpec(name="gain", dtype="float32", shape=()),), "a sample")
    assert isinstance(found["gain"], np.ndarray)
    assert found["gain"].shape == ()
