"""`prepare` on the command line: the inputs an app wants, custom operators, and refusals that name what is valid."""

import json
from pathlib import Path
from typing import Any

import pytest
from demo_paths import MODEL

from edgekit.cli.main import run_command
from edgekit.model.model import load_model

TOML = 'size = [24, 24]\ncolor = "L"\nmean = [0.5]\nstd = [0.25]\n'


def _prepare(arguments: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run_command(["prepare", str(MODEL), *arguments, "--out", str(out), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_prepare_makes_the_interface_an_app_wants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = load_model(MODEL)
    name, output = source.inputs[0].name, source.outputs[0].name
    shape = [dim if isinstance(dim, int) else 1 for dim in source.inputs[0].shape or ()]
    (tmp_path / "p.toml").write_text(TOML)
    dims = [f"--dim={dim}=1" for dim in source.inputs[0].shape or () if isinstance(dim, str)]
    report = _prepare(
        [
            *dims, "--embed-preprocess", str(tmp_path / "p.toml"), "--layout", f"{name}=nhwc",
            "--rename", f"{name}=pixels", "--rename", f"{output}=scores", "--opset", "18", "--external-data",
        ],
        tmp_path / "out.onnx",
        capsys,
    )  # fmt: skip
    given = report["model"]["inputs"][0]
    assert (given["name"], given["dtype"]) == ("pixels", "uint8")
    assert given["shape"] == [shape[0], shape[2], shape[3], shape[1]]
    assert report["model"]["outputs"][0]["name"] == "scores"
    assert report["model"]["opsets"]["ai.onnx"] == 18
    assert report["model"]["external_files"] == ["out.onnx.data"]
    assert (report["preprocess"]["dtype"], report["preprocess"]["scale"]) == ("uint8", 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data", "p.toml"]
