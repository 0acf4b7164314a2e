"""`edgekit verify`: other samples, other limits, and the reports it writes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from demo_paths import EVALUATION, LABELS, MODEL
from tiny_models import parse_model

import edgekit
from edgekit.bundle.folder import open_bundle
from edgekit.cli.main import run_command

WITH_DATA = ["--data", str(EVALUATION), "--reference", str(MODEL), "--samples", "8"]


@pytest.fixture
def built(demo_bundles: Path) -> Path:
    return demo_bundles / "digits_mobilenet-cpu"


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy: `verify` writes into it."""
    return shutil.copytree(built, tmp_path / built.name)


def test_other_samples_are_measured_and_leave_the_bundle_alone(bundle: Path, answer: Callable[..., Any]) -> None:
    before = sorted(bundle.rglob("*"))
    labels = ["--labels", str(LABELS)]
    (run,) = answer(["verify", str(bundle), "--on", "host", *WITH_DATA, *labels])["runs"]
    assert run["samples"] == 8
    assert run["accuracy"]["samples"] == 8
    assert run["accuracy"]["reference"] > 0.8
    assert sorted(bundle.rglob("*")) == before


def test_the_reference_is_the_float_model_not_the_golden_outputs(
    bundle: Path, tmp_path: Path, answer: Callable[..., Any]
) -> None:
    np.savez(tmp_path / "golden.npz", **np.load(bundle / "golden" / "inputs.npz"))
    data = ["--data", str(tmp_path / "golden.npz"), "--reference", str(MODEL)]
    ours = answer(["verify", str(bundle), "--on", "host", *data])["runs"][0]["outputs"]
    assert ours == answer(["verify", str(bundle), "--on", "host"])["runs"][0]["outputs"]


def test_another_model_is_no_reference(bundle: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }'
    other = parse_model(text, tmp_path / "other.onnx")
    message = refused("verify", str(bundle), "--data", str(EVALUATION), "--reference", str(other))
    assert str(other) in message
    assert open_bundle(bundle).manifest.ancestry.source in message


def test_labels_of_another_length_are_refused(bundle: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    np.save(tmp_path / "few.npy", np.load(LABELS)[:-1])
    message = refused("verify", str(bundle), *WITH_DATA, "--labels", str(tmp_path / "few.npy"))
    assert "few.npy" in message
    assert f"give {len(np.load(LABELS))} whole numbers" in message


def test_labels_go_with_their_samples(bundle: Path, tmp_path: Path, answer: Callable[..., Any]) -> None:
    labels = np.load(LABELS)
    kept = [index * len(labels) // 8 for index in range(8)]
    wrong = (labels + 1) % 10
    wrong[kept] = labels[kept]
    np.save(tmp_path / "labels.npy", wrong)
    report = answer(["verify", str(bundle), "--on", "host", *WITH_DATA, "--labels", str(tmp_path / "labels.npy")])
    assert report["runs"][0]["accuracy"]["reference"] > 0.8


@pytest.mark.parametrize("limit", [["--min-cosine", "1"], ["--min-sqnr", "90"]])
def test_a_limit_that_is_not_reached_is_a_no_and_a_failure_in_junit(
    bundle: Path, limit: list[str], tmp_path: Path, answer: Callable[..., Any]
) -> None:
    junit, page = tmp_path / "out" / "v.xml", tmp_path / "out" / "v.html"
    reports = ["--junit", str(junit), "--html", str(page)]
    report = answer(["verify", str(bundle), "--on", "host", *limit, *reports], 1)
    failure = ET.parse(junit).find("testsuite/testcase/failure")  # noqa: S314 - our own text
    assert failure is not None
    assert failure.get("message") == report["runs"][0]["failures"][0]
    assert 'class="fail"' in page.read_text()
    assert sorted(path.name for path in junit.parent.iterdir()) == ["v.html", "v.xml"]


def test_a_required_device_must_run(bundle: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> None:
    """In continuous integration nobody reads what was skipped: there every device that is named must run."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    named = [str(bundle), "--on", "host", "--on", "adb:1"]
    assert answer(["verify", *named])["skipped"][0]["device"] == "adb:1"
    monkeypatch.setenv("CI", "true")
    failing = answer(["verify", *named], 1)
    assert "device 'adb:1' was asked for and did not run" in failing["failures"][0]
    monkeypatch.setenv("CI", "0")
    required = answer(["verify", *named[:3], "--require", "adb:1"], 1)
    assert required["required"] == ["adb:1"]
    assert answer(["verify", *named[:3], "--require", "host"])["passed"]


def test_limits_do_not_go_into_the_bundle(bundle: Path, answer: Callable[..., Any]) -> None:
    lax = answer(["verify", str(bundle), "--on", "host", "--min-sqnr", "-200", "--min-cosine", "-1"])
    assert lax["runs"][0]["thresholds"]["min_sqnr_db"] == -200
    kept = json.loads((bundle / "verify.json").read_text())["runs"][0]["thresholds"]
    assert kept["min_sqnr_db"] == open_bundle(bundle).manifest.thresholds.min_sqnr_db


def test_recheck_says_yes_and_no_without_running(bundle: Path, tmp_path: Path, answer: Callable[..., Any]) -> None:
    report = answer(["verify", str(bundle), "--on", "host"])
    facts = shutil.copy(bundle / "verify.json", tmp_path / "facts.json")
    shutil.rmtree(bundle)
    assert answer(["verify", "--recheck", str(facts)]) == report
    no = answer(["verify", "--recheck", str(facts), "--min-sqnr", "90", "--junit", str(tmp_path / "j.xml")], 1)
    assert "below 90 dB" in no["runs"][0]["failures"][0]
    assert "below 90 dB" in (tmp_path / "j.xml").read_text()


def test_the_gate_reaches_the_metric_and_what_is_not_proven_is_exit_code_3(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["--labels", str(LABELS), "--metric", "top1", "--max-metric-drop", "2"]
    asked = ["verify", str(bundle), "--on", "host", *WITH_DATA, *labels, "--json"]
    capsys.readouterr()
    assert run_command(asked) == 3
    shown = capsys.readouterr().out
    report = json.loads(shown)
    assert (report["verdict"], report["passed"], report["runs"][0]["failures"]) == ("not proven", False, [])
    assert "samples would tell" in report["runs"][0]["unproven"][0]
    facts = tmp_path / "facts.json"
    facts.write_text(shown)
    recheck = ["verify", "--recheck", str(facts), "--history", str(tmp_path / "h.sqlite")]
    files = [
        "--markdown",
        str(tmp_path / "v.md"),
        "--html",
        str(tmp_path / "v.html"),
        "--junit",
        str(tmp_path / "v.xml"),
    ]
    assert run_command([*recheck, *files]) == 3
    assert "not proven" in (tmp_path / "v.md").read_text().splitlines()[0]
    assert '<span class="open">not proven</span>' in (tmp_path / "v.html").read_text()
    assert ET.parse(tmp_path / "v.xml").getroot().get("failures") == "1"  # noqa: S314 - our own text
    assert run_command([*recheck, *files, "--accept-unproven"]) == 0
    assert ET.parse(tmp_path / "v.xml").getroot().get("failures") == "0"  # noqa: S314 - our own text
    assert run_command([*recheck, "--gate", "estimate"]) == 0
    assert run_command([*recheck, "--gate", "bound"]) == 3
    # Nothing makes a failure go away.
    assert run_command([*recheck, "--accept-unproven", "--min-sqnr", "190"]) == 1
    capsys.readouterr()
    assert run_command(["runs", "list", "--history", str(tmp_path / "h.sqlite")]) == 0
    words = [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert words == ["not proven", "not proven", "pass", "not proven", "fail"]
    codes = [run_command(["runs", "show", str(n), "--history", str(tmp_path / "h.sqlite")]) for n in (1, 3, 5)]
    assert codes == [3, 0, 1]


def test_a_share_that_is_named_grants_no_sample(tmp_path: Path, answer: Callable[..., Any]) -> None:
    output = {"name": "y", "samples": 8, "cosine": 1.0, "sqnr_db": 50.0, "top1_agreement": 0.875}
    limits = {"min_cosine": 0.9, "min_top1_agreement": 0.9, "min_sqnr_db": 20.0, "granted_samples": 1}
    run = {"device": "host", "evidence": "same-ep", "provider": "P", "form": "onnx", "samples": 8, "load_ms": 1.0}
    run |= {"provider_nodes": {"P": 1}, "placement_source": "profile", "outputs": [output], "accuracy": None}
    run |= {"latency_ms": None, "peak_rss_bytes": 1, "versions": {}, "thresholds": limits, "failure": None}
    facts = tmp_path / "verify.json"
    facts.write_text(json.dumps({"bundle": "b", "target": "t", "runs": [run], "skipped": []}))
    assert answer(["verify", "--recheck", str(facts)])["passed"]
    assert not answer(["verify", "--recheck", str(facts), "--min-top1", "0.9"], 1)["passed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either a BUNDLE to run or --recheck"),
        (["BUNDLE", "--recheck", "v.json"], "either a BUNDLE to run or --recheck"),
        (["--recheck", "none.json"], "cannot read 'none.json'"),
        (["--recheck", "v.json", "--on", "host"], "--on means nothing"),
        (["--recheck", "v.json", *WITH_DATA], "--data means nothing"),
        (["BUNDLE", "--labels", str(LABELS)], "--labels means nothing"),
        (["BUNDLE", "--samples", "3"], "--samples means nothing"),
        (["BUNDLE", "--data", str(EVALUATION)], "--data needs --reference"),
        (["BUNDLE", *WITH_DATA, "--on", "emulatd"], "emulatd"),
        (["BUNDLE", "--data", "none.npz", "--reference", str(MODEL)], "'none.npz' does not exist"),
        (["BUNDLE", "--data", str(EVALUATION), "--reference", "none.onnx"], "no file 'none.onnx'"),
        (["BUNDLE", "--junit", "BUNDLE/v.xml"], "lies in the bundle"),
        (["BUNDLE", "--html", "BUNDLE/manifest.json"], "lies in the bundle"),
        (["BUNDLE", "--min-cosine", "1.5"], "--min-cosine"),
        (["BUNDLE", "--min-sqnr", "nan"], "'nan' is no number"),
        (["BUNDLE", "--min-top1", "x"], "--min-top1"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], message: str, built: Path, refused: Callable[..., str]
) -> None:
    assert message in refused("verify", *(word.replace("BUNDLE", str(built)) for word in arguments))
    open_bundle(built)


def test_a_metric_is_shown_on_both_sides_and_gates(bundle: Path, tmp_path: Path, answer: Callable[..., Any]) -> None:
    asked = [str(bundle), "--on", "host", *WITH_DATA, "--labels", str(LABELS), "--metric", "top1"]
    task = answer(["verify", *asked])["runs"][0]["task"]
    assert (task["samples"], task["unit"], len(task["interval"])) == (8, "share", 2)
    # Eight samples that agree cannot tell half a point.
    assert "points worse" in " ".join(answer(["verify", *asked, "--max-metric-drop", "0.5"], 3)["runs"][0]["unproven"])
    limit = tmp_path / "metric.toml"
    limit.write_text('name = "top3"\nmax_drop = 50.0\ngate = "estimate"\n')
    assert answer(["verify", *asked[:-1], str(limit)])["runs"][0]["task"]["name"] == "top3"


def test_markdown_says_the_verdict(bundle: Path, tmp_path: Path, answer: Callable[..., Any]) -> None:
    page = tmp_path / "summary.md"
    answer(["verify", str(bundle), "--on", "host", "--markdown", str(page)])
    assert page.read_text().startswith("### \N{WHITE HEAVY CHECK MARK} digits\\_mobilenet-cpu: pass\n")
    answer(["verify", str(bundle), "--on", "host", "--min-sqnr", "90", "--markdown", str(page)], 1)
    assert "below 90 dB" in page.read_text()
    assert "| **fail** |" in page.read_text()


def test_the_history_is_kept_listed_shown_and_compared(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    refused: Callable[..., str],
    answer: Callable[..., Any],
) -> None:
    history = ["--history", str(tmp_path / "h.sqlite")]
    for _ in range(2):
        answer(["verify", str(bundle), "--on", "host", *history])
    assert run_command(["runs", "list", *history, "--json"]) == 0
    assert [run["id"] for run in json.loads(capsys.readouterr().out)["runs"]] == [1, 2]
    assert run_command(["runs", "show", "2", *history]) == 0
    assert "digits_mobilenet-cpu: pass" in capsys.readouterr().out
    assert run_command(["runs", "diff", "1", "2", *history]) == 0
    assert "nothing became worse" in capsys.readouterr().out
    for missing in ("3", "9" * 30):
        assert f"has no run {missing}" in refused("runs", "show", missing, *history)


def test_a_ratio_needs_a_reference_run(bundle: Path, refused: Callable[..., str]) -> None:
    assert "give --baseline FILE or --history" in refused("verify", str(bundle), "--max-latency-ratio", "1.2")
    assert "cannot read 'none.json'" in refused("verify", str(bundle), "--on", "host", "--baseline", "none.json")


def test_a_run_is_held_against_the_baseline_that_it_writes_over(bundle: Path, answer: Callable[..., Any]) -> None:
    before, asked = bundle / "verify.json", ["verify", str(bundle), "--on", "host"]
    report = answer(asked)
    report["runs"][0]["peak_rss_bytes"] = 1
    before.write_text(json.dumps(report))
    (run,) = answer([*asked, "--baseline", str(before), "--max-memory-ratio", "2"], 1)["runs"]
    assert "peak memory" in run["failures"][0]


def test_compare_takes_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", str(MODEL), str(MODEL), "--data", str(EVALUATION), "--samples", "40"]
    assert run_command([*asked, "--metric", "top1", "--labels", str(LABELS), "--json"]) == 0
    task = json.loads(capsys.readouterr().out)["task"]
    assert (task["samples"], task["reference"] == task["got"]) == (40, True)
    strict = ["--metric", "top1", "--labels", str(LABELS), "--max-metric-drop", "0.5"]
    assert run_command([*asked, *strict]) == 3
    assert "not proven: metric 'top1' is 0.00 points worse" in capsys.readouterr().out
    assert run_command([*asked, *strict, "--accept-unproven"]) == 0
    assert run_command([*asked, "--metric", "top1"]) == 2


def test_compare_runs_the_second_model_on_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", str(MODEL), str(MODEL), "--data", str(EVALUATION), "--samples", "2", "--on", "host", "--layers"]
    assert run_command([*asked, "--json", "--html", str(tmp_path / "c.html")]) == 0
    assert "Layer by layer on host" in (tmp_path / "c.html").read_text()
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["failure"], report["located"]["layer"]) == ("host", None, None)
    assert report["outputs"][0]["sqnr_db"] > 60


@pytest.mark.parametrize("data", [[], WITH_DATA], ids=["golden", "data"])
def test_the_page_shows_the_worst_samples(bundle: Path, tmp_path: Path, data: list[str]) -> None:
    page = tmp_path / "v.html"
    assert run_command(["verify", str(bundle), "--on", "host", *data, "--html", str(page)]) == 0
    assert page.read_text().count('<img src="data:image/') == 1


def test_a_device_that_is_not_there_leaves_the_evidence_alone(
    bundle: Path, answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(["verify", str(bundle), "--on", "host"])
    before = (bundle / "verify.json").read_bytes()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CI", raising=False)  # where every device that is named has to run
    report = answer(["verify", str(bundle), "--on", "adb:1"], 3)
    assert report["skipped"][0]["device"] == "adb:1"
    assert (bundle / "verify.json").read_bytes() == before


def test_a_model_is_no_bundle(refused: Callable[..., str]) -> None:
    assert "is a model, not a bundle (edgekit build makes bundles" in refused("verify", str(MODEL))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-sqnr", "nan"], "'nan' is no number"),
        (["--target", "qnn"], "--target says how a device opens B"),
        (["--on", "hots"], "there is no device 'hots'"),
        (["--on", "host", "--target", "nap"], "there is no target 'nap'"),
    ],
)
def test_compare_refuses_in_one_line(options: list[str], message: str, refused: Callable[..., str]) -> None:
    arguments = ["compare", str(MODEL), str(MODEL), "--data", str(EVALUATION), "--samples", "2", *options]
    assert message in refused(*arguments)


def test_a_history_without_such_a_bundle_says_so(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Callable[..., Any]
) -> None:
    history = tmp_path / "h.sqlite"
    answer(["verify", str(bundle), "--on", "host", "--history", str(history)])
    assert run_command(["runs", "list", "--history", str(history), "--bundle", "other"]) == 0
    assert capsys.readouterr().out == "no verification of 'other' is recorded\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("cosine", 5.0), ("samples", -5), ("non_finite", -1), ("top1_agreement", 7.0), ("sqnr_db", 1e308), ("iou", "1")],
)
def test_figures_that_cannot_be_are_not_judged(
    bundle: Path, tmp_path: Path, name: str, value: object, answer: Callable[..., Any], refused: Callable[..., str]
) -> None:
    report = answer(["verify", str(bundle), "--on", "host"])
    report["runs"][0]["outputs"][0][name] = value
    (tmp_path / "v.json").write_text(json.dumps(report))
    said = refused("verify", "--recheck", str(tmp_path / "v.json"))
    assert f"'{tmp_path / 'v.json'}' is malformed: " in said
    assert f"`$.runs[0].outputs[0].{name}`" in said


_OWN = """
import numpy as np

def samples():
    yield {"image": 5}
    raise ValueError("no\\nmore")

def metric(outputs, label):
    return 1 / 0
"""


def test_functions_of_the_user_that_raise_are_told_of_in_one_line(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_functions.py").write_text(_OWN)
    (tmp_path / "own_broken.py").write_text("def f(:")
    reference = ["--on", "host", "--reference", str(MODEL)]
    labelled = [*WITH_DATA, "--on", "host", "--labels", str(LABELS)]
    assert "'own_functions:samples'" in refused("verify", str(bundle), *reference, "--data", "own_functions:samples")
    assert "cannot load samples 'own_broken:f'" in refused("verify", str(bundle), *reference, "--data", "own_broken:f")
    said = refused("verify", str(bundle), *labelled, "--metric", "own_functions:metric")
    assert "metric 'own_functions:metric' raises ZeroDivisionError: division by zero" in said
    assert "cannot load metric 'own_broken:f'" in refused("verify", str(bundle), *labelled, "--metric", "own_broken:f")


def test_a_label_that_is_no_class_is_refused(bundle: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    np.save(tmp_path / "l.npy", np.full_like(np.load(LABELS), -1))
    arguments = [*WITH_DATA, "--on", "host", "--labels", str(tmp_path / "l.npy")]
    assert "label -1 is no class of an output of 10" in refused("verify", str(bundle), *arguments)


def test_without_a_run_there_are_no_reports(bundle: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    for option in (["--on", "host"], ["--html", str(tmp_path / "v.html")], ["--layers"]):
        assert "means nothing here (--files-only runs nothing)" in refused(
            "verify", str(bundle), "--files-only", *option
        )


def test_a_figure_is_told_from_its_limit(bundle: Path, answer: Callable[..., Any]) -> None:
    report = answer(["verify", str(bundle), "--on", "host", "--min-cosine", "0.99999999"], 1)
    (line,) = report["runs"][0]["failures"]
    assert ", below 0.99999999" in line
    assert "cosine 1," not in line


def test_a_bundle_that_cannot_be_written_is_judged_all_the_same(bundle: Path, answer: Callable[..., Any]) -> None:
    (bundle / "verify.json").mkdir()
    report = answer(["verify", str(bundle), "--on", "host"])
    assert report["passed"]
    (note,) = report["notes"]
    assert note.startswith(f"the bundle has no new verify.json: cannot write '{bundle / 'verify.json'}'")


def test_a_job_that_is_ended_from_outside_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "slow_samples.py").write_text(
        "import time\nimport numpy as np\n\ndef samples():\n    print('reading', flush=True)\n"
        "    yield {'image': np.zeros((1, 1, 8, 8), np.float32)}\n    time.sleep(60)\n"
    )
    (tmp_path / "tmp").mkdir()
    arguments = ["verify", str(bundle), "--on", "host", "--reference", str(MODEL), "--data", "slow_samples:samples"]
    process = subprocess.Popen(
        [sys.executable, "-m", "edgekit", *arguments],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path(edgekit.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.endswith("edgekit: interrupted; nothing half-written is left\n")
    assert list((tmp_path / "tmp").iterdir()) == []
