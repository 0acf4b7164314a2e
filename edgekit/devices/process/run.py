"""Runs a job in a program that reads samples and writes tensors, and judges what comes back.

The program is ONNX Runtime in a child of this Python, or another that a command starts: here, in an emulator, or on
another machine.
"""

import select
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit._proc import ChildSetting, Finished, run_process, stream_process
from edgekit.data.samples import Samples
from edgekit.devices.device import LEAST_SAMPLES, Device, DeviceRun, Job, Measured, Missing, PlacedNode, RunOptions
from edgekit.devices.process.exchange import (
    MAX_RESULT_BYTES,
    TRACE,
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
from edgekit.errors import DeviceError, ModelError, TargetError, suggest_name
from edgekit.model.external import skim_model

STANDALONE = Path(__file__).parents[1] / "standalone"
"""Programs that run in another process or on another machine, and import nothing of edgekit."""
ORT_RUNNER = STANDALONE / "ort_runner.py"
ORT_QUEUE = STANDALONE / "ort_queue.py"
"""What the runner in Python opens beside itself for a queue of requests."""
REPLAY_SAVED = "session.enable_saved_runtime_optimizations"
MAX_LOG = 8192
# A device may say what it likes: what goes into reports is bounded in number and length.
_MOST_VERSIONS = 32

# The report of a program that wrote none: it was started, and no more is known.
_NO_REPORT = RunnerResult(
    status="running",
    message="",
    load_ms=0.0,
    latency_ms=(),
    peak_rss_bytes=0,
    versions={},
    placement=(),
    placement_source="session",
)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program that is copied to where it runs: its files by their names there, and the command that starts it.

    `{folder}` in the command stands for the folder of the files there. `runtime` and `library` name the files that are
    ONNX Runtime's library and that of a plug-in provider. `notes` go into the report of each run.
    """

    files: Mapping[str, Path]
    argv: tuple[str, ...]
    runtime: str = ""
    library: str = ""
    notes: tuple[str, ...] = ()

    def command(self, folder: str) -> list[str]:
        """Returns the command that starts the program in a folder."""
        return [word.replace("{folder}", folder) for word in self.argv]

    def fill_job(self, request: RunnerJob, folder: str) -> RunnerJob:
        """Returns a job with the paths of the program's libraries in a folder."""
        return msgspec.structs.replace(
            request,
            runtime=self.runtime and f"{folder}/{self.runtime}",
            library=self.library and f"{folder}/{self.library}",
        )


def python_program(python: str, notes: tuple[str, ...] = ()) -> Program:
    """Returns the runner in Python, for the interpreter `python` of another root or machine."""
    return Program(
        files={path.name: path for path in (ORT_RUNNER, ORT_QUEUE)},
        argv=(python, f"{{folder}}/{ORT_RUNNER.name}", "--pipe"),
        notes=notes,
    )


def require_device(name: str, missing: Missing | None) -> None:
    """Refuses a device that lacks something.

    Raises:
        DeviceError: the device cannot run on this machine.
    """
    if missing is not None:
        hint = missing.command or "use another device: edgekit devices list"
        raise DeviceError(f"'{name}' cannot run here: {missing.reason}", hint=hint)


def check_options(provider: str, options: Mapping[str, str], known: Collection[str]) -> None:
    """Refuses an option that a provider does not know: providers ignore such words without complaint.

    Raises:
        TargetError: there is no such option.
    """
    for key in options:
        if key not in known:
            raise TargetError(f"'{key}' is no option of {provider}", hint=suggest_name(key, known))


def describe_job(job: Job, *, provider: str = CPU_PROVIDER) -> RunnerJob:
    """Returns the job for the program that opens the model on a provider as an app on the target would.

    The options are the target's where the provider is. Two entries of the session are left out: the one that forbids
    the fallback to the CPU, which ONNX Runtime refuses where the CPU provider is the only one; and the one that replays
    saved optimisations, unless the file's digest was just checked, because they are applied as the file states them.
    """
    session = job.target.session
    is_own = provider == job.target.provider
    config = dict(session.config)
    if provider == CPU_PROVIDER:
        config.pop("session.disable_cpu_ep_fallback", None)
    if not job.digests_hold:
        config.pop(REPLAY_SAVED, None)
    return RunnerJob(
        # Absolute, because the child works in a folder of its own.
        model=str(job.model.resolve()),
        provider=provider,
        provider_options=session.provider_options if is_own else {},
        chain=(session.chain or ()) if is_own else (),
        session_config=config,
        samples=job.samples.count,
        # A session of a file in ORT format does not record its assignments: there the profiler names each provider.
        profile=job.model.suffix == ".ort" and not job.trace,
        custom_ops=tuple(map(str, job.custom_ops)),
        **{name: getattr(job, name) for name in RunOptions.__struct_fields__},
    )


def refuse_run(device: Device, reason: str) -> DeviceRun:
    """Returns the run of a job that could not be started on a device."""
    return DeviceRun(
        device=device.name,
        evidence=device.evidence,
        outputs=Samples(source=device.name, count=0, read=lambda: iter(())),
        placement=(),
        placement_source="predicted",
        load_ms=0.0,
        latency_ms=(),
        peak_rss_bytes=0,
        versions={},
        failure=reason,
    )


class _Answer(msgspec.Struct, kw_only=True):
    """What has come back so far; `report` stays None until the last line is there.

    `wrong` says what is malformed, and `is_cut` that nothing follows it: then it may be no more than the end of a
    program that died. `sent` counts the samples that the program was given, `count` the outputs that it gave.
    """

    sent: int = 0
    count: int = 0
    report: RunnerResult | None = None
    wrong: str = ""
    is_cut: bool = False


def run_program(
    device: Device,
    argv: Sequence[str],
    job: Job,
    request: RunnerJob,
    work: Path,
    *,
    setting: ChildSetting | None = None,
    by_files: bool = False,
    emulates: bool = False,
) -> DeviceRun:
    """Runs a job with the program that a command starts, and returns it as a run of the device.

    `request` is the job with the paths that the program sees. Samples are streamed through pipes, so that neither side
    holds more than a few in memory; with `by_files` all messages pass through two files, because a process that feeds
    pipes competes for the cores while runs are timed. Outputs are kept in the folder `work`. When `job.timeout_s` is
    over the program ends, also one on another machine, whose pipes are closed. A program that `emulates` may die by a
    fault of the emulator.

    Raises:
        DeviceError: the command cannot be started.
        DataError: the samples of the job cannot be read.
    """
    answer = _Answer()
    receive = partial(_receive, answer, job, work / "out")
    messages = _list_messages(answer, request, job)
    if by_files:
        with tempfile.TemporaryFile(dir=work) as given, tempfile.TemporaryFile(dir=work) as said:
            given.writelines(messages)
            given.seek(0)
            finished = run_process(argv, timeout_s=job.timeout_s, setting=setting, stdin=given, stdout=said)
            said.seek(0)
            with open(said.fileno(), "rb", closefd=False) as stream:
                receive(stream, is_whole=True)
    else:
        finished = stream_process(argv, timeout_s=job.timeout_s, feed=messages, take=receive, setting=setting)
    failure = _find_failure(answer, finished, job)
    if failure and not by_files:
        failure = f"'{device.name}' {_describe_step(answer, job)}: {failure}"
    outputs, _ = open_outputs(work / "out", job.outputs, device.name)
    run = judge_run(device, job, answer.report, outputs, failure)
    trace = work / "out" / TRACE
    if job.trace and trace.is_file():
        run = msgspec.structs.replace(run, trace=trace)
    if failure is None:
        return run
    # A session that was refused is an answer, however its program ended then.
    is_refusal = answer.report is not None and answer.report.status == "refused"
    return msgspec.structs.replace(
        run, log=_clean_log(finished), crashed=emulates and finished.crashed and not is_refusal
    )


def run_python(
    device: Device,
    job: Job,
    request: RunnerJob,
    work: Path,
    emulator: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    one_core: bool = False,
    emulates: bool = False,
) -> DeviceRun:
    """Runs a job with the runner in Python in a child, which `emulator` executes if it is given.

    `env` is added to the child's environment. With `one_core` all of the child's threads share a core.
    """
    # -P keeps the program's own folder out of sys.path: its neighbours would stand in for modules of the same names.
    argv = [*emulator, sys.executable, "-P", str(ORT_RUNNER), "--pipe"]
    setting = ChildSetting(cwd=work, env=env, one_core=one_core)
    by_files = job.answered is None
    return run_program(device, argv, job, request, work, setting=setting, by_files=by_files, emulates=emulates)


def _list_messages(answer: _Answer, request: RunnerJob, job: Job) -> Iterator[bytes]:
    yield msgspec.json.encode(request) + b"\n"
    for sample in job.samples:
        answer.sent += 1
        yield encode_tensors(sample)


def _receive(answer: _Answer, job: Job, folder: Path, stream: BufferedReader, *, is_whole: bool = False) -> None:
    """Reads messages until the last line, into the answer; with `is_whole` no more can come than is there."""
    try:
        while first := _peek(stream):
            # A message begins with the list of its tensors, a report with an object: one byte tells them apart.
            if first == b"{":
                line = stream.readline(MAX_RESULT_BYTES + 1)
                answer.report = decode_run(line if line.endswith(b"\n") or len(line) > MAX_RESULT_BYTES else b"")
                if answer.report.status == "running":
                    continue
                if job.trace and answer.report.trace_bytes:
                    receive_trace(stream, folder / TRACE, answer.report.trace_bytes)
                if _peek(stream):
                    answer.wrong = "it wrote more after its last line"
                return
            if answer.count == _count_wanted(answer, job):
                answer.wrong = "it gave more outputs than it got samples"
                return
            file = folder / tensors_name(answer.count)
            receive_tensors(stream, file, job.outputs)
            answer.count += 1
            if job.answered is not None:
                job.answered(read_tensors(file, job.outputs))
    except DeviceError as error:
        answer.wrong = error.message
        # Whether it is the end is known without waiting: at the end of a pipe `select` says that it can be read.
        answer.is_cut = (is_whole or bool(select.select([stream.fileno()], [], [], 0)[0])) and not _peek(stream)


def _peek(stream: BufferedReader) -> bytes:
    return stream.peek(1)[:1]


def _count_wanted(answer: _Answer, job: Job) -> int:
    """Returns how many outputs must come: where samples follow from outputs, as many as were sent so far."""
    return answer.sent if job.answered else job.samples.count


def _find_failure(answer: _Answer, finished: Finished, job: Job) -> str | None:
    report = answer.report
    # First of all: what else is wrong may be no more than the end of a program that was killed.
    if finished.timed_out:
        return f"ran out of time ({job.timeout_s:g} s)"
    # A program that died in the middle of a message is reported by how it died, not by the message that it cut off.
    if answer.wrong and (finished.succeeded or not answer.is_cut):
        return answer.wrong
    if report is not None and report.status == "refused":
        return f"refused: {_clean_line(report.message)[:400]}"
    if not finished.succeeded:
        return f"the program {finished.ending}{last_words(finished.stderr)}"
    if report is None or report.status == "running":
        return f"the program ended before its work was done{last_words(finished.stderr)}"
    return _find_shortage(answer, report, job)


def _find_shortage(answer: _Answer, report: RunnerResult, job: Job) -> str | None:
    wanted, times = _count_wanted(answer, job), len(report.latency_ms)
    least = min(LEAST_SAMPLES, job.least_samples, wanted) if report.status == "stopped" else wanted
    if least <= answer.count <= wanted and answer.count * job.repeat == times:
        return None
    return f"{answer.count} of {wanted} samples came back, with {times} times"


def _describe_step(answer: _Answer, job: Job) -> str:
    if answer.count == job.samples.count:
        return "after the last sample"
    return f"at sample {answer.count + 1} of {job.samples.count}" if answer.count else "before the first outputs"


def judge_run(
    device: Device, job: Job, report: RunnerResult | None, outputs: Samples, failure: str | None
) -> DeviceRun:
    """Returns the run of a device from what its program reports, None where that is nothing, and what came back."""
    report = report or _NO_REPORT
    # Programs look at the clock before they see that there is no further sample.
    stopped_early = report.status == "stopped" and outputs.count < job.samples.count
    measured = {name: getattr(report, name) for name in Measured.__struct_fields__}
    # Times beyond the outputs that are whole belong to a sample that did not come back.
    measured["latency_ms"] = report.latency_ms[: outputs.count * job.repeat]
    measured["elapsed_ms"] = report.elapsed_ms[: outputs.count]
    return DeviceRun(
        device=device.name,
        evidence=device.evidence,
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
            nodes = skim_model(model).graph.node
        except ModelError:
            return ()  # a file of another format: the device cannot know that it took its nodes whole
        whole = printable(report.placed_whole)
        return tuple(PlacedNode(name=node.name, op=node.op_type, domain=node.domain, provider=whole) for node in nodes)
    return tuple(
        PlacedNode(
            name=printable(node.name, MAX_LOG),
            op=printable(node.op),
            domain=printable(node.domain),
            provider=printable(node.provider),
        )
        for node in report.placement
    )


def last_words(stderr: str) -> str:
    """Returns the last line that a program wrote, after a colon; empty where it wrote none."""
    line = last_line(stderr)
    return f": {line[-300:]}" if line else ""


def last_line(text: str) -> str:
    """Returns the last line that says something, without what could steer a terminal."""
    return next((line for raw in reversed(text.splitlines()) if (line := _clean_line(raw))), "")


def printable(text: str, most: int = 200) -> str:
    """Returns the beginning of what a device said, with a question mark for what could steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def _clean_log(finished: Finished) -> str:
    text = f"{finished.stdout[-MAX_LOG:]}\n{finished.stderr[-MAX_LOG:]}"
    return "\n".join(line for raw in text.splitlines() if (line := _clean_line(raw)))[-MAX_LOG:]


def _clean_line(text: str) -> str:
    """Returns one line without what could steer a terminal."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
