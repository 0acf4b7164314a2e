"""The profiler's file read: runs, nested kernels, shapes, work; and what is no such file."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgekit.errors import DeviceError
from edgekit.profile.events import Step, Tensor, decode_trace, read_profile
from edgekit.profile.nodes import count_work


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


def test_the_session_tells_what_it_took_to_load() -> None:
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


def test_names_from_a_device_cannot_steer_a_terminal() -> None:
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
def test_work_is_counted_from_shapes(
    op: str, inputs: list[tuple[int, ...]], output: tuple[int, ...], macs: int
) -> None:
    assert count_work(step(op, inputs, output)) == macs


def test_a_profile_is_read_up_to_its_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"[]  ")
    assert read_profile(path, 4, "the device gave no profile") == b"[]  "
    with pytest.raises(DeviceError, match="larger than 3 bytes"):
        read_profile(path, 3, "the device gave no profile")
    with pytest.raises(DeviceError, match=r"cannot read 'none\.json'"):
        read_profile(tmp_path / "none.json", 3, "the device gave no profile")
