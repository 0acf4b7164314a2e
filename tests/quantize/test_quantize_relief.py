"""A tensor that leaves 8 bits is not rounded to 8 bits on its way there."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import make_job, require_device
from fixture_types import present
from onnx import TensorProto, helper, numpy_helper
from quantize_models import (
    Units,
    make_model,
    make_samples,
    make_search,
    plan_model,
    predicted,
    quantize,
    random_samples,
    sqnr_db,
)

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.errors import UsageError
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.constants import find_narrow, narrow_constants, round_by_channel, widen_constants
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.apply import require_plan
from edgekit.quantize.gptq import Rounding
from edgekit.quantize.graph.float_graph import range_source, read_float_graph
from edgekit.quantize.mixed_precision.candidates import (
    Draft,
    judge_plan,
    place_draft,
    store_narrow,
)
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.relief import fit_inputs, relieve_tensors
from edgekit.quantize.mixed_precision.score import (
    SWITCHES,
    switch_activations,
)
from edgekit.quantize.mixed_precision.sensitivity import (
    Bound,
    Noises,
    TensorError,
    rank_activations,
    rank_plan,
    search_spans,
)
from edgekit.quantize.plan import FloatNode, NarrowConstants, find_float_constants
from edgekit.quantize.qdq import build_qdq
from edgekit.quantize.ranges import scale_range
from edgekit.target import Precision, load_target

ACTIVATIONS = {
    "Relu": "r = Relu(c)",
    "Relu behind a Transpose": "t = Transpose<perm=[0,1,3,2]>(c) r = Relu(t)",
    "Clip": "r = Clip(c, zero, big)",
    "LeakyRelu": "r = LeakyRelu<alpha=0.1>(c)",
    "PRelu": "r = PRelu(c, slope)",
    "HardSwish": "r = HardSwish(c)",
}


def make_net(activation: str, folder: Path) -> tuple[Model, Calibration]:
    """A Conv and an activation, whose second channel is 300 times as large as the others, and what evens that out."""
    text = f"""g (float[1,3,8,8] x) => (float[1,40,8,8] y)
      <float zero = {{0.0}}, float big = {{4000.0}}> {{
      c = Conv<kernel_shape=[1,1]>(x, w1, b1) {ACTIVATIONS[activation]}
      d = Conv<kernel_shape=[1,1]>(r, w2) e = Relu(d) y = Conv<kernel_shape=[1,1]>(e, w3) }}"""
    shapes = {"w1": (8, 3, 1, 1), "b1": (8,), "w2": (16, 8, 1, 1), "w3": (40, 16, 1, 1), "slope": (8, 1, 1)}
    model = make_model(text, folder / "m.onnx", {name: shapes[name] for name in shapes if name in text})
    proto = onnx.load(str(model.path))
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    for name, part, scale in (("w1", np.s_[1], 300.0), ("w2", np.s_[:, 1], 1 / 300)):
        value = numpy_helper.to_array(stored[name]).copy()
        value[part] *= scale
        stored[name].CopyFrom(numpy_helper.from_array(value, name))
    onnx.save(proto, str(model.path))
    return model, calibrate_model(model, random_samples(model, count=12), work=folder / "work")


def roundings_before(model: Model, name: str) -> set[str]:
    """The integer types that values go through between the first Conv and a tensor."""
    units, found = Units(model), set[str]()
    waiting = [units.makers[name if name in units.makers else f"{name}_QuantizeLinear_Input"]]
    while waiting:
        node = waiting.pop()
        if node.op_type == "QuantizeLinear":
            found.add(units.stored[node.input[2]].dtype.name)
        if node.op_type != "Conv":
            waiting += [units.makers[each] for each in node.input if each in units.makers]
    return found


@pytest.mark.parametrize("target", ["qnn", "xnnpack"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_8_bits_lie_between_a_layer_and_what_left_8_bits(activation: str, target: str, tmp_path: Path) -> None:
    model, calibration = make_net(activation, tmp_path)
    plan = plan_quantization(model, calibration, load_target(target), "int8", method="minmax")
    widens = target == "qnn"
    relieved = relieve_tensors(read_float_graph(model), plan, ("r",), calibration, widens=widens)
    made = quantize_model(model, relieved, calibration, tmp_path / "q.onnx").model
    assert roundings_before(made, "r") <= {"uint16"}
    plain = quantize_model(model, plan, calibration, tmp_path / "p.onnx").model
    assert sqnr_db(model, made) > sqnr_db(model, plain) + 6


def test_a_constant_has_16_bits_where_the_tensor_has_that_it_is_added_to(tmp_path: Path) -> None:
    text = """g (float[1,4] x) => (float[1,16] y)
        <float[4] mean = {75.5, 1.5, 0.5, 5}, float[4] step = {0.02, 0.9, 2, 0.3}>
        { c = Sub(x, mean) r = Transpose<perm = [0, 1]>(c) s = Mul(r, step) y = MatMul(s, w) }"""
    model, rng = make_model(text, tmp_path / "m.onnx", {"w": (4, 16)}), np.random.default_rng(0)
    columns = [rng.integers(1, 150, 64), rng.integers(0, 4, 64), rng.integers(0, 2, 64), rng.integers(2, 9, 64)]
    rows: list[Tensors] = [{"x": row[None].astype(np.float32)} for row in np.stack(columns, axis=1)]
    calibration, plan = plan_model(model, tmp_path, "qnn", make_samples(rows))
    relieved = relieve_tensors(read_float_graph(model), plan, ("x", "c", "s"), calibration, widens=True)
    assert relieved.wide.keys() >= {"x", "c", "s", "mean", "step"}
    made = quantize_model(model, relieved, calibration, tmp_path / "q.onnx").model
    assert sqnr_db(model, made, rows) > 30
    # The constants of the node that makes a tensor count too, and those behind a node that only moves values.
    wide = relieve_tensors(read_float_graph(model), plan, ("c",), calibration, widens=True).wide
    assert wide.keys() == {"c", "r", "mean", "step"}
    # `step` is read by a product that stays in 8 bits too, and a constant has one grid.
    shared = make_model(text.replace("y = ", "t = Relu(x) u = Mul(t, step) y = "), tmp_path / "s.onnx", {"w": (4, 16)})
    wide = relieve_tensors(read_float_graph(shared), plan, ("x", "c"), calibration, widens=True).wide
    assert "mean" in wide
    assert "step" not in wide


def test_what_only_multiplies_zeros_does_not_widen_the_range_of_a_constant(tmp_path: Path) -> None:
    """As a layer of Keras normalizes inputs: it divides the first, which never varies, by 1e-7."""
    text = """g (float[1,4] x) => (float[1,16] y)
        <float[4] mean = {3, 1.5, 0.5, 5}, float[4] step = {1e7, 0.9, 2, -0.3}>
        { c = Sub(x, mean) s = Mul(c, step) y = MatMul(s, w) }"""
    model, rng = make_model(text, tmp_path / "m.onnx", {"w": (4, 16)}), np.random.default_rng(0)
    columns = [np.full(64, 3), rng.integers(0, 4, 64), rng.integers(0, 2, 64), rng.integers(2, 9, 64)]
    rows: list[Tensors] = [{"x": row[None].astype(np.float32)} for row in np.stack(columns, axis=1)]
    least: dict[Precision, int] = {"int8": 30, "int16": 40}
    for precision, enough in least.items():
        work = tmp_path / precision
        calibration, plan = plan_model(model, work, "qnn", make_samples(rows), precision=precision)
        assert (plan.ranges["step"].low, plan.ranges["step"].high) == pytest.approx((-0.3, 2))
        if precision == "int8":
            plan = relieve_tensors(read_float_graph(model), plan, ("x", "c", "s"), calibration, widens=True)
        assert sqnr_db(model, quantize_model(model, plan, calibration, work / "q.onnx").model, rows) > enough
    # A sample in which the input varies shows what the number does.
    changed: Tensors = {"x": rows[0]["x"] + np.array([1, 0, 0, 0], np.float32)}
    calibration, plan = plan_model(model, tmp_path / "seen", "qnn", make_samples([*rows, changed]))
    assert "step" not in plan.ranges


def test_the_range_of_a_constant_that_multiplies_known_ends_is_its_own(tmp_path: Path) -> None:
    """A reader of captchas weighs the letters of a Sigmoid: it has the ends 0 and 1 in all channels."""
    text = """g (float[1,4] x) => (float[1,16] y) <float[4] weight = {1, 2, 3, 4}>
        { c = Sigmoid(x) s = Mul(c, weight) y = MatMul(s, w) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w": (4, 16)})
    _, plan = plan_model(model, tmp_path, "qnn", random_samples(model, 8))
    assert "weight" not in plan.ranges


def test_what_pads_a_tensor_in_16_bits_has_16_too(tmp_path: Path) -> None:
    # QNN's provider refuses a value of another width; one of zero is left out before (`plain-pad`).
    text = (
        "g (float[1,4] x) => (float[1,6] y) <int64[4] p = {0,1,0,1}, float v = {-1.5}> { c = Abs(x) y = Pad(c, p, v) }"
    )
    model = make_model(text, tmp_path / "m.onnx")
    rows: list[Tensors] = [{"x": np.array([[1, -2, 3, index]], np.float32)} for index in range(8)]
    calibration, plan = plan_model(model, tmp_path, "qnn", make_samples(rows))
    assert relieve_tensors(read_float_graph(model), plan, ("c",), calibration, widens=True).wide.keys() >= {"c", "v"}


@pytest.mark.parametrize("rounding", ["nearest", "bias"])
@pytest.mark.parametrize(("precision", "most"), [("int16", 2**28), ("int8", 2**31)])
def test_biases_leave_room_for_products(tmp_path: Path, rounding: Rounding, precision: Precision, most: int) -> None:
    # The weights of a dead channel decay: the least scale with which its bias fits into 32 bits counts.
    stored = {"w": np.array([[1e-9, -0.61e-9], [1, 2.27]], np.float32), "b": np.array([5, 0.2], np.float32)}
    text = "g (float[1,2] x) => (float[1,2] y) { y = Gemm<transB=1>(x, w, b) }"
    model = make_model(text, tmp_path / "m.onnx", constants=stored)
    rows: list[Tensors] = [{"x": row[None]} for row in np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)]
    calibration, plan = plan_model(model, tmp_path, "qnn", make_samples(rows), precision=precision)
    plan = msgspec.structs.replace(plan, rounding=rounding)
    integers = Units(quantize_model(model, plan, calibration, tmp_path / "q.onnx").model).stored.values()
    largest = max(int(np.abs(each.astype(np.int64)).max()) for each in integers if each.dtype == np.int32)
    assert 0.99 * most < largest <= most


# The weights of dead channels: zero; so small that their products vanish in the output's step; and a live one that the
# Clip cuts off, whose scale is far larger.
DEAD = np.array([[0, 0], [1e-9, -0.61e-9], [310, 240], [1, 2.27]], np.float32)[:, :, None, None]


def quantize_dead_channels(precision: Precision, work: Path) -> Model:
    stored = {"w": DEAD, "b": np.array([2.7, 1e-7, -2e3, 0.2], np.float32), "v": np.eye(4, dtype=np.float32) - 0.3}
    stored["v"] = stored["v"][:, :, None, None]
    text = "g (float[1,2,6,6] x) => (float[1,4,6,6] y) { c = Conv(x, w, b) h = Clip(c, low, high) y = Conv(h, v) }"
    limits = {"low": np.array(0, np.float32), "high": np.array(6, np.float32)}
    model = make_model(text, work / "m.onnx", constants={**stored, **limits})
    drawn = np.random.default_rng(0).normal(size=(16, 1, 2, 6, 6)).astype(np.float32)
    return quantize(model, work, "qnn", make_samples([{"x": row} for row in drawn]), "minmax", precision).model


def test_scales_beside_data_of_16_bits_are_large_enough_for_the_kernel(tmp_path: Path) -> None:
    least: dict[Precision, float] = {}
    for precision in ("int16", "int8"):
        (tmp_path / precision).mkdir()
        units = Units(quantize_dead_channels(precision, tmp_path / precision))
        conv = next(node for node in units.nodes if node.op_type == "Conv")
        (steps, _), (scales, _), (made_steps, _) = units.read(conv, 0), units.read(conv, 1), units.write(conv)
        # A channel of zeros has the least scale with which its bias fits, since that is less coarse than another.
        assert scales[1] < scales[0] < scales[3]
        least[precision] = float((steps * scales / made_steps).min() * 2**24)
    assert 1 <= least["int16"] < 1.01
    assert least["int8"] < 0.1


@pytest.mark.slow
def test_dead_channels_are_computed_rightly_in_16_bits(tmp_path: Path) -> None:
    made = quantize_dead_channels("int16", tmp_path)
    sample: Tensors = {"x": np.random.default_rng(1).normal(size=(1, 2, 6, 6)).astype(np.float32)}
    run = require_device("qnn-htp-sim", "qnn").run_job(make_job(made.path, "qnn", [sample]), tmp_path)
    wanted = CpuSession(made.path, SessionSettings()).run(sample)["y"]
    assert np.abs(next(iter(run.outputs))["y"] - wanted).max() < 0.005 * np.abs(wanted).max()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_input_is_cut_at_its_long_end_alone_while_the_outputs_gain(tmp_path: Path, sign: int) -> None:
    model = make_model("g (float[1,64] x) => (float[1,32] y) { h = Tanh(x) y = MatMul(h, w) }", tmp_path / "m.onnx",
                       {"w": (64, 32)})  # fmt: skip
    rows = np.random.default_rng(0).uniform(-1, 1, (48, 1, 64)).astype(np.float32)
    drafts = []
    for tail in (1, 30):
        rows[::2, 0, 0] = sign * tail
        samples = make_samples([{"x": row} for row in rows])
        calibration, plan = plan_model(model, tmp_path / f"{tail}", "qnn", samples)
        drafts.append(Draft(graph=read_float_graph(model), calibration=calibration, plan=plan))
    steady, tailed = drafts
    assert fit_inputs(steady) == steady.plan
    fitted = msgspec.structs.replace(tailed, plan=fit_inputs(tailed))
    span, before = fitted.plan.ranges["x"], tailed.plan.ranges["x"]
    ends = (span.low, span.high)[::sign]
    assert ends[0] == (before.low, before.high)[::sign][0]
    assert 0.5 < abs(ends[1]) < 8
    assert judge_plan(fitted).sqnr_db > judge_plan(tailed).sqnr_db + 6


STACKED = """<ir_version: 10, opset_import: ["" : 21]>
  g (float[1,1,64] x, float[1,1,64] far) => (float[1,2,64] y, float[1,1,64] z) <int64[3] shape = {1,1,64}> {
  near = Tanh(x) flat = Reshape(near, shape) y = Concat<axis=1>(flat, far) z = Tanh(far) }"""


@pytest.mark.slow
def test_eight_bits_in_a_concat_of_coarser_steps_are_wrong_and_are_avoided(tmp_path: Path) -> None:
    model, rng = make_model(STACKED, tmp_path / "m.onnx"), np.random.default_rng(0)
    samples: list[Tensors] = [
        {"x": each, "far": (300 * each - 30).astype(np.float32)}
        for each in rng.uniform(-1, 1, (16, 1, 1, 64)).astype(np.float32)
    ]
    calibration, plan = plan_model(model, tmp_path, "qnn", make_samples(samples))
    relieved = relieve_tensors(read_float_graph(model), plan, ["y"], calibration, widens=True)
    assert relieved.wide.keys() >= {"y", "near", "flat"}
    exact = calibration.ranges["minmax"]
    # In 16 bits a Concat of nearly the same range has finer steps than its inputs: those keep 8 bits.
    alike = msgspec.structs.replace(calibration, ranges={"minmax": dict.fromkeys(exact, exact["near"])})
    assert relieve_tensors(read_float_graph(model), plan, ["y"], alike, widens=True).wide.keys() == {"y"}
    for wide, is_right in (({"y": exact["y"]}, False), (relieved.wide, True)):
        changed, out = msgspec.structs.replace(plan, wide=wide), tmp_path / f"{is_right}.onnx"
        quantized = quantize_model(model, changed, calibration, out).model
        work = tmp_path / f"{is_right}"
        work.mkdir()
        run = require_device("qnn-htp-sim", "qnn").run_job(make_job(out, "qnn", samples[:1]), work)
        assert (run.failure, run.notes) == (None, ())
        wanted, found = CpuSession(quantized.path, SessionSettings()).run(samples[0])["y"], next(iter(run.outputs))["y"]
        # If this fails with a new version of QNN, it requantizes rightly, and the wider inputs can go.
        assert bool(np.abs(wanted - found)[:, 0].max() < 0.1) == is_right


WEIGHTS_ONLY = SessionSettings(level=Level.DISABLED)


def test_what_is_squared_and_magnified_is_ranked_before_what_is_not(tmp_path: Path) -> None:
    text = """g (float[1,64] x) => (float[1,40] y) <float big = {1000.0}> {
      h = MatMul(x, w) t = Mul(h, h) u = Mul(t, big) r = MatMul(u, v) y = Add(r, h) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w": (64, 40), "v": (40, 40)})
    rng = np.random.default_rng(0)
    rows = [{"x": (rng.normal(size=(1, 64)) * 10.0 ** rng.uniform(-2, 0)).astype(np.float32)} for _ in range(48)]
    calibration, plan = plan_model(model, tmp_path, "nnapi", make_samples(rows))
    ranked = rank_plan(model, plan, calibration)
    assert {error.name for error in ranked[:4]} == {"t", "u", "r", "y"}
    assert ranked[-1].name == "h"


def test_looking_closely_at_a_few_names_all_and_the_same_first(net: Model, tmp_path: Path) -> None:
    calibration, plan = plan_model(net, tmp_path, "nnapi", random_samples(net, count=32))
    draft = Draft(graph=read_float_graph(net), calibration=calibration, plan=plan)
    graph, qdq = draft.graph, build_qdq(draft.graph, plan, draft.statistics, "m")
    known: dict[str, Noises] = {}
    bound = Bound(worst=3, most=21, samples=4, guesses={})
    some = rank_activations(draft, qdq, bound=bound, known=known)
    assert rank_activations(draft, qdq, bound=bound, known=known) == some
    every = rank_activations(draft, qdq)
    known.clear()
    assert rank_activations(draft, qdq, known=known) == every
    (found,) = known.values()
    assert len(found) >= 6 * len(every)
    found |= {key: powers * [1, 4] for key, powers in found.items()}
    four_times = rank_activations(draft, qdq, known=known)
    assert [each.sqnr_db for each in four_times[:5]] == pytest.approx(
        [each.sqnr_db - 6.02 for each in every[:5]], abs=0.011
    )
    assert len(every) > len(some) > 3
    assert {error.name for error in some} == {range_source(graph, error.name) for error in every}
    assert some[0].name == every[0].name


def test_what_one_target_measured_is_known_to_others_that_quantize_alike_what_is_compared(tmp_path: Path) -> None:
    text = """g (float[1,16] x) => (float[1,16] y) {
        a = MatMul(x, v) b = Relu(a) l = MatMul(b, w) y = Softmax(l) }"""
    model = make_model(text, tmp_path / "m.onnx", {"v": (16, 16), "w": (16, 16)})
    calibration = calibrate_model(model, random_samples(model, count=32), work=tmp_path / "work")
    graph, runs, counts = read_float_graph(model), dict[str, Noises](), dict[str, int]()

    def rank(target: str, known: dict[str, Noises], factor: float = 1.0) -> tuple[TensorError, ...]:
        plan = plan_quantization(model, calibration, load_target(target), "int8", method="minmax")
        ranges = {name: scale_range(span, factor) for name, span in plan.ranges.items()}
        plan = msgspec.structs.replace(plan, ranges=ranges)
        draft = Draft(graph=graph, calibration=calibration, plan=plan).use_unsigned()
        bound = Bound(worst=3, most=99, samples=4, guesses={})
        return rank_activations(draft, place_draft(draft), bound=bound, known=known)

    for target in ("cpu", "qnn", "xnnpack"):
        assert rank(target, runs) == rank(target, {})
        counts[target] = sum(map(len, runs.values()))
    # The Softmax behind the compared logits has another scale on qnn, and stays float on xnnpack.
    assert counts["cpu"] == counts["qnn"] == counts["xnnpack"] > 0
    assert rank("cpu", runs, 0.5) == rank("cpu", {}, 0.5) != rank("cpu", runs)


@pytest.mark.parametrize("worst", [3, 80])
def test_a_ranking_takes_three_runs_for_each_activation_or_eleven_for_each_sought(worst: int, tmp_path: Path) -> None:
    layers = " ".join(f"h{index} = MatMul(x{index}, w) x{index + 1} = Tanh(h{index})" for index in range(20))
    text = f"g (float[1,16] x0) => (float[1,16] y) {{ {layers} y = MatMul(x20, w) }}"
    model = make_model(text, tmp_path / "m.onnx", {"w": (16, 16)})
    calibration, plan = plan_model(model, tmp_path, "qnn", random_samples(model, count=32))
    draft = Draft(graph=read_float_graph(model), calibration=calibration, plan=plan)
    qdq = build_qdq(draft.graph, plan, draft.statistics, "m")
    known: dict[str, Noises] = {}
    found = rank_activations(draft, qdq, bound=Bound(worst=worst, most=999, samples=4, guesses={}), known=known)
    (runs,) = known.values()
    assert len(found) == 42
    assert len(runs) <= (3 * len(found) if worst > len(found) else 11 * worst + 1)
    # The worst are judged by all samples.
    every = {
        each.name: each.sqnr_db
        for each in rank_activations(draft, qdq, bound=Bound(worst=99, most=999, samples=4, guesses={}))
    }
    assert found[0].sqnr_db == every[found[0].name]


@pytest.mark.parametrize(
    ("at", "guess", "worst", "most", "runs"),
    [(0, 1.0, 8, 99, 56), (99, 1.0, 8, 99, 56), (140, 1.0, 8, 99, 56), (99, 1e-4, 3, 28, 28)],
)
def test_the_worst_of_many_are_found_in_spans(at: int, guess: float, worst: int, most: int, runs: int) -> None:
    """Guesses halve the runs; wrong ones cost runs, but what was judged decides."""
    noise, judged = np.full(141, 1e-6), list[int]()
    noise[[at, 30, 70]] = 1.0, 0.1, 0.01

    def judge(spans: Sequence[range]) -> list[float]:
        judged.append(len(spans))
        return [float(-10 * np.log10(noise[span.start : span.stop].sum())) for span in spans]

    ratios = search_spans([max(guess, 0.01) if each > 1e-3 else guess for each in noise], judge, worst, most)
    assert np.argsort(ratios)[:3].tolist() == [at, 30, 70]
    assert [ratios[index] for index in (at, 30, 70)] == pytest.approx([0, 10, 20], abs=0.01)
    assert sum(judged) <= runs < len(ratios) == np.isfinite(ratios).sum()
    wrong = search_spans([1.0 if index < 9 else 0.01 for index in range(141)], judge, worst=3, most=99)
    assert np.argmin(wrong) == at


def test_few_are_judged_alone_since_what_two_do_may_cancel() -> None:
    seen: list[range] = []

    def judge(spans: Sequence[range]) -> list[float]:
        seen.extend(spans)
        return [0.0] * len(spans)

    search_spans([1.0] * 9, judge, worst=8, most=99)
    assert sorted(map(len, seen)) == [1] * 9


@pytest.mark.parametrize(("both", "count"), [(True, 2), (False, 1)])
def test_both_halves_of_a_span_are_judged_where_runs_are_short(*, both: bool, count: int) -> None:
    judged = list[int]()

    def judge(spans: Sequence[range]) -> list[float]:
        judged.append(len(spans))
        return [0.0 if 72 in span else 60.0 for span in spans]

    ratios = search_spans([1.0] * 141, judge, 8, 99, judges_both=both)
    assert judged[1] == count
    assert np.argmin(ratios) == 72


def test_no_switch_on_is_the_float_model(net: Model, tmp_path: Path) -> None:
    calibration = calibrate_model(net, random_samples(net), work=tmp_path / "work")
    graph = read_float_graph(net)
    plan = plan_quantization(net, calibration, load_target("nnapi"), "int8", method="minmax")
    qdq = build_qdq(graph, plan, Path(calibration.statistics), "m")
    proto, names = switch_activations(qdq, graph)
    assert switch_activations(qdq, graph, only=names[1:])[1] == names[1:]
    sample = next(iter(random_samples(net)))
    off = CpuSession(proto.SerializeToString(), WEIGHTS_ONLY).run({**sample, SWITCHES: np.zeros(len(names), bool)})
    on = CpuSession(proto.SerializeToString(), WEIGHTS_ONLY).run({**sample, SWITCHES: np.ones(len(names), bool)})
    plain = CpuSession(net.path, WEIGHTS_ONLY).run(sample)
    assert np.allclose(off["y"], plain["y"], atol=1e-6)
    assert not np.array_equal(on["y"], plain["y"])


# Large constants of nodes that stay float: in 8 or 16 bits where the outputs do not notice, and only there.

FRONT = """g (float[1,64] x) => (float[1,4] y) <float eps = {0.1}> {
  s = MatMul(x, dft) t = OFFSET p = Mul(t, t) e = Add(p, eps) l = Log(e) h = MatMul(l, w1) r = Relu(h)
  y = MatMul(r, w2) }"""
PLAIN = FRONT.replace("OFFSET", "Identity(s)")
WEIGHTS: dict[str, tuple[int, ...]] = {"w1": (64, 64), "w2": (64, 4)}
_RNG = np.random.default_rng(3)
_DFT = _RNG.normal(size=(64, 64)).astype(np.float32)


Planned = tuple[Model, Calibration, QuantPlan]


def planned(folder: Path, text: str, constants: dict[str, Array]) -> Planned:
    model = make_model(text, folder / "m.onnx", WEIGHTS, constants)
    rows = [{"x": np.random.default_rng(seed).normal(size=(1, 64)).astype(np.float32)} for seed in range(24)]
    return model, *plan_model(model, folder, "nnapi", make_samples(rows), "auto")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return planned(tmp_path_factory.mktemp("plain"), PLAIN, {"dft": _DFT})


def test_a_front_end_takes_half_the_bytes_and_a_session_knows_no_difference(plain: Planned, tmp_path: Path) -> None:
    model, calibration, plan = plain
    narrowed = store_narrow(model, plan, calibration)
    assert (narrowed.narrow.bits, narrowed.narrow.saved_bytes) == ({"dft": 16}, 64 * 64 * 2)
    assert narrowed.narrow.ratio_db > plan.judged[0].sqnr_db + 16.3
    one = quantize_model(model, plan, calibration, tmp_path / "one.onnx")
    two = quantize_model(model, narrowed, calibration, tmp_path / "two.onnx")
    assert one.size_after - two.size_after == pytest.approx(64 * 64 * 2, abs=500)
    assert (one.float_constants["dft"], two.float_constants["dft"]) == (64 * 64 * 4, 64 * 64 * 2 + 64 * 4)
    assert one.float_constants.keys() == two.float_constants.keys()
    for name in ("nnapi", "xnnpack", "cpu", "qnn", "coreml"):
        placed = [check_model(each.model, load_target(name)).node_list for each in (one, two)]
        assert [(node.name, node.taken) for node in placed[0]] == [(node.name, node.taken) for node in placed[1]]
    saved = [tmp_path / "one.saved.onnx", tmp_path / "two.saved.onnx"]
    for each, path in zip((one, two), saved, strict=True):
        CpuSession(each.model.path, SessionSettings(level=Level.BASIC, save_to=path))
    loaded = [[node.op_type for node in onnx.load(str(path)).graph.node] for path in saved]
    assert loaded[0] == loaded[1]


def test_where_a_plan_is_poor_eight_bits_do(plain: Planned) -> None:
    model, calibration, plan = plain
    poor = [msgspec.structs.replace(each, sqnr_db=12.0) for each in plan.judged]
    plan = msgspec.structs.replace(plan, judged=tuple(poor))
    assert store_narrow(model, plan, calibration).narrow.bits == {"dft": 8}
    assert store_narrow(model, plan, calibration, reached_db=20.0).narrow.bits == {"dft": 16}


def test_what_fewer_bits_round_away_stays_whole(tmp_path: Path) -> None:
    # A million and something, less a million: of the something 16 bits leave nothing.
    constants = {"dft": _DFT + np.float32(1e6), "base": np.full((64, 1), 1e6, np.float32)}
    constants["mixed"] = _RNG.normal(size=(64, 80)).astype(np.float32)
    text = FRONT.replace("OFFSET", "Sub(s, b)").replace("s = MatMul", "b = MatMul(x, base) s = MatMul")
    text = text.replace("l = Log(e)", "lo = Log(e) m = MatMul(x, mixed) mm = Mul(m, m) me = Add(mm, eps) ml = Log(me)"
                        " a = ReduceMean<axes=[1]>(ml) l = Add(lo, a)")  # fmt: skip
    model, calibration, plan = planned(tmp_path, text, constants)
    assert {name for name, _ in find_float_constants(read_float_graph(model), plan)} == {"dft", "mixed"}
    assert store_narrow(model, plan, calibration) == plan


def test_without_held_out_samples_nothing_changes(plain: Planned) -> None:
    model, calibration, plan = plain
    assert store_narrow(model, plan, msgspec.structs.replace(calibration, statistics="")) == plan


@pytest.mark.parametrize(
    ("wide", "narrow", "goal", "is_kept"),
    [(0.0, 0.0009, None, True), (0, 0.0011, None, False), (0.0046, 0.0054, 0.005, False), (0.04, 0.0405, 0.005, True)],
    ids=["loses a little", "loses more", "misses a goal that was met", "misses one that was missed"],
)
def test_the_file_with_narrow_constants_is_measured_and_kept_if_it_loses_hardly_more(
    plain: Planned, tmp_path: Path, wide: float, narrow: float, goal: float | None, *, is_kept: bool
) -> None:
    """Constants are narrowed last, so that what is told is what the written file loses."""
    model, calibration, _ = plain

    def measure(quantized: Model) -> Prediction:
        return predicted(narrow if "narrow" in quantized.path.stem else wide, sqnr_db=25.0)

    search = make_search((model, calibration), measure, load_target("nnapi"), tmp_path)
    plan, searched = find_plan(search, max_drop=goal, narrow=True)
    chosen = present(searched).chosen
    assert (set(plan.narrow.bits), chosen.plan == plan) == ({"dft"} if is_kept else set(), True)
    assert (chosen.prediction.drop_estimate, "narrow" in chosen.step) == (narrow if is_kept else wide, is_kept)
    assert not find_plan(search, max_drop=goal, narrow=False)[0].narrow.bits


def test_a_plan_may_narrow_only_what_float_nodes_alone_read(plain: Planned) -> None:
    model, calibration, plan = plain
    target = load_target("nnapi")
    require_plan(msgspec.structs.replace(plan, narrow=NarrowConstants(bits={"dft": 8})), model, calibration, target)
    wrong = msgspec.structs.replace(plan, narrow=NarrowConstants(bits={"w1": 8}))
    with pytest.raises(UsageError, match="narrows 'w1', which is no large constant of float nodes alone"):
        require_plan(wrong, model, calibration, target)
    floats = (*plan.float_nodes, FloatNode(name="n5_MatMul", op="MatMul", reason="by hand"))
    require_plan(msgspec.structs.replace(wrong, float_nodes=floats), model, calibration, target)


def test_each_channel_has_a_scale_and_a_vector_has_one() -> None:
    values = _DFT[:, :48] * np.geomspace(1e-3, 1e3, 48, dtype=np.float32)
    integers, scales = round_by_channel(values, 8)
    assert (str(integers.dtype), scales.shape) == ("int8", (1, 48))
    np.testing.assert_allclose(integers * scales, values, atol=0.51 * scales.max(), rtol=0)
    assert np.abs(integers * scales - values)[:, 0].max() <= 0.51 * scales[0, 0]
    assert round_by_channel(values.T, 16)[1].shape == (48, 1)
    assert round_by_channel(values[0], 16)[1].shape == (1,)


def test_constants_are_stored_and_widened_under_the_name_that_is_read() -> None:
    cast = helper.make_node("Cast", ["fed"], ["wide"], to=TensorProto.FLOAT, name="w_counts")
    fed = helper.make_tensor_value_info("fed", TensorProto.INT8, [64, 64])
    mul = helper.make_node("Mul", ["wide", "w"], ["y"])
    graph = helper.make_graph([cast, mul], "g", [fed], [], [numpy_helper.from_array(_DFT, "w")])
    narrow_constants(graph, {"w": 16})
    assert [node.op_type for node in graph.node] == ["Cast", "Mul", "Cast", "Mul"]
    assert list(find_narrow(graph)) == ["w"]
    assert find_narrow(graph)["w"].integers == "w__integers"
    widen_constants(graph)
    assert [node.output[0] for node in graph.node] == ["wide", "y"]
    (wide,) = (tensor for tensor in graph.initializer if tensor.name == "w")
    assert (wide.data_type, list(wide.dims)) == (TensorProto.FLOAT, [64, 64])


def test_a_cast_tells_its_type_by_name() -> None:
    cast = helper.make_node("Cast", ["i"], ["wide"], saturate=1, to=TensorProto.FLOAT)
    attributes = sorted(cast.attribute, key=lambda attribute: attribute.name)
    del cast.attribute[:]
    cast.attribute.extend(attributes)
    stored = [numpy_helper.from_array(np.ones(64, np.int8), "i"), numpy_helper.from_array(_DFT[0], "s")]
    graph = helper.make_graph([cast, helper.make_node("Mul", ["wide", "s"], ["y"])], "g", [], [], stored)
    assert list(find_narrow(graph)) == ["y"]
