"""Builds and verifies each network for the mobile targets and the CPU, asks the oracle, and counts wrong verdicts.

Each network has a process of its own, and its result is a line of CORPUS/runs/LABEL.jsonl, so that a stopped run
continues where it was.
"""

import json
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Literal

import msgspec
import onnx
from oracle import DEVICES, State, Truth, ask_oracle
from table import CORPUS, Net

from edgekit.errors import BundleError, EdgekitError
from edgekit.jobs.build import FAULT, build
from edgekit.prepare.fix import REWRITES, apply_rewrites
from edgekit.recipe import Data, Recipe
from edgekit.report.summary import BundleSummary

Verdict = Literal["pass", "fail", "not proven", "no bundle", "traceback"]
MOST_CPU_S = 120.0
# Below this share of the nodes a provider may be called idle.
_IDLE = 0.75


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One target of one network: edgekit's verdict, its first reason, and the truth if there is a bundle.

    `idle` is True if the verdict is that the provider takes less of the work than the target requires. `untrue` are
    statements of notes or of `check.json` that the shipped file contradicts.
    """

    target: str
    verdict: Verdict
    reason: str = ""
    idle: bool = False
    precision: str = ""
    untrue: tuple[str, ...] = ()
    truth: Truth | None = None

    @property
    def state(self) -> State | Literal["no bundle"]:
        """The oracle's answer."""
        return "no bundle" if self.truth is None else self.truth.state

    @property
    def is_wrong(self) -> bool:
        """True if the verdict contradicts the truth; an open truth or a verdict of "not proven" contradicts nothing."""
        if self.verdict == "pass":
            return self.state in {"wrong", "does not start"}
        if self.verdict == "fail" and self.idle and self.truth and (self.truth.taken or 0) < _IDLE:
            return False
        return self.verdict == "traceback" or (self.verdict == "fail" and self.state == "right")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The results and the cost of one network; `failure` if the whole build ended without a report."""

    net: str
    held_out: bool
    findings: tuple[Finding, ...]
    cpu_s: float
    wall_s: float
    failure: str = ""


def judge_net(net: Net, targets: Sequence[str], out: Path) -> Row:
    """Builds one network and asks the oracle about each bundle."""
    recipe = Recipe(targets=tuple(targets), dims=dict(net.dims), freeze=dict(net.freeze))
    data = Data(source=str(net.folder / "calib.npz"), evaluation=str(net.folder / "eval.npz"))
    begun, before = time.monotonic(), _used_cpu_s()
    built, ended, reason = tuple[BundleSummary, ...](), tuple[Verdict, ...](), ""
    try:
        built = build(net.folder / "model.onnx", data, out, recipe).bundles
    except EdgekitError as error:
        ended, reason = ("no bundle",), error.message
    except Exception:  # noqa: BLE001 - what a user would see as a traceback is what is looked for
        ended, reason = ("traceback",), traceback.format_exc().strip()[-300:]
    cpu_s, wall_s = _used_cpu_s() - before, time.monotonic() - begun
    findings = [judge_bundle(bundle, net) for bundle in built]
    findings += [Finding(target=target, verdict=verdict, reason=reason) for verdict in ended for target in targets]
    return Row(
        net=net.name, held_out=net.held_out, findings=tuple(findings), cpu_s=round(cpu_s, 1), wall_s=round(wall_s, 1)
    )


def _used_cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def judge_bundle(bundle: BundleSummary, net: Net) -> Finding:
    """Returns edgekit's verdict on one target, with its reason, and the truth."""
    if bundle.path is None:
        reason = bundle.failure or ""
        # A fault of edgekit at one target does not stop the others, so it ends in words in place of a traceback.
        return Finding(target=bundle.target, verdict="traceback" if FAULT in reason else "no bundle", reason=reason)
    try:
        truth = ask_oracle(bundle.path, net)
    except BundleError as error:
        truth = Truth(state="does not start", failure=error.message)
    reasons, report = list[str](), bundle.verify
    if report is not None:
        reasons = [line for run in report.runs for line in run.failures] + list(report.failures)
        reasons += [line for run in report.runs for line in run.unproven] + list(report.unproven)
    return Finding(
        target=bundle.target,
        verdict=bundle.verdict,
        reason=next(iter(reasons), ""),
        idle=report is not None and not any(run.failures for run in report.runs) and bool(report.failures),
        precision=bundle.precision or "",
        untrue=tuple(find_untrue(bundle, bundle.path)),
        truth=truth,
    )


def find_untrue(bundle: BundleSummary, folder: Path) -> Iterator[str]:
    """Yields untrue statements about a bundle's ONNX file: a rewrite that was not made, a check of other bytes."""
    path = folder / "model.onnx"
    if not path.is_file():
        return
    # Rewrites change the model in place, so the nodes are listed first.
    shipped = onnx.load(str(path), load_external_data=False)
    computed, names = set(_list_computed(shipped.graph)), {node.name for node in shipped.graph.node}
    told = {name for name in REWRITES if any(f"{name} (" in note for note in bundle.notes)}
    # If a rewrite was made, applying it again changes nothing.
    yield from (f"{fix.id} finds more to do" for fix in apply_rewrites(shipped, told))
    checked = json.loads((folder / "check.json").read_text())
    if checked["sha256"] != bundle.files["model.onnx"]:
        yield "check.json is of another file"
    if not computed <= {node["name"] for node in checked["node_list"]} <= names:
        yield "check.json lists other nodes"


def _list_computed(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the nodes that a session computes, without nodes that read only constants, which it may fold."""
    constants = {"", *(tensor.name for tensor in graph.initializer)}
    for node in graph.node:
        if node.input and constants.issuperset(node.input):
            constants.update(node.output)
        else:
            yield node.name


def run_corpus(nets: Sequence[Net], targets: Sequence[str], label: str, jobs: int, timeout_s: float) -> Iterator[Row]:
    """Judges the networks that are not in the label's file yet, `jobs` at once, and yields the rows of all."""
    kept = CORPUS / "runs" / f"{label}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(label)
    yield from rows
    done = {row.net for row in rows}
    with ThreadPoolExecutor(jobs) as pool:
        work = [pool.submit(_judge_apart, net, targets, label, timeout_s) for net in nets if net.name not in done]
        for each in as_completed(work):
            row = each.result()
            # Networks that failed or took too long are tried again by the next run.
            if not row.failure:
                with kept.open("ab") as file:
                    file.write(msgspec.json.encode(row) + b"\n")
            yield row


def _judge_apart(net: Net, targets: Sequence[str], label: str, timeout_s: float) -> Row:
    out = CORPUS / "bundles" / label / net.name
    shutil.rmtree(out, ignore_errors=True)
    # Other programs on this machine have priority.
    command = ["nice", "-n", "10", sys.executable, str(Path(__file__).with_name("corpus.py")), "judge", net.name]
    command += ["--out", str(out), "--targets", ",".join(targets)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        failure = f"it took more than {timeout_s:.0f} s"
    except subprocess.CalledProcessError as error:
        # If the oracle failed or the process died, the row says that, and has no verdict of edgekit's.
        failure = error.stderr[-300:] or str(error)
    else:
        return msgspec.json.decode(ended.stdout, type=Row)
    return Row(net=net.name, held_out=net.held_out, findings=(), cpu_s=0, wall_s=0, failure=failure)


def read_rows(label: str) -> list[Row]:
    """Returns the stored rows of a label."""
    kept = CORPUS / "runs" / f"{label}.jsonl"
    return [msgspec.json.decode(line, type=Row) for line in kept.read_bytes().splitlines()] if kept.is_file() else []


_STATES = ("right", "open", "wrong", "does not start", "no bundle")


def format_matrix(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the confusion matrix, for each target and in total, then too expensive networks and wrong verdicts."""
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
    for row, finding in found:
        if (finding.verdict, finding.state) == ("not proven", "right"):
            yield f"NOT PROVEN {row.net} {finding.target}, although right: {finding.reason}"
        yield from (f"UNTRUE {row.net} {finding.target}: {fact}" for fact in finding.untrue)
    yield from (f"NO REPORT {row.net}: {row.failure}" for row in rows if row.failure)
