"""`prepare` on the command line: the inputs an app wants, custom operators, and refusals that name what is valid."""

from pathlib import Path

from demo_paths import MODEL
from fixture_types import Answer

from edgekit.model.model import load_model

TOML = 'size = [24, 24]\ncolor = "L"\nmean = [0.5]\nstd = [0.25]\n'


def test_prepare_makes_the_interface_an_app_wants(tmp_path: Path, answer: Answer) -> None:
    source = load_model(MODEL)
    name, output = source.inputs[0].name, source.outputs[0].name
    shape = [dim if isinstance(dim, int) else 1 for dim in source.inputs[0].shape or ()]
    (tmp_path / "p.toml").write_text(TOML)
    dims = [f"--dim={dim}=1" for dim in source.inputs[0].shape or () if isinstance(dim, str)]
    report = answer([
        "prepare", str(MODEL), *dims, "--embed-preprocess", str(tmp_path / "p.toml"), "--layout", f"{name}=nhwc",
        "--rename", f"{name}=pixels", "--rename", f"{output}=scores", "--opset", "18", "--external-data",
        "--out", str(tmp_path / "out.onnx"),
    ])  # fmt: skip
    given = report["model"]["inputs"][0]
    assert (given["name"], given["dtype"]) == ("pixels", "uint8")
    assert given["shape"] == [shape[0], shape[2], shape[3], shape[1]]
    assert report["model"]["outputs"][0]["name"] == "scores"
    assert report["model"]["opsets"]["ai.onnx"] == 18
    assert report["model"]["external_files"] == ["out.onnx.data"]
    assert (report["preprocess"]["dtype"], report["preprocess"]["scale"]) == ("uint8", 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data", "p.toml"]
