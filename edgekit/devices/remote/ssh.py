"""Boards and computers that `ssh` reaches, with OpenSSH's own programs and the user's own configuration."""

import contextlib
import shlex
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._proc import Finished, run_process
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.runner import ABIS, find_missing_runner
from edgekit.devices.process.child import ORT_QUEUE, ORT_RUNNER, require_device
from edgekit.devices.remote.adb import linked_names
from edgekit.devices.remote.remote import (
    SLOWEST_BYTES_PER_S,
    STEP_S,
    Program,
    RemoteOptions,
    native_program,
    run_remote,
)
from edgekit.devices.remote.store import (
    COUNT_CORES,
    ask,
    clean_store,
    end_run,
    one_line,
    push_set,
    read_count,
    run_name,
    wrap_program,
)
from edgekit.errors import DeviceError, EdgekitError

# No questions, no endless waits, and none of the forwardings that the user's configuration may ask for.
_OPTIONS = (
    "BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "ClearAllForwardings=yes",
)  # fmt: skip

# A connection that nobody closed, because edgekit was killed, ends by itself.
_SHARED_S = 30
_PYTHON = "python3"
_HAS_ONNXRUNTIME = 'import importlib.util as u, sys; sys.exit(u.find_spec("onnxruntime") is None)'


class SshLink(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that ssh reaches as `host`, which is written as the user would for ssh itself.

    `base` is the folder there in which edgekit keeps its files, absolute. `control` is the socket of a connection that
    several commands share, "" for one each. `run` names the folder of the program that this link starts.
    """

    host: str
    base: str = ""
    control: str = ""
    step_timeout_s: float = STEP_S
    slowest_bytes_per_s: int = SLOWEST_BYTES_PER_S
    run: str = msgspec.field(default_factory=run_name)

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return f"ssh:{self.host}"

    def find_missing(self) -> Missing | None:
        """Returns why ssh cannot run a program on this machine, and what to do about it."""
        missing = self.find_absent()
        if missing is not None:
            return missing
        try:
            ask(self, ":", step="connecting")
        except DeviceError as error:
            reason = error.message.removeprefix(f"'{self.name}' ")
            return Missing(reason=reason, command=f"ssh {shlex.quote(self.host)}")
        return None

    def find_absent(self) -> Missing | None:
        """Returns what is wrong on this side, before anything is asked of the machine."""
        for program in ("ssh", "sftp"):
            if shutil.which(program) is None:
                return Missing(reason=f"{program} not found", command="apt-get install openssh-client")
        if not self.host or self.host.startswith("-") or not self.host.isprintable() or " " in self.host:
            return Missing(reason=f"'{self.host[:80]}' is no name of a host", command="use ssh:USER@HOST")
        return None

    def push(self, files: Mapping[str, Path]) -> str:
        """Returns the folder on the machine that holds these files.

        Raises:
            DeviceError: the machine does not answer, has no space, or holds other bytes than were sent.
        """
        return push_set(self, self.base, files)

    def wrap(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Returns the command that runs `argv` on the machine."""
        return self._command(wrap_program(self.base, self.run, argv))

    def stop(self) -> None:
        """Ends the program of `wrap`, if it still runs, and removes what it left."""
        end_run(self, self.base, self.run)

    def clean(self) -> None:
        """Removes everything that edgekit stored on the machine.

        Raises:
            DeviceError: the machine does not answer.
        """
        clean_store(self, self.base)

    def start_script(self, script: str, timeout_s: float) -> Finished:
        """Runs a script in a POSIX shell of the machine."""
        return run_process(self._command(script), timeout_s=timeout_s)

    def send_files(self, files: Mapping[str, Path], folder: str) -> None:
        """Copies files into a folder of the machine, under plain names.

        Raises:
            DeviceError: sftp could not copy them.
        """
        size_bytes = sum(path.stat().st_size for path in files.values())
        with linked_names(files) as paths, tempfile.NamedTemporaryFile("w", suffix=".sftp") as batch:
            batch.writelines(f"put {_sftp_quote(path)} {_sftp_quote(folder)}/\n" for path in paths)
            batch.flush()
            host = self.host.replace("ssh://", "sftp://", 1) if self.host.startswith("ssh://") else self.host
            argv = ["sftp", "-q", *self._options(), "-b", batch.name, "--", host]
            finished = run_process(argv, timeout_s=self.step_timeout_s + size_bytes / self.slowest_bytes_per_s)
        if not finished.succeeded:
            broken = "the link broke" if finished.status < 0 else finished.ending
            reason = "it does not answer" if finished.timed_out else one_line(finished.stderr) or broken
            raise DeviceError(f"'{self.name}' while sending files: {reason[-300:]}", hint=f"sftp {self.host}")

    def _command(self, script: str) -> tuple[str, ...]:
        # `exec sh -c`, because the user's own shell may be fish or csh, which read other scripts; `--` ends the
        # options.
        return ("ssh", "-T", *self._options(), "--", self.host, f"exec sh -c {shlex.quote(script)}")

    def _options(self) -> tuple[str, ...]:
        shared = (f"ControlPath={self.control}", "ControlMaster=auto", f"ControlPersist={_SHARED_S}")
        return tuple(word for option in (*_OPTIONS, *(shared if self.control else ())) for word in ("-o", option))


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a machine: the kind that edgekit names its runners by, system, cores, its cache, its Python.

    `abi` is "" where there is no runner for that system, and `python` is "" where none there has onnxruntime.
    """

    abi: str
    system: str
    cores: str
    base: str
    python: str


class SshDevice(RemoteOptions, frozen=True, kw_only=True):
    """A machine behind ssh, named as the user would for ssh itself.

    Where there is no runner for its kind, a Python there that has onnxruntime runs models. `python` asks for that
    Python by its path.
    """

    host: str
    python: str = ""

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return self._link().name

    def find_missing(self) -> Missing | None:
        """Returns why this machine cannot be used, and what to do about it."""
        link = self._link()
        missing = link.find_absent()
        if missing is not None:
            return missing
        try:
            return self._find_lacking(self._look_at(link))
        except EdgekitError as error:
            return Missing(reason=error.message.removeprefix(f"'{self.name}' "), command=error.hint)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job on the machine.

        Raises:
            DeviceError: the machine is not there, or has nothing to run a model with.
        """
        if job.queue is not None and not self.python:
            # Only the runner in Python serves a queue, also where there is another.
            return msgspec.structs.replace(self, python=_PYTHON).run_job(job, work)
        with shared_connection(self._link()) as link:
            require_device(self.name, link.find_absent())
            machine = self._look_at(link)
            require_device(self.name, self._find_lacking(machine))
            program = self._choose_program(machine)
            run = run_remote(msgspec.structs.replace(link, base=machine.base), program, job, work, self.session)
        about = {"system": machine.system, "cores": machine.cores}
        return msgspec.structs.replace(run, versions={**{k: v for k, v in about.items() if v}, **run.versions})

    def clean(self) -> None:
        """Removes everything that edgekit stored on the machine.

        Raises:
            DeviceError: the machine does not answer.
        """
        link = self._link()
        msgspec.structs.replace(link, base=self._look_at(link).base).clean()

    def _find_lacking(self, machine: Machine) -> Missing | None:
        if machine.python or (machine.abi and not self.python and self.find_runner(machine.abi)):
            return None
        if self.python:
            return Missing(reason=f"'{self.python}' there has no onnxruntime", command="pip install onnxruntime, there")
        if machine.abi:
            lacking = find_missing_runner(machine.abi)
            reason = f"{lacking.reason if lacking else 'no runner'}, and no python3 there has onnxruntime"
            return Missing(reason=reason, command=lacking.command if lacking else None)
        return Missing(
            reason=f"there is no runner for '{machine.system}', and no python3 there has onnxruntime", command=None
        )

    def _choose_program(self, machine: Machine) -> Program:
        native = self.find_runner(machine.abi) if machine.abi and not self.python else None
        if native is not None:
            return native_program(native, self.libraries)
        why = "as asked" if self.python else f"because no runner for '{machine.abi or machine.system}' is built"
        return Program(
            files={program.name: program for program in (ORT_RUNNER, ORT_QUEUE)},
            argv=(machine.python, f"{{folder}}/{ORT_RUNNER.name}", "--pipe"),
            notes=(f"run by the onnxruntime of {machine.python}, {why}",),
        )

    def _look_at(self, link: SshLink) -> Machine:
        linux = [abi for abi in ABIS.values() if not abi.android and not self.python and self.find_runner(abi.name)]
        return _look_at(link, self.python, [f"Linux {abi.machine}" for abi in linux])

    def _link(self) -> SshLink:
        return SshLink(host=self.host, step_timeout_s=self.step_timeout_s, slowest_bytes_per_s=self.slowest_bytes_per_s)


def _look_at(link: SshLink, python: str, with_runner: Sequence[str]) -> Machine:
    """Returns what a machine is; its Python is not looked at on systems for which there is a runner.

    Raises:
        DeviceError: it does not answer, or not as a POSIX system does.
    """
    chosen = shlex.quote(python or _PYTHON)
    script = f"""
uname -sm
{COUNT_CORES}
echo "${{XDG_CACHE_HOME:-$HOME/.cache}}/edgekit"
case "$(uname -sm)" in {" | ".join(map(shlex.quote, [*with_runner, "-"]))}) exit 0 ;; esac
p=$(command -v {chosen}) && "$p" -c '{_HAS_ONNXRUNTIME}' </dev/null 2>/dev/null && echo "$p"
exit 0"""
    system, cores, base, path, *_ = [*ask(link, script, step="connecting").splitlines(), "", "", "", ""]
    if not base.startswith("/") or not base.isprintable():
        raise DeviceError(f"'{link.name}' while connecting: it has no home folder", hint=f"ssh {link.host}")
    name, _, machine = system.strip().partition(" ")
    abis = [abi.name for abi in ABIS.values() if not abi.android and abi.machine == machine and name == "Linux"]
    return Machine(
        abi=abis[0] if abis else "",
        system=one_line(system)[:80],
        cores=read_count(cores),
        base=base,
        python=one_line(path)[:200],
    )


@contextlib.contextmanager
def shared_connection(link: SshLink) -> Generator[SshLink]:
    """Yields a link like `link` whose commands share one connection, which ends with the block."""
    # A short path: a Unix socket's name has about 100 bytes (sun_path in unix(7): 108).
    with tempfile.TemporaryDirectory(prefix="edgekit-ssh-") as folder:
        shared = msgspec.structs.replace(link, control=f"{folder}/c")
        try:
            yield shared
        finally:
            if Path(shared.control).exists():
                run_process(["ssh", "-o", f"ControlPath={shared.control}", "-O", "exit", "--", link.host], timeout_s=5)


def _sftp_quote(path: str) -> str:
    """Returns a path as sftp's batches take it: in quotes, with what would be a pattern taken literally."""
    escaped = "".join(f"\\{letter}" if letter in '\\"*?[' else letter for letter in path)
    return f'"{escaped}"'
