"""What a build is told of the model's inputs: frozen ones, whole shapes, labels without samples."""

import json
from pathlib import Path

import numpy as np
import pytest
from demo_paths import CALIBRATION, LABELS, MODEL
from fixture_types import Refused
from tiny_models import parse_model

from edgekit._files import digest_file
from edgekit.bundle.folder import open_bundle
from edgekit.cli.main import run_command
from edgekit.errors import DataError, UsageError
from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe

BRANCHES = """g (float[N,4] x, int64 rate) => (float[N,4] y)
<int64 wanted = {16000}> {
  is_wide = Equal(rate, wanted)
  y = If (is_wide) <
    then_branch = wide () => (float[N,4] a) { a = Add(x, x) },
    else_branch = narrow () => (float[N,4] b) { b = Neg(x) }
  >
}"""


def _write(folder: Path) -> tuple[Path, Path]:
    model = parse_model(BRANCHES, folder / "rate.onnx")
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    np.savez(folder / "d.npz", x=rows, rate=np.full(8, 16000))
    return model, folder / "d.npz"


def test_an_input_is_frozen_though_the_data_still_contain_it(tmp_path: Path) -> None:
    model, data = _write(tmp_path)
    recipe = Recipe(targets=("xnnpack",), dims={"N": 1}, freeze={"rate": 16000})
    report = build(model, Data(source=str(data)), tmp_path / "out", recipe, verify=False)
    bundle = open_bundle(tmp_path / "out" / "rate-xnnpack")
    assert [tensor.name for tensor in bundle.manifest.inputs] == ["x"]
    assert bundle.manifest.ancestry.source == digest_file(model) == report.sha256
    assert bundle.manifest.provenance.recipe["freeze"] == {"rate": 16000}
    assert report.bundles[0].check is not None
    ops = {node.op for node in report.bundles[0].check.node_list}
    assert ops - {"QuantizeLinear", "DequantizeLinear"} == {"Add"}
    with (
        np.load(bundle.golden.folder / "inputs.npz") as inputs,
        np.load(bundle.golden.folder / "outputs.npz") as outputs,
    ):
        np.testing.assert_allclose(outputs["y"], 2 * inputs["x"])
    np.savez(tmp_path / "odd.npz", x=np.zeros((2, 4), np.float32), other=np.zeros(2))
    with pytest.raises(DataError, match="'other', which is no model input"):
        build(model, Data(source=str(tmp_path / "odd.npz")), tmp_path / "no", recipe, verify=False)


def test_options_freeze_and_give_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    model, data = _write(tmp_path)
    words = ["--target", "xnnpack", "--shape", "x=1,4"]
    out = ["--data", str(data), "--freeze", "rate=16000", "--no-verify", "--out", str(tmp_path / "out"), "--json"]
    assert run_command(["build", str(model), *words, *out]) == 0
    assert [bundle["target"] for bundle in json.loads(capsys.readouterr().out)["bundles"]] == ["xnnpack"]
    run_command(["check", str(model), *words, "--json"])
    assert json.loads(capsys.readouterr().out)["targets"]["xnnpack"]["nodes"] > 0
    assert "--shape x=1,5 does not fit the model's" in refused("check", str(model), "--shape", "x=1,5")


def test_labels_without_their_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no --eval") as raised:
        build(MODEL, Data(source=str(CALIBRATION), labels=LABELS), tmp_path / "out", Recipe(targets=("xnnpack",)))
    assert raised.value.hint == "add --eval DATA, the samples that the labels belong to"
    assert not (tmp_path / "out").exists()
