"""Random networks that ONNX Runtime runs: quantize makes a model that it runs too, or refuses in one line."""

import sys
from pathlib import Path

import numpy as np
import pytest

from edgekit._ort import CpuSession, SessionSettings
from edgekit.cli.main import run_command
from edgekit.model.model import load_model, save_proto

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from placement_generated import generate_models


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("target", ["nnapi", "qnn", "xnnpack"])
def test_no_random_network_ends_quantize_in_a_traceback(target: str, tmp_path: Path) -> None:
    for seed in range(7000, 7040):
        ((name, proto),) = generate_models(range(seed, seed + 1), size=10)
        model, made = save_proto(proto, tmp_path / f"{name}.onnx"), tmp_path / f"{name}.int8.onnx"
        shape = [int(str(size)) for size in model.inputs[0].shape or ()]
        rows = np.random.default_rng(seed).normal(size=(8, *shape[shape[0] == 1 :])).astype(np.float32)
        np.savez(tmp_path / "data.npz", x=rows)
        options = ["--data", str(tmp_path / "data.npz"), "--target", target, "--out", str(made), "--quiet"]
        if run_command(["quantize", str(model.path), *options]) == 0:
            row = {"x": rows[0].reshape(shape)}
            CpuSession(load_model(made).path, SessionSettings()).run(row)
