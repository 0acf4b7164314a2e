"""A bundle of a model that keeps float weights between Q and DQ nodes keeps them on the device too."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny_models import parse_model

from edgekit._ort import CpuSession, SessionSettings
from edgekit.bundle.folder import open_bundle
from edgekit.jobs.build import build
from edgekit.prepare.constants import DISABLED, OPTIMIZER
from edgekit.recipe import Data, Recipe

TEXT = (
    "g (float[1,4,4,4] x) => (float[1,4,4,4] y) "
    "<float s = {0.02}, uint8 z = {128}, float t = {0.05}> { a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z)"
    " [n] c = Conv(b, w) q = QuantizeLinear(c, t, z) y = DequantizeLinear(q, t, z) }"
)


@pytest.mark.parametrize("target", ["nnapi", "xnnpack", "qnn", "cpu"])
def test_the_session_is_told_to_keep_them(tmp_path: Path, target: str) -> None:
    rng = np.random.default_rng(0)
    path = parse_model(TEXT, tmp_path / "m.onnx")
    proto = onnx.load(str(path))
    weight = rng.normal(0, 1, (4, 4, 1, 1)).astype(np.float32)
    weight[0] *= 0.003
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(proto, str(path))
    np.savez(tmp_path / "data.npz", x=rng.normal(0, 1, (4, 4, 4, 4)).astype(np.float32))
    recipe = Recipe(targets=(target,))
    report = build(path, Data(source=str(tmp_path / "data.npz")), tmp_path / "out", recipe, verify=False)
    (summary,) = report.bundles
    assert summary.failure is None
    assert "1 layers keep float weights between Q and DQ nodes ('n')" in summary.notes[-1]
    bundle = open_bundle(tmp_path / "out" / f"m-{target}")
    config = bundle.manifest.session_config
    assert config[DISABLED] == OPTIMIZER
    config = {key: value for key, value in config.items() if key != "session.disable_cpu_ep_fallback"}
    sample = {"x": rng.normal(0, 1, (1, 4, 4, 4)).astype(np.float32)}
    wanted = CpuSession(path, SessionSettings(config={DISABLED: OPTIMIZER})).run(sample)["y"]
    files = [name for name in bundle.manifest.files if name.endswith((".onnx", ".ort")) and "/" not in name]
    plain = [name for name in files if "context" not in name and "ctx" not in name]
    for name in plain:
        got = CpuSession(bundle.folder / name, SessionSettings(config=config)).run(sample)["y"]
        assert (got == wanted).all(), name
    assert (CpuSession(path, SessionSettings()).run(sample)["y"] != wanted).any()
