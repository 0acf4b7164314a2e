"""Bundles as folders: writes them, opens them after checking every digest, copies them for a device.

A device runs a copy whose digests were checked while it was written, so that no file can be exchanged in between.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from edgekit import _files
from edgekit._files import AnyPath, as_path
from edgekit.bundle.checks import TARGET_FIELDS, check_files, check_requests, find_fault, iterate_files, read_bounded
from edgekit.bundle.describe import Contents, describe_contents
from edgekit.bundle.expected import EXPECTED, adopt_expected, write_expected
from edgekit.bundle.golden import Golden, KnownOutputs
from edgekit.bundle.manifest import UNPADDED, BundledFile, Manifest, decode_manifest, encode_json
from edgekit.bundle.sign import SIGNATURE, Statement, TestResult, check_signature, list_subjects
from edgekit.bundle.snippets import NOTES, README, render_readme, render_snippets
from edgekit.check.report import CheckReport
from edgekit.convert.convert import find_needed_ort
from edgekit.errors import BundleError, ModelError, OutputError, reading, reraised
from edgekit.model.model import list_external
from edgekit.serialize import UNDECODABLE, ready_type
from edgekit.target import Form, Target, read_version

MANIFEST, CHECK, TARGET, LAYERS, VERIFY, GOLDEN, APP = (
    "manifest.json", "check.json", "target.json", "layers.json", "verify.json", "golden", "app",
)  # fmt: skip

_MODELS = frozenset({".onnx", ".ort"})
UNLISTED = frozenset({MANIFEST, VERIFY, SIGNATURE})
"""Files that the manifest does not list: itself, its signature, and `verify.json`, which differs from run to run."""

_T = TypeVar("_T")
_Value = TypeVar("_Value")


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What was opened in a folder: `sha256` is the digest of its listing, and so of every file that this lists.

    `attested` is the signer's statement about the verification, None if it was opened without a key.
    """

    folder: Path
    sha256: str
    attested: TestResult | None = None


class Bundle(Opened, frozen=True, kw_only=True):
    """An opened bundle: a folder with a model for one target and everything an app needs, listed by `manifest.json`."""

    manifest: Manifest

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of every file that a signature covers, by its name."""
        return {MANIFEST: self.sha256, **{name: entry.sha256 for name, entry in self.manifest.files.items()}}

    @property
    def golden(self) -> Golden:
        """Its golden samples."""
        return Golden(
            folder=self.folder / GOLDEN,
            samples=self.manifest.golden.samples,
            inputs=tuple(tensor.spec for tensor in self.manifest.inputs),
            outputs=tuple(tensor.spec for tensor in self.manifest.outputs),
            has_labels=self.manifest.golden.has_labels,
        )

    @property
    def manifest_file(self) -> BundledFile:
        """The digest and size of `manifest.json`."""
        return BundledFile(sha256=self.sha256, size_bytes=(self.folder / MANIFEST).stat().st_size)

    def find_model(self, form: Form) -> Path:
        """Returns the file to load for a form.

        Raises:
            BundleError: the bundle has no such form.
        """
        if not (names := self.manifest.forms.get(form)):
            valid = ", ".join(sorted(self.manifest.forms))
            raise BundleError(f"bundle '{self.folder}' has no model in the form '{form}'", hint=f"it has: {valid}")
        return self.folder / names[0]


def write_bundle(contents: Contents, out: Path, known: KnownOutputs | None = None) -> Bundle:
    """Fills the folder `out` and returns the bundle; the manifest comes last, so that an unfinished bundle has none.

    The same contents give the same bytes. What the model gives for golden samples is added to `known`.

    Raises:
        BundleError: there is no model file in a form that the target loads, or the target sets session keys or options
            that no bundle may set.
        OutputError: the folder cannot be written, a name is not safe on every system, or two files have the same name.
    """
    _copy_models(contents.files, out)
    # The minimum ONNX Runtime must read every file: newer opsets need a newer one.
    target = contents.target
    needed_ort = find_needed_ort(path for paths in contents.files.values() for path in paths if path.suffix in _MODELS)
    target = msgspec.structs.replace(target, minimum_ort=max(target.minimum_ort, needed_ort, key=read_version))
    contents = msgspec.structs.replace(contents, target=target)
    for file in contents.golden.files:
        _files.replace_file(file, out / GOLDEN / file.name)
    if contents.unpadded is not None:
        _files.replace_file(contents.unpadded, out / UNPADDED)
    _files.write_file(out / CHECK, encode_json(contents.check))
    target_facts = msgspec.structs.asdict(contents.target)
    target_facts = {key: value for key, value in target_facts.items() if key != "folder" and value is not msgspec.UNSET}
    _files.write_file(out / TARGET, encode_json(target_facts))
    if contents.layers is not None:
        _files.write_file(out / LAYERS, contents.layers)
    # Before the manifest, which names the digests of these files.
    models: dict[Form, list[Path]] = {form: [out / it.name for it in paths] for form, paths in contents.files.items()}
    recorded = contents.recorded
    golden = adopt_expected(recorded, models, out / GOLDEN) if recorded else None
    if recorded and golden and contents.layers is not None and LAYERS in recorded.manifest.files:
        # The last bits of measured figures depend on the CPU.
        _files.replace_file(recorded.folder / LAYERS, out / LAYERS)
    # Some providers compute the floats of a float32 file in half precision too.
    precision = "fp16" if contents.precision == "fp32" and contents.target.float_bits == 16 else contents.precision
    golden = golden or write_expected(contents.golden, models, precision, out / GOLDEN, known)
    return _write_manifest(describe_contents(contents, golden, _files.digest_file(out / CHECK)), contents.target, out)


def replace_model(bundle: Bundle, files: Sequence[Path], templates: Path, out: Path) -> Bundle:
    """Writes a bundle again into the folder `out`, with other files for the ONNX form of its model.

    The outputs of the model must stay bit-equal, because the self-test is copied. `templates` is the folder of the
    target, from which pages and code that name the files are rendered.

    Raises:
        OutputError: `out` cannot be written, or two files have the same name.
    """
    manifest = bundle.manifest
    old = set(manifest.forms["onnx"])
    for name in manifest.files:
        if name not in old and name != README and not name.startswith(f"{APP}/"):
            _files.replace_file(bundle.folder / name, out / name)
    _copy_models({"onnx": tuple(files)}, out)
    forms = {**manifest.forms, "onnx": tuple(path.name for path in files)}
    draft = msgspec.structs.replace(manifest, forms=forms, files={})
    size_bytes = sum((out / name).stat().st_size for name in forms[manifest.form])
    target = msgspec.structs.replace(read_target(bundle), folder=templates)
    return _write_manifest(msgspec.structs.replace(draft, model_size_bytes=size_bytes), target, out)


def _write_manifest(draft: Manifest, target: Target, out: Path) -> Bundle:
    """Writes the README, the code snippets and finally the manifest of a bundle whose other files exist."""
    snippets = dict(render_snippets(target, draft))
    notes = snippets.pop(NOTES, "")
    for name, text in snippets.items():
        _files.write_file(out / APP / name, text.encode())
    _files.write_file(out / README, render_readme(target, draft, notes, snippets).encode())
    files = {name: BundledFile.describe(path) for name, path in iterate_files(out) if name not in UNLISTED}
    manifest = msgspec.structs.replace(draft, files=files)
    # With options that no bundle may set, the bundle could not be opened again.
    check_requests(manifest, str(out / MANIFEST))
    data = encode_json(manifest)
    _files.write_file(out / MANIFEST, data)
    return Bundle(folder=out, manifest=manifest, sha256=_files.digest_bytes(data))


def open_bundle(path: AnyPath, *, key: AnyPath | None = None) -> Bundle:
    """Opens a bundle after checking every file in it against the manifest, and with a public key its signature.

    Raises:
        BundleError: the manifest is missing or malformed, sets options that no bundle may set, or contradicts
            `target.json`; a file is missing, altered, unlisted, a link, or has an unsafe name; with `key`, the manifest
            is not signed with its private key.
        UsageError: the key cannot be read.
    """
    path, key = as_path(path), None if key is None else as_path(key)
    if not path.is_dir():
        raise BundleError(f"there is no bundle '{path}'", hint="give the folder that holds manifest.json")
    listing = read_listing(path, MANIFEST, key)
    manifest = decode_manifest(listing.data, listing.source)
    check_requests(manifest, listing.source)
    # Every file is checked, also one that will not be used: a bundle must hold exactly the signed files.
    listing.check_folder(manifest.files)
    for name in (name for name in manifest.files if name.endswith(".onnx")):
        try:
            external = list_external(path / name)
        except ModelError as error:
            raise BundleError(f"a model of the bundle is not safe: {error.message}", hint=error.hint) from error
        # ONNX Runtime would open an external file that the manifest does not list.
        folder = PurePosixPath(name).parent
        if unlisted := next((each for each in external if str(folder / each) not in manifest.files), None):
            words = f"'{name}' of bundle '{path}' names {unlisted!r}, which the manifest does not list"
            raise BundleError(words, hint="build the bundle again")
    bundle = Bundle(folder=path, manifest=manifest, sha256=listing.sha256, attested=listing.attested)
    target = read_target(bundle)
    if other := next((key for key, read in TARGET_FIELDS.items() if getattr(manifest, key) != read(target)), None):
        words = f"'{listing.source}' and target.json beside it contradict each other in '{other}'"
        raise BundleError(words, hint="build the bundle again")
    return bundle


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The file that lists all others of a folder, with its bytes and the signed statement, None without a key.

    It is the `manifest.json` of a bundle, the `index.json` of several targets or the `group.json` of several models.
    """

    folder: Path
    name: str
    data: bytes
    statement: Statement | None

    @property
    def source(self) -> str:
        """Its path, for messages."""
        return str(self.folder / self.name)

    @property
    def sha256(self) -> str:
        """The digest of its bytes."""
        return _files.digest_bytes(self.data)

    @property
    def attested(self) -> TestResult | None:
        """The signer's statement about the verification, None if no key was given."""
        return None if self.statement is None else self.statement.predicate

    def check_folder(self, files: Mapping[str, BundledFile], optional: Collection[str] = ()) -> dict[str, str]:
        """Checks that the folder holds exactly these files; returns the sha256 of each file that a signature covers.

        `optional` files may be there too. If there is a statement, it must be about exactly these files.

        Raises:
            BundleError: a file is missing, altered, unlisted, a link, or has an unsafe name, or the signature is of
                other files.
        """
        check_files(self.folder, files, {self.name, VERIFY, SIGNATURE, *optional})
        digests = {self.name: self.sha256, **{name: entry.sha256 for name, entry in files.items()}}
        expected = list_subjects(digests)
        if self.statement is not None and self.statement.subject != expected:
            stated, present = (
                {(it.name, it.digest.sha256) for it in side} for side in (self.statement.subject, expected)
            )
            name = min((name for name, _ in stated ^ present), default="order of files")
            words = f"the signature of '{self.folder}' is of another {name[:200]!r}"
            raise BundleError(words, hint="do not use it: fetch it again")
        return digests


def read_listing(folder: Path, name: str, key: Path | None) -> Listing:
    """Returns the file that lists all others of a folder; with a public key its signature is checked before decoding.

    Raises:
        BundleError: it is missing, a link, or not signed with the private key.
    """
    data = read_bounded(folder, name)
    statement = None if key is None else check_signature(data, name, folder, key)
    return Listing(folder=folder, name=name, data=data, statement=statement)


def read_check(bundle: Bundle) -> CheckReport:
    """Returns the predicted placement that the bundle was built with.

    Raises:
        BundleError: `check.json` is missing or malformed.
    """
    return read_fact(bundle, CHECK, CheckReport)


def read_target(bundle: Bundle) -> Target:
    """Returns the target with the settings that the bundle was built for; its `folder` is empty.

    Raises:
        BundleError: `target.json` is missing or malformed.
    """
    return read_fact(bundle, TARGET, Target)


def read_fact(bundle: Bundle, name: str, kind: type[_Value]) -> _Value:
    """Returns the content of a JSON file of a bundle.

    Raises:
        BundleError: it is missing or malformed.
    """
    file, bad = bundle.folder / name, (*UNDECODABLE, OSError)
    with reraised(bad, BundleError(f"'{file}' is malformed", hint="build the bundle again"), quote=True):
        return msgspec.json.decode(file.read_bytes(), type=ready_type(kind))


def _copy_models(files: Mapping[Form, tuple[Path, ...]], out: Path) -> None:
    # Lower case, because Windows and macOS ignore the case of names.
    taken: dict[str, Path] = {name.lower(): Path() for name in (*UNLISTED, CHECK, TARGET, LAYERS, GOLDEN, APP, README)}
    for path in (path for paths in files.values() for path in paths):
        if (fault := find_fault(path.name)) is not None:
            raise OutputError(f"the model file {path.name!r} {fault}", hint="rename the model")
        if taken.setdefault(path.name.lower(), path) != path:
            raise OutputError(f"two files of the bundle want the name '{path.name}'", hint="rename the model")
        _files.replace_file(path, out / path.name)


_CHUNK_BYTES = 1 << 20


def snapshot_bundle(bundle: Bundle, forms: Iterable[Form], out: Path) -> Bundle:
    """Copies the model files of some forms, the golden samples, and the facts about model and target into `out`.

    The digest of each file is checked while it is copied, so that a bundle that was altered after it was opened is
    refused, and later alterations have no effect on the copy.

    Raises:
        BundleError: the bundle has no such form, or a file was altered.
        OutputError: the folder cannot be written.
    """
    names = [f"{GOLDEN}/{file.name}" for file in bundle.golden.files]
    optional = (f"{GOLDEN}/{EXPECTED}", UNPADDED, LAYERS, CHECK, TARGET)
    names += [name for name in optional if name in bundle.manifest.files]
    for form in forms:
        bundle.find_model(form)
        names += bundle.manifest.forms[form]
    for name in dict.fromkeys(names):
        _files.write_new(out / name, _read_checked(bundle, name))
    return msgspec.structs.replace(bundle, folder=out)


def _read_checked(bundle: Bundle, name: str) -> Iterator[bytes]:
    """Yields a file in chunks; at the end raises a BundleError if its digest is not that of the manifest."""
    entry = bundle.manifest.files.get(name)
    digest = hashlib.sha256()
    what, hint = f"{name!r} of bundle '{bundle.folder}'", "build the bundle again"
    # Opened without following links, and read once: the digested bytes are those that are copied.
    with reading(what, BundleError, hint), _files.open_regular(_files.safe_join(bundle.folder, name)) as source:
        # Reading stops one chunk after the stated size, so that a file that grows meanwhile gets a wrong digest.
        while entry and source.tell() <= entry.size_bytes and (chunk := source.read(_CHUNK_BYTES)):
            digest.update(chunk)
            yield chunk
    if entry is None or digest.hexdigest() != entry.sha256:
        raise BundleError(f"{what} was altered after it was opened", hint=hint)


_HINT = "build it again, or fetch it again"


class Nested(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle in a root folder that stores common files once: a variant of an index, or a member of a group.

    `folder` has its manifest, whose digest `entry` is in the root's listing (`index.json`, `group.json`). `places` are
    the paths of its files from the root, by their names in the manifest: in `folder`, or elsewhere below the root.
    """

    folder: str
    entry: BundledFile
    manifest: Manifest
    places: Mapping[str, str]

    @property
    def model_file(self) -> str:
        """The path from the root of the file that an app loads."""
        return self.places[self.manifest.model_file]

    @property
    def files(self) -> dict[str, BundledFile]:
        """The manifest and every file that it lists, by their paths from the root."""
        listed = {self.places[name]: file for name, file in self.manifest.files.items()}
        return {f"{self.folder}/{MANIFEST}": self.entry, **listed}

    def extract(self, root: Path, out: Path) -> Bundle:
        """Writes the bundle as a folder of its own into `out`, and opens it.

        Raises:
            BundleError: it was altered since the root was opened.
            OutputError: `out` cannot be written.
        """
        with _files.staged_folder(out) as staging:
            for name, place in self.places.items():
                _files.copy_once(root / place, staging / name)
            _files.write_file(staging / MANIFEST, read_bounded(root, f"{self.folder}/{MANIFEST}"))
        bundle = open_bundle(out)
        if bundle.sha256 != self.entry.sha256:
            raise BundleError(f"'{self.folder}' of '{root}' was altered", hint=_HINT)
        return bundle


def require_folder_name(name: str, source: str) -> None:
    """Checks that a name can name a folder directly below the root.

    Raises:
        BundleError: it could lead to another place.
    """
    if "/" in name or find_fault(name):
        raise BundleError(f"'{source}' has no safe folder for {name[:99]!r}", hint=_HINT)


def read_nested(root: Path, folder: str, entry: BundledFile, source: str) -> Manifest:
    """Returns the manifest in a folder below the root, if it has the digest that the listing `source` says.

    Raises:
        BundleError: it is missing, malformed or altered.
    """
    data = read_bounded(root, f"{folder}/{MANIFEST}")
    if _files.digest_bytes(data) != entry.sha256:
        raise BundleError(f"'{folder}/{MANIFEST}' was altered: its sha256 is not that in '{source}'", hint=_HINT)
    return decode_manifest(data, f"{root}/{folder}/{MANIFEST}")


def find_shared(sets: Iterable[Mapping[str, _T]]) -> dict[str, _T]:
    """Returns the items that several of these tables have, sorted by their key (a digest)."""
    counts, known = Counter[str](), dict[str, _T]()
    for each in sets:
        counts.update(each.keys())
        known.update(each)
    return {digest: known[digest] for digest in sorted(counts) if counts[digest] > 1}
