"""Phones and boards reached by `adb`: files are stored there by digest, and a native program runs the model."""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgekit._proc import Finished, run_process
from edgekit.devices.device import Missing
from edgekit.devices.local.runner import ABIS
from edgekit.devices.process.run import last_line
from edgekit.devices.remote.remote import Machine, RemoteDevice, is_serial, linked_names
from edgekit.devices.remote.store import COUNT_CORES, ask, read_count
from edgekit.errors import DeviceError

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

    def find_link_fault(self) -> Missing | None:
        """Returns why adb cannot run a program on this device, and what to do about it."""
        if shutil.which(ADB) is None:
            return Missing(reason="adb not found", command="apt-get install adb")
        if self.serial and not is_serial(self.serial):
            return Missing(reason=f"'{self.serial[:80]}' is no serial of a device", command="adb devices -l")
        # Only the state tells whether there is a link: `adb connect` exits with 0 even if it fails (measured).
        finished = self._adb(["get-state"])
        if finished.stdout.strip() != "device":
            said = f"{finished.stdout}\n{finished.stderr}"
            find = f"adb connect {self.serial}" if ":" in self.serial else "adb devices -l"
            values = {"serial": self.serial, "find": find, "adb": " ".join(self._client())}
            for words, reason, command in _STATES:
                if words in said:
                    return Missing(reason=reason.format(**values), command=command.format(**values))
            if finished.timed_out:
                return Missing(reason="adb does not answer", command="adb kill-server")
            state = last_line(finished.stdout) or last_line(finished.stderr) or "unknown"
            return Missing(reason=f"it is in the state '{state[:120]}'", command="adb devices -l")
        features = self._adb(["features"]).stdout.split()
        # Without this feature, adb does not transmit the exit code of a program.
        if "shell_v2" not in features:
            return Missing(reason="its adb daemon is older than Android 7: programs have no exit code", command=None)
        return None

    def look_at(self) -> Machine:
        """Returns the device's ABI, system, model and cores.

        Raises:
            DeviceError: the device does not answer, or edgekit has no runner for its kind.
        """
        names = ("ro.product.cpu.abi", "ro.build.version.release", "ro.product.model", "ro.soc.model")
        # Only the last command's exit code counts: toybox on old systems has no nproc, which is no error.
        script = "\n".join((COUNT_CORES, *(f"getprop {name}" for name in names)))
        lines = [last_line(line)[:80] for line in ask(self, script, step="reading its properties").splitlines()]
        cores, abi, release, model, soc = [*lines, *([""] * 5)][:5]
        if abi not in ABIS:
            raise DeviceError(f"'{self.name}' has the ABI '{abi}'", hint=f"edgekit has runners for {', '.join(ABIS)}")
        about = {
            "system": f"Android {ABIS[abi].machine}", "android": release, "model": model, "soc": soc, "abi": abi,
            "cores": read_count(cores),
        }  # fmt: skip
        return Machine(abi=abi, base=BASE, versions=about)

    def command(self, script: str) -> tuple[str, ...]:
        """Returns the command that runs a script in the device's shell."""
        # -T: no terminal, which would convert line ends and echo the input.
        return (*self._client(), "shell", "-T", script)

    def send_files(self, files: Mapping[str, Path], folder: str) -> None:
        """Copies files into a folder of the device, under plain names.

        Raises:
            DeviceError: adb could not copy them.
        """
        with linked_names(files) as paths:
            for path in paths:  # one at a time: with several, adb's client loses the reason of a failure
                finished = self._adb(["push", path, f"{folder}/"], self.transfer_s(Path(path).stat().st_size))
                if not finished.succeeded:
                    # adb's message may be on either stream, among lines of progress: adb 29 writes errors to stdout,
                    # adb 36 to stderr, with different text before "error: ".
                    lines = f"{finished.stdout}\n{finished.stderr}".replace("\r", "\n").splitlines()
                    errors = [line for line in lines if "error: " in line]
                    line = last_line(errors[-1] if errors else "\n".join(lines)).removeprefix("adb: error: ")
                    # The files are numbered, in a temporary folder whose path means nothing to the user.
                    said = re.sub(r"'/[^']*/(\d+)'", r"file \1", line)[-300:] or finished.ending
                    reason = "it does not answer" if finished.timed_out else said
                    raise DeviceError(f"'{self.name}' while sending files: {reason}", hint="edgekit devices list")

    def _client(self) -> tuple[str, ...]:
        return (ADB, "-s", self.serial) if self.serial else (ADB,)

    def _adb(self, words: Sequence[str], timeout_s: float | None = None) -> Finished:
        argv = [*self._client(), *words]
        return run_process(argv, timeout_s=self.step_timeout_s if timeout_s is None else timeout_s)
