"""QNN's own profile: what ran inside the one kernel that ONNX Runtime sees, read from a file that may be hostile."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import make_job, noise_samples, present, qdq_conv

from edgekit.errors import DeviceError
from edgekit.graph.graph import read_graph
from edgekit.model.model import load_model
from edgekit.profile.measure import list_npu, read_npu
from edgekit.profile.nodes import list_sources

pytestmark = pytest.mark.slow

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


def test_operations_have_their_nodes_and_the_middle_of_their_cycles(tmp_path: Path) -> None:
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


def test_operations_of_one_name_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "q.csv", {"a": 1})
    path.write_text(path.read_text().replace("a:OpId_0 (cycles)", "Input OpId_5 (cycles)"))
    assert [list(run) for run in read_npu(path)] == [["Input", "Input (99)"]]


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


def test_the_simulator_tells_what_runs_inside(tmp_path: Path) -> None:
    device = present("qnn-htp-sim", "qnn")
    model = qdq_conv(tmp_path / "q.onnx", activation=np.uint8)
    job = msgspec.structs.replace(make_job(model, "qnn", noise_samples(1)), trace=True, repeat=3)
    (tmp_path / "work").mkdir()
    run = device.run_job(job, tmp_path / "work")
    assert run.failure is None
    assert run.npu_trace is not None
    runs = read_npu(run.npu_trace)
    assert len(runs) == 3
    found = list_npu(runs, list_sources(read_graph(load_model(model))))
    assert "conv" in {one.source for one in found}
    assert all(one.cycles >= 0 for one in found)
