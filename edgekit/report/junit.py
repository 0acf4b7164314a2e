"""A verification as JUnit XML, which every CI system shows."""

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

from edgekit.devices.device import SkippedDevice
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.report import VerifyReport
from edgekit.verify.run_report import RunReport

# What XML 1.0 forbids (its production 2, Char) or discourages: control characters, surrogates, non-characters.
_CONTROL = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(reports: Sequence[VerifyReport], *, accept_unproven: bool = False) -> bytes:
    """Returns verifications as JUnit XML: a suite a target, and in it a case for each output of each device.

    What else a run is judged by is a case too: that it came to its end, the metric, placement, costs. It has a failure
    exactly where a report does not pass: what speaks against the bundle as a whole is a case of its own, and so is that
    no device ran, because CI takes a suite of nothing but skipped cases for a success. What is not proven is a failure
    of the type "not proven"; with `accept_unproven` it is a case that was skipped. The form is that of Jenkins
    (`jenkins-junit.xsd`), which GitLab, GitHub's actions and Azure read too.
    """
    suites = [_describe_report(report, accepts=accept_unproven) for report in reports]
    counts = {name: str(sum(int(suite.get(name, "0")) for suite in suites)) for name in ("tests", "failures", "errors")}
    root = _element("testsuites", name="edgekit verify", **counts)
    root.extend(suites)
    ET.indent(root)
    data: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _describe_report(report: VerifyReport, *, accepts: bool) -> ET.Element:
    cases = [case for run in report.runs for case in _describe_run(report.bundle, run, accepts=accepts)]
    cases += [_describe_skip(report.bundle, skip) for skip in report.skipped]
    bundle = _element("testcase", name="the bundle as a whole", classname=report.bundle, time="0")
    _judge(bundle, report.failures, report.unproven, accepts=accepts)
    cases.append(bundle)
    failed, skipped = (sum(case.find(tag) is not None for case in cases) for tag in ("failure", "skipped"))
    counts = {"tests": str(len(cases)), "failures": str(failed), "errors": "0", "skipped": str(skipped)}
    suite = _element("testsuite", name=report.bundle, **counts)
    suite.extend(cases)
    return suite


def _describe_run(bundle: str, run: RunReport, *, accepts: bool) -> Iterator[ET.Element]:
    """Yields a case for each thing that a run is judged by; what explains a failure stands in the first that fails."""
    outputs = {output.name: output for output in run.outputs}
    explanations = run.explanations
    for gate in run.gates:
        seconds = _count_seconds(run) if gate.name == "run" else 0.0
        name = f"{gate.name} {gate.subject}" if gate.subject else gate.name
        case = _element("testcase", name=name, classname=f"{bundle}.{run.device}", time=f"{seconds:.3f}")
        # The explanations are of the run, and stand once: with the first gate that fails.
        _judge(case, (*gate.failures, *explanations) if gate.failures else (), gate.unproven, accepts=accepts)
        explanations = () if gate.failures else explanations
        if gate.name == "run":
            facts = [f"evidence: {run.evidence}, {run.evidence.meaning}", f"samples: {run.samples}", *run.notes]
            case.append(_text("system-out", "\n".join(facts)))
        elif gate.name == "output":
            case.append(_text("system-out", _describe_output(outputs[gate.subject])))
        elif gate.name == "placement":
            counts = ", ".join(f"{provider} {count}" for provider, count in run.provider_nodes.items()) or "unknown"
            case.append(_text("system-out", f"{counts} ({run.placement_source})"))
        if gate.name == "run" and run.log:
            case.append(_text("system-err", run.log))
        yield case


def _count_seconds(run: RunReport) -> float:
    median = 0.0 if run.latency_ms is None else run.latency_ms.median
    # An estimate from the median: the time of each sample is not kept.
    return (run.load_ms + median * run.samples) / 1e3


def _describe_output(output: OutputReport) -> str:
    figures = {"cosine": output.cosine, "SQNR dB": output.sqnr_db, "top-1 agreement": output.top1_agreement}
    figures |= {"exact match": output.exact_match, "IoU": output.iou, "detection agreement": output.detection_agreement}
    known = ", ".join(f"{name} {value:.5g}" for name, value in figures.items() if value is not None)
    return f"output '{output.name}' over {output.samples} samples: {known or 'not measured'}"


def _describe_skip(bundle: str, skip: SkippedDevice) -> ET.Element:
    case = _element("testcase", name="run", classname=f"{bundle}.{skip.device}", time="0")
    advice = f"; to run it: {skip.command}" if skip.command else ""
    case.append(_element("skipped", message=skip.reason + advice))
    return case


def _judge(case: ET.Element, failures: Sequence[str], unproven: Sequence[str], *, accepts: bool) -> None:
    """Says in a case why it failed, else why it is not proven: as a failure too, or as skipped where it is accepted."""
    if unproven and not failures and accepts:
        case.append(_element("skipped", message=f"not proven: {unproven[0]}"))
    elif failures or unproven:
        lines = (*failures, *(f"not proven: {line}" for line in unproven))
        failure = _element("failure", message=lines[0], type="verify" if failures else "not proven")
        failure.text = _clean("\n".join(lines))
        case.append(failure)


def _text(tag: str, text: str) -> ET.Element:
    element = _element(tag)
    element.text = _clean(text)
    return element


def _element(tag: str, **attributes: str) -> ET.Element:
    return ET.Element(tag, {name: _clean(value) for name, value in attributes.items()})


def _clean(text: str) -> str:
    return _CONTROL.sub("", text)
