"""Small nets with as many labelled samples as one likes, for what 4 bits cost: drops of a point need thousands.

A ResNet over drawn shapes and a vision transformer over MNIST's test digits (one half trains it, the other is scored)
are trained here; a MobileNet over shapes and a transformer over sounds are those of `collapse/`. Training needs jax,
optax and scikit-learn (`pip install -r tools/lock/train.txt`).
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from zoo_tasks import ZooTask, read_digits

from edgekit.target import TaskLimit

sys.path.insert(0, str(Path(__file__).parent / "collapse"))

from collapse_data import KINDS, draw_scenes, make_tones
from collapse_families import FAMILIES, TRAIN, add_block, class_loss, rename_last, scene_classes
from collapse_net import Net
from collapse_train import train_net

from edgekit.model.tensors import Array

CACHE = Path.home() / ".cache/edgekit/four_bits"
_CALIBRATE, _SCORED = 256, 4000
_SIDE = 32
_DIGIT, _PATCH, _TRAINED = 28, 7, 5000


def shapes(count: int, seed: int) -> tuple[Array, Array]:
    """Returns images [N,3,32,32] of one shape, and its kind."""
    scenes = draw_scenes(count, _SIDE, 1, seed)
    return scenes.images, np.array([boxes.classes[0] if boxes.classes else 0 for boxes in scenes.boxes])


def _read_digits() -> tuple[Array, Array]:
    images, labels = read_digits()
    return images / np.float32(255), labels


def digits(count: int, seed: int) -> tuple[Array, Array]:
    """Returns images [N,1,28,28] of digits and their classes, of those that train nothing where many are wanted."""
    images, labels = _read_digits()
    if count > _CALIBRATE:
        return images[_TRAINED:], labels[_TRAINED:]
    chosen = np.random.default_rng(seed).choice(_TRAINED, count, replace=False)
    return images[chosen], labels[chosen]


def tones(count: int, seed: int) -> tuple[Array, Array]:
    """Returns waves [N,L] and their classes."""
    return make_tones(count, 10, seed)


def make_resnet() -> Net:
    """Returns a ResNet of six blocks of two convolutions, with stride 2 and a 1x1 shortcut between stages."""
    net = Net("resnet_like", 17, seed=71)
    net.inputs["image"] = (3, _SIDE, _SIDE)

    def block(x: str, sizes: tuple[int, int], kernel: int = 3, stride: int = 1, *, act: bool = True) -> str:
        y = net.norm(net.conv(x, sizes, kernel, stride=stride, bias=False), sizes[1], 0.3)
        return net.add("Relu", [y]) if act else y

    x, channels = block("image", (3, 24), 3, 2), 24
    for width, stride in ((24, 1), (24, 1), (48, 2), (48, 1), (96, 2), (96, 1)):
        y = block(block(x, (channels, width), 3, stride), (width, width), act=False)
        same = stride == 1 and channels == width
        x = net.add("Relu", [net.add("Add", [y, x if same else block(x, (channels, width), 1, stride, act=False)])])
        channels = width
    x = net.add("Reshape", [net.add("GlobalAveragePool", [x]), net.constant(np.array([0, -1]))])
    _add_classes(net, x, channels, KINDS)
    images, labels = scene_classes(TRAIN)
    train_net(net, {"image": images, "label": labels}, class_loss, steps=1500, batch=48, rate=2e-3)
    return net


def make_vit() -> Net:
    """Returns a vision transformer of three blocks, normalised before attention and before the layers with Erf."""
    width, heads, count = 64, 4, (_DIGIT // _PATCH) ** 2
    net = Net("vit_like", 17, seed=72)
    net.inputs["image"] = (1, _DIGIT, _DIGIT)
    weight = net.constant(net.rng.normal(0, 1 / _PATCH, (width, 1, _PATCH, _PATCH)), "patches", trained=True)
    patch = [_PATCH] * 2
    x = net.add(
        "Conv", ["image", weight], kernel_shape=patch, strides=patch, pads=[0] * 4, group=1, dilations=[1] * 2,
    )  # fmt: skip
    x = net.add("Reshape", [x, net.constant(np.array([0, width, count]))])
    x = net.add("Transpose", [x], perm=[0, 2, 1])
    x = net.add("Add", [x, net.constant(net.rng.normal(0, 0.1, (count, width)), "positions", trained=True)])
    for _ in range(3):
        x = add_block(net, x, count, width, heads, _normalise)
    x = net.add("ReduceMean", [_normalise(net, x, width)], axes=[1], keepdims=0)
    _add_classes(net, x, width, 10)
    images, labels = _read_digits()
    data = {"image": images[:_TRAINED], "label": labels[:_TRAINED]}
    train_net(net, data, class_loss, steps=1200, batch=48, rate=1e-3)
    return net


def _normalise(net: Net, x: str, width: int) -> str:
    name = f"ln{len(net.arrays)}"
    gain = net.constant(np.exp(net.rng.normal(0, 0.5, width)), name, trained=True)
    return net.add(
        "LayerNormalization", [x, gain, net.constant(np.zeros(width), f"{name}.shift", trained=True)], axis=-1,
        epsilon=1e-5,
    )  # fmt: skip


def _add_classes(net: Net, x: str, width: int, classes: int) -> None:
    net.outputs[rename_last(net, net.linear(x, width, classes), "logits")] = (classes,)


NETS: dict[str, tuple[Callable[[], Net], str, Callable[[int, int], tuple[Array, Array]]]] = {
    "resnet_like": (make_resnet, "image", shapes),
    "depthwise_relu6": (FAMILIES["depthwise_relu6"].make, "image", shapes),
    "vit_like": (make_vit, "image", digits),
    "audio_transformer": (FAMILIES["audio_transformer"].make, "wave", tones),
}
"""How a net is made, the name of its input, and what draws samples and labels from a number and a seed."""


def load_net(name: str, cache: Path, scored: int = _SCORED) -> ZooTask:
    """Returns a net with its samples; trains it where the cache has none."""
    make, key, draw = NETS[name]
    path = cache / f"{name}.onnx"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        onnx.save(make().to_onnx(), str(path))
    calibration, (rows, labels) = draw(_CALIBRATE, 910)[0], draw(scored, 911)
    found: dict[str, Any] = {"name": name, "calibration": {key: calibration}, "scored": {key: rows}, "path": path}
    return ZooTask(**found, labels=tuple(int(label) for label in labels), limit=TaskLimit(name="top1"))
