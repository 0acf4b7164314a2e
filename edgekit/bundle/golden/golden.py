"""Golden vectors: inputs, and what the user's own float model makes of them."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit._files import write_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.golden.rows import writing_rows
from edgekit.data.data_check import digest_sample
from edgekit.data.labels import Boxes, Label
from edgekit.data.samples import Samples, load_samples
from edgekit.errors import DataError, ModelError
from edgekit.model.model import Model
from edgekit.model.tensors import DTYPES, HEADERS, Tensors, TensorSpec

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
        """The files that make it up."""
        names = (INPUTS, OUTPUTS, self.label_file) if self.has_labels else (INPUTS, OUTPUTS)
        return tuple(self.folder / name for name in names)

    @property
    def label_file(self) -> str:
        """The name of the file that holds the labels."""
        return WORDS if (self.folder / WORDS).is_file() else LABELS


class KnownOutputs(msgspec.Struct, kw_only=True):
    """What a model gives, by the digest of the sample, as far as there is room; `ran` counts the samples that ran."""

    room_bytes: int
    outputs: dict[bytes, Tensors] = {}
    ran: int = 0

    def run(self, session: CpuSession, sample: Tensors) -> Tensors:
        """Returns what the model of a session gives for a sample, which runs if that is not known."""
        digest = digest_sample(sample)
        found = self.outputs.get(digest)
        if found is None:
            found = session.run(sample)
            self._add(digest, found)
        return found

    def _add(self, digest: bytes, outputs: Tensors) -> None:
        """Takes the outputs of a sample that ran, if they are numbers and there is room for them."""
        self.ran += 1
        size_bytes = sum(value.nbytes for value in outputs.values())
        if size_bytes <= self.room_bytes and all(value.dtype.kind in "biuf" for value in outputs.values()):
            self.room_bytes -= size_bytes
            # What ONNX Runtime returns keeps the memory of its whole session.
            self.outputs[digest] = {name: value.copy() for name, value in outputs.items()}


def make_golden(
    model: Model,
    samples: Samples,
    out: Path,
    *,
    labels: Sequence[Label] | None = None,
    at_once: int = 1,
    ragged: bool = False,
    known: KnownOutputs | None = None,
) -> Golden:
    """Runs the model on the CPU without optimisation and writes inputs, outputs and labels into the folder `out`.

    The samples are read once, and memory holds a few of them. With `at_once` that many run at a time and share the
    cores: small nets leave most of a core idle. The shape of an output may depend on the data, with `ragged` that of an
    input too. Samples whose outputs are `known` are not run, and what the others give is put there.

    Raises:
        ModelError: an output is of a type that edgekit cannot carry, so that nothing can be compared with it.
        DataError: an output changes its rank from sample to sample, or there are more or fewer labels than samples.
        RuntimeRefusal: ONNX Runtime cannot run the model.
    """
    for spec in model.outputs:
        if spec.dtype not in DTYPES and spec.dtype not in _FLATTENED:
            raise ModelError(
                f"output '{spec.name}' of '{model.path}' is a {spec.dtype}, which cannot be compared",
                hint="leave it out: edgekit prepare MODEL --outputs NAME,...",
            )
    if labels is not None and len(labels) != samples.count:
        raise DataError(
            f"there are {len(labels)} labels for {samples.count} samples of '{samples.source}'",
            hint="give one a sample",
        )
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
            labels = _read_array(path)
    except (OSError, ValueError, EOFError, msgspec.DecodeError) as error:
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
    if labels is None or not all(isinstance(label, int) for label in labels):
        return None
    return tuple(label for label in labels if isinstance(label, int))


def _read_rows(golden: Golden, name: str, specs: Sequence[TensorSpec]) -> Samples:
    path = golden.folder / name
    samples = load_samples(str(path), specs)
    if samples.count != golden.samples:
        raise DataError(f"'{path}' holds {samples.count} samples, not {golden.samples}", hint="build the bundle again")
    return samples


def _run_all(
    model: Model, samples: Samples, at_once: int, known: KnownOutputs | None
) -> Iterator[tuple[Tensors, Tensors]]:
    """Yields each sample with what the model makes of it, in order; libraries of operators may bear one at a time."""
    at_once = 1 if model.custom_ops else at_once
    settings = SessionSettings(level=Level.DISABLED, libraries=model.custom_ops)
    if at_once > 1:
        threads = max(1, (os.cpu_count() or 1) // at_once)
        settings = msgspec.structs.replace(settings, threads=threads, config=_NO_SPINNING)
    session = CpuSession(model.path, settings)

    def run(sample: Tensors) -> Tensors:
        return session.run(sample) if known is None else known.run(session, sample)

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        running = deque[tuple[Tensors, Future[Tensors]]]()
        for sample in samples:
            running.append((sample, pool.submit(run, sample)))
            # One more than run is held: the next is ready as soon as a thread is free, and memory stays flat.
            if len(running) > at_once:
                first, result = running.popleft()
                yield first, result.result()
        yield from ((first, result.result()) for first, result in running)


def _read_array(path: Path) -> Sequence[Label]:
    with HEADERS, path.open("rb") as file:
        values: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    if values.ndim == 1 and values.dtype != np.int64:
        raise ValueError(f"it holds {values.dtype}, no int64")
    return tuple(int(value) for value in values) if values.ndim == 1 else tuple(values)


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
