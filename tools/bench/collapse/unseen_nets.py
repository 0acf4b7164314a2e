"""Small nets of families that no rule of quantization was made from: how each is built, trained and scored."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from collapse_data import KINDS, draw_scenes
from collapse_families import mask_loss
from collapse_net import Net
from collapse_train import Values, train_net
from unseen_data import (
    JOINTS,
    MOST_DIGITS,
    PARTS,
    SIDE,
    WAVE,
    add_noise,
    draw_figures,
    render_rooms,
    split_digits,
    write_lines,
)
from unseen_score import encode_centres, encode_joints

from edgekit.model.tensors import Array

TRAIN = 0
_KNOWN_DIGITS = 7
"""Digits that the embedding is trained with; the others it must tell apart all the same."""


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """One family: how its net is made, its samples and labels by part, and the name of its score."""

    make: Callable[[], Net]
    data: Callable[[int], tuple[Array | dict[str, Array], Any]]
    score: str


def scene_masks(part: int) -> tuple[Array, Array]:
    """Returns images of several shapes and the class of each pixel."""
    scenes = draw_scenes(PARTS[part], SIDE, 4, 960 + part)
    return scenes.images, scenes.masks


def scene_boxes(part: int) -> tuple[Array, tuple[Any, ...]]:
    """Returns images of several shapes and where they are."""
    scenes = draw_scenes(PARTS[part], SIDE, 3, 970 + part)
    return scenes.images, scenes.boxes


def make_dilated() -> Net:
    """Returns a segmentation net of dilated depthwise convolutions with PReLU, as ESPNet and DeepLab on MobileNet."""
    net = Net("dilated_prelu", 13, seed=81)
    net.inputs["image"] = (3, SIDE, SIDE)

    def block(
        x: str, sizes: tuple[int, int], *, kernel: int = 1, stride: int = 1, groups: int = 1, far: int = 1
    ) -> str:
        y = net.conv(x, sizes, kernel, stride=stride, groups=groups, dilation=far, bias=False)
        slope = net.constant(np.full((sizes[1], 1, 1), 0.25), f"slope{len(net.arrays)}", trained=True)
        return net.add("PRelu", [net.norm(y, sizes[1], 0.5), slope])

    def residual(x: str, size: int, far: int) -> str:
        y = block(block(x, (size, 2 * size)), (2 * size, 2 * size), kernel=3, groups=2 * size, far=far)
        return net.add("Add", [x, net.norm(net.conv(y, (2 * size, size), 1, bias=False), size)])

    fine = block("image", (3, 16), kernel=3, stride=2)
    x = block(block(fine, (16, 16), kernel=3, stride=2, groups=16), (16, 40))
    for far in (1, 2, 4, 8, 1):
        x = residual(x, 40, far)
    branches = [
        block(x, (40, 16)),
        *(block(block(x, (40, 40), kernel=3, groups=40, far=far), (40, 16)) for far in (2, 6)),
    ]
    x = _enlarge(net, block(net.add("Concat", branches, axis=1), (48, 24)), 2)
    x = block(net.add("Concat", [x, fine], axis=1), (40, 24), kernel=3)
    net.nodes[-1].output[0] = "features"
    scores = net.conv("features", (24, 1 + KINDS), 1)
    _rename(net, scores, "small")
    _rename(net, _enlarge(net, "small", 2, "linear"), "scores")
    net.outputs["scores"] = (1 + KINDS, SIDE, SIDE)
    images, masks = scene_masks(TRAIN)
    train_net(net, {"image": images, "mask": masks}, mask_loss, steps=900, batch=12)
    return net


def _rename(net: Net, old: str, new: str) -> str:
    """Gives what the last node makes, named `old`, another name, and returns that."""
    net.nodes[-1].output[0] = new
    return new if old else old


def _enlarge(net: Net, x: str, factor: int, mode: str = "nearest") -> str:
    scales = net.constant(np.array([1, 1, factor, factor], np.float32))
    how = {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    how = how if mode == "nearest" else {"coordinate_transformation_mode": "half_pixel"}
    return net.add("Resize", [x, net.constant(np.zeros(0, np.float32)), scales], mode=mode, **how)


def make_reader() -> Net:
    """Returns a reader of digits whose output is [N, classes, steps], as CTC heads of PyTorch are; class 0 is blank."""
    net = Net("ctc_reader", 14, seed=82)
    net.inputs["image"] = (1, 16, 96)

    def block(x: str, sizes: tuple[int, int], stride: int = 1) -> str:
        return net.add("HardSwish", [net.norm(net.conv(x, sizes, stride=stride, bias=False), sizes[1], 0.4)])

    x = block(block("image", (1, 24), 2), (24, 32))
    x = net.add("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2], pads=[0] * 4)
    x = block(block(x, (32, 48)), (48, 64))
    x = net.add("ReduceMean", [x], axes=[2], keepdims=0)
    for sizes, kernel in (((64, 64), 5), ((64, 11), 3)):
        weight = net.constant(
            net.rng.normal(0, (2 / (sizes[0] * kernel)) ** 0.5, (*sizes[::-1], kernel)), f"line{kernel}", trained=True
        )
        bias = net.constant(np.zeros(sizes[1]), f"line{kernel}.bias", trained=True)
        pads = [kernel // 2] * 2
        x = net.add(
            "Conv", [x, weight, bias], "logits" if kernel == 3 else "", kernel_shape=[kernel], strides=[1], pads=pads,
            dilations=[1], group=1,
        )  # fmt: skip
        x = net.add("Relu", [x]) if kernel == 5 else x
    net.outputs["logits"] = (11, 24)
    images, digits = write_lines(TRAIN)
    train_net(net, {"image": images, "digits": digits}, _reading_loss, steps=1100, batch=32)
    return net


def _reading_loss(values: Values, rows: Values) -> Any:
    logits, digits = values["logits"].transpose(0, 2, 1), rows["digits"]
    nothing = jnp.zeros(logits.shape[:2])
    return (
        optax.ctc_loss(logits, nothing, jnp.where(digits < 0, 0, digits + 1), (digits < 0) * 1.0).mean() / MOST_DIGITS
    )


def make_centres(name: str = "centernet", seed: int = 83) -> Net:
    """Returns an anchor-free detector after CenterNet: a map of middles for each class, sizes, and shifts in a cell."""
    net = Net(name, 13, seed=seed)
    net.inputs["image"] = (3, SIDE, SIDE)

    def block(x: str, sizes: tuple[int, int], stride: int = 1) -> str:
        return net.add("Relu", [net.norm(net.conv(x, sizes, stride=stride, bias=False), sizes[1], 0.6)])

    def residual(x: str, size: int) -> str:
        y = net.norm(net.conv(block(x, (size, size)), (size, size), bias=False), size)
        return net.add("Relu", [net.add("Add", [x, y])])

    fine = residual(block(block("image", (3, 16), 2), (16, 32), 2), 32)
    middle = residual(block(fine, (32, 48), 2), 48)
    coarse = residual(block(middle, (48, 64), 2), 64)
    x = net.add("Add", [block(_enlarge(net, coarse, 2), (64, 48)), middle])
    x = net.add("Add", [block(_enlarge(net, x, 2), (48, 32)), fine])
    for part, count, gain in (("heat", KINDS, 0.1), ("size", 2, 0.5), ("shift", 2, 0.1)):
        y = net.conv(block(x, (32, 32)), (32, count), 1, gain=gain)
        _ = net.add("Sigmoid", [y], part) if part == "heat" else _rename(net, y, part)
        net.outputs[part] = (count, SIDE // 4, SIDE // 4)
    images, boxes = scene_boxes(TRAIN)
    train_net(net, {"image": images, **encode_centres(boxes)}, _centre_loss, steps=1100, batch=16)
    return net


def _centre_loss(values: Values, rows: Values) -> Any:
    heat, wanted = jnp.clip(values["heat"], 1e-5, 1 - 1e-5), rows["heat"]
    near = (1 - wanted) ** 4 * heat**2 * jnp.log(1 - heat) * (wanted < 1)
    there = (1 - heat) ** 2 * jnp.log(heat) * (wanted == 1)
    has = rows["has"]
    apart = jnp.abs(values["size"] - rows["size"]) * 0.2 + jnp.abs(values["shift"] - rows["shift"])
    return -(near + there).sum() / has.sum() + (apart * has).sum() / has.sum()


def make_pose() -> Net:
    """Returns a net of heatmaps of joints after SimpleBaseline: strides, then ConvTranspose."""
    net = Net("pose_heatmaps", 13, seed=84)
    net.inputs["image"] = (3, SIDE, SIDE)

    def block(x: str, sizes: tuple[int, int], stride: int = 1) -> str:
        return net.add("Relu", [net.norm(net.conv(x, sizes, stride=stride, bias=False), sizes[1], 0.5)])

    x = block(block(block("image", (3, 16), 2), (16, 32), 2), (32, 48), 2)
    x = block(block(block(x, (48, 64), 2), (64, 64)), (64, 64))
    for sizes in ((64, 48), (48, 32)):
        weight = net.constant(
            net.rng.normal(0, (1 / (4 * sizes[0])) ** 0.5, (*sizes, 4, 4)), f"up{sizes[0]}", trained=True
        )
        y = net.add(
            "ConvTranspose", [x, weight], kernel_shape=[4, 4], strides=[2, 2], pads=[1] * 4, group=1, dilations=[1, 1],
        )  # fmt: skip
        x = net.add("Relu", [net.norm(y, sizes[1], 0.3)])
    _rename(net, net.conv(x, (32, JOINTS), 1, gain=0.2), "heatmaps")
    net.outputs["heatmaps"] = (JOINTS, SIDE // 4, SIDE // 4)
    images, joints = draw_figures(TRAIN)
    train_net(net, {"image": images, "wanted": encode_joints(joints)}, _pose_loss, steps=1200, batch=16)
    return net


def _pose_loss(values: Values, rows: Values) -> Any:
    return ((values["heatmaps"] - rows["wanted"]) ** 2).mean() * 100


def make_depth() -> Net:
    """Returns a net of depths after FastDepth: depthwise layers with ReLU6, skips that are joined, a Softplus last."""
    net = Net("depth_unet", 12, seed=85)
    net.inputs["image"] = (3, SIDE, SIDE)
    limits = [net.constant(np.float32(0.0)), net.constant(np.float32(6.0))]

    def block(x: str, sizes: tuple[int, int], *, kernel: int = 1, stride: int = 1, groups: int = 1) -> str:
        y = net.norm(net.conv(x, sizes, kernel, stride=stride, groups=groups, bias=False), sizes[1], 0.4)
        return net.add("Clip", [y, *limits])

    def separable(x: str, sizes: tuple[int, int], *, kernel: int = 3, stride: int = 1) -> str:
        return block(block(x, (sizes[0], sizes[0]), kernel=kernel, stride=stride, groups=sizes[0]), sizes)

    half = block("image", (3, 16), kernel=3, stride=2)
    quarter = separable(separable(half, (16, 32), stride=2), (32, 32))
    eighth = separable(separable(quarter, (32, 64), stride=2), (64, 64))
    x = separable(separable(eighth, (64, 96), stride=2), (96, 96))
    x = net.add("Concat", [_enlarge(net, separable(x, (96, 64), kernel=5), 2), eighth], axis=1)
    x = net.add("Concat", [_enlarge(net, separable(x, (128, 48), kernel=5), 2), quarter], axis=1)
    x = net.add("Concat", [_enlarge(net, separable(x, (80, 32), kernel=5), 2), half], axis=1)
    y = net.conv(separable(x, (48, 24), kernel=5), (24, 1), 1)
    net.add("Softplus", [_enlarge(net, y, 2, "linear")], "depth")
    net.outputs["depth"] = (1, SIDE, SIDE)
    images, depths = render_rooms(TRAIN)
    train_net(net, {"image": images, "wanted": depths}, _depth_loss, steps=800, batch=12)
    return net


def _depth_loss(values: Values, rows: Values) -> Any:
    return jnp.abs(jnp.log(values["depth"] + 1e-3) - jnp.log(rows["wanted"])).mean() * 10


def digit_images(part: int) -> tuple[Array, Array]:
    """Returns digits [N,1,8,8] and their classes."""
    images, classes = split_digits(part)
    return images[:, None], classes


def make_embedding() -> Net:
    """Returns a net of embeddings of length one after MobileNetV3: HardSwish, squeeze and excitation."""
    net = Net("embedding_se", 14, seed=86)
    net.inputs["image"] = (1, 8, 8)

    def block(x: str, sizes: tuple[int, int], *, kernel: int = 1, stride: int = 1, groups: int = 1) -> str:
        y = net.norm(net.conv(x, sizes, kernel, stride=stride, groups=groups, bias=False), sizes[1], 0.5)
        return net.add("HardSwish", [y])

    def excite(x: str, size: int) -> str:
        y = net.add("Relu", [net.conv(net.add("GlobalAveragePool", [x]), (size, size // 4), 1)])
        gate = net.add("HardSigmoid", [net.conv(y, (size // 4, size), 1)], alpha=1 / 6, beta=0.5)
        return net.add("Mul", [x, gate])

    x, channels = block("image", (1, 16), kernel=3), 16
    for width, stride in ((24, 2), (24, 1), (40, 2), (40, 1)):
        hidden = 3 * channels
        y = block(block(x, (channels, hidden)), (hidden, hidden), kernel=3, stride=stride, groups=hidden)
        y = net.norm(net.conv(excite(y, hidden), (hidden, width), 1, bias=False), width)
        x, channels = net.add("Add", [x, y]) if stride == 1 else y, width
    x = net.add("Reshape", [net.add("GlobalAveragePool", [block(x, (40, 96))]), net.constant(np.array([0, 96]))])
    weight = net.constant(net.rng.normal(0, 0.1, (32, 96)), "project", trained=True)
    x = net.add("Gemm", [x, weight, net.constant(np.zeros(32), "project.bias", trained=True)], transB=1)
    length = net.add(
        "Clip",
        [net.add("ReduceL2", [x], axes=[1], keepdims=1), net.constant(np.float32(1e-6)), net.constant(np.float32(1e6))],
    )
    net.outputs[net.add("Div", [x, length], "embedding")] = (32,)
    net.constant(net.rng.normal(0, 1, (_KNOWN_DIGITS, 32)), "prototypes", trained=True)
    images, classes = digit_images(TRAIN)
    known = classes < _KNOWN_DIGITS
    train_net(net, {"image": images[known], "label": classes[known]}, _embedding_loss, steps=900, batch=48)
    del net.arrays["prototypes"]
    return net


def _embedding_loss(values: Values, rows: Values) -> Any:
    """After H. Wang et al., "CosFace", arXiv:1801.09414."""
    prototypes = values["prototypes"]
    prototypes = prototypes / jnp.linalg.norm(prototypes, axis=1, keepdims=True)
    wanted = jax.nn.one_hot(rows["label"], _KNOWN_DIGITS)
    return optax.softmax_cross_entropy(16 * (values["embedding"] @ prototypes.T - 0.3 * wanted), wanted).mean()


def make_denoiser() -> Net:
    """Returns a denoiser of waves after Wave-U-Net: strides, ConvTranspose, skips that are joined, and a Tanh."""
    net = Net("wave_denoiser", 13, seed=87)
    net.inputs["noisy"] = (1, WAVE)

    def layer(op: str, x: str, sizes: tuple[int, int], *, kernel: int, stride: int = 1) -> str:
        name, order = f"w{len(net.arrays)}", -1 if op == "Conv" else 1
        weight = net.rng.normal(
            0, (2 / (sizes[0] * kernel / (1 if order < 0 else stride))) ** 0.5, (*sizes[::order], kernel)
        )
        parameters = [
            net.constant(weight, name, trained=True),
            net.constant(np.zeros(sizes[1]), f"{name}.bias", trained=True),
        ]
        pads = [(kernel - stride + 1) // 2] * 2
        return net.add(op, [x, *parameters], kernel_shape=[kernel], strides=[stride], pads=pads, dilations=[1], group=1)

    def leaky(x: str) -> str:
        return net.add("LeakyRelu", [x], alpha=0.2)

    x, channels, kept = "noisy", 1, list[tuple[str, int]]()
    for width in (16, 24, 32, 48):
        x = leaky(layer("Conv", x, (channels, width), kernel=9))
        kept.append((x, width))
        x, channels = leaky(layer("Conv", x, (width, width), kernel=4, stride=2)), width
    x = leaky(layer("Conv", x, (48, 48), kernel=9))
    for skip, width in reversed(kept):
        x = leaky(layer("ConvTranspose", x, (channels, width), kernel=4, stride=2))
        x = leaky(layer("Conv", net.add("Concat", [x, skip], axis=1), (2 * width, width), kernel=5))
        channels = width
    net.add("Tanh", [layer("Conv", x, (16, 1), kernel=1)], "clean")
    net.outputs["clean"] = (1, WAVE)
    noisy, clean = add_noise(TRAIN)
    train_net(net, {"noisy": noisy, "wanted": clean}, _wave_loss, steps=900, batch=16, rate=2e-3)
    return net


def _wave_loss(values: Values, rows: Values) -> Any:
    return jnp.abs(values["clean"] - rows["wanted"]).mean() * 10


UNSEEN: dict[str, Unseen] = {
    "dilated_prelu": Unseen(make=make_dilated, data=scene_masks, score="mIoU"),
    "ctc_reader": Unseen(make=make_reader, data=write_lines, score="exact"),
    "centernet": Unseen(make=make_centres, data=scene_boxes, score="AP"),
    "pose_heatmaps": Unseen(make=make_pose, data=draw_figures, score="PCK"),
    "depth_unet": Unseen(make=make_depth, data=render_rooms, score="delta"),
    "embedding_se": Unseen(make=make_embedding, data=digit_images, score="retrieval"),
    "wave_denoiser": Unseen(make=make_denoiser, data=add_noise, score="SI-SNR"),
}
