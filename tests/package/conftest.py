"""One build of the demo model for all packages."""

from pathlib import Path

import pytest
from demo_paths import CALIBRATION, MODEL

from edgekit.pipeline import build
from edgekit.recipe import Data, Recipe


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle of the digits for each target."""
    out = tmp_path_factory.mktemp("package") / "bundles"
    build(MODEL, Data(source=str(CALIBRATION)), out, Recipe(samples=16), verify=False)
    return out
