"""Bundles whose dimensions stay open: built for any size, judged at the sizes of the samples, small and large apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from bucket_models import LENGTHS, make, make_sample, write_net, write_samples
from onnx import parser
from verify_devices import InProcess, open_loader

from edgekit._ort import CpuSession, SessionSettings
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.manifest import decode_manifest, encode_json
from edgekit.cli.main import run_command
from edgekit.devices.register import DeviceChoice
from edgekit.errors import BundleError, UsageError
from edgekit.jobs.build import build
from edgekit.model.state import State
from edgekit.model.tensors import Tensors
from edgekit.package.package import package_bundles
from edgekit.recipe import Data, Recipe
from edgekit.verify.on_devices import verify_with
from edgekit.verify.run import verify_bundle


@pytest.fixture(scope="module")
def made(make_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return make_once("open_dims", lambda folder: make(folder, dims={}, buckets={}))


@pytest.fixture(scope="module")
def bundle(made: Path) -> Bundle:
    return open_bundle(made / "out" / "net-cpu")


def test_the_manifest_says_which_dimensions_are_open(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.precision == "int8"
    assert [spec.shape for spec in manifest.inputs] == [("batch", "sequence"), ("batch", "sequence")]
    assert [spec.shape for spec in manifest.outputs] == [
        ("batch", 8), ("batch", "sequence", 32), ("batch", None, 32),
    ]  # fmt: skip
    assert manifest.open_dims == {"batch": (1,), "sequence": tuple(sorted(LENGTHS))}
    assert "| `sequence` | 1, 2, 3," in (bundle.folder / "README.md").read_text()
    assert "| input | `ids` | int64 | [batch, sequence] |" in (bundle.folder / "README.md").read_text()


def test_small_middle_and_large_samples_are_judged_apart(bundle: Bundle) -> None:
    (run,) = verify_bundle(bundle, [InProcess()]).runs
    assert run.passed, (run.failures, run.unproven)
    assert run.sizes is not None
    assert run.sizes.dim == "sequence"
    assert [size.lengths for size in run.sizes.sizes] == [(3, 4, 1, 2), (8, 5, 6, 7), (12, 10, 9, 11)]


def test_a_device_that_is_wrong_at_large_sizes_alone_fails_there(bundle: Bundle) -> None:
    def lie(rows: list[Tensors]) -> list[Tensors]:
        return [row if row["t"].shape[1] < 9 else {**row, "t": row["t"] * np.float32(1.5)} for row in rows]

    (run,) = verify_bundle(bundle, [InProcess(lie=lie)]).runs
    assert {gate.subject for gate in run.gates if gate.name == "size" and gate.failures} == {"sequence=12"}


def test_samples_of_ones_own_have_their_own_sizes(bundle: Bundle, made: Path, tmp_path: Path) -> None:
    data = Data(source=write_samples(tmp_path / "own", (20, 1, 30, 17, 2, 3, 25, 4)))
    report = verify_with(bundle, made / "net.onnx", data, DeviceChoice(names=("host",)))
    (run,) = report.runs
    assert run.passed, (run.failures, run.unproven)
    assert run.sizes is not None
    assert [size.size for size in run.sizes.sizes] == [4, 30]


def test_a_package_tests_one_size_and_runs_any(bundle: Bundle, tmp_path: Path) -> None:
    loader, variant = open_loader(bundle, tmp_path)
    session = loader.open_session(variant, loader.find_folder(variant))
    assert loader.run_self_test(variant, loader.find_folder(variant), session) == []
    for length in (2, 40):
        (found,) = session.run(["t"], make_sample(length, 7))
        wanted = CpuSession(bundle.find_model("onnx"), SessionSettings()).run(make_sample(length, 7))["t"]
        np.testing.assert_allclose(found, wanted, atol=0.2)
    with pytest.raises(UsageError, match="have several sizes"):
        package_bundles([bundle.folder], "tar", tmp_path / "q.tar", extras=("golden",))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda it: it["open_dims"].pop("batch"), lambda it: it["open_dims"].clear(),
        lambda it: it["open_dims"].update(height=[1]), lambda it: it["open_dims"].update(batch=[]),
        lambda it: it["open_dims"].update(batch=[2, 1]), lambda it: it["open_dims"].update(batch=[-1]),
        lambda it: it["open_dims"].update(batch=list(range(99))),
        lambda it: [each.update(shape=[1, 2]) for each in it["inputs"]],
    ],
)  # fmt: skip
def test_a_manifest_cannot_state_open_dimensions_that_are_not_there(
    bundle: Bundle, spoil: Callable[[dict[str, Any]], object]
) -> None:
    raw = msgspec.json.decode(encode_json(bundle.manifest))
    assert decode_manifest(encode_json(raw), "it") == bundle.manifest
    spoil(raw)
    with pytest.raises(BundleError, match="open dimensions"):
        decode_manifest(encode_json(raw), "it")


def test_a_target_that_wants_sizes_still_asks_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_samples(tmp_path / "d", (3, 4)), str(tmp_path / "o")
    words = ["--target", "cpu", "--target", "xnnpack", "--out", out]
    assert run_command(["build", str(write_net(tmp_path)), "--data", data, *words]) == 2
    assert "add --dim batch=1 --dim sequence=INT, as in the samples" in capsys.readouterr().err


def test_state_that_grows_cannot_be_packaged(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
      g (float[1,new,4] x, float[1,past,4] past_kv) => (float[1,new,4] y, float[1,total,4] present_kv)
      { present_kv = Concat<axis = 1>(past_kv, x)  y = Sigmoid(x) }"""
    onnx.save(parser.parse_model(text), str(tmp_path / "net.onnx"))
    (tmp_path / "d").mkdir()
    for index in range(4):
        x = np.random.default_rng(index).normal(size=(1, 1, 4)).astype(np.float32)
        np.savez(tmp_path / "d" / f"{index}.npz", x=x)
    recipe = Recipe(targets=("cpu",), precision="fp32", state=State(steps=2))
    report = build(tmp_path / "net.onnx", Data(source=str(tmp_path / "d")), tmp_path / "o", recipe, verify=False)
    path = report.bundles[0].path
    assert path is not None, report.bundles[0].failure
    made = open_bundle(path)
    assert made.manifest.open_dims == {"new": (1,), "past": (0, 1)}
    (run,) = verify_bundle(made, [InProcess()]).runs
    assert run.passed, run.failures
    with pytest.raises(UsageError, match="its state 'past_kv' may grow"):
        package_bundles([path], "tar", tmp_path / "p.tar")
