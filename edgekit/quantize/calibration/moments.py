"""First and second moments of the inputs of layers, gathered inside ONNX Runtime and summed in numpy.

Rounding with second-order information needs nothing else from the data: E[xx'] is the Hessian of a layer's squared
output error, up to a factor (GPTQ, E. Frantar et al., arXiv:2210.17323), and bias correction multiplies by E[x]. If a
bias corrects the mean error, the covariance E[xx'] - E[x]E[x]' takes the place of E[xx'].
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgekit.model.external import ArrayFile
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.store import StoredArrays, save_arrays
from edgekit.quantize.graph.layers import Layer, PatchIndices

MOMENTS = "moments.bin"
"""The file of moments in the folder of a calibration's statistics."""
BUDGET_BYTES = 96 << 20
"""The memory for all second moments; if they need more, they are made block diagonal.

Chosen by hand: tools/bench/calibrate_ratio.py shows the memory of a calibration.
"""
# 128 channels x 3 x 3, then halves of it: a block holds whole kernels of neighbouring channels.
_BLOCK_SIZES = (1152, 576, 288, 144)
# Patches are collected until there are this many, since products of a few rows are slow. Chosen by hand.
_FLUSH_ROWS = 256
_FIELDS = ("mean", "spread", "low", "high", "covariance")
# Squares of values above 1e19 are infinite in float32; a layer that reads such values is rounded to nearest.
_QUIET = np.errstate(over="ignore", invalid="ignore")


class InputMoments(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a layer's input patches: their `count`, mean [groups, inputs] and covariance.

    `low` and `high` [2, channels] are the extremes over all positions of all samples, and of all but the sample with
    the channel's extreme. `spread` [groups, inputs] is the difference of the first ones: it reveals an input that is
    seldom nonzero, which patches may miss. `covariance` is [groups x pieces, size, size]. If there are several pieces,
    the inputs are divided into parts of `size`, and the covariance between different parts is omitted.
    """

    count: int
    mean: Array
    spread: Array
    low: Array
    high: Array
    covariance: Array

    @property
    def size(self) -> int:
        """The number of inputs in a block of the second moment."""
        return int(self.covariance.shape[-1])

    def second_moment(self, *, centred: bool = False) -> Array:
        """Returns E[xx'], or the covariance if `centred`, in float64 [groups x pieces, size, size]."""
        covariance = self.covariance.astype(np.float64)
        if centred:
            return covariance
        mean = self.mean.reshape(-1, self.size).astype(np.float64)
        squares = mean[:, :, None] * mean[:, None, :]
        return covariance + squares

    def split(self, most_bytes: int) -> Iterator[tuple[slice, "InputMoments"]]:
        """Yields the statistics of one span of inputs after another, each of as many blocks as take `most_bytes`.

        A span has at least one block. If there are several groups, all inputs are one span.
        """
        count = len(self.covariance)
        step = max(1, most_bytes // self.covariance[0].nbytes) if len(self.mean) == 1 else count
        for start in range(0, count, step):
            blocks = self.covariance[start : start + step]
            span = slice(start * self.size, (start + step) * self.size) if step < count else slice(None)
            mean, spread = self.mean[:, span], self.spread[:, span]
            yield span, msgspec.structs.replace(self, mean=mean, spread=spread, covariance=blocks)

    def energy(self) -> Array:
        """Returns E[x^2] of each input, float64 [groups, inputs]."""
        variance = np.diagonal(self.covariance, axis1=1, axis2=2).reshape(self.mean.shape)
        return variance + self.mean.astype(np.float64) ** 2


class MomentCollector:
    """Sums up the moments of one layer, sample by sample."""

    def __init__(self, layer: Layer, patches: PatchIndices, size: int, file: ArrayFile) -> None:
        self._layer, self._patches, self._size = layer, patches, size
        # Sums over thousands of patches lose digits in float32. Second moments in float64 would take twice the memory,
        # so only means, which bias correction needs precisely, are summed in float64.
        self._sum = np.zeros((layer.groups, layer.inputs))
        # The mean of the first patches is subtracted before products are summed. If an input varies little compared
        # with its mean, E[xx'] - E[x]E[x]' from float32 sums would be mostly rounding error, and seldom positive
        # definite.
        self._shift = np.zeros((layer.groups, layer.inputs), np.float32)
        # The products lie in a file: they are used only once in several samples, and take no memory in between.
        self._products = file.zeros((layer.groups * (layer.inputs // size), size, size), np.float32)
        self._file, self._pending, self._filled = file, file.zeros((0, layer.inputs * layer.groups), np.float32), 0
        self._count = np.zeros((), np.int64)

    def arrays(self) -> dict[str, Array]:
        """Returns the arrays of the sums, not copies, with pending patches added: `restore` writes into them."""
        self._flush()
        return {"count": self._count, "sum": self._sum, "shift": self._shift, "products": self._products.values}

    def add(self, values: Array) -> None:
        """Adds the patches of one sample."""
        rows = self._patches.patches(values)
        start, stop = self._filled, self._filled + len(rows)
        if stop > len(self._pending.values):
            grown = self._file.zeros((max(stop, _FLUSH_ROWS + len(rows)), rows.shape[1]), np.float32)
            grown.values[:start] = self._pending.values[:start]
            self._pending = grown
        self._pending.values[start:stop] = rows
        self._filled = stop
        if stop >= _FLUSH_ROWS:
            self._flush()
        self._pending.release(rows.nbytes)

    @_QUIET
    def freeze(self, lows: Array, highs: Array) -> InputMoments:
        """Returns the moments of all patches, given the source's extremes [2, channels], or [2, 1] for all channels."""
        self._flush()
        count, taps = max(1, int(self._count)), math.prod(self._patches.kernel)
        lows, highs = (np.broadcast_to(ends, (2, self._sum.size // taps)) for ends in (lows, highs))
        # Padding adds zeros to the values of patches.
        padded = not all(inside.all() for inside in self._patches.inside)
        spread = np.maximum(highs[0], 0) - np.minimum(lows[0], 0) if padded else highs[0] - lows[0]
        centred = self._products.values / np.float32(count)
        self._products.release()
        left = (self._sum / count - self._shift).astype(np.float32).reshape(-1, self._size)
        for place, mean in enumerate(left):
            centred[place] -= np.outer(mean, mean)
        # If an input never varies, rounding may make its variance negative.
        np.einsum("gii->gi", centred)[...] = np.maximum(np.diagonal(centred, axis1=1, axis2=2), 0)
        return InputMoments(
            count=int(self._count),
            mean=(self._sum / count).astype(np.float32),
            spread=np.repeat(spread, taps).reshape(self._sum.shape).astype(np.float32),
            low=lows.astype(np.float32),
            high=highs.astype(np.float32),
            covariance=centred,
        )

    @_QUIET
    def _flush(self) -> None:
        if not self._filled:
            return
        rows = self._pending.values[: self._filled].reshape(-1, self._layer.groups, self._layer.inputs)
        self._filled = 0
        if not self._count:
            self._shift[...] = rows.mean(axis=0, dtype=np.float64)
        self._count += len(rows)
        self._sum += rows.sum(axis=0, dtype=np.float64)
        rows = rows - self._shift
        parts = np.ascontiguousarray(rows.reshape(len(rows), -1, self._size).transpose(1, 0, 2))
        self._products.values += np.swapaxes(parts, 1, 2) @ parts
        self._products.release()
        self._pending.release()


def block_sizes(layers: Sequence[Layer]) -> dict[str, int]:
    """Returns, by node name, the block size of each layer's second moment, so that all fit into the budget."""
    sizes: dict[str, int] = {}
    for limit in _BLOCK_SIZES:
        sizes = {layer.node: _divide(layer.inputs, limit) for layer in layers}
        if sum(4 * layer.groups * layer.inputs * sizes[layer.node] for layer in layers) <= BUDGET_BYTES:
            break
    return sizes


def patches_per_sample(layer: Layer, samples: int) -> int:
    """Returns how many patches to take from each of `samples` samples: in all about four times the layer's inputs."""
    # With fewer patches than inputs E[xx'] is singular; `shrink_moment` compensates for that.
    wanted = int(np.clip(4 * layer.inputs, 1024, 4096))
    return int(np.clip(-(-wanted // max(1, samples)), 1, 64))


def save_moments(statistics: Path, moments: Iterable[tuple[Sequence[str], InputMoments]]) -> None:
    """Writes moments one by one into a folder, each with the node names of the layers that read the input."""
    places: dict[str, int] = {}
    counts: list[int] = []

    def list_arrays() -> Iterator[tuple[str, Array]]:
        for nodes, its in moments:
            places.update(dict.fromkeys(nodes, len(counts)))
            yield from ((f"{len(counts)}.{field}", getattr(its, field)) for field in _FIELDS)
            counts.append(its.count)
        yield "nodes", np.array(list(places), np.str_)
        yield "places", np.array(list(places.values()), np.int64)
        yield "counts", np.array(counts, np.int64)

    save_arrays(statistics / MOMENTS, list_arrays())


class StoredMoments:
    """The moments in a calibration's folder, read for one node at a time; threads may read side by side."""

    def __init__(self, statistics: Path) -> None:
        """Reads which nodes have moments.

        Raises:
            UsageError: they are gone.
        """
        self._arrays = arrays = StoredArrays(statistics / MOMENTS)
        self._counts = arrays["counts"]
        self._indices: dict[str, int] = dict(zip(arrays["nodes"].tolist(), arrays["places"].tolist(), strict=True))

    def __call__(self, node: str) -> InputMoments | None:
        """Returns the moments of a node, None if there are none."""
        if node not in self._indices:
            return None
        return InputMoments(count=int(self._counts[self._indices[node]]), **self._read(node, _FIELDS))

    def extremes(self, node: str) -> tuple[Array, Array] | None:
        """Returns the `low` and `high` of the input of a node, None if there are none."""
        if node not in self._indices:
            return None
        ends = self._read(node, ("low", "high"))
        return ends["low"], ends["high"]

    def _read(self, node: str, fields: Sequence[str]) -> dict[str, Array]:
        return {field: self._arrays[f"{self._indices[node]}.{field}"] for field in fields}


def _divide(inputs: int, limit: int) -> int:
    pieces = -(-inputs // limit)
    while inputs % pieces:
        pieces += 1
    return inputs // pieces
