import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from fixture_types import present
from quantize_models import make_model, make_samples, predicted

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.intervals import wilson_interval
from edgekit.data.samples import Samples
from edgekit.data.sets import Label
from edgekit.model.model import Model
from edgekit.model.tensors import Array, MeasuredKind, OutputKind, Reading, StatedOutput, Tensors
from edgekit.quantize.accuracy.loss import MEASURES, ONE_ANSWER, find_probability, judge_records, spell_answer
from edgekit.quantize.accuracy.output_kinds import read_output_kinds, read_probabilities
from edgekit.quantize.accuracy.predict import FloatReference, Prediction, wanted_samples
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.report.tables import describe_answers, describe_prediction
from edgekit.target import TaskLimit
from edgekit.verify.task_metrics import MOST_SAMPLES, TOP1, measure_drop

CLASSIFIER = "g (float[1,4] x) => (float[1,4] y) <float[4] b = {BIAS}> { y = Add(x, b) }"


def classifier(folder: Path, name: str, bias: str) -> Model:
    return make_model(CLASSIFIER.replace("BIAS", bias), folder / f"{name}.onnx")


@pytest.fixture
def samples() -> Samples:
    rows = np.random.default_rng(0).normal(size=(100, 1, 4)).astype(np.float32)
    return make_samples([{"x": row * 3} for row in rows])


def true_drop(
    good: Model, other: Model, samples: Samples, labels: Sequence[Label], limit: TaskLimit = TOP1
) -> Prediction:
    """Returns the true drop of one model from another over labelled samples."""
    return measure_drop(FloatReference(good, samples, most=MOST_SAMPLES), other, labels, limit)


@pytest.mark.parametrize(
    ("text", "agreement", "drop"),
    [
        (CLASSIFIER.replace("BIAS", "0, 0, 0, 0"), 1, 0),
        ("g (float[1,4] x) => (int64[1,4] y) { y = Cast<to=7>(x) }", None, None),
        ("g (float[1,4] x) => (float[2,N] y) { r = Relu(x) n = NonZero(r) y = Cast<to=1>(n) }", None, None),
    ],
    ids=["classes", "whole numbers tell nothing", "a shape that changes"],
)
def test_a_model_and_itself_differ_in_nothing(
    text: str, agreement: float | None, drop: float | None, samples: Samples, tmp_path: Path
) -> None:
    one = make_model(text, tmp_path / "one.onnx")
    found = FloatReference(one, samples).predict_drop(one)
    assert (found.top1_agreement, found.drop_estimate) == (agreement, drop)
    assert found.sqnr_db == (math.inf if "int64" in text else 80)
    assert (found.drop_interval is None) == (drop is None)
    assert found.drop_interval is None or found.drop_interval[0] <= 0 <= found.drop_interval[1]
    assert found.meets(0)


def test_samples_are_read_once_more_and_the_float_model_never_runs_again(samples: Samples, tmp_path: Path) -> None:
    good, bad = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "bad", "9, 0, 0, 0")
    reads: list[int] = []

    def read() -> Iterator[Tensors]:
        reads.append(1)
        return samples.read()

    counted = msgspec.structs.replace(samples, read=read)
    # What two models lost is remembered without labels, so that they run only once.
    for predict, expected, more in (
        (FloatReference(good, counted).predict_drop, FloatReference(good, samples).predict_drop(bad), 0),
        (
            partial(measure_drop, FloatReference(good, counted), labels=[0] * 100),
            *(true_drop(good, bad, samples, [0] * 100), 1),
        ),
    ):
        reads.clear()
        assert predict(bad) == expected
        first = len(reads)
        # Its outputs are known: without its file nothing changes.
        away = good.path.rename(tmp_path / "away.onnx")
        assert predict(bad) == expected
        assert len(reads) == first + more
        away.rename(good.path)


def test_large_outputs_lie_in_a_file(samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "bad", "9, 0, 0, 0")
    expected = FloatReference(good, samples).predict_drop(bad)
    monkeypatch.setattr("edgekit.quantize.accuracy.predict._MEMORY_BYTES", 5 * 16)
    reference = FloatReference(good, samples, work=tmp_path)
    assert reference.predict_drop(bad) == expected
    away = good.path.rename(tmp_path / "away.onnx")
    other = classifier(tmp_path, "other", "0, 9, 0, 0")
    found = reference.predict_drop(other)
    away.rename(good.path)
    assert found == FloatReference(good, samples).predict_drop(other)


def test_outputs_of_calibration_are_used(samples: Samples, tmp_path: Path, runs: list[CpuSession]) -> None:
    # Three samples count; kinds of outputs are guessed from 16.
    good, bad = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "bad", "9, 0, 0, 0")
    expected, reference = FloatReference(good, samples, most=3).predict_drop(bad), FloatReference(good, samples, most=3)
    session = CpuSession(good.path, SessionSettings())
    for index, sample in enumerate(samples.read()):
        reference.keep(index, session.run(sample))
    runs.clear()
    assert reference.predict_drop(bad) == expected
    assert len(runs) == 3


def top1(low: float, high: float, agreement: float | None, source: str = "labels") -> Prediction:
    drop, measure = (low + high) / 2, "top-1 accuracy"
    return predicted(drop, (low, high), same=agreement, samples=100, source=source, measure=measure)


@pytest.mark.parametrize(
    ("prediction", "wanted"),
    [
        (top1(-0.02, 0.02, 0.97), 1600),  # four times as wide as wanted: sixteen times as many
        (top1(-0.02, 0.02, 1.0), 400),  # nothing changed: the interval shrinks with the number itself
        (top1(-0.004, 0.004, 0.97), None),
        (top1(0.08, 0.12, 0.5), None),  # lost far more than half a point, as sure as need be
        (top1(-0.02, 0.02, None), None),
        (top1(-0.01, 0.01, 1.0, "confidence"), 200),
        (top1(-0.02, 0.02, 1.0, "confidence"), math.inf),  # without labels 256 count
        (top1(-0.01, 0.01, 0.95, "confidence"), math.inf),  # of 5 % that changed labels tell what each costs
        (top1(-0.006, 0.006, 0.995, "confidence"), 160),
    ],
)
def test_a_wide_interval_says_how_many_samples_would_do(prediction: Prediction, wanted: float | None) -> None:
    assert wanted_samples(prediction) == wanted


def test_the_estimate_lies_near_the_drop_where_confidence_is_right(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(256, 1, 4)).astype(np.float32) * 2
    powers = np.exp(rows[:, 0])
    labels = [int(rng.choice(4, p=row / row.sum())) for row in powers.astype(np.float64)]
    samples = make_samples([{"x": row} for row in rows])
    good, off = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "off", "1, 0, -1, 0")
    guess, truth = FloatReference(good, samples).predict_drop(off), true_drop(good, off, samples, labels)
    assert (guess.source.split(";")[0], truth.source) == ("the float model's confidence", "labels")
    assert truth.drop_estimate is not None
    assert present(guess.drop_interval)[0] <= truth.drop_estimate <= present(guess.drop_interval)[1]
    assert truth.drop_estimate > 0.02
    assert present(truth.reference) < 0.9
    assert truth.drop_estimate == pytest.approx(present(truth.reference) - (truth.got or 0), abs=1e-5)


def test_numbers_of_one_answer_are_judged_as_values_unless_they_are_known_as_classes(tmp_path: Path) -> None:
    """The largest of a network's numbers is always the same, and a bias on another one of them changes no answer."""
    rows = np.random.default_rng(0).normal(size=(20, 1, 4)).astype(np.float32)
    rows[:, :, 0] += 9
    samples = make_samples([{"x": row} for row in rows])
    float_model, off = (classifier(tmp_path, name, bias) for name, bias in (("f", "0, 0, 0, 0"), ("o", "0, 2, 0, 0")))
    guess = FloatReference(float_model, samples).predict_drop(off)
    stated = FloatReference(float_model, samples, {"y": StatedOutput(kind="classes")}).predict_drop(off)
    assert (guess.measure, stated.measure) == (MEASURES["values"].name, MEASURES["classes"].name)
    # All of the variance of one of four numbers.
    assert present(guess.drop_estimate) == pytest.approx(0.25, rel=0.2)
    assert (stated.top1_agreement, stated.source, guess.source) == (1.0, ONE_ANSWER, ONE_ANSWER)
    assert present(stated.drop_estimate) < 0.01


@pytest.mark.parametrize(("last", "count", "is_one"), [(0, 20, True), (1, 20, False), (0, 1, False)])
def test_samples_of_one_answer_are_told(last: int, count: int, *, is_one: bool, tmp_path: Path) -> None:
    """Ranges of samples without a wake word may cut off what leads to one."""
    rows = np.random.default_rng(0).normal(size=(count, 1, 4)).astype(np.float32)
    rows[:, :, 0] += 9
    rows[-1, :, last] += 99
    one = classifier(tmp_path, "one", "0, 0, 0, 0")
    found = FloatReference(one, make_samples([{"x": row} for row in rows])).predict_drop(one)
    assert (found.source == ONE_ANSWER) is is_one
    lines = list(describe_answers(found))
    assert [line.startswith("warning: all 20 samples have the same answer") for line in lines] == [True] * is_one


@pytest.mark.parametrize(("op", "shift"), [("ArgMax", "0.4"), ("ArgMin", "-0.4")])
def test_whole_numbers_behind_the_classes_of_two_networks_are_answers(op: str, shift: str, tmp_path: Path) -> None:
    text = f"""g (float[1,3,4] x) => (int64[1,4] y) <float[1,3,1] b = {{SHIFT, 0, 0}}, int64 none = {{0}}> {{
        a = {op}<axis = 1, keepdims = 0>(x)  g = Add(x, b)  c = {op}<axis = 1, keepdims = 0>(g)
        is = Equal(c, none)  y = Where(is, none, a) }}"""
    exact, other = (make_model(text.replace("SHIFT", each), tmp_path / f"{each}.onnx") for each in ("0", shift))
    rows = np.random.default_rng(0).normal(size=(60, 1, 3, 4)).astype(np.float32)
    found = FloatReference(exact, make_samples([{"x": row} for row in rows])).predict_drop(other)
    one, two = (CpuSession(model.path, SessionSettings()) for model in (exact, other))
    equal = np.mean([one.run({"x": row})["y"] == two.run({"x": row})["y"] for row in rows])
    assert found.top1_agreement == pytest.approx(equal)
    assert 0.7 < equal < 1.0
    words = f"over 60 samples, {100 * equal:.1f} % of decisions the same; equal labels down by {50 * (1 - equal):.2f}"
    assert describe_prediction(found).startswith(words)


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [("string[1,4] t", "labels"), ("string[1,4] t, float[1,3,4] s", "map")],
    ids=["texts alone", "texts beside scores"],
)
def test_texts_that_name_classes_are_labels_unless_scores_decide(
    outputs: str, kind: MeasuredKind, tmp_path: Path
) -> None:
    text = f"""g (float[1,3,4] x) => ({outputs}) <float[1,3,1] b = {{SHIFT, 0, 0}}> {{
        g = Add(x, b)  s = Softmax<axis = 1>(g)  c = ArgMax<axis = 1, keepdims = 0>(s)
        t = ai.onnx.ml.LabelEncoder<keys_int64s = [0, 1, 2], values_strings = ["a", "b", "c"]>(c) }}"""
    exact, other = (make_model(text.replace("SHIFT", each), tmp_path / f"{each}.onnx") for each in ("0", "0.4"))
    rows = np.random.default_rng(0).normal(size=(60, 1, 3, 4)).astype(np.float32)
    found = FloatReference(exact, make_samples([{"x": row} for row in rows])).predict_drop(other)
    assert found.measure == MEASURES[kind].name
    one, two = (CpuSession(model.path, SessionSettings()) for model in (exact, other))
    equal = np.mean([one.run({"x": row})["t"] == two.run({"x": row})["t"] for row in rows])
    assert found.top1_agreement == pytest.approx(equal)
    assert equal < 1


@pytest.mark.parametrize(("dtype", "kind"), [(2, "image"), (5, "values"), (7, None)], ids=["bytes", "int16", "int64"])
def test_integers_of_few_bits_are_numbers(dtype: int, kind: MeasuredKind | None, tmp_path: Path) -> None:
    """As pixels of a picture, which an app shows as they are; int64 may be an index or a count."""
    text = f"""g (float[1,3,16,16] x) => ({onnx.TensorProto.DataType.Name(dtype).lower()}[1,3,16,16] y)
      <float s = {{SHIFT}}> {{ z = Add(x, s)  r = Round(z)  y = Cast<to = {dtype}>(r) }}"""
    exact, other = (make_model(text.replace("SHIFT", each), tmp_path / f"{each}.onnx") for each in ("0", "2"))
    low, high = (0, 250) if dtype == 2 else (-900, 900)
    rows = np.random.default_rng(0).uniform(low, high, (20, 1, 3, 16, 16)).astype(np.float32)
    found = FloatReference(exact, make_samples([{"x": row} for row in rows])).predict_drop(other)
    power = np.square(rows.round()).mean() / 4
    assert found.measure == ("" if kind is None else MEASURES[kind].name)
    assert found.sqnr_db == (math.inf if kind is None else pytest.approx(10 * np.log10(power), abs=0.1))


def test_values_that_are_not_finite_have_lost_everything(samples: Samples, tmp_path: Path) -> None:
    good, bad = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "bad", "0, 0, 0, -inf")
    found = FloatReference(good, samples).predict_drop(bad)
    assert (found.drop_estimate, found.top1_agreement, found.meets(0.5)) == (1.0, 0.0, False)


def with_bias(folder: Path, shape: str, bias: float, tail: str) -> Model:
    """A model that adds a bias to the first channel (or to all, where there is one) and then does `tail`."""
    channels = int(shape.split(",")[1].rstrip("]"))
    values = ", ".join([str(bias), *["0"] * (channels - 1)])
    ones = ",1" * (shape.count(",") - 1)
    text = f"""g ({shape} x) => ({shape} y)
      <float[1,{channels}{ones}] b = {{{values}}}> {{ z = Add(x, b) y = {tail}(z) }}"""
    return make_model(text, folder / f"{tail.split('<', maxsplit=1)[0]}-{bias}.onnx")


def drop_of(folder: Path, shape: str, tail: str, scale: float, bias: float) -> Prediction:
    sizes = [int(word) for word in shape.split("[")[1].rstrip("]").split(",")]
    rng = np.random.default_rng(0)
    samples = make_samples([{"x": (rng.normal(size=sizes) * scale).astype(np.float32)} for _ in range(40)])
    return FloatReference(with_bias(folder, shape, 0, tail), samples).predict_drop(with_bias(folder, shape, bias, tail))


@pytest.mark.parametrize(
    ("shape", "tail", "scale", "measure"),
    [
        ("float[1,5,16,16]", "Identity", 6, "mean overlap of classes (mIoU)"),
        ("float[1,5,16,16]", "Softmax<axis=1>", 2, "mean overlap of classes (mIoU)"),
        ("float[1,1,16,16]", "Sigmoid", 3, "mean overlap of classes (mIoU)"),
        ("float[1,1]", "Sigmoid", 3, "top-1 accuracy"),
        ("float[1,7]", "Softmax", 3, "top-1 accuracy"),
        ("float[1,3,16,16]", "Identity", 0.2, "PSNR of images"),
    ],
)
def test_a_loss_follows_what_outputs_mean(shape: str, tail: str, scale: float, measure: str, tmp_path: Path) -> None:
    same, far = (drop_of(tmp_path, shape, tail, scale, bias) for bias in (1e-4, 4.0))
    assert (same.measure, far.measure) == (measure, measure)
    assert same.meets(0.005)
    assert not far.meets(0.005)
    assert present(far.drop_interval)[0] <= present(far.drop_estimate) <= present(far.drop_interval)[1]
    assert present(far.drop_estimate) > 0.05


def predict_pair(
    folder: Path, text: str, values: tuple[str, str], rows: list[Tensors], stated: OutputKind | None = None
) -> Prediction:
    """Compares two models: `text` with the first and with the second value for VALUE; all outputs may be stated."""
    one, two = (make_model("g " + text.replace("VALUE", value), folder / f"{value}.onnx") for value in values)
    outputs = {spec.name: StatedOutput(kind=stated) for spec in one.outputs} if stated else None
    return FloatReference(one, make_samples(rows), outputs).predict_drop(two)


@pytest.mark.parametrize(
    ("text", "shape", "least", "most"),
    [
        # The same number throughout has no spread, and is held against zero.
        ("(float[1,13,4,5] x) => (float[1,13,4,5] y) <float b = {VALUE}> { y = Add(x, b) }", None, 0.0099, 0.0101),
        ("""(float[1,8] x) => (float y) <float b = {VALUE}> { z = Add(x, b)  y = ReduceMean<keepdims=0>(z) }""",
         (1, 8), 0.01, 1.0),
    ],
)  # fmt: skip
def test_one_number_loses_its_spread_and_a_constant_its_size(
    text: str, shape: tuple[int, ...] | None, least: float, most: float, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    rows: list[Tensors] = [
        {"x": np.ones((1, 13, 4, 5), np.float32) if shape is None else rng.normal(size=shape).astype(np.float32)}
        for _ in range(50)
    ]
    assert least <= (predict_pair(tmp_path, text, ("0", "0.1"), rows).drop_estimate or 0) <= most
    assert predict_pair(tmp_path, text, ("0", "0"), rows).drop_estimate == 0


def test_landmarks_and_ratings_are_held_by_their_spread_and_scores_of_classes_are_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    face = rng.uniform(0, 60, 20) - 10
    scaled = "(float[1,20] x) => (float[1,20] y) { scale = Constant<value_float = VALUE>() y = Mul(x, scale) }"
    shifted = "(float[1,3] x) => (float[1,3] y) { off = Constant<value_float = VALUE>() y = Add(x, off) }"
    landmarks: list[Tensors] = [{"x": (face + rng.normal(size=(1, 20)) * 3).astype(np.float32)} for _ in range(40)]
    scores: list[Tensors] = [{"x": (rng.normal(size=(1, 20)) * 3).astype(np.float32)} for _ in range(40)]
    ratings: list[Tensors] = [{"x": rng.uniform(1, 5, (1, 3)).astype(np.float32)} for _ in range(40)]
    # Four of the samples do not tell these from ratings, as many as a bundle is read from do.
    mixed: list[Tensors] = [
        {"x": row["x"] if index % 10 == 0 else row["x"] - np.float32(3)} for index, row in enumerate(ratings)
    ]
    for text, values, rows, measure in (
        (scaled, ("1.0", "1.1"), landmarks, "spread of the values (R2)"),
        (scaled, ("1.0", "1.1"), scores, "top-1 accuracy"),
        (shifted, ("0.0", "0.3"), ratings, "spread of the values (R2)"),
        (shifted, ("0.0", "0.3"), mixed, "top-1 accuracy"),
    ):
        found = predict_pair(tmp_path, text, values, rows)
        assert (found.measure, found.meets(0.005)) == (measure, measure == "top-1 accuracy")


@pytest.mark.parametrize(
    ("count", "axes", "shift", "measure"),
    [
        (30, 3, 1.0, "spread of the values (R2)"),
        (34, 2, 1.0, "spread of the values (R2)"),
        (35, 2, 1.0, "top-1 accuracy"),
        (28, 2, 1.0, "top-1 accuracy"),
        (34, 2, 0.2, "top-1 accuracy"),
    ],
)
def test_points_that_move_together_stay(tmp_path: Path, count: int, axes: int, shift: float, measure: str) -> None:
    """A hand moves as a whole along each axis. A guess of classes is told, what the user or the graph says is none."""
    rng = np.random.default_rng(0)
    text = "(float[1,N] x) => (float[1,N] y) { scale = Constant<value_float = VALUE>() y = Mul(x, scale) }"
    moved = np.stack([np.resize(rng.normal(size=axes) * shift, (1, count)) for _ in range(40)])
    rows: list[Tensors] = [{"x": ((row + rng.normal(size=(1, count))) * 3).astype(np.float32)} for row in moved]
    found = predict_pair(tmp_path, text.replace("N", str(count)), ("1.0", "1.1"), rows)
    assert found.measure == measure
    assert ("taken as classes" in found.source) == (measure == "top-1 accuracy")


@pytest.mark.parametrize(("tail", "stated"), [("Softmax", False), ("Identity", True), ("Identity", False)])
def test_classes_that_the_graph_or_the_user_states_are_no_guess(tmp_path: Path, tail: str, *, stated: bool) -> None:
    drawn = np.random.default_rng(0).normal(size=(40, 1, 12)).astype(np.float32) * 3
    text = f"(float[1,12] x) => (float[1,12] y) {{ y = {tail}(x) }}"
    found = predict_pair(tmp_path, text, ("1", "2"), [{"x": row} for row in drawn], "classes" if stated else None)
    assert (found.measure, "taken as classes" in found.source) == ("top-1 accuracy", tail == "Identity" and not stated)


@pytest.mark.parametrize(
    ("tail", "measure"), [("Identity", "spread of the values (R2)"), ("Sigmoid", "mean overlap of classes (mIoU)")]
)
def test_one_score_for_each_of_many_boxes_is_no_choice_between_them(tail: str, measure: str, tmp_path: Path) -> None:
    text = f"""(float[1,50,1] x, float[1,50,4] b) => (float[1,50,1] y, float[1,50,4] boxes)
      {{ off = Constant<value_float = VALUE>() z = Add(x, off) y = {tail}(z) boxes = Identity(b) }}"""
    rng = np.random.default_rng(0)
    shapes = {"x": (1, 50, 1), "b": (1, 50, 4)}
    rows: list[Tensors] = [
        {key: (rng.normal(size=shape) * 4).astype(np.float32) for key, shape in shapes.items()} for _ in range(40)
    ]
    found = predict_pair(tmp_path, text, ("0.0", "2.0"), rows)
    assert found.measure == measure
    assert not found.meets(0.005)


def test_labels_tell_the_drop_of_any_metric_of_the_task(tmp_path: Path) -> None:
    shape = "float[1,5,16,16]"
    good, bad = (with_bias(tmp_path, shape, bias, "Identity") for bias in (0, 3))
    rows = np.random.default_rng(0).normal(size=(40, 1, 5, 16, 16)).astype(np.float32) * 3
    samples = make_samples([{"x": row} for row in rows])
    masks, images = [row[0].argmax(0) for row in rows], [row + 0.3 for row in rows]
    overlap = true_drop(good, bad, samples, masks, TaskLimit(name="miou"))
    assert (overlap.measure, overlap.source, overlap.reference) == ("miou", "labels", 1.0)
    assert overlap.drop_estimate is not None
    assert overlap.got == pytest.approx(1 - overlap.drop_estimate)
    noise = true_drop(good, bad, samples, images, TaskLimit(name="psnr", peak=20.0))
    assert noise.reference == pytest.approx(36.48, abs=0.01)
    assert noise.got == pytest.approx(24.17, abs=0.01)
    assert noise.drop_estimate == pytest.approx(1 - (noise.got or 0) / (noise.reference or 1), abs=1e-4)
    assert true_drop(good, good, samples, masks, TaskLimit(name="miou")).drop_estimate == 0
    assert overlap.drop_interval is not None
    assert overlap.drop_interval[0] < overlap.drop_estimate < overlap.drop_interval[1] < 1.2 * overlap.drop_estimate
    assert overlap.drop_interval == tuple(round(end, 6) for end in overlap.drop_interval)
    assert present(noise.drop_interval) == pytest.approx((noise.drop_estimate,) * 2, abs=0.01)
    negative = true_drop(good, bad, samples, images, TaskLimit(name="psnr", peak=0.1))
    assert negative.drop_estimate == pytest.approx(
        36.48 - 24.17, abs=0.01
    )  # of a reference below 0 dB no share is taken
    small = true_drop(good, bad, samples, images, TaskLimit(name="psnr", peak=0.32))
    assert small.reference == pytest.approx(0.56, abs=0.01)
    assert small.drop_estimate == pytest.approx((36.48 - 24.17) / 0.56, abs=0.5)
    for figure in (small.reference, small.got, small.drop_estimate, noise.drop_estimate):
        assert figure == round(figure or 0, 6)
    few = make_samples([{"x": row} for row in rows[:20]])
    assert true_drop(good, bad, few, masks[:20], TaskLimit(name="miou")).drop_interval is None


def test_a_loss_that_grows_is_a_drop(samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_loss.py").write_text(
        "def far(outputs, label):\n    return float(outputs['y'][0, 0]) + 50, 1.0\n"
        "def lost(outputs, label):\n    return float(outputs['y'][0, 0] > 1e6), 1.0\n"
    )
    good, bad = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "bad", "5, 0, 0, 0")
    found = true_drop(good, bad, samples, [0] * 100, TaskLimit(name="own_loss:far", higher_is_better=False))
    assert found.got == pytest.approx(present(found.reference) + 5, abs=1e-4)
    assert found.drop_estimate == pytest.approx(5 / present(found.reference), abs=1e-5)
    assert found.drop_interval == pytest.approx((found.drop_estimate,) * 2, abs=1e-5)
    lost = true_drop(good, bad, samples, [0] * 100, TaskLimit(name="own_loss:lost"))
    assert (lost.reference, lost.drop_estimate) == (0, 0)


def test_outputs_that_the_metric_cannot_read_have_lost_everything(samples: Samples, tmp_path: Path) -> None:
    good, bad = classifier(tmp_path, "good", "0, 0, 0, 0"), classifier(tmp_path, "bad", "0, 0, 0, nan")
    lost = true_drop(good, bad, samples, [0] * 100)
    assert (lost.measure, lost.source, lost.drop_estimate, lost.drop_interval) == ("top1", "labels", 1.0, (1.0, 1.0))
    assert not lost.meets(0.99)


def test_logarithms_of_probabilities_are_read_as_what_they_stand_for() -> None:
    shares = np.array([[0.7, 0.2, 0.1]])
    reading = Reading(kind="classes", axis=1)
    assert np.allclose(read_probabilities(np.log(shares), reading), shares.T)
    assert np.allclose(read_probabilities(shares, reading), shares.T)


def test_a_change_of_class_costs_by_how_sure_the_float_model_was() -> None:
    reading, record = Reading(kind="classes", axis=1, squash="Softmax"), MEASURES["classes"].record
    unsure, sure = np.array([[0.5, 0.4, 0.1]]), np.array([[0.9, 0.05, 0.05]])
    assert record(unsure, unsure[:, [1, 0, 2]], reading) == pytest.approx([0.1, 1, 0, (0.9 - 2 * 0.2**0.5) ** 0.5])
    assert record(sure, sure[:, [1, 0, 2]], reading) == pytest.approx([0.85, 1, 0, (0.95 - 2 * 0.045**0.5) ** 0.5])
    moved = (1 - 0.45**0.5 - 0.02**0.5 - 0.005**0.5) ** 0.5
    assert record(sure, unsure, reading) == pytest.approx([0, 0, 0, moved])
    # Rounded probabilities add up to less than one, and are still the same distribution.
    assert record(sure, 0.9 * unsure, reading) == pytest.approx([0, 0, 0, moved])


def test_the_overlap_of_a_map_is_weighed_by_chances() -> None:
    reading, measure = Reading(kind="map", axis=1), MEASURES["map"]
    chances = np.array([[[0.9, 0.8, 0.3], [0.1, 0.2, 0.7]]])
    record = measure.record(chances, np.array([[[0.9, 0.2, 0.3], [0.1, 0.8, 0.7]]]), reading)
    sums = [[1.7, 0.7], [2.3, 1.3], [0.9, 0.9], [2.1, 2.1], [2, 1], [1, 1], [0.16, 0.16], [0.2**0.5, 0]]
    assert record.tolist() == pytest.approx(np.array(sums))
    lost = ((1.7 / 2.3 - 0.9 / 2.1) + (0.7 / 1.3 - 0.9 / 2.1)) / 2
    for count, is_sure in ((3, False), (300, True)):
        loss = measure.judge([record] * count)
        assert (loss.estimate, loss.agreement) == pytest.approx((lost, 2 / 3))
        doubt = sum(0.16 / count * ((1 + own / union) / union) ** 2 for own, union in ((1.7, 2.3), (0.7, 1.3)))
        reach = 1.959964 * (16 * doubt / 4 + (0.3 * lost) ** 2) ** 0.5
        assert loss.interval == pytest.approx((max(lost - reach, -1.0), min(lost + reach, 1.0)))
        assert (-1 < lost - reach < lost + reach < 1) is is_sure
    turned = measure.record(chances[..., :2], chances[:, ::-1, :2], reading)
    assert measure.judge([turned] * 3).estimate == pytest.approx(1.7 / 2)  # only the class that there was counts
    rare = np.pad(record, ((0, 0), (0, 1))) + np.array([[0.0, 0, 1.0], [0, 0, 1.0]] + [[0, 0, 0]] * 6)
    assert measure.judge([rare] * 3).estimate == pytest.approx(lost)


def test_images_lose_by_the_noise_that_is_added_to_their_own() -> None:
    reading, measure = Reading(kind="image"), MEASURES["image"]
    flat = np.linspace(0, 1, 64).reshape(1, 1, 8, 8)
    record = measure.record(flat, flat + 0.1, reading)
    low, high = np.quantile(flat, (0.01, 0.99))
    assert record[[0, 2, 3]] == pytest.approx([0.01, low, high])
    # The float model comes within 48 dB of its truth without detail, within 36 dB with much; all errors are of 20 dB.
    for sums, own_db in (
        ([0.01, 0.0, 0.0, 1.0], 48),
        ([0.01, 0.1, 0.0, 1.0], 36),
        ([0.01, 10**-4.0, 0.0, 1.0], 40),
        ([0.04, 4 * 10**-4.0, 1.0, 3.0], 40),
        ([0.0025, 0.25 * 10**-4.0, 0.0, 0.5], 40),
    ):
        lost_db = 10 * np.log10(1 + 10 ** (own_db / 10 - 2))
        assert measure.judge([np.array(sums)] * 4).estimate == pytest.approx(lost_db / own_db)
    assert measure.judge([np.array([0.0, 0.1, 0.0, 1.0])]).estimate == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("last", [False, True])
def test_the_detail_of_an_image_is_what_means_over_four_pixels_lose(last: bool) -> None:
    record = MEASURES["image"].record
    ramp = np.broadcast_to(np.arange(16.0), (1, 1, 16, 16))
    stripes = np.broadcast_to(np.arange(16) % 2 * 2.0, (1, 1, 18, 16))
    ramp, stripes = (np.moveaxis(image, 1, -1) if last else image for image in (ramp, stripes))
    reading = Reading(kind="image")
    assert record(stripes, stripes, reading)[1] == pytest.approx(1.0)
    # A ramp is made again but for the two pixels at each end, where the means stay: 1.5, 0.5, 0.5 and 1.5 beyond them.
    assert record(ramp, ramp, reading)[1] == pytest.approx((1.5**2 + 0.5**2) * 2 / 16)


def test_of_several_outputs_the_one_that_loses_most_is_named(tmp_path: Path) -> None:
    text = "(float[1,6] x) => (float[1,6] y, float[1,6] z) <float s = {VALUE}> { y = Neg(x) z = Mul(x, s) }"
    drawn = np.random.default_rng(0).normal(size=(24, 1, 6)).astype(np.float32)
    rows: list[Tensors] = [{"x": row} for row in drawn]
    found = predict_pair(tmp_path, text, ("2.0", "2.2"), rows, "values")
    # The exact output does not raise the ratio that is told.
    words = "20.0 dB or more in each output over 24 samples; 'z' loses most and decides nothing that is known"
    assert (found.outputs, describe_prediction(found).startswith(words)) == (("z",), True)
    assert predict_pair(tmp_path, text, ("2.0", "2.2"), rows, "embedding").candidates == 23


def test_what_stands_beside_a_decision_counts_too(tmp_path: Path) -> None:
    """As the points and the box of a face beside whether there is one: they were left out, and could be lost unseen."""
    text = "g (float[1,4] x) => (float[1,4] y, float[1,4] z) <float s = {SCALE}> { y = Softmax(x) z = Mul(x, s) }"
    exact, other = (make_model(text.replace("SCALE", scale), tmp_path / f"{scale}.onnx") for scale in ("2.0", "2.2"))
    rows = np.random.default_rng(0).normal(0, 4, (24, 1, 4)).astype(np.float32)
    stated = {"z": StatedOutput(kind="values")}
    reference = FloatReference(exact, make_samples([{"x": row} for row in rows]), stated)
    assert [part.measure.name for part in reference.parts] == [MEASURES["classes"].name, MEASURES["values"].name]
    assert reference.predict_drop(other).outputs == ("z",)


def test_raw_numbers_beside_probabilities_of_others_are_no_scores(tmp_path: Path) -> None:
    """As the offsets of a box beside whether there is a face: they were compared by the largest of the four."""
    rows = np.random.default_rng(0).normal(0, 2, (24, 1, 8)).astype(np.float32)
    layers = {name: np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32) for name in ("v", "w")}
    biases = {name: np.zeros(4, np.float32) for name in ("b", "c")}
    for first, measures in (
        ("n = Gemm(x, w, c) z = Softmax(n)", ["spread of the values (R2)", "top-1 accuracy"]),
        # Its own logits, and those of another choice where nothing is squashed, are scores.
        ("z = Softmax(y)", ["top-1 accuracy", "top-1 accuracy"]),
        ("z = Gemm(x, w, c)", ["top-1 accuracy", "top-1 accuracy"]),
    ):
        text = f"g (float[1,8] x) => (float[1,4] y, float[1,4] z) {{ y = Gemm(x, v, b) {first} }}"
        model = make_model(text, tmp_path / "m.onnx", constants=layers | biases)
        reference = FloatReference(model, make_samples([{"x": row} for row in rows]))
        assert [part.measure.name for part in reference.parts if not part.stands_in] == measures


@pytest.mark.parametrize(("squash", "read_as"), [("Softmax", ""), ("Sigmoid", "raw")])
def test_logits_are_read_as_what_another_output_makes_of_them(squash: str, read_as: str, tmp_path: Path) -> None:
    """Four classes at each of 30 moments: by themselves, so few columns may as well be corners of boxes."""
    text = f"g (float[30,1,6] x) => (float[30,1,4] y, float[30,1,4] z) {{ y = MatMul(x, v) z = {squash}(y) }}"
    model = make_model(text, tmp_path / "m.onnx", {"v": (6, 4)})
    rows = np.random.default_rng(0).normal(0, 4, (24, 30, 1, 6)).astype(np.float32)
    reference = FloatReference(model, make_samples([{"x": row} for row in rows]))
    assert [part.measure.name for part in reference.parts] == [MEASURES["map"].name] * 2
    outputs = [CpuSession(model.path, SessionSettings()).run({"x": row}) for row in rows[:4]]
    readings = read_output_kinds(read_float_graph(model), outputs, {})
    assert readings["y"] == msgspec.structs.replace(readings["z"], squash=read_as)
    assert readings["z"].kind == "map"


def test_values_lose_what_their_spread_loses() -> None:
    reading, measure = Reading(kind="values", axis=1), MEASURES["values"]
    values = np.array([[[1.0, 3.0], [10.0, 30.0]]])
    record = measure.record(values, values + np.array([[[0.0, 1.0], [0.0, 0.0]]]), reading)
    assert record.tolist() == [[4, 40], [10, 1000], [1, 0], [2, 2]]
    # Two channels with deviations of 1 and 10, of which the first loses half of its variance, the second nothing.
    assert measure.judge([record]).estimate == pytest.approx(0.5 * 1 / 11)
    silent = np.zeros((1, 2, 2))
    assert measure.judge([measure.record(silent, silent, reading)]).estimate == 0


def test_what_differs_only_between_places_says_nothing_about_a_sample(tmp_path: Path) -> None:
    """As the queries of a detector: a plan that kept nothing of the input was told to lose a thousandth."""
    text = """(float[1,2,40] x) => (float[1,2,40] y)
      <float s = {VALUE}, float first = {0}, float count = {40}, float step = {1}>
      { grid = Range(first, count, step) z = Mul(x, s) y = Add(z, grid) }"""
    rows = list[Tensors]({"x": row} for row in np.random.default_rng(0).normal(size=(24, 1, 2, 40)).astype(np.float32))
    kept, lost = (predict_pair(tmp_path, text, ("1", scale), rows).drop_estimate for scale in ("0.9", "0"))
    assert kept == pytest.approx(0.01, rel=0.1)
    assert lost == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("shape", "most"), [("1,3,8,8", 0.1), ("1,192", 1.0)], ids=["image", "no image"])
def test_the_rows_of_a_detector_that_nothing_decodes_are_measured_by_their_places(
    shape: str, most: float, tmp_path: Path
) -> None:
    """UltraFace's boxes hardly vary where there is no face: a twelfth of that was lost, of no face's place 0.02 %."""
    text = f"""(float[{shape}] x) => (float[1,100,6] y) <float s = {{VALUE}}, int64[3] one = {{1, 1, 1}},
      int64[3] rows = {{1, 100, 6}}, float first = {{0}}, float count = {{600}}, float step = {{1}}>
      {{ line = Range(first, count, step) grid = Reshape(line, rows) m = ReduceMean(x) f = Reshape(m, one)
      z = Mul(f, s) y = Add(z, grid) }}"""
    drawn = np.random.default_rng(0).normal(size=(24, *map(int, shape.split(",")))).astype(np.float32)
    lost = predict_pair(tmp_path, text, ("1", "0"), [{"x": row} for row in drawn]).drop_estimate
    assert most - 0.1 <= (lost or 0.0) <= most


@pytest.mark.parametrize(
    ("small", "lost"), [(0.011, 0.02 * 0.011 / 1.011), (0.009, 0.02), (0.000101, 0.02), (0.00009, 0.0)]
)
def test_channels_a_hundred_times_smaller_are_a_group_of_their_own(small: float, lost: float) -> None:
    # One record with 2 places: both channels have mean 0, the first a deviation of 1 and no error.
    record = np.array([[0.0, 0.0], [2.0, 2 * small**2], [0.0, 2 * 0.02 * small**2], [2.0, 2.0]])
    assert MEASURES["values"].judge([record]).estimate == pytest.approx(lost, rel=1e-6)
    vector = record.copy()
    vector[3] = 1.0
    assert MEASURES["values"].judge([vector]).estimate == pytest.approx(0.02 * small / (1 + small), rel=1e-6)


def test_the_interval_of_values_reaches_to_what_they_lose_as_one_number() -> None:
    # Vectors of the cell states of an LSTM: one channel is large, and all of the 24 small ones is lost.
    states = np.random.default_rng(0).normal(size=(64, 25)) * np.array([30.0, *[0.3] * 24])
    records = [
        MEASURES["values"].record(one, one * np.array([1.0, *[0.0] * 24]), Reading(kind="values", axis=0))
        for one in states
    ]
    loss = MEASURES["values"].judge(records)
    as_one = float(states[:, 1:].var(axis=0).sum() / states.var(axis=0).sum())
    assert loss.interval[0] < as_one < 0.1 * loss.estimate
    assert loss.interval[1] > loss.estimate > 0.15


def test_a_table_of_many_values_at_many_places_loses_what_its_spread_loses() -> None:
    """Half of it was told, as of the head of a detector: 0.08 % of the heatmaps of poses, of which 0.19 were lost."""
    record = np.array([[0.0], [1.0], [0.2], [1.0]]) * np.full(6, 20.0)
    loss = MEASURES["values"].judge([record] * 3)
    chance = 0.12 * 0.2**0.5
    assert (loss.estimate, *loss.interval) == pytest.approx((0.2, 0.2 - chance, 0.2 + chance))


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [(0, 1, "image"), (0, 250, "image"), (-1, 1, "image"), (-0.1, 1.3, "image"), (1, 10, "values"), (-9, 9, "values"),
     (0, 0.05, "values"), (0, 900, "values"), (-200, 255, "values")],
)  # fmt: skip
def test_maps_from_black_to_white_are_images(low: float, high: float, kind: str, tmp_path: Path) -> None:
    values = np.linspace(low, high, 256, dtype=np.float32).reshape(1, 1, 16, 16)
    assert read_kind(tmp_path, [values]).kind == kind


def read_kind(
    folder: Path, values: list[Array], beside: Array | None = None, stated: dict[str, StatedOutput] | None = None
) -> Reading:
    """Returns how the output of a graph without layers is read that has these values, perhaps with another beside."""
    dims = ",".join(map(str, values[0].shape))
    text = f"g (float[{dims}] x) => (float[{dims}] y) {{ y = Neg(x) }}"
    graph = read_float_graph(make_model(text, folder / "m.onnx"))
    others = {} if beside is None else {"boxes": beside}
    return read_output_kinds(graph, [{"y": value, **others} for value in values], stated or {})["y"]


def test_the_interval_of_losses_holds_half_a_change_more_than_was_seen() -> None:
    found = MEASURES["classes"].judge([np.array([0.5, 1.0, 0.0])] * 3 + [np.zeros(3)] * 97)
    # Half a change more of 101, which costs a half as well; by the beta distribution of Jeffreys' posterior.
    rate = 3.5 / 101
    doubt = 0.2 - 0.1 * rate**0.5
    reach = 1.959964 * (0.5**2 * 3.5 * 97.5 / (101**2 * 102) + rate**2 * doubt**2) ** 0.5
    assert (found.estimate, found.agreement) == pytest.approx((0.015, 0.97))
    assert {type(end) for end in found.interval} == {float}  # as a report is written
    assert found.interval == pytest.approx((0.5 * rate - reach, 0.5 * rate + reach), abs=1e-6)


def test_labels_that_change_cost_half_and_single_ones_are_not_trusted_when_they_agree() -> None:
    judge = MEASURES["labels"].judge
    one, many = judge([np.array([0.0, 1.0])] * 20), judge([np.array([0.0, 4.0])] * 20)
    assert (one.estimate, one.interval, one.agreement) == (0, (0, wilson_interval(0, 20)[1]), 1)
    assert (many.estimate, many.interval, many.agreement) == (0, (0, wilson_interval(0, 80)[1]), 1)
    assert judge([np.array([0.0, 4.0])] * 15 + [np.array([4.0, 4.0])] * 5).interval[1] > wilson_interval(20, 80)[1]
    some = judge([np.array([1.0, 1.0])] + [np.array([0.0, 1.0])] * 19)
    assert (some.estimate, some.interval[1], some.agreement) == (0.025, wilson_interval(1, 20)[1], 0.95)


def reader_logits(rng: np.random.Generator, steps: int, classes: int, sure: float, letters: float = 0.25) -> Array:
    """What a CTC reader gives: blanks (class 0), and letters at a share of the steps, [steps, classes]."""
    shown = np.where(rng.random(steps) < letters, rng.integers(1, classes, steps), 0)
    return np.asarray(rng.normal(0, 1, (steps, classes)) + sure * np.eye(classes)[shown]).astype(np.float32)


@pytest.mark.parametrize("layout", ["classes last", "classes before steps", "steps first"])
def test_a_sequence_is_read_on_the_axis_that_its_values_decide_over(tmp_path: Path, layout: str) -> None:
    rng = np.random.default_rng(0)
    rows = [reader_logits(rng, 24, 36, 9) for _ in range(4)]
    moved = {
        "classes last": [row[None] for row in rows],
        "classes before steps": [row.T[None] for row in rows],
        "steps first": [row[:, None] for row in rows],
    }[layout]
    assert read_kind(tmp_path, moved) == Reading(kind="sequence", axis=1 if layout == "classes before steps" else 2)
    assert read_kind(tmp_path, moved, beside=np.zeros((1, 24, 4), np.float32)).kind == "map"


@pytest.mark.parametrize(("classes", "kind"), [(3000, "sequence"), (36, "values")])
def test_of_thousands_of_letters_the_blank_may_be_far_larger(classes: int, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [reader_logits(rng, 24, classes, 50)[None] for _ in range(4)]
    assert read_kind(tmp_path, rows).kind == kind


@pytest.mark.parametrize(
    ("shape", "axis", "kind"),
    [
        ((1, 21, 16, 16), 1, "map"), ((1, 16, 16, 21), 3, "map"), ((1, 7, 16, 16), 1, "map"),
        ((1, 8, 12, 24), 1, "map"), ((1, 24, 12, 8), 3, "map"), ((1, 16, 16, 16), 1, "map"),
        ((1, 30, 1, 18), 1, "sequence"), ((1, 18, 1, 30), 3, "sequence"), ((1, 18, 1, 30), 1, "sequence"),
    ],
)  # fmt: skip
def test_classes_of_four_axes_are_found(shape: tuple[int, ...], axis: int, kind: str, tmp_path: Path) -> None:
    rng, values = np.random.default_rng(0), list[Array]()
    for _ in range(4):
        values.append(rng.normal(size=shape).astype(np.float32))
        winners = rng.integers(0, shape[axis], [1 if at == axis else side for at, side in enumerate(shape)])
        np.put_along_axis(values[-1], winners, np.float32(9), axis)
    found = read_kind(tmp_path, values)
    assert (found.kind, found.axis) == (kind, axis)
    if kind == "map":
        assert read_kind(tmp_path, values, stated={"y": StatedOutput(kind="map")}).axis == axis


def test_each_token_is_a_decision_and_those_of_a_sample_tell_less() -> None:
    """Truths are drawn from the float model's own probabilities; no class is a blank, also if most have it."""
    rng, measure, reading = np.random.default_rng(1), MEASURES["tokens"], Reading(kind="tokens", axis=2)
    records, right = list[Array](), np.zeros(2)
    for _ in range(400):
        row = reader_logits(rng, 16, 10, 3)[None]
        other = row + rng.normal(0, 1.2, row.shape).astype(np.float32)
        records.append(measure.record(row, other, reading))
        chances = np.exp(row[0]) / np.exp(row[0]).sum(axis=1, keepdims=True)
        truth = (chances.cumsum(axis=1) < rng.random((16, 1))).sum(axis=1)
        right += [(each[0].argmax(axis=1) == truth).mean() / 400 for each in (row, other)]
    loss, changed = judge_records(measure, records), np.mean([record[0] != record[1] for record in records])
    assert loss.estimate == pytest.approx(right[0] - right[1], abs=0.01)
    assert right[0] - right[1] > 0.03
    assert loss.agreement == pytest.approx(1 - changed)
    # The same tokens, sorted into samples where all move far and others where none does.
    tokens = np.concatenate([record[:5].T for record in records])
    sorted_records = [each.T for each in np.split(tokens[np.argsort(tokens[:, 4])], 400)]
    alike = judge_records(measure, sorted_records)
    assert (alike.estimate, alike.agreement) == pytest.approx((loss.estimate, loss.agreement))
    assert np.ptp(alike.interval) > 3 * np.ptp(loss.interval)
    # A single text tells no more than its two halves; of texts with one token each is a sample of its own.
    assert np.ptp(judge_records(measure, records[:1]).interval) > np.ptp(judge_records(measure, records[:3]).interval)
    single = [record[:, :1] for record in records]
    assert np.ptp(judge_records(measure, single).interval) < 5 * np.ptp(loss.interval)


def draw_peaks(rng: np.random.Generator, places: Array, spread: float = 1.5, size: tuple[int, int] = (32, 24)) -> Array:
    """Heatmaps [1, maps, height, width] with a Gaussian at each of `places` [maps, 2], and a little noise."""
    grid = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"))
    ways = ((grid[None] - places[:, :, None, None]) ** 2).sum(axis=1)
    return np.asarray(np.exp(-ways / (2 * spread**2)) + rng.normal(0, 0.01, ways.shape))[None].astype(np.float32)


def test_maps_of_one_peak_each_are_heatmaps(tmp_path: Path) -> None:
    """As those of the joints of a body: not masks, which are flat on top, nor crowds, nor photographs."""
    rng = np.random.default_rng(0)
    rows = [draw_peaks(rng, rng.uniform(4, 20, (17, 2))) for _ in range(8)]
    assert read_kind(tmp_path, rows) == Reading(kind="heatmaps", axis=1)
    assert read_kind(tmp_path, [row.transpose(0, 2, 3, 1) for row in rows]) == Reading(kind="heatmaps", axis=3)
    # A joint that is not in the picture has no peak.
    hidden = [np.where(np.arange(17)[:, None, None] % 3 == 0, row * np.float32(0.1), row) for row in rows]
    assert read_kind(tmp_path, hidden).kind == "heatmaps"
    # Of a tenth without a single peak few samples have more by chance; of a third none have.
    joints = [draw_peaks(rng, rng.uniform(6, 18, (3, 2))) for _ in range(16)]
    double = [row + np.roll(row, 11, axis=2) for row in joints]
    for count, is_read in ((6, True), (16, False)):
        some = [np.where(np.arange(3)[:, None, None] < (at < count), double[at], joints[at]) for at in range(16)]
        assert (read_kind(tmp_path, some).kind == "heatmaps") == is_read
    # Where most maps are empty, nothing tells what they are.
    empty = [np.where(np.arange(17)[:, None, None] > 5, row * np.float32(0.1), row) for row in rows]
    masks = [(row > 0.5).astype(np.float32) for row in rows]
    crowds = [row + np.roll(row, 11, axis=2) for row in rows]
    photographs = [rng.random(row.shape, np.float32) for row in rows]
    wide = [draw_peaks(rng, rng.uniform(4, 20, (17, 2)), 6.0) for _ in range(8)]
    for others in (empty, masks, crowds, photographs, wide, [row * np.float32(0) for row in rows]):
        assert read_kind(tmp_path, others).kind != "heatmaps"


def test_the_drop_of_heatmaps_is_the_share_of_peaks_that_move() -> None:
    rng, measure, reading = np.random.default_rng(0), MEASURES["heatmaps"], Reading(kind="heatmaps", axis=1)
    records = list[Array]()
    for index in range(20):
        places = rng.integers(4, 20, (5, 2))
        # One place of 32 is less than a twentieth, three are more; the last map of each sample shows nothing.
        moved = places + np.array([(0, 0), (1, 0), (0, 0), (3 if index % 4 == 0 else 0, 0), (9, 9)])
        seen = np.array([1, 1, 1, 1, 0.1], np.float32)[:, None, None]
        records.append(measure.record(draw_peaks(rng, places) * seen, draw_peaks(rng, moved) * seen, reading))
    loss = judge_records(measure, records)
    assert (loss.estimate, loss.agreement) == pytest.approx((5 / 80, 75 / 80))
    assert loss.interval[0] <= wilson_interval(5, 80)[0] < 5 / 80 < wilson_interval(5, 80)[1] <= loss.interval[1]
    same = measure.judge(records[1:4])
    assert (same.estimate, same.agreement) == (0, 1)
    assert measure.judge(records[:1]).interval == wilson_interval(1, 4)
    assert judge_records(measure, records[:1]).interval[0] == 0
    # The same number of peaks, all of them in two samples.
    places = rng.integers(4, 20, (5, 2))
    whole = [
        measure.record(draw_peaks(rng, places), draw_peaks(rng, places + 5 * (at < 2)), reading) for at in range(20)
    ]
    assert np.ptp(judge_records(measure, whole).interval) > 1.5 * np.ptp(wilson_interval(10, 100))
    assert measure.distances(records)[0] > measure.distances(records)[1]


@pytest.mark.parametrize(("way", "stays"), [((0, 0), True), ((0.7, 0.7), True), ((1.0, 1.0), False), ((1.3, 0), False)])
def test_a_peak_between_places_stays_where_noise_moves_the_highest_place(way: tuple[float, float], stays: bool) -> None:
    """A twentieth of 24 places is 1.2; from one place to the next across is 1.4."""
    rng, measure, reading = np.random.default_rng(0), MEASURES["heatmaps"], Reading(kind="heatmaps", axis=1)
    places = rng.integers(4, 20, (40, 2)) + 0.5
    one, two = (draw_peaks(rng, each, size=(24, 24)) for each in (places, places + np.array(way)))
    tops = [each[0].reshape(40, -1).argmax(axis=1) for each in (one, two)]
    assert (tops[0] != tops[1]).mean() > 0.5
    assert measure.judge([measure.record(one, two, reading)]).agreement == (1 if stays else 0)


def test_the_probability_of_an_answer_is_that_of_all_steps_that_spell_it() -> None:
    rows = np.random.default_rng(0).dirichlet(np.ones(3), size=5).T
    spelt = dict[tuple[int, ...], float]()
    for steps in product(range(3), repeat=5):
        answer = tuple(spell_answer(np.array(steps), 0))
        spelt[answer] = spelt.get(answer, 0.0) + float(np.prod(rows[list(steps), range(5)]))
    assert {(), (1,), (1, 1), (1, 2, 1), (1, 2, 1, 2, 1)} <= spelt.keys()
    for answer, probability in spelt.items():
        assert find_probability(answer, dict(enumerate(rows)), 0) == pytest.approx(probability)
    # Each step alone is more likely a blank, but a letter anywhere is more likely than none. Another line has letters.
    reading, measure = Reading(kind="sequence", axis=1), MEASURES["sequence"]
    line = np.log(0.01 + np.eye(3, dtype=np.float32)[[1, 0, 2]].T)[None]
    before, after = (
        np.log([[[1 - each - 1e-9 for each in row], row, [1e-9] * 3]]).astype(np.float32)
        for row in ([0.1, 0.45, 0.1], [0.1, 0.9, 0.1])
    )
    loss = measure.judge([measure.record(before, after, reading), measure.record(line, line, reading)])
    assert 2 * loss.estimate == pytest.approx(0.9 * 0.55 * 0.9 - (1 - 0.9 * 0.55 * 0.9 - 0.1 * 0.55 * 0.1), abs=1e-6)


def test_a_letter_that_comes_a_step_later_is_the_same_answer() -> None:
    def show(steps: list[int]) -> Array:
        return np.asarray(9 * np.eye(4, dtype=np.float32)[steps])[None]

    reading, measure = Reading(kind="sequence", axis=2), MEASURES["sequence"]

    def agree(*pairs: tuple[list[int], list[int]]) -> float | None:
        return measure.judge([measure.record(show(one), show(two), reading) for one, two in pairs]).agreement

    short, later, other = [0, 2, 0, 0, 3, 0, 0], [0, 0, 2, 0, 3, 3, 0], [0, 2, 0, 2, 3, 0, 0]
    assert agree((short, later)) == 1
    assert agree((short, other)) == 0
    # Without a class of most changes each step counts; so it does where one class fills up short words.
    full, shifted = [1, 2, 3, 1, 3, 2, 2], [1, 2, 2, 3, 1, 3, 2]
    assert agree((full, shifted)) == 0
    assert agree(([1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 3, 0, 0, 0, 0])) == 0
    # A line of close letters has fewer blanks than letters; what its blank is, others may tell.
    assert agree(([1, 0, 2, 3, 0, 1, 2, 0, 3, 0, 1], [1, 0, 2, 3, 0, 1, 0, 2, 3, 0, 1])) == 1
    assert agree((full, shifted), *[(short, later)] * 5) == 1


@pytest.mark.parametrize("shape", [(1, 600, 4), (1, 4, 600)])
def test_boxes_are_no_classes_on_any_axis(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    assert read_kind(tmp_path, [rng.uniform(0, 300, shape).astype(np.float32) for _ in range(4)]).kind == "values"
