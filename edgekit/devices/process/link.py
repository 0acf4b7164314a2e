"""The seam to another machine: files go there once, and programs run there with their standard streams passed through.

A link stores a set of files in a folder named by its digest, so that what is there already is not sent again.
"""

import contextlib
import functools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from edgekit._files import digest_bytes, digest_file, safe_join, staged_folder
from edgekit.devices.device import Missing
from edgekit.model.model import list_external


class Link(Protocol):
    """A way to a machine that can run a program."""

    @property
    def name(self) -> str:
        """The machine as the user names it, for example `adb:SERIAL`."""
        ...

    def find_missing(self) -> Missing | None:
        """Returns what is lacking for a program to run there, or None."""
        ...

    def push(self, files: Mapping[str, Path]) -> str:
        """Returns the folder on the machine that holds these files, under these names; a name may have folders.

        They arrive whole or not at all, and what is there already is not sent again.

        Raises:
            DeviceError: the machine does not answer, or has no space.
        """
        ...

    def wrap(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Returns the command that, run here, runs `argv` there, with stdin, stdout and stderr passed through."""
        ...

    def clean(self) -> None:
        """Removes everything that edgekit stored on the machine."""
        ...


class LocalLink(msgspec.Struct, frozen=True, kw_only=True):
    """This machine, or a root on it that `enter` leads into.

    `folder` is where sets of files are kept, and `inside` the same folder as a program sees it after `enter`.
    """

    name: str
    folder: Path
    inside: str
    enter: tuple[str, ...] = ()

    def find_missing(self) -> Missing | None:
        """Returns None: this machine is here."""
        return None

    def push(self, files: Mapping[str, Path]) -> str:
        """Returns the folder that holds these files; where the file system allows it they are hard links.

        Raises:
            BundleError: a name leads out of the folder.
            OutputError: the folder cannot be written.
        """
        digest = digest_files(files)
        place = self.folder / digest
        if not place.is_dir():
            # Whole or not at all: a folder under its digest is believed to hold what the digest says.
            with staged_folder(place) as staging:
                for name, source in files.items():
                    target = safe_join(staging, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _link_or_copy(source, target)
        return f"{self.inside}/{digest}"

    def wrap(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Returns the command that runs `argv` after `enter`."""
        return (*self.enter, *argv)

    def clean(self) -> None:
        """Removes the sets of files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def digest_files(files: Mapping[str, Path]) -> str:
    """Returns the sha256 that names a set of files, by their names, contents and whether they may be executed."""
    lines = [f"{digest_unchanged(path)} {int(os.access(path, os.X_OK))} {name}" for name, path in sorted(files.items())]
    return digest_bytes("\n".join(lines).encode())


def digest_unchanged(path: Path) -> str:
    """Returns the sha256 of a file in hex, read once for as long as its size and times stay what they are."""
    facts = path.stat()
    # Models of gigabytes are pushed to several devices in one run; the change time catches who sets the other back.
    return _digest_known(path, (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))


@functools.lru_cache(maxsize=64)
def _digest_known(path: Path, facts: tuple[int, ...]) -> str:  # noqa: ARG001 - part of the key
    return digest_file(path)


def list_model_files(model: Path) -> dict[str, Path]:
    """Returns the files of a model by the names they must have beside each other: itself, and what it refers to.

    Raises:
        ModelError: the file is no model, or names a file that is missing or outside its folder.
    """
    beside = list_external(model) if model.suffix == ".onnx" else ()
    return {name: model.parent / name for name in (model.name, *beside)}


def _link_or_copy(source: Path, target: Path) -> None:
    # Another file system, or one without hard links.
    with contextlib.suppress(OSError):
        os.link(source, target, follow_symlinks=True)
        return
    shutil.copy(source, target)
