"""A device under a name of the user's, with its own time limits and its place in a laboratory."""

from contextlib import nullcontext
from pathlib import Path

import msgspec

from edgekit.devices.device import Device, DeviceRun, Job, Missing
from edgekit.devices.process.labgrid import holding_place
from edgekit.evidence import Evidence


class Labelled(msgspec.Struct, frozen=True, kw_only=True):
    """A device as `devices.toml` lists it: reports call it `label`; limits of None are those of the job.

    A `place` of Labgrid is held while it runs.
    """

    label: str
    device: Device
    timeout_s: float | None = None
    budget_s: float | None = None
    place: str | None = None

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.label

    @property
    def evidence(self) -> Evidence:
        """How good its word is."""
        return self.device.evidence

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine."""
        return self.device.find_missing()

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
    """Returns what a device is, whatever the user calls it, for example `adb:SERIAL` or `arm64`."""
    return device.device.name if isinstance(device, Labelled) else device.name


def kind_of(device: Device) -> str:
    """Returns the part of a device's address before the colon."""
    return address_of(device).partition(":")[0]
