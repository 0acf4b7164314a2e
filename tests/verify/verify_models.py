"""A small float network, its INT8 form by edgekit's own quantizer, and ways to corrupt one layer of it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from devices_models import make_job
from onnx import numpy_helper
from tiny_models import save_net

from edgekit.data.samples import Samples
from edgekit.devices.device import Job
from edgekit.model.model import Model, save_proto
from edgekit.model.tensors import Array
from edgekit.prepare.clean import prepare_model
from edgekit.quantize.apply import quantize_model
from edgekit.quantize.calibration.calibrate import calibrate_model
from edgekit.quantize.mixed_precision.auto import plan_quantization
from edgekit.target import Precision, load_target

LAYERS = 5
CHANNELS = 24


def make_images(count: int = 4) -> Samples:
    rows = np.random.default_rng(3).normal(size=(count, 1, 3, 12, 12)).astype(np.float32)
    return Samples(source="random images", count=count, read=lambda: ({"x": row} for row in rows))


def save_network(path: Path) -> Model:
    """Five 3x3 convolutions with ReLU, pooled into 24 classes."""
    rng, weights, last, body = np.random.default_rng(4), dict[str, Array](), "x", ""
    for index in range(LAYERS):
        width = 3 if index == 0 else CHANNELS
        weight = rng.normal(scale=(2 / (9 * width)) ** 0.5, size=(CHANNELS, width, 3, 3))
        weights[f"w{index}"] = weight.astype(np.float32)
        body += f"[conv{index}] c{index} = Conv<pads = [1,1,1,1]>({last}, w{index})"
        body += f"[relu{index}] r{index} = Relu(c{index}) "
        last = f"r{index}"
    body += f"[pool] pooled = GlobalAveragePool({last}) [flatten] y = Flatten(pooled)"
    return save_net(f"(float[1,3,12,12] x) => (float[1,{CHANNELS}] y) {{ {body} }}", path, **weights)


def quantize(folder: Path) -> tuple[Model, Model]:
    """Returns the prepared network and its INT8 form for NNAPI."""
    prepared = prepare_model(save_network(folder / "network.onnx"), folder / "prepared.onnx", {})
    calibration = calibrate_model(prepared, make_images(), work=folder / "calibration")
    plan = plan_quantization(prepared, calibration, load_target("nnapi"), "int8")
    return prepared, quantize_model(prepared, plan, calibration, folder / "quantized.onnx").model


def turn_weights(proto: onnx.ModelProto, layer: str) -> None:
    """Inverts the sign of one layer's weights, if the model has that layer."""
    change_weights(proto, layer, lambda weights: -weights)


def change_weights(proto: onnx.ModelProto, layer: str, change: Callable[[Array], Array]) -> None:
    """Changes the weights of one layer, quantized or not, if the model has that layer."""
    for tensor in find_weights(proto, layer):
        values = np.ascontiguousarray(change(numpy_helper.to_array(tensor).copy()))
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def find_weights(proto: onnx.ModelProto, layer: str) -> list[onnx.TensorProto]:
    """Returns the stored weights of one layer, quantized or not: none if the model has no such layer."""
    producers = {name: node for node in proto.graph.node for name in node.output}
    reads = [node.input[1] for node in proto.graph.node if node.name == layer]
    names = {producers[name].input[0] if name in producers else name for name in reads}
    return [tensor for tensor in proto.graph.initializer if tensor.name in names]


def break_layer(model: Model, path: Path, layer: str, change: Callable[[Array], Array]) -> Model:
    """Saves the model with the weights of one layer changed."""
    proto = onnx.load(str(model.path))
    change_weights(proto, layer, change)
    return save_proto(proto, path)


def job_of(model: Model, target: str = "nnapi", samples: Samples | None = None) -> Job:
    """Returns the job of a device that runs the model, by default on two random images."""
    quantized = any(node.op_type == "QuantizeLinear" for node in onnx.load(str(model.path)).graph.node)
    precision: Precision = "int8" if quantized else "fp32"
    return make_job(model.path, target, list(samples or make_images(2)), precision=precision)
