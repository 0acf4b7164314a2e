"""Bundles into one package: which kinds there are, which providers each can hold, and writing it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgekit._files import copy_into, digest_bytes, digest_file, staged_entries, work_folder, write_file
from edgekit.bundle.archive import write_archive
from edgekit.bundle.folder import MANIFEST, Bundle, open_bundle
from edgekit.errors import BundleError, OutputError, UsageError
from edgekit.package.aar import collect_aar
from edgekit.package.board import collect_board
from edgekit.package.ort_package import collect_ort_package
from edgekit.package.swiftpm import collect_swiftpm
from edgekit.package.variant import Identity, Variant, describe_variants, identify, sort_bundles

Kind = Literal["aar", "ort-package", "swiftpm", "tar", "zip"]
Collect = Callable[[Sequence[Bundle], Sequence[Variant], Identity, Path], Mapping[str, Path | bytes]]


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of package: what collects its files, which providers it can hold (none: all), and if it is an archive.

    `platform` names the operating system whose provider options the app passes, "" for those of every system.
    """

    collect: Collect
    platform: str
    providers: frozenset[str]
    archive: Literal["zip", "tar"] | None


_BOARD = frozenset(
    {"CPUExecutionProvider", "CoreMLExecutionProvider", "QNNExecutionProvider", "XnnpackExecutionProvider"}
)

_ANDROID = frozenset(
    {"CPUExecutionProvider", "NnapiExecutionProvider", "QNNExecutionProvider", "XnnpackExecutionProvider"}
)

_APPLE = frozenset({"CPUExecutionProvider", "CoreMLExecutionProvider", "XnnpackExecutionProvider"})

FORMS: dict[Kind, Form] = {
    "aar": Form(collect=collect_aar, platform="android", providers=_ANDROID, archive=None),
    "ort-package": Form(collect=collect_ort_package, platform="", providers=frozenset(), archive=None),
    "swiftpm": Form(collect=collect_swiftpm, platform="ios", providers=_APPLE, archive=None),
    "tar": Form(collect=collect_board, platform="linux", providers=_BOARD, archive="tar"),
    "zip": Form(collect=collect_board, platform="linux", providers=_BOARD, archive="zip"),
}
"""Every kind of package."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of a build that such a package cannot hold, and why."""

    path: str
    reason: str


class PackageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was packed: the bundles in the order in which an app tries them, and the files of the package.

    `sha256` is that of the archive; for a folder it is that of the lines `sha256  name`, sorted by name, as
    `sha256sum` writes them.
    """

    kind: Kind
    out: str
    sha256: str
    bundles: tuple[Variant, ...]
    left_out: tuple[LeftOut, ...]
    files: dict[str, str]


def package_bundles(
    paths: Sequence[Path],
    kind: Kind,
    out: Path,
    *,
    name: str = "",
    group: str = "",
    version: str = "",
    key: Path | None = None,
    accept: Callable[[Sequence[Bundle]], None] | None = None,
) -> PackageReport:
    """Writes bundles, or those of a build's folder, as one package and returns what it holds.

    `accept` is shown the bundles before anything is written, and raises where one of them may not go.

    Every bundle is opened first, so that its digests hold, and with a public `key` its signature. Bundles that are
    given one by one keep their order, in which an app tries them; those of a build are sorted. Same bundles and
    options, same bytes.

    Raises:
        UsageError: a bundle does not fit this kind of package, a name is malformed, or there is none.
        BundleError: a bundle is damaged.
        MissingExtraError: a compiler that this kind of package needs is not installed.
        OutputError: `out` cannot be written, or is a folder that holds something already.
    """
    form = FORMS[kind]
    # Opened first, so that nothing is written of a bundle that was altered.
    bundles, left_out = _choose(paths, kind, form, key)
    if accept is not None:
        accept(bundles)
    variants = describe_variants(bundles, form.platform)
    identity = identify(bundles, name=name, group=group, version=version)
    with work_folder() as work:
        entries = form.collect(bundles, variants, identity, work)
        # Before anything is written, and of the sources: what the report names is what was to be packed.
        digests = {name: _digest(entries[name]) for name in sorted(entries)}
        if form.archive is not None:
            write_archive(entries, out, form.archive)
            sha256 = digest_file(out)
        else:
            _write_folder(entries, out)
            sha256 = digest_bytes("".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode())
    return PackageReport(kind=kind, out=str(out), sha256=sha256, bundles=variants, left_out=left_out, files=digests)


def _choose(
    paths: Sequence[Path], kind: Kind, form: Form, key: Path | None
) -> tuple[tuple[Bundle, ...], tuple[LeftOut, ...]]:
    if len(paths) == 1 and not (paths[0] / MANIFEST).exists():
        found = sort_bundles([open_bundle(path.parent, key=key) for path in sorted(paths[0].glob(f"*/{MANIFEST}"))])
        if not found:
            raise BundleError(f"'{paths[0]}' is no bundle and holds none", hint="give the --out folder of a build")
        fitting = tuple(bundle for bundle in found if _find_misfit(bundle, kind, form) is None)
        reasons = [(bundle, _find_misfit(bundle, kind, form)) for bundle in found]
        left_out = tuple(LeftOut(path=str(bundle.folder), reason=reason) for bundle, reason in reasons if reason)
        if not fitting:
            raise UsageError(f"no bundle of '{paths[0]}' fits: {left_out[0].reason}", hint="choose another --as")
        return fitting, left_out
    bundles = tuple(open_bundle(path, key=key) for path in paths)
    for bundle in bundles:
        misfit = _find_misfit(bundle, kind, form)
        # Named one by one, a bundle that does not fit is a mistake; found in a build's folder, it is only left out.
        if misfit is not None:
            raise UsageError(f"bundle '{bundle.folder}': {misfit}", hint="leave it out, or choose another --as")
    return bundles, ()


def _find_misfit(bundle: Bundle, kind: Kind, form: Form) -> str | None:
    provider = bundle.manifest.provider
    if form.providers and provider not in form.providers:
        return f"{provider} cannot be used from a package of kind {kind}"
    return None


def _write_folder(entries: Mapping[str, Path | bytes], out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"'{out}' holds something already", hint="give a folder that does not exist yet")
    with staged_entries(out) as staging:
        for name, source in entries.items():
            place = staging / name
            if isinstance(source, bytes):
                write_file(place, source)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as file:
                copy_into(source, file)


def _digest(source: Path | bytes) -> str:
    return digest_bytes(source) if isinstance(source, bytes) else digest_file(source)
