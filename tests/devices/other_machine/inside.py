"""Makes a root for programs of another machine inside a namespace of its own, and stays in it: `python inside.py SPEC`.

It is started as process 1 of new user, mount and process namespaces, so nothing of it shows outside: neither its
mounts, nor the binfmt_misc entry that lets the kernel start 64-bit Arm programs, nor a process that it leaves behind.
SPEC is JSON: `root` (a folder to fill, or an Arm root), `qemu` ("" for a root of this machine's own programs), `site`
(aarch64 wheels, or ""), `getprop` (a program for a root of this machine's own), `space_bytes` (how large the disk of
the machine is), `daemon` (true: serve adb; false: wait).
It prints a line of JSON when it is ready, and ends when its standard input is closed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from adb_daemon.daemon import (
    say,
    serve,
)  # everything is imported before the change of root: after it there is no Python

_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_MAGIC = (
    r":edgekit-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:%s:F"
)
_OWN = frozenset({"data", "system", "proc", "dev"})
_CPUINFO = """processor\t: 0
BogoMIPS\t: 100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1
"""


def main() -> int:
    """Makes the root, enters it, and serves or waits."""
    spec = json.loads(sys.argv[1])
    outer_pid = int(Path("/proc/self").readlink().name)
    root = Path(spec["root"])
    if spec["qemu"]:
        _mount("-t", "binfmt_misc", "binfmt_misc", str(_BINFMT))
        (_BINFMT / "register").write_text(_MAGIC % spec["qemu"])
        _fill_arm(root, spec)
    else:
        _fill_native(root, spec["getprop"])
    _mount("-t", "tmpfs", "-o", f"size={spec['space_bytes']},mode=0755", "disk", str(root / "data"))
    for name in ("local/tmp", "home"):
        (root / "data" / name).mkdir(parents=True)
    os.chroot(root)
    os.chdir("/")
    ready = {"pid": outer_pid}
    if spec["daemon"]:
        serve(ready)
    else:
        say(ready)
        sys.stdin.buffer.read()
    return 0


def _fill_arm(root: Path, spec: dict[str, str]) -> None:
    for name in ("null", "zero", "urandom"):
        _mount("--bind", f"/dev/{name}", str(root / "dev" / name))
    _mount("-t", "tmpfs", "fake", str(root / "proc"))
    (root / "proc/cpuinfo").write_text(_CPUINFO)
    (root / "proc/mounts").write_text("disk /data tmpfs rw 0 0\n")
    _mount("-t", "tmpfs", "fake", str(root / "sys"))
    cpus = root / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    for name in ("possible", "present", "online"):
        (cpus / name).write_text("0-1\n")
    if spec["site"]:
        _mount("--bind", spec["site"], str(root / "site"))


def _fill_native(root: Path, getprop: str) -> None:
    """Shows the programs of this machine, and puts a disk of its own and Android's shell beside them."""
    _mount("-t", "tmpfs", "root", str(root))
    for entry in Path("/").iterdir():
        place = root / entry.name
        if entry.is_symlink():
            place.symlink_to(entry.readlink())
        elif entry.is_dir() and entry.name not in _OWN:
            place.mkdir()
            _mount("--rbind", str(entry), str(place))
    for name in ("proc", "dev", "data"):
        (root / name).mkdir()
    _mount("-t", "proc", "proc", str(root / "proc"))
    _mount("--rbind", "/dev", str(root / "dev"))
    (root / "system/bin").mkdir(parents=True)
    (root / "system/bin/sh").symlink_to("/bin/sh")
    (root / "system/bin/getprop").write_text(getprop)
    (root / "system/bin/getprop").chmod(0o755)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
