"""Writing a bundle and opening one: what is opened is exactly what was written, or it is refused."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from edgekit._files import digest_bytes, digest_file, replacing_file, safe_join, write_file
from edgekit.bundle.golden import Golden
from edgekit.bundle.manifest import (
    MAX_MANIFEST_BYTES,
    Ancestry,
    BundledFile,
    GoldenFacts,
    Manifest,
    Placement,
    decode_manifest,
    encode_json,
)
from edgekit.bundle.snippets import render_snippets
from edgekit.check.report import CheckReport
from edgekit.errors import BundleError, OutputError
from edgekit.model import Model
from edgekit.target import Form, Precision, Target

MANIFEST, CHECK, TARGET, VERIFY, GOLDEN, APP = (
    "manifest.json", "check.json", "target.json", "verify.json", "golden", "app",
)  # fmt: skip

_UNLISTED = frozenset({MANIFEST, VERIFY})

_Value = TypeVar("_Value", CheckReport, Target)


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that holds a model for one target with everything an app needs."""

    folder: Path
    manifest: Manifest

    @property
    def sha256(self) -> str:
        """The digest of the manifest, and so of everything that the manifest covers."""
        return digest_bytes(encode_json(self.manifest))

    @property
    def golden(self) -> Golden:
        """The golden vectors in it."""
        return Golden(
            folder=self.folder / GOLDEN,
            samples=self.manifest.golden.samples,
            inputs=self.manifest.inputs,
            outputs=self.manifest.outputs,
            has_labels=self.manifest.golden.has_labels,
        )

    def find_model(self, form: Form) -> Path:
        """Returns the file to load for a form.

        Raises:
            BundleError: the bundle has no such form.
        """
        names = self.manifest.forms.get(form)
        if not names:
            valid = ", ".join(sorted(self.manifest.forms))
            raise BundleError(f"bundle '{self.folder}' has no model in the form '{form}'", hint=f"it has: {valid}")
        return self.folder / names[0]


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into a bundle.

    `files` are the model files of each form, the one to load first; the bundle keeps their names. `source` is the
    user's model. `versions` names the tools and their versions.
    """

    source: Model
    target: Target
    precision: Precision
    files: Mapping[Form, tuple[Path, ...]]
    golden: Golden
    check: CheckReport
    ancestry: Ancestry
    versions: Mapping[str, str]


def write_bundle(contents: Contents, out: Path) -> Bundle:
    """Fills the folder `out` and returns the bundle; the manifest is written last, so that a torn bundle has none.

    Model files that lie in `out` already stay where they are, all others are copied. Same contents, same bytes.

    Raises:
        OutputError: the folder cannot be written, or two files want the same name.
    """
    _copy_models(contents.files, out)
    for file in contents.golden.files:
        _copy_file(file, out / GOLDEN / file.name)
    write_file(out / CHECK, encode_json(contents.check))
    write_file(out / TARGET, encode_json(_describe_target(contents.target)))
    draft = _make_manifest(contents, {})
    for name, text in render_snippets(contents.target, draft).items():
        write_file(out / APP / name, text.encode())
    manifest = _make_manifest(contents, _digest_files(out))
    write_file(out / MANIFEST, encode_json(manifest))
    return Bundle(folder=out, manifest=manifest)


def open_bundle(path: Path) -> Bundle:
    """Opens a bundle after checking every file in it against the manifest.

    Raises:
        BundleError: the manifest is missing or malformed; a file is missing, altered, unlisted, a link, or bears an
            unsafe name.
    """
    if not path.is_dir():
        raise BundleError(f"there is no bundle '{path}'", hint="give the folder that holds manifest.json")
    file = path / MANIFEST
    _check_regular(file, MANIFEST, path)
    with file.open("rb") as stream:
        manifest = decode_manifest(stream.read(MAX_MANIFEST_BYTES + 1), str(file))
    _check_names(manifest, path)
    for name, entry in manifest.files.items():
        _check_file(safe_join(path, name), name, entry, path)
    return Bundle(folder=path, manifest=manifest)


def read_check(bundle: Bundle) -> CheckReport:
    """Returns the predicted placement that the bundle was built with.

    Raises:
        BundleError: `check.json` is missing or malformed.
    """
    return _read_json(bundle, CHECK, CheckReport)


def read_target(bundle: Bundle) -> Target:
    """Returns the target with the settings that the bundle was built for; its `folder` is empty.

    Raises:
        BundleError: `target.json` is missing or malformed.
    """
    return _read_json(bundle, TARGET, Target)


def _read_json(bundle: Bundle, name: str, kind: type[_Value]) -> _Value:
    file = bundle.folder / name
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise BundleError(f"'{file}' is malformed: {error}", hint="build the bundle again") from error


def _make_manifest(contents: Contents, files: dict[str, BundledFile]) -> Manifest:
    target, check = contents.target, contents.check
    forms: dict[Form, tuple[str, ...]] = {
        form: tuple(path.name for path in paths) for form, paths in contents.files.items() if paths
    }
    loadable: list[Form] = [form for form in target.conversion.forms if form in forms]
    if not loadable:
        raise BundleError(
            f"there is no model file in a form that target '{target.name}' loads", hint="convert it first"
        )
    return Manifest(
        name=contents.source.name,
        target=target.name,
        settings=target.settings,
        precision=contents.precision,
        provider=target.provider,
        provider_options=target.session.provider_options,
        session_config=target.session.config,
        minimum_ort=target.minimum_ort,
        runtime=target.runtime,
        form=loadable[0],
        forms=forms,
        files=files,
        inputs=contents.golden.inputs,
        outputs=contents.golden.outputs,
        golden=GoldenFacts(samples=contents.golden.samples, has_labels=contents.golden.has_labels),
        placement=Placement(
            nodes=check.nodes, taken=check.taken, partitions=check.partitions, taken_macs=check.taken_macs
        ),
        thresholds=target.thresholds,
        verification=target.verification,
        ancestry=contents.ancestry,
        versions=dict(contents.versions),
        source_size_bytes=contents.source.size_bytes,
        model_size_bytes=sum(path.stat().st_size for path in contents.files[loadable[0]]),
    )


def _describe_target(target: Target) -> dict[str, object]:
    return {key: value for key, value in msgspec.structs.asdict(target).items() if key != "folder"}


def _copy_models(files: Mapping[Form, tuple[Path, ...]], out: Path) -> None:
    taken: dict[str, Path] = {name.lower(): Path() for name in (MANIFEST, CHECK, TARGET, VERIFY, GOLDEN, APP)}
    for path in (path for paths in files.values() for path in paths):
        if taken.setdefault(path.name.lower(), path) != path:
            raise OutputError(f"two files of the bundle want the name '{path.name}'", hint="rename the model")
        _copy_file(path, out / path.name)


def _copy_file(source: Path, target: Path) -> None:
    if source == target:
        return
    with replacing_file(target) as temporary:
        shutil.copyfile(source, temporary)


def _digest_files(folder: Path) -> dict[str, BundledFile]:
    return {
        name: BundledFile(sha256=digest_file(path), size_bytes=path.stat().st_size)
        for name, path in _iterate_files(folder)
        if name not in _UNLISTED
    }


def _iterate_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix(), path


def _check_names(manifest: Manifest, folder: Path) -> None:
    """Refuses a bundle that does not hold exactly the files that its manifest lists, before any of them is opened."""
    present = {name for name, _ in _iterate_files(folder)} - _UNLISTED
    for name in sorted(present - manifest.files.keys()):
        raise BundleError(
            f"bundle '{folder}' holds {name!r}, which its manifest does not list", hint="remove that file"
        )
    for name in sorted(manifest.files.keys() - present):
        raise BundleError(f"bundle '{folder}' lacks the file {name[:200]!r}", hint="build the bundle again")
    folded = [name.casefold() for name in manifest.files]
    twins = next((name for name in manifest.files if folded.count(name.casefold()) > 1), None)
    if twins is not None:
        raise BundleError(
            f"bundle '{folder}' has two files named {twins!r} but for case", hint="build the bundle again"
        )


def _check_file(path: Path, name: str, entry: BundledFile, folder: Path) -> None:
    _check_regular(path, name, folder)
    size_bytes = path.stat().st_size
    if size_bytes != entry.size_bytes:
        raise BundleError(
            f"{name!r} of bundle '{folder}' has {size_bytes} bytes, the manifest says {entry.size_bytes}",
            hint="the bundle was altered or copied badly: build it again",
        )
    if digest_file(path) != entry.sha256:
        raise BundleError(
            f"{name!r} of bundle '{folder}' was altered: its sha256 is not that of the manifest",
            hint="build the bundle again",
        )


def _check_regular(path: Path, name: str, folder: Path) -> None:
    if path.is_symlink() or not path.is_file():
        reason = "is a link or no regular file" if path.is_symlink() or path.exists() else "is missing"
        raise BundleError(f"{name!r} of bundle '{folder}' {reason}", hint="build the bundle again")
