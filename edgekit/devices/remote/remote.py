"""Runs a job on another machine: the program and the model go there once, then samples stream.

An address (`adb:SERIAL`, `ssh:USER@HOST`) may hold nothing that a command line could take for an option or a command.
"""

import contextlib
import re
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

import msgspec

from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.runner import LIBRARY, PROGRAM, NativeRunner, find_missing_runner, find_runner
from edgekit.devices.process.link import list_model_files
from edgekit.devices.process.run import Runner, describe_job, refuse_run, require_device, run_over
from edgekit.devices.remote.store import SLOWEST_BYTES_PER_S, STEP_S, ShellLink
from edgekit.errors import DeviceError, EdgekitError, UsageError
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


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine says of itself; `abi` names the kind of its runner, and `base` is edgekit's folder there.

    `versions` are for the report, "" for what it does not tell. `abi` is "" where there is no runner for that system.
    `python` is a Python there that has onnxruntime, "" for none.
    """

    abi: str
    base: str
    versions: Mapping[str, str]
    python: str = ""


class RemoteDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A phone, board or computer behind a link: what a user may say of it, and how a job is run there.

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
    def name(self) -> str:
        """The device as the user names it."""
        return self.link().name

    @property
    def evidence(self) -> Evidence:
        """How good its word is: another provider than the target's shows no more than the architecture."""
        return Evidence.SAME_ARCH if self.provider else Evidence.DEVICE

    def link(self) -> ShellLink:
        """Returns a link to the machine, for one run."""
        raise NotImplementedError

    def look_at(self, link: ShellLink) -> Machine:
        """Returns what the machine is.

        Raises:
            DeviceError: it does not answer, or nothing can run there.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def connected(self) -> Generator[ShellLink]:
        """Yields a link for several steps."""
        yield self.link()

    def find_missing(self) -> Missing | None:
        """Returns why this machine cannot be used, and what to do about it."""
        link = self.link()
        missing = link.find_missing()
        if missing is not None:
            return missing
        try:
            return self.find_lacking(self.look_at(link))
        except EdgekitError as error:
            return Missing(reason=error.message.removeprefix(f"'{self.name}' "), command=error.hint)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job on the machine.

        Raises:
            DeviceError: the machine is not there, or has nothing to run a model with.
            UsageError: a runner was given without its library.
        """
        with self.connected() as link:
            require_device(self.name, link.find_missing())
            machine = self.look_at(link)
            require_device(self.name, self.find_lacking(machine))
            at_home = msgspec.structs.replace(link, base=machine.base)
            run = self._run_program(at_home, self.choose_program(machine), job, work)
        said = {key: value for key, value in machine.versions.items() if value}
        return msgspec.structs.replace(run, versions={**run.versions, **said})

    def clean(self) -> None:
        """Removes everything that edgekit stored on the machine.

        Raises:
            DeviceError: the machine does not answer.
        """
        link = self.link()
        (link if link.base else msgspec.structs.replace(link, base=self.look_at(link).base)).clean()

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

    def find_lacking(self, machine: Machine) -> Missing | None:
        """Returns what a machine lacks to run models."""
        return None if self.find_runner(machine.abi) else find_missing_runner(machine.abi)

    def choose_program(self, machine: Machine) -> Program:
        """Returns what runs a model there.

        Raises:
            DeviceError: nothing does.
        """
        native = self.find_runner(machine.abi)
        if native is None:
            raise DeviceError(f"'{self.name}' has no runner for {machine.abi}", hint="edgekit runner build")
        return native_program(native, self.libraries)

    def _run_program(self, link: ShellLink, program: Program, job: Job, work: Path) -> DeviceRun:
        runner = Runner(device=link.name, evidence=self.evidence)
        try:
            # Program and model are two sets: another model does not send the library again.
            folder = link.push(program.files)
            model = f"{link.push(list_model_files(job.model))}/{job.model.name}"
        except EdgekitError as error:
            return refuse_run(runner, error.message)
        request = msgspec.structs.replace(
            describe_job(job, provider=self.provider or job.target.provider),
            model=model,
            threads=self.threads or job.threads,
            runtime=program.runtime and f"{folder}/{program.runtime}",
            library=program.library and f"{folder}/{program.library}",
        )
        argv = [word.replace("{folder}", folder) for word in program.argv]
        try:
            run = run_over(link, argv, job, request, work, runner=runner)
        # Ctrl-C too: a program left running would keep the phone busy and warm.
        except BaseException:
            link.stop()
            raise
        if run.failure is not None:
            link.stop()
        return msgspec.structs.replace(run, notes=(*run.notes, *program.notes))


@contextlib.contextmanager
def linked_names(files: Mapping[str, Path]) -> Generator[tuple[str, ...]]:
    """Yields paths with plain names that lead to files, so that no client has to understand names of the user."""
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        for name, path in files.items():
            Path(folder, name).symlink_to(path.resolve())
        yield tuple(f"{folder}/{name}" for name in files)
