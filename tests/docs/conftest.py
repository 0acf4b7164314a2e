"""Runs the tutorial once: its folder has the model, samples and bundles that the commands of other pages use."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from doc_pages import PAGES, ROOT, run_page
from group_models import make_speech

_COPIES = {
    "digits_mobilenet.onnx": "model.onnx",
    "calibration.npz": "samples.npz",
    "evaluation.npz": "eval.npz",
    "evaluation_labels.npy": "eval.npy",
}


@pytest.fixture(scope="session")
def tutorial(make_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The folder in which the commands of the tutorial ran; tests must not change it."""
    return make_once("tutorial", _run_tutorial)


def _run_tutorial(folder: Path) -> None:
    for source, name in _COPIES.items():
        shutil.copy(ROOT / "edgekit" / "demo" / source, folder / name)
    # The file that the Python of how-to/failing-build.md writes, and the user's files of how-to/groups.md.
    np.savez(folder / "pixels.npz", image=np.load(folder / "samples.npz")["image"] * np.float32(255))
    make_speech(folder)
    assert list(run_page(PAGES["docs/tutorial.md"], folder)) == []
