"""Bundles inside one folder, which stores once what several of them have: variants of an index, members of a group.

Each has a folder with its manifest; its files lie there too, or elsewhere below the root. The file that lists all of
the root (`index.json`, `group.json`) names the digest of each manifest.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from edgekit._files import copy_once, digest_bytes, staged_folder, write_file
from edgekit.bundle.checks import find_fault, read_bounded
from edgekit.bundle.folder import MANIFEST, Bundle, open_bundle
from edgekit.bundle.manifest import BundledFile, Manifest, decode_manifest
from edgekit.errors import BundleError

_HINT = "build it again, or fetch it again"


def require_folder_name(name: str, source: str) -> None:
    """Refuses a name of which a folder below the root is to be made, before anything there is opened.

    Raises:
        BundleError: it could lead somewhere else.
    """
    if "/" in name or find_fault(name):
        raise BundleError(f"'{source}' has no safe folder for {name[:99]!r}", hint=_HINT)


def read_nested(root: Path, folder: str, entry: BundledFile, source: str) -> Manifest:
    """Returns the manifest in a folder below the root, if it has the digest that the listing `source` says.

    Raises:
        BundleError: it is missing, malformed or altered.
    """
    data = read_bounded(root, f"{folder}/{MANIFEST}")
    if digest_bytes(data) != entry.sha256:
        raise BundleError(f"'{folder}/{MANIFEST}' was altered: its sha256 is not that in '{source}'", hint=_HINT)
    return decode_manifest(data, f"{root}/{folder}/{MANIFEST}")


def list_nested(
    folder: str, entry: BundledFile, manifest: Manifest, places: Mapping[str, str]
) -> dict[str, BundledFile]:
    """Returns the manifest in a folder and every file that it lists, by their places seen from the root."""
    return {f"{folder}/{MANIFEST}": entry, **{places[name]: file for name, file in manifest.files.items()}}


def extract_nested(
    root: Path, folder: str, entry: BundledFile, find_places: Callable[[Manifest], Mapping[str, str]], out: Path
) -> Bundle:
    """Writes a bundle, as it was before it was put into the root, into the folder `out` and opens it.

    Raises:
        BundleError: it was altered since the root was opened.
        OutputError: `out` cannot be written.
    """
    data = read_bounded(root, f"{folder}/{MANIFEST}")
    places = find_places(decode_manifest(data, f"{root}/{folder}/{MANIFEST}"))
    with staged_folder(out) as staging:
        for name, place in places.items():
            copy_once(root / place, staging / name)
        write_file(staging / MANIFEST, data)
    bundle = open_bundle(out)
    if bundle.sha256 != entry.sha256:
        raise BundleError(f"'{folder}' of '{root}' was altered", hint=_HINT)
    return bundle
