"""Devices behind adb and ssh: the program and the model are sent once, then samples are streamed.

The two differ in the command that runs a script on the device and passes its streams through. On a phone a native
program runs the model. Boards and computers are reached by OpenSSH, with the user's own configuration.
An address (`adb:SERIAL`, `ssh:USER@HOST`) must not contain anything that a command line could interpret as an option or
a command.
"""

import contextlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Self

import msgspec

from edgekit._proc import Finished, run_process
from edgekit.devices.device import DeviceRun, Job, Missing, refuse_run, require_device
from edgekit.devices.local.runner import ABIS, NativeRunner, find_runner
from edgekit.devices.process.run import Program, describe_job, last_line, python_program, run_program
from edgekit.devices.remote import store
from edgekit.errors import DeviceError, EdgekitError, UsageError
from edgekit.evidence import Evidence
from edgekit.model.model import list_model_files

# No "-" in front, because that would be an option, and no characters that are special in a shell. `adb devices` prints
# serials as a number, `emulator-5554` or HOST:PORT.
_SERIAL = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,126}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_USER = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}@"
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]{1,43}\]?)"
_SSH = re.compile(f"(?:{_USER})?{_HOST}")


_ADDRESSES = {
    "adb": (_SERIAL, "is no serial of a device", "adb devices lists them"),
    "ssh": (_SSH, "is no USER@HOST", "give ports and options in ~/.ssh/config under a name"),
}


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


class RemoteDevice(store.Shell, frozen=True, kw_only=True):
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
            found = self.find_program(self.look_at())
        except EdgekitError as error:
            return Missing(reason=error.message.removeprefix(f"'{self.name}' "), command=error.hint)
        return found if isinstance(found, Missing) else None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job on the machine.

        Raises:
            DeviceError: the machine is not there, or has nothing to run a model with.
            UsageError: a runner was given without its library.
        """
        with self.connected() as device:
            require_device(device.name, device.find_link_fault())
            machine = device.look_at()
            program = require_device(device.name, device.find_program(machine))
            run = device._run_program(machine.base, program, job, work)  # noqa: SLF001 - itself
        facts = {key: value for key, value in machine.versions.items() if value}
        return msgspec.structs.replace(run, versions={**run.versions, **facts})

    def find_runner(self, abi: str) -> NativeRunner | Missing:
        """Returns the runner that the user gave, or the one that was built for a kind of machine, or why there is none.

        Raises:
            UsageError: one of the two files is given without the other.
        """
        if self.runner is not None and self.library is not None:
            return NativeRunner(abi=abi, program=self.runner, library=self.library)
        if self.runner is not None or self.library is not None:
            raise UsageError("a runner and a library are given together", hint="give both, or none")
        return find_runner(abi)

    def find_program(self, machine: Machine) -> Program | Missing:
        """Returns the program that runs a model there, or why there is none."""
        native = self.find_runner(machine.abi)
        return native if isinstance(native, Missing) else native.pack(self.libraries)

    def _run_program(self, base: str, program: Program, job: Job, work: Path) -> DeviceRun:
        try:
            # Program and model are two sets of files, so that another model does not send the library again.
            folder = store.push_set(self, base, program.files)
            model = f"{store.push_set(self, base, list_model_files(job.model))}/{job.model.name}"
        except EdgekitError as error:
            return refuse_run(self, error.message)
        provider, threads = self.provider or job.target.provider, self.threads or job.threads
        libraries = program.find_libraries(folder)
        request = describe_job(job, provider=provider, model=model, threads=threads, **libraries)
        run_folder = store.make_folder_name("run")
        argv = self.command(store.wrap_program(base, run_folder, program.command(folder)))
        try:
            run = run_program(self, argv, job, request, work)
        # Also on Ctrl-C: a program left running would keep the phone busy and warm.
        except BaseException:
            store.remove_folder(self, base, run_folder)
            raise
        if run.failure is not None:
            store.remove_folder(self, base, run_folder)
        return msgspec.structs.replace(run, notes=(*run.notes, *program.notes))


ADB = "adb"
BASE = "/data/local/tmp/edgekit"
"""The folder for edgekit's files: the only one of a phone in which adb's user may both write and execute files."""

# Part of adb's message about a device that cannot be used, its explanation, and the command to run next.
_STATES = (
    (
        "authoriz",  # "unauthorized", or "still authorizing" just before
        "it has not been told to trust this computer: confirm the dialog on its screen",
        "{adb} get-state",
    ),
    ("offline", "it is offline", "adb disconnect {serial} && adb connect {serial}"),
    ("no permissions", "this user may not open its USB port", "apt-get install android-sdk-platform-tools-common"),
    ("more than one", "there are several devices: name one as adb:SERIAL", "adb devices -l"),
    ("not found", "adb knows no device '{serial}'", "{find}"),
    ("no devices", "adb knows no device", "adb devices -l"),
)


class AdbDevice(RemoteDevice, frozen=True, kw_only=True):
    """A phone or a board that adb knows by `serial`; "" means the only connected one."""

    serial: str = ""

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return f"adb:{self.serial}" if self.serial else ADB

    @property
    def probe(self) -> str:
        """The command that lists what adb knows."""
        return "adb devices -l"

    def find_link_fault(self) -> Missing | None:
        """Returns why adb cannot run a program on this device, and what to do about it."""
        if shutil.which(ADB) is None:
            return Missing(reason="adb not found", command="apt-get install adb")
        # Only the state tells whether there is a link: `adb connect` exits with 0 even if it fails (measured).
        finished = self._adb("get-state")
        if finished.stdout.strip() != "device":
            output = f"{finished.stdout}\n{finished.stderr}"
            find = f"adb connect {self.serial}" if ":" in self.serial else "adb devices -l"
            values = {"serial": self.serial, "find": find, "adb": " ".join(self._client())}
            for words, reason, command in _STATES:
                if words in output:
                    return Missing(reason=reason.format(**values), command=command.format(**values))
            if finished.timed_out:
                return Missing(reason="adb does not answer", command="adb kill-server")
            state = last_line(finished.stdout) or last_line(finished.stderr) or "unknown"
            return Missing(reason=f"it is in the state '{state[:120]}'", command="adb devices -l")
        # Without this feature, adb does not transmit the exit code of a program.
        if "shell_v2" not in self._adb("features").stdout.split():
            return Missing(reason="its adb daemon is older than Android 7: programs have no exit code", command=None)
        return None

    def look_at(self) -> Machine:
        """Returns the device's ABI, system, model and cores.

        Raises:
            DeviceError: the device does not answer, or edgekit has no runner for its kind.
        """
        names = ("ro.product.cpu.abi", "ro.build.version.release", "ro.product.model", "ro.soc.model")
        # Only the last command's exit code counts: toybox on old systems has no nproc, which is no error.
        script = "\n".join((store.COUNT_CORES, *(f"getprop {name}" for name in names)))
        lines = [last_line(line)[:80] for line in store.ask(self, script, step="reading its properties").splitlines()]
        cores, abi, release, model, soc = [*lines, *([""] * 5)][:5]
        if abi not in ABIS:
            raise DeviceError(f"'{self.name}' has the ABI '{abi}'", hint=f"edgekit has runners for {', '.join(ABIS)}")
        about = {
            "system": f"Android {ABIS[abi].machine}", "android": release, "model": model, "soc": soc, "abi": abi,
            "cores": store.read_count(cores),
        }  # fmt: skip
        return Machine(abi=abi, base=BASE, versions=about)

    def command(self, script: str) -> tuple[str, ...]:
        """Returns the command that runs a script in the device's shell."""
        # -T: no terminal, which would convert line ends and echo the input.
        return (*self._client(), "shell", "-T", script)

    def _client(self) -> tuple[str, ...]:
        return (ADB, "-s", self.serial) if self.serial else (ADB,)

    def _adb(self, word: str) -> Finished:
        return run_process([*self._client(), word], timeout_s=self.step_timeout_s)


# No prompts, no endless waits, and no port forwarding, even if the user's configuration asks for it.
_OPTIONS = (
    "BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "ClearAllForwardings=yes",
)  # fmt: skip

# A shared connection ends by itself after this time, in case edgekit is killed before it closes it.
_SHARED_S = 30
_PYTHON = "python3"
_HAS_ONNXRUNTIME = 'import importlib.util as u, sys; sys.exit(u.find_spec("onnxruntime") is None)'


class SshDevice(RemoteDevice, frozen=True, kw_only=True):
    """A machine that ssh reaches as `host`, written as on ssh's own command line.

    If edgekit has no runner for its kind, a Python there that has onnxruntime runs models; `python` requests a Python
    by its path. `control` is the socket of a connection that several commands share, "" for separate connections.
    """

    host: str
    python: str = ""
    control: str = ""

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return f"ssh:{self.host}"

    @property
    def probe(self) -> str:
        """The command that logs in as edgekit does."""
        return f"ssh {shlex.quote(self.host)}"

    def find_link_fault(self) -> Missing | None:
        """Returns what is wrong on this machine, without contacting the other one."""
        missing = Missing(reason="ssh not found", command="apt-get install openssh-client")
        return None if shutil.which("ssh") else missing

    def command(self, script: str) -> tuple[str, ...]:
        """Returns the command that runs a script in a POSIX shell of the machine."""
        # `exec sh -c`, because the user's login shell may be fish or csh, with another syntax; `--` ends the options.
        return ("ssh", "-T", *self._options(), "--", self.host, f"exec sh -c {shlex.quote(script)}")

    def _options(self) -> tuple[str, ...]:
        shared = (f"ControlPath={self.control}", "ControlMaster=auto", f"ControlPersist={_SHARED_S}")
        return tuple(word for option in (*_OPTIONS, *(shared if self.control else ())) for word in ("-o", option))

    @contextlib.contextmanager
    def connected(self) -> Generator[Self]:
        """Yields the device with one connection for all commands, which is closed after the block."""
        # A short path, because a Unix socket's name is limited to about 100 bytes (sun_path in unix(7): 108).
        with tempfile.TemporaryDirectory(prefix="edgekit-ssh-") as folder:
            device = msgspec.structs.replace(self, control=f"{folder}/c")
            try:
                yield device
            finally:
                if Path(device.control).exists():
                    end = ["ssh", "-o", f"ControlPath={device.control}", "-O", "exit", "--", self.host]
                    run_process(end, timeout_s=5)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job on the machine.

        Raises:
            DeviceError: the machine is not there, or has nothing to run a model with.
        """
        # Only the runner in Python serves a queue, even if there is a native runner.
        needs_python = job.queue is not None and not self.python
        device = msgspec.structs.replace(self, python=_PYTHON) if needs_python else self
        return RemoteDevice.run_job(device, job, work)

    def look_at(self) -> Machine:
        """Returns a description of the machine; Python is not looked for if there is a native runner for the system.

        Raises:
            DeviceError: it does not answer, or not as a POSIX system does.
        """
        linux = {abi.machine: abi.name for abi in ABIS.values() if not abi.android}
        native = {} if self.python else {machine: self.find_runner(abi) for machine, abi in linux.items()}
        served = [machine for machine, found in native.items() if isinstance(found, NativeRunner)]
        python = shlex.quote(self.python or _PYTHON)
        cases = " | ".join(shlex.quote(f"Linux {machine}") for machine in [*served, "-"])
        script = f"""
uname -srm
{store.COUNT_CORES}
echo "${{XDG_CACHE_HOME:-$HOME/.cache}}/edgekit"
case "$(uname -sm)" in {cases}) exit 0 ;; esac
p=$(command -v {python}) && "$p" -c '{_HAS_ONNXRUNTIME}' </dev/null 2>/dev/null && echo "$p"
exit 0"""
        system, cores, base, path, *_ = [*store.ask(self, script, step="connecting").splitlines(), "", "", "", ""]
        if not base.startswith("/") or not base.isprintable():
            raise DeviceError(f"'{self.name}' while connecting: it has no home folder", hint=f"ssh {self.host}")
        words = [*system.split(), ""]
        abi = linux.get(words[-2], "") if words[0] == "Linux" else ""
        versions = {"system": last_line(system)[:80], "cores": store.read_count(cores)}
        return Machine(abi=abi, base=base, versions=versions, python=last_line(path)[:200])

    def find_program(self, machine: Machine) -> Program | Missing:
        """Returns edgekit's native runner; if there is none, or Python is requested, the runner in Python."""
        native = self.find_runner(machine.abi) if machine.abi and not self.python else None
        if isinstance(native, NativeRunner):
            return native.pack(self.libraries)
        kind = machine.abi or machine.versions["system"]
        if machine.python:
            why = "as asked" if self.python else f"because no runner for '{kind}' is built"
            return python_program(machine.python, (f"run by the onnxruntime of {machine.python}, {why}",))
        if self.python:
            return Missing(reason=f"'{self.python}' there has no onnxruntime", command="pip install onnxruntime, there")
        missing = native or Missing(reason=f"there is no runner for '{kind}'", command=None)
        return Missing(reason=f"{missing.reason}, and no python3 there has onnxruntime", command=missing.command)
