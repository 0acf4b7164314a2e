"""A build, end to end, on the demo model and on models that are hard."""

import itertools
import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from demo_paths import CALIBRATION, EVALUATION, LABELS, MODEL
from devices_models import require_device
from fixture_types import Refused, present
from tiny_models import parse_model, save_net, write_small_net

from edgekit._files import digest_file
from edgekit.bundle.folder import open_bundle
from edgekit.cli.main import run_command
from edgekit.devices.device import LEAST_SAMPLES
from edgekit.devices.find import DeviceChoice, find_device
from edgekit.errors import DataError, EdgekitError, OutputError, UsageError
from edgekit.evidence import Verdict
from edgekit.jobs.build import build
from edgekit.jobs.check import check_targets
from edgekit.jobs.quantize import QuantizeOptions, quantize_for
from edgekit.model.model import load_model
from edgekit.recipe import Data, PrecisionChoice, Recipe
from edgekit.report.summary import BuildReport
from edgekit.report.tables import describe_quantization
from edgekit.target import Precision, find_group, load_target
from edgekit.verify.on_devices import verify_on

pytestmark = pytest.mark.slow

TARGETS = ("nnapi", "coreml", "qnn", "xnnpack")
DEMO_DATA = Data(source=str(CALIBRATION), evaluation=str(EVALUATION), labels=LABELS)


@pytest.fixture(scope="module")
def demo(make_once: Callable[[str, Callable[[Path], None]], Path]) -> BuildReport:
    """What `edgekit demo` makes."""
    for name, target in (("qnn-htp-sim", "qnn"), ("android", "xnnpack"), ("android:x86_64", "nnapi")):
        require_device(name, target)

    def fill(folder: Path) -> None:
        assert run_command(["demo", "-q", "--json", "--out", str(folder / "out")]) == 0

    out = make_once("demo-on-targets", fill) / "out"
    text = (out / "report.json").read_bytes()
    report = msgspec.json.decode(text, type=BuildReport, dec_hook=lambda kind, value: kind(value))
    # The folder was moved to its place when it was whole.
    bundles = tuple(
        msgspec.structs.replace(bundle, path=bundle.path and out / bundle.path.name) for bundle in report.bundles
    )
    return msgspec.structs.replace(report, bundles=bundles, report=out / report.report.name)


def verdict_of_coreml() -> Verdict:
    """What can be said here of a bundle for Core ML that is right: without its provider nothing is proven."""
    missing = find_device("ios-sim", load_target("coreml")).find_missing()
    return "pass" if missing is None else "not proven"


def test_the_demo_passes_on_four_targets(demo: BuildReport) -> None:
    wanted = {target: verdict_of_coreml() if target == "coreml" else "pass" for target in TARGETS}
    assert {bundle.target: bundle.verdict for bundle in demo.bundles} == wanted
    assert demo.verdict == verdict_of_coreml()


def test_a_time_budget_covers_verifying_with_fewer_samples_and_tells(tmp_path: Path) -> None:
    write_small_net(path := tmp_path / "m.onnx", tmp_path / "x.npz")
    data = Data(source=str(tmp_path / "x.npz"), evaluation=str(tmp_path / "x.npz"))
    counts = []
    for seconds in None, 0.0:
        out = tmp_path / f"out-{seconds}"
        # On this machine alone: without emulated Arm.
        recipe = Recipe(targets=("cpu",), precision="fp32", settings={"arch": "x64-vnni"})
        (bundle,) = build(path, data, out, recipe, time_budget_s=seconds).bundles
        assert bundle.verify is not None
        counts.append({run.samples for run in bundle.verify.runs})
        notes = [note for run in bundle.verify.runs for note in run.notes]
        assert any(f"stopped after {LEAST_SAMPLES} of " in note for note in notes) == (seconds is not None)
    assert counts == [{32}, {LEAST_SAMPLES}]
    how = QuantizeOptions(time_budget_s=0.0)
    report = quantize_for(path, Data(source=data.source), tmp_path / "q.onnx", Recipe(targets=("qnn",)), how)
    assert report.left_out == ("range methods and roundings",)


def test_a_label_that_is_no_class_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.full_like(np.load(LABELS), -1))
    data = msgspec.structs.replace(DEMO_DATA, labels=tmp_path / "labels.npy")
    with pytest.raises(DataError, match="label -1 is no class of an output of 10"):
        build(MODEL, data, tmp_path / "out", Recipe(targets=("xnnpack",)))
    assert not (tmp_path / "out").exists()


def test_every_run_has_the_evidence_of_its_device(demo: BuildReport) -> None:
    worth = {
        bundle.target: {run.evidence.value for run in bundle.verify.runs} for bundle in demo.bundles if bundle.verify
    }
    assert worth["qnn"] == {"simulator"}
    assert worth["xnnpack"] == worth["nnapi"] == {"same-binary", "same-ep"}
    assert "emulated" in worth["coreml"]


def test_the_demo_keeps_its_accuracy(demo: BuildReport) -> None:
    for bundle in demo.bundles:
        for run in bundle.verify.runs if bundle.verify else ():
            assert run.accuracy is not None
            assert run.accuracy.got >= run.accuracy.reference - 0.02


def test_qnn_ran_without_the_cpu(demo: BuildReport) -> None:
    (run,) = next(bundle for bundle in demo.bundles if bundle.target == "qnn").verify.runs  # type: ignore[union-attr]
    assert run.provider_nodes.keys() == {"QNNExecutionProvider"}


def test_xnnpack_took_the_convolutions(demo: BuildReport) -> None:
    bundle = next(bundle for bundle in demo.bundles if bundle.target == "xnnpack")
    (run,) = (run for run in bundle.verify.runs if run.device == "android")  # type: ignore[union-attr]
    assert run.provider_nodes["XnnpackExecutionProvider"] >= 31


def test_the_report_is_the_json_beside_it(demo: BuildReport) -> None:
    written = json.loads((demo.report.parent / "report.json").read_text())
    assert {"model", "bundles", "seconds", "peak_rss_bytes", "report"} <= written.keys()
    assert written["passed"] is (verdict_of_coreml() == "pass")
    for bundle in written["bundles"]:
        assert {"target", "path", "passed", "sha256", "files"} <= bundle.keys()
    page = demo.report.read_text()
    assert page.count("<script") == 1
    assert all(f'id="{target}"' in page for target in TARGETS)


def test_the_seconds_of_a_build_are_those_of_its_stages(demo: BuildReport) -> None:
    # First the target for which nothing is planned, then those that are verified more and more slowly.
    shared, last = [(name, "") for name in ("prepare", "samples", "float model")], [("verify", "")]
    coreml, *own = ([("quantize", name), ("convert", name)] for name in ("coreml", "qnn", "xnnpack", "nnapi"))
    assert [(stage.stage, stage.target) for stage in demo.stages] == [
        *shared, *coreml, ("calibrate", ""), *itertools.chain(*own), *last
    ]  # fmt: skip
    assert sum(stage.seconds for stage in demo.stages) == pytest.approx(demo.seconds, abs=0.5)
    # Emulators are processes of their own, which count.
    assert demo.stages[-1].cpu_seconds > 0.5


def test_every_bundle_opens_and_verifies_again(demo: BuildReport) -> None:
    for bundle in demo.bundles:
        assert open_bundle(present(bundle.path)).manifest.target == bundle.target
    nnapi = next(bundle.path for bundle in demo.bundles if bundle.target == "nnapi")
    assert verify_on(open_bundle(present(nnapi)), DeviceChoice(names=("android:x86_64",))).passed


@pytest.mark.long
def test_the_wheel_runs_the_demo_and_gives_the_same_bytes(built_wheel: Path, demo: BuildReport, tmp_path: Path) -> None:
    place = tmp_path / "env"
    venv.create(place, symlinks=True)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--offline", "--no-cache", "--python"]
    subprocess.run([*uv, str(place / "bin/python"), str(built_wheel)], check=True, capture_output=True)
    # What edgekit depends on is that of this environment; the checkout itself, an editable install, stays hidden.
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    asked = "import edgekit; print(edgekit.__file__)"
    where = subprocess.run([place / "bin/python", "-c", asked], cwd=tmp_path, capture_output=True, check=True)
    assert Path(where.stdout.decode().strip()).is_relative_to(place)
    command = [str(place / "bin/edgekit"), "demo", "-q", "--json", "--out", "out"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert json.loads(run.stdout) == written
    files = [dict(bundle.files) for bundle in demo.bundles]
    assert [bundle["files"] for bundle in written["bundles"]] == files


def test_without_verification_data_some_samples_are_kept_back(tmp_path: Path) -> None:
    report = build(MODEL, Data(source=str(CALIBRATION)), tmp_path / "o", Recipe(targets=("coreml",)), verify=False)
    assert (report.calibration_samples, report.golden_samples) == (192, 64)


def test_a_model_without_weights_to_quantize_is_built_in_float_and_says_so(tmp_path: Path, nnapi: str) -> None:
    model = parse_model("g (int64[1,4] x) => (int64[1,4] y) { y = Add(x, x) }", tmp_path / "integers.onnx")
    np.savez(tmp_path / "d.npz", x=np.arange(16).reshape(4, 4))
    report = build(model, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", Recipe(targets=(nnapi,)))
    assert report.bundles[0].precision == "fp32"
    assert "built as fp32" in report.bundles[0].notes[0]


def test_samples_with_one_answer_are_told_of(tmp_path: Path) -> None:
    weights = ", ".join(str(0.01 * (index % 7 - 3)) for index in range(64))
    model = parse_model(
        f"g (float[1,8] x) => (float[1,8] y) <float[8,8] w = {{{weights}}}, float[8] b = {{9, 0, 0, 0, 0, 0, 0, 0}}> "
        "{ s = Gemm(x, w, b) y = Softmax(s) }",
        tmp_path / "m.onnx",
    )
    rows = np.random.default_rng(0).normal(size=(24, 1, 8)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=rows)
    data, recipe = Data(source=str(tmp_path / "d.npz")), Recipe(targets=("cpu",))
    report = build(model, data, tmp_path / "out", recipe, verify=False)
    assert any("samples have the same answer" in note for note in report.bundles[0].notes)
    quantized = quantize_for(model, data, tmp_path / "q.onnx", recipe)
    assert any("samples have the same answer" in line for line in describe_quantization(quantized))


def test_two_inputs_one_dynamic_and_two_outputs(tmp_path: Path, nnapi: str) -> None:
    weights = ", ".join(str(0.01 * (index % 7 - 3)) for index in range(108))
    model = parse_model(
        "g (float[N,3,8,8] a, float[N,4,6,6] b) => (float[N,4,6,6] y, float[N,4,1,1] z)"
        f"<float[4,3,3,3] w = {{{weights}}}> {{ c = Conv(a, w)  y = Add(c, b)  z = GlobalAveragePool(y) }}",
        tmp_path / "two.onnx",
    )
    random = np.random.default_rng(0)
    arrays = {"a": random.normal(size=(12, 3, 8, 8)), "b": random.normal(size=(12, 1, 4, 6, 6))}
    np.savez(tmp_path / "d.npz", **{name: value.astype(np.float32) for name, value in arrays.items()})  # type: ignore[arg-type]
    recipe = Recipe(targets=(nnapi, "coreml"), dims={"N": 1})
    report = build(model, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", recipe)
    verdicts = [bundle.verdict for bundle in report.bundles]
    assert verdicts == ["pass", verdict_of_coreml()], [bundle.verify for bundle in report.bundles]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").touch()
    with pytest.raises(EdgekitError, match="is empty"):
        build(tmp_path / "empty.onnx", DEMO_DATA, tmp_path / "deep" / "out")
    np.savez(tmp_path / "nan.npz", image=np.full((2, 1, 32, 32), np.nan, np.float32))
    with pytest.raises(EdgekitError, match="NaN"):
        build(MODEL, Data(source=str(tmp_path / "nan.npz")), tmp_path / "deep" / "out")
    with pytest.raises(OutputError, match="is a file"):
        build(MODEL, DEMO_DATA, tmp_path / "empty.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.onnx", "nan.npz"]


def test_a_check_covers_each_target(small: tuple[Path, Data], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert set(check_targets(MODEL, Recipe()).targets) == set(find_group("all"))
    out = tmp_path_factory.mktemp("one")
    report = quantize_for(*small, out / "q.onnx", Recipe(targets=("nnapi",), samples=8))
    assert report.samples == 8
    assert report.quantized_nodes == 3  # two pass values on in float, as nnapi takes them
    assert report.met is None  # no goal was set
    assert report.float_bytes == 0
    assert [path.name for path in out.iterdir()] == ["q.onnx"]


def test_quantizing_alone_makes_what_a_build_makes(tmp_path: Path) -> None:
    weights = ", ".join(str(0.01 * (index % 7 - 3)) for index in range(108))
    model = parse_model(
        "g (float[1,3,8,8] x) => (float[1,4,6,6] y)"
        f"<float[4,3,3,3] w = {{{weights}}}> {{ c = Conv(x, w)  s = Sum(c, c)  y = Relu(s) }}",
        tmp_path / "rewritten.onnx",
    )
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(40, 1, 3, 8, 8)).astype(np.float32))
    data = Data(source=str(tmp_path / "d.npz"), evaluation=str(tmp_path / "d.npz"))
    recipe = Recipe(targets=("nnapi", "xnnpack"))
    bundles = build(model, data, tmp_path / "out", recipe, verify=False).bundles
    for target, bundle in zip(recipe.targets, bundles, strict=True):
        out = tmp_path / f"{target}.onnx"
        assert quantize_for(model, data, out, Recipe(targets=(target,))).fixes == {"sum-to-add": 1}
        assert load_model(out).sha256 == open_bundle(present(bundle.path)).manifest.ancestry.quantized


def test_a_quantized_model_is_taken_as_it_is(small: tuple[Path, Data], tmp_path: Path, nnapi: str) -> None:
    recipe, (model, data) = Recipe(targets=(nnapi,)), small
    quantize_for(model, data, tmp_path / "q.onnx", recipe)
    (bundle,) = build(tmp_path / "q.onnx", data, tmp_path / "out", recipe).bundles
    assert bundle.passed
    assert bundle.precision == "int8"
    assert "quantized already" in bundle.notes[0]


def test_a_target_that_takes_none_of_the_work_fails(tmp_path: Path, nnapi: str) -> None:
    text = "g (float[1,4] x) => (float[1,4] y) { y = Erf(x) }"
    np.savez(tmp_path / "d.npz", x=np.ones((8, 4), np.float32))
    recipe = Recipe(targets=(nnapi,))
    report = build(
        parse_model(text, tmp_path / "erf.onnx"), Data(source=str(tmp_path / "d.npz")), tmp_path / "o", recipe
    )
    assert not report.passed
    assert "takes 0% of the work" in report.bundles[0].verify.failures[0]  # type: ignore[union-attr]


def test_weights_stored_in_8_bits_do_not_make_a_model_quantized(tmp_path: Path, nnapi: str) -> None:
    weights = ", ".join(str(index % 9 - 4) for index in range(144))
    text = (
        "g (float[1,4,8,8] x) => (float[1,4,6,6] y)"
        f"<int8[4,4,3,3] q = {{{weights}}}, float s = {{0.05}}>"
        "{ w = DequantizeLinear(q, s) c = Conv(x, w) y = Relu(c) }"
    )
    samples = np.random.default_rng(0).normal(size=(12, 4, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=samples)
    data = Data(source=str(tmp_path / "d.npz"))
    (bundle,) = build(parse_model(text, tmp_path / "w.onnx"), data, tmp_path / "o", Recipe(targets=(nnapi,))).bundles
    assert bundle.passed
    assert bundle.quantized_nodes == 1


@pytest.mark.parametrize(
    ("precision", "least_db"),
    [*(pytest.param(*given, marks=pytest.mark.long) for given in (("int16", 45), ("w4a16", 25))), ("w4a8", 25)],
)
def test_other_integer_precisions_pass_on_the_simulator(tmp_path: Path, precision: Precision, least_db: float) -> None:
    require_device("qnn-htp-sim", "qnn")
    rng = np.random.default_rng(7)
    text = """(float[1,3,16,16] x) => (float[1,10] y) {
      c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, u)  r = Relu(c)  d = Conv<group=16, pads=[1,1,1,1]>(r, k)  s = Relu(d)
      e = Conv(s, q)  a = Add(e, r)  p = GlobalAveragePool(a)  f = Flatten(p)  y = Gemm<transB=1>(f, w) }"""
    shapes = {"u": (16, 3, 3, 3), "k": (16, 1, 3, 3), "q": (16, 16, 1, 1), "w": (10, 16)}
    # Values keep their size.
    drawn = {name: rng.normal(0, np.prod(shape[1:]) ** -0.5, shape) for name, shape in shapes.items()}
    weights = {name: value.astype(np.float32) for name, value in drawn.items()}
    path = save_net(text, tmp_path / "net.onnx", **weights).path
    np.savez(tmp_path / "x.npz", x=rng.normal(size=(24, 1, 3, 16, 16)).astype(np.float32))
    data = Data(source=str(tmp_path / "x.npz"), evaluation=str(tmp_path / "x.npz"))
    (bundle,) = build(path, data, tmp_path / "out", Recipe(targets=("qnn",), precision=precision)).bundles
    assert (bundle.precision, bundle.passed) == (precision, True)
    (run,) = present(bundle.verify).runs
    assert run.evidence.value == "simulator"
    assert run.provider_nodes.keys() == {"QNNExecutionProvider"}
    assert (run.outputs[0].sqnr_db or 0.0) > least_db


@pytest.fixture
def saturating(tmp_path: Path) -> tuple[Path, Data, Recipe]:
    """A model whose 8-bit products of pairs saturate in 16 bits, in some channels, and what tells that."""
    require_device("host:haswell")
    text = """(float[1,8,8,8] x) => (float[1,10] y) { c = Conv<pads=[1,1,1,1]>(x, u)  r = Relu(c)
      p = GlobalAveragePool(r)  f = Flatten(p)  y = Gemm<transB=1>(f, w) }"""
    rng = np.random.default_rng(7)
    large, mixed = rng.uniform(0.8, 1, (16, 8, 3, 3)), rng.uniform(-1, 1, (10, 16))
    large[::2, :, :, ::2] *= 0.02
    path = save_net(text, tmp_path / "net.onnx", u=large.astype(np.float32), w=mixed.astype(np.float32)).path
    np.savez(tmp_path / "x.npz", x=rng.uniform(0.3, 1, size=(24, 1, 8, 8, 8)).astype(np.float32))
    data = Data(source=str(tmp_path / "x.npz"), evaluation=str(tmp_path / "x.npz"))
    limits = {"cpu": {"min_sqnr_db": 30.0}}
    return path, data, Recipe(targets=("cpu",), thresholds=limits, outputs={"y": "values"})


@pytest.mark.long
def test_a_bundle_for_any_x64_passes_without_vnni(saturating: tuple[Path, Data, Recipe], tmp_path: Path) -> None:
    path, data, recipe = saturating
    recipe = msgspec.structs.replace(recipe, settings={"arch": "x64"})
    (summary,) = build(path, data, tmp_path / "out", recipe).bundles
    assert [(run.device, run.passed, run.evidence.value) for run in present(summary.verify).runs] == [
        ("host", True, "same-ep"),
        ("host:haswell", True, "same-ep"),
    ]


@pytest.mark.long
def test_a_bundle_for_vnni_says_why_it_fails(saturating: tuple[Path, Data, Recipe], tmp_path: Path) -> None:
    path, data, recipe = saturating
    recipe = msgspec.structs.replace(recipe, settings={"arch": "x64-vnni"})
    build(path, data, tmp_path / "out", recipe, verify=False)
    report = verify_on(open_bundle(tmp_path / "out" / "net-cpu"), DeviceChoice(names=("host:haswell",)))
    assert not report.passed
    (run,) = report.runs
    assert any("the emulated CPU has no VNNI" in line for line in (*run.failures, *run.notes))


def test_a_build_says_where_a_model_may_end_whose_last_nodes_qnn_does_not_take(tmp_path: Path) -> None:
    require_device("qnn-htp-sim", "qnn")
    text = """g (float[1,2,4,4] x) => (float[1,2] y) <float[2,2,1,1] w = {1,2,3,4}> {
      c = Conv(x, w) r = Relu(c) d = Det(r) y = Relu(d) }"""
    path = parse_model(text, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(16, 1, 2, 4, 4)).astype(np.float32))
    report = build(path, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", Recipe(targets=("qnn",)), verify=False)
    (bundle,) = report.bundles
    # The rules agree with the compiler that Det is not taken: nothing else is planned and compiled.
    assert [stage.stage for stage in report.stages].count("convert") == 1
    ends = "(end the model before 2 nodes, which the app then computes: edgekit prepare --outputs r; "
    assert ends in str(bundle.failure)


@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_a_model_whose_best_plan_leaves_no_work_in_integers_is_built_as_float(
    tmp_path: Path, precision: PrecisionChoice
) -> None:
    """An output is a difference of 0.1 between channels of 100, which 8 bits do not hold; a MaxPool has 8 bits."""
    text = """g (float[1,2,8,8] x, float[1,1,8,8] z) => (float[1,1,8,8] y, float[1,1,4,4] m)
      <float[1,2,1,1] w = {1, -1}> { c = Conv(x, w) y = Sigmoid(c)
      m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(z) }"""
    path, rng = parse_model(text, tmp_path / "m.onnx"), np.random.default_rng(0)
    sizes = ((100, (32, 1, 1, 8, 8)), (0.1, (32, 1, 2, 8, 8)), (1, (32, 1, 1, 8, 8)))
    common, own, free = (rng.normal(0, spread, size).astype(np.float32) for spread, size in sizes)
    np.savez(tmp_path / "d.npz", x=common + own, z=free)
    recipe = Recipe(targets=("cpu",), precision=precision)
    (bundle,) = build(path, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", recipe, verify=False).bundles
    reason = "built as fp32, because the best plan that was found leaves no work in int8; with all of it there: "
    assert any(note.startswith(reason) for note in bundle.notes) is (precision == "auto")
    assert bundle.precision == ("fp32" if precision == "auto" else "int8")


def test_a_model_that_multiplies_nothing_is_built_as_float_where_integers_lose_much(tmp_path: Path) -> None:
    """Nearest neighbours of a table, of columns of ten thousands and of tenths, failed on nnapi as int8."""
    text = """g (float[1,6] x) => (float[1,6] y)
      <float[1,6] f = {1e-4, 1e-3, 1e-2, 0.1, 1, 10}> { h = Mul(x, f) y = Sin(h) }"""
    path, sizes = parse_model(text, tmp_path / "m.onnx"), 10.0 ** np.arange(4, -2, -1)
    np.savez(tmp_path / "d.npz", x=(np.random.default_rng(0).normal(size=(32, 1, 6)) * sizes).astype(np.float32))
    recipe = Recipe(targets=("nnapi",))
    (bundle,) = build(path, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", recipe, verify=False).bundles
    assert bundle.precision == "fp32"
    assert any(note.startswith("built as fp32, because the best plan that was found") for note in bundle.notes)


def test_a_build_names_a_large_table_that_leaves_8_bits(tmp_path: Path) -> None:
    text = """(int64[1,8] x) => (float[1,8,32] y) {
      rows = Gather(table, x) h = MatMul(rows, v) n = LayerNormalization(h, gain) y = MatMul(n, w) }"""
    rng = np.random.default_rng(0)
    # Most rows are far smaller than a few, and a normalization makes them equal.
    table = rng.normal(size=(400, 32)) * np.where(np.arange(400) % 50, 0.01, 8)[:, None]
    drawn = {
        "table": table,
        "v": rng.normal(size=(32, 32)) / 6,
        "w": rng.normal(size=(32, 32)) / 6,
        "gain": np.ones(32),
    }
    path = save_net(text, tmp_path / "m.onnx", **{name: each.astype(np.float32) for name, each in drawn.items()}).path
    np.savez(tmp_path / "d.npz", x=rng.integers(0, 400, (48, 1, 8)))
    recipe = Recipe(targets=("qnn",), precision="int8", forms=("onnx",))
    (bundle,) = build(path, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", recipe, verify=False).bundles
    assert "large constants in 16 bits, which 8 bits do not hold: 'table' 26 kB" in bundle.notes


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


def test_trees_alone_are_no_int8_model(tmp_path: Path, refused: Refused) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
        trees (float[1,1] x) => (int64[1] y, seq(map(int64, float)) m) {
        y, p = ai.onnx.ml.TreeEnsembleClassifier <classlabels_int64s = [0, 1], nodes_treeids = [0, 0, 0],
            nodes_nodeids = [0, 1, 2], nodes_featureids = [0, 0, 0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_values = [0.0, 0.0, 0.0], nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0],
            class_treeids = [0, 0], class_nodeids = [1, 2], class_ids = [0, 1], class_weights = [1.0, 1.0]> (x)
        m = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]> (p) }"""
    model = str(parse_model(text, tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.linspace(-1, 1, 32, dtype=np.float32).reshape(32, 1, 1))
    given = (model, "--data", str(tmp_path / "d.npz"), "--target", "cpu", "--precision", "int8")
    words = "no target computes TreeEnsembleClassifier in integers (build it with --precision fp32)"
    assert words in refused("quantize", *given, "--out", str(tmp_path / "q.onnx"))


def test_trees_read_nan_as_a_missing_value(tmp_path: Path, refused: Refused, without_arm: Callable[[str], str]) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]> trees (float[1,1] x, float[1,2] u)
    => (float[1,1] y, float[1,2] z) <float[2,2] w = {0.5, 0.2, -0.4, 1.0}> {
        p = MatMul(u, w) z = Relu(p) y = ai.onnx.ml.TreeEnsembleRegressor <n_targets = 1, nodes_treeids = [0, 0, 0],
            nodes_nodeids = [0, 1, 2], nodes_featureids = [0, 0, 0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_values = [0.0, 0.0, 0.0], nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0],
            target_treeids = [0, 0], target_nodeids = [1, 2], target_ids = [0, 0], target_weights = [-1.0, 1.0]
            > (x) }"""
    model, data = str(parse_model(text, tmp_path / "m.onnx")), ("--data", str(tmp_path / "d.npz"))
    rows = np.linspace(-1, 1, 64, dtype=np.float32).reshape(32, 1, 2)
    holes = np.where(np.arange(32)[:, None, None] == 3, np.float32(np.nan), rows)
    np.savez(tmp_path / "d.npz", x=holes[..., :1], u=rows)
    commands = [
        ("build", model, *data, "--target", without_arm("cpu"), "--out", str(tmp_path / "out")),
        ("quantize", model, *data, "--target", "cpu", "--out", str(tmp_path / "q.onnx")),
        ("compare", model, str(tmp_path / "q.onnx"), *data, "--min-sqnr", "20", "--accept-unproven"),
        ("verify", str(tmp_path / "out/m-cpu"), *data, "--on", "host", "--reference", model, "--accept-unproven"),
    ]
    assert [run_command([*command]) for command in commands] == [0, 0, 0, 0]
    np.savez(tmp_path / "d.npz", x=rows[..., :1], u=holes)
    for command in commands:
        assert "sample 3 of" in (told := refused(*command))
        assert "has NaN in input 'u'" in told
