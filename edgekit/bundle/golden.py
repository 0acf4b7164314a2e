"""Golden samples: inputs, and the outputs of the user's float model for them.

They are stored in `.npz` files; the same content gives the same bytes. The samples of a model with state are steps of
sequences: each contains the state of the float model at its step.
"""

import contextlib
import math
import os
import zipfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekit._files import AnyPath, as_path, replacing_file, work_folder, write_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.archive import write_entry
from edgekit.data.data_check import digest_sample
from edgekit.data.npz import MALFORMED, SHAPES, open_npy
from edgekit.data.samples import Samples, load_samples
from edgekit.data.sets import Boxes, Label, Sequences
from edgekit.errors import DataError, ModelError, reraised
from edgekit.machine import map_in_order
from edgekit.model.external import skim_model
from edgekit.model.model import Model, iterate_nodes
from edgekit.model.state import State, resolve_state, run_steps
from edgekit.model.tensors import DTYPES, Array, Tensors, TensorSpec, is_text
from edgekit.serialize import ready_type


def write_rows(path: Path, samples: Iterable[Tensors], *, ragged: bool = False) -> tuple[tuple[TensorSpec, ...], int]:
    """Writes one array per tensor, with sample i in row i, and returns their specs and the number of samples.

    With `ragged` the shape of a tensor `y`, but not its rank, may differ between samples: `y` then holds the values of
    all samples one after another, `y.shapes` the shape of each, and the dimensions that differ are None in its spec.

    Arrays are stored without compression, because deflated bytes depend on the version of zlib; entries are sorted by
    name and have no time. Strings are kept in memory until the end, numbers are not. `edgekit.data.npz` reads the file.

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
    """Yields rows to append samples to; after the block they are written as by `write_rows`.

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
        """Adds the next sample.

        Raises:
            DataError: a tensor has another shape or dtype than before, is new or is missing.
        """
        if self.count and sample.keys() != self._columns.keys():
            before = ", ".join(self._columns)
            words = f"sample {self.count} for '{self._name}' holds {', '.join(sample)}; sample 0 {before}"
            hint = "a sequence of changing length cannot be kept: cut the model before it (prepare --outputs)"
            raise DataError(words, hint=hint)
        for place, (name, value) in enumerate(sample.items()):
            if name not in self._columns:
                dtype = np.dtype(np.str_) if is_text(value) else value.dtype
                self._columns[name] = _Column(name=name, dtype=dtype, path=self._work / str(place))
            self._columns[name].append(value, ragged=self._ragged)
        self.count += 1

    def pack(self, path: Path) -> None:
        """Writes the archive of all samples.

        Raises:
            DataError: there is no sample, or two tensors need the same name.
        """
        if not self.count:
            raise DataError(f"there is no sample for '{self._name}'", hint="give at least one, better 100")
        arrays = [array for column in self._columns.values() for array in column.list_arrays()]
        if len({name for name, *_ in arrays}) < len(arrays):
            raise DataError(f"'{self._name}' has two tensors of one name with '{SHAPES}'", hint="rename an output")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, dtype, shape, data in sorted(arrays, key=itemgetter(0)):
                header = BytesIO()
                fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                # Version 1.0 of the header, which every numpy reads.
                np.lib.format.write_array_header_1_0(header, fields)
                write_entry(archive, f"{name}.npy", [header.getvalue(), data], 0o644)


class _Column(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one tensor and their shapes: numbers in a raw file until their count is known, strings in memory."""

    name: str
    dtype: np.dtype[Any]
    path: Path
    shapes: list[tuple[int, ...]] = []
    words: list[Array] = []

    @property
    def spec(self) -> TensorSpec:
        """Name, type and shape; dimensions that differ between rows are None."""
        dims = (next(iter(sizes)) if len(sizes) == 1 else None for sizes in map(set, zip(*self.shapes, strict=True)))
        return TensorSpec(name=self.name, dtype=_name_dtype(self.dtype), shape=tuple(dims))

    def append(self, value: Array, *, ragged: bool) -> None:
        has_texts = is_text(value)
        first = self.shapes[0] if self.shapes else value.shape
        fits = len(value.shape) == len(first) if ragged else value.shape == first
        if not fits or not (self.dtype.kind == "U" if has_texts else value.dtype == self.dtype):
            spec = TensorSpec(name=self.name, dtype=_name_dtype(self.dtype), shape=first)
            index, what = len(self.shapes), "rank or type" if ragged else "shape or type"
            words = f"'{self.name}' is {value.dtype}{list(value.shape)} in sample {index}, in sample 0 [{spec}]"
            hint = f"a tensor of changing {what} cannot be kept: cut the model before it (prepare --outputs)"
            raise DataError(words, hint=hint)
        self.shapes.append(value.shape)
        if not has_texts:
            with self.path.open("ab") as file:
                file.write(np.ascontiguousarray(value).tobytes())
            return
        self.words.append(value.astype(np.str_))
        # numpy's strings lose null characters at the end, so such text could not be read back.
        if not np.array_equal(self.words[-1].astype(object), value.astype(object)):
            raise DataError(f"'{self.name}' holds strings that end in a null character", hint="leave this output out")

    def list_arrays(self) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...], bytes | Path]]:
        """Yields the arrays that hold its rows: name, type, shape and bytes."""
        # Tensors of one shape stay normal arrays, which numpy reads.
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


def _name_dtype(dtype: np.dtype[Any]) -> str:
    return "string" if dtype.kind == "U" else dtype.name


INPUTS, OUTPUTS, LABELS, WORDS = "inputs.npz", "outputs.npz", "labels.npy", "labels.json"
"""The golden files. Labels that are classes or arrays are in the `.npy`, texts and boxes in the `.json`."""

_FLATTENED = frozenset({"sequence", "map"})


class Golden(msgspec.Struct, frozen=True, kw_only=True):
    """Sample inputs and the outputs of the source model, in files of one folder, and how to read them.

    The shapes in `inputs` and `outputs` are those of one sample, batch axis included. With `has_labels` there is a
    label for each sample in `labels.npy` or `labels.json`.
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
    """A cache of a model's outputs by the digest of the sample, with `room_bytes` left; `ran` counts the runs."""

    room_bytes: int = 32 << 20
    outputs: dict[bytes, Tensors] = {}
    ran: int = 0

    def run(self, session: CpuSession, sample: Tensors) -> Tensors:
        """Returns the outputs for a sample; the session runs only if they are not known yet."""
        digest = digest_sample(sample)
        if (found := self.outputs.get(digest)) is None:
            found = session.run(sample)
            self.ran += 1
            size_bytes = sum(value.nbytes for value in found.values())
            # Only numbers are kept, while there is room.
            if size_bytes <= self.room_bytes and all(value.dtype.kind in "biuf" for value in found.values()):
                self.room_bytes -= size_bytes
                # The arrays that ONNX Runtime returns keep the memory of the session alive.
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

    The samples are streamed once. `at_once` samples run at a time and share the cores, because small networks leave
    cores idle. The shape of an output may depend on the data, with `ragged` that of an input too. Samples whose outputs
    are `known` are not run; the outputs of the others are added to it.

    Raises:
        ModelError: an output is of a type that edgekit cannot store and compare.
        DataError: an output changes its rank from sample to sample, or there are more or fewer labels than samples.
        RuntimeRefusal: ONNX Runtime cannot run the model.
    """
    out = as_path(out)
    for spec in model.outputs:
        if spec.dtype not in DTYPES and spec.dtype not in _FLATTENED:
            words = f"output '{spec.name}' of '{model.path}' is of type {spec.dtype}, which cannot be compared"
            raise ModelError(words, hint="leave it out: edgekit prepare MODEL --outputs NAME,...")
    if labels is not None and len(labels) != samples.count:
        words = f"there are {len(labels)} labels for {samples.count} samples of '{samples.source}'"
        raise DataError(words, hint="give one a sample")
    # One at a time with custom operators, because their library may not be thread-safe.
    at_once, settings = 1 if model.custom_ops else at_once, _choose_settings(model)
    if at_once > 1:
        threads = max(1, (os.cpu_count() or 1) // at_once)
        settings = msgspec.structs.replace(settings, threads=threads)
    session = CpuSession(model.path, settings)
    run = session.run if known is None else partial(known.run, session)
    with writing_rows(out / INPUTS, ragged=ragged) as inputs, writing_rows(out / OUTPUTS, ragged=True) as outputs:
        for sample, result in map_in_order(run, samples, at_once):
            inputs.append(sample)
            outputs.append(result)
    if labels is not None:
        write_labels(out, labels)
    count, labelled = inputs.count, labels is not None
    return Golden(folder=out, samples=count, inputs=inputs.specs, outputs=outputs.specs, has_labels=labelled)


def read_inputs(golden: Golden) -> Samples:
    """Returns the inputs of a golden set, streamed.

    Raises:
        DataError: the file is damaged, or does not hold `golden.samples` samples.
    """
    return _read_rows(golden, INPUTS, golden.inputs)


def read_outputs(golden: Golden) -> Samples:
    """Returns the outputs of the source model, streamed.

    Raises:
        DataError: the file is damaged, or does not hold `golden.samples` samples.
    """
    return _read_rows(golden, OUTPUTS, golden.outputs)


def read_labels(golden: Golden) -> Sequence[Label] | None:
    """Returns the label of each sample, None if the golden set has none.

    Raises:
        DataError: the file is damaged, or does not hold one label per sample.
    """
    if not golden.has_labels:
        return None
    path = golden.folder / golden.label_file
    labels: Sequence[Label]
    with reraised(MALFORMED, DataError(f"'{path}' is malformed", hint="build the bundle again"), quote=True):
        if path.name == WORDS:
            labels = msgspec.json.decode(path.read_bytes(), type=ready_type(list[str | Boxes]))
        else:
            values = open_npy(path)
            if values.ndim == 1 and values.dtype != np.int64:
                raise ValueError(f"it holds {values.dtype}, no int64")
            labels = tuple(values.tolist() if values.ndim == 1 else values)
    if len(labels) != golden.samples:
        raise DataError(f"'{path}' does not hold {golden.samples} labels", hint="write one label a sample")
    return labels


def read_classes(golden: Golden) -> tuple[int, ...] | None:
    """Returns the class of each sample, None if the golden set has no labels, or others.

    Raises:
        DataError: the file is damaged, or does not hold one label per sample.
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


def _choose_settings(model: Model) -> SessionSettings:
    """Returns the session settings of the float reference: no optimization, unless a Dropout may run in training mode.

    The results of such a Dropout are random. ONNX Runtime's basic optimizations, which every app has, remove it.
    """
    nodes = iterate_nodes(skim_model(model.path).graph)
    trains = any(node.op_type == "Dropout" and len(node.input) == 3 for node in nodes)
    return SessionSettings(level=Level.BASIC if trains else Level.DISABLED, libraries=model.custom_ops)


def write_labels(folder: Path, labels: Sequence[Label]) -> None:
    """Writes the labels of all samples into `folder`, for `read_labels`.

    Raises:
        OutputError: the folder cannot be written.
    """
    if isinstance(labels[0], str | Boxes):
        write_file(folder / WORDS, msgspec.json.encode(list(labels)) + b"\n")
        return
    values = np.stack([np.asarray(label) for label in labels])
    values = values.astype(np.int64) if values.ndim == 1 else np.ascontiguousarray(values)
    buffer = BytesIO()
    # By default numpy would choose the version by the header's length.
    np.lib.format.write_array(buffer, values, version=(1, 0), allow_pickle=False)
    write_file(folder / LABELS, buffer.getvalue())


def plan_sequences(
    model: Model, given: State | None, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], work: Path
) -> Sequences:
    """Returns the state of a float model, and the function that adds it to each sample of a sequence.

    `inputs` and `outputs` have the shapes of the target. That function runs the float model over the sequences and
    writes the samples, each with the state at its step, into a file of the folder `work`. Each is then a sample like
    any other, for calibration and for comparison with a device.

    Raises:
        UsageError: the `given` state does not fit the model.
    """
    state = resolve_state(given, inputs, outputs)
    specs = {spec.name: spec for spec in inputs}

    def unroll(samples: Samples, name: str) -> Samples:
        if state.steps == 1:
            return samples
        # Without optimization, like the float reference: the state is bit-equal to its output of the step before.
        session = CpuSession(model.path, _choose_settings(model))

        def run(steps: Sequence[Tensors]) -> Sequence[Tensors]:
            return [session.run(sample) for sample in steps]

        def rows() -> Iterator[Tensors]:
            remaining = iter(samples)
            for _ in range(samples.count // state.steps):
                sequence = ([sample] for sample in islice(remaining, state.steps))
                for (step,), _ in run_steps(sequence, state.feeds, specs, run):
                    yield step

        path = work / f"{name}.steps.npz"
        write_rows(path, rows(), ragged=True)
        return msgspec.structs.replace(samples, batches=0, read=load_samples(str(path), inputs).read)

    return Sequences(state=state, unroll=unroll)
