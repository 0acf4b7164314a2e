"""What runs is what the manifest covers: the files of a bundle are copied, and the copy is what was digested."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from edgekit._files import open_regular, safe_join, write_new
from edgekit.bundle.folder import CHECK, GOLDEN, LAYERS, TARGET, Bundle
from edgekit.bundle.golden.expected import EXPECTED
from edgekit.bundle.manifest.manifest import UNPADDED
from edgekit.errors import BundleError
from edgekit.target import Form

_CHUNK_BYTES = 1 << 20


def snapshot_bundle(bundle: Bundle, forms: Iterable[Form], out: Path) -> Bundle:
    """Copies the model files of some forms, the golden samples and what is known of model and target into `out`.

    Each file is digested as it is copied, so that a bundle which is altered after it was opened is refused, and what is
    altered later is not what runs.

    Raises:
        BundleError: the bundle has no such form, or a file is not what the manifest says.
        OutputError: the folder cannot be written.
    """
    for name in dict.fromkeys(_list_files(bundle, forms)):
        write_new(out / name, _read_checked(bundle, name))
    return msgspec.structs.replace(bundle, folder=out)


def _list_files(bundle: Bundle, forms: Iterable[Form]) -> Iterator[str]:
    for form in forms:
        bundle.find_model(form)
        yield from bundle.manifest.forms[form]
    for file in bundle.golden.files:
        yield file.relative_to(bundle.folder).as_posix()
    yield from (
        name for name in (f"{GOLDEN}/{EXPECTED}", UNPADDED, LAYERS, CHECK, TARGET) if name in bundle.manifest.files
    )


def _read_checked(bundle: Bundle, name: str) -> Iterator[bytes]:
    """Yields a file in chunks; raises a BundleError at its end, if not before, where it is not what was digested."""
    entry = bundle.manifest.files.get(name)
    digest = hashlib.sha256()
    try:
        # Opened without following links, and read once: what is digested is what is copied.
        with open_regular(safe_join(bundle.folder, name)) as source:
            # A file that grows while it is read ends at one chunk too many, and fails by its digest.
            while entry and source.tell() <= entry.size_bytes and (chunk := source.read(_CHUNK_BYTES)):
                digest.update(chunk)
                yield chunk
    except OSError as error:
        reason = f"cannot read {name!r} of bundle '{bundle.folder}': {error.strerror}"
        raise BundleError(reason, hint="build the bundle again") from error
    if entry is None or digest.hexdigest() != entry.sha256:
        raise BundleError(
            f"{name!r} of bundle '{bundle.folder}' was altered after it was opened", hint="build the bundle again"
        )
