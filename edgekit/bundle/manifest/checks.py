"""Is a folder what its manifest says: names, sizes and digests, before anything in it is used."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from edgekit._files import digest_file, safe_join
from edgekit.bundle.manifest.manifest import MAX_MANIFEST_BYTES, BundledFile
from edgekit.bundle.manifest.names import find_clash, find_fault
from edgekit.errors import BundleError

# What a folder is, by the file that names all others, and what opens it.
_KINDS = {
    "manifest.json": "one model: edgekit verify",
    "group.json": "a group of models: edgekit group verify",
}


def read_bounded(folder: Path, name: str) -> bytes:
    """Returns the bytes of a manifest or index in a folder; of one that is too large, enough to see that.

    Raises:
        BundleError: it is missing, a link, or no regular file.
    """
    file = safe_join(folder, name)
    _check_regular(file, name, folder)
    with file.open("rb") as stream:
        # One byte more than allowed, so that the decoder sees that it is too large.
        return stream.read(MAX_MANIFEST_BYTES + 1)


def check_files(folder: Path, files: Mapping[str, BundledFile], beside: Collection[str]) -> None:
    """Refuses a folder that does not hold exactly these files, and perhaps those `beside`, to the byte.

    Names are judged before any file is opened, and sizes before digests are computed.

    Raises:
        BundleError: a file is missing, altered, unlisted, a link, or bears an unsafe name.
    """
    _check_names(folder, files, beside)
    for name, entry in files.items():
        path = safe_join(folder, name)
        _check_regular(path, name, folder)
        # Sizes of all before a digest of any: a file of terabytes is refused without being read.
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            raise BundleError(
                f"{name!r} of bundle '{folder}' has {size_bytes} bytes, the manifest says {entry.size_bytes}",
                hint="the bundle was altered or copied badly: build it again",
            )
    for name, entry in files.items():
        if digest_file(folder / name) != entry.sha256:
            raise BundleError(
                f"{name!r} of bundle '{folder}' was altered: its sha256 is not that of the manifest",
                hint="build the bundle again",
            )


def iterate_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields everything below a folder that is no folder, by its name with `/`, sorted."""
    for path in sorted(folder.rglob("*")):
        # A link to a folder is listed, not followed: it leads out of the bundle, and is refused as no regular file.
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix(), path


def _check_names(folder: Path, files: Iterable[str], beside: Collection[str]) -> None:
    wanted = set(files)
    present = {name for name, _ in iterate_files(folder)} - set(beside)
    # A file too many is an alteration like any other: apps copy folders whole.
    for name in sorted(present - wanted):
        raise BundleError(
            f"bundle '{folder}' holds {name!r}, which its manifest does not list", hint="remove that file"
        )
    for name in sorted(wanted - present):
        raise BundleError(f"bundle '{folder}' lacks the file {name[:200]!r}", hint="build the bundle again")
    for name in sorted(wanted):
        fault = find_fault(name)
        if fault is not None:
            raise BundleError(f"{name[:200]!r} of bundle '{folder}' {fault}", hint="build the bundle again")
    clash = find_clash(wanted)
    if clash is not None:
        raise BundleError(
            f"{clash[0]!r} and {clash[1]!r} of bundle '{folder}' are one file on some systems",
            hint="build the bundle again",
        )


def _check_regular(path: Path, name: str, folder: Path) -> None:
    if path.is_symlink() or not path.is_file():
        reason = "is a link or no regular file" if path.is_symlink() or path.exists() else "is missing"
        raise BundleError(f"{name[:200]!r} of bundle '{folder}' {reason}", hint=_find_next_step(name, folder))


def _find_next_step(name: str, folder: Path) -> str:
    """Returns what to do where a file is not there: there may be a folder of another kind, or of several bundles."""
    for other, what in _KINDS.items():
        if name in _KINDS and other != name and (folder / other).is_file():
            return f"it holds {what} '{folder}'"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{name}")) if name in _KINDS else []
    return f"it holds {', '.join(inside[:8])}: name one of them" if inside else "build the bundle again"
