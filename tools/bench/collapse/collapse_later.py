"""Nets trained after the cures were found, of other makes, seeds and data: what they taught stands in the docs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from collapse_data import AUDIO_LENGTH, KINDS, cut_photographs, draw_scenes, make_tones
from collapse_families import TRAIN, Family, class_loss, image_loss, mel_weights, rename_last, spread_plain
from collapse_net import Net
from collapse_train import Values, train_net

from edgekit.model.tensors import Array

_BINS, _STRIDES, _SIDE = 8, (8, 16), 64
_COUNTS = (4000, 96, 240, 1000)


def make_yolo() -> Net:
    """Returns a detector after YOLOv8: SiLU, splits, residuals, pooling, distances by a softmax, one output."""
    net = Net("yolo8_like", 13, seed=53)
    net.inputs["images"] = (3, _SIDE, _SIDE)

    def block(x: str, sizes: tuple[int, int], kernel: int = 3, stride: int = 1) -> str:
        y = net.norm(net.conv(x, sizes, kernel, stride=stride, bias=False), sizes[1], 0.9)
        return net.add("Mul", [y, net.add("Sigmoid", [y])])

    def fuse(x: str, sizes: tuple[int, int], *, shortcut: bool = True) -> str:
        half, y = sizes[1] // 2, block(x, sizes, 1)
        parts = [_part(net, y, 0, half), _part(net, y, half, sizes[1])]
        z = block(block(parts[1], (half, half)), (half, half))
        parts.append(net.add("Add", [parts[1], z]) if shortcut else z)
        return block(net.add("Concat", parts, axis=1), (3 * half, sizes[1]), 1)

    x = fuse(block(block("images", (3, 12), 3, 2), (12, 24), 3, 2), (24, 24))
    fine = fuse(block(x, (24, 32), 3, 2), (32, 32))
    pools = [block(fuse(block(fine, (32, 48), 3, 2), (48, 48)), (48, 24), 1)]
    for _ in range(2):
        pools.append(net.add("MaxPool", pools[-1:], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4))
    coarse = block(net.add("Concat", pools, axis=1), (72, 48), 1)
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    up = net.add(
        "Resize", [coarse, net.constant(np.zeros(0, np.float32)), scales], mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    fine = fuse(net.add("Concat", [up, fine], axis=1), (80, 32), shortcut=False)
    coarse = fuse(net.add("Concat", [block(fine, (32, 32), 3, 2), coarse], axis=1), (80, 48), shortcut=False)
    levels: list[str] = []
    for level, channels, stride in ((fine, 32, 8), (coarse, 48, 16)):
        boxes = net.conv(block(block(level, (channels, 32)), (32, 32)), (32, 4 * _BINS), 1, gain=0.5)
        classes = net.conv(block(block(level, (channels, 32)), (32, 32)), (32, KINDS), 1, gain=0.1)
        shape = net.constant(np.array([0, 4 * _BINS + KINDS, (_SIDE // stride) ** 2]))
        levels.append(net.add("Reshape", [net.add("Concat", [boxes, classes], axis=1), shape]))
    net.outputs[_decode(net, net.add("Concat", levels, axis=2))] = (4 + KINDS, 80)
    images, wanted = yolo_scenes(TRAIN)
    train_net(net, {"images": images, **_encode(wanted)}, _box_loss, steps=1800, batch=20)
    return net


def _part(net: Net, x: str, start: int, stop: int) -> str:
    return net.add("Slice", [x, *(net.constant(np.array([number])) for number in (start, stop, 1))])


def _cells() -> tuple[Array, Array]:
    """Returns the middle of every cell in cells [1,2,80], and its size in pixels [1,1,80]."""
    places, sizes = [], []
    for stride in _STRIDES:
        down, right = np.mgrid[: _SIDE // stride, : _SIDE // stride] + 0.5
        places.append(np.stack([right.ravel(), down.ravel()]))
        sizes.append(np.full((1, right.size), stride))
    return np.concatenate(places, 1).astype(np.float32)[None], np.concatenate(sizes, 1).astype(np.float32)[None]


def _decode(net: Net, raw: str) -> str:
    """Adds what makes boxes in pixels of distances in bins, and puts the chances of classes behind them."""
    places, sizes = map(net.constant, _cells())
    boxes, classes = _part(net, raw, 0, 4 * _BINS), _part(net, raw, 4 * _BINS, 4 * _BINS + KINDS)
    bins = net.add("Reshape", [boxes, net.constant(np.array([0, 4, _BINS, 80]))])
    chances = net.add("Softmax", [net.add("Transpose", [bins], perm=[0, 1, 3, 2])], axis=-1)
    weights = net.constant(np.arange(_BINS, dtype=np.float32).reshape(_BINS, 1) * 0.5)
    reach = net.add("Reshape", [net.add("MatMul", [chances, weights]), net.constant(np.array([0, 4, 80]))])
    first = net.add("Sub", [places, _part(net, reach, 0, 2)])
    last = net.add("Add", [places, _part(net, reach, 2, 4)])
    middle = net.add("Div", [net.add("Add", [first, last]), net.constant(np.float32(2.0))])
    sized = net.add("Mul", [net.add("Concat", [middle, net.add("Sub", [last, first])], axis=1), sizes])
    return net.add("Concat", [sized, net.add("Sigmoid", [classes])], "output0", axis=1)


def yolo_scenes(part: int) -> tuple[Array, tuple[Any, ...]]:
    """Returns images of up to four shapes and where they are."""
    scenes = draw_scenes(_COUNTS[part], _SIDE, 4, 120 + part)
    return scenes.images, scenes.boxes


def _encode(boxes: tuple[Any, ...]) -> Values:
    places, sizes = _cells()
    middles, size = (places * sizes)[0].T, sizes[0, 0]
    wanted, kinds = np.zeros((len(boxes), 80, 4), np.float32), np.full((len(boxes), 80), -1)
    for index, one in enumerate(boxes):
        for (left, top, right, bottom), kind in zip(one.boxes, one.classes, strict=True):
            middle, extent = np.array([left + right, top + bottom]) / 2, np.array([right - left, bottom - top])
            near = (size == (8 if extent.max() < 26 else 16)) & (np.abs(middles - middle).max(1) < 0.9 * size)
            wanted[index, near], kinds[index, near] = [*middle, *extent], kind
    return {"wanted": wanted, "kinds": kinds}


def _box_loss(values: Values, rows: Values) -> Any:
    found, has = values["output0"].transpose(0, 2, 1), rows["kinds"] >= 0
    chances, kinds = jnp.clip(found[..., 4:], 1e-6, 1 - 1e-6), jax.nn.one_hot(rows["kinds"], KINDS)
    is_kind = -(3 * kinds * jnp.log(chances) + (1 - kinds) * jnp.log(1 - chances)).sum(-1).mean() * 4
    apart = jnp.abs(found[..., :4] - rows["wanted"]).sum(-1) / _cells()[1][0]
    return is_kind + 3 * (apart * has).sum() / (has.sum() + 1)


def later_tones(part: int) -> tuple[Array, Array]:
    """Returns waves [N,1,L] and their classes."""
    waves, classes = make_tones((4000, 96, 400, 2000)[part], 10, 230 + part)
    return waves[:, None], classes


def make_keyword() -> Net:
    """Returns a transformer, normalised behind each sum, whose spectrum is a Conv with windows, then cosines."""
    net = Net("kwt_conv_front", 17, seed=54)
    net.inputs["audio"] = (1, AUDIO_LENGTH)
    window, hop, width, heads = 320, 125, 48, 4
    bins, count = window // 2 + 1, (AUDIO_LENGTH - window) // hop + 1
    angles, shape = 2 * np.pi * np.outer(np.arange(bins), np.arange(window)) / window, np.hamming(window)
    filters = np.concatenate([np.cos(angles) * shape, np.sin(angles) * shape])[:, None].astype(np.float32)
    x = net.add(
        "Conv", ["audio", net.constant(filters)], kernel_shape=[window], strides=[hop], pads=[0, 0], group=1,
        dilations=[1],
    )  # fmt: skip
    x = net.add("Mul", [x, x])
    x = net.add("Add", [_part(net, x, 0, bins), _part(net, x, bins, 2 * bins)])
    x = net.add("MatMul", [net.add("Transpose", [x], perm=[0, 2, 1]), net.constant(mel_weights(bins, 40))])
    x = net.add("Log", [net.add("Add", [x, net.constant(np.float32(1e-6))])])
    cosines = np.cos(np.pi / 40 * np.outer(np.arange(40) + 0.5, np.arange(30))) * np.sqrt(2 / 40)
    x = net.add("MatMul", [x, net.constant(cosines)])
    x = net.linear(net.add("Mul", [x, net.constant(np.float32(0.1))]), 30, width)
    x = net.add("Add", [x, net.constant(net.rng.normal(0, 0.1, (count, width)), "positions", trained=True)])
    for _ in range(3):
        x = _add_block(net, x, count, width, heads)
    x = net.add("ReduceMean", [x], axes=[1], keepdims=0)
    net.outputs[rename_last(net, net.linear(x, width, 10), "logits")] = (10,)
    waves, labels = later_tones(TRAIN)
    train_net(net, {"audio": waves, "label": labels}, class_loss, steps=1500, batch=32, rate=1e-3)
    return net


def _normalise(net: Net, x: str, width: int) -> str:
    name = f"ln{len(net.arrays)}"
    gain = net.constant(np.exp(net.rng.normal(0, 1.0, width)), name, trained=True)
    shift = net.constant(np.zeros(width), f"{name}.shift", trained=True)
    return net.add("LayerNormalization", [x, gain, shift], axis=-1, epsilon=1e-5)


def _add_block(net: Net, x: str, count: int, width: int, heads: int) -> str:
    size = width // heads
    shape, merged = net.constant(np.array([0, count, heads, size])), net.constant(np.array([0, count, width]))
    query, key, value = (
        net.add("Transpose", [net.add("Reshape", [net.linear(x, width, width), shape])], perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    )
    scores = net.add("Div", [net.add("MatMul", [query, key]), net.constant(np.float32(size**0.5))])
    mixed = net.add("MatMul", [net.add("Softmax", [scores], axis=-1), value])
    mixed = net.add("Reshape", [net.add("Transpose", [mixed], perm=[0, 2, 1, 3]), merged])
    x = _normalise(net, net.add("Add", [x, net.linear(mixed, width, width)]), width)
    y = net.linear(x, width, 2 * width)
    gate = net.add("Erf", [net.add("Div", [y, net.constant(np.float32(2**0.5))])])
    y = net.add("Mul", [y, net.add("Add", [gate, net.constant(np.float32(1.0))])])
    y = net.linear(net.add("Mul", [y, net.constant(np.float32(0.5))]), 2 * width, width)
    return _normalise(net, net.add("Add", [x, y]), width)


def luma(part: int) -> tuple[Array, Array]:
    """Returns the brightness of small pieces of photographs, and twice as large: white is in the last part only."""
    name, columns = (("flower.jpg", (0, 640)), ("china.jpg", (0, 320)), ("china.jpg", (320, 640)))[part]
    pieces = cut_photographs(name, columns, (2000, 64, 60)[part], 96 if part != TRAIN else 48, 540 + part)
    large = np.tensordot(pieces, np.array([0.299, 0.587, 0.114], np.float32), ((1,), (0,)))[:, None].astype(np.float32)
    n, c, h, w = large.shape
    return large.reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5)), large


def make_fsrcnn() -> Net:
    """Returns an FSRCNN with PReLU whose result is added to the image made larger by cubic splines."""

    def layers(net: Net) -> str:
        x = "luma"
        for sizes, kernel in (((1, 32), 5), ((32, 12), 1), ((12, 12), 3), ((12, 12), 3), ((12, 12), 3), ((12, 32), 1)):
            slope = net.constant(np.full((sizes[1], 1, 1), 0.25), f"slope{len(net.arrays)}", trained=True)
            x = net.add("PRelu", [net.conv(x, sizes, kernel), slope])
        x = net.add("DepthToSpace", [net.conv(x, (32, 4), 3, gain=0.2)], blocksize=2, mode="CRD")
        scales = net.constant(np.array([1, 1, 2, 2], np.float32))
        large = net.add(
            "Resize", ["luma", net.constant(np.zeros(0, np.float32)), scales], mode="cubic",
            coordinate_transformation_mode="half_pixel", cubic_coeff_a=-0.5, exclude_outside=1,
        )  # fmt: skip
        return net.add("Add", [x, large], "large")

    return _train_luma(Net("fsrcnn_residual", 18, seed=56), layers, 1.8)


def make_espcn() -> Net:
    """Returns an ESPCN with LeakyRelu: three convolutions and DepthToSpace."""

    def layers(net: Net) -> str:
        x = net.add("LeakyRelu", [net.conv("luma", (1, 48), 5)], alpha=0.1)
        x = net.add("LeakyRelu", [net.conv(x, (48, 24), 3)], alpha=0.1)
        return net.add("DepthToSpace", [net.conv(x, (24, 4), 3, gain=0.5)], "large", blocksize=2, mode="CRD")

    return _train_luma(Net("espcn_leaky", 13, seed=57), layers, 2.0)


def _train_luma(net: Net, layers: Callable[[Net], str], decades: float) -> Net:
    net.inputs["luma"] = (1, 48, 48)
    net.outputs[layers(net)] = (1, 96, 96)
    small, large = luma(TRAIN)
    train_net(net, {"luma": small, "target": large}, image_loss, steps=2500, batch=16, rate=1e-3)
    spread_plain(net, decades)
    return net


LATER: dict[str, Family] = {
    "yolo8_like": Family(make=make_yolo, data=yolo_scenes, task="columns"),
    "kwt_conv_front": Family(make=make_keyword, data=later_tones, task="class"),
    "fsrcnn_residual": Family(make=make_fsrcnn, data=luma, task="image"),
    "espcn_leaky": Family(make=make_espcn, data=luma, task="image"),
}
