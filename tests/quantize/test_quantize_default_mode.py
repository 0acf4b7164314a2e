"""The default mode and a search for a goal take no more tensors out of 8 bits than the expected drop asks for."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fixture_types import present
from quantize_models import (
    conv_net,
    find_searched,
    make_model,
    make_samples,
    make_search,
    plan_model,
    predicted,
    random_samples,
)

from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.model.tensors import Array, StatedOutput, Tensors
from edgekit.progress import Budget
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.loss import MEASURES
from edgekit.quantize.accuracy.predict import FloatReference, Prediction
from edgekit.quantize.mixed_precision.auto import plan_minmax
from edgekit.quantize.mixed_precision.candidates import Memo, Subject
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.plan_search import (
    Goal,
    Search,
    Searched,
    Trial,
    measure_work,
    plan_step,
    search_plan,
    write_chosen,
)
from edgekit.quantize.mixed_precision.relief import LEAST_GAIN_DB, bound_relief, relieve_step, rise_db
from edgekit.target import load_target

# Judgements and rankings have digests of all that they depend on, so these tests share them.
_KNOWN = Memo()


def told(
    drop: float | Callable[[str], float | None] | None,
    sqnr_db: float = 25.0,
    steps: list[str] | None = None,
    same: Callable[[str], float | None] = lambda _: None,
) -> Callable[[Model], Prediction]:
    """A measure that says one drop, or that of each step, and lists the steps that it was asked of."""

    def measure(quantized: Model) -> Prediction:
        step = quantized.path.stem
        if steps is not None:
            steps.append(step)
        lost = drop(step) if callable(drop) else drop
        return predicted(lost, sqnr_db=sqnr_db, same=same(step))

    return measure


def begin_search(
    calibrated: tuple[Model, Calibration],
    measure: Callable[[Model], Prediction],
    work: Path,
    target: str = "qnn",
    **how: Any,
) -> Search:
    """A search for a plan in 8 bits."""
    memo = msgspec.structs.replace(_KNOWN, budget=Budget())
    return make_search(calibrated, measure, load_target(target), work, memo=memo, **how)


Begin = Callable[..., Search]


@pytest.fixture
def begin(collapsing: tuple[Model, Calibration], tmp_path: Path) -> Begin:
    """Begins a search for a plan of a net that 8 bits ruin."""
    return partial(begin_search, collapsing, work=tmp_path)


def run_search(search: Search, goal: Goal | None = None) -> tuple[QuantPlan, Searched]:
    plan, searched = search_plan(search, goal or Goal())
    return plan, present(searched)


def run_all(search: Search, max_drop: float | None = None, *, narrow: bool = False) -> tuple[QuantPlan, Searched]:
    plan, searched = find_plan(search, max_drop=max_drop, narrow=narrow)
    return plan, present(searched)


@pytest.mark.parametrize(
    ("drop", "sqnr_db", "is_enough"),
    [*((0.0049, 15.0, True), (0.0051, 15.0, False), (0.006, 21.0, False)), *((None, 35.0, True), (None, 25.0, False))],
)
def test_tensors_leave_8_bits_by_their_loss(begin: Begin, drop: float | None, sqnr_db: float, is_enough: bool) -> None:

    def measure(quantized: Model) -> Prediction:
        is_first = quantized.path.stem == "all"
        return told(drop if is_first else drop and 0.0001, sqnr_db if is_first else 40.0)(quantized)

    plan, searched = run_search(begin(measure))
    assert plan.judged[0].sqnr_db < 20
    assert (searched.chosen.step, searched.met) == ("all" if is_enough else "relieve 1", True)
    assert bool(plan.wide) != is_enough


@pytest.mark.parametrize(
    ("lost", "low", "step"),
    [(0.09, 0.01, "all"), (0.09, 0.03, "relieve 1"), (0.43, -0.09, "relieve 3")],
    ids=["near", "surely lost", "scores beside pixels"],
)
def test_values_that_lose_their_spread_leave_8_bits_however_near(
    begin: Begin, lost: float, low: float, step: str
) -> None:
    """Ten answers that hardly vary were told to lose 44 % of their spread (32 to 63 %) at 53 dB, and stayed so."""

    def measure(quantized: Model) -> Prediction:
        is_first = quantized.path.stem == "all"
        found = told(lost if is_first else 0.0001, 53.0)(quantized)
        interval = (low, 0.6) if is_first else (0.0, 0.001)
        return msgspec.structs.replace(found, drop_interval=interval, measure=MEASURES["values"].name)

    assert run_search(begin(measure))[1].chosen.step == step
    # What noise makes of a network hardly varies: that says nothing of real data.
    assert run_search(msgspec.structs.replace(begin(measure), is_noise=True))[1].chosen.step == "all"


@pytest.mark.parametrize(
    ("kept", "goal", "step"),
    [
        *((0.894, Goal(), "relieve 1"), (0.896, Goal(), "all"), (0.894, Goal(is_given=True), "all")),
        *((0.7, Goal(), "relieve 1"), (0.944, Goal(most_changed=0.05), "relieve 1")),
        *((0.946, Goal(most_changed=0.05), "all"), (0.894, Goal(is_given=True, most_changed=0.05), "all")),
    ],
)
def test_a_plan_that_changes_many_decisions_misses_the_goal(begin: Begin, kept: float, goal: Goal, step: str) -> None:
    """A recognizer of text that is sure of no line lost 0.06 points by its own confidence, and a fifth of its lines."""

    def keep(tried: str) -> float:
        return kept if tried == "all" else 0.97

    _, searched = run_search(begin(told(0.0006, 15.0, same=keep)), goal)
    assert searched.chosen.step == step


@pytest.mark.parametrize(("target", "step"), [("qnn", "relieve 1"), ("xnnpack", "all")])
def test_fewer_decisions_may_change_where_tensors_get_16_bits(begin: Begin, target: str, step: str) -> None:
    def keep(tried: str) -> float:
        return 0.97 if tried.startswith("relieve") else 0.92

    assert run_all(begin(told(0.0006, 15.0, same=keep), target=target))[1].chosen.step == step


@pytest.mark.parametrize(("samples", "changed", "may_meet"), [(13, 2, True), (13, 8, False), (256, 39, False)])
def test_a_few_samples_rule_no_plan_out(samples: int, changed: int, may_meet: bool) -> None:
    """MobileNetV2 changed two of the first 13 decisions and four of 100: 8 of its tensors got 16 bits for nothing."""
    seen = predicted(0.001, sqnr_db=22.0, same=1 - changed / samples, samples=samples)
    assert Goal().may_meet(seen, 0.0) == may_meet
    assert not Goal().is_met(seen)
    assert Goal(is_given=True).is_met(seen)


@pytest.mark.parametrize(("first", "step"), [(0.0066, "all"), (0.0071, "relieve 1"), (0.009, "relieve 1")])
def test_tensors_of_a_collapsed_model_leave_8_bits_if_that_pays(begin: Begin, first: float, step: str) -> None:
    drops = [first, 0.0049]
    _, searched = run_search(begin(told(lambda _: drops.pop(0), 15.0)))
    assert searched.chosen.step == step
    assert not drops


def test_a_search_goes_on_while_a_stage_pays_and_to_the_end_where_a_goal_was_asked_for(begin: Begin) -> None:
    drops = dict.fromkeys(("relieve 1", "relieve 3", "relieve 8"), 0.019) | {"all": 0.02}
    kept = list[Sequence[Trial]]()
    search = begin(told(drops.get, 15.0), keep=kept.append)
    _, plain = run_search(search)
    _, asked = run_search(search, Goal(is_given=True))
    # One tensor makes 93 % of the noise: without it less than twice the goal may be lost. The net has seven tensors.
    steps = ["all", "relieve 1", "relieve 3", "relieve 8"]
    assert [trial.step for trial in plain.trials] == [trial.step for trial in asked.trials] == steps
    assert (plain.chosen.step, plain.met) == ("all", True)
    assert asked.chosen.step in steps[1:]
    assert not asked.met
    assert tuple(kept[-1]) == asked.trials


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Calibration]:
    """A chain of layers, of whose tensors no few make most of the noise."""
    folder, layers = tmp_path_factory.mktemp("deep"), 17
    middle = " ".join(f"g{i} = MatMul(h{i - 1}, w{i}) h{i} = Tanh(g{i})" for i in range(1, layers))
    text = f"g (float[1,16] x) => (float[1,16] y) {{ h0 = MatMul(x, w0) {middle} y = MatMul(h{layers - 1}, v) }}"
    model = make_model(text, folder / "m.onnx", {"v": (16, 16), **{f"w{i}": (16, 16) for i in range(layers)}})
    return model, calibrate_model(model, random_samples(model, count=24), work=folder / "work")


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Calibration]:
    """Four layers side by side, each with twelve tensors that make the same noise, and a quarter of the usual steps."""
    monkeypatch.setattr("edgekit.quantize.mixed_precision.plan_search._MORE_THAN_FEW", (10, 15, 20))
    monkeypatch.setattr("edgekit.quantize.mixed_precision.plan_search._MOST", 40)
    return draw_branches(tmp_path, 4)


def draw_branches(folder: Path, branches: int) -> tuple[Model, Calibration]:
    layers = [f"h{i} = MatMul(x, w{i}) t{i}_0 = Tanh(h{i})" for i in range(branches)]
    turns = [f"t{i}_{k + 1} = Neg(t{i}_{k})" for i in range(branches) for k in range(10)]
    terms = " ".join([*layers, *turns])
    sums, head = ", ".join(f"t{i}_10" for i in range(branches)), f"g (float[1,16] x) => (float[1,{16 * branches}] y)"
    weights = {f"w{i}": (16, 16) for i in range(branches)}
    model = make_model(f"{head} {{ {terms} y = Concat<axis=1>({sums}) }}", folder / "m.onnx", weights)
    return model, calibrate_model(model, random_samples(model, count=24), work=folder / "work")


@pytest.mark.parametrize("is_like", [True, False])
def test_weights_are_rounded_again_once_activations_hide_no_error(
    tmp_path: Path, is_like: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ compensates an error by inputs that are alike; weights that are whole steps have no error."""
    rng, names = np.random.default_rng(5), ["x", *(f"t{index}" for index in range(1, 64)), "y"]
    rows = [f"{made} = MatMul({read}, w{index})" for index, (read, made) in enumerate(pairwise(names))]
    weights = {f"w{index}": np.linalg.qr(rng.normal(size=(16, 16)))[0].astype(np.float32) for index in range(64)}
    if not is_like:
        weights = {name: np.eye(16, dtype=np.float32) for name in weights}
    text = f"m (float[1,8,16] x) => (float[1,8,16] y) {{ {' '.join(rows)} }}"
    model, mixed = make_model(text, tmp_path / "m.onnx", constants=weights), rng.normal(size=(2, 16))
    drawn = [{"x": (rng.normal(size=(1, 8, 2)) @ mixed).astype(np.float32)} for _ in range(24)]
    calibration, target = calibrate_model(model, make_samples(drawn), work=tmp_path / "work"), load_target("qnn")
    first = plan_quantization(model, calibration, target, "int8", method="minmax")
    subject = Subject(model=model, calibration=calibration, target=target, precision="int8")
    first = msgspec.structs.replace(first, rounding="bias")
    monkeypatch.setattr("edgekit.quantize.mixed_precision.relief._MANY_RELIEVED", 30)
    few, many = (present(relieve_step(subject, first, count, before=first)) for count in (30, 40))
    assert [few.rounding, many.rounding] == ["bias", "gptq" if is_like else "bias"]


def test_a_plan_with_too_little_in_integers_is_not_measured(deep: tuple[Model, Calibration], tmp_path: Path) -> None:
    search = begin_search(deep, told(0.3), tmp_path, "xnnpack")
    first, searched = run_search(search)
    left = search.tried.keys() - {trial.step for trial in searched.trials}
    assert left
    for step in left:
        assert (
            measure_work(search, step, search.tried[step][0]).integer
            < 0.75 * measure_work(search, "all", first).integer
        )


def test_a_step_goes_on_from_a_plan_of_its_factors(deep: tuple[Model, Calibration], tmp_path: Path) -> None:
    search = begin_search(deep, told(0.3), tmp_path, "xnnpack")
    first = run_search(search)[1].trials[0]
    # Its ranges are of tensors that the first plan does not have.
    rival = msgspec.structs.replace(first.plan, factors={"x": (1.0, 2.0)}, ranges={})
    trials = (first, msgspec.structs.replace(first, plan=rival))
    assert present(plan_step(search, trials, 20)) == plan_step(search, trials[:1], 20)


@pytest.mark.parametrize(
    ("net", "drops", "chosen"),
    [
        # Where none may be enough, most are tried first and then fewer by bisection.
        pytest.param("deep", {8: 0.29, 20: 0.26, 40: 0.25}, "relieve 20", id="twenty do as well as forty"),
        pytest.param("deep", {3: 0.29, 8: 0.26, 40: 0.25}, "relieve 8", id="eight do"),
        pytest.param("deep", {8: 0.29, 20: 0.29, 40: 0.25}, "relieve 40", id="forty are needed"),
        pytest.param("deep", {40: 0.295}, "all", id="more hardly save anything"),
        # The worst 20 make too little of the noise to lose so little without them.
        pytest.param("deep", {40: 0.05}, "relieve 40", id="fewer cannot do"),
        # Beyond the last of the usual steps, twice as many get 16 bits where that pays.
        pytest.param("wide", {20: 0.06, 40: 0.04}, "relieve 40", id="twice as many pay"),
        pytest.param("wide", {20: 0.06, 40: 0.055}, "relieve 20", id="20 do as well"),
        pytest.param("wide", {20: 0.004}, "relieve 20", id="20 meet the goal"),
    ],
)
def test_so_many_tensors_get_16_bits_as_pay(
    net: str, drops: dict[int, float], chosen: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    steps = {"all": 0.3, **{f"relieve {count}": drop for count, drop in drops.items()}}
    _, searched = run_search(begin_search(request.getfixturevalue(net), told(steps.get), tmp_path))
    assert [trial.step for trial in searched.trials] == [*steps]
    assert searched.chosen.step == chosen


def test_the_worst_tensors_take_no_more_noise_than_is_theirs() -> None:
    assert (bound_relief([6.0, 3.0, 1.0], 1), bound_relief([], 1)) == (0.6, 0.0)
    assert rise_db(0.9) == pytest.approx(10.0)
    assert rise_db(bound_relief([1.0] * 40, 8)) < LEAST_GAIN_DB < rise_db(bound_relief([1.0] * 40, 9))


@pytest.mark.parametrize(
    ("drops", "moved", "chosen"),
    [
        ({"all": 0.04, "minmax": 0.004}, -1.0, "minmax"),
        ({"all": 0.004, "minmax": 0.0025}, 0.0, "minmax"),
        ({"all": 0.004, "minmax": 0.0035}, -1.0, "all"),
        ({"all": 0.004, "minmax": 0.0045}, 1.0, "minmax"),
        ({"all": 0.0045, "minmax": 0.0055}, 1.0, "all"),
        ({"all": 0.004, "minmax": 0.0055}, 1.0, "all"),
        ({"all": 0.0009}, 1.0, "all"),
    ],
    ids=[
        *("alone meets the goal", "moves as much, loses less", "moves more", "moves less"),
        *("moves less, misses the goal", "worse", "nothing to gain"),
    ],
)
def test_minmax_wins_where_it_loses_less(begin: Begin, drops: dict[str, float], moved: float, chosen: str) -> None:
    steps = list[str]()
    measure = told(lambda step: drops.get(step, 0.05), steps=steps)
    plan, searched = run_all(begin(measure, compare=lambda _chosen, _minmax: moved), narrow=True)
    assert (searched.chosen.step, searched.met) == (chosen, True)
    assert drops.keys() <= set(steps)
    assert ("minmax" in steps) == ("minmax" in drops)
    assert (plan.method, plan.rounding) == ("minmax", "nearest") or chosen != "minmax"


def test_a_plan_that_loses_much_says_what_16_bits_would_lose(begin: Begin) -> None:
    search = begin(told(lambda step: 0.001 if step == "int16" else 0.1, 12.0), may_widen=True)
    plan, searched = run_all(search)
    assert plan.precision == "int8"
    told_of = r"--precision int16: 0.10 points are lost, \d\.\d\d times the bytes, 100% of the work in integers"
    assert re.fullmatch(told_of, searched.advice)
    plan, searched = run_all(search, 0.005)
    assert (plan.precision, searched.met, searched.chosen.step) == ("int16", True, "int16")
    known = dict[str, Trial]()
    for _ in range(2):
        # The second search knows all steps, and has none of their files.
        asked = msgspec.structs.replace(search, may_widen=False, tried={}, known=known)
        plan, searched = run_all(asked, 0.005)
        assert (plan.precision, searched.met) == ("int8", False)
        assert searched.advice
        known = {trial.step: trial for trial in searched.trials}


@pytest.mark.parametrize(
    ("drop", "target", "advice"),
    [
        (0.02, "qnn", ""),
        (0.03, "qnn", "--precision int16: 3.00 points are lost, which is no better: more samples may help"),
        (0.03, "xnnpack", "no plan that was tried loses less: more samples may help"),
    ],
)
def test_advice_is_given_from_two_points_on(begin: Begin, drop: float, target: str, advice: str) -> None:
    _, searched = run_all(begin(told(drop), target=target, may_widen=True))
    assert searched.advice.startswith(advice)
    assert bool(searched.advice) == bool(advice)


@pytest.mark.parametrize(
    ("target", "ratio", "high", "is_said"),
    [
        ("qnn", 3.0, 0.07, True),
        ("qnn", 3.0, 0.02, False),
        ("qnn", 20.0, 0.07, False),
        # Without 16 bits the advice would cost as much as the plan.
        ("xnnpack", 3.0, 0.07, False),
    ],
)
def test_advice_is_given_where_the_samples_leave_open_what_is_lost(
    begin: Begin, target: str, ratio: float, high: float, *, is_said: bool
) -> None:
    """A layout detector with 3 dB was told to lose 1.80 points (-3 to 7), without a word of what would help."""

    def measure(quantized: Model) -> Prediction:
        found = told(0.003, ratio)(quantized)
        return msgspec.structs.replace(found, drop_interval=(-0.03, high), measure=MEASURES["image"].name)

    _, searched = run_all(begin(measure, target=target, may_widen=True))
    assert searched.advice.startswith("--precision int16: 0.30 % are lost" if is_said else "")
    assert bool(searched.advice) == is_said


@pytest.mark.parametrize(("kept", "is_said"), [(0.62, True), (0.91, False)])
def test_where_many_decisions_change_at_no_cost_16_bits_are_tried(begin: Begin, kept: float, *, is_said: bool) -> None:
    measure = told(lambda step: 0.004 if step == "int16" else 0.003, same=lambda step: {"int16": 0.99}.get(step, kept))
    _, searched = run_all(begin(measure))
    assert bool(searched.advice) == is_said
    what = (
        r"--precision int16: 0.40 points are lost and 99.0% of the decisions are the same, \d\.\d\d times the bytes.*"
    )
    assert re.fullmatch(what, searched.advice) or not is_said


READER = "g (float[1,12,24] x) => (float[1,12,9000] y) { h = MatMul(x, eye) l = MatMul(h, w) y = Add(l, b) }"
ENCODER = """g (float[10,1,16] x) => (float[1,16] y)
  <int64[1] last = {-1}, int64[1] end = {10}, int64[1] zero = {0}, int64[1] one = {1}> {
  s = LSTM<hidden_size=16>(x, w, r, b) q = Squeeze(s, one) t = Slice(q, last, end, zero) v = Squeeze(t, zero)
  p = MatMul(v, proj) n = ReduceL2<axes=[1], keepdims=1>(p) y = Div(p, n) }"""


def draw_reader(folder: Path) -> tuple[Model, Samples]:
    """A line reader whose last weights make 9,000 raw logits a step, of which one is sure."""
    rng = np.random.default_rng(3)
    glyphs: Array = rng.normal(size=(24, 9000)).astype(np.float32)
    glyphs *= rng.uniform(0.8, 1.2, 9000).astype(np.float32) / np.linalg.norm(glyphs, axis=0)
    constants = {"eye": np.eye(24, dtype=np.float32), "w": glyphs, "b": np.zeros(9000, np.float32)}
    rows = list[Tensors]()
    for _ in range(24):
        line: Array = glyphs[:, rng.integers(0, 9000, 12)].T * rng.uniform(25, 60, (12, 1))
        rows.append({"x": (line + rng.normal(0, 0.3, line.shape)).astype(np.float32)[None]})
    return make_model(READER, folder / "m.onnx", constants=constants), make_samples(rows)


def draw_encoder(folder: Path) -> tuple[Model, Samples]:
    """A recurrent encoder of unit vectors."""
    model = make_model(
        ENCODER, folder / "m.onnx", {"w": (1, 64, 16), "r": (1, 64, 16), "b": (1, 128), "proj": (16, 16)}
    )
    return model, random_samples(model, count=24)


@pytest.mark.parametrize(("loudest", "is_cut"), [(10_000, True), (1, False)])
def test_the_tail_of_an_input_is_cut_where_it_saturates(tmp_path: Path, loudest: int, *, is_cut: bool) -> None:
    model, _ = draw_encoder(tmp_path)
    rng = np.random.default_rng(5)
    rows = [{"x": np.exp(rng.normal(size=(10, 1, 16))).astype(np.float32)} for _ in range(32)]
    rows[::4] = [{"x": row["x"] * np.float32(loudest)} for row in rows[::4]]
    calibration, plan = plan_model(model, tmp_path, "qnn", make_samples(rows), "auto", "int16")
    assert (plan.ranges["x"].high < calibration.ranges["minmax"]["x"].high) == is_cut
    if is_cut:
        assert plan.judged[0].sqnr_db > plan.judged[1].sqnr_db + 3


DRAWN: dict[str, Callable[[Path], tuple[Model, Samples]]] = {
    "reader": draw_reader,
    "encoder": draw_encoder,
    # A small CNN, whose plan comes nearer than 30 dB.
    "classifier": lambda folder: (model := conv_net(folder), random_samples(model, count=24)),
}


# test_quantize_families.py holds the plans of nets that stock quantization ruins to a higher limit.
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_written_was_measured_and_never_loses_more_than_plain_minmax(name: str, tmp_path: Path) -> None:
    model, samples = DRAWN[name](tmp_path)
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    measure = FloatReference(model, samples).predict_drop
    for target in ("qnn", "xnnpack"):
        search = begin_search((model, calibration), measure, tmp_path, target)
        plan, searched = run_all(search, narrow=True)
        written = measure(write_chosen(search, plan, searched, tmp_path / "written.onnx").model)
        told = searched.chosen.prediction
        # The interval is that of these samples, or reaches as far as that of new ones.
        assert msgspec.structs.replace(told, drop_interval=written.drop_interval) == written
        assert present(told.drop_interval)[1] >= present(written.drop_interval)[1]
        stock = plan_minmax(search, plan)
        plain = measure(quantize_model(model, stock, calibration, tmp_path / "stock.onnx").model)
        assert present(written.drop_estimate) <= present(plain.drop_estimate) + 0.001
        if name == "reader":
            # Winners that are cut tie, and no line would be left.
            assert written.measure == MEASURES["sequence"].name
            assert present(written.top1_agreement) > 0.9


def draw_rows(count: int, seed: int, distinct: int) -> list[Tensors]:
    """Rows between -1 and 1, of which so many are distinct."""
    few = np.random.default_rng(seed).uniform(-1, 1, (distinct, 1, 32)).astype(np.float32)
    return [{"x": few[index % distinct]} for index in range(count)]


@pytest.mark.parametrize("target", ["qnn", "xnnpack"])
@pytest.mark.parametrize("are_new", [True, False])
def test_ranges_get_headroom_where_new_samples_would_reach_beyond_them(
    target: str, are_new: bool, tmp_path: Path
) -> None:
    """The samples of a calibration are never clipped by minmax, so they tell too little of what new ones lose.

    Samples of which each was seen twice have no extremes of their own.
    """
    rows = draw_rows(48, 5, 48 if are_new else 16)
    text = "(float[1,32] x) => (float[1,8] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"
    model = make_model(text, tmp_path / "m.onnx", {"w": (32, 24), "v": (24, 8)})
    found = find_searched(tmp_path, model, rows, load_target(target))
    assert found.chosen.step.endswith("times as wide") == are_new
    plans = {trial.step: trial.plan for trial in found.trials}
    before = plans[found.chosen.step.split(", ranges")[0]]
    factor = found.chosen.plan.ranges["x"].high / before.ranges["x"].high
    assert math.log2(factor) == pytest.approx(round(2 * math.log2(factor)) / 2, abs=0.01)
    assert (factor > 1) == are_new
    # What new samples lose is within the told interval, and with headroom they lose less.
    calibration = calibrate_model(model, make_samples(rows), work=tmp_path / "again")
    reference = FloatReference(
        model, make_samples(draw_rows(256, 6, 256) if are_new else rows), {"y": StatedOutput(kind="values")}
    )
    lost = [
        reference.predict_drop(quantize_model(model, plan, calibration, tmp_path / "q.onnx").model).loss()
        for plan in (found.chosen.plan, before)
    ]
    assert lost[0] <= present(found.chosen.prediction.drop_interval)[1]
    assert lost[0] < lost[1] / 2 if are_new else lost[0] == lost[1]


def seldom(rows: int) -> list[Tensors]:
    """Rows of which one is ten times as large as the others."""
    return [{"x": row["x"] * (10 if index == 5 else 1)} for index, row in enumerate(draw_rows(rows, 5, rows))]


@pytest.mark.parametrize(
    ("max_drop", "unseen", "own", "target", "factor", "advice"),
    [
        # As wide as it saves a tenth of a point, and the default mode's goal is missed by more without.
        (None, (0.3, 0.2, 0.1, 0.0995), {1.4: 0.001, 2: 0.006}, "qnn", "2", ""),
        (None, (0.0014,), {}, "qnn", "", ""),
        (None, (0.3, 0.2995), {}, "qnn", "", ""),
        # A goal of the user that is met stays met.
        (0.005, (0.3, 0.2, 0.1, 0.0995), {1.4: 0.004, 2: 0.006}, "qnn", "1.4", ""),
        (0.005, (0.3, 0.2, 0.2), {1.4: 0.006}, "qnn", "", ""),
        # What would help, if much is lost now.
        (None, (0.3, 0.2, 0.2), {1.4: 0.03}, "qnn", "1.4", "--precision int16"),
        (None, (0.3, 0.2, 0.2), {1.4: 0.03}, "xnnpack", "1.4", "more samples may help"),
        # An output that is lost entirely, however wide the ranges are.
        (None, (math.inf, math.inf), {}, "qnn", "", ""),
    ],
)
def test_headroom_is_as_wide_as_new_samples_need(
    max_drop: float | None,
    unseen: tuple[float, ...],
    own: dict[float, float],
    target: str,
    factor: str,
    advice: str,
    tmp_path: Path,
) -> None:
    text = "(float[1,32] x) => (float[1,8] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"
    model = make_model(text, tmp_path / "m.onnx", {"w": (32, 24), "v": (24, 8)})
    samples, left = make_samples(seldom(32)), list(unseen)

    def measure(quantized: Model) -> Prediction:
        step = quantized.path.stem
        wide = re.search(r"ranges ([0-9.]+) times", step)
        lost = left.pop(0) if "left out" in step else 0.0005 if wide is None else own[float(wide[1])]
        is_lost = lost == math.inf
        return predicted(None if is_lost else lost, (-0.01, lost), sqnr_db=-math.inf if is_lost else 30)

    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    _, found = run_all(begin_search((model, calibration), measure, tmp_path, target), max_drop)
    assert found.chosen.step == (f"all, ranges {factor} times as wide" if factor else "all")
    assert found.met
    assert advice in found.advice
    assert bool(found.advice) == bool(advice)
    assert not left
    # The interval reaches as far as that of new samples with the chosen plan.
    steps = list(own)
    assert present(found.chosen.prediction.drop_interval)[1] == unseen[steps.index(float(factor)) + 1 if factor else 0]


def test_headroom_ends_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "(float[1,32] x) => (float[1,8] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"
    model = make_model(text, tmp_path / "m.onnx", {"w": (32, 24), "v": (24, 8)})
    calibration = calibrate_model(model, make_samples(seldom(32)), work=tmp_path / "work")

    def measure(quantized: Model) -> Prediction:
        if "left out" not in quantized.path.stem:
            return predicted(0.0005)
        # The time ends during the first of these.
        monkeypatch.setattr("edgekit.progress.time", SimpleNamespace(monotonic=lambda: math.inf))
        return predicted(0.3, (0.2, 0.4))

    search = begin_search((model, calibration), measure, tmp_path)
    _, found = run_all(search)
    assert found.chosen.step == "all"
    assert found.chosen.prediction.drop_interval == (0.2, 0.4)
    assert search.memo.budget.left_out == ["ranges with headroom"]


def test_a_plan_that_leaves_nothing_in_integers_is_no_failure(tmp_path: Path) -> None:
    """With 20 tensors in float only a Gather is left, which is not quantized between nodes that compute in float."""
    layers = " ".join(f"h{at} = MatMul(x{at}, w{at}) x{at + 1} = Relu(h{at})" for at in range(12))
    end = "e = Exp(x12) g = Gather<axis=1>(e, i) y = Sqrt(g)"
    text = f"(float[1,32] x0) => (float[1,4] y) <int64[4] i = {{0,1,2,3}}> {{ {layers} {end} }}"
    model = make_model(text, tmp_path / "m.onnx", {f"w{at}": (32, 32) for at in range(12)})
    samples = [{"x0": row["x"]} for row in seldom(32)]
    calibration = calibrate_model(model, make_samples(samples), work=tmp_path / "work")
    search = begin_search((model, calibration), told(0.3), tmp_path, "nnapi")
    _, found = run_all(search, None)
    assert search.memo.budget.failed == {}
    assert "no plan that was tried loses less" in found.advice
