"""Another machine for the tests: a root in namespaces of its own, in which adb or ssh run commands."""

import contextlib
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from edgekit._files import digest_bytes, one_at_a_time, staged_folder
from edgekit.devices.local.arm64 import find_missing_root
from edgekit.machine import cache_folder

_INSIDE = Path(__file__).parent / "inside.py"
_PACKAGES = "mksh,toybox,coreutils,findutils,grep,python3,libc6,libgcc-s1,libstdc++6"
_LARGE = 512 << 20


class OtherMachine:
    """A running machine: its files and its processes, seen from here."""

    def __init__(self, child: subprocess.Popen[str], ready: dict[str, int]) -> None:
        self.child = child
        self.pid = ready["pid"]
        self.port = ready.get("port", 0)

    @property
    def root(self) -> Path:
        return Path(f"/proc/{self.pid}/root")

    def ask(self, **fault: Any) -> dict[str, Any]:
        """Sets a fault, and returns what the daemon has seen since the last call."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(fault) + "\n")
        self.child.stdin.flush()
        answer: dict[str, Any] = json.loads(self.child.stdout.readline())
        return answer

    def files(self) -> list[str]:
        """Returns the files on the machine's disk."""
        data = self.root / "data"
        return sorted(str(path.relative_to(data)) for path in data.rglob("*"))

    def left_files(self) -> list[str]:
        """Returns the files of runs and transfers that have not ended."""
        return [name for name in self.files() if "part-" in name or "run-" in name]

    def left_running(self, *, within_s: float = 5.0) -> list[str]:
        """Returns the processes that still run after `within_s`; returns at once when there is none."""
        deadline = time.monotonic() + within_s
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def processes(self) -> list[str]:
        """Returns the command lines of the processes in the namespace, without its first one."""
        own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found: list[str] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if (entry / "ns/pid").readlink() == own and words:
                        found.append(words)
        return found


@contextlib.contextmanager
def start_machine(*, arm: bool, adb: bool, space_bytes: int = _LARGE) -> Generator[OtherMachine]:
    """Yields a machine; skips the test where namespaces cannot be made."""
    with tempfile.TemporaryDirectory(prefix="edgekit-machine-") as folder:
        spec = {
            "root": str(arm_root() if arm else folder),
            "qemu": require("qemu-aarch64-static", "qemu-user-static") if arm else "",
            "site": str(cache_folder() / "arm64" / "root" / "site") if arm and find_missing_root() is None else "",
            "getprop": _getprop("x86_64"),
            "space_bytes": space_bytes,
            "daemon": adb,
        }
        enter = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        child = subprocess.Popen(
            [*enter, sys.executable, "-I", str(_INSIDE), json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                _, words = child.communicate(timeout=10)
                pytest.skip(f"no namespace with {'binfmt_misc and ' * arm}mounts here: {words.strip()[-300:]}")
            yield OtherMachine(child, json.loads(line))
        finally:
            child.kill()
            child.communicate()


def require(program: str, package: str) -> str:
    """Returns the path of a program; skips the test if it is not installed."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{program} not found: apt-get install {package}")
    return path


def wait_for(family: socket.AddressFamily, address: tuple[str, int] | str) -> None:
    """Waits until a server takes connections at an address."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.connect(address)
            return
        time.sleep(0.02)
    raise TimeoutError(address)


def arm_root() -> Path:
    """Returns the Debian root for 64-bit Arm with Android's shell and tools, made once and kept in the cache."""
    require("mmdebstrap", "mmdebstrap")
    stamp = digest_bytes((_PACKAGES + inspect.getsource(_fill) + _getprop("")).encode())[:12]
    folder = cache_folder() / "test-far" / stamp
    with one_at_a_time(folder):
        if not folder.is_dir():
            with staged_folder(folder) as staging:
                _fill(staging)
    return folder


def _fill(root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="edgekit-machine-") as work:
        archive = f"{work}/root.tar"
        made = subprocess.run(
            ["mmdebstrap", "--mode=chrootless", "--arch=arm64", "--variant=extract", f"--include={_PACKAGES}",
             "bookworm", archive],
            capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": work},
        )  # fmt: skip
        if made.returncode:
            pytest.skip(f"mmdebstrap cannot make the other machine's root: {made.stderr.strip()[-300:]}")
        unpack = ["tar", "-xf", archive, "-C", str(root), "--no-same-owner", "--exclude=./dev/*"]
        subprocess.run(unpack, check=True, capture_output=True)
    for name in ("system/bin", "data", "proc", "sys", "dev", "site", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("null", "zero", "urandom"):
        (root / "dev" / name).touch()
    (root / "system/bin/sh").symlink_to("/bin/mksh-static")
    (root / "etc/passwd").write_text("root:x:0:0:root:/data/home:/bin/sh\nshell:x:2000:2000::/:/bin/sh\n")
    (root / "bin/sh").unlink(missing_ok=True)
    (root / "bin/sh").symlink_to("mksh-static")
    for name in ("df", "mv", "rm", "mkdir", "ls", "cat", "tar", "touch", "chmod", "find", "grep", "cp", "setsid"):
        (root / "system/bin" / name).symlink_to("/bin/toybox")
    getprop = root / "system/bin/getprop"
    getprop.write_text(_getprop("arm64-v8a"))
    getprop.chmod(0o755)


def _getprop(abi: str) -> str:
    """Returns the text of a program that prints Android's system properties."""
    values = {"ro.product.cpu.abi": abi, "ro.build.version.release": "14", "ro.product.model": "Edge Fake 1",
              "ro.soc.model": "SM8650"}  # fmt: skip
    cases = "".join(f"{key}) echo '{value}';;\n" for key, value in values.items())
    return f'#!/system/bin/sh\ncase "$1" in\n{cases}esac\n'
