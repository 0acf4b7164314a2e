from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model, make_samples, plan_model, random_samples

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.model.model import Model
from edgekit.quantize import calibrate_model, plan_quantization
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.graph.float_graph import range_source, read_float_graph
from edgekit.quantize.mixed_precision.score import SWITCHES, switch_activations
from edgekit.quantize.mixed_precision.sensitivity import (
    Bound,
    Noises,
    rank_activations,
    rank_plan,
    search_spans,
)
from edgekit.quantize.qdq import build_qdq
from edgekit.target import load_target

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
    graph, statistics = read_float_graph(net), Path(calibration.statistics)
    qdq, compared = build_qdq(graph, plan, statistics, "m"), find_compared_tensors(graph)
    known: Noises = {}
    bound = Bound(worst=3, most=21, samples=4, guesses={})
    some = rank_activations(graph, qdq, compared, statistics, bound=bound, known=known)
    assert rank_activations(graph, qdq, compared, statistics, bound=bound, known=known) == some
    every = rank_activations(graph, qdq, compared, statistics)
    known.clear()
    assert rank_activations(graph, qdq, compared, statistics, known=known) == every
    assert len(known) >= 6 * len(every)
    known |= {key: powers * [1, 4] for key, powers in known.items()}
    four_times = rank_activations(graph, qdq, compared, statistics, known=known)
    assert [each.sqnr_db for each in four_times[:5]] == pytest.approx(
        [each.sqnr_db - 6.02 for each in every[:5]], abs=0.011
    )
    assert len(every) > len(some) > 3
    assert {error.name for error in some} == {range_source(graph, error.name) for error in every}
    assert some[0].name == every[0].name


@pytest.mark.parametrize(
    ("at", "guess", "worst", "most", "runs"),
    [(0, 1.0, 8, 99, 56), (99, 1.0, 8, 99, 56), (140, 1.0, 8, 99, 56), (99, 1e-4, 3, 28, 28)],
)
def test_the_worst_of_many_are_found_in_spans_and_come_first(
    at: int, guess: float, worst: int, most: int, runs: int
) -> None:
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
    graph, plan = (
        read_float_graph(net),
        plan_quantization(net, calibration, load_target("nnapi"), "int8", method="minmax"),
    )
    qdq = build_qdq(graph, plan, Path(calibration.statistics), "m")
    proto, names = switch_activations(qdq, graph)
    assert switch_activations(qdq, graph, only=names[1:])[1] == names[1:]
    sample = next(iter(random_samples(net)))
    off = CpuSession(proto.SerializeToString(), WEIGHTS_ONLY).run({**sample, SWITCHES: np.zeros(len(names), bool)})
    on = CpuSession(proto.SerializeToString(), WEIGHTS_ONLY).run({**sample, SWITCHES: np.ones(len(names), bool)})
    plain = CpuSession(net.path, WEIGHTS_ONLY).run(sample)
    assert np.allclose(off["y"], plain["y"], atol=1e-6)
    assert not np.array_equal(on["y"], plain["y"])


def test_what_only_holds_values_of_another_needs_no_switch_and_one_whose_source_is_not_quantized_does(
    tmp_path: Path,
) -> None:
    text = """g (float[1,4,4] x) => (float[1,4,4] y) {
      a = MatMul(x, w) t = Transpose<perm = [0, 2, 1]>(a) r = Transpose<perm = [0, 2, 1]>(t) b = MatMul(r, w)
      y = Add(b, t) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w": (4, 4)})
    calibration = calibrate_model(model, random_samples(model), work=tmp_path / "work")
    graph = read_float_graph(model)
    plan = plan_quantization(model, calibration, load_target("nnapi"), "int8", method="minmax")
    qdq = build_qdq(graph, plan, Path(calibration.statistics), "m")
    assert {*switch_activations(qdq, graph)[1]} == {"x", "a", "t", "r", "b", "y"}
    assert {*switch_activations(qdq, graph, sources=True)[1]} == {"x", "a", "b", "y"}
    for node in qdq.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0].startswith("a"):
            node.op_type = "Identity"
    assert {*switch_activations(qdq, graph, sources=True)[1]} == {"x", "t", "r", "b", "y"}
