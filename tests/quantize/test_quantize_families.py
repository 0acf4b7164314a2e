"""The five kinds of nets that stock quantization ruins come back, on every target that takes integers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime.quantization as stock
import pytest
from collapsing_models import DETECTOR, SEGMENTATION, SEPARABLE, SPECTRUM, SUBPIXEL, draw_samples, make_collapsing
from quantize_models import choose_plan

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize import calibrate_model, quantize_model
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.ranges import TensorRange, share_ranges
from edgekit.target import load_target

pytestmark = pytest.mark.slow

TARGETS: tuple[tuple[str, dict[str, str]], ...] = (
    ("qnn", {}),
    ("nnapi", {"api_level": "28"}),
    ("xnnpack", {}),
    ("cpu", {}),
)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A net, where its output is cut into parts along the last axis, and ratios in dB."""

    text: str
    cut: int = 0
    stock_below: float
    at_least: float


FAMILIES = {
    "depthwise": Family(text=SEPARABLE, stock_below=15, at_least=20),
    "detector": Family(text=DETECTOR, cut=4, stock_below=15, at_least=20),
    "spectrum": Family(text=SPECTRUM, stock_below=20, at_least=25),
    "segmentation": Family(text=SEGMENTATION, stock_below=15, at_least=20),
    "subpixel": Family(text=SUBPIXEL, stock_below=25, at_least=40),
}


def run(path: Path, samples: Samples) -> Array:
    session = CpuSession(path, SessionSettings())
    return np.concatenate([session.run(sample)["y"] for sample in samples]).astype(np.float64)


def worst_db(expected: Array, found: Array, cut: int) -> float:
    """Returns the ratio of the part of an output that lost most."""
    parts = [slice(None, cut), slice(cut, None)] if cut else [slice(None)]
    noise = [((expected - found)[..., part] ** 2).sum() / (expected[..., part] ** 2).sum() for part in parts]
    return float(-10 * np.log10(max(noise)))


def quantize_stock(model: Model, samples: Samples, out: Path) -> Path:
    class Reader(stock.CalibrationDataReader):  # type: ignore[misc] # untyped base
        def __init__(self) -> None:
            self.rows: Iterator[Tensors] = iter(samples)

        def get_next(self) -> Any:
            return next(self.rows, None)

    stock.quantize_static(str(model.path), str(out), Reader(), weight_type=stock.QuantType.QInt8)
    return out


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_that_collapses_comes_back(family: Family, tmp_path: Path) -> None:
    model = make_collapsing(family.text, tmp_path)
    known, new = draw_samples(model, 40, 1), draw_samples(model, 12, 2)
    expected = run(model.path, new)
    ruined = run(quantize_stock(model, known, tmp_path / "stock.onnx"), new)
    calibration = calibrate_model(model, known, work=tmp_path / "work")
    ratios = {"stock": worst_db(expected, ruined, family.cut)}
    for name, settings in TARGETS:
        plan = choose_plan((model, calibration), known, load_target(name, settings), tmp_path)
        saved = quantize_model(model, plan, calibration, tmp_path / f"{name}.onnx").model
        ratios[name] = worst_db(expected, run(saved.path, new), family.cut)
    assert ratios.pop("stock") < family.stock_below
    assert min(ratios.values()) >= family.at_least


def test_a_concat_that_stays_float_joins_no_ranges(tmp_path: Path) -> None:
    graph = read_float_graph(make_collapsing(DETECTOR, tmp_path))
    (node,) = (node for node in graph.nodes if node.op_type == "Concat")
    spans = {"large": TensorRange(low=-300, high=300), "scores": TensorRange(low=0, high=1)}
    assert share_ranges(graph, spans, ("Concat",))[0]["scores"].high == 300
    assert share_ranges(graph, spans, ("Concat",), {node.name}) == (spans, frozenset())
