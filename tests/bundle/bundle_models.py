"""Tiny models, their samples, and a bundle of them."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from onnx import parser
from tiny_models import save_net

from edgekit.bundle.describe import Contents
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden import make_golden
from edgekit.bundle.manifest import Ancestry, MachineClass, SessionSetting, TunedSession, TuningEvidence, encode_json
from edgekit.bundle.sign import TestResult
from edgekit.check.check import check_model
from edgekit.data.samples import Samples
from edgekit.evidence import Evidence
from edgekit.model.model import Model, save_proto
from edgekit.target import load_target

PASSED = TestResult(result="PASSED", configuration=(), passed_tests=("tiny-nnapi on host",))
"""The test result that a signer states."""


def save_classifier(path: Path, *, classes: int = 5) -> Model:
    """A linear classifier of 8 inputs, with bias."""
    weight = np.random.default_rng(1).normal(size=(8, classes)).astype(np.float32)
    text = f"(float[1,8] x) => (float[1,{classes}] y) {{ [mul] xw = MatMul(x, w) [add] y = Add(xw, b) }}"
    return save_net(text, path, w=weight, b=weight[0])


DETECTOR = """<ir_version: 9, opset_import: ["" : 17]>
  detector (float[1,16,6] x) => (float[?,4] found, int64[?,3] kept, float[1,2] best)
  <int64[1] zero = {0}, int64[1] four = {4}, int64[1] six = {6}, int64[1] last = {2}, int64[1] most = {5},
   int64 two = {2}, float[1] overlap = {0.5}, float[1] least = {0.8}, float[2,2] w = {1, -0.25, -0.25, 1}> {
    boxes = Slice(x, zero, four, last)
    logits = Slice(x, four, six, last)
    mixed = MatMul(logits, w)
    likely = Sigmoid(mixed)
    scores = Transpose<perm = [0, 2, 1]>(likely)
    kept = NonMaxSuppression(boxes, scores, most, overlap, least)
    places = Gather<axis = 1>(kept, two)
    flat = Squeeze(boxes, zero)
    found = Gather<axis = 0>(flat, places)
    best = ReduceMax<axes = [2], keepdims = 0>(scores) }"""
NAMES = {"mixed": "mix", "likely": "sigmoid", "scores": "turn", "kept": "nms"}


def save_detector(path: Path) -> Model:
    """A detector that contains its NMS: 16 boxes of 4 corners and 2 logits in, the remaining boxes and scores out."""
    proto = parser.parse_model(DETECTOR)
    for node in proto.graph.node:
        node.name = NAMES.get(node.output[0], node.output[0])
    return save_proto(proto, path)


def make_scenes(count: int = 6) -> Samples:
    """Returns scenes for the detector; the second one is empty."""
    rng = np.random.default_rng(5)
    corners = rng.uniform(0, 0.7, size=(count, 1, 16, 2)).astype(np.float32)
    logits = rng.normal(scale=2.0, size=(count, 1, 16, 2)).astype(np.float32)
    logits[1] = -4.0
    rows = np.concatenate([corners, corners + 0.2, logits], axis=-1)
    return Samples(source="scenes", count=count, read=lambda: ({"x": row} for row in rows))


def make_detector_bundle(folder: Path, target: str = "nnapi") -> Bundle:
    model = save_detector(folder / "detector.onnx")
    contents = make_contents(folder, target=target, model=model, samples=make_scenes())
    bundle = write_bundle(contents, folder / f"detector-{target}")
    return msgspec.structs.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, verification=()))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Changes the JSON of a file, and writes it in edgekit's format."""
    said = json.loads(path.read_bytes())
    change(said)
    path.write_bytes(encode_json(said))
    return path


def flip_byte(path: Path) -> None:
    """Alters a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def tuned_for(machine: MachineClass, setting: SessionSetting) -> TunedSession:
    """Returns a setting as `edgekit tune` finds it, for machines of a class."""
    evidence = TuningEvidence(
        goal="latency", device="host", evidence=Evidence.EMULATED, ratio=0.8, interval=(0.7, 0.9), rounds=8,
        changes=("1 thread",), versions={},
    )  # fmt: skip
    return TunedSession(machine=machine, setting=setting, evidence=evidence)


def make_samples(count: int = 6) -> Samples:
    rows = np.random.default_rng(2).normal(size=(count, 1, 8)).astype(np.float32)
    return Samples(source="random rows", count=count, read=lambda: ({"x": row} for row in rows))


def make_contents(
    folder: Path,
    *,
    target: str = "nnapi",
    labels: tuple[int, ...] | None = None,
    model: Model | None = None,
    samples: Samples | None = None,
) -> Contents:
    """Returns the contents of a bundle, by default of the classifier and its samples."""
    model, chosen = model or save_classifier(folder / "tiny.onnx"), load_target(target)
    return Contents(
        source=model, target=chosen, precision="fp32", files={"onnx": (model.path,)},
        golden=make_golden(model, samples or make_samples(), folder / "golden", labels=labels),
        check=check_model(model, chosen), versions={"onnxruntime": "1.31.1"},
        ancestry=Ancestry(source=model.sha256, prepared=model.sha256, quantized=None, data=None),
    )  # fmt: skip


# Found before a test states a folder of its own, which goes with it.
_TEMPORARY = tempfile.gettempdir()


@functools.cache
def _make_once(target: str, labels: tuple[int, ...] | None) -> tuple[tempfile.TemporaryDirectory[str], Bundle]:
    folder = tempfile.TemporaryDirectory(prefix="edgekit-tests-", dir=_TEMPORARY)
    contents = make_contents(Path(folder.name), target=target, labels=labels)
    return folder, write_bundle(contents, Path(folder.name) / f"tiny-{target}")


def make_bundle(folder: Path, *, target: str = "nnapi", labels: tuple[int, ...] | None = None) -> Bundle:
    """A bundle of the classifier, its model and its golden samples: a copy of one that is made once in each process."""
    made, bundle = _make_once(target, labels)
    shutil.copytree(made.name, folder, dirs_exist_ok=True)
    return msgspec.structs.replace(bundle, folder=folder / bundle.folder.name)
