"""A verification as Markdown: verdicts, figures, and names that stay in their place."""

from test_report_junit import BAD, DEAD, GOOD, HOSTILE, _hostile, _report

from edgekit.bench.report import BenchReport, BenchRun
from edgekit.evidence import Evidence
from edgekit.report.ci import render_bench_markdown, render_markdown


def test_each_output_is_a_row_and_each_reason_a_line() -> None:
    text = render_markdown((_report(GOOD, BAD, DEAD),))
    assert text.startswith("### \N{CROSS MARK} m-t: fail\n")
    assert "| emulated | emulated | y | 0.99900 | 30.0 | 100.0% | pass |" in text
    assert "| arm64 | emulated | y | 0.99900 | 30.0 | 100.0% | **fail** |" in text
    assert "- phone: the device failed: the cable fell out" in text
    assert "- coreml skipped: no Mac; to run it: buy one" in text


def test_several_verifications_are_one_page() -> None:
    assert render_markdown((_report(GOOD), _report(GOOD))).count("pass\n") == 2
    assert "nothing ran" in render_markdown((_report(),))


def test_names_stay_in_their_place() -> None:
    text = render_markdown((_hostile(),))
    assert HOSTILE not in text
    assert "<script" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == 8 for line in rows)


def test_times_are_a_row_each_and_names_mean_nothing_to_markdown() -> None:
    good = BenchRun(
        device="host", evidence=Evidence.EMULATED, provider="CPU", batch=4, median_ms=12.34, interval_ms=(12.0, 13.0),
        p95_ms=14.0, p99_ms=15.0, throughput_per_s=320.0, load_ms=99.6, peak_rss_bytes=50_000_000,
    )  # fmt: skip
    dead = BenchRun(device="a|b", evidence=Evidence.DEVICE, provider="CPU", failure="it <died>")
    text = render_bench_markdown(BenchReport(subject="a*b", runs=(good, dead), notes=("x|y",)))
    rows = text.splitlines()
    assert rows[0] == "### ❌ a\\*b"
    assert rows[4] == "| host | emulated | 4 | 1 | 12.3 | 12 to 13 | 14 | 15 | 320 | 100 | 50 MB |"
    assert rows[5] == "| a\\|b | device | 1 | 1 | **failed** | - | - | - | - | - | - |"
    assert len({row.replace("\\|", "").count("|") for row in rows[2:6]}) == 1
    assert "- a\\|b failed: it &lt;died&gt;" in rows
    assert render_bench_markdown(BenchReport(subject="n", runs=(good,))).startswith("### ✅ n")
