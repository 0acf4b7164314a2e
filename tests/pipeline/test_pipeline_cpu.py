"""Bundles for ONNX Runtime's own kernels, on this x64 and on an emulated one without VNNI."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import present
from onnx import numpy_helper
from tiny_models import parse_model

from edgekit.bundle.folder import open_bundle
from edgekit.devices.register import DeviceChoice
from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe
from edgekit.verify.on_devices import verify_on

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def haswell() -> None:
    present("host:haswell")


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Data, Recipe]:
    """A model whose 8-bit products of pairs saturate in 16 bits, in some channels, and what tells that."""
    path = parse_model(
        "g (float[1,8,8,8] x) => (float[1,10] y) {"
        " c = Conv<pads=[1,1,1,1]>(x, u)  r = Relu(c)  p = GlobalAveragePool(r)  f = Flatten(p)"
        " y = Gemm<transB=1>(f, w) }",
        tmp_path / "net.onnx",
    )
    rng = np.random.default_rng(7)
    large, mixed = rng.uniform(0.8, 1, (16, 8, 3, 3)), rng.uniform(-1, 1, (10, 16))
    large[::2, :, :, ::2] *= 0.02
    proto = onnx.load(str(path))
    for name, value in (("u", large), ("w", mixed)):
        proto.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    onnx.save(proto, str(path))
    np.savez(tmp_path / "x.npz", x=rng.uniform(0.3, 1, size=(24, 1, 8, 8, 8)).astype(np.float32))
    data = Data(source=str(tmp_path / "x.npz"), evaluation=str(tmp_path / "x.npz"))
    limits = {"cpu": {"min_sqnr_db": 30.0}}
    return path, data, Recipe(targets=("cpu",), thresholds=limits, outputs={"y": "values"})


@pytest.mark.long
def test_a_bundle_for_any_x64_passes_without_vnni(small: tuple[Path, Data, Recipe], tmp_path: Path) -> None:
    path, data, recipe = small
    recipe = msgspec.structs.replace(recipe, settings={"arch": "x64"})
    (summary,) = build(path, data, tmp_path / "out", recipe).bundles
    assert summary.verify is not None
    assert [(run.device, run.passed, run.evidence.value) for run in summary.verify.runs] == [
        ("host", True, "same-ep"),
        ("host:haswell", True, "same-ep"),
    ]


@pytest.mark.long
def test_a_bundle_for_vnni_fails_without_it_and_is_told_why(small: tuple[Path, Data, Recipe], tmp_path: Path) -> None:
    path, data, recipe = small
    recipe = msgspec.structs.replace(recipe, settings={"arch": "x64-vnni"})
    build(path, data, tmp_path / "out", recipe, verify=False)
    report = verify_on(open_bundle(tmp_path / "out" / "net-cpu"), DeviceChoice(names=("host:haswell",)))
    assert not report.passed
    (run,) = report.runs
    assert any("the emulated CPU has no VNNI" in line for line in (*run.failures, *run.notes))
