"""What comes from a model, a bundle or a device is data: no name, number or file of it becomes a command or a path."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import OUTPUTS, REPORT, Stub, float_conv, make_job, require_device, run_fake_program
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from onnx import helper

from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.process.exchange import (
    RunnerResult,
    decode_run,
    encode_tensors,
    read_tensors,
    receive_tensors,
    tensors_name,
)
from edgekit.devices.process.run import judge_run, printable
from edgekit.errors import DeviceError, EdgekitError, OutputError
from edgekit.model.model import load_model
from edgekit.model.tensors import DTYPES, Array, Tensors, TensorSpec

NAMES = (
    "; touch pwned", "$(touch pwned)", "`touch pwned`", "| touch pwned", "&& touch pwned", "../../pwned", "/tmp/pwned",
    "a\nb", "a\tb", "-rf", "--help", "a b", "'", '"', "\\", "%s%n", "é☃", "\u202eabc", "\x1b[2J", "CON", ".", "..",
    "x" * 5000,
)  # fmt: skip
TARGETS = {"host": "nnapi", "emulated": "coreml", "android:x86_64": "xnnpack", "arm64:native": "nnapi"}

ROW: list[Tensors] = [{"x": np.zeros((1, 4, 8, 8), np.float32)}]
DONE = {**REPORT, "latency_ms": [1]}


def hostile_job(path: Path, target: str) -> Job:
    """The job of a model with an Identity for each hostile name, whose node, input and output bear it."""
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in NAMES]
    outputs = [helper.make_tensor_value_info(f"out {name}", onnx.TensorProto.FLOAT, [1]) for name in NAMES]
    nodes = [helper.make_node("Identity", [name], [f"out {name}"], name) for name in NAMES]
    graph = helper.make_graph(nodes, "; touch pwned", inputs, outputs)
    onnx.save(helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)]), str(path))
    sample: Tensors = {name: np.array([index], np.float32) for index, name in enumerate(NAMES)}
    return make_job(path, target, [sample], precision="fp32")


@pytest.mark.parametrize("device", TARGETS)
def test_hostile_names_are_not_run(device: str, tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = require_device(device, TARGETS[device])
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    model = tmp_path / "; touch pwned; $(touch pwned) 'x' .onnx"
    run = found.run_job(hostile_job(model, TARGETS[device]), work)
    assert run.failure is None
    (got,) = run.outputs
    assert {name: float(got[f"out {name}"][0]) for name in NAMES} == {name: i for i, name in enumerate(NAMES)}
    assert not list(tmp_path.rglob("pwned*"))
    assert list((tmp_path / "cwd").iterdir()) == []


def test_a_name_that_is_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    data = float_conv(tmp_path / "f.onnx").read_bytes()
    (tmp_path / "b.onnx").write_bytes(data.replace(b"conv", b"\xff\xfe\xc0\x80"))
    with pytest.raises(EdgekitError) as caught:
        load_model(tmp_path / "b.onnx")
    assert "\n" not in str(caught.value)


def judge_report(work: Path, report: object) -> DeviceRun:
    """What edgekit makes of a report behind one sample of outputs that are right."""
    text = report if isinstance(report, str) else json.dumps(report)
    folder = work / str(len(list(work.iterdir())))
    folder.mkdir()
    job = make_job(float_conv(folder / "f.onnx"), "nnapi", ROW)
    return run_fake_program(folder, OUTPUTS + text.encode() + b"\n", job=job)


@pytest.mark.parametrize(
    "change",
    [
        '"latency_ms":[NaN]', '"latency_ms":[Infinity]', '"latency_ms":[1e400]', '"latency_ms":[1e300]',
        '"latency_ms":[-1]', '"latency_ms":[null]', '"latency_ms":["1"]',
        '"latency_ms":[1e9]', '"load_ms":NaN', '"load_ms":-1', '"load_ms":1e99',
        '"peak_rss_bytes":-1', '"peak_rss_bytes":1.5', '"peak_rss_bytes":1e400',
        '"peak_rss_bytes":99999999999999999999999', '"status":"passed"', '"status":["done"]', '"versions":{"a":{}}',
        '"placement":[{"name":"a","op":"b","domain":"","provider":"p","extra":1}]', '"placement":[{"name":"n"}]',
        '"placement_source":"me"', '"placement_source":"predicted"', '"versions":{"a":1}',
        '"failure":null', '"__class__":"os.system"', '"before":{"temperatures_c":{"a":NaN}}',
        '"versions":' + '{"a":' * 5000 + "1" + "}" * 5000,
    ],
)  # fmt: skip
def test_a_hostile_run_is_refused_in_one_printable_line(change: str) -> None:
    key = change.split(":", maxsplit=1)[0].strip('"')
    rest = json.dumps({name: value for name, value in DONE.items() if name != key})
    with pytest.raises(DeviceError, match=r"'run\.json' from the device is malformed") as caught:
        decode_run((rest[:-1] + ", " + change + "}").encode())
    assert caught.value.message.isprintable()


def test_what_a_device_calls_itself_cannot_steer_a_terminal(work: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nedgekit: pass\r\u202e"
    node = {"name": evil, "op": evil, "domain": evil, "provider": evil}
    run = judge_report(work, {**DONE, "versions": {evil: evil * 1000}, "placement": [node]})
    assert run.failure is None
    (placed,) = run.placement
    shown = [placed.name, placed.op, placed.domain, placed.provider, *run.versions, *run.versions.values()]
    assert all(text.isprintable() and len(text) <= 8192 for text in shown)
    assert printable("plain") == "plain"


def test_a_placement_of_a_file_without_nodes_is_ignored(tmp_path: Path, work: Path) -> None:
    whole = {**DONE, "placed_whole": "\x1b[2JQNN"}
    assert {node.provider for node in judge_report(work, whole).placement} == {"?[2JQNN"}
    (tmp_path / "f.ort").write_bytes(b"\0\0\0\0ORTM" + bytes(64))
    job = msgspec.structs.replace(make_job(float_conv(work / "f.onnx"), "nnapi", ROW), model=tmp_path / "f.ort")
    report = msgspec.json.decode(json.dumps(whole), type=RunnerResult)
    outputs = Samples(source="liar", count=0, read=lambda: iter(()))
    assert judge_run(Stub(), job, report, outputs, None).placement == ()


def test_a_report_that_says_too_much_is_bounded(work: Path) -> None:
    run = judge_report(work, {**DONE, "latency_ms": [1] * 10})
    assert "1 of 1 samples came back, with 10 times" in str(run.failure)
    run = judge_report(work, {**DONE, "versions": {str(index): "1" for index in range(100_000)}})
    assert len(run.versions) <= 32
    assert "larger than" in str(judge_report(work, "{" * (1 << 26) + "{").failure)


SPEC = (TensorSpec(name="y", dtype="float32", shape=(1, 2)),)
GOOD = [{"name": "y", "dtype": "float32", "shape": [1, 2], "size_bytes": 8}]


def receive(folder: Path, header: object, payload: bytes = bytes(8), specs: Sequence[TensorSpec] = SPEC) -> Path:
    """Receives a message with this header and payload, and returns the file that it is stored in."""
    path = folder / tensors_name(len(list(folder.glob("*.tensors"))))
    receive_tensors(io.BytesIO(json.dumps(header).encode() + b"\n" + payload), path, specs)
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
        ({}, bytes(7), "it ends early"),
        ({"more": 1}, bytes(8), "header is wrong"),
        ({"shape": [10**400, 2]}, bytes(8), "header is wrong"),
        ({"shape": [10**9, 2]}, bytes(8), "has shape [1000000000"),
    ],
)
def test_a_hostile_message_is_refused(tmp_path: Path, change: dict[str, object], payload: bytes, reason: str) -> None:
    with pytest.raises(DeviceError) as caught:
        receive(tmp_path, [{**GOOD[0], **change}], payload)
    assert reason in caught.value.message
    assert not list(tmp_path.iterdir())


def test_a_header_with_other_names_or_no_end_is_refused(tmp_path: Path) -> None:
    for header in ([], [*GOOD, *GOOD], {"y": 1}, "y"):
        with pytest.raises(DeviceError, match="malformed"):
            receive(tmp_path, header, bytes(16))
    with pytest.raises(DeviceError, match="header has no end"):
        receive_tensors(io.BytesIO(b"[" * (3 << 20)), tmp_path / "a.tensors", SPEC)


@pytest.mark.parametrize("shape", [[0, 2**52, 2**52], [1] * 70])
def test_a_shape_that_numpy_cannot_hold_is_refused(tmp_path: Path, shape: list[int]) -> None:
    anything = [TensorSpec(name="y", dtype="float32", shape=None)]
    with pytest.raises(DeviceError, match="too large"):
        receive(tmp_path, [{**GOOD[0], "shape": shape, "size_bytes": 0}], b"", anything)
    words = [TensorSpec(name="y", dtype="string", shape=None)]
    with pytest.raises(DeviceError, match="larger than"):
        receive(tmp_path, [{**GOOD[0], "dtype": "string", "size_bytes": 1 << 40}], b"", words)


@pytest.mark.parametrize("payload", [b'["a"]', b'["a", 1]', b'["a", "b", "c"]', b"\xff\xff", b""])
def test_hostile_strings_are_refused(tmp_path: Path, payload: bytes) -> None:
    entry = {"name": "y", "dtype": "string", "shape": [2], "size_bytes": len(payload)}
    with pytest.raises(DeviceError, match="malformed"):
        receive(tmp_path, [entry], payload, [TensorSpec(name="y", dtype="string", shape=(2,))])


def test_outputs_end_at_the_first_that_is_wrong(work: Path) -> None:
    job = make_job(float_conv(work / "f.onnx"), "nnapi", ROW * 3)
    damaged = OUTPUTS.replace(b"float32", b"float64")
    run = run_fake_program(work, OUTPUTS + damaged + OUTPUTS + json.dumps(DONE).encode() + b"\n", job=job)
    assert "'00001.tensors' from the device is malformed" in str(run.failure)
    assert [list(sample) for sample in run.outputs] == [["y"]]


def test_results_do_not_overwrite_files_nor_follow_links(tmp_path: Path) -> None:
    (tmp_path / "00000.tensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError):
        receive_tensors(io.BytesIO(json.dumps(GOOD).encode() + b"\n" + bytes(8)), tmp_path / "00000.tensors", SPEC)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("text", ["", "[", "NaN", '{"status": "done"}', "[" * 100_000, "{" * (1 << 26) + "{"])
def test_a_result_that_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="malformed"):
        decode_run(text.encode())
