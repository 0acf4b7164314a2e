"""Samples of any length for models of fixed length: padded at the end to the size of a bucket; outputs are cut back."""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from edgekit.data.samples import Samples, map_samples
from edgekit.errors import DataError, UsageError, require_known
from edgekit.model.tensors import Array, Tensors, TensorSpec


class Padding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The axes of inputs that have the size of the dimension `dim`, and those of outputs whose size follows from it.

    `values` holds the number with which each of these inputs is padded at its end. The size of an output axis may be a
    fixed share of the input's, as after a pooling; it is rounded up.
    """

    dim: str
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]
    values: dict[str, float]

    def measure(self, sample: Tensors) -> int:
        """Returns the length of a sample.

        Raises:
            DataError: its inputs, or two axes of one, have different lengths.
        """
        shapes: dict[str, tuple[int, ...]] = {name: sample[name].shape for name in self.inputs}
        found = [(name, shapes[name][axis]) for name, axes in self.inputs.items() for axis in axes]
        if len({size for _, size in found}) != 1:
            sizes = ", ".join(f"{size} in '{name}'" for name, size in found)
            raise DataError(f"a sample has several sizes of '{self.dim}': {sizes}", hint="give all of them one size")
        return found[0][1]

    def fill(self, sample: Tensors, size: int) -> dict[str, Array]:
        """Returns a sample padded to `size`; it must not be longer."""
        filled = dict(sample)
        for name, axes in self.inputs.items():
            value = sample[name]
            widths = [(0, size - length if axis in axes else 0) for axis, length in enumerate(value.shape)]
            if any(end for _, end in widths):
                filled[name] = np.pad(value, widths, constant_values=np.asarray(self.values[name]).astype(value.dtype))
        return filled

    def cut(self, outputs: Tensors, length: int, size: int) -> dict[str, Array]:
        """Returns the outputs of a model of `size`, cut to what belongs to a sample of this length."""

        def share(name: str, value: Array) -> Array:
            axes = (axis for axis in self.outputs.get(name, ()) if axis < value.ndim)
            return _take(value, {axis: -(-length * value.shape[axis] // size) for axis in axes})

        return {name: share(name, value) for name, value in outputs.items()}


def find_padding(
    dim: str,
    inputs: Mapping[int, Sequence[TensorSpec]],
    outputs: Mapping[int, Sequence[TensorSpec]],
    values: Mapping[str, float],
) -> Padding:
    """Finds the axes of a dimension from the inputs and outputs of a model at several sizes of it.

    Raises:
        UsageError: no input has the dimension, a size of an input only follows from it, or a padding value is for an
            input without the dimension, or does not fit the type of its input.
    """
    places: dict[str, tuple[int, ...]] = {}
    for spec, shapes in _trace_shapes(inputs):
        for axis in _find_moving(shapes):
            if any(shape[axis] != size for size, shape in shapes.items()):
                words = f"axis {axis} of input '{spec.name}' follows from '{dim}', and can be filled by no bucket"
                raise UsageError(words, hint="give it a size of its own, or build without buckets")
            places[spec.name] = (*places.get(spec.name, ()), axis)
    if not places:
        raise UsageError(f"no input has the size of '{dim}'", hint="give the name of a dimension of an input")
    for name in values:
        require_known(name, places, f"input '{name}' has no dimension '{dim}' to fill")
    kinds = {spec.name: spec.dtype for spec in next(iter(inputs.values()))}
    largest, shares = max(outputs), dict[str, tuple[int, ...]]()
    for spec, shapes in _trace_shapes(outputs):
        for axis in _find_moving(shapes):
            most = shapes[largest][axis]
            # The axis is the same fraction of the dimension at every size of it, rounded up.
            if isinstance(most, int) and all(each[axis] == -(-size * most // largest) for size, each in shapes.items()):
                shares[spec.name] = (*shares.get(spec.name, ()), axis)
    checked = {name: _check_value(name, values.get(name, 0), kinds[name]) for name in places}
    return Padding(dim=dim, inputs=places, outputs=shares, values=checked)


_Shapes = dict[int, tuple[int | str | None, ...]]


def _trace_shapes(tensors: Mapping[int, Sequence[TensorSpec]]) -> Iterator[tuple[TensorSpec, _Shapes]]:
    for specs in zip(*tensors.values(), strict=True):
        yield specs[0], dict(zip(tensors, (spec.shape or () for spec in specs), strict=True))


def _find_moving(shapes: _Shapes) -> Iterator[int]:
    """Yields the axes whose size changes with the size of the dimension."""
    for axis, sizes in enumerate(zip(*shapes.values(), strict=False)):
        if len(set(sizes)) > 1:
            yield axis


def _check_value(name: str, value: float, dtype: str) -> float:
    if dtype == "string":
        raise UsageError(f"input '{name}' is text, which no bucket can fill", hint="build without buckets")
    kind, fits = np.dtype(dtype), math.isfinite(value)
    if fits and kind.kind != "f":
        low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind.name).min, np.iinfo(kind.name).max)
        fits = value == int(value) and low <= value <= high
    if not fits:
        raise UsageError(f"input '{name}' is {dtype} and cannot be filled with {value:g}", hint="give another value")
    return float(value)


def free_axes(axes: Mapping[str, Sequence[int]], tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Returns the specs with these axes of theirs open to any size."""

    def free(spec: TensorSpec) -> TensorSpec:
        sizes = enumerate(spec.shape or ())
        shape = tuple(None if axis in axes.get(spec.name, ()) else dim for axis, dim in sizes)
        return msgspec.structs.replace(spec, shape=shape)

    return tuple(map(free, tensors))


def pad_samples(padding: Padding, samples: Samples, size: int) -> Samples:
    """Returns samples padded to a size.

    Reading them raises a DataError if one is longer than that.
    """

    def read() -> Iterator[Tensors]:
        for index, sample in enumerate(samples):
            length = padding.measure(sample)
            if not 0 < length <= size:
                where = f"sample {samples.place(index)} of '{samples.source}'"
                hint = f"add a larger bucket, or leave out the sample: --dim {padding.dim}=...,{length}"
                raise DataError(f"{where} has {length} of '{padding.dim}', the largest bucket {size}", hint=hint)
            yield padding.fill(sample, size)

    return msgspec.structs.replace(samples, read=read)


def crop_samples(padding: Padding, samples: Samples, size: int) -> Samples:
    """Returns samples that were padded to a larger size, cropped to a smaller padded size that they fit."""

    def crop(sample: Tensors) -> Tensors:
        return {name: _take(value, dict.fromkeys(padding.inputs.get(name, ()), size)) for name, value in sample.items()}

    return map_samples(samples, crop)


def cut_samples(padding: Padding, outputs: Samples, lengths: Sequence[int], size: int) -> Samples:
    """Returns the outputs of a model of one size, each cut to what belongs to a sample of its length."""

    def read() -> Iterator[Tensors]:
        yield from (padding.cut(sample, length, size) for length, sample in zip(lengths, outputs, strict=False))

    return msgspec.structs.replace(outputs, read=read)


def _take(value: Array, sizes: Mapping[int, int]) -> Array:
    for axis, size in sizes.items():
        value = value.take(range(min(size, value.shape[axis])), axis)
    return np.asarray(value, order="C")
