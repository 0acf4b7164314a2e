"""Profiles one subject on one device: rounds of runs with and without the profiler, and conclusions from the times.

QNN's own profiler reports the operations inside its single kernel. Advice says what `prepare --fix` and `check` would
change about the nodes that cost the most.
"""

import csv
import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import get_args

import msgspec
import numpy as np

from edgekit._files import work_folder
from edgekit._ort import CPU_PROVIDER
from edgekit.bench.bench import FIRST_RUNS, count_fitting, run_slices
from edgekit.bench.latency import compare_rounds, find_steady, measure_round
from edgekit.bench.subject import Subject
from edgekit.check.check import check_model
from edgekit.devices.device import Device, DeviceRun, Job, Phase
from edgekit.devices.process.run import MAX_LOG, printable
from edgekit.errors import DeviceError, EdgekitError
from edgekit.evidence import Evidence
from edgekit.graph.graph import Graph, read_graph
from edgekit.model.external import skim_model
from edgekit.model.model import Model, load_model
from edgekit.prepare.clean import merge_domains
from edgekit.prepare.fix import FIXES, apply_rewrites
from edgekit.prepare.interface import name_nodes
from edgekit.profile import nodes as kernels
from edgekit.profile.events import Execution, Trace, read_profile, read_trace
from edgekit.profile.report import DISTURBED, Cause, DeviceProfile, NodeTime, NpuTime, PhaseMemory, Roof
from edgekit.progress import Progress
from edgekit.target import Target, load_target, target_names

_MIN_SHARE = 0.01


def give_advice(model: Model, target: Target, nodes: Sequence[NodeTime]) -> tuple[Cause, ...]:
    """Returns changes to a model for nodes that take at least 1 % of the time, those for the most time first.

    These are the rewrites that help every provider, and the advice of `check` for a target with a provider of its own.

    Raises:
        EdgekitError: the model cannot be read, or the target's rules.
    """
    found: list[Cause] = []
    proto = skim_model(model.path)
    merge_domains(proto)
    name_nodes(proto.graph)
    for fix in apply_rewrites(proto, tuple(FIXES)):
        message = f"'{fix.id}' of prepare changes {len(fix.nodes)} nodes that take"
        advice = f"edgekit prepare {model.path.name} --fix --out FILE"
        found.append(_name_cause(nodes, fix.nodes, rule=fix.id, message=message, advice=advice))
    # A bundle's target has no folder with rules, but mostly has the name of a shipped target.
    if target.folder == Path() and target.name in target_names():
        target = msgspec.structs.replace(target, folder=load_target(target.name).folder)
    if target.provider != CPU_PROVIDER and target.folder != Path():
        advice = f"edgekit check {model.path.name} --target {target.name}"
        for item in check_model(model, target).advice:
            message = f"{item.message} ({item.subject}): its nodes take"
            found.append(_name_cause(nodes, item.nodes, rule=item.id, message=message, advice=advice))
    total_ms = sum(node.self_ms for node in nodes)
    significant = [cause for cause in found if cause.milliseconds >= _MIN_SHARE * total_ms]
    return tuple(sorted(significant, key=lambda cause: -cause.milliseconds))


def _name_cause(nodes: Sequence[NodeTime], names: Iterable[str], *, rule: str, message: str, advice: str) -> Cause:
    """Returns a cause about the kernels of these nodes of the model; their time is appended to `message`."""
    wanted = frozenset(names)
    concerned = [node for node in nodes if node.source in wanted]
    milliseconds = sum(node.self_ms for node in concerned)
    return Cause(
        id=rule,
        message=f"{message} {milliseconds:.3g} ms",
        milliseconds=milliseconds,
        advice=advice,
        nodes=tuple(node.name for node in concerned),
    )


# The file has half a kilobyte for each node and run.
_MAX_NPU_BYTES = 1 << 26
_EVENT = re.compile(r"(?P<name>.*?):?\s?OpId_(?P<number>\d{1,9}) \(cycles\)")

Cycles = Mapping[str, int]
"""The cycles of each operation of a run, by its name, in the order of the file."""


def read_npu(path: Path) -> tuple[Cycles, ...]:
    """Returns the cycles of the operations in each run, in order.

    Raises:
        DeviceError: it cannot be read, or is no such file.
    """
    data = read_profile(path, _MAX_NPU_BYTES, "--on host profiles the CPU")
    try:
        return tuple(_list_runs(data.decode()))
    except (UnicodeDecodeError, csv.Error, ValueError, KeyError) as error:
        hint = "this version of onnxruntime-qnn may write another format: edgekit doctor"
        raise DeviceError(f"QNN's profile is malformed: {printable(str(error))}", hint=hint) from error


def _list_runs(text: str) -> Iterator[Cycles]:
    cycles: dict[str, int] = {}
    for row in csv.DictReader(text.splitlines()):
        if None in row.values():
            raise ValueError("a line has too few columns")
        found = _EVENT.fullmatch(row["Event Identifier"])
        if row["Message"] == "NODE" and row["Unit of Measurement"] == "CYCLES" and found:
            # Nodes with the same name are distinguished by QNN's number.
            name = printable(found["name"], MAX_LOG)
            name = f"{name} ({found['number']})" if name in cycles else name
            cycles[name] = min(int(row["Time"]), 1 << 53)
        elif row["Message"] == "EXECUTE" and cycles:
            yield cycles
            cycles = {}


def list_npu(runs: Sequence[Cycles], sources: Mapping[str, kernels.Source]) -> tuple[NpuTime, ...]:
    """Returns the operations with their median cycles, the most expensive first; the first run is left out."""
    steady = runs[1:] or runs
    names = dict.fromkeys(name for run in steady for name in run)
    found = {name: [run[name] for run in steady if name in run] for name in names}
    medians = {name: median(cycles) for name, cycles in found.items()}
    total_cycles = sum(medians.values())
    times = (
        NpuTime(
            name=name,
            source=kernels.find_source(name, sources).node,
            cycles=cycles,
            share=cycles / total_cycles if total_cycles else 0.0,
            spread=(max(found[name]) - min(found[name])) / cycles if cycles else 0.0,
        )
        for name, cycles in medians.items()
    )
    return tuple(sorted(times, key=lambda one: -one.cycles))


# Three rounds are six sessions: enough to show that the profiler costs little (Student's t with 2 degrees of freedom).
ROUNDS = 3
# ONNX Runtime's profiler stops at a million events (profiler.h), and writes about a kilobyte for each; a device may
# send a quarter of a gigabyte.
_MAX_EVENTS = 60_000
# If the kernels take less than this share of a run, the report warns.
_MIN_COVERAGE = 0.95
_SECONDS = 10.0
_MAX_BUDGET_S = 3600.0


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much to run: `runs` in each round, else as many as fit into the time; with `threads` 0, ORT chooses.

    No session starts after `seconds` (None: 10, or no limit if `runs` is given), except the first one. Without
    `roofline` the machine's peak rates are not measured; with `probe_again` they are measured even if they are in the
    cache. With `raw` the profiler's own file is kept.
    """

    runs: int | None = None
    seconds: float | None = None
    threads: int = 0
    roofline: bool = True
    probe_again: bool = False
    raw: bool = False

    @property
    def limit_s(self) -> float:
        """The seconds after which no session starts."""
        return self.seconds or (_SECONDS if self.runs is None else math.inf)


class _Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions on a device: a first one, then pairs without and with the profiler, and one without an arena.

    There are as many pairs as the time allowed, perhaps none.
    """

    first: DeviceRun
    pairs: tuple[tuple[DeviceRun, ...], ...]
    without_arena: DeviceRun | None

    @property
    def traced(self) -> tuple[DeviceRun, ...]:
        """The sessions with the profiler to evaluate: those of the pairs, or without any the first, less steady one."""
        return tuple(traced for _, traced in self.pairs) or (self.first,)


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """A profile, the runs that it was computed from (for time lines and trace files), and the model's graph.

    `graph` is None for a file in ORT format. `raw` is the last file of ONNX Runtime's profiler, b"" if not asked for.
    """

    profile: DeviceProfile
    executions: tuple[Execution, ...] = ()
    graph: Graph | None = None
    raw: bytes = b""


def profile_subject(subject: Subject, device: Device, options: ProfileOptions, progress: Progress) -> Profiled:
    """Profiles a subject on a device; a failure of the device is reported in the profile."""
    progress(f"profile {subject.name} on {device.name}")
    empty = DeviceProfile(
        subject=subject.name,
        device=device.name,
        evidence=device.evidence,
        provider=CPU_PROVIDER,
        threads=options.threads,
    )
    try:
        job = msgspec.structs.replace(subject.job_for(device), threads=options.threads)
        end_s = time.monotonic() + options.limit_s
        with work_folder() as work:
            measured = _take_rounds(device, job, options, end_s, work)
            roof, no_roof = _find_roof(device, options, end_s, progress) if options.roofline else (None, "")
            empty = msgspec.structs.replace(empty, provider=job.target.provider, roof=roof)
            return _describe(empty, job, measured, no_roof, keep_raw=options.raw)
    except EdgekitError as error:
        return Profiled(profile=msgspec.structs.replace(empty, failure=error.message))
    except ValueError as error:
        failure = f"the device gave times that cannot be: {error}"
        return Profiled(profile=msgspec.structs.replace(empty, failure=failure))


def _take_rounds(device: Device, job: Job, options: ProfileOptions, end_s: float, work: Path) -> _Rounds:
    """Makes the runs that fit before `end_s` on the clock of `time.monotonic`.

    Raises:
        DeviceError: the device failed, or gave no profile.
    """
    start = time.monotonic()
    folders = (work / str(number) for number in itertools.count())
    budget_s = min(_MAX_BUDGET_S, max(0.0, end_s - start))
    traced_job = msgspec.structs.replace(job, trace=True, least_samples=1)
    first = run_slices(device, traced_job, next(folders), slices=3, repeat=1, seconds=budget_s)
    _read(first)
    guess_ms = max(1e-3, median(first.latency_ms[1:] or first.latency_ms))
    # The time to start a session counts too: each round starts two.
    start_s = max(0.0, time.monotonic() - start - sum(first.latency_ms) / 1e3)
    left_s = end_s - time.monotonic()
    count = int(max(0.0, min(ROUNDS, left_s / (2 * (start_s + 3 * guess_ms / 1e3)))))
    each_s = min(_SECONDS, left_s / max(1, 2 * count) - start_s)
    events = max(1, _MAX_EVENTS // max(1, len(first.placement)))
    runs = options.runs or max(2, min(FIRST_RUNS, count_fitting(max(0.0, each_s), guess_ms), events))

    def run(job: Job, repeat: int = runs + 1) -> DeviceRun:
        return run_slices(device, job, next(folders), slices=1, repeat=repeat, seconds=job.budget_s)

    jobs = (job, msgspec.structs.replace(job, trace=True))
    pairs = tuple(measure_round(number, jobs, run) for number in range(count))
    without_arena = None
    if pairs and pairs[0][0].memory and end_s - time.monotonic() > start_s:
        without_arena = run(msgspec.structs.replace(job, arena=False), 3)
    return _Rounds(first=first, pairs=pairs, without_arena=without_arena)


def _take_median(run: DeviceRun) -> float:
    """Returns the median time of the steady runs of a session."""
    return median(run.latency_ms[find_steady(run.latency_ms, len(run.latency_ms) // 2) :])


def _read(run: DeviceRun) -> Trace:
    if run.trace is None:
        words = f"'{run.device}' gave no profile: its runner is older than this edgekit, or cannot profile"
        raise DeviceError(words, hint="edgekit runner build, or --on host")
    trace = read_trace(run.trace)
    if not any(execution.steps for execution in trace.executions):
        words = f"the profile of '{run.device}' holds no kernel"
        raise DeviceError(words, hint="its ONNX Runtime may be built without a profiler: --on host has one")
    return trace


def _find_roof(device: Device, options: ProfileOptions, end_s: float, progress: Progress) -> tuple[Roof | None, str]:
    """Returns a device's peak rates, or why they are unknown: a provider need not support the probe's kernels."""

    def run(job: Job, work: Path) -> DeviceRun:
        if time.monotonic() >= end_s:
            raise DeviceError("the time was over", hint="give more --seconds")
        progress(f"measure what {device.name} reaches")
        return device.run_job(job, work)

    with work_folder() as work:
        try:
            return kernels.find_roof(device.name, options.threads, run, work, probe_again=options.probe_again), ""
        except EdgekitError as error:
            return None, f"what {device.name} reaches is not known: {error.message}"


def _describe(empty: DeviceProfile, job: Job, measured: _Rounds, no_roof: str, *, keep_raw: bool) -> Profiled:
    """Returns the profile of some runs; `no_roof` says why the device's peak rates are unknown, if so."""
    traces, last = [_read(run) for run in measured.traced], measured.traced[-1]
    counted = tuple(run for trace in traces for run in kernels.choose_runs(trace.executions))
    runs = (measured.first, *(traced for _, traced in measured.pairs))
    cycles = [one for run in runs if run.npu_trace for one in read_npu(run.npu_trace)]
    # For a file in ORT format there is only ONNX Runtime's own graph.
    model = load_model(job.model) if job.model.suffix == ".onnx" else None
    graph = None if model is None else read_graph(model)
    sources = {} if graph is None else kernels.list_sources(graph)
    nodes = kernels.list_nodes(counted, sources)
    if empty.roof is not None:
        nodes = kernels.add_roof_shares(nodes, empty.roof)
    rounds = [(_take_median(untraced), _take_median(traced)) for untraced, traced in measured.pairs]
    with_arena = (measured.pairs[0][0] if measured.pairs else measured.first).memory
    bare: Mapping[Phase, tuple[int, int]] = {} if measured.without_arena is None else measured.without_arena.memory
    found = msgspec.structs.replace(
        empty,
        versions=dict(sorted(last.versions.items())),
        runs=len(counted),
        run_ms=float(np.mean([run.duration_us for run in counted])) / 1e3,
        nodes_ms=sum(node.self_ms for node in nodes),
        # If there was no time for runs without the profiler, those with it are used.
        plain_ms=median([untraced for untraced, _ in rounds] or last.latency_ms),
        overhead=compare_rounds(rounds) if len(rounds) > 1 else None,
        memory=tuple(
            PhaseMemory(
                phase=phase,
                resident_bytes=with_arena[phase][0],
                peak_bytes=with_arena[phase][1],
                bare_bytes=bare[phase][0] if phase in bare else None,
                bare_peak_bytes=bare[phase][1] if phase in bare else None,
            )
            for phase in get_args(Phase)
            if phase in with_arena
        ),
        load_ms=last.load_ms,
        make_ms=traces[-1].make_ms,
        operators=kernels.list_operators(nodes),
        nodes=nodes,
        unasked=kernels.list_unasked(nodes),
        npu=list_npu(cycles, sources),
    )
    advice = () if model is None else give_advice(model, job.target, nodes)
    warnings = (*_warn(found, len(rounds)), *last.notes, *filter(None, (no_roof,)))
    raw = last.trace.read_bytes() if keep_raw and last.trace is not None else b""
    profile = msgspec.structs.replace(found, warnings=warnings, advice=advice)
    return Profiled(profile=profile, executions=counted, graph=graph, raw=raw)


def _warn(found: DeviceProfile, rounds: int) -> Iterator[str]:
    """Yields what makes the figures less reliable, the worst first."""
    if found.evidence is not Evidence.DEVICE:
        yield f"this is not the device's time ({found.evidence.value}: {found.evidence.meaning})"
    if found.provider != CPU_PROVIDER and not any(node.provider == found.provider for node in found.nodes):
        yield f"silent fallback: {found.provider} took no node"
    if rounds < ROUNDS:
        why = "because a session takes long to start and run here; give more time: --seconds"
        yield f"{rounds} of {ROUNDS} rounds fitted into the time, {why}"
    if found.overhead is not None and found.overhead.value > DISTURBED and found.overhead.interval[0] > 1:
        longer = f"the profiler makes these runs {found.overhead.value:.2g} times as long"
        yield f"{longer}, most of it between the kernels: shares tell more than milliseconds here"
    elif found.covered + found.recording < _MIN_COVERAGE:
        shares = f"kernels make {found.covered:.1%} of a run and the profiler's own writing {found.recording:.1%}"
        rest = f"the rest lies between them, {found.between_us:.1f} us for each"
        yield f"{shares}: {rest}, where ONNX Runtime hands over from one to the next, or another program had the core"
    fast = sum(node.bound == "compute" and (node.roof_share or 0.0) > 1.1 for node in found.nodes)
    if found.roof is not None and fast:
        why = "the machine was busy when that ran, or a cache holds their data"
        yield f"{fast} kernels are faster than the probe: {why}; --probe-again measures it anew"
    if found.npu and found.evidence is not Evidence.DEVICE:
        why = "QNN counts what its simulator took, which differs from run to run and says nothing of a phone"
        yield f"cycles inside the NPU's graph are this PC's: {why}; which operations there are, does"
