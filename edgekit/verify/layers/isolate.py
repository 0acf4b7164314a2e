"""Feeding each layer of model B with what it would read if all before it were right, and what model A makes of that."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from edgekit._ort import CpuSession
from edgekit.model.model import Model
from edgekit.model.scaling import scale_channels
from edgekit.model.tensors import Array, Tensors
from edgekit.verify.matching.grids import Grid
from edgekit.verify.matching.match import MatchedTensor
from edgekit.verify.matching.regions import Region
from edgekit.verify.matching.trace import ISOLATED_PREFIX, adapt_sample, open_isolated


class IsolatedLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Both models with every matched tensor as an input; that of A is only opened where it is needed."""

    models: tuple[Model, Model]
    matched: Sequence[MatchedTensor]
    grids: Mapping[str, Grid | None]
    scaling: Mapping[str, Array]
    of_a: CpuSession | None
    of_b: CpuSession

    def scale(self, values: Tensors, sign: int = 1) -> dict[str, Array]:
        """Returns A's tensors by their names, with the channels scaled as B's are, or with -1 back again."""
        factors = {item.in_a: self.scaling[item.raw_b] ** sign for item in self.matched if item.raw_b in self.scaling}
        return {name: scale_channels(value, factors[name]) if name in factors else value
                for name, value in values.items()}  # fmt: skip

    def run(self, sample: Tensors, wanted: Tensors, found: Tensors) -> tuple[Tensors, Tensors]:
        """Returns what A's layers and B's make of A's values, scaled as in B; `wanted` are these, `found` B's.

        Where B rounds tensors inside a layer that A does not have, both are given values rounded to B's grid: that
        rounding is not the layer's.
        """
        values = {item.tensor: wanted[item.in_a] for item in self.matched}
        reference = wanted
        if self.of_a is not None:
            values = {item.tensor: self._round(item, values[item.tensor]) for item in self.matched}
            plain = self.scale({item.in_a: values[item.tensor] for item in self.matched}, -1)
            feed = {
                ISOLATED_PREFIX + item.tensor: plain[item.in_a].astype(wanted[item.in_a].dtype) for item in self.matched
            }
            reference = self.scale(self.of_a.run({**adapt_sample(sample, self.models[0]), **feed}))
        feed = {ISOLATED_PREFIX + item.tensor: _cast(values[item.tensor], found[item.in_b]) for item in self.matched}
        return reference, self.of_b.run({**adapt_sample(sample, self.models[1]), **feed})

    def _round(self, item: MatchedTensor, value: Array) -> Array:
        grid = self.grids.get(item.raw_b)
        return value if grid is None else grid.round_values(value).astype(value.dtype)


def isolate_layers(
    models: tuple[Model, Model],
    matched: Sequence[MatchedTensor],
    values: tuple[Tensors, Tensors],
    regions: Mapping[str, Region],
    told: tuple[Mapping[str, Grid | None], Mapping[str, Array]],
) -> IsolatedLayers:
    """Returns the isolated of two models; `values` are one sample's, for their types, `told` B's grids and scaling."""
    of_a = None
    if any(region.roundings for region in regions.values()):
        mirrored = [
            msgspec.structs.replace(item, raw_b=item.tensor, in_b=item.in_a, copies_in_b=frozenset({item.in_a}))
            for item in matched
        ]
        of_a = open_isolated(models[0], mirrored, {item.tensor: values[0][item.in_a].dtype for item in matched})
    of_b = open_isolated(models[1], matched, {item.tensor: values[1][item.in_b].dtype for item in matched})
    return IsolatedLayers(models=models, matched=matched, grids=told[0], scaling=told[1], of_a=of_a, of_b=of_b)


def _cast(wanted: Array, found: Array) -> Array:
    with np.errstate(over="ignore"):
        return wanted.astype(found.dtype)
