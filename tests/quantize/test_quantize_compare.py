"""Two plans of one network are told apart by how far they move its decisions."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fixture_types import present
from quantize_models import make_model, make_samples, make_search

from edgekit._ort import CpuSession
from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.quantize import calibrate_model, plan_quantization
from edgekit.quantize.accuracy.detections import CERTAINTY, detection_distances
from edgekit.quantize.accuracy.likeness import Compared, Likeness, Pair, Part, compare_sample
from edgekit.quantize.accuracy.loss import MEASURES, Loss, Measure, judge_records, measure_hellinger
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.plan_search import Trial, write_chosen
from edgekit.quantize.ranges import softmax
from edgekit.target import Precision, load_target

LOGITS = "g (float[1,4] x) => (float[1,4] y) <float[4] b = {BIAS}> { y = Add(x, b) }"
VECTORS = """g (float[1,16] x) => (float[1,16] y) { y = MatMul(x, w) }"""
TRAINED = "g (float[1,8] x) => (float[1,5] y) { a = Gemm(x, w1, b1) h = Relu(a) y = Gemm(h, w2, b2) }"


def add_bias(folder: Path, bias: str) -> Model:
    return make_model(LOGITS.replace("BIAS", bias), folder / f"{bias}.onnx")


@pytest.fixture
def reference(tmp_path: Path) -> FloatReference:
    """Logits of four classes, of which the last never wins."""
    rows = np.random.default_rng(0).normal(size=(100, 1, 4)).astype(np.float32) * 3
    rows[:, :, 3] = -20
    return FloatReference(add_bias(tmp_path, "0, 0, 0, 0"), make_samples([{"x": row} for row in rows]))


def test_an_error_of_a_class_that_never_wins_counts_for_nothing(reference: FloatReference, tmp_path: Path) -> None:
    loud, quiet = add_bias(tmp_path, "0, 0, 0, -40"), add_bias(tmp_path, "0.05, 0, 0, 0")
    assert reference.predict_drop(loud).sqnr_db < reference.predict_drop(quiet).sqnr_db - 30
    found = reference.compare(loud, quiet)
    assert found < 0
    assert (reference.compare(quiet, loud), reference.compare(quiet, quiet)) == (-found, 0.0)


def test_a_worse_model_runs_less(reference: FloatReference, tmp_path: Path, runs: list[CpuSession]) -> None:
    near, bad, nearer = (add_bias(tmp_path, bias) for bias in ("0.2, 0, 0, 0", "9, 0, 0, 0", "0.1, 0, 0, 0"))
    assert reference.predict_drop(near).samples == reference.predict_drop(bad).samples == 100
    assert [reference.look(one, rival=other).samples for one, other in ((nearer, near), (near, bad))] == [100, 100]
    runs.clear()
    # All these ran over all samples.
    assert [reference.predict_drop(model).samples for model in (near, bad, nearer)] == [100] * 3
    assert not runs
    worse = add_bias(tmp_path, "8, 0, 0, 0")
    found = reference.look(worse, rival=near)
    assert found.samples == len(runs) == 13
    assert present(found.drop_estimate) > 0.1
    # What it gave for these samples is remembered.
    assert reference.predict_drop(worse).samples == 100
    assert len(runs) == 100


def test_looking_several_times_finds_no_more_where_there_is_no_difference() -> None:
    rng = np.random.default_rng(0)
    part = Part(
        shapes={"y": (1,)},
        measure=Measure("", "", lambda _records: Loss(estimate=0.0, interval=(0.0, 0.0)), np.concatenate),
        record=lambda _expected, found: found["y"],
    )

    def draw(farther: float) -> list[Compared]:
        records = rng.exponential(size=(128, 1)) + farther
        return [Compared(powers={}, records=(record,), broken=frozenset()) for record in records]

    def race(farther: float) -> int:
        """The number of samples after which the second is found to be worse, 0 if it never is."""
        one, two = draw(0.0), draw(farther)
        looks = ([Likeness([part], each[::stride]) for each in (one, two)] for stride in (16, 8, 4, 2, 1))
        return next((first.distances().shape[1] for first, second in looks if first.is_clearly_better_than(second)), 0)

    # In one direction it is half of 5 %.
    assert 0.01 < np.mean([race(0.0) > 0 for _ in range(600)]) < 0.04
    assert 0 < np.mean([race(2.0) for _ in range(100)]) < 24


def test_steps_of_a_sequence_tell_less_than_as_many_samples() -> None:
    """Errors of a whole sequence widen the interval, and make no plan clearly better; errors of single steps do."""
    steps, moved = 16, np.concatenate
    measure = Measure("", "", lambda records: Loss(estimate=float(moved(records).mean()), interval=(0.0, 0.1)), moved)
    part = Part(shapes={"y": (1,)}, measure=measure, record=lambda _expected, found: found["y"])

    def draw(errors: Array, steps: int) -> Likeness:
        return Likeness(
            [part], [Compared(powers={}, records=(np.array([each]),), broken=frozenset()) for each in errors], steps
        )

    rng = np.random.default_rng(0)
    own, shared = rng.uniform(0, 0.1, 8 * steps), np.repeat(rng.uniform(0, 0.1, 8), steps)
    # Student's t of seven degrees of freedom.
    for errors, factor in ((own, 2.365 / 1.96), (shared, math.sqrt(steps) * 2.365 / 1.96)):
        (_, loss), (_, alone) = draw(errors, steps).losses[0], draw(errors, 1).losses[0]
        assert loss.estimate == alone.estimate
        reach, wanted = (each.interval[1] - each.estimate for each in (loss, alone))
        assert reach == pytest.approx(factor * wanted, rel=0.15)
    # A single sequence tells no more than its two halves.
    (_, loss), (_, alone) = (draw(own, each).losses[0] for each in (len(own), 1))
    assert np.ptp(loss.interval) > 6 * np.ptp(alone.interval)
    # A sequence whose samples hold several decisions each is one cluster: the interval is widened once.
    rows = msgspec.structs.replace(
        part, measure=msgspec.structs.replace(measure, row=0, distances=lambda records: np.concatenate(records)[:, 0])
    )
    for errors, factor in ((own, math.sqrt(4) * 2.365 / 1.96), (shared, math.sqrt(4 * steps) * 2.365 / 1.96)):
        records = [np.repeat(each, 4)[None] for each in errors]
        widened, alone = judge_records(rows.measure, records, steps), measure.judge(records)
        assert np.ptp(widened.interval) == pytest.approx(factor * np.ptp(alone.interval), rel=0.15)
    worse = np.repeat([0.05, 0, 0, 0, 0.001, 0, 0, 0], steps)
    assert draw(own, 1).is_clearly_better_than(draw(own + worse, 1))
    assert not draw(own, steps).is_clearly_better_than(draw(own + worse, steps))
    assert draw(own, steps).is_clearly_better_than(draw(own + rng.uniform(0, 0.01, len(own)), steps))


def test_vectors_move_by_their_choice_of_neighbours(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    noise: Array = rng.normal(0, 0.02, (16, 16))
    eye = np.eye(16)
    models = [
        make_model(VECTORS, tmp_path / f"{index}.onnx", constants={"w": value.astype(np.float32)})
        for index, value in enumerate((eye, 2 * eye, eye + noise))
    ]
    rows = rng.normal(size=(40, 1, 16))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    reference = FloatReference(models[0], make_samples([{"x": row.astype(np.float32)} for row in rows]))
    assert reference.predict_drop(models[1]).measure == MEASURES["embedding"].name
    pair: Array = np.stack([eye, eye + noise])
    for count in (2, 3):
        assert MEASURES["embedding"].distances([*pair[:, :count].swapaxes(0, 1)]).any() == (count == 3)
    # Twice the length is all noise to a ratio, and nothing to a cosine.
    ratios = [reference.predict_drop(each).sqnr_db for each in models[1:]]
    assert ratios == [pytest.approx(0, abs=0.1), pytest.approx(22, abs=3)]
    assert reference.compare(models[1], models[2]) < 0


def test_distances_follow_the_hellinger_distance_of_the_decisions() -> None:
    logits: Array = np.array([[2.0, 0.0, -1.0], [0.1, 0.0, -9.0]]).T
    one, two = softmax(logits, axis=0), softmax(logits + np.array([[0.01], [0.0], [0.0]]), axis=0)
    found = measure_hellinger(one, two)
    # For small errors its square is a quarter of the Kullback-Leibler divergence, an eighth of the error's variance.
    assert found**2 == pytest.approx(0.01**2 * one[0] * (1 - one[0]) / 8, rel=0.02)
    assert measure_hellinger(np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])) == pytest.approx(1.0)
    rows = np.array([[0, 0.9, 0.9, 0.9, 0.0], [1, 0.5, 0.5, 0.5, 0.2]])
    lost = rows.copy()
    lost[0, 3] = 0.0
    sure, unsure = 0.9**CERTAINTY, 0.5**CERTAINTY
    expected = np.array([0.2 * unsure, 0.2 * unsure + sure * (1 - 0.1**0.5) ** 0.5]) / (sure + unsure)
    assert detection_distances([rows, lost]).tolist() == pytest.approx(expected)


def test_low_scores_move_no_detection() -> None:
    """A face detector had 417 rows of scores below 0.05 beside 100 faces: they were two thirds of all movement."""
    faces = np.array([[0, 0.9, 0.9, 0.9, 0.0]] * 10)
    noise = np.array([[0, 0.02, 0.02, 0.05, 0.1]] * 40)
    shifted = faces + np.array([0, 0, 0, 0, 0.05])
    quiet, loud = (detection_distances([np.concatenate(each)]).sum() for each in ((faces, noise), (shifted, noise[:0])))
    assert quiet < loud


def test_parts_are_weighed_by_what_they_lose() -> None:
    """One part moves in hundredths and loses nothing, the other in millionths and loses a tenth of each."""

    def make_part(name: str, price: float) -> Part:
        def judge(records: Sequence[Array]) -> Loss:
            return Loss(estimate=price * float(np.mean(records)), interval=(0.0, 1.0))

        measure = Measure(name, "", judge, np.concatenate)
        return Part(shapes={name: (1,)}, measure=measure, record=lambda _expected, found: found[name])

    def draw(decisions: float, values: float) -> Likeness:
        parts = [make_part("decisions", 1e-4), make_part("values", 1e4)]
        found = {"decisions": np.array([decisions]), "values": np.array([values])}
        pair = Pair(expected={name: np.zeros(1) for name in found}, found=found)
        return Likeness(parts, [compare_sample(parts, pair)] * 4)

    first, second = draw(0.01, 2e-6), draw(0.02, 1e-6)
    assert float(first.compare(second).mean()) == pytest.approx(0.01, rel=0.01)
    assert (first.compare(second) == -second.compare(first)).all()


def train(folder: Path) -> tuple[Model, Samples]:
    """A network of random features, whose last layer is fitted to five clusters."""
    rng = np.random.default_rng(2)
    middles = rng.normal(size=(5, 8)) * 1.2
    kinds = rng.integers(0, 5, 400)
    values: Array = middles[kinds] + rng.normal(size=(400, 8))
    first, shift = rng.normal(size=(8, 32)), rng.normal(size=32)
    hidden = np.c_[np.maximum(values @ first + shift, 0), np.ones(400)]
    last = 8 * np.linalg.lstsq(hidden, np.eye(5)[kinds], rcond=None)[0]
    constants = {"w1": first, "b1": shift, "w2": last[:-1], "b2": last[-1]}
    model = make_model(
        TRAINED, folder / "m.onnx", constants={name: each.astype(np.float32) for name, each in constants.items()}
    )
    return model, make_samples([{"x": row.astype(np.float32)[None]} for row in values[:200]])


@pytest.mark.parametrize(("precision", "is_sound"), [("int8", True), ("int16", False)], ids=["sound", "winners tie"])
def test_the_plan_that_decides_worse_is_refused(tmp_path: Path, precision: Precision, *, is_sound: bool) -> None:
    model, samples = train(tmp_path)
    calibration, target = calibrate_model(model, samples, work=tmp_path / "work"), load_target("qnn")
    plan = plan_quantization(model, calibration, target, precision)
    if not is_sound:
        logits = msgspec.structs.replace(plan.ranges["y"], high=plan.ranges["y"].high * 0.075)
        plan = msgspec.structs.replace(plan, ranges={**plan.ranges, "y": logits})
    reference = FloatReference(model, samples)
    search = make_search((model, calibration), reference, target, tmp_path, precision)
    made = write_chosen(search, plan, None, tmp_path / "given.onnx").model
    trial = Trial(step="all", plan=plan, prediction=reference.predict_drop(made), taken_macs=1.0)
    known = msgspec.structs.replace(search, known={"all": trial})
    chosen, searched = find_plan(known, max_drop=1.0, narrow=False)
    assert searched is not None
    assert [each.step for each in searched.trials] == ["all", "minmax"]
    assert (chosen == plan) == is_sound
    lost, least = (each.prediction.drop_estimate or 0.0 for each in searched.trials)
    assert (lost > least + 0.1) != is_sound
