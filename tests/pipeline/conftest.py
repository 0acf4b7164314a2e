"""A network for tests in which the model does not matter."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_small_net

from edgekit.devices.find import find_device
from edgekit.recipe import Data
from edgekit.target import load_target


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Data]:
    """A network of three layers and ten classes, and samples for it."""
    write_small_net(tmp_path / "small.onnx", tmp_path / "small.npz")
    return tmp_path / "small.onnx", Data(source=str(tmp_path / "small.npz"))


_EMULATED = '[[verification]]\ndevice = "android"\nform = "onnx"\nsamples = 8\n'


@pytest.fixture(scope="session")
def without_arm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns a target that is verified without emulated 64-bit Arm, on which the tests verify the demo."""

    def make(target: str) -> str:
        folder = tmp_path_factory.mktemp("targets") / target
        shutil.copytree(Path(__file__).parents[2] / "targets" / target, folder)
        text = (folder / "target.toml").read_text()
        (folder / "target.toml").write_text(text.replace(_EMULATED, ""))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def nnapi(without_arm: Callable[[str], str]) -> str:
    """The target nnapi, verified only in Android's library for x86-64."""
    missing = find_device("android:x86_64", load_target("nnapi")).find_missing()
    if missing is not None:
        pytest.skip(f"android:x86_64: {missing.reason}: {missing.command}")
    return without_arm("nnapi")
