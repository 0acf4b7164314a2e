"""Packs bundles into one package: the table of the kinds of package, and what each of them supports."""

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgekit import _files
from edgekit._files import AnyPath, as_path
from edgekit.app_runtime import AppRuntime
from edgekit.bundle.archive import write_archive
from edgekit.bundle.folder import Bundle
from edgekit.bundle.group import Group
from edgekit.bundle.manifest import Manifest
from edgekit.bundle.multi import find_bundles
from edgekit.bundle.sign import SIGNATURE
from edgekit.errors import OutputError, UsageError, look_up
from edgekit.package import formats, variant
from edgekit.target import read_version

Kind = Literal["aar", "ort-package", "react-native", "swiftpm", "tar", "zip"]
Collect = Callable[[Sequence[variant.Part], variant.Identity, variant.Workplace], Mapping[str, Path | bytes]]


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of package: the function that collects its files, its providers (empty: all), its format as an archive.

    `platform` names the operating system whose provider options are packed, "" for the options of every system.
    `needs_runtime` is True if the package is compiled against one archive of ONNX Runtime, `shares` if its bundles
    share their golden samples. `refuse` returns why such a package cannot contain a bundle (None if it can), `remark`
    gives lines for the user.
    """

    collect: Collect
    platform: str = ""
    providers: frozenset[str] = frozenset()
    archive: Literal["zip", "tar"] | None = None
    needs_runtime: bool = False
    shares: bool = True
    refuse: Callable[[Manifest], str | None] = lambda _manifest: None
    remark: Callable[[Sequence[variant.Part]], Iterable[str]] = lambda _parts: ()


def _name_providers(*names: str) -> frozenset[str]:
    return frozenset(f"{name}ExecutionProvider" for name in names)


_BOARD = _name_providers("CPU", "CUDA", "CoreML", "OpenVINO", "QNN", "Tensorrt", "WebGpu", "Xnnpack")
_ANDROID = _name_providers("CPU", "Nnapi", "QNN", "Xnnpack")
_APPLE = _name_providers("CPU", "CoreML", "Xnnpack")
# All providers of React Native's plug-in except QNN, whose options it misnames (`backendType` for `backend_type`).
_PLUGIN = _name_providers("CPU", "CoreML", "Nnapi", "Xnnpack")

FORMS: dict[Kind, Form] = {
    "aar": Form(collect=formats.collect_aar, platform="android", providers=_ANDROID, needs_runtime=True),
    "ort-package": Form(collect=formats.collect_ort_package, shares=False),
    "react-native": Form(
        collect=formats.collect_npm, providers=_PLUGIN, refuse=formats.find_unsupported, remark=formats.list_remarks
    ),
    "swiftpm": Form(collect=formats.collect_swiftpm, platform="ios", providers=_APPLE),
    "tar": Form(collect=formats.collect_board, platform="linux", providers=_BOARD, archive="tar"),
    "zip": Form(collect=formats.collect_board, platform="linux", providers=_BOARD, archive="zip"),
}
"""All kinds of package."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of a build's folder that this kind of package cannot contain, and why."""

    path: str
    reason: str


class PackageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was packed: the bundles in the order in which an app tries them, and the files of the package.

    `files` are the sha256 of each file. `sizes` are the bytes of every file, with those in an AAR listed one by one,
    and `model_bytes` those of the models among them. `sha256` is that of the archive; for a folder it is that of the
    lines `sha256  name`, sorted by name, as `sha256sum` writes them. `store` is what Google Play checks, None if the
    package adds no shared library to an app; `remarks` are lines for the user.
    """

    kind: Kind
    out: str
    sha256: str
    bundles: tuple[variant.Variant, ...]
    left_out: tuple[LeftOut, ...]
    files: dict[str, str]
    sizes: dict[str, int]
    model_bytes: int
    store: formats.StoreReport | None = None
    remarks: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole package."""
        return sum(self.sizes.values())

    @property
    def outweighs(self) -> bool:
        """True if everything else in the package is larger than the models."""
        return self.size_bytes > 2 * self.model_bytes


def package_bundles(
    paths: Sequence[AnyPath],
    kind: Kind,
    out: AnyPath,
    *,
    names: variant.Identity = variant.UNNAMED,
    key: AnyPath | None = None,
    extras: tuple[variant.Extra, ...] = (),
    runtime: AppRuntime | None = None,
    accept: Callable[[Sequence[Bundle]], None] = lambda _bundles: None,
) -> PackageReport:
    """Writes bundles, or those of a build's folder, as one package and returns what it contains.

    Of each bundle the package contains the form of the model that the loader opens, the golden samples of its self-test
    and the manifest; `extras` names what is added. An AAR is compiled against the classes of `runtime`, and depends on
    its version. Every bundle is opened first, which checks its digests, and with a public `key` its signature. `accept`
    gets the bundles before anything is written, and raises if one of them must not be packed. An app tries bundles in
    the given order; those of a build's folder are sorted, NPU first. The same bundles and options give the same bytes.

    Raises:
        UsageError: a bundle does not fit this kind of package, or needs a newer ONNX Runtime than `runtime`; `runtime`
            is needed and missing; a name is malformed; or there is no bundle.
        BundleError: a bundle is damaged.
        MissingExtraError: a compiler that this kind of package needs is not installed.
        OutputError: `out` cannot be written, or is a folder that holds something already.
    """
    form = look_up(FORMS, kind, f"there is no package of kind '{kind}'")
    folders, out, key = [as_path(path) for path in paths], as_path(out), None if key is None else as_path(key)
    app_runtime = formats.require_runtime(runtime) if form.needs_runtime else None
    # Opened first, so that nothing is written if a bundle was altered.
    found = find_bundles(folders, key=key)
    is_build = len(folders) == 1 and found[0].folder != folders[0]
    found = variant.sort_bundles(found) if is_build else found
    misfits = {bundle.folder: _find_misfit(bundle, kind, app_runtime) for bundle in found}
    bundles = tuple(bundle for bundle in found if misfits[bundle.folder] is None)
    left_out = tuple(LeftOut(path=str(folder), reason=why) for folder, why in misfits.items() if why is not None)
    # A bundle in a build's folder that does not fit is left out; one that the user named is an error.
    if left_out and not (is_build and bundles):
        others = [other for other in FORMS if not any(_find_misfit(bundle, other, None) for bundle in found)]
        hint = f"leave it out, or choose {' or '.join(f'--as {other}' for other in others) or 'another --as'}"
        raise UsageError(f"bundle '{left_out[0].path}': {left_out[0].reason}", hint=hint)
    accept(bundles)
    identity = variant.identify(bundles, names, extras)
    with _files.work_folder() as work:
        parts = variant.make_parts(bundles, extras, work / "golden", platform=form.platform, share=form.shares)
        # By digest: a model file that several bundles share counts once.
        sizes: dict[str, int] = {}
        for part in parts:
            models = {name for names in part.bundle.manifest.forms.values() for name in names}
            sizes |= {file.sha256: file.size_bytes for name, file in part.variant.files.items() if name in models}
        return _write(
            form.collect(parts, identity, variant.Workplace(folder=work, runtime=app_runtime)),
            kind,
            out,
            bundles=tuple(part.variant for part in parts),
            left_out=left_out,
            model_bytes=sum(sizes.values()),
            store=None if app_runtime is None else formats.report_store(parts, app_runtime),
            remarks=tuple(form.remark(parts)),
        )


def package_group(group: Group, kind: Kind, out: Path) -> PackageReport:
    """Writes a group of models as an archive of its folder, signature included, and returns what it contains.

    Raises:
        UsageError: this kind of package has no code that runs several models.
        OutputError: `out` cannot be written.
    """
    if FORMS[kind].archive is None:
        archives = " or ".join(name for name, each in FORMS.items() if each.archive)
        words = f"a package of kind {kind} has no code that runs several models"
        raise UsageError(words, hint=f"--as {archives}: a group brings its own loader in Python, app/edgekit_group.py")
    entries: dict[str, Path | bytes] = {name: group.folder / name for name in group.digests}
    if (group.folder / SIGNATURE).is_file():
        entries[SIGNATURE] = group.folder / SIGNATURE
    return _write(entries, kind, out, bundles=(), left_out=(), model_bytes=group.size_bytes)


def _write(entries: Mapping[str, Path | bytes], kind: Kind, out: Path, **facts: Any) -> PackageReport:
    """Writes the package, and returns its report; `facts` are its remaining fields."""
    files, sizes = dict[str, str](), dict[str, int]()
    for name, source in sorted(entries.items()):
        files[name] = _files.digest_bytes(source) if isinstance(source, bytes) else _files.digest_file(source)
        if isinstance(source, Path) and name.endswith(".aar"):
            # An app's build unpacks the AAR.
            with zipfile.ZipFile(source) as aar:
                sizes |= {f"aar/{entry.filename}": entry.file_size for entry in aar.infolist()}
        else:
            sizes[name] = _files.measure_content(source)
    if (archive := FORMS[kind].archive) is not None:
        write_archive(entries, out, archive)
        sha256 = _files.digest_file(out)
    else:
        if out.is_dir() and any(out.iterdir()):
            raise OutputError(f"'{out}' holds something already", hint="give a folder that does not exist yet")
        with _files.staged_entries(out) as staging:
            for name, source in entries.items():
                place = staging / name
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("xb") as file:
                    _files.copy_into(source, file)
        sha256 = _files.digest_bytes("".join(f"{digest}  {name}\n" for name, digest in files.items()).encode())
    return PackageReport(kind=kind, out=str(out), sha256=sha256, files=files, sizes=sizes, **facts)


def _find_misfit(bundle: Bundle, kind: Kind, runtime: AppRuntime | None) -> str | None:
    provider, minimum_ort, providers = bundle.manifest.provider, bundle.manifest.minimum_ort, FORMS[kind].providers
    if providers and provider not in providers:
        return f"{provider} cannot be used from a package of kind {kind}"
    if runtime is not None and read_version(runtime.version) < read_version(minimum_ort):
        return f"it needs ONNX Runtime {minimum_ort}, and '{runtime.archive}' holds {runtime.version}"
    return FORMS[kind].refuse(bundle.manifest)
