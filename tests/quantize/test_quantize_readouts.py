"""What a graph tells of an output: which axis weights make, and whether a layer with weights makes its numbers."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fixture_types import present
from quantize_models import choose_plan, make_model, make_samples, predicted
from test_quantize_ranges import as_samples, smooth_images

from edgekit._ort import CpuSession, SessionSettings
from edgekit.cli.main import run_command
from edgekit.errors import UsageError
from edgekit.model.tensors import Array, MeasuredKind, OutputKind, Reading, StatedOutput, Tensors, check_outputs
from edgekit.quantize import calibrate_model, quantize_model
from edgekit.quantize.accuracy.loss import MEASURES, Loss
from edgekit.quantize.accuracy.output_kinds import read_output_kinds
from edgekit.quantize.accuracy.predict import FloatReference, Prediction, wanted_samples
from edgekit.quantize.accuracy.readouts import find_origins, find_readout
from edgekit.quantize.calibration.calibrate import add_image_headroom
from edgekit.quantize.graph.compared_tensors import are_raw_scores, list_raw_scores
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.objective import find_objective, measure_loss
from edgekit.quantize.ranges import sigmoid
from edgekit.recipe import load_recipe
from edgekit.report.tables import describe_prediction
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


def sure(classes: int) -> Array:
    return np.asarray(RNG.normal(size=(1, classes)) + 6 * np.eye(classes)[RNG.integers(classes)], np.float32)


@pytest.mark.parametrize(
    ("body", "readout", "kinds"),
    [
        ("y = Gemm(x, w, b) }", "biased", ("classes", "")),
        ("y = MatMul(x, w) }", "projected", ("classes", "")),
        ("h = MatMul(x, w) y = Add(h, b) }", "biased", ("classes", "")),
        ("h = Gemm(x, w, b) y = Tanh(h) }", "shaped", ("values", "embedding")),
        ("h = Gemm(x, w, b) y = Softmax(h) }", "shaped", ("classes", "")),
        ("h = MatMul(x, w) r = Reshape(h, s) y = Flatten(r) }", "projected", ("classes", "")),
    ],
)
def test_shaped_vectors_are_no_scores(body: str, readout: str, kinds: tuple[str, str], tmp_path: Path) -> None:
    constants = {"s": np.array([1, 3, 4])} if "(h, s)" in body else None
    graph = read_float_graph(make_model(HEAD + body, tmp_path / "m.onnx", SHAPES, constants))
    assert find_readout(graph, "y") == readout
    assert find_origins(graph, "y")[1] == "weights"
    reading = read_output_kinds(graph, [{"y": sure(12)} for _ in range(8)], {})["y"]
    assert (reading.kind, reading.other) == kinds


# As in a recurrent layer that is written step by step: each step reads the one before it twice.
STEPS = " ".join(f"a{step} = Add(a{step - 1}, a{step - 1})" for step in range(1, 60))


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        (CURVE, ("places", "places")),
        (f"g (float[1,4] x) => (float[1,4] y) {{ a0 = Relu(x) {STEPS} y = Relu(a59) }}", ("unknown", "unknown")),
        ("""g (float[1,8] x) => (float[1,2] y) <float one = {1}, float[1] b = {0.5}> {
         h = Gemm(x, c, b) yes = Sigmoid(h) no = Sub(one, yes) y = Concat<axis = 1>(no, yes) }""",
         ("unknown", "weights")),
        ("""g (float[1,8] x) => (float[1,2] y) <int64[2] s = {1, 1}> {
         h = MatMul(x, w) a = ReduceSum(h) b = ReduceMax(h)
         r = Reshape(a, s) q = Reshape(b, s) y = Concat<axis = 1>(r, q) }""", ("unknown", "unknown")),
        ("""g (float[1,8] x) => (float[1,2,0] y) <int64[2] sizes = {0, 12}, int64[3] shape = {1, 2, 0}> {
         h = MatMul(x, w) e, r = Split<axis = 1>(h, sizes) y = Reshape<allowzero = 1>(e, shape) }""", ("unknown",) * 3),
    ],
    ids=["a curve of frames", "sums of sums", "no and yes", "sums", "an empty axis"],
)  # fmt: skip
def test_axes_of_places_come_from_no_weights(text: str, origins: tuple[str, ...], tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"k": (12, 3, 1), "w": (8, 12), "c": (8, 1)}
    given = {name: shape for name, shape in shapes.items() if f", {name}" in text}
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", given))
    assert find_origins(graph, "y") == origins
    if text == CURVE:
        assert read_output_kinds(graph, [{"y": sure(16)} for _ in range(8)], {})["y"].kind == "values"


def test_the_chances_of_no_and_yes_are_two_classes_and_the_label_beside_them_says_no_more(tmp_path: Path) -> None:
    """As scikit-learn writes them: they were values that decide nothing, and the label had a doubt of its own."""
    text = """g (float[1,8] x) => (int64[1] t, float[1,2] y) <float one = {1}, float[1] b = {SHIFT}> {
      h = Gemm(x, c, b) yes = Sigmoid(h) no = Sub(one, yes) y = Concat<axis = 1>(no, yes)
      t = ArgMax<axis = 1, keepdims = 0>(y) }"""
    weights = {"c": np.ones((8, 1), np.float32)}
    exact, other = (
        make_model(text.replace("SHIFT", each), tmp_path / f"{each}.onnx", constants=weights) for each in ("0", "0.4")
    )
    rows = np.random.default_rng(0).normal(size=(60, 1, 8)).astype(np.float32)
    found = FloatReference(exact, make_samples([{"x": row} for row in rows])).predict_drop(other)
    changed = np.mean([(row.sum() > 0) != (row.sum() > -0.4) for row in rows])
    assert found.measure == MEASURES["classes"].name
    assert found.top1_agreement == pytest.approx(1 - changed)
    assert found.outputs == ()


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
    found = FloatReference(exact, make_samples([{"x": each.astype(np.float32)} for each in vectors])).predict_drop(
        other
    )
    assert found.measure == "nearest neighbours (recall@1)"
    assert present(found.top1_agreement) < 0.9
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


@pytest.mark.parametrize(("several", "kind"), [(True, "map"), (False, "classes")])
def test_several_classes_in_most_samples_are_answers_of_their_own(several: bool, kind: str, tmp_path: Path) -> None:
    """A tagger whose answers were all the same failed, because another of its sure classes was highest."""
    graph = read_float_graph(
        make_model(
            "g (float[1,4] x) => (float[1,6] y) { h = MatMul(x, w) y = Sigmoid(h) }", tmp_path / "m.onnx", {"w": (4, 6)}
        )
    )
    rows = [np.roll([0.99, 0.98 if several else 0.01, 0.01, 0.01, 0.01, 0.01], step)[None] for step in range(6)]
    reading = read_output_kinds(graph, [{"y": row.astype(np.float32)} for row in rows], {})["y"]
    assert (reading.kind, reading.squash) == (kind, "Sigmoid")


def test_the_numbers_whose_means_are_squashed_are_no_scores_themselves(tmp_path: Path) -> None:
    text = """g (float[1,6] x) => (float[1,12] z, float[1,2] y) <int64[3] s = {1, 2, 6}> {
      z = Gemm(x, w) r = Reshape(z, s) m = ReduceMean<axes=[2], keepdims=0>(r) y = Softmax(m) }"""
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (6, 12)}))
    rows: list[Tensors] = [{"z": sure(12), "y": np.full((1, 2), 0.5, np.float32)} for _ in range(8)]
    assert read_output_kinds(graph, rows, {})["z"].kind == "values"


@pytest.mark.parametrize(
    ("words", "read", "kind", "other"),
    [(50, "int64[1,16]", "tokens", ""), (40, "int64[1,16]", "values", "tokens"), (50, "int32[1,n]", "tokens", ""),
     (50, "int64[1,12]", "sequence", ""), (50, "int64[16,1]", "tokens", ""), (50, "int64[n]", "sequence", "")],
)  # fmt: skip
def test_steps_that_rank_words_are_next_words(words: int, read: str, kind: str, other: str, tmp_path: Path) -> None:
    text = TOKENS.replace("W]", f"{words}]").replace("int64[1,16]", read)
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
    rows = [{"y": 1 / (1 + np.exp(8 - 2 * sure(12).reshape(1, 1, 12)))} for _ in range(8)]
    assert read_output_kinds(graph, rows, {})["y"].kind == kind


@pytest.mark.parametrize(
    ("shape", "reach", "kind"),
    [
        ("64,88", 4, "map"), ("1,64,88", 4, "map"), ("1,12,16,16", 4, "map"), ("1,1,16,16", 4, "map"),
        ("64,1", 4, "map"), ("1,64,88", 0.2, "values"), ("1,64,4", 4, "values"), ("1,64,40", 4, "values"),
        ("1,3,16,16", 4, "image"),
    ],
    ids=["roll", "batch", "labels of pixels", "mask", "beginnings of words", "unsure", "corners", "gains", "colours"],
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
def test_scores_of_levels_decide(text: str, outputs: dict[str, StatedOutput], family: str, tmp_path: Path) -> None:
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
        lost = [measure_loss(each, wanted)(found)[1] for each in compared]
        assert lost[0] == 0
        assert lost[1] > 0.5


FLOOR = -8.0

BOXES = """g (float[1,64] near, float[1,64] far)
  => (float[1,64,1] y, float[1,64,4] boxes)
  <int64[3] one = {1, 64, 1}, int64[3] four = {1, 64, 4}> {
  s = Sub(near, far) y = Reshape(s, one) b = MatMul(near, wb) boxes = Reshape(b, four) }"""


@pytest.mark.parametrize("target", ["qnn", "xnnpack"])
def test_raw_scores_of_boxes_keep_what_a_sigmoid_tells_apart(target: str, tmp_path: Path) -> None:
    model = make_model(BOXES, tmp_path / "m.onnx", {"wb": (64, 256)})
    rng = np.random.default_rng(0)
    near, far, there = rng.normal(size=(48, 1, 64)), rng.uniform(600, 3000, (48, 1, 64)), rng.random((48, 1, 64))
    # Something is where `far` is zero, at 3 % of the places; elsewhere scores lie down to -3000.
    pairs = zip(near.astype(np.float32), (far * (there > 0.03)).astype(np.float32), strict=True)
    samples, graph = make_samples([{"near": one, "far": two} for one, two in pairs]), read_float_graph(model)
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    assert "scores" in {each.family for each in find_objective(graph, calibration)}
    assert calibration.ranges["minmax"]["y"].low < -2000
    plan = choose_plan((model, calibration), samples, load_target(target), tmp_path)
    quantized = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model
    for sample in samples:
        wanted, found = (CpuSession(each.path, SessionSettings()).run(sample)["y"] for each in (model, quantized))
        is_shown = wanted > FLOOR
        assert (np.abs(wanted[is_shown] - found[is_shown]) < 0.2).all()
        assert (found[~is_shown] < FLOOR + 0.2).all()
    assert present(FloatReference(model, samples).predict_drop(quantized).drop_estimate) < 0.02


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


# What a recipe states of outputs counts more than what their values look like.


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"z": "classes"}, r"\[outputs\] names 'z', which is no output of 'm.onnx'"),
        ({"y": "labels"}, r"'y' is labels, but it is float32"),
        ({"t": "classes"}, r"'t' is classes, but it is string"),
        ({"y": "image"}, r"'y' is image, but it has 2 axes"),
        ({"x": "embedding"}, r"'x' is embedding, but it is more than one vector"),
        ({"y": StatedOutput(kind="map", axis=2)}, r"'y' is map, but it has no axis 2"),
    ],
)
def test_a_false_kind_is_refused(tmp_path: Path, stated: dict[str, OutputKind | StatedOutput], message: str) -> None:
    text = (
        "g (float[1,6] a) => (float[1,6] y, float[1,2,3] x, string[1,6] t)"
        "{ y = Mul(a, a)  s = Constant<value = int64[3] {1, 2, 3}>()  x = Reshape(a, s)  t = Cast<to = 8>(a) }"
    )
    model = make_model(text, tmp_path / "m.onnx")
    right: dict[str, OutputKind | StatedOutput] = {"y": "values", "t": "labels"}
    kinds = {"y": StatedOutput(kind="values"), "t": StatedOutput(kind="labels")}
    assert check_outputs(right, model.outputs, "m.onnx") == kinds
    with pytest.raises(UsageError, match=message):
        check_outputs(stated, model.outputs, "m.onnx")


def test_a_recipe_holds_a_kind_or_a_kind_with_its_axis(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[outputs]\nface = "embedding"\nscores = {kind = "map", axis = 1}\n')
    assert load_recipe(tmp_path / "r.toml").outputs == {"face": "embedding", "scores": StatedOutput(kind="map", axis=1)}
    (tmp_path / "r.toml").write_text('[outputs]\nboxes = "box"\n')
    with pytest.raises(UsageError, match=r"r\.toml' is malformed"):
        load_recipe(tmp_path / "r.toml")


def test_the_drop_is_estimated_by_the_stated_kind(tmp_path: Path) -> None:
    """Six positive numbers look like ratings; stated to be classes, what counts is which of them is the largest."""
    text = "g (float[1,6] x) => (float[1,6] y) <float[6] w = {1, 1, 1, 1, 1, LAST}> { y = Mul(x, w) }"
    one, two = (make_model(text.replace("LAST", last), tmp_path / f"{last}.onnx") for last in ("1", "0.5"))
    rng = np.random.default_rng(0)
    samples = make_samples([{"x": rng.uniform(1, 9, (1, 6)).astype(np.float32)} for _ in range(40)])
    assert FloatReference(one, samples).predict_drop(two).measure == "spread of the values (R2)"
    found = FloatReference(one, samples, {"y": StatedOutput(kind="classes")}).predict_drop(two)
    assert found.measure == "top-1 accuracy"
    assert 0.7 < present(found.top1_agreement) < 1


def test_what_is_stated_to_be_no_image_gets_no_headroom(tmp_path: Path) -> None:
    text = """g (float[1,1,12,12] x) => (float[1,1,12,12] y) {
      c = Conv<pads=[1,1,1,1]>(x, w1, b1) r = Relu(c) y = Conv<pads=[1,1,1,1]>(r, w2) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 1, 3, 3), "b1": (8,), "w2": (1, 8, 3, 3)})
    samples, graph = as_samples(smooth_images(12, 0.85)), read_float_graph(model)
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    assert add_image_headroom(graph, calibration).ranges["minmax"]["c"] != calibration.ranges["minmax"]["c"]
    stated = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    assert add_image_headroom(graph, stated) == stated


def test_scores_are_compared_behind_a_sigmoid_where_one_is_stated(tmp_path: Path) -> None:
    model = make_model("g (float[1,32] x) => (float[1,32] y) { y = Mul(x, x2) }", tmp_path / "m.onnx", {"x2": (1, 32)})
    rng = np.random.default_rng(0)
    samples = make_samples([{"x": (rng.normal(size=(1, 32)) * 400).astype(np.float32)} for _ in range(24)])
    for outputs in ({}, {"y": StatedOutput(kind="scores")}):
        calibration = calibrate_model(model, samples, work=tmp_path / f"work{len(outputs)}", outputs=outputs)
        (compared,) = find_objective(read_float_graph(model), calibration)
        assert (compared.family == "scores") == bool(outputs)


def test_quantize_reads_stated_outputs_from_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """g (float[1,3,8,8] x) => (float[1,40] y) {
      c = Conv(x, w1, b1) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p) y = Gemm<transB=1>(f, w2) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (40, 8)})
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(1).normal(size=(12, 1, 3, 8, 8)).astype(np.float32))
    (tmp_path / "r.toml").write_text('samples = 10\n[outputs]\ny = "map"\n')
    argv = ["quantize", str(model.path), "--data", str(tmp_path / "x.npz"), "--target", "nnapi", "--method", "minmax"]
    argv += ["--recipe", str(tmp_path / "r.toml"), "--out", str(tmp_path / "q.onnx"), "--json"]
    assert run_command(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["predicted"]["measure"]) == (10, "mean overlap of classes (mIoU)")
    (tmp_path / "r.toml").write_text('[outputs]\nyy = "map"\n')
    assert run_command(argv) == 2
    assert "did you mean 'y'" in capsys.readouterr().err


# How many nearest neighbours a quantized embedding changes, and how sure that share is.

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
    return FloatReference(
        one, make_samples([{"x": row[None].astype(np.float32)} for row in rows]), stated
    ).predict_drop(two)


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
    prediction = predicted(same.estimate, same.interval, same=same.agreement, samples=160, measure=MEASURE)
    assert wanted_samples(prediction) == math.inf
    assert wanted_samples(msgspec.structs.replace(prediction, drop_interval=(0.0, 0.012))) == 200


def test_values_that_lose_most_are_not_all_that_the_outputs_say() -> None:
    shown = describe_prediction(predicted(0.2, (0.1, 0.3), sqnr_db=9.0, measure=MEASURES["values"].name))
    assert "the output decides nothing that is known, and its spread (R2) falls by 20.00 %" in shown


@pytest.mark.parametrize(
    ("measure", "reference", "unit"), [("image", None, "%"), ("map", None, "points"), ("map", 36.0, "%")]
)
def test_a_drop_of_a_large_figure_is_a_share(measure: MeasuredKind, reference: float | None, unit: str) -> None:
    told = predicted(0.034, (0.03, 0.04), measure=MEASURES[measure].name, reference=reference, got=reference)
    assert f"by 3.40 {unit} (" in describe_prediction(told)
    # What is lost to the last bit is nothing, and has no sign.
    assert f"by 0.00 {unit} (" in describe_prediction(msgspec.structs.replace(told, drop_estimate=-1e-7))
