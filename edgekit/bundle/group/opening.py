"""Opening and signing a group of models, as a folder or as the archive that it was packed into."""

import contextlib
from collections.abc import Generator
from pathlib import Path

from edgekit.bundle.archive import opened_folder
from edgekit.bundle.group.group import GROUP, Group, open_group
from edgekit.bundle.sign import sign_files
from edgekit.bundle.statement import TestResult
from edgekit.errors import BundleError


def is_group(path: Path) -> bool:
    """Returns True for the folder of a group."""
    return (path / GROUP).is_file()


@contextlib.contextmanager
def opened_group(path: Path, *, key: Path | None = None) -> Generator[Group]:
    """Yields a group, checked to the byte; with `key` only one that its private half signed.

    An archive is unpacked into a folder that is gone after the block: what is written into such a group is lost.

    Raises:
        BundleError: it is no group, was altered, is not safe to open, or is not signed with the key.
        UsageError: the key cannot be read.
    """
    with opened_folder(path) as folder:
        yield open_group(folder, key=key)


def sign_group(folder: Path, key: Path, result: TestResult) -> str:
    """Checks the folder of a group, signs its files with what was verified of them, and returns the id of the key.

    Raises:
        BundleError: the group is not whole, or is an archive.
        UsageError: the key cannot be read, or is no Ed25519 private key.
        OutputError: the folder cannot be written.
    """
    if folder.is_file():
        raise BundleError(f"'{folder}' is a file", hint="sign the group's folder, then pack it")
    return sign_files(folder, open_group(folder).digests, result, key)
