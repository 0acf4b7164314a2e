"""A verification as JUnit XML, as Markdown, as a page and in a notebook: no name gets out of its place."""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from fixture_types import present
from msgspec.structs import replace

import edgekit as ek
from edgekit._ort import CPU_PROVIDER
from edgekit.bench.bench import BenchReport, BenchRun
from edgekit.devices.device import SkippedDevice
from edgekit.evidence import Evidence, Judgement
from edgekit.report.ci import render_bench_markdown, render_junit, render_markdown
from edgekit.report.html import render_page
from edgekit.target import TaskLimit, Thresholds
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.report import AttributionStep, VerifyReport
from edgekit.verify.run_report import Cost, RunReport

HOSTILE = "</testcase><script>alert(1)</script>\"'&]]>\x00\x1b[31m\x85\ud800\ufffe"
CLEANED = "</testcase><script>alert(1)</script>\"'&]]>[31m"
GOOD = RunReport(
    device="emulated",
    evidence=Evidence.EMULATED,
    provider=CPU_PROVIDER,
    form="onnx",
    samples=8,
    provider_nodes={CPU_PROVIDER: 3},
    outputs=(OutputReport(name="y", samples=8, max_abs=0.1, cosine=0.999, sqnr_db=30.0, top1_agreement=1.0),),
    load_ms=1.0,
    peak_rss_bytes=1,
    thresholds=Thresholds(min_cosine=0.9, min_top1_agreement=0.9, min_sqnr_db=20.0),
)
BAD = replace(GOOD, device="arm64", thresholds=Thresholds(min_cosine=1.0, min_top1_agreement=0.9, min_sqnr_db=40.0))
DEAD = replace(GOOD, device="phone", outputs=(), failure="the cable fell out")
SKIPPED = SkippedDevice(device="coreml", reason="no Mac", command="buy one")


def _report(*runs: RunReport, bundle: str = "m-t", skipped: tuple[SkippedDevice, ...] = (SKIPPED,)) -> VerifyReport:
    return VerifyReport(bundle=bundle, target="t", runs=runs, skipped=skipped)


def _suite(report: VerifyReport) -> ET.Element:
    root = ET.fromstring(render_junit((report,)))  # noqa: S314 - our own text
    assert list(_find_faults(root)) == []
    return present(root.find("testsuite"))


_RULES: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, set(), {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "group", "time", "skipped", "timestamp", "hostname", "id", "package",
         "file", "log", "url", "version"},
        {"name", "tests"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name", "classname", "time", "group"},
        {"name"},
        {"skipped", "error", "failure", "rerunFailure", "rerunError", "flakyFailure", "flakyError", "system-out",
         "system-err", "properties"},
    ),
    "failure": ({"type", "message"}, set(), set()),
    "skipped": ({"type", "message"}, set(), set()),
    "system-out": (set(), set(), set()),
    "system-err": (set(), set(), set()),
}  # fmt: skip
"""What Jenkins' jenkins-junit.xsd allows: attributes, those that are required, and children."""


def _find_faults(element: ET.Element) -> Iterator[str]:
    """Yields what Jenkins' schema would refuse."""
    allowed, required, children = _RULES[element.tag]
    if not required <= set(element.attrib) <= allowed:
        yield f"{element.tag}: {sorted(element.attrib)}"
    for name in {"tests", "failures", "errors", "skipped"} & set(element.attrib):
        if not element.attrib[name].isdecimal():
            yield f"{element.tag}: {name} is no number"
    if "time" in element.attrib and not re.fullmatch(r"\d+(\.\d{1,3})?", element.attrib["time"]):
        yield f"{element.tag}: time"
    for child in element:
        if child.tag not in children:
            yield f"{child.tag} in {element.tag}"
        else:
            yield from _find_faults(child)


def _names(suite: ET.Element) -> list[tuple[str, str]]:
    return [(case.get("classname", ""), case.get("name", "")) for case in suite]


def test_each_output_of_each_device_is_a_case() -> None:
    two = replace(GOOD, outputs=(*GOOD.outputs, replace(GOOD.outputs[0], name="z")))
    suite = _suite(_report(two, BAD, DEAD))
    assert suite.attrib == {"name": "m-t", "tests": "8", "failures": "2", "errors": "0", "skipped": "1"}
    assert _names(suite) == [
        ("m-t.emulated", "run"),
        ("m-t.emulated", "output y"),
        ("m-t.emulated", "output z"),
        ("m-t.arm64", "run"),
        ("m-t.arm64", "output y"),
        ("m-t.phone", "run"),
        ("m-t.coreml", "run"),
        ("m-t", "the bundle as a whole"),
    ]
    assert present(suite.find("testcase/skipped")).get("message") == "no Mac; to run it: buy one"


def test_each_other_gate_of_a_run_is_a_test_case() -> None:
    limit = TaskLimit(name="top1", max_drop=0.5)
    run = replace(
        GOOD,
        evidence=Evidence.DEVICE,
        provider="P",
        provider_nodes={CPU_PROVIDER: 3},
        placement_source="session",
        thresholds=replace(GOOD.thresholds, task=limit, max_latency_ratio=1.1),
        reference_cost=Cost(source="run 3", latency_ms=None, peak_rss_bytes=1),
        findings=("the saved runtime optimisations were ignored",),
        traps=("this machine's CPU has no VNNI",),
    )
    suite = _suite(_report(run, skipped=()))
    names = ["run", "output y", "metric top1", "placement", "costs", "session", "the bundle as a whole"]
    assert [name for _, name in _names(suite)] == names
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["metric top1", "placement", "session"]
    texts = [failure.text or "" for failure in suite.iter("failure")]
    # What explains a failure does not explain what is not proven.
    assert ["no VNNI" in text for text in texts] == [False, True, False]
    assert [failure.get("type") for failure in suite.iter("failure")] == ["not proven", "verify", "verify"]
    assert texts[0].startswith("not proven: metric 'top1' was not measured")
    assert "silent fallback" in texts[1]


def test_what_is_not_proven_is_skipped_where_that_is_accepted() -> None:
    limits = replace(GOOD.thresholds, task=TaskLimit(name="top1", max_drop=0.5))
    report = _report(replace(GOOD, thresholds=limits), skipped=())
    for accepts, counts in ((False, ("1", "0")), (True, ("0", "1"))):
        root = ET.fromstring(render_junit((report,), accept_unproven=accepts))  # noqa: S314 - our own text
        assert list(_find_faults(root)) == []
        (suite,) = root
        assert (suite.get("failures"), suite.get("skipped")) == counts
    # What failed is a failure all the same, and so is that nothing ran until somebody takes that for enough.
    (suite,) = ET.fromstring(render_junit((_report(BAD),), accept_unproven=True))  # noqa: S314 - our own text
    assert suite.get("failures") == "1"
    (suite,) = ET.fromstring(render_junit((_report(),)))  # noqa: S314 - our own text
    assert suite.get("failures") == "1"


def test_a_bundle_without_a_verification_is_a_case_and_a_line_too() -> None:
    others = {
        "m-a": Judgement(failures=("it broke",)),
        "m-b": Judgement(unproven=("nobody ran it",)),
        "m-c": Judgement(),
    }
    for accepts, failures in ((False, ["1", "1", "0"]), (True, ["1", "0", "0"])):
        root = ET.fromstring(render_junit((), others=others, accept_unproven=accepts))  # noqa: S314 - our own text
        assert [(suite.get("name"), suite.get("failures")) for suite in root] == list(
            zip(others, failures, strict=True)
        )
    assert render_markdown((), others).split("### ")[1:] == [
        "❌ m-a: fail\n\n- it broke\n\n",
        "❔ m-b: not proven\n\n- nobody ran it\n\n",
        "✅ m-c: pass\n\n\n",
    ]


def test_several_targets_are_several_suites() -> None:
    root = ET.fromstring(render_junit((_report(GOOD), _report(BAD, bundle="m-u"))))  # noqa: S314 - our own text
    assert list(_find_faults(root)) == []
    assert [suite.get("name") for suite in root] == ["m-t", "m-u"]
    assert root.attrib == {"name": "edgekit verify", "tests": "8", "failures": "1", "errors": "0"}


IDLE = replace(_report(GOOD), taken_macs=0.0, min_taken_macs=0.5)


@pytest.mark.parametrize(
    "report", [_report(), _report(skipped=()), _report(BAD), _report(GOOD, DEAD), _report(GOOD), IDLE]
)
def test_it_fails_exactly_where_the_report_does_not_pass(report: VerifyReport) -> None:
    suite = _suite(report)
    assert (suite.get("failures") == "0") == report.passed
    assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))
    assert int(suite.get("tests", "")) == len(suite.findall("testcase"))


def test_a_case_says_every_reason_and_the_figures() -> None:
    bad, dead = _suite(_report(GOOD, BAD, DEAD)).findall("testcase/failure")
    assert bad.get("message") == "output 'y' has cosine 0.999, below 1"
    assert bad.text == "output 'y' has cosine 0.999, below 1\noutput 'y' has SQNR 30 dB, below 40 dB"
    assert dead.get("message") == "the device failed: the cable fell out"
    run, output, _ = (case.findtext("system-out") or "" for case in _suite(_report(GOOD, skipped=())))
    assert "evidence: emulated" in run
    assert output == "output 'y' over 8 samples: cosine 0.999, SQNR dB 30, top-1 agreement 1"
    failure = present(_suite(IDLE).find("testcase[@name='the bundle as a whole']/failure"))
    assert failure.get("message") == IDLE.failures[0]
    assert IDLE.failures[0] in render_page(IDLE)


def _hostile() -> VerifyReport:
    output = replace(GOOD.outputs[0], name=HOSTILE, cosine=0.1)
    run = replace(GOOD, device=HOSTILE, outputs=(output,), notes=(HOSTILE,), versions={HOSTILE: "1"})
    skipped = SkippedDevice(device=HOSTILE, reason=HOSTILE, command=HOSTILE)
    return _report(run, bundle=HOSTILE, skipped=(skipped,))


def test_hostile_names_do_not_change_the_structure_of_the_xml() -> None:
    suite = _suite(_hostile())
    assert suite.get("name") == CLEANED
    assert _names(suite) == [
        (f"{CLEANED}.{CLEANED}", "run"),
        (f"{CLEANED}.{CLEANED}", f"output {CLEANED}"),
        (f"{CLEANED}.{CLEANED}", "run"),
        (CLEANED, "the bundle as a whole"),
    ]
    assert {element.tag for element in suite.iter()} == {"testsuite", "testcase", "failure", "system-out", "skipped"}
    assert (suite.findtext("testcase/failure") or "").startswith(f"output '{CLEANED}' has cosine 0.1")


def test_the_page_says_what_passed_what_failed_and_what_did_not_run() -> None:
    page = render_page(_report(GOOD, BAD, DEAD))
    assert (page.count('"pass"'), page.count('"fail"')) == (1, 3)
    assert "phone: the device failed: the cable fell out" in page
    assert "coreml skipped: no Mac; to run it: buy one" in page
    assert "nothing ran" in render_page(_report())
    assert "http:" not in page
    assert "https:" not in page
    page = render_page(replace(_report(GOOD), machine={"x": "y"}))
    assert "edgekit ran on ?, ? cores" in page


def test_in_markdown_each_output_is_a_row_and_each_reason_a_line() -> None:
    text = render_markdown((_report(GOOD, BAD, DEAD),))
    assert text.startswith("### \N{CROSS MARK} m-t: fail\n")
    assert "| emulated | emulated | y | 0.99900 | 30.0 dB | 100.0% | - | pass |" in text
    assert "| arm64 | emulated | y | 0.99900 | 30.0 dB | 100.0% | - | fail |" in text
    assert "| phone | emulated | - | - | - | - | - | fail |" in text
    assert "- phone: the device failed: the cable fell out" in text
    assert "- coreml skipped: no Mac; to run it: buy one" in text
    assert render_markdown((_report(GOOD), _report(GOOD))).count("pass\n") == 2
    assert "nothing ran" in render_markdown((_report(),))
    step = AttributionStep(step="provider", sqnr_db=20.0, top1_agreement=None, accuracy=None, noise_share=0.9)
    advised = replace(_report(GOOD), attribution=(step,))
    noted = replace(advised, notes=(f"{advised.advice} (what an earlier verification found)",))
    assert [render_markdown((each,)).count("makes 100% of the error") for each in (advised, noted)] == [1, 1]


def test_bench_has_a_markdown_row_for_each_time_with_names_escaped() -> None:
    good = BenchRun(
        device="host", evidence=Evidence.EMULATED, provider="CPU", batch=4, median_ms=12.34, interval_ms=(12.0, 13.0),
        p95_ms=14.0, p99_ms=15.0, throughput_per_s=320.0, load_ms=99.6, peak_rss_bytes=50_000_000,
    )  # fmt: skip
    dead = BenchRun(device="a|b", evidence=Evidence.DEVICE, provider="CPU", failure="it <died>")
    text = render_bench_markdown(BenchReport(subject="a*b", runs=(good, dead), notes=("x|y",)))
    rows = text.splitlines()
    assert rows[0] == "### ❌ a\\*b"
    times = r"12.3 ms \(12 to 13\) | 14 ms | 15 ms | 320 | 0 | 100 ms | 0 ms | 50 MB |"
    assert rows[4] == f"| host | emulated | CPU | 4 | {times}"
    assert rows[5] == "| a\\|b | device | CPU | 1 | failed | - | - | - | - | - | - | - |"
    assert len({row.replace("\\|", "").count("|") for row in rows[2:6]}) == 1
    assert "- a\\|b failed: it &lt;died&gt;" in rows
    assert render_bench_markdown(BenchReport(subject="n", runs=(good,))).startswith("### ✅ n")


EXAMPLE = Path(__file__).parents[2] / "docs" / "first_steps.ipynb"


def test_a_notebook_cell_that_ends_with_a_report_shows_its_page() -> None:
    shown = ek.show(_report(GOOD), height=300)._repr_html_()
    (page,) = re.findall(r'srcdoc="([^"]*)"></iframe>', shown)
    assert html.unescape(page) == render_page(_report(GOOD))
    assert 'sandbox="allow-scripts"' in shown
    assert "height: 300px" in shown
    # And a report shows itself.
    (page,) = re.findall(r'srcdoc="([^"]*)"></iframe>', _report(GOOD)._repr_html_())
    assert html.unescape(page) == render_page(_report(GOOD))


@pytest.mark.long
@pytest.mark.slow
def test_the_example_notebook_runs_and_shows_its_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLE.parents[1])}}).execute()
    outputs: list[list[Any]] = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    shown = [cell[-1].data.get("text/html", "") for cell in outputs if cell]
    assert [len(re.findall("<iframe", page)) for page in shown] == [1, 1, 1]
    # Placement, layers and loss, sizes.
    for page, word in zip(shown, ("partition", "kB", "emulated"), strict=True):
        assert word in html.unescape(page)
    # The line of progress was renewed to its last step.
    assert outputs[2][0].data["text/plain"] not in {"", "''"}


def test_hostile_names_are_escaped_in_markdown_and_in_the_notebook_frame() -> None:
    text = render_markdown((_hostile(),))
    assert HOSTILE not in text
    assert "<script" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == 9 for line in rows)
    shown = ek.show(_hostile())._repr_html_()
    assert (shown.count("<"), shown.count(">")) == (2, 2)
