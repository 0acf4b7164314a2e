"""What the bundle's own model does on this machine too is not held against a device, and what it does not is."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bundle_models import make_contents
from fixture_types import present
from msgspec.structs import replace
from tiny_models import save_net
from verify_devices import InProcess, Lie, from_list, restate

from edgekit._ort import Level, SessionSettings
from edgekit.bundle.folder import Bundle, open_bundle, write_bundle
from edgekit.bundle.golden import Golden, KnownOutputs, make_golden, read_outputs
from edgekit.data.samples import Samples, order_for_runs
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Reading, Tensors
from edgekit.prepare.constants import DISABLED
from edgekit.recipe import Data, Recipe
from edgekit.target import Form
from edgekit.verify.own_model import _is_near, _limit_here, choose_settings, find_self_test_fault, run_own_model
from edgekit.verify.run import verify_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle that was calibrated with inputs below 1."""
    folder = tmp_path_factory.mktemp("clipping")
    # Two outputs that grow with the first input, and hardly move within the range that is calibrated.
    text = "(float[1,2] x) => (float[1,2] y) <float[2,2] w = {1, 0.5, 0.01, -0.01}> { [mul] y = MatMul(x, w) }"
    save_net(text, folder / "line.onnx")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).uniform(-1, 1, size=(32, 1, 2)).astype(np.float32))
    data, recipe = Data(source=str(folder / "data.npz")), Recipe(targets=("nnapi",))
    build(folder / "line.onnx", data, folder / "out", recipe, verify=False)
    return open_bundle(folder / "out" / "line-nnapi")


@pytest.fixture(scope="module")
def beyond(bundle: Bundle) -> Golden:
    """Samples beyond that range, whose outputs the bundle's own model clips to the same."""
    rows = np.random.default_rng(1).uniform(1.2, 2.0, size=(12, 1, 2)).astype(np.float32)
    model = load_model(bundle.folder.parents[1] / "line.onnx")
    return make_golden(model, from_list([{"x": row} for row in rows]), bundle.folder.parents[1] / "golden")


def ask(bundle: Bundle, golden: Golden | None, lie: Lie) -> tuple[str, str]:
    (run,) = verify_bundle(bundle, [InProcess(lie=lie)], golden=golden).runs
    return " / ".join(run.failures), " / ".join(run.notes)


def test_what_the_own_model_clips_is_no_accusation(bundle: Bundle, beyond: Golden) -> None:
    """Its own model gives the same for all samples, and so does an honest device: it is no liar, and may fail."""
    failures, _ = ask(bundle, beyond, lambda rows: rows)
    assert "same for every sample" not in failures


def test_an_app_s_self_test_fails_where_verify_does(bundle: Bundle) -> None:
    """The loader's own rule: no number farther from what the bundle expects than the manifest's tolerance."""
    limit = bundle.manifest.golden.tolerance["y"]
    count = bundle.golden.samples
    chosen = order_for_runs(count, count, 1).index(bundle.manifest.golden.chosen[0].row)

    def move(by: float) -> Lie:
        return lambda rows: [{"y": each["y"] + np.float32(by * (place == chosen))} for place, each in enumerate(rows)]

    assert ask(bundle, None, move(0.9 * limit))[0] == ""
    assert "an app's self-test fails there: output 'y' is farther than" in ask(bundle, None, move(1.1 * limit))[0]


def test_a_tolerance_of_an_output_that_nothing_is_expected_of_is_no_fault(bundle: Bundle) -> None:
    more = replace(bundle.manifest.golden, tolerance={**bundle.manifest.golden.tolerance, "z": 1.0})
    got = list(read_outputs(bundle.golden))
    for golden in (bundle.manifest.golden, more):
        assert not [*find_self_test_fault(restate(bundle, golden=golden), range(len(got)), from_list(got))]
    changes: list[Callable[[Array], Tensors]] = [lambda y: {"y": y + 9}, lambda y: {"y": y[:, :1]}, lambda _: {}]
    for change in changes:
        wrong = from_list([change(row["y"]) for row in got])
        assert [*find_self_test_fault(bundle, range(len(got)), wrong)]


@pytest.mark.parametrize(("off", "limit"), [(0.0, 0.02 * 0.5), (0.25, 2 * 0.25), (2.0, 1.0)])
def test_the_limit_here_follows_from_what_this_kind_of_machine_gave(bundle: Bundle, off: float, limit: float) -> None:
    golden = replace(bundle.manifest.golden, tolerance={"y": 1.0})
    own, wanted = np.full((1, 2), -0.5), np.full((1, 2), -0.5 + off)
    assert _limit_here(restate(bundle, golden=golden), [{"y": own}], [{"y": wanted}]) == {"y": pytest.approx(limit)}


def test_only_a_file_of_ort_format_is_optimized_and_as_the_manifest_says(bundle: Bundle) -> None:
    told = restate(bundle, session_config={DISABLED: "ConstantFolding"})
    forms: tuple[Form, ...] = ("onnx", "runtime")
    for form in forms:
        assert choose_settings(told, form, Path("model.onnx")) == SessionSettings(level=Level.DISABLED)
    assert choose_settings(told, "runtime", Path("model.ort")).config[DISABLED] == "ConstantFolding"
    assert DISABLED not in choose_settings(restate(bundle, session_config={}), "runtime", Path("model.ort")).config


@pytest.mark.parametrize(("precision", "file"), [("w8a8", "model.onnx"), ("fp16", "model.runtime.ort")])
def test_of_half_precision_the_file_that_ran_is_the_own_model(bundle: Bundle, precision: str, file: str) -> None:
    samples = from_list([{"x": np.ones((1, 2), np.float32)}])
    stated = restate(bundle, precision=precision)
    own, _ = run_own_model(stated, "runtime", samples, KnownOutputs(room_bytes=1 << 20))
    assert present(own).source == f"the bundle's '{file}' here"


def test_the_runs_for_a_self_test_serve_the_verification(tmp_path: Path) -> None:
    known = KnownOutputs()
    bundle = write_bundle(make_contents(tmp_path), tmp_path / "out", known)
    assert known.ran == bundle.manifest.golden.samples
    report = verify_bundle(bundle, [InProcess()], known=known)
    assert known.ran == bundle.manifest.golden.samples
    assert report.passed == verify_bundle(bundle, [InProcess()]).passed


def run_own(bundle: Bundle, samples: Samples) -> list[Tensors]:
    own, notes = run_own_model(bundle, "onnx", samples, KnownOutputs(room_bytes=1 << 20))
    assert (own is None) == bool(notes)
    return [] if own is None else list(own)


def test_the_first_file_that_runs_here_is_the_own_model(bundle: Bundle) -> None:
    samples = from_list([{"x": np.ones((1, 2), np.float32)}])
    (name,) = bundle.manifest.forms["onnx"]
    forms: list[dict[Form, tuple[str, ...]]] = [{"onnx": ("manifest.json",), "full": (name,)}, {"full": (name,)}]
    for found in (run_own(restate(bundle, forms=each), samples) for each in forms):
        assert np.array_equal(run_own(bundle, samples)[0]["y"], found[0]["y"])
    assert not run_own(restate(bundle, forms={"context": (name,)}), samples)


def test_what_a_recipe_states_to_be_values_is_judged_as_no_classifier(bundle: Bundle, tmp_path: Path) -> None:
    """The two numbers change places in the order of their size, which is no class that became another."""
    source, data = bundle.folder.parents[1] / "line.onnx", bundle.folder.parents[1] / "data.npz"
    recipe = Recipe(targets=("nnapi",), outputs={"y": "values"})
    build(source, Data(source=str(data)), tmp_path / "out", recipe, verify=False)
    stated = open_bundle(tmp_path / "out" / "line-nnapi")
    assert [reading.kind for reading in (stated.manifest.readings or {}).values()] == ["values"]
    classes = restate(bundle, readings={"y": Reading(kind="classes", axis=1)})
    plain, judged = (verify_bundle(each, [InProcess()]).runs[0].outputs[0] for each in (classes, stated))
    assert plain.top1_agreement is not None
    assert (judged.top1_agreement, judged.changes, judged.sqnr_db) == (None, (), plain.sqnr_db)
    assert [[each.of for each in one.agreements] for one in (plain, judged)] == [["classes"], ["variance", "energy"]]


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "pass"), (9, "pass"), (15, "not proven"), (30, "not proven")])
def test_a_model_of_chance_proves_nothing(bundle: Bundle, tmp_path: Path, wrong: int, verdict: str) -> None:
    model = load_model(bundle.folder.parents[1] / "line.onnx")
    rows = np.random.default_rng(3).uniform(-1, 1, size=(30, 1, 2)).astype(np.float32)
    samples = from_list([{"x": row} for row in rows])
    (tmp_path / "plain").mkdir()
    classes = [int(row["y"].argmax()) for row in read_outputs(make_golden(model, samples, tmp_path / "plain"))]
    labels = [(label + (place < wrong)) % 2 for place, label in enumerate(classes)]
    report = verify_bundle(bundle, [InProcess()], golden=make_golden(model, samples, tmp_path, labels=labels))
    assert report.verdict == verdict
    assert all("no better than chance among 2 classes" in line for line in report.unproven)
    assert present(report.runs[0].accuracy).reference == 1 - wrong / 30


@pytest.mark.parametrize(("shift", "verdict"), [(0, "pass"), (1, "not proven")])
def test_what_few_samples_leave_open_all_golden_ones_tell(bundle: Bundle, shift: int, verdict: str) -> None:
    """Of a device that stops early, and decides as the own model on each sample that it ran."""

    def stop(rows: list[Tensors]) -> list[Tensors]:
        return [{"y": row["y"] if place or not shift else row["y"][:, ::-1]} for place, row in enumerate(rows[:4])]

    limits = replace(bundle.manifest.thresholds, gate="bound", min_top1_agreement=0.6)
    strict = restate(bundle, thresholds=limits, readings={"y": Reading(kind="classes", axis=1)})
    (run,) = verify_bundle(strict, [InProcess(lie=stop, stopped_early=True)]).runs
    (shared,) = run.outputs[0].agreements
    assert (shared.samples, run.outputs[0].samples) == (4 if shift else bundle.golden.samples, 4)
    assert any("the decisions of that model on" in note for note in run.notes) is not bool(shift)
    assert ("not proven" if run.gates[1].unproven else "pass") == verdict


@pytest.mark.parametrize(
    ("own", "found", "is_near"),
    [
        ([1.0, 2.0], [1.5, 1.5], True), ([1.0, 2.0], [1.0, 2.6], False), ([1.0, 2.0], [1.0], False),
        ([np.nan, np.inf], [np.nan, np.inf], True), ([np.nan], [1.0], False), ([1.0], [np.nan], False),
        ([np.inf], [-np.inf], False),
    ],
)  # fmt: skip
def test_each_value_is_near_or_the_same_non_number(own: list[float], found: list[float], is_near: bool) -> None:
    assert _is_near(np.array(own), np.array(found), 0.5) is is_near
