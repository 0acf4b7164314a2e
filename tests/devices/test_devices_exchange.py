"""What comes back from a device is refused unless it is exactly what was asked for."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from edgekit.devices.process.exchange import (
    MAX_TRACE_BYTES,
    decode_run,
    encode_tensors,
    open_outputs,
    read_tensors,
    receive_trace,
)
from edgekit.errors import DeviceError
from edgekit.model.tensors import DTYPES, Array, TensorSpec

SPEC = (TensorSpec(name="y", dtype="float32", shape=(1, 2)),)
GOOD = [{"name": "y", "dtype": "float32", "shape": [1, 2], "size_bytes": 8}]


def write(path: Path, header: object, payload: bytes = bytes(8)) -> Path:
    path.write_bytes(json.dumps(header).encode() + b"\n" + payload)
    return path


@given(npst.arrays(st.sampled_from([d for d in DTYPES if d != "string"]), npst.array_shapes(min_dims=0, min_side=0)))
def test_tensors_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, value: Array) -> None:
    path = tmp_path_factory.getbasetemp() / "a.tensors"
    path.write_bytes(encode_tensors({"y": value}))
    got = read_tensors(path, [TensorSpec(name="y", dtype=value.dtype.name, shape=value.shape)])
    np.testing.assert_array_equal(got["y"], value)


@pytest.mark.parametrize(
    ("change", "payload", "reason"),
    [
        ({"name": "z"}, bytes(8), "it holds 'z', the model gives 'y'"),
        ({"dtype": "float64"}, bytes(8), "'y' is float64, the model gives float32"),
        ({"dtype": "object"}, bytes(8), "'y' is object"),
        ({"shape": [2, 1]}, bytes(8), "shape [2, 1]"),
        ({"shape": [-1, -2]}, bytes(8), "header is wrong"),
        ({"size_bytes": 16}, bytes(16), "not that of its shape"),
        ({}, bytes(7), "its size is not what its header says"),
        ({}, bytes(9), "its size is not what its header says"),
        ({"more": 1}, bytes(8), "header is wrong"),
        ({"shape": [10**400, 2]}, bytes(8), "header is wrong"),
        ({"shape": [10**9, 2]}, bytes(8), "has shape [1000000000"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, change: dict[str, object], payload: bytes, reason: str) -> None:
    path = write(tmp_path / "a.tensors", [{**GOOD[0], **change}], payload)
    with pytest.raises(DeviceError) as caught:
        read_tensors(path, SPEC)
    assert reason in caught.value.message


def test_a_header_of_other_names_or_form_or_without_an_end_is_refused(tmp_path: Path) -> None:
    for header in ([], [*GOOD, *GOOD], {"y": 1}, "y"):
        with pytest.raises(DeviceError, match="malformed"):
            read_tensors(write(tmp_path / "a.tensors", header, bytes(16)), SPEC)
    (tmp_path / "a.tensors").write_bytes(b"[" * (3 << 20))
    with pytest.raises(DeviceError, match="header has no end"):
        read_tensors(tmp_path / "a.tensors", SPEC)


@pytest.mark.parametrize("shape", [[0, 2**52, 2**52], [1] * 70])
def test_a_shape_that_numpy_cannot_hold_is_refused(tmp_path: Path, shape: list[int]) -> None:
    path = write(tmp_path / "a.tensors", [{**GOOD[0], "shape": shape, "size_bytes": 0}], b"")
    with pytest.raises(DeviceError, match="too large"):
        read_tensors(path, [TensorSpec(name="y", dtype="float32", shape=None)])


@pytest.mark.parametrize("payload", [b'["a"]', b'["a", 1]', b'["a", "b", "c"]', b"\xff\xff", b""])
def test_hostile_strings_are_refused(tmp_path: Path, payload: bytes) -> None:
    entry = {"name": "y", "dtype": "string", "shape": [2], "size_bytes": len(payload)}
    path = write(tmp_path / "00000.tensors", [entry], payload)
    specs = [TensorSpec(name="y", dtype="string", shape=(2,))]
    with pytest.raises(DeviceError, match="malformed"):
        read_tensors(path, specs)
    assert "malformed" in open_outputs(tmp_path, specs, "a device")[1]


def test_a_trace_that_is_too_large_is_not_received(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="larger than"):
        receive_trace(io.BytesIO(b"x"), tmp_path / "trace.json", MAX_TRACE_BYTES + 1)
    with pytest.raises(DeviceError, match="ends early"):
        receive_trace(io.BytesIO(b"x"), tmp_path / "trace.json", 2)


def test_outputs_end_at_the_first_that_is_wrong(tmp_path: Path) -> None:
    write(tmp_path / "00000.tensors", GOOD)
    write(tmp_path / "00001.tensors", GOOD, bytes(4))
    write(tmp_path / "00002.tensors", GOOD)
    outputs, wrong = open_outputs(tmp_path, SPEC, "a device")
    assert [list(sample) for sample in outputs] == [["y"]]
    assert "'00001.tensors'" in wrong


def test_a_link_and_a_pipe_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", GOOD)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/00000.tensors").symlink_to(tmp_path / "elsewhere")
    assert open_outputs(tmp_path / "out", SPEC, "a device")[1]
    (tmp_path / "out/00000.tensors").unlink()
    os.mkfifo(tmp_path / "out/00000.tensors")
    assert "no plain file" in open_outputs(tmp_path / "out", SPEC, "a device")[1]
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert "is a link" in open_outputs(tmp_path / "link", SPEC, "a device")[1]


@pytest.mark.parametrize("text", ["", "[", "NaN", '{"status": "done"}', "[" * 100_000, "{" * (1 << 26) + "{"])
def test_a_run_that_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="malformed"):
        decode_run(text.encode())
