"""The folder of a reader of the tutorial: the model, samples and bundles that the commands of other pages use."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from doc_pages import ROOT
from fixture_types import MakeOnce
from group_models import make_speech

_COPIES = {
    "digits_mobilenet.onnx": "model.onnx",
    "calibration.npz": "samples.npz",
    "evaluation.npz": "eval.npz",
    "evaluation_labels.npy": "eval.npy",
}


@pytest.fixture(scope="session")
def begun(make_once: MakeOnce) -> Path:
    """The folder in which a reader begins the tutorial; tests must not change it."""
    return make_once("begun", _begin)


@pytest.fixture(scope="session")
def read(make_once: MakeOnce, begun: Path, demo_bundles: Path) -> Path:
    """The folder of a reader who ended the tutorial, with bundles that were not verified; tests must not change it."""

    def fill(folder: Path) -> None:
        shutil.copytree(begun, folder, dirs_exist_ok=True)
        for target in ("nnapi", "qnn"):
            shutil.copytree(demo_bundles / f"digits_mobilenet-{target}", folder / "bundles" / f"model-{target}")

    return make_once("read", fill)


def _begin(folder: Path) -> None:
    for source, name in _COPIES.items():
        shutil.copy(ROOT / "edgekit" / "demo" / source, folder / name)
    # The file that the Python of how-to/failing-build.md writes, and the user's files of how-to/groups.md.
    np.savez(folder / "pixels.npz", image=np.load(folder / "samples.npz")["image"] * np.float32(255))
    make_speech(folder)
