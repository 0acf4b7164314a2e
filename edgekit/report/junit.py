"""A verification as JUnit XML, which every CI system shows."""

import re
from xml.etree import ElementTree as ET

from edgekit.verify.report import OutputReport, RunReport, SkippedDevice, VerifyReport

_CONTROL = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 forbids (its production 2, Char) or discourages: control characters, surrogates, non-characters."""


def render_junit(report: VerifyReport) -> bytes:
    """Returns a verification as JUnit XML: a suite, and in it a case a device.

    It has a failure exactly where the report does not pass: what speaks against the bundle as a whole is a case of its
    own, and so is that no device ran, because CI takes a suite of nothing but skipped cases for a success.
    """
    cases = [*map(_describe_run, report.runs), *map(_describe_skip, report.skipped)]
    whole = (*report.failures, *(() if report.runs else ("no device ran, so nothing is proven",)))
    if whole:
        cases.append(_fail(_element("testcase", name="the bundle as a whole"), whole))
    failed = sum(case.find("failure") is not None for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failed), "errors": "0", "skipped": str(len(report.skipped))}
    root = _element("testsuites", name="edgekit verify", **counts)
    suite = _element("testsuite", name=report.bundle, **counts)
    root.append(suite)
    for case in cases:
        case.set("classname", _clean(report.bundle))
        suite.append(case)
    ET.indent(root)
    data: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _describe_run(run: RunReport) -> ET.Element:
    case = _element("testcase", name=run.device)
    if not run.passed:
        _fail(case, run.failures)
    facts = [f"evidence: {run.evidence}, {run.evidence.meaning}", f"samples: {run.samples}"]
    shown = _element("system-out")
    shown.text = _clean("\n".join([*facts, *map(_describe_output, run.outputs), *run.notes]))
    case.append(shown)
    if run.log:
        said = _element("system-err")
        said.text = _clean(run.log)
        case.append(said)
    return case


def _describe_output(output: OutputReport) -> str:
    figures = {"cosine": output.cosine, "SQNR dB": output.sqnr_db, "top-1 agreement": output.top1_agreement}
    known = ", ".join(f"{name} {value:.5g}" for name, value in figures.items() if value is not None)
    return f"output '{output.name}': {known or 'not measured'}"


def _describe_skip(skip: SkippedDevice) -> ET.Element:
    case = _element("testcase", name=skip.device)
    advice = f"; to run it: {skip.command}" if skip.command else ""
    case.append(_element("skipped", message=skip.reason + advice))
    return case


def _fail(case: ET.Element, failures: tuple[str, ...]) -> ET.Element:
    failure = _element("failure", message=failures[0], type="verify")
    failure.text = _clean("\n".join(failures))
    case.append(failure)
    return case


def _element(tag: str, **attributes: str) -> ET.Element:
    return ET.Element(tag, {name: _clean(value) for name, value in attributes.items()})


def _clean(text: str) -> str:
    return _CONTROL.sub("", text)
