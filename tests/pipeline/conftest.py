"""A network for tests in which the model does not matter."""

from collections.abc import Callable
from pathlib import Path

import pytest
from devices_models import require_device
from tiny_models import write_small_net

from edgekit.recipe import Data


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Data]:
    """A network of three layers and ten classes, and samples for it."""
    write_small_net(tmp_path / "small.onnx", tmp_path / "small.npz")
    return tmp_path / "small.onnx", Data(source=str(tmp_path / "small.npz"))


@pytest.fixture(scope="session")
def nnapi(without_arm: Callable[[str], str]) -> str:
    """The target nnapi, verified only in Android's library for x86-64."""
    require_device("android:x86_64", "nnapi")
    return without_arm("nnapi")
