"""Runs a job in a program that reads samples and writes tensors, and checks what comes back.

The program is the runner in Python, as a child process, or another one that a command starts: here, in an emulator, or
on another machine.
"""

import contextlib
import select
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path

import msgspec
from onnx import TensorProto

from edgekit._files import digest_file
from edgekit._ort import (
    CPU_PROVIDER,
    EXACT_SUMS,
    IN_FLOAT,
    PRECISE,
    SessionSettings,
    has_integer_products,
    makes_session,
)
from edgekit._proc import ChildSetting, Finished, run_process, stream_process
from edgekit.data.samples import Samples
from edgekit.devices.device import LEAST_SAMPLES, STOPPED, Device, DeviceRun, Job, PlacedNode, refuse_run
from edgekit.devices.process import exchange
from edgekit.errors import DeviceError, ModelError, TargetError, require_known
from edgekit.machine import may_saturate
from edgekit.model.external import skim_model
from edgekit.serialize import fill

STANDALONE = Path(__file__).parents[1] / "standalone"
"""Programs that run in another process or on another machine, and import nothing of edgekit."""
ORT_RUNNER = STANDALONE / "ort_runner.py"
REPLAY_SAVED = "session.enable_saved_runtime_optimizations"
MAX_LOG = 8192
# What `find_exact_sums` found, by the digest of the model and its custom operators.
_EXACT: dict[tuple[object, ...], Mapping[str, str]] = {}
# A device may send anything, so the number and length of what goes into reports is limited.
_MAX_VERSIONS = 32


def find_exact_sums(job: Job, provider: str) -> Mapping[str, str]:
    """Returns the session config entries with which this CPU adds products of 8 bits as a phone's does.

    These are `EXACT_SUMS`, or `IN_FLOAT` where ONNX Runtime makes no session with them because nodes share a constant
    or its zero point. There are none where this CPU is exact anyway; for a target on PCs, whose CPU may saturate as
    this one does; and where a QLinearMatMul multiplies s8 by s8, which neither changes. Nor is a session of another
    provider than the CPU's made `IN_FLOAT`: ONNX Runtime would give that provider another graph than in an app.
    """
    target = job.target
    is_for_pcs = not target.is_for_phones or target.settings.get("arch", "").startswith("x64")
    if not may_saturate() or is_for_pcs or job.model.suffix != ".onnx":
        return {}
    graph = skim_model(job.model).graph
    if all(tensor.data_type != TensorProto.INT8 for tensor in graph.initializer):
        return {}
    key = (digest_file(job.model), *job.custom_ops)
    if key not in _EXACT:
        is_exact = makes_session(job.model, SessionSettings(config=dict(EXACT_SUMS), libraries=job.custom_ops))
        _EXACT[key] = EXACT_SUMS if is_exact else {}
        # What ONNX Runtime refuses as it is, it may load in float.
        as_it_is = SessionSettings(config={PRECISE: "0"}, libraries=job.custom_ops)
        if not is_exact and not has_integer_products(graph) and makes_session(job.model, as_it_is):
            _EXACT[key] = IN_FLOAT
    return {} if _EXACT[key] == IN_FLOAT and provider != CPU_PROVIDER else _EXACT[key]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program that is copied to where it runs: its files by their names there, and the start command.

    `{folder}` in the command stands for the folder of the files there. `runtime` is the name of ONNX Runtime's library
    among the files, `library` that of a plug-in provider's library. `notes` go into the report of each run.
    """

    files: Mapping[str, Path]
    argv: tuple[str, ...]
    runtime: str = ""
    library: str = ""
    notes: tuple[str, ...] = ()

    def command(self, folder: str) -> list[str]:
        """Returns the command that starts the program in a folder."""
        return [word.replace("{folder}", folder) for word in self.argv]

    def find_libraries(self, folder: str) -> dict[str, str]:
        """Returns the paths of ONNX Runtime's and the provider's library, as `RunnerJob` has them."""
        names = {"runtime": self.runtime, "library": self.library}
        return {key: name and f"{folder}/{name}" for key, name in names.items()}


def python_program(python: str, notes: tuple[str, ...] = ()) -> Program:
    """Returns the runner in Python, for the interpreter `python` in another root file system or on another machine."""
    argv = (python, f"{{folder}}/{ORT_RUNNER.name}", "--pipe")
    return Program(files={ORT_RUNNER.name: ORT_RUNNER}, argv=argv, notes=notes)


def check_options(provider: str, options: Mapping[str, str], known: Collection[str]) -> None:
    """Checks that a provider knows all options, because providers silently ignore unknown ones.

    Raises:
        TargetError: there is no such option.
    """
    for key in options:
        require_known(key, known, f"'{key}' is no option of {provider}", TargetError)


def describe_job(job: Job, *, provider: str = CPU_PROVIDER, **changes: object) -> exchange.RunnerJob:
    """Returns the job for a program that opens the model on a provider, as an app on the target would.

    The target's provider options are used only if the provider is the target's. Two session config entries are left
    out: the one that forbids the fallback to the CPU, if the provider is the CPU's, because ONNX Runtime refuses that;
    and the one that replays saved optimisations, unless the file's digest was just checked, because ONNX Runtime
    applies them without checks. `changes` replace fields of the job.
    """
    session = job.target.session
    is_own = provider == job.target.provider
    config = dict(session.config)
    if provider == CPU_PROVIDER:
        config.pop("session.disable_cpu_ep_fallback", None)
    if not job.digests_hold:
        config.pop(REPLAY_SAVED, None)
    request = fill(
        exchange.RunnerJob,
        job,
        # Absolute, because the child has its own working directory.
        model=str(job.model.resolve()),
        provider=provider,
        provider_options=session.provider_options if is_own else {},
        chain=(session.chain or ()) if is_own else (),
        session_config=config,
        samples=job.samples.count,
        # ONNX Runtime does not record the assignment of nodes for files in ORT format: it is read from the profile.
        profile=job.model.suffix == ".ort" and not job.trace,
        custom_ops=tuple(map(str, job.custom_ops)),
    )
    return msgspec.structs.replace(request, **changes)


def stand_in(job: Job, *, provider: str = CPU_PROVIDER, **changes: object) -> exchange.RunnerJob:
    """Returns the job for a program on this machine, whose CPU computes what that of a phone will."""
    request = describe_job(job, provider=provider, **changes)
    return msgspec.structs.replace(request, session_config={**request.session_config, **find_exact_sums(job, provider)})


class _Answer(msgspec.Struct, kw_only=True):
    """What has come back so far; `report` is None until a report has arrived.

    `malformed` is the error about the first malformed message. `is_truncated` says that nothing follows it, so that it
    may have been cut off when the program died. `sent` counts the samples sent to the program, `count` the outputs
    received.
    """

    sent: int = 0
    count: int = 0
    report: exchange.RunnerResult | None = None
    malformed: str = ""
    is_truncated: bool = False


def run_program(
    device: Device,
    argv: Sequence[str],
    job: Job,
    request: exchange.RunnerJob,
    work: Path,
    *,
    setting: ChildSetting | None = None,
    by_files: bool = False,
    emulates: bool = False,
) -> DeviceRun:
    """Runs a job with the program that a command starts, and returns it as a run of the device.

    `request` is the job with the paths that the program sees. Samples are streamed through pipes, so that neither side
    holds more than a few in memory. With `by_files`, all messages pass through two files instead, because a process
    that feeds pipes would compete for the cores while runs are timed. Outputs are stored in the folder `work`. After
    `job.timeout_s` the program is killed; one on another machine ends because its pipes are closed. If the program runs
    in an emulator (`emulates`), a crash may be the emulator's fault.

    Raises:
        DeviceError: the command cannot be started.
        DataError: the samples of the job cannot be read.
    """
    work.mkdir(parents=True, exist_ok=True)
    answer = _Answer()
    receive = partial(_receive, answer, job, work / "out")

    def send() -> Iterator[bytes]:
        yield msgspec.json.encode(request) + b"\n"
        for sample in job.samples:
            answer.sent += 1
            yield exchange.encode_tensors(sample)

    if by_files:
        with tempfile.TemporaryFile(dir=work) as input_file, tempfile.TemporaryFile(dir=work) as output_file:
            input_file.writelines(send())
            input_file.seek(0)
            finished = run_process(argv, timeout_s=job.timeout_s, setting=setting, stdin=input_file, stdout=output_file)
            output_file.seek(0)
            with open(output_file.fileno(), "rb", closefd=False) as stream:
                receive(stream, is_whole=True)
    else:
        finished = stream_process(argv, timeout_s=job.timeout_s, feed=send(), take=receive, setting=setting)
    failure = _find_failure(answer, finished, job)
    if failure and not by_files:
        step = f"at sample {answer.count + 1} of {job.samples.count}" if answer.count else "before the first outputs"
        step = "after the last sample" if answer.count == job.samples.count else step
        failure = f"'{device.name}' {step}: {failure}"
    outputs = exchange.open_outputs(work / "out", answer.count, job.outputs, device.name)
    run = judge_run(device, job, answer.report, outputs, failure)
    trace = work / "out" / exchange.TRACE
    if job.trace and trace.is_file():
        run = msgspec.structs.replace(run, trace=trace)
    if failure is None:
        return run
    # A refused session is a valid answer, however the program ended afterwards.
    is_refusal = answer.report is not None and answer.report.status == "refused"
    text = f"{finished.stdout[-MAX_LOG:]}\n{finished.stderr[-MAX_LOG:]}"
    log = "\n".join(line for raw in text.splitlines() if (line := _clean_line(raw)))[-MAX_LOG:]
    crashed = emulates and finished.crashed and not is_refusal
    return msgspec.structs.replace(run, log=log, crashed=crashed, timed_out=finished.timed_out)


def run_python(
    device: Device,
    job: Job,
    request: exchange.RunnerJob,
    work: Path,
    emulator: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    one_core: bool = False,
    emulates: bool = False,
) -> DeviceRun:
    """Runs a job with the runner in Python in a child process, executed by `emulator` if it is given.

    `env` is added to the child's environment. With `one_core`, all threads of the child share one core.
    """
    # -P keeps the program's own folder out of sys.path, where its files would shadow modules of the same names.
    argv = [*emulator, sys.executable, "-P", str(ORT_RUNNER), "--pipe"]
    setting = ChildSetting(cwd=work, env=env, one_core=one_core)
    by_files = job.on_outputs is None
    return run_program(device, argv, job, request, work, setting=setting, by_files=by_files, emulates=emulates)


def _receive(answer: _Answer, job: Job, folder: Path, stream: BufferedReader, *, is_whole: bool = False) -> None:
    """Reads messages into the answer until the last line; `is_whole` says that the stream is a complete file."""
    try:
        while first := _peek(stream):
            # A message begins with the list of its tensors, a report with an object: one byte tells them apart.
            if first == b"{":
                line = stream.readline(exchange.MAX_RESULT_BYTES + 1)
                is_whole = line.endswith(b"\n") or len(line) > exchange.MAX_RESULT_BYTES
                answer.report = exchange.decode_run(line if is_whole else b"")
                if answer.report.status == "running":
                    continue
                if job.trace and answer.report.trace_bytes:
                    exchange.receive_trace(stream, folder / exchange.TRACE, answer.report.trace_bytes)
                if _peek(stream):
                    answer.malformed = "it wrote more after its last line"
                return
            if answer.count == _count_wanted(answer, job):
                answer.malformed = "it gave more outputs than it got samples"
                return
            file = folder / exchange.tensors_name(answer.count)
            exchange.receive_tensors(stream, file, job.outputs)
            answer.count += 1
            if job.on_outputs is not None:
                job.on_outputs(exchange.read_tensors(file, job.outputs))
    except DeviceError as error:
        answer.malformed = error.message
        # This tests for the end without waiting: at the end of a pipe, `select` reports it as readable.
        answer.is_truncated = (is_whole or bool(select.select([stream.fileno()], [], [], 0)[0])) and not _peek(stream)


def _peek(stream: BufferedReader) -> bytes:
    return stream.peek(1)[:1]


def _count_wanted(answer: _Answer, job: Job) -> int:
    """Returns how many outputs to expect: if samples depend on outputs, as many as samples were sent so far."""
    return answer.sent if job.on_outputs else job.samples.count


def _find_failure(answer: _Answer, finished: Finished, job: Job) -> str | None:
    report = answer.report
    # Checked first, because anything else that is wrong may just follow from the program being killed.
    if finished.timed_out:
        return f"ran out of time ({job.timeout_s:g} s)"
    # If the program died in the middle of a message, the way it died is reported, not the truncated message.
    if answer.malformed and (finished.succeeded or not answer.is_truncated):
        return answer.malformed
    if report is not None and report.status == "refused":
        return f"refused: {_clean_line(report.message)[:400]}"
    if not finished.succeeded:
        return f"the program {finished.ending}{quote_last_line(finished.stderr)}"
    if report is None or report.status == "running":
        return f"the program ended before its work was done{quote_last_line(finished.stderr)}"
    expected, times = _count_wanted(answer, job), len(report.latency_ms)
    minimum = min(LEAST_SAMPLES, job.least_samples, expected) if report.status == "stopped" else expected
    if minimum <= answer.count <= expected and answer.count * job.repeat == times:
        return None
    return f"{answer.count} of {expected} samples came back, with {times} times"


def judge_run(
    device: Device, job: Job, report: exchange.RunnerResult | None, outputs: Samples, failure: str | None
) -> DeviceRun:
    """Returns the run of a device from its program's report (None: there is none) and the outputs that came back."""
    if report is None:
        return msgspec.structs.replace(refuse_run(device, ""), outputs=outputs, failure=failure)
    # Programs check the clock before they know that there is no further sample.
    stopped_early = report.status == "stopped" and outputs.count < job.samples.count
    note = f"{STOPPED} {outputs.count} of {job.samples.count} samples, because {job.budget_s:g} s were over"
    placed = [
        (printable(it.name, MAX_LOG), *map(printable, (it.op, it.domain, it.provider))) for it in report.placement
    ]
    # The program knows only that one provider took everything, so the nodes are those of the file.
    if report.placed_whole:
        placed, whole = [], printable(report.placed_whole)
        with contextlib.suppress(ModelError):  # not an ONNX file: the nodes are not known
            placed = [(node.name, node.op_type, node.domain, whole) for node in skim_model(job.model).graph.node]
    return fill(
        DeviceRun,
        report,
        device=device.name,
        evidence=device.evidence,
        outputs=outputs,
        # Further times belong to a sample whose outputs did not come back.
        latency_ms=report.latency_ms[: outputs.count * job.repeat],
        elapsed_ms=report.elapsed_ms[: outputs.count],
        placement=tuple(PlacedNode(name=name, op=op, domain=domain, provider=by) for name, op, domain, by in placed),
        versions={printable(key): printable(value) for key, value in list(report.versions.items())[:_MAX_VERSIONS]},
        notes=(note,) if stopped_early else (),
        stopped_early=stopped_early,
        failure=failure,
    )


def quote_last_line(stderr: str) -> str:
    """Returns ": " and the last line that a program wrote, for a message; "" if it wrote none.

    A line that begins with # tells of a library's settings as it is loaded, as Hexagon's libnative writes it, and not
    why a program ended.
    """
    line = last_line("\n".join(line for line in stderr.splitlines() if not line.startswith("#")))
    return f": {line[-300:]}" if line else ""


def last_line(text: str) -> str:
    """Returns the last line that is not blank, without control characters for terminals."""
    return next((line for raw in reversed(text.splitlines()) if (line := _clean_line(raw))), "")


def printable(text: str, limit: int = 200) -> str:
    """Returns the beginning of a text from a device, with question marks in place of unprintable characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def _clean_line(text: str) -> str:
    """Returns the text as one line without unprintable characters, which could control a terminal."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
