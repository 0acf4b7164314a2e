"""Taking the float reference and the self-test of an earlier build over, to make the same bytes on another kind of CPU.

Kernels for other CPUs add in other orders, so a float model's outputs differ in their last bits from machine to
machine. They are measurements: a build that repeats another takes them over as they were recorded, once checked.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgekit._files import digest_file, replacing_file
from edgekit.bundle.golden.expected import EXPECTED
from edgekit.bundle.golden.golden import INPUTS, OUTPUTS, Golden, read_outputs
from edgekit.bundle.manifest.manifest import UNPADDED, GoldenFacts, Manifest
from edgekit.data.samples import load_samples
from edgekit.errors import DataError, UsageError
from edgekit.model.tensors import Array
from edgekit.target import Form

LIMIT = 1e-3
"""How far a recorded output may lie from what this machine computes, as a share of the largest number in it."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of an earlier build: its folder, opened and checked, and its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def golden(self) -> Path:
        """The folder of its golden samples."""
        return self.folder / "golden"


def adopt_reference(golden: Golden, recorded: Recorded) -> None:
    """Puts the recorded outputs of the float model in the place of those that this machine computed.

    Raises:
        UsageError: the bundle was made with other samples, or its outputs are not those of this model.
        DataError: the recorded outputs cannot be read.
    """
    # Inputs are data, not measurements: they must be the same to the byte.
    entry = recorded.manifest.files.get(f"golden/{INPUTS}")
    if entry is None or entry.sha256 != digest_file(golden.folder / INPUTS):
        raise UsageError(
            f"'{recorded.folder}' was made with other golden samples", hint="give the data it was made with"
        )
    _adopt_outputs(golden, recorded, recorded.golden / OUTPUTS)


def adopt_unpadded(golden: Golden, recorded: Recorded) -> None:
    """Does the same for the golden samples at their own sizes, once `adopt_reference` has held their inputs together.

    Raises:
        UsageError: the recorded outputs are not those of this model.
        DataError: they cannot be read.
    """
    _adopt_outputs(golden, recorded, recorded.folder / UNPADDED)


def _adopt_outputs(golden: Golden, recorded: Recorded, file: Path) -> None:
    theirs = load_samples(str(file), golden.outputs)
    for index, (own, other) in enumerate(zip(read_outputs(golden), theirs, strict=True)):
        for name, value in own.items():
            if not _is_near(value, other.get(name)):
                raise UsageError(
                    f"output '{name}' of golden sample {index} in '{recorded.folder}' is not what the model gives here",
                    hint="build without --golden",
                )
    _copy(file, golden.folder / OUTPUTS)


def adopt_expected(recorded: Recorded, models: Mapping[Form, Sequence[Path]], out: Path) -> GoldenFacts | None:
    """Copies the recorded self-test into the folder `out` and returns its facts, if it is of exactly these model files.

    Raises:
        DataError: the recorded bundle lacks the file.
    """
    known = {name: entry.sha256 for name, entry in recorded.manifest.files.items()}
    is_same = all(known.get(path.name) == digest_file(path) for paths in models.values() for path in paths)
    if not is_same or not recorded.manifest.golden.chosen:
        return None
    _copy(recorded.golden / EXPECTED, out / EXPECTED)
    return recorded.manifest.golden


def _is_near(own: Array, theirs: Array | None) -> bool:
    if theirs is None or own.shape != theirs.shape or own.dtype != theirs.dtype:
        return False
    if own.dtype.kind != "f":
        return bool(np.array_equal(own, theirs))
    # Against the largest number: near zero a relative tolerance would refuse differences in the last bits.
    reach = float(np.max(np.abs(own), initial=0.0))
    return bool(np.allclose(own, theirs, rtol=0.0, atol=LIMIT * reach, equal_nan=True))


def _copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise DataError(f"there is no '{source}'", hint="build without --golden")
    with replacing_file(target) as temporary:
        shutil.copyfile(source, temporary)
