"""A bundle on devices: what passes and what does not, and the report, in which verify.json decides nothing."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from bundle_models import edit_json, make_bundle, make_contents, make_samples
from fixture_types import present
from msgspec.structs import replace
from onnx import helper
from tiny_models import parse_model
from verify_devices import InProcess, Lie, restate

from edgekit.bundle.folder import VERIFY, Bundle, open_bundle, write_bundle
from edgekit.bundle.golden import make_golden, read_labels
from edgekit.bundle.manifest import encode_json
from edgekit.bundle.multi import join_bundles
from edgekit.data.sets import Boxes
from edgekit.devices.bundled import plan_run
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.host import Host
from edgekit.errors import BundleError, DataError
from edgekit.evidence import Evidence
from edgekit.inspect.diff import compare_versions
from edgekit.model.model import load_model
from edgekit.report.text import list_verify_remarks
from edgekit.target import Form, TaskLimit, Verification
from edgekit.verify.attribute import keep_attribution, share_loss
from edgekit.verify.layers.comparison import LayerEvidence, LayerReport, read_evidence
from edgekit.verify.report import (
    AttributionStep,
    VerifyReport,
    read_known,
    read_report,
    recheck_report,
    require_devices,
    write_report,
)
from edgekit.verify.run import verify_bundle
from edgekit.verify.run_report import BucketReport, FileReport, SizesReport
from edgekit.verify.task_scores import Accuracy


def change_all(change: Callable[[np.ndarray], np.ndarray]) -> Lie:
    return lambda rows: [{name: change(value) for name, value in row.items()} for row in rows]


def test_a_device_that_stops_at_once_fails(tiny: Bundle) -> None:
    """All other lies that we know of are in test_verify_liars.py."""
    (run,) = verify_bundle(tiny, [InProcess(lie=lambda _: [], stopped_early=True)]).runs
    assert "came back for 0 of 6" in " / ".join(run.failures)


def test_an_emulator_that_crashed_proves_nothing(bundle: Bundle) -> None:
    """What came back until then is no word against the bundle either."""
    died = InProcess(failure="was ended by SIGSEGV", crashed=True, lie=lambda rows: rows[:2], nodes=0)
    report = verify_bundle(bundle, [died])
    assert report.verdict == "not proven"
    assert report.runs[0].unproven == ("the emulator crashed, which proves nothing: was ended by SIGSEGV",)
    assert verify_bundle(bundle, [died, InProcess(lie=change_all(lambda y: y * 0))]).verdict == "fail"


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_fails(tiny: Bundle, time: float) -> None:
    (run,) = verify_bundle(tiny, [InProcess(times=(1.0, time))]).runs
    assert run.verdict == "fail"
    assert f"it says that run 2 took {time:g} ms, which is no time" in run.failures
    assert run.latency_ms is None


def test_a_model_for_another_provider_fails_where_only_the_cpu_ran(tmp_path: Path) -> None:
    """Its outputs are right on the CPU. XNNPACK takes the MatMul that is promised, and no Einsum."""
    contents = make_contents(tmp_path, target="xnnpack")
    honest = write_bundle(contents, tmp_path / "honest")
    proto = onnx.load(str(contents.source.path))
    del proto.graph.node[0]
    proto.graph.node.insert(0, helper.make_node("Einsum", ["x", "w"], ["xw"], name="mul", equation="ij,jk->ik"))
    onnx.save(proto, str(tmp_path / "other.onnx"))
    swapped = replace(contents, files={"onnx": (tmp_path / "other.onnx",)})
    other = write_bundle(swapped, tmp_path / "other")
    kept = verify_bundle(honest, [Host()])
    # The host runs no XNNPACK, so that nothing is proven of it; nothing speaks against it either.
    assert (kept.verdict, kept.runs[0].verdict, kept.alterations) == ("not proven", "pass", ())
    report = verify_bundle(other, [Host()])
    assert report.verdict == "fail"
    assert "'other.onnx' is another model than promised: XnnpackExecutionProvider takes 0%" in report.alterations[0]


def test_a_crash_on_another_file_or_size_proves_nothing_of_it(bundle: Bundle) -> None:
    (run,) = verify_bundle(bundle, [InProcess()]).runs
    for crashed, verdict in ((False, "fail"), (True, "not proven")):
        file = FileReport(file="model.ort", form="full", failure="was ended by SIGSEGV", crashed=crashed)
        size = BucketReport(size=8, file="model.onnx", lengths=(8,), failure="was ended by SIGSEGV", crashed=crashed)
        sizes = SizesReport(dim="n", filled=(), sizes=(size,))
        assert replace(run, files=(file,)).verdict == verdict
        assert replace(run, sizes=sizes).verdict == verdict


def test_what_no_device_ran_is_not_proven(bundle: Bundle) -> None:
    emulated = InProcess(evidence=Evidence.EMULATED, nodes=0)
    report = verify_bundle(bundle, [emulated])
    assert (report.verdict, report.runs[0].verdict) == ("not proven", "pass")
    (said,) = report.unproven
    assert said.startswith("no run used NnapiExecutionProvider: ")
    assert verify_bundle(bundle, [emulated, InProcess()]).passed
    missing = Missing(reason="there is no archive", command="edgekit devices install android")
    report = verify_bundle(bundle, [InProcess(missing=missing)])
    assert not report.passed
    assert report.skipped[0].command == "edgekit devices install android"
    assert verify_bundle(bundle, [InProcess(missing=missing), InProcess()]).passed


def test_a_device_gets_the_planned_samples_and_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_bundle(tmp_path)
    fewer = restate(bundle, verification=(Verification(device="emulated", form="onnx", samples=3),))
    assert verify_bundle(fewer, [InProcess()]).runs[0].samples == 3
    assert verify_bundle(fewer, [InProcess(name="ssh:me@board")]).runs[0].samples == 6
    bundle = make_bundle(tmp_path)
    names = bundle.manifest.forms["onnx"]
    forms: dict[Form, tuple[str, ...]] = {"onnx": names, "runtime": names}
    unplanned = restate(bundle, verification=(), form="runtime", forms=forms)
    assert plan_run(unplanned, InProcess(name="emulated"), 6).form == "onnx"
    # A CPU that saturates computes products of u8 and s8 exactly for the ONNX file only; an emulated one has its own.
    proto = onnx.load(str(bundle.folder / names[0]))
    for kind in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8):
        proto.graph.initializer.append(onnx.helper.make_tensor(f"of_{kind}", kind, [1], [127]))
    onnx.save(proto, str(bundle.folder / names[0]))
    for flags, device, form in (
        ("flags : avx2 avx512_vnni", "host", "runtime"),
        ("flags : avx2", "host", "onnx"),
        ("flags : avx2", "arm64", "runtime"),
    ):
        monkeypatch.setattr("edgekit.machine.read_cpu_flags", lambda flags=flags: flags)
        monkeypatch.setattr("edgekit.machine.platform.machine", lambda: "x86_64")
        assert plan_run(unplanned, InProcess(name=device), 6).form == form


def test_the_report_comes_back_and_its_verdict_is_judged_again(bundle: Bundle) -> None:
    report = verify_bundle(bundle, [InProcess(lie=change_all(lambda y: y * 1.0005))])
    file = write_report(bundle, report)
    assert read_report(file) == report
    assert open_bundle(bundle.folder) == bundle
    stricter = replace(bundle.manifest.thresholds, min_sqnr_db=80.0)
    assert report.passed
    assert not recheck_report(report, stricter).passed
    file = write_report(bundle, verify_bundle(bundle, [InProcess(failure="was ended by SIGSEGV")]))
    file.write_text(file.read_text().replace('"passed": false', '"passed": true').replace("SIGSEGV", "SIGBUS"))
    assert not read_report(file).passed


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"bundle": 1}'])
def test_a_malformed_report_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "verify.json"
    file.write_text(content)
    with pytest.raises(DataError, match="malformed"):
        read_report(file)


def test_a_model_that_gives_maps_is_verified_in_another_process(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17, "ai.onnx.ml" : 1]> mapping (float[1,8] x)
      => (seq(map(int64, float)) maps) { [zip] maps = ai.onnx.ml.ZipMap<classlabels_int64s = [0,1,2,3,4,5,6,7]>(x) }"""
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    report = verify_bundle(write_bundle(make_contents(tmp_path, model=model), tmp_path / "maps-nnapi"), [Host()])
    (run,) = report.runs
    assert run.failure is None
    assert not any("its outputs are" in failure for failure in report.failures)
    assert [(output.name, output.exact_match, output.sqnr_db) for output in run.outputs] == [
        ("maps.keys", 1.0, None),
        ("maps.values", None, 200.0),
    ]


def test_devices_run_on_a_copy_whose_digests_were_checked(bundle: Bundle) -> None:
    places: list[Path] = []

    class Altering(InProcess, frozen=True, kw_only=True):
        """Overwrites the bundle before it runs what it was given."""

        def run_job(self, job: Job, work: Path) -> DeviceRun:
            bundle.find_model("onnx").write_bytes(b"something else")
            places.append(job.model)
            return InProcess.run_job(self, job, work)

    assert verify_bundle(bundle, [Altering()]).passed
    assert not places[0].is_relative_to(bundle.folder)
    assert not places[0].exists()


def test_honest_devices_pass_in_the_order_in_which_they_were_named(bundle: Bundle) -> None:
    report = verify_bundle(bundle, [InProcess()])
    (run,) = report.runs
    assert report.passed
    assert run.failures == ()
    assert run.provider_nodes == {"NnapiExecutionProvider": 2}
    assert present(run.accuracy).got == present(run.accuracy).reference
    names = [f"adb:{index}" for index in range(6)]
    report = verify_bundle(bundle, [InProcess(name=name, evidence=Evidence.DEVICE) for name in names])
    assert [run.device for run in report.runs] == names


@pytest.mark.parametrize(("evidence", "warned"), [(Evidence.DEVICE, True), (Evidence.SIMULATOR, False)])
def test_a_device_that_slows_down_is_told_of(tmp_path: Path, evidence: Evidence, warned: bool) -> None:
    slowing = InProcess(evidence=evidence, times=tuple(0.001 * (10.0 + index) for index in range(24)))
    (run,) = verify_bundle(make_bundle(tmp_path), [slowing]).runs
    assert present(run.latency_ms).drift is not None
    assert any("slower from first to last" in note for note in run.notes) is warned


def test_a_gate_on_the_bound_needs_enough_samples(bundle: Bundle) -> None:
    report = verify_bundle(bundle, [InProcess()])
    strict = replace(bundle.manifest.thresholds, gate="bound")
    held = recheck_report(report, strict)
    assert (held.verdict, held.runs[0].failures) == ("not proven", ())
    (line,) = held.runs[0].unproven
    assert "has top-1 agreement 1, and with 6 samples it could be 0.6097, below 0.9: about 35 samples would" in line
    many = replace(report.runs[0].outputs[0], samples=64, top1_interval=(0.943, 1.0))
    run = replace(report.runs[0], outputs=(many,), thresholds=strict)
    assert run.passed
    loud = replace(many, sqnr_db=14.0, sqnr_interval_db=(11.0, 17.0))
    assert "it could be 11 dB" in replace(run, outputs=(loud,)).unproven[0]


def test_a_bundle_fails_that_leaves_too_much_work_or_is_too_large(bundle: Bundle) -> None:
    report = verify_bundle(bundle, [InProcess()])
    assert report.passed
    idle = replace(report, taken_macs=0.3)
    assert not idle.passed
    assert "takes 30% of the work, less than 50%" in idle.failures[0]
    limits = bundle.manifest.thresholds
    assert report.size_bytes == report.source_size_bytes > 0
    small = recheck_report(report, replace(limits, max_size_bytes=100))
    assert "more than 100" in small.failures[0]
    half = recheck_report(report, replace(limits, max_size_share=0.5))
    assert "100% of the float model's size, more than 50%" in half.failures[0]
    assert recheck_report(report, replace(limits, max_size_share=1.0)).passed


def test_a_metric_is_measured_on_both_sides_and_judged(bundle: Bundle) -> None:
    limit = TaskLimit(name="top1", max_drop=0.5)
    report = verify_bundle(bundle, [InProcess(), InProcess(lie=change_all(lambda y: y[:, ::-1]))], task=limit)
    good, _ = (present(run.task) for run in report.runs)
    assert (good.samples, good.difference) == (6, 0.0)
    strict = recheck_report(report, replace(bundle.manifest.thresholds, task=limit))
    assert "metric 'top1' is 0.00 points worse" in strict.runs[0].unproven[0]
    assert [run.verdict for run in strict.runs] == ["not proven", "fail"]
    assert strict.verdict == "fail"
    fair = replace(limit, gate="estimate")
    fairly = recheck_report(report, replace(bundle.manifest.thresholds, task=fair))
    assert fairly.runs[0].passed
    assert not fairly.runs[1].passed


def test_labels_that_are_texts_go_into_the_bundle(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    for labels in (["a", "b", "", "d", "e", "f"], [Boxes(boxes=((0, 0, 1, 1),), classes=(1,))] * 6):
        golden = make_golden(contents.source, make_samples(), tmp_path / labels[0].__class__.__name__, labels=labels)
        folder = tmp_path / f"{labels[0].__class__.__name__}-bundle"
        bundle = write_bundle(replace(contents, golden=golden), folder)
        assert read_labels(open_bundle(bundle.folder).golden) == labels


def test_what_the_build_knew_of_the_loss_is_kept(bundle: Bundle) -> None:
    steps = (
        AttributionStep(step="prepare", sqnr_db=120.0, top1_agreement=1.0, accuracy=1.0),
        AttributionStep(step="quantize", sqnr_db=30.0, top1_agreement=0.9, accuracy=0.8),
        AttributionStep(step="provider", sqnr_db=28.0, top1_agreement=0.9, accuracy=0.8),
    )
    first = verify_bundle(bundle, [InProcess()])
    first = replace(first, attribution=share_loss(steps, 1.0), attributed_device="emulated", layers=(BAD,))
    write_report(bundle, first)
    known = read_known(bundle)
    again = verify_bundle(bundle, [InProcess(lie=change_all(lambda y: y * 1.01))])
    kept = keep_attribution(again, known)
    assert [step.step for step in kept.attribution] == ["prepare", "quantize", "provider"]
    assert kept.attribution[-1].sqnr_db == pytest.approx(40.0, abs=0.1)
    assert sum(step.noise_share or 0.0 for step in kept.attribution) == pytest.approx(1.0)
    assert kept.first_bad_layer is None
    (note,) = (note for note in kept.notes if "an earlier verification" in note)
    assert re.match(r"the step '\w+' makes .* of the error.*what an earlier verification found, as", note)
    assert keep_attribution(again, kept).notes == kept.notes
    # The other device ran other samples, on which the float model is worse: none of the steps lost that.
    other = verify_bundle(bundle, [InProcess(name="other")])
    worse = Accuracy(output="y", samples=6, reference=0.5, got=0.5)
    other = replace(other, runs=(replace(other.runs[0], accuracy=worse),))
    losses = [step.accuracy_loss for step in keep_attribution(other, known).attribution]
    assert losses == pytest.approx([0.0, 0.2, 0.0])
    phone = InProcess(name="adb:1", evidence=Evidence.DEVICE, lie=change_all(lambda y: y * 1.1))
    added = keep_attribution(verify_bundle(bundle, [phone]), known).attribution
    assert [step.step for step in added] == ["prepare", "quantize", "provider", "device"]
    assert present(added[-1].noise_share) > 0.8
    assert read_known(replace(bundle, folder=bundle.folder.parent)) is None


def test_a_device_that_was_asked_for_and_did_not_run_is_a_failure(bundle: Bundle) -> None:
    away = InProcess(name="phone:v2", missing=Missing(reason="unplugged", command=None))
    report = verify_bundle(bundle, [InProcess(), away])
    assert report.passed
    assert require_devices(report, ["emulated"]).passed
    required = require_devices(report, ["phone"])
    assert required.failures == ("device 'phone' was asked for and did not run: unplugged",)
    assert require_devices(report, ["pho"]).failures == (
        "device 'pho' was asked for and did not run: nothing named it",
    )
    assert not recheck_report(required, bundle.manifest.thresholds).passed


BAD = LayerReport(
    name="mul", op="MatMul", tensor="xw", sqnr_db=30.0, max_abs=0.1, own_sqnr_db=30.0, own_bias=0.0,
    arithmetic="int8", offset_steps=2.0, channel_steps=(9.4, 0.3),
)  # fmt: skip
WORDS = "layer 'mul' (MatMul) is the first whose result is not the float model's: given the same values"


def make_suspect(folder: Path, target: str = "nnapi") -> Bundle:
    """Returns a bundle in which the build found a layer that is not the float model's, though the outputs agree."""
    evidence = encode_json(LayerEvidence(layers=(BAD,)))
    contents = replace(make_contents(folder, target=target), layers=evidence)
    return write_bundle(contents, folder / f"tiny-{target}")


def verify_again(bundle: Bundle) -> VerifyReport:
    """Verifies as `edgekit verify BUNDLE` does, on a device that is honest."""
    return keep_attribution(verify_bundle(bundle, [InProcess()]), read_known(bundle))


def test_a_layer_that_stands_out_is_told_also_after_join_and_fails_no_bundle(tmp_path: Path) -> None:
    report = verify_again(make_suspect(tmp_path))
    assert report.passed
    assert report.first_bad_layer == "mul"
    clean = tmp_path / "clean"
    clean.mkdir()
    assert any(WORDS in line for line in list_verify_remarks(report))
    assert not any(WORDS in line for line in list_verify_remarks(verify_again(make_bundle(clean))))
    joined = join_bundles([make_suspect(tmp_path)], tmp_path / "joined")
    assert verify_again(joined.nested["nnapi"].extract(joined.folder, tmp_path / "one")).first_bad_layer == "mul"


def test_a_bundle_that_keeps_less_is_said_to(tmp_path: Path) -> None:
    bundle = write_bundle(replace(make_contents(tmp_path), layers=encode_json(LayerEvidence())), tmp_path / "whole")
    assert verify_again(bundle).notes == ()
    (tmp_path / "in").mkdir()
    less = make_bundle(tmp_path / "in")
    edit_json(less.folder / "manifest.json", lambda said: said["golden"].update(chosen=[]))
    notes = verify_again(open_bundle(less.folder)).notes
    assert [note.split(":")[0] for note in notes] == [
        "the layers were not compared with the float model's",
        "the bundle has no self-test",
    ]


def test_a_forged_verify_json_fails_no_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    good = verify_again(bundle)
    assert good.passed
    write_report(bundle, replace(good, layers=(BAD,), alterations=("forged",)))
    report = verify_again(open_bundle(bundle.folder))
    assert (report.passed, report.layers, report.first_bad_layer) == (True, (), None)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"layers": 3}', b'{"other": 1}', b"[" * 100_000])
def test_malformed_evidence_is_refused(tmp_path: Path, content: bytes) -> None:
    bundle = write_bundle(replace(make_contents(tmp_path), layers=content), tmp_path / "tiny-nnapi")
    with pytest.raises(BundleError, match=r"layers\.json' is malformed"):
        read_evidence(bundle)


@pytest.mark.parametrize("forged", [b"{", b"[]", b'{"bundle": "x"}'])
def test_diff_is_not_stopped_by_a_verify_json_that_is_none(tmp_path: Path, forged: bytes) -> None:
    bundle = make_bundle(tmp_path)
    (bundle.folder / VERIFY).write_bytes(forged)
    assert compare_versions(bundle.folder, bundle.folder).is_same


def test_diff_shows_no_figures_of_another_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    write_report(bundle, verify_again(bundle))
    facts = json.loads((bundle.folder / VERIFY).read_bytes())
    (bundle.folder / VERIFY).write_text(json.dumps(facts | {"bundle_sha256": "0" * 64}))
    (tmp_path / "other").mkdir()
    assert compare_versions(make_bundle(tmp_path / "other").folder, bundle.folder).accuracy == ()


def test_a_pipe_in_the_place_of_verify_json_is_no_history(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    os.mkfifo(bundle.folder / VERIFY)
    assert read_known(bundle) is None
