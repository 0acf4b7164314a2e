"""Tiny models for the tests of check, and functions that return the result of checking them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from tiny_models import parse_net, save_net

from edgekit.check.check import check_graph, check_model
from edgekit.check.report import CheckedNode, CheckReport
from edgekit.check.rules.rulebook import load_rules
from edgekit.graph.graph import Graph, infer_graph
from edgekit.model.model import load_model
from edgekit.target import load_target

TARGETS = ("nnapi", "coreml", "qnn", "xnnpack", "cpu")


CONTRIB = ', "com.microsoft" : 1, "ai.onnx.ml" : 3'


def check_proto(proto: onnx.ModelProto, target: str, settings: Mapping[str, str] | None = None) -> list[CheckedNode]:
    """Returns the checked nodes of a model in memory."""
    loaded = load_target(target, settings)
    opset = {entry.domain: entry.version for entry in proto.opset_import}.get("", 1)
    known = {**loaded.session.provider_options, **loaded.settings}
    return list(check_graph(infer_graph(proto), load_rules(loaded), known, opset=opset))


def graph_of(body: str, opset: int = 17) -> Graph:
    """Returns the view of a graph given in onnx's text form."""
    return infer_graph(parse_net(body, opset=opset, imports=CONTRIB))


def save_text(body: str, path: Path) -> Path:
    """Writes a graph given in onnx's text form."""
    onnx.save(parse_net(body, imports=CONTRIB), str(path))
    return path


def check_text(body: str, target: str, settings: Mapping[str, str] | None = None, opset: int = 17) -> list[CheckedNode]:
    """Returns the checked nodes of a graph given in onnx's text form."""
    return check_proto(parse_net(body, opset=opset, imports=CONTRIB), target, settings)


def check_file(path: Path, target: str, settings: Mapping[str, str] | None = None) -> CheckReport:
    """Returns the report of a model file."""
    return check_model(load_model(path), load_target(target, settings))


def why_not(nodes: list[CheckedNode]) -> str:
    """Returns every reason, joined."""
    return "; ".join(reason for node in nodes for reason in node.reasons)


def conv_net(path: Path) -> Path:
    """Writes a small inverted-residual network: Conv, Clip, depthwise Conv, Clip, Conv, Add, pooling, Gemm."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 1, 3, 3), "b2": (8,), "w3": (8, 8, 1, 1), "b3": (8,),
        "wf": (8, 4), "bf": (4,),
    }  # fmt: skip
    text = """(float[1,3,16,16] x) => (float[1,4] y) <float low = {0}, float high = {6}> {
      [conv1] c1 = Conv<strides = [2,2], pads = [1,1,1,1], kernel_shape = [3,3]>(x, w1, b1)
      [clip1] r1 = Clip(c1, low, high)
      [conv2] c2 = Conv<group = 8, pads = [1,1,1,1], kernel_shape = [3,3]>(r1, w2, b2)
      [clip2] r2 = Clip(c2, low, high)
      [conv3] c3 = Conv<kernel_shape = [1,1]>(r2, w3, b3)
      [add] a = Add(r1, c3) [pool] p = GlobalAveragePool(a) [flatten] f = Flatten(p) [gemm] y = Gemm(f, wf, bf) }"""
    save_net(text, path, **{name: rng.normal(size=shape).astype(np.float32) for name, shape in weights.items()})
    return path


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    def __init__(self) -> None:
        rows = np.random.default_rng(1).normal(size=(2, 1, 3, 16, 16)).astype(np.float32)
        self._samples: Iterator[dict[str, Any]] = iter([{"x": row} for row in rows])

    def get_next(self) -> dict[str, Any] | None:
        """Returns the next sample."""
        return next(self._samples, None)


def quantized_net(path: Path, activation: QuantType, weight: QuantType = QuantType.QInt8) -> Path:
    """Writes the network quantized per channel by ONNX Runtime, in QDQ form."""
    model = conv_net(path.with_name("float.onnx"))
    quantize_static(
        str(model),
        str(path),
        _Reader(),
        quant_format=QuantFormat.QDQ,
        activation_type=activation,
        weight_type=weight,
        per_channel=True,
    )
    return path
