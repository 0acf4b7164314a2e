"""Signing, joining and packing bundles: each passed its verification as it is now, or the user said that it may go."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekit.bundle.folder import LAYERS, MANIFEST, VERIFY, Bundle
from edgekit.bundle.multi import MultiBundle, find_bundles, find_file, join_bundles
from edgekit.bundle.opening import SignedBundle, open_any, sign_bundle
from edgekit.bundle.statement import AttestedOutput, AttestedRun, TestResult, list_subjects
from edgekit.devices.android.installed import find_app_runtime
from edgekit.errors import BundleError, DataError
from edgekit.package.package import Kind, PackageReport, package_bundles
from edgekit.verify.layers.evidence import read_evidence_file
from edgekit.verify.layers.outliers import judge_layers
from edgekit.verify.report import RunReport, VerifyReport
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
    return sign_bundle(folder, key, _attest(bundles, doubts)), doubts


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

    An AAR is made for the archive of ONNX Runtime that the device `android` runs. Returns also what `allow_failed` let
    through.

    Raises:
        BundleError: one is damaged, or did not pass a verification, and that was not allowed.
        EdgekitError: as `package_bundles`.
    """
    doubts: list[Doubt] = []

    def accept(bundles: Sequence[Bundle]) -> None:
        doubts.extend(_refuse_doubtful([_place(bundle) for bundle in bundles], allow_failed=allow_failed))

    report = package_bundles(paths, kind, out, accept=accept, runtime=find_app_runtime(), **options)
    return report, tuple(doubts)


class _Released(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that is to go: where it lies, its name in reports, its digest, its manifest, and its layers if any.

    `report` is that of its last verification, None where there is none that can be read.
    """

    folder: Path
    name: str
    sha256: str
    manifest: str
    layers: Path | None
    report: VerifyReport | None


def _list_bundles(found: Bundle | MultiBundle) -> list[_Released]:
    """Returns each bundle of a folder: those of a joined one keep the digests that they had."""
    if isinstance(found, Bundle):
        return [_place(found)]
    return [
        _Released(
            folder=found.folder / variant.folder,
            name=f"{found.index.name}-{variant.target}",
            sha256=variant.manifest.sha256,
            manifest=f"{variant.folder}/{MANIFEST}",
            layers=find_file(found, variant, LAYERS),
            report=_read_report(found.folder / variant.folder),
        )
        for variant in found.index.variants
    ]


def _place(bundle: Bundle) -> _Released:
    return _Released(
        folder=bundle.folder,
        name=f"{bundle.manifest.name}-{bundle.manifest.target}",
        sha256=bundle.sha256,
        manifest=MANIFEST,
        layers=bundle.folder / LAYERS if LAYERS in bundle.manifest.files else None,
        report=_read_report(bundle.folder),
    )


def _read_report(folder: Path) -> VerifyReport | None:
    try:
        return read_report(folder / VERIFY)
    except DataError:
        return None


def _refuse_doubtful(bundles: Sequence[_Released], *, allow_failed: bool) -> tuple[Doubt, ...]:
    reasons = ((bundle.folder, _find_doubt(bundle)) for bundle in bundles)
    doubts = tuple(Doubt(bundle=str(folder), reason=reason) for folder, reason in reasons if reason)
    if doubts and not allow_failed:
        raise BundleError(
            f"bundle '{doubts[0].bundle}' {doubts[0].reason}",
            hint=f"edgekit verify {doubts[0].bundle}, or --allow-failed to release it all the same",
        )
    return doubts


def _find_doubt(bundle: _Released) -> str | None:
    report = bundle.report
    if report is None:
        return "was not verified"
    # The evidence lies beside the manifest and is not covered by it: it counts only for the manifest that it names.
    if report.bundle_sha256 != bundle.sha256:
        return "was verified before it became what it is now"
    if bundle.layers is not None and judge_layers(read_evidence_file(bundle.layers).layers):
        return "has a layer that is not the float model's, whatever its verify.json says"
    return None if report.passed else "did not pass its verification"


def _attest(bundles: Sequence[_Released], doubts: Sequence[Doubt]) -> TestResult:
    """Returns what a signer says of bundles: what their reports found, and which of them may only go as they are."""
    failed = {doubt.bundle: doubt.reason for doubt in doubts}
    tests: dict[str, bool] = {}
    runs: list[AttestedRun] = []
    for bundle in bundles:
        tests[bundle.name] = str(bundle.folder) not in failed
        report = bundle.report
        for run in report.runs if report is not None and report.bundle_sha256 == bundle.sha256 else ():
            runs.append(_describe_run(bundle.name, run))
            tests[f"{bundle.name} on {run.device}"] = run.passed
    return TestResult(
        result="PASSED" if all(tests.values()) else "FAILED",
        configuration=list_subjects({bundle.manifest: bundle.sha256 for bundle in bundles}),
        passed_tests=tuple(name for name, passed in tests.items() if passed),
        failed_tests=tuple(name for name, passed in tests.items() if not passed),
        edgekit_runs=tuple(runs),
        edgekit_allowed=tuple(
            f"{bundle.name} {failed[str(bundle.folder)]}" for bundle in bundles if str(bundle.folder) in failed
        ),
    )


def _describe_run(bundle: str, run: RunReport) -> AttestedRun:
    task = run.task
    return AttestedRun(
        bundle=bundle,
        device=run.device,
        evidence=run.evidence,
        provider=run.provider,
        passed=run.passed,
        samples=run.samples,
        provider_nodes=run.provider_nodes,
        outputs=tuple(
            AttestedOutput(
                name=output.name,
                sqnr_db=output.sqnr_db,
                cosine=output.cosine,
                top1_agreement=output.top1_agreement,
            )
            for output in run.outputs
        ),
        accuracy=None if run.accuracy is None else run.accuracy.got,
        metric={} if task is None or task.got is None else {task.name: task.got},
        latency_ms=None if run.latency_ms is None else run.latency_ms.median,
        versions=run.versions,
    )
