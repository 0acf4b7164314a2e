"""What can go wrong on the way to a device, injected at a chosen byte of a chosen service."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any


class Fault:
    """A fault that the tests asked for.

    `kind` says what happens, once `after` bytes have passed `towards` the device ("in") or the host ("out") on a
    stream whose service contains `service`; it happens `times` times. `seconds` is how long a slow thing takes.
    """

    def __init__(
        self, *, kind: str = "", service: str = "", after: int = 0, towards: str = "out", times: int = 1,
        seconds: float = 0.0, text: str = "",
    ) -> None:  # fmt: skip
        self.kind = kind
        self.service = service
        self.after = after
        self.towards = towards
        self.times = times
        self.seconds = seconds
        self.text = text
        self.passed: dict[int, int] = {}

    def meets(self, service: str) -> bool:
        return bool(self.kind) and self.times > 0 and self.service in service


class Faults:
    """The fault that is set, and what each kind does to a stream."""

    def __init__(self, vanish: Callable[[float], None]) -> None:
        self.fault = Fault()
        self._vanish = vanish
        self._actions: dict[str, Callable[[Any], None]] = {
            "drop": lambda stream: stream.link.cut(),
            "close": lambda stream: stream.close(),
            "stall": lambda stream: stream.link.stalled.set(),
            "garbage": lambda stream: stream.link.send_garbage(),
            "vanish": lambda _: self._vanish(0.0),
            "reboot": lambda _: self._reboot(),
            "kill-process": lambda stream: _kill_all(stream.pids),
            "kill-daemon": lambda _: os._exit(9),
        }

    def set(self, **values: Any) -> None:
        self.fault = Fault(**values)

    def takes(self, kind: str, service: str) -> bool:
        """Returns True, and uses the fault up, if it is set for a service that causes it itself."""
        if self.fault.kind != kind or not self.fault.meets(service):
            return False
        self.fault.times -= 1
        return True

    def pass_in(self, stream: Any, data: bytes) -> bytes:
        return self._pass(stream, data, "in")

    def pass_out(self, stream: Any, data: bytes) -> bytes:
        return self._pass(stream, data, "out")

    def _pass(self, stream: Any, data: bytes, towards: str) -> bytes:
        fault = self.fault
        if fault.towards != towards or not fault.meets(stream.service):
            return data
        if fault.kind == "slow":
            time.sleep(fault.seconds)
            return data
        if fault.kind != "corrupt" and fault.kind not in self._actions:
            return data
        before = fault.passed.get(id(stream), 0)
        fault.passed[id(stream)] = before + len(data)
        if before + len(data) <= fault.after:
            return data
        fault.times -= 1
        keep = max(0, fault.after - before)
        if fault.kind == "corrupt":
            return data[:keep] + bytes([data[keep] ^ 0x20]) + data[keep + 1 :]
        if towards == "out" and keep:
            stream.link.send(0x45545257, stream.own, stream.peer, data[:keep])
        self._actions[fault.kind](stream)
        return data if fault.kind == "kill-process" else b""

    def _reboot(self) -> None:
        _kill_others()
        self._vanish(self.fault.seconds or 1.0)


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _kill_others() -> None:
    """Ends every process of the namespace but this one, which is its first."""
    if os.getpid() == 1:
        os.kill(-1, signal.SIGKILL)


def later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
