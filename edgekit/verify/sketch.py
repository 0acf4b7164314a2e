"""What the layers of a bundle's model gave at the build, in a few numbers each, to tell later which one changed."""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from edgekit.bundle.expected import LAYERS
from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import Golden, read_inputs
from edgekit.errors import BundleError, EdgekitError, RuntimeRefusal
from edgekit.model import Model, load_model, read_proto
from edgekit.samples import Samples, select_samples, spread_indices
from edgekit.tensors import Array
from edgekit.verify.buckets import fill_buckets
from edgekit.verify.grids import find_grids
from edgekit.verify.match import match_tensors
from edgekit.verify.regions import find_regions
from edgekit.verify.trace import adapt_sample, open_traced

_SAMPLES = 2
_DIGITS = 6
_MOVED = 1e-5
_MORE = 100.0
"""A layer has moved by itself if its error has more than 1e-5 of its energy, and a hundred times as large a share as
that of any layer that it reads: kernels of another CPU make 1e-8 of their own, and the next layers make it larger."""
_FLIPS, _FLIP_SHARE = 3.0, 0.02
"""On a grid, so many values may move by a step, because they lay between two."""


class LayerSketch(msgspec.Struct, frozen=True, kw_only=True):
    """A layer's result in a few numbers: for each sample its energy, and what the sketch makes of it.

    The sketches are those of `fill_buckets`. `granted` is the energy that rounding may cost, `reads` the tensors that
    the layer computes from.
    """

    tensor: str
    layer: str
    op: str
    reads: tuple[str, ...]
    granted: float
    energies: tuple[float, ...]
    sketches: tuple[tuple[float, ...], ...]


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that computes otherwise than when its bundle was built; `share` is the error's part of the energy."""

    layer: str
    op: str
    share: float | None

    @property
    def words(self) -> str:
        """What happened, in a line."""
        if self.share is None:
            return (
                f"the bundle's model has no layer '{self.layer}' ({self.op}) any more: it was changed since the build"
            )
        db = -10.0 * math.log10(self.share)
        return (
            f"layer '{self.layer}' ({self.op}) gives something else than when the bundle was built ({db:.0f} dB),"
            " although what it reads is the same: its weights, scales or attributes were changed since; build again"
        )


def sketch_model(model: Model, golden: Golden) -> bytes | None:
    """Returns the sketches of a model's layers on a few golden samples, as JSON; None where it does not run here."""
    try:
        return msgspec.json.encode(sketch_layers(model, _choose_samples(golden))) + b"\n"
    except RuntimeRefusal:
        return None


def find_moved(bundle: Bundle) -> Moved | None:
    """Returns the first layer of a bundle's ONNX model that moved since the build, None if none did or nobody knows.

    Raises:
        BundleError: the sketches are malformed.
    """
    path = bundle.folder / "golden" / LAYERS
    if "onnx" not in bundle.manifest.forms or f"golden/{LAYERS}" not in bundle.manifest.files:
        return None
    try:
        then = msgspec.json.decode(path.read_bytes(), type=tuple[LayerSketch, ...])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"'{path}' is malformed: {error}", hint="build the bundle again") from error
    try:
        now = sketch_layers(load_model(bundle.find_model("onnx")), _choose_samples(bundle.golden))
    except EdgekitError:
        return None
    return find_moved_layer(then, now)


def find_moved_layer(then: Sequence[LayerSketch], now: Sequence[LayerSketch]) -> Moved | None:
    """Returns the first layer that moved by itself from one sketch of a model to another, None if none did."""
    known = {layer.tensor: layer for layer in now}
    shares = {layer.tensor: _measure(layer, known.get(layer.tensor)) for layer in then}
    return next(_list_moved(then, shares), None)


def _choose_samples(golden: Golden) -> Samples:
    return select_samples(read_inputs(golden), spread_indices(golden.samples, _SAMPLES))


def _list_moved(then: Sequence[LayerSketch], shares: Mapping[str, float | None]) -> Iterator[Moved]:
    for layer in then:
        share = shares[layer.tensor]
        before = max((shares.get(name) or 0.0 for name in layer.reads), default=0.0)
        if share is None or share > max(_MOVED, _MORE * before):
            yield Moved(layer=layer.layer, op=layer.op, share=share)


def _measure(then: LayerSketch, now: LayerSketch | None) -> float | None:
    """Returns the largest share of a sample's energy that a layer moved by, beyond what is granted; None if gone."""
    if now is None or len(now.sketches) != len(then.sketches):
        return None
    shares = [0.0]
    for energy, first, second in zip(then.energies, then.sketches, now.sketches, strict=True):
        moved = sum((one - other) ** 2 for one, other in zip(first, second, strict=False))
        shares.append(max(0.0, moved - then.granted) / max(energy, then.granted, 1e-30))
    return max(shares)


def sketch_layers(model: Model, samples: Samples) -> tuple[LayerSketch, ...]:
    """Returns the sketches of what the layers of a model give, in the order of computation.

    Raises:
        RuntimeRefusal: ONNX Runtime cannot run the model.
    """
    graph = read_proto(model, weights=False).graph
    matched = match_tensors(graph, graph)
    grids, session = find_grids(model), open_traced(model, [item.in_b for item in matched])
    regions = find_regions(graph, graph, matched)
    energies: dict[str, list[float]] = {}
    sketches: dict[str, list[tuple[float, ...]]] = {}
    sizes: dict[str, int] = {}
    for sample in samples:
        values = session.run(adapt_sample(sample, model))
        for item in matched:
            value = values[item.in_b]
            if value.dtype.kind == "f" and value.size:
                energy, buckets = _add_up(value)
                energies.setdefault(item.tensor, []).append(energy)
                sketches.setdefault(item.tensor, []).append(buckets)
                sizes[item.tensor] = value.size
    steps = {item.tensor: grid.scale for item in matched if (grid := grids.get(item.raw_b)) is not None}
    return tuple(
        LayerSketch(
            tensor=item.tensor,
            layer=item.layer,
            op=item.op,
            reads=regions[item.tensor].reads,
            granted=_round(steps.get(item.tensor, 0.0) ** 2 * max(_FLIPS, _FLIP_SHARE * sizes[item.tensor])),
            energies=tuple(energies[item.tensor]),
            sketches=tuple(sketches[item.tensor]),
        )
        for item in matched
        if item.tensor in sketches
    )


def _add_up(value: Array) -> tuple[float, tuple[float, ...]]:
    flat = np.nan_to_num(value.astype(np.float64).reshape(-1), nan=0.0, posinf=0.0, neginf=0.0).clip(-1e15, 1e15)
    return _round(float(np.vdot(flat, flat))), tuple(_round(float(bucket)) for bucket in fill_buckets(value))


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
