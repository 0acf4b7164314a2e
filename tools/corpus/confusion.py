"""Builds and verifies each network for the mobile targets and the CPU, asks the oracle, and counts who was right.

A network is a process of its own, and what was found of it a line of CORPUS/runs/LABEL.jsonl: a run that was stopped
goes on where it was.
"""

import json
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Literal

import msgspec
from oracle import DEVICES, State, Truth, ask_oracle
from table import CORPUS, Net

from edgekit.errors import EdgekitError

Verdict = Literal["pass", "fail", "not proven", "no bundle", "traceback"]
MOST_CPU_S = 120.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One target of one network: what edgekit said, its first reason, and the truth where there is a bundle."""

    target: str
    verdict: Verdict
    reason: str = ""
    precision: str = ""
    truth: Truth | None = None

    @property
    def state(self) -> State | Literal["no bundle"]:
        """What the oracle says."""
        return "no bundle" if self.truth is None else self.truth.state

    @property
    def is_wrong(self) -> bool:
        """True where edgekit said the contrary of the truth; what is open, or not proven, contradicts nothing."""
        if self.verdict == "pass":
            return self.state in {"wrong", "does not start"}
        return self.verdict == "traceback" or (self.verdict == "fail" and self.state == "right")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of one network, and what it cost; `failure` where the whole build ended without a report."""

    net: str
    held_out: bool
    findings: tuple[Finding, ...]
    cpu_s: float
    wall_s: float
    failure: str = ""


def judge_net(net: Net, targets: Sequence[str], out: Path, timeout_s: float) -> Row:
    """Builds one network and asks the oracle about each bundle."""
    command = [sys.executable, "-m", "edgekit", "build", str(net.folder / "model.onnx"), "--quiet", "--json"]
    command += ["--data", str(net.folder / "calib.npz"), "--eval", str(net.folder / "eval.npz"), "--out", str(out)]
    command += [word for target in targets for word in ("--target", target)]
    command += [word for name, size in net.dims.items() for word in ("--dim", f"{name}={size}")]
    command += [word for name, value in net.freeze.items() for word in ("--freeze", f"{name}={value:g}")]
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        code, said, complaint = ended.returncode, ended.stdout, ended.stderr.strip()
    except subprocess.TimeoutExpired:
        code, said, complaint = -1, "", f"the build took more than {timeout_s:.0f} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    findings = tuple[Finding, ...]()
    if said.startswith("{") and code in {0, 1, 3}:
        findings = tuple(_judge_bundle(bundle, net) for bundle in json.loads(said)["bundles"])
    elif code >= 0:
        refused: Verdict = "no bundle" if code == 2 else "traceback"
        line = complaint.splitlines()[-1] if complaint else f"exit code {code}"
        findings = tuple(Finding(target=target, verdict=refused, reason=line[:300]) for target in targets)
    return Row(
        net=net.name,
        held_out=net.held_out,
        findings=findings,
        cpu_s=round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        wall_s=round(time.monotonic() - begun, 1),
        failure="" if findings else complaint[-300:],
    )


def _judge_bundle(bundle: dict[str, object], net: Net) -> Finding:
    target = str(bundle["target"])
    if bundle["path"] is None:
        return Finding(target=target, verdict="no bundle", reason=str(bundle["failure"])[:300])
    summary = msgspec.convert(bundle, _Built, strict=False)
    try:
        truth = ask_oracle(Path(str(bundle["path"])), net)
    except EdgekitError as error:
        truth = Truth(state="does not start", failure=str(error))
    reasons = [failure for run in summary.verify.runs for failure in (*run.failures, *run.doubts)]
    reason = next(iter((*summary.verify.failures, *reasons)), "")
    return Finding(
        target=target, verdict=summary.verdict, reason=reason[:300], precision=summary.precision, truth=truth
    )


class _Run(msgspec.Struct, frozen=True):
    failures: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


class _Verify(msgspec.Struct, frozen=True):
    failures: tuple[str, ...] = ()
    runs: tuple[_Run, ...] = ()


class _Built(msgspec.Struct, frozen=True):
    verdict: Verdict
    precision: str
    verify: _Verify = _Verify()


def run_corpus(nets: Sequence[Net], targets: Sequence[str], label: str, jobs: int, timeout_s: float) -> Iterator[Row]:
    """Judges the networks that the label's file lacks, `jobs` at once, and yields the rows of all."""
    kept = CORPUS / "runs" / f"{label}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(label)
    yield from rows
    done = {row.net for row in rows}
    with ThreadPoolExecutor(jobs) as pool:
        work = [pool.submit(_judge_apart, net, targets, label, timeout_s) for net in nets if net.name not in done]
        for each in as_completed(work):
            row = each.result()
            with kept.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
            yield row


def _judge_apart(net: Net, targets: Sequence[str], label: str, timeout_s: float) -> Row:
    out = CORPUS / "bundles" / label / net.name
    shutil.rmtree(out, ignore_errors=True)
    # Others of this machine go first.
    command = ["nice", "-n", "10", sys.executable, str(Path(__file__).with_name("corpus.py")), "judge", net.name]
    command += ["--out", str(out), "--targets", ",".join(targets), "--timeout", str(timeout_s)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        # The oracle itself broke: that is said as such, and no verdict of edgekit's.
        return Row(net=net.name, held_out=net.held_out, findings=(), cpu_s=0, wall_s=0, failure=ended.stderr[-300:])
    return msgspec.json.decode(ended.stdout, type=Row)


def read_rows(label: str) -> list[Row]:
    """Returns what was found so far under a label."""
    kept = CORPUS / "runs" / f"{label}.jsonl"
    return [msgspec.json.decode(line, type=Row) for line in kept.read_bytes().splitlines()] if kept.is_file() else []


_STATES = ("right", "open", "wrong", "does not start", "no bundle")


def format_matrix(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the confusion matrix, per target and of all, then what costs too much and what is wrong."""
    found = [(row, finding) for row in rows for finding in row.findings]
    counts = Counter[tuple[str, str]]((finding.verdict, finding.state) for _, finding in found)
    yield f"| edgekit says | {' | '.join(f'truth: {state}' for state in _STATES)} |"
    yield f"|---|{'---:|' * len(_STATES)}"
    for verdict in ("pass", "not proven", "fail", "no bundle", "traceback"):
        yield f"| {verdict} | {' | '.join(str(counts[verdict, state]) for state in _STATES)} |"
    for target in DEVICES:
        own = [finding for _, finding in found if finding.target == target]
        yield f"{target}: {sum(finding.is_wrong for finding in own)} of {len(own)} wrong"
    wrong, costs = [pair for pair in found if pair[1].is_wrong], sorted(row.cpu_s for row in rows)
    percent = 100 * len(wrong) / max(len(found), 1)
    yield f"{len(rows)} networks, {len(found)} verdicts, {len(wrong)} wrong ({percent:.1f} %)"
    yield (
        f"tracebacks {sum(finding.verdict == 'traceback' for _, finding in found)}, shipped files that do not start"
        f" {sum(finding.state == 'does not start' for _, finding in found)}, CPU seconds a network: median"
        f" {costs[len(costs) // 2] if costs else 0:.0f}, most {costs[-1] if costs else 0:.0f},"
        f" above {MOST_CPU_S:.0f}: {sum(cost > MOST_CPU_S for cost in costs)}"
    )
    for row, finding in wrong:
        seen = finding.truth.failure or f"agreement {finding.truth.agreement}" if finding.truth else "not run"
        yield f"WRONG {row.net} {finding.target}: {finding.verdict}, truth {finding.state} ({seen}): {finding.reason}"
    yield from (f"NO REPORT {row.net}: {row.failure}" for row in rows if row.failure)
