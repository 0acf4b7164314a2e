"""Tiny models from onnx's text form, and a network for tests in which the model does not matter."""

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


def with_versions(text: str) -> str:
    return text if text.lstrip().startswith("<") else f'<ir_version: 8, opset_import: ["" : 17]> {text}'


def parse_model(text: str, path: Path, **fields: Any) -> Path:
    """Writes a model from onnx's text form and returns its path; `fields` are set on the ModelProto.

    A text that names no versions is of IR version 8 and opset 17.
    """
    model = parser.parse_model(with_versions(text))
    for name, value in fields.items():
        setattr(model, name, value)
    onnx.save(model, str(path))
    return path


def save_net(text: str, path: Path, **weights: Array) -> Model:
    """Writes a graph given in onnx's text form, with these weights beside those of the text, and loads the model.

    A text that names no versions, nor the graph, is of IR version 9 and opset 17.
    """
    whole = text if text.lstrip().startswith("<") else f'<ir_version: 9, opset_import: ["" : 17]> g {text}'
    proto = parser.parse_model(whole)
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(proto, str(path))
    return load_model(path)


def write_small_net(model: Path, samples: Path) -> None:
    """Writes a network of three layers and ten classes, and 32 samples for it."""
    rng = np.random.default_rng(5)
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,3,8,8] x) => (float[1,10] y) {
      a = Conv(x, u)  b = Relu(a)  c = Conv(b, v)  d = Relu(c)  p = GlobalAveragePool(d)  f = Flatten(p)
      y = Gemm(f, w) }"""
    shapes = {"u": (8, 3, 3, 3), "v": (16, 8, 3, 3), "w": (16, 10)}
    save_net(text, model, **{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    np.savez(samples, x=rng.normal(size=(32, 1, 3, 8, 8)).astype(np.float32))
