"""What retrieval by embeddings loses, told without labels."""

from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array
from edgekit.quantize.accuracy.loss import Retrieval, judge_retrieval
from edgekit.quantize.accuracy.predict import Prediction, predict_drop, wanted_samples
from edgekit.report.tables import describe_prediction

MEASURE = "retrieval (mean AP of neighbours)"


def unit(vectors: Array) -> Array:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def draw_vectors(noise: float = 0.0, scatter: float = 0.2) -> tuple[Array, Array]:
    """Returns vectors of eight things, the more alike the more they scatter, with noise, and which thing each is."""
    rng = np.random.default_rng(0)
    things = np.arange(160) % 8
    exact = unit(rng.normal(size=(8, 24)))[things] + rng.normal(size=(160, 24)) * scatter
    return unit(unit(exact) + noise * rng.normal(size=(160, 24))), things


def read(found: Retrieval | None) -> Retrieval:
    assert found is not None
    return found


def true_precision(vectors: Array, things: Array) -> float:
    alike = vectors @ vectors.T - 9 * np.eye(len(vectors))
    found = (things[np.argsort(-alike, axis=1)] == things[:, None])[:, :-1]
    precision = found.cumsum(axis=1) / np.arange(1, len(vectors))
    return float(((precision * found).sum(axis=1) / found.sum(axis=1)).mean())


@pytest.mark.parametrize("noise", [0.02, 0.08, 0.35])
def test_what_is_expected_to_be_lost_is_what_labels_show(noise: float) -> None:
    (exact, things), (others, _) = draw_vectors(), draw_vectors(noise)
    true = true_precision(exact, things) - true_precision(others, things)
    found = read(judge_retrieval(exact, others))
    assert abs(found.drop - true) <= 0.005 + 0.45 * true
    assert abs(found.drop - true) <= 0.005 + found.reach


def test_vectors_of_which_none_are_alike_tell_nothing() -> None:
    assert judge_retrieval(*(draw_vectors(noise, scatter=0.4)[0] for noise in (0, 0.1))) is None


def test_neighbours_that_stay_lose_nothing_and_vectors_that_are_all_alike_lose_much() -> None:
    exact, _ = draw_vectors()
    turned = exact @ np.linalg.qr(np.random.default_rng(1).normal(size=(24, 24)))[0]
    assert read(judge_retrieval(exact, 3 * turned)).drop == pytest.approx(0, abs=1e-9)
    assert read(judge_retrieval(exact, np.ones_like(exact))).drop > 0.3
    assert judge_retrieval(np.ones_like(exact), np.ones_like(exact)) is None


def predict(folder: Path, count: int, stated: dict[str, StatedOutput] | None = None, length: float = 1) -> Prediction:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,24] x) => (float[1,24] y)
      <float[1,24] b = {VALUES}, float s = {LENGTH}> { z = Add(x, b)  n = LpNormalization<axis=1>(z)  y = Mul(n, s) }"""
    values = [", ".join(["0"] * 24), ", ".join([f"{0.4 * (index % 2)}" for index in range(24)])]
    one, two = (
        make_model(text.replace("VALUES", value).replace("LENGTH", str(length)), folder / f"{index}.onnx")
        for index, value in enumerate(values)
    )
    samples = make_samples([{"x": row[None].astype(np.float32)} for row in draw_vectors()[0][:count]])
    return predict_drop(one, two, samples, stated)


VALUES = {"y": StatedOutput(kind="values")}


def test_vectors_of_length_one_are_embeddings_also_where_values_are_stated(tmp_path: Path) -> None:
    found = predict(tmp_path, 60)
    assert found.measure == predict(tmp_path, 60, VALUES).measure == MEASURE
    assert 0.01 < (found.drop_estimate or 0) < 0.5
    vectors = (draw_vectors()[0][:60] + shift for shift in (0, np.resize([0, 0.4], 24)))
    before, after = ((unit(each) @ unit(each).T - 9 * np.eye(60)).argmax(axis=1) for each in vectors)
    assert found.top1_agreement == pytest.approx((before == after).mean(), abs=0.02)
    assert found.top1_agreement is not None
    assert found.top1_agreement < 0.9
    assert f"{100 * found.top1_agreement:.1f} % of nearest neighbours the same" in describe_prediction(found)
    assert wanted_samples(found) is None
    assert predict(tmp_path, 60, VALUES, length=2).measure == "spread of the values (R2)"


def test_few_vectors_are_held_by_half_of_their_spread(tmp_path: Path) -> None:
    few, spread = (predict(tmp_path, 12, VALUES, length=length) for length in (1.0, 2.0))
    lost, found = spread.drop_estimate or 0, few.drop_estimate or 0
    assert found == pytest.approx(lost * (1 + lost) / 2, rel=1e-3)
    assert few.drop_interval is not None
    assert few.drop_interval[0] <= found <= few.drop_interval[1]
