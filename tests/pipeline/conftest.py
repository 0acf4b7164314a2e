"""A net for tests that are about the run and not about the model."""

import shutil
from pathlib import Path

import pytest
from tiny_models import write_small_net

from edgekit.devices.find import find_device
from edgekit.recipe import Data
from edgekit.target import load_target


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Data]:
    """A net of three layers and ten classes, and samples of it."""
    write_small_net(tmp_path / "small.onnx", tmp_path / "small.npz")
    return tmp_path / "small.onnx", Data(source=str(tmp_path / "small.npz"))


@pytest.fixture(scope="session")
def nnapi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """NNAPI verified in Android's library for x86-64 alone: without emulated Arm, where the demo is verified too."""
    missing = find_device("android:x86_64", load_target("nnapi")).find_missing()
    if missing is not None:
        pytest.skip(f"android:x86_64: {missing.reason}: {missing.command}")
    folder = tmp_path_factory.mktemp("targets") / "nnapi"
    shutil.copytree(Path(__file__).parents[2] / "targets" / "nnapi", folder)
    text = (folder / "target.toml").read_text()
    arm = '[[verification]]\ndevice = "android"\nform = "onnx"\nsamples = 8\n'
    assert arm in text
    (folder / "target.toml").write_text(text.replace(arm, ""))
    return str(folder)
