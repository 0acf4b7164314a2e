"""Opening whatever a bundle comes as: a folder, an archive, or either with several targets."""

import contextlib
from collections.abc import Generator, Iterable
from pathlib import Path

import msgspec

from edgekit._files import work_folder
from edgekit.bundle.archive import opened_folder
from edgekit.bundle.expected import Recorded
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.multi import INDEX, MultiBundle, extract_variant, open_index
from edgekit.bundle.sign import TestResult, sign_files
from edgekit.errors import BundleError, UsageError


class SignedBundle(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that was signed: the digest of its manifest or index, that of the public key, and what was said."""

    bundle: Path
    sha256: str
    key: str
    attested: TestResult


@contextlib.contextmanager
def opened_any(path: Path, *, key: Path | None = None) -> Generator[Bundle | MultiBundle]:
    """Yields what is in a folder or archive, checked to the byte; with `key` only what its private half signed.

    An archive is unpacked into a folder that is gone after the block: what is written into such a bundle is lost.

    Raises:
        BundleError: it is no bundle, was altered, is not safe to open, or is not signed with the key.
        UsageError: the key cannot be read.
    """
    with opened_folder(path) as folder:
        # The signature is asked for after unpacking too: an archive is no way around it.
        yield open_any(folder if folder == path else _find_root(folder), key=key)


@contextlib.contextmanager
def opened_bundle(path: Path, *, key: Path | None = None, target: str | None = None) -> Generator[Bundle]:
    """Yields the bundle of one target in a folder or archive, as `opened_any` does.

    `target` chooses a variant of several, and may be left out where there is one. A variant is put together in a folder
    that is gone after the block.

    Raises:
        BundleError: it is no bundle, was altered, is not safe to open, or is not signed with the key.
        UsageError: it holds several targets or another one, or the key cannot be read.
    """
    with opened_any(path, key=key) as found, work_folder() as work:
        if isinstance(found, MultiBundle):
            names = [variant.target for variant in found.index.variants]
            if target is None and len(names) != 1:
                raise UsageError(
                    f"'{path}' holds several targets", hint=f"choose one: --target {' or '.join(sorted(names))}"
                )
            chosen = target or names[0]
            yield extract_variant(found, chosen, work / chosen)
            return
        if target not in {None, found.manifest.target}:
            raise UsageError(f"'{path}' is for '{found.manifest.target}', not '{target}'", hint="leave --target out")
        yield found


def open_recorded(build: Path, name: str, targets: Iterable[str]) -> dict[str, Recorded]:
    """Returns the bundles of an earlier build of the model `name`, by target; one that was not built is left out.

    Raises:
        UsageError: there is none.
        BundleError: one is damaged.
    """
    folders = {target: build / f"{name}-{target}" for target in targets}
    opened = {target: open_bundle(folder) for target, folder in folders.items() if folder.is_dir()}
    if not opened:
        wanted = " or ".join(folder.name for folder in folders.values())
        raise UsageError(f"'{build}' holds no bundle to take the reference from", hint=f"it should hold {wanted}")
    return {target: Recorded(folder=bundle.folder, manifest=bundle.manifest) for target, bundle in opened.items()}


def open_any(folder: Path, *, key: Path | None = None) -> Bundle | MultiBundle:
    """Opens a folder of one target or of several, checked to the byte.

    Raises:
        BundleError: it is no bundle, was altered, or is not signed with the key.
    """
    if (folder / INDEX).is_file():
        return open_index(folder, key=key)
    return open_bundle(folder, key=key)


def sign_bundle(folder: Path, key: Path, result: TestResult) -> SignedBundle:
    """Checks a folder of one target or of several, and signs its files with what was verified of them.

    Raises:
        BundleError: the bundle is not whole, or is an archive.
        UsageError: the key cannot be read, or is no Ed25519 private key.
        OutputError: the folder cannot be written.
    """
    if folder.is_file():
        raise BundleError(f"'{folder}' is a file", hint="sign the bundle's folder, then pack it")
    found = open_any(folder)
    keyid = sign_files(folder, found.digests, result, key)
    return SignedBundle(bundle=folder, sha256=found.sha256, key=keyid, attested=result)


def _find_root(unpacked: Path) -> Path:
    """Returns the folder that holds the manifest: the archive's own root, or the one folder in it."""
    entries = list(unpacked.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else unpacked
