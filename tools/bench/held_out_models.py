"""Models with random weights and usual shapes from which no rule of the verification was made."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from net import Net

from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array


class _Net(Net):
    """A graph that grows node by node, with random weights whose channels differ in size, as in trained models."""

    def __init__(self, seed: int) -> None:
        super().__init__("held_out", 17, seed)

    def weigh(self, shape: Sequence[int], fan_in: int) -> str:
        spread = np.exp(self.rng.normal(scale=0.4, size=(shape[0], *[1] * (len(shape) - 1))))
        values = self.rng.normal(scale=(1.6 / fan_in) ** 0.5, size=shape) * spread
        return self.constant(values.astype(np.float32))

    def bias(self, size: int) -> str:
        return self.constant(self.rng.normal(scale=0.3, size=size).astype(np.float32))

    def convolve(self, last: str, width: int, out: int, kernel: int = 3, *, stride: int = 1, groups: int = 1) -> str:
        weight = self.weigh((out, width // groups, kernel, kernel), width // groups * kernel * kernel)
        inputs = [last, weight, self.bias(out)]
        pads, shape = [kernel // 2] * 4, [kernel, kernel]
        return self.add("Conv", inputs, pads=pads, kernel_shape=shape, strides=[stride] * 2, group=groups)

    def norm(self, last: str, width: int) -> str:
        parts = [self.rng.uniform(0.6, 1.4, width), self.rng.normal(scale=0.2, size=width),
                 self.rng.normal(scale=0.2, size=width), self.rng.uniform(0.5, 1.5, width)]  # fmt: skip
        return self.add("BatchNormalization", [last, *(self.constant(part.astype(np.float32)) for part in parts)])

    def layer_norm(self, last: str, width: int) -> str:
        scale = self.constant(self.rng.uniform(0.6, 1.4, width).astype(np.float32))
        return self.add("LayerNormalization", [last, scale, self.bias(width)], axis=-1, epsilon=1e-5)

    def project(self, last: str, width: int, out: int) -> str:
        weight = self.weigh((out, width), width)
        self.arrays[weight] = np.ascontiguousarray(self.arrays[weight].T)
        return self.add("Add", [self.add("MatMul", [last, weight]), self.bias(out)])

    def save(self, path: Path, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]]) -> Model:
        self.inputs, self.outputs = inputs, outputs
        onnx.save(self.to_onnx(None, 9), str(path))
        return load_model(path)


def make_residual(path: Path) -> Model:
    """Saves a residual network: 3x3 convolutions with batch normalization, two of them strided, 20 classes."""
    net, width = _Net(11), 16
    last = net.add("Relu", [net.norm(net.convolve("x", 3, width), width)])
    for block, out in enumerate((16, 32, 64)):
        stride = 1 if block == 0 else 2
        inner = net.add("Relu", [net.norm(net.convolve(last, width, out, stride=stride), out)])
        inner = net.norm(net.convolve(inner, out, out), out)
        way = last if stride == 1 else net.norm(net.convolve(last, width, out, 1, stride=stride), out)
        last, width = net.add("Relu", [net.add("Add", [inner, way])]), out
    pooled = net.add("Flatten", [net.add("GlobalAveragePool", [last])])
    net.add("Gemm", [pooled, net.weigh((20, width), width), net.bias(20)], "y", transB=1)
    return net.save(path, {"x": (1, 3, 24, 24)}, {"y": (1, 20)})


def make_transformer(path: Path) -> Model:
    """Saves two transformer blocks with four heads over 16 tokens, the last four of them masked, 20 classes."""
    net, width, tokens, heads = _Net(12), 48, 16, 4
    mask = np.zeros((1, 1, 1, tokens), np.float32)
    mask[..., -4:] = -30.0
    last, masked = net.project("x", 24, width), net.constant(mask)
    split = net.constant(np.array([1, tokens, heads, width // heads], np.int64))
    joined = net.constant(np.array([1, tokens, width], np.int64))
    root = net.constant(np.array((width // heads) ** -0.5, np.float32))
    for _ in range(2):
        normed = net.layer_norm(last, width)
        q, k, v = (net.add("Reshape", [net.project(normed, width, width), split]) for _ in range(3))
        q, v = (net.add("Transpose", [part], perm=[0, 2, 1, 3]) for part in (q, v))
        scores = net.add("Mul", [net.add("MatMul", [q, net.add("Transpose", [k], perm=[0, 2, 3, 1])]), root])
        shares = net.add("Softmax", [net.add("Add", [scores, masked])], axis=-1)
        mixed = net.add("Transpose", [net.add("MatMul", [shares, v])], perm=[0, 2, 1, 3])
        last = net.add("Add", [last, net.project(net.add("Reshape", [mixed, joined]), width, width)])
        inner = net.project(net.layer_norm(last, width), width, 2 * width)
        erf = net.add("Erf", [net.add("Div", [inner, net.constant(np.array(2**0.5, np.float32))])])
        half = net.add("Mul", [inner, net.constant(np.array(0.5, np.float32))])
        gelu = net.add("Mul", [half, net.add("Add", [erf, net.constant(np.array(1, np.float32))])])
        last = net.add("Add", [last, net.project(gelu, 2 * width, width)])
    pooled = net.add("ReduceMean", [net.layer_norm(last, width)], axes=[1], keepdims=0)
    net.add("Gemm", [pooled, net.weigh((20, width), width), net.bias(20)], "y", transB=1)
    return net.save(path, {"x": (1, tokens, 24)}, {"y": (1, 20)})


def make_recurrent(path: Path) -> Model:
    """Saves two LSTM layers over 20 steps between two fully connected ones, 20 classes."""
    net, hidden = _Net(13), 32
    last = net.add("Relu", [net.project("x", 12, 24)])
    last, width = net.add("Transpose", [last], perm=[1, 0, 2]), 24
    for _ in range(2):
        inputs = [last, net.weigh((1, 4 * hidden, width), width), net.weigh((1, 4 * hidden, hidden), hidden)]
        inputs.append(net.constant(net.rng.normal(scale=0.2, size=(1, 8 * hidden)).astype(np.float32)))
        last = net.add("Squeeze", [net.add("LSTM", inputs, hidden_size=hidden), net.constant(np.array([1], np.int64))])
        width = hidden
    pooled = net.add("ReduceMean", [last], axes=[0], keepdims=0)
    inner = net.add("Tanh", [net.project(pooled, width, 40)])
    net.add("Gemm", [inner, net.weigh((20, 40), 40), net.bias(20)], "y", transB=1)
    return net.save(path, {"x": (1, 20, 12)}, {"y": (1, 20)})


def make_detector(path: Path) -> Model:
    """Saves a detector: depthwise blocks with squeeze-and-excitation and HardSwish, two scales joined, two outputs."""
    net, width, levels = _Net(14), 16, list[str]()
    last = net.add("HardSwish", [net.norm(net.convolve("x", 3, width, stride=2), width)])
    for out in (24, 32):
        last = net.add("HardSwish", [net.norm(net.convolve(last, width, width, stride=2, groups=width), width)])
        last = net.norm(net.convolve(last, width, out, 1), out)
        squeezed = net.add("Relu", [net.convolve(net.add("GlobalAveragePool", [last]), out, 8, 1)])
        gate = net.add("HardSigmoid", [net.convolve(squeezed, 8, out, 1)], alpha=1 / 6, beta=0.5)
        last, width = net.add("Mul", [last, gate]), out
        levels.append(last)
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    up = net.add("Resize", [levels[1], "", scales], mode="nearest", coordinate_transformation_mode="asymmetric",
                 nearest_mode="floor")  # fmt: skip
    joined = net.add("Relu", [net.convolve(net.add("Concat", [up, levels[0]], axis=1), 56, 32, 1)])
    joined = net.add("Relu", [net.convolve(joined, 32, 32, groups=32)])
    flat = net.constant(np.array([1, -1, 4], np.int64))
    for name in ("boxes", "scores"):
        raw = net.convolve(net.add("Relu", [net.convolve(joined, 32, 32)]), 32, 12, 1)
        rows = net.add("Reshape", [net.add("Transpose", [raw], perm=[0, 2, 3, 1]), flat])
        net.add("Sigmoid", [rows], name)
    return net.save(path, {"x": (1, 3, 48, 48)}, {"boxes": (1, 108, 4), "scores": (1, 108, 4)})


def make_mlp(path: Path) -> Model:
    """Saves a perceptron over normalized features: LeakyRelu, Elu and PRelu between linear layers, 20 classes."""
    net = _Net(15)
    mean, spread = (net.constant(net.rng.uniform(0.5, 1.5, 40).astype(np.float32)) for _ in range(2))
    last = net.add("Div", [net.add("Sub", ["x", mean]), spread])
    last = net.add("LeakyRelu", [net.project(last, 40, 64)], alpha=0.1)
    last = net.add("Elu", [net.layer_norm(net.project(last, 64, 64), 64)])
    slope = net.constant(net.rng.uniform(0.05, 0.4, 48).astype(np.float32))
    last = net.add("PRelu", [net.project(last, 64, 48), slope])
    net.add("Softmax", [net.add("Gemm", [last, net.weigh((20, 48), 48), net.bias(20)], transB=1)], "y", axis=-1)
    return net.save(path, {"x": (1, 40)}, {"y": (1, 20)})


def make_gated(path: Path) -> Model:
    """Saves a convolution over time, two GRU layers and a linear layer at each step, with 12 classes for each step."""
    net, hidden = _Net(16), 24
    weight = net.weigh((20, 10, 5), 50)
    last = net.add("Conv", ["x", weight, net.bias(20)], pads=[2, 2], kernel_shape=[5])
    last, width = net.add("Transpose", [net.add("Relu", [last])], perm=[2, 0, 1]), 20
    for before in (0, 1):
        inputs = [last, net.weigh((1, 3 * hidden, width), width), net.weigh((1, 3 * hidden, hidden), hidden)]
        inputs.append(net.constant(net.rng.normal(scale=0.2, size=(1, 6 * hidden)).astype(np.float32)))
        state = net.add("GRU", inputs, hidden_size=hidden, linear_before_reset=before)
        last, width = net.add("Squeeze", [state, net.constant(np.array([1], np.int64))]), hidden
    net.add("LogSoftmax", [net.project(last, hidden, 12)], "y", axis=-1)
    return net.save(path, {"x": (1, 10, 24)}, {"y": (24, 1, 12)})


def make_unet(path: Path) -> Model:
    """Saves a U-Net: two levels down by pooling, up by a transposed convolution and a Resize, 5 classes a pixel."""
    net, ways, last, width = _Net(17), list[tuple[str, int]](), "x", 1
    for out in (12, 24):
        last = net.add("Relu", [net.norm(net.convolve(last, width, out), out)])
        ways.append((last, out))
        last, width = net.add("MaxPool", [last], kernel_shape=[2, 2], strides=[2, 2]), out
    last = net.add("Relu", [net.convolve(last, 24, 32)])
    up = net.add("ConvTranspose", [last, net.weigh((32, 24, 2, 2), 32), net.bias(24)], kernel_shape=[2, 2],
                 strides=[2, 2])  # fmt: skip
    last = net.add("Relu", [net.convolve(net.add("Concat", [up, ways[1][0]], axis=1), 48, 24)])
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    up = net.add("Resize", [last, "", scales], mode="linear", coordinate_transformation_mode="half_pixel")
    last = net.add("Relu", [net.convolve(net.add("Concat", [up, ways[0][0]], axis=1), 36, 12)])
    net.add("Softmax", [net.convolve(last, 12, 5, 1)], "y", axis=1)
    return net.save(path, {"x": (1, 1, 32, 32)}, {"y": (1, 5, 32, 32)})


def make_grouped(path: Path) -> Model:
    """Saves grouped convolutions with Clip, Sub and a padded AveragePool, and two outputs: 10 classes and 4 numbers."""
    net, width = _Net(18), 24
    last = net.add("Sub", ["x", net.constant(net.rng.normal(scale=0.3, size=(1, 3, 1, 1)).astype(np.float32))])
    zero, six = (net.constant(np.array(value, np.float32)) for value in (0, 6))
    last = net.add("Clip", [net.convolve(last, 3, width, stride=2), zero, six])
    for _ in range(2):
        inner = net.add("Clip", [net.norm(net.convolve(last, width, width, groups=4), width), zero, six])
        last = net.add("Add", [last, net.norm(net.convolve(inner, width, width, 1), width)])
    last = net.add("AveragePool", [last], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    last = net.add("LeakyRelu", [net.convolve(last, width, 32)], alpha=0.1)
    flat = net.add("Flatten", [net.add("GlobalAveragePool", [last])])
    for name, size in (("classes", 10), ("box", 4)):
        net.add("Gemm", [flat, net.weigh((size, 32), 32), net.bias(size)], name, transB=1)
    return net.save(path, {"x": (1, 3, 32, 32)}, {"classes": (1, 10), "box": (1, 4)})


MODELS: dict[str, Callable[[Path], Model]] = {
    "residual": make_residual,
    "transformer": make_transformer,
    "recurrent": make_recurrent,
    "detector": make_detector,
    "mlp": make_mlp,
    "gated": make_gated,
    "unet": make_unet,
    "grouped": make_grouped,
}


def draw_inputs(model: Model, count: int, seed: int) -> Samples:
    """Returns samples for a model: smooth noise, each with its own level and contrast."""
    rng = np.random.default_rng(seed)
    spec = model.inputs[0]
    shape = tuple(dim for dim in spec.shape or () if isinstance(dim, int))
    rows: list[Array] = []
    for _ in range(count):
        noise = rng.normal(size=shape)
        smooth = noise + np.roll(noise, 1, -1) + np.roll(noise, 1, -2)
        rows.append((smooth * rng.uniform(0.3, 1.0) + rng.normal(scale=0.5)).astype(np.float32))
    return Samples(source="drawn", count=count, read=lambda: ({spec.name: row} for row in rows))
