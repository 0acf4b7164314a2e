from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model

from edgekit.quantize.accuracy.sqnr import join_ratios, ratio_db
from edgekit.quantize.graph.compared_tensors import ComparedTensor, find_compared_tensors
from edgekit.quantize.graph.graph import read_graph
from edgekit.quantize.mixed_precision.score import powers_of


def test_logits_are_judged_not_probabilities(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,64] x) => (float[1,40] y, int64[1,1] k) {
      h = Relu(x) z = MatMul(h, w) y = Softmax(z) k = ArgMax<axis=1>(y) }"""
    points = find_compared_tensors(read_graph(make_model(text, tmp_path / "m.onnx", {"w": (64, 40)})))
    assert points == (ComparedTensor(tensor="z", reader="n2_Softmax", centred=True),)


def test_few_outputs_are_judged_with_their_features(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,64] x) => (float[1,2] y) { h = Relu(x) y = MatMul(h, w) }'
    )
    points = find_compared_tensors(read_graph(make_model(text, tmp_path / "m.onnx", {"w": (64, 2)})))
    assert [point.tensor for point in points] == ["y", "h"]


def test_ratio_is_20_db_for_a_tenth() -> None:
    point, ones = ComparedTensor(tensor="y", reader="", centred=False), np.ones(10)
    assert ratio_db(*powers_of(point, ones, ones * 1.1)) == pytest.approx(20)
    assert ratio_db(*powers_of(point, ones, ones)) == 80
    assert ratio_db(*powers_of(point, ones, ones * np.nan)) == -20


def test_shift_of_all_logits_is_no_error() -> None:
    point = ComparedTensor(tensor="z", reader="n", centred=True)
    assert ratio_db(*powers_of(point, np.arange(4.0), np.arange(4.0) + 5)) == 80


def test_several_ratios_stand_for_their_mean_noise() -> None:
    assert join_ratios([20.0, 20.0]) == pytest.approx(20)
    assert join_ratios([10.0, 80.0]) == pytest.approx(10 + 10 * np.log10(2), abs=1e-5)
    assert join_ratios([-20.0, 80.0, 80.0, 80.0]) == pytest.approx(-20 + 10 * np.log10(4), abs=1e-5)
