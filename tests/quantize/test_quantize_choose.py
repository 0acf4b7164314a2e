import shutil
import time
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from quantize_models import draft_of, make_model, make_samples, plan_model, random_samples
from tiny_models import parse_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit.cli.main import run_command
from edgekit.errors import UsageError
from edgekit.graph.graph import view_model
from edgekit.jobs.quantize import QuantizeOptions, quantize_for
from edgekit.model.model import Model
from edgekit.progress import Budget
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.calibration.moments import MOMENTS
from edgekit.quantize.calibration.store import StoredArrays, save_arrays
from edgekit.quantize.effort import Effort, count_side_by_side, find_effort
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.auto import plan_minmax
from edgekit.quantize.mixed_precision.candidates import (
    Memo,
    Subject,
    judge_draft,
    learn_roundings,
    needs_moments,
)
from edgekit.quantize.mixed_precision.relief import keep_float
from edgekit.quantize.mixed_precision.sensitivity import PARTS, find_cuts, nest_parts
from edgekit.quantize.plan import draft_plan
from edgekit.quantize.ranges import TensorRange
from edgekit.recipe import Data, Recipe
from edgekit.target import load_target


def test_a_rounding_that_meets_no_numbers_is_left_out(net: Model, many: Calibration, tmp_path: Path) -> None:
    many = msgspec.structs.replace(many, statistics=str(shutil.copytree(many.statistics, tmp_path / "spoilt")))
    shutil.rmtree(tmp_path / "spoilt" / "rounded", ignore_errors=True)
    path = tmp_path / "spoilt" / MOMENTS
    arrays = {**StoredArrays(path)}
    spoilt = {
        name: np.full_like(each, np.nan) if name.endswith("covariance") else each for name, each in arrays.items()
    }
    save_arrays(path, spoilt.items())
    memo = Memo()
    plan = plan_quantization(net, many, load_target("nnapi"), "int8", memo=memo)
    assert {entry.rounding for entry in plan.judged} == {"nearest", "bias"}
    assert memo.budget.failed.keys() == {"rounding gptq", "rounding refit"}
    assert "holds no numbers" in memo.budget.failed["rounding gptq"]


SILU_NET = """g (float[1,3,8,8] x) => (float[1,40] y) {
  c = Conv(x, w1, b1) s = Sigmoid(c) m = Mul(c, s)
  p = GlobalAveragePool(m) f = Flatten(p) y = Gemm<transB=1>(f, w2) }"""


def test_a_plan_is_the_same_alone_and_beside_other_targets(tmp_path: Path) -> None:
    model = make_model(SILU_NET, tmp_path / "m.onnx", {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (40, 8)})
    calibration = calibrate_model(model, random_samples(model, count=32), work=tmp_path / "work")
    targets = {name: load_target(name) for name in ("nnapi", "qnn", "xnnpack", "cpu")}
    alone = {name: plan_quantization(model, calibration, target, "int8") for name, target in targets.items()}
    assert alone["nnapi"].judged != alone["qnn"].judged  # a sigmoid has a scale of its own on one of them
    for order in (list(targets), list(targets)[::-1]):
        memo = Memo()
        for name in order:
            assert plan_quantization(model, calibration, targets[name], "int8", memo=memo) == alone[name]


def test_few_samples_give_minmax_with_corrected_biases(net: Model, tmp_path: Path) -> None:
    calibration, plan = plan_model(net, tmp_path, "nnapi", random_samples(net, count=4), "auto")
    assert (plan.method, plan.rounding, plan.judged) == ("minmax", "bias", ())
    without = msgspec.structs.replace(calibration, statistics="")
    plan = plan_quantization(net, without, load_target("nnapi"), "int8")
    assert (plan.method, plan.rounding, plan.judged) == ("minmax", "nearest", ())


def test_plain_minmax_leaves_the_same_tensors_out_of_8_bits_with_headroom(net: Model, many: Calibration) -> None:
    graph, target = read_float_graph(net), load_target("qnn")
    name = graph.nodes[0].output[0]
    draft = draft_plan(net, graph, many, target, "int8")
    plan = msgspec.structs.replace(draft, method="mse", rounding="bias", wide={name: TensorRange(low=-0.1, high=0.1)})
    plan = keep_float(graph, plan, (name, *graph.outputs))
    stock = plan_minmax(Subject(model=net, calibration=many, target=target, precision="int8"), plan)
    assert (stock.method, stock.rounding, stock.float_nodes) == ("minmax", "nearest", plan.float_nodes)
    seen = many.ranges["minmax"][name]
    assert stock.wide == {name: TensorRange(low=2 * seen.low, high=2 * seen.high)}
    reasons = {node.name: node.reason for node in plan.float_nodes}
    assert reasons[graph.nodes[0].name] == f"it makes or reads '{name}', which 16 bits do not hold"
    assert reasons[graph.nodes[-1].name] == "it makes or reads 'y', which 8 bits do not hold"


def test_plain_minmax_leaves_the_same_tensors_out_of_8_bits_if_the_other_plan_scales_channels(
    net: Model, many: Calibration
) -> None:
    graph, target = read_float_graph(net), load_target("qnn")
    name = graph.nodes[0].output[0]
    draft = draft_plan(net, graph, many, target, "int8")
    wide = {f"{name}_equalized": TensorRange(low=-1, high=1)}
    plan = msgspec.structs.replace(draft, factors={name: (1.0, 2.0)}, wide=wide)
    stock = plan_minmax(Subject(model=net, calibration=many, target=target, precision="int8"), plan)
    assert (list(stock.wide), stock.factors) == ([name], {})


def test_statistics_that_are_gone_are_named(net: Model, many: Calibration) -> None:
    gone = msgspec.structs.replace(many, statistics="/nowhere")
    with pytest.raises(UsageError, match=r"'/nowhere', are gone.*calibrate again"):
        plan_quantization(net, gone, load_target("nnapi"), "int8")


@pytest.mark.parametrize("target", ["cpu", "qnn", "nnapi"])
def test_rows_gathered_from_a_table_keep_the_scale_of_the_table(tmp_path: Path, target: str) -> None:
    text = "g (int64[1,4] x) => (float[1,4,8] y) { e = Gather(t, x) s = Add(e, p) h = MatMul(s, w) y = Tanh(h) }"
    model = make_model(text, tmp_path / "m.onnx", {"t": (32, 8), "p": (4, 8), "w": (8, 8)})
    rng = np.random.default_rng(0)
    samples = make_samples([{"x": rng.integers(0, 32, (1, 4))} for _ in range(32)])
    assert plan_model(model, tmp_path, target, samples, "auto")[1].judged[0].sqnr_db > 20


def test_learned_roundings_are_judged_once(net: Model, many: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, memo = draft_of(net, many, "cpu"), Memo()
    quick = judge_draft(draft, memo)
    assert [candidate.rounding for candidate in quick.candidates] == ["bias", "nearest"]
    assert judge_draft(draft.use_unsigned(), memo) is quick
    every = learn_roundings(draft, quick, memo).candidates
    assert [candidate.rounding for candidate in every] == ["refit", "gptq", "bias", "nearest"]
    assert (every[2:], len(memo.judged)) == (quick.candidates, 2)
    faithful = msgspec.structs.replace(quick, unrounded_db=quick.candidates[0].sqnr_db + 0.1)
    assert learn_roundings(draft.use_unsigned(), faithful, memo).candidates == every  # few weights, and below 40 dB
    assert len(memo.judged) == 2
    # Another method may lead before: weights are rounded by samples for the method with the best ranges.
    ahead = msgspec.structs.replace(quick.candidates[0], method="percentile-99.9", sqnr_db=99.0)
    led = msgspec.structs.replace(quick, candidates=(ahead, *quick.candidates))
    assert learn_roundings(draft, led, Memo()).candidates[1:] == every
    assert [draft.use_unsigned().plan.grids["y"].zero_point, draft.plan.grids["y"].zero_point] == [0, -128]
    assert draft.use_unsigned().use_unsigned() == draft.use_unsigned()
    with pytest.raises(UsageError, match="no ranges of method 'mode'"):
        draft.choose("mode", "nearest")
    # With more weights, the slow one is not tried once what is left of the cost of rounding is half a decibel.
    monkeypatch.setattr("edgekit.quantize.mixed_precision.candidates._QUICK_WEIGHTS", 0)
    for left, roundings in ((0.4, ["refit"]), (0.6, ["refit", "gptq"])):
        bias = msgspec.structs.replace(every[2], sqnr_db=1.0)
        costly = msgspec.structs.replace(quick, candidates=(bias,), unrounded_db=every[0].sqnr_db + left)
        assert [each.rounding for each in learn_roundings(draft, costly, Memo()).candidates] == [*roundings, "bias"]


@pytest.mark.parametrize(
    ("reached", "unrounded", "weights", "needed"),
    [
        (5.0, 5.5, 1_000_000, False),  # better integers bring back no more than rounding cost
        (20.0, 20.5, 1_000_000, False),
        (20.0, 20.6, 1_000_000, True),
        (20.0, 50.0, 1_000_000, True),
        (39.9, 39.9, 262_144, True),
        (39.9, 39.9, 262_145, False),
        (40.0, 40.5, 200_000, False),
        (40.0, 40.6, 200_000, True),
    ],
)
def test_second_moments_are_tried_if_they_may_pay(reached: float, unrounded: float, weights: int, needed: bool) -> None:
    assert needs_moments(reached, unrounded, weights) is needed


def test_best_takes_tensors_out_of_8_bits_where_auto_is_content(net: Model, tmp_path: Path) -> None:
    rows = [*random_samples(net, count=64)]
    np.savez(tmp_path / "d.npz", allow_pickle=False, x=np.stack([row["x"] for row in rows]))
    data, recipe = Data(source=str(tmp_path / "d.npz")), Recipe(targets=("qnn",))
    auto, best = (
        quantize_for(net.path, data, tmp_path / "q.onnx", recipe, QuantizeOptions(method=method))
        for method in ("auto", "best")
    )
    assert {trial.step for trial in auto.trials} == {"all", "minmax"}
    assert {trial.step for trial in best.trials} >= {"all", "relieve 1", "relieve 3"}
    assert best.predicted.sqnr_db > auto.predicted.sqnr_db + 1
    assert (best.max_drop, best.met) == (None, None)
    wide = msgspec.structs.replace(recipe, max_drop=50.0)
    stated = quantize_for(net.path, data, tmp_path / "q.onnx", wide, QuantizeOptions(method="best"))
    assert (stated.max_drop, {trial.step for trial in stated.trials}) == (50.0, {"all", "minmax"})


# Planning a large model takes a number of runs that its size and its samples bound.

_SETTINGS = SessionSettings()


@pytest.mark.parametrize(
    ("rows", "samples", "runs"),
    [(3_000, 32, 322), (5_000, 8, 193), (5_000, 120, 240), (50_000, 8, 48), (50_000, 32, 64), (50_000, 999, 256)],
)
def test_what_a_run_takes_and_how_many_samples_there_are_bound_the_runs(rows: int, samples: int, runs: int) -> None:
    text = f"(float[{rows},1000] x, float[1000,1000] w) => (float[{rows},1000] y) {{ y = MatMul(x, w) }}"
    effort = find_effort(view_model(parse_net(text), Path()), samples)
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
    text = f"(float[{rows},1000] x) => (float[{rows},1000] y) {{ t1 = Relu(x) {body} y = Relu(t9) }}"
    proto = onnx.shape_inference.infer_shapes(parse_net(text))
    assert count_side_by_side(view_model(proto, Path()), cores=cores) == at_once


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is a large one, which has the least of runs."""
    monkeypatch.setattr("edgekit.quantize.effort._FREE", 0)


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


def test_no_cut_lies_where_nothing_crosses_it() -> None:
    """Behind nodes that nothing compared reads, such as a counter of steps: ONNX has no If without an output."""
    proto = parse_net("(float[4] x) => (float[4] y) { unread = Neg(x) a = Abs(x) y = Relu(a) }")
    assert [(cut.start, cut.fed) for cut in find_cuts(proto, 2, lambda _: (4,))] == [(2, ("a",))]


# A budget ends the planning: the best of what was tried is taken, and what was not is named.


class _Clock:
    """Time that moves on by one with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def measured(net: Model, tmp_path: Path) -> Calibration:
    return calibrate_model(net, random_samples(net, count=24), work=tmp_path / "measured")


def _plan(net: Model, measured: Calibration, budget: Budget) -> QuantPlan:
    return plan_quantization(net, measured, load_target("nnapi"), "int8", memo=Memo(budget=budget))


def test_without_time_nothing_is_tried(net: Model, measured: Calibration) -> None:
    budget = Budget(end=time.monotonic())
    plan = _plan(net, measured, budget)
    assert (plan.method, plan.rounding, plan.judged) == ("minmax", "bias", ())
    assert budget.left_out == ["range methods and roundings"]


def test_more_time_brings_no_less(net: Model, measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, left = [], []
    for end in range(1, 14, 2):
        with monkeypatch.context() as patched:
            patched.setattr("edgekit.progress.time", _Clock())
            budget = Budget(end=end + 0.5)
            plan = _plan(net, measured, budget)
        tried.append(len(plan.judged))
        left.append(len(budget.left_out))
        best = max((candidate.sqnr_db for candidate in plan.judged), default=0.0)
        assert not plan.judged or plan.judged[0].sqnr_db >= best
    assert tried == sorted(tried)
    assert left[0] > 1
    assert tried[-1] > tried[0] > 0


def test_what_was_cut_is_not_remembered(net: Model, measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = Memo(budget=Budget(end=2.5))
    with monkeypatch.context() as patched:
        patched.setattr("edgekit.progress.time", _Clock())
        plan_quantization(net, measured, load_target("nnapi"), "int8", memo=memo)
    assert memo.budget.left_out
    assert memo.judged == {}


def test_the_time_that_is_left_is_told() -> None:
    said: list[str] = []
    began = time.monotonic() - 10.0
    Budget(progress=said.append).tell("rank", 20, 60, began)
    Budget(progress=said.append, end=time.monotonic() + 5.4).tell("rank", 20, 60, began)
    Budget(progress=said.append).tell("rank", 0, 60, began)
    assert said == ["rank: 20 of 60, 20 s left", "rank: 20 of 60, 5 s left", "rank: 0 of 60"]


@pytest.mark.parametrize("text", ["soon", "-5s", "5d", "", "1e3", "nan"])
def test_what_is_no_time_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["quantize", "m.onnx", "--data", "d", "--target", "nnapi", "--time-budget", text]) == 2
    assert "90s, 5m or 1h" in capsys.readouterr().err


def test_what_is_kept_back_for_the_end_is_no_time_of_the_search_and_what_it_leaves_out_is_told() -> None:
    whole = Budget(end=time.monotonic() + 60)
    search = whole.keep_back(90)
    assert whole.allows("a plan")
    assert not search.allows("another plan")
    assert whole.left_out == ["another plan"]
    assert Budget().keep_back(90).allows("a plan")
