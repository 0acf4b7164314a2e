"""Runs a job on another machine: the program and the model go there once, then samples stream.

An address (`adb:SERIAL`, `ssh:USER@HOST`) may hold nothing that a command line could take for an option or a command.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.local.runner import LIBRARY, PROGRAM, NativeRunner, find_runner
from edgekit.devices.process.child import Runner, describe_job, refuse_run
from edgekit.devices.process.link import Link, list_model_files
from edgekit.devices.process.pipe import run_over
from edgekit.errors import EdgekitError, UsageError
from edgekit.evidence import Evidence

# No "-" in front, which would make an option of it, and nothing that means something to a shell.
_SERIAL = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,126}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_USER = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}@"
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]{1,43}\]?)"
_SSH = re.compile(f"(?:{_USER})?{_HOST}")


def is_serial(text: str) -> bool:
    """Returns True for a serial as `adb devices` prints it: a number, `emulator-5554`, or HOST:PORT."""
    return _SERIAL.fullmatch(text) is not None


def check_serial(serial: str) -> str:
    """Returns a serial.

    Raises:
        UsageError: it could be something else on a command line.
    """
    if not is_serial(serial):
        raise UsageError(f"{_quote(serial)} is no serial of a device", hint="adb devices lists them")
    return serial


def check_host(host: str) -> str:
    """Returns USER@HOST, HOST, or a name of the user's ssh configuration.

    Raises:
        UsageError: it could be something else on a command line.
    """
    if not _SSH.fullmatch(host):
        raise UsageError(f"{_quote(host)} is no USER@HOST", hint="give ports and options in ~/.ssh/config under a name")
    return host


def _quote(text: str) -> str:
    return ascii(text[:80])


STEP_S = 30.0
"""How long one step of a conversation with a device may take, but for what its bytes need."""
# adb's client waits for ever for a daemon that stops answering (measured): each step has a limit of its own, which
# grows with its bytes.
SLOWEST_BYTES_PER_S = 256 << 10
"""A link that moves fewer is taken for dead: USB 2 and slow Wi-Fi move ten times as many."""


class StoppableLink(Link, Protocol):
    """A link that can end the program it started."""

    def stop(self) -> None:
        """Ends the program, if it still runs, and removes what it left."""
        ...


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What runs a model over there: files to push, and the command; `{folder}` in it is where they lie then.

    `runtime` and `library` are files of it: ONNX Runtime's library, and that of a plug-in provider. `notes` go into
    the report of each run.
    """

    files: Mapping[str, Path]
    argv: tuple[str, ...]
    runtime: str = ""
    library: str = ""
    notes: tuple[str, ...] = ()


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """How a session is opened over there: on a provider, "" for the target's own, with `threads`, 0 for its choice."""

    provider: str = ""
    threads: int = 0

    @property
    def evidence(self) -> Evidence:
        """How good a run's word is: another provider than the target's shows no more than the architecture."""
        return Evidence.SAME_ARCH if self.provider else Evidence.DEVICE


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may say of a device behind any link.

    `runner` and `library` are edgekit's runner and ONNX Runtime's library for it; without them those are used that
    `edgekit runner build` made for its ABI. `libraries` are a plug-in provider's library and what that one loads.
    `provider` is "" for the target's own; with another, a run shows no more than the CPU architecture.
    """

    runner: Path | None = None
    library: Path | None = None
    libraries: tuple[Path, ...] = ()
    provider: str = ""
    threads: int = 0
    step_timeout_s: float = STEP_S
    slowest_bytes_per_s: int = SLOWEST_BYTES_PER_S

    @property
    def evidence(self) -> Evidence:
        """How good its word is."""
        return self.session.evidence

    @property
    def session(self) -> Session:
        """How a session is opened there."""
        return Session(provider=self.provider, threads=self.threads)

    def find_runner(self, abi: str) -> NativeRunner | None:
        """Returns the runner that the user gave, or the one that was built for a kind of machine, or None.

        Raises:
            UsageError: one of the two files is given without the other.
        """
        if self.runner is not None and self.library is not None:
            return NativeRunner(abi=abi, program=self.runner, library=self.library)
        if self.runner is not None or self.library is not None:
            raise UsageError("a runner and a library are given together", hint="give both, or none")
        return find_runner(abi)


def native_program(native: NativeRunner, libraries: tuple[Path, ...] = ()) -> Program:
    """Returns edgekit's own runner with ONNX Runtime's library, and a plug-in provider's with what that one loads."""
    # The second is where Qualcomm's FastRPC looks for the half of the library that runs on the DSP.
    paths = ("env", "LD_LIBRARY_PATH={folder}", "ADSP_LIBRARY_PATH={folder}") if libraries else ()
    return Program(
        files={**native.files, **{path.name: path for path in libraries}},
        argv=(*paths, f"{{folder}}/{PROGRAM}", "--pipe"),
        runtime=LIBRARY,
        library=libraries[0].name if libraries else "",
    )


def run_remote(link: StoppableLink, program: Program, job: Job, work: Path, session: Session) -> DeviceRun:
    """Runs every sample of a job on the machine of a link; whatever goes wrong on the way is the run's failure."""
    runner = Runner(device=link.name, evidence=session.evidence)
    try:
        # Program and model are two sets: another model does not send the library again.
        folder = link.push(program.files)
        model = f"{link.push(list_model_files(job.model))}/{job.model.name}"
    except EdgekitError as error:
        return refuse_run(runner, error.message)
    far = msgspec.structs.replace(
        describe_job(job, provider=session.provider or job.target.provider),
        model=model,
        threads=session.threads or job.threads,
        runtime=program.runtime and f"{folder}/{program.runtime}",
        library=program.library and f"{folder}/{program.library}",
    )
    argv = [word.replace("{folder}", folder) for word in program.argv]
    try:
        run = run_over(link, argv, job, far, work, runner=runner)
    # Ctrl-C too: a program left running would keep the phone busy and warm.
    except BaseException:
        link.stop()
        raise
    if run.failure is not None:
        link.stop()
    return msgspec.structs.replace(run, notes=(*run.notes, *program.notes))
