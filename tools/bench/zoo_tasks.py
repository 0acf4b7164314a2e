"""The labelled models of ../shared/zoo: their calibration samples, scored samples and metrics.

No sample is used both for calibration and for scoring. Photographs are scored twice, the second time mirrored, because
there are few: intervals from such similar pairs are slightly too narrow. Two tasks for which the zoo has no labels are
generated: upright and upside-down text lines for the direction classifier, and photographs reduced to a third for
super-resolution.
"""

import atexit
import csv
import functools
import gzip
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples, fit_sample
from edgekit.data.sets import Boxes, Label
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare import prepare_model
from edgekit.target import TaskLimit

ZOO = Path(__file__).parents[3] / "shared" / "zoo"
_SUPERRES_SIDE = 224
_TEXT_LINES, _TEXT_CALIBRATES = 1600, 100
_OVERLAP = 0.45
_CHUNK, _CONTEXT = 512, 64
_CHUNKS_A_CLIP = 4

Run = Callable[[Tensors], Tensors]
"""One run of a model."""


class ZooTask(msgspec.Struct, frozen=True, kw_only=True):
    """One labelled model: arrays with one row for each sample, labels of the scored rows, and how they are scored.

    `decode` turns the model's outputs into the input of the metric; `stream` runs the model many times over one sample.
    """

    name: str
    calibration: dict[str, Array]
    scored: dict[str, Array]
    labels: Sequence[Label]
    limit: TaskLimit
    dims: dict[str, int] = {}
    decode: Callable[[Tensors], Tensors] | None = None
    stream: Callable[[Run, Tensors], Tensors] | None = None
    path: Path | None = None

    @property
    def model(self) -> Path:
        """The path of the model."""
        return self.path or ZOO / "models" / f"{self.name}.onnx"


def require_zoo() -> None:
    """Ends the program with exit code 2 where there is no ../shared/zoo."""
    if not ZOO.is_dir():
        print(f"needs {ZOO}")
        raise SystemExit(2)


def load_task(name: str) -> ZooTask:
    """Returns a labelled model of the zoo by name."""
    return TASKS[name](name)


def write_calibration(task: ZooTask, path: Path) -> None:
    """Writes the samples that calibrate a model into an .npz file."""
    arrays: dict[str, Any] = dict(task.calibration)
    np.savez(path, **arrays)


def read_inputs(name: str) -> dict[str, Array]:
    """Returns the arrays of any zoo model, sample i at index i."""
    inputs: dict[str, Array] = _load_inputs().MODELS[name]()[0]
    return inputs


def as_samples(inputs: dict[str, Array], model: Model, start: int) -> Samples:
    """Returns every second sample, from `start` on."""
    count = len(next(iter(inputs.values())))
    indices = range(start, count, 2)

    def read() -> Iterator[Tensors]:
        for index in indices:
            row: dict[str, Array] = {name: np.asarray(value[index], order="C") for name, value in inputs.items()}
            # Some of the zoo's preprocessing gives double precision.
            row = {name: value.astype(np.float32) if value.dtype.char == "d" else value for name, value in row.items()}
            yield fit_sample(row, model.inputs, f"sample {index}")

    return Samples(source="zoo", count=len(indices), read=read)


@functools.cache
def _load_inputs() -> Any:
    require_zoo()
    sys.path.append(str(ZOO))
    return importlib.import_module("inputs")


def _classes(name: str, *, dims: Mapping[str, int] | None = None) -> ZooTask:
    """Returns a classifier with every second sample for calibration and the others for scoring."""
    inputs, labels = _load_inputs().MODELS[name]()
    count = len(labels)
    inputs = {key: value.astype(np.float32) if value.dtype.kind == "f" else value for key, value in inputs.items()}
    return ZooTask(
        name=name,
        calibration={key: value[0:count:2] for key, value in inputs.items()},
        scored={key: value[1:count:2] for key, value in inputs.items()},
        labels=tuple(int(label) for label in labels[1::2]),
        limit=TaskLimit(name="top1"),
        dims=dict(dims or {}),
    )


def _photographs(name: str, *, dims: Mapping[str, int] | None = None) -> ZooTask:
    """Returns a classifier of photographs [n, c, h, w], which are scored as they are and mirrored."""
    task = _classes(name, dims=dims)
    scored = {key: np.concatenate([value, value[..., ::-1]]) for key, value in task.scored.items()}
    return msgspec.structs.replace(task, scored=scored, labels=(*task.labels, *task.labels))


@functools.cache
def read_digits() -> tuple[Array, Array]:
    """Returns MNIST's test images [10000,1,28,28] with values from 0 to 255, and their digits."""
    folder = ZOO / "data" / "mnist_t10k"
    raw = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    labels = np.frombuffer(gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:], np.uint8)
    return np.frombuffer(raw[16:], np.uint8).reshape(-1, 1, 28, 28).astype(np.float32), labels


def _digits(name: str, key: str, scale: Callable[[Array], Array]) -> ZooTask:
    images, labels = read_digits()
    pixels = scale(images).astype(np.float32)
    return ZooTask(
        name=name,
        calibration={key: pixels[:200]},
        scored={key: pixels[2000:4000]},
        labels=tuple(int(label) for label in labels[2000:4000]),
        limit=TaskLimit(name="top1"),
    )


def _mnist(name: str) -> ZooTask:
    return _digits(name, "0", lambda pixels: (pixels / 255 - 0.1307) / 0.3081)


def _mnist_cntk(name: str) -> ZooTask:
    return _digits(name, "Input3", lambda pixels: pixels)


def _photos(width: int, height: int) -> Array:
    """Returns ImageNet's photographs [n, h, w, 3], which calibrate models that COCO's labelled photographs score."""
    files = sorted((ZOO / "data" / "imagenet200_256").glob("*.jpg"))[::2]
    return np.stack([_resize(Image.open(file), width, height) for file in files]).astype(np.float32)


def _resize(image: Image.Image, width: int, height: int) -> Array:
    return np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR))


def _coco_boxes() -> list[Boxes]:
    found: list[Boxes] = []
    for file in sorted((ZOO / "data" / "coco_train48").glob("*.txt")):
        rows = [[float(word) for word in line.split()] for line in file.read_text().splitlines()]
        boxes = tuple((x - w / 2, y - h / 2, x + w / 2, y + h / 2) for _, x, y, w, h in rows)
        found.append(Boxes(boxes=boxes, classes=tuple(int(row[0]) for row in rows)))
    return found


def _mirror(found: Boxes) -> Boxes:
    boxes = tuple((1 - right, top, 1 - left, bottom) for left, top, right, bottom in found.boxes)
    return Boxes(boxes=boxes, classes=found.classes)


def _labelled_photos() -> list[Path]:
    return [file.with_suffix(".jpg") for file in sorted((ZOO / "data" / "coco_train48").glob("*.txt"))]


def _vww(name: str) -> ZooTask:
    zoo = _load_inputs()
    images = zoo.vww()[0]["input_1"].astype(np.float32)
    files = [path.stem for path in sorted((ZOO / "data" / "coco_train48").glob("*.jpg"))]
    stems = {path.stem: boxes for path, boxes in zip(_labelled_photos(), _coco_boxes(), strict=True)}
    empty = Boxes(boxes=(), classes=())
    labels = tuple(int(0 in stems.get(stem, empty).classes) for stem in files)
    return ZooTask(
        name=name,
        calibration={"input_1": _photos(96, 96) / np.float32(255)},
        scored={"input_1": np.concatenate([images, images[:, :, ::-1]])},
        labels=(*labels, *labels),
        limit=TaskLimit(name="top1"),
        dims={"unk__337": 1},
    )


def _fastestdet(name: str) -> ZooTask:
    boxes = _coco_boxes()
    photos = np.stack([_resize(Image.open(file), 352, 352) for file in _labelled_photos()]).astype(np.float32)
    return ZooTask(
        name=name,
        calibration={"input.1": _to_bgr(_photos(352, 352))},
        scored={"input.1": _to_bgr(np.concatenate([photos, photos[:, :, ::-1]]))},
        labels=[*boxes, *(_mirror(one) for one in boxes)],
        limit=TaskLimit(name="map"),
        decode=_decode_fastestdet,
    )


def _to_bgr(pixels: Array) -> Array:
    return np.ascontiguousarray((pixels[..., ::-1] / np.float32(255)).transpose(0, 3, 1, 2))


def _decode_fastestdet(outputs: Tensors) -> Tensors:
    """Returns boxes, scores and classes from the grid of [object, box, classes], as the model's own script does."""
    grid = next(iter(outputs.values()))[0].astype(np.float64)
    height, width = grid.shape[1:]
    scores = np.clip(grid[0], 0, None) ** 0.6 * np.clip(grid[5:].max(0), 0, None) ** 0.4
    rows, columns = np.mgrid[0:height, 0:width]
    x, y = (columns + np.tanh(grid[1])) / width, (rows + np.tanh(grid[2])) / height
    w, h = (1 / (1 + np.exp(-grid[index])) for index in (3, 4))
    boxes = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=-1).reshape(-1, 4)
    return suppress(boxes, scores.reshape(-1), grid[5:].argmax(0).reshape(-1))


def suppress(
    boxes: Array, scores: Array, classes: Array, *, least: float = 0.01, first: int | None = None, most: int = 100
) -> Tensors:
    """Returns the boxes that remain if of two overlapping boxes of a class only the better one is kept (NMS).

    Of the boxes with a score of at least `least`, the `first` ones are considered, and at most `most` remain.
    """
    left = [int(index) for index in np.argsort(-scores, kind="stable")[:first] if scores[index] >= least]
    kept: list[int] = []
    while left and len(kept) < most:
        best, *left = left
        kept.append(best)
        sides = np.minimum(boxes[best, 2:], boxes[left, 2:]) - np.maximum(boxes[best, :2], boxes[left, :2])
        both = np.clip(sides, 0, None).prod(axis=1)
        areas = (boxes[[best, *left], 2:] - boxes[[best, *left], :2]).prod(axis=1)
        far = (both < _OVERLAP * (areas[0] + areas[1:] - both + 1e-12)) | (classes[left] != classes[best])
        left = [index for index, is_far in zip(left, far, strict=True) if is_far]
    return {"boxes": boxes[kept].reshape(-1, 4), "scores": scores[kept], "classes": classes[kept]}


def _superres(name: str) -> ZooTask:
    """The true images are four photographs of 336 x 336 side by side; the input is their mean over 3 x 3 pixels."""
    side = 3 * _SUPERRES_SIDE // 2
    crops: list[Array] = []
    for file in sorted((ZOO / "data" / "coco_train48").glob("*.jpg")):
        image = Image.open(file).convert("YCbCr")
        if min(image.size) >= side:
            crops += [np.asarray(image.crop((x, 0, x + side, side)))[..., 0] for x in (0, image.width - side)]
    luma = np.stack(crops[: len(crops) // 4 * 4]).astype(np.float32) / 255
    truth = luma.reshape(-1, 2, 2, side, side).transpose(0, 1, 3, 2, 4).reshape(-1, 1, 2 * side, 2 * side)
    small = truth.reshape(-1, 1, _SUPERRES_SIDE, 3, _SUPERRES_SIDE, 3).mean((3, 5), dtype=np.float32)
    return ZooTask(
        name=name,
        calibration={"input": _load_inputs().superres()[0]["input"][::2]},
        scored={"input": small},
        labels=list(truth),
        limit=TaskLimit(name="psnr"),
    )


def _voice(name: str) -> ZooTask:
    inputs = _load_inputs().vad_transformer()[0]
    rows = list(csv.DictReader((ZOO / "data" / "speech_commands_120" / "labels.csv").open()))
    labels = tuple(int(row["word"] != "Silence") for row in rows)
    audio = inputs["input"]
    # Silence is rare, so both halves get a part of it.
    order = np.argsort(labels, kind="stable")
    return ZooTask(
        name=name,
        calibration={"input": audio[order[0::3]]},
        scored={"input": np.concatenate([audio[order[1::3]], audio[order[2::3]]])},
        labels=tuple(labels[index] for index in (*order[1::3], *order[2::3])),
        limit=TaskLimit(name="auc"),
        dims={"batch": 1, "samples": 16000},
    )


def _silero(name: str) -> ZooTask:
    """The voice detector at 16 kHz, which passes its state from chunk to chunk; a clip's best chunk scores.

    The rate is made a constant, as with `edgekit prepare --freeze sr=16000`, because a graph within an `If` stays
    float.
    """
    task = _voice(name)
    path = _freeze_rate(name)
    run = CpuSession(path, SessionSettings()).run
    rng = np.random.default_rng(0)
    chunks: list[Tensors] = []
    for audio in task.calibration["input"]:
        every = [inputs for inputs, _ in _run_chunks(run, audio)]
        chunks += [every[index] for index in rng.choice(len(every), _CHUNKS_A_CLIP, replace=False)]
    return msgspec.structs.replace(
        task,
        calibration={key: np.stack([chunk[key] for chunk in chunks]) for key in ("input", "state")},
        stream=lambda run, sample: {"output": max(found for _, found in _run_chunks(run, sample["input"])).reshape(1)},
        path=path,
        dims={},
    )


@functools.cache
def _freeze_rate(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="zoo-"))
    atexit.register(shutil.rmtree, folder)
    dims = {"input:0": 1, "input:1": _CONTEXT + _CHUNK, "state:1": 1}
    source = load_model(ZOO / "models" / f"{name}.onnx")
    return prepare_model(source, folder / f"{name}.onnx", dims, constants={"sr": 16000}).path


def _run_chunks(run: Run, audio: Array) -> Iterator[tuple[Tensors, Array]]:
    """Yields the inputs and the voice's probability, chunk by chunk."""
    state = np.zeros((2, 1, 128), np.float32)
    for start in range(0, audio.size - _CONTEXT - _CHUNK + 1, _CHUNK):
        inputs = {"input": audio[None, start : start + _CONTEXT + _CHUNK], "state": state}
        outputs = run(inputs)
        state = outputs["stateN"]
        yield inputs, outputs["output"]


def _direction(name: str) -> ZooTask:
    """Text lines of random words, half of them upside down, at the input size of the direction classifier."""
    rng = np.random.default_rng(0)
    lines = np.stack([_draw_line(rng, upside_down=bool(index % 2)).astype(np.float32) for index in range(_TEXT_LINES)])
    pixels = ((lines / 255 - 0.5) / 0.5).astype(np.float32).transpose(0, 3, 1, 2)
    return ZooTask(
        name=name,
        calibration={"x": np.ascontiguousarray(pixels[:_TEXT_CALIBRATES])},
        scored={"x": np.ascontiguousarray(pixels[_TEXT_CALIBRATES:])},
        labels=tuple(index % 2 for index in range(_TEXT_CALIBRATES, _TEXT_LINES)),
        limit=TaskLimit(name="top1"),
        dims={"x:0": 1, "x:2": 48, "x:3": 192},
    )


def _draw_line(rng: np.random.Generator, *, upside_down: bool) -> Array:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    words = ["".join(rng.choice(list(letters), size=rng.integers(2, 8))) for _ in range(rng.integers(1, 4))]
    font = ImageFont.load_default(size=int(rng.integers(18, 36)))
    left, top, right, bottom = font.getbbox(" ".join(words))
    paper, ink = rng.integers(120, 256, 3), rng.integers(0, 110, 3)
    if rng.random() < 0.3:
        paper, ink = ink, paper
    size = (int(right - left) + int(rng.integers(4, 20)), int(bottom - top) + int(rng.integers(4, 16)))
    image = Image.new("RGB", size, tuple(int(value) for value in paper))
    place = ((size[0] - right + left) / 2 - left, (size[1] - bottom + top) / 2 - top)
    ImageDraw.Draw(image).text(place, " ".join(words), fill=tuple(int(value) for value in ink), font=font)
    if upside_down:
        image = image.rotate(180)
    width = min(192, round(48 * image.width / image.height))
    canvas = np.full((48, 192, 3), 127.5)
    canvas[:, :width] = np.asarray(image.resize((width, 48), Image.Resampling.BILINEAR))
    return np.asarray(np.clip(canvas + rng.normal(0, rng.uniform(0, 25), canvas.shape), 0, 255))


TASKS: Mapping[str, Callable[[str], ZooTask]] = {
    "mobilenetv2_1.0_224_fp32": lambda name: _photographs(name, dims={"N": 1}),
    "squeezenet1.1_fp32": _photographs,
    "vww_96_float": _vww,
    "kws_dscnn_float": lambda name: _classes(name, dims={"unk__123": 1}),
    "magika_v3_3": lambda name: _classes(name, dims={"unk__214": 1}),
    "mnist_cnn_pytorch": _mnist,
    "mnist8_cntk": _mnist_cntk,
    "ppocr_cls_mbv3": _direction,
    "silero_vad_micro_transformer": _voice,
    "silero_vad": _silero,
    "superres_core_224": _superres,
    "fastestdet": _fastestdet,
}
