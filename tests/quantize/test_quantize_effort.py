"""Planning a large model takes a number of runs that its size and its samples bound."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser
from quantize_models import random_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.graph.graph import view_model
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize import calibrate_model, plan_quantization
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.effort import Effort, count_side_by_side, find_effort
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.sensitivity import PARTS, find_cuts, nest_parts
from edgekit.target import load_target

_SETTINGS = SessionSettings()


def _product(rows: int) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
      g (float[{rows},1000] x, float[1000,1000] w) => (float[{rows},1000] y) {{ y = MatMul(x, w) }}"""
    return parser.parse_model(text)


@pytest.mark.parametrize(
    ("rows", "samples", "runs"),
    [(3_000, 32, 322), (5_000, 8, 193), (5_000, 120, 240), (50_000, 8, 48), (50_000, 32, 64), (50_000, 999, 256)],
)
def test_what_a_run_takes_and_how_many_samples_there_are_bound_the_runs(rows: int, samples: int, runs: int) -> None:
    effort = find_effort(view_model(_product(rows), Path()), samples)
    assert (effort.runs, effort.work) == (runs, rows * 1_000_000 + 32 * rows * 1_000)
    assert effort.is_short == (runs > 256)


def test_a_note_says_that_not_all_that_was_held_out_judges() -> None:
    assert Effort(work=10**9, runs=1000, predicting_samples=256).describe(16) == ()
    assert Effort(work=10**10, runs=240, predicting_samples=40).describe(10) == ()
    (note,) = Effort(work=10**10, runs=100, predicting_samples=40).describe(16)
    assert note == "4 of 16 held-out samples judge the plans: a run takes 10.0 G"


@pytest.mark.parametrize(
    ("rows", "cores", "at_once"), [(2_000, 2, None), (2_200, 2, 1), (2_000, 64, 2), (1_000, 64, None), (9_000, 1, None)]
)
def test_runs_in_parallel_hold_no_more_than_32_mb_of_activations(rows: int, cores: int, at_once: int | None) -> None:
    # Two tensors of 1,000 columns are held at a time, however many follow each other: 8 kB a row.
    body = " ".join(f"t{index + 1} = Relu(t{index})" for index in range(1, 9))
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
      g (float[{rows},1000] x) => (float[{rows},1000] y) {{ t1 = Relu(x) {body} y = Relu(t9) }}"""
    proto = onnx.shape_inference.infer_shapes(parser.parse_model(text))
    assert count_side_by_side(view_model(proto, Path()), cores=cores) == at_once


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is a large one, which has the least of runs."""
    monkeypatch.setattr("edgekit.quantize.effort._FREE", 0)


@pytest.mark.usefixtures("bounded")
def test_with_a_bound_planning_takes_no_more_than_twice_as_many_runs(
    net: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = calibrate_model(net, random_samples(net, count=24), work=tmp_path / "work")
    assert any("2 of 8 held-out samples judge" in note for note in measured.notes)
    runs, run = list[int](), CpuSession.run

    def count(session: CpuSession, inputs: Tensors, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        runs.append(1)
        return run(session, inputs, outputs)

    monkeypatch.setattr(CpuSession, "run", count)
    plan = plan_quantization(net, measured, load_target("nnapi"), "int8", method="best")
    assert 0 < sum(runs) <= 2 * 48
    assert plan.judged[0].sqnr_db > 20


@pytest.mark.usefixtures("bounded")
def test_with_a_bound_a_drop_is_told_over_fewer_samples(net: Model) -> None:
    assert len(FloatReference(net, random_samples(net, count=12)).indices) == 8
    assert len(FloatReference(net, random_samples(net, count=96)).indices) == 32
    assert len(FloatReference(net, random_samples(net, count=96), most=96).indices) == 96


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_may_start_at_each_cut_and_gives_what_the_whole_gives(net: Model, count: int) -> None:
    graph = read_float_graph(net)
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.model)
    cuts = [*find_cuts(proto, count, graph.static_shape)]
    assert len(cuts) == count
    assert all(0 < cut.start < len(graph.model.graph.node) for cut in cuts)
    nest_parts(proto, cuts, graph.dims)
    fed = dict.fromkeys(name for cut in cuts for name in cut.fed)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in fed)
    session, sample = CpuSession(proto.SerializeToString(), _SETTINGS), next(iter(random_samples(net)))
    unread = {f"{name}.edgekit.fed": np.zeros(graph.static_shape(name) or (), np.float32) for name in fed}
    whole = session.run({**sample, **unread, PARTS: np.zeros(count, bool)})
    plain = CpuSession(graph.model.SerializeToString(), _SETTINGS).run(sample)
    assert np.allclose(whole["y"], plain["y"], atol=1e-6)
    for index in range(count):
        # What lies across other cuts is not read, and the sample neither.
        known = {f"{name}.edgekit.fed": whole[name] for name in cuts[index].fed}
        none = {name: np.full_like(value, np.nan) for name, value in sample.items()}
        found = session.run({**none, **unread, **known, PARTS: np.arange(count) == index})
        assert np.allclose(found["y"], whole["y"], atol=1e-6)
    # What is too large to keep for each sample is cut nowhere.
    assert not [*find_cuts(graph.model, 1, lambda _: None)]
