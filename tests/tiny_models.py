"""Tiny models from onnx's text form, and a network for tests in which the model does not matter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, TensorSpec


def spec(name: str, *shape: int | str | None, dtype: str = "float32") -> TensorSpec:
    """Returns a tensor's name, type and shape."""
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def parse_net(
    text: str, weights: Mapping[str, Array] | None = None, *, opset: int = 17, ir_version: int = 8, imports: str = ""
) -> onnx.ModelProto:
    """Returns a model from onnx's text form, with these weights beside those of the text.

    What the text leaves out is added: the name of the graph, and versions, perhaps with imports of more domains.
    """
    text = f"g {text}" if text.lstrip().startswith("(") else text
    if not text.lstrip().startswith("<"):
        text = f'<ir_version: {ir_version}, opset_import: ["" : {opset}{imports}]> {text}'
    proto = parser.parse_model(text)
    stored = {name: np.asarray(value) for name, value in (weights or {}).items()}
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    return proto


def parse_model(text: str, path: Path, **fields: Any) -> Path:
    """Writes a model from onnx's text form and returns its path; `fields` are set on the ModelProto."""
    model = parse_net(text)
    for name, value in fields.items():
        setattr(model, name, value)
    onnx.save(model, str(path))
    return path


def save_net(text: str, path: Path, **weights: Array) -> Model:
    """Writes a model from onnx's text form, with these weights beside those of the text, and loads it."""
    onnx.save(parse_net(text, weights, ir_version=9), str(path))
    return load_model(path)


def write_small_net(model: Path, samples: Path) -> None:
    """Writes a network of three layers and ten classes, and 32 samples for it."""
    rng = np.random.default_rng(5)
    text = """(float[1,3,8,8] x) => (float[1,10] y) {
      a = Conv(x, u)  b = Relu(a)  c = Conv(b, v)  d = Relu(c)  p = GlobalAveragePool(d)  f = Flatten(p)
      y = Gemm(f, w) }"""
    shapes = {"u": (8, 3, 3, 3), "v": (16, 8, 3, 3), "w": (16, 10)}
    save_net(text, model, **{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    np.savez(samples, x=rng.normal(size=(32, 1, 3, 8, 8)).astype(np.float32))
