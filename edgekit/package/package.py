"""Bundles into one package: which kinds there are, which providers each can hold, and writing it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgekit._files import copy_into, digest_bytes, digest_file, staged_entries, work_folder, write_file
from edgekit.app_runtime import AppRuntime
from edgekit.bundle.archive import write_archive
from edgekit.bundle.folder import MANIFEST, Bundle, open_bundle
from edgekit.errors import BundleError, OutputError, UsageError
from edgekit.package.aar import collect_aar, report_store
from edgekit.package.board import collect_board
from edgekit.package.ort_package import collect_ort_package
from edgekit.package.store import StoreReport
from edgekit.package.swiftpm import collect_swiftpm
from edgekit.package.variant import (
    UNNAMED,
    Identity,
    Names,
    Variant,
    Workplace,
    describe_variants,
    identify,
    sort_bundles,
)
from edgekit.target import read_version

Kind = Literal["aar", "ort-package", "swiftpm", "tar", "zip"]
Collect = Callable[[Sequence[Bundle], Sequence[Variant], Identity, Workplace], Mapping[str, Path | bytes]]


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of package: what collects its files, which providers it can hold (none: all), and if it is an archive.

    `platform` names the operating system whose provider options the app passes, "" for those of every system.
    `needs_runtime` is True where the package is made for one archive of ONNX Runtime.
    """

    collect: Collect
    platform: str
    providers: frozenset[str]
    archive: Literal["zip", "tar"] | None
    needs_runtime: bool = False


_BOARD = frozenset(
    {"CPUExecutionProvider", "CoreMLExecutionProvider", "QNNExecutionProvider", "XnnpackExecutionProvider"}
)

_ANDROID = frozenset(
    {"CPUExecutionProvider", "NnapiExecutionProvider", "QNNExecutionProvider", "XnnpackExecutionProvider"}
)

_APPLE = frozenset({"CPUExecutionProvider", "CoreMLExecutionProvider", "XnnpackExecutionProvider"})

FORMS: dict[Kind, Form] = {
    "aar": Form(collect=collect_aar, platform="android", providers=_ANDROID, archive=None, needs_runtime=True),
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

    `store` is what an app store checks, None where the package brings no shared library into an app.

    `sha256` is that of the archive; for a folder it is that of the lines `sha256  name`, sorted by name, as
    `sha256sum` writes them.
    """

    kind: Kind
    out: str
    sha256: str
    bundles: tuple[Variant, ...]
    left_out: tuple[LeftOut, ...]
    files: dict[str, str]
    store: StoreReport | None = None


def package_bundles(
    paths: Sequence[Path],
    kind: Kind,
    out: Path,
    *,
    names: Names = UNNAMED,
    key: Path | None = None,
    runtime: AppRuntime | None = None,
    accept: Callable[[Sequence[Bundle]], None] | None = None,
) -> PackageReport:
    """Writes bundles, or those of a build's folder, as one package and returns what it holds.

    An AAR is compiled against the classes of `runtime`, and depends on its version. `accept` is shown the bundles
    before anything is written, and raises where one of them may not go.

    Every bundle is opened first, so that its digests hold, and with a public `key` its signature. Bundles that are
    given one by one keep their order, in which an app tries them; those of a build are sorted. Same bundles and
    options, same bytes.

    Raises:
        UsageError: a bundle does not fit this kind of package or needs a newer ONNX Runtime than `runtime`, that is
            lacking, a name is malformed, or there is no bundle.
        BundleError: a bundle is damaged.
        MissingExtraError: a compiler that this kind of package needs is not installed.
        OutputError: `out` cannot be written, or is a folder that holds something already.
    """
    form = FORMS[kind]
    made_for = _require_runtime(kind, runtime) if form.needs_runtime else None
    # Opened first, so that nothing is written of a bundle that was altered.
    bundles, left_out = _choose(paths, key, lambda bundle: _find_misfit(bundle, kind, made_for))
    if accept is not None:
        accept(bundles)
    variants = describe_variants(bundles, form.platform)
    identity = identify(bundles, names)
    with work_folder() as work:
        entries = form.collect(bundles, variants, identity, Workplace(folder=work, runtime=made_for))
        # Before anything is written, and of the sources: what the report names is what was to be packed.
        digests = {name: _digest(entries[name]) for name in sorted(entries)}
        sha256 = _write(entries, digests, form, out)
    return PackageReport(
        kind=kind,
        out=str(out),
        sha256=sha256,
        bundles=variants,
        left_out=left_out,
        files=digests,
        store=None if made_for is None else report_store(variants, made_for),
    )


def _write(entries: Mapping[str, Path | bytes], digests: Mapping[str, str], form: Form, out: Path) -> str:
    """Writes the package, and returns its digest as `PackageReport` has it."""
    if form.archive is not None:
        write_archive(entries, out, form.archive)
        return digest_file(out)
    _write_folder(entries, out)
    return digest_bytes("".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode())


def _require_runtime(kind: Kind, runtime: AppRuntime | None) -> AppRuntime:
    if runtime is None:
        raise UsageError(
            f"a package of kind {kind} is compiled against ONNX Runtime's own classes, which are not here",
            hint="edgekit devices install android",
        )
    return runtime


def _choose(
    paths: Sequence[Path], key: Path | None, find_misfit: Callable[[Bundle], str | None]
) -> tuple[tuple[Bundle, ...], tuple[LeftOut, ...]]:
    if len(paths) == 1 and not (paths[0] / MANIFEST).exists():
        found = sort_bundles([open_bundle(path.parent, key=key) for path in sorted(paths[0].glob(f"*/{MANIFEST}"))])
        if not found:
            raise BundleError(f"'{paths[0]}' is no bundle and holds none", hint="give the --out folder of a build")
        reasons = [(bundle, find_misfit(bundle)) for bundle in found]
        fitting = tuple(bundle for bundle, reason in reasons if reason is None)
        left_out = tuple(LeftOut(path=str(bundle.folder), reason=reason) for bundle, reason in reasons if reason)
        if not fitting:
            raise UsageError(f"no bundle of '{paths[0]}' fits: {left_out[0].reason}", hint="choose another --as")
        return fitting, left_out
    bundles = tuple(open_bundle(path, key=key) for path in paths)
    for bundle in bundles:
        misfit = find_misfit(bundle)
        # Named one by one, a bundle that does not fit is a mistake; found in a build's folder, it is only left out.
        if misfit is not None:
            raise UsageError(f"bundle '{bundle.folder}': {misfit}", hint="leave it out, or choose another --as")
    return bundles, ()


def _find_misfit(bundle: Bundle, kind: Kind, runtime: AppRuntime | None) -> str | None:
    provider, least, fitting = bundle.manifest.provider, bundle.manifest.minimum_ort, FORMS[kind].providers
    if fitting and provider not in fitting:
        return f"{provider} cannot be used from a package of kind {kind}"
    if runtime is not None and read_version(runtime.version) < read_version(least):
        return f"it needs ONNX Runtime {least}, and '{runtime.archive}' holds {runtime.version}"
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
