"""Slow devices that run few samples: how good they are, the bundle's own model shows, if each gets its scores."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bundle_models import make_contents, make_samples
from fixture_types import present
from msgspec.structs import replace
from verify_devices import InProcess, Lie, restate

from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden import make_golden, read_outputs
from edgekit.data.sets import Label
from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors
from edgekit.report.text import list_verify_remarks
from edgekit.target import TaskLimit, Verification
from edgekit.verify.report import VerifyReport, recheck_report
from edgekit.verify.run import verify_bundle
from edgekit.verify.run_report import RunReport

SAMPLES, FEW = 220, 8
LIMIT = TaskLimit(name="top1", max_drop=1.0)


def make_labelled(folder: Path, label: Callable[[Tensors], Label], size: int = SAMPLES) -> Bundle:
    """Returns a bundle with labels made of what its model gives, of which devices named slow run eight samples."""
    contents = make_contents(folder)
    plain = make_golden(contents.source, make_samples(size), folder / "plain")
    labels = [label(row) for row in read_outputs(plain)]
    golden = make_golden(contents.source, make_samples(size), folder / "own", labels=labels)
    bundle = write_bundle(replace(contents, golden=golden), folder / "labelled")
    return restate(bundle, verification=(Verification(device="slow", form="onnx", samples=FEW),))


def best_class(row: Tensors) -> Label:
    return int(row["y"].argmax())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_labelled(tmp_path_factory.mktemp("labelled"), best_class)


def verify(bundle: Bundle, *devices: InProcess, limit: TaskLimit = LIMIT) -> VerifyReport:
    report = verify_bundle(bundle, devices, task=limit)
    return recheck_report(report, replace(bundle.manifest.thresholds, task=limit))


def wrong_on(*rows: int) -> Lie:
    """Swaps the two best classes of some samples, with outputs that are otherwise as near as before."""

    def lie(outputs: list[Tensors]) -> list[Tensors]:
        changed: list[Tensors] = [{name: value.copy() for name, value in row.items()} for row in outputs]
        for row in filter(lambda row: row < len(changed), rows):
            y = changed[row]["y"].reshape(-1)
            second, first = y.argsort()[-2:]
            y[[first, second]] = y[[second, first]]
        return changed

    return lie


def metric_lines(run: RunReport) -> tuple[str, ...]:
    return tuple(line for gate in run.gates if gate.name == "metric" for line in (*gate.failures, *gate.unproven))


def test_a_slow_device_that_agrees_passes_by_what_this_machine_measures(bundle: Bundle) -> None:
    report = verify(bundle, InProcess(name="slow"))
    (run,) = report.runs
    task = present(run.task)
    assert (task.ran, task.samples, task.labelled) == (FEW, SAMPLES, SAMPLES)
    assert report.verdict == "pass"
    (line,) = (line for line in list_verify_remarks(report) if "on 220 labelled samples" in line)
    assert "; the device ran 8 of them, and scores these as the bundle's own model does on this machine" in line
    (whole,) = verify(bundle, InProcess(name="quick")).runs
    assert present(whole.task) == replace(task, ran=0)


def test_too_few_labelled_samples_prove_nothing_and_say_how_many_would(tmp_path: Path) -> None:
    (run,) = verify(make_labelled(tmp_path, best_class, size=24), InProcess(name="slow")).runs
    assert run.verdict == "not proven"
    (line,) = metric_lines(run)
    assert "is 0.00 points worse than the float model, and with 24 samples it could be 7.54, more than 1" in line
    assert "about 200 samples would tell" in line


def test_a_device_that_differs_is_judged_by_what_it_ran(bundle: Bundle) -> None:
    report = verify(bundle, InProcess(name="slow", lie=wrong_on(3)))
    (run,) = report.runs
    assert (present(run.task).ran, present(run.task).samples) == (0, FEW)
    (line,) = metric_lines(run)
    assert "12.50 points worse than the float model, more than 1, on 8 of 220 labelled samples" in line
    assert run.verdict != "pass"
    assert "top1 on 8 of 220 labelled samples: " in " ".join(list_verify_remarks(report))
    (run,) = verify(bundle, InProcess(name="slow", lie=wrong_on(*range(FEW)))).runs
    assert any(line.startswith("metric 'top1' is 100.00 points worse") for line in run.failures)


def test_what_is_wrong_on_all_samples_fails_the_slow_device_too(tmp_path: Path) -> None:
    """The bundle's own model is what is bad here: the slow device agrees with it, and shares its verdict."""

    def second_class(row: Tensors) -> Label:
        return int(row["y"].argsort().reshape(-1)[-2]) if row["y"][0, 0] > 0 else 0

    bundle = make_labelled(tmp_path, second_class, size=64)
    (run,) = verify(bundle, InProcess(name="slow"), limit=TaskLimit(name="top1", at_least=0.9)).runs
    assert present(run.task).ran == FEW
    assert any("below 0.9" in line for line in run.failures)


def test_without_the_time_for_more_samples_the_devices_own_count(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgekit.verify.own_model._BUDGET_S", 0.0)
    (run,) = verify(bundle, InProcess(name="slow")).runs
    assert (present(run.task).ran, present(run.task).samples) == (0, FEW)


def test_what_ran_when_the_time_ends_is_spread_over_all_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of the samples, sorted like a folder of classes, is wrong: half of the time must tell it."""
    places = count()
    bundle = make_labelled(tmp_path, lambda row: int((row["y"] if next(places) < SAMPLES / 2 else -row["y"]).argmax()))
    clock = count(0.0, 1.0)
    monkeypatch.setattr("edgekit.verify.own_model.time", SimpleNamespace(monotonic=lambda: next(clock)))
    (run,) = verify(bundle, InProcess(name="slow"), limit=TaskLimit(name="top1", at_least=0.9)).runs
    task = present(run.task)
    assert (task.samples, task.ran) == (121, FEW)
    assert task.reference == pytest.approx(0.5, abs=0.1)


def test_what_the_metric_of_several_values_lost_on_the_common_samples_counts(tmp_path: Path) -> None:
    """PSNR against the model's own outputs, a little off: what rounds otherwise agrees, and its loss goes along."""
    bundle = make_labelled(tmp_path, lambda row: row["y"] + np.float32(0.1), size=64)
    limit = TaskLimit(name="psnr", max_drop=0.3, peak=1.0)
    (same,) = verify(bundle, InProcess(name="slow"), limit=limit).runs
    assert metric_lines(same) == ()

    def shifted(by: float) -> InProcess:
        return InProcess(name="slow", lie=lambda rows: [{"y": row["y"] - np.float32(by)} for row in rows])

    near, far = (verify(bundle, shifted(by), limit=limit).runs[0] for by in (0.0047, 0.0071))
    assert (present(near.task).ran, present(far.task).ran) == (FEW, 0)
    best, moved = (present(run.task) for run in (same, near))
    assert moved.difference == pytest.approx(-0.4, abs=0.02)
    share = present(moved.difference) / best.reference
    assert present(moved.share_interval) == pytest.approx([each + share for each in present(best.share_interval)])
    assert "0.40 points worse than the float model, more than 0.3" in metric_lines(near)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("by", "ran"), [(0.005, FEW), (0.02, 0)])
def test_samples_of_a_metric_that_only_ranks_agree_by_their_scores(bundle: Bundle, by: float, ran: int) -> None:
    device = InProcess(name="slow", lie=lambda rows: [*rows[:-1], {"y": rows[-1]["y"] + np.float32(by)}])
    (run,) = verify(bundle, device, limit=TaskLimit(name="auc", positive=0, at_least=0.5)).runs
    assert present(run.task).ran == ran


@pytest.mark.parametrize(("evidence", "verdict"), [(Evidence.SAME_EP, "not proven"), (Evidence.DEVICE, "fail")])
def test_an_emulator_that_is_too_old_proves_nothing(tmp_path: Path, evidence: Evidence, verdict: str) -> None:
    bundle = write_bundle(make_contents(tmp_path), tmp_path / "new")
    newer = restate(bundle, minimum_ort="99.0.0")
    # It takes no node: in a runtime that is new enough that is a silent fallback.
    fallen = InProcess(evidence=evidence, provider="CPUExecutionProvider")
    (old,) = verify_bundle(newer, [fallen]).runs
    assert old.verdict == verdict
    assert any("1.31.1" in line for line in old.failures + old.unproven)
    assert any("silent fallback" in line for line in (old.unproven if verdict == "not proven" else old.failures))
    (new,) = verify_bundle(bundle, [fallen]).runs
    assert (new.verdict, new.outdated) == ("fail", "")
    # What it does not load, a newer one may; what it computes wrongly is wrong.
    (dead,) = verify_bundle(newer, [replace(fallen, failure="opset 99 is not known")]).runs
    assert dead.verdict == verdict
    (wrong,) = verify_bundle(newer, [replace(fallen, lie=wrong_on(*range(6)))]).runs
    assert wrong.verdict == "fail"


def test_nothing_that_ran_is_not_proven_and_no_failure(bundle: Bundle) -> None:
    report = verify_bundle(bundle, [])
    assert (report.verdict, report.failures) == ("not proven", ())
    assert report.unproven == ("no device ran, so nothing is proven",)
