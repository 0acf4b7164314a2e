"""What a graph tells of an output: which axis weights make, and whether a layer with weights makes its numbers."""

from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model

from edgekit.model.tensors import Array
from edgekit.quantize.accuracy.output_kinds import read_output_kinds
from edgekit.quantize.accuracy.readouts import find_origins, find_readout
from edgekit.quantize.graph.float_graph import read_float_graph

RNG = np.random.default_rng(0)
HEAD = "g (float[1,8] x) => (float[1,12] y) {"
SHAPES = {"w": (8, 12), "b": (12,)}
CURVE = """g (float[1,3,16] x) => (float[1,16] y) {
  c = Conv(x, k)
  y = ReduceMean<axes=[1], keepdims=0>(c) }"""
TOKENS = """g (int64[1,16] x) => (float[1,16,W] y) {
  e = Gather(t, x)
  y = MatMul(e, w) }"""


@pytest.mark.parametrize(
    ("body", "readout", "origins"),
    [
        ("y = Gemm(x, w, b) }", "biased", "pw"),
        ("y = MatMul(x, w) }", "projected", "pw"),
        ("h = MatMul(x, w)\n y = Add(h, b) }", "biased", "pw"),
        ("h = Gemm(x, w, b)\n y = Tanh(h) }", "shaped", "pw"),
        ("h = MatMul(x, w)\n r = Reshape(h, [1, 3, 4])\n y = Flatten(r) }", "projected", "pw"),
    ],
)
def test_a_graph_tells_who_makes_an_output(body: str, readout: str, origins: str, tmp_path: Path) -> None:
    body = body.replace("[1, 3, 4]", "s")
    constants = {"s": np.array([1, 3, 4])} if "(h, s)" in body else None
    graph = read_float_graph(make_model(HEAD + body, tmp_path / "m.onnx", SHAPES, constants))
    assert find_readout(graph, "y") == readout
    assert [origin[0] for origin in find_origins(graph, "y")] == list(origins)


def sure(classes: int) -> Array:
    return np.asarray(RNG.normal(size=(1, classes)) + 6 * np.eye(classes)[RNG.integers(classes)], np.float32)


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ("y = Gemm(x, w, b) }", ("classes", "")),
        ("y = MatMul(x, w) }", ("classes", "embedding")),
        ("h = Gemm(x, w, b)\n y = Tanh(h) }", ("values", "embedding")),
        ("h = Gemm(x, w, b)\n y = Softmax(h) }", ("classes", "")),
    ],
)
def test_what_shapes_a_vector_makes_it_no_scores(body: str, kinds: tuple[str, str], tmp_path: Path) -> None:
    graph = read_float_graph(make_model(HEAD + body, tmp_path / "m.onnx", SHAPES))
    reading = read_output_kinds(graph, [{"y": sure(12)} for _ in range(8)], {})["y"]
    assert (reading.kind, reading.other) == kinds


def test_a_curve_of_frames_is_no_classifier(tmp_path: Path) -> None:
    graph = read_float_graph(make_model(CURVE, tmp_path / "m.onnx", {"k": (12, 3, 1)}))
    assert find_origins(graph, "y") == ("places", "places")
    assert read_output_kinds(graph, [{"y": sure(16)} for _ in range(8)], {})["y"].kind == "values"


@pytest.mark.parametrize(("words", "kind", "other"), [(50, "sequence", ""), (40, "values", "sequence")])
def test_steps_that_rank_the_words_of_the_input_are_next_words(
    words: int, kind: str, other: str, tmp_path: Path
) -> None:
    text = TOKENS.replace("W]", f"{words}]")
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"t": (50, 8), "w": (8, words)}))
    rows = [{"y": np.asarray(RNG.normal(size=(1, 16, words)), np.float32)} for _ in range(8)]
    reading = read_output_kinds(graph, rows, {})["y"]
    assert (reading.kind, reading.other) == (kind, other)


@pytest.mark.parametrize(("size", "kind"), [(12, "values"), (8, "classes")])
def test_a_gain_for_each_number_of_the_input_is_no_score(size: int, kind: str, tmp_path: Path) -> None:
    """A denoiser's mask has the shape of the spectrum that it is for."""
    text = f"g (float[1,1,{size}] x) => (float[1,1,12] y) {{"
    graph = read_float_graph(
        make_model(f"{text} h = MatMul(x, w)\n y = Sigmoid(h) }}", tmp_path / "m.onnx", {"w": (size, 12)})
    )
    rows = [{"y": 1 / (1 + np.exp(4 - 2 * sure(12).reshape(1, 1, 12)))} for _ in range(8)]
    assert read_output_kinds(graph, rows, {})["y"].kind == kind
