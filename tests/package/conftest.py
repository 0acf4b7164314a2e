"""The bundles that are packed."""

from pathlib import Path

import pytest
from package_loaders import OLDER


@pytest.fixture(scope="session")
def bundles(demo_bundles: Path) -> Path:
    return demo_bundles


@pytest.fixture(scope="session")
def older(demo_build: Path) -> Path:
    """The bundle for an older ONNX Runtime."""
    return demo_build / OLDER
