"""Tiny models, their samples, and a bundle of them."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit.bundle.describe import Contents
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden import make_golden
from edgekit.bundle.manifest import Ancestry
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.model import Model, load_model
from edgekit.samples import Samples
from edgekit.target import Target, load_target


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
