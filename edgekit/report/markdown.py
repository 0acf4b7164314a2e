"""Verifications and benchmarks as Markdown, for the summary of a pull request."""

from collections.abc import Iterator, Mapping, Sequence

from edgekit.bench.report import BenchReport, BenchRun
from edgekit.evidence import Verdict
from edgekit.report.text import list_verify_remarks
from edgekit.report.timing.bench_text import list_bench_remarks
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.report import VerifyReport
from edgekit.verify.run_report import RunReport
from edgekit.verify.tasks.scores import describe_difference, format_score

# GitHub takes a mebibyte of summary from a step, and a person reads far less.
_MOST_REMARKS = 30
_SIGNS: Mapping[Verdict, str] = {"pass": "✅", "fail": "❌", "not proven": "❔"}


def render_markdown(reports: Sequence[VerifyReport]) -> str:
    """Returns verifications as GitHub's Markdown: a line a verdict, a table of outputs, and what failed and why."""
    return "\n".join(line for report in reports for line in _describe(report)) + "\n"


def render_bench_markdown(report: BenchReport) -> str:
    """Returns times as GitHub's Markdown: a table of devices and ways to run, and then comparisons and warnings."""
    return "\n".join(_describe_bench(report)) + "\n"


def _describe_bench(report: BenchReport) -> Iterator[str]:
    against = "" if report.against is None else f" against {_clean(report.against)}"
    yield f"### {_SIGNS['pass' if report.succeeded else 'fail']} {_clean(report.subject)}{against}"
    yield ""
    if report.runs:
        yield "| device | evidence | batch | at once | p50 ms | 95 % | p95 | p99 | per second | load ms | memory |"
        yield "|---|---|--:|--:|--:|---|--:|--:|--:|--:|--:|"
        yield from (_describe_times(run) for run in report.runs)
        yield ""
    remarks = list(list_bench_remarks(report))
    yield from (f"- {_clean(remark)}" for remark in remarks[:_MOST_REMARKS])
    if len(remarks) > _MOST_REMARKS:
        yield f"- and {len(remarks) - _MOST_REMARKS} more"
    yield ""


def _describe_times(run: BenchRun) -> str:
    way = (_clean(run.device), run.evidence.value, str(run.batch), str(run.concurrency))
    if run.failure is not None:
        return f"| {' | '.join((*way, '**failed**', *('-' for _ in range(6))))} |"
    low, high = run.interval_ms
    times = (f"{run.median_ms:.3g}", f"{low:.3g} to {high:.3g}", f"{run.p95_ms:.3g}", f"{run.p99_ms:.3g}")
    rest = (f"{run.throughput_per_s:.3g}", f"{run.load_ms:.0f}", f"{run.peak_rss_bytes / 1e6:.0f} MB")
    return f"| {' | '.join((*way, *times, *rest))} |"


def _describe(report: VerifyReport) -> Iterator[str]:
    yield f"### {_SIGNS[report.verdict]} {_clean(report.bundle)}: {report.verdict if report.runs else 'nothing ran'}"
    yield ""
    if report.runs:
        yield "| device | evidence | output | cosine | SQNR dB | top-1 | result |"
        yield "|---|---|---|--:|--:|--:|---|"
        for run in report.runs:
            for output in run.outputs:
                yield _describe_output(run, output)
            if not run.outputs:
                yield f"| {_clean(run.device)} | {run.evidence.value} | - | - | - | - | {run.verdict} |"
        yield ""
    for run in report.runs:
        task = run.settled_task
        if task is not None:
            values = f"float {format_score(task, task.reference)}, here {format_score(task, task.got)}"
            yield f"- {_clean(run.device)}: {_clean(task.name)} {values}, {describe_difference(task)} points"
    remarks = list(list_verify_remarks(report))
    yield from (f"- {_clean(remark)}" for remark in remarks[:_MOST_REMARKS])
    if len(remarks) > _MOST_REMARKS:
        yield f"- and {len(remarks) - _MOST_REMARKS} more"
    if report.advice:
        yield f"- {_clean(report.advice)}"
    yield ""


def _describe_output(run: RunReport, output: OutputReport) -> str:
    top1 = output.top1_agreement if output.top1_agreement is not None else output.exact_match
    figures = (_number(output.cosine, "{:.5f}"), _number(output.sqnr_db, "{:.1f}"), _number(top1, "{:.1%}"))
    verdict = "pass" if run.passed else f"**{run.verdict}**"
    cells = (_clean(run.device), run.evidence.value, _clean(output.name), *figures, verdict)
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _clean(text: str) -> str:
    """Returns a line in which no letter means anything to Markdown or HTML."""
    line = " ".join(text.split())
    # The ampersand first: the entities that follow begin with one.
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]()#!|~" else letter for letter in line if letter.isprintable())
