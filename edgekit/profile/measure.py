"""One subject on one device: rounds of runs with and without the profiler, and what they say."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from edgekit._files import work_folder
from edgekit._ort import CPU_PROVIDER
from edgekit.bench.blocks import FIRST_RUNS, count_fitting
from edgekit.bench.latency import compare_rounds, find_steady
from edgekit.bench.subject import Subject
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.errors import DeviceError, EdgekitError
from edgekit.evidence import Evidence
from edgekit.graph.graph import Graph, read_graph
from edgekit.model.model import load_model
from edgekit.profile.advice import give_advice
from edgekit.profile.events import Execution, Trace, read_trace
from edgekit.profile.nodes import choose_runs, hold_against, list_nodes, list_operators, list_sources, list_unasked
from edgekit.profile.npu import Cycles, list_npu, read_npu
from edgekit.profile.report import DISTURBED, DeviceProfile, Roof
from edgekit.profile.roofline import find_roof
from edgekit.progress import Progress

# Two degrees of freedom: enough to say that the profiler costs little, in half a dozen sessions.
ROUNDS = 3
# ONNX Runtime's profiler stops at a million events (profiler.h), and writes about a kilobyte for each; a device may
# send a quarter of a gigabyte.
_MOST_EVENTS = 60_000
# The sum of the kernels lies that near the run, or the report says so.
_COVERED = 0.95


class Watching(msgspec.Struct, frozen=True, kw_only=True):
    """How much to run: `runs` in each round, else as many as fit into `seconds`; `threads` of 0 lets ORT choose.

    Without `roofline` no probe is run; with `probe_again` also where the machine was measured before.
    """

    runs: int | None = None
    seconds: float = 20.0
    threads: int = 0
    roofline: bool = True
    probe_again: bool = False


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What rounds on a device gave: the median times of both kinds of round, the traces, the last run, and NPU's."""

    rounds: tuple[tuple[float, float], ...]
    traces: tuple[Trace, ...]
    last: DeviceRun
    npu: tuple[Cycles, ...] = ()


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """A profile, the runs that it was made of, for time lines and trace files, and the model's graph, if it has one."""

    profile: DeviceProfile
    executions: tuple[Execution, ...] = ()
    graph: Graph | None = None


def profile_subject(subject: Subject, device: Device, watching: Watching, progress: Progress) -> Profiled:
    """Returns where the time of a subject goes on a device; a device that fails is a finding."""
    progress(f"profile {subject.name} on {device.name}")
    empty = DeviceProfile(
        subject=subject.name,
        device=device.name,
        evidence=device.evidence,
        provider=CPU_PROVIDER,
        threads=watching.threads,
    )
    try:
        job = msgspec.structs.replace(subject.job_for(device), threads=watching.threads)
        taken = _take_rounds(device, job, watching)
        roof, lack = _find_roof(device, watching, progress) if watching.roofline else (None, "")
        found = _describe(msgspec.structs.replace(empty, provider=job.target.provider), job, taken, roof)
        return _add_warning(found, lack) if lack else found
    except EdgekitError as error:
        return Profiled(profile=msgspec.structs.replace(empty, failure=error.message))
    except ValueError as error:
        failure = f"the device gave times that cannot be: {error}"
        return Profiled(profile=msgspec.structs.replace(empty, failure=failure))


def _take_rounds(device: Device, job: Job, watching: Watching) -> Taken:
    pilot = _run(device, job, 3)
    guess_ms = max(1e-3, median(pilot.latency_ms[1:]))
    fitting = count_fitting(watching.seconds / (2 * ROUNDS), guess_ms)
    events = max(1, _MOST_EVENTS // max(1, len(pilot.placement)))
    runs = watching.runs or max(2, min(FIRST_RUNS, fitting, events))
    times: list[dict[bool, float]] = []
    traces: list[Trace] = []
    npu: list[Cycles] = []
    last = pilot
    for number in range(ROUNDS):
        times.append({})
        # The one that is first in a round is second in the next, so that neither always finds the device rested.
        for traced in (False, True) if number % 2 == 0 else (True, False):
            with work_folder() as work:
                last = _run(device, msgspec.structs.replace(job, trace=traced), runs + 1, work)
                if traced:
                    traces.append(_read(device, last))
                    npu += read_npu(last.npu_trace) if last.npu_trace else ()
            steady = last.latency_ms[find_steady(last.latency_ms, len(last.latency_ms) // 2) :]
            times[-1][traced] = median(steady)
    rounds = tuple((both[False], both[True]) for both in times)
    return Taken(rounds=rounds, traces=tuple(traces), last=last, npu=tuple(npu))


def _run(device: Device, job: Job, runs: int, work: Path | None = None) -> DeviceRun:
    if work is None:
        with work_folder() as folder:
            return _run(device, job, runs, folder)
    run = device.run_job(msgspec.structs.replace(job, repeat=runs), work)
    if run.failure is not None:
        raise DeviceError(run.failure, hint=f"edgekit devices test {device.name}")
    return run


def _read(device: Device, run: DeviceRun) -> Trace:
    if run.trace is None:
        raise DeviceError(
            f"'{device.name}' gave no profile: its runner is older than this edgekit, or cannot profile",
            hint="edgekit runner build, or --on host",
        )
    trace = read_trace(run.trace)
    if not any(execution.steps for execution in trace.executions):
        raise DeviceError(f"the profile of '{device.name}' holds no kernel", hint="was its ONNX Runtime built without?")
    return trace


def _add_warning(found: Profiled, warning: str) -> Profiled:
    profile = msgspec.structs.replace(found.profile, warnings=(*found.profile.warnings, warning))
    return msgspec.structs.replace(found, profile=profile)


def _find_roof(device: Device, watching: Watching, progress: Progress) -> tuple[Roof | None, str]:
    """Returns what a device reaches, or why that is not known: a provider need not take the kernels of the probe."""

    def run(job: Job, work: Path) -> DeviceRun:
        progress(f"measure what {device.name} reaches")
        work.mkdir(parents=True, exist_ok=True)
        return device.run_job(job, work)

    with work_folder() as work:
        try:
            return find_roof(device.name, watching.threads, run, work, afresh=watching.probe_again), ""
        except EdgekitError as error:
            return None, f"what {device.name} reaches is not known: {error.message}"


def _describe(empty: DeviceProfile, job: Job, taken: Taken, roof: Roof | None) -> Profiled:
    kept = tuple(run for trace in taken.traces for run in choose_runs(trace.executions))
    # The graph of a file in ORT format is ONNX Runtime's own.
    model = load_model(job.model) if job.model.suffix == ".onnx" else None
    graph = None if model is None else read_graph(model)
    sources = {} if graph is None else list_sources(graph)
    nodes = list_nodes(kept, sources)
    if roof is not None:
        nodes = hold_against(nodes, roof)
    found = msgspec.structs.replace(
        empty,
        versions=dict(sorted(taken.last.versions.items())),
        runs=len(kept),
        run_ms=float(np.mean([run.duration_us for run in kept])) / 1e3,
        nodes_ms=sum(node.self_ms for node in nodes),
        plain_ms=median(plain for plain, _ in taken.rounds),
        overhead=compare_rounds(taken.rounds),
        load_ms=taken.last.load_ms,
        make_ms=taken.traces[-1].make_ms,
        operators=list_operators(nodes),
        nodes=nodes,
        unasked=list_unasked(nodes),
        npu=list_npu(taken.npu, sources),
        roof=roof,
    )
    advice = () if model is None else give_advice(model, job.target, nodes)
    done = msgspec.structs.replace(found, warnings=tuple(_warn(found, taken)), advice=advice)
    return Profiled(profile=done, executions=kept, graph=graph)


def _warn(found: DeviceProfile, taken: Taken) -> Iterator[str]:
    """Yields what makes the figures worth less than they look, worst first."""
    if found.evidence is not Evidence.DEVICE:
        yield f"this is not the device's time ({found.evidence.value}: {found.evidence.meaning})"
    if found.provider != CPU_PROVIDER and not any(node.provider == found.provider for node in found.nodes):
        yield f"silent fallback: {found.provider} took no node"
    if found.overhead is not None and found.overhead.value > DISTURBED and found.overhead.interval[0] > 1:
        yield (
            f"the profiler makes these runs {found.overhead.value:.2g} times as long, most of it between the kernels:"
            " shares tell more than milliseconds here"
        )
    elif found.covered + found.recording < _COVERED:
        yield (
            f"kernels make {found.covered:.1%} of a run and the profiler's own writing {found.recording:.1%}: the rest"
            f" lies between them, {found.between_us:.1f} us for each, where ONNX Runtime hands over from one to the"
            " next, or another program had the core"
        )
    if found.roof is not None and (fast := _beyond(found)):
        yield (
            f"{fast} kernels are faster than the probe: the machine was busy when that ran, or a cache holds their"
            " data; --probe-again measures it anew"
        )
    if found.npu and found.evidence is not Evidence.DEVICE:
        yield (
            "cycles inside the NPU's graph are this PC's: QNN counts what its simulator took, which differs from run to"
            " run and says nothing of a phone; which operations there are, does"
        )
    yield from taken.last.notes


def _beyond(found: DeviceProfile) -> int:
    return sum(node.bound == "compute" and (node.roof_share or 0.0) > 1.1 for node in found.nodes)
