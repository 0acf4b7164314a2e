"""Random networks that ONNX Runtime runs: quantize makes a model that it runs too, or refuses in one line."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit._ort import CpuSession, SessionSettings
from edgekit.cli.main import run_command
from edgekit.model.model import load_model, save_proto

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from placement_generated import Network, generate_models


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("target", ["nnapi", "qnn", "xnnpack"])
def test_no_random_network_ends_quantize_in_a_traceback(target: str, tmp_path: Path) -> None:
    for net in generate_models(range(7000, 7040), size=10, plain=False):
        path, made = save_proto(net.proto, tmp_path / f"{net.name}.onnx").path, tmp_path / f"{net.name}.int8.onnx"
        options = [*_write_rows(net, tmp_path), "--target", target, "--out", str(made), "--quiet"]
        if run_command(["quantize", str(path), *options]) == 0:
            CpuSession(load_model(made).path, SessionSettings()).run(net.inputs)


def _write_rows(net: Network, folder: Path) -> list[str]:
    """Returns the options for eight random samples and the batch of an open axis."""
    rng = np.random.default_rng(0)
    kinds: dict[str, Any] = {
        "f": rng.normal,
        "i": lambda size: rng.integers(0, 5, size=size),
        "b": lambda size: rng.random(size) > 0.5,
    }
    rows = {
        name: kinds[value.dtype.kind](size=(8, *value.shape[value.shape[0] == 1 :])).astype(value.dtype)
        for name, value in net.inputs.items()
    }
    np.savez(folder / "data.npz", allow_pickle=False, **rows)
    axes = net.proto.graph.input[0].type.tensor_type.shape.dim
    opened = [f"--dim={axes[0].dim_param}={net.inputs['x'].shape[0]}"] if axes[0].dim_param else []
    return ["--data", str(folder / "data.npz"), *opened]
