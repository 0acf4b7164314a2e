"""Runs a job on a program that reads samples and writes tensors, and judges what came back.

The program lies behind a link to another machine, or is the onnxruntime of this Python in a child process.
"""

import select
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit._proc import ChildSetting, Finished, run_process, stream_process
from edgekit.data.samples import Samples
from edgekit.devices.device import LEAST_SAMPLES, DeviceRun, Job, Measured, Missing, PlacedNode, RunOptions
from edgekit.devices.process.exchange import (
    MAX_RESULT_BYTES,
    RunnerJob,
    RunnerResult,
    decode_run,
    encode_tensors,
    open_outputs,
    read_tensors,
    receive_tensors,
    receive_trace,
    tensors_name,
)
from edgekit.devices.process.link import Link, LocalLink
from edgekit.errors import DeviceError, ModelError
from edgekit.evidence import Evidence
from edgekit.model.external import skim_model

FAR = Path(__file__).parents[1] / "far"
ORT_RUNNER = FAR / "ort_runner.py"
ORT_QUEUE = FAR / "ort_queue.py"
"""What the runner in Python opens beside itself for a queue of requests."""
REPLAY_SAVED = "session.enable_saved_runtime_optimizations"
MAX_LOG = 8192
# A device may say what it likes: what goes into reports is bounded in number and length.
_MOST_VERSIONS = 32

_TRACE = "trace.json"

# What a program that wrote nothing has said: it was started, and no more is known.
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
    """Returns the job of the program that opens the model as an app on the target would, on a provider.

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
        samples=job.samples.count,
        # A session of a file in ORT format has no record of assignments; the profiler names the provider of each
        # kernel.
        profile=job.model.suffix == ".ort" and not job.trace,
        custom_ops=tuple(map(str, job.custom_ops)),
        **{name: getattr(job, name) for name in RunOptions.__struct_fields__},
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


class _Answer(msgspec.Struct, kw_only=True):
    """What has come back so far; `run` stays None until the last line is there.

    `cut` says that what is wrong came last: it may be no more than the end of a program that died. `sent` counts the
    samples that went there.
    """

    sent: int = 0
    count: int = 0
    run: RunnerResult | None = None
    wrong: str = ""
    cut: bool = False


def run_over(
    link: Link,
    program: Sequence[str],
    job: Job,
    request: RunnerJob,
    work: Path,
    *,
    runner: Runner,
    setting: ChildSetting | None = None,
) -> DeviceRun:
    """Runs a job with the command `program` of the machine that a link leads to.

    `request` is the job with paths of that machine. Samples are streamed: neither side holds more than a few in memory.
    Outputs are kept in the folder `work`. The `setting` is for the command of the link itself. The run ends when
    `job.timeout_s` is over, and so does the program there, because its stdin and stdout are closed.

    Raises:
        DeviceError: the local program of the link cannot be started.
        DataError: the samples of the job cannot be read.
    """
    answer = _Answer()
    finished = stream_process(
        link.wrap(program),
        timeout_s=job.timeout_s,
        feed=_messages(answer, request, job),
        take=partial(_receive, answer, job, work / "out"),
        setting=setting,
    )
    return _judge(runner, job, request, work, answer, finished, where=link.name)


def run_python(
    runner: Runner,
    job: Job,
    request: RunnerJob,
    work: Path,
    emulator: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    one_core: bool = False,
) -> DeviceRun:
    """Runs a job in a child, which `emulator` executes if it is given.

    `env` is added to the child's environment. With `one_core` all of the child's threads share a core.
    """
    # -P keeps the program's own folder out of sys.path: its neighbours would stand in for modules of the same names.
    argv = [*emulator, sys.executable, "-P", str(ORT_RUNNER), "--pipe"]
    setting = ChildSetting(cwd=work, env=env, one_core=one_core)
    if job.answered is not None:
        link = LocalLink(name=runner.device, folder=work, inside=str(work))
        return run_over(link, argv, job, request, work, runner=runner, setting=setting)
    return run_on_files(runner, argv, job, request, work, setting=setting)


def run_on_files(
    runner: Runner,
    argv: Sequence[str],
    job: Job,
    request: RunnerJob,
    work: Path,
    *,
    setting: ChildSetting | None = None,
) -> DeviceRun:
    """Runs a job on a program of this machine that reads its messages from a file and writes them into one.

    Not through pipes, as `run_over` does: this process would compete for the cores while runs are timed.

    Raises:
        DeviceError: the program cannot be started.
        DataError: the samples of the job cannot be read.
    """
    answer = _Answer()
    with tempfile.TemporaryFile(dir=work) as given, tempfile.TemporaryFile(dir=work) as said:
        for message in _messages(answer, request, job):
            given.write(message)
        given.seek(0)
        finished = run_process(argv, timeout_s=job.timeout_s, setting=setting, stdin=given, stdout=said)
        said.seek(0)
        with open(said.fileno(), "rb", closefd=False) as stream:
            _receive(answer, job, work / "out", stream, is_whole=True)
    return _judge(runner, job, request, work, answer, finished)


def _messages(answer: _Answer, request: RunnerJob, job: Job) -> Iterator[bytes]:
    yield msgspec.json.encode(request) + b"\n"
    for sample in job.samples:
        answer.sent += 1
        yield encode_tensors(sample)


def _receive(answer: _Answer, job: Job, folder: Path, stream: BufferedReader, *, is_whole: bool = False) -> None:
    """Reads messages until the last line; what is wrong stands in the answer. No more comes where it `is_whole`."""
    try:
        while first := _peek(stream):
            # A message begins with the list of its tensors, the last line with an object: one byte tells them apart.
            if first == b"{":
                line = stream.readline(MAX_RESULT_BYTES + 1)
                answer.run = decode_run(line if line.endswith(b"\n") or len(line) > MAX_RESULT_BYTES else b"")
                if answer.run.status == "running":
                    continue
                if job.trace and answer.run.trace_bytes:
                    receive_trace(stream, folder / _TRACE, answer.run.trace_bytes)
                if _peek(stream):
                    answer.wrong = "it wrote more after its last line"
                return
            if answer.count == (answer.sent if job.answered else job.samples.count):
                answer.wrong = "it gave more outputs than it got samples"
                return
            file = folder / tensors_name(answer.count)
            receive_tensors(stream, file, job.outputs)
            answer.count += 1
            if job.answered is not None:
                job.answered(read_tensors(file, job.outputs))
    except DeviceError as error:
        answer.wrong = error.message
        # True if nothing will come any more, without waiting for what may come.
        # At the end of a pipe `select` says that it can be read, and reading gives nothing.
        answer.cut = (is_whole or bool(select.select([stream.fileno()], [], [], 0)[0])) and not _peek(stream)


def _peek(stream: BufferedReader) -> bytes:
    return stream.peek(1)[:1]


def _judge(
    runner: Runner, job: Job, request: RunnerJob, work: Path, answer: _Answer, finished: Finished, *, where: str = ""
) -> DeviceRun:
    outputs, _ = open_outputs(work / "out", job.outputs, runner.device)
    failure = _find_failure(answer, finished, job, request.repeat)
    if failure and where:
        failure = f"'{where}' {_describe_step(answer, job)}: {failure}"
    run = judge_run(runner, job, answer.run, outputs, failure, request.repeat)
    trace = work / "out" / _TRACE
    if job.trace and trace.is_file():
        run = msgspec.structs.replace(run, trace=trace)
    return _add_ending(run, runner, answer.run, finished)


def _find_failure(answer: _Answer, finished: Finished, job: Job, repeat: int) -> str | None:
    report = answer.run
    # First of all: what else is wrong may be no more than the end of a program that was killed.
    if finished.timed_out:
        return f"ran out of time ({job.timeout_s:g} s)"
    # A program that died in the middle of a message is reported by how it died, not by the message that it cut off.
    if answer.wrong and (finished.succeeded or not answer.cut):
        return answer.wrong
    if report is not None and report.status == "refused":
        return describe_refusal(report)
    if not finished.succeeded:
        return f"the program {finished.ending}{last_words(finished.stderr)}"
    if report is None or report.status == "running":
        return f"the program ended before its work was done{last_words(finished.stderr)}"
    return find_shortage(answer.count, report, job, answer.sent if job.answered else job.samples.count, repeat)


def _describe_step(answer: _Answer, job: Job) -> str:
    if answer.count == job.samples.count:
        return "after the last sample"
    return f"at sample {answer.count + 1} of {job.samples.count}" if answer.count else "before the first outputs"


def _add_ending(run: DeviceRun, runner: Runner, report: RunnerResult | None, finished: Finished) -> DeviceRun:
    """Returns a run that failed with the last words of its program, and whether that was an emulator which died."""
    if run.failure is None:
        return run
    # A session that was refused is an answer, however its program ended then.
    crashed = runner.emulates and finished.crashed and (report is None or report.status != "refused")
    # The last lines that a program wrote, without what could steer a terminal.
    text = f"{finished.stdout[-MAX_LOG:]}\n{finished.stderr[-MAX_LOG:]}"
    return msgspec.structs.replace(
        run, log="\n".join(line for raw in text.splitlines() if (line := _clean_line(raw)))[-MAX_LOG:], crashed=crashed
    )


def judge_run(
    runner: Runner,
    job: Job,
    report: RunnerResult | None,
    outputs: Samples,
    failure: str | None,
    repeat: int = 1,
) -> DeviceRun:
    """Returns the run of a device from what its program says, None where that is nothing, and what came back."""
    report = report or _NOTHING
    # Programs look at the clock before they see that there is no further sample.
    stopped_early = report.status == "stopped" and outputs.count < job.samples.count
    measured = {name: getattr(report, name) for name in Measured.__struct_fields__}
    # Times beyond the outputs that are whole belong to a sample that did not come back.
    measured["latency_ms"] = report.latency_ms[: outputs.count * repeat]
    measured["elapsed_ms"] = report.elapsed_ms[: outputs.count]
    return DeviceRun(
        device=runner.device,
        evidence=runner.evidence,
        outputs=outputs,
        placement=_read_placement(report, job.model),
        placement_source=report.placement_source,
        versions={printable(key): printable(value) for key, value in list(report.versions.items())[:_MOST_VERSIONS]},
        notes=describe_stop(outputs.count, job) if stopped_early else (),
        stopped_early=stopped_early,
        failure=failure,
        **measured,
    )


def describe_stop(count: int, job: Job) -> tuple[str, ...]:
    """Returns the note of a run that stopped because its time was over."""
    return (f"stopped after {count} of {job.samples.count} samples, because {job.budget_s:g} s were over",)


def _read_placement(report: RunnerResult, model: Path) -> tuple[PlacedNode, ...]:
    # The program saw only that one provider took everything: the nodes are those of the file.
    if report.placed_whole:
        try:
            graph = skim_model(model).graph
        except ModelError:
            return ()  # a file of another format: the device cannot know that it took its nodes whole
        provider = printable(report.placed_whole)
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
        for node in report.placement
    )


def describe_refusal(report: RunnerResult) -> str:
    """Returns in one line why the program did not do its work."""
    return f"refused: {_clean_line(report.message)[:400]}"


def find_shortage(count: int, report: RunnerResult, job: Job, wanted: int, repeat: int) -> str | None:
    """Returns what is wrong with the number of samples and times that came back, None where it is right."""
    least = min(LEAST_SAMPLES, job.least_samples, wanted)
    due = range(least, wanted + 1) if report.status == "stopped" else (wanted,)
    if count in due and count * repeat == len(report.latency_ms):
        return None
    return f"{count} of {wanted} samples came back, with {len(report.latency_ms)} times"


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
