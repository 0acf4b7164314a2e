"""A network for tests in which the model does not matter."""

import re
import shutil
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


_EMULATED = re.compile(r'\[\[verification\]\]\ndevice = "(?:android|arm64)"\nform = "\w+"\nsamples = \d+\n')


@pytest.fixture(scope="session")
def without_arm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns a target that is verified without emulated 64-bit Arm, on which the tests verify the demo."""

    def make(target: str) -> str:
        folder = tmp_path_factory.mktemp("targets") / target
        shutil.copytree(Path(__file__).parents[2] / "targets" / target, folder)
        (folder / "target.toml").write_text(_EMULATED.sub("", (folder / "target.toml").read_text()))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def nnapi(without_arm: Callable[[str], str]) -> str:
    """The target nnapi, verified only in Android's library for x86-64."""
    require_device("android:x86_64", "nnapi")
    return without_arm("nnapi")
