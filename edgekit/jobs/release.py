"""Signs, joins and packs bundles that passed their verification, or that the user allows although they did not."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from edgekit.bundle.folder import MANIFEST, VERIFY, Bundle
from edgekit.bundle.group import GROUP, Group, is_group, open_group
from edgekit.bundle.multi import MultiBundle, SignedBundle, find_bundles, join_bundles, open_any, sign_bundle
from edgekit.bundle.sign import AttestedOutput, AttestedRun, TestResult, list_subjects
from edgekit.devices.android.installed import find_app_runtime
from edgekit.errors import BundleError, DataError, UsageError
from edgekit.evidence import Verdict, worst_verdict
from edgekit.package.package import Kind, PackageReport, package_bundles, package_group
from edgekit.package.variant import UNNAMED, Extra, Identity
from edgekit.serialize import fill
from edgekit.verify.on_devices import GroupReport
from edgekit.verify.report import VerifyReport, read_facts
from edgekit.verify.task_scores import TaskReport

_Report = TypeVar("_Report", VerifyReport, GroupReport)


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that did not pass a verification, and the reason, which follows its name in a message.

    `verdict` is "not proven" if nothing speaks against the bundle, else "fail".
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


NOTHING = Allowed()
"""Only bundles that passed are released."""


def sign_verified(folder: Path, key: Path, *, allowed: Allowed = NOTHING) -> tuple[SignedBundle, tuple[Doubt, ...]]:
    """Signs a folder of one target, of several or of a group; also returns the doubts that `allowed` accepts.

    Raises:
        BundleError: a bundle in it did not pass a verification, and is not allowed; or as `sign_bundle`.
        UsageError: the key cannot be read, or is no Ed25519 private key.
        OutputError: the folder cannot be written.
    """
    if is_group(folder):
        found = _list_group(open_group(folder))
        doubts = _refuse(found[:1], allowed)
    else:
        # `sign_bundle` refuses an archive with its own message.
        found = [] if folder.is_file() else _list_bundles(open_any(folder))
        doubts = _refuse(found, allowed)
    tests: dict[str, Verdict] = {}
    for one in found:
        tests[one.name] = "pass" if one.doubt is None else one.doubt.verdict
        tests |= {f"{one.name} on {run.device}": verdict for run, verdict in one.runs}
    named = {verdict: tuple(name for name, each in tests.items() if each == verdict) for verdict in _RESULTS}
    # A bundle that was released without a pass is named in what is signed.
    attested = TestResult(
        result=_RESULTS[worst_verdict(tests.values())],
        configuration=list_subjects({one.manifest: one.sha256 for one in found}),
        passed_tests=named["pass"],
        warned_tests=named["not proven"],
        failed_tests=named["fail"],
        edgekit_runs=tuple(run for one in found for run, _ in one.runs),
        edgekit_allowed=tuple(f"{one.name} {one.doubt.reason}" for one in found if one.doubt is not None),
    )
    return sign_bundle(folder, key, attested), doubts


def join_verified(paths: Sequence[Path], out: Path, *, allowed: Allowed) -> tuple[MultiBundle, tuple[Doubt, ...]]:
    """Joins bundles, or all of a build's folder, as `join_bundles`; also returns the doubts that `allowed` accepts.

    Raises:
        BundleError: one is damaged, or did not pass a verification and is not allowed.
        UsageError: two are for one target, or they are of different models.
        OutputError: `out` cannot be written.
    """
    bundles = find_bundles(paths)
    doubts = _refuse(map(_read_bundle, bundles), allowed)
    return join_bundles(bundles, out), doubts


def package_verified(
    paths: Sequence[Path],
    kind: Kind,
    out: Path,
    *,
    allowed: Allowed,
    key: Path | None = None,
    names: Identity = UNNAMED,
    extras: tuple[Extra, ...] = (),
) -> tuple[PackageReport, tuple[Doubt, ...]]:
    """Packs a group, bundles, or all that fit of a build's folder; also returns the doubts that `allowed` accepts.

    See `package_bundles` for the options. An AAR is made for the ONNX Runtime that the device `android` runs.

    Raises:
        BundleError: one is damaged, or did not pass a verification and is not allowed.
        EdgekitError: as `package_bundles`.
    """
    doubts: list[Doubt] = []
    if any(is_group(path) for path in paths):
        # The package of a group is an archive of its folder, which contains its loader.
        if len(paths) > 1:
            raise UsageError("a group is packed by itself", hint="one folder, for one target")
        if names != UNNAMED or extras:
            words = "a group is packed whole and under its own name"
            raise UsageError(words, hint="leave --name, --group, --package-version and --with out")
        group = open_group(paths[0], key=key)
        doubts += _refuse(_list_group(group)[:1], allowed)
        return package_group(group, kind, out), tuple(doubts)

    def accept(bundles: Sequence[Bundle]) -> None:
        doubts.extend(_refuse(map(_read_bundle, bundles), allowed))

    report = package_bundles(
        paths, kind, out, names=names, key=key, extras=extras, runtime=find_app_runtime(), accept=accept
    )
    return report, tuple(doubts)


class _Released(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle or a group to release: its name in reports, its manifest, and the results of its last verification.

    `doubt` says why it did not pass, None if it did. `runs` has, for each device that ran it, the facts to sign and the
    verdict.
    """

    name: str
    manifest: str
    sha256: str
    doubt: Doubt | None
    runs: tuple[tuple[AttestedRun, Verdict], ...]


def _list_bundles(found: Bundle | MultiBundle) -> list[_Released]:
    """Returns the bundle of a folder, or each one of a joined folder."""
    if isinstance(found, Bundle):
        return [_read_bundle(found)]
    released: list[_Released] = []
    for variant in found.index.variants:
        folder, name = found.folder / variant.folder, f"{found.index.name}-{variant.target}"
        manifest, report = f"{variant.folder}/{MANIFEST}", _read_report(folder, VerifyReport)
        released.append(_describe(folder, name, manifest, variant.manifest.sha256, report))
    return released


def _read_bundle(bundle: Bundle) -> _Released:
    name = f"{bundle.manifest.name}-{bundle.manifest.target}"
    return _describe(bundle.folder, name, MANIFEST, bundle.sha256, _read_report(bundle.folder, VerifyReport))


def _list_group(group: Group) -> list[_Released]:
    """Returns the whole group, which has the doubts of its members too, and then each member."""
    name, report = f"{group.manifest.name}-{group.manifest.target}", _read_report(group.folder, GroupReport)
    # A verification of another version of the group does not count.
    report = report if report is not None and report.sha256 == group.sha256 else None
    members: list[_Released] = []
    for each in group.manifests:
        place, sha256 = group.folder / "members" / each, group.manifest.members[each].manifest.sha256
        verified = None if report is None else report.members.get(each)
        members.append(_describe(place, f"{name}/{each}", f"members/{each}/{MANIFEST}", sha256, verified))
    doubt, runs = None, () if report is None else report.runs
    doubtful = next((member for member in members if member.doubt is not None), None)
    if report is None:
        doubt = Doubt(bundle=str(group.folder), reason="was not verified as it is now")
    elif doubtful is not None and doubtful.doubt is not None:
        reason = f"({doubtful.name}) {doubtful.doubt.reason}"
        doubt = msgspec.structs.replace(doubtful.doubt, bundle=str(group.folder), reason=reason)
    elif report.verdict != "pass":
        lines = [line for run in runs for line in (*run.judgement.failures, *run.judgement.unproven)]
        words = "did not pass its verification" if report.verdict == "fail" else "is not proven"
        reason = f"{words}: {lines[0] if lines else 'no device ran the group'}"
        doubt = Doubt(bundle=str(group.folder), reason=reason, verdict=report.verdict)
    unknown: dict[str, Any] = {"provider_nodes": {}, "outputs": (), "latency_ms": None, "versions": {}}
    facts = {**unknown, "accuracy": None, "bundle": name, "provider": next(iter(group.manifests.values())).provider}
    attested = [
        fill(AttestedRun, run, **facts, passed=run.verdict == "pass", metric=_name_score(run.task)) for run in runs
    ]
    group_release = _Released(
        name=name,
        manifest=GROUP,
        sha256=group.sha256,
        doubt=doubt,
        runs=tuple(zip(attested, [run.verdict for run in runs], strict=True)),
    )
    return [group_release, *members]


def _read_report(folder: Path, kind: type[_Report]) -> _Report | None:
    """Returns the last verification of a bundle or a group, None if there is none that can be read."""
    try:
        return read_facts(folder / VERIFY, kind)
    except DataError:
        return None


def _describe(folder: Path, name: str, manifest: str, sha256: str, report: VerifyReport | None) -> _Released:
    # The manifest has no digest of `verify.json`, so that file counts only for the manifest whose digest it names.
    is_current = report is not None and report.bundle_sha256 == sha256
    reason, verdict = "", "fail" if report is None or not is_current else report.verdict
    if report is None:
        reason = "was not verified"
    elif not is_current:
        reason = "was changed after its verification"
    elif verdict == "fail":
        reason = "did not pass its verification"
    elif verdict != "pass":
        lines = (*report.unproven, *(line for run in report.runs for line in run.unproven))
        reason = f"is not proven: {lines[0]}"
    runs: list[tuple[AttestedRun, Verdict]] = []
    for run in report.runs if report and is_current else ():
        attested = fill(
            AttestedRun,
            run,
            bundle=name,
            outputs=tuple(fill(AttestedOutput, output) for output in run.outputs),
            accuracy=None if run.accuracy is None else run.accuracy.got,
            metric=_name_score(run.task),
            latency_ms=None if run.latency_ms is None else run.latency_ms.median,
        )
        runs.append((attested, run.verdict))
    doubt = Doubt(bundle=str(folder), reason=reason, verdict=verdict) if reason else None
    return _Released(name=name, manifest=manifest, sha256=sha256, doubt=doubt, runs=tuple(runs))


def _name_score(task: TaskReport | None) -> dict[str, float]:
    return {} if task is None or task.got is None else {task.name: task.got}


def _refuse(found: Iterable[_Released], allowed: Allowed) -> tuple[Doubt, ...]:
    """Returns the doubts, if all are allowed.

    Raises:
        BundleError: one is not.
    """
    doubts = tuple(one.doubt for one in found if one.doubt is not None)
    for doubt in doubts:
        if not allowed.takes(doubt):
            option = "--accept-unproven" if doubt.verdict == "not proven" else "--allow-failed"
            command = "group verify" if is_group(Path(doubt.bundle)) else "verify"
            words = f"bundle '{doubt.bundle}' {doubt.reason}"
            raise BundleError(words, hint=f"edgekit {command} {doubt.bundle}, or {option} to release it all the same")
    return doubts


# The results of in-toto's test-result predicate: WARNED means neither passed nor failed.
_RESULTS: Mapping[Verdict, Literal["PASSED", "WARNED", "FAILED"]] = {
    "pass": "PASSED",
    "not proven": "WARNED",
    "fail": "FAILED",
}
