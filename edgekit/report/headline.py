"""The sentence on top of a report: the verdict, and the reason for it."""

from edgekit.report.summary import BuildReport, BundleSummary
from edgekit.report.text import describe_agreement
from edgekit.verify.report import VerifyReport


def headline_verify(report: VerifyReport) -> str:
    """Returns whether a bundle does what the float model does, on which devices, or the first reason why not."""
    if not report.runs:
        skip = next(iter(report.skipped), None)
        return "Nothing ran" + (f": {skip.device}: {skip.reason}." if skip else ".")
    if report.passed:
        devices = ", ".join(run.device for run in report.runs)
        return f"It does what the float model does on {devices}: at worst {describe_agreement(report)}."
    return f"{'It fails' if report.verdict == 'fail' else 'It is not proven'}: {_find_reason(report)}."


def headline_build(report: BuildReport) -> str:
    """Returns how many targets have a bundle that passed, and for the first of the others why not."""
    count = len(report.bundles)
    good = [bundle for bundle in report.bundles if bundle.path is not None and (bundle.passed or not report.verified)]
    said = f"{len(good)} of {count} {'bundle' if count == 1 else 'bundles'}"
    if not report.verified:
        said += " made, none verified"
    elif good:
        said += " do what the float model does" if len(good) > 1 else " does what the float model does"
    else:
        said += " pass"
    bad = next((bundle for bundle in report.bundles if bundle not in good), None)
    return f"{said}." if bad is None else f"{said}; {bad.target}: {_find_bundle_reason(bad)}."


def describe_verified(report: BuildReport) -> str:
    """Returns how many samples were kept back, and how many of them ran where."""
    kept = report.golden_samples
    runs = [run for bundle in report.bundles if bundle.verify is not None for run in bundle.verify.runs]
    counts = [run.samples for run in runs]
    if not counts:
        return f"{kept} kept back to verify"
    if min(counts) == kept:
        return f"{kept} others verified on each device"
    some = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{kept} kept back, of which {some} ran on each device"


def _find_bundle_reason(bundle: BundleSummary) -> str:
    if bundle.failure is not None:
        return bundle.failure
    if bundle.verify is None:
        return "not verified"
    if not bundle.verify.runs:
        return "nothing ran"
    return ("" if bundle.verdict == "fail" else "not proven: ") + _find_reason(bundle.verify)


def _find_reason(report: VerifyReport) -> str:
    failures = (*report.failures, *(f"{run.device}: {line}" for run in report.runs for line in run.failures))
    unproven = (*report.unproven, *(f"{run.device}: {line}" for run in report.runs for line in run.unproven))
    return next(iter((*failures, *unproven)), "no reason is known")
