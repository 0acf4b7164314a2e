"""Bundles as folders: written, opened after every byte was compared with the manifest, copied for a device, nested.

A device runs a copy that was digested while it was made, so that nobody can exchange a file in between.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from edgekit import _files
from edgekit._files import AnyPath, as_path
from edgekit.bundle.checks import SAID_BY_TARGET, check_files, check_requests, find_fault, iterate_files, read_bounded
from edgekit.bundle.describe import Contents, describe_contents
from edgekit.bundle.expected import EXPECTED, adopt_expected, write_expected
from edgekit.bundle.golden import Golden
from edgekit.bundle.manifest import UNPADDED, BundledFile, Manifest, decode_manifest, encode_json
from edgekit.bundle.sign import SIGNATURE, Statement, TestResult, check_signature, check_subjects
from edgekit.bundle.snippets import NOTES, README, render_readme, render_snippets
from edgekit.check.report import CheckReport
from edgekit.convert.convert import find_needed_ort
from edgekit.errors import BundleError, ModelError, OutputError
from edgekit.model.model import list_external
from edgekit.target import Form, Target, read_version

MANIFEST, CHECK, TARGET, LAYERS, VERIFY, GOLDEN, APP = (
    "manifest.json", "check.json", "target.json", "layers.json", "verify.json", "golden", "app",
)  # fmt: skip

_MODELS = frozenset({".onnx", ".ort"})
UNLISTED = frozenset({MANIFEST, VERIFY, SIGNATURE})
"""Files that the manifest does not list: itself, its signature, and the evidence, which differs from run to run."""

_T = TypeVar("_T")
_Value = TypeVar("_Value", CheckReport, Target)


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that holds a model for one target with everything an app needs.

    `sha256` is the digest of the manifest's file, and through it of every file that the manifest lists. `attested` is
    what the signer says was verified, None where the bundle was opened without a key.
    """

    folder: Path
    manifest: Manifest
    sha256: str
    attested: TestResult | None = None

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
        """The digest and size of `manifest.json`, and so of everything in the bundle."""
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


def write_bundle(contents: Contents, out: Path) -> Bundle:
    """Fills the folder `out` and returns the bundle; the manifest comes last, so that an unfinished bundle has none.

    Model files that lie in `out` already stay where they are, all others are copied. Same contents, same bytes.

    Raises:
        BundleError: there is no model file in a form that the target loads, or the target asks for session keys or
            options that no bundle may pass.
        OutputError: the folder cannot be written, a name is not safe everywhere, or two files want the same one.
    """
    _copy_models(contents.files, out)
    # The target with an ONNX Runtime that reads every file: those of a newer opset need a newer one.
    target = contents.target
    needed = find_needed_ort(path for paths in contents.files.values() for path in paths if path.suffix in _MODELS)
    contents = msgspec.structs.replace(
        contents, target=msgspec.structs.replace(target, minimum_ort=max(target.minimum_ort, needed, key=read_version))
    )
    for file in contents.golden.files:
        _files.replace_file(file, out / GOLDEN / file.name)
    if contents.unpadded is not None:
        _files.replace_file(contents.unpadded, out / UNPADDED)
    _files.write_file(out / CHECK, encode_json(contents.check))
    told = msgspec.structs.asdict(contents.target)
    told = {key: value for key, value in told.items() if key != "folder" and value is not msgspec.UNSET}
    _files.write_file(out / TARGET, encode_json(told))
    if contents.layers is not None:
        _files.write_file(out / LAYERS, contents.layers)
    # Before the manifest: it names the digests of what is written here.
    models: dict[Form, list[Path]] = {
        form: [out / path.name for path in paths] for form, paths in contents.files.items()
    }
    recorded = contents.recorded
    golden = adopt_expected(recorded, models, out / GOLDEN) if recorded else None
    if recorded and golden and contents.layers is not None and LAYERS in recorded.manifest.files:
        # Measured figures, which another kind of CPU gives in other last bits.
        _files.replace_file(recorded.folder / LAYERS, out / LAYERS)
    golden = golden or write_expected(contents.golden, models, contents.precision, out / GOLDEN)
    return _conclude(describe_contents(contents, golden, _files.digest_file(out / CHECK)), contents.target, out)


def replace_model(bundle: Bundle, form: Form, files: Sequence[Path], templates: Path, out: Path) -> Bundle:
    """Writes a bundle again into the folder `out`, with other files for one form of its model.

    What the model gives must be the same to the bit: the self-test is taken over. `templates` is the folder of the
    target, whose pages and code name the files.

    Raises:
        OutputError: `out` cannot be written, or two files want the same name.
    """
    manifest = bundle.manifest
    old = set(manifest.forms[form])
    for name in manifest.files:
        if name not in old and name != README and not name.startswith(f"{APP}/"):
            _files.replace_file(bundle.folder / name, out / name)
    _copy_models({form: tuple(files)}, out)
    forms = {**manifest.forms, form: tuple(path.name for path in files)}
    draft = msgspec.structs.replace(manifest, forms=forms, files={})
    size_bytes = sum((out / name).stat().st_size for name in forms[manifest.form])
    target = msgspec.structs.replace(read_target(bundle), folder=templates)
    return _conclude(msgspec.structs.replace(draft, model_size_bytes=size_bytes), target, out)


def _conclude(draft: Manifest, target: Target, out: Path) -> Bundle:
    """Writes the README, the code snippets and at last the manifest of a bundle whose other files are there."""
    snippets = dict(render_snippets(target, draft))
    notes = snippets.pop(NOTES, "")
    for name, text in snippets.items():
        _files.write_file(out / APP / name, text.encode())
    _files.write_file(out / README, render_readme(target, draft, notes, snippets).encode())
    files = {name: BundledFile.describe(path) for name, path in iterate_files(out) if name not in UNLISTED}
    manifest = msgspec.structs.replace(draft, files=files)
    # A manifest that asks for what no bundle may is not written: the bundle could not be opened again.
    check_requests(manifest, str(out / MANIFEST))
    # Last, and the digest is that of the very bytes that were written.
    data = encode_json(manifest)
    _files.write_file(out / MANIFEST, data)
    return Bundle(folder=out, manifest=manifest, sha256=_files.digest_bytes(data))


def open_bundle(path: AnyPath, *, key: AnyPath | None = None) -> Bundle:
    """Opens a bundle after checking every file in it against the manifest, and with a public key its signature.

    Raises:
        BundleError: the manifest is missing or malformed, asks for what no bundle may, or contradicts `target.json`; a
            file is missing, altered, unlisted, a link, or bears an unsafe name; with `key`, the manifest is not signed
            with its private half.
    """
    path, key = as_path(path), None if key is None else as_path(key)
    if not path.is_dir():
        raise BundleError(f"there is no bundle '{path}'", hint="give the folder that holds manifest.json")
    listing = read_listing(path, MANIFEST, key)
    manifest = decode_manifest(listing.data, listing.source)
    check_requests(manifest, listing.source)
    # Every file is checked, whether it will be used or not: a bundle may hold exactly what was signed.
    listing.check_folder(manifest.files)
    for name in (name for name in manifest.files if name.endswith(".onnx")):
        try:
            beside = list_external(path / name)
        except ModelError as error:
            raise BundleError(f"a model of the bundle is not safe: {error.message}", hint=error.hint) from error
        # ONNX Runtime would open an external file that the manifest does not list.
        folder = PurePosixPath(name).parent
        if strange := next((each for each in beside if str(folder / each) not in manifest.files), None):
            words = f"'{name}' of bundle '{path}' names {strange!r}, which the manifest does not list"
            raise BundleError(words, hint="build the bundle again")
    bundle = Bundle(folder=path, manifest=manifest, sha256=listing.sha256, attested=listing.attested)
    target = read_target(bundle)
    if other := next((key for key, read in SAID_BY_TARGET.items() if getattr(manifest, key) != read(target)), None):
        words = f"'{listing.source}' and target.json beside it contradict each other in '{other}'"
        raise BundleError(words, hint="build the bundle again")
    return bundle


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The file that lists all others of a folder, as it was read, and what its signature states.

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
        """The digest of its bytes, and so of everything that it lists."""
        return _files.digest_bytes(self.data)

    @property
    def attested(self) -> TestResult | None:
        """What the signer says was verified, None where no key was given."""
        return None if self.statement is None else self.statement.predicate

    def check_folder(self, files: Mapping[str, BundledFile], beside: Collection[str] = ()) -> dict[str, str]:
        """Returns the sha256 of each file that a signature covers, if the folder holds exactly these files.

        Those `beside` may lie there too. If there is a statement, it must be of exactly these files.

        Raises:
            BundleError: a file is missing, altered, unlisted, a link, or bears an unsafe name, or the
                signature is of other files.
        """
        check_files(self.folder, files, {self.name, VERIFY, SIGNATURE, *beside})
        digests = {self.name: self.sha256, **{name: entry.sha256 for name, entry in files.items()}}
        if self.statement is not None:
            check_subjects(self.statement, digests, self.folder)
        return digests


def read_listing(folder: Path, name: str, key: Path | None) -> Listing:
    """Returns the file that lists all others of a folder; with a public key its signature is checked first.

    Nothing of a file is decoded whose signer is not known.

    Raises:
        BundleError: it is missing, a link, or not signed with the private half of the key.
    """
    data = read_bounded(folder, name)
    statement = None if key is None else check_signature(data, name, folder, key)
    return Listing(folder=folder, name=name, data=data, statement=statement)


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


def _copy_models(files: Mapping[Form, tuple[Path, ...]], out: Path) -> None:
    # Lower case, because Windows and macOS take names that differ in case alone for one file.
    taken: dict[str, Path] = {name.lower(): Path() for name in (*UNLISTED, CHECK, TARGET, LAYERS, GOLDEN, APP, README)}
    for path in (path for paths in files.values() for path in paths):
        if (fault := find_fault(path.name)) is not None:
            raise OutputError(f"the model file {path.name!r} {fault}", hint="rename the model")
        if taken.setdefault(path.name.lower(), path) != path:
            raise OutputError(f"two files of the bundle want the name '{path.name}'", hint="rename the model")
        _files.replace_file(path, out / path.name)


_CHUNK_BYTES = 1 << 20


def snapshot_bundle(bundle: Bundle, forms: Iterable[Form], out: Path) -> Bundle:
    """Copies the model files of some forms, the golden samples and what is known of model and target into `out`.

    Each file is digested as it is copied, so that a bundle which is altered after it was opened is refused, and what is
    altered later is not what runs.

    Raises:
        BundleError: the bundle has no such form, or a file is not what the manifest says.
        OutputError: the folder cannot be written.
    """
    names = [f"{GOLDEN}/{file.name}" for file in bundle.golden.files]
    names += [
        name for name in (f"{GOLDEN}/{EXPECTED}", UNPADDED, LAYERS, CHECK, TARGET) if name in bundle.manifest.files
    ]
    for form in forms:
        bundle.find_model(form)
        names += bundle.manifest.forms[form]
    for name in dict.fromkeys(names):
        _files.write_new(out / name, _read_checked(bundle, name))
    return msgspec.structs.replace(bundle, folder=out)


def _read_checked(bundle: Bundle, name: str) -> Iterator[bytes]:
    """Yields a file in chunks; raises a BundleError where its digest is not that of the manifest."""
    entry = bundle.manifest.files.get(name)
    digest = hashlib.sha256()
    try:
        # Opened without following links, and read once: what is digested is what is copied.
        with _files.open_regular(_files.safe_join(bundle.folder, name)) as source:
            # Of a file that grows while it is read at most one chunk more is read: its digest is then wrong.
            while entry and source.tell() <= entry.size_bytes and (chunk := source.read(_CHUNK_BYTES)):
                digest.update(chunk)
                yield chunk
    except OSError as error:
        reason = f"cannot read {name!r} of bundle '{bundle.folder}': {error.strerror}"
        raise BundleError(reason, hint="build the bundle again") from error
    if entry is None or digest.hexdigest() != entry.sha256:
        words = f"{name!r} of bundle '{bundle.folder}' was altered after it was opened"
        raise BundleError(words, hint="build the bundle again")


# Bundles inside one folder, which stores once what several of them have: variants of an index, members of a group. Each
# has a folder with its manifest; its files lie there too, or elsewhere below the root. The file that lists all of the
# root (`index.json`, `group.json`) names the digest of each manifest.
_HINT = "build it again, or fetch it again"


def require_folder_name(name: str, source: str) -> None:
    """Refuses a name of which a folder below the root is to be made, before anything there is opened.

    Raises:
        BundleError: it could lead somewhere else.
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
    """Returns what several of some sets hold, by its digest, sorted."""
    counts, known = Counter[str](), dict[str, _T]()
    for each in sets:
        counts.update(each.keys())
        known.update(each)
    return {digest: known[digest] for digest in sorted(counts) if counts[digest] > 1}


def list_nested(
    folder: str, entry: BundledFile, manifest: Manifest, places: Mapping[str, str]
) -> dict[str, BundledFile]:
    """Returns the manifest in a folder and every file that it lists, by their places seen from the root."""
    return {f"{folder}/{MANIFEST}": entry, **{places[name]: file for name, file in manifest.files.items()}}


def extract_nested(
    root: Path, folder: str, entry: BundledFile, find_places: Callable[[Manifest], Mapping[str, str]], out: Path
) -> Bundle:
    """Writes a bundle, as it was before it was put into the root, into the folder `out` and opens it.

    Raises:
        BundleError: it was altered since the root was opened.
        OutputError: `out` cannot be written.
    """
    data = read_bounded(root, f"{folder}/{MANIFEST}")
    places = find_places(decode_manifest(data, f"{root}/{folder}/{MANIFEST}"))
    with _files.staged_folder(out) as staging:
        for name, place in places.items():
            _files.copy_once(root / place, staging / name)
        _files.write_file(staging / MANIFEST, data)
    bundle = open_bundle(out)
    if bundle.sha256 != entry.sha256:
        raise BundleError(f"'{folder}' of '{root}' was altered", hint=_HINT)
    return bundle
