"""ONNX Runtime for 64-bit Arm on this PC: its aarch64 wheel in a Debian root, executed by qemu."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._proc import run_process
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.process.cache import find_installed, installing
from edgekit.devices.process.link import LocalLink, list_model_files
from edgekit.devices.process.run import (
    FAR,
    ORT_QUEUE,
    ORT_RUNNER,
    Runner,
    describe_job,
    refuse_run,
    require_device,
    run_over,
)
from edgekit.errors import DeviceError, EdgekitError
from edgekit.evidence import Evidence
from edgekit.model.model import MOST_INLINE_BYTES, load_model, read_proto
from edgekit.prepare.external import write_inline
from edgekit.progress import Progress

CPUS = ("cortex-a76", "cortex-a72")
"""The first has the dot-product instructions, the second plain NEON: ONNX Runtime takes other kernels."""

_REQUIREMENTS = FAR / "arm64" / "requirements.txt"
_QEMU = "qemu-aarch64-static"
_TOOLS = (_QEMU, "mmdebstrap")
_INSTALL_TIMEOUT_S = 900.0
_IMPORT = "import onnxruntime; print(onnxruntime.__version__)"
_ENVIRONMENT = (
    "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH=/site", "LC_ALL=C.UTF-8", "ORT_DISABLE_TELEMETRY=1",
)  # fmt: skip


class Arm64(msgspec.Struct, frozen=True, kw_only=True):
    """An emulated Arm CPU, on the CPU provider: the kernels that an Arm device runs, without its speed."""

    cpu: str = CPUS[0]
    evidence: Evidence = Evidence.SAME_ARCH

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return "arm64" if self.cpu == CPUS[0] else f"arm64:{self.cpu}"

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine."""
        if find_installed("arm64", _REQUIREMENTS) is None:
            install = "edgekit devices install arm64"
            absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
            if absent:
                packages = "apt-get install qemu-user-static mmdebstrap"
                return Missing(reason=f"{' and '.join(absent)} not found", command=f"{packages} && {install}")
            return Missing(reason="the Debian arm64 root is not installed", command=install)
        # chroot needs a capability that a user has in a user namespace of his own alone; some systems forbid to make
        # one.
        if os.geteuid() != 0 and not run_process(["unshare", "--map-root-user", "true"], timeout_s=20).succeeded:
            return Missing(reason="this user may not make a user namespace", command="sudo edgekit devices list")
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job under qemu.

        Raises:
            DeviceError: qemu or the Debian root is missing.
        """
        require_device(self.name, self.find_missing())
        runner = Runner(device=self.name, evidence=self.evidence, emulates=True)
        root = arm64_root()
        with folder_in_arm64(root) as folder:
            inside = f"/jobs/{folder.name}"
            try:
                name = _copy_model(job.model, folder / "model")
            except EdgekitError as error:
                return refuse_run(runner, error.message)
            request = msgspec.structs.replace(
                describe_job(job), model=f"{inside}/model/{name}", threads=job.threads or thread_count()
            )
            for program in (ORT_RUNNER, ORT_QUEUE):
                shutil.copyfile(program, folder / program.name)
            link = LocalLink(name=self.name, folder=folder, inside=inside)
            argv = _emulate_python(root, self.cpu, [f"{inside}/{ORT_RUNNER.name}", "--pipe"])
            return run_over(link, argv, job, request, work, runner=runner)


def install_arm64(progress: Progress) -> None:
    """Builds the Debian root with Python and the pinned aarch64 wheels in the cache, and tries it.

    Raises:
        DeviceError: a tool is missing, or a step fails.
        OutputError: the cache cannot be written.
    """
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        raise DeviceError(f"{' and '.join(absent)} not found", hint="apt-get install qemu-user-static mmdebstrap")
    with installing("arm64", _REQUIREMENTS) as staging:
        root = staging / "root"
        # Jobs lie inside the root: without mounts, which would need root, nothing outside is visible there.
        (root / "jobs").mkdir(parents=True)
        progress("fetching a Debian arm64 root with mmdebstrap")
        _unpack_debian(staging / "debian.tar", root)
        progress("fetching the aarch64 wheels with pip")
        _install_wheels(root / "site")
        shutil.copy(str(shutil.which(_QEMU)), root / "qemu")
        progress("trying it")
        _run_step("the emulated import of onnxruntime", _emulate_python(root, CPUS[0], ["-c", _IMPORT]))


def find_arm64_versions() -> dict[str, str]:
    """Returns the versions of the pinned ONNX Runtime, of the Python beside it, and of the qemu that was copied."""
    pinned = re.search(r"^onnxruntime==(\S+)", _REQUIREMENTS.read_text(), re.MULTILINE)
    root = arm64_root()
    python = next(iter(sorted(path.name.removeprefix("python") for path in root.glob("usr/lib/python3.*"))), "")
    said = run_process([str(root / "qemu"), "--version"], timeout_s=20).stdout.split()
    return {
        "onnxruntime": pinned.group(1) if pinned else "",
        "python": python,
        "qemu": said[2] if len(said) > 2 else "",
    }


def arm64_root() -> Path:
    """Returns the Debian root with Python and the aarch64 wheels.

    Raises:
        DeviceError: it is not installed.
    """
    folder = find_installed("arm64", _REQUIREMENTS)
    if folder is None:
        raise DeviceError("the Debian arm64 root is not installed", hint="edgekit devices install arm64")
    return folder / "root"


def find_arm64_library() -> Path | None:
    """Returns ONNX Runtime's library of the aarch64 wheel, None where that is not installed."""
    folder = find_installed("arm64", _REQUIREMENTS)
    found = () if folder is None else (folder / "root/site/onnxruntime/capi").glob("libonnxruntime.so*")
    return next(iter(sorted(found)), None)


def thread_count() -> int:
    """Returns how many threads the emulated session gets; without a /sys it cannot find out itself."""
    return min(os.cpu_count() or 1, 4)


@contextlib.contextmanager
def folder_in_arm64(root: Path) -> Generator[Path]:
    """Yields a folder in the root, which sees it as `/jobs/NAME`; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(dir=root / "jobs"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_model(model: Path, folder: Path) -> str:
    """Copies the files of a model, and returns the name of the one to load; weights go inside where 2 GB hold them."""
    facts = load_model(model) if model.suffix == ".onnx" else None
    if facts is not None and facts.external_files and facts.size_bytes <= MOST_INLINE_BYTES:
        # ONNX Runtime 1.31 asks /proc/self/fd where a file beside the model really lies, and the root has no /proc.
        folder.mkdir()
        write_inline(read_proto(facts, weights=False), model.parent, folder / model.name)
        return model.name
    for name, source in list_model_files(model).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
    return model.name


def enter_arm64(root: Path, cpu: str) -> list[str]:
    """Returns the start of a command in the root, which has neither the host's /proc nor its /sys.

    With them ONNX Runtime's cpuinfo would read the caches of an x86 and crash. Without a /proc the peak of memory is
    ru_maxrss, which survives an exec: the fork keeps this process out of it.
    """
    enter = ["unshare", "--fork", *([] if os.geteuid() == 0 else ["--map-root-user"]), "chroot"]
    # A clean environment: PYTHONPATH, LD_* and locales of the host would reach into the root.
    return ["env", "-i", *_ENVIRONMENT, *enter, str(root), "/qemu", "-cpu", cpu]


def _emulate_python(root: Path, cpu: str, arguments: Sequence[str]) -> list[str]:
    return [*enter_arm64(root, cpu), "/usr/bin/python3", "-P", *arguments]


def _unpack_debian(archive: Path, root: Path) -> None:
    """Fetches the packages and unpacks them; nothing of them runs, so that neither root nor binfmt_misc is needed."""
    packages = "--include=python3,libstdc++6,libc6"
    argv = ["mmdebstrap", "--mode=chrootless", "--arch=arm64", "--variant=extract", packages, "bookworm", str(archive)]
    _run_step("mmdebstrap", argv, {"TMPDIR": str(archive.parent)})
    _run_step("tar", ["tar", "-xf", str(archive), "-C", str(root), "--no-same-owner", "--exclude=./dev/*"])
    archive.unlink()


def _install_wheels(site: Path) -> None:
    # pip takes wheels for the platform tags that it is told, not for older ones by itself.
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)]
    _run_step(
        "pip",
        [
            sys.executable, "-m", "pip", "install", "--require-hashes", "-r", str(_REQUIREMENTS), "--target", str(site),
            "--only-binary=:all:", "--no-deps", "--no-compile", "--python-version=3.11", "--implementation=cp",
            *platforms,
        ],
    )  # fmt: skip


def _run_step(what: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    finished = run_process(argv, timeout_s=_INSTALL_TIMEOUT_S, env=env)
    if not finished.succeeded:
        words = " ".join(finished.stderr.split())[-400:]
        raise DeviceError(f"{what} {finished.ending}: {words}", hint="check the connection, then install again")
