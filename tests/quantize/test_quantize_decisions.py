"""The objective: what outputs decide counts, not the power of their errors; the surest classes do not tie."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.model import Model
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.loss import ratio_db
from edgekit.quantize.graph.compared_tensors import ComparedTensor
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.objective import find_enlarged, find_objective, measure_classes, measure_loss, measure_scores
from edgekit.quantize.ranges import softmax
from edgekit.target import load_target


def test_for_small_errors_the_loss_is_twice_the_kullback_leibler_divergence() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (50, 4))
    others = logits + 0.02 * rng.normal(size=logits.shape)
    chances, theirs = (softmax(each) for each in (logits, others))
    diverged = (chances * np.log(chances / theirs)).sum(axis=1)
    _, lost = measure_classes(logits, others)
    assert 2 * lost.sum() == pytest.approx(diverged.sum(), rel=0.02)


def test_however_sure_a_model_is_a_decision_lost_is_one_decision() -> None:
    for margin in (20.0, 500.0):
        told, lost = measure_classes(np.array([[margin, 0.0], [0.0, margin]]), np.array([[0.0, margin], [0.0, margin]]))
        assert told == pytest.approx(1.0, rel=1e-3)
        assert lost.tolist() == pytest.approx([2.0, 0.0], rel=1e-3)


def test_sure_places_tolerate_errors_but_no_ties() -> None:
    sure = np.array([[30.0, 10.0, 0.0]] * 8 + [[0.0, 10.0, 30.0]] * 8)
    _, moved = measure_classes(sure, sure * 0.8)
    _, tied = measure_classes(sure, np.minimum(sure, 10.0))
    assert moved.max() < 1e-4
    assert tied.min() == pytest.approx(2 - 2**0.5, rel=1e-3)


def test_scores_far_below_zero_lose_nothing_and_what_is_shown_does() -> None:
    scores = np.array([[-300.0]] * 60 + [[2.0]] * 4)
    told, lost = measure_scores(scores, np.where(scores < 0, -12.0, scores))
    assert lost.sum() < 1e-3 * told
    _, lost = measure_scores(scores, np.minimum(scores, 0.0))
    assert lost.sum() > 0.05 * told


def test_temperature_takes_divergence_to_the_ratio_of_logits() -> None:
    # The limit of a high temperature is the ratio of logits less their mean, by which single decisions are judged.
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 5))
    others = logits + 0.1 * rng.normal(size=logits.shape)
    told, lost = measure_classes(logits / 100, others / 100)
    centred = ComparedTensor(tensor="y", reader="", centred=True)
    assert ratio_db(told, lost.sum()) == pytest.approx(ratio_db(*measure_loss(centred, logits, others)), abs=0.05)


@pytest.fixture
def rejected(tmp_path: Path) -> tuple[Model, Calibration]:
    """Logits of places with small margins; a few places are sure that they are not of one class."""
    head = "g (float[1,5,16,16] x) => (float[1,5,16,16] y)"
    eye = np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1)
    model = make_model(head + " { l = Conv(x, w) y = Identity(l) }", tmp_path / "m.onnx", constants={"w": eye})
    rng = np.random.default_rng(5)
    rows = rng.normal(0, 1, (32, 1, 5, 16, 16)).astype(np.float32)
    rows[:, 0, 2:] -= 4
    rows[::2, 0, 4, 0, 0] = -120
    outputs = {"y": StatedOutput(kind="map", axis=1)}
    samples = make_samples([{"x": row} for row in rows])
    return model, calibrate_model(model, samples, work=tmp_path / "work", outputs=outputs)


def test_a_method_that_keeps_decisions_wins_over_one_that_keeps_power(
    rejected: tuple[Model, Calibration], tmp_path: Path
) -> None:
    model, calibration = rejected
    target = load_target("cpu")
    plan = plan_quantization(model, calibration, target, "int8", relieve=False)
    by_power = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    other = plan_quantization(model, by_power, target, "int8", relieve=False)
    assert (plan.method.split("-")[0], other.method) == ("percentile", "mse")

    def changed(chosen: QuantPlan) -> float:
        path = quantize_model(model, chosen, calibration, tmp_path / "q.onnx").model.path
        one, two = (
            np.stack([CpuSession(each, SessionSettings()).run(sample)["y"] for sample in scenes]).argmax(axis=2)
            for each in (model.path, path)
        )
        return float((one != two).mean())

    scenes = [{"x": np.random.default_rng(9).normal(0, 1, (1, 5, 16, 16)).astype(np.float32)}]
    assert changed(plan) < changed(other) / 2


HEAD = "g (float[1,5,16,16] x)"


def draw_scenes(count: int = 24) -> list[Array]:
    """Returns logits of places that are sure of a class, a few of them of a rare one that is surer by far."""
    rng = np.random.default_rng(3)
    found = rng.normal(0, 0.5, (count, 1, 5, 16, 16)).astype(np.float32)
    kinds = rng.integers(0, 4, (count, 16, 16))
    for index, image in enumerate(found):
        np.put_along_axis(image[0], kinds[index][None], 6.0 + 0.1 * kinds[index][None], axis=0)
        if index % 6 == 0:
            image[0, 3, 0, 0], image[0, 4, 0, 0] = 13.0, 14.0
    return list(found)


@pytest.mark.parametrize("target", ["qnn", "xnnpack"])
@pytest.mark.parametrize("tail", ["Identity(l)", "Softmax<axis=1>(l)"])
def test_the_rare_class_wins_where_it_did(tail: str, target: str, tmp_path: Path) -> None:
    """No rule spares logits: the objective refuses ranges in which the surest classes tie."""
    text = HEAD + f" => (float[1,5,16,16] y) {{ l = Conv(x, w) y = {tail} }}"
    model = make_model(text, tmp_path / "m.onnx", constants={"w": np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1)})
    samples = make_samples([{"x": image} for image in draw_scenes()])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    assert calibration.ranges["percentile-99.9"]["l"].high < 8
    plan = plan_quantization(model, calibration, load_target(target), "int8")
    path = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model.path
    (found,) = CpuSession(path, SessionSettings()).run({"x": draw_scenes()[0]}).values()
    assert found[0, :, 0, 0].argmax() == 4


RESIZED = """ => (float[1,5,32,32] y) { l = Conv(x, w) r = Resize<mode = "MODE">(l, n, s) y = Identity(r) }"""
ENLARGED = {
    "map": HEAD + RESIZED,
    "softmax": HEAD + RESIZED.replace("Identity", "Softmax<axis = 1>"),
    "labels": HEAD + RESIZED.replace("Identity", "ArgMax<axis = 1>").replace("float[1,5,", "int64[1,1,"),
}


@pytest.mark.parametrize(("tail", "mode", "kind", "found"), [
    ("map", "linear", "", True), ("map", "cubic", "", True), ("map", "nearest", "", False),
    ("map", "linear", "values", False), ("softmax", "linear", "", True), ("labels", "linear", "", True),
    ("labels", "nearest", "", False),
])  # fmt: skip
def test_maps_of_classes_that_are_interpolated_are_not_rounded_to_8_bits_again(
    tail: str, mode: str, kind: str, found: bool, tmp_path: Path
) -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    constants = {"w": np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1), "s": scales, "n": np.zeros(0, np.float32)}
    model = make_model(ENLARGED[tail].replace("MODE", mode), tmp_path / "m.onnx", constants=constants)
    samples = make_samples([{"x": image} for image in draw_scenes()])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    if kind:
        calibration = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    last = read_float_graph(model)
    assert bool(find_enlarged(last, calibration)) == found
    qnn, nnapi = (plan_quantization(model, calibration, load_target(name), "int8") for name in ("qnn", "nnapi"))
    assert bool(qnn.wide) == found
    assert "l" not in qnn.wide
    fine = plan_quantization(model, calibration, load_target("qnn"), "int16")
    assert (fine.wide, "Resize" in {node.op for node in fine.float_nodes}) == ({}, False)
    assert ("Resize" in {node.op for node in nnapi.float_nodes}) == found
    assert "Conv" not in {node.op for node in nnapi.float_nodes}


@pytest.mark.parametrize(
    ("shape", "tail", "family"),
    [
        ("1,1,1,1", "Sigmoid(l)", ""), ("1,5,1,1", "Softmax<axis=1>(l)", ""),
        ("1,1,1,2", "Sigmoid(l)", "scores"), ("1,5,1,2", "Softmax<axis=1>(l)", "classes"),
    ],
)  # fmt: skip
def test_one_decision_with_four_axes_is_no_map_of_decisions(shape: str, tail: str, family: str, tmp_path: Path) -> None:
    """Around their mean the decisions of a sample have no power if it makes only one: every plan seemed to collapse."""
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ l = Neg(x) y = {tail} }}"
    model, rng = make_model(text, tmp_path / "m.onnx"), np.random.default_rng(0)
    sizes = tuple(map(int, shape.split(",")))
    samples = make_samples([{"x": rng.normal(size=sizes).astype(np.float32)} for _ in range(16)])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    (compared,) = find_objective(read_float_graph(model), calibration)
    assert (compared.tensor, compared.family) == ("l", family)
