"""Boards and computers reached by OpenSSH's programs, with the user's own configuration."""

import contextlib
import shlex
import shutil
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Self

import msgspec

from edgekit._proc import run_process
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.runner import ABIS, find_missing_runner
from edgekit.devices.process.run import Program, last_line, python_program
from edgekit.devices.remote.remote import Machine, RemoteDevice, linked_names
from edgekit.devices.remote.store import COUNT_CORES, ask, read_count
from edgekit.errors import DeviceError

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

    def find_link_fault(self) -> Missing | None:
        """Returns what is wrong on this machine, without contacting the other one."""
        for program in ("ssh", "sftp"):
            if shutil.which(program) is None:
                return Missing(reason=f"{program} not found", command="apt-get install openssh-client")
        if not self.host or self.host.startswith("-") or not self.host.isprintable() or " " in self.host:
            return Missing(reason=f"'{self.host[:80]}' is no name of a host", command="use ssh:USER@HOST")
        return None

    def command(self, script: str) -> tuple[str, ...]:
        """Returns the command that runs a script in a POSIX shell of the machine."""
        # `exec sh -c`, because the user's login shell may be fish or csh, with another syntax; `--` ends the options.
        return ("ssh", "-T", *self._options(), "--", self.host, f"exec sh -c {shlex.quote(script)}")

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
            finished = run_process(argv, timeout_s=self.transfer_s(size_bytes))
        if not finished.succeeded:
            broken = "the link broke" if finished.status < 0 else finished.ending
            reason = "it does not answer" if finished.timed_out else last_line(finished.stderr) or broken
            raise DeviceError(f"'{self.name}' while sending files: {reason[-300:]}", hint=f"sftp {self.host}")

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
                    run_process(
                        ["ssh", "-o", f"ControlPath={device.control}", "-O", "exit", "--", self.host], timeout_s=5
                    )

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
        served = [machine for machine, abi in linux.items() if not self.python and self.find_runner(abi)]
        python = shlex.quote(self.python or _PYTHON)
        cases = " | ".join(shlex.quote(f"Linux {machine}") for machine in [*served, "-"])
        script = f"""
uname -srm
{COUNT_CORES}
echo "${{XDG_CACHE_HOME:-$HOME/.cache}}/edgekit"
case "$(uname -sm)" in {cases}) exit 0 ;; esac
p=$(command -v {python}) && "$p" -c '{_HAS_ONNXRUNTIME}' </dev/null 2>/dev/null && echo "$p"
exit 0"""
        system, cores, base, path, *_ = [*ask(self, script, step="connecting").splitlines(), "", "", "", ""]
        if not base.startswith("/") or not base.isprintable():
            raise DeviceError(f"'{self.name}' while connecting: it has no home folder", hint=f"ssh {self.host}")
        words = [*system.split(), ""]
        return Machine(
            abi=linux.get(words[-2], "") if words[0] == "Linux" else "",
            base=base,
            versions={"system": last_line(system)[:80], "cores": read_count(cores)},
            python=last_line(path)[:200],
        )

    def find_lacking(self, machine: Machine) -> Missing | None:
        """Returns what a machine lacks to run models."""
        if machine.python or (machine.abi and not self.python and self.find_runner(machine.abi)):
            return None
        if self.python:
            return Missing(reason=f"'{self.python}' there has no onnxruntime", command="pip install onnxruntime, there")
        if not machine.abi:
            system = machine.versions["system"]
            return Missing(
                reason=f"there is no runner for '{system}', and no python3 there has onnxruntime", command=None
            )
        lacking = find_missing_runner(machine.abi)
        reason = f"{lacking.reason if lacking else 'no runner'}, and no python3 there has onnxruntime"
        return Missing(reason=reason, command=lacking.command if lacking else None)

    def choose_program(self, machine: Machine) -> Program:
        """Returns edgekit's native runner; if there is none, or Python is requested, the runner in Python."""
        native = self.find_runner(machine.abi) if machine.abi and not self.python else None
        if native is not None:
            return native.pack(self.libraries)
        kind = machine.abi or machine.versions["system"]
        why = "as asked" if self.python else f"because no runner for '{kind}' is built"
        return python_program(machine.python, (f"run by the onnxruntime of {machine.python}, {why}",))


def _sftp_quote(path: str) -> str:
    """Returns a path quoted for sftp's batch files, with wildcards escaped."""
    escaped = "".join(f"\\{letter}" if letter in '\\"*?[' else letter for letter in path)
    return f'"{escaped}"'
