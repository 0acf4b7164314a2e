"""One build of the demo model for all packages."""

import shutil
from pathlib import Path

import pytest
from demo_paths import CALIBRATION, MODEL
from package_loaders import OLDER, PLAIN

from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe
from edgekit.target import target_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build for each target, and two that are no target of edgekit's.

    `older` is for XNNPACK and an ONNX Runtime of which there is a Java package for desktops, `plain` for the CPU.
    """
    folder = tmp_path_factory.mktemp("package")
    text = (ROOT / "targets" / "xnnpack" / "target.toml").read_text()
    older = text.replace('"1.31.0"', '"1.29.0"').replace('"xnnpack"', '"older"', 1)
    plain = text.replace('"xnnpack"', '"plain"', 1).replace("XnnpackExecutionProvider", "CPUExecutionProvider")
    plain = plain.replace('intra_op_num_threads = "4"\n', "").replace(
        'forms = ["runtime", "full", "onnx"]', 'forms = ["onnx"]'
    )
    for name, changed in (("older", older), ("plain", plain)):
        shutil.copytree(ROOT / "targets" / "xnnpack", folder / name)
        (folder / name / "target.toml").write_text(changed)
    recipe = Recipe(samples=16, targets=(*target_names(), str(folder / "older"), str(folder / "plain")))
    build(MODEL, Data(source=str(CALIBRATION)), folder / "bundles", recipe, verify=False)
    for name in (OLDER, PLAIN):
        (folder / "bundles" / name).rename(folder / name)
    return folder


@pytest.fixture(scope="session")
def bundles(everything: Path) -> Path:
    """A folder with a bundle of the digits for each target that edgekit ships."""
    return everything / "bundles"


@pytest.fixture(scope="session")
def older(everything: Path) -> Path:
    """The bundle for an older ONNX Runtime."""
    return everything / OLDER
