"""The real adb client on a server of its own, which knows no phone of the developer and leaves no key behind."""

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

from other_machine.machine import OtherMachine, require, wait_for


class Adb:
    """An adb server of the tests, and the environment in which every `adb` is its client."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    def run(self, *words: str, data: bytes = b"", timeout_s: float = 20.0) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["adb", *words], input=data, capture_output=True, timeout=timeout_s, check=False,
            env={**os.environ, **self.environment},
        )  # fmt: skip

    @contextlib.contextmanager
    def connected(self, machine: OtherMachine) -> Generator[str]:
        """Yields the serial of a machine that the server is connected to."""
        serial = f"127.0.0.1:{machine.port}"
        self.run("connect", serial)
        try:
            yield serial
        finally:
            self.run("disconnect", serial)


@contextlib.contextmanager
def adb_server() -> Generator[Adb]:
    """Yields a server on a socket of its own, started once: clients that find none would each start one."""
    require("adb", "adb")
    with tempfile.TemporaryDirectory(prefix="edgekit-adb-") as folder:
        place = f"localfilesystem:{folder}/adb.sock"
        environment = {
            "ADB_SERVER_SOCKET": place, "ADB_EMU": "0", "ADB_USB": "0", "ADB_MDNS": "0",
            "ANDROID_ADB_LOG_PATH": f"{folder}/adb.log", "ANDROID_SERIAL": "", "ADB_VENDOR_KEYS": "",
        }  # fmt: skip
        Path(folder, "home").mkdir()
        with Path(folder, "server.log").open("wb") as log:
            server = subprocess.Popen(
                ["adb", "-L", place, "nodaemon", "server"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **environment, "HOME": f"{folder}/home"},
            )  # fmt: skip
        try:
            wait_for(socket.AF_UNIX, f"{folder}/adb.sock")
            yield Adb(environment)
        finally:
            server.kill()
            server.wait()
