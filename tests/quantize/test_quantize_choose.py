import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fixture_types import present
from quantize_models import COLLAPSING, make_model, make_samples, plan_model, random_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import UsageError
from edgekit.model.model import Model
from edgekit.quantize import Calibration, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize._ort_quantizer import find_plan_grids
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.auto import Judged, plan_minmax, prefer_draft
from edgekit.quantize.mixed_precision.candidates import (
    Draft,
    Judgement,
    Memo,
    choose_ranges,
    digest_draft,
    judge_draft,
    learn_roundings,
    needs_moments,
)
from edgekit.quantize.mixed_precision.relief import keep_float, relieve_step
from edgekit.quantize.mixed_precision.score import grids_to_inputs, judge_candidate, open_judge, strip_weights
from edgekit.quantize.plan import Candidate, FloatNode, draft_plan
from edgekit.quantize.qdq import place_plan
from edgekit.quantize.ranges import TensorRange
from edgekit.target import Precision, load_target


def test_auto_is_never_worse_than_minmax_on_held_out_samples(net: Model, many: Calibration) -> None:
    plan = plan_quantization(net, many, load_target("nnapi"), "int8")
    scores = {(entry.method, entry.rounding): entry.sqnr_db for entry in plan.judged}
    assert scores[plan.method, plan.rounding] == max(scores.values()) >= scores["minmax", "nearest"]


def test_a_rounding_that_meets_no_numbers_is_left_out_with_its_reason(
    net: Model, many: Calibration, tmp_path: Path
) -> None:
    many = msgspec.structs.replace(many, statistics=str(shutil.copytree(many.statistics, tmp_path / "spoilt")))
    shutil.rmtree(tmp_path / "spoilt" / "rounded", ignore_errors=True)
    path = tmp_path / "spoilt" / "moments.npz"
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    spoilt = {
        name: np.full_like(each, np.nan) if name.endswith("covariance") else each for name, each in arrays.items()
    }
    np.savez(path, allow_pickle=False, **spoilt)
    memo = Memo()
    plan = plan_quantization(net, many, load_target("nnapi"), "int8", memo=memo)
    assert {entry.rounding for entry in plan.judged} == {"nearest", "bias"}
    assert memo.budget.failed.keys() == {"rounding gptq", "rounding refit"}
    assert "holds no numbers" in memo.budget.failed["rounding gptq"]


def test_targets_that_differ_in_sign_share_the_judgement(net: Model, many: Calibration) -> None:
    memo = Memo()
    nnapi, xnnpack = (
        plan_quantization(net, many, load_target(name), "int8", memo=memo) for name in ("nnapi", "xnnpack")
    )
    assert nnapi.judged == xnnpack.judged
    assert len(memo.judged) == 2  # quick roundings, and those that learn


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


def test_same_statistics_give_the_same_bytes(net: Model, tmp_path: Path) -> None:
    digests = set[str]()
    for name in ("a", "b"):
        calibration, plan = plan_model(net, tmp_path / name, "qnn", random_samples(net, count=32), "auto")
        plan = msgspec.structs.replace(plan, rounding="refit")
        digests.add(quantize_model(net, plan, calibration, tmp_path / f"{name}.onnx").model.sha256)
    assert len(digests) == 1


def test_few_samples_give_minmax_with_corrected_biases(net: Model, tmp_path: Path) -> None:
    calibration, plan = plan_model(net, tmp_path, "nnapi", random_samples(net, count=4), "auto")
    assert (plan.method, plan.rounding, plan.judged) == ("minmax", "bias", ())
    without = msgspec.structs.replace(calibration, statistics="")
    plan = plan_quantization(net, without, load_target("nnapi"), "int8")
    assert (plan.method, plan.rounding, plan.judged) == ("minmax", "nearest", ())


def test_plain_minmax_leaves_the_same_tensors_out_of_8_bits_with_their_exact_range(
    net: Model, many: Calibration
) -> None:
    graph, target = read_float_graph(net), load_target("qnn")
    name = graph.nodes[0].output[0]
    draft = draft_plan(net, graph, many, target, "int8")
    plan = msgspec.structs.replace(draft, method="mse", rounding="bias", wide={name: TensorRange(low=-0.1, high=0.1)})
    plan = keep_float(graph, plan, (name, *graph.outputs))
    stock = plan_minmax(net, many, target, plan)
    assert (stock.method, stock.rounding, stock.float_nodes) == ("minmax", "nearest", plan.float_nodes)
    assert stock.wide == {name: many.ranges["minmax"][name]}
    reasons = {node.name: node.reason for node in plan.float_nodes}
    assert reasons[graph.nodes[0].name] == f"it makes or reads '{name}', which 16 bits do not hold"
    assert reasons[graph.nodes[-1].name] == "it makes or reads 'y', which 8 bits do not hold"


def test_statistics_that_are_gone_are_named(net: Model, many: Calibration) -> None:
    gone = msgspec.structs.replace(many, statistics="/nowhere")
    with pytest.raises(UsageError, match=r"'/nowhere', are gone.*calibrate again"):
        plan_quantization(net, gone, load_target("nnapi"), "int8")


def test_range_methods_are_judged_in_one_session_as_each_alone(net: Model, many: Calibration) -> None:
    graph, statistics = read_float_graph(net), Path(many.statistics)
    compared = find_compared_tensors(graph)
    plan = plan_quantization(net, many, load_target("cpu"), "int8", method="minmax")
    plans = {
        "minmax": plan,
        "mse": msgspec.structs.replace(plan, ranges=many.ranges["mse"]),
        "cut": msgspec.structs.replace(
            plan, ranges={name: TensorRange(low=its.low / 9, high=its.high / 9) for name, its in plan.ranges.items()}
        ),
    }
    alone = {
        name: judge_candidate(
            strip_weights(place_plan(graph, each, "m"), graph), compared, statistics, keep_float_weights=True
        )
        for name, each in plans.items()
    }
    stripped = strip_weights(place_plan(graph, plan, "m"), graph)
    grids = {name: find_plan_grids(graph, each, "m") for name, each in plans.items()}
    names = grids_to_inputs(stripped, grids["minmax"])
    assert not {tensor.name for tensor in stripped.graph.initializer} & {*names}
    outputs = [value.name for value in stripped.graph.output]
    fed = {name: {each: own[each] for each in names} for name, own in grids.items()}
    judge = open_judge(stripped, compared, statistics)
    found = {name: judge(values, -np.inf) for name, values in fed.items()}
    assert [value.name for value in stripped.graph.output] == outputs
    assert found["minmax"] == pytest.approx(alone["minmax"], abs=0.2)
    assert found["mse"] == pytest.approx(alone["mse"], abs=0.2)
    assert found["cut"] == pytest.approx(alone["cut"], abs=0.2)
    # Where another is better, no more samples are run than show that.
    assert found["cut"] < judge(fed["cut"], found["mse"]) < found["mse"]


@pytest.mark.parametrize("target", ["cpu", "qnn", "nnapi"])
def test_rows_gathered_from_a_table_keep_the_scale_of_the_table(tmp_path: Path, target: str) -> None:
    text = "g (int64[1,4] x) => (float[1,4,8] y) { e = Gather(t, x) s = Add(e, p) h = MatMul(s, w) y = Tanh(h) }"
    model = make_model(text, tmp_path / "m.onnx", {"t": (32, 8), "p": (4, 8), "w": (8, 8)})
    rng = np.random.default_rng(0)
    samples = make_samples([{"x": rng.integers(0, 32, (1, 4))} for _ in range(32)])
    assert plan_model(model, tmp_path, target, samples, "auto")[1].judged[0].sqnr_db > 20


@pytest.mark.parametrize(
    ("target", "steps", "kept", "floats"),
    [("qnn", [1, 3, 7], 3, set[str]()), ("nnapi", [1, 3], 1, {"n3_Mul", "n4_MatMul", "n5_Tanh"})],
)
def test_more_tensors_leave_8_bits_only_where_that_gains_a_decibel(
    collapsing: tuple[Model, Calibration], tmp_path: Path, target: str, steps: list[int], kept: int, floats: set[str]
) -> None:
    model, calibration = collapsing
    plan = plan_quantization(model, calibration, load_target(target), "int8")
    relieved = [entry for entry in plan.judged if entry.relieved]
    tried = {len(entry.relieved): entry for entry in relieved}
    assert len(tried) == len(relieved)
    reached, best = max(entry.sqnr_db for entry in plan.judged if not entry.relieved), 0
    for count in steps:
        if tried[count].sqnr_db >= reached + 1:
            reached, best = tried[count].sqnr_db, count
    assert (sorted(tried), best) == (steps, kept)
    assert (plan.method, plan.rounding) == (tried[kept].method, tried[kept].rounding)
    assert set(plan.wide) == (set() if floats else set(tried[kept].relieved))
    assert {node.name for node in plan.float_nodes} == floats
    assert all(node.op == "Tanh" or "8 bits do not hold" in node.reason for node in plan.float_nodes)
    CpuSession(quantize_model(model, plan, calibration, tmp_path / "q.onnx").model.path, SessionSettings())


def test_roundings_that_learn_are_tried_on_what_was_judged_quickly_and_judged_once(
    net: Model, many: Calibration
) -> None:
    graph = read_float_graph(net)
    draft = Draft(graph=graph, calibration=many, plan=draft_plan(net, graph, many, load_target("cpu"), "int8"))
    memo = Memo()
    quick = judge_draft(draft, memo)
    assert [candidate.rounding for candidate in quick.candidates] == ["bias", "nearest"]
    assert judge_draft(draft.use_unsigned(), memo) is quick
    every = learn_roundings(draft, quick, memo)
    assert [candidate.rounding for candidate in every] == ["refit", "gptq", "bias", "nearest"]
    assert (every[2:], len(memo.judged)) == (quick.candidates, 2)
    faithful = msgspec.structs.replace(quick, unrounded_db=quick.candidates[0].sqnr_db + 0.1)
    assert learn_roundings(draft.use_unsigned(), faithful, memo) == every  # few weights, and below 40 dB
    assert len(memo.judged) == 2
    # Another method may lead before: weights are rounded by samples for the method with the best ranges.
    ahead = msgspec.structs.replace(quick.candidates[0], method="percentile-99.9", sqnr_db=99.0)
    led = msgspec.structs.replace(quick, candidates=(ahead, *quick.candidates))
    assert learn_roundings(draft, led, Memo())[1:] == every
    assert [draft.use_unsigned().plan.grids["y"].zero_point, draft.plan.grids["y"].zero_point] == [0, -128]
    assert draft.use_unsigned().use_unsigned() == draft.use_unsigned()
    with pytest.raises(UsageError, match="no ranges of method 'mode'"):
        draft.choose("mode", "nearest")


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
def test_second_moments_are_tried_where_they_may_gain_something(
    reached: float, unrounded: float, weights: int, needed: bool
) -> None:
    assert needs_moments(reached, unrounded, weights) is needed


def test_a_judgement_is_shared_only_by_what_leads_to_the_same_compared_tensors(tmp_path: Path) -> None:
    text = SILU_NET.replace("y = Gemm<transB=1>(f, w2)", "z = Gemm<transB=1>(f, w2) y = Softmax(z)")
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (40, 8)})
    calibration = calibrate_model(model, random_samples(model, count=8), work=tmp_path / "work")
    graph = read_float_graph(model)
    plan = draft_plan(model, graph, calibration, load_target("nnapi"), "int8")
    assert set(plan.grids) == {"s", "y"}

    def digest(**changes: object) -> str:
        changed = msgspec.structs.replace(plan, **changes)
        return digest_draft(Draft(graph=graph, calibration=calibration, plan=changed))

    def floats(name: str, reason: str = "") -> tuple[FloatNode, ...]:
        return (*plan.float_nodes, FloatNode(name=name, op=name[3:], reason=reason))

    behind, before = {"s": plan.grids["s"]}, {"y": plan.grids["y"]}
    ops = {op: tuple(each for each in plan.op_types if each != op) for op in ("Softmax", "Sigmoid")}
    assert digest(grids=behind) == digest(op_types=ops["Softmax"]) == digest(float_nodes=floats("n6_Softmax"))
    assert digest() == digest(grids=behind) == digest(target="qnn")
    changed = {digest(grids=before), digest(op_types=ops["Sigmoid"]), digest(float_nodes=floats("n5_Gemm"))}
    assert len({digest(), digest(rounding="bias"), *changed}) == 5
    assert digest(float_nodes=floats("n5_Gemm", "told")) == digest(float_nodes=floats("n5_Gemm"))
    # The logits are float then, and it shows whether what reads them rounds them.
    assert digest(float_nodes=floats("n5_Gemm"), grids=behind) != digest(float_nodes=floats("n5_Gemm"))


def test_another_draft_is_used_where_its_best_candidate_gains_enough(net: Model, many: Calibration) -> None:
    graph = read_float_graph(net)
    draft = Draft(graph=graph, calibration=many, plan=draft_plan(net, graph, many, load_target("qnn"), "int8"))

    def judged(*ratios: float) -> Judged:
        found = tuple(Candidate(method="mse", rounding="bias", relieved=(), sqnr_db=ratio) for ratio in ratios)
        return Judged(draft=draft, found=Judgement(candidates=found, method="minmax", unrounded_db=0.0))

    first, second = judged(20.0, 5.0), judged(21.5, 5.0)
    assert prefer_draft(first, second, 1.0) is second
    assert prefer_draft(first, second, 1.5) is first
    assert prefer_draft(second, first, -1.0) is second
    assert prefer_draft(first, None, 1.0) is first
    learned = Candidate(method="mse", rounding="gptq", relieved=(), sqnr_db=30.0)
    more = msgspec.structs.replace(first.found, candidates=(learned, *first.found.candidates))
    assert (first.quick_db, Judged(draft=draft, found=more).quick_db) == (20.0, 20.0)


def test_a_step_with_many_tensors_out_of_8_bits_keeps_the_ranges_of_the_one_before(
    collapsing: tuple[Model, Calibration],
) -> None:
    model, calibration = collapsing
    plan = plan_quantization(model, calibration, load_target("qnn"), "int8", method="minmax")
    before, memo = choose_ranges(plan, calibration, "mse", "nearest"), Memo()
    few, more, many, none = (
        relieve_step(model, calibration, load_target("qnn"), plan, count, before=before, memo=memo)
        for count in (8, 9, 14, 15)
    )
    assert none is None  # the model has seven tensors
    assert present(few).rounding != "nearest"
    for step in (present(more), present(many)):
        assert (step.method, step.rounding, step.ranges) == ("mse", "nearest", calibration.ranges["mse"])


def test_best_takes_tensors_out_of_8_bits_where_auto_is_content(net: Model, many: Calibration) -> None:
    plans = [plan_quantization(net, many, load_target("qnn"), "int8", method=method) for method in ("auto", "best")]
    assert [any(entry.relieved for entry in plan.judged) for plan in plans] == [False, True]


def test_best_goes_on_to_30_db_where_what_leaves_8_bits_is_float(tmp_path: Path) -> None:
    text = COLLAPSING.replace("e = Mul(d, d) f = MatMul(e, v)", "f = MatMul(d, v)")
    model = make_model(text, tmp_path / "m.onnx", {"w": (32, 32), "v": (32, 32)})
    calibration = calibrate_model(model, random_samples(model, count=48), work=tmp_path / "work")
    auto, best = (
        plan_quantization(model, calibration, load_target("nnapi"), "int8", method=method)
        for method in ("auto", "best")
    )
    assert 20 < auto.judged[0].sqnr_db < best.judged[0].sqnr_db - 1 < 29
    assert [node.op for node in auto.float_nodes] == ["Tanh"]
    assert len(best.float_nodes) > 1


@pytest.mark.parametrize(
    ("precision", "body"),
    [("int16", "y = Relu(x)"), ("int8", "a = Mul(x, x) b = Mul(a, a) c = Mul(b, b) y = Mul(c, c)")],
)
def test_without_layers_there_is_nothing_to_round(tmp_path: Path, precision: Precision, body: str) -> None:
    model = make_model(f"g (float[1,16] x) => (float[1,16] y) {{ {body} }}", tmp_path / "m.onnx")
    calibration = calibrate_model(model, random_samples(model, count=16), work=tmp_path / "work")
    graph = read_float_graph(model)
    plan = draft_plan(model, graph, calibration, load_target("qnn"), precision)
    draft = Draft(graph=graph, calibration=calibration, plan=plan)
    judged = judge_draft(draft, Memo())
    assert learn_roundings(draft, judged, Memo()) == judged.candidates
    assert {(each.rounding, each.relieved, each.equalized) for each in judged.candidates} == {("nearest", (), False)}
    assert "minmax" in {each.method for each in judged.candidates}
