"""The profiler's file and QNN's own read: runs, nested kernels, shapes, work; and what is no such file."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from devices_models import make_job, noise_samples, qdq_conv, require_device, run_in

from edgekit.errors import DeviceError
from edgekit.graph.graph import read_graph
from edgekit.model.model import load_model
from edgekit.profile.events import Step, Tensor, decode_trace, read_profile
from edgekit.profile.measure import list_npu, read_npu
from edgekit.profile.nodes import count_work, list_sources


def node(name: str, op: str, start: int, length: int, tid: int = 1, **facts: Any) -> dict[str, Any]:
    arguments = {"op_name": op, "provider": "CPUExecutionProvider", **facts}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": start, "dur": length, "tid": tid, "args": arguments}


def session(name: str, start: int, length: int) -> dict[str, Any]:
    return {"cat": "Session", "name": name, "ts": start, "dur": length, "tid": 1, "args": {}}


def decode(*events: dict[str, Any]) -> list[list[Step]]:
    return [list(run.steps) for run in decode_trace(json.dumps(events).encode()).executions]


def test_a_body_is_no_part_of_its_node_s_own_time() -> None:
    (steps,) = decode(
        session("model_run", 100, 60),
        node("loop", "Loop", 110, 40),
        node("inside", "Add", 112, 10),
        node("deeper", "If", 125, 20),
        node("deepest", "Mul", 126, 5),
        node("after", "Relu", 150, 9),
        node("other thread", "Relu", 115, 10, tid=2),
    )
    own = {step.name: (step.self_us, step.depth) for step in steps}
    assert own == {
        "loop": (10, 0), "inside": (10, 1), "deeper": (15, 1), "deepest": (5, 2), "after": (9, 0),
        "other thread": (10, 0),
    }  # fmt: skip
    assert sum(step.self_us for step in steps if step.thread == 1) == 49


def test_kernels_belong_to_the_run_in_which_they_begin() -> None:
    runs = decode(
        node("folded", "Add", 5, 5),
        session("model_run", 100, 50),
        session("model_run", 200, 50),
        node("a", "Conv", 110, 30),
        node("a", "Conv", 210, 20),
        node("late", "Conv", 260, 20),
    )
    assert [[step.duration_us for step in steps] for steps in runs] == [[30], [20]]


def test_the_trace_has_the_time_of_the_sessions_initialization() -> None:
    trace = decode_trace(
        json.dumps([session("model_loading_uri", 0, 2500), session("session_initialization", 3000, 4500)]).encode()
    )
    assert (trace.make_ms, trace.executions) == (4.5, ())


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[", b"{}", b'[{"cat":"Node"}]', b'[{"cat":"Node","name":"\xff"}]',
        b'[{"cat":"Node","name":"x","ts":-1}]', b'[{"cat":"Node","name":"x","ts":99999999999999999}]',
        b'[{"cat":"Node","name":"x","args":{"input_type_shape":[{"float":["n"]}]}}]',
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(DeviceError, match="the profile is malformed") as caught:
        decode_trace(data)
    assert "\n" not in str(caught.value)


def test_names_from_a_device_have_no_terminal_codes() -> None:
    ((step,),) = decode(session("model_run", 0, 9), node("\x1b[31mred", "Co\nnv", 1, 2, output_size="x"))
    assert (step.name, step.op, step.bytes) == ("?[31mred", "Co?nv", 0)


def step(op: str, inputs: list[tuple[int, ...]], output: tuple[int, ...]) -> Step:
    return Step(
        name="n", op=op, provider="", start_us=0, duration_us=1, self_us=1, thread=1, depth=0, bytes=0, spread=False,
        inputs=tuple(Tensor(dtype="float", shape=shape) for shape in inputs),
        outputs=(Tensor(dtype="float", shape=output),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "inputs", "output", "macs"),
    [
        ("Conv", [(1, 3, 224, 224), (32, 3, 3, 3), (32,)], (1, 32, 112, 112), 10_838_016),
        ("QLinearConv", [(1, 8, 8, 4), (), (), (16, 4, 1, 1), (16,), ()], (1, 8, 8, 16), 4096),
        ("QLinearConv", [(1, 8, 8, 4), (), (), (16,), (16,), ()], (1, 8, 8, 16), 0),
        ("ConvTranspose", [(1, 4, 5, 5), (4, 2, 3, 3)], (1, 2, 11, 11), 1800),
        ("MatMul", [(2, 5, 7), (7, 3)], (2, 5, 3), 210),
        ("Gemm", [(5, 7), (3, 7), (3,)], (5, 3), 105),
        ("FusedGemm", [(7, 5), (7, 3)], (5, 3), 105),
        ("Gemm", [(5, 7)], (5, 3), 105),
        ("MultiHeadAttention", [(2, 4, 8), (2, 6, 8), (2, 6, 8)], (2, 4, 8), 768),
        ("Attention", [(1, 4, 8), (8, 24)], (1, 4, 8), 1024),
        ("LSTM", [(5, 1, 3), (1, 16, 3), (1, 16, 4)], (5, 1, 1, 4), 560),
        ("Add", [(4, 4), (4, 4)], (4, 4), 0),
    ],
)
def test_shapes_tell_the_work(op: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], macs: int) -> None:
    assert count_work(step(op, inputs, output)) == macs


def test_a_profile_is_read_up_to_its_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"[]  ")
    assert read_profile(path, 4, "the device gave no profile") == b"[]  "
    with pytest.raises(DeviceError, match="larger than 3 bytes"):
        read_profile(path, 3, "the device gave no profile")
    with pytest.raises(DeviceError, match=r"cannot read 'none\.json'"):
        read_profile(tmp_path / "none.json", 3, "the device gave no profile")


HEAD = "Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier"


def written(path: Path, *runs: dict[str, int]) -> Path:
    """A file with the lines that QNN writes before, in and after each run."""
    lines = [HEAD, "0,FINALIZE,129712,US,BACKEND,ROOT,QNN (finalize) time"]
    for run in runs:
        lines.append("0,BACKEND,54416,CYCLES,BACKEND,ROOT,Accelerator (execute) time (cycles)")
        lines += [
            f"0,NODE,{cycles},CYCLES,BACKEND,SUB-EVENT,{name}:OpId_{at} (cycles)"
            for at, (name, cycles) in enumerate(run.items())
        ]
        lines += ["0,NODE,7,CYCLES,BACKEND,SUB-EVENT,Input OpId_99 (cycles)"]
        lines.append("0,EXECUTE,75035,US,BACKEND,ROOT,QNN (execute) time")
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_operations_have_their_nodes_and_median_cycles(tmp_path: Path) -> None:
    sources = list_sources(read_graph(load_model(qdq_conv(tmp_path / "q.onnx", activation=np.uint8))))
    cold, *rest = ({"conv_token_1": cycles, "Transpose_token_6": 10} for cycles in (999, 30, 20, 40))
    runs = read_npu(written(tmp_path / "qnn.csv", cold, *rest))
    assert len(runs) == 4
    found = list_npu(runs, sources)
    assert [(one.name, one.source, one.cycles) for one in found] == [
        ("conv_token_1", "conv", 30), ("Transpose_token_6", "", 10), ("Input", "", 7),
    ]  # fmt: skip
    assert found[0].spread == pytest.approx(20 / 30)
    assert sum(one.share for one in found) == pytest.approx(1)
    assert list_npu((), sources) == ()


@pytest.mark.slow
def test_operations_of_one_name_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "q.csv", {"a": 1})
    path.write_text(path.read_text().replace("a:OpId_0 (cycles)", "Input OpId_5 (cycles)"))
    assert [list(run) for run in read_npu(path)] == [["Input", "Input (99)"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b"\xff\n", b"a,b\n1,2", f"{HEAD}\n0,NODE,1".encode(),
        f"{HEAD}\n0,NODE,x,CYCLES,BACKEND,SUB-EVENT,a:OpId_1 (cycles)".encode(),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused_in_one_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "qnn.csv").write_bytes(data)
    with pytest.raises(DeviceError, match="QNN's profile is malformed") as caught:
        read_npu(tmp_path / "qnn.csv")
    assert "\n" not in str(caught.value)
    (tmp_path / "empty.csv").write_bytes(b"")
    assert read_npu(tmp_path / "empty.csv") == ()


@pytest.mark.slow
def test_the_profile_of_the_simulator_has_the_operations_inside(tmp_path: Path) -> None:
    device = require_device("qnn-htp-sim", "qnn")
    model = qdq_conv(tmp_path / "q.onnx", activation=np.uint8)
    job = msgspec.structs.replace(make_job(model, "qnn", noise_samples(1)), trace=True, repeat=3)
    run = run_in(device, job, tmp_path / "work")
    assert run.failure is None
    assert run.npu_trace is not None
    runs = read_npu(run.npu_trace)
    assert len(runs) == 3
    found = list_npu(runs, list_sources(read_graph(load_model(model))))
    assert "conv" in {one.source for one in found}
    assert all(one.cycles >= 0 for one in found)
