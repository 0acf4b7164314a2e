"""What a graph tells of an output: which axis weights make, and whether a layer with weights makes its numbers."""

import math
from pathlib import Path

import numpy as np
import pytest
from fixture_types import present
from quantize_models import make_model, make_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.output_kinds import read_output_kinds
from edgekit.quantize.accuracy.predict import predict_drop
from edgekit.quantize.accuracy.readouts import find_origins, find_readout
from edgekit.quantize.graph.compared_tensors import are_raw_scores, list_raw_scores
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.objective import find_objective, measure_loss
from edgekit.quantize.ranges import sigmoid
from edgekit.target import load_target

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


def test_an_empty_axis_has_no_origin(tmp_path: Path) -> None:
    text = """g (float[1,8] x) => (float[1,2,0] y) { h = MatMul(x, w) e, r = Split<axis = 1>(h, sizes)
        y = Reshape<allowzero = 1>(e, shape) }"""
    constants = {"sizes": np.array([0, 12]), "shape": np.array([1, 2, 0])}
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (8, 12)}, constants))
    assert set(find_origins(graph, "y")) <= {"unknown"}


def sure(classes: int) -> Array:
    return np.asarray(RNG.normal(size=(1, classes)) + 6 * np.eye(classes)[RNG.integers(classes)], np.float32)


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ("y = Gemm(x, w, b) }", ("classes", "")),
        ("y = MatMul(x, w) }", ("classes", "")),
        ("h = Gemm(x, w, b)\n y = Tanh(h) }", ("values", "embedding")),
        ("h = Gemm(x, w, b)\n y = Softmax(h) }", ("classes", "")),
    ],
)
def test_what_shapes_a_vector_makes_it_no_scores(body: str, kinds: tuple[str, str], tmp_path: Path) -> None:
    graph = read_float_graph(make_model(HEAD + body, tmp_path / "m.onnx", SHAPES))
    reading = read_output_kinds(graph, [{"y": sure(12)} for _ in range(8)], {})["y"]
    assert (reading.kind, reading.other) == kinds


def test_numbers_that_stand_out_below_as_well_as_above_may_be_a_vector(tmp_path: Path) -> None:
    """The embedding of a wake word has numbers up to 60, and was taken for 96 classes that are never in doubt."""
    rng = np.random.default_rng(3)
    # One number is large in all samples, another varies most: neither makes the others scores.
    vectors = rng.normal(0, 5, (16, 1, 12)) * np.linspace(1, 4, 12) + np.eye(12)[3] * 60
    text = "g (float[1,12] x) => (float[1,12] y) { y = MatMul(x, w) }"
    changed = np.diag(np.where((np.arange(12) // 3) == 2, 0.2, 1)).astype(np.float32)
    exact, other = (
        make_model(text, tmp_path / f"{name}.onnx", constants={"w": weights})
        for name, weights in (("exact", np.eye(12, dtype=np.float32)), ("other", changed))
    )
    graph = read_float_graph(exact)
    reading = read_output_kinds(graph, [{"y": each.astype(np.float32)} for each in vectors], {})["y"]
    assert (reading.kind, reading.other) == ("classes", "embedding")
    found = predict_drop(exact, other, make_samples([{"x": each.astype(np.float32)} for each in vectors]))
    assert found.measure == "nearest neighbours (recall@1)"
    assert found.top1_agreement is not None
    assert found.top1_agreement < 0.9
    assert found.source.endswith("[outputs] of a recipe states which")


@pytest.mark.parametrize(
    "mean",
    ["ReduceMean<axes=[2], keepdims=0>(p)", "GlobalAveragePool(p)", "AveragePool<kernel_shape=[6]>(p)"],
    ids=["reduced", "pooled", "one window"],
)
def test_the_mean_of_probabilities_says_yes_or_no(mean: str, tmp_path: Path) -> None:
    """Whether there was speech in one of a few moments; the mean of logits is read as what it was before."""
    rank = ",1" if "Pool" in mean else ""
    text = f"g (float[1,1,6] x) => (float[1,1{rank}] y) {{ p = Sigmoid(x) y = {mean} }}"
    rows = [{"y": np.full((1, 1, 1)[: 3 if rank else 2], share, np.float32)} for share in (0.1, 0.9)]
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx"))
    reading = read_output_kinds(graph, rows, {})["y"]
    assert (reading.kind, reading.squash) == ("classes", "Sigmoid")
    plain = read_float_graph(make_model(text.replace("Sigmoid", "Relu"), tmp_path / "plain.onnx"))
    assert read_output_kinds(plain, rows, {})["y"].kind == "values"


def test_the_numbers_whose_means_are_squashed_are_no_scores_themselves(tmp_path: Path) -> None:
    text = """g (float[1,6] x) => (float[1,12] z, float[1,2] y) <int64[3] s = {1, 2, 6}> {
      z = Gemm(x, w) r = Reshape(z, s) m = ReduceMean<axes=[2], keepdims=0>(r) y = Softmax(m) }"""
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (6, 12)}))
    rows: list[Tensors] = [{"z": sure(12), "y": np.full((1, 2), 0.5, np.float32)} for _ in range(8)]
    assert read_output_kinds(graph, rows, {})["z"].kind == "values"


def test_a_curve_of_frames_is_no_classifier(tmp_path: Path) -> None:
    graph = read_float_graph(make_model(CURVE, tmp_path / "m.onnx", {"k": (12, 3, 1)}))
    assert find_origins(graph, "y") == ("places", "places")
    assert read_output_kinds(graph, [{"y": sure(16)} for _ in range(8)], {})["y"].kind == "values"


def test_sums_of_sums_are_not_traced_without_end(tmp_path: Path) -> None:
    # As in a recurrent layer that is written step by step: each step reads the one before it twice.
    steps = " ".join(f"a{step} = Add(a{step - 1}, a{step - 1})" for step in range(1, 60))
    text = f"g (float[1,4] x) => (float[1,4] y) {{ a0 = Relu(x) {steps} y = Relu(a59) }}"
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {}))
    assert find_origins(graph, "y") == ("places", "unknown")


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


@pytest.mark.parametrize(
    ("shape", "reach", "kind"),
    [
        ("64,88", 4, "map"), ("1,64,88", 4, "map"), ("1,12,16,16", 4, "map"), ("1,1,16,16", 4, "map"),
        ("1,64,88", 0.2, "values"), ("1,64,4", 4, "values"), ("1,64,40", 4, "values"), ("1,3,16,16", 4, "image"),
    ],
    ids=["roll", "batch", "labels of pixels", "mask", "unsure", "corners", "gains", "colours"],
)  # fmt: skip
def test_sigmoids_of_many_say_yes_or_no(shape: str, reach: float, kind: str, tmp_path: Path) -> None:
    """Whether a note sounds; but corners of boxes, gains for the input and colours of an image are numbers."""
    sizes = tuple(map(int, shape.split(",")))
    text = f"""g (float[{math.prod(sizes)}] h, float[1,64,40] x) => (float[{shape}] y)
      <int64[{len(sizes)}] s = {{{shape}}}> {{ r = Reshape(h, s) y = Sigmoid(r) }}"""
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx"))
    rows: list[Tensors] = [{"y": sigmoid(reach * (2 * np.abs(RNG.normal(size=sizes)) - 2))} for _ in range(8)]
    assert read_output_kinds(graph, rows, {})["y"].kind == kind


LEVELS = "g (float[1,64,1] a, float[1,64,1] b) => (float[1,128,1] y, float[1,128,4] boxes)"
COLUMNS = "g (float[1,64,1] a, float[1,64,1] b) => (float[1,64,2] y)"


@pytest.mark.parametrize(
    ("text", "outputs", "family"),
    [
        (LEVELS + " { y = Concat<axis=1>(a, b) boxes = MatMul(y, w) }", {}, "scores"),
        (COLUMNS + " { y = Concat<axis=2>(a, b) }", {"y": StatedOutput(kind="map", axis=-1)}, ""),
    ],
)
def test_scores_of_several_levels_are_decisions_and_columns_of_two_layers_are_numbers(
    text: str, outputs: dict[str, StatedOutput], family: str, tmp_path: Path
) -> None:
    model, rng = make_model(text, tmp_path / "m.onnx", {"w": (1, 4)}), np.random.default_rng(0)
    # Only the later samples have scores that lie far below zero, as those of raw scores do.
    reaches = [10] * 12 + [40] * 12
    rows: list[Tensors] = [
        {name: rng.uniform(-reach, 0.2, (1, 64, 1)).astype(np.float32) for name in "ab"} for reach in reaches
    ]
    calibration = calibrate_model(model, make_samples(rows), work=tmp_path / "work", outputs=outputs)
    compared = [each for each in find_objective(read_float_graph(model), calibration) if each.tensor == "y"]
    assert [each.family for each in compared] == [family] * 2
    # Each part counts by itself: a decision that one level loses is not hidden by those of the other.
    if family:
        wanted, found = np.full((1, 128, 1), -9.0), np.full((1, 128, 1), -9.0)
        wanted[0, 70], found[0, 70] = 2.0, -9.0
        lost = [measure_loss(each, wanted, found)[1] for each in compared]
        assert lost[0] == 0
        assert lost[1] > 0.5


FLOOR = -8.0

BOXES = """g (float[1,64] near, float[1,64] far)
  => (float[1,64,1] y, float[1,64,4] boxes)
  <int64[3] one = {1, 64, 1}, int64[3] four = {1, 64, 4}> {
  s = Sub(near, far) y = Reshape(s, one) b = MatMul(near, wb) boxes = Reshape(b, four) }"""


def objects(count: int, *, reach: float) -> Samples:
    """Something is where `far` is zero, at 3 % of the places; elsewhere scores lie down to -reach."""
    rng = np.random.default_rng(0)
    rows = list[Tensors]()
    for _ in range(count):
        near = rng.normal(size=(1, 64)).astype(np.float32)
        far = (rng.uniform(0.2, 1, (1, 64)) * reach * (rng.random((1, 64)) > 0.03)).astype(np.float32)
        rows.append({"near": near, "far": far})
    return make_samples(rows)


@pytest.mark.parametrize("target", ["qnn", "xnnpack"])
def test_raw_scores_of_boxes_keep_what_a_sigmoid_tells_apart(target: str, tmp_path: Path) -> None:
    model = make_model(BOXES, tmp_path / "m.onnx", {"wb": (64, 256)})
    samples, graph = objects(48, reach=3000), read_float_graph(model)
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    assert "scores" in {each.family for each in find_objective(graph, calibration)}
    assert calibration.ranges["minmax"]["y"].low < -2000
    plan = plan_quantization(model, calibration, load_target(target), "int8")
    quantized = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model
    for sample in samples:
        wanted, found = (CpuSession(each.path, SessionSettings()).run(sample)["y"] for each in (model, quantized))
        near = wanted > FLOOR
        assert (np.abs(wanted[near] - found[near]) < 0.2).all()
        assert (found[~near] < FLOOR + 0.2).all()
    prediction = predict_drop(model, quantized, samples)
    assert present(prediction.drop_estimate) < 0.02


def test_numbers_that_are_predicted_are_no_raw_scores() -> None:
    assert list_raw_scores({"s": (1, 9, 1), "b": (1, 9, 4)}) == list_raw_scores({"s": (9, 1), "b": (9, 2)}) == {"s"}
    assert list_raw_scores({"s": (1, 9, 1), "t": (1, 9, 1)}) == list_raw_scores({"s": (9,), "b": (9, 4)}) == set()
    assert list_raw_scores({"s": (1, 1, 1), "b": (1, 1, 4)}) == set()  # a table of one row
    rng = np.random.default_rng(0)
    assert not are_raw_scores(rng.normal(size=1000) * 30)
    assert not are_raw_scores(-rng.uniform(5, 900, 1000) * np.where(np.arange(1000) % 10, 1, -1))
    assert are_raw_scores(np.append(-rng.uniform(5, 900, 1000), 3.0))
    cases = ((-20.1, 20, 21, True), (-20, 20, 21, False), (-20.1, 20.1, 21, False), (-21, 1, 20, False))
    for low, high, count, is_raw in cases:
        assert are_raw_scores(np.array([low] * (count - 1) + [high])) is is_raw
