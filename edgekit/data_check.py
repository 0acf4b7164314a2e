"""Sample inputs judged before any work starts: what is refused, and what is only suspicious."""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from edgekit.errors import DataError
from edgekit.samples import Samples
from edgekit.tensors import Array, Tensors

FEW_SAMPLES = 32
"""With fewer samples to calibrate with, ranges and the held-out judge are coarse; about 100 are enough."""
_FAR = 100.0
_PIXELS = (0.0, 255.0)


class SampleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What all samples hold: the sha256 of their content, how many there are, and what looks wrong, a line each.

    `digests` holds the sha256 of each sample by itself.
    """

    sha256: str
    count: int
    digests: tuple[bytes, ...]
    warnings: tuple[str, ...]


def check_samples(samples: Samples) -> SampleFacts:
    """Reads every sample once, refuses NaN and infinity, and returns what was seen.

    Raises:
        DataError: a sample has a value that is not finite, does not fit, or there are fewer than were promised.
    """
    digest, contents, inputs = hashlib.sha256(), list[bytes](), dict[str, _Input]()
    for index, sample in enumerate(samples):
        for name in sorted(sample):
            _check_finite(sample[name], name, f"sample {index} of '{samples.source}'")
            inputs.setdefault(name, _Input()).add(sample[name])
        contents.append(digest_sample(sample))
        digest.update(contents[-1])
    if len(contents) != samples.count:
        raise DataError(
            f"'{samples.source}' gave {len(contents)} samples, then {samples.count}",
            hint="it must give the same at each pass",
        )
    cut = (f"{samples.batches} batches were cut into {samples.count} samples",) if samples.batches else ()
    warnings = (*cut, *_repeated(contents), *(line for name, seen in inputs.items() for line in seen.doubts(name)))
    return SampleFacts(sha256=digest.hexdigest(), count=len(contents), digests=tuple(contents), warnings=warnings)


def digest_sample(sample: Tensors) -> bytes:
    """Returns the sha256 of the content of one sample: names, types, shapes and every bit."""
    digest = hashlib.sha256()
    for name in sorted(sample):
        digest.update(_content(name, sample[name]))
    return digest.digest()


def digest_samples(samples: Samples) -> str:
    """Returns the sha256 of the content of samples: names, types, shapes and every bit, in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        for name in sorted(sample):
            digest.update(_content(name, sample[name]))
    return digest.hexdigest()


def warn_if_few(facts: SampleFacts) -> tuple[str, ...]:
    """Returns the warnings of samples to calibrate with: those they have, and one if they are few."""
    few = f"{facts.count} samples are few to calibrate with: about 100 make ranges and the judge's choice steady"
    return (few, *facts.warnings) if facts.count < FEW_SAMPLES else facts.warnings


class _Input:
    """What one input was over the samples."""

    def __init__(self) -> None:
        self._lows: list[float] = []
        self._highs: list[float] = []
        self._constant: list[int] = []
        self._whole = True

    def add(self, value: Array) -> None:
        if value.dtype.kind != "f" or not value.size:
            self._whole = False
            return
        low, high = float(value.min()), float(value.max())
        if low == high and value.size > 1:
            self._constant.append(len(self._lows))
        self._lows.append(low)
        self._highs.append(high)
        in_range = _PIXELS[0] <= low and high <= _PIXELS[1]
        self._whole = self._whole and in_range and bool((value == np.rint(value)).all())

    def doubts(self, name: str) -> Iterator[str]:
        if not self._lows:
            return
        if self._constant:
            some = _some(len(self._constant), len(self._lows))
            yield f"input '{name}' is one number throughout in {some}, first in sample {self._constant[0]}"
        if self._whole and max(self._highs) > 1:
            yield (
                f"input '{name}' holds whole numbers from {min(self._lows):g} to {max(self._highs):g}, as raw pixels"
                " do: check that this model wants them unnormalised"
            )
        reach = np.maximum(np.abs(self._lows), np.abs(self._highs))
        usual, farthest = float(np.median(reach)), int(np.argmax(reach))
        if reach[farthest] > _FAR * usual > 0:
            yield (
                f"sample {farthest} reaches {reach[farthest]:g} in input '{name}', half of them no more than {usual:g}:"
                " it stretches every range"
            )


def _repeated(contents: Sequence[bytes]) -> Iterator[str]:
    first: dict[bytes, int] = {}
    again = [(index, first[own]) for index, own in enumerate(contents) if first.setdefault(own, index) != index]
    if again:
        index, before = again[0]
        yield f"{_some(len(again), len(contents))} repeat an earlier one: sample {index} is sample {before} again"


def _some(count: int, total: int) -> str:
    return f"{count} of {total} samples"


def _check_finite(value: Array, name: str, where: str) -> None:
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        kind = "NaN" if np.isnan(value).any() else "infinity"
        raise DataError(f"{where} has {kind} in input '{name}'", hint="mend or drop the sample")


def _content(name: str, value: Array) -> bytes:
    data = repr(value.tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    return f"{name}:{value.dtype}:{value.shape};".encode() + data
