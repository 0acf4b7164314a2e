"""Runs a job on a program that reads samples from its stdin and writes tensors to its stdout.

The program lies behind a link to another machine, or is the onnxruntime of this Python in a child process.
"""

import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path

import msgspec

from edgekit._proc import ChildSetting, Finished, run_process, stream_process
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.process.child import (
    ORT_RUNNER,
    Runner,
    add_ending,
    collect_run,
    describe_refusal,
    find_shortage,
    find_trace,
    judge_run,
    last_words,
)
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
    write_job,
)
from edgekit.devices.process.link import Link, LocalLink
from edgekit.errors import DeviceError


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
    far: RunnerJob,
    work: Path,
    *,
    runner: Runner,
    setting: ChildSetting | None = None,
) -> DeviceRun:
    """Runs a job with the command `program` of the machine that a link leads to.

    `far` is the job with paths of that machine. Samples are streamed: neither side holds more than a few in memory.
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
        feed=_messages(answer, far, job),
        take=partial(_receive, answer, job, work / "out"),
        setting=setting,
    )
    outputs, _ = open_outputs(work / "out", job.outputs, runner.device)
    reason = _find_failure(answer, finished, job, far.repeat)
    failure = reason and f"'{link.name}' {_describe_step(answer, job)}: {reason}"
    run = judge_run(runner, job, answer.run, outputs, failure, far.repeat, trace=find_trace(work / "out" / TRACE, job))
    return add_ending(run, runner, answer.run, finished)


def _messages(answer: _Answer, far: RunnerJob, job: Job) -> Iterator[bytes]:
    yield msgspec.json.encode(far) + b"\n"
    for sample in job.samples:
        answer.sent += 1
        yield encode_tensors(sample)


def _receive(answer: _Answer, job: Job, folder: Path, stream: BufferedReader) -> None:
    """Reads messages until the last line; what is wrong stands in the answer."""
    try:
        while first := _peek(stream):
            # A message begins with the list of its tensors, the last line with an object: one byte tells them apart.
            if first == b"{":
                line = stream.readline(MAX_RESULT_BYTES + 1)
                answer.run = decode_run(line if line.endswith(b"\n") or len(line) > MAX_RESULT_BYTES else b"")
                if job.trace and answer.run.trace_bytes:
                    receive_trace(stream, folder / TRACE, answer.run.trace_bytes)
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
        answer.cut = bool(select.select([stream.fileno()], [], [], 0)[0]) and not _peek(stream)


def _peek(stream: BufferedReader) -> bytes:
    return stream.peek(1)[:1]


def _find_failure(answer: _Answer, finished: Finished, job: Job, repeat: int) -> str | None:
    far = answer.run
    # First of all: what else is wrong may be no more than the end of a program that was killed.
    if finished.timed_out:
        return f"ran out of time ({job.timeout_s:g} s)"
    # A program that died in the middle of a message is reported by how it died, not by the message that it cut off.
    if answer.wrong and (finished.succeeded or not answer.cut):
        return answer.wrong
    if far is not None and far.status == "refused":
        return describe_refusal(far)
    if not finished.succeeded:
        return f"the program {finished.ending}{last_words(finished.stderr)}"
    if far is None or far.status == "running":
        return f"the program ended before its work was done{last_words(finished.stderr)}"
    return find_shortage(answer.count, far, job, answer.sent if job.answered else job.samples.count, repeat)


def _describe_step(answer: _Answer, job: Job) -> str:
    if answer.count == job.samples.count:
        return "after the last sample"
    return f"at sample {answer.count + 1} of {job.samples.count}" if answer.count else "before the first outputs"


def run_python(
    runner: Runner,
    job: Job,
    far: RunnerJob,
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
    argv = [*emulator, sys.executable, "-P", str(ORT_RUNNER)]
    if job.answered is not None:
        # Samples that are not known yet cannot lie in a folder.
        link = LocalLink(name=runner.device, folder=work, inside=str(work))
        argv.append("--pipe")
        setting = ChildSetting(cwd=work, env=env, one_core=one_core)
        return run_over(link, argv, job, far, work, runner=runner, setting=setting)
    write_job(work, far, job.samples)
    # No pipes: this process would compete for the cores while runs are timed.
    finished = run_process([*argv, str(work)], timeout_s=job.timeout_s, cwd=work, env=env, one_core=one_core)
    return collect_run(runner, job, finished, work)
