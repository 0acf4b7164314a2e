"""Devices that lie in ways that figures alone may let pass fail, and honest devices are not accused."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from verify_devices import InProcess, Lie, from_list

from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.golden import read_outputs
from edgekit.data.samples import Samples, order_for_runs, select_samples
from edgekit.model.tensors import Array, Tensors
from edgekit.verify.metrics.fidelity import (
    Sides,
    describe_origin,
    find_distance,
    find_permutation,
    find_replay,
    find_swapped,
    find_unfaithful,
)
from edgekit.verify.own_model import find_equal_outputs, find_half_values
from edgekit.verify.run import verify_bundle
from edgekit.verify.run_report import RunReport

COUNT = 16


@pytest.fixture(scope="module")
def bundle(network_build: Path) -> Bundle:
    return open_bundle(network_build / "out" / "network-nnapi")


def ask(bundle: Bundle, lie: Lie) -> RunReport:
    (run,) = verify_bundle(bundle, [InProcess(lie=lie)]).runs
    return run


def test_a_device_as_far_from_the_float_model_as_the_bundle_is_no_replay(bundle: Bundle) -> None:
    rng = np.random.default_rng(0)
    wanted = list(select_samples(read_outputs(bundle.golden), order_for_runs(COUNT, COUNT, 1)))
    noise = float(np.std(np.stack([own["y"] - row["y"] for own, row in zip(ask_outputs(bundle), wanted, strict=True)])))

    def run_float(scale: float) -> Lie:
        return lambda _: [
            {"y": row["y"] + (scale * rng.normal(size=row["y"].shape)).astype(np.float32)} for row in wanted
        ]

    assert "dB nearer to the float model's than the bundle's own model does" in ask(bundle, run_float(1e-5)).failures[0]
    assert ask(bundle, run_float(noise)).passed


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_an_honest_device_that_happens_to_lie_near_the_float_model_is_no_replay(classes: int) -> None:
    """On a coarse grid a device that rounds otherwise may hit the float model's value, the more the fewer there are."""
    rng, accused = np.random.default_rng(classes), 0
    for _ in range(1000):
        wanted = rng.normal(size=(3, classes))
        own = np.round((wanted + rng.normal(scale=0.02, size=wanted.shape)) * 20) / 20
        got = own + rng.choice([-0.05, 0.0, 0.0, 0.05], size=own.shape)
        accused += find_replay(make_sides(own, got, wanted)) is not None
    assert accused <= 1


def test_a_sample_in_which_a_topk_picks_another_entry_here_convicts_no_device() -> None:
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=(10, 32))
    own, got = (wanted + rng.normal(scale=1e-3, size=wanted.shape) for _ in range(2))
    own[3] += rng.normal(scale=0.1, size=32)
    assert find_replay(make_sides(own, got, wanted)) is None
    assert find_replay(make_sides(own, wanted + (got - wanted) / 100, wanted)) is not None


@pytest.mark.parametrize("certain", [0, 2])
def test_a_probability_that_happens_to_be_right_is_no_replay(certain: int) -> None:
    """Of two classes all is told by one number, and a sample that saturates tells nothing (seen: a text classifier)."""
    rng, accused = np.random.default_rng(certain), 0
    for _ in range(1000):
        odds = np.append(rng.normal(size=3 - certain), np.full(certain, 20.0))
        shares = [1 / (1 + np.exp(-(odds + rng.normal(scale=size, size=3)))) for size in (0.0, 0.1, 0.1)]
        wanted, own, got = (np.stack([share, 1 - share], axis=1) for share in shares)
        accused += find_replay(make_sides(own, got, wanted)) is not None
    assert accused <= 1


def test_few_probabilities_still_convict_what_lies_too_near() -> None:
    wanted = np.random.default_rng(0).dirichlet(np.ones(4), 3)
    own, near = (wanted + np.array([1, -1, 2, -2]) * size for size in (1e-2, 1e-5))
    assert "the float model ran" in str(find_replay(make_sides(own, near, wanted)))


def test_a_bundle_in_float32_may_give_what_the_float_model_gives_on_another_machine() -> None:
    wanted = np.random.default_rng(5).normal(size=(8, 4))
    # The sums of trees depend on their order: this machine's order is not that of every other one.
    assert find_replay(make_sides(wanted * (1 + 3e-6), wanted, wanted)) is None
    assert find_replay(make_sides(wanted * (1 + 3e-4), wanted, wanted)) is not None


@pytest.mark.parametrize(("steps", "is_told"), [(1, False), (100, True)])
def test_float16_outputs_that_differ_by_their_last_digit_are_no_replay(steps: int, *, is_told: bool) -> None:
    wanted = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float16)
    own = (wanted + np.float16(steps) * np.spacing(np.abs(wanted))).astype(np.float64)
    own[:, ::2] = wanted[:, ::2]
    assert (find_replay(make_sides(own, wanted.astype(np.float64), wanted.astype(np.float64))) is not None) == is_told


def ask_outputs(bundle: Bundle) -> list[Tensors]:
    kept: list[Tensors] = []

    def keep(rows: list[Tensors]) -> list[Tensors]:
        kept.extend(rows)
        return rows

    ask(bundle, keep)
    return kept


def rows_of(rows: Sequence[Array] | Array) -> Samples:
    return Samples(source="x", count=len(rows), read=lambda: ({"y": row} for row in rows))


def test_grids_and_outputs_that_did_not_come_back_are_no_half_precision() -> None:
    wanted = [np.random.default_rng(0).normal(size=16).astype(np.float32)]
    two, three = np.array([0.25, 0.75] * 8, np.float32), np.array([0.0, 2.0**-10, 0.75, 0.75] * 4, np.float32)
    assert not find_half_values(rows_of(wanted), rows_of([two]))
    assert find_half_values(rows_of(wanted), rows_of([three]))
    rows: list[Tensors] = [{"y": np.random.default_rng(0).normal(size=16).astype(np.float32), "z": np.ones(16)}]
    found: list[Tensors] = [{"y": rows[0]["y"].astype(np.float16).astype(np.float32), "other": np.ones(16)}]
    (note,) = find_half_values(from_list(rows), from_list(found))
    assert "output 'y'" in note
    # What an honest device gave of eight photos (vww of the zoo, NNAPI): no two of the 256 values side by side.
    first = np.array([[255], [255], [224], [181], [248], [231], [120], [241]], np.float32)
    shares = np.concatenate([first, 256 - first], axis=1) / 256
    near = shares + np.float32(1e-3)
    assert not find_half_values(rows_of(near), rows_of(shares))
    # As many values of half precision that lie on no such grid are told of.
    drawn = np.random.default_rng(0).random((8, 2)).astype(np.float16).astype(np.float32)
    assert find_half_values(rows_of(near), rows_of(drawn))


def test_samples_that_all_give_the_same_are_told() -> None:
    row = np.ones((1, 4), np.float32)
    assert "for all 9 samples" in find_equal_outputs(rows_of([row] * 9))[0]
    assert not find_equal_outputs(rows_of([*[row] * 8, row + 1]))
    assert not find_equal_outputs(rows_of([row]))


SPREAD = np.random.default_rng(0).uniform(-0.9, 0.9, (16, 6))
LATE = np.vstack([SPREAD[:1], SPREAD[:-1]])
SURE = np.eye(6)[[0] * 16]


@pytest.mark.parametrize(
    ("own", "got", "words"),
    [
        (SPREAD, 0.7 * SPREAD, None),
        (SPREAD, SPREAD + 1.0, None),
        (SPREAD + 3, np.zeros((16, 6)) + 3, "is the same for every sample"),
        (SPREAD / 10 + 9, np.zeros((16, 6)) + 9, None),  # so steady that a constant answers it
        (SPREAD.round(), np.zeros((16, 6)), None),  # a step of the grid
        (SPREAD[:2], np.zeros((2, 6)), None),  # two samples may saturate
        (SPREAD[:1], SPREAD[:1, ::-1], None),  # of one sample nothing is known
        (SPREAD + 3, LATE + 3, "follows the sample before, not its own"),
        (SPREAD, 0.9 * SPREAD + 0.1 * LATE, "holds 10% of the sample before"),
        (SPREAD, SPREAD + 0.2 * LATE, "holds 20% of the sample before"),
        (SPREAD, SPREAD + 0.04 * LATE, None),
        (SPREAD[:5], 0.9 * SPREAD[:5] + 0.1 * LATE[:5], None),  # too few samples to tell
        (SURE + 1e-27 * SPREAD, SURE + 1e-27 * LATE, None),  # a softmax that saturates
        (SURE + 1e-3 * SPREAD, SURE + 1e-3 * LATE, "follows the sample before, not its own"),
        (SPREAD + 3, SPREAD[[1, 0, 3, 2, *range(4, 16)]] + 3, "came back for other samples"),
        (SPREAD, SPREAD[:, [1, 0, 2, 3, 4, 5]], "what belongs to 1 came back as 0"),
        (SPREAD, SPREAD[:, ::-1], "has its elements in another order"),
        (SPREAD, np.where(np.arange(6) == 2, 0.1, SPREAD), "has element 2 the same for every sample"),
        (SPREAD[:, :2], np.where(np.arange(2) == 1, 0.1, SPREAD[:, :2]), "has element 1 the same for every sample"),
        (SPREAD * [1, 1, 0.02, 1, 1, 1], np.where(np.arange(6) == 2, 0.0, SPREAD), None),  # it hardly moves
    ],
)
def test_an_output_must_come_from_its_own_sample_and_element(own: Array, got: Array, words: str | None) -> None:
    noise = np.random.default_rng(1).normal(scale=1e-6, size=own.shape)
    found = describe_origin(make_sides(own, got))
    assert found is None if words is None else words in str(found)
    assert describe_origin(make_sides(own, own + noise)) is None


def test_elements_a_step_of_a_coarse_grid_away_are_in_no_other_order() -> None:
    """Nearly still values of a codec's output have two levels, and a device rounds some to the other one."""
    for seed in range(1, 5):
        rng = np.random.default_rng(seed)
        level = rng.integers(0, 2, 200).astype(np.float64)
        own = level + np.where(rng.random((16, 200)) < 0.2, 1.0, 0.0)
        got = own.copy()
        got[:, np.flatnonzero(level == 0)[:9]] += 1
        got[:, np.flatnonzero(level == 1)[:9]] -= 1
        assert find_swapped(own, got) is None


def test_outputs_are_far_if_they_lie_beyond_what_quantization_moved() -> None:
    assert "lies 3.1 dB from" in str(find_distance(make_sides(SPREAD, 0.3 * SPREAD, 1.01 * SPREAD)))
    assert find_distance(make_sides(SPREAD, 0.3 * SPREAD, 0.2 * SPREAD)) is None
    assert find_distance(make_sides(SPREAD, 0.8 * SPREAD, 1.01 * SPREAD)) is None


def test_outputs_that_are_too_large_to_keep_are_held_by_their_sketches() -> None:
    rows: list[Tensors] = [{"y": np.random.default_rng(seed).normal(size=(1, 5000))} for seed in range(12)]
    own, late = from_list(rows), from_list([rows[0], *rows[:-1]])
    assert find_unfaithful(own, own, own) == {}
    assert find_unfaithful(own, own, late) == {"y": "follows the sample before, not its own"}


def test_a_device_may_give_the_outputs_of_a_source_that_computes_in_integers() -> None:
    """Its kernels round as the source's do, the bundle's own model does not; another sample's is still told."""
    rng = np.random.default_rng(3)
    own = [rng.normal(size=(1, 8)) for _ in range(12)]
    source = [row + rng.normal(scale=0.05, size=row.shape) for row in own]
    sides = [rows_of(rows) for rows in (own, source, source)]
    assert "to the bit" in find_unfaithful(*sides)["y"]
    assert "to the bit" in find_unfaithful(*sides, may_be_equal={"z"})["y"]
    assert find_unfaithful(*sides, may_be_equal={"y"}) == {}
    late = find_unfaithful(sides[0], sides[1], rows_of([source[0], *source[:-1]]), may_be_equal={"y"})
    assert late == {"y": "follows the sample before, not its own"}


@pytest.mark.parametrize("broken", [None, np.full((1, 8), np.nan), np.zeros((1, 4)), np.full((1, 8), "0")])
def test_an_output_that_did_not_come_back_whole_has_no_origin(broken: Array | None) -> None:
    rows = [np.random.default_rng(seed).normal(size=(1, 8)) for seed in range(12)]
    own, late = rows_of(rows), list[Tensors]({"y": row} for row in (rows[0], *rows[:-1]))
    assert find_unfaithful(own, own, from_list(late)).keys() == {"y"}
    late[3] = {} if broken is None else {"y": broken}
    assert find_unfaithful(own, own, from_list(late)) == {}


@pytest.mark.parametrize(("level", "is_told"), [(1.0, True), (100.0, False)])
def test_outputs_that_do_not_follow_their_inputs_are_told(level: float, is_told: bool) -> None:
    rng = np.random.default_rng(4)
    own, other = (rng.normal(scale=0.2, size=(12, 24)) + level for _ in range(2))
    assert describe_origin(make_sides(own, own + rng.normal(scale=0.1, size=own.shape))) is None
    assert ("does not follow its inputs" in str(describe_origin(make_sides(own, other)))) is is_told


def test_few_samples_cannot_prove_a_swap_nor_can_two_on_a_line() -> None:
    rows = np.random.default_rng(3).normal(size=(6, 16))
    assert find_permutation(rows, rows[[1, 0, 2, 3, 4, 5]]) is None
    assert find_permutation(rows, rows[[1, 2, 3, 4, 5, 0]]) is not None
    line = np.arange(16.0)[:, None] ** 1.5 * np.ones(16)
    assert find_permutation(line, line[[1, 0, *range(2, 16)]] + 0.1) is None
    assert find_permutation(line, line[::-1] + 0.01) is not None


def halves(rows: list[np.ndarray]) -> list[np.ndarray]:
    return [row.astype(np.float16).astype(np.float32) for row in rows]


@pytest.mark.parametrize(("values", "count", "exact_from", "told"), [
    (16, 1, 1, True), (15, 1, 1, False), (8, 2, 2, True), (16, 9, 8, True), (16, 9, 7, False),
])  # fmt: skip
def test_half_precision_is_told_from_sixteen_values(values: int, count: int, exact_from: int, *, told: bool) -> None:
    wanted = [np.random.default_rng(index).normal(size=(1, values)).astype(np.float32) for index in range(count)]
    found = halves(wanted[:exact_from]) + wanted[exact_from:]
    assert bool(find_half_values(rows_of(wanted), rows_of(found))) is told
    assert not find_half_values(rows_of(halves(wanted)), rows_of(halves(wanted)))
    mixed = halves(wanted[1:]) + wanted[:1]
    is_enough = values * min(count, 8) >= 16 and count < 9
    assert bool(find_half_values(rows_of(mixed), rows_of(halves(mixed)))) is is_enough
    assert not find_half_values(rows_of(wanted), rows_of([row.astype(np.float64) for row in halves(wanted)]))


@pytest.mark.parametrize(
    ("step", "most", "told"), [(1, 255, False), (1, 256, True), (4, 255, False), (5, 255, False), (5, 256, True)]
)
def test_a_grid_has_at_most_256_steps_whatever_the_least_distance(step: int, most: int, *, told: bool) -> None:
    places = np.array([0, step, 100, 101 + step, most * 1.0] * 4, np.float32)
    wanted = np.random.default_rng(0).normal(size=(1, 20)).astype(np.float32)
    assert bool(find_half_values(rows_of([wanted]), rows_of([places[None] / 64]))) is told


RUNS, MOST_ACCUSED = 1000, 1
CLASSES, SAMPLES = (1, 1, 2, 2, 3, 5, 10, 10, 100), (2, 3, 4, 6, 8, 8, 16, 24, 64)


def softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def sigmoid(values: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-values.clip(-60.0, 60.0))))


HEADS: dict[str, Callable[[Array], Array]] = {
    "logits": np.asarray, "softmax": softmax, "sigmoid": sigmoid, "image": lambda values: np.cumsum(values, axis=1),
}  # fmt: skip


def draw_values(rng: np.random.Generator) -> Array:
    """Returns what a model gives before its head: spread, in clusters, or nearly the same for all samples."""
    shape, scale = (int(rng.choice(SAMPLES)), int(rng.choice(CLASSES))), float(rng.choice([0.3, 1.0, 3.0, 10.0, 30.0]))
    kind, values = rng.choice(["spread", "clusters", "steady"], p=[0.6, 0.2, 0.2]), rng.normal(size=shape) * scale
    if kind == "clusters":
        centres = rng.normal(size=(max(2, min(shape[1], 10)), shape[1])) * scale
        values = centres[rng.integers(0, len(centres), shape[0])] + 0.05 * values
    return scale + 0.05 * values if kind == "steady" else values


def add_noise(values: Array, rng: np.random.Generator, loudness_db: float) -> Array:
    """Returns the values with noise so far below them, often of heavy tails or much worse in some samples."""
    noise = rng.normal(size=values.shape) if rng.random() < 0.5 else rng.standard_t(3, size=values.shape) / 1.7
    if rng.random() < 0.3:
        noise = noise * np.where(rng.random((len(values), 1)) < 0.1, 5.0, 0.7)
    if rng.random() < 0.2:
        noise = noise + rng.normal(size=(1, values.shape[1]))
    return np.asarray(values + 10.0 ** (-loudness_db / 20.0) * max(values.std(), 1e-3) * noise)


def draw_run(rng: np.random.Generator) -> Sides:
    """Returns what a float model gives, what its quantized model gives, and a device that rounds otherwise."""
    values, head = draw_values(rng), HEADS[rng.choice(list(HEADS))]
    far_db = rng.uniform(8.0, 40.0)
    own, got = (head(add_noise(values, rng, db)) for db in (far_db + rng.uniform(-6.0, 20.0), far_db))
    if rng.random() < 0.5:
        own, got = (np.round(side / (np.ptp(side) + 1e-9) * 255) * (np.ptp(side) + 1e-9) / 255 for side in (own, got))
    got = got * rng.uniform(0.9, 1.1) if rng.random() < 0.3 else got
    return make_sides(own, got, head(values))


def make_sides(own: Array, got: Array, reference: Array | None = None) -> Sides:
    own, got = (side.reshape(len(side), -1).astype(np.float32).astype(np.float64) for side in (own, got))
    return Sides(own=own, got=got, reference=own if reference is None else reference, is_whole=True)


def test_honest_runs_are_not_accused() -> None:
    rng = np.random.default_rng(0)
    accused = [words for words in (describe_origin(draw_run(rng)) for _ in range(RUNS)) if words]
    assert len(accused) <= MOST_ACCUSED, accused


@pytest.mark.parametrize("classes", [1, 2])
def test_two_samples_of_one_or_two_classes_that_are_mistaken_are_no_other_order(classes: int) -> None:
    """A classifier that mistakes a few confident samples gives what belongs to others, and each looks like a swap."""
    rng = np.random.default_rng(classes)
    for _ in range(100):
        sides = rng.permutation(np.repeat([0.02, 0.98], 12)) + rng.normal(scale=0.005, size=24)
        found = sides + rng.normal(scale=0.005, size=24)
        wrong = [*rng.choice(np.flatnonzero(sides < 0.5), 2), *rng.choice(np.flatnonzero(sides > 0.5), 2)]
        found[wrong] = 1.0 - found[wrong]
        own, got = (np.stack([side, 1.0 - side][:classes], axis=1) for side in (sides, found))
        assert describe_origin(make_sides(own, got)) is None


@pytest.mark.parametrize("mistaken", [1, 2])
def test_samples_of_a_class_that_are_all_mistaken_are_no_class_that_is_stuck(mistaken: int) -> None:
    """Where a softmax saturates, the class of a mistaken sample is zero everywhere, and another one gains it."""
    own = np.eye(10)[[*range(10), *range(mistaken - 1, 10)]]
    got = own.copy()
    got[own[:, 3] > 0] = np.eye(10)[4]
    assert describe_origin(make_sides(own, got)) is None


@pytest.mark.parametrize(("classes", "samples"), [(1, 64), (2, 24), (10, 16)])
def test_a_device_that_gives_the_outputs_of_others_is_still_found(classes: int, samples: int) -> None:
    """The fewer values an output has, the more samples it takes; the figures are good enough to pass."""
    rng, missed = np.random.default_rng(classes), 0
    for _ in range(50):
        own = 1.0 + 0.25 * rng.normal(size=(samples, classes))
        got = own[rng.permutation(samples)] + rng.normal(scale=0.01, size=own.shape)
        missed += describe_origin(make_sides(own, got)) is None
    assert missed <= 2
