"""How many nearest neighbours a quantized embedding changes, and how sure that share is."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit.model.outputs import MeasuredKind, Reading, StatedOutput
from edgekit.model.tensors import Array
from edgekit.quantize.accuracy.loss import MEASURES, Loss
from edgekit.quantize.accuracy.predict import Prediction, predict_drop, wanted_samples
from edgekit.report.tables import describe_prediction

MEASURE = "nearest neighbours (recall@1)"


def unit(vectors: Array) -> Array:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def draw_vectors(rng: np.random.Generator, things: int = 8, count: int = 160) -> Array:
    """Returns vectors of a few things, drawn around the middle of each."""
    middles = unit(rng.normal(size=(things, 24)))
    return unit(middles[np.arange(count) % things] + 0.2 * rng.normal(size=(count, 24)))


def judge(exact: Array, others: Array) -> Loss:
    measure, reading = MEASURES["embedding"], Reading(kind="embedding", axis=1)
    return measure.judge(
        [measure.record(one[None], two[None], reading) for one, two in zip(exact, others, strict=True)]
    )


def nearest(vectors: Array) -> Array:
    return np.asarray((unit(vectors) @ unit(vectors).T - 9 * np.eye(len(vectors))).argmax(axis=1))


@pytest.mark.parametrize(("things", "noise"), [(8, 0.002), (8, 0.02), (100, 0.05)])
def test_the_interval_holds_the_share_of_changes_that_many_draws_show(things: int, noise: float) -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_vectors(rng, things, count=100) for _ in range(50)]
    pairs = [(exact, exact + noise * rng.normal(size=exact.shape)) for exact in drawn]
    found = [judge(exact, others) for exact, others in pairs]
    true = float(np.mean([nearest(exact) != nearest(others) for exact, others in pairs]))
    assert np.mean([loss.estimate for loss in found]) == pytest.approx(true)
    assert sum(loss.interval[0] <= true <= loss.interval[1] for loss in found) >= 44
    assert max(loss.interval[1] - loss.interval[0] for loss in found) < 0.2


def test_vectors_that_are_turned_alike_lose_nothing_and_one_vector_for_all_loses_nearly_all() -> None:
    exact = draw_vectors(np.random.default_rng(0))
    turned = exact @ np.linalg.qr(np.random.default_rng(1).normal(size=(24, 24)))[0]
    assert judge(exact, 3 * turned).estimate == 0
    assert judge(exact, np.ones_like(exact)).estimate > 0.95
    assert judge(exact[:1], turned[:1]).interval[1] > 0.7


def test_a_neighbour_that_is_as_near_is_the_same() -> None:
    exact = draw_vectors(np.random.default_rng(0), count=40)
    twice = np.concatenate([exact, exact, exact])
    # Each sample has two copies, of which rounding makes now one the nearest and now the other.
    rng = np.random.default_rng(1)
    mine, theirs = (twice * (1 + 1e-8 * rng.normal(size=twice.shape)) for _ in range(2))
    assert (nearest(mine) != nearest(theirs)).any()
    assert judge(mine, theirs).agreement == 1


def predict(folder: Path, count: int, stated: dict[str, StatedOutput] | None = None, length: float = 1) -> Prediction:
    text = """g (float[1,24] x) => (float[1,24] y)
      <float[1,24] b = {VALUES}, float s = {LENGTH}> { z = Add(x, b)  n = LpNormalization<axis=1>(z)  y = Mul(n, s) }"""
    values = [", ".join(["0"] * 24), ", ".join([f"{0.4 * (index % 2)}" for index in range(24)])]
    one, two = (
        make_model(text.replace("VALUES", value).replace("LENGTH", str(length)), folder / f"{index}.onnx")
        for index, value in enumerate(values)
    )
    rows = draw_vectors(np.random.default_rng(0))[:count]
    return predict_drop(one, two, make_samples([{"x": row[None].astype(np.float32)} for row in rows]), stated)


VALUES = {"y": StatedOutput(kind="values")}


def test_vectors_of_length_one_are_embeddings_also_where_values_are_stated(tmp_path: Path) -> None:
    found = predict(tmp_path, 60)
    assert found.measure == predict(tmp_path, 60, VALUES).measure == MEASURE
    exact = draw_vectors(np.random.default_rng(0))[:60].astype(np.float32)
    share = int(np.count_nonzero(nearest(exact) != nearest(exact + np.resize([0, 0.4], 24)))) / 60
    assert found.drop_estimate == pytest.approx(share, abs=1e-6)
    assert share > 0.1
    assert found.top1_agreement == pytest.approx(1 - share, abs=1e-6)
    assert f"{100 * (1 - share):.1f} % of nearest neighbours among 59 others the same" in describe_prediction(found)
    assert predict(tmp_path, 60, VALUES, length=2).measure == "spread of the values (R2)"


def test_of_an_open_share_it_is_told_how_many_samples_would_tell() -> None:
    exact = draw_vectors(np.random.default_rng(0))
    same = judge(exact, exact)
    prediction = Prediction(
        samples=160, sqnr_db=40.0, top1_agreement=same.agreement, drop_estimate=same.estimate,
        drop_interval=same.interval, source="", measure=MEASURE,
    )  # fmt: skip
    assert wanted_samples(prediction) == math.inf
    assert wanted_samples(msgspec.structs.replace(prediction, drop_interval=(0.0, 0.012))) == 200


def test_values_that_lose_most_are_not_all_that_the_outputs_say() -> None:
    worst = Prediction(
        samples=32, sqnr_db=9.0, top1_agreement=None, drop_estimate=0.2, drop_interval=(0.1, 0.3), source="",
        measure=MEASURES["values"].name,
    )  # fmt: skip
    shown = describe_prediction(worst)
    assert "the output decides nothing that is known, and its spread (R2) falls by 20.00 %" in shown


@pytest.mark.parametrize(
    ("measure", "reference", "unit"), [("image", None, "%"), ("map", None, "points"), ("map", 36.0, "%")]
)
def test_a_drop_of_a_figure_above_one_is_told_as_a_share_of_it(
    measure: MeasuredKind, reference: float | None, unit: str
) -> None:
    told = Prediction(
        samples=32, sqnr_db=34.0, top1_agreement=None, drop_estimate=0.034, drop_interval=(0.03, 0.04), source="",
        measure=MEASURES[measure].name, reference=reference, got=reference,
    )  # fmt: skip
    assert f"by 3.40 {unit} (" in describe_prediction(told)
    # What is lost to the last bit is nothing, and has no sign.
    assert f"by 0.00 {unit} (" in describe_prediction(msgspec.structs.replace(told, drop_estimate=-1e-7))
