"""Faults that a device must survive: how each is caused, and a pattern for edgekit's one line of message."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from other_machine.board import Board
from other_machine.machine import OtherMachine

MIB = 1 << 20


class Fault(NamedTuple):
    """A fault behind adb or ssh.

    Behind adb, `wire` is the fault of the daemon, which begins before the connection if `early`; behind ssh it is that
    of Wire.fail, and if `warm`, a run succeeded before, so that only samples are sent. `prepare` changes the device.
    `says` is a pattern for the message; "" if the run must succeed all the same. `returns` is whether the device
    answers again afterwards, `program` replaces the runner.
    """

    name: str
    says: str
    wire: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default, never changed
    early: bool = False
    warm: bool = False
    prepare: Callable[[Any], object] = lambda _: None
    program: str = ""
    space_bytes: int = 512 * MIB
    returns: bool = True
    quick: bool = False


def _root(device: OtherMachine | Board) -> Path:
    return (device.machine if isinstance(device, Board) else device).root


def _program(name: str, text: str) -> Callable[[OtherMachine | Board], None]:
    """Puts a program into the PATH before those of the system."""

    def put(device: OtherMachine | Board) -> None:
        path = _root(device) / "system/bin" / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    return put


def _blocked(place: str) -> Callable[[OtherMachine | Board], None]:
    def put(device: OtherMachine | Board) -> None:
        path = _root(device) / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a file where a folder should be")

    return put


def _settings(name: str, text: str) -> Callable[[Board], object]:
    """Overwrites a file of the board's keys and settings."""
    return lambda board: (board.folder / name).write_text(text)


def _append_user(board: Board) -> None:
    path = board.folder / "ssh_config"
    path.write_text(path.read_text().replace("User ", "User nobody-of-that-name-"))


def _enters(before: str) -> Callable[[Board], None]:
    return lambda board: board.set_enter(before=before)


def _out(kind: str, service: str = "", after: int = 0, **more: Any) -> dict[str, Any]:
    """Returns a fault that happens after some bytes came from the device."""
    return {"kind": kind, "after": after, **({"service": service} if service else {}), **more}


def _in(kind: str, service: str = "", after: int = 0) -> dict[str, Any]:
    """Returns a fault that happens after some bytes went to the device."""
    return _out(kind, service, after, towards="in")


_ENDED = "(before the first outputs|at sample .*|after the last sample): "
_LOTS = "echo x 1 2 3 4; echo x 99999999 1 99999999 1"
_READING, _LOOKING = "reading its properties", "looking at what is there"
_SENDING, _CHECKING = "sending files", "checking what arrived"
_RUN, _SYNC = "wait $p", "tar -xf"
_LOSING_TAR = _program("tar", "head -c 1000 >0; cat >/dev/null")
_BROKEN_TAR = _program("tar", "echo tar: 0: write failed: I/O error >&2; echo tar: giving up >&2; exit 2")

_OF_BOTH = (
    Fault("disk-full", f"{_SENDING}: .* are needed .* are free", space_bytes=4 * MIB, quick=True),
    Fault("disk-full-unseen", f"{_SENDING}: tar: .*", prepare=_program("df", _LOTS), space_bytes=4 * MIB),
    Fault("wrong-digests", f"{_CHECKING}: .*damaged", prepare=_program("sha256sum", "cat >/dev/null; echo 00 -")),
    Fault("rename-fails", f"{_CHECKING}: mv is broken", prepare=_program("mv", "echo mv is broken >&2; exit 1")),
    Fault("runner-hangs", "ran out of time", program="#!/bin/sh\nexec sleep 300\n", quick=True),
    Fault("runner-says-nonsense", "malformed", program="#!/bin/sh\ncat >/dev/null; echo hello\n"),
)

ADB_FAULTS = (
    *_OF_BOTH,
    # Whether it is there at all.
    Fault("unauthorized", "told to trust", {"kind": "unauthorized", "times": 3}, early=True, returns=False, quick=True),
    Fault("old-android", "older than Android 7", {"kind": "banner", "text": "device::"}, early=True, returns=False),
    Fault("recovery", "state 'recovery'", {"kind": "banner", "text": "recovery::"}, early=True, returns=False),
    Fault("unknown-abi", "has the ABI 'mips'", prepare=_program("getprop", "echo mips")),
    Fault("no-getprop", f"{_READING}: .*not found", prepare=_program("getprop", "exec /nosuch")),
    # The first words.
    Fault("shell-refused", f"{_READING}: .*closed", _out("refuse", "shell")),
    Fault("shell-closed", f"{_READING}: the link broke", _out("close", "shell", 20)),
    Fault("shell-dropped", f"{_READING}: the link broke", _out("drop", "shell", 20)),
    Fault("shell-stalled", f"{_READING}: it does not answer", _out("stall", "shell"), quick=True),
    Fault("shell-garbage", f"{_READING}: ", _out("garbage", "shell")),
    Fault("cut-at-once", f"({_READING}|{_LOOKING}): ", _in("drop", "shell")),
    Fault("no-exit-packet", "", _out("no-exit", "getprop")),
    # What is there.
    Fault("folder-blocked", f"{_LOOKING}: ", prepare=_blocked("data/local/tmp/edgekit")),
    Fault("look-dropped", f"{_LOOKING}: the link broke", _out("drop", "df -Pk", 15)),
    Fault("look-vanished", f"{_LOOKING}: ", _out("vanish", "df -Pk")),
    Fault("noisy-shell", "writes 'hello'", _out("prefix", "df -Pk")),
    Fault("prepare-closed", f"{_SENDING}: ", _out("close", "mkdir part", 10)),
    # Sending files.
    Fault("push-dropped", f"{_SENDING}: ", _in("drop", _SYNC, 5 * MIB), quick=True),
    Fault("push-closed", f"{_SENDING}: ", _in("close", _SYNC, 3 * MIB)),
    Fault("push-stalled", f"{_SENDING}: it does not answer", _in("stall", _SYNC, MIB)),
    Fault("push-garbage", f"{_SENDING}: ", _in("garbage", _SYNC, MIB)),
    Fault("push-vanished", f"{_SENDING}: ", _in("vanish", _SYNC, 2 * MIB)),
    Fault("push-reboot", f"{_SENDING}: ", _in("reboot", _SYNC, 2 * MIB), quick=True),
    Fault("push-daemon-dies", f"{_SENDING}: ", _in("kill-daemon", _SYNC, MIB), returns=False),
    Fault("push-refused", f"{_SENDING}: .*closed", _out("refuse", _SYNC)),
    Fault("push-io-error", f"{_SENDING}: tar: 0: .*I/O error", prepare=_BROKEN_TAR, quick=True),
    Fault("push-lost", f"{_CHECKING}: .*damaged", prepare=_LOSING_TAR, quick=True),
    Fault("push-corrupt", f"{_CHECKING}: .*damaged", _in("corrupt", _SYNC, 5 * MIB)),
    Fault("no-digests", f"{_CHECKING}: ", prepare=_program("sha256sum", "echo no >&2; exit 1")),
    Fault("check-dropped", f"{_CHECKING}: the link broke", _out("drop", "ls -t", 15)),
    Fault("check-stalled", f"{_CHECKING}: it does not answer", _out("stall", "ls -t")),
    # The run.
    Fault("run-refused", "before the first outputs: ", _out("refuse", _RUN)),
    Fault("run-dropped-in", _ENDED, _in("drop", _RUN, 10_000)),
    Fault("run-dropped-out", _ENDED, _out("drop", _RUN, 10_000), quick=True),
    Fault("run-closed", _ENDED, _out("close", _RUN, 20_000)),
    Fault("run-stalled", "ran out of time", _out("stall", _RUN, 10_000)),
    Fault("run-vanished", _ENDED, _out("vanish", _RUN, 10_000)),
    Fault("run-reboot", _ENDED, _out("reboot", _RUN, 10_000)),
    Fault("run-daemon-dies", _ENDED, _out("kill-daemon", _RUN, 10_000), returns=False),
    Fault("runner-killed", _ENDED, _out("kill-process", _RUN, 10_000), quick=True),
    Fault("run-corrupt", "malformed|ended", _out("corrupt", _RUN, 5)),
    Fault("run-last-line-cut", _ENDED, _out("close", _RUN, 44_000)),
    Fault("run-slow", "", _out("slow", _RUN, times=20, seconds=0.01)),
    Fault("run-too-slow", "ran out of time", _out("slow", _RUN, times=9999, seconds=5)),
    Fault("runner-says-nothing", "before its work was done", program="#!/bin/sh\ncat >/dev/null\n"),
    Fault("runner-floods", "malformed|larger", program="#!/bin/sh\nyes | tr -d '\\n'\n"),
    Fault("runner-is-no-program", "exit code 12[67]|before its work", program="no program at all"),
    Fault("runner-spawns-and-hangs", "ran out of time", program="#!/bin/sh\nsleep 300 & wait\n"),
)

_FIRST = "connecting"
_OTHER_KEY = "* ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAcEHPVMC6VGlXn3Kl1ZTPxX9Ac4fEcWqDxoRxXSg4hF\n"

SSH_FAULTS = (
    *_OF_BOTH,
    # Whether it is there at all.
    Fault("other-host-key", f"{_FIRST}: Host key verification failed", prepare=_settings("known_hosts", _OTHER_KEY),
          returns=False, quick=True),
    Fault("key-not-known", f"{_FIRST}: .*Permission denied", prepare=_settings("authorized_keys", ""), returns=False),
    Fault("no-such-user", f"{_FIRST}: .*Permission denied", prepare=_append_user, returns=False),
    Fault("sshd-is-dead", f"{_FIRST}: ", prepare=lambda board: board.server.kill(), returns=False),
    Fault("turned-away", f"{_FIRST}: ", {"kind": "refuse", "times": 9}),
    Fault("no-ssh-at-all", f"{_FIRST}: ", {"kind": "noise", "times": 9}),
    Fault("says-nothing", f"{_FIRST}: it does not answer", {"kind": "mute", "times": 9}),
    Fault("cut-in-key-exchange", f"{_FIRST}: ", _out("cut", after=1500)),
    Fault("cut-in-first-command", f"{_FIRST}: ", _out("cut", after=3300)),
    Fault("stalled-in-key-exchange", f"{_FIRST}: it does not answer", _out("stall", after=1500)),
    Fault("garbled-in-key-exchange", f"{_FIRST}: ", _out("garble", after=1500)),
    Fault("command-refused", f"{_FIRST}: ", prepare=_enters("echo not today >&2; exit 1")),
    Fault("noisy-shell", "writes 'welcome'", prepare=_enters("echo welcome"), quick=True),
    Fault("other-system", "no runner for 'Plan9 mips'", prepare=_program("uname", "echo Plan9 mips")),
    # Sending files.
    Fault("folder-blocked", f"{_LOOKING}: ", prepare=_blocked("data/home/.cache")),
    Fault("no-tar", f"{_SENDING}: .*(not found|No such file)", prepare=_program("tar", "exec /nosuch")),
    Fault("push-cut", f"{_SENDING}: ", _in("cut", after=5 * MIB), quick=True),
    Fault("push-stalled", f"{_SENDING}: (it does not answer|the link broke)", _in("stall", after=5 * MIB)),
    Fault("push-garbled", f"{_SENDING}: ", _in("garble", after=5 * MIB)),
    # The run.
    Fault("run-cut-in", _ENDED, _in("cut", after=25_000), warm=True, quick=True),
    Fault("run-cut-out", _ENDED, _out("cut", after=25_000), warm=True),
    Fault("run-stalled", "ran out of time", _out("stall", after=25_000), warm=True),
    Fault("run-garbled", _ENDED, _out("garble", after=25_000), warm=True),
    Fault("run-slow", "", {"kind": "slow", "seconds": 0.01, "times": 30}),
    Fault("board-loses-all-processes", "before the first outputs: ", program="#!/bin/sh\nkill -9 -1\nsleep 9\n"),
    Fault("runner-killed", "exit code 137", program="#!/bin/sh\nkill -9 $$\n"),
    Fault("runner-ignores-the-end", "ran out of time",
          program="#!/bin/sh\ntrap '' HUP TERM PIPE\nwhile :; do sleep 1; done\n"),
)  # fmt: skip
