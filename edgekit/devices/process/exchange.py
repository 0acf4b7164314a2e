"""The messages between edgekit and a program that runs a model: a job and samples, then tensors and a report.

The program reads one line of JSON with the job, and then one message for each sample. It writes one message for each
sample and, last, one line of JSON with its report. When the session is made, it may write an earlier report with the
status "running", so that something is known if it dies later. If the job asked for a trace, the profiler's file of
`trace_bytes` bytes follows the last line. A message, like a `.tensors` file, is one line of JSON, a list of {name,
dtype, shape, size_bytes}, followed by the payloads, little-endian and in C order; the payload of strings is a JSON
array. Nothing that comes back is trusted before it has been checked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec
import numpy as np

from edgekit._files import read_chunks, write_new
from edgekit.data.samples import Samples
from edgekit.devices.device import Count, Measured, PlacedNode, RunOptions
from edgekit.errors import DeviceError, reraised
from edgekit.model.tensors import DTYPES, Array, Tensors, TensorSpec, is_text, shape_matches
from edgekit.serialize import UNDECODABLE, ready_type
from edgekit.target import ChainedProvider

# Limits for what comes back, checked before it is parsed or stored; numpy allowed at most 32 axes until 2.0.
MAX_HEADER_BYTES = 1 << 20
MAX_SAMPLE_BYTES = 1 << 32
MAX_RANK = 32
MAX_RESULT_BYTES = 1 << 26
# The profiler writes about a kilobyte per node and run.
MAX_TRACE_BYTES = 1 << 28
TRACE = "trace.json"


class RunnerJob(RunOptions, frozen=True, kw_only=True):
    """The job for the program that runs a model on the device; paths are as that program sees them.

    `chain` lists further providers, which are offered the nodes that `provider` leaves, before the CPU is. `library` is
    the library of a plug-in provider, "" for a built-in one. The session uses the plug-in's first device of the kind
    `hardware` (cpu, gpu or npu, "" for any); while the plug-in enumerates devices, every CPU is presented as one of
    `cpu_vendor` (a PCI number, 0 for the true one). With `preload`, CUDA libraries from wheels are loaded first.
    `profile` asks for the placement from the profile of the first sample, for files in ORT format. `runtime` is the
    path of ONNX Runtime's library, "" if the program knows it. `custom_ops` are libraries of custom operators.
    """

    model: str
    provider: str
    library: str = ""
    hardware: str = ""
    cpu_vendor: int = 0
    preload: bool = False
    provider_options: Mapping[str, str] = {}
    chain: tuple[ChainedProvider, ...] = ()
    session_config: Mapping[str, str] = {}
    samples: int
    profile: bool = False
    runtime: str = ""
    custom_ops: tuple[str, ...] = ()


class RunnerResult(Measured, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The report of the program that runs a model on the device.

    `status` stays "running" if the program died, and is "stopped" if the time was over before the last sample.
    `placed_whole` names a provider that took every node, if the program knows nothing else about the placement.
    `trace_bytes` is the size of the profiler's file that follows the report.
    """

    status: Literal["running", "done", "stopped", "refused"]
    message: str
    versions: dict[str, str]
    placement: tuple[PlacedNode, ...]
    placement_source: Literal["session", "profile", "log"]
    placed_whole: str = ""
    trace_bytes: Count = 0


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[Count, ...]
    size_bytes: Count


_RESULT, _HEADER = msgspec.json.Decoder(ready_type(RunnerResult)), msgspec.json.Decoder(ready_type(list[_Entry]))


def decode_run(data: bytes) -> RunnerResult:
    """Returns a program's report of its run.

    Raises:
        DeviceError: it is no valid report.
    """
    if len(data) > MAX_RESULT_BYTES:
        raise _malformed(Path("run.json"), f"it is larger than {MAX_RESULT_BYTES} bytes")
    try:
        return _RESULT.decode(data)
    except UNDECODABLE as error:
        raise _malformed(Path("run.json"), str(error)) from error


def open_outputs(folder: Path, count: int, outputs: Sequence[TensorSpec], source: str) -> Samples:
    """Returns the samples that were received into the files of a folder."""
    files = [folder / tensors_name(index) for index in range(count)]
    return Samples(source=source, count=count, read=lambda: (read_tensors(file, outputs) for file in files))


def tensors_name(index: int) -> str:
    """Returns the file name of a sample."""
    return f"{index:05d}.tensors"


def encode_tensors(tensors: Tensors) -> bytes:
    """Returns the tensors of one sample as a message."""
    entries: list[_Entry] = []
    payloads: list[bytes] = []
    for name, value in tensors.items():
        dtype = "string" if is_text(value) else value.dtype.name
        if dtype == "string":
            payload = msgspec.json.encode([str(item) for item in value.flat])
        else:
            payload = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False)).tobytes()
        entries.append(_Entry(name=name, dtype=dtype, shape=value.shape, size_bytes=len(payload)))
        payloads.append(payload)
    return b"".join((msgspec.json.encode(entries), b"\n", *payloads))


def receive_tensors(stream: IO[bytes], path: Path, specs: Sequence[TensorSpec]) -> None:
    """Copies one message from a pipe into the new file `path`; reads no more than `specs` allow.

    Raises:
        DeviceError: it is no message, it does not hold exactly these tensors, or it ends early.
        OutputError: the folder cannot be written, or there is such a file.
    """
    line = stream.readline(MAX_HEADER_BYTES + 1)
    entries = _decode_header(line, path, specs)
    write_new(path, _read_message(stream, line, sum(entry.size_bytes for entry in entries), path))
    # Any bytes are numbers, but not any bytes are strings.
    if any(entry.dtype == "string" for entry in entries):
        read_tensors(path, specs)


def receive_trace(stream: IO[bytes], path: Path, size_bytes: int) -> None:
    """Copies the profiler's file from a pipe into the new file `path`, without a look at its content.

    Raises:
        DeviceError: it is too large, or it ends early.
        OutputError: the folder cannot be written.
    """
    if size_bytes > MAX_TRACE_BYTES:
        raise _malformed(path, f"it is larger than {MAX_TRACE_BYTES} bytes")
    write_new(path, _read_message(stream, b"", size_bytes, path))


def _read_message(stream: IO[bytes], line: bytes, remaining: int, path: Path) -> Iterator[bytes]:
    yield line
    for chunk in read_chunks(stream, remaining):
        yield chunk
        remaining -= len(chunk)
    if remaining:
        raise _malformed(path, "it ends early")


def read_tensors(path: Path, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Returns the tensors of one sample by name.

    Raises:
        DeviceError: it is not a file of tensors, or it does not hold exactly the tensors of `specs`.
    """
    tensors: dict[str, Array] = {}
    with path.open("rb") as stream:
        for entry in _decode_header(stream.readline(MAX_HEADER_BYTES + 1), path, specs):
            data = stream.read(entry.size_bytes)
            if entry.dtype != "string":
                dtype = np.dtype(DTYPES[entry.dtype])
                value = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False)
            else:
                wrong = _malformed(path, f"the strings of '{entry.name}' are wrong")
                with reraised(UNDECODABLE, wrong, quote=True):
                    value = np.array(msgspec.json.decode(data, type=ready_type(list[str])), dtype=object)
                if value.size != math.prod(entry.shape):
                    raise _malformed(path, f"the size of '{entry.name}' is not that of its shape")
            tensors[entry.name] = value.reshape(entry.shape)
    return tensors


def _decode_header(line: bytes, path: Path, specs: Sequence[TensorSpec]) -> list[_Entry]:
    # Without a newline, the header is longer than allowed, or cut off.
    if not line.endswith(b"\n"):
        raise _malformed(path, "its header has no end")
    with reraised(UNDECODABLE, _malformed(path, "its header is wrong"), quote=True):
        entries = _HEADER.decode(line)
    names = [entry.name for entry in entries]
    expected = [spec.name for spec in specs]
    # Sorted lists, not sets, so that a duplicate name is noticed.
    if sorted(names) != sorted(expected):
        raise _malformed(path, f"it holds {_quoted(names)}, the model gives {_quoted(expected)}")
    by_name = {spec.name: spec for spec in specs}
    for entry in entries:
        spec, size = by_name[entry.name], math.prod(entry.shape)
        if entry.dtype != spec.dtype or entry.dtype not in DTYPES:
            raise _malformed(path, f"'{entry.name}' is {entry.dtype[:40]}, the model gives {spec.dtype}")
        if not shape_matches(entry.shape, spec):
            raise _malformed(path, f"'{entry.name}' has shape {list(entry.shape)[:16]}, the model gives [{spec}]")
        # A dimension of 0 counts as 1, so that shapes like [0, 2^40], which have no bytes, are refused too.
        if len(entry.shape) > MAX_RANK or math.prod(dim or 1 for dim in entry.shape) > MAX_SAMPLE_BYTES:
            raise _malformed(path, f"the shape of '{entry.name}' is too large")
        if entry.dtype != "string" and entry.size_bytes != np.dtype(DTYPES[entry.dtype]).itemsize * size:
            raise _malformed(path, f"the size of '{entry.name}' is not that of its shape")
    if sum(entry.size_bytes for entry in entries) > MAX_SAMPLE_BYTES:
        raise _malformed(path, f"it is larger than {MAX_SAMPLE_BYTES} bytes")
    return entries


def _malformed(path: Path, reason: str) -> DeviceError:
    return DeviceError(f"'{path.name}' from the device is malformed: {reason[:400]}", hint="do not trust this device")


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name[:80]}'" for name in sorted(names)[:10]) or "nothing"
