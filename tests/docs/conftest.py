"""The model, samples and bundles of the tutorial, which the commands of other pages use."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from devices_models import require_device
from doc_pages import PAGES, ROOT, run_page
from fixture_types import MakeOnce
from group_models import make_speech

from edgekit.cli.main import run_command

_COPIES = {
    "digits_mobilenet.onnx": "model.onnx",
    "calibration.npz": "samples.npz",
    "evaluation.npz": "eval.npz",
    "evaluation_labels.npy": "eval.npy",
}


@pytest.fixture(scope="session")
def tutorial(make_once: MakeOnce) -> Path:
    """The folder in which the commands of the tutorial ran; tests must not change it."""

    def run_tutorial(folder: Path) -> None:
        _begin(folder)
        assert list(run_page(PAGES["docs/tutorial.md"], folder)) == []

    return make_once("tutorial", run_tutorial)


@pytest.fixture(scope="session")
def work(make_once: MakeOnce, demo_bundles: Path) -> Path:
    """A folder with the tutorial's files, and bundles like its own, which are made sooner; tests must not change it."""

    def fill(folder: Path) -> None:
        _begin(folder)
        for target, device in (("nnapi", "android:x86_64"), ("qnn", "qnn-htp-sim")):
            require_device(device, target)
            bundle = shutil.copytree(
                demo_bundles / f"digits_mobilenet-{target}", folder / "bundles" / f"model-{target}"
            )
            assert run_command(["verify", str(bundle), "--on", device, "-q"]) == 0

    return make_once("docs-work", fill)


def _begin(folder: Path) -> None:
    for source, name in _COPIES.items():
        shutil.copy(ROOT / "edgekit" / "demo" / source, folder / name)
    # The file that the Python of how-to/failing-build.md writes, and the user's files of how-to/groups.md.
    np.savez(folder / "pixels.npz", image=np.load(folder / "samples.npz")["image"] * np.float32(255))
    make_speech(folder)
