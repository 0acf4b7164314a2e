"""The history of verifications, in a SQLite file: the last run that passed, and what became worse since."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgekit.bench.history import Table
from edgekit.errors import UsageError
from edgekit.evidence import Evidence, Verdict
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.report import VerifyReport
from edgekit.verify.run_report import Cost

# The largest integer that SQLite can store.
_MOST_RUNS = (1 << 63) - 1
# By how many dB a signal-to-noise ratio may fall if the earlier one has no interval. Kernels of another version add in
# another order, and may thereby round a value to the next step of its grid.
_SQNR_SLACK_DB = 1.0


class PastRun(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded verification: `time` is UTC, `report` the result."""

    id: int
    time: str
    bundle: str
    target: str
    passed: bool
    report: VerifyReport

    @property
    def verdict(self) -> Verdict:
        """The recorded verdict; a run that was recorded as not passed never counts as passed."""
        return "pass" if self.passed else "not proven" if self.report.verdict == "not proven" else "fail"


_RUNS = Table(name="runs", columns={"bundle": "TEXT", "target": "TEXT", "passed": "INTEGER"}, kind=PastRun, noun="run")


class RunsDiff(msgspec.Struct, frozen=True, kw_only=True):
    """Two recorded verifications: what differed between them, and what became worse from the first to the second."""

    before: int
    now: int
    changes: tuple[str, ...]
    regressions: tuple[str, ...]


def record_report(path: Path, report: VerifyReport) -> int:
    """Adds a report to a history file, which is created if it does not exist, and returns its number.

    Raises:
        DataError: the file is no history.
        OutputError: the file cannot be written.
    """
    return _RUNS.add(path, (report.bundle, report.target, report.passed), report)


def list_runs(path: Path, *, bundle: str | None = None) -> tuple[PastRun, ...]:
    """Returns the recorded verifications, oldest first; with a name, only those of this bundle.

    Raises:
        DataError: there is no such file, or it is no history.
    """
    return _RUNS.select(path, bundle=bundle)


def read_run(path: Path, number: int) -> PastRun:
    """Returns one recorded verification.

    Raises:
        UsageError: there is none of that number.
        DataError: there is no such file, or it is no history.
    """
    if not (found := _RUNS.select(path, id=max(-1, min(number, _MOST_RUNS)))):
        raise UsageError(f"'{path}' has no run {number}", hint=f"edgekit runs list --history {path}")
    return found[0]


def find_last_good(path: Path, report: VerifyReport) -> PastRun | None:
    """Returns the last passed verification of the same bundle name and target, or None.

    Raises:
        DataError: the file is no history.
    """
    return _RUNS.find_last(path, bundle=report.bundle, target=report.target, passed=1)


def compare_with_baseline(report: VerifyReport, before: VerifyReport, source: str) -> VerifyReport:
    """Returns the report with its regressions against an earlier one, whose costs become its reference.

    Devices that nobody asked for this time are left out of the comparison.
    """
    costs: dict[str, Cost] = {}
    for run in (run for run in before.runs if run.failure is None):
        latency_ms = None if run.latency_ms is None else run.latency_ms.median
        costs[run.device] = Cost(source=source, latency_ms=latency_ms, peak_rss_bytes=run.peak_rss_bytes)
    pairs = [(run, costs.get(run.device, run.reference_cost)) for run in report.runs]
    runs = tuple(msgspec.structs.replace(run, reference_cost=cost) for run, cost in pairs)
    chosen = {run.device for run in report.runs} | {skip.device for skip in report.skipped}
    known = tuple(run for run in before.runs if run.device in chosen)
    if lines := find_regressions(msgspec.structs.replace(before, runs=known), report):
        changes = "; ".join(find_changes(before, report)) or "nothing that edgekit knows of"
        lines = tuple(f"worse than {source}: {line} (changed since: {changes})" for line in lines)
    return msgspec.structs.replace(report, runs=runs, regressions=lines)


def diff_runs(before: PastRun, now: PastRun) -> RunsDiff:
    """Returns what differed between two verifications, and what became worse."""
    changes, regressions = tuple(find_changes(before.report, now.report)), find_regressions(before.report, now.report)
    return RunsDiff(before=before.id, now=now.id, changes=changes, regressions=regressions)


def find_changes(before: VerifyReport, now: VerifyReport) -> Iterator[str]:
    """Yields what differed between two verifications: model, data, versions of runtime and driver, thresholds."""
    for name in sorted(before.ancestry.keys() | now.ancestry.keys()):
        old, new = before.ancestry.get(name, "unknown"), now.ancestry.get(name, "unknown")
        if old != new:
            yield f"{name} {old[:12]} -> {new[:12]}"
    earlier = {run.device: run for run in before.runs}
    for run in now.runs:
        if (other := earlier.get(run.device)) is None:
            yield f"device {run.device} is new"
            continue
        for name in sorted(other.versions.keys() | run.versions.keys()):
            old, new = other.versions.get(name, "none"), run.versions.get(name, "none")
            if old != new:
                yield f"{name} on {run.device} {old} -> {new}"
        if other.samples != run.samples:
            yield f"samples on {run.device} {other.samples} -> {run.samples}"
        for name in run.thresholds.__struct_fields__:
            old_limit, new_limit = getattr(other.thresholds, name), getattr(run.thresholds, name)
            if old_limit != new_limit:
                yield f"threshold {name} on {run.device} {old_limit} -> {new_limit}"


def find_regressions(before: VerifyReport, now: VerifyReport) -> tuple[str, ...]:
    """Returns what became worse, one line each.

    A figure counts as worse only if it lies below the earlier 95 % interval: a smaller difference may be chance.

    A device, an output or a metric that is gone counts as worse; so does a provider that takes fewer nodes. Latency and
    memory have their own limits (`max_latency_ratio`, `max_memory_ratio`).
    """
    later = {run.device: run for run in now.runs}
    lines: list[str] = []
    for run in before.runs:
        if (other := later.get(run.device)) is None:
            reason = next((f": {skip.reason}" for skip in now.skipped if skip.device == run.device), "")
            lines.append(f"device {run.device} did not run{reason}")
            continue
        outputs = {output.name: output for output in other.outputs}
        for output in run.outputs:
            lines += _compare_output(f"output '{output.name}' on {run.device}", output, outputs.get(output.name))
        old, new = run.task, other.task
        if old is not None and old.got is not None:
            got = None if new is None or new.name != old.name else new.got
            low, high = old.interval or (0.0, 0.0)
            slack = (high - low) / 2
            if got is None:
                lines.append(f"metric '{old.name}' on {run.device} was not measured")
            elif (old.got - got if old.higher_is_better else got - old.got) > slack + 1e-9:
                lines.append(f"metric '{old.name}' on {run.device} went to {got:.4g} from {old.got:.4g}")
        taken, left = run.provider_nodes.get(run.provider), other.provider_nodes.get(run.provider, 0)
        if taken and other.evidence is not Evidence.EMULATED and left < taken:
            lines.append(f"{run.provider} on {run.device} takes {left} nodes, before {taken}")
    return tuple(lines)


def _compare_output(name: str, before: OutputReport, now: OutputReport | None) -> Iterator[str]:
    if now is None:
        yield f"{name} is gone"
        return
    shared = {each.of: each.share for each in now.agreements}
    by_rows = (
        ("SQNR", before.sqnr_db, before.sqnr_interval_db, now.sqnr_db, _SQNR_SLACK_DB, " dB"),
        ("top-1 agreement", before.top1_agreement, before.top1_interval, now.top1_agreement, 0.0, ""),
        ("exact match", before.exact_match, None, now.exact_match, 0.0, ""),
    )
    detections = (each for each in before.agreements if each.of == "detections")
    lists = tuple(("detection agreement", it.share, it.interval, shared.get(it.of), 0.0, "") for it in detections)
    for label, old, interval, new, slack, unit in lists or by_rows:
        if old is None:
            continue
        least = old - slack if interval is None else min(interval[0], old - slack)
        if new is None or new < least - 1e-9:
            found = "was not measured" if new is None else f"fell to {new:.4g}{unit}"
            yield f"{name}: {label} {found} from {old:.4g}{unit}"
