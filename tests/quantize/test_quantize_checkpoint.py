"""Checkpoints come back as they were written, and whatever else is in such a file is refused."""

import contextlib
import hashlib
from pathlib import Path

import numpy as np

from edgekit.errors import DataError
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.store import Checkpoint, read_checkpoint, write_checkpoint

ARRAYS: dict[str, Array] = {
    "floats": np.arange(12, dtype=np.float32).reshape(3, 4),
    "count": np.array(5, np.int64),
    "none": np.zeros((0, 7)),
    "flags": np.array([True, False]),
    "half": np.ones((2, 3, 1), np.float16)[:, ::-1],
    "big endian": np.arange(3, dtype=">i4").astype("<i4"),
}


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    seen = {7: b"a" * 32, 0: b"b" * 32}
    write_checkpoint(tmp_path / "c", "key", Checkpoint(seen=seen, arrays=ARRAYS))
    found = read_checkpoint(tmp_path / "c", "key", 1 << 20)
    assert found is not None
    assert list(found.seen.items()) == list(seen.items())
    assert list(found.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found.arrays[name], array)
    assert read_checkpoint(tmp_path / "absent", "key", 1 << 20) is None


def test_bytes_changed_and_signed_again_are_refused_or_read_but_never_crash(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", "key", Checkpoint(seen={0: b"a" * 32}, arrays=ARRAYS))
    good, random = (tmp_path / "c").read_bytes()[:-32], np.random.default_rng(0)
    for _ in range(500):
        bad = bytearray(good)
        for at in random.integers(0, min(len(bad), 330), random.integers(1, 4)):
            bad[at] = random.integers(0, 256)
        (tmp_path / "c").write_bytes(bad + hashlib.sha256(bad).digest())
        with contextlib.suppress(DataError):
            read_checkpoint(tmp_path / "c", "key", 1 << 20)
