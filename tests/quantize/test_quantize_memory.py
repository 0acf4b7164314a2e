"""What rounding found, kept beside the statistics."""

from pathlib import Path

import numpy as np

from edgekit.quantize.rounding import recall, remember


def test_what_was_kept_is_found_under_its_key_alone(tmp_path: Path) -> None:
    assert recall(tmp_path, "a") is None
    remember(tmp_path, "a", {"integers": np.arange(3), "scale": np.array([0.5], np.float32)})
    found = recall(tmp_path, "a")
    assert found is not None
    assert {name: value.tolist() for name, value in found.items()} == {"integers": [0, 1, 2], "scale": [0.5]}
    assert recall(tmp_path, "b") is None


def test_a_damaged_file_is_as_if_there_were_none(tmp_path: Path) -> None:
    remember(tmp_path, "a", {"scale": np.zeros(100)})
    path = next(tmp_path.rglob("*.npz"))
    path.write_bytes(path.read_bytes()[:150])
    assert recall(tmp_path, "a") is None
    remember(tmp_path, "a", {"scale": np.ones(1)})
    found = recall(tmp_path, "a")
    assert found is not None
    assert found["scale"].tolist() == [1.0]
