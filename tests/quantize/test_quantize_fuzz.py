"""Random networks: quantize and build make what runs and computes the network, or refuse in one line."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit._ort import CpuSession, SessionSettings
from edgekit.cli.main import run_command
from edgekit.jobs.build import FAULT
from edgekit.model.model import load_model, save_proto

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from placement_generated import Network, generate_models, try_model

SAMPLES = 12
SIGNED = {"session.qdqisint8allowed": "1"}


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("target", ["nnapi", "qnn", "xnnpack"])
def test_no_random_network_ends_quantize_in_a_traceback(target: str, tmp_path: Path) -> None:
    for net in generate_models(range(7000, 7040), size=10, plain=False):
        path, made = save_proto(net.proto, tmp_path / f"{net.name}.onnx").path, tmp_path / f"{net.name}.int8.onnx"
        options = [*_write_rows(net, _draw_rows(net), tmp_path), "--target", target, "--out", str(made), "--quiet"]
        if run_command(["quantize", str(path), *options]) == 0:
            # Without the option of xnnpack's bundles ONNX Runtime makes s8 activations u8 on x86-64, but not the
            # `output_dtype` of the Q nodes that it moved itself, and refuses its own graph.
            CpuSession(load_model(made).path, SessionSettings(config=SIGNED)).run(net.inputs)


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("target", ["coreml", "nnapi", "qnn", "xnnpack"])
def test_bundles_compute_random_networks(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for net in generate_models(range(7000, 7010), size=7, plain=False):
        path, rows = save_proto(net.proto, tmp_path / f"{net.name}.onnx").path, _draw_rows(net)
        options = [*_write_rows(net, rows, tmp_path), "--target", target, "--out", str(tmp_path / net.name)]
        capsys.readouterr()
        run_command(["build", str(path), *options, "--quiet", "--json"])
        told = capsys.readouterr().out
        assert FAULT not in told, net.name
        steady = _find_steady(net, rows)
        for bundle in json.loads(told)["bundles"] if told else ():
            for run in (bundle["verify"] or {"runs": ()})["runs"]:
                lost = [output for output in run["outputs"] if output["name"] in steady and output["sqnr_db"] < 0]
                assert not lost, (net.name, run["device"], lost)


def _find_steady(net: Network, rows: dict[str, Any]) -> set[str]:
    """Returns the float outputs that inputs of 8 bits change by less than a hundredth of their energy."""
    steps = {name: np.ptp(row) / 255 for name, row in rows.items() if row.dtype.kind == "f"}
    signal, noise = dict[str, float](), dict[str, float]()
    for at in range(SAMPLES):
        feeds = {name: row[at].reshape(net.inputs[name].shape) for name, row in rows.items()}
        rounded = {
            name: (np.round(value / steps[name]) * steps[name]).astype(value.dtype) if name in steps else value
            for name, value in feeds.items()
        }
        pairs = zip(try_model(net.proto, feeds) or (), try_model(net.proto, rounded) or (), strict=True)
        for output, (exact, other) in zip(net.proto.graph.output, pairs, strict=True):
            if exact.dtype.kind == "f" and exact.shape == other.shape:
                energy, error = (float(np.sum(part.astype(np.float64) ** 2)) for part in (exact, other - exact))
                signal[output.name] = signal.get(output.name, 0) + energy
                noise[output.name] = noise.get(output.name, 0) + error
    return {name for name, energy in signal.items() if noise[name] < energy / 100}


def _draw_rows(net: Network) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    kinds: dict[str, Any] = {
        "f": rng.normal,
        "i": lambda size: rng.integers(0, 5, size=size),
        "b": lambda size: rng.random(size) > 0.5,
    }
    return {
        name: kinds[value.dtype.kind](size=(SAMPLES, *value.shape)).astype(value.dtype)
        for name, value in net.inputs.items()
    }


def _write_rows(net: Network, rows: dict[str, Any], folder: Path) -> list[str]:
    """Returns the options for these samples and for the batch of an open axis."""
    samples = {name: row[:, 0] if row.shape[1:2] == (1,) else row for name, row in rows.items()}
    np.savez(folder / "data.npz", allow_pickle=False, **samples)
    axes = net.proto.graph.input[0].type.tensor_type.shape.dim
    opened = [f"--dim={axes[0].dim_param}={net.inputs['x'].shape[0]}"] if axes[0].dim_param else []
    return ["--data", str(folder / "data.npz"), *opened]
