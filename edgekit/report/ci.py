"""Verifications and benchmarks for CI: JUnit XML, and Markdown for a pull request."""

import re
from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree as ET

from rich.table import Table

from edgekit.bench.bench import BenchReport
from edgekit.evidence import Judgement, Verdict
from edgekit.report.text import list_verify_remarks, table_verify
from edgekit.report.timing import list_bench_remarks, table_bench
from edgekit.verify.metrics.agreement import SHARED
from edgekit.verify.report import VerifyReport
from edgekit.verify.run_report import RunReport

# What XML 1.0 forbids (its production 2, Char) or discourages: control characters, surrogates, non-characters.
_CONTROL = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


_NONE: Mapping[str, Judgement] = {}


def render_junit(
    reports: Sequence[VerifyReport], *, others: Mapping[str, Judgement] = _NONE, accept_unproven: bool = False
) -> bytes:
    """Returns verifications as JUnit XML: a suite for each target, and in it a case for each output of each device.

    Every other gate of a run is a case too: that the run finished, the metric, the placement, the costs. A last case
    has the failures of the bundle as a whole, such as that no device ran: CI systems count a suite of skipped cases as
    a success. Some case fails if and only if the report does not pass. "Not proven" is a failure of the type "not
    proven", or with `accept_unproven` a skipped case. `others` are bundles without a verification, each only with that
    last case. The format is that of Jenkins (`jenkins-junit.xsd`), which GitLab, GitHub Actions and Azure read too.
    """
    root = _element("testsuites", name="edgekit verify")
    suites: list[tuple[str, list[ET.Element], VerifyReport | Judgement]] = []
    for report in reports:
        runs = [case for run in report.runs for case in _describe_run(report.bundle, run, accepts=accept_unproven)]
        for skip in report.skipped:
            case = _element("testcase", name="run", classname=f"{report.bundle}.{skip.device}", time="0")
            advice = f"; to run it: {skip.command}" if skip.command else ""
            case.append(_element("skipped", message=skip.reason + advice))
            runs.append(case)
        suites.append((report.bundle, runs, report))
    suites += [(name, [], found) for name, found in others.items()]
    for name, cases, whole in suites:
        bundle = _element("testcase", name="the bundle as a whole", classname=name, time="0")
        _judge(bundle, whole.failures, whole.unproven, accepts=accept_unproven)
        cases.append(bundle)
        failed, skipped = (sum(case.find(tag) is not None for case in cases) for tag in ("failure", "skipped"))
        counts = {"tests": str(len(cases)), "failures": str(failed), "errors": "0", "skipped": str(skipped)}
        suite = _element("testsuite", name=name, **counts)
        suite.extend(cases)
        root.append(suite)
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    data: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _describe_run(bundle: str, run: RunReport, *, accepts: bool) -> Iterator[ET.Element]:
    """Yields a case for each gate of a run; explanations of a failure are in the first case that fails."""
    outputs = {output.name: output for output in run.outputs}
    explanations = run.explanations
    for gate in run.gates:
        # An estimate from the median: the time of each sample is not stored.
        median = 0.0 if run.latency_ms is None else run.latency_ms.median
        seconds = (run.load_ms + median * run.samples) / 1e3 if gate.name == "run" else 0.0
        name = f"{gate.name} {gate.subject}" if gate.subject else gate.name
        case = _element("testcase", name=name, classname=f"{bundle}.{run.device}", time=f"{seconds:.3f}")
        # Explanations belong to the run, not to a gate: they are printed once, with the first gate that fails.
        _judge(case, (*gate.failures, *explanations) if gate.failures else (), gate.unproven, accepts=accepts)
        explanations = () if gate.failures else explanations
        if gate.name == "run":
            facts = [f"evidence: {run.evidence}, {run.evidence.meaning}", f"samples: {run.samples}", *run.notes]
            case.append(_element("system-out", "\n".join(facts)))
        elif gate.name == "output":
            output = outputs[gate.subject]
            figures = {"cosine": output.cosine, "SQNR dB": output.sqnr_db, "top-1 agreement": output.top1_agreement}
            figures |= {"exact match": output.exact_match, "IoU": output.iou}
            figures |= {SHARED[each.of]: each.share for each in output.agreements if each.of != "classes"}
            known = ", ".join(f"{name} {value:.5g}" for name, value in figures.items() if value is not None)
            line = f"output '{output.name}' over {output.samples} samples: {known or 'not measured'}"
            case.append(_element("system-out", line))
        elif gate.name == "placement":
            counts = ", ".join(f"{provider} {count}" for provider, count in run.provider_nodes.items()) or "unknown"
            case.append(_element("system-out", f"{counts} ({run.placement_source})"))
        if gate.name == "run" and run.log:
            case.append(_element("system-err", run.log))
        yield case


def _judge(case: ET.Element, failures: Sequence[str], unproven: Sequence[str], *, accepts: bool) -> None:
    """Adds the failures to a case, or that it is not proven: as a failure, or as skipped if it `accepts` that."""
    if unproven and not failures and accepts:
        case.append(_element("skipped", message=f"not proven: {unproven[0]}"))
    elif failures or unproven:
        lines = (*failures, *(f"not proven: {line}" for line in unproven))
        kind = "verify" if failures else "not proven"
        case.append(_element("failure", "\n".join(lines), message=lines[0], type=kind))


def _element(tag: str, text: str = "", **attributes: str) -> ET.Element:
    element = ET.Element(tag, {name: _clean_xml(value) for name, value in attributes.items()})
    element.text = _clean_xml(text) or None
    return element


def _clean_xml(text: str) -> str:
    return _CONTROL.sub("", text)


# GitHub accepts a summary of one MiB for each step; a person reads far less.
_MAX_REMARKS = 30
_SIGNS: Mapping[Verdict, str] = {"pass": "✅", "fail": "❌", "not proven": "❔"}


def render_markdown(reports: Sequence[VerifyReport], others: Mapping[str, Judgement] = _NONE) -> str:
    """Returns verifications as GitHub's Markdown: a line for each verdict, a table of outputs, and the failures."""
    lines: list[str] = []
    for report in reports:
        lines += [_title(report.verdict, f"{report.bundle}: {report.verdict if report.runs else 'nothing ran'}"), ""]
        lines += [*_list_rows(table_verify(report)), ""] if report.runs else []
        remarks = [*list_verify_remarks(report)]
        # A note on an earlier verification may give the same advice.
        if report.advice and not any(report.advice in remark for remark in remarks):
            remarks.append(report.advice)
        lines += [*_list_remarks(remarks), ""]
    for name, found in others.items():
        lines += [_title(found.verdict, f"{name}: {found.verdict}"), ""]
        lines += [*_list_remarks((*found.failures, *found.unproven)), ""]
    return "\n".join(lines) + "\n"


def render_bench_markdown(report: BenchReport) -> str:
    """Returns times as GitHub's Markdown: a table of runs by device and settings, then comparisons and warnings."""
    against = "" if report.against is None else f" against {report.against}"
    lines = [_title("pass" if report.succeeded else "fail", f"{report.subject}{against}"), ""]
    lines += [*_list_rows(table_bench(report)), ""] if report.runs else []
    return "\n".join((*lines, *_list_remarks(list(list_bench_remarks(report))), "")) + "\n"


def _title(verdict: Verdict, text: str) -> str:
    return f"### {_SIGNS[verdict]} {_escape(text)}"


def _list_rows(table: Table) -> Iterator[str]:
    """Yields a table of the terminal in Markdown."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    head, *rows = (f"| {' | '.join(map(_escape, row))} |" for row in zip(*columns, strict=True))
    yield from (head, "|---" * len(columns) + "|", *rows)


def _list_remarks(remarks: Sequence[str]) -> Iterator[str]:
    yield from (f"- {_escape(remark)}" for remark in remarks[:_MAX_REMARKS])
    if len(remarks) > _MAX_REMARKS:
        yield f"- and {len(remarks) - _MAX_REMARKS} more"


def _escape(text: str) -> str:
    """Returns a line in which no character has a special meaning in Markdown or HTML."""
    line = " ".join(text.split())
    # The ampersand first: the entities inserted below begin with one.
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]()#!|~" else letter for letter in line if letter.isprintable())
