"""Nodes that a target takes in float only stay float, with the neighbours that would break them up."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from quantize_models import find_searched, make_model, make_search, predicted, random_samples

from edgekit.check.check import check_model
from edgekit.errors import ModelError
from edgekit.graph.graph import read_graph
from edgekit.model.model import Model, load_model
from edgekit.progress import Budget
from edgekit.quantize import QuantizedModel, calibrate_model
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.mixed_precision import plan_search
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.placement import FLOAT_ONLY, PLACEMENT, keep_taken, widen_region
from edgekit.quantize.mixed_precision.plan_search import Search, Searched
from edgekit.quantize.plan import QuantPlan, draft_plan
from edgekit.target import load_target

# NNAPI takes GlobalAveragePool and Gather in float only.
SPLIT = """net (float[1,3,8,8] x) => (float[1,8,1,1] y) <int64[8] few = {0, 1, 2, 3, 0, 1, 2, 3}> {
  c1 = Conv<pads=[1,1,1,1]>(x, w1, b1)  r1 = Relu(c1)  q = Gather<axis=1>(r1, few)
  c2 = Conv<pads=[1,1,1,1], group=8>(q, w2, b2)  r2 = Relu(c2)  y = GlobalAveragePool(r2) }"""
WEIGHTS = {"b1": (8,), "w2": (8, 1, 3, 3), "b2": (8,), "w3": (16, 8, 3, 3)}
# The Gather picks the channels with small values.
UNEQUAL = np.random.default_rng(0).normal(size=(8, 3, 3, 3)) * np.repeat([1, 6], 4)[:, None, None, None]
CONSTANTS = {"w1": UNEQUAL.astype(np.float32)}


def search(folder: Path, text: str, target: str) -> tuple[Model, Searched]:
    model = make_model(text, folder / "net.onnx", WEIGHTS, CONSTANTS)
    return model, find_searched(folder, model, list(random_samples(model, 24)), load_target(target))


def begin(folder: Path, text: str, measure: Callable[[Model], Prediction]) -> Search:
    """A search for NNAPI of which `measure` says what each plan loses."""
    weights = WEIGHTS | {"w4": (8, 8, 3, 3), "w5": (8, 8, 1, 1)}
    model = make_model(text, folder / "net.onnx", weights, CONSTANTS)
    calibration = calibrate_model(model, random_samples(model, 24), work=folder / "work")
    return make_search((model, calibration), measure, load_target("nnapi"), folder)


def list_kept(plan: QuantPlan) -> list[str]:
    return [node.op for node in plan.float_nodes if node.reason == FLOAT_ONLY]


def test_what_nnapi_takes_in_float_only_is_kept_so_and_what_is_moved_keeps_its_scale(tmp_path: Path) -> None:
    _, searched = search(tmp_path, SPLIT, "nnapi")
    step = "all, as the target takes it"
    first, chosen = searched.trials[0], next(each for each in searched.trials if each.step == step)
    # Its ranges got headroom.
    assert searched.chosen.step.startswith(step)
    assert sorted(list_kept(searched.chosen.plan)) == sorted(list_kept(chosen.plan))
    assert sorted(list_kept(chosen.plan)) == ["Gather", "GlobalAveragePool", "Relu"]
    # Without the Relu, the Gather would lie between a DQ and the Q that the next Conv needs.
    checks = [check_model(load_model(tmp_path / f"{each.step}.onnx"), load_target("nnapi")) for each in (first, chosen)]
    assert [(check.partitions, check.taken < check.nodes) for check in checks] == [(3, True), (1, False)]
    assert chosen.integer_macs == first.integer_macs
    # A Q behind the Gather with a scale of its own would round a second time.
    assert chosen.plan.ranges["q"] == chosen.plan.ranges["r1"]
    assert chosen.prediction.sqnr_db > first.prediction.sqnr_db


def test_layers_with_weights_do_not_leave_integers_for_it(tmp_path: Path) -> None:
    text = """net (float[1,8,8,8] x) => (float[1,16,6,6] y) <int64[8] turned = {4, 5, 6, 7, 0, 1, 2, 3}> {
      c1 = Conv<pads=[1,1,1,1], group=8>(x, w2, b2)  q = Gather<axis=1>(c1, turned)  y = Conv(q, w3) }"""
    model, searched = search(tmp_path, text, "nnapi")
    assert list_kept(searched.chosen.plan) == []
    graph, every = read_graph(model), {"n0_Conv", "n1_Gather", "n2_Conv"}
    assert widen_region(graph, {"n1_Gather"}, set(), {"n1_Gather"}) == {"n0_Conv"}
    assert widen_region(graph, {"n1_Gather"}, set(), {"n0_Conv", "n1_Gather"}) == {"n2_Conv"}
    assert widen_region(graph, {"n1_Gather"}, set(), every) == set()
    # What the target leaves out comes first, then what makes an input, and the region grows past known nodes.
    assert widen_region(graph, {"n1_Gather"}, {"n0_Conv"}, {"n1_Gather"}) == {"n0_Conv"}
    assert widen_region(graph, {"n2_Conv"}, set(), {"n1_Gather", "n2_Conv"}) == {"n0_Conv"}


@pytest.mark.parametrize(("drop", "is_kept"), [(0.0005, True), (0.004, False)])
def test_nodes_are_kept_float_unless_that_loses_more(tmp_path: Path, drop: float, *, is_kept: bool) -> None:
    def measure(quantized: Model) -> Prediction:
        lost = drop if "takes it" in quantized.path.stem else 0.0005
        return predicted(lost, sqnr_db=25.0)

    search = begin(tmp_path, SPLIT, measure)
    assert bool(list_kept(find_plan(search, max_drop=None, narrow=False)[0])) == is_kept


def test_nodes_are_kept_float_where_too_few_samples_tell_of_any_loss(tmp_path: Path) -> None:
    model = make_model(SPLIT, tmp_path / "net.onnx", WEIGHTS, CONSTANTS)
    calibration = calibrate_model(model, random_samples(model, 2), work=tmp_path / "work")
    search = make_search((model, calibration), lambda _: predicted(None), load_target("nnapi"), tmp_path)
    plan, searched = find_plan(search, max_drop=None, narrow=True)
    assert (searched, plan.judged) == (None, ())
    assert sorted(list_kept(plan)) == ["Gather", "GlobalAveragePool", "Relu"]


def test_what_is_left_out_in_float_too_stays_in_integers(tmp_path: Path) -> None:
    """ONNX Runtime moves a Q before a MaxPool, so that float neighbours do not help it."""
    text = SPLIT.replace("Gather<axis=1>(r1, few)", "MaxPool<kernel_shape=[2,2]>(r1)")
    _, searched = search(tmp_path, text, "nnapi")
    assert list_kept(searched.chosen.plan) == ["GlobalAveragePool"]


def test_more_work_on_the_target_counts_more_than_fewer_partitions(tmp_path: Path) -> None:
    """NNAPI takes products of two activations in float only."""
    text = """net (float[1,3,8,8] x) => (float[1,8,8] y) <int64[3] flat = {1, 8, 64}> {
      c1 = Conv<pads=[1,1,1,1]>(x, w1, b1)  r1 = Relu(c1)  f = Reshape(r1, flat)  t = Transpose<perm=[0,2,1]>(f)
      y = MatMul(f, t) }"""
    _, searched = search(tmp_path, text, "nnapi")
    assert "MatMul" in list_kept(searched.chosen.plan)
    assert searched.chosen.taken_macs == 1 > searched.trials[0].taken_macs


def test_a_region_that_gains_nothing_is_given_up_soon(tmp_path: Path) -> None:
    layers = " ".join(f"d{i} = Conv<pads=[1,1,1,1]>(e{i}, w4) e{i + 1} = Relu(d{i})" for i in range(8))
    text = f"""net (float[1,3,8,8] x) => (float[1,8,7,7] y) {{
      c1 = Conv<pads=[1,1,1,1]>(x, w1, b1)  r1 = Relu(c1)  e0 = MaxPool<kernel_shape=[2,2]>(r1)
      {layers} y = Conv(e8, w5) }}"""
    search = begin(tmp_path, text, lambda _: predicted(0.0, sqnr_db=50.0))
    plan, _ = find_plan(search, max_drop=None, narrow=False)
    assert list_kept(plan) == []
    # The plan itself, and two of the three regions around the MaxPool: one is the same file.
    assert len(search.checks) == 3


def test_no_node_is_tried_after_the_time_is_over(tmp_path: Path) -> None:
    search = begin(tmp_path, SPLIT, lambda _: predicted(0.0, sqnr_db=50.0))
    plan = draft_plan(search.model, search.graph, search.calibration, search.target, search.precision)
    assert list_kept(keep_taken(search, plan, None))
    late = msgspec.structs.replace(search, memo=Memo(budget=Budget(end=0.0)))
    assert keep_taken(late, plan, None) == plan
    assert late.memo.budget.left_out == [PLACEMENT]


def test_a_plan_that_cannot_be_written_is_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = begin(tmp_path, SPLIT, lambda _: predicted(0.0, sqnr_db=50.0))
    plan = draft_plan(search.model, search.graph, search.calibration, search.target, search.precision)
    write, most = plan_search.write_chosen, len(plan.float_nodes)

    def refuse(search: Search, plan: QuantPlan, searched: Searched | None, out: Path) -> QuantizedModel:
        if len(plan.float_nodes) > most:
            raise ModelError("a float layer lies between quantized neighbours", hint="")
        return write(search, plan, searched, out)

    monkeypatch.setattr(plan_search, "write_chosen", refuse)
    assert keep_taken(search, plan, None) == plan
    most -= 1
    assert keep_taken(search, plan, None) == plan


def test_a_plan_of_which_the_target_takes_all_is_left_as_it_is(tmp_path: Path) -> None:
    _, searched = search(tmp_path, SPLIT, "qnn")
    assert list_kept(searched.chosen.plan) == []
    assert not any("takes it" in trial.step for trial in searched.trials)
