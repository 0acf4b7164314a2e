"""Sizes of one dimension that a bundle has a model for each of, and how a sample comes into the smallest that fits."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from edgekit.data.padding import Padding
from edgekit.model.tensors import TensorSpec

_MOST_BUCKETS = 64


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A size, and the file of the model that has it."""

    size: int
    file: str


class Buckets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models of a bundle by the size of one dimension, the smallest first; the last is the bundle's own.

    `padding` says which axes have that size, and what inputs are filled with. `lengths` are those of the golden samples
    before they were filled: `golden/unpadded.npz` holds what the float model makes of them as they were.
    """

    padding: Padding
    sizes: tuple[Bucket, ...]
    lengths: tuple[int, ...]

    def choose(self, length: int) -> Bucket | None:
        """Returns the smallest bucket that takes a sample of some length, None where none does."""
        return next((bucket for bucket in self.sizes if bucket.size >= length), None)


def find_fault(
    buckets: Buckets,
    files: Sequence[str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    samples: int,
) -> str | None:
    """Returns what is wrong with buckets in a manifest, None where nothing is.

    `files` are those of the bundle's model, the one of the largest bucket first.
    """
    sizes, names, padding = (
        [each.size for each in buckets.sizes],
        [each.file for each in buckets.sizes],
        buckets.padding,
    )
    if not 0 < len(sizes) <= _MOST_BUCKETS or sizes != sorted(set(sizes)) or sizes[0] < 1:
        return "are not in order"
    if names[-1] != files[0] or len(set(names)) < len(names) or not set(names) <= set(files):
        return "name files that are not those of the model"
    if not padding.inputs or padding.values.keys() != padding.inputs.keys():
        return "do not say which inputs are filled, and with what"
    # Nothing fills text.
    numbers = [spec for spec in inputs if spec.is_tensor and spec.dtype != "string"]
    filled, cut = _find_sizes(padding.inputs, numbers), _find_sizes(padding.outputs, outputs)
    if any(size != sizes[-1] for size in filled) or any(size is None for size in cut):
        return f"fill axes that do not have the size {sizes[-1]}, or cut axes that are not there"
    if len(buckets.lengths) != samples or not all(1 <= length <= sizes[-1] for length in buckets.lengths):
        return "do not hold the lengths of the golden samples"
    return None


def _find_sizes(axes: Mapping[str, Sequence[int]], tensors: Sequence[TensorSpec]) -> Iterator[int | None]:
    """Yields the size of each axis; None for one that is not there, or of no fixed size."""
    shapes = {spec.name: spec.shape or () for spec in tensors}
    for name, places in axes.items():
        shape = shapes.get(name, ())
        for axis in places or (-1,):
            size = shape[axis] if 0 <= axis < len(shape) else None
            yield size if isinstance(size, int) else None
