"""Shared by several tests of verify: a network in float and in INT8, its bundles, and a small bundle."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from bundle_models import make_bundle
from fixture_types import MakeOnce
from verify_models import make_images, quantize, save_network

from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.jobs.build import build
from edgekit.model.model import Model, load_model
from edgekit.recipe import Data, Recipe


@pytest.fixture(scope="session")
def models(make_once: MakeOnce) -> tuple[Model, Model]:
    """The prepared network and its INT8 form for NNAPI."""
    folder = make_once("network-models", quantize)
    return load_model(folder / "prepared.onnx"), load_model(folder / "quantized.onnx")


@pytest.fixture(scope="session")
def network_build(make_once: MakeOnce) -> Path:
    """A folder with `network.onnx`, and in `out` a bundle for each of three targets with 16 golden samples."""

    def fill(folder: Path) -> None:
        model = save_network(folder / "network.onnx")
        np.savez(folder / "data.npz", x=np.stack([row["x"] for row in make_images(32)]))
        np.savez(folder / "eval.npz", x=np.stack([row["x"] for row in make_images(48)])[-16:])
        data = Data(source=str(folder / "data.npz"), evaluation=str(folder / "eval.npz"))
        build(model.path, data, folder / "out", Recipe(targets=("cpu", "nnapi", "coreml")), verify=False)

    return make_once("network-build", fill)


@pytest.fixture(scope="session")
def tiny(make_once: MakeOnce) -> Bundle:
    """A bundle of a small classifier for NNAPI with six labelled golden samples; tests must not change it."""
    return open_bundle(make_once("tiny-bundle", lambda folder: make_bundle(folder, labels=(0, 1, 2, 3, 4, 0))) / TINY)


@pytest.fixture
def bundle(tiny: Bundle, tmp_path: Path) -> Bundle:
    """A copy of the small bundle, which a test may change."""
    return open_bundle(Path(shutil.copytree(tiny.folder, tmp_path / TINY)))


TINY = "tiny-nnapi"
