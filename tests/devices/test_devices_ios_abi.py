"""What differs between Apple's libraries and this machine's: it is right, and without what stands for it it is not.

The checks are compiled by zig for macOS, with Apple's headers, and loaded as ONNX Runtime's object is.
"""

import subprocess
from pathlib import Path

import msgspec
import pytest
from devices_models import require_device
from fixture_types import MakeOnce

from edgekit.devices.ios.ios import LOADER, list_imports
from edgekit.devices.release import Compiler, compile_sources, find_zig

pytestmark = pytest.mark.long

SOURCES = Path(__file__).parent / "ios_abi"

# Each check, and the stand-ins without each of which it must fail.
CHECKS: dict[str, tuple[str, ...]] = {
    "exceptions": (),
    "thread_variables": ("_tlv_bootstrap", "_tlv_atexit"),
    "mutex": ("_ZNSt3__15mutex4lockEv", "_ZNSt3__15mutex8try_lockEv"),
    "plain_condition": ("pthread_cond_wait", "pthread_cond_timedwait_relative_np", "pthread_mutex_lock"),
    "condition_variable": ("_ZNSt3__118condition_variable4waitERNS_11unique_lockINS_5mutexEEE",),
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


# What this machine has nothing of: without its stand-in a check cannot even be loaded.
APPLES = frozenset({
    "_DefaultRuneLocale", "__bzero", "__error", "__maskrune", "__sincosf_stret", "__tolower", "__toupper",
    "_tlv_atexit", "_tlv_bootstrap", "clock_gettime_nsec_np", "memset_pattern16", "pthread_cond_timedwait_relative_np",
})  # fmt: skip


def build_checks(compiler: Compiler, folder: Path) -> None:
    """Builds `checks.macho` and `main`, which opens it."""
    # -target x86_64-linux-musl is the last word of the compiler's command.
    apple = [*compiler.cpp[:-1], "x86_64-macos", "-std=c++17", "-O1", "-fno-omit-frame-pointer"]
    jobs = [([*apple, "-fno-sanitize=undefined", "-fno-stack-protector"], SOURCES / "checks.cpp")]
    sources = [SOURCES / "main.cpp", *(source for source in LOADER.list_sources() if source.name != "coreml.cpp")]
    jobs += [(LOADER.compile_command(compiler, source), source) for source in sources]
    checks, *objects = compile_sources(jobs, folder)
    names = list_imports(checks.read_bytes())
    LOADER.write_imports(names, folder / "imports.c")
    own = {name: name.removeprefix("_").partition("$")[0] for name in names}
    own = {name: place for name, place in own.items() if place not in APPLES}
    msgspec.structs.replace(LOADER, header="tables.h", map_imports=lambda *_: own).write_imports(own, folder / "own.c")
    tables = [folder / "imports.c", folder / "own.c"]
    includes = f"-I{SOURCES}"
    objects += compile_sources(
        [([*LOADER.compile_command(compiler, table), includes], table) for table in tables], folder
    )
    link = [*compiler.cpp, "-O2", "-static", "-s", "-o", str(folder / "main"), *map(str, objects)]
    subprocess.run(link, check=True)


@pytest.fixture(scope="session")
def built(make_once: MakeOnce) -> Path:
    require_device("ios-sim", "coreml")
    compiler = find_zig("x86_64")
    if compiler is None:
        pytest.skip("ziglang is not installed: pip install ziglang==0.17.1")
    return make_once("ios-abi", lambda folder: build_checks(compiler, folder))


def run_check(built: Path, work: Path, *words: str, timeout_s: float) -> int | None:
    """Returns the code with which a check ends, None where it does not."""
    argv = [str(built / "main"), str(built / "checks.cpp.o"), *words]
    try:
        return subprocess.run(argv, cwd=work, capture_output=True, timeout=timeout_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def test_every_check_passes(built: Path, tmp_path: Path) -> None:
    assert {check: run_check(built, tmp_path, check, timeout_s=60) for check in CHECKS} == dict.fromkeys(CHECKS, 0)


@pytest.mark.parametrize(("check", "name"), [(check, name) for check, names in CHECKS.items() for name in names])
def test_without_its_stand_in_a_check_fails(check: str, name: str, built: Path, tmp_path: Path) -> None:
    """It says no, crashes, or waits for ever."""
    assert run_check(built, tmp_path, check, f"_{name}", timeout_s=0.5) not in {0, 3}
