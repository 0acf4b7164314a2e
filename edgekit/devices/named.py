"""A device under the name that the user gave it, with its own time limits and its place in a laboratory.

In a laboratory that is shared through Labgrid, the device's place is acquired while a job runs on it.
"""

import contextlib
import getpass
import shutil
import time
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, one_at_a_time
from edgekit._proc import Finished, run_process
from edgekit.devices.device import Device, DeviceRun, Job, WrappedDevice
from edgekit.devices.process.files import cache_folder
from edgekit.errors import DeviceError

REMOTE = frozenset({"adb", "ssh"})
"""Kinds of devices that are other machines."""

_CLIENT = "labgrid-client"
_CALL_S = 60.0
_WAIT_S = 3600.0
_PAUSE_S = 2.0
# Messages of the client of Labgrid 24 and 26 (`labgrid/remote/client.py`).
_MINE, _TAKEN = "You have already acquired place", "is already acquired by"


@contextlib.contextmanager
def holding_place(place: str, *, wait_s: float = _WAIT_S) -> Generator[None]:
    """Acquires a place of Labgrid for the duration of the block; waits if somebody else has it.

    Labgrid's client finds the coordinator by the environment variable `LG_COORDINATOR`.

    Raises:
        DeviceError: there is no client or no coordinator or no such place, or it was not free in time.
    """
    program = shutil.which(_CLIENT)
    if program is None:
        raise DeviceError(f"place '{place}' of Labgrid needs {_CLIENT}", hint="pip install labgrid, or pipx")
    # A user name of edgekit's own, so that a place which the user acquired by hand is not mistaken for edgekit's.
    env = {"LG_USERNAME": f"edgekit-{getpass.getuser()}"}

    def ask(what: str) -> Finished:
        return run_process([program, "-p", place, what], timeout_s=_CALL_S, env=env)

    # One process of this machine at a time: if the place is acquired in edgekit's name now, a killed process left it
    # so.
    with one_at_a_time(cache_folder() / "leases" / digest_bytes(f"labgrid:{place}".encode()) / "lock"):
        end = time.monotonic() + wait_s
        while not (done := ask("acquire")).succeeded:
            if _MINE in done.stderr:
                ask("release")
            elif _TAKEN not in done.stderr:
                raise DeviceError(f"place '{place}' of Labgrid: {_quote(done)}", hint=f"{_CLIENT} places lists them")
            elif time.monotonic() > end:
                raise DeviceError(f"place '{place}' was not free: {_quote(done)}", hint=f"{_CLIENT} who says more")
            else:
                time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            ask("release")


def _quote(done: Finished) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1].removeprefix(f"{_CLIENT}: ") if lines else done.ending


class NamedDevice(WrappedDevice, frozen=True, kw_only=True):
    """A device of `devices.toml`: reports call it `label`; a limit of None leaves that of the job.

    A `place` of Labgrid is acquired while it runs.
    """

    label: str
    timeout_s: float | None = None
    budget_s: float | None = None
    place: str | None = None

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.label

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job within the limits.

        Raises:
            DeviceError: the device is not there, or its place is not free.
        """
        limited = msgspec.structs.replace(
            job,
            timeout_s=job.timeout_s if self.timeout_s is None else self.timeout_s,
            # A job may ask for less time than the user allows, never for more.
            budget_s=job.budget_s if self.budget_s is None else min(job.budget_s, self.budget_s),
        )
        with nullcontext() if self.place is None else holding_place(self.place):
            return msgspec.structs.replace(self.device.run_job(limited, work), device=self.label)


def address_of(device: Device) -> str:
    """Returns the address of a device, whatever the user calls it, for example `adb:SERIAL` or `arm64`."""
    return device.device.name if isinstance(device, NamedDevice) else device.name


def kind_of(device: Device) -> str:
    """Returns the part of a device's address before the colon."""
    return address_of(device).partition(":")[0]


def is_remote(device: Device) -> bool:
    """Returns True for a device that is another machine; all others run on this one, emulated or not."""
    return kind_of(device) in REMOTE
