"""Reports of builds and quantizations: facts and verdicts, whatever is in them."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console
from test_report_junit import GOOD
from tiny_models import parse_model

import edgekit
from edgekit.devices.device import SkippedDevice
from edgekit.jobs.quantize import quantize_for
from edgekit.progress import StageTime
from edgekit.quantize.plan import FloatNode
from edgekit.recipe import Data, Recipe
from edgekit.report.html import render_page
from edgekit.report.summary import BuildReport, BundleSummary, QuantizeReport
from edgekit.report.tables import describe_quantization, format_bytes
from edgekit.report.text import describe_agreement, headline_build, list_remarks, table_build, table_device_figures
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.report import VerifyReport
from edgekit.verify.run_report import RunReport

HOSTILE = "<script>alert(1)</script>"


def _run(sqnr_db: float) -> RunReport:
    output = OutputReport(name=HOSTILE, samples=8, max_abs=0.1, cosine=0.999, sqnr_db=sqnr_db, top1_agreement=0.875)
    return replace(GOOD, outputs=(output,), thresholds=replace(GOOD.thresholds, granted_samples=1))


def _verify(*runs: RunReport) -> VerifyReport:
    skipped = (SkippedDevice(device="phone", reason="not here", command="plug it in"),)
    return VerifyReport(bundle="b", target="t", runs=runs, skipped=skipped)


def _report(**fields: object) -> BuildReport:
    whole = BundleSummary(target="good", title="Good", path=Path("out/good"), precision="int8", size_after=10)
    bundles = (
        replace(whole, verify=_verify(_run(30.0))),
        replace(whole, target="bad", verify=_verify(_run(10.0))),
        replace(whole, target="idle", verify=_verify()),
        BundleSummary(target="none", title="None", failure=f"cannot be built: {HOSTILE}"),
    )
    report = BuildReport(
        model=HOSTILE,
        sha256="0" * 64,
        verified=True,
        calibration_samples=1,
        golden_samples=8,
        fixes={"sum-to-add": 2},
        bundles=bundles,
        seconds=1.0,
        peak_rss_bytes=1,
        versions={},
        report=Path("out/report.html"),
    )
    return replace(report, **fields)


def test_a_bundle_passes_if_its_runs_reached_their_limits_or_verification_was_off() -> None:
    report = _report()
    assert [bundle.passed for bundle in report.bundles] == [True, False, False, False]
    assert not report.passed
    assert _report(bundles=report.bundles[:1]).passed
    assert not _report(bundles=report.bundles[2:3]).passed
    report = _report(verified=False)
    assert not report.passed
    unverified = replace(report.bundles[0], verify=None)
    assert _report(verified=False, bundles=(unverified,)).passed
    assert not _report(verified=True, bundles=(unverified,)).passed
    assert headline_build(_report(verified=False, bundles=(unverified,))) == (
        "1 of 1 bundle made, none verified. Next: edgekit verify BUNDLE."
    )


def test_the_page_escapes_what_models_say() -> None:
    page = render_page(_report())
    assert page.count("<script") == 1
    assert "&lt;script&gt;" in page
    assert page.count('class="pass"') >= 2
    assert "nothing ran" in page


def test_the_page_shows_where_the_time_of_a_build_went() -> None:
    stages = (
        StageTime(stage="prepare", seconds=3.0, cpu_seconds=4.0),
        StageTime(stage="quantize", target=HOSTILE, seconds=1.0, cpu_seconds=2.25),
    )
    page = render_page(_report(stages=stages))
    assert "<td>prepare</td><td>all</td><td>3.00</td><td>4.00</td>" in page
    assert 'style="flex: 3.000" title="prepare: 3.0 s"' in page
    assert 'style="flex: 1.000" title="quantize for ' in page
    assert page.count("<script") == 1
    assert "<h2>Time</h2>" not in render_page(_report())


def test_the_table_says_pass_fail_and_nothing_ran() -> None:
    console = Console(width=200, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as shown:
        console.print(table_build(_report()))
    words = [
        line.split()[0] + " " + " ".join(line.split()[-2:]) for line in shown.get().splitlines()[2:] if line.strip()
    ]
    assert [word.split()[-1] for word in words] == ["pass", "fail", "ran", "bundle"]


def test_remarks_list_failures_skipped_devices_and_rewrites() -> None:
    remarks = list_remarks(_report())
    assert any("below 20 dB" in remark and remark.startswith("bad:") for remark in remarks)
    assert "good, bad, idle: phone skipped: not here; to run it: plug it in" in remarks
    assert "rewritten before the check: sum-to-add (2 nodes)" in remarks


def test_the_worst_run_is_shown() -> None:
    assert describe_agreement(_verify(_run(30.0), _run(10.0))) == "87.5% agree, 10.0 dB"
    assert describe_agreement(None) == "-"
    assert [format_bytes(size) for size in (0, 999, 1000, 2_500_000, 3_000_000_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "2.5 MB",
        "3000.0 GB",
    ]


def test_devices_with_equal_outputs_are_named_in_the_table_of_devices() -> None:
    digests = {"android": "a", "android:cortex-a53": "b", "host": "a", "dead": "", "gone": ""}
    runs = [replace(_run(30.0), device=name, outputs_sha256=digest) for name, digest in digests.items()]
    columns = {str(column.header): list(column.cells) for column in table_device_figures(_verify(*runs)).columns}
    assert columns["outputs"] == ["own", "own", "as android", "own", "own"]
    assert columns["SQNR"] == ["30.0 dB"] * 5


def test_every_page_says_that_nothing_is_fetched_and_no_other_script_runs() -> None:
    folder = Path(edgekit.__file__).parent / "report/templates"
    texts = {path.name.partition(".")[0]: path.read_text() for path in folder.glob("*.html.j2")}
    page = texts.pop("page")
    # Before anything that a policy is about.
    assert page.index('{% include "policy.html.j2" %}') < page.index("<style>")
    pages = {name for name, text in texts.items() if text.startswith('{% extends "page.html.j2" %}')}
    assert {"app", "build", "check", "compare", "forecast", "profile", "quantize", "tune", "verify"} == pages
    assert not any(tag in text for text in texts.values() for tag in ("<!DOCTYPE", "<script>", "<style"))


SPECTRUM = """g (float[1,64] x) => (float[1,16] y)
  <float[64,64] dft = {DFT}, float[64,16] w = {W}, float eps = {1e-6}> {
  s = MatMul(x, dft) p = Mul(s, s) e = Add(p, eps) l = Log(e) y = MatMul(l, w) }"""


@pytest.fixture
def report(tmp_path: Path) -> QuantizeReport:
    rng = np.random.default_rng(0)
    dft, w = (", ".join(f"{value:.3f}" for value in rng.normal(size=size)) for size in (64 * 64, 64 * 16))
    parse_model(SPECTRUM.replace("DFT", dft).replace("W", w), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(16, 1, 64)).astype(np.float32))
    recipe = Recipe(targets=("cpu",))
    return quantize_for(tmp_path / "m.onnx", Data(source=str(tmp_path / "data.npz")), tmp_path / "q.onnx", recipe)


def test_each_reason_is_printed_once_and_large_float_constants_are_named(report: QuantizeReport) -> None:
    assert report.float_constants["dft"] == 64 * 64 * 2 + 64 * 4
    assert next(iter(report.float_constants)) == "dft"
    assert report.float_bytes == sum(report.float_constants.values())
    lines = list(describe_quantization(report))
    assert sum("magnifies rounding near 0" in line for line in lines) == 1
    assert f"- {len(report.float_nodes)} in float: it leads to the logarithm" in "\n".join(lines)
    assert (
        sum(line.startswith("- of these constants 1 in 16 bits: 8 kB less; that alone keeps ") for line in lines) == 1
    )


@pytest.mark.parametrize(
    ("drop", "agreement", "goal", "why"),
    [
        (0.021, 0.8, None, "much is lost"),
        (0.02, 0.8, 0.5, "many decisions change"),
        (0.019, 0.95, 0.5, "much may be lost"),
        (0.02, 0.95, 0.5, "no plan meets the goal"),
        (0.02, 0.95, None, "no plan loses nothing"),
    ],
)
def test_advice_says_why_it_is_given(
    report: QuantizeReport, drop: float, agreement: float, goal: float | None, why: str
) -> None:
    predicted = replace(report.predicted, drop_estimate=drop, top1_agreement=agreement, measure="top-1 accuracy")
    predicted = replace(predicted, drop_interval=(-0.01, 0.03), sqnr_db=15.0 if "may" in why else 25.0)
    told = replace(report, predicted=predicted, advice="try int16", max_drop=goal)
    assert f"{why}; try int16" in [*describe_quantization(told)]


def test_a_recipe_keeps_large_constants_in_float32(report: QuantizeReport, tmp_path: Path) -> None:
    recipe, out = Recipe(targets=("cpu",), float_constants="float32"), tmp_path / "whole.onnx"
    whole = quantize_for(tmp_path / "m.onnx", Data(source=str(tmp_path / "data.npz")), out, recipe)
    assert (whole.float_constants["dft"], whole.narrow.bits) == (64 * 64 * 4, {})
    assert whole.size_after > report.size_after + 7_000
    assert "- large constants in float: 'dft' 16 kB" in list(describe_quantization(whole))


def test_many_reasons_and_constants_are_counted_and_few_are_left_out(report: QuantizeReport) -> None:
    nodes = tuple(FloatNode(name=f"n{index}", op="Mul", reason=f"reason {index % 7}") for index in range(9))
    sizes = {f"c{index}": 20_000 for index in range(8)} | {"small": 9_999}
    lines = list(describe_quantization(replace(report, float_nodes=nodes, float_constants=sizes)))
    assert [line for line in lines if " in float: reason" in line][:2] == [
        "- 2 in float: reason 0", "- 2 in float: reason 1",
    ]  # fmt: skip
    assert "- 9 in float for 7 reasons in all: --json lists them" in lines
    assert "- large constants in float: 'c0' 20 kB, 'c1' 20 kB, 'c2' 20 kB, 'c3' 20 kB, 'c4' 20 kB and 3 more" in lines
    wide = list(describe_quantization(replace(report, wide_constants={"table": 23_440_896, "small": 9_999})))
    assert "- large constants in 16 bits, which 8 bits do not hold: 'table' 23441 kB" in wide
    none = replace(report, float_nodes=(), float_constants={"small": 9_999})
    assert not any("in float" in line for line in describe_quantization(none))
