"""Each function whose interface is another in Android's C library: it is right, and without its stand-in it is not."""

import contextlib
import re
import shutil
import struct
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fixture_types import MakeOnce, present
from other_machine.machine import require

from edgekit.devices.android.android import find_emulator
from edgekit.devices.android.installed import LOADER, MACHINES, list_stand_ins, map_imports, read_library
from edgekit.devices.release import Compiler, Installed, find_compiler, find_zig

pytestmark = pytest.mark.slow

ABI_SOURCES = Path(__file__).parent / "android_abi"
CHECKS = re.findall(r"^CHECK\((\w+)\)", (ABI_SOURCES / "checks.c").read_text(), re.MULTILINE)
THREAD_VARIABLES = 7
OF_THE_LOADER = {"dladdr", "dlopen"}
ARM_ONLY = {
    "pthread_mutex_init", "pthread_attr_init", "pthread_attr_setstacksize", "pthread_cond_destroy",
    "pthread_cond_wait", "pthread_cond_timedwait", "pthread_cond_clockwait", "pthread_cond_signal",
    "pthread_cond_broadcast",
}  # fmt: skip
"""On x86-64 sizes are those of glibc, and it lets 64-bit words lie anywhere."""
MUSL_ONLY = {
    "__memcpy_chk", "__memmove_chk", "__memset_chk", "__vsnprintf_chk", "__vsprintf_chk", "__read_chk", "strtoll_l",
    "strtoull_l", "__register_atfork", "__cxa_thread_atexit_impl",
}  # fmt: skip
"""glibc has them as Android does; the C library that zig links has not."""

SHORT = {"__open_2", "__strlen_chk", "access", "fflush", "pthread_sigmask", "pthread_attr_init", "pthread_cond_wait"}
"""One of each kind: what is linked without one of the others is tried by the long tests."""


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What a check is linked from, for one machine, and what runs it."""

    compiler: Compiler
    objects: tuple[Path, ...]
    library: Path
    imports: tuple[str, ...]
    enter: tuple[str, ...]

    def link(self, work: Path, without: Collection[str] = ()) -> bool:
        """Links the checks without some stand-ins, and returns False where that cannot be."""
        places = {name: name if name in without else place for name, place in map_imports(self.imports).items()}
        msgspec.structs.replace(LOADER, map_imports=lambda _: places).write_imports(self.imports, work / "imports.c")
        argv = [*self.compiler.c, f"-I{LOADER.sources}", "-static", "-o", str(work / "checks"), "-pthread"]
        argv += [str(work / "imports.c"), *map(str, self.objects), "-lm"]
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0

    def run(self, check: str, work: Path, *, timeout_s: float = 8) -> "subprocess.CompletedProcess[str]":
        """Runs one check where `folder` and a phone's files are."""
        for name in ("folder/file", "phone/proc/cpuinfo", "phone/sys/devices/only_here", "stdin"):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text("phone\n" if "phone" in name else "line\nnext\n")
        environment = {"EDGEKIT_PHONE": str(work / "phone"), "EDGEKIT_ANDROID_API": "31", "EDGEKIT_HWCAP": "0x0,0x2"}
        with (work / "stdin").open() as stdin:
            words = [*self.enter, str(work / "checks"), str(self.library), check]
            return subprocess.run(
                words, stdin=stdin, cwd=work, env=environment, capture_output=True, text=True, timeout=timeout_s,
                check=False,
            )  # fmt: skip


def build_checks(abi: str, make_once: MakeOnce, name: str = "gcc") -> Built:
    emulator = find_emulator(abi)
    if emulator is None:
        require("qemu-aarch64-static", "qemu-user-static")
    found = (find_compiler(MACHINES[abi]), find_zig(MACHINES[abi]))
    compiler = next((each for each in found if each is not None and each.name == name), None)
    if compiler is None and name == "zig":
        pytest.skip("ziglang is not installed: pip install ziglang==0.17.1")
    if compiler is None:
        require("aarch64-linux-gnu-gcc", "g++-aarch64-linux-gnu")
    assert compiler is not None

    def fill(folder: Path) -> None:
        sources = [ABI_SOURCES / "main.c", *LOADER.sources.glob("*.c")]
        for source in sources:
            flags = ["-std=gnu11", "-O1", "-fno-builtin", "-c", "-o", str(folder / f"{source.stem}.o"), str(source)]
            subprocess.run([*compiler.c, *flags], check=True)
        flags = ["-O1", "-ffreestanding", "-fno-builtin", "-fno-stack-protector", "-fPIC", "-shared", "-nostdlib"]
        out = ["-Wl,--hash-style=gnu", "-o", str(folder / "libchecks.so"), str(ABI_SOURCES / "checks.c")]
        subprocess.run([*compiler.c, *flags, *out], check=True)

    folder = make_once(f"android-abi-{abi}-{name}", fill)
    library = folder / "libchecks.so"
    return Built(
        compiler=compiler, objects=tuple(sorted(folder.glob("*.o"))), library=library,
        imports=read_library(library).imports, enter=present(emulator),
    )  # fmt: skip


# Arm is emulated, and zig compiles its C++ library for a minute.
_ARM = [pytest.param(("arm64-v8a", name), marks=pytest.mark.long) for name in ("gcc", "zig")]


@pytest.fixture(scope="session", params=[*_ARM, ("x86_64", "gcc")], ids="-".join)
def built(request: pytest.FixtureRequest, make_once: MakeOnce) -> Built:
    abi, name = request.param
    return build_checks(abi, make_once, name)


def test_every_stand_in_is_checked() -> None:
    assert set(CHECKS) - OF_THE_LOADER == {name for name in list_stand_ins() if not name.startswith("ANeuralNetworks")}


def test_every_stand_in_behaves_like_androids_function(built: Built, tmp_path: Path) -> None:
    assert built.link(tmp_path)
    runs = {check: built.run(check, tmp_path) for check in CHECKS}
    assert {check: run.stderr for check, run in runs.items() if run.returncode} == {}


def _each(names: Collection[str], abi: str) -> list[Any]:
    return [pytest.param(name, abi, marks=() if name in SHORT else pytest.mark.long) for name in sorted(names)]


@pytest.mark.parametrize(
    ("name", "abi"),
    [*_each(set(CHECKS) - OF_THE_LOADER - ARM_ONLY - MUSL_ONLY, "x86_64"), *_each(ARM_ONLY, "arm64-v8a")],
)
def test_without_its_stand_in_a_check_fails(name: str, abi: str, make_once: MakeOnce, tmp_path: Path) -> None:
    built = build_checks(abi, make_once)
    with contextlib.suppress(subprocess.TimeoutExpired):
        assert not built.link(tmp_path, {name}) or built.run(name, tmp_path, timeout_s=3).returncode != 0


@pytest.mark.parametrize("compiler", ["gcc", pytest.param("zig", marks=pytest.mark.long)])
def test_no_thread_variable_overlaps_the_stack_guard_on_arm(compiler: str, make_once: MakeOnce, tmp_path: Path) -> None:
    """Code for Android reads it 40 bytes behind the thread pointer, where no thread variable may lie."""
    built = build_checks("arm64-v8a", make_once, compiler)
    (tmp_path / "device").mkdir()
    objects = tuple(Path(shutil.copy(path, tmp_path / "device")) for path in built.objects)
    # As the device links it, which leaves out what nobody uses; zig in C, as it compiles its C++ library for minutes.
    linker = msgspec.structs.replace(built.compiler, cpp=built.compiler.c) if compiler == "zig" else built.compiler
    LOADER.link(linker, objects, built.imports, tmp_path / "device" / "checks", name="checks")
    data = (tmp_path / "device" / "checks").read_bytes()
    (start,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, start + size * index) for index in range(count)]
    (alignment,) = (header[7] for header in headers if header[0] == THREAD_VARIABLES)
    assert alignment >= 64
    if compiler == "gcc":  # glibc itself does not start with what follows
        return
    # The loader looks for itself: a program that was linked otherwise says so, and does not crash.
    place = start + size * next(index for index, header in enumerate(headers) if header[0] == THREAD_VARIABLES)
    spoilt = bytearray(data)
    struct.pack_into("<Q", spoilt, place + 48, 8)
    (tmp_path / "device" / "checks").write_bytes(spoilt)
    run = built.run("getpid", tmp_path / "device")
    assert (run.returncode, run.stderr) == (2, "this program was linked without Android's thread slots\n")


def test_an_installation_is_current_while_it_is_the_pinned_one_for_each_machine_with_a_compiler() -> None:
    loader = msgspec.structs.replace(LOADER, find_compiler=find_compiler, machines={"x86_64": "x86_64"})
    made = Installed(
        archive="a", sha256=loader.pinned_sha256, version="1.29.0", providers=(), abis=("x86_64",), sources=""
    )
    assert loader.is_current(made)
    assert not loader.is_current(msgspec.structs.replace(made, sha256="0"))
    lacking = msgspec.structs.replace(made, abis=())
    assert not loader.is_current(lacking)
    assert msgspec.structs.replace(loader, find_compiler=lambda _: None).is_current(lacking)
