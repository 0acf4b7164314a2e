"""Stores weights that several models of a group have in common once, in an external file that all of them name."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import onnx

from edgekit._files import digest_bytes, read_chunks, write_new
from edgekit.bundle.folder import Bundle, replace_model
from edgekit.model.external import LEAST_BYTES, PAGE_BYTES, DataPlace, point_to, read_place, read_words
from edgekit.model.model import Model, load_model, read_proto


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bytes of a weight are: in the tensor itself, or at an offset of a file."""

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
    """Returns how many bytes of weights more than one of these models has, each weight counted once."""
    found = [_digest_weights(model, read_proto(model, weights=False)) for model in models]
    return sum(_find_equal(found).values())


def share_weights(bundles: Mapping[str, Bundle], folder: Path, templates: Path) -> tuple[dict[str, Bundle], int]:
    """Returns bundles whose ONNX models refer to one file, `weights-DIGEST.data`, for the weights that several have.

    They are written into `folder`; bundles that share nothing are returned unchanged. Beside them the bytes of these
    weights are returned. `templates` is the folder of the target.

    Raises:
        OutputError: `folder` cannot be written.
    """
    models = {
        name: load_model(each.find_model("onnx")) for name, each in bundles.items() if "onnx" in each.manifest.forms
    }
    shared, size_bytes = share_models(models, folder)
    made = {
        name: replace_model(bundles[name], "onnx", files, templates, folder / name / "bundle")
        for name, files in shared.items()
    }
    return {**bundles, **made}, size_bytes


def share_models(models: Mapping[str, Model], folder: Path) -> tuple[dict[str, tuple[Path, ...]], int]:
    """Writes models that have weights in common with another into `folder`, and these weights into one file.

    Returns the files of each such model, the one to load first, and the bytes of the weights in common. The files of a
    model are in several folders; to load the model they must be put into one.

    Raises:
        OutputError: `folder` cannot be written.
    """
    protos = {name: read_proto(model, weights=False) for name, model in models.items()}
    weights = {name: _digest_weights(model, protos[name]) for name, model in models.items()}
    equal = _find_equal(list(weights.values()))
    if not equal:
        return {}, 0
    # Named after its content, so that the file of another group has another name.
    file = folder / f"weights-{digest_bytes(''.join(equal).encode())[:16]}.data"
    found = {digest: places[0] for each in reversed(weights.values()) for digest, places in each.items()}
    offsets = _write_weights(file, {digest: found[digest] for digest in equal})
    made: dict[str, tuple[Path, ...]] = {}
    for name, proto in protos.items():
        mine = {digest: places for digest, places in weights[name].items() if digest in offsets}
        if mine:
            for digest, places in mine.items():
                _point_to(places, file.name, offsets[digest])
            # Named after the member, because in a group the models are in one folder.
            path = folder / name / "model" / f"{name}.onnx"
            own = _move_others(proto, models[name], file.name, path.with_name(f"{path.name}.data"))
            write_new(path, [proto.SerializeToString(deterministic=True)])
            made[name] = (path, file, *own)
    return made, sum(equal.values())


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
    place = read_place(tensor)
    if place is None:
        return _Place(tensor=tensor, file=None, offset=0, size_bytes=len(tensor.raw_data))
    return _Place(tensor=tensor, file=folder / place.file, offset=place.offset, size_bytes=place.length)


def _find_equal(weights: Sequence[Mapping[str, Sequence[_Place]]]) -> dict[str, int]:
    """Returns the bytes of each weight that several models have, by digest, in its order."""
    counts = Counter(digest for found in weights for digest in found)
    sizes = {digest: places[0].size_bytes for found in weights for digest, places in found.items()}
    return {digest: sizes[digest] for digest in sorted(counts) if counts[digest] > 1}


def _write_weights(file: Path, places: Mapping[str, _Place]) -> dict[str, int]:
    """Writes weights one after another and returns the offset of each; each begins a page, so that it can be mapped."""
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


def _point_to(places: Iterable[_Place], name: str, offset: int) -> None:
    for place in places:
        point_to(place.tensor, DataPlace(name, offset, place.size_bytes))


def _move_others(proto: onnx.ModelProto, model: Model, shared: str, path: Path) -> tuple[Path, ...]:
    """Writes the external weights of a model that are not shared to `path`, and returns it if there are any."""
    others = {
        tensor.name: _locate(tensor, model.path.parent)
        for tensor in proto.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL and read_words(tensor).get("location") != shared
    }
    if not others:
        return ()
    for name, offset in _write_weights(path, others).items():
        _point_to([others[name]], path.name, offset)
    return (path,)
