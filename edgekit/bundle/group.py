"""The folder of a group of models: the bundle of each member, the files that they share, and their connections.

`group.json` lists every file. A file that several members have is stored in `shared/` under its sha256. Models whose
external weights are shared are stored with these in `models/`. A group is opened and signed as a folder, or as the
archive that it was packed into; its README says which model runs when.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import onnx

from edgekit._files import copy_once, digest_bytes, read_chunks, staged_folder, write_file, write_new
from edgekit.bundle import folder as folders
from edgekit.bundle.folder import APP, GOLDEN, MANIFEST, Bundle, Nested, Opened
from edgekit.bundle.golden import Golden
from edgekit.bundle.manifest import BundledFile, Manifest, Strict, decode_strictly, encode_json
from edgekit.bundle.snippets import README, render_template
from edgekit.bundle.wiring import MAX_MEMBERS, Interface, Wiring, describe_interface, find_fault
from edgekit.errors import BundleError, UsageError
from edgekit.model.external import LEAST_BYTES, PAGE_BYTES, DataPlace, point_to, read_external_entries, read_place
from edgekit.model.model import Model, load_model, read_proto
from edgekit.model.tensors import TensorSpec
from edgekit.serialize import fill
from edgekit.target import TaskLimit

GROUP = "group.json"
_MEMBERS, _MODELS, _SHARED = "members", "models", "shared"


class Member(Strict, frozen=True, kw_only=True):
    """A model of the group: the digest of its manifest, and the file to load, relative to `group.json`."""

    manifest: BundledFile
    model_file: str


class GroupManifest(Strict, frozen=True, kw_only=True):
    """The content of `group.json`: members, wiring, golden samples, and the metric by which the group is judged.

    `inputs` and `outputs` are those of the group as a whole. `files` are its own files, `shared` those of several
    members by their sha256.
    """

    schema_version: Literal[1] = 1
    name: str
    target: str
    wiring: Wiring
    members: Annotated[dict[str, Member], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    samples: Annotated[int, msgspec.Meta(ge=1)]
    metric: TaskLimit
    files: dict[str, BundledFile]
    shared: dict[str, BundledFile]


class Group(Opened, frozen=True, kw_only=True):
    """An opened group in a folder, listed by `group.json`.

    `nested` are the bundles of the members; `digests` hold the sha256 of every file that a signature covers, by its
    path.
    """

    manifest: GroupManifest
    nested: Mapping[str, Nested]
    digests: Mapping[str, str]

    @property
    def golden(self) -> Golden:
        """The golden samples of the whole group, with the outputs of the float models and labels."""
        return fill(Golden, self.manifest, folder=self.folder / GOLDEN, has_labels=True)

    @property
    def manifests(self) -> dict[str, Manifest]:
        """The manifests of the members."""
        return {name: each.manifest for name, each in self.nested.items()}

    @property
    def size_bytes(self) -> int:
        """The bytes of the model files that an app loads; a file that several members load counts once."""
        sizes: dict[str, int] = {}
        for each in self.nested.values():
            names = each.manifest.forms[each.manifest.form]
            sizes |= {each.places[name]: each.manifest.files[name].size_bytes for name in names}
        return sum(sizes.values())

    @property
    def interfaces(self) -> dict[str, Interface]:
        """The inputs and outputs of each member."""
        return _interfaces(self.nested)


def write_group(
    name: str,
    wiring: Wiring,
    bundles: Mapping[str, Bundle],
    golden: Golden,
    metric: TaskLimit,
    programs: Sequence[Path],
    out: Path,
) -> Group:
    """Writes the group of these bundles, which must be for one target, into the folder `out` and opens it.

    `wiring` is resolved and valid. `programs` are source files for the folder `app/`, which an app may use.

    Raises:
        UsageError: the bundles are for several targets, or two models with external weights have the same file name.
        OutputError: `out` cannot be written.
    """
    targets = {bundle.manifest.target for bundle in bundles.values()}
    if len(targets) != 1:
        named = ", ".join(sorted(targets))
        raise UsageError("the members of a group are for one target", hint=f"these are for {named}")
    files_by_digest = ({it.sha256: it for it in bundle.manifest.files.values()} for bundle in bundles.values())
    shared, taken = folders.find_shared(files_by_digest), dict[str, str]()
    nested = {member: _nest(member, it.manifest, it.manifest_file, shared) for member, it in bundles.items()}
    for each in nested.values():
        for file, place in each.places.items():
            digest = each.manifest.files[file].sha256
            if taken.setdefault(place, digest) != digest:
                raise UsageError(f"two members have a file '{file}'", hint="give the models of a group different names")
    with staged_folder(out) as staging:
        for member, bundle in bundles.items():
            write_file(staging / nested[member].folder / MANIFEST, (bundle.folder / MANIFEST).read_bytes())
            for file, place in nested[member].places.items():
                copy_once(bundle.folder / file, staging / place)
        own = {f"{GOLDEN}/{path.name}": path for path in golden.files}
        own |= {f"{APP}/{path.name}": path for path in programs}
        for place, path in own.items():
            copy_once(path, staging / place)
        draft = fill(
            GroupManifest,
            golden,
            name=name,
            target=targets.pop(),
            wiring=wiring,
            members={member: Member(manifest=it.entry, model_file=it.model_file) for member, it in nested.items()},
            metric=metric,
            files={},
            shared=shared,
        )
        models = {member: entry.model_file for member, entry in draft.members.items()}
        page = {"name": draft.name, "target": draft.target, "models": models, **msgspec.structs.asdict(draft.wiring)}
        write_file(staging / README, render_template("group.md.j2", **page).encode())
        files = {place: BundledFile.describe(staging / place) for place in (README, *own)}
        write_file(staging / GROUP, encode_json(msgspec.structs.replace(draft, files=files)))
    return open_group(out)


def open_group(path: Path, *, key: Path | None = None) -> Group:
    """Opens a group's folder after checking every file, its wiring, and, with a public key, its signature.

    Raises:
        BundleError: `group.json` or a manifest is missing, malformed or altered; a file is missing, altered, unlisted,
            a link, or has an unsafe name; the wiring does not fit the members; the metric is code; with `key`, the
            group is not signed with its private key.
    """
    if not path.is_dir():
        raise BundleError(f"there is no group '{path}'", hint="give the folder that holds group.json")
    listing = folders.read_listing(path, GROUP, key)
    source = listing.source
    group = decode_strictly(listing.data, GroupManifest, source)
    nested, files = dict[str, Nested](), dict(group.files)
    for name, member in group.members.items():
        folders.require_folder_name(name, source)
        manifest = folders.read_nested(path, f"{_MEMBERS}/{name}", member.manifest, source)
        nested[name] = each = _nest(name, manifest, member.manifest, group.shared)
        files |= each.files
        if (manifest.target, each.model_file) != (group.target, member.model_file):
            raise BundleError(f"'{source}' contradicts the manifest of '{name}'", hint="build the group again")
    if ":" in group.metric.name:
        # A metric `module:function` would import and run Python.
        words = f"'{source}' asks for the metric {group.metric.name[:200]!r}, code that no bundle may run"
        raise BundleError(words, hint="name a metric that edgekit has")
    if (fault := find_fault(group.wiring, _interfaces(nested))) is not None:
        raise BundleError(f"the wiring in '{source}' {fault[0]}", hint="build the group again")
    return fill(Group, listing, manifest=group, nested=nested, digests=listing.check_folder(files))


def _interfaces(nested: Mapping[str, Nested]) -> dict[str, Interface]:
    sides = {name: (each.manifest.inputs, each.manifest.outputs) for name, each in nested.items()}
    specs = {name: [[tensor.spec for tensor in side] for side in each] for name, each in sides.items()}
    return {name: describe_interface(*each) for name, each in specs.items()}


def _nest(member: str, manifest: Manifest, entry: BundledFile, shared: Mapping[str, object]) -> Nested:
    """Returns a member with the path of each of its files, relative to `group.json`."""
    multi_file_forms = [names for names in manifest.forms.values() if len(names) > 1]
    # A model refers to its external weights by path, so models that share weights must be in one folder.
    sharing = [names for names in multi_file_forms if any(manifest.files[each].sha256 in shared for each in names)]
    with_shared_weights = {name for names in sharing for name in names}
    with_own_weights = {name for names in multi_file_forms for name in names}

    def place(name: str, digest: str) -> str:
        if name in with_shared_weights:
            return f"{_MODELS}/{name}"
        is_shared = digest in shared and name not in with_own_weights
        return f"{_SHARED}/{digest}" if is_shared else f"{_MEMBERS}/{member}/{name}"

    places = {name: place(name, file.sha256) for name, file in manifest.files.items()}
    return Nested(folder=f"{_MEMBERS}/{member}", entry=entry, manifest=manifest, places=places)


def is_group(path: Path) -> bool:
    """Returns True for the folder of a group."""
    return (path / GROUP).is_file()


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a weight's bytes: in the tensor itself (`file` is None), or at an offset of a file."""

    tensor: onnx.TensorProto
    file: Path | None
    offset: int
    size_bytes: int

    def read(self) -> Iterator[bytes]:
        """Yields the bytes, one block at a time."""
        if self.file is None:
            yield self.tensor.raw_data
            return
        with self.file.open("rb") as source:
            source.seek(self.offset)
            yield from read_chunks(source, self.size_bytes)


def find_equal_weights(models: Sequence[Model]) -> int:
    """Returns the total bytes of the weights that occur in several of these models, each counted once."""
    found = [_digest_weights(model, read_proto(model, weights=False)) for model in models]
    return sum(places[0].size_bytes for places in folders.find_shared(found).values())


def share_weights(bundles: Mapping[str, Bundle], folder: Path, templates: Path) -> tuple[dict[str, Bundle], int]:
    """Returns bundles whose ONNX models refer to one file, `weights-DIGEST.data`, for the weights that several have.

    They are written into `folder`; bundles that share nothing are returned unchanged. The second result is the bytes of
    the shared weights. `templates` is the folder of the target.

    Raises:
        OutputError: `folder` cannot be written.
    """
    loading = {name: bundle for name, bundle in bundles.items() if "onnx" in bundle.manifest.forms}
    models = {name: load_model(bundle.find_model("onnx")) for name, bundle in loading.items()}
    shared, size_bytes = share_models(models, folder)
    replaced = {
        name: folders.replace_model(bundles[name], files, templates, folder / name / "bundle")
        for name, files in shared.items()
    }
    return {**bundles, **replaced}, size_bytes


def share_models(models: Mapping[str, Model], folder: Path) -> tuple[dict[str, tuple[Path, ...]], int]:
    """Writes models that have weights in common with another into `folder`, and these weights into one file.

    Returns the files of each such model, the one to load first, and the bytes of the weights in common. The files of a
    model are in several folders; to load the model they must be put into one.

    Raises:
        OutputError: `folder` cannot be written.
    """
    protos = {name: read_proto(model, weights=False) for name, model in models.items()}
    weights = {name: _digest_weights(model, protos[name]) for name, model in models.items()}
    if not (equal := folders.find_shared(weights.values())):
        return {}, 0
    # The file is named after its content, so that two groups never have different files of the same name.
    file = folder / f"weights-{digest_bytes(''.join(equal).encode())[:16]}.data"
    found = {digest: places[0] for each in reversed(weights.values()) for digest, places in each.items()}
    offsets = _write_weights(file, {digest: found[digest] for digest in equal})
    written: dict[str, tuple[Path, ...]] = {}
    for name, proto in protos.items():
        if not (own_shared := {digest: places for digest, places in weights[name].items() if digest in offsets}):
            continue
        for digest, places in own_shared.items():
            for place in places:
                point_to(place.tensor, DataPlace(file.name, offsets[digest], place.size_bytes))
        # The file is named after the member, because all models of a group are in one folder.
        path = folder / name / "model" / f"{name}.onnx"
        # External weights that are not shared go beside the model.
        outside = [it for it in proto.graph.initializer if it.data_location == onnx.TensorProto.EXTERNAL]
        own = [it for it in outside if read_external_entries(it).get("location") != file.name]
        unshared = {tensor.name: _locate(tensor, models[name].path.parent) for tensor in own}
        own_file = path.with_name(f"{path.name}.data")
        for other, offset in (_write_weights(own_file, unshared) if unshared else {}).items():
            point_to(unshared[other].tensor, DataPlace(own_file.name, offset, unshared[other].size_bytes))
        write_new(path, [proto.SerializeToString(deterministic=True)])
        written[name] = (path, file, own_file) if unshared else (path, file)
    return written, sum(places[0].size_bytes for places in equal.values())


def _digest_weights(model: Model, proto: onnx.ModelProto) -> dict[str, list[_Place]]:
    """Returns the large weights of a model by the sha256 of their bytes."""
    found: dict[str, list[_Place]] = {}
    for tensor in proto.graph.initializer:
        place = _locate(tensor, model.path.parent)
        if place.size_bytes > LEAST_BYTES:
            digest = hashlib.sha256()
            for block in place.read():
                digest.update(block)
            found.setdefault(digest.hexdigest(), []).append(place)
    return found


def _locate(tensor: onnx.TensorProto, folder: Path) -> _Place:
    if (place := read_place(tensor)) is None:
        return _Place(tensor=tensor, file=None, offset=0, size_bytes=len(tensor.raw_data))
    return _Place(tensor=tensor, file=folder / place.file, offset=place.offset, size_bytes=place.length)


def _write_weights(file: Path, places: Mapping[str, _Place]) -> dict[str, int]:
    """Writes weights one after another, each at the start of a page for mmap, and returns their offsets."""
    offsets: dict[str, int] = {}

    def write() -> Iterator[bytes]:
        end = 0
        for key, place in places.items():
            yield bytes(-end % PAGE_BYTES)
            offsets[key] = end + -end % PAGE_BYTES
            yield from place.read()
            end = offsets[key] + place.size_bytes

    write_new(file, write())
    return offsets
