"""Devices that a file lists: read strictly, found by their address, called by their name."""

from pathlib import Path

import pytest
from devices_models import float_conv, make_job

from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.local.host import Host
from edgekit.devices.named import NamedDevice, address_of, kind_of
from edgekit.devices.register import DeviceChoice, choose_devices, read_devices
from edgekit.errors import UsageError
from edgekit.target import Target, load_target


def write(folder: Path, text: str) -> Path:
    (folder / "devices.toml").write_text(text)
    return folder / "devices.toml"


def target_for(_kind: str) -> Target:
    return load_target("nnapi")


def test_devices_come_in_the_order_of_options_and_file(tmp_path: Path) -> None:
    file = write(
        tmp_path, '[[device]]\nname = "desk pc"\ndevice = "host"\n[[device]]\nname = "b"\ndevice = "host:native"'
    )
    found = choose_devices(DeviceChoice(names=("arm64",), file=file), target_for, default=("host",))
    assert [device.name for device in found] == ["arm64", "desk pc", "b"]
    assert [address_of(device) for device in found] == ["arm64", "host", "host:native"]
    assert [device.name for device in choose_devices(DeviceChoice(), target_for, default=("host",))] == ["host"]
    # Paths start at the folder of the file.
    text = '[[device]]\nname = "p"\ndevice = "adb:1"\nrunner = "bin/runner"\nlibrary = "/lib/libort.so"'
    (entry,) = read_devices(write(tmp_path, text))
    assert (entry.runner, entry.library) == (str(tmp_path / "bin/runner"), "/lib/libort.so")


def test_a_listed_device_bears_its_name_and_keeps_its_limits(tmp_path: Path, work: Path) -> None:
    jobs: list[Job] = []

    class Watched(Host, frozen=True, kw_only=True):
        """Remembers its jobs."""

        def run_job(self, job: Job, work: Path) -> DeviceRun:
            jobs.append(job)
            return Host.run_job(self, job, work)

    device = NamedDevice(label="desk", device=Watched(), timeout_s=30.0, budget_s=2.0)
    run = device.run_job(make_job(float_conv(tmp_path / "f.onnx"), "nnapi"), work)
    assert (run.device, run.failure, kind_of(device)) == ("desk", None, "host")
    assert (jobs[0].timeout_s, jobs[0].budget_s) == (30.0, 2.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "malformed: Object missing required field `device`"),
        ("device = []", "lists no device"),
        ("[[devices]]\nname = 'a'", "unknown field `devices` (did you mean 'device'"),
        (
            "[[device]]\nname = 'a'\ndevice = 'host'\ntimout_s = 3",
            "unknown field `timout_s` - at `$.device[0]` (did you mean",
        ),
        ("[[device]]\nname = 'a'", "missing required field `device`"),
        ("[[device]]\nname = 'a'\ndevice = 'host'\ntimeout_s = -1", "timeout_s"),
        ("[[device]]\nname = 'a'\ndevice = 'host'\ntimeout_s = nan", "timeout_s"),
        ("[[device]]\nname = 'a'\ndevice = 'host'\nbudget_s = '3'", "budget_s"),
        ("[[device]]\nname = '\\u001b[2J'\ndevice = 'host'".replace("'", '"'), "name"),
        ("[[device]]\nname = '-q'\ndevice = 'host'", "name"),
        ("[[device]]\nname = 'a'\ndevice = 'host'\n[[device]]\nname = 'a'\ndevice = 'host'", "the name 'a' twice"),
        ("[[device]\n", "malformed"),
        ("device = 3", "malformed"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_devices(write(tmp_path, text))
    assert reason in str(caught.value)


def test_a_file_that_is_no_file_or_too_large_or_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_devices(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="larger than"):
        read_devices(write(tmp_path, "#" * (2 << 20)))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="malformed"):
        read_devices(tmp_path / "b.toml")


@pytest.mark.parametrize(("device", "reason"), [("hots", "did you mean 'host'"), ("qnn-htp-sim", "runs QNN")])
def test_a_listed_device_must_exist_and_fit(tmp_path: Path, device: str, reason: str) -> None:
    file = write(tmp_path, f'[[device]]\nname = "a"\ndevice = "{device}"')
    with pytest.raises(UsageError, match=reason):
        choose_devices(DeviceChoice(file=file), target_for, default=())


def test_a_key_that_means_nothing_for_a_device_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path, '[[device]]\nname = "a"\ndevice = "host"\nrunner = "r"')
    with pytest.raises(UsageError, match="'runner' of device 'a' means nothing for 'host'"):
        choose_devices(DeviceChoice(file=file), target_for, default=())
