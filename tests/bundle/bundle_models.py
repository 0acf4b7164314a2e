"""Tiny models, their samples, and a bundle of them."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit.bundle.describe import Contents
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden import make_golden
from edgekit.bundle.manifest import Ancestry
from edgekit.bundle.sign import TestResult
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.target import Target, load_target

PASSED = TestResult(result="PASSED", configuration=(), passed_tests=("tiny-nnapi on host",))
"""What a signer says."""


def save_classifier(path: Path, *, classes: int = 5) -> Model:
    """A linear classifier of 8 inputs, with bias."""
    weight = np.random.default_rng(1).normal(size=(8, classes)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"], name="mul"),
        helper.make_node("Add", ["xw", "b"], ["y"], name="add"),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, classes])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(weight[0], "b")],
    )
    return save_graph(graph, path)


def save_detector(path: Path) -> Model:
    """A detector with its NMS inside: 16 boxes of 4 corners and 2 logits in, what is left and best scores out."""
    nodes = [
        helper.make_node("Slice", ["x", "zero", "four", "last"], ["boxes"], name="boxes"),
        helper.make_node("Slice", ["x", "four", "six", "last"], ["logits"], name="logits"),
        helper.make_node("MatMul", ["logits", "w"], ["mixed"], name="mix"),
        helper.make_node("Sigmoid", ["mixed"], ["likely"], name="sigmoid"),
        helper.make_node("Transpose", ["likely"], ["scores"], name="turn", perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["kept"], name="nms"),
        helper.make_node("Gather", ["kept", "two"], ["places"], name="places", axis=1),
        helper.make_node("Squeeze", ["boxes", "zero"], ["flat"], name="flat"),
        helper.make_node("Gather", ["flat", "places"], ["found"], name="found", axis=0),
        helper.make_node("ReduceMax", ["scores"], ["best"], name="best", axes=[2], keepdims=0),
    ]
    wholes = {"zero": [0], "four": [4], "six": [6], "last": [2], "most": [5]}
    constants = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in wholes.items()]
    constants.append(numpy_helper.from_array(np.array(2, np.int64), "two"))
    constants += [
        numpy_helper.from_array(np.array([value], np.float32), name)
        for name, value in (("overlap", 0.5), ("least", 0.8))
    ]
    constants.append(numpy_helper.from_array(np.array([[1.0, -0.25], [-0.25, 1.0]], np.float32), "w"))
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 6])],
        [
            helper.make_tensor_value_info("found", TensorProto.FLOAT, [None, 4]),
            helper.make_tensor_value_info("kept", TensorProto.INT64, [None, 3]),
            helper.make_tensor_value_info("best", TensorProto.FLOAT, [1, 2]),
        ],
        constants,
    )
    return save_graph(graph, path)


def make_scenes(count: int = 6) -> Samples:
    """Returns scenes for the detector: the second has nothing in it."""
    rng = np.random.default_rng(5)
    corners = rng.uniform(0, 0.7, size=(count, 1, 16, 2)).astype(np.float32)
    logits = rng.normal(scale=2.0, size=(count, 1, 16, 2)).astype(np.float32)
    logits[1] = -4.0
    rows = np.concatenate([corners, corners + 0.2, logits], axis=-1)
    return Samples(source="scenes", count=count, read=lambda: ({"x": row} for row in rows))


def make_detector_bundle(folder: Path, target: str = "nnapi") -> Bundle:
    model = save_detector(folder / "detector.onnx")
    contents = make_contents(folder, target=target)
    contents = msgspec.structs.replace(
        contents,
        source=model,
        files={"onnx": (model.path,)},
        golden=make_golden(model, make_scenes(), folder / "scenes"),
        check=make_check(model, load_target(target)),
    )
    bundle = write_bundle(contents, folder / f"detector-{target}")
    return msgspec.structs.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, verification=()))


def save_graph(graph: onnx.GraphProto, path: Path) -> Model:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path))
    return load_model(path)


def make_samples(count: int = 6) -> Samples:
    rows = np.random.default_rng(2).normal(size=(count, 1, 8)).astype(np.float32)
    return Samples(source="random rows", count=count, read=lambda: ({"x": row} for row in rows))


def make_check(model: Model, target: Target) -> CheckReport:
    return check_model(model, target)


def make_contents(folder: Path, *, target: str = "nnapi", labels: tuple[int, ...] | None = None) -> Contents:
    model = save_classifier(folder / "tiny.onnx")
    chosen = load_target(target)
    return Contents(
        source=model,
        target=chosen,
        precision="fp32",
        files={"onnx": (model.path,)},
        golden=make_golden(model, make_samples(), folder / "golden", labels=labels),
        check=make_check(model, chosen),
        ancestry=Ancestry(source=model.sha256, prepared=model.sha256, quantized=None, data=None),
        versions={"onnxruntime": "1.31.1"},
    )


def make_bundle(folder: Path, *, target: str = "nnapi", labels: tuple[int, ...] | None = None) -> Bundle:
    return write_bundle(make_contents(folder, target=target, labels=labels), folder / f"tiny-{target}")
