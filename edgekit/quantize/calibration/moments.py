"""First and second moments of what layers multiply, gathered inside ONNX Runtime and summed in numpy.

They are what rounding with second-order information needs of the data: E[xx'] is the Hessian of a layer's squared
output error, up to a factor (GPTQ, E. Frantar et al., arXiv:2210.17323), and E[x] what bias correction multiplies.
Where a bias takes the mean error, the covariance E[xx'] - E[x]E[x]' counts instead.
"""

import contextlib
import math
import zipfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgekit.errors import UsageError
from edgekit.model.tensors import HEADERS, Array
from edgekit.quantize.calibration.store import ArrayFile
from edgekit.quantize.graph.layers import Layer, PatchIndices, expand_channel_factors

BUDGET_BYTES = 96 << 20
"""What all second moments may take; above it they become block diagonal. Chosen by hand: tools/bench/calibrate_ratio.py
shows the memory of a calibration."""
# From 128 channels x 3 x 3 down by halves: a block then holds whole kernels of channels that lie side by side.
_BLOCK_SIZES = (1152, 576, 288, 144)
# Patches wait until there are so many: products of a few rows are slow. Chosen by hand.
_FLUSH_ROWS = 256
_FIELDS = ("mean", "spread", "low", "high", "covariance")


class InputMoments(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a layer's input patches: `count` of them, mean [groups, inputs], covariance in diagonal blocks.

    `spread` [groups, inputs] is the highest less the lowest value of each input over every place of every sample, not
    only over the patches: an input that seldom fires shows there. `low` and `high` [channels] are these values.
    `covariance` has shape [groups x pieces, size, size]; where there is more than one piece, the inputs are cut into
    as many parts of `size` and what one part has to do with another is left out.
    """

    count: int
    mean: Array
    spread: Array
    low: Array
    high: Array
    covariance: Array

    @property
    def size(self) -> int:
        """How many inputs a block of the second moment has."""
        return int(self.covariance.shape[-1])

    def second_moment(self, *, centred: bool = False) -> Array:
        """Returns E[xx'], or the covariance where it is to be `centred`, in float64 [groups x pieces, size, size]."""
        covariance = self.covariance.astype(np.float64)
        if centred:
            return covariance
        mean = self.mean.reshape(-1, self.size).astype(np.float64)
        return covariance + mean[:, :, None] * mean[:, None, :]

    def energy(self) -> Array:
        """Returns E[x^2] of each input, float64 [groups, inputs]."""
        variance = np.diagonal(self.covariance, axis1=1, axis2=2).reshape(self.mean.shape)
        return variance + self.mean.astype(np.float64) ** 2


class MomentCollector:
    """Sums up the moments of one layer, a sample at a time."""

    def __init__(self, layer: Layer, patches: PatchIndices, size: int, file: ArrayFile) -> None:
        self._layer, self._patches, self._size = layer, patches, size
        # Sums over thousands of patches lose digits in float32, but second moments in float64 would take twice the
        # memory: only means, which bias correction subtracts, are summed in it.
        self._sum = np.zeros((layer.groups, layer.inputs))
        # Products are those of what is left beside the mean of the first patches: E[xx'] - E[x]E[x]' in float32 would
        # be all rounding, and seldom positive definite, where an input hardly varies beside its mean.
        self._shift = np.zeros((layer.groups, layer.inputs), np.float32)
        # They are touched once in some samples: meanwhile no memory is held for them.
        self._products = file.zeros((layer.groups * (layer.inputs // size), size, size), np.float32)
        self._file, self._pending, self._filled = file, file.zeros((0, layer.inputs * layer.groups), np.float32), 0
        self._count = np.zeros((), np.int64)

    def arrays(self) -> dict[str, Array]:
        """Returns the sums themselves, settled: what is written into them is gone on from."""
        self._flush()
        return {"count": self._count, "sum": self._sum, "shift": self._shift, "products": self._products.values}

    def add(self, values: Array) -> None:
        """Takes in what was gathered from one sample."""
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
        self._pending.rest()

    def freeze(self, lows: Array, highs: Array) -> InputMoments:
        """Returns the moments of everything added, given the extremes of the source: one a channel, or one for all."""
        self._flush()
        count, taps = max(1, int(self._count)), math.prod(self._patches.kernel)
        lows, highs = (np.broadcast_to(ends, self._sum.size // taps) for ends in (lows, highs))
        # Padding puts zeros beside what was seen.
        padded = not all(inside.all() for inside in self._patches.inside)
        spread = np.maximum(highs, 0) - np.minimum(lows, 0) if padded else highs - lows
        return InputMoments(
            count=int(self._count),
            mean=(self._sum / count).astype(np.float32),
            spread=np.repeat(spread, taps).reshape(self._sum.shape).astype(np.float32),
            low=lows.astype(np.float32),
            high=highs.astype(np.float32),
            covariance=self._centre_products(count),
        )

    def _centre_products(self, count: int) -> Array:
        centred = self._products.values / np.float32(count)
        self._products.rest()
        left = (self._sum / count - self._shift).astype(np.float32).reshape(-1, self._size)
        for place, mean in enumerate(left):
            centred[place] -= np.outer(mean, mean)
        # Rounding may still leave less than nothing where an input never varies.
        np.einsum("gii->gi", centred)[...] = np.maximum(np.diagonal(centred, axis1=1, axis2=2), 0)
        return centred

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
        self._products.rest()


def scale_moments(moments: InputMoments, layer: Layer, factors: Array) -> InputMoments:
    """Returns the moments of a layer's input once its channels are multiplied by factors."""
    scale = expand_channel_factors(layer, factors)[:, 0].astype(np.float32)
    pieces = scale.reshape(-1, moments.size)
    return msgspec.structs.replace(
        moments,
        mean=moments.mean * scale,
        spread=moments.spread * scale,
        low=moments.low * factors.astype(np.float32),
        high=moments.high * factors.astype(np.float32),
        covariance=moments.covariance * pieces[:, :, None] * pieces[:, None, :],
    )


def block_sizes(layers: Sequence[Layer]) -> dict[str, int]:
    """Returns for each layer (by its node) how many inputs a block of its second moment has, within the budget."""
    sizes: dict[str, int] = {}
    for limit in _BLOCK_SIZES:
        sizes = {layer.node: _divide(layer.inputs, limit) for layer in layers}
        if sum(4 * layer.groups * layer.inputs * sizes[layer.node] for layer in layers) <= BUDGET_BYTES:
            break
    return sizes


def patches_per_sample(layer: Layer, samples: int) -> int:
    """Returns how many patches a sample should give: in all about four times as many as the layer has inputs."""
    # Fewer than there are inputs leave E[xx'] singular; rounding shrinks it for what is missing (`shrink_moment`).
    wanted = int(np.clip(4 * layer.inputs, 1024, 4096))
    return int(np.clip(-(-wanted // max(1, samples)), 1, 64))


def save_moments(path: Path, moments: Iterable[tuple[Sequence[str], InputMoments]]) -> None:
    """Writes moments, each with the nodes of the layers that it is of, one by one to an .npz file."""
    places: dict[str, int] = {}
    counts: list[int] = []
    with zipfile.ZipFile(path, "w") as archive:

        def write(name: str, array: Array) -> None:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)

        for nodes, its in moments:
            places |= dict.fromkeys(nodes, len(counts))
            for field in _FIELDS:
                write(f"{len(counts)}.{field}", getattr(its, field))
            counts.append(its.count)
        write("nodes", np.array(list(places), np.str_))
        write("places", np.array(list(places.values()), np.int64))
        write("counts", np.array(counts, np.int64))


class StoredMoments:
    """The moments in an open file, read node by node; threads may read side by side."""

    def __init__(self, archive: Mapping[str, Array]) -> None:
        with HEADERS:
            self._archive, self._counts = archive, archive["counts"]
            nodes, places = (archive[name].tolist() for name in ("nodes", "places"))
            self._indices: dict[str, int] = dict(zip(nodes, places, strict=True))

    def __call__(self, node: str) -> InputMoments | None:
        """Returns the moments of a node, None if there are none."""
        if node not in self._indices:
            return None
        return InputMoments(count=int(self._counts[self._indices[node]]), **self._read(node, _FIELDS))

    def extremes(self, node: str) -> tuple[Array, Array] | None:
        """Returns the lowest and highest value of each channel of a node's input, None if there are none."""
        if node not in self._indices:
            return None
        ends = self._read(node, ("low", "high"))
        return ends["low"], ends["high"]

    def _read(self, node: str, fields: Sequence[str]) -> dict[str, Array]:
        with HEADERS:
            return {field: self._archive[f"{self._indices[node]}.{field}"] for field in fields}


@contextlib.contextmanager
def open_moments(path: Path) -> Generator[StoredMoments]:
    """Yields the moments in a file that `save_moments` wrote.

    Raises:
        UsageError: the file is gone.
    """
    try:
        archive = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise UsageError(f"the statistics of the calibration, '{path}', are gone", hint="calibrate again") from error
    with archive:
        yield StoredMoments(archive)


def _divide(inputs: int, limit: int) -> int:
    pieces = -(-inputs // limit)
    while inputs % pieces:
        pieces += 1
    return inputs // pieces
