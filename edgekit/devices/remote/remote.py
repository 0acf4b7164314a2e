"""Runs a job on another machine: the program and the model are sent once, then samples are streamed.

An address (`adb:SERIAL`, `ssh:USER@HOST`) must not contain anything that a command line could interpret as an option or
a command.
"""

import contextlib
import re
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Self

import msgspec

from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.runner import NativeRunner, find_missing_runner, find_runner, require_runner
from edgekit.devices.process.files import list_model_files
from edgekit.devices.process.run import Program, describe_job, refuse_run, require_device, run_program
from edgekit.devices.remote.store import Shell, own_name, push_set, remove_folder, wrap_program
from edgekit.errors import EdgekitError, UsageError
from edgekit.evidence import Evidence

# No "-" in front, because that would be an option, and no characters that are special in a shell.
_SERIAL = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,126}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_USER = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}@"
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]{1,43}\]?)"
_SSH = re.compile(f"(?:{_USER})?{_HOST}")


_ADDRESSES = {
    "adb": (_SERIAL, "is no serial of a device", "adb devices lists them"),
    "ssh": (_SSH, "is no USER@HOST", "give ports and options in ~/.ssh/config under a name"),
}


def is_serial(text: str) -> bool:
    """Returns True for a serial as `adb devices` prints it: a number, `emulator-5554`, or HOST:PORT."""
    return _SERIAL.fullmatch(text) is not None


def check_address(kind: str, address: str) -> str:
    """Returns a serial (`adb`), or USER@HOST, HOST or a name of the ssh configuration (`ssh`), unchanged.

    Raises:
        UsageError: it could be something else on a command line.
    """
    pattern, problem, hint = _ADDRESSES[kind]
    if not pattern.fullmatch(address):
        raise UsageError(f"{address[:80]!a} {problem}", hint=hint)
    return address


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine reports about itself; `abi` names the runner for it, and `base` is edgekit's folder there.

    `versions` are for the report, "" for unknown ones. `abi` is "" if edgekit has no runner for that system. `python`
    is a Python there that has onnxruntime, "" for none.
    """

    abi: str
    base: str
    versions: Mapping[str, str]
    python: str = ""


class RemoteDevice(Shell, frozen=True, kw_only=True):
    """A phone, board or computer behind a link: the user's settings for it, and how a job is run there.

    `runner` and `library` are edgekit's runner and ONNX Runtime's library for it; by default, those that `edgekit
    runner build` made for its ABI. `libraries` are a plug-in provider's library and the libraries that it loads.
    `provider` is "" for the target's own; a run with another one proves no more than one on the same CPU architecture.
    """

    runner: Path | None = None
    library: Path | None = None
    libraries: tuple[Path, ...] = ()
    provider: str = ""
    threads: int = 0

    @property
    def evidence(self) -> Evidence:
        """How much a run on it proves: with another provider than the target's, no more than the CPU architecture."""
        return Evidence.SAME_ARCH if self.provider else Evidence.DEVICE

    def find_link_fault(self) -> Missing | None:
        """Returns why no script can be run there, as far as this machine can tell, and what to do about it."""
        raise NotImplementedError

    def look_at(self) -> Machine:
        """Returns a description of the machine.

        Raises:
            DeviceError: it does not answer, or nothing can run there.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def connected(self) -> Generator[Self]:
        """Yields the device, with a connection that several steps share if the device supports that."""
        yield self

    def find_missing(self) -> Missing | None:
        """Returns why this machine cannot be used, and what to do about it."""
        if fault := self.find_link_fault():
            return fault
        try:
            return self.find_lacking(self.look_at())
        except EdgekitError as error:
            return Missing(reason=error.message.removeprefix(f"'{self.name}' "), command=error.hint)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job on the machine.

        Raises:
            DeviceError: the machine is not there, or has nothing to run a model with.
            UsageError: a runner was given without its library.
        """
        with self.connected() as device:
            require_device(device.name, device.find_link_fault())
            machine = device.look_at()
            require_device(device.name, device.find_lacking(machine))
            run = device._run_program(machine.base, device.choose_program(machine), job, work)  # noqa: SLF001 - itself
        said = {key: value for key, value in machine.versions.items() if value}
        return msgspec.structs.replace(run, versions={**run.versions, **said})

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
        """Returns the program that runs a model there. Raises: DeviceError: there is none."""
        return (self.find_runner(machine.abi) or require_runner(machine.abi)).pack(self.libraries)

    def _run_program(self, base: str, program: Program, job: Job, work: Path) -> DeviceRun:
        try:
            # Program and model are two sets of files, so that another model does not send the library again.
            folder = push_set(self, base, program.files)
            model = f"{push_set(self, base, list_model_files(job.model))}/{job.model.name}"
        except EdgekitError as error:
            return refuse_run(self, error.message)
        request = msgspec.structs.replace(
            program.fill_job(describe_job(job, provider=self.provider or job.target.provider), folder),
            model=model,
            threads=self.threads or job.threads,
        )
        run_folder = own_name("run")
        argv = self.command(wrap_program(base, run_folder, program.command(folder)))
        try:
            run = run_program(self, argv, job, request, work)
        # Also on Ctrl-C: a program left running would keep the phone busy and warm.
        except BaseException:
            remove_folder(self, base, run_folder)
            raise
        if run.failure is not None:
            remove_folder(self, base, run_folder)
        return msgspec.structs.replace(run, notes=(*run.notes, *program.notes))


@contextlib.contextmanager
def linked_names(files: Mapping[str, Path]) -> Generator[tuple[str, ...]]:
    """Yields symbolic links to files under plain names, so that no client has to handle the user's file names."""
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        for name, path in files.items():
            Path(folder, name).symlink_to(path.resolve())
        yield tuple(f"{folder}/{name}" for name in files)
