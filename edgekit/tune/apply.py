"""A setting written into a bundle, for a kind of machine, with the evidence; the manifest stays the word on everything.

The model files, golden samples and thresholds are what they were; a signature is of the bundle before and goes.
"""

from pathlib import Path

import msgspec

from edgekit._files import write_file
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.manifest.manifest import Manifest, encode_json
from edgekit.bundle.manifest.trust import check_requests
from edgekit.bundle.manifest.tuned import TunedSession
from edgekit.bundle.multi import INDEX
from edgekit.bundle.statement import SIGNATURE
from edgekit.errors import BundleError


def require_bundle(path: Path) -> None:
    """Refuses what no setting can be written into, before anything is measured.

    Raises:
        BundleError: it is no folder with a manifest, or a part of a folder of several targets.
    """
    if not path.is_dir():
        raise BundleError(f"--apply writes into a bundle, and '{path}' is none", hint="build one, or leave --apply out")
    # The index names the digest of each manifest: changing one would break the others' folder.
    index = next((parent / INDEX for parent in path.resolve().parents[:2] if (parent / INDEX).is_file()), None)
    if index is not None:
        raise BundleError(
            f"'{path}' belongs to '{index}'", hint="tune the bundle before you join it: edgekit join comes after"
        )


def apply_setting(path: Path, tuned: TunedSession) -> str:
    """Writes a setting into a bundle's manifest in the place of one for the same machines; returns what was done.

    Raises:
        BundleError: the bundle is not whole, or the setting is not for a bundle to pass.
        OutputError: the folder cannot be written.
    """
    bundle = open_bundle(path)
    others = [one for one in bundle.manifest.tuned or () if one.machine != tuned.machine]
    # The narrower class first: the first that holds is taken.
    ordered = sorted((*others, tuned), key=lambda one: (one.machine.system, one.machine.machine, -one.machine.cores))
    return _write(path, msgspec.structs.replace(bundle.manifest, tuned=tuple(ordered)), str(path / MANIFEST))


def _write(path: Path, manifest: Manifest, source: str) -> str:
    check_requests(manifest, source)
    signed = (path / SIGNATURE).exists()
    # The signature goes first: cut here, the bundle is unsigned and whole, and never signed for other content.
    (path / SIGNATURE).unlink(missing_ok=True)
    write_file(path / MANIFEST, encode_json(manifest))
    return f"'{source}'" + (
        "; its signature was of the bundle before and is gone: edgekit sign signs it again" if signed else ""
    )
