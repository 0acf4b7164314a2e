"""Faults that a device must survive: how each is caused, and a pattern for edgekit's one line of message."""

from collections.abc import Callable
from typing import Any, NamedTuple

from other_machine.board import Board
from other_machine.keeper import OtherMachine

MIB = 1 << 20


def nothing(_: OtherMachine) -> None:
    return


class AdbFault(NamedTuple):
    """A fault behind adb.

    `wire` is the fault of the daemon, which begins before the connection if `early`. `prepare` changes the device.
    `says` is a pattern for the message; "" if the run must succeed all the same. `returns` is whether the device
    answers again afterwards, `program` replaces the runner.
    """

    name: str
    says: str
    wire: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default, never changed
    early: bool = False
    prepare: Callable[[OtherMachine], None] = nothing
    program: str = ""
    space_bytes: int = 512 * MIB
    returns: bool = True
    quick: bool = False


class SshFault(NamedTuple):
    """A fault behind ssh: like one behind adb, but `wire` is that of Wire.fail.

    If `warm`, a run succeeded before, so that only samples are sent.
    """

    name: str
    says: str
    wire: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default, never changed
    prepare: Callable[[Board], None] = lambda _: None
    program: str = ""
    space_bytes: int = 512 * MIB
    warm: bool = False
    returns: bool = True
    quick: bool = False


def _program(name: str, text: str) -> Callable[[OtherMachine], None]:
    """Puts a program into the PATH before those of the system."""

    def put(machine: OtherMachine) -> None:
        path = machine.root / "system/bin" / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    return put


def _blocked(place: str) -> Callable[[OtherMachine], None]:
    def put(machine: OtherMachine) -> None:
        path = machine.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a file where a folder should be")

    return put


def _on_board(change: Callable[[OtherMachine], None]) -> Callable[[Board], None]:
    return lambda board: change(board.machine)


def _settings(name: str, text: str) -> Callable[[Board], None]:
    """Overwrites a file of the board's keys and settings."""

    def put(board: Board) -> None:
        (board.folder / name).write_text(text)

    return put


def _append_user(board: Board) -> None:
    path = board.folder / "ssh_config"
    path.write_text(path.read_text().replace("User ", "User nobody-of-that-name-"))


def _enters(*, before: str = "", sftp: str = "") -> Callable[[Board], None]:
    return lambda board: board.set_enter(before=before, **({"sftp": sftp} if sftp else {}))


def _out(kind: str, service: str = "", after: int = 0, **more: Any) -> dict[str, Any]:
    """Returns a fault that happens after some bytes came from the device."""
    return {"kind": kind, "after": after, **({"service": service} if service else {}), **more}


def _in(kind: str, service: str = "", after: int = 0) -> dict[str, Any]:
    """Returns a fault that happens after some bytes went to the device."""
    return _out(kind, service, after, towards="in")


_ENDED = "(before the first outputs|at sample .*|after the last sample): "
_LOTS = "echo x 1 2 3 4; echo x 99999999 1 99999999 1"
_READING, _LOOKING, _PREPARING = "reading its properties", "looking at what is there", "preparing its folder"
_SENDING, _CHECKING = "sending files", "checking what arrived"
_RUN, _SYNC = "wait $p", "sync:"
_HANG = "#!/bin/sh\nexec sleep 300\n"

ADB_FAULTS = (
    # Whether it is there at all.
    AdbFault(
        "unauthorized", "told to trust", {"kind": "unauthorized", "times": 3}, early=True, returns=False, quick=True
    ),
    AdbFault("old-android", "older than Android 7", {"kind": "banner", "text": "device::"}, early=True, returns=False),
    AdbFault("recovery", "state 'recovery'", {"kind": "banner", "text": "recovery::"}, early=True, returns=False),
    AdbFault("unknown-abi", "has the ABI 'mips'", prepare=_program("getprop", "echo mips")),
    AdbFault("no-getprop", f"{_READING}: .*not found", prepare=_program("getprop", "exec /nosuch")),
    # The first words.
    AdbFault("shell-refused", f"{_READING}: .*closed", _out("refuse", "shell")),
    AdbFault("shell-closed", f"{_READING}: the link broke", _out("close", "shell", 20)),
    AdbFault("shell-dropped", f"{_READING}: the link broke", _out("drop", "shell", 20)),
    AdbFault("shell-stalled", f"{_READING}: it does not answer", _out("stall", "shell"), quick=True),
    AdbFault("shell-garbage", f"{_READING}: ", _out("garbage", "shell")),
    AdbFault("cut-at-once", f"({_READING}|{_LOOKING}): ", _in("drop", "shell")),
    AdbFault("no-exit-packet", "", _out("no-exit", "getprop")),
    # What is there.
    AdbFault("folder-blocked", f"{_LOOKING}: ", prepare=_blocked("data/local/tmp/edgekit")),
    AdbFault("look-dropped", f"{_LOOKING}: the link broke", _out("drop", ".files", 15)),
    AdbFault("look-vanished", f"{_LOOKING}: ", _out("vanish", ".files")),
    AdbFault("noisy-shell", "writes 'hello'", _out("prefix", ".files")),
    AdbFault("prepare-closed", f"{_PREPARING}: ", _out("close", "mkdir part", 10)),
    # Sending files.
    AdbFault("push-dropped", f"{_SENDING}: ", _in("drop", _SYNC, 5 * MIB), quick=True),
    AdbFault("push-closed", f"{_SENDING}: ", _in("close", _SYNC, 3 * MIB)),
    AdbFault("push-stalled", f"{_SENDING}: it does not answer", _in("stall", _SYNC, MIB)),
    AdbFault("push-garbage", f"{_SENDING}: ", _in("garbage", _SYNC, MIB)),
    AdbFault("push-vanished", f"{_SENDING}: ", _in("vanish", _SYNC, 2 * MIB)),
    AdbFault("push-reboot", f"{_SENDING}: ", _in("reboot", _SYNC, 2 * MIB), quick=True),
    AdbFault("push-daemon-dies", f"{_SENDING}: ", _in("kill-daemon", _SYNC, MIB), returns=False),
    AdbFault("push-refused", f"{_SENDING}: .*closed", _out("refuse", _SYNC)),
    AdbFault(
        "push-forbidden",
        f"{_SENDING}: .*Permission denied",
        _out("fail-push", _SYNC, text="couldn't create file: Permission denied"),
    ),
    AdbFault("push-io-error", f"{_SENDING}: .*I/O error", _out("fail-push", _SYNC, text="write failed: I/O error")),
    AdbFault("push-unanswered", f"{_SENDING}: it does not answer", _out("no-answer", _SYNC)),
    AdbFault("stat-lies", f"{_SENDING}: .*Permission denied", _out("stat-lies", _SYNC)),
    AdbFault("push-lost", f"{_CHECKING}: .*damaged", _out("lose-push", _SYNC, 1000), quick=True),
    AdbFault("push-corrupt", f"{_CHECKING}: .*damaged", _in("corrupt", _SYNC, 5 * MIB)),
    AdbFault("disk-full", f"{_SENDING}: .* are needed .* are free", space_bytes=4 * MIB, quick=True),
    AdbFault("disk-full-unseen", f"{_SENDING}: .*No space left", prepare=_program("df", _LOTS), space_bytes=4 * MIB),
    AdbFault("no-digests", f"{_CHECKING}: ", prepare=_program("sha256sum", "echo no >&2; exit 1")),
    AdbFault("wrong-digests", f"{_CHECKING}: .*damaged", prepare=_program("sha256sum", "cat >/dev/null; echo 00 -")),
    AdbFault("check-dropped", f"{_CHECKING}: the link broke", _out("drop", "printf", 15)),
    AdbFault("check-stalled", f"{_CHECKING}: it does not answer", _out("stall", "printf")),
    AdbFault("rename-fails", f"{_CHECKING}: mv is broken", prepare=_program("mv", "echo mv is broken >&2; exit 1")),
    # The run.
    AdbFault("run-refused", "before the first outputs: ", _out("refuse", _RUN)),
    AdbFault("run-dropped-in", _ENDED, _in("drop", _RUN, 10_000)),
    AdbFault("run-dropped-out", _ENDED, _out("drop", _RUN, 10_000), quick=True),
    AdbFault("run-closed", _ENDED, _out("close", _RUN, 20_000)),
    AdbFault("run-stalled", "ran out of time", _out("stall", _RUN, 10_000)),
    AdbFault("run-vanished", _ENDED, _out("vanish", _RUN, 10_000)),
    AdbFault("run-reboot", _ENDED, _out("reboot", _RUN, 10_000)),
    AdbFault("run-daemon-dies", _ENDED, _out("kill-daemon", _RUN, 10_000), returns=False),
    AdbFault("runner-killed", _ENDED, _out("kill-process", _RUN, 10_000), quick=True),
    AdbFault("run-corrupt", "malformed|ended", _out("corrupt", _RUN, 5)),
    AdbFault("run-last-line-cut", _ENDED, _out("close", _RUN, 44_000)),
    AdbFault("run-slow", "", _out("slow", _RUN, times=20, seconds=0.01)),
    AdbFault("run-too-slow", "ran out of time", _out("slow", _RUN, times=9999, seconds=5)),
    AdbFault("runner-hangs", "ran out of time", program=_HANG, quick=True),
    AdbFault("runner-says-nonsense", "malformed", program="#!/bin/sh\ncat >/dev/null; echo hello\n"),
    AdbFault("runner-says-nothing", "before its work was done", program="#!/bin/sh\ncat >/dev/null\n"),
    AdbFault("runner-floods", "malformed|larger", program="#!/bin/sh\nyes | tr -d '\\n'\n"),
    AdbFault("runner-is-no-program", "exit code 12[67]|before its work", program="no program at all"),
    AdbFault("runner-spawns-and-hangs", "ran out of time", program="#!/bin/sh\nsleep 300 & wait\n"),
)

_FIRST = "connecting"
_OTHER_KEY = "* ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAcEHPVMC6VGlXn3Kl1ZTPxX9Ac4fEcWqDxoRxXSg4hF\n"

SSH_FAULTS = (
    # Whether it is there at all.
    SshFault(
        "other-host-key",
        f"{_FIRST}: Host key verification failed",
        prepare=_settings("known_hosts", _OTHER_KEY),
        returns=False,
        quick=True,
    ),
    SshFault(
        "key-not-known", f"{_FIRST}: .*Permission denied", prepare=_settings("authorized_keys", ""), returns=False
    ),
    SshFault("no-such-user", f"{_FIRST}: .*Permission denied", prepare=_append_user, returns=False),
    SshFault("sshd-is-dead", f"{_FIRST}: ", prepare=lambda board: board.server.kill(), returns=False),
    SshFault("turned-away", f"{_FIRST}: ", {"kind": "refuse", "times": 9}),
    SshFault("no-ssh-at-all", f"{_FIRST}: ", {"kind": "noise", "times": 9}),
    SshFault("says-nothing", f"{_FIRST}: it does not answer", {"kind": "mute", "times": 9}),
    SshFault("cut-in-key-exchange", f"{_FIRST}: ", _out("cut", after=1500)),
    SshFault("cut-in-first-command", f"{_FIRST}: ", _out("cut", after=3300)),
    SshFault("stalled-in-key-exchange", f"{_FIRST}: it does not answer", _out("stall", after=1500)),
    SshFault("garbled-in-key-exchange", f"{_FIRST}: ", _out("garble", after=1500)),
    SshFault("command-refused", f"{_FIRST}: ", prepare=_enters(before="echo not today >&2; exit 1")),
    SshFault("noisy-shell", "writes 'welcome'", prepare=_enters(before="echo welcome"), quick=True),
    SshFault("other-system", "no runner for 'Plan9 mips'", prepare=_on_board(_program("uname", "echo Plan9 mips"))),
    # Sending files.
    SshFault("folder-blocked", f"{_LOOKING}: ", prepare=_on_board(_blocked("data/home/.cache"))),
    SshFault("no-sftp", f"{_SENDING}: ", prepare=_enters(sftp="/nosuch"), quick=True),
    SshFault("sftp-fails", f"{_SENDING}: ", prepare=_enters(sftp="exit 3")),
    SshFault("push-cut", f"{_SENDING}: ", _in("cut", after=5 * MIB), quick=True),
    SshFault("push-stalled", f"{_SENDING}: (it does not answer|the link broke)", _in("stall", after=5 * MIB)),
    SshFault("push-garbled", f"{_SENDING}: ", _in("garble", after=5 * MIB)),
    SshFault("disk-full", f"{_SENDING}: .* are needed .* are free", space_bytes=4 * MIB),
    SshFault("disk-full-unseen", f"{_SENDING}: ", prepare=_on_board(_program("df", _LOTS)), space_bytes=4 * MIB),
    SshFault(
        "wrong-digests",
        f"{_CHECKING}: .*damaged",
        prepare=_on_board(_program("sha256sum", "cat >/dev/null; echo 00 -")),
    ),
    SshFault(
        "rename-fails", f"{_CHECKING}: mv is broken", prepare=_on_board(_program("mv", "echo mv is broken >&2; exit 1"))
    ),
    # The run.
    SshFault("run-cut-in", _ENDED, _in("cut", after=25_000), warm=True, quick=True),
    SshFault("run-cut-out", _ENDED, _out("cut", after=25_000), warm=True),
    SshFault("run-stalled", "ran out of time", _out("stall", after=25_000), warm=True),
    SshFault("run-garbled", _ENDED, _out("garble", after=25_000), warm=True),
    SshFault("run-slow", "", {"kind": "slow", "seconds": 0.01, "times": 30}),
    SshFault("board-loses-all-processes", "before the first outputs: ", program="#!/bin/sh\nkill -9 -1\nsleep 9\n"),
    SshFault("runner-killed", "exit code 137", program="#!/bin/sh\nkill -9 $$\n"),
    SshFault("runner-hangs", "ran out of time", program=_HANG),
    SshFault(
        "runner-ignores-the-end",
        "ran out of time",
        program="#!/bin/sh\ntrap '' HUP TERM PIPE\nwhile :; do sleep 1; done\n",
    ),
    SshFault("runner-says-nonsense", "malformed", program="#!/bin/sh\ncat >/dev/null; echo hello\n"),
)
