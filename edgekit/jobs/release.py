"""Signing, joining and packing bundles that passed their verification, or that the user allows all the same."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgekit.bundle.folder import MANIFEST, VERIFY, Bundle
from edgekit.bundle.group.group import GROUP, Group, is_group, open_group
from edgekit.bundle.multi import MultiBundle, SignedBundle, find_bundles, join_bundles, open_any, sign_bundle
from edgekit.bundle.sign import AttestedOutput, AttestedRun, TestResult, list_subjects
from edgekit.devices.android.installed import find_app_runtime
from edgekit.errors import BundleError, DataError, UsageError
from edgekit.evidence import Verdict, worst_verdict
from edgekit.package.package import Kind, PackageReport, package_bundles, package_group
from edgekit.package.variant import UNNAMED, Extra, Identity
from edgekit.verify.groups import GroupReport
from edgekit.verify.report import VerifyReport, read_facts, read_report
from edgekit.verify.run_report import RunReport


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that is released although it did not pass a verification, and why it did not.

    `verdict` is "not proven" where nothing speaks against the bundle, else "fail".
    """

    bundle: str
    reason: str
    verdict: Verdict = "fail"


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """Which bundles may be released although they did not pass: unproven ones, or also failed and unverified ones."""

    unproven: bool = False
    failed: bool = False

    def takes(self, doubt: Doubt) -> bool:
        """Returns True if a bundle with this doubt may be released."""
        return self.failed or (self.unproven and doubt.verdict == "not proven")


NOTHING_ALLOWED = Allowed()
"""Only what passed is released."""


def sign_verified(
    folder: Path, key: Path, *, allowed: Allowed = NOTHING_ALLOWED
) -> tuple[SignedBundle, tuple[Doubt, ...]]:
    """Signs a folder of one target, of several or of a group, and returns also what `allowed` let through.

    Raises:
        BundleError: a bundle in it did not pass a verification, and that was not allowed; or as `sign_bundle`.
        UsageError: the key cannot be read, or is no Ed25519 private key.
        OutputError: the folder cannot be written.
    """
    if is_group(folder):
        group = open_group(folder)
        report = _read_group_report(group)
        members = _list_members(group, report)
        doubts = _refuse([_find_group_doubt(group, report, members)], allowed)
        return sign_bundle(folder, key, _attest_group(group, report, members, doubts)), doubts
    # Signing refuses an archive with words of its own.
    bundles = () if folder.is_file() else _list_bundles(open_any(folder))
    doubts = _refuse(map(_find_doubt, bundles), allowed)
    return sign_bundle(folder, key, _attest(bundles, doubts)), doubts


def join_verified(paths: Sequence[Path], out: Path, *, allowed: Allowed) -> tuple[MultiBundle, tuple[Doubt, ...]]:
    """Joins bundles, or all of a build's folder, as `join_bundles`; returns also what `allowed` let through.

    Raises:
        BundleError: one is damaged, or did not pass a verification, and that was not allowed.
        UsageError: two are for one target, or they are of different models.
        OutputError: `out` cannot be written.
    """
    bundles = find_bundles(paths)
    doubts = _refuse(map(_find_doubt, map(_place, bundles)), allowed)
    return join_bundles(bundles, out), doubts


def package_verified(
    paths: Sequence[Path], kind: Kind, out: Path, *, allowed: Allowed, **options: Any
) -> tuple[PackageReport, tuple[Doubt, ...]]:
    """Packs bundles, or all that fit of a build's folder, as `package_bundles`, which says what the options are.

    An AAR is made for the archive of ONNX Runtime that the device `android` runs. Returns also what `allowed` let
    through.

    Raises:
        BundleError: one is damaged, or did not pass a verification, and that was not allowed.
        EdgekitError: as `package_bundles`.
    """
    if any(is_group(path) for path in paths):
        return _package_group(paths, kind, out, allowed, **options)
    doubts: list[Doubt] = []

    def accept(bundles: Sequence[Bundle]) -> None:
        doubts.extend(_refuse(map(_find_doubt, map(_place, bundles)), allowed))

    report = package_bundles(paths, kind, out, accept=accept, runtime=find_app_runtime(), **options)
    return report, tuple(doubts)


class _Released(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that is to go: where it lies, its name in reports, its digest and its manifest.

    `report` is that of its last verification, None where there is none that can be read.
    """

    folder: Path
    name: str
    sha256: str
    manifest: str
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
        report=_read_report(bundle.folder),
    )


def _package_group(
    paths: Sequence[Path],
    kind: Kind,
    out: Path,
    allowed: Allowed,
    *,
    key: Path | None = None,
    names: Identity = UNNAMED,
    extras: Sequence[Extra] = (),
) -> tuple[PackageReport, tuple[Doubt, ...]]:
    """Writes the folder of a group as an archive; its loader is in it already."""
    if len(paths) > 1:
        raise UsageError("a group is packed by itself", hint="one folder, for one target")
    if names != UNNAMED or extras:
        words = "a group is packed whole and under its own name"
        raise UsageError(words, hint="leave --name, --group, --package-version and --with out")
    group = open_group(paths[0], key=key)
    report = _read_group_report(group)
    doubts = _refuse([_find_group_doubt(group, report, _list_members(group, report))], allowed)
    return package_group(group, kind, out), doubts


def _list_members(group: Group, report: GroupReport | None) -> list[_Released]:
    return [
        _Released(
            folder=group.folder / "members" / name,
            name=f"{group.manifest.name}-{group.manifest.target}/{name}",
            sha256=group.manifest.members[name].manifest.sha256,
            manifest=f"members/{name}/{MANIFEST}",
            report=None if report is None else report.members.get(name),
        )
        for name in group.manifests
    ]


def _read_group_report(group: Group) -> GroupReport | None:
    """Returns what was verified of exactly this group, None where there is nothing that can be read."""
    try:
        report = read_facts(group.folder / VERIFY, GroupReport)
    except DataError:
        return None
    return report if report.sha256 == group.sha256 else None


def _find_group_doubt(group: Group, report: GroupReport | None, members: Sequence[_Released]) -> Doubt | None:
    """Returns why a group may not go as it is: a member may not, or the whole did not pass."""
    if report is None:
        return Doubt(bundle=str(group.folder), reason="was not verified as it is now")
    for member in members:
        doubt = _find_doubt(member)
        if doubt is not None:
            return msgspec.structs.replace(doubt, bundle=str(group.folder), reason=f"({member.name}) {doubt.reason}")
    if report.verdict == "pass":
        return None
    lines = [line for run in report.runs for line in (*run.judgement.failures, *run.judgement.unproven)]
    said = lines[0] if lines else "no device ran the whole"
    words = "did not pass its verification" if report.verdict == "fail" else "is not proven"
    return Doubt(bundle=str(group.folder), reason=f"{words}: {said}", verdict=report.verdict)


def _attest_group(
    group: Group, report: GroupReport | None, members: Sequence[_Released], doubts: Sequence[Doubt]
) -> TestResult:
    """Returns what is signed of a group: beside its members each device that ran it from end to end."""
    name = f"{group.manifest.name}-{group.manifest.target}"
    provider = next(iter(group.manifests.values())).provider
    tests: dict[str, Verdict] = {name: doubts[0].verdict if doubts else "pass"}
    runs: list[AttestedRun] = []
    for run in report.runs if report is not None else ():
        tests[f"{name} on {run.device}"] = run.verdict
        metric = {} if run.task is None or run.task.got is None else {run.task.name: run.task.got}
        runs.append(AttestedRun(
            bundle=name, device=run.device, evidence=run.evidence, provider=provider, passed=run.verdict == "pass",
            samples=run.samples, provider_nodes={}, outputs=(), accuracy=None, latency_ms=None, versions={},
            metric=metric,
        ))  # fmt: skip
    allowed = [f"{name} {doubt.reason}" for doubt in doubts]
    weak = [doubt for doubt in map(_find_doubt, members) if doubt is not None]
    return _attest(members, weak, {GROUP: group.sha256}, tests, runs, allowed)


def _read_report(folder: Path) -> VerifyReport | None:
    try:
        return read_report(folder / VERIFY)
    except DataError:
        return None


def _refuse(found: Iterable[Doubt | None], allowed: Allowed) -> tuple[Doubt, ...]:
    """Returns the doubts that are allowed; None stands for a bundle without any."""
    doubts = tuple(doubt for doubt in found if doubt is not None)
    for doubt in doubts:
        if not allowed.takes(doubt):
            option = "--accept-unproven" if doubt.verdict == "not proven" else "--allow-failed"
            command = "group verify" if is_group(Path(doubt.bundle)) else "verify"
            raise BundleError(
                f"bundle '{doubt.bundle}' {doubt.reason}",
                hint=f"edgekit {command} {doubt.bundle}, or {option} to release it all the same",
            )
    return doubts


def _find_doubt(bundle: _Released) -> Doubt | None:
    report, name = bundle.report, str(bundle.folder)
    if report is None:
        return Doubt(bundle=name, reason="was not verified")
    # The evidence lies beside the manifest and is not covered by it: it counts only for the manifest that it names.
    if report.bundle_sha256 != bundle.sha256:
        return Doubt(bundle=name, reason="was verified before it became what it is now")
    if report.verdict == "fail":
        return Doubt(bundle=name, reason="did not pass its verification")
    if report.verdict == "pass":
        return None
    lines = (*report.unproven, *(line for run in report.runs for line in run.unproven))
    return Doubt(bundle=name, reason=f"is not proven: {lines[0]}", verdict="not proven")


def _attest(
    bundles: Sequence[_Released],
    doubts: Sequence[Doubt],
    manifests: Mapping[str, str] = {},
    tests: Mapping[str, Verdict] = {},
    runs: Sequence[AttestedRun] = (),
    allowed: Sequence[str] = (),
) -> TestResult:
    """Returns what is signed of bundles: the results of their reports, and which were allowed although they failed.

    What is known of a whole that they belong to comes before.
    """
    found, tests, runs = {doubt.bundle: doubt for doubt in doubts}, dict(tests), list(runs)
    for bundle in bundles:
        doubt = found.get(str(bundle.folder))
        tests[bundle.name] = "pass" if doubt is None else doubt.verdict
        report = bundle.report
        for run in report.runs if report is not None and report.bundle_sha256 == bundle.sha256 else ():
            runs.append(_describe_run(bundle.name, run))
            tests[f"{bundle.name} on {run.device}"] = run.verdict
    return TestResult(
        result=_RESULTS[worst_verdict(tests.values())],
        configuration=list_subjects({**manifests, **{bundle.manifest: bundle.sha256 for bundle in bundles}}),
        passed_tests=_list_tests(tests, "pass"),
        warned_tests=_list_tests(tests, "not proven"),
        failed_tests=_list_tests(tests, "fail"),
        edgekit_runs=tuple(runs),
        edgekit_allowed=(
            *allowed,
            *(f"{each.name} {found[str(each.folder)].reason}" for each in bundles if str(each.folder) in found),
        ),
    )


def _list_tests(tests: Mapping[str, Verdict], verdict: Verdict) -> tuple[str, ...]:
    return tuple(name for name, found in tests.items() if found == verdict)


# The words of the predicate: one that warns has found no fault, and does not vouch either.
_RESULTS: Mapping[Verdict, Literal["PASSED", "WARNED", "FAILED"]] = {
    "pass": "PASSED",
    "not proven": "WARNED",
    "fail": "FAILED",
}


def _describe_run(bundle: str, run: RunReport) -> AttestedRun:
    task = run.settled_task
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
