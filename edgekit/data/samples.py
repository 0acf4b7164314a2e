"""Sources of sample inputs: they are streamed, one sample at a time.

A function of the user's own may give them (`module:function`, named on the command line or in a recipe, never by a
bundle). A model without samples gets random ones, the same at each call.
"""

import importlib
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.numpy_helper
from google.protobuf.message import DecodeError

from edgekit._files import AnyPath, as_path
from edgekit.data.images import SUFFIXES, Preprocess, read_image, refuse_other_input
from edgekit.data.npz import MALFORMED, count_rows, open_npy, read_rows
from edgekit.errors import DataError, UsageError, quote_error, require_known, reraised
from edgekit.model.tensors import DTYPES, PARSER_LOCK, Array, Tensors, TensorSpec, is_text, shape_matches

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A function of the user's own, as `module:function`: `load_function` imports it."""


def load_function(source: str, what: str) -> Callable[..., Any]:
    """Returns the function that `module:function` names; installed modules come before those of the working folder.

    Raises:
        UsageError: the module cannot be imported, or has no such function; `what` says what it is for.
    """
    module, _, name = source.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # last, so that no file of the working folder replaces an installed module
    unloaded = UsageError(f"cannot load {what} '{source}'", hint="module:function, importable from here")
    with reraised(Exception, unloaded, quote=True):  # the user's own code may raise anything
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


_MOST_KEPT_BYTES = 32 << 20
_FORMS_HINT = "DATA is a .npz or .npy, a folder of these or of images, ONNX test_data_set folders, or module:function"
# So many samples are read to see whether all have the same sizes: a choice.
_LOOKED_AT = 8
_UNCOUNTED = -1
_IMAGE_RANK = 4


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Sample inputs that can be read any number of times, always in the same order.

    `read` starts a new pass and yields one sample at a time, each with a tensor for every model input, batch axis
    included. `source` is their origin, for messages. `class_names` holds the name of each sample's folder, for images
    in folders. `batches` says how many batches were cut into samples, 0 if they came singly. `places` holds the place
    of each sample in its origin, where these are some of its samples.
    """

    source: str
    count: int
    read: Callable[[], Iterator[Tensors]]
    class_names: tuple[str, ...] = ()
    batches: int = 0
    places: tuple[int, ...] = ()

    def place(self, index: int) -> int:
        """Returns which sample of its origin one of these is: the user knows no other number."""
        return self.places[index] if index < len(self.places) else index

    def __iter__(self) -> Iterator[Tensors]:
        return self.read()


def load_samples(
    source: AnyPath,
    inputs: Sequence[TensorSpec],
    preprocess: Preprocess | None = None,
    *,
    idle: Collection[str] = (),
    absent: Tensors | None = None,
) -> Samples:
    """Opens sample inputs for a model with these inputs, and checks names, dtype and shape of the first.

    If the model takes one row and the data are batches (of any size, even of several sizes), each row is a sample.
    Arrays named in `idle`, such as frozen inputs, are ignored. `absent` gives values for inputs that the data lack.

    Raises:
        DataError: the source does not exist, has an unknown form, or does not fit the inputs.
        UsageError: `module:function` names nothing that can be imported.
    """
    # The name `module:function` is no path, and stays as it is.
    source = source if isinstance(source, str) else str(as_path(source))
    if (other := next((spec for spec in inputs if not spec.is_tensor), None)) is not None:
        words = f"the model input '{other.name}' is a {other.dtype}, and samples hold tensors"
        raise DataError(words, hint="export the model with tensors as inputs")
    given = [spec for spec in inputs if not absent or spec.name not in absent]
    raw = _open_source(source, inputs, given, preprocess)
    if idle or absent:
        fixed = dict(absent or {})
        raw = map_samples(raw, lambda sample: fixed | {name: sample[name] for name in sample if name not in idle})

    def read() -> Iterator[Tensors]:
        for index, sample in enumerate(raw):
            for row in _split_rows(sample, inputs):
                yield fit_sample(row, inputs, f"sample {index} of '{source}'")

    batches, count = _count_samples(raw, inputs)
    if count == 0:
        raise DataError(f"'{source}' holds no sample", hint="give at least one, better 100")
    samples = msgspec.structs.replace(raw, count=count, batches=batches if count != batches else 0, read=read)
    # Reads the first, so that a wrong name or shape is reported before any work starts.
    next(iter(samples))
    return samples


def read_shapes(
    source: AnyPath, inputs: Sequence[TensorSpec], preprocess: Preprocess | None = None
) -> Sequence[Mapping[str, tuple[int, ...]]]:
    """Returns the shape of each input in the first few samples, with a batch axis of one where a sample has none.

    Raises:
        DataError: the source does not exist, or has an unknown form.
        UsageError: `module:function` names nothing that can be imported.
    """
    source = source if isinstance(source, str) else str(as_path(source))
    ranks = {spec.name: len(spec.shape) for spec in inputs if spec.shape is not None}
    rows = islice(_open_source(source, inputs, inputs, preprocess), _LOOKED_AT)
    # A sample of text is no array yet.
    seen = [{name: np.shape(value) for name, value in row.items()} for row in rows]
    return [
        {name: (1, *shape) if len(shape) + 1 == ranks.get(name) else shape for name, shape in row.items()}
        for row in seen
    ]


def select_samples(samples: Samples, indices: Iterable[int]) -> Samples:
    """Returns the samples at these positions, in the order given.

    The source is read once more for each position that is not above the one before.
    """
    wanted = tuple(indices)
    steps_back = [place for place in range(1, len(wanted)) if wanted[place] <= wanted[place - 1]]
    passes = [wanted[begin:end] for begin, end in pairwise((0, *steps_back, len(wanted)))]

    def read() -> Iterator[Tensors]:
        for rising in passes:
            here = frozenset(rising)
            for index, sample in zip(range(rising[-1] + 1 if rising else 0), samples, strict=False):
                if index in here:
                    yield sample

    names = tuple(samples.class_names[index] for index in wanted) if samples.class_names else ()
    places = tuple(map(samples.place, wanted))
    return Samples(source=samples.source, count=len(wanted), read=read, class_names=names, places=places)


def map_samples(samples: Samples, function: Callable[[Tensors], Tensors], *, source: str | None = None) -> Samples:
    """Returns the results of a function, such as the run of a session, for each sample; computed anew in each pass."""
    return msgspec.structs.replace(
        samples, source=source or samples.source, read=lambda: (function(sample) for sample in samples)
    )


def list_samples(rows: Sequence[Tensors], source: str) -> Samples:
    """Returns rows that are in memory as samples."""
    return Samples(source=source, count=len(rows), read=lambda: iter(rows))


def keep_small(samples: Samples) -> Samples:
    """Returns samples that stay in memory after their first full pass, if they have 32 MB at most."""
    kept: list[tuple[Tensors, ...]] = []

    def read() -> Iterator[Tensors]:
        if kept:
            yield from kept[0]
            return
        rows: list[Tensors] = []
        size_bytes = 0
        for sample in samples:
            size_bytes += sum(value.nbytes for value in sample.values())
            if size_bytes <= _MOST_KEPT_BYTES:
                rows.append(sample)
            else:
                # Too large: what was stored so far is freed at once.
                rows.clear()
            yield sample
        if size_bytes <= _MOST_KEPT_BYTES:
            kept.append(tuple(rows))

    return msgspec.structs.replace(samples, read=read)


def spread_indices(count: int, wanted: int) -> tuple[int, ...]:
    """Returns at most `wanted` positions spread evenly over `count` samples."""
    if wanted >= count:
        return tuple(range(count))
    # Spread, because folders and exports are often sorted by class.
    return tuple(index * count // wanted for index in range(wanted))


def spread_sequences(count: int, wanted: int, steps: int) -> tuple[int, ...]:
    """Returns at most `wanted` positions of `count` samples: whole sequences of `steps`, at least one."""
    if steps == 1:
        return spread_indices(count, wanted)
    chosen = spread_indices(count // steps, max(1, wanted // steps))
    return tuple(steps * sequence + step for sequence in chosen for step in range(steps))


def order_for_runs(count: int, wanted: int, steps: int) -> tuple[int, ...]:
    """Returns the positions of `spread_sequences` in the order in which a device runs them.

    A device may stop early, and samples are often sorted by class. So every eighth sequence comes first, then those
    halfway between, and so on (bit-reversed, as in van der Corput's sequence): what ran by then is spread as well.
    """
    chosen = spread_sequences(count, wanted, steps)
    firsts = [chosen[place : place + steps] for place in range(0, len(chosen), steps)]
    return tuple(index for offset in (0, 4, 2, 6, 1, 5, 3, 7) for sequence in firsts[offset::8] for index in sequence)


def limit_samples(samples: Samples, most: int | None, steps: int = 1) -> Samples:
    """Returns at most `most` samples as whole sequences of `steps`, spread evenly; all if `most` is None."""
    return samples if most is None else select_samples(samples, spread_sequences(samples.count, most, steps))


def fit_sample(sample: Tensors, inputs: Sequence[TensorSpec], where: str) -> dict[str, Array]:
    """Returns a sample with the names, dtypes and shapes of the inputs; a missing batch axis of one is added.

    Raises:
        DataError: an input is missing, unknown, of another dtype or of another shape.
    """
    names = [spec.name for spec in inputs]
    for name in sample:
        require_known(name, names, f"{where} has '{name}', which is no model input", DataError)
    if (missing := next((name for name in names if name not in sample), None)) is not None:
        held = ", ".join(sample) or "nothing"
        fed = "build and quantize begin state, which an output feeds back, with zeros: --steps N"
        hint = f"it has {held}; {fed}; a number that never changes can be a constant: --freeze {missing}=NUMBER"
        raise DataError(f"{where} lacks the model input '{missing}'", hint=hint)
    return {spec.name: _fit(np.asarray(sample[spec.name]), spec, where) for spec in inputs}


def _split_rows(sample: Tensors, inputs: Sequence[TensorSpec]) -> Iterator[Tensors]:
    """Yields the rows of a batch as batches of one, for a model of batch one; anything else as it is."""
    sizes: dict[str, int] = {}
    for spec in (spec for spec in inputs if spec.name in sample):
        # The number of rows in a value for an input that takes one row; 1 if it is no batch.
        rows, axes = sample[spec.name].shape, spec.shape or (None,)
        is_batch = axes[0] == 1 and len(rows) == len(axes) and rows[0] > 1 and shape_matches((1, *rows[1:]), spec)
        sizes[spec.name] = rows[0] if is_batch else 1
    batched = {size for size in sizes.values() if size != 1}
    # Inputs with different first sizes are no batch: each of these axes may mean something else.
    if len(batched) != 1:
        yield sample
        return
    for row in range(batched.pop()):
        yield {name: value if sizes.get(name, 1) == 1 else value[row : row + 1] for name, value in sample.items()}


def _count_samples(raw: Samples, inputs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Returns the number of samples before and after batches are cut into rows; all samples may have to be read."""
    takes_rows = any(spec.shape and spec.shape[0] == 1 for spec in inputs)
    if raw.class_names or raw.count == 0 or (raw.count != _UNCOUNTED and not takes_rows):
        return raw.count, raw.count
    if Path(raw.source).is_file():
        return raw.count, raw.count * sum(1 for _ in _split_rows(next(iter(raw)), inputs))
    sizes = [sum(1 for _ in _split_rows(sample, inputs)) for sample in raw]
    return len(sizes), sum(sizes)


def _fit(value: Array, spec: TensorSpec, where: str) -> Array:
    if spec.dtype == "string" and is_text(value):
        value = value.astype(object)
    elif value.dtype != np.dtype(DTYPES.get(spec.dtype, np.void)):
        words = f"{where} has {value.dtype} for input '{spec.name}', the model wants {spec.dtype}"
        raise DataError(words, hint=f"save it with .astype('{spec.dtype}')")
    for candidate in (value, value[np.newaxis]):
        if shape_matches(candidate.shape, spec):
            return candidate
    wanted, hint = spec.shape or (), "sample i is array[i]; a batch axis of one is added where it is missing"
    shapes = value.shape, (1, *value.shape)
    if any(_is_shorter(shape, wanted) for shape in shapes):
        hint = "samples are not filled up to one size: fill them, or build with several sizes, as --dim NAME=64,128"
    elif any(Counter(shape) == Counter(wanted) for shape in shapes):
        hint = "its axes have another order: numpy.transpose, before you save it"
    raise DataError(f"{where} has shape {list(value.shape)} for input '{spec.name}', the model wants {spec}", hint=hint)


def _is_shorter(shape: Sequence[int], wanted: Sequence[int | str | None]) -> bool:
    """Returns True if padding along one axis would make a sample fit, as for text; a padded image is another image."""
    if len(wanted) == _IMAGE_RANK:
        return False
    known = [(size, want) for size, want in zip(shape, wanted, strict=False) if isinstance(want, int) and size != want]
    return len(shape) == len(wanted) and len(known) == 1 and known[0][0] < known[0][1]


def _open_source(
    source: str, inputs: Sequence[TensorSpec], given: Sequence[TensorSpec], preprocess: Preprocess | None
) -> Samples:
    """Opens data; `given` are the inputs that they must hold."""
    path = Path(source)
    if path.suffix == ".npz" and path.is_file():
        return Samples(source=source, count=count_rows(path), read=lambda: read_rows(path))
    if path.suffix == ".npy" and path.is_file():
        name, rows = _only_input(given, path), np.atleast_1d(_read_npy(path, mapped=True))
        return Samples(source=source, count=len(rows), read=lambda: ({name: row} for row in rows))
    if path.is_dir():
        if sets := sorted(path.glob("test_data_set_*"), key=_natural_key):
            return _from_files(path, sets, lambda folder: _read_data_set(folder, inputs))
        if files := sorted(path.glob("*.npz"), key=_natural_key):
            return _from_files(path, files, _read_npz_sample)
        if files := sorted(path.glob("*.npy"), key=_natural_key):
            return _from_files(path, files, lambda file: {_only_input(given, path): _read_npy(file)})
        files = sorted((file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES), key=_natural_key)
        if not files:
            raise DataError(f"'{path}' holds no sample", hint=_FORMS_HINT)
        if preprocess is None:
            hint = "say how the model wants them: --preprocess FILE.toml, with at least size = [WIDTH, HEIGHT]"
            raise DataError(f"'{path}' holds images", hint=hint)
        name = _only_input(given, path)
        samples = _from_files(path, files, lambda file: {name: read_image(file, preprocess)})
        refuse_other_input(preprocess, given[0])
        return msgspec.structs.replace(samples, class_names=tuple(file.parent.name for file in files))
    if FUNCTION.fullmatch(source):
        function: Callable[[], Iterable[Mapping[str, Array]]] = load_function(source, "samples")

        def read() -> Iterator[Tensors]:
            try:
                for sample in function():
                    yield {key: np.asarray(value) for key, value in sample.items()}
            except Exception as error:  # the user's own code may raise anything
                words = f"'{source}' raises {type(error).__name__}: {quote_error(error)}"
                raise DataError(words, hint="it must give dicts of arrays by input name") from error

        return Samples(source=source, count=_UNCOUNTED, read=read)
    if not path.exists():
        raise DataError(f"the data '{source}' does not exist", hint=f"check the path; {_FORMS_HINT}")
    raise DataError(f"the data '{source}' is no data that edgekit reads", hint=_FORMS_HINT)


def _from_files(path: Path, files: Sequence[Path], read_one: Callable[[Path], Tensors]) -> Samples:
    refuse_endless(files)
    return Samples(source=str(path), count=len(files), read=lambda: (read_one(file) for file in files))


def refuse_endless(files: Iterable[Path]) -> None:
    """Refuses pipes and devices among the files of a folder: reading them would block or never end.

    Raises:
        DataError: one of the files is such.
    """
    odd = next((file for file in files if file.is_fifo() or file.is_char_device()), None)
    if odd is not None:
        kind = "pipe" if odd.is_fifo() else "device"
        raise DataError(f"'{odd}' is a {kind}, not a file", hint="remove it from the folder")


def _read_data_set(folder: Path, inputs: Sequence[TensorSpec]) -> Tensors:
    tensors: dict[str, Array] = {}
    for index, spec in enumerate(inputs):
        file = folder / f"input_{index}.pb"
        refuse_endless([file])
        unread = DataError(f"cannot read '{file}' for input '{spec.name}'", hint="it must be a TensorProto")
        with reraised((*MALFORMED, DecodeError), unread):
            tensors[spec.name] = onnx.numpy_helper.to_array(onnx.load_tensor(str(file)))
    return tensors


def _read_npz_sample(file: Path) -> Tensors:
    with (
        reraised(MALFORMED, DataError(f"cannot read '{file}'", hint="write it with numpy.savez")),
        PARSER_LOCK,
        file.open("rb") as stream,
        np.load(stream, allow_pickle=False) as archive,
    ):
        return {name: archive[name] for name in archive.files}


def _read_npy(file: Path, *, mapped: bool = False) -> Array:
    with reraised(MALFORMED, DataError(f"cannot read '{file}'", hint="write it with numpy.save")):
        return open_npy(file, mapped=mapped)


def _only_input(inputs: Sequence[TensorSpec], path: Path) -> str:
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise DataError(f"'{path}' gives one input, the model has {len(inputs)}", hint=f"give a .npz with {names}")
    return inputs[0].name


def _natural_key(path: Path) -> list[tuple[int, str]]:
    # Digits compare as numbers: sample 10 comes after sample 9.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path)) if part]


MOST_AXES = 64
"""The largest number of dimensions of a numpy array."""

_UNSET_DIM = 1
# A gibibyte of float32: more than any model for edgekit's devices takes at a time.
_MOST_VALUES = 1 << 28


def draw_samples(inputs: tuple[TensorSpec, ...], count: int = 1) -> Samples | None:
    """Returns random samples for inputs that are tensors, or None if one is not; unknown dimensions get size 1.

    Floats are normally distributed, integers 0 or 1 (they are mostly indices), strings a letter.

    Raises:
        DataError: an input is so large that nothing could hold it, or has more dimensions than numpy knows.
    """
    if not all(spec.is_tensor and spec.shape is not None for spec in inputs):
        return None

    for spec in inputs:
        if (axes := len(spec.shape or ())) > MOST_AXES:
            words = f"input '{spec.name}' has {axes} dimensions, numpy has {MOST_AXES} at most"
            raise DataError(words, hint="merge dimensions that always stand together, by a Reshape in the model")
        count_values = math.prod(dim for dim in spec.shape or () if isinstance(dim, int))
        if count_values > _MOST_VALUES:
            words = f"input '{spec.name}' has {count_values} values, too many to draw"
            raise DataError(words, hint="give it smaller dimensions")

    def read() -> Iterator[Tensors]:
        yield from ({spec.name: _draw(spec, index) for spec in inputs} for index in range(count))

    return Samples(source="drawn at random", count=count, read=read)


def _draw(spec: TensorSpec, index: int) -> Array:
    # Seeded by the name of the input, so that a further input does not change the values of the others. crc32, as
    # `hash` differs from process to process.
    rng = np.random.default_rng([zlib.crc32(spec.name.encode()), index])
    shape = [dim if isinstance(dim, int) else _UNSET_DIM for dim in spec.shape or ()]
    if spec.dtype == "string":
        return np.full(shape, "a", object)
    dtype = np.dtype(DTYPES[spec.dtype])
    if dtype.kind == "f":
        return np.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)
