"""Which of the checked targets to use, in which file form and precision, and why."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.check.report import CheckReport
from edgekit.evidence import Evidence
from edgekit.target import Form, Precision, Target


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The target to use, the form of the file and the precision to build for it, and the reasons, the weightiest first.

    `target` is None where no target is worth it; then the CPU is. `rest` names the other targets, the best first.
    """

    target: str | None
    style: Form | None = None
    precision: Precision | None = None
    reasons: tuple[str, ...]
    rest: tuple[str, ...] = ()


def recommend_target(
    reports: Mapping[str, CheckReport],
    targets: Mapping[str, Target],
    refused: Collection[str] = (),
    floats: Mapping[str, str] = MappingProxyType({}),
) -> Recommendation:
    """Returns what to use: the best verdict, most work, fewest crossings, best evidence, in this order.

    ONNX Runtime's CPU provider takes every model, so a target of it is named only where no accelerator is of use.
    `refused` names targets whose vendor's own code made no session; these are not recommended, whatever the rules say.
    `floats` says of targets why integers gain nothing there.
    """
    fit = [name for name, report in reports.items() if report.verdict != "no" and name not in refused]
    # The CPU takes everything in one piece, and would win every comparison of shares.
    usable = [name for name in fit if not _is_cpu(targets.get(name))] or fit
    if not usable:
        why = "each refuses the model or takes less than half of its work; use the CPU"
        return Recommendation(target=None, reasons=(why,), rest=tuple(reports))
    name = max(usable, key=lambda at: rank_report(reports[at]))
    best, target = reports[name], targets.get(name)
    others = [other for other in reports if other != name]
    rest = tuple(sorted(others, key=lambda at: rank_report(reports[at]), reverse=True))
    reasons = [f"{best.verdict}: {describe_share(best)}"]
    reasons += [_compare(reports[other], name=other, refused=other in refused) for other in rest]
    if target is None:
        return Recommendation(target=name, reasons=tuple(reasons), rest=rest)
    is_quantized = any(node.is_quantizer for node in best.node_list)
    precision: Precision = "int8" if is_quantized else target.precision
    why = "the model is quantized already" if is_quantized else target.precision_reason
    if name in floats and "fp32" in target.precisions:
        precision, why = "fp32", floats[name]
    style = target.conversion.forms[0]
    reasons += [f"{precision}: {why}", f"{style}: {target.conversion.reason}"]
    return Recommendation(target=name, style=style, precision=precision, reasons=tuple(reasons), rest=rest)


def rank_report(report: CheckReport) -> tuple[int, float, float, int, int]:
    """Returns what reports are compared by, more being better."""
    # Order of weight: what decides, then the work, then the memory traffic, then the copies, then how sure the check
    # is.
    verdict = ("no", "maybe", "yes").index(report.verdict)
    evidence = list(Evidence).index(Evidence(report.evidence))
    return verdict, report.taken_macs, report.taken_bytes, -report.crossings, -evidence


def describe_share(report: CheckReport) -> str:
    """Returns how much of the work a target takes, in how many pieces, in one line."""
    return (
        f"{report.taken_macs:.0%} of the MACs and {report.taken_bytes:.0%} of the activation bytes in"
        f" {report.partitions} partitions; {report.crossings} values ({report.crossing_bytes} bytes) cross"
    )


def _is_cpu(target: Target | None) -> bool:
    return target is not None and target.provider == CPU_PROVIDER


def _compare(report: CheckReport, *, name: str, refused: bool) -> str:
    if refused:
        return f"{name} refused the model when it was asked"
    return f"{name}: {report.verdict}, {describe_share(report)}"
