"""A verification as Markdown, for the summary of a pull request."""

from collections.abc import Iterator, Mapping, Sequence

from edgekit.evidence import Verdict
from edgekit.report.text import list_verify_remarks
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
