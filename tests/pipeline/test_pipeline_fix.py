"""A build rewrites the graph for a target where it then takes more, and ships only what is expected to start."""

import json
import math
import re
import shutil
from collections.abc import Generator
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from fixture_types import present
from onnx import numpy_helper
from tiny_models import parse_net, save_net

from edgekit.cli.main import run_command
from edgekit.errors import ModelError
from edgekit.jobs.build import build
from edgekit.jobs.build_inputs import BuildCache, BuildJob, calibrate_inputs, read_build_inputs
from edgekit.jobs.check import check_targets
from edgekit.jobs.quantize import QuantizeOptions, quantize_for
from edgekit.jobs.target_bundle import ReadyBundle, ready_bundles
from edgekit.model.model import load_model
from edgekit.model.tensors import Array
from edgekit.prepare.fix import REWRITES, apply_rewrites
from edgekit.progress import Stopwatch, say_nothing
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.recipe import Data, Recipe, load_targets
from edgekit.report.summary import BuildReport, BundleSummary
from edgekit.report.tables import describe_quantization
from edgekit.target import Precision, load_target

pytestmark = pytest.mark.slow
ZOO = Path(__file__).parents[3] / "shared/zoo"

NET = """
(float[1,4,8,8] x) => (float[1,5] y)
{ a = Conv<pads=[1,1,1,1]>(x, u)  h = HardSwish(a)  b = Conv<pads=[1,1,1,1]>(h, v)  i = HardSwish(b)
  p = GlobalAveragePool(i)  f = Flatten(p)  y = Gemm(f, w) }
"""


# Mirrored borders become Slice and Concat for NNAPI, which takes these; but quantized, its builder refuses that Concat.
MIRRORED = """
(float[1,4,8,8] x) => (float[1,5] y) <int64[8] pads = {0,0,1,1,0,0,1,1}>
{ q = Pad<mode="reflect">(x, pads)  a = Conv(q, u)  r = Relu(a)  b = Conv<pads=[1,1,1,1]>(r, v)
  p = GlobalAveragePool(b)  f = Flatten(p)  y = Gemm(f, w) }
"""


@pytest.fixture
def swishing(tmp_path: Path) -> tuple[Path, Data]:
    """A net whose HardSwish NNAPI does not take and QNN does."""
    return _make(NET, tmp_path)


def _make(text: str, tmp_path: Path) -> tuple[Path, Data]:
    rng = np.random.default_rng(3)
    shapes = {"u": (8, 4, 3, 3), "k": (8, 8, 1, 1), "t": (8, 20, 1, 1), "v": (8, 8, 3, 3), "w": (8, 5)}
    weights = {name: 0.3 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    path = save_net(text, tmp_path / "swishing.onnx", **weights).path
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(24, 4, 8, 8)).astype(np.float32))
    return path, Data(source=str(tmp_path / "data.npz"))


def _find(report: BuildReport, target: str) -> BundleSummary:
    return next(bundle for bundle in report.bundles if bundle.target == target)


def _read_check(bundle: BundleSummary) -> tuple[bool, int]:
    assert bundle.check is not None
    left = {node.op for node in bundle.check.node_list if not node.taken}
    return "HardSwish" in left, bundle.check.partitions


def test_a_target_gets_the_rewrites_by_which_it_takes_more(swishing: tuple[Path, Data], tmp_path: Path) -> None:
    recipe = Recipe(targets=("nnapi", "qnn"), forms=("onnx",))
    fixed = build(*swishing, tmp_path / "fixed", recipe, verify=False)
    plain = build(*swishing, tmp_path / "plain", msgspec.structs.replace(recipe, fix=False), verify=False)
    assert _read_check(_find(plain, "nnapi"))[0]
    assert not _read_check(_find(fixed, "nnapi"))[0]
    assert _read_check(_find(fixed, "nnapi"))[1] < _read_check(_find(plain, "nnapi"))[1]
    assert "split-hard-swish" in _check_notes(_find(fixed, "nnapi"))
    assert any("split-hard-swish (2 nodes)" in note for note in _find(fixed, "nnapi").notes)
    # What has nothing to gain has the bytes that it has alone.
    models = [
        {name: sha for name, sha in _find(each, "qnn").files.items() if name.startswith("model")}
        for each in (fixed, plain)
    ]
    assert models[0] == models[1] != {}


def test_no_fix_leaves_the_graph_and_is_recorded_in_the_manifest(
    swishing: tuple[Path, Data], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = swishing
    arguments = ["build", str(model), "--data", data.source, "--target", "nnapi", "--no-verify", "--no-fix"]
    run_command([*arguments, "--out", str(tmp_path / "out")])
    assert "rewritten for it" not in capsys.readouterr().out
    assert "--no-fix" in (tmp_path / "out" / "swishing-nnapi" / "manifest.json").read_text()


def _list_candidates(model: Path, data: Data, recipe: Recipe, folder: Path) -> Generator[ReadyBundle, str]:
    loaded = load_model(model)
    job = BuildJob(
        recipe=recipe, targets=load_targets(recipe), work=folder / "work", staging=folder / "out",
        cache=BuildCache(folder=None), progress=say_nothing, origin=loaded.sha256, end=math.inf, watch=Stopwatch(),
        memo=Memo(),
    )  # fmt: skip
    job.work.mkdir()
    inputs = calibrate_inputs(read_build_inputs(loaded, data, job), job)
    return ready_bundles(inputs, job.targets[0], job, folder / "nnapi")


def test_a_graph_stays_where_a_device_refuses_its_rewrite(swishing: tuple[Path, Data], tmp_path: Path) -> None:
    candidates = _list_candidates(*swishing, Recipe(targets=("nnapi",)), tmp_path)
    assert "rewritten for it" in next(candidates).notes[0]
    second = candidates.send("the driver refuses it")
    told = "left as it is, because 'nnapi' makes no session of the int8 model: the driver refuses it"
    assert second.notes[0] == told
    # What was dropped is not told.
    assert not any("rewritten for it" in note for note in second.notes)
    assert "HardSwish" in {node.op for node in second.contents.check.node_list}
    assert candidates.send("again").notes[0].startswith("quantized with exact ranges and plain rounding, because")


def test_a_model_of_which_nothing_starts_tells_why_its_best_form_failed(
    swishing: tuple[Path, Data], tmp_path: Path
) -> None:
    candidates = _list_candidates(*swishing, Recipe(targets=("nnapi",), precision="int8"), tmp_path)
    next(candidates)
    candidates.send("the driver refuses it")
    candidates.send("left as it is, it runs out of memory")
    with pytest.raises(ModelError, match="session of the int8 model: the driver refuses it"):
        candidates.send("so it does with plain rounding")


# Activations of 16 bits, of which NNAPI and Core ML take none. Each layer in float is a partition of its own.
SIXTEEN = """(float[1,4,8,8] x) => (float[1,4,8,8] y)
    <float s = {0.0002}, uint16 z = {32768}, float t = {0.01}>
    { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) f = DequantizeLinear(u, t)
      a = Conv<pads=[1,1,1,1]>(d, f) o = QuantizeLinear(a, s, z) e = DequantizeLinear(o, s, z)
      g = DequantizeLinear(v, t) b = Conv<pads=[1,1,1,1]>(e, g) p = QuantizeLinear(b, s, z)
      y = DequantizeLinear(p, s, z) }"""


def test_a_float_form_of_gigabytes_is_left_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = _save_sixteen(tmp_path)
    monkeypatch.setattr("edgekit.jobs.check.MOST_INLINE_BYTES", 4 * model.stat().st_size - 1)
    said = list[str]()
    build(model, data, tmp_path / "out", Recipe(targets=("nnapi",)), verify=False, progress=said.append)
    assert any("may take more than 2 GB" in line and "--dequantize" in line for line in said), said
    assert "float-form" not in str(check_targets(model, Recipe(targets=("nnapi",))).targets["nnapi"].report.advice)


def _save_sixteen(folder: Path) -> tuple[Path, Data]:
    rng = np.random.default_rng(3)
    weights: dict[str, Array] = {name: rng.integers(-40, 40, (4, 4, 3, 3)).astype(np.int8) for name in "uv"}
    model, samples = folder / "sixteen.onnx", folder / "data.npz"
    onnx.save(parse_net(SIXTEEN, weights, opset=21, ir_version=10), model)
    np.savez(samples, x=rng.normal(size=(24, 4, 8, 8)).astype(np.float32))
    return model, Data(source=str(samples))


def test_a_quantized_model_of_which_a_target_takes_too_little_is_built_from_its_float_form(tmp_path: Path) -> None:
    model, data = _save_sixteen(tmp_path)
    weights = {it.name: numpy_helper.to_array(it) for it in onnx.load(model).graph.initializer}
    targets = ("nnapi", "coreml", "qnn", "cpu")
    (tmp_path / "work").mkdir()
    recipe, cache = Recipe(targets=targets, forms=("onnx",)), BuildCache(work=tmp_path / "work")
    report = build(model, data, tmp_path / "out", recipe, verify=False, cache=cache)
    told = "made from the float form of the quantized model, which differs from it by "
    replanned = {each.target for each in report.bundles if any(note.startswith(told) for note in each.notes)}
    assert replanned == {"nnapi", "coreml"}, [each.notes for each in report.bundles]
    # Quantized anew, or in half precision; the others keep the numbers that they were given.
    precisions = {each.target: each.precision for each in report.bundles}
    assert precisions == {"nnapi": "int8", "coreml": "fp16", "qnn": "int8", "cpu": "int8"}
    for name in replanned:
        check = _find(report, name).check
        assert check is not None
        assert check.verdict == "yes"
    kept = "the model is quantized already: taken as it is; its float form differs from it by "
    assert all(any(note.startswith(kept) for note in _find(report, name).notes) for name in ("qnn", "cpu"))
    shipped = onnx.load(tmp_path / "out" / "sixteen-cpu" / "model.onnx")
    assert any(np.array_equal(numpy_helper.to_array(it), weights["u"]) for it in shipped.graph.initializer)
    # A second build finds the float form in the cache.
    (again,) = build(
        model, data, tmp_path / "again", Recipe(targets=("nnapi",), forms=("onnx",)), verify=False, cache=cache
    ).bundles
    assert again.files["model.onnx"] == _find(report, "nnapi").files["model.onnx"]
    # Another precision than int8 is that of the float form.
    (half,) = build(model, data, tmp_path / "half", Recipe(targets=("qnn",), precision="fp16"), verify=False).bundles
    assert half.precision == "fp16"
    assert half.notes[0].endswith(": --precision fp16 is asked for")
    with pytest.raises(ModelError, match="no float form of it can be built as fp16"):
        build(model, data, tmp_path / "no", Recipe(targets=("qnn",), precision="fp16", fix=False), verify=False)
    # The build does as the check says.
    summary = check_targets(model, Recipe(targets=targets))
    assert {n for n, it in summary.targets.items() if any(a.id == "float-form" for a in it.report.advice)} == replanned
    assert all(summary.targets[name].shipped.verdict == "yes" for name in replanned)


@pytest.mark.parametrize(("scale", "clips"), [(0.08, False), (0.002, True)])
def test_the_float_form_keeps_ranges_that_cut_off_what_no_calibration_would(
    scale: float, tmp_path: Path, *, clips: bool
) -> None:
    """Training can learn them (PACT): without them it is another network."""
    text = f"""g (float[1,4,8,8] x) => (float[1,4,8,8] y) <float s = {{{scale}}}, uint8 z = {{128}}>
        {{ c = Conv(x, w) q = QuantizeLinear(c, s, z) d = DequantizeLinear(q, s, z) y = Conv(d, w) }}"""
    rng = np.random.default_rng(3)
    model = save_net(text, tmp_path / "m.onnx", w=rng.normal(size=(4, 4, 1, 1)).astype(np.float32)).path
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(24, 1, 4, 8, 8)).astype(np.float32))
    data, recipe = Data(source=str(tmp_path / "data.npz")), Recipe(targets=("coreml",), forms=("onnx",))
    bundle = _find(build(model, data, tmp_path / "out", recipe, verify=False), "coreml")
    told = re.match(r"made from the float form .* differs from it by ([\d.]+) dB", bundle.notes[0])
    assert float(present(told).group(1)) > 30
    shipped = onnx.load(present(bundle.path) / "model.onnx").graph.node
    assert ("Clip" in {node.op_type for node in shipped}) == clips


# Along one axis, so that NNAPI takes the layers by a rewrite only; what mirrors the edges would stop the session.
LINE = """
(float[1,4,16] x) => (float[1,4,18] y) <int64[6] pads = {0,0,2,0,0,2}>
{ m = Neg(x)  q = Pad<mode="reflect">(m, pads)  a = Conv(q, u)  r = Relu(a)  y = Conv<pads=[1,1]>(r, u) }
"""


def test_nodes_stay_in_float_before_rewrites_go(tmp_path: Path) -> None:
    weights = np.random.default_rng(5).normal(size=(4, 4, 3)).astype(np.float32)
    model = save_net(LINE, tmp_path / "line.onnx", u=weights).path
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(6).normal(size=(16, 1, 4, 16)).astype(np.float32))
    data = Data(source=str(tmp_path / "data.npz"))
    bundle = _find(build(model, data, tmp_path / "out", Recipe(targets=("nnapi",)), verify=False), "nnapi")
    assert any(re.match(r"\d+ nodes stay in float \(Pad_q.*: in integers", note) for note in bundle.notes)
    assert _check_notes(bundle) >= {"conv-to-planes", "pad-reflect"}
    assert present(bundle.check).taken_macs == 1


def test_the_report_describes_the_file_that_is_shipped(tmp_path: Path) -> None:
    recipe = Recipe(targets=("nnapi",), precision="fp32")
    bundle = _find(build(*_make(MIRRORED, tmp_path), tmp_path / "out", recipe, verify=False), "nnapi")
    assert _check_notes(bundle) or "left as it is" in bundle.notes[0]


@pytest.mark.parametrize("name", ["kws_dscnn_float", pytest.param("vww_96_float", marks=pytest.mark.long)])
def test_the_report_describes_the_file_that_is_shipped_for_trained_networks(tmp_path: Path, name: str) -> None:
    model = ZOO / f"models/{name}.onnx"
    if not model.is_file():
        pytest.skip(f"needs ../shared/zoo/models/{name}.onnx")
    (given,) = onnx.load(model).graph.input
    batch, *shape = given.type.tensor_type.shape.dim
    values = np.random.default_rng(3).normal(size=(8, *(dim.dim_value for dim in shape)))
    np.savez(tmp_path / "data.npz", allow_pickle=False, **{given.name: values.astype(np.float32)})
    recipe = Recipe(targets=("nnapi", "coreml"), dims={batch.dim_param: 1})
    report = build(model, Data(source=str(tmp_path / "data.npz")), tmp_path / "out", recipe, verify=False)
    for target in recipe.targets:
        _check_notes(_find(report, target))


def _check_notes(bundle: BundleSummary) -> set[str]:
    """Returns the rewrites that notes tell, and holds notes and `check.json` against the bytes that are shipped."""
    assert bundle.path is not None
    # Rewrites change what they are given, so the nodes are listed first.
    shipped = onnx.load(str(bundle.path / "model.onnx"))
    names = {node.name for node in shipped.graph.node}
    told = {name for name in REWRITES if any(f"{name} (" in note for note in bundle.notes)}
    # A rewrite that was told finds nothing more to do there.
    assert not {fix.id for fix in apply_rewrites(shipped, told)}
    checked = json.loads((bundle.path / "check.json").read_text())
    assert checked["sha256"] == bundle.files["model.onnx"]
    assert {node["name"] for node in checked["node_list"]} == names
    return told


# A Concat that reads what NNAPI leaves to the CPU, as those of a U-Net do (no rewrite makes a Conv of a ConvTranspose
# with unequal strides): in integers it is claimed, and then refused.
JOINED = """
(float[1,4,8,8] x) => (float[1,5] y)
{ a = Conv<pads=[1,1,1,1]>(x, u)  r = Relu(a)  e = ConvTranspose<strides=[1,2], output_shape=[8,8]>(r, k)
  j = Concat<axis=1>(r, e, x)  s = Conv(j, t)  b = Conv<pads=[1,1,1,1]>(s, v)
  p = GlobalAveragePool(b)  f = Flatten(p)  y = Gemm(f, w) }
"""

# As YOLOv8's head: ONNX Runtime carries the Q of a Conv behind Reshape and Transpose back to the Concat before them.
CARRIED = """
(float[1,4,8,8] x) => (float[1,8,22,6] y)
<int64[3] flat = {1,8,-1}, int64[4] four = {1,8,8,24}>
{ a = Conv<pads=[1,1,1,1]>(x, u)  r = Relu(a)  e = ConvTranspose<strides=[1,2], output_shape=[8,8]>(r, k)
  b = Conv<pads=[1,1,1,1]>(e, v)  h = ConvTranspose<strides=[1,2], output_shape=[8,8]>(b, k)
  c = Reshape(r, flat)  d = Reshape(b, flat)  i = Reshape(h, flat)
  j = Concat<axis=2>(i, c, d)  m = Reshape(j, four)  o = Transpose<perm=[0,1,3,2]>(m)  y = Conv(o, v) }
"""

# A Max of one input, which Core ML's provider claims; it then crashes.
LONELY = """
<ir_version: 8, opset_import: ["" : 18]> g (float[1,4,8,8] x) => (float[1,5] y)
{ q = Max(x)  a = Conv<pads=[1,1,1,1]>(q, u)  r = Relu(a)  b = Conv<pads=[1,1,1,1]>(r, v)
  p = GlobalAveragePool(b)  f = Flatten(p)  y = Gemm(f, w) }
"""


@pytest.mark.parametrize(
    ("text", "precision", "kept"),
    [
        pytest.param(JOINED, "auto", "1 node stays in float (Concat_j)", marks=pytest.mark.long),
        (JOINED, "int8", "1 node stays in float (Concat_j)"),
        (CARRIED, "auto", "6 nodes stay in float (ConvTranspose_h, Reshape_c, Reshape_d)"),
    ],
)
def test_nodes_that_fail_sessions_stay_in_float(text: str, tmp_path: Path, precision: Precision, kept: str) -> None:
    recipe = Recipe(targets=("nnapi",), precision=precision)
    bundle = _find(build(*_make(text, tmp_path), tmp_path / "out", recipe, verify=False), "nnapi")
    assert f"{kept}: in integers the target would make no session" in bundle.notes
    assert bundle.check is not None
    assert (bundle.precision, bundle.check.is_refused) == ("int8", False)
    assert bundle.check.sha256 == bundle.files["model.onnx"]


def test_a_precision_that_was_asked_for_and_does_not_start_is_not_shipped_nor_exchanged(tmp_path: Path) -> None:
    recipe = Recipe(targets=("coreml", "cpu"), precision="fp32")
    report = build(*_make(LONELY, tmp_path), tmp_path / "out", recipe, verify=False)
    refused, whole = _find(report, "coreml"), _find(report, "cpu")
    assert (refused.path, refused.verdict) == (None, "fail")
    assert "no session of the fp32 model starts on coreml because of 1 node: Max 'Max_q'" in str(refused.failure)
    assert "leave --precision out" in str(refused.failure)
    assert whole.path is not None
    assert not (tmp_path / "out" / "swishing-coreml").exists()


def test_an_internal_error_fails_one_target(swishing: tuple[Path, Data], tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(load_target("nnapi").folder, odd)
    rules = odd / "rules.toml"
    # A version without its second number is a mistake that nothing looks for.
    rules.write_text(re.sub(r'^ort = ".*"$', 'ort = "1"', rules.read_text(), count=1, flags=re.MULTILINE))
    (odd / "target.toml").write_text((odd / "target.toml").read_text().replace('name = "nnapi"', 'name = "odd"'))
    report = build(*swishing, tmp_path / "out", Recipe(targets=(str(odd), "cpu")), verify=False)
    assert (_find(report, "odd").path, report.verdict) == (None, "fail")
    assert "fault of its own, IndexError" in str(_find(report, "odd").failure)
    assert (tmp_path / "out" / "swishing-cpu" / "manifest.json").is_file()
    told = (tmp_path / "out" / "fault-odd.txt").read_text()
    assert "Traceback" in told
    assert "onnxruntime: " in told


def test_quantize_by_a_method_says_why_no_session_starts_and_a_search_leaves_that_node_in_float(tmp_path: Path) -> None:
    text = """(float[1,4,8,8] x) => (float[1,8,15,8] y) { a = Conv<pads=[1,1,1,1]>(x, u) r = Relu(a)
      e = Erf(r) c = Concat<axis=2>(r, e) s = AveragePool<kernel_shape=[2,1]>(c) y = Relu(s) }"""
    path, data = _make(text, tmp_path)
    # A named range method is taken as it is.
    report = quantize_for(path, data, tmp_path / "q.onnx", Recipe(targets=("nnapi",)), QuantizeOptions(method="minmax"))
    assert report.refused
    line = next(line for line in describe_quantization(report) if line.startswith("no session of it is expected"))
    assert "because of 1 node: Concat 'Concat_c': a quantized Concat of one partition reads " in line
    searched = quantize_for(path, data, tmp_path / "q.onnx", Recipe(targets=("nnapi",)))
    assert (searched.refused, searched.precision) == (False, "int8")


def test_quantize_writes_what_the_target_takes_as_build_does(tmp_path: Path) -> None:
    text = """(float[1,4,8,8] x) => (float[1,5] y)
      <float z = {0.044715}, float r = {0.7978846}, float one = {1}, float half = {0.5}, float cube = {3}>
      { a = Conv<pads=[1,1,1,1]>(x, u) p = Pow(a, cube) q = Mul(p, z) s = Add(a, q) c = Mul(s, r) d = Tanh(c)
        e = Add(d, one) f = Mul(a, e) h = Mul(f, half) b = Conv<pads=[1,1,1,1]>(h, v) m = GlobalAveragePool(b)
        l = Flatten(m) y = Gemm(l, w) }"""
    path, data = _make(text, tmp_path)
    recipe = Recipe(targets=("qnn",))
    report = quantize_for(path, data, tmp_path / "q.onnx", recipe)
    assert (report.taken_macs, report.refused) == (1.0, False)
    assert report.taken.endswith("in 1 partition")
    assert "FastGelu" not in {node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node}
    as_it_is = quantize_for(path, data, tmp_path / "plain.onnx", msgspec.structs.replace(recipe, fix=False))
    assert not as_it_is.taken.endswith("in 1 partition")
