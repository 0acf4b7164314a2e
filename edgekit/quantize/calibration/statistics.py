"""Statistics of activations over samples: extremes, histograms and moments, in constant memory."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from edgekit.graph.graph import Graph
from edgekit.model.external import ArrayFile
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.calibration.augment import HIGHS, LOWS, PATCHES, SCORES, AugmentedGraph, TensorAxis, pick_outputs
from edgekit.quantize.calibration.moments import InputMoments, MomentCollector, block_sizes
from edgekit.quantize.graph.float_graph import SCORE_MARGIN
from edgekit.quantize.ranges import Histogram, HistogramCollector, TensorRange

SUMMED_SAMPLES = 8
"""Picked values of this many samples are counted at once, so that the cost of each numpy call is small: a choice."""

# So many extremes tell the tail of a tensor: a choice. With more, a tail that is bounded, as that of uniform numbers,
# seems longer than it is; with fewer the mean excess varies more from calibration to calibration.
_TAIL = 3
# New samples, as many as were seen, lose twice the squared mean excess beyond the highest value that was seen. So do
# the seen ones if they are cut this many mean excesses below it, by exponential spacings: 2 (e^c - c - 1) = 2.
_CUT = 1.1462


class ActivationStatistics:
    """Accumulates the outputs of an augmented graph, sample by sample; large sums lie in a file in `work`."""

    def __init__(self, augmented: AugmentedGraph, work: Path) -> None:
        self._augmented = augmented
        self._lows, self._highs = _Extremes(augmented.lows, np.minimum), _Extremes(augmented.highs, np.maximum)
        self._scores = _Extremes(tuple(((each.tensor, None), 1) for each in augmented.scores), np.minimum)
        self._extremes = {LOWS: self._lows, HIGHS: self._highs, SCORES: self._scores}
        file = ArrayFile(work / "sums.data")
        self._collectors = [HistogramCollector() for _ in augmented.picks]
        self._pick_outputs = tuple(pick_outputs(len(augmented.picks)))
        self._ends = np.cumsum([0, *(count for _, count in augmented.picks)])
        self._picked = file.zeros((SUMMED_SAMPLES, int(self._ends[-1])), np.float32)
        self._pending = 0
        self._layers = [layers for layers, _ in augmented.patches]
        sizes = block_sizes([layer for layers in self._layers for layer in layers])
        patches = ((layers[0], its) for layers, its in augmented.patches)
        self._moments = [MomentCollector(layer, its, sizes[layer.node], file) for layer, its in patches]

    def fits(self, values: Tensors) -> bool:
        """Returns False if a tensor has more or fewer channels than the graph says."""
        return all(values[name].size == ends.size for name, ends in self._extremes.items() if name in values)

    def add(self, values: Tensors, *, learn: bool, sequence: int) -> None:
        """Adds the outputs for one sample of a sequence; moments only of a sample that rounding may `learn` from."""
        for name, ends in self._extremes.items():
            ends.add(values.get(name), sequence)
        picked = {output: part for output, part in self._pick_outputs if output in values}
        for output, part in picked.items():
            self._picked.values[self._pending, self._ends[part.start] : self._ends[part.stop]] = values[output]
            self._picked.release(values[output].nbytes)
        self._pending += bool(picked)
        if self._pending == SUMMED_SAMPLES:
            self._flush()
        for (layer, *_), moments in zip(self._layers, self._moments, strict=True):
            if learn and PATCHES + layer.node in values:
                moments.add(values[PATCHES + layer.node])

    def arrays(self) -> dict[str, Array]:
        """Returns the arrays of the extremes, the histograms and the moments, with pending values added.

        A sum of floats depends on where it is split: a resumed calibration must do this after the same samples as an
        uninterrupted one, so that both end with the same bits.
        """
        self._flush()
        sums: dict[str, _Extremes | HistogramCollector | MomentCollector] = {**self._extremes}
        sums |= {f"histogram.{index}": each for index, each in enumerate(self._collectors)}
        sums |= {f"moment.{index}": each for index, each in enumerate(self._moments)}
        return {f"{kind}.{name}": array for kind, each in sums.items() for name, array in each.arrays().items()}

    def restore(self, arrays: Tensors) -> bool:
        """Continues from what `arrays` returned; returns False if one does not fit, which makes these unusable."""
        own = self.arrays()
        if own.keys() != arrays.keys():
            return False
        for name, array in arrays.items():
            fits = (own[name].dtype, own[name].shape) == (array.dtype, array.shape)
            # Integers are counts.
            if not fits or np.isnan(array).any() or (array.dtype.kind == "i" and array.min(initial=0) < 0):
                return False
            own[name][...] = array
        return True

    def exact_ranges(self) -> dict[str, TensorRange]:
        """Returns the lowest and highest value of each tensor over all samples, except tensors that were ever empty."""
        empty = self._lows.sometimes_empty() | self._highs.sometimes_empty()
        return {
            name: TensorRange(low=float(low.min()), high=float(high.max()))
            for (name, _), (low, high) in self._channel_extremes().items()
            if name not in empty
        }

    def masked(self) -> dict[str, TensorRange]:
        """Returns the ranges of the unmasked values, for tensors before a Softmax that hold masked values."""
        exact = self.exact_ranges()
        lowest = {name: float(values[0]) for (name, _), values in self._scores.entries().items() if name in exact}
        counting = dict[str, TensorRange]()
        for name, low in lowest.items():
            whole, high = exact[name].low, exact[name].high
            # The lowest values are a mask: their gap to those that matter exceeds the range of the latter.
            if np.isfinite(low) and whole < low - (max(high, 0.0) - min(low, 0.0)):
                counting[name] = TensorRange(low=low, high=max(high, low))
        seen = exact | counting
        reach = dict[str, float]()
        for each in self._augmented.scores:
            spans = [seen[name] for name in each.added if name in seen]
            reach[each.tensor] = sum(span.high - span.low for span in spans) + SCORE_MARGIN
        return {
            name: msgspec.structs.replace(span, low=max(exact[name].low, min(span.low, span.high - reach[name])))
            for name, span in counting.items()
        }

    def mean_ranges(self) -> dict[str, TensorRange]:
        """Returns the mean over the samples of each tensor's lowest and highest value; ends that are known stay."""
        lows, highs = self._lows.means(), self._highs.means()
        return {
            name: TensorRange(low=lows.get(name, span.low), high=highs.get(name, span.high))
            for name, span in self.exact_ranges().items()
        }

    def unseen_shares(self) -> dict[str, tuple[float, float]]:
        """Returns the shares of a tensor's lowest and highest value at which its samples lose what new ones will."""
        lows, highs = self._lows.unseen_shares(), self._highs.unseen_shares()
        return {name: (lows.get(name, 1.0), highs.get(name, 1.0)) for name in lows.keys() | highs.keys()}

    def factor_ranges(self, graph: Graph) -> dict[str, TensorRange]:
        """Returns the ranges of constants that multiply channels, some of them zero in all samples, by the other ones.

        A layer of Keras that normalizes its inputs divides one that never varied by 1e-7. In the steps of a range up to
        1e7 all other numbers would be zero; what they multiply by a number cut to their range is zero all the same.
        """
        extremes, found = self._channel_extremes(), dict[str, TensorRange]()
        for name, tensor in self._augmented.factors.items():
            live, numbers = np.any(extremes[tensor], axis=0), graph.weight(name).reshape(-1)
            # Ends that the operator tells, as those of a Sigmoid, are one for all channels.
            kept = numbers if live.all() else numbers[live]
            if kept.size and np.abs(kept).max() < np.abs(numbers).max():
                found[name] = TensorRange(low=float(kept.min()), high=float(kept.max()))
        return found

    def histograms(self) -> dict[str, Histogram]:
        """Returns the histogram of each tensor that values were picked from."""
        self._flush()
        named = zip(self._augmented.picks, self._collectors, strict=True)
        return {name: collector.freeze() for (name, _), collector in named}

    def moments(self) -> Iterator[tuple[tuple[str, ...], InputMoments]]:
        """Yields the moments of layer inputs, each with the node names of the layers that read it."""
        first, second = self._channel_extremes(), self._channel_extremes(second=True)
        axes = self._augmented.channel_axes
        for layers, moments in zip(self._layers, self._moments, strict=True):
            at = layers[0].source, axes[layers[0].node]
            lows, highs = (np.stack(ends) for ends in zip(first[at], second[at], strict=True))
            yield tuple(layer.node for layer in layers), moments.freeze(lows, highs)

    def _channel_extremes(self, *, second: bool = False) -> dict[TensorAxis, tuple[Array, Array]]:
        """Returns the lowest and highest value of each channel, for each channel axis that a layer uses.

        With `second` they are those of all samples but the one with the channel's extreme.
        """
        lows, highs = self._lows.entries(second=second), self._highs.entries(second=second)
        found: dict[TensorAxis, tuple[Array, Array]] = {}
        for each in self._augmented.extremes:
            low, high = self._augmented.bounds.get(each[0], (None, None))
            ends = (lows[each] if low is None else [low], highs[each] if high is None else [high])
            one, two = np.broadcast_arrays(*(_or_zero(np.asarray(end)) for end in ends))
            found[each] = (one, two)
        return found

    def _flush(self) -> None:
        if not self._pending:
            return
        for collector, (start, stop) in zip(self._collectors, pairwise(self._ends), strict=True):
            values = np.ascontiguousarray(self._picked.values[: self._pending, start:stop])
            collector.add(values)
            self._picked.release(values.nbytes)
        self._pending = 0


class _Extremes:
    """The lowest (or highest) value of each entry over samples and the second, those of each tensor, and their sum.

    Of a tensor the extremes of four sequences are kept, one each: the steps of a sequence are alike. An empty tensor
    has infinite extremes, which do not count.
    """

    def __init__(self, parts: Sequence[tuple[TensorAxis, int]], pick: np.ufunc) -> None:
        self._keys = [key for key, _ in parts]
        self._starts = np.cumsum([0, *(count for _, count in parts)])
        self._pick, self._runs, self._counts = pick, np.zeros((), np.int64), np.zeros(len(parts), np.int64)
        self._worst = np.inf if pick is np.minimum else -np.inf
        self._best = np.full(self._starts[-1], self._worst)
        self._second, self._drop = self._best.copy(), np.maximum if pick is np.minimum else np.minimum
        self._sums = np.zeros(len(parts))
        self._tops = np.tile(self._best[self._starts[:-1]], (_TAIL + 1, 1))
        # Of each of these, the number of its sequence, from 1 on.
        self._sequences = np.zeros(self._tops.shape, np.int64)

    @property
    def size(self) -> int:
        """The number of entries of all tensors."""
        return len(self._best)

    def add(self, values: Array | None, sequence: int) -> None:
        if values is not None:
            own = self._pick.reduceat(values, self._starts[:-1])
            self._rank(own, sequence + 1)
            self._pick(self._second, self._drop(self._best, values), out=self._second)
            self._pick(self._best, values, out=self._best)
            self._runs += 1
            self._counts += np.isfinite(own)
            self._sums += _or_zero(own)

    def _rank(self, own: Array, sequence: int) -> None:
        is_known = self._sequences == sequence
        tops = np.where(is_known, self._pick(own, self._tops), self._tops)
        last = np.where(is_known.any(axis=0), self._worst, own)
        tops, sequences = np.vstack([tops, last]), np.vstack([self._sequences, np.full(len(last), sequence)])
        order = np.argsort(tops if self._pick is np.minimum else -tops, axis=0, kind="stable")[:-1]
        self._tops[...] = np.take_along_axis(tops, order, axis=0)
        self._sequences[...] = np.take_along_axis(sequences, order, axis=0)

    def arrays(self) -> dict[str, Array]:
        best = {"best": self._best, "second": self._second, "tops": self._tops}
        return {"runs": self._runs, "counts": self._counts, "sums": self._sums, "sequences": self._sequences, **best}

    def entries(self, *, second: bool = False) -> dict[TensorAxis, Array]:
        values = self._second if second else self._best
        return dict(zip(self._keys, np.split(values, self._starts[1:-1]), strict=True)) if self._keys else {}

    def sometimes_empty(self) -> set[str]:
        return {name for (name, _), count in zip(self._keys, self._counts, strict=True) if count < self._runs}

    def unseen_shares(self) -> dict[str, float]:
        """Returns the share of each tensor's extreme at which its samples lose what new ones lose beyond the extreme.

        Few values are beyond a high threshold, and their excess is about exponential (Pickands, 1975): its mean is that
        of the three largest over the fourth. A largest value that stands alone tells more than its tail: there, as much
        is cut as it is above the second. What is found twice is a bound that new samples keep.
        """
        kept = np.isfinite(self._tops)
        tops, count = np.where(kept, self._tops, 0.0), np.maximum(kept.sum(axis=0) - 1, 0)
        threshold = np.take_along_axis(tops, count[None], axis=0)[0]
        excess = np.where(kept, tops - threshold, 0.0).sum(axis=0) / np.maximum(count, 1)
        step = tops[0] - np.where(kept[1], tops[1], tops[0])
        cut = tops[0] - np.where(step == 0, 0.0, self._pick(step, _CUT * excess))
        shares = np.divide(cut, tops[0], out=np.ones_like(cut), where=tops[0] != 0)
        return {name: float(share) for (name, _), share in zip(self._keys, np.clip(shares, 0, 1), strict=True)}

    def means(self) -> dict[str, float]:
        """Returns the mean extreme of each tensor, for those that were never empty."""
        return {name: float(total / self._runs) for (name, _), total in zip(self._keys, self._sums, strict=True)}


def _or_zero(values: Array) -> Array:
    """Returns extremes with 0 for tensors that have no values."""
    return np.where(np.isfinite(values), values, 0.0)
