"""A folder with bundles for several targets: common files are stored once, and `index.json` says which to use where.

This module also opens a bundle in any container: a folder, an archive, or either with several targets.
"""

import contextlib
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgekit._files import copy_once, digest_bytes, staged_folder, work_folder, write_file
from edgekit._ort import CPU_PROVIDER
from edgekit.bundle import folder as folders
from edgekit.bundle.archive import opened_folder
from edgekit.bundle.expected import Recorded
from edgekit.bundle.folder import MANIFEST, VERIFY, Bundle, Nested, Opened, open_bundle
from edgekit.bundle.group import is_group, open_group
from edgekit.bundle.manifest import BundledFile, Manifest, decode_strictly, encode_json
from edgekit.bundle.sign import TestResult, sign_files
from edgekit.errors import BundleError, OutputError, UsageError, look_up
from edgekit.serialize import fill

INDEX = "index.json"
PREFERENCE = (
    "TensorrtExecutionProvider", "CUDAExecutionProvider", "QNNExecutionProvider", "CoreMLExecutionProvider",
    "XnnpackExecutionProvider", "NnapiExecutionProvider", CPU_PROVIDER,
)  # fmt: skip
"""The order in which a runtime should try the providers; NNAPI is deprecated and comes after XNNPACK."""
_VARIANTS, _SHARED = "variants", "shared"


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bundle of one target in the folder, and where it can run.

    `folder` holds its `manifest.json`, with the digest `manifest`. Its files are in `folder` under their names, or if
    several variants have a file, in `shared/` under its sha256. `model_file` is the one to load, relative to the index.
    `systems` has the oldest version by operating system, "" for any; `socs` names the only chips that it runs on, empty
    for all.
    """

    target: str
    folder: str
    manifest: BundledFile
    provider: str
    systems: dict[str, str]
    socs: tuple[str, ...]
    minimum_ort: str
    precision: str
    model_file: str
    fallback: tuple[str, ...]


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `index.json`; `variants` are in the order in which a runtime should try them."""

    schema_version: Literal[1] = 1
    name: str
    source: str
    variants: tuple[Variant, ...]
    shared: dict[str, BundledFile]


class MultiBundle(Opened, frozen=True, kw_only=True):
    """An opened folder with bundles for several targets, listed by `index.json`.

    `nested` are the bundles by target. `digests` hold the sha256 of every file in it except the reports
    (`verify.json`).
    """

    index: Index
    nested: Mapping[str, Nested]
    digests: dict[str, str]


def find_bundles(paths: Sequence[Path], *, key: Path | None = None) -> tuple[Bundle, ...]:
    """Opens bundles; a single path that is no bundle is the folder of a build, and stands for all bundles in it.

    With a public `key` each must be signed with its private key.

    Raises:
        BundleError: one is damaged, or there is none.
    """
    if len(paths) == 1 and not (paths[0] / MANIFEST).exists():
        if not (found := sorted(path.parent for path in paths[0].glob(f"*/{MANIFEST}"))):
            raise BundleError(f"'{paths[0]}' is no bundle and holds none", hint="give the --out folder of a build")
        paths = found
    return tuple(open_bundle(path, key=key) for path in paths)


def join_bundles(bundles: Sequence[Bundle], out: Path) -> MultiBundle:
    """Writes the folder `out` with every bundle as a variant; the same bundles give the same bytes, in any order.

    A file that several bundles have is stored once, except models with external data, which refer to it by path.
    `verify.json` is copied; signatures are not, because they are of other folders: sign the result.

    Raises:
        UsageError: there is no bundle, two are for one target, or they are of different models.
        OutputError: `out` cannot be written, or is a folder with other files.
    """
    targets = Counter(bundle.manifest.target for bundle in bundles)
    repeated = next((target for target, count in targets.items() if count > 1), None)
    if not bundles:
        raise UsageError("there is no bundle to join", hint="give the folders that edgekit build made")
    if repeated is not None:
        raise UsageError(f"two bundles are for the target '{repeated}'", hint="join one bundle of each target")
    if len({bundle.manifest.ancestry.source for bundle in bundles}) > 1:
        raise UsageError("the bundles are of different models", hint="join the bundles of one edgekit build")
    # The bytes must not depend on the order of the arguments.
    bundles = sorted(bundles, key=lambda bundle: bundle.manifest.target)
    index, nested = _make_index([(bundle.manifest, bundle.manifest_file) for bundle in bundles])
    # An existing folder is replaced only if it is a joined one.
    if out.is_dir() and any(out.iterdir()) and not (out / INDEX).is_file():
        raise OutputError(f"'{out}' is a folder with other files", hint="give the name of a new folder")
    with staged_folder(out) as staging:
        for bundle in bundles:
            variant = nested[bundle.manifest.target]
            for name, place in variant.places.items():
                copy_once(bundle.folder / name, staging / place)
            for name in (MANIFEST, VERIFY):
                source = bundle.folder / name
                if source.is_file() and not source.is_symlink():
                    copy_once(source, staging / variant.folder / name)
        data = encode_json(index)
        write_file(staging / INDEX, data)
    files = (pair for each in nested.values() for pair in each.files.items())
    digests = {INDEX: digest_bytes(data), **{place: file.sha256 for place, file in files}}
    return MultiBundle(folder=out, index=index, nested=nested, sha256=digests[INDEX], digests=digests)


def open_index(path: Path, *, key: Path | None = None) -> MultiBundle:
    """Opens a folder of several targets after checking every file in it, and with a key the signature.

    Raises:
        BundleError: the index or a manifest is missing, malformed or altered; a file is missing, altered, unlisted, a
            link, or has an unsafe name; it is not signed with the key.
    """
    listing = folders.read_listing(path, INDEX, key)
    index = decode_strictly(listing.data, Index, listing.source)
    manifests: list[tuple[Manifest, BundledFile]] = []
    for variant in index.variants:
        # The folder that the index names is checked before it is used.
        is_own = variant.folder == f"{_VARIANTS}/{variant.target}"
        folders.require_folder_name(variant.target if is_own else variant.folder, listing.source)
        manifests.append((folders.read_nested(path, variant.folder, variant.manifest, INDEX), variant.manifest))
    # The index must be the same as that computed from the manifests.
    expected, nested = _make_index(manifests) if manifests else (None, dict[str, Nested]())
    if index != expected:
        words = f"'{listing.source}' contradicts the manifests of its variants"
        raise BundleError(words, hint="join the bundles again")
    files = dict(pair for each in nested.values() for pair in each.files.items())
    digests = listing.check_folder(files, [f"{variant.folder}/{VERIFY}" for variant in index.variants])
    return fill(MultiBundle, listing, index=index, nested=nested, digests=digests)


def _make_index(manifests: Sequence[tuple[Manifest, BundledFile]]) -> tuple[Index, dict[str, Nested]]:
    """Returns the index of variants with these manifests and the digests of their files, each target once.

    The second result are the bundles by target, with the path of each of their files, relative to the index.
    """
    ranks = {provider: rank for rank, provider in enumerate(PREFERENCE)}
    variants = {manifest.target: (manifest, file) for manifest, file in manifests}
    ordered = sorted(variants.values(), key=lambda it: (ranks.get(it[0].provider, len(ranks)), it[0].target))
    shared = folders.find_shared({it.sha256: it for it in _sharable(manifest).values()} for manifest, _ in ordered)
    nested: dict[str, Nested] = {}
    for manifest, file in ordered:
        folder = f"{_VARIANTS}/{manifest.target}"
        places = {name: f"{folder}/{name}" for name in manifest.files}
        places |= {name: f"{_SHARED}/{e.sha256}" for name, e in _sharable(manifest).items() if e.sha256 in shared}
        nested[manifest.target] = Nested(folder=folder, entry=file, manifest=manifest, places=places)
    first = manifests[0][0]
    index = Index(
        name=first.name,
        source=first.ancestry.source,
        variants=tuple(
            fill(
                Variant,
                each,
                each.manifest,
                manifest=each.entry,
                systems={name: platform.minimum_os for name, platform in each.manifest.platforms.items()},
                socs=each.manifest.tested.socs,
            )
            for each in nested.values()
            if each.manifest.ancestry.source == first.ancestry.source
        ),
        shared=shared,
    )
    return index, nested


def _sharable(manifest: Manifest) -> dict[str, BundledFile]:
    """Returns the files of a variant that may be in `shared/`: all but models with external data."""
    with_external_data = {name for names in manifest.forms.values() if len(names) > 1 for name in names}
    return {name: entry for name, entry in manifest.files.items() if name not in with_external_data}


class SignedBundle(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that was signed: the digest of its manifest or index, that of the public key, and what was attested."""

    bundle: Path
    sha256: str
    key: str
    attested: TestResult


@contextlib.contextmanager
def opened_any(path: Path, *, key: Path | None = None) -> Generator[Bundle | MultiBundle]:
    """Yields the bundle in a folder or archive, with every digest checked; with a public `key`, also the signature.

    An archive is unpacked into a folder that is deleted after the block: anything written into such a bundle is lost.

    Raises:
        BundleError: it is no bundle, was altered, is not safe to open, or is not signed with the key.
        UsageError: the key cannot be read.
    """
    with opened_folder(path) as unpacked:
        entries = [] if unpacked == path else list(unpacked.iterdir())
        # In an archive the manifest is at the root, or in the only folder there.
        folder = entries[0] if len(entries) == 1 and entries[0].is_dir() else unpacked
        inside = sorted(place.parent.name for place in folder.glob(f"bundles/*/{MANIFEST}"))
        if unpacked != path and inside and not (folder / MANIFEST).is_file():
            hint = "verify the bundles that it was made of; packed --with all, also those in it, once it is unpacked"
            raise BundleError(f"'{path}' is a package of {', '.join(inside[:8])}", hint=hint)
        yield open_any(folder, key=key)


@contextlib.contextmanager
def opened_bundle(path: Path, *, key: Path | None = None, target: str | None = None) -> Generator[Bundle]:
    """Yields the bundle of one target in a folder or archive, as `opened_any` does.

    `target` chooses a variant of several, and may be left out if there is only one. A variant is extracted into a
    folder that is deleted after the block.

    Raises:
        BundleError: it is no bundle, was altered, is not safe to open, or is not signed with the key.
        UsageError: it holds several targets or another one, or the key cannot be read.
    """
    with opened_any(path, key=key) as found, work_folder() as work:
        if isinstance(found, MultiBundle):
            names = [variant.target for variant in found.index.variants]
            if target is None and len(names) != 1:
                words = f"'{path}' holds several targets"
                raise UsageError(words, hint=f"choose one: --target {' or '.join(sorted(names))}")
            chosen = target or names[0]
            variant = look_up(found.nested, chosen, f"'{found.folder}' has no variant '{chosen}'")
            yield variant.extract(found.folder, work / chosen)
            return
        if target not in {None, found.manifest.target}:
            raise UsageError(f"'{path}' is for '{found.manifest.target}', not '{target}'", hint="leave --target out")
        yield found


def open_recorded(build: Path, name: str, targets: Iterable[str]) -> dict[str, Recorded]:
    """Returns the bundles of an earlier build of the model `name`, by target; one that was not built is left out.

    Raises:
        UsageError: there is none.
        BundleError: one is damaged.
    """
    places = {target: build / f"{name}-{target}" for target in targets}
    opened = {target: open_bundle(folder) for target, folder in places.items() if folder.is_dir()}
    if not opened:
        wanted = " or ".join(folder.name for folder in places.values())
        raise UsageError(f"'{build}' holds no bundle to take the reference from", hint=f"it should hold {wanted}")
    return {target: Recorded(folder=bundle.folder, manifest=bundle.manifest) for target, bundle in opened.items()}


def open_any(folder: Path, *, key: Path | None = None) -> Bundle | MultiBundle:
    """Opens a folder of one target or of several, with every digest checked.

    Raises:
        BundleError: it is no bundle, was altered, or is not signed with the key.
    """
    return (open_index if (folder / INDEX).is_file() else open_bundle)(folder, key=key)


def sign_bundle(folder: Path, key: Path, result: TestResult) -> SignedBundle:
    """Checks a folder of one target, of several or of a group, and signs its files and the results of verification.

    Raises:
        BundleError: the bundle is incomplete, or is an archive.
        UsageError: the key cannot be read, or is no Ed25519 private key.
        OutputError: the folder cannot be written.
    """
    if folder.is_file():
        raise BundleError(f"'{folder}' is a file", hint="sign the folder, then pack it")
    found = open_group(folder) if is_group(folder) else open_any(folder)
    keyid = sign_files(folder, found.digests, result, key)
    return SignedBundle(bundle=folder, sha256=found.sha256, key=keyid, attested=result)
