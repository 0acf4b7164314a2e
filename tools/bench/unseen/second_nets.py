"""A second set of nets of families that no rule of quantization was made from, written before any was looked at."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from collapse_data import KINDS
from collapse_families import class_loss, mask_loss, rename_last
from collapse_net import Net
from collapse_train import Values, train_net
from second_data import (
    BANDS,
    CELL,
    FRAMES,
    TEMPLATE,
    cut_targets,
    encode_targets,
    scene_masks,
    shape_classes,
    tone_spectra,
)
from unseen_data import SIDE
from unseen_nets import TRAIN, Unseen, make_centres, scene_boxes

_MOST_LISTED = 30


def _conv(net: Net, x: str, weights: Sequence[str], *, stride: int, kernel: int, pad: int = 0) -> str:
    return net.add(
        "Conv", [x, *weights], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, group=1,
        dilations=[1, 1],
    )  # fmt: skip


def _weights(net: Net, name: str, sizes: tuple[int, int], kernel: int) -> list[str]:
    spread = (2 / (sizes[0] * kernel**2)) ** 0.5
    weight = net.rng.normal(0, spread, (sizes[1], sizes[0], kernel, kernel))
    return [net.constant(weight, name, trained=True), net.constant(np.zeros(sizes[1]), f"{name}.bias", trained=True)]


def _patch(net: Net, x: str, sizes: tuple[int, int], size: int) -> str:
    """Adds a convolution whose windows lie side by side."""
    return _conv(net, x, _weights(net, f"w{len(net.arrays)}", sizes, size), stride=size, kernel=size)


def _normalise(net: Net, x: str, width: int) -> str:
    name = f"ln{len(net.arrays)}"
    gain = net.constant(np.ones(width), name, trained=True)
    shift = net.constant(np.zeros(width), f"{name}.shift", trained=True)
    return net.add("LayerNormalization", [x, gain, shift], axis=-1, epsilon=1e-6)


def _gelu(net: Net, x: str) -> str:
    """Adds GELU as PyTorch exports it."""
    gate = net.add("Erf", [net.add("Div", [x, net.constant(np.float32(2**0.5))])])
    y = net.add("Mul", [x, net.add("Add", [gate, net.constant(np.float32(1.0))])])
    return net.add("Mul", [y, net.constant(np.float32(0.5))])


def make_convnext() -> Net:
    """Returns a classifier after ConvNeXt (Z. Liu et al., 2022): 7 x 7 depthwise, LayerNorm, GELU, scales."""
    net = Net("convnext_like", 17, seed=101)
    net.inputs["image"] = (3, 32, 32)

    def channels_last(x: str, width: int) -> str:
        y = _normalise(net, net.add("Transpose", [x], perm=[0, 2, 3, 1]), width)
        return net.add("Transpose", [y], perm=[0, 3, 1, 2])

    def block(x: str, width: int) -> str:
        y = net.conv(x, (width, width), 7, groups=width, gain=1.0)
        y = _normalise(net, net.add("Transpose", [y], perm=[0, 2, 3, 1]), width)
        y = net.linear(_gelu(net, net.linear(y, width, 4 * width)), 4 * width, width)
        scale = net.constant(np.full(width, 0.2), f"scale{len(net.arrays)}", trained=True)
        return net.add("Add", [x, net.add("Transpose", [net.add("Mul", [y, scale])], perm=[0, 3, 1, 2])])

    x = channels_last(_patch(net, "image", (3, 24), 2), 24)
    x = block(block(x, 24), 24)
    x = _patch(net, channels_last(x, 24), (24, 48), 2)
    x = block(block(x, 48), 48)
    x = _normalise(net, net.add("ReduceMean", [x], axes=[2, 3], keepdims=0), 48)
    net.outputs[rename_last(net, net.linear(x, 48, KINDS), "logits")] = (KINDS,)
    images, kinds = shape_classes(TRAIN)
    train_net(net, {"image": images, "label": kinds}, class_loss, steps=450, batch=32, rate=2e-3)
    return net


def make_recurrent() -> Net:
    """Returns a keyword spotter of two GRU layers, the first read both ways, over spectra."""
    net = Net("gru_keyword", 14, seed=102)
    net.inputs["spectra"] = (FRAMES, BANDS)

    def layer(x: str, inputs: int, size: int, ways: int) -> str:
        shapes = {"w": (ways, 3 * size, inputs), "r": (ways, 3 * size, size), "b": (ways, 6 * size)}
        names = [
            net.constant(net.rng.uniform(-1, 1, shape) / size**0.5, f"{role}{len(net.nodes)}", trained=True)
            for role, shape in shapes.items()
        ]
        direction = "bidirectional" if ways == 2 else "forward"
        y = net.add("GRU", [x, *names], hidden_size=size, direction=direction, linear_before_reset=1)
        if ways == 1:
            return net.add("Squeeze", [y, net.constant(np.array([1]))])
        joined = net.constant(np.array([0, 0, ways * size]))
        return net.add("Reshape", [net.add("Transpose", [y], perm=[0, 2, 1, 3]), joined])

    mean = tone_spectra(TRAIN)[0].mean((0, 1))
    x = net.add("Sub", ["spectra", net.constant(mean)])
    x = net.add("Relu", [net.linear(x, BANDS, 48)])
    x = layer(layer(net.add("Transpose", [x], perm=[1, 0, 2]), 48, 32, 2), 64, 48, 1)
    last = [net.constant(np.array([number])) for number in (FRAMES - 1, FRAMES, 0)]
    x = net.add("Squeeze", [net.add("Slice", [x, *last]), net.constant(np.array([0]))])
    weight = net.constant(net.rng.normal(0, 0.2, (10, 48)), "decide", trained=True)
    bias = net.constant(np.zeros(10), "decide.bias", trained=True)
    net.outputs[net.add("Gemm", [x, weight, bias], "logits", transB=1)] = (10,)
    spectra, classes = tone_spectra(TRAIN)
    train_net(net, {"spectra": spectra, "label": classes}, class_loss, steps=1200, batch=48, rate=3e-3)
    return net


def make_unet() -> Net:
    """Returns a U-Net as nnU-Net writes it: InstanceNorm, LeakyReLU, ConvTranspose of 2 x 2, skips that are joined."""
    net = Net("unet_instance", 13, seed=103)
    net.inputs["image"] = (3, SIDE, SIDE)

    def block(x: str, sizes: tuple[int, int], stride: int = 1) -> str:
        name = f"in{len(net.arrays)}"
        gain = net.constant(np.exp(net.rng.normal(0, 0.4, sizes[1])), name, trained=True)
        shift = net.constant(np.zeros(sizes[1]), f"{name}.shift", trained=True)
        y = net.add("InstanceNormalization", [net.conv(x, sizes, stride=stride), gain, shift], epsilon=1e-5)
        return net.add("LeakyRelu", [y], alpha=0.01)

    def enlarge(x: str, sizes: tuple[int, int]) -> str:
        weight = net.rng.normal(0, (1 / sizes[0]) ** 0.5, (*sizes, 2, 2))
        return net.add(
            "ConvTranspose", [x, net.constant(weight, f"up{sizes[0]}", trained=True)], kernel_shape=[2, 2],
            strides=[2, 2], pads=[0] * 4, group=1, dilations=[1, 1],
        )  # fmt: skip

    whole = block("image", (3, 12))
    half = block(block(whole, (12, 24), 2), (24, 24))
    quarter = block(block(half, (24, 40), 2), (40, 40))
    x = block(block(quarter, (40, 64), 2), (64, 64))
    for skip, sizes in ((quarter, (64, 40)), (half, (40, 24)), (whole, (24, 12))):
        x = block(net.add("Concat", [enlarge(x, sizes), skip], axis=1), (2 * sizes[1], sizes[1]))
    net.outputs[rename_last(net, net.conv(x, (12, 1 + KINDS), 1), "scores")] = (1 + KINDS, SIDE, SIDE)
    images, masks = scene_masks(TRAIN)
    train_net(net, {"image": images, "mask": masks}, mask_loss, steps=400, batch=10)
    return net


def make_hybrid() -> Net:
    """Returns a classifier after MobileViT (S. Mehta and M. Rastegari, arXiv:2110.02178), unfolded as timm does it."""
    net = Net("mobilevit_like", 17, seed=104)
    net.inputs["image"] = (3, 32, 32)

    def block(x: str, sizes: tuple[int, int], kernel: int = 3, stride: int = 1, groups: int = 1) -> str:
        y = net.conv(x, sizes, kernel, stride=stride, groups=groups, bias=False)
        y = net.norm(y, sizes[1], 0.4)
        return net.add("Mul", [y, net.add("Sigmoid", [y])])

    def inverted(x: str, sizes: tuple[int, int], stride: int) -> str:
        hidden = 3 * sizes[0]
        y = block(block(x, (sizes[0], hidden), 1), (hidden, hidden), 3, stride, hidden)
        y = net.norm(net.conv(y, (hidden, sizes[1]), 1, bias=False), sizes[1])
        return net.add("Add", [x, y]) if stride == 1 and sizes[0] == sizes[1] else y

    def reshape(x: str, *shape: int) -> str:
        return net.add("Reshape", [x, net.constant(np.array(shape))])

    def swap(x: str, *perm: int) -> str:
        return net.add("Transpose", [x], perm=perm)

    def attend(x: str, count: int, width: int, heads: int) -> str:
        y, size = _normalise(net, x, width), width // heads
        query, key, value = (
            swap(reshape(net.linear(y, width, width), 0, count, heads, size), 0, *perm)
            for perm in ((2, 1, 3), (2, 3, 1), (2, 1, 3))
        )
        scores = net.add("Mul", [net.add("MatMul", [query, key]), net.constant(np.float32(size**-0.5))])
        mixed = net.add("MatMul", [net.add("Softmax", [scores], axis=-1), value])
        x = net.add("Add", [x, net.linear(reshape(swap(mixed, 0, 2, 1, 3), 0, count, width), width, width)])
        y = net.linear(_normalise(net, x, width), width, 2 * width)
        y = net.add("Mul", [y, net.add("Sigmoid", [y])])
        return net.add("Add", [x, net.linear(y, 2 * width, width)])

    def mix(x: str, channels: int, width: int, side: int) -> str:
        y, half = net.conv(block(x, (channels, channels)), (channels, width), 1, bias=False), side // 2
        y = reshape(swap(reshape(y, -1, 2, half, 2), 0, 2, 1, 3), -1, width, half**2, 4)
        y = reshape(swap(y, 0, 3, 2, 1), -1, half**2, width)
        y = _normalise(net, attend(attend(y, half**2, width, 4), half**2, width, 4), width)
        y = reshape(swap(reshape(y, -1, 4, half**2, width), 0, 3, 2, 1), -1, half, 2, 2)
        y = block(reshape(swap(y, 0, 2, 1, 3), -1, width, side, side), (width, channels), 1)
        return block(net.add("Concat", [x, y], axis=1), (2 * channels, channels))

    x = inverted(block("image", (3, 16), 3, 2), (16, 24), 1)
    x = mix(inverted(x, (24, 40), 2), 40, 48, 8)
    x = block(x, (40, 96), 1)
    x = reshape(net.add("GlobalAveragePool", [x]), 0, 96)
    net.outputs[rename_last(net, net.linear(x, 96, KINDS), "logits")] = (KINDS,)
    images, kinds = shape_classes(TRAIN)
    train_net(net, {"image": images, "label": kinds}, class_loss, steps=450, batch=32, rate=2e-3)
    return net


def make_tracker() -> Net:
    """Returns a Siamese tracker after LightTrack (B. Yan et al., arXiv:2104.14545).

    Two inputs share weights; what these make of them is correlated, and tells a map of where the target is and the
    distances to its sides.
    """
    net = Net("siamese_tracker", 13, seed=105)
    net.inputs |= {"template": (3, TEMPLATE, TEMPLATE), "search": (3, SIDE, SIDE)}
    shared = [_weights(net, f"shared{sizes[1]}", sizes, 3) for sizes in pairwise((3, 16, 32, 48))]

    def look(x: str) -> str:
        for weights in shared:
            x = net.add("Relu", [_conv(net, x, weights, stride=2, kernel=3, pad=1)])
        return x

    template, search = look("template"), look("search")
    cells, places = (TEMPLATE // CELL) ** 2, (SIDE // CELL) ** 2
    kernels = net.add("Transpose", [_flat(net, template, 48, cells)], perm=[0, 2, 1])
    alike = net.add("MatMul", [kernels, _flat(net, search, 48, places)])
    alike = net.add("Mul", [alike, net.constant(np.float32(48**-0.5))])
    alike = net.add("Reshape", [alike, net.constant(np.array([0, cells, SIDE // CELL, SIDE // CELL]))])
    x = net.add("Concat", [alike, search], axis=1)
    x = net.add("Relu", [net.norm(net.conv(x, (48 + cells, 64), bias=False), 64)])
    x = net.add("Relu", [net.norm(net.conv(x, (64, 64), bias=False), 64)])
    net.outputs[net.add("Sigmoid", [net.conv(x, (64, 1), 1, gain=0.1)], "heat")] = (1, SIDE // CELL, SIDE // CELL)
    net.outputs[net.add("Exp", [net.conv(x, (64, 4), 1, gain=0.1)], "sides")] = (4, SIDE // CELL, SIDE // CELL)
    rows, boxes = cut_targets(TRAIN)
    wanted = {f"wanted.{name}": value for name, value in encode_targets(boxes).items()}
    train_net(net, {**rows, **wanted}, _track_loss, steps=1100, batch=24)
    return net


def _flat(net: Net, x: str, channels: int, places: int) -> str:
    return net.add("Reshape", [x, net.constant(np.array([0, channels, places]))])


def _track_loss(values: Values, rows: Values) -> Any:
    heat, wanted = jnp.clip(values["heat"], 1e-5, 1 - 1e-5), rows["wanted.heat"]
    there = -(wanted * jnp.log(heat) * 4 + (1 - wanted) * jnp.log(1 - heat)).mean() * 10
    down, right = (jnp.asarray(np.mgrid[: SIDE // CELL, : SIDE // CELL] + 0.5) * CELL)[:, None]
    left, top, more, below = (rows["wanted.box"][:, at, None, None] for at in range(4))
    sides = jnp.stack([right - left, down - top, more - right, below - down], axis=1) / CELL
    apart = jnp.abs(values["sides"] - jnp.maximum(sides, 0)) * rows["wanted.near"]
    return there + apart.sum() / (rows["wanted.near"].sum() + 1)


def make_listed() -> Net:
    """Returns the CenterNet with what lists its detections: highest neighbours, TopK, Gather, as exporters write it."""
    net = make_centres("centernet_listed", seed=106)
    side = SIDE // 4
    highest = net.add("MaxPool", ["heat"], kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    kept = net.add("Mul", ["heat", net.add("Cast", [net.add("Equal", [highest, "heat"])], to=1)])
    flat = net.add("Reshape", [kept, net.constant(np.array([1, -1]))])
    scores = net.add("TopK", [flat, net.constant(np.array([_MOST_LISTED]))], axis=1, largest=1, sorted=1)
    net.nodes[-1].output.append("where")
    cells = net.constant(np.array(side**2))
    kinds, place = (net.add(op, ["where", cells]) for op in ("Div", "Mod"))
    line, column = (net.add(op, [place, net.constant(np.array(side))]) for op in ("Div", "Mod"))
    index = net.add("Unsqueeze", [place, net.constant(np.array([2]))])

    def read(name: str) -> str:
        rows = net.add("Reshape", [name, net.constant(np.array([1, 2, side**2]))])
        return net.add("GatherND", [net.add("Transpose", [rows], perm=[0, 2, 1]), index], batch_dims=1)

    axis = net.constant(np.array([2]))
    corner = [net.add("Unsqueeze", [net.add("Cast", [each], to=1), axis]) for each in (column, line)]
    middle = net.add("Add", [net.add("Concat", corner, axis=2), read("shift")])
    half = net.add("Mul", [net.add("Relu", [read("size")]), net.constant(np.float32(0.5))])
    ends = net.add("Concat", [net.add(op, [middle, half]) for op in ("Sub", "Add")], axis=2)
    boxes = net.add("Mul", [ends, net.constant(np.float32(4.0))])
    columns = [net.add("Unsqueeze", [each, axis]) for each in (scores, net.add("Cast", [kinds], to=1))]
    net.outputs = {net.add("Concat", [boxes, *columns], "detections", axis=2): (_MOST_LISTED, 6)}
    return net


SECOND: dict[str, Unseen] = {
    "convnext_like": Unseen(make=make_convnext, data=shape_classes, score="top-1"),
    "gru_keyword": Unseen(make=make_recurrent, data=tone_spectra, score="top-1"),
    "unet_instance": Unseen(make=make_unet, data=scene_masks, score="mIoU"),
    "mobilevit_like": Unseen(make=make_hybrid, data=shape_classes, score="top-1"),
    "siamese_tracker": Unseen(make=make_tracker, data=cut_targets, score="overlap"),
    "centernet_listed": Unseen(make=make_listed, data=scene_boxes, score="listed AP"),
}
