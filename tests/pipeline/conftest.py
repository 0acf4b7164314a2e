"""A net for tests that are about the run and not about the model."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny_models import parse_model

from edgekit.devices.find import find_device
from edgekit.recipe import Data
from edgekit.target import load_target


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Data]:
    """A net of three layers and ten classes, and samples of it."""
    rng = np.random.default_rng(5)
    path = parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,3,8,8] x) => (float[1,10] y)'
        "{ a = Conv(x, u)  b = Relu(a)  c = Conv(b, v)  d = Relu(c)  p = GlobalAveragePool(d)  f = Flatten(p)"
        " y = Gemm(f, w) }",
        tmp_path / "small.onnx",
    )
    proto = onnx.load(str(path))
    for name, shape in {"u": (8, 3, 3, 3), "v": (16, 8, 3, 3), "w": (16, 10)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    onnx.save(proto, str(path))
    np.savez(tmp_path / "small.npz", x=rng.normal(size=(32, 1, 3, 8, 8)).astype(np.float32))
    return path, Data(source=str(tmp_path / "small.npz"))


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
