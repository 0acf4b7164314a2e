"""Several devices at once: in order, side by side, within what this machine bears, and all ended together."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from devices_models import Stub

from edgekit._proc import run_process
from edgekit.devices.device import Device
from edgekit.devices.parallel import count_slots, in_background, run_each, run_together
from edgekit.errors import DeviceError


def devices(*names: str) -> list[Stub]:
    return [Stub(name=name) for name in names]


def test_results_keep_the_order_of_the_devices_however_long_each_takes() -> None:
    def run(device: Device) -> str:
        time.sleep(0.2 if device.name.endswith("1") else 0.0)
        return device.name

    names = ("adb:1", "host", "adb:2", "adb:1", "emulated")
    assert run_each(devices(*names), run) == names
    assert run_each([], run) == ()


def _most_at_once(names: tuple[str, ...], *, timed: bool = False) -> int:
    lock, now, most = threading.Lock(), 0, 0

    def run(_device: Device) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1

    run_each(devices(*names), run, timed=timed)
    return most


def test_remote_devices_run_side_by_side_and_one_device_or_machine_does_not() -> None:
    everyone = threading.Barrier(5, timeout=10)
    assert len(run_each(devices("adb:1", "adb:2", "ssh:a@b", "ssh:c", "adb:3"), lambda _: everyone.wait())) == 5
    assert _most_at_once(("adb:1", "adb:1", "adb:1")) == 1
    assert _most_at_once(("host", "emulated", "arm64"), timed=True) == 1


@pytest.mark.parametrize(
    ("cores", "free_bytes", "slots"), [(2, 64 << 30, 4), (8, 4 << 30, 2), (8, 1 << 20, 1), (4, None, 4)]
)
def test_as_many_run_at_once_as_cores_and_memory_allow(cores: int, free_bytes: int | None, slots: int) -> None:
    assert count_slots(cores, free_bytes) == slots


def test_when_one_raises_the_children_of_the_others_end() -> None:
    start = time.monotonic()
    ended: list[str] = []

    def sleep() -> None:
        ended.append(run_process([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=60).ending)

    def fail() -> None:
        time.sleep(0.5)
        raise DeviceError("unplugged", hint="plug it in")

    with pytest.raises(DeviceError, match="unplugged"):
        run_together([sleep, fail, sleep])
    assert time.monotonic() - start < 20
    assert set(ended) == {"was ended by SIGKILL"}


@pytest.mark.parametrize("who", ["block", "call"])
def test_background_calls_end_when_the_block_or_another_call_raises(who: str) -> None:
    start = time.monotonic()
    ended: list[str] = []

    def work(seconds: float) -> None:
        if not seconds:
            raise DeviceError("unplugged", hint="plug it in")
        program = f"import time; time.sleep({seconds})"
        ended.append(run_process([sys.executable, "-c", program], timeout_s=60).ending)

    with pytest.raises(DeviceError, match="unplugged"), in_background(work, 2, 1) as begin:
        begin(60.0)
        if who == "call":
            begin(0.0)
        else:
            time.sleep(0.2)
            work(0.0)
    assert time.monotonic() - start < 20
    assert ended == ["was ended by SIGKILL"]


def test_a_block_continues_while_calls_run_in_the_background() -> None:
    done = threading.Event()
    with in_background(done.wait, 1, 1) as begin:
        found = begin(20.0)
        assert not found.done()
        done.set()
    assert found.result()


def test_more_background_calls_run_at_once_after_the_block() -> None:
    begun: list[int] = []
    both = threading.Barrier(2)

    def work(item: int) -> int:
        begun.append(item)
        # One call alone waits in vain, and the barrier breaks.
        both.wait(20.0)
        return item

    with in_background(work, 1, 1) as begin:
        found = [begin(item) for item in range(4)]
        time.sleep(0.1)
        assert begun == [0]
    assert [each.result() for each in found] == sorted(begun) == [0, 1, 2, 3]


def test_an_interrupt_leaves_no_child(tmp_path: Path) -> None:
    sleeper = f"import time, pathlib; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)"
    program = (
        "import sys\nfrom edgekit._proc import run_process\nfrom edgekit.devices.parallel import run_together\n"
        f"run_together([lambda: run_process([sys.executable, '-c', {sleeper!r}], timeout_s=60)])"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    while not (tmp_path / "up").exists():
        time.sleep(0.05)
    child.send_signal(2)
    assert child.wait(20) != 0
    assert str(tmp_path) not in run_process(["ps", "-eo", "args"], timeout_s=20).stdout
