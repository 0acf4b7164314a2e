"""A board behind ssh: a real sshd on loopback whose commands run on another machine, behind a wire that can be cut."""

import contextlib
import getpass
import itertools
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

from other_machine.machine import OtherMachine, require, start_machine, wait_for
from other_machine.wire import Wire

_ENTER = """#!/bin/sh
{before}
command=${{SSH_ORIGINAL_COMMAND:-sh}}
exec nsenter --target {pid} --user --preserve-credentials --mount --pid --root --wd env -i \
    HOME=/data/home TMPDIR=/data/local/tmp PATH=/system/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH=/site \
    LC_ALL=C QEMU_CPU=cortex-a76 \
    /system/bin/sh -c "$command"
"""
_SSHD = """ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
SetEnv SHLVL=2
ForceCommand {folder}/enter
"""
_CLIENT = """Host board
HostName 127.0.0.1
Port {port}
User {user}
IdentityFile {folder}/user_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
"""


# SHLVL keeps bash from reading this user's own start-up files, which are slow or write something on some machines.


class Board:
    """A machine behind ssh, and the wire to it; the user's configuration calls it `board`."""

    def __init__(self, machine: OtherMachine, wire: Wire, folder: Path, server: subprocess.Popen[bytes]) -> None:
        self.machine = machine
        self.wire = wire
        self.folder = folder
        self.server = server

    @property
    def programs(self) -> str:
        """A folder whose `ssh` is the real one with the configuration of this board's user."""
        return str(self.folder / "bin")

    def set_enter(self, *, before: str = "") -> None:
        """Says what the board does before each command."""
        _write_program(self.folder / "enter", _ENTER.format(pid=self.machine.pid, before=before))


@contextlib.contextmanager
def ssh_board(*, arm: bool, space_bytes: int = 512 << 20) -> Generator[Board]:
    """Yields a board; skips where this machine has no sshd or can start no other machine."""
    sshd = require("sshd", "openssh-server")
    for program in ("ssh", "ssh-keygen"):
        require(program, "openssh-client")
    with (
        start_machine(arm=arm, adb=False, space_bytes=space_bytes) as machine,
        tempfile.TemporaryDirectory(prefix="edgekit-sshd-") as name,
        Wire(_free_port()) as wire,
    ):
        folder = Path(name)
        _write_settings(folder, wire)
        run = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs run /run && mkdir /run/sshd && exec "$@"', "sshd"]
        server = subprocess.Popen(
            [*(run if os.geteuid() == 0 else []), sshd, "-D", "-e", "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            board = Board(machine, wire, folder, server)
            board.set_enter()
            wait_for(socket.AF_INET, ("127.0.0.1", wire.target))
            yield board
        finally:
            wire.cut()  # or its processes would wait for a client that is stalled
            server.kill()
            server.wait()


def _write_settings(folder: Path, wire: Wire) -> None:
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(_SSHD.format(port=wire.target, folder=folder))
    (folder / "ssh_config").write_text(_CLIENT.format(port=wire.port, folder=folder, user=getpass.getuser()))
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    host_key = (folder / "host_key.pub").read_text().split()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{wire.port} {host_key[0]} {host_key[1]}\n")
    (folder / "bin").mkdir()
    _write_program(folder / "bin/ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def _free_port() -> int:
    """Returns a port below those that the system gives away: another listener could take one of those meanwhile."""
    # Each worker of a test run begins at another one.
    for port in itertools.count(20000 + os.getpid() % 10000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError
