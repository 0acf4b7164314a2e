"""Phones and boards that `adb` reaches: files go there by digest, and a native program runs the model."""

import contextlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._proc import Finished, run_process
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.runner import ABIS, find_missing_runner
from edgekit.devices.process.child import require_device
from edgekit.devices.remote.remote import (
    SLOWEST_BYTES_PER_S,
    STEP_S,
    RemoteOptions,
    is_serial,
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

ADB = "adb"
BASE = "/data/local/tmp/edgekit"
"""Where edgekit keeps its files: the one folder of a phone in which adb's user may write and start programs."""

# What adb says of a device that cannot be used, the same in our words, and what to do next.
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


class AdbLink(msgspec.Struct, frozen=True, kw_only=True):
    """A device that adb knows by `serial`, or the only one where that is "". A step may take `step_timeout_s`.

    `run` names the folder of the program that this link starts: a link is made for one run.
    """

    serial: str = ""
    step_timeout_s: float = STEP_S
    slowest_bytes_per_s: int = SLOWEST_BYTES_PER_S
    run: str = msgspec.field(default_factory=run_name)

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return f"adb:{self.serial}" if self.serial else ADB

    def find_missing(self) -> Missing | None:
        """Returns why adb cannot run a program on this device, and what to do about it."""
        if shutil.which(ADB) is None:
            return Missing(reason="adb not found", command="apt-get install adb")
        if self.serial and not is_serial(self.serial):
            return Missing(reason=f"'{self.serial[:80]}' is no serial of a device", command="adb devices -l")
        # The state alone tells whether there is a link: `adb connect` exits with 0 however it went (measured).
        finished = self._adb(["get-state"])
        if finished.stdout.strip() != "device":
            return self._describe_state(finished)
        features = self._adb(["features"]).stdout.split()
        # Without that feature the exit code of a program never reaches this side.
        if "shell_v2" not in features:
            return Missing(reason="its adb daemon is older than Android 7: programs have no exit code", command=None)
        return None

    def push(self, files: Mapping[str, Path]) -> str:
        """Returns the folder on the device that holds these files.

        Raises:
            DeviceError: the device does not answer, has no space, or holds other bytes than were sent.
        """
        return push_set(self, BASE, files)

    def wrap(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Returns the command that runs `argv` on the device."""
        # -T: no terminal, which would turn line ends and echo what is sent.
        return (*self._command(), "shell", "-T", wrap_program(BASE, self.run, argv))

    def stop(self) -> None:
        """Ends the program of `wrap`, if it still runs, and removes what it left."""
        end_run(self, BASE, self.run)

    def clean(self) -> None:
        """Removes everything that edgekit stored on the device.

        Raises:
            DeviceError: the device does not answer.
        """
        clean_store(self, BASE)

    def read_properties(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns how many cores the device has, and properties of the system by name; "" for what it does not tell.

        Raises:
            DeviceError: the device does not answer.
        """
        # The last command's exit code counts: toybox has no nproc on old systems, and that is no fault.
        script = "\n".join((COUNT_CORES, *(f"getprop {shlex.quote(name)}" for name in names)))
        lines = ask(self, script, step="reading its properties").splitlines()
        return (*(one_line(line)[:80] for line in lines), *([""] * len(names)))[: len(names) + 1]

    def start_script(self, script: str, timeout_s: float) -> Finished:
        """Runs a script in the device's shell."""
        return self._adb(["shell", "-T", script], timeout_s)

    def send_files(self, files: Mapping[str, Path], folder: str) -> None:
        """Copies files into a folder of the device, under plain names.

        Raises:
            DeviceError: adb could not copy them.
        """
        with linked_names(files) as paths:
            for path in paths:  # one at a time: of several, adb's client loses the reason why one failed
                size_bytes = Path(path).stat().st_size
                timeout_s = self.step_timeout_s + size_bytes / self.slowest_bytes_per_s
                finished = self._adb(["push", path, f"{folder}/"], timeout_s)
                if not finished.succeeded:
                    reason = _push_reason(finished)
                    raise DeviceError(f"'{self.name}' while sending files: {reason}", hint="edgekit devices list")

    def _describe_state(self, finished: Finished) -> Missing:
        said = f"{finished.stdout}\n{finished.stderr}"
        find = f"adb connect {self.serial}" if ":" in self.serial else "adb devices -l"
        for words, reason, command in _STATES:
            if words in said:
                adb = " ".join(self._command())
                values = {"serial": self.serial, "find": find, "adb": adb}
                return Missing(reason=reason.format(**values), command=command.format(**values))
        if finished.timed_out:
            return Missing(reason="adb does not answer", command="adb kill-server")
        state = one_line(finished.stdout) or one_line(finished.stderr) or "unknown"
        return Missing(reason=f"it is in the state '{state[:120]}'", command="adb devices -l")

    def _command(self) -> tuple[str, ...]:
        return (ADB, "-s", self.serial) if self.serial else (ADB,)

    def _adb(self, words: Sequence[str], timeout_s: float | None = None) -> Finished:
        argv = [*self._command(), *words]
        return run_process(argv, timeout_s=self.step_timeout_s if timeout_s is None else timeout_s)


class Phone(msgspec.Struct, frozen=True, kw_only=True):
    """What a device says it is: the kind of its processor and its cores, its Android, its name and its chip's."""

    abi: str
    release: str
    model: str
    soc: str
    cores: str


class AdbDevice(RemoteOptions, frozen=True, kw_only=True):
    """A phone or a board behind adb, by its serial; "" is the only one that is connected."""

    serial: str = ""

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return self._link().name

    def find_missing(self) -> Missing | None:
        """Returns why this device cannot be used, and what to do about it."""
        link = self._link()
        missing = link.find_missing()
        if missing is not None:
            return missing
        try:
            return self._find_lacking(_look_at(link).abi)
        except EdgekitError as error:
            return Missing(reason=error.message.removeprefix(f"'{self.name}' "), command=error.hint)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job on the device.

        Raises:
            DeviceError: the device is not there, or the runner for it is not built.
            UsageError: a runner was given without its library.
        """
        link = self._link()
        require_device(self.name, link.find_missing())
        phone = _look_at(link)
        require_device(self.name, self._find_lacking(phone.abi))
        native = self.find_runner(phone.abi)
        if native is None:
            raise DeviceError(f"'{self.name}' has no runner for {phone.abi}", hint="edgekit runner build")
        run = run_remote(link, native_program(native, self.libraries), job, work, self.session)
        system = f"Android {ABIS[phone.abi].machine}"
        about = {
            "system": system, "android": phone.release, "model": phone.model, "soc": phone.soc, "abi": phone.abi,
            "cores": phone.cores,
        }  # fmt: skip
        return msgspec.structs.replace(run, versions={**run.versions, **{k: v for k, v in about.items() if v}})

    def clean(self) -> None:
        """Removes everything that edgekit stored on the device.

        Raises:
            DeviceError: the device does not answer.
        """
        self._link().clean()

    def _find_lacking(self, abi: str) -> Missing | None:
        return None if self.find_runner(abi) else find_missing_runner(abi)

    def _link(self) -> AdbLink:
        return AdbLink(
            serial=self.serial, step_timeout_s=self.step_timeout_s, slowest_bytes_per_s=self.slowest_bytes_per_s
        )


def _look_at(link: AdbLink) -> Phone:
    """Returns what a device is.

    Raises:
        DeviceError: the device does not answer, or edgekit has no runner for its kind.
    """
    names = ("ro.product.cpu.abi", "ro.build.version.release", "ro.product.model", "ro.soc.model")
    cores, abi, release, model, soc = link.read_properties(names)
    if abi not in ABIS:
        raise DeviceError(f"'{link.name}' has the ABI '{abi}'", hint=f"edgekit has runners for {', '.join(ABIS)}")
    return Phone(abi=abi, release=release, model=model, soc=soc, cores=read_count(cores))


@contextlib.contextmanager
def linked_names(files: Mapping[str, Path]) -> Generator[tuple[str, ...]]:
    """Yields paths with plain names that lead to files, so that no client has to understand names of the user."""
    with tempfile.TemporaryDirectory(prefix="edgekit-") as folder:
        for name, path in files.items():
            Path(folder, name).symlink_to(path.resolve())
        yield tuple(f"{folder}/{name}" for name in files)


def _push_reason(finished: Finished) -> str:
    """Returns what adb says went wrong; it says so on either stream, between lines of progress."""
    if finished.timed_out:
        return "it does not answer"
    lines = f"{finished.stdout}\n{finished.stderr}".replace("\r", "\n").splitlines()
    # adb 29 writes what went wrong to stdout, adb 36 to stderr, and what stands before "error: " differs: both are
    # searched for the word.
    errors = [line for line in lines if "error: " in line]
    line = one_line(errors[-1] if errors else "\n".join(lines))
    # The files have numbers here, in a folder of this machine that says nothing to the user.
    return re.sub(r"'/[^']*/(\d+)'", r"file \1", line.removeprefix("adb: error: "))[-300:] or finished.ending
