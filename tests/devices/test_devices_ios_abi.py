"""What differs between Apple's libraries and this machine's: it is right, and without what stands for it it is not.

The checks are compiled by zig for macOS, with Apple's headers, and loaded as ONNX Runtime's object is.
"""

import shutil
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
import pytest

from edgekit.devices.ios.framework import list_imports
from edgekit.devices.ios.ios import IosSimulator
from edgekit.devices.ios.stand_in import compile_command, list_sources, write_imports
from edgekit.devices.release.compilers import Compiler, find_zig

pytestmark = pytest.mark.slow

SOURCES = Path(__file__).parent / "ios_abi"
WAIT = "_ZNSt3__118condition_variable4waitERNS_11unique_lockINS_5mutexEEE"

# Each check, and the stand-ins without each of which it must fail.
CHECKS: dict[str, tuple[str, ...]] = {
    "exceptions": (),
    "thread_variables": ("_tlv_bootstrap", "_tlv_atexit"),
    "mutex": ("_ZNSt3__15mutex4lockEv", "_ZNSt3__15mutex8try_lockEv"),
    "plain_condition": ("pthread_cond_wait", "pthread_cond_timedwait_relative_np", "pthread_mutex_lock"),
    "condition_variable": (WAIT,),
    "recursive_mutex": ("pthread_mutex_init", "pthread_mutexattr_settype"),
    "once": ("pthread_once",),
    "thread_key": ("pthread_key_create",),
    "files": ("open", "fstat", "stat", "mmap", "sysconf", "__error"),
    "folders": ("nftw",),
    "clocks": ("clock_gettime", "clock_gettime_nsec_np"),
    "letters": ("_DefaultRuneLocale",),
    "facet": ("_ZNKSt3__16locale9use_facetERNS0_2idE",),
    "regex": ("_ZNSt3__115__get_classnameEPKcb",),
    "positions": ("_ZNSt3__113basic_istreamIcNS_11char_traitsIcEEE5tellgEv",),
    "bare_buffer": ("_ZNSt3__115basic_streambufIcNS_11char_traitsIcEEE7seekoffExNS_8ios_base7seekdirEj",),
    "sines": ("__sincosf_stret",),
    "patterns": ("memset_pattern16",),
}


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What a check is linked from."""

    compiler: Compiler
    objects: tuple[Path, ...]
    checks: Path

    def link(self, work: Path, without: Collection[str] = ()) -> bool:
        """Links the program without some stand-ins, and returns False where that cannot be."""
        write_imports(list_imports(self.checks.read_bytes()), work / "imports.c", without=without)
        table = [*compile_command(self.compiler, work / "imports.c"), "-c", "-o", str(work / "imports.o")]
        subprocess.run([*table, str(work / "imports.c")], check=True)
        argv = [*self.compiler.cpp, "-O2", "-static", "-s", "-o", str(work / "checks"), str(work / "imports.o")]
        return subprocess.run([*argv, *map(str, self.objects)], capture_output=True, check=False).returncode == 0

    def run(self, check: str, work: Path) -> bool:
        """Runs one check, and returns True where it is fine."""
        try:
            words = [str(work / "checks"), str(self.checks), check]
            return subprocess.run(words, cwd=work, capture_output=True, timeout=8, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            return False


@pytest.fixture(scope="session")
def built(make_once: Callable[[str, Callable[[Path], None]], Path]) -> Built:
    missing = IosSimulator().find_missing()
    if missing is not None:
        pytest.skip(f"ios-sim is not installed: {missing.reason}: {missing.command}")
    compiler = find_zig("x86_64")
    assert compiler is not None

    def fill(folder: Path) -> None:
        for source in (SOURCES / "main.cpp", *list_sources()):
            if source.name != "coreml.cpp":
                out = ["-c", "-o", str(folder / f"{source.name}.o"), str(source)]
                subprocess.run([*compile_command(compiler, source), *out], check=True)
        # -target x86_64-linux-musl is the last word of the compiler's command.
        apple = [*compiler.cpp[:-1], "x86_64-macos", "-std=c++17", "-O2", "-fno-omit-frame-pointer"]
        flags = ["-fno-sanitize=undefined", "-fno-stack-protector", "-c", "-o", str(folder / "checks.macho")]
        subprocess.run([*apple, *flags, str(SOURCES / "checks.cpp")], check=True)

    folder = make_once("ios-abi", fill)
    return Built(compiler=compiler, objects=tuple(sorted(folder.glob("*.o"))), checks=folder / "checks.macho")


def test_every_check_passes(built: Built, tmp_path: Path) -> None:
    assert built.link(tmp_path)
    assert {check for check in CHECKS if not built.run(check, tmp_path)} == set()


@pytest.mark.parametrize(("check", "name"), [(check, name) for check, names in CHECKS.items() for name in names])
def test_without_its_stand_in_a_check_fails(check: str, name: str, built: Built, tmp_path: Path) -> None:
    if built.link(tmp_path, without=(name,)):
        assert not built.run(check, tmp_path)
    shutil.rmtree(tmp_path)
