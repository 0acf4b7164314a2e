"""Signing, joining and packing bundles: each passed its verification as it is now, or the user said that it may go."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekit.bundle.folder import LAYERS, VERIFY, Bundle
from edgekit.bundle.multi import MultiBundle, find_bundles, join_bundles
from edgekit.bundle.opening import SignedBundle, open_any, sign_bundle
from edgekit.errors import BundleError, DataError
from edgekit.package.package import Kind, PackageReport, package_bundles
from edgekit.verify.layers.evidence import read_evidence_file
from edgekit.verify.layers.outliers import judge_layers
from edgekit.verify.run import read_report


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that was released although it did not pass a verification, and why."""

    bundle: str
    reason: str


def sign_verified(folder: Path, key: Path, *, allow_failed: bool = False) -> tuple[SignedBundle, tuple[Doubt, ...]]:
    """Signs a folder of one target or of several, as `sign_bundle`; returns also what `allow_failed` let through.

    Raises:
        BundleError: a bundle in it did not pass a verification, and that was not allowed; or as `sign_bundle`.
        UsageError: the key cannot be read, or is no Ed25519 private key.
        OutputError: the folder cannot be written.
    """
    # Signing refuses an archive with words of its own.
    bundles = () if folder.is_file() else _list_bundles(open_any(folder))
    doubts = _refuse_doubtful(bundles, allow_failed=allow_failed)
    return sign_bundle(folder, key), doubts


def join_verified(
    paths: Sequence[Path], out: Path, *, allow_failed: bool = False
) -> tuple[MultiBundle, tuple[Doubt, ...]]:
    """Joins bundles, or all of a build's folder, as `join_bundles`; returns also what `allow_failed` let through.

    Raises:
        BundleError: one is damaged, or did not pass a verification, and that was not allowed.
        UsageError: two are for one target, or they are of different models.
        OutputError: `out` cannot be written.
    """
    bundles = find_bundles(paths)
    doubts = _refuse_doubtful([_place(bundle) for bundle in bundles], allow_failed=allow_failed)
    return join_bundles(bundles, out), doubts


def package_verified(
    paths: Sequence[Path], kind: Kind, out: Path, *, allow_failed: bool = False, **options: Any
) -> tuple[PackageReport, tuple[Doubt, ...]]:
    """Packs bundles, or all that fit of a build's folder, as `package_bundles`, which says what the options are.

    Returns also what `allow_failed` let through.

    Raises:
        BundleError: one is damaged, or did not pass a verification, and that was not allowed.
        EdgekitError: as `package_bundles`.
    """
    doubts: list[Doubt] = []

    def accept(bundles: Sequence[Bundle]) -> None:
        doubts.extend(_refuse_doubtful([_place(bundle) for bundle in bundles], allow_failed=allow_failed))

    return package_bundles(paths, kind, out, accept=accept, **options), tuple(doubts)


def _list_bundles(found: Bundle | MultiBundle) -> list[tuple[Path, str]]:
    """Returns the folder and the digest of each bundle: those of a joined folder keep the digests that they had."""
    if isinstance(found, Bundle):
        return [_place(found)]
    return [(found.folder / variant.folder, variant.manifest.sha256) for variant in found.index.variants]


def _place(bundle: Bundle) -> tuple[Path, str]:
    return bundle.folder, bundle.sha256


def _refuse_doubtful(bundles: Sequence[tuple[Path, str]], *, allow_failed: bool) -> tuple[Doubt, ...]:
    reasons = ((folder, _find_doubt(folder, sha256)) for folder, sha256 in bundles)
    doubts = tuple(Doubt(bundle=str(folder), reason=reason) for folder, reason in reasons if reason)
    if doubts and not allow_failed:
        raise BundleError(
            f"bundle '{doubts[0].bundle}' {doubts[0].reason}",
            hint=f"edgekit verify {doubts[0].bundle}, or --allow-failed to release it all the same",
        )
    return doubts


def _find_doubt(folder: Path, sha256: str) -> str | None:
    try:
        report = read_report(folder / VERIFY)
    except DataError:
        return "was not verified"
    # The evidence lies beside the manifest and is not covered by it: it counts only for the manifest that it names.
    if report.bundle_sha256 != sha256:
        return "was verified before it became what it is now"
    layers = folder / LAYERS
    if layers.is_file() and judge_layers(read_evidence_file(layers).layers):
        return "has a layer that is not the float model's, whatever its verify.json says"
    return None if report.passed else "did not pass its verification"
