from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit.model import Model
from edgekit.quantize.predict import predict_drop
from edgekit.samples import Samples

CLASSIFIER = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y)
  <float[4] b = {BIAS}> { y = Add(x, b) }"""


def classifier(folder: Path, name: str, bias: str) -> Model:
    return make_model(CLASSIFIER.replace("BIAS", bias), folder / f"{name}.onnx")


@pytest.fixture
def samples() -> Samples:
    rows = np.random.default_rng(0).normal(size=(100, 1, 4)).astype(np.float32)
    return make_samples([{"x": row * 3} for row in rows])


def test_a_model_and_itself_differ_in_nothing(samples: Samples, tmp_path: Path) -> None:
    one = classifier(tmp_path, "one", "0, 0, 0, 0")
    found = predict_drop(one, one, samples)
    assert (found.top1_agreement, found.drop_estimate, found.sqnr_db) == (1, 0, 80)
    assert found.drop_interval is not None
    assert found.drop_interval[0] <= 0 <= found.drop_interval[1]
    assert found.meets(0)


def test_a_model_that_favours_one_class_is_expected_to_lose(samples: Samples, tmp_path: Path) -> None:
    good, bad = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "bad", "9, 0, 0, 0")
    found = predict_drop(good, bad, samples)
    assert found.top1_agreement is not None
    assert found.drop_estimate is not None
    assert found.top1_agreement < 0.5
    assert found.drop_estimate > 0.3
    assert not found.meets(0.005)


def test_the_estimate_lies_near_the_drop_where_confidence_is_right(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(256, 1, 4)).astype(np.float32) * 2
    powers = np.exp(rows[:, 0])
    labels = [int(rng.choice(4, p=row / row.sum())) for row in powers.astype(np.float64)]
    samples = make_samples([{"x": row} for row in rows])
    good, off = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "off", "1, 0, -1, 0")
    guess, truth = predict_drop(good, off, samples), predict_drop(good, off, samples, labels)
    assert (guess.source, truth.source) == ("the float model's confidence", "labels")
    assert guess.drop_interval is not None
    assert truth.drop_estimate is not None
    assert guess.drop_interval[0] <= truth.drop_estimate <= guess.drop_interval[1]
    assert truth.drop_estimate > 0.02


def test_outputs_that_rank_no_classes_have_a_ratio_only(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,2,3] x) => (float[1,2,3] y) { y = Relu(x) }'
    model = make_model(text, tmp_path / "m.onnx")
    samples = make_samples([{"x": np.ones((1, 2, 3), np.float32)}])
    found = predict_drop(model, model, samples)
    assert (found.top1_agreement, found.drop_estimate, found.drop_interval) == (None, None, None)
    assert found.meets(0)
