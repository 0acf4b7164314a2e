"""`edgekit verify`: other samples, other limits, and the reports it writes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from demo_paths import EVALUATION, LABELS, MODEL
from fixture_types import Answer, Refused, Shown, present
from tiny_models import parse_model

import edgekit
from edgekit.bundle.folder import open_bundle
from edgekit.cli.main import run_command

WITH_DATA = ["--data", str(EVALUATION), "--reference", str(MODEL), "--samples", "8"]


@pytest.fixture
def bundle(demo_bundles: Path, tmp_path: Path) -> Path:
    """A copy: `verify` writes into it."""
    return shutil.copytree(demo_bundles / "digits_mobilenet-cpu", tmp_path / "digits_mobilenet-cpu")


@pytest.fixture(scope="module")
def facts(demo_bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What verifying a copy of the bundle on this machine left in it; tests must not change it."""
    bundle = shutil.copytree(demo_bundles / "digits_mobilenet-cpu", tmp_path_factory.mktemp("facts") / "bundle")
    assert run_command(["verify", str(bundle), "--on", "host", "-q"]) == 0
    return bundle / "verify.json"


def test_own_samples_are_measured_without_changing_the_bundle(bundle: Path, tmp_path: Path, answer: Answer) -> None:
    before, page = sorted(bundle.rglob("*")), tmp_path / "v.html"
    labels = np.load(LABELS)
    # Those of the samples that run are right, all others wrong.
    kept = [index * len(labels) // 8 for index in range(8)]
    wrong = (labels + 1) % 10
    wrong[kept] = labels[kept]
    np.save(tmp_path / "labels.npy", wrong)
    asked = ["--labels", str(tmp_path / "labels.npy"), "--html", str(page)]
    (run,) = answer(["verify", str(bundle), "--on", "host", *WITH_DATA, *asked])["runs"]
    assert (run["samples"], run["accuracy"]["samples"]) == (8, 8)
    assert run["accuracy"]["reference"] > 0.8
    assert sorted(bundle.rglob("*")) == before
    assert page.read_text().count('<img src="data:image/') == 1


def test_the_reference_is_the_float_model(bundle: Path, facts: Path, tmp_path: Path, answer: Answer) -> None:
    np.savez(tmp_path / "golden.npz", **np.load(bundle / "golden" / "inputs.npz"))
    data = ["--data", str(tmp_path / "golden.npz"), "--reference", str(MODEL)]
    ours = answer(["verify", str(bundle), "--on", "host", *data])["runs"][0]["outputs"]
    assert ours == json.loads(facts.read_bytes())["runs"][0]["outputs"]


def test_another_model_is_no_reference(bundle: Path, tmp_path: Path, refused: Refused) -> None:
    other = parse_model("g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }", tmp_path / "other.onnx")
    message = refused("verify", str(bundle), "--data", str(EVALUATION), "--reference", str(other))
    assert str(other) in message
    assert open_bundle(bundle).manifest.ancestry.source in message


def test_labels_of_another_length_are_refused(bundle: Path, tmp_path: Path, refused: Refused) -> None:
    np.save(tmp_path / "few.npy", np.load(LABELS)[:-1])
    message = refused("verify", str(bundle), *WITH_DATA, "--labels", str(tmp_path / "few.npy"))
    assert "few.npy" in message
    assert f"give {len(np.load(LABELS))} whole numbers" in message


def test_a_missed_limit_fails_in_each_report(bundle: Path, tmp_path: Path, answer: Answer) -> None:
    out = tmp_path / "out"
    reports = [f"--{kind}={out / f'v.{kind}'}" for kind in ("junit", "html", "markdown")]
    report = answer(["verify", str(bundle), "--on", "host", "--min-cosine", "0.99999999", *reports], 1)
    (line,) = report["runs"][0]["failures"]
    # The figure is told from its limit.
    assert ", below 0.99999999" in line
    assert "cosine 1," not in line
    failure = present(ET.parse(out / "v.junit").find("testsuite/testcase/failure"))  # noqa: S314 - our own text
    assert failure.get("message") == line
    page, summary = (out / "v.html").read_text(), (out / "v.markdown").read_text()
    assert 'class="fail"' in page
    assert page.count('<img src="data:image/') == 1
    assert "below 0.99999999" in summary
    assert "| fail |" in summary
    assert sorted(path.name for path in out.iterdir()) == ["v.html", "v.junit", "v.markdown"]
    # The limits of the command line are not written into the bundle.
    assert report["runs"][0]["thresholds"]["min_cosine"] == 0.99999999
    kept = json.loads((bundle / "verify.json").read_text())["runs"][0]["thresholds"]
    assert kept["min_cosine"] == open_bundle(bundle).manifest.thresholds.min_cosine


def test_a_required_device_must_run(bundle: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    """In continuous integration nobody reads what was skipped: there every device that is named must run."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    named, before = ["verify", str(bundle), "--on", "adb:1"], sorted(bundle.iterdir())
    assert answer(named, 3)["skipped"][0]["device"] == "adb:1"
    assert sorted(bundle.iterdir()) == before
    monkeypatch.setenv("CI", "true")
    assert "device 'adb:1' was asked for and did not run" in answer(named, 1)["failures"][0]
    monkeypatch.setenv("CI", "0")
    assert answer(named, 3)["failures"] == []
    required = answer([*named[:2], "--on", "host", "--require", "adb:1"], 1)
    assert (required["required"], required["runs"][0]["passed"]) == (["adb:1"], True)
    assert answer([*named[:2], "--require", "host"])["passed"]


def test_recheck_judges_a_report_without_running_anything(facts: Path, tmp_path: Path, answer: Answer) -> None:
    page, recheck = tmp_path / "summary.md", ["verify", "--recheck", str(facts)]
    assert answer([*recheck, "--markdown", str(page)]) == json.loads(facts.read_bytes())
    assert page.read_text().startswith("### \N{WHITE HEAVY CHECK MARK} digits\\_mobilenet-cpu: pass\n")
    lax = answer([*recheck, "--min-sqnr", "-200", "--min-cosine", "-1"])["runs"][0]["thresholds"]
    assert (lax["min_sqnr_db"], lax["min_cosine"]) == (-200, -1)
    no = answer([*recheck, "--min-sqnr", "90", "--junit", str(tmp_path / "j.xml")], 1)
    assert "below 90 dB" in no["runs"][0]["failures"][0]
    assert "below 90 dB" in (tmp_path / "j.xml").read_text()
    run = no["runs"][0]
    keys = {"device", "evidence", "passed", "provider_nodes", "outputs", "latency_ms", "thresholds", "failures"}
    assert keys <= run.keys()
    keys = {"name", "max_abs", "mean_abs", "rmse", "cosine", "sqnr_db", "top1_agreement", "non_finite"}
    assert keys <= run["outputs"][0].keys()
    assert run["latency_ms"].keys() >= {"median", "p95"}
    assert {"bundle", "target", "passed", "runs", "skipped", "attribution", "first_bad_layer"} <= no.keys()


def test_the_gate_reaches_the_metric_and_unproven_is_code_3(bundle: Path, tmp_path: Path, shown: Shown) -> None:
    labels = ["--labels", str(LABELS), "--metric", "top1", "--max-metric-drop", "2"]
    printed = shown(["verify", str(bundle), "--on", "host", *WITH_DATA, *labels, "--json"], 3)
    report = json.loads(printed)
    assert (report["verdict"], report["passed"], report["runs"][0]["failures"]) == ("not proven", False, [])
    # Eight samples that agree cannot tell two points.
    assert re.search("points worse.* samples would tell", report["runs"][0]["unproven"][0])
    facts = tmp_path / "facts.json"
    facts.write_text(printed)
    recheck = ["verify", "--recheck", str(facts), "--history", str(tmp_path / "h.sqlite")]
    files = [f"--{kind}={tmp_path / f'v.{kind}'}" for kind in ("markdown", "html", "junit")]
    assert run_command([*recheck, *files]) == 3
    assert "not proven" in (tmp_path / "v.markdown").read_text().splitlines()[0]
    assert '<span class="open">not proven</span>' in (tmp_path / "v.html").read_text()
    assert ET.parse(tmp_path / "v.junit").getroot().get("failures") == "1"  # noqa: S314 - our own text
    assert run_command([*recheck, *files, "--accept-unproven"]) == 0
    assert ET.parse(tmp_path / "v.junit").getroot().get("failures") == "0"  # noqa: S314 - our own text
    assert run_command([*recheck, "--gate", "estimate"]) == 0
    assert run_command([*recheck, "--gate", "bound"]) == 3
    # Nothing makes a failure go away.
    assert run_command([*recheck, "--accept-unproven", "--min-sqnr", "190"]) == 1
    rows = shown(["runs", "list", "--history", str(tmp_path / "h.sqlite")]).splitlines()
    assert [row.rpartition("  ")[2] for row in rows] == ["not proven", "not proven", "pass", "not proven", "fail"]
    codes = [run_command(["runs", "show", str(n), "--history", str(tmp_path / "h.sqlite")]) for n in (1, 3, 5)]
    assert codes == [3, 0, 1]


def test_an_explicit_minimum_share_has_no_tolerance_of_one_sample(tmp_path: Path, answer: Answer) -> None:
    output = {"name": "y", "samples": 8, "cosine": 1.0, "sqnr_db": 50.0, "top1_agreement": 0.875}
    limits = {"min_cosine": 0.9, "min_top1_agreement": 0.9, "min_sqnr_db": 20.0, "granted_samples": 1}
    run = {"device": "host", "evidence": "same-ep", "provider": "P", "form": "onnx", "samples": 8, "load_ms": 1.0}
    run |= {"provider_nodes": {"P": 1}, "placement_source": "profile", "outputs": [output], "accuracy": None}
    run |= {"latency_ms": None, "peak_rss_bytes": 1, "versions": {}, "thresholds": limits, "failure": None}
    facts = tmp_path / "verify.json"
    facts.write_text(json.dumps({"bundle": "b", "target": "t", "runs": [run], "skipped": []}))
    assert answer(["verify", "--recheck", str(facts)])["passed"]
    assert not answer(["verify", "--recheck", str(facts), "--min-top1", "0.9"], 1)["passed"]


def test_a_metric_is_read_from_a_file(bundle: Path, tmp_path: Path, answer: Answer) -> None:
    limit = tmp_path / "metric.toml"
    limit.write_text('name = "top3"\nmax_drop = 50.0\ngate = "estimate"\n')
    asked = [str(bundle), "--on", "host", *WITH_DATA, "--labels", str(LABELS), "--metric", str(limit)]
    task = answer(["verify", *asked])["runs"][0]["task"]
    assert (task["name"], task["samples"], task["unit"], len(task["interval"])) == ("top3", 8, "share", 2)


def test_the_history_is_kept(facts: Path, tmp_path: Path, shown: Shown, refused: Refused, answer: Answer) -> None:
    history = ["--history", str(tmp_path / "h.sqlite")]
    for _ in range(2):
        answer(["verify", "--recheck", str(facts), *history])
    assert [run["id"] for run in answer(["runs", "list", *history])["runs"]] == [1, 2]
    assert "digits_mobilenet-cpu: pass" in shown(["runs", "show", "2", *history])
    assert "nothing became worse" in shown(["runs", "diff", "1", "2", *history])
    assert shown(["runs", "list", *history, "--bundle", "other"]) == "no verification of 'other' is recorded\n"
    for missing in ("3", str(1 << 63), "9" * 30):
        assert f"has no run {missing}" in refused("runs", "show", missing, *history)


def test_a_run_is_compared_with_the_baseline_before_it_overwrites_it(bundle: Path, facts: Path, answer: Answer) -> None:
    before, report = bundle / "verify.json", json.loads(facts.read_bytes())
    report["runs"][0]["peak_rss_bytes"] = 1
    before.write_text(json.dumps(report))
    asked = ["verify", str(bundle), "--on", "host", "--baseline", str(before), "--max-memory-ratio", "2"]
    assert "peak memory" in answer(asked, 1)["runs"][0]["failures"][0]


def test_compare_takes_a_metric(shown: Shown, answer: Answer) -> None:
    asked = ["compare", str(MODEL), str(MODEL), "--data", str(EVALUATION), "--samples", "40"]
    task = answer([*asked, "--metric", "top1", "--labels", str(LABELS)])["task"]
    assert (task["samples"], task["reference"] == task["got"]) == (40, True)
    strict = ["--metric", "top1", "--labels", str(LABELS), "--max-metric-drop", "0.5"]
    assert "not proven: metric 'top1' is 0.00 points worse" in shown([*asked, *strict], 3)
    assert run_command([*asked, *strict, "--accept-unproven"]) == 0
    assert run_command([*asked, "--metric", "top1"]) == 2


def test_compare_runs_the_second_model_on_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", str(MODEL), str(MODEL), "--data", str(EVALUATION), "--samples", "2", "--on", "host", "--layers"]
    assert run_command([*asked, "--json", "--html", str(tmp_path / "c.html")]) == 0
    assert "Layer by layer on host" in (tmp_path / "c.html").read_text()
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["failure"], report["located"]["layer"]) == ("host", None, None)
    assert report["outputs"][0]["sqnr_db"] > 60
    # A device that does not run NNAPI gets its own target: it was refused, whether installed or not.
    assert run_command(["compare", str(MODEL), str(MODEL), "--data", str(EVALUATION), "--on", "coreml"]) != 0
    assert "target 'nnapi'" not in capsys.readouterr().err


def test_a_report_with_impossible_figures_is_refused(facts: Path, tmp_path: Path, refused: Refused) -> None:
    report = json.loads(facts.read_bytes())
    report["runs"][0]["outputs"][0]["cosine"] = 5.0
    (tmp_path / "v.json").write_text(json.dumps(report))
    said = refused("verify", "--recheck", str(tmp_path / "v.json"))
    assert f"'{tmp_path / 'v.json'}' is malformed: " in said
    assert "`$.runs[0].outputs[0].cosine`" in said


_OWN = """
import numpy as np

def samples():
    yield {"image": 5}
    raise ValueError("no\\nmore")

def metric(outputs, label):
    return 1 / 0
"""


def test_a_users_function_that_raises_is_an_error_in_one_line(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
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


def test_a_label_that_is_no_class_is_refused(bundle: Path, tmp_path: Path, refused: Refused) -> None:
    np.save(tmp_path / "l.npy", np.full_like(np.load(LABELS), -1))
    arguments = [*WITH_DATA, "--on", "host", "--labels", str(tmp_path / "l.npy")]
    assert "label -1 is no class of an output of 10" in refused("verify", str(bundle), *arguments)


def test_a_bundle_whose_verify_json_cannot_be_written_is_verified(bundle: Path, answer: Answer) -> None:
    (bundle / "verify.json").mkdir()
    report = answer(["verify", str(bundle), "--on", "host"])
    assert report["passed"]
    (note,) = report["notes"]
    assert note.startswith(f"the bundle has no new verify.json: cannot write '{bundle / 'verify.json'}'")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_is_ended_from_outside_leaves_nothing(bundle: Path, tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "slow_samples.py").write_text(
        "import time\nimport numpy as np\n\ndef samples():\n    print('reading', flush=True)\n"
        "    yield {'image': np.zeros((1, 1, 8, 8), np.float32)}\n    time.sleep(60)\n"
    )
    (tmp_path / "tmp").mkdir()
    arguments = ["verify", str(bundle), "--on", "host", "--reference", str(MODEL), "--data", "slow_samples:samples"]
    argv = [sys.executable, "-m", "edgekit", *arguments]
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path(edgekit.__file__).parents[1])}
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert present(process.stdout).readline() == "reading\n"
    process.send_signal(end)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.endswith("edgekit: interrupted; nothing half-written is left\n")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_end_that_comes_while_a_generator_is_closed_is_not_lost() -> None:
    program = """
import time
from edgekit.cli import main

def rows():
    try:
        yield
    finally:
        raise KeyboardInterrupt

def close(_arguments):
    started = rows()
    next(started)
    del started
    time.sleep(60)

main.run_command = close
main.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
