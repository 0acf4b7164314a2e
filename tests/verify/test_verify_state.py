"""Models with state: built from sequences, and verified with the state that a device feeds back itself."""

import runpy
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from fixture_types import present
from msgspec.structs import replace
from onnx import numpy_helper
from stepped_models import RECURRENT, STEPS, save_data
from tiny_models import parse_model
from verify_devices import InProcess, from_list, open_loader, restate

import edgekit
from edgekit.bundle import edgekit_pipeline
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.golden import read_inputs, read_outputs
from edgekit.bundle.manifest import Manifest, decode_manifest, encode_json
from edgekit.cli.main import run_command
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.find import DeviceChoice
from edgekit.errors import BundleError, DataError, UsageError
from edgekit.jobs.build import build
from edgekit.jobs.quantize import quantize_for
from edgekit.model.state import State, feed_back
from edgekit.model.tensors import Reading, Tensors, TensorSpec
from edgekit.recipe import Data, Recipe
from edgekit.report.text import find_worst, list_verify_remarks, table_verify
from edgekit.serialize import to_json
from edgekit.verify.metrics.agreement import Agreement
from edgekit.verify.metrics.compare import compare_bundled
from edgekit.verify.metrics.outputs import weigh_output
from edgekit.verify.more_runs import measure_drift
from edgekit.verify.on_devices import verify_with
from edgekit.verify.report import read_report, write_report
from edgekit.verify.run import verify_bundle


class Decaying(InProcess, frozen=True, kw_only=True):
    """Makes the state at each step a little larger than it is: no step by itself is bad."""

    factor: float

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        def decay(row: Tensors) -> Tensors:
            return {**row, "new_h": row["new_h"] * np.float32(self.factor)}

        tell = job.on_outputs
        if tell is not None:
            job = replace(job, on_outputs=lambda row: tell(decay(row)))
        run = super().run_job(job, work)
        return replace(run, outputs=from_list([decay(row) for row in run.outputs]))


class Stumbling(InProcess, frozen=True, kw_only=True):
    """Runs all samples of a verification, and once it is called step by step no more than so many turns."""

    turns: int
    dies: bool = False

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        if job.on_outputs is None:
            return super().run_job(job, work)
        first = Samples(source="it", count=self.turns, read=lambda: islice(job.samples, self.turns))
        run = super().run_job(replace(job, samples=first), work)
        return run if self.turns else replace(run, failure="it is asleep", crashed=self.dies)


def test_golden_samples_are_whole_sequences_with_the_float_models_state(stepped: Bundle) -> None:
    assert stepped.manifest.state == State(steps=STEPS, feeds={"h": "new_h"})
    assert stepped.golden.samples % STEPS == 0
    last: Tensors = {}
    for index, (given, made) in enumerate(zip(read_inputs(stepped.golden), read_outputs(stepped.golden), strict=True)):
        wanted = np.zeros((1, 4), np.float32) if index % STEPS == 0 else last["new_h"]
        np.testing.assert_array_equal(given["h"], wanted)
        last = made
    assert "`h` | `new_h`" in (stepped.folder / "README.md").read_text()


def test_an_honest_device_keeps_its_state(stepped: Bundle, tmp_path: Path) -> None:
    report = verify_bundle(stepped, [InProcess()])
    (run,) = report.runs
    assert report.passed, (run.failures, run.unproven)
    assert run.state is not None
    assert (run.state.steps, run.state.sequences, run.samples) == (STEPS, 2, 2 * STEPS)
    assert [output.name for output in run.state.outputs] == ["y"]  # of the state the app sees nothing
    assert {drift.output: drift.lost_db for drift in run.state.drift} == {"y": 0.0, "new_h": 0.0}
    assert any("2 sequences of 8 steps" in line for line in list_verify_remarks(report))
    write_report(replace(stepped, folder=tmp_path), report)
    assert to_json(read_report(tmp_path / "verify.json")) == to_json(report)


@pytest.mark.parametrize(("factor", "said"), [(1.03, "output 'y' drifts"), (1.3, "with its own state over 8 steps")])
def test_a_device_whose_state_drifts_fails(stepped: Bundle, factor: float, said: str) -> None:
    # Its two numbers are read as classes, which the state hardly moves: here they are a curve.
    curve = restate(stepped, readings={"y": Reading(kind="values", axis=1)})
    (run,) = verify_bundle(curve, [Decaying(factor=factor)]).runs
    gates = {gate.name for gate in run.gates if gate.failures}
    assert "state" in gates
    assert any(said in line for line in run.failures), run.failures
    if factor < 1.1:
        assert gates == {"session", "state"}  # 3 % is more than the self-test of a float32 model grants
        drift = present(run.state).drift[0]
        # The more steps, the more its error adds up.
        assert drift.fed_back[1] > drift.fed_back[3] > drift.fed_back[7]  # type: ignore[operator]
        loose = replace(run.thresholds, max_drift_db=None)
        assert replace(run, thresholds=loose, findings=()).passed


@pytest.mark.parametrize(("turns", "said"), [(0, "it is asleep"), (3, "1 of 2 samples came back")])
def test_a_device_that_cannot_step_fails(stepped: Bundle, turns: int, said: str) -> None:
    (run,) = verify_bundle(stepped, [Stumbling(turns=turns)]).runs
    assert any(f"step by step the device failed: {said}" in line for line in run.failures)


def test_what_ended_before_a_sequence_was_whole_proves_nothing(stepped: Bundle) -> None:
    report = verify_bundle(stepped, [Stumbling(turns=0, dies=True)])
    assert (report.verdict, report.runs[0].failures) == ("not proven", ())
    assert report.runs[0].unproven == ("step by step the emulator crashed, which proves nothing: it is asleep",)
    report = verify_bundle(stepped, [InProcess(stopped_early=True, lie=lambda rows: rows[: STEPS - 1])])
    (run,) = report.runs
    assert report.verdict == "not proven", run.failures
    assert any("before one sequence of 8 steps was whole" in line for line in run.unproven)


def test_a_slow_device_runs_one_whole_sequence(stepped: Bundle) -> None:
    slow = replace(stepped.manifest.verification[0], device="emulated", samples=3)
    (run,) = verify_bundle(restate(stepped, verification=(slow,)), [InProcess()]).runs
    assert (run.samples, run.find_places(stepped.golden.samples)) == (STEPS, tuple(range(STEPS)))
    assert present(run.state).sequences == 1


def _spoil(manifest: Manifest, **changes: object) -> bytes:
    raw = msgspec.to_builtins(manifest)
    raw["state"] |= changes
    return encode_json(raw)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0}, {"steps": 4097}, {"steps": 3}, {"steps": "8"}, {"feeds": {"h": "y", "x": "y"}},
        {"feeds": {"../h": "y"}}, {"feeds": {"h": "gone"}}, {"feeds": {}}, {"feeds": {"h": ["new_h"]}},
        {"code": "import os"}, {"feeds": {f"h{i}": "new_h" for i in range(5000)}},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_cannot_state_what_is_not_there(stepped: Bundle, changes: dict[str, object]) -> None:
    assert decode_manifest(_spoil(stepped.manifest), "it") == stepped.manifest
    with pytest.raises(BundleError):
        decode_manifest(_spoil(stepped.manifest, **changes), "it")


def test_single_steps_of_a_model_with_state_are_told(tmp_path: Path) -> None:
    model, recipe = parse_model(RECURRENT, tmp_path / "m.onnx"), Recipe(targets=("cpu",), precision="fp32")
    data = save_data(tmp_path / "d.npz", h=np.ones((8 * STEPS, 1, 4), np.float32))
    report = build(model, data, tmp_path / "o", recipe, verify=False)
    assert "'new_h' feeds 'h'" in report.data_warnings[0]
    with pytest.raises(DataError, match="lacks the model input 'h'") as caught:
        build(model, save_data(tmp_path / "none.npz"), tmp_path / "p", recipe, verify=False)
    assert "--steps N" in caught.value.hint


def test_a_model_that_draws_random_numbers_is_told_with_what_to_do(tmp_path: Path) -> None:
    text = """g (float[1,4] x) => (float[1,4] y)
        <float[4,4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
        { n = RandomNormalLike(x) s = Add(x, n) y = MatMul(s, w) }"""
    model, recipe = parse_model(text, tmp_path / "m.onnx"), Recipe(targets=("cpu",))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(8, 1, 4)).astype(np.float32))
    data = Data(source=str(tmp_path / "d.npz"))
    built = build(model, data, tmp_path / "o", recipe, verify=False)
    quantized = quantize_for(model, data, tmp_path / "q.onnx", recipe)
    for report in (built, quantized):
        assert report.data_warnings[0].endswith("make the numbers inputs: edgekit prepare --inputs x,n")


def test_a_sequence_may_begin_with_a_state_of_the_data(tmp_path: Path) -> None:
    model = parse_model(RECURRENT, tmp_path / "m.onnx")
    recipe = Recipe(targets=("cpu",), precision="fp32", state=State(steps=STEPS))
    data = save_data(tmp_path / "d.npz", h=np.ones((8 * STEPS, 1, 4), np.float32))
    (made,) = build(model, data, tmp_path / "o", recipe, verify=False).bundles
    rows = [row["h"] for row in read_inputs(open_bundle(present(made.path)).golden)]
    assert rows[0].tolist() == rows[STEPS].tolist() == [[1.0] * 4]
    assert rows[1].tolist() != [[1.0] * 4]


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        (State(steps=7), DataError, "no whole sequences of 7"),
        (State(steps=2, feeds={"g": "new_h"}), UsageError, "'g', which is no input"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(tmp_path: Path, state: State, error: type[Exception], said: str) -> None:
    recipe = Recipe(targets=("cpu",), precision="fp32", state=state)
    with pytest.raises(error, match=said):
        build(parse_model(RECURRENT, tmp_path / "m.onnx"), save_data(tmp_path / "d.npz"), tmp_path / "o", recipe)


def test_the_python_loader_of_a_package_steps_as_the_float_model_does(stepped: Bundle, tmp_path: Path) -> None:
    loader, variant = open_loader(stepped, tmp_path)
    stepper = loader.Stepper(variant, loader.open_session(variant, loader.find_folder(variant)))
    pairs = list(zip(read_inputs(stepped.golden), read_outputs(stepped.golden), strict=True))
    for index, (given, wanted) in enumerate(pairs):
        if index % STEPS == 0:
            stepper.reset()
        got = stepper.run({"x": given["x"]})
        np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-4, atol=1e-5)


LOADER = Path(edgekit.__file__).parent / "package" / "standalone" / "python" / "edgekit_loader.py"
loaders_feed_back = runpy.run_path(str(LOADER))["feed_back"]


@pytest.mark.parametrize(("rows", "wanted"), [(1, [2, 3, 9]), (4, [7, 8, 9]), (3, [7, 8, 9])])
def test_the_python_loader_keeps_a_window(rows: int, wanted: list[int]) -> None:
    output = np.arange(10 - rows, 10)[None]
    assert loaders_feed_back([1, 3], np.array([[1, 2, 3]]), output).tolist() == [wanted]


def test_a_scalar_as_state_stays_a_scalar() -> None:
    held, output = np.array(3), np.array(4)
    for got in (
        loaders_feed_back([], held, output),
        feed_back(TensorSpec(name="count", dtype="int64", shape=()), held, output),
        edgekit_pipeline._feed_back([], held, output),
    ):
        assert (got.shape, int(got)) == ((), 4)


def test_other_sequences_verify_with_the_float_models_state(stepped: Bundle, tmp_path: Path) -> None:
    choice, data = DeviceChoice(names=("host",)), save_data(tmp_path / "d.npz", sequences=3)
    report = verify_with(stepped, stepped.folder.parents[1] / "recurrent.onnx", data, choice, samples=2 * STEPS)
    (run,) = report.runs
    assert run.passed, run.failures
    assert (present(run.state).sequences, present(run.state).steps) == (2, STEPS)
    with pytest.raises(DataError, match="no whole sequences"):
        np.savez(tmp_path / "e.npz", x=np.ones((STEPS + 1, 1, 4), np.float32))
        verify_with(stepped, stepped.folder.parents[1] / "recurrent.onnx", Data(source=str(tmp_path / "e.npz")), choice)


def test_quantize_calibrates_with_the_state_of_sequences(tmp_path: Path) -> None:
    model, data = parse_model(RECURRENT, tmp_path / "m.onnx"), str(tmp_path / "d.npz")
    save_data(tmp_path / "d.npz")
    options = ("--target", "qnn", "--method", "minmax", "--out", str(tmp_path / "q.onnx"), "--quiet")
    assert run_command(["quantize", str(model), "--data", data, "--steps", str(STEPS), *options]) == 0
    graph = onnx.load(tmp_path / "q.onnx").graph
    (scale,) = [node.input[1] for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "h"]
    (values,) = [numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name == scale]
    # Zeros, the state of a first step, would have given this input no range at all.
    assert float(values) * 255 > 3
    assert run_command(["quantize", str(model), "--data", data, "--steps", "5", *options]) == 2


def test_a_step_whose_reference_is_zero_has_no_ratio() -> None:
    zeros, ones = (from_list([{"y": np.full(2, value)}]) for value in (0.0, 1.0))
    (drift,) = measure_drift(["y"], zeros, ones, zeros, 1)
    assert (drift.fed_back, drift.given, drift.lost_db) == ((None,), (None,), None)


def test_state_is_judged_by_what_it_does_and_not_by_its_distance(stepped: Bundle) -> None:
    stated = restate(stepped, readings={name: Reading(kind="values", axis=1) for name in ("y", "new_h")})
    (run,) = verify_bundle(stated, [InProcess()]).runs
    y, state = sorted(run.outputs, key=lambda output: output.is_state)
    assert (y.name, y.is_state, state.name, state.is_state) == ("y", False, "new_h", True)
    far = (Agreement(of="variance", share=0.1, interval=(0.0, 0.2), samples=16),)
    found = {each.name: replace(each, agreements=far) for each in (y, state)}
    assert weigh_output(found["y"], run.thresholds).failures
    assert not weigh_output(found["new_h"], run.thresholds).failures
    # What is missing or not finite, and what the bundle's own model does not compute, fails in state too.
    wrong = (replace(state, non_finite=1), replace(state, samples=0), replace(state, mismatch="lies far away"))
    assert all(weigh_output(each, run.thresholds).failures for each in wrong)
    # A model all of whose outputs are state is judged by them.
    feeds = {"x": "y", "h": "new_h"}
    both = replace(stated, manifest=replace(stated.manifest, state=State(steps=STEPS, feeds=feeds)))
    rows = read_outputs(stepped.golden)
    assert not any(output.is_state for output in compare_bundled(both, rows, rows))
    # Where the worst output is looked for, state is left out.
    report = verify_bundle(stated, [InProcess()])
    worse = replace(report.runs[0], outputs=(replace(y, sqnr_db=50.0), replace(state, sqnr_db=2.0)))
    assert find_worst(worse)[0] == 50.0
    assert "new_h (state)" in table_verify(report).columns[2]._cells
    told = " ".join(list_verify_remarks(report))
    assert "state is judged by what it does to the other outputs: 'new_h'" in told
