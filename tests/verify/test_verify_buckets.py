"""Bundles of several sizes, and of any size: built, their weights stored once, and judged at each size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from bucket_models import LENGTHS, SIZES, make, make_sample, write_net, write_samples
from fixture_types import MakeOnce, present
from msgspec.structs import replace
from onnx import parser
from verify_devices import InProcess, from_list, open_loader

from edgekit._ort import CpuSession, SessionSettings
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.manifest import UNPADDED, decode_manifest, encode_json
from edgekit.bundle.multi import join_bundles
from edgekit.cli.main import run_command
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.find import DeviceChoice
from edgekit.errors import BundleError, DataError, UsageError
from edgekit.jobs.build import build
from edgekit.model.state import State
from edgekit.model.tensors import Tensors
from edgekit.package.package import package_bundles
from edgekit.recipe import Data, Recipe
from edgekit.report.text import list_verify_remarks
from edgekit.verify.on_devices import verify_with
from edgekit.verify.run import verify_bundle


def test_weights_of_all_sizes_lie_in_one_file(sized: Bundle) -> None:
    manifest = sized.manifest
    assert manifest.buckets
    assert [bucket.size for bucket in manifest.buckets.sizes] == list(SIZES)
    assert manifest.buckets.padding.inputs == {"ids": (1,), "mask": (1,)}
    assert manifest.buckets.padding.outputs == {"t": (1,), "half": (1,)}
    assert manifest.forms.keys() == {"onnx"}
    (weights,) = (name for name in manifest.files if name.startswith("weights-"))
    assert manifest.files[weights].size_bytes > 4096
    for bucket in manifest.buckets.sizes:
        model = onnx.load(str(sized.folder / bucket.file), load_external_data=False)
        assert model.graph.input[0].type.tensor_type.shape.dim[1].dim_value == bucket.size
        assert weights in str(model)  # the same bytes: quantized with the same ranges and rounding
    assert "| 4 | `net-4.onnx` |" in (sized.folder / "README.md").read_text()
    assert "--dim sequence=4,8,12" in manifest.provenance.command


def test_each_size_is_held_against_the_float_model_at_the_length_of_the_sample(sized: Bundle) -> None:
    report = verify_bundle(sized, [InProcess()])
    (run,) = report.runs
    assert run.passed, (run.failures, run.unproven)
    assert any("at its own 'sequence': 4 (4 samples, " in line for line in list_verify_remarks(report))
    ran = {size.size: size.lengths for size in present(run.sizes).sizes}
    assert (set(ran[4]), set(ran[8])) == ({1, 2, 3, 4}, {5, 6, 7, 8})
    assert sorted(ran[12]) == sorted(sized.manifest.buckets.lengths)  # type: ignore[union-attr]
    assert all(output.elements for size in present(run.sizes).sizes for output in size.outputs)


def turn_one_size(job: Job, run: DeviceRun) -> dict[str, Any]:
    """Is right at the largest size, and turns an output around at a smaller one."""
    rows = [{**row, "y": -row["y"]} if job.model.name == "net-8.onnx" else row for row in run.outputs]
    return {"outputs": from_list(rows)}


def test_a_size_that_a_device_computes_otherwise_fails(sized: Bundle) -> None:
    (run,) = verify_bundle(sized, [InProcess(retell=turn_one_size)]).runs
    assert {gate.subject for gate in run.gates if gate.failures} == {"sequence=8"}
    assert not any("padding changes" in line for line in run.failures)


def test_a_model_that_does_not_mask_what_fills_a_sample_is_found(tmp_path: Path) -> None:
    made = present(make(tmp_path, "plain", "fp32"))
    (run,) = verify_bundle(open_bundle(made), [InProcess()]).runs
    assert {gate.name for gate in run.gates if gate.failures} == {"size"}
    assert any("padding changes the result of the float model itself" in line for line in run.failures)
    own = Data(source=str(tmp_path / "data"))
    (run,) = verify_with(open_bundle(made), tmp_path / "net.onnx", own, DeviceChoice(names=("host",))).runs
    assert {gate.name for gate in run.gates if gate.failures} == {"size"}


def test_the_loader_of_a_package_fills_picks_and_cuts(sized: Bundle, tmp_path: Path) -> None:
    loader, variant = open_loader(sized, tmp_path)
    sizes = loader.Sizes(variant, loader.find_folder(variant))
    assert sized.manifest.buckets
    for length, file in ((1, "net-4.onnx"), (5, "net-8.onnx"), (12, "net.onnx")):
        sample = make_sample(length, 90)
        got: Tensors = sizes.run(sample)
        assert got["t"].shape == (1, length, 32)
        assert got["half"].shape == (1, (length + 1) // 2, 32)
        size = next(bucket.size for bucket in sized.manifest.buckets.sizes if bucket.file == file)
        filled = sized.manifest.buckets.padding.fill(sample, size)
        # The loader's session adds products as an app's does here, without VNNI in 16 bits.
        as_app = SessionSettings(config={"session.x64quantprecision": "0"})
        wanted = CpuSession(sized.folder / file, as_app).run(filled)
        np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-4)
        np.testing.assert_allclose(got["t"], wanted["t"][:, :length], rtol=1e-4)
    with pytest.raises(loader.LoaderError, match="takes no sample of 13"):
        sizes.run(make_sample(13, 0))


def test_the_swift_package_knows_sizes_and_what_fills_them(sized: Bundle, tmp_path: Path) -> None:
    package_bundles([sized.folder], "swiftpm", tmp_path / "p")
    (table,) = (tmp_path / "p").rglob("Bundles.swift")
    text = " ".join(table.read_text().split())
    assert 'sizes: [ ModelSize(size: 4, file: "net-4.onnx"), ModelSize(size: 8, file: "net-8.onnx"), ' in text
    assert 'FilledTensor(name: "mask", axes: [1], element: [0, 0, 0, 0]), ], cut: [ FilledTensor(name: "half",' in text
    # No compiler is here: at least every name that the table uses is declared with these words.
    (declared,) = (tmp_path / "p").rglob("Variant.swift")
    words = declared.read_text()
    assert all(
        f"let {name}:" in words for name in ("size", "file", "name", "axes", "element", "sizes", "filled", "cut")
    )
    assert "`Sizes(loader:bundle:)`" in (tmp_path / "p" / "README.md").read_text()


def test_samples_of_ones_own_go_to_the_smallest_size_that_takes_them(sized: Bundle, tmp_path: Path) -> None:
    data = Data(source=write_samples(tmp_path / "own", (1, 6, 7, 12)))
    float_model = write_net(tmp_path)
    (run,) = verify_with(sized, float_model, data, DeviceChoice(names=("host",))).runs
    assert run.passed, (run.failures, run.unproven)
    assert [size.lengths for size in present(run.sizes).sizes] == [(1,), (7, 6), (1, 7, 6, 12)]
    long = Data(source=write_samples(tmp_path / "long", (9, 10)))
    (run,) = verify_with(sized, float_model, long, DeviceChoice(names=("host",))).runs
    assert not run.failures
    assert [line for line in run.unproven if "sequence" in line] == [
        "no sample ran with sequence=4", "no sample ran with sequence=8",
    ]  # fmt: skip
    with pytest.raises(DataError, match="has 13 of 'sequence', the largest bucket 12"):
        verify_with(sized, float_model, Data(source=write_samples(tmp_path / "13", (13,))), DeviceChoice())


def test_an_output_whose_shape_is_not_inferred_is_cut_too(tmp_path: Path) -> None:
    """ONNX infers no shape behind a Loop, in which it may change."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,n,4] x) => (float[1,n,4] y)
        <int64 turns = {2}, bool go = {1}> { z = Loop(turns, go, x) <body = b (int64 i, bool c, float[a,b,e] v)
        => (bool d, float[f,h,k] w) { d = Identity(c) w = Add(v, v) }> y = Neg(z) }"""
    for length in range(1, 9):
        rows = np.random.default_rng(length).normal(size=(1, length, 4)).astype(np.float32)
        np.savez(tmp_path / f"{length}.npz", x=rows)
    recipe = Recipe(targets=("cpu",), precision="fp32", buckets={"n": (4, 8)})
    path, data = tmp_path / "m.onnx", Data(source=str(tmp_path))
    proto = parser.parse_model(text)
    body = proto.graph.node[0].attribute[0].g
    for value in (proto.graph.output[0], body.input[2], body.output[1]):
        value.type.tensor_type.ClearField("shape")
    path.write_bytes(proto.SerializeToString())
    (summary,) = build(path, data, tmp_path / "out", recipe, verify=False).bundles
    bundle = open_bundle(present(summary.path))
    assert bundle.manifest.buckets
    assert bundle.manifest.buckets.padding.outputs == {"y": (1,)}
    (run,) = verify_bundle(bundle, [InProcess()]).runs
    assert not run.failures


def test_a_joined_bundle_keeps_its_sizes(sized: Bundle, tmp_path: Path) -> None:
    joined = join_bundles([sized], tmp_path / "joined")
    again = joined.nested["cpu"].extract(joined.folder, tmp_path / "again")
    assert again.manifest == sized.manifest
    assert (again.folder / UNPADDED).read_bytes() == (sized.folder / UNPADDED).read_bytes()


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        (["sequence=8,4"], "do not rise"), (["sequence=4,4"], "do not rise"), (["sequence=4,"], "'' is no size"),
        (["sequence=0,4"], "do not rise"), (["sequence=4,x"], "'x' is no size"), (["length=4,8"], "length"),
        (["sequence=4,8", "batch=1,2"], "have several sizes"), (["sequence=4,8", "sequence=9"], "twice"),
    ],
    ids=str,
)  # fmt: skip
def test_buckets_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dims: list[str], said: str
) -> None:
    words = [word for dim in dims for word in ("--dim", dim)]
    words += [] if any("batch" in dim for dim in dims) else ["--dim", "batch=1"]
    data, out = write_samples(tmp_path / "d"), tmp_path / "out"
    code = run_command(
        ["build", str(write_net(tmp_path)), "--data", data, "--target", "cpu", *words, "--out", str(out)]
    )
    assert code == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("lengths", "changes", "error", "said"),
    [
        ((3, 13), {}, DataError, "has 13 of 'sequence', the largest bucket 12"),
        ((5, 6), {}, DataError, "no golden sample fits into sequence=4"),
        ((3, 4), {"pad": {"y": 1.0}}, UsageError, "'y' has no dimension"),
        ((3, 4), {"pad": {"ids": 0.5}}, UsageError, "cannot be filled with 0.5"),
        ((3, 4), {"forms": ("full",)}, UsageError, "cannot share weights"),
    ],
)
def test_what_no_bucket_can_hold_is_refused(
    tmp_path: Path, lengths: tuple[int, ...], changes: dict[str, object], error: type[Exception], said: str
) -> None:
    data = write_samples(tmp_path / "d", lengths)
    recipe = Recipe(targets=("cpu",), precision="fp32", dims={"batch": 1}, buckets={"sequence": SIZES})
    with pytest.raises(error, match=said):
        build(write_net(tmp_path), Data(source=data, evaluation=data), tmp_path / "o", replace(recipe, **changes))


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        *(("sized", spoil, "") for spoil in (
                lambda it: it["buckets"]["sizes"].reverse(), lambda it: it["buckets"]["sizes"].clear(),
                lambda it: it["buckets"]["sizes"][0].update(file="../x.onnx"),
                lambda it: it["buckets"]["sizes"][0].update(size=0),
                lambda it: it["buckets"]["sizes"][0].update(file="net.onnx"),
                lambda it: it["buckets"]["padding"]["inputs"].update(ids=[0]),
                lambda it: it["buckets"]["padding"]["inputs"].update(ids=[-1]),
                lambda it: it["buckets"]["padding"]["outputs"].update(t=[7]),
                lambda it: it["buckets"]["padding"]["values"].clear(), lambda it: it["buckets"]["lengths"].pop(),
                lambda it: it["buckets"]["lengths"].__setitem__(0, 13), lambda it: it["buckets"].update(code="x"),
        )),
        ("sized", lambda it: it["inputs"][0].update(dtype="string"), "fill axes"),
        ("sized", lambda it: it["files"].pop(UNPADDED), "lack 'golden/unpadded.npz'"),
        ("sized", lambda it: it.update(open_dims={"sequence": [4]}), "stand beside buckets"),
        *(("sizeless", spoil, "open dimensions") for spoil in (
                lambda it: it["open_dims"].pop("batch"), lambda it: it["open_dims"].clear(),
                lambda it: it["open_dims"].update(height=[1]), lambda it: it["open_dims"].update(batch=[]),
                lambda it: it["open_dims"].update(batch=[2, 1]), lambda it: it["open_dims"].update(batch=[-1]),
                lambda it: it["open_dims"].update(batch=list(range(99))),
                lambda it: [each.update(shape=[1, 2]) for each in it["inputs"]],
        )),
        (
            "sized",
            lambda it: (
                it.update(state={"steps": 2, "feeds": {"ids": it["outputs"][0]["name"]}}),
                it["inputs"][0].update(dtype=it["outputs"][0]["dtype"], shape=it["outputs"][0]["shape"]),
            ),
            "are of a model with state",
        ),
    ],
)  # fmt: skip
def test_a_manifest_cannot_state_sizes_that_are_not_there_or_beside_what_excludes_them(
    name: str, spoil: Callable[[dict[str, Any]], object], said: str, request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue(name)
    raw = msgspec.json.decode(encode_json(bundle.manifest))
    assert decode_manifest(encode_json(raw), "it") == bundle.manifest
    spoil(raw)
    with pytest.raises(BundleError, match=said or None):
        decode_manifest(encode_json(raw), "it")


def test_an_earlier_build_is_repeated_to_the_byte(tmp_path: Path) -> None:
    first = present(make(tmp_path, precision="fp32"))
    recipe = Recipe(targets=("cpu",), precision="fp32", dims={"batch": 1}, buckets={"sequence": SIZES})
    data = str(tmp_path / "data")
    again = build(
        tmp_path / "net.onnx", Data(source=data, evaluation=data, golden=first.parent), tmp_path / "again", recipe,
        verify=False,
    ).bundles[0].path  # fmt: skip
    assert (present(again) / "manifest.json").read_bytes() == (first / "manifest.json").read_bytes()


@pytest.fixture(scope="module")
def made(make_once: MakeOnce) -> Path:
    return make_once("open_dims", lambda folder: make(folder, dims={}, buckets={}))


@pytest.fixture(scope="module")
def sizeless(made: Path) -> Bundle:
    return open_bundle(made / "out" / "net-cpu")


def test_the_manifest_says_which_dimensions_are_open(sizeless: Bundle) -> None:
    manifest = sizeless.manifest
    assert manifest.precision == "int8"
    assert [spec.shape for spec in manifest.inputs] == [("batch", "sequence"), ("batch", "sequence")]
    assert [spec.shape for spec in manifest.outputs] == [
        ("batch", 8), ("batch", "sequence", 32), ("batch", None, 32), (),
    ]  # fmt: skip
    assert manifest.open_dims == {"batch": (1,), "sequence": tuple(sorted(LENGTHS))}
    assert "| `sequence` | 1, 2, 3," in (sizeless.folder / "README.md").read_text()
    assert "| input | `ids` | int64 | [batch, sequence] |" in (sizeless.folder / "README.md").read_text()


def test_small_middle_and_large_samples_are_judged_apart(sizeless: Bundle) -> None:
    (run,) = verify_bundle(sizeless, [InProcess()]).runs
    assert run.passed, (run.failures, run.unproven)
    assert present(run.sizes).dim == "sequence"
    assert [size.lengths for size in present(run.sizes).sizes] == [(3, 4, 1, 2), (8, 5, 6, 7), (12, 10, 9, 11)]
    by_size = InProcess(
        lie=lambda rows: [row if row["t"].shape[1] < 9 else {**row, "t": row["t"] * np.float32(1.5)} for row in rows]
    )
    (run,) = verify_bundle(sizeless, [by_size]).runs
    assert {gate.subject for gate in run.gates if gate.name == "size" and gate.failures} == {"sequence=12"}


def test_samples_of_ones_own_have_their_own_sizes(sizeless: Bundle, made: Path, tmp_path: Path) -> None:
    data = Data(source=write_samples(tmp_path / "own", (20, 1, 30, 17, 2, 3, 25, 4)))
    (run,) = verify_with(sizeless, made / "net.onnx", data, DeviceChoice(names=("host",))).runs
    assert run.passed, (run.failures, run.unproven)
    assert [size.size for size in present(run.sizes).sizes] == [4, 30]


def test_a_package_tests_one_size_and_runs_any(sizeless: Bundle, tmp_path: Path) -> None:
    loader, variant = open_loader(sizeless, tmp_path)
    session = loader.open_session(variant, loader.find_folder(variant))
    assert loader.run_self_test(variant, loader.find_folder(variant), session) == []
    for length in (2, 40):
        (found,) = session.run(["t"], make_sample(length, 7))
        wanted = CpuSession(sizeless.find_model("onnx"), SessionSettings()).run(make_sample(length, 7))["t"]
        np.testing.assert_allclose(found, wanted, atol=0.2)
    with pytest.raises(UsageError, match="have several sizes"):
        package_bundles([sizeless.folder], "tar", tmp_path / "q.tar", extras=("golden",))


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
