"""ONNX Runtime for 64-bit Arm on this PC: its aarch64 wheel in a Debian root file system, executed by qemu."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from edgekit._files import digest_file, one_at_a_time, staged_folder
from edgekit._proc import run_process
from edgekit.devices.device import Device, DeviceRun, Job, Missing, refuse_run
from edgekit.devices.process.run import STANDALONE, Program, describe_job, run_program
from edgekit.errors import DeviceError, EdgekitError
from edgekit.machine import cache_folder
from edgekit.model.model import MOST_INLINE_BYTES, list_model_files, load_model, read_proto
from edgekit.prepare.external import write_inline
from edgekit.progress import Progress

CPUS = ("cortex-a76", "cortex-a72")
"""The first has dot-product instructions, the second only plain NEON: ONNX Runtime uses different kernels on them."""

REQUIREMENTS = STANDALONE / "arm64" / "requirements.txt"
"""The wheels to install; an installation from another list counts as missing."""
PYTHON = "/usr/bin/python3"
"""The Python interpreter in the Debian root."""

_QEMU = "qemu-aarch64-static"
_TOOLS = (_QEMU, "mmdebstrap")
_APT = "apt-get install qemu-user-static mmdebstrap"
_INSTALL = "edgekit devices install arm64"
_STAMP = "installed-from"
_IMPORT = "import onnxruntime; print(onnxruntime.__version__)"
_ENVIRONMENT = (
    "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH=/site", "LC_ALL=C.UTF-8", "ORT_DISABLE_TELEMETRY=1",
)  # fmt: skip


def find_arm64_versions() -> dict[str, str]:
    """Returns the versions of the pinned ONNX Runtime, and of Python and qemu in the Debian root."""
    pinned = re.search(r"^onnxruntime==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE)
    root = arm64_root()
    python = next(iter(sorted(path.name.removeprefix("python") for path in root.glob("usr/lib/python3.*"))), "")
    words = run_process([str(root / "qemu"), "--version"], timeout_s=20).stdout.split()
    return {
        "onnxruntime": pinned.group(1) if pinned else "",
        "python": python,
        "qemu": words[2] if len(words) > 2 else "",
    }


def run_in_root(device: Device, cpu: str, program: Program, job: Job, work: Path) -> DeviceRun:
    """Runs every sample of a job with a program for 64-bit Arm Linux, on an emulated CPU.

    Raises:
        DeviceError: qemu or the Debian root is missing.
    """
    root = arm64_root()
    with folder_in_arm64(root) as folder:
        inside = f"/jobs/{folder.name}"
        model, model_folder = job.model, folder / "model"
        try:
            facts = load_model(model) if model.suffix == ".onnx" else None
            if facts is not None and facts.external_files and facts.size_bytes <= MOST_INLINE_BYTES:
                # ONNX Runtime 1.31 resolves the path of an external data file by /proc/self/fd, and the root has no
                # /proc: the weights go inside the file.
                model_folder.mkdir()
                write_inline(read_proto(facts, weights=False), model.parent, model_folder / model.name)
            else:
                for name, source in list_model_files(model).items():
                    (model_folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, model_folder / name)
        except EdgekitError as error:
            return refuse_run(device, error.message)
        for file, source in program.files.items():
            shutil.copy(source, folder / file)
        # Without /sys, the session cannot find out the number of cores.
        threads = job.threads or min(os.cpu_count() or 1, 4)
        inner = f"{inside}/model/{model.name}"
        request = describe_job(job, model=inner, threads=threads, **program.find_libraries(inside))
        argv = [*enter_arm64(root, cpu), *program.command(inside)]
        return run_program(device, argv, job, request, work, emulates=True)


def install_arm64(progress: Progress) -> None:
    """Builds the Debian root with Python and the pinned aarch64 wheels in the cache, and tests it.

    Raises:
        DeviceError: a tool is missing, or a step fails; no half-finished installation is left.
        OutputError: the cache cannot be written.
    """
    if absent := _list_absent():
        raise DeviceError(f"{absent} not found", hint=_APT)
    with installing() as staging:
        root = staging / "root"
        # Jobs are stored inside the root: nothing outside is visible there without mounts, which only the superuser may
        # make.
        (root / "jobs").mkdir(parents=True)
        progress("fetching a Debian arm64 root with mmdebstrap")
        # None of the packages' programs runs, so neither superuser rights nor binfmt_misc are needed.
        archive = str(staging / "debian.tar")
        mode = ["--mode=chrootless", "--arch=arm64", "--variant=extract", "--include=python3,libstdc++6,libc6"]
        _run_step("mmdebstrap", ["mmdebstrap", *mode, "bookworm", archive], {"TMPDIR": str(staging)})
        _run_step("tar", ["tar", "-xf", archive, "-C", str(root), "--no-same-owner", "--exclude=./dev/*"])
        (staging / "debian.tar").unlink()
        progress("fetching the aarch64 wheels with pip")
        # pip takes wheels only for the given platform tags: older ones must be listed too.
        platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)]
        _run_step(
            "pip",
            [
                sys.executable, "-m", "pip", "install", "--require-hashes", "-r", str(REQUIREMENTS),
                "--target", str(root / "site"), "--only-binary=:all:", "--no-deps", "--no-compile",
                "--python-version=3.11", "--implementation=cp", *platforms,
            ],
        )  # fmt: skip
        shutil.copy(str(shutil.which(_QEMU)), root / "qemu")
        progress("trying it")
        _run_step("the emulated import of onnxruntime", [*enter_arm64(root, CPUS[0]), PYTHON, "-c", _IMPORT])


@contextlib.contextmanager
def installing() -> Generator[Path]:
    """Yields an empty folder, which becomes the installation if the block succeeds, and is removed if not.

    Raises:
        OutputError: the cache cannot be written.
    """
    place = cache_folder() / "arm64"
    with one_at_a_time(place), staged_folder(place) as staging:
        yield staging
        (staging / _STAMP).write_text(digest_file(REQUIREMENTS))


def find_installed() -> Path | None:
    """Returns the folder of the installation, if it was made from exactly the pinned wheels, else None."""
    stamp = cache_folder() / "arm64" / _STAMP
    return stamp.parent if stamp.is_file() and stamp.read_text() == digest_file(REQUIREMENTS) else None


def find_missing_root() -> Missing | None:
    """Returns what is lacking to run a program in the Debian root, or None."""
    if find_installed() is None:
        if absent := _list_absent():
            return Missing(reason=f"{absent} not found", command=f"{_APT} && {_INSTALL}")
        return Missing(reason="the Debian arm64 root is not installed", command=_INSTALL)
    # chroot needs a capability that a normal user has only in a new user namespace, which some systems forbid.
    if os.geteuid() != 0 and not run_process(["unshare", "--map-root-user", "true"], timeout_s=20).succeeded:
        return Missing(reason="this user may not make a user namespace", command="sudo edgekit devices list")
    return None


def _list_absent() -> str:
    return " and ".join(tool for tool in _TOOLS if shutil.which(tool) is None)


def arm64_root() -> Path:
    """Returns the Debian root with Python and the aarch64 wheels.

    Raises:
        DeviceError: it is not installed.
    """
    if (folder := find_installed()) is None:
        raise DeviceError("the Debian arm64 root is not installed", hint=_INSTALL)
    return folder / "root"


@contextlib.contextmanager
def folder_in_arm64(root: Path) -> Generator[Path]:
    """Yields a temporary folder in the root, whose programs see it as `/jobs/NAME`."""
    with tempfile.TemporaryDirectory(dir=root / "jobs", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def enter_arm64(root: Path, cpu: str) -> list[str]:
    """Returns the start of a command that runs in the root, which has no /proc and no /sys.

    With the host's, ONNX Runtime's cpuinfo would read the caches of an x86 and crash. Without /proc, the runner takes
    its peak memory from ru_maxrss, which survives an exec: `--fork` keeps this process's memory out of it.
    """
    enter = ["unshare", "--fork", *([] if os.geteuid() == 0 else ["--map-root-user"]), "chroot"]
    # A clean environment, because the host's PYTHONPATH, LD_* and locale would be wrong in the root.
    return ["env", "-i", *_ENVIRONMENT, *enter, str(root), "/qemu", "-cpu", cpu]


def _run_step(what: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    finished = run_process(argv, timeout_s=900.0, env=env)
    if not finished.succeeded:
        raise DeviceError(f"{what} {finished.explanation}", hint="check the connection, then install again")
