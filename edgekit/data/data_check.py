"""Checks of sample inputs before any work starts: what is refused, and what only causes a warning."""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec
import numpy as np

from edgekit.data.samples import Samples
from edgekit.errors import DataError
from edgekit.graph.graph import Graph
from edgekit.model.tensors import Array, Tensors

FEW_SAMPLES = 32
"""With fewer samples, ranges and the evaluation on held-out samples are coarse; about 100 are enough."""
ALIKE = "make both as the app does"
"""The end of a warning that the samples for calibration and verification differ, which explains a loss best."""
# Raw pixels are 255 times as large as those from 0 to 1, and raw 16-bit sound is 32768 times as large as sound from -1
# to 1.
_OUTLIER = 100.0
_PIXELS = (0.0, 255.0)
# Fractional values between 0 and 255 count as resized pixels only if they reach this; whole numbers need not.
_LEAST_PIXEL = 64.0
# The largest magnitude of 16-bit PCM.
_SOUND = 32768.0
# The correlation of neighbours among independent numbers has the standard deviation 1 / sqrt(n). One this many times
# larger is no chance (6e-7 of all sets); that of images and sound is far larger.
_CHANCE = 5.0
# The same as a probability, for two sets of samples whose values do not overlap.
_UNLIKELY = 6e-7
# Shorter rows count as features, which have no order.
_LEAST_ROW = 1000
_LEAST_SIDE = 8
# The largest difference between two channels, relative to their spread, that still counts as gray; gray images that
# were normalised in float32 stay far below it.
_GRAY = 0.02


class SampleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about all samples: the sha256 of their content, their number, and a line for each thing that looks wrong.

    `digests` holds the sha256 of each single sample, `raw_pixels` the warnings of raw pixels by the name of the input.
    `is_noise` says that an input of pictures or sound is random numbers.
    """

    sha256: str
    count: int
    digests: tuple[bytes, ...]
    warnings: tuple[str, ...]
    raw_pixels: dict[str, str] = {}
    is_noise: bool = False


def accept_pixels(facts: SampleFacts, takes_raw: Callable[[str], bool]) -> SampleFacts:
    """Returns the facts without warnings of raw pixels in inputs that take them."""
    accepted = {line for name, line in facts.raw_pixels.items() if takes_raw(name)}
    return msgspec.structs.replace(facts, warnings=tuple(each for each in facts.warnings if each not in accepted))


# To these NaN is a value that is not known (ai.onnx.ml, opset 3, and ONNX's IsNaN).
_TAKE_MISSING = frozenset({"Imputer", "IsNaN", "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})


def find_missing(graph: Graph) -> frozenset[str]:
    """Returns the inputs in which NaN stands for a missing value: trees and the like alone read them."""
    return frozenset(name for name in graph.inputs if {node.op_type for node in graph.readers(name)} <= _TAKE_MISSING)


def refusing_bad(samples: Samples, missing: Collection[str] = ()) -> Samples:
    """Returns the same samples, checked as they are read, for callers that read them once and need no facts.

    Reading raises DataError if a sample has a value that is not finite, or if there are fewer or more samples than
    promised. In the inputs `missing`, such as those of trees, NaN stands for a value that is not known.
    """

    def read() -> Iterator[Tensors]:
        count = 0
        for sample in samples:
            for name, value in sorted(sample.items(), key=lambda item: item[0]):
                if value.dtype.kind == "f" and not (np.isfinite(value) | (np.isnan(value) & (name in missing))).all():
                    kind = "NaN" if np.isnan(value).any() and name not in missing else "infinity"
                    where = f"sample {samples.place(count)} of '{samples.source}'"
                    raise DataError(f"{where} has {kind} in input '{name}'", hint="mend or drop the sample")
            yield sample
            count += 1
        if count != samples.count:
            words = f"'{samples.source}' gave {count} samples, then {samples.count}"
            raise DataError(words, hint="it must give the same at each pass")

    return msgspec.structs.replace(samples, read=read)


def check_samples(
    samples: Samples,
    *,
    computed: Collection[str] = (),
    golden: Samples | None = None,
    missing: Collection[str] = (),
) -> SampleFacts:
    """Reads every sample once, refuses NaN and infinity, and returns the facts.

    Samples are compared with each other and with what images and sound look like, and with the `golden` samples for
    verification, if these come from another source. Inputs that were `computed`, such as state, cause no warnings, nor
    do those where values may be `missing`.

    Raises:
        DataError: a sample has a value that is not finite, does not fit, or there are fewer than were promised.
    """
    digest, contents, inputs = hashlib.sha256(), list[bytes](), dict[str, _Input]()
    for sample in refusing_bad(samples, missing):
        for name in sorted(sample.keys() - {*computed, *missing}):
            inputs.setdefault(name, _Input(samples.place)).add(sample[name])
        contents.append(digest_sample(sample))
        # A digest of digests, so that the order of samples matters and no sample has to stay in memory.
        digest.update(contents[-1])
    warnings = [f"{samples.batches} batches were cut into {samples.count} samples"] if samples.batches else []
    first: dict[bytes, int] = {}
    again = [(index, first[own]) for index, own in enumerate(contents) if first.setdefault(own, index) != index]
    if again:
        index, before = map(samples.place, again[0])
        some = _some(len(again), len(contents))
        warnings.append(f"{some} repeat an earlier one: sample {index} is sample {before} again")
    warnings += [line for name, seen in inputs.items() for line in seen.doubts(name)]
    reaches = {name: reach for name, seen in inputs.items() if (reach := seen.usual_reach()) > 0}
    least, most = min(reaches, key=reaches.__getitem__, default=""), max(reaches, key=reaches.__getitem__, default="")
    # The magnitudes of two inputs differ as those of raw and normalised data do.
    if reaches and reaches[most] > _OUTLIER * reaches[least]:
        both = f"input '{most}' reaches {reaches[most]:g} and input '{least}' {reaches[least]:g}"
        warnings.append(f"{both} in half of the samples: check that both are normalised as the model wants")
    others = dict[str, _Input]()
    for sample in () if golden is None else refusing_bad(golden, missing):
        for name in inputs.keys() & sample.keys():
            others.setdefault(name, _Input(samples.place)).add(sample[name])
    warnings += [line for name in sorted(others) for line in inputs[name].differences(name, others[name])]
    return SampleFacts(
        sha256=digest.hexdigest(),
        count=len(contents),
        digests=tuple(contents),
        warnings=tuple(warnings),
        is_noise=any(each.is_noise() for each in inputs.values()),
        raw_pixels={name: line for name, seen in inputs.items() if (line := seen.pixels(name))},
    )


def digest_sample(sample: Tensors) -> bytes:
    """Returns the sha256 of the content of one sample: names, types, shapes and every bit."""
    return bytes.fromhex(digest_samples([sample]))


def digest_samples(samples: Iterable[Tensors]) -> str:
    """Returns the sha256 of the content of samples: names, types, shapes and every bit, in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        for name, value in sorted(sample.items(), key=lambda item: item[0]):
            digest.update(f"{name}:{value.dtype}:{value.shape};".encode())
            # An array of objects holds pointers, not their bytes.
            is_pointers = value.dtype.hasobject
            digest.update(repr(value.tolist()).encode() if is_pointers else np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def warn_if_few(facts: SampleFacts) -> tuple[str, ...]:
    """Returns the warnings about calibration samples: their own, and one more if they are few."""
    few = f"{facts.count} samples are few to calibrate with: about 100 make ranges and the choice of a plan steady"
    return (few, *facts.warnings) if facts.count < FEW_SAMPLES else facts.warnings


class _Input:
    """Statistics of one input over the samples, which messages name by their `place`."""

    def __init__(self, place: Callable[[int], int]) -> None:
        self._place = place
        self.measures: dict[str, list[float]] = {"smallest value": [], "largest value": [], "mean": [], "spread": []}
        self._lows, self._highs = self.measures["smallest value"], self.measures["largest value"]
        self._is_float = True
        self._constant: list[int] = []
        self._whole = True
        self._rank = self._size = 0
        self._values = 0
        # For each lag, the sums of the correlations of values with those `lag` places later in their row, and those of
        # values with those `lag` rows below.
        self._alike = {1: 0.0, 3: 0.0}
        self._below = {1: 0.0, 3: 0.0}
        # For NHWC images, the correlation at a distance of `width` values minus that at a whole row of 3 * `width`
        # values: positive if the data are NCHW.
        self._folded = 0.0
        # For each image with three channels, whether a channel differs from the first.
        self._colored: list[bool] = []

    def add(self, value: Array) -> None:
        self._is_float = self._is_float and value.dtype.kind == "f"
        # Other whole numbers are tokens, lengths and classes, whose neighbours are unrelated.
        if not value.size or not (value.dtype.kind == "f" or (value.dtype.itemsize == 1 and value.ndim == 4)):
            return
        low, high = float(value.min()), float(value.max())
        if low == high and value.size > 1:
            self._constant.append(len(self._lows))
        else:
            self._correlate(value)
        self._lows.append(low)
        self._highs.append(high)
        self.measures["mean"].append(float(value.mean(dtype=np.float64)))
        self.measures["spread"].append(float(value.std(dtype=np.float64)))
        self._rank, self._size = max(self._rank, value.ndim), max(self._size, value.size)
        self._whole = self._whole and max(-low, high) <= _SOUND and bool((value == np.rint(value)).all())

    def _correlate(self, value: Array) -> None:
        """Adds the correlation of neighbours in an image or a long row, weighted by its size."""
        is_picture = value.ndim == 4 and value.shape[1] in {1, 3} and min(value.shape[2:]) >= _LEAST_SIDE
        if not is_picture and value.ndim == 4 and value.shape[3] in {1, 3} and min(value.shape[1:3]) >= _LEAST_SIDE:
            self._fold(value)
            value, is_picture = value.transpose(0, 3, 1, 2), True
        if not is_picture and not (value.ndim in {2, 3} and value.shape[-1] >= _LEAST_ROW):
            return
        planes = value.reshape(-1, *value.shape[2:]) if is_picture else value.reshape(-1, 1, value.shape[-1])
        centred = planes - planes.mean((1, 2), keepdims=True, dtype=np.float64)
        power = float((centred * centred).sum()) / value.size
        if not np.isfinite(power) or power <= 0:
            return
        if is_picture and value.shape[1] == 3:
            spread = np.maximum(centred.std((1, 2), keepdims=True), np.finfo(np.float32).tiny)
            channels = (centred / spread).reshape(value.shape)
            self._colored.append(bool(np.abs(channels - channels[:, :1]).max() > _GRAY))
        self._values += value.size
        for lag in self._alike:
            self._alike[lag] += float((centred[..., lag:] * centred[..., :-lag]).sum()) / power
            self._below[lag] += float((centred[:, lag:] * centred[:, :-lag]).sum()) / power

    def _fold(self, value: Array) -> None:
        """Adds the evidence that the data of an NHWC image are NCHW, where a row of pixels is a third as long."""
        flat, width = value.reshape(-1).astype(np.float64), value.shape[2]
        flat -= flat.mean()
        power = float((flat * flat).sum()) / value.size
        if value.shape[3] == 3 and np.isfinite(power) and power > 0:
            near, far = (float((flat[lag:] * flat[:-lag]).sum()) for lag in (width, 3 * width))
            self._folded += (near - far) / power

    def is_noise(self) -> bool:
        """Returns True if neighbours in images or sound are no more alike than random numbers."""
        return max(abs(self._alike[1]), abs(self._below[1])) < _CHANCE * math.sqrt(self._values)

    def order(self) -> str:
        """Returns what is wrong with the order of the values in images or sound, "" if nothing is."""
        if not self._values:
            return ""
        if self.is_noise():
            return "is noise: neighbours are no more alike than random numbers, as they are in pictures and sound"
        chance = _CHANCE / self._values**0.5
        near, third = (total / self._values for total in self._alike.values())
        below, deep = (total / self._values for total in self._below.values())
        # If three channels are interleaved, every third value is more alike than the next one, and every third row,
        # since a row of pixels fills three. In print the first may be so, as strokes stand that far apart.
        if self._colored and third > near + chance and deep > below + chance:
            mistake = "as NHWC pictures do that were reshaped and not transposed to NCHW"
            return f"repeats every third value in a row, {mistake}"
        if self._folded / self._values > chance:
            return "has three rows of pixels in each, as NCHW pictures do that were reshaped and not transposed to NHWC"
        return ""

    def usual_reach(self) -> float:
        """The median over the samples of the largest magnitude; 0 if there were no floats."""
        return float(np.median(np.maximum(np.abs(self._lows), np.abs(self._highs)))) if self._lows else 0.0

    def pixels(self, name: str) -> str:
        """Returns a warning if the values look like raw pixels, else ""."""
        # A row of fewer numbers than a picture has holds features, such as counts.
        is_row = self._rank < 3 and self._size < _LEAST_SIDE**2
        if is_row or not (self._lows and self._is_float):
            return ""
        low, high = min(self._lows), max(self._highs)
        in_bytes = _PIXELS[0] <= low and high <= _PIXELS[1]
        looks = ""
        # Values up to 1 may be a mask, a one-hot code, or pixels that were scaled.
        if in_bytes and self._whole and high > 1:
            looks = f"whole numbers from {low:g} to {high:g}, as raw pixels do"
        # Interpolation makes fractional values. Only rank 4, because tables of features have such ranges too.
        elif in_bytes and self._rank == 4 and high >= _LEAST_PIXEL:
            looks = f"values from {low:g} to {high:g}, as resized pixels do"
        return looks and _doubt(name, looks)

    def raw(self) -> str:
        """Returns which other data that were not normalised, or were rounded after it, the values look like."""
        low, high = min(self._lows), max(self._highs)
        if not self._is_float:
            scaled = bool(self._colored) and 0 <= low < high <= 1
            return (
                "nothing but 0 and 1, as pixels do that were scaled before they became whole numbers" if scaled else ""
            )
        if self._whole and low < 0 and max(-low, high) > _PIXELS[1]:
            return f"whole numbers from {low:g} to {high:g}, as raw 16-bit sound does"
        return ""

    def differences(self, name: str, golden: "_Input") -> Iterator[str]:
        """Yields a warning for the first measure whose values do not overlap with those of the golden samples.

        For two sets from the same distribution that is so in only 2 of all orders of their values.
        """
        count = len(self._lows)
        if 2 * len(self.measures) / math.comb(count + len(golden.measures["mean"]), count) > _UNLIKELY:
            return
        for what, mine in self.measures.items():
            theirs = golden.measures[what]
            if max(mine) < min(theirs) or min(mine) > max(theirs):
                here = f"a {what} of {min(mine):g} to {max(mine):g} in the samples to calibrate with"
                there = f"of {min(theirs):g} to {max(theirs):g} in the golden ones"
                yield f"input '{name}' has {here} and {there}: {ALIKE}"
                return

    def doubts(self, name: str) -> Iterator[str]:
        if not self._lows:
            return
        if self._constant:
            some = _some(len(self._constant), len(self._lows))
            yield f"input '{name}' is one number throughout in {some}, first in sample {self._place(self._constant[0])}"
        if self.order():
            yield f"input '{name}' {self.order()}: ranges and plans that are made from it hold for nothing else"
        if self._colored and not any(self._colored):
            unseen = "in each of which the three channels are one: what the model makes of colors is not seen"
            yield f"input '{name}' holds gray pictures alone, {unseen}"
        if self.raw():
            yield _doubt(name, self.raw())
        if line := self.pixels(name):
            yield line
        reach = np.maximum(np.abs(self._lows), np.abs(self._highs))
        usual, farthest = float(np.median(reach)), int(np.argmax(reach))
        # Compared with the median, which the outlier itself does not move.
        if self._is_float and reach[farthest] > _OUTLIER * usual > 0:
            reached = f"sample {self._place(farthest)} reaches {reach[farthest]:g} in input '{name}'"
            yield f"{reached}, half of them no more than {usual:g}: it stretches every range"


def _doubt(name: str, looks: str) -> str:
    return f"input '{name}' holds {looks}: check that this model wants them so"


def _some(count: int, total: int) -> str:
    return f"{count} of {total} samples"
