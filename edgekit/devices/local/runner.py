"""edgekit's own runner: a small C++ program for machines without Python, built for each kind of machine (ABI).

Its sources ship with edgekit. It is built once, into the user's cache, in a folder named by the kind of machine and the
digest of the sources. ONNX Runtime's library is not part of the program: it is sent along.
"""

import importlib.util
import platform
import shutil
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, digest_file, one_at_a_time, staged_entries, staged_folder, work_folder
from edgekit._proc import run_process
from edgekit.bundle.archive import unpack_archive
from edgekit.devices.device import Missing, require_device
from edgekit.devices.local.arm64 import find_installed
from edgekit.devices.process.run import Program
from edgekit.errors import DeviceError, UsageError, look_up
from edgekit.machine import cache_folder
from edgekit.progress import Progress

PROGRAM, LIBRARY = "edgekit-runner", "libonnxruntime.so"
ANDROID_API = 29
"""The oldest Android API level for which the runner is built."""

_BUILD_TIMEOUT_S = 600.0
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
SMALL = ["-std=c++17", "-Os", "-ffunction-sections", "-fvisibility=hidden"]
LIBRARIES = ["-ldl", "-pthread"]
_STRIPPED = ["-fdata-sections", "-Wl,--gc-sections", "-s"]


class Abi(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of machine: `machine` is the output of `uname -m` there."""

    name: str
    machine: str
    android: bool = False


ABIS: dict[str, Abi] = {
    "linux-x64": Abi(name="linux-x64", machine="x86_64"),
    "linux-arm64": Abi(name="linux-arm64", machine="aarch64"),
    "arm64-v8a": Abi(name="arm64-v8a", machine="aarch64", android=True),
    "x86_64": Abi(name="x86_64", machine="x86_64", android=True),
}


class NativeRunner(msgspec.Struct, frozen=True, kw_only=True):
    """A runner for a kind of machine, and the ONNX Runtime library that it opens, as files on this machine."""

    abi: str
    program: Path
    library: Path

    @property
    def files(self) -> dict[str, Path]:
        """The files that a machine needs, by their names in a common folder."""
        return {PROGRAM: self.program, LIBRARY: self.library}

    def pack(self, libraries: tuple[Path, ...] = ()) -> Program:
        """Returns the program for another machine; `libraries` are a plug-in's and those that it loads."""
        # In ADSP_LIBRARY_PATH, Qualcomm's FastRPC looks for the part of QNN that runs on the DSP.
        paths = ("env", "LD_LIBRARY_PATH={folder}", "ADSP_LIBRARY_PATH={folder}") if libraries else ()
        return Program(
            files={**self.files, **{path.name: path for path in libraries}},
            argv=(*paths, f"{{folder}}/{PROGRAM}", "--pipe"),
            runtime=LIBRARY,
            library=libraries[0].name if libraries else "",
        )


def host_abi() -> str:
    """Returns the kind of this machine."""
    return "linux-arm64" if platform.machine() == "aarch64" else "linux-x64"


def find_runner(abi: str) -> NativeRunner | Missing:
    """Returns the runner built from the current sources, with its library, or why there is none.

    Raises:
        UsageError: there is no such kind of machine.
    """
    folder = _place(_known_abi(abi))
    library = folder / LIBRARY if ABIS[abi].android else _find_wheel_library(abi)
    if (folder / PROGRAM).is_file() and library is not None and library.is_file():
        return NativeRunner(abi=abi, program=folder / PROGRAM, library=library)
    command = f"edgekit runner build --abi {abi}"
    if ABIS[abi].android:
        command = f"{command} --ndk NDK --library AAR"
        return Missing(reason=f"the runner for Android {abi} is not built", command=command)
    if library is None:
        return Missing(reason="the aarch64 onnxruntime is not installed", command="edgekit devices install arm64")
    if shutil.which(compiler := _name_compiler(ABIS[abi])) is None:
        package = "g++" if abi == host_abi() else "g++-aarch64-linux-gnu"
        return Missing(reason=f"{compiler} not found", command=f"apt-get install {package} && {command}")
    return Missing(reason=f"the runner for {abi} is not built", command=command)


def build_runner(abi: str, progress: Progress, *, ndk: Path | None = None, library: Path | None = None) -> NativeRunner:
    """Returns the runner for a kind of machine, and builds it if it is not in the cache.

    For Android, `ndk` is the folder of the Android NDK, and `library` ONNX Runtime's archive (`.aar`) or its
    `libonnxruntime.so` for that kind. On Linux the library is that of the onnxruntime wheel.

    Raises:
        UsageError: there is no such kind of machine, or Android needs an NDK and a library.
        DeviceError: a tool is missing, or the compiler fails.
        BundleError: the archive is damaged or unsafe.
        OutputError: the cache cannot be written.
    """
    known = _known_abi(abi)
    # If the user names a library, always build: the one in the cache may be another.
    if library is None and isinstance(found := find_runner(abi), NativeRunner):
        return found
    # Look again inside the lock, because another process may have built it meanwhile.
    with one_at_a_time(_place(known)):
        if library is not None or isinstance(find_runner(abi), Missing):
            _build(known, progress, ndk, library)
    return require_device(f"runner for {abi}", find_runner(abi))


def _build(abi: Abi, progress: Progress, ndk: Path | None, library: Path | None) -> None:
    if abi.android:
        if ndk is None or library is None:
            words = f"Android {abi.name} needs --ndk and --library"
            raise UsageError(words, hint="--ndk FOLDER of the Android NDK, --library onnxruntime-android-VERSION.aar")
        if (clang := next(ndk.absolute().glob("toolchains/llvm/prebuilt/*/bin/clang++"), None)) is None:
            raise UsageError(f"'{ndk}' is no Android NDK: it has no clang++", hint="give the folder of an NDK")
        # Linked statically: a shared C++ library would be one more file to push, and might clash with another version.
        compiler = [str(clang), f"--target={abi.machine}-linux-android{ANDROID_API}", "-static-libstdc++"]
    else:
        found = find_runner(abi.name)
        if isinstance(found, Missing) and not (found.command or "edgekit runner").startswith("edgekit runner"):
            raise DeviceError(found.reason, hint=str(found.command))
        compiler = [_name_compiler(abi), *WARNINGS]
    with staged_folder(_place(abi)) as staging, work_folder() as work:
        if library is not None:
            source = library
            if not library.is_file():
                raise UsageError(f"there is no file '{library}'", hint="--library onnxruntime-android-VERSION.aar")
            if library.suffix == ".aar":
                unpack_archive(library, work / "aar")
                source = work / "aar" / "jni" / abi.name / LIBRARY
                if not source.is_file():
                    hint = "give ONNX Runtime's own archive"
                    raise UsageError(f"'{library}' holds no {LIBRARY} for {abi.name}", hint=hint)
            shutil.copyfile(source, staging / LIBRARY)
        progress(f"compiling the runner for {abi.name}")
        argv = [*compiler, *SMALL, *_STRIPPED, str(write_unit(work / "runner.cpp")), *LIBRARIES]
        argv += ["-o", str(staging / PROGRAM)]
        finished = run_process(argv, timeout_s=_BUILD_TIMEOUT_S)
        if not finished.succeeded:
            raise DeviceError(f"'{argv[0]}' {finished.explanation}", hint="check the compiler or the NDK")


def find_sources(name: str) -> Path:
    """Returns the folder of C and C++ sources that ship with edgekit; in a checkout that is `tools/NAME`."""
    shipped = Path(__file__).parents[2] / f"_{name}"
    return shipped if shipped.is_dir() else Path(__file__).parents[3] / "tools" / name


def digest_sources(name: str) -> str:
    """Returns the digest of a program's sources: those in its own folder, and those of the runner linked with them."""
    runner = find_sources("runner")
    files = [*runner.rglob("*.cpp"), *runner.rglob("*.h"), *find_sources(name).iterdir()]
    return digest_bytes("\n".join(sorted(f"{path.name} {digest_file(path)}" for path in files)).encode())


def write_unit(path: Path) -> Path:
    """Writes the runner's sources as one unit: nine tenths of the compiling is the standard headers."""
    sources = sorted((find_sources("runner") / "src").glob("*.cpp"))
    path.write_text("".join(f'#include "{source}"\n' for source in sources))
    return path


def copy_runner(runner: NativeRunner, out: Path) -> NativeRunner:
    """Returns a copy of a runner and its library in the folder `out`.

    Raises:
        OutputError: the folder cannot be written.
    """
    with staged_entries(out) as staging:
        for name, path in runner.files.items():
            shutil.copy(path, staging / name)
    return NativeRunner(abi=runner.abi, program=out / PROGRAM, library=out / LIBRARY)


def _name_compiler(abi: Abi) -> str:
    return "c++" if abi.name == host_abi() else f"{abi.machine}-linux-gnu-g++"


def _known_abi(abi: str) -> Abi:
    return look_up(ABIS, abi, f"there is no kind of machine '{abi}'")


def _place(abi: Abi) -> Path:
    files = sorted(path for path in find_sources("runner").rglob("*") if path.is_file())
    # Everything that determines the program, so that a change of a source leads to a new build.
    parts = [abi.name, str(ANDROID_API), *(f"{path.name} {digest_file(path)}" for path in files)]
    return cache_folder() / "runner" / f"{abi.name}-{digest_bytes(chr(10).join(parts).encode())[:16]}"


def _find_wheel_library(abi: str) -> Path | None:
    """Returns ONNX Runtime's library from this machine's wheel, or for linux-arm64 from the aarch64 wheel."""
    folder = None
    if abi == host_abi():
        spec = importlib.util.find_spec("onnxruntime")
        folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    elif abi == "linux-arm64" and (root := find_installed()) is not None:
        folder = root / "root/site/onnxruntime"
    return None if folder is None else next(iter(sorted((folder / "capi").glob("libonnxruntime.so*"))), None)
