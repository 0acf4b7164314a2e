"""A model at several sizes of one dimension: prepared for each, and where that dimension stands in it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit.data.padding import Padding, find_padding
from edgekit.errors import UsageError
from edgekit.model.model import Model
from edgekit.prepare.fix import ready_model


class BucketModels(msgspec.Struct, frozen=True, kw_only=True):
    """The prepared model of each size but the `largest`, and how samples are filled up to a size."""

    padding: Padding
    smaller: dict[int, Model]
    largest: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, the smallest first."""
        return (*self.smaller, self.largest)


def choose_dims(
    dims: Mapping[str, int], buckets: Mapping[str, Sequence[int]], values: Mapping[str, float]
) -> dict[str, int]:
    """Returns a number for each dimension that has one, or several: of those the largest.

    Raises:
        UsageError: more than one dimension has several sizes, they do not rise, one is no size, or `values` say what
            fills inputs, and there is nothing to fill.
    """
    if not buckets:
        if values:
            raise UsageError(
                f"input '{next(iter(values))}' is to be filled, and no dimension has several sizes",
                hint="give buckets: --dim NAME=64,128,256",
            )
        return dict(dims)
    if len(buckets) > 1:
        names = "' and '".join(buckets)
        raise UsageError(f"'{names}' have several sizes", hint="one dimension can: give the others one size each")
    ((name, sizes),) = buckets.items()
    told = ",".join(str(size) for size in sizes)
    if list(sizes) != sorted(set(sizes)) or len(sizes) < 2 or sizes[0] < 1:
        raise UsageError(
            f"the buckets '{name}={told}' do not rise from 1 or more",
            hint=f"each size once, the smallest first: --dim {name}={','.join(map(str, _put_in_order(sizes)))}",
        )
    if name in dims:
        raise UsageError(f"'{name}' is given both {dims[name]} and {told}", hint="leave one of them out")
    return {**dims, name: sizes[-1]}


def _put_in_order(sizes: Sequence[int]) -> list[int]:
    rising = sorted({size for size in sizes if size > 0})
    return rising if len(rising) > 1 else [64, 128, 256]


def prepare_buckets(
    source: Model,
    prepared: Model,
    dims: Mapping[str, int],
    buckets: Mapping[str, Sequence[int]],
    values: Mapping[str, float],
    work: Path,
) -> BucketModels | None:
    """Prepares a model for each bucket but the largest, which `prepared` is of; returns None where there are none.

    Raises:
        UsageError: a size contradicts the model, or the dimension cannot be filled; see `find_padding`.
        ModelError: the model is another at another size.
    """
    if not buckets:
        return None
    ((name, sizes),) = buckets.items()
    smaller = {size: ready_model(source, work / f"size-{size}", {**dims, name: size}).model for size in sizes[:-1]}
    at = {**smaller, sizes[-1]: prepared}
    padding = find_padding(
        name,
        {size: model.inputs for size, model in at.items()},
        {size: model.outputs for size, model in at.items()},
        values,
    )
    return BucketModels(padding=padding, smaller=smaller, largest=sizes[-1])
