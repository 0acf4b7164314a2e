"""Runs a far-side program in a child process of its own, and judges what came back.

A program that keeps one core busy runs a job in two halves side by side, where nobody asks for times.
"""

from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit._proc import Finished
from edgekit.data.samples import Samples, select_samples
from edgekit.devices.device import LEAST_SAMPLES, DeviceRun, Job, Missing, PlacedNode
from edgekit.devices.process.exchange import TRACE, RunnerJob, RunnerResult, open_outputs, read_run
from edgekit.errors import DeviceError, ModelError
from edgekit.evidence import Evidence
from edgekit.machine import count_cores, map_in_order
from edgekit.model.external import skim_model
from edgekit.model.tensors import Tensors

FAR = Path(__file__).parents[1] / "far"
ORT_RUNNER = FAR / "ort_runner.py"
ORT_QUEUE = FAR / "ort_queue.py"
"""What the runner in Python opens beside itself for a queue of requests."""
REPLAY_SAVED = "session.enable_saved_runtime_optimizations"
MAX_LOG = 8192
# A device may say what it likes: what goes into reports is bounded in number and length.
_MOST_VERSIONS = 32

# What a far side that wrote nothing has said: it was started, and no more is known.
_NOTHING = RunnerResult(
    status="running",
    message="",
    load_ms=0.0,
    latency_ms=(),
    peak_rss_bytes=0,
    versions={},
    placement=(),
    placement_source="session",
)


class Runner(msgspec.Struct, frozen=True, kw_only=True):
    """The device that a child process stands for; it `emulates` one where it runs a program or a CPU of another kind.

    Where such a child dies, the emulator may be at fault.
    """

    device: str
    evidence: Evidence
    emulates: bool = False


def require_device(name: str, missing: Missing | None) -> None:
    """Refuses a device that lacks something.

    Raises:
        DeviceError: the device cannot run on this machine.
    """
    if missing is not None:
        hint = missing.command or "use another device: edgekit devices list"
        raise DeviceError(f"'{name}' cannot run here: {missing.reason}", hint=hint)


def describe_job(job: Job, *, provider: str = CPU_PROVIDER) -> RunnerJob:
    """Returns the far-side job that opens the model as an app on the target would, on a provider.

    Options are those of the target where the provider is the target's. On the CPU provider nothing can fall back to
    the CPU, and ONNX Runtime refuses a session that forbids it; the entry is left out. So is the one that replays
    optimisations saved in the file, unless the file is known to be what was built: they are as good as code.
    """
    session = job.target.session
    config = dict(session.config)
    if provider == CPU_PROVIDER:
        config.pop("session.disable_cpu_ep_fallback", None)
    # Saved optimisations are applied as the file states them: only a file whose digest was just checked is trusted so
    # far.
    if not job.digests_hold:
        config.pop(REPLAY_SAVED, None)
    return RunnerJob(
        # Absolute, as the child works in a folder of its own.
        model=str(job.model.resolve()),
        provider=provider,
        provider_options=session.provider_options if provider == job.target.provider else {},
        chain=(session.chain or ()) if provider == job.target.provider else (),
        session_config=config,
        level=job.level,
        threads=job.threads,
        inter_threads=job.inter_threads,
        parallel=job.parallel,
        arena=job.arena,
        memory_pattern=job.memory_pattern,
        samples=job.samples.count,
        repeat=job.repeat,
        concurrency=job.concurrency,
        io_binding=job.io_binding,
        budget_s=job.budget_s,
        least_samples=job.least_samples,
        # A session of a file in ORT format has no record of assignments; the profiler names the provider of each
        # kernel.
        profile=job.model.suffix == ".ort" and not job.trace,
        custom_ops=tuple(map(str, job.custom_ops)),
        trace=job.trace,
        queue=job.queue,
    )


def refuse_run(runner: Runner, reason: str) -> DeviceRun:
    """Returns the run of a job that could not be started on a device."""
    return DeviceRun(
        device=runner.device,
        evidence=runner.evidence,
        outputs=Samples(source=runner.device, count=0, read=lambda: iter(())),
        placement=(),
        placement_source="predicted",
        load_ms=0.0,
        latency_ms=(),
        peak_rss_bytes=0,
        versions={},
        failure=reason,
    )


def collect_run(runner: Runner, job: Job, finished: Finished, work: Path) -> DeviceRun:
    """Returns what a child left in its folder; whatever it did wrong is the run's failure."""
    try:
        far, wrong = read_run(work), ""
    except DeviceError as error:
        far, wrong = _NOTHING, error.message if finished.succeeded else ""
    outputs, malformed = open_outputs(work / "out", job.outputs, runner.device)
    shortage = find_shortage(outputs.count, far, job, job.samples.count, job.repeat)
    failure = wrong or _failure(far, finished) or malformed or shortage
    run = judge_run(runner, job, far, outputs, failure, job.repeat, trace=find_trace(work / TRACE, job))
    return add_ending(run, runner, far, finished)


def add_ending(run: DeviceRun, runner: Runner, far: RunnerResult | None, finished: Finished) -> DeviceRun:
    """Returns a run that failed with the last words of its program, and whether that was an emulator which died."""
    if run.failure is None:
        return run
    # A session that was refused is an answer, however its program ended then.
    crashed = runner.emulates and finished.crashed and (far is None or far.status != "refused")
    # The last lines that a program wrote, without what could steer a terminal.
    text = f"{finished.stdout[-MAX_LOG:]}\n{finished.stderr[-MAX_LOG:]}"
    return msgspec.structs.replace(
        run, log="\n".join(line for raw in text.splitlines() if (line := _clean_line(raw)))[-MAX_LOG:], crashed=crashed
    )


def find_trace(file: Path, job: Job) -> Path | None:
    """Returns the profiler's file, where the job asked for it and it came back."""
    return file if job.trace and file.is_file() else None


def judge_run(
    runner: Runner,
    job: Job,
    far: RunnerResult | None,
    outputs: Samples,
    failure: str | None,
    repeat: int = 1,
    *,
    trace: Path | None = None,
) -> DeviceRun:
    """Returns the run of a device from what its far side says, None where that is nothing, and what came back."""
    far = far or _NOTHING
    # Programs look at the clock before they see that there is no further sample.
    stopped_early = far.status == "stopped" and outputs.count < job.samples.count
    return DeviceRun(
        device=runner.device,
        evidence=runner.evidence,
        outputs=outputs,
        placement=_read_placement(far, job.model),
        placement_source=far.placement_source,
        load_ms=far.load_ms,
        # Times beyond the outputs that are whole belong to a sample that did not come back.
        latency_ms=far.latency_ms[: outputs.count * repeat],
        elapsed_ms=far.elapsed_ms[: outputs.count],
        peak_rss_bytes=far.peak_rss_bytes,
        versions={printable(key): printable(value) for key, value in list(far.versions.items())[:_MOST_VERSIONS]},
        notes=describe_stop(outputs.count, job) if stopped_early else (),
        stopped_early=stopped_early,
        failure=failure,
        cpu_features=far.cpu_features,
        before=far.before,
        after=far.after,
        trace=trace,
        memory=far.memory,
    )


def describe_stop(count: int, job: Job) -> tuple[str, ...]:
    """Returns the note of a run that stopped because its time was over."""
    return (f"stopped after {count} of {job.samples.count} samples, because {job.budget_s:g} s were over",)


def _read_placement(far: RunnerResult, model: Path) -> tuple[PlacedNode, ...]:
    # The program saw only that one provider took everything: the nodes are those of the file.
    if far.placed_whole:
        try:
            graph = skim_model(model).graph
        except ModelError:
            return ()  # a file of another format: the device cannot know that it took its nodes whole
        provider = printable(far.placed_whole)
        return tuple(
            PlacedNode(name=node.name, op=node.op_type, domain=node.domain, provider=provider) for node in graph.node
        )
    return tuple(
        PlacedNode(
            name=printable(node.name, MAX_LOG),
            op=printable(node.op),
            domain=printable(node.domain),
            provider=printable(node.provider),
        )
        for node in far.placement
    )


def _failure(far: RunnerResult, finished: Finished) -> str:
    if far.status == "refused" and not finished.timed_out:
        return describe_refusal(far)
    if not finished.succeeded:
        return f"the child process {finished.ending}{last_words(finished.stderr)}"
    return "" if far.status in {"done", "stopped"} else "the child process ended before its work was done"


def describe_refusal(far: RunnerResult) -> str:
    """Returns in one line why the far side did not do its work."""
    return f"refused: {_clean_line(far.message)[:400]}"


def find_shortage(count: int, far: RunnerResult, job: Job, wanted: int, repeat: int) -> str | None:
    """Returns what is wrong with the number of samples and times that came back, None where it is right."""
    least = min(LEAST_SAMPLES, job.least_samples, wanted)
    due = range(least, wanted + 1) if far.status == "stopped" else (wanted,)
    if count in due and count * repeat == len(far.latency_ms):
        return None
    return f"{count} of {wanted} samples came back, with {len(far.latency_ms)} times"


def last_words(stderr: str) -> str:
    """Returns the last line that a program wrote, after a colon; empty where it wrote none."""
    lines = [line for text in stderr.splitlines() if (line := _clean_line(text))]
    return f": {lines[-1][-300:]}" if lines else ""


def printable(text: str, most: int = 200) -> str:
    """Returns the beginning of what a device said, with a question mark for what could steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def _clean_line(text: str) -> str:
    """Returns one line without what could steer a terminal."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def can_halve(job: Job) -> bool:
    """Returns True if two programs may share the samples of a job: no time, trace or order of the session is asked."""
    is_plain = job.repeat == job.concurrency == 1 and not job.trace and job.answered is None and job.queue is None
    return is_plain and job.samples.count >= 2 * job.least_samples and count_cores() > 1


def run_in_two_calls(job: Job, work: Path, run: Callable[[Job, Path], DeviceRun]) -> DeviceRun:
    """Runs every other sample of a job in a call of its own, at once, and returns both as one run.

    Where a half stops early or fails, the outputs are those up to the first sample that is missing.

    Raises:
        EdgekitError: what `run` raises.
    """
    rows = [range(start, job.samples.count, 2) for start in (0, 1)]
    halves = [msgspec.structs.replace(job, samples=select_samples(job.samples, each)) for each in rows]

    def run_half(place: int) -> DeviceRun:
        folder = work / ("even", "odd")[place]
        folder.mkdir()
        return run(halves[place], folder)

    even, odd = (half for _, half in map_in_order(run_half, range(2), at_once=2))
    count = min(2 * even.outputs.count, 2 * odd.outputs.count + 1)
    stopped, told = even.stopped_early or odd.stopped_early, describe_stop(even.outputs.count, halves[0])
    return msgspec.structs.replace(
        even,
        outputs=_merge(even.outputs, odd.outputs, count),
        latency_ms=tuple(each for each in chain(*zip_longest(even.latency_ms, odd.latency_ms)) if each is not None),
        peak_rss_bytes=max(even.peak_rss_bytes, odd.peak_rss_bytes),
        failure=even.failure or odd.failure,
        crashed=even.crashed if even.failure else odd.crashed,
        stopped_early=stopped,
        notes=(*(note for note in even.notes if note not in told), *(describe_stop(count, job) if stopped else ())),
        log=even.log or odd.log,
    )


def _merge(even: Samples, odd: Samples, count: int) -> Samples:
    def read() -> Iterator[Tensors]:
        sides = iter(even), iter(odd)
        for index in range(count):
            yield next(sides[index % 2])

    return Samples(source=even.source, count=count, read=read)
