"""Two detectors whose heads are coded otherwise: SSD's scores and boxes apart, and NanoDet's distances in bins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from collapse_data import KINDS, draw_scenes
from collapse_families import Family
from collapse_net import Net
from collapse_train import Values, train_net

from edgekit.model.tensors import Array

_BINS, _STRIDES, _SIDE = 8, (8, 16), 64
_COUNTS = (3000, 96, 240, 1000)


def scenes(part: int) -> tuple[Array, tuple[Any, ...]]:
    """Returns images of up to three shapes and where they are."""
    found = draw_scenes(_COUNTS[part], _SIDE, 3, 320 + part)
    return found.images, found.boxes


def share_scenes(part: int) -> tuple[Array, tuple[Any, ...]]:
    """Returns the same with boxes in shares of the image."""
    images, boxes = scenes(part)
    return images, tuple(
        type(one)(boxes=tuple(tuple(edge / _SIDE for edge in box) for box in one.boxes), classes=one.classes)
        for one in boxes
    )


def make_ssd() -> Net:
    """Returns an SSD of plain convolutions: a softmax with background, and corners in shares of the image."""
    net = Net("ssd_like", 13, seed=71)
    levels = _add_levels(net, 1 + KINDS + 4)
    rows = net.add("Transpose", [net.add("Concat", levels, axis=2)], perm=[0, 2, 1])
    scores = net.add("Softmax", [_part(net, rows, 0, 1 + KINDS)], "scores", axis=2)
    places, sizes = _cells()
    raw = [_part(net, rows, 1 + KINDS, 3 + KINDS), _part(net, rows, 3 + KINDS, 5 + KINDS)]
    size, shift = (net.constant(value.astype(np.float32)) for value in (2 * sizes / _SIDE, places / _SIDE))
    middle = net.add("Add", [net.add("Mul", [raw[0], size]), shift])
    half = net.add("Mul", [net.add("Exp", [raw[1]]), net.constant((sizes / _SIDE).astype(np.float32))])
    net.add("Concat", [net.add("Sub", [middle, half]), net.add("Add", [middle, half])], "boxes", axis=2)
    net.outputs |= {scores: (1 + KINDS,), "boxes": (4,)}
    net.outputs = {name: (80, *shape) for name, shape in net.outputs.items()}
    images, boxes = share_scenes(0)
    train_net(net, {"image": images, **_encode(boxes, _SIDE)}, _ssd_loss, steps=1200, batch=16)
    return net


def make_bins() -> Net:
    """Returns a detector after NanoDet: the chances of classes, then the logits of distances in bins, raw."""
    net = Net("bins_like", 13, seed=72)
    levels = _add_levels(net, KINDS + 4 * _BINS)
    rows = net.add("Transpose", [net.add("Concat", levels, axis=2)], perm=[0, 2, 1])
    chances = net.add("Sigmoid", [_part(net, rows, 0, KINDS)])
    net.add("Concat", [chances, _part(net, rows, KINDS, KINDS + 4 * _BINS)], "output", axis=2)
    net.outputs["output"] = (80, KINDS + 4 * _BINS)
    images, boxes = scenes(0)
    train_net(net, {"image": images, **_encode(boxes, 1)}, _bins_loss, steps=1200, batch=16)
    return net


def decode_bins(rows: Array) -> Array:
    """Returns rows [N,80,4+C] with middle, size and chances, of what the net with bins gives."""
    powers = np.exp(rows[..., KINDS:].reshape(*rows.shape[:2], 4, _BINS))
    reach = (powers / powers.sum(-1, keepdims=True)) @ np.arange(_BINS)
    places, sizes = _cells()
    low, high = places - reach[..., :2] * sizes, places + reach[..., 2:] * sizes
    return np.concatenate([(low + high) / 2, high - low, rows[..., :KINDS]], axis=-1)


def _add_levels(net: Net, columns: int) -> list[str]:
    """Adds a trunk and a head for each level, [N, columns, places]."""
    net.inputs["image"] = (3, _SIDE, _SIDE)

    def block(x: str, sizes: tuple[int, int], stride: int = 1) -> str:
        return net.add("Relu", [net.norm(net.conv(x, sizes, stride=stride, bias=False), sizes[1], 0.6)])

    x = block(block("image", (3, 16), 2), (16, 24), 2)
    fine = block(block(x, (24, 40), 2), (40, 40))
    coarse = block(block(fine, (40, 56), 2), (56, 56))
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    up = net.add(
        "Resize", [coarse, net.constant(np.zeros(0, np.float32)), scales], mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    fine = net.add("Concat", [fine, up], axis=1)
    found: list[str] = []
    for level, channels, stride in ((fine, 96, 8), (coarse, 56, 16)):
        raw = net.conv(block(block(level, (channels, 40)), (40, 40)), (40, columns), 1, gain=0.2)
        found.append(net.add("Reshape", [raw, net.constant(np.array([0, columns, (_SIDE // stride) ** 2]))]))
    return found


def _part(net: Net, x: str, start: int, stop: int) -> str:
    return net.add("Slice", [x, *(net.constant(np.array([number])) for number in (start, stop, 2))])


def _cells() -> tuple[Array, Array]:
    """Returns the middle of every cell in pixels [80,2], and its size [80,1]."""
    places, sizes = [], []
    for stride in _STRIDES:
        down, right = (np.mgrid[: _SIDE // stride, : _SIDE // stride] + 0.5) * stride
        places.append(np.stack([right.ravel(), down.ravel()], 1))
        sizes.append(np.full((right.size, 1), stride))
    return np.concatenate(places), np.concatenate(sizes).astype(np.float64)


def _encode(boxes: tuple[Any, ...], scale: float) -> Values:
    places, sizes = _cells()
    wanted, kinds = np.zeros((len(boxes), 80, 4), np.float32), np.full((len(boxes), 80), -1)
    for index, one in enumerate(boxes):
        for box, kind in zip(one.boxes, one.classes, strict=True):
            left, top, right, bottom = (edge * scale for edge in box)
            middle, extent = np.array([left + right, top + bottom]) / 2, np.array([right - left, bottom - top])
            near = (sizes[:, 0] == (8 if extent.max() < 26 else 16)) & (
                np.abs(places - middle).max(1) < 0.9 * sizes[:, 0]
            )
            wanted[index, near], kinds[index, near] = [left, top, right, bottom], kind
    return {"wanted": wanted, "kinds": kinds}


def _ssd_loss(values: Values, rows: Values) -> Any:
    has = rows["kinds"] >= 0
    chances = jnp.take_along_axis(values["scores"], rows["kinds"][..., None] + 1, axis=2)[..., 0]
    apart = jnp.abs(values["boxes"] * _SIDE - rows["wanted"]).sum(-1) / _cells()[1][:, 0]
    is_kind = -(jnp.log(chances + 1e-7) * (1 + 3 * has)).mean() * 20
    return is_kind + 2 * (apart * has).sum() / (has.sum() + 1)


def _bins_loss(values: Values, rows: Values) -> Any:
    found, has = values["output"], rows["kinds"] >= 0
    chances, kinds = jnp.clip(found[..., :KINDS], 1e-6, 1 - 1e-6), jax.nn.one_hot(rows["kinds"], KINDS)
    is_kind = -(3 * kinds * jnp.log(chances) + (1 - kinds) * jnp.log(1 - chances)).sum(-1).mean() * 8
    shares = jax.nn.softmax(found[..., KINDS:].reshape(*found.shape[:2], 4, _BINS), axis=-1)
    places, sizes = _cells()
    reach = shares @ jnp.arange(_BINS, dtype=jnp.float32) * sizes
    corners = jnp.concatenate([places - reach[..., :2], places + reach[..., 2:]], axis=-1)
    apart = jnp.abs(corners - rows["wanted"]).sum(-1) / sizes[:, 0]
    return is_kind + 2 * (apart * has).sum() / (has.sum() + 1)


HEADS: dict[str, Family] = {
    "ssd_like": Family(make=make_ssd, data=share_scenes, task="ssd"),
    "bins_like": Family(make=make_bins, data=scenes, task="bins"),
}
