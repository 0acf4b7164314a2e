"""Operations that move elements and compute nothing: shapes, slices, gathered and repeated parts."""

from collections.abc import Callable, Mapping

import numpy as np

from edgekit.devices.ios.mil.arguments import Arguments
from edgekit.model.tensors import Array

_NAMES = {"bool": np.bool_, "fp16": np.float16, "fp32": np.float32, "int8": np.int8, "int16": np.int16,
          "int32": np.int32, "int64": np.int64, "uint8": np.uint8, "uint16": np.uint16}  # fmt: skip


def _reshape(given: Arguments) -> Array:
    x, shape = given.tensor("x"), list(given.wholes("shape") or ())
    # A size of 0 is that of the same axis; in another rank there is none, and releases of MIL differ.
    if 0 in shape and len(shape) != x.ndim:
        raise ValueError(f"its shape {shape} leaves sizes to an input of rank {x.ndim}")
    return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])


def _expand(given: Arguments) -> Array:
    return np.expand_dims(given.tensor("x"), given.wholes("axes") or ())


def _squeeze(given: Arguments) -> Array:
    return np.squeeze(given.tensor("x"), given.wholes("axes"))


def _transpose(given: Arguments) -> Array:
    return np.transpose(given.tensor("x"), given.wholes("perm"))


def _concatenate(given: Arguments) -> Array:
    parts, axis = given.tensors("values"), given.whole("axis", 0)
    if not given.flag("interleave"):
        return np.concatenate(parts, axis)
    stacked = np.stack(parts, axis=axis % parts[0].ndim + 1)
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return stacked.reshape(shape)


def _stack(given: Arguments) -> Array:
    return np.stack(given.tensors("values"), given.whole("axis", 0))


def _split(given: Arguments) -> tuple[Array, ...]:
    x, axis = given.tensor("x"), given.whole("axis", 0)
    sizes = given.wholes("split_sizes")
    if sizes is None:
        return tuple(np.split(x, given.whole("num_splits", 1), axis))
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


def _slice_by_index(given: Arguments) -> Array:
    x = given.tensor("x")
    rank = x.ndim
    begin, end = given.wholes("begin") or (), given.wholes("end") or ()
    stride = given.wholes("stride") or (1,) * rank
    masks = {name: given.wholes(f"{name}_mask") or (0,) * rank for name in ("begin", "end", "squeeze")}
    cuts: list[int | slice] = []
    for axis in range(rank):
        if masks["squeeze"][axis]:
            cuts.append(begin[axis])
            continue
        first = None if masks["begin"][axis] else begin[axis]
        last = None if masks["end"][axis] else end[axis]
        cuts.append(slice(first, last, stride[axis]))
    return x[tuple(cuts)]


def _slice_by_size(given: Arguments) -> Array:
    x, begin, size = given.tensor("x"), given.wholes("begin") or (), given.wholes("size") or ()
    return x[tuple(slice(at, None if count == -1 else at + count) for at, count in zip(begin, size, strict=True))]


def _pad(given: Arguments) -> Array:
    x, flat = given.tensor("x"), given.wholes("pad") or ()
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    mode = given.text("mode", "constant")
    if mode == "constant":
        return np.pad(x, pairs, constant_values=given.number("constant_val", 0.0))
    return np.pad(x, pairs, mode="reflect" if mode == "reflect" else "edge")


def _gather(given: Arguments) -> Array:
    x, axis = given.tensor("x"), given.whole("axis", 0)
    if given.whole("batch_dims", 0):
        raise ValueError("it gathers in batches")
    indices = given.tensor("indices").astype(np.int64)
    return np.take(x, np.where(indices < 0, indices + x.shape[axis], indices), axis)


def _gather_along(given: Arguments) -> Array:
    return np.take_along_axis(given.tensor("x"), given.tensor("indices").astype(np.int64), given.whole("axis", 0))


def _gather_points(given: Arguments) -> Array:
    """Computes `gather_nd`: the last axis of `indices` names a place along the first axes of `x`."""
    if given.whole("batch_dims", 0):
        raise ValueError("it gathers in batches")
    places = np.moveaxis(given.tensor("indices").astype(np.int64), -1, 0)
    return np.asarray(given.tensor("x")[tuple(places)])


def _cast(given: Arguments) -> Array:
    name = given.text("dtype", "fp32")
    if name not in _NAMES:
        raise ValueError(f"it casts to {name!r}")
    x = given.tensor("x")
    # Towards zero, as C does.
    return x.astype(_NAMES[name])


def _depth_to_space(given: Arguments) -> Array:
    """Computes `depth_to_space`, whose channels hold the place in the block first (ONNX: DCR)."""
    x, block = given.tensor("x"), given.whole("block_size", 1)
    batch, channels, height, width = x.shape
    split = x.reshape(batch, block, block, channels // block**2, height, width)
    return split.transpose(0, 3, 4, 1, 5, 2).reshape(batch, channels // block**2, height * block, width * block)


def _pixel_shuffle(given: Arguments) -> Array:
    """Computes `pixel_shuffle`, whose channels hold the place in the block last (ONNX: CRD)."""
    x, block = given.tensor("x"), given.whole("upscale_factor", 1)
    batch, channels, height, width = x.shape
    split = x.reshape(batch, channels // block**2, block, block, height, width)
    return split.transpose(0, 1, 4, 2, 5, 3).reshape(batch, channels // block**2, height * block, width * block)


def _space_to_depth(given: Arguments) -> Array:
    x, block = given.tensor("x"), given.whole("block_size", 1)
    batch, channels, height, width = x.shape
    split = x.reshape(batch, channels, height // block, block, width // block, block)
    return split.transpose(0, 3, 5, 1, 2, 4).reshape(batch, channels * block**2, height // block, width // block)


def _fill(given: Arguments) -> Array:
    value = given.tensor("value").reshape(-1)
    return np.full(given.wholes("shape") or (), value[0], value.dtype)


LAYOUT: Mapping[str, Callable[[Arguments], Array | tuple[Array, ...]]] = {
    "cast": _cast,
    "concat": _concatenate,
    "depth_to_space": _depth_to_space,
    "expand_dims": _expand,
    "fill": _fill,
    "gather": _gather,
    "gather_along_axis": _gather_along,
    "gather_nd": _gather_points,
    "pad": _pad,
    "pixel_shuffle": _pixel_shuffle,
    "reshape": _reshape,
    "reverse": lambda given: np.flip(given.tensor("x"), given.wholes("axes")),
    "shape": lambda given: np.array(given.tensor("x").shape, np.int32),
    "slice_by_index": _slice_by_index,
    "slice_by_size": _slice_by_size,
    "space_to_depth": _space_to_depth,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": lambda given: np.tile(given.tensor("x"), given.wholes("reps") or ()),
    "transpose": _transpose,
}
"""Operations by their names in MIL."""
