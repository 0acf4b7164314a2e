"""Lets loaders run with Android's own ONNX Runtime on this machine: its headers, its classes, its libraries.

C++ programs are linked with the loader of `tools/android` in place of Android's linker, like the device `android`. Java
runs on this machine's JVM with the archive's classes, whose native methods call the archive's own binding.
"""

import platform
from pathlib import Path

import pytest
from fixture_types import MakeOnce
from package_loaders import run_program

from edgekit.app_runtime import AppRuntime
from edgekit.devices.android.android import DEFAULT_CORE, enter_phone, find_emulator
from edgekit.devices.android.installed import LOADER, find_app_runtime, read_library
from edgekit.devices.release import Compiler, find_compiler

HERE = Path(__file__).parent
LIBRARY, BINDING = "libonnxruntime.so", "libonnxruntime4j_jni.so"
MACHINES = {"arm64-v8a": "aarch64", "x86_64": "x86_64"}


def find_runtime() -> AppRuntime:
    """The archive for which packages are made in the tests."""
    runtime = find_app_runtime()
    if runtime is None:
        pytest.skip("android is not installed: edgekit devices install android")
    return runtime


def android_headers() -> Path:
    return find_runtime().classes.parent / "headers"


def android_libraries(abi: str) -> Path:
    """The folder of the archive's libraries for an ABI that can run here."""
    installed = LOADER.find_installed()
    if installed is None or abi not in installed.abis:
        pytest.skip(f"android is not installed for {abi}: edgekit devices install android")
    return LOADER.folder / abi


def find_phone_prefix(abi: str, work: Path) -> tuple[str, ...]:
    """Returns the prefix of a command that runs a program of an ABI here; on Arm, emulated with the CPU of a phone."""
    emulator = find_emulator(abi)
    if emulator is None:
        pytest.skip("qemu-aarch64-static not found: apt-get install qemu-user-static")
    return ("env", *enter_phone(DEFAULT_CORE, emulator, work))


def link_for_android(abi: str, source: Path, program: Path, make_once: MakeOnce, *flags: str | Path) -> Path:
    """A C++ program that opens Android's library as a process of Android does."""
    compiler, library = _require_compiler(abi), android_libraries(abi) / LIBRARY

    def compile_loader(folder: Path) -> None:
        LOADER.write_imports(read_library(library).imports, folder / "imports.c")
        options = ("-std=gnu11", "-O1", "-fno-builtin", "-I", LOADER.sources, "-c")
        for part in (*LOADER.sources.glob("*.c"), folder / "imports.c"):
            run_program([*compiler.c, *options, part, "-o", folder / f"{part.stem}.o"])

    objects = sorted(make_once(f"android-loader-{abi}", compile_loader).glob("*.o"))
    run_program([*compiler.cpp, "-std=c++17", "-O1", *flags, source, *objects, "-static", "-pthread", "-o", program])
    return program


def build_natives(folder: Path) -> Path:
    """A folder with the library that Java loads in place of the archive's binding, and which loads that binding."""
    abi = platform.machine()
    own, compiler = android_libraries(abi), _require_compiler(abi)
    library, binding = read_library(own / LIBRARY), read_library(own / BINDING)
    # The functions of the library that the binding needs are found in it.
    system = {name for name in (*library.imports, *binding.imports) if not name.startswith("Ort")}
    LOADER.write_imports(system, folder / "imports.c")
    names = sorted(word for word in binding.words if word.startswith("Java_"))
    (folder / "names.c").write_text(
        "const char *const native_names[] = {" + "".join(f'"{name}", ' for name in names) + "0};\n"
    )
    # Each native method is one jump, because a C function would have to know the number of arguments to pass on.
    jumps = (
        f".globl {name}\n.type {name}, @function\n{name}: jmp *native_places+{8 * at}(%rip)"
        for at, name in enumerate(names)
    )
    table = f".data\n.hidden native_places\n.globl native_places\nnative_places: .zero {8 * len(names)}\n"
    (folder / "natives.S").write_text("\n".join(('.section .note.GNU-stack,"",@progbits', ".text", *jumps, table)))
    sources = [
        HERE / "standalone" / "android_natives.c",
        *(folder / name for name in ("names.c", "natives.S", "imports.c")),
    ]
    flags = [
        *["-shared", "-fPIC", "-O1", "-std=gnu11", "-fno-builtin", "-fvisibility=hidden", "-I"],
        str(LOADER.sources),
    ]
    (folder / "natives").mkdir()
    out = folder / "natives" / BINDING
    run_program([*compiler.c, *flags, *sources, *LOADER.sources.glob("*.c"), "-lm", "-pthread", "-o", out])
    return out.parent


def _require_compiler(abi: str) -> Compiler:
    compiler = find_compiler(MACHINES[abi])
    if compiler is None:
        pytest.skip(f"needs a compiler for {abi}: apt-get install g++ g++-aarch64-linux-gnu")
    return compiler
