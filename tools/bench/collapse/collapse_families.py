"""The five kinds of nets whose accuracy stock quantization loses, built, trained and ready to be scored."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from collapse_data import AUDIO_LENGTH, KINDS, RATE, Scenes, cut_photographs, draw_scenes, make_tones
from collapse_net import Net, spread_channels
from collapse_train import Values, channel_highs, train_net

from edgekit.model.tensors import Array

TRAIN, CALIBRATE, EVALUATE = 0, 1, 2
_COUNTS = (4000, 96, 400, 4000)
_STRIDES = (8, 16)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One net: how to make it, how its samples are scored, and the form of its file."""

    make: Callable[[], Net]
    data: Callable[[int], tuple[Array, Any]]
    task: str
    constant_nodes: bool = False
    batch: int | str = 1


def scene_classes(part: int) -> tuple[Array, Array]:
    """Returns images of one shape and its kind."""
    scenes = draw_scenes(_COUNTS[part], 32, 1, 10 + part)
    kinds = np.array([boxes.classes[0] if boxes.classes else 0 for boxes in scenes.boxes])
    return scenes.images, kinds


def make_depthwise(name: str, opset: int, *, bounded: bool, decades: float, steps: int = 2000) -> Net:
    """Returns a MobileNet of depthwise separable convolutions, with ReLU6 (`bounded`) or ReLU."""
    net = Net(name, opset, seed=1)
    net.inputs["image"] = (3, 32, 32)
    limits = [net.constant(np.float32(0.0)), net.constant(np.float32(6.0))]

    def block(
        x: str, sizes: tuple[int, int], kernel: int, stride: int = 1, groups: int = 1, *, act: bool = True
    ) -> str:
        y = net.norm(net.conv(x, sizes, kernel, stride=stride, groups=groups, bias=False), sizes[1], 0.5)
        if not act:
            return y
        return net.add("Clip", [y, *limits]) if bounded else net.add("Relu", [y])

    x, channels = block("image", (3, 16), 3, 2), 16
    for width, stride in ((24, 1), (32, 2), (32, 1), (48, 2), (48, 1)):
        hidden = channels * (3 if bounded else 1)
        y = block(x, (channels, hidden), 1) if bounded else x
        y = block(y, (hidden, hidden), 3, stride, hidden)
        y = block(y, (hidden, width), 1, act=not bounded)
        x = net.add("Add", [x, y]) if bounded and stride == 1 and channels == width else y
        channels = width
    x = block(x, (channels, 96), 1)
    x = net.add("Reshape", [net.add("GlobalAveragePool", [x]), net.constant(np.array([0, -1]))])
    weight = net.constant(net.rng.normal(0, 0.1, (KINDS, 96)), "classifier", trained=True)
    bias = net.constant(np.zeros(KINDS), "classifier.bias", trained=True)
    net.outputs[net.add("Gemm", [x, weight, bias], "logits", transB=1)] = (KINDS,)
    images, labels = scene_classes(TRAIN)
    train_net(net, {"image": images, "label": labels}, class_loss, steps=steps, batch=48)
    spread_channels(net, decades, 5, channel_highs(net, {"image": images[:128]}))
    return net


def class_loss(values: Values, rows: Values) -> Any:
    """Returns the cross entropy of the tensor "logits"."""
    logits = values["logits"]
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(rows["label"], logits.shape[1])).mean()


def scene_boxes(part: int) -> tuple[Array, tuple[Any, ...]]:
    """Returns images of several shapes and where they are."""
    scenes = draw_scenes((4000, 96, 240, 1000)[part], 64, 3, 20 + part)
    return scenes.images, scenes.boxes


def make_detector(name: str, *, spread: float) -> Net:
    """Returns an anchor-free detector with SiLU, a neck of Concats, and boxes and scores in one output, as YOLOX.

    `spread` says how unequal its channels start, and mostly stay.
    """
    net = Net(name, 12, seed=2)
    net.inputs["image"] = (3, 64, 64)

    def block(x: str, sizes: tuple[int, int], kernel: int = 3, stride: int = 1) -> str:
        y = net.norm(net.conv(x, sizes, kernel, stride=stride, bias=False), sizes[1], spread)
        return net.add("Mul", [y, net.add("Sigmoid", [y])])

    def cross(x: str, size: int) -> str:
        one, two = block(x, (size, size // 2), 1), block(x, (size, size // 2), 1)
        two = net.add("Add", [two, block(block(two, (size // 2, size // 2), 1), (size // 2, size // 2))])
        return block(net.add("Concat", [one, two], axis=1), (size, size), 1)

    x = cross(block(block("image", (3, 12), 3, 2), (12, 24), 3, 2), 24)
    fine = cross(block(x, (24, 32), 3, 2), 32)
    coarse = cross(block(fine, (32, 48), 3, 2), 48)
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    up = net.add(
        "Resize", [block(coarse, (48, 32), 1), net.constant(np.zeros(0, np.float32)), scales], mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    fine = block(net.add("Concat", [up, fine], axis=1), (64, 32))
    coarse = block(net.add("Concat", [block(fine, (32, 32), 3, 2), coarse], axis=1), (80, 32))
    levels = [_add_head(net, block, level, stride) for level, stride in zip((fine, coarse), _STRIDES, strict=True)]
    joined = net.add("Concat", levels, axis=2)
    rows = net.add("Transpose", [joined], "rows", perm=[0, 2, 1])
    net.outputs[_decode(net, rows)] = (80, 5 + KINDS)
    images, boxes = scene_boxes(TRAIN)
    wanted = encode_boxes(boxes)
    train_net(net, {"image": images, **wanted}, box_loss, steps=1500, batch=24)
    return net


def _add_head(net: Net, block: Callable[..., str], x: str, stride: int) -> str:
    scores, boxes = block(x, (32, 32)), block(x, (32, 32))
    parts = [net.conv(boxes, (32, 4), 1, gain=0.1), net.conv(boxes, (32, 1), 1, gain=0.1)]
    parts.append(net.conv(scores, (32, KINDS), 1, gain=0.1))
    parts[1:] = [net.add("Sigmoid", [part]) for part in parts[1:]]
    cells = (64 // stride) ** 2
    return net.add("Reshape", [net.add("Concat", parts, axis=1), net.constant(np.array([0, 5 + KINDS, cells]))])


def grid_cells() -> tuple[Array, Array]:
    """Returns left and top of every cell [80,2], and its size [80,1]."""
    places, sizes = [], []
    for stride in _STRIDES:
        down, right = np.mgrid[: 64 // stride, : 64 // stride] * stride
        places.append(np.stack([right.ravel(), down.ravel()], 1))
        sizes.append(np.full((right.size, 1), stride))
    return np.concatenate(places).astype(np.float32), np.concatenate(sizes).astype(np.float32)


def _decode(net: Net, rows: str) -> str:
    """Adds what turns rows of a head into centre, size and scores in pixels."""
    axis, cells, sizes = net.constant(np.array([2])), *map(net.constant, grid_cells())

    def part(start: int, stop: int) -> str:
        return net.add("Slice", [rows, net.constant(np.array([start])), net.constant(np.array([stop])), axis])

    centre = net.add("Add", [net.add("Mul", [part(0, 2), sizes]), cells])
    extent = net.add("Mul", [net.add("Exp", [part(2, 4)]), sizes])
    return net.add("Concat", [centre, extent, part(4, 5 + KINDS)], "detections", axis=2)


def encode_boxes(boxes: tuple[Any, ...]) -> dict[str, Array]:
    """Returns for each image what each cell should say: a box [N,80,4], whether it has one, and its class."""
    places, sizes = grid_cells()
    middles = places + sizes / 2
    wanted = np.zeros((len(boxes), 80, 4), np.float32)
    has, kinds = np.zeros((len(boxes), 80), np.float32), np.zeros((len(boxes), 80), np.int64)
    for index, one in enumerate(boxes):
        for (left, top, right, bottom), kind in zip(one.boxes, one.classes, strict=True):
            centre, extent = np.array([left + right, top + bottom]) / 2, np.array([right - left, bottom - top])
            level = sizes[:, 0] == (8 if extent.max() < 26 else 16)
            near = level & (np.abs(middles - centre).max(1) < 0.9 * sizes[:, 0])
            wanted[index, near] = [*centre, *extent]
            has[index, near], kinds[index, near] = 1, kind
    return {"wanted": wanted, "has": has, "kinds": kinds}


def box_loss(values: Values, rows: Values) -> Any:
    """Returns the loss of boxes, of whether there is something, and of classes."""
    found, (_, sizes) = values["detections"], grid_cells()
    has = rows["has"]
    objectness, classes = (jnp.clip(part, 1e-6, 1 - 1e-6) for part in (found[..., 4], found[..., 5:]))
    is_there = -(has * jnp.log(objectness) * 3 + (1 - has) * jnp.log(1 - objectness)).mean() * 8
    kinds = jax.nn.one_hot(rows["kinds"], KINDS)
    is_kind = -(kinds * jnp.log(classes) + (1 - kinds) * jnp.log(1 - classes)).sum(-1)
    centre = jnp.abs(found[..., :2] - rows["wanted"][..., :2]).sum(-1) / sizes[:, 0]
    extent = jnp.abs(jnp.log(found[..., 2:4] + 1e-3) - jnp.log(rows["wanted"][..., 2:] + 1e-3)).sum(-1)
    return is_there + ((is_kind + 2 * centre + 2 * extent) * has).sum() / (has.sum() + 1)


def tone_classes(part: int) -> tuple[Array, Array]:
    """Returns waves and their classes."""
    return make_tones(_COUNTS[part], 10, 30 + part)


def make_audio() -> Net:
    """Returns a transformer over the logarithm of a mel spectrum that the graph computes itself."""
    net = Net("audio_transformer", 14, seed=3)
    net.inputs["wave"] = (AUDIO_LENGTH,)
    window, hop, width = 256, 100, 48
    count = (AUDIO_LENGTH - window) // hop + 1
    frames = np.arange(count)[:, None] * hop + np.arange(window)
    angles = 2 * np.pi * np.outer(np.arange(window), np.arange(window // 2 + 1)) / window
    x = net.add("Gather", ["wave", net.constant(frames)], axis=1)
    x = net.add("Mul", [x, net.constant(np.hanning(window))])
    two = net.constant(np.float32(2.0))
    parts = [net.add("Pow", [net.add("MatMul", [x, net.constant(f(angles))]), two]) for f in (np.cos, np.sin)]
    x = net.add("MatMul", [net.add("Add", parts), net.constant(mel_weights(window // 2 + 1, 40))])
    x = net.add("Log", [net.add("Add", [x, net.constant(np.float32(1e-6))])])
    x = net.linear(net.add("Mul", [x, net.constant(np.float32(0.2))]), 40, width)
    x = net.add("Add", [x, net.constant(net.rng.normal(0, 0.1, (count, width)), "positions", trained=True)])
    for _ in range(2):
        x = add_block(net, x, count, width, 3, layer_norm)
    x = net.add("ReduceMean", [layer_norm(net, x, width)], axes=[1], keepdims=0)
    net.outputs[
        net.add("Softmax", [rename_last(net, net.linear(x, width, 10), "logits")], "probabilities", axis=-1)
    ] = (10,)
    waves, labels = tone_classes(TRAIN)
    train_net(net, {"wave": waves, "label": labels}, class_loss, steps=600, batch=32, rate=2e-3)
    return net


def rename_last(net: Net, old: str, new: str) -> str:
    """Gives what the last node makes another name, and returns that; `old` is the one that it has."""
    net.nodes[-1].output[0] = new
    return new if old else old


def mel_weights(bins: int, bands: int) -> Array:
    """Returns triangles on the mel scale [bins, bands]."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1) / (RATE / 2) * (bins - 1)
    at = np.arange(bins)[:, None]
    rise, fall = (at - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - at) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rise, fall)).astype(np.float32)


def layer_norm(net: Net, x: str, width: int) -> str:
    """Adds layer normalisation, spelled out as exporters did before opset 17; its factors start unequal."""
    centred = net.add("Sub", [x, net.add("ReduceMean", [x], axes=[2])])
    square = net.add("Pow", [centred, net.constant(np.float32(2.0))])
    variance = net.add("Add", [net.add("ReduceMean", [square], axes=[2]), net.constant(np.float32(1e-5))])
    y = net.add("Div", [centred, net.add("Sqrt", [variance])])
    name = f"ln{len(net.arrays)}"
    y = net.add("Mul", [y, net.constant(np.exp(net.rng.normal(0, 0.8, width)), name, trained=True)])
    return net.add("Add", [y, net.constant(np.zeros(width), f"{name}.shift", trained=True)])


def add_block(net: Net, x: str, count: int, width: int, heads: int, norm: Callable[[Net, str, int], str]) -> str:
    """Adds a transformer's block: attention over `count` places of `width` numbers, and a GELU between two layers."""
    size = width // heads
    y, merged = norm(net, x, width), net.constant(np.array([0, count, width]))
    shape = net.constant(np.array([0, count, heads, size]))
    query, key, value = (
        net.add("Transpose", [net.add("Reshape", [net.linear(y, width, width), shape])], perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    )
    scores = net.add("Mul", [net.add("MatMul", [query, key]), net.constant(np.float32(size**-0.5))])
    mixed = net.add("MatMul", [net.add("Softmax", [scores], axis=-1), value])
    mixed = net.add("Reshape", [net.add("Transpose", [mixed], perm=[0, 2, 1, 3]), merged])
    x = net.add("Add", [x, net.linear(mixed, width, width)])
    y = net.linear(norm(net, x, width), width, 3 * width)
    gate = net.add("Erf", [net.add("Div", [y, net.constant(np.float32(2**0.5))])])
    gate = net.add("Add", [gate, net.constant(np.float32(1.0))])
    y = net.add("Mul", [net.add("Mul", [y, gate]), net.constant(np.float32(0.5))])
    return net.add("Add", [x, net.linear(y, 3 * width, width)])


def scene_masks(part: int) -> tuple[Array, Array]:
    """Returns images of several shapes and the class of each pixel."""
    scenes: Scenes = draw_scenes((4000, 96, 120)[part], 64, 3, 20 + part)
    return scenes.images, scenes.masks


def make_segmentation(name: str, *, decades: float, steps: int) -> Net:
    """Returns an encoder and decoder with PReLU, dilated convolutions and unequal channels, as ENet."""
    net = Net(name, 11, seed=4)
    net.inputs["image"] = (3, 64, 64)

    def block(
        x: str, sizes: tuple[int, int], kernel: int = 3, stride: int = 1, dilation: int = 1, groups: int = 1
    ) -> str:
        y = net.conv(x, sizes, kernel, stride=stride, dilation=dilation, groups=groups, bias=False)
        slope = net.constant(np.full((sizes[1], 1, 1), 0.25), f"slope{len(net.arrays)}", trained=True)
        return net.add("PRelu", [net.norm(y, sizes[1], 0.8), slope])

    def bottleneck(x: str, size: int, dilation: int) -> str:
        y = block(block(x, (size, size // 2), 1), (size // 2, size // 2), dilation=dilation)
        return net.add("Add", [x, net.norm(net.conv(y, (size // 2, size), 1, bias=False), size, 0.5)])

    scales = net.constant(np.array([1, 1, 2, 2], np.float32))

    def double(x: str) -> str:
        return net.add(
            "Resize", [x, net.constant(np.zeros(0, np.float32)), scales], mode="nearest",
            coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        )  # fmt: skip

    half = block("image", (3, 16), 3, 2)
    x = block(half, (16, 32), 3, 2)
    for dilation in (1, 2, 1, 4):
        x = bottleneck(x, 32, dilation)
    x = net.add("Concat", [double(block(x, (32, 16), 1)), half], axis=1)
    x = block(block(x, (32, 32), groups=32), (32, 16), 1)
    x = rename_last(net, net.conv(block(double(x), (16, 16)), (16, 1 + KINDS), 1), "scores")
    net.outputs[x] = (1 + KINDS, 64, 64)
    images, masks = scene_masks(TRAIN)
    train_net(net, {"image": images, "mask": masks}, mask_loss, steps=steps, batch=16)
    spread_channels(net, decades, 6, {})
    return net


def mask_loss(values: Values, rows: Values) -> Any:
    """Returns the cross entropy of every pixel of the tensor "scores"."""
    scores = values["scores"].transpose(0, 2, 3, 1)
    return optax.softmax_cross_entropy(scores, jax.nn.one_hot(rows["mask"], 1 + KINDS)).mean()


def photographs(part: int) -> tuple[Array, Array]:
    """Returns small pieces of photographs, and the same three times as large."""
    name, columns = (("china.jpg", (0, 640)), ("flower.jpg", (0, 320)), ("flower.jpg", (320, 640)))[part]
    large = cut_photographs(name, columns, (2000, 64, 60)[part], 96 if part != TRAIN else 48, 40 + part)
    n, c, h, w = large.shape
    return large.reshape(n, c, h // 3, 3, w // 3, 3).mean((3, 5)), large


def make_superres(name: str, opset: int, *, residual: bool, decades: float, side: int = 32) -> Net:
    """Returns convolutions and DepthToSpace that make an image three times as large; `residual` adds to its input."""
    net = Net(name, opset, seed=5)
    net.inputs["image"] = (3, side, side)
    x = "image"
    for sizes, kernel in (((3, 32), 5), ((32, 32), 3), ((32, 24), 3)):
        x = net.add("Relu", [net.conv(x, sizes, kernel)])
    x = net.add("DepthToSpace", [net.conv(x, (24, 27), 3, gain=0.5)], blocksize=3, mode="CRD")
    if residual:
        scales = net.constant(np.array([1, 1, 3, 3], np.float32))
        large = net.add(
            "Resize", ["image", net.constant(np.zeros(0, np.float32)), scales], mode="linear",
            coordinate_transformation_mode="half_pixel",
        )  # fmt: skip
        x = net.add("Add", [x, large], "large")
    else:
        x = rename_last(net, x, "large")
    net.outputs["large"] = (3, 3 * side, 3 * side)
    small, large_images = photographs(TRAIN)
    train_net(net, {"image": small, "target": large_images}, image_loss, steps=2500, batch=16, rate=1e-3)
    spread_plain(net, decades)
    return net


def image_loss(values: Values, rows: Values) -> Any:
    """Returns the mean squared error of the tensor "large"."""
    return ((values["large"] - rows["target"]) ** 2).mean() * 100


def spread_plain(net: Net, decades: float) -> None:
    """Makes channels between convolutions without normalisation differ in size; what the net computes stays."""
    rng = np.random.default_rng(7)
    convs = [node for node in net.nodes if node.op_type == "Conv"]
    for before, after in pairwise(convs):
        weight, bias = before.input[1:3]
        factors = (10 ** rng.uniform(-decades, 0, len(net.arrays[bias]))).astype(np.float32)
        net.arrays[weight] = net.arrays[weight] * factors.reshape(-1, 1, 1, 1)
        net.arrays[bias] = net.arrays[bias] * factors
        net.arrays[after.input[1]] = net.arrays[after.input[1]] / factors.reshape(1, -1, 1, 1)


FAMILIES: dict[str, Family] = {
    "depthwise_relu": Family(
        make=lambda: make_depthwise("depthwise_relu", 13, bounded=False, decades=2.0), data=scene_classes, task="class",
    ),
    "depthwise_relu6": Family(
        make=lambda: make_depthwise("depthwise_relu6", 11, bounded=True, decades=1.5), data=scene_classes,
        task="class", constant_nodes=True,
    ),
    "silu_detector": Family(
        make=lambda: make_detector("silu_detector", spread=0.8), data=scene_boxes, task="boxes",
    ),
    "silu_detector_uneven": Family(
        make=lambda: make_detector("silu_detector_uneven", spread=1.8), data=scene_boxes, task="boxes",
    ),
    "audio_transformer": Family(make=make_audio, data=tone_classes, task="class", batch="N"),
    "prelu_segmentation": Family(
        make=lambda: make_segmentation("prelu_segmentation", decades=1.5, steps=800), data=scene_masks, task="mask",
    ),
    "prelu_segmentation_uneven": Family(
        make=lambda: make_segmentation("prelu_segmentation_uneven", decades=2.5, steps=1600), data=scene_masks,
        task="mask",
    ),
    "superres_residual": Family(
        make=lambda: make_superres("superres_residual", 17, residual=True, decades=2.0), data=photographs, task="image",
    ),
    "superres_plain": Family(
        make=lambda: make_superres("superres_plain", 11, residual=False, decades=1.5), data=photographs, task="image",
    ),
}  # fmt: skip
