"""Well-known architectures at their true size with random weights: for measuring time and memory, not outputs.

Random weights are scaled so that the magnitude of activations stays the same from layer to layer.
"""

from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import numpy as np
from net import Net

from edgekit.model.tensors import Array

Inputs = Callable[[np.random.Generator], dict[str, Array]]


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A network, and a function that draws one sample for it."""

    net: Net
    draw: Inputs


def draw_normal(net: Net, rng: np.random.Generator) -> dict[str, Array]:
    """Returns normally distributed values for each input, a batch of one."""
    return {name: rng.standard_normal((1, *shape), np.float32) for name, shape in net.inputs.items()}


def conv_net(nodes: int, *, channels: int = 32, side: int = 64) -> Architecture:
    """Returns residual blocks of Conv, Relu, Conv, Add, Relu: about so many nodes."""
    net = Net(f"conv{nodes}", 17, nodes)
    net.inputs["image"] = (3, side, side)
    x = net.add("Relu", [net.conv("image", (3, channels), stride=2)])
    for _ in range((nodes - 5) // 5):
        inside = net.add("Relu", [net.conv(x, (channels, channels))])
        x = net.add("Relu", [net.add("Add", [x, net.conv(inside, (channels, channels), gain=0.2)])])
    pooled = net.add("Flatten", [net.add("GlobalAveragePool", [x])])
    net.add("Gemm", [pooled, net.constant(net.rng.normal(0, 0.1, (channels, 10)))], "scores")
    net.outputs["scores"] = (10,)
    return Architecture(net=net, draw=partial(draw_normal, net))


def residual_net(*, side: int = 224, classes: int = 1000) -> Architecture:
    """Returns ResNet-50 (arXiv:1512.03385, version 1.5: strides in the 3 x 3), normalization folded into weights."""
    net = Net("resnet50", 17, 50)
    net.inputs["image"] = (3, side, side)
    x = net.add("Relu", [net.conv("image", (3, 64), 7, stride=2)])
    x = net.add("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    inputs = 64
    for level, count in enumerate((3, 4, 6, 3)):
        width = 64 << level
        for block in range(count):
            stride = 2 if level and not block else 1
            inside = net.add("Relu", [net.conv(x, (inputs, width), 1)])
            inside = net.add("Relu", [net.conv(inside, (width, width), stride=stride)])
            inside = net.conv(inside, (width, 4 * width), 1, gain=0.2)
            beside = x if block else net.conv(x, (inputs, 4 * width), 1, stride=stride, gain=1.0)
            x, inputs = net.add("Relu", [net.add("Add", [beside, inside])]), 4 * width
    pooled = net.add("Flatten", [net.add("GlobalAveragePool", [x])])
    net.add("Gemm", [pooled, net.constant(net.rng.normal(0, 0.02, (inputs, classes)))], "scores")
    net.outputs["scores"] = (classes,)
    return Architecture(net=net, draw=partial(draw_normal, net))


def layer_norm(net: Net, x: str, width: int) -> str:
    """Adds LayerNormalization over the last axis."""
    return net.add("LayerNormalization", [x, net.constant(np.ones(width)), net.constant(np.zeros(width))], axis=-1)


def gelu(net: Net, x: str) -> str:
    """Adds the exact GELU as PyTorch exports it."""
    erf = net.add("Erf", [net.add("Div", [x, net.constant(np.float32(np.sqrt(2)))])])
    inside = net.add("Mul", [x, net.add("Add", [erf, net.constant(np.float32(1))])])
    return net.add("Mul", [inside, net.constant(np.float32(0.5))])


def silu(net: Net, x: str) -> str:
    """Adds x times its sigmoid."""
    return net.add("Mul", [x, net.add("Sigmoid", [x])])


def attention(net: Net, x: str, sizes: tuple[int, int, int]) -> str:
    """Adds attention over sizes: how many tokens, their width, and the heads."""
    tokens, width, heads = sizes
    split = net.constant(np.array([1, tokens, heads, width // heads]))
    parts = [net.add("Reshape", [net.linear(x, width, width), split]) for _ in range(3)]
    query, value = (net.add("Transpose", [part], perm=[0, 2, 1, 3]) for part in (parts[0], parts[2]))
    key = net.add("Transpose", [parts[1]], perm=[0, 2, 3, 1])
    scores = net.add("MatMul", [query, key])
    scores = net.add("Div", [scores, net.constant(np.float32(np.sqrt(width / heads)))])
    mixed = net.add("MatMul", [net.add("Softmax", [scores], axis=-1), value])
    joined = net.add(
        "Reshape", [net.add("Transpose", [mixed], perm=[0, 2, 1, 3]), net.constant(np.array([1, tokens, width]))]
    )
    return net.linear(joined, width, width)


def transformer(net: Net, x: str, depth: int, sizes: tuple[int, int, int]) -> str:
    """Adds blocks of attention and a hidden layer of four times the width, each after a normalization."""
    width = sizes[1]
    for _ in range(depth):
        x = net.add("Add", [x, attention(net, layer_norm(net, x, width), sizes)])
        hidden = gelu(net, net.linear(layer_norm(net, x, width), width, 4 * width))
        x = net.add("Add", [x, net.linear(hidden, 4 * width, width)])
    return layer_norm(net, x, width)


def encoder(depth: int, width: int, words: int, *, tokens: int = 128) -> Architecture:
    """Returns a text encoder with an embedding table and a classifier."""
    net = Net(f"encoder{depth}x{width}", 17, width)
    net.inputs["ids"] = (tokens,)
    table = net.constant(net.rng.normal(0, 1, (words, width)).astype(np.float32))
    x = net.add("Add", [net.add("Gather", [table, "ids"]), net.constant(net.rng.normal(0, 0.3, (tokens, width)))])
    x = transformer(net, x, depth, (tokens, width, width // 64))
    first = net.add("Flatten", [net.add("Gather", [x, net.constant(np.array([0]))], axis=1)])
    net.add("Gemm", [first, net.constant(net.rng.normal(0, 0.05, (width, 10)))], "scores")
    net.outputs["scores"] = (10,)
    return Architecture(net=net, draw=lambda rng: {"ids": rng.integers(0, words, (1, tokens))})


def vision_transformer(depth: int = 12, width: int = 384, side: int = 224) -> Architecture:
    """Returns a ViT with patches of 16 x 16; the default is ViT-S (arXiv:2106.10270)."""
    net = Net(f"vit{depth}x{width}", 17, width)
    net.inputs["image"] = (3, side, side)
    count = (side // 16) ** 2
    weight = net.constant(net.rng.normal(0, 1 / np.sqrt(768), (width, 3, 16, 16)))
    patches = net.add("Conv", ["image", weight], kernel_shape=[16, 16], strides=[16, 16])
    flat = net.add("Reshape", [patches, net.constant(np.array([1, width, count]))])
    x = net.add("Transpose", [flat], perm=[0, 2, 1])
    x = net.add("Concat", [net.constant(net.rng.normal(0, 1, (1, 1, width))), x], axis=1)
    x = net.add("Add", [x, net.constant(net.rng.normal(0, 0.3, (count + 1, width)))])
    x = transformer(net, x, depth, (count + 1, width, width // 64))
    first = net.add("Flatten", [net.add("Gather", [x, net.constant(np.array([0]))], axis=1)])
    net.add("Gemm", [first, net.constant(net.rng.normal(0, 0.05, (width, 1000)))], "scores")
    net.outputs["scores"] = (1000,)
    return Architecture(net=net, draw=partial(draw_normal, net))


def speech_encoder(depth: int = 4, width: int = 384, frames: int = 3000) -> Architecture:
    """Returns the encoder of Whisper (arXiv:2212.04356); the default is that of the tiny model."""
    net = Net(f"whisper{depth}x{width}", 17, width)
    net.inputs["mel"] = (80, frames)
    x = "mel"
    for inputs, stride in ((80, 1), (width, 2)):
        weight = net.constant(net.rng.normal(0, np.sqrt(2 / inputs / 3), (width, inputs, 3)))
        x = net.add("Conv", [x, weight, net.constant(np.zeros(width))], kernel_shape=[3], pads=[1, 1], strides=[stride])
        x = gelu(net, x)
    x = net.add("Transpose", [x], perm=[0, 2, 1])
    x = net.add("Add", [x, net.constant(net.rng.normal(0, 0.3, (frames // 2, width)))])
    x = transformer(net, x, depth, (frames // 2, width, width // 64))
    net.add("Identity", [x], "hidden")
    net.outputs["hidden"] = (frames // 2, width)
    return Architecture(net=net, draw=partial(draw_normal, net))


def detector(*, side: int = 640, width: int = 16, classes: int = 80) -> Architecture:
    """Returns a detector like YOLOv8: SiLU, C2f blocks, pooled pyramid, three heads; the default has the size of n."""
    net = Net(f"yolo{side}", 17, width)
    net.inputs["image"] = (3, side, side)

    def conv(x: str, sizes: tuple[int, int], kernel: int = 3, stride: int = 1) -> str:
        return silu(net, net.conv(x, sizes, kernel, stride=stride))

    def c2f(x: str, sizes: tuple[int, int], count: int, *, residual: bool) -> str:
        half = sizes[1] // 2
        parts = [
            net.add("Slice", [conv_out, *(net.constant(np.array([at])) for at in (start, start + half, 1))])
            for conv_out in (conv(x, (sizes[0], sizes[1]), 1),)
            for start in (0, half)
        ]
        for _ in range(count):
            made = conv(conv(parts[-1], (half, half)), (half, half))
            parts.append(net.add("Add", [parts[-1], made]) if residual else made)
        return conv(net.add("Concat", parts, axis=1), (half * len(parts), sizes[1]), 1)

    def upsample(x: str) -> str:
        return net.add("Resize", [x, "", net.constant(np.array([1, 1, 2, 2], np.float32))], mode="nearest")

    widths = [width * 2**level for level in range(5)]
    x = conv("image", (3, widths[0]), stride=2)
    levels: list[str] = []
    for level, count in enumerate((1, 2, 2, 1)):
        sizes = (widths[level], widths[level + 1])
        x = c2f(conv(x, sizes, stride=2), (sizes[1], sizes[1]), count, residual=True)
        levels.append(x)
    x = conv(x, (widths[4], widths[3]), 1)
    pools = [x]
    for _ in range(3):
        pools.append(net.add("MaxPool", [pools[-1]], kernel_shape=[5, 5], pads=[2] * 4))
    top = conv(net.add("Concat", pools, axis=1), (4 * widths[3], widths[4]), 1)
    middle = c2f(
        net.add("Concat", [upsample(top), levels[2]], axis=1), (widths[4] + widths[3], widths[3]), 1, residual=False
    )
    low = c2f(
        net.add("Concat", [upsample(middle), levels[1]], axis=1), (widths[3] + widths[2], widths[2]), 1, residual=False
    )
    joined = net.add("Concat", [conv(low, (widths[2], widths[2]), stride=2), middle], axis=1)
    middle = c2f(joined, (widths[2] + widths[3], widths[3]), 1, residual=False)
    joined = net.add("Concat", [conv(middle, (widths[3], widths[3]), stride=2), top], axis=1)
    top = c2f(joined, (widths[3] + widths[4], widths[4]), 1, residual=False)
    heads: list[str] = []
    for feature, inputs, cells in (
        (low, widths[2], side // 8),
        (middle, widths[3], side // 16),
        (top, widths[4], side // 32),
    ):
        boxes = net.conv(conv(conv(feature, (inputs, 64)), (64, 64)), (64, 64), 1)
        scores = net.conv(conv(conv(feature, (inputs, classes)), (classes, classes)), (classes, classes), 1)
        both = net.add("Concat", [boxes, scores], axis=1)
        heads.append(net.add("Reshape", [both, net.constant(np.array([1, 64 + classes, cells * cells]))]))
    net.add("Concat", heads, "predictions", axis=2)
    net.outputs["predictions"] = (64 + classes, sum((side // stride) ** 2 for stride in (8, 16, 32)))
    return Architecture(net=net, draw=partial(draw_normal, net))


ARCHITECTURES: Mapping[str, Callable[[], Architecture]] = {
    "conv50": partial(conv_net, 50),
    "conv200": partial(conv_net, 200),
    "conv400": partial(conv_net, 400),
    "resnet50": residual_net,
    "encoder5m": partial(encoder, 3, 256, 10_000),
    "encoder25m": partial(encoder, 4, 512, 24_000),
    "encoder110m": partial(encoder, 12, 768, 30_522),
    "vit-s": vision_transformer,
    "yolov8n": detector,
    "whisper-tiny": speech_encoder,
}
GROWING: tuple[int, ...] = (100, 200, 400, 800, 1600)
"""The numbers of nodes of convolutional networks for which the growth of the cost is measured."""
