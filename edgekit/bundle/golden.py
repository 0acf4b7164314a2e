"""Golden samples: inputs, and the outputs of the user's own float model for them.

They are stored in `.npz` files; the same content gives the same bytes. The samples of a model with state are steps of
sequences: each has the state that the float model has at its step.
"""

import contextlib
import math
import os
import zipfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekit._files import AnyPath, as_path, copy_into, measure_content, replacing_file, work_folder, write_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data.data_check import digest_sample
from edgekit.data.labels import Boxes, Label
from edgekit.data.npz import MALFORMED, SHAPES, open_npy
from edgekit.data.samples import Samples, load_samples
from edgekit.data.split import Sequences
from edgekit.errors import DataError, ModelError
from edgekit.machine import map_in_order
from edgekit.model.model import Model
from edgekit.model.state import State, resolve_state, run_steps
from edgekit.model.tensors import DTYPES, Array, Tensors, TensorSpec

# The first moment that a zip can hold (APPNOTE.TXT, 4.4.6).
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_rows(path: Path, samples: Iterable[Tensors], *, ragged: bool = False) -> tuple[tuple[TensorSpec, ...], int]:
    """Writes one array per tensor, row i of it being sample i, and returns their specs and the number of samples.

    With `ragged` a tensor `y` may change its shape, not its rank: `y` then holds the values of all samples one after
    another, `y.shapes` the shape of each, and in its spec the dimensions that change are unknown.

    Arrays are stored, not deflated, because deflated bytes depend on the version of zlib; entries are sorted by name
    and bear no time. Strings are kept in memory until the end, numbers are not. `edgekit.npz` reads them back.

    Raises:
        DataError: a tensor has another shape or dtype in some sample, or there is no sample.
        OutputError: the file cannot be written.
    """
    with writing_rows(path, ragged=ragged) as rows:
        for sample in samples:
            rows.append(sample)
    return rows.specs, rows.count


@contextlib.contextmanager
def writing_rows(path: Path, *, ragged: bool = False) -> Generator["Rows"]:
    """Yields rows to append samples to; they are in the file, as `write_rows` writes it, once the block has ended well.

    Raises:
        DataError: a tensor has another shape or dtype in some sample, or there is no sample.
        OutputError: the file cannot be written.
    """
    with work_folder() as work:
        rows = Rows(path.name, work, ragged=ragged)
        yield rows
        with replacing_file(path) as temporary:
            rows.pack(temporary)


class Rows:
    """Collects samples for a file."""

    def __init__(self, name: str, work: Path, *, ragged: bool) -> None:
        self.count = 0
        self._name, self._work, self._ragged = name, work, ragged
        self._columns: dict[str, _Column] = {}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The name, type and shape of each tensor."""
        return tuple(column.spec for column in self._columns.values())

    def append(self, sample: Tensors) -> None:
        """Takes the next sample.

        Raises:
            DataError: a tensor has another shape or dtype than before, or is new or gone.
        """
        if self.count and sample.keys() != self._columns.keys():
            before = ", ".join(self._columns)
            raise DataError(
                f"sample {self.count} for '{self._name}' holds {', '.join(sample)}; sample 0 {before}",
                hint="a sequence of changing length cannot be kept: cut the model before it (prepare --outputs)",
            )
        for place, (name, value) in enumerate(sample.items()):
            if name not in self._columns:
                dtype = np.dtype(np.str_) if value.dtype.kind in "UO" else value.dtype
                self._columns[name] = _Column(name=name, dtype=dtype, path=self._work / str(place))
            self._columns[name].append(value, ragged=self._ragged)
        self.count += 1

    def pack(self, path: Path) -> None:
        """Writes the archive of all samples.

        Raises:
            DataError: there is no sample, or two tensors need one name.
        """
        if not self.count:
            raise DataError(f"there is no sample for '{self._name}'", hint="give at least one, better 100")
        arrays = [array for column in self._columns.values() for array in column.list_arrays()]
        if len({name for name, *_ in arrays}) < len(arrays):
            raise DataError(f"'{self._name}' has two tensors of one name with '{SHAPES}'", hint="rename an output")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for array in sorted(arrays, key=itemgetter(0)):
                _pack(archive, *array)


class _Column(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one tensor and their shapes: numbers in a raw file until their count is known, strings in memory."""

    name: str
    dtype: np.dtype[Any]
    path: Path
    shapes: list[tuple[int, ...]] = []
    words: list[Array] = []

    @property
    def spec(self) -> TensorSpec:
        """Its type, and the dimensions that all rows have."""
        dims = (next(iter(sizes)) if len(sizes) == 1 else None for sizes in map(set, zip(*self.shapes, strict=True)))
        return TensorSpec(name=self.name, dtype=_name_dtype(self.dtype), shape=tuple(dims))

    def append(self, value: Array, *, ragged: bool) -> None:
        is_text = value.dtype.kind in "UO"
        first = self.shapes[0] if self.shapes else value.shape
        fits = len(value.shape) == len(first) if ragged else value.shape == first
        if not fits or not (self.dtype.kind == "U" if is_text else value.dtype == self.dtype):
            spec = TensorSpec(name=self.name, dtype=_name_dtype(self.dtype), shape=first)
            index, what = len(self.shapes), "rank or type" if ragged else "shape or type"
            raise DataError(
                f"'{self.name}' is {value.dtype}{list(value.shape)} in sample {index}, in sample 0 [{spec}]",
                hint=f"a tensor of changing {what} cannot be kept: cut the model before it (prepare --outputs)",
            )
        self.shapes.append(value.shape)
        if not is_text:
            with self.path.open("ab") as file:
                file.write(np.ascontiguousarray(value).tobytes())
            return
        self.words.append(value.astype(np.str_))
        # numpy's text drops null characters at the end: what could not be read back is refused.
        if not np.array_equal(self.words[-1].astype(object), value.astype(object)):
            raise DataError(f"'{self.name}' holds strings that end in a null character", hint="leave this output out")

    def list_arrays(self) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...], bytes | Path]]:
        """Yields the arrays that hold its rows: name, type, shape and bytes."""
        # Ragged only where it has to be: outputs of one shape stay a plain array that numpy reads.
        is_ragged = len(set(self.shapes)) > 1
        if is_ragged:
            shapes = np.array(self.shapes, np.int64)
            yield f"{self.name}{SHAPES}", shapes.dtype, shapes.shape, shapes.tobytes()
        if self.words:
            words = np.concatenate([word.reshape(-1) for word in self.words]) if is_ragged else np.stack(self.words)
            yield self.name, words.dtype, words.shape, words.tobytes()
        else:
            shape = (sum(map(math.prod, self.shapes)),) if is_ragged else (len(self.shapes), *self.shapes[0])
            yield self.name, self.dtype, shape, self.path


def _pack(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], content: bytes | Path
) -> None:
    header = BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    # Version 1.0, which every numpy reads; names of fields, for which there are newer ones, do not occur.
    np.lib.format.write_array_header_1_0(header, fields)
    entry = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
    entry.create_system = 3
    entry.external_attr = 0o644 << 16
    # With the size known beforehand no Python writes a zip64 record that is not needed; they differ in its bytes.
    entry.file_size = header.tell() + measure_content(content)
    with archive.open(entry, "w") as out:
        out.write(header.getvalue())
        copy_into(content, out)


def _name_dtype(dtype: np.dtype[Any]) -> str:
    return "string" if dtype.kind == "U" else dtype.name


INPUTS, OUTPUTS, LABELS, WORDS = "inputs.npz", "outputs.npz", "labels.npy", "labels.json"
"""Labels that are classes or arrays lie in the `.npy`, texts and boxes in the `.json`."""

_FLATTENED = frozenset({"sequence", "map"})
# Several sessions' runs share the cores: a thread that spins while it waits takes one from its neighbour.
_NO_SPINNING = {"session.intra_op.allow_spinning": "0"}


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """Sample inputs and the outputs of the source model, in files of one folder, and how to read them.

    The shapes in `inputs` and `outputs` are those of one sample, batch axis included. `has_labels` tells of a label
    per sample in `labels.npy` or `labels.json`.
    """

    folder: Path
    samples: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    has_labels: bool

    @property
    def files(self) -> tuple[Path, ...]:
        """Its files."""
        names = (INPUTS, OUTPUTS, self.label_file) if self.has_labels else (INPUTS, OUTPUTS)
        return tuple(self.folder / name for name in names)

    @property
    def label_file(self) -> str:
        """The name of the file that holds the labels."""
        return WORDS if (self.folder / WORDS).is_file() else LABELS


class KnownOutputs(msgspec.Struct, kw_only=True):
    """A cache of what a model gives, by the digest of the sample; `ran` counts the samples that the model ran on."""

    room_bytes: int
    outputs: dict[bytes, Tensors] = {}
    ran: int = 0

    def run(self, session: CpuSession, sample: Tensors) -> Tensors:
        """Returns what the model of a session gives for a sample; it runs only if that is not known yet."""
        digest = digest_sample(sample)
        if (found := self.outputs.get(digest)) is None:
            found = session.run(sample)
            self.ran += 1
            size_bytes = sum(value.nbytes for value in found.values())
            # Kept are numbers, as long as there is room for them.
            if size_bytes <= self.room_bytes and all(value.dtype.kind in "biuf" for value in found.values()):
                self.room_bytes -= size_bytes
                # An array that ONNX Runtime returns keeps the memory of the whole session alive.
                self.outputs[digest] = {name: value.copy() for name, value in found.items()}
        return found


def make_golden(
    model: Model,
    samples: Samples,
    out: AnyPath,
    *,
    labels: Sequence[Label] | None = None,
    at_once: int = 1,
    ragged: bool = False,
    known: KnownOutputs | None = None,
) -> Golden:
    """Runs the model on the CPU without optimisation and writes inputs, outputs and labels into the folder `out`.

    The samples are read once, and memory holds a few of them. With `at_once` that many run at a time and share the
    cores: small nets leave most of a core idle. The shape of an output may depend on the data, with `ragged` that of an
    input too. Samples whose outputs are `known` are not run; the outputs of the others are added to it.

    Raises:
        ModelError: an output is of a type that edgekit cannot carry, so that nothing can be compared with it.
        DataError: an output changes its rank from sample to sample, or there are more or fewer labels than samples.
        RuntimeRefusal: ONNX Runtime cannot run the model.
    """
    out = as_path(out)
    for spec in model.outputs:
        if spec.dtype not in DTYPES and spec.dtype not in _FLATTENED:
            words = f"output '{spec.name}' of '{model.path}' is a {spec.dtype}, which cannot be compared"
            raise ModelError(words, hint="leave it out: edgekit prepare MODEL --outputs NAME,...")
    if labels is not None and len(labels) != samples.count:
        words = f"there are {len(labels)} labels for {samples.count} samples of '{samples.source}'"
        raise DataError(words, hint="give one a sample")
    with writing_rows(out / INPUTS, ragged=ragged) as inputs, writing_rows(out / OUTPUTS, ragged=True) as outputs:
        for sample, result in _run_all(model, samples, at_once, known):
            inputs.append(sample)
            outputs.append(result)
    if labels is not None:
        write_labels(out, labels)
    return Golden(
        folder=out, samples=inputs.count, inputs=inputs.specs, outputs=outputs.specs, has_labels=labels is not None
    )


def read_inputs(golden: Golden) -> Samples:
    """Returns the inputs of a golden set, streamed.

    Raises:
        DataError: the file is damaged, or does not hold the samples that the golden set promises.
    """
    return _read_rows(golden, INPUTS, golden.inputs)


def read_outputs(golden: Golden) -> Samples:
    """Returns the outputs that the source model gave, streamed.

    Raises:
        DataError: the file is damaged, or does not hold the samples that the golden set promises.
    """
    return _read_rows(golden, OUTPUTS, golden.outputs)


def read_labels(golden: Golden) -> Sequence[Label] | None:
    """Returns the label of each sample, None where the golden set has none.

    Raises:
        DataError: the file is damaged, or does not hold one label a sample.
    """
    if not golden.has_labels:
        return None
    path = golden.folder / golden.label_file
    labels: Sequence[Label]
    try:
        if path.name == WORDS:
            labels = msgspec.json.decode(path.read_bytes(), type=list[str | Boxes])
        else:
            values = open_npy(path)
            if values.ndim == 1 and values.dtype != np.int64:
                raise ValueError(f"it holds {values.dtype}, no int64")
            labels = tuple(values.tolist() if values.ndim == 1 else values)
    except MALFORMED as error:
        raise DataError(f"'{path}' is malformed: {error}", hint="build the bundle again") from error
    if len(labels) != golden.samples:
        raise DataError(f"'{path}' does not hold {golden.samples} labels", hint="write one label a sample")
    return labels


def read_classes(golden: Golden) -> tuple[int, ...] | None:
    """Returns the class of each sample, None where the golden set has none or has other labels.

    Raises:
        DataError: the file is damaged, or does not hold one label a sample.
    """
    labels = read_labels(golden)
    classes = tuple(label for label in labels or () if isinstance(label, int))
    return None if labels is None or len(classes) < len(labels) else classes


def _read_rows(golden: Golden, name: str, specs: Sequence[TensorSpec]) -> Samples:
    path = golden.folder / name
    samples = load_samples(str(path), specs)
    if samples.count != golden.samples:
        raise DataError(f"'{path}' holds {samples.count} samples, not {golden.samples}", hint="build the bundle again")
    return samples


def _run_all(
    model: Model, samples: Samples, at_once: int, known: KnownOutputs | None
) -> Iterator[tuple[Tensors, Tensors]]:
    """Returns each sample with its outputs, in order, as they are computed.

    With custom operators one sample runs at a time, because their library may not be thread-safe.
    """
    at_once = 1 if model.custom_ops else at_once
    settings = SessionSettings(level=Level.DISABLED, libraries=model.custom_ops)
    if at_once > 1:
        threads = max(1, (os.cpu_count() or 1) // at_once)
        settings = msgspec.structs.replace(settings, threads=threads, config=_NO_SPINNING)
    session = CpuSession(model.path, settings)

    def run(sample: Tensors) -> Tensors:
        return session.run(sample) if known is None else known.run(session, sample)

    return map_in_order(run, samples, at_once)


def write_labels(folder: Path, labels: Sequence[Label]) -> None:
    """Writes the label of each sample where `read_labels` finds it.

    Raises:
        OutputError: the folder cannot be written.
    """
    if isinstance(labels[0], str | Boxes):
        write_file(folder / WORDS, msgspec.json.encode(list(labels)) + b"\n")
        return
    values = np.stack([np.asarray(label) for label in labels])
    values = values.astype(np.int64) if values.ndim == 1 else np.ascontiguousarray(values)
    buffer = BytesIO()
    # The version is stated: numpy would choose it by the header's length.
    np.lib.format.write_array(buffer, values, version=(1, 0), allow_pickle=False)
    write_file(folder / LABELS, buffer.getvalue())


def plan_sequences(
    model: Model, given: State | None, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], work: Path
) -> Sequences:
    """Returns how samples make sequences of a float model; `inputs` and `outputs` have the shapes of the target.

    A sample of a sequence comes with the state that the float model has when it comes to it, kept in a file of the
    folder `work`. Each is then a sample like any other: it calibrates, and what a device makes of it can be judged by
    itself.

    Raises:
        UsageError: the state that is given does not fit the model.
    """
    state = resolve_state(given, inputs, outputs)
    specs = {spec.name: spec for spec in inputs}

    def unroll(samples: Samples, name: str) -> Samples:
        if state.steps == 1:
            return samples
        # As the float reference runs: what comes out at a step is, to the bit, what goes in at the next.
        session = CpuSession(model.path, SessionSettings(level=Level.DISABLED, libraries=model.custom_ops))

        def run(steps: Sequence[Tensors]) -> Sequence[Tensors]:
            return [session.run(sample) for sample in steps]

        def rows() -> Iterator[Tensors]:
            left = iter(samples)
            for _ in range(samples.count // state.steps):
                sequence = ([sample] for sample in islice(left, state.steps))
                for (step,), _ in run_steps(sequence, state.feeds, specs, run):
                    yield step

        path = work / f"{name}.steps.npz"
        write_rows(path, rows(), ragged=True)
        return msgspec.structs.replace(samples, batches=0, read=load_samples(str(path), inputs).read)

    return Sequences(state=state, unroll=unroll)
