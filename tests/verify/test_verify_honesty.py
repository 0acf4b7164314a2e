"""Devices that lie in ways that figures alone may let pass: each fails, or what it did is told."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from verify_devices import InProcess, Lie
from verify_models import make_images, save_network

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.folder import GOLDEN, Bundle, open_bundle
from edgekit.bundle.golden.expected import EXPECTED
from edgekit.bundle.golden.golden import OUTPUTS, make_golden, read_outputs
from edgekit.data.npz import read_rows
from edgekit.data.samples import Samples
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.recipe import Data, Recipe
from edgekit.verify.causes.honesty import describe_replay, find_half_values, find_replay, find_sameness
from edgekit.verify.metrics.dependence import (
    compare_device_outputs,
    count_dimensions,
    find_independence,
    find_permutation,
    may_be_rounded,
)
from edgekit.verify.metrics.sketch import BUCKETS, sketch_samples
from edgekit.verify.run import verify_bundle
from edgekit.verify.run_report import RunReport

COUNT = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("liars")
    model = save_network(folder / "network.onnx")
    np.savez(folder / "data.npz", x=np.stack([row["x"] for row in make_images(2 * COUNT)]))
    np.savez(folder / "eval.npz", x=np.stack([row["x"] for row in make_images(3 * COUNT)])[-COUNT:])
    data = Data(source=str(folder / "data.npz"), evaluation=str(folder / "eval.npz"))
    build(model.path, data, folder / "out", Recipe(targets=("nnapi",)), verify=False)
    return folder


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder / "out" / "network-nnapi")


def ask(bundle: Bundle, lie: Lie, **more: object) -> RunReport:
    (run,) = verify_bundle(bundle, [InProcess(lie=lie, **more)]).runs  # type: ignore[arg-type]
    return run


def listed(rows: Sequence[Tensors]) -> Samples:
    return Samples(source="rows", count=len(rows), read=lambda: iter(rows))


def test_the_truth_is_no_lie(bundle: Bundle) -> None:
    run = ask(bundle, lambda rows: rows)
    assert run.passed
    assert not run.findings
    assert not run.notes


def run_other(folder: Path, rows: int) -> list[Tensors]:
    """Returns what a model of the same layers and other weights gives."""
    proto = onnx.load(str(folder / "network.onnx"))
    rng = np.random.default_rng(5)
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(rng.permuted(values.reshape(-1)).reshape(values.shape), tensor.name))
    session = CpuSession(proto.SerializeToString(), SessionSettings(level=Level.DISABLED), subject="other")
    return [session.run(sample) for _, sample in zip(range(rows), make_images(COUNT), strict=False)]


def test_outputs_of_another_model_fail(bundle: Bundle, folder: Path) -> None:
    assert "below" in " / ".join(ask(bundle, lambda rows: run_other(folder, len(rows))).failures)


def test_the_references_own_outputs_are_a_replay(bundle: Bundle) -> None:
    run = ask(bundle, lambda _: list(read_outputs(bundle.golden)))
    assert not run.passed
    assert "the outputs are the float model's to the bit" in run.findings[0]


def test_a_bundle_that_gives_the_float_models_bits_is_no_replay(bundle: Bundle) -> None:
    own, wanted = (list(read_rows(bundle.folder / GOLDEN / name)) for name in (EXPECTED, OUTPUTS))
    rows = [choice.row for choice in bundle.manifest.golden.chosen]
    chosen = [wanted[row] for row in rows]
    assert find_replay(bundle, rows, listed(own), listed(own)) is None
    assert "to the bit" in str(find_replay(bundle, rows, listed(chosen), listed(chosen)))
    assert find_replay(bundle, rows, listed(chosen), listed(own)) is None
    retyped: list[Tensors] = [{"y": row["y"].view(np.int32)} for row in chosen]
    assert find_replay(bundle, rows, listed(chosen), listed(retyped)) is None
    assert find_replay(bundle, [COUNT + 1], listed(chosen), listed(chosen)) is None  # no row whose own output is known
    manifest = msgspec.structs.replace(bundle.manifest, precision="fp32")
    assert find_replay(msgspec.structs.replace(bundle, manifest=manifest), rows, listed(chosen), listed(chosen)) is None


def test_a_run_of_the_float_model_on_kernels_of_its_own_is_told(bundle: Bundle) -> None:
    rng = np.random.default_rng(0)

    def run_float(noise: float) -> Lie:
        return lambda _: [
            {"y": row["y"] + (noise * rng.normal(size=row["y"].shape)).astype(np.float32)}
            for row in read_outputs(bundle.golden)
        ]

    run = ask(bundle, run_float(1e-5))
    assert not run.passed
    assert "dB nearer to the float model's than the bundle's own model does" in run.findings[0]
    noise = float(np.std(next(iter(ask_outputs(bundle)))["y"] - next(iter(read_outputs(bundle.golden)))["y"]))
    assert not ask(bundle, run_float(noise)).findings


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_an_honest_device_that_happens_to_lie_near_the_float_model_is_no_replay(classes: int) -> None:
    """On a coarse grid a device that rounds otherwise may hit the float model's value, the more the fewer there are."""
    rng, accused = np.random.default_rng(classes), 0
    for _ in range(1000):
        wanted = rng.normal(size=(3, 1, classes))
        own = np.round((wanted + rng.normal(scale=0.02, size=wanted.shape)) * 20) / 20
        got = own + rng.choice([-0.05, 0.0, 0.0, 0.05], size=own.shape)
        accused += describe_replay(list(zip(wanted, own, got, strict=True)), 3) is not None
    assert accused <= 1


@pytest.mark.parametrize("certain", [0, 2])
def test_a_probability_that_happens_to_be_right_is_no_replay(certain: int) -> None:
    """Of two classes all is told by one number, and a sample that saturates tells nothing (seen: a text classifier)."""
    rng, accused = np.random.default_rng(certain), 0
    for _ in range(1000):
        odds = np.append(rng.normal(size=3 - certain), np.full(certain, 20.0))
        shares = [1 / (1 + np.exp(-(odds + rng.normal(scale=size, size=3)))) for size in (0.0, 0.1, 0.1)]
        wanted, own, got = (np.stack([share, 1 - share], axis=1) for share in shares)
        accused += describe_replay(list(zip(wanted, own, got, strict=True)), 3) is not None
    assert accused <= 1


def test_few_probabilities_still_convict_what_lies_too_near() -> None:
    wanted = np.random.default_rng(0).dirichlet(np.ones(4), (3, 1))
    own, near = (wanted + np.array([1, -1, 2, -2]) * size for size in (1e-2, 1e-5))
    assert "the float model ran" in str(describe_replay(list(zip(wanted, own, near, strict=True)), 3))


@pytest.mark.parametrize(
    "shuffle",
    [
        pytest.param(lambda rows: [*rows[1:], rows[0]], id="early by one"),
        pytest.param(lambda rows: rows[::-1], id="reversed"),
        pytest.param(lambda rows: [*rows[:-2], rows[-1], rows[-2]], id="the last two swapped"),
        pytest.param(lambda rows: [rows[place] for place in np.random.default_rng(1).permutation(len(rows))], id="any"),
    ],
)
def test_outputs_of_other_samples_are_told_though_the_figures_pass(bundle: Bundle, shuffle: Lie) -> None:
    steady: list[Tensors] = [{"y": row["y"] + np.float32(1000.0)} for row in read_outputs(bundle.golden)]
    noisy: list[Tensors] = [{"y": row["y"] + np.float32(0.001)} for row in steady]
    (report,) = compare_device_outputs(listed(steady), listed(shuffle(noisy)))
    assert report.sqnr_db is not None
    assert report.sqnr_db > 40
    assert report.mismatch is not None
    assert "for other samples" in report.mismatch or "the sample before" in report.mismatch


def test_noise_on_samples_that_are_alike_is_no_other_order() -> None:
    rng = np.random.default_rng(0)
    for spread in (0.0, 0.01, 1.0):
        for size in (1, 24):
            rows = [rng.normal(scale=spread, size=size) + 1.0 for _ in range(200)]
            found = [row + rng.normal(scale=0.2 * spread + 0.001, size=size) for row in rows]
            if spread == 0.01 and size == 1:
                found = [row + rng.normal(scale=0.002) for row in rows]
            assert find_permutation(sketch_samples(np.stack(rows)), sketch_samples(np.stack(found))) is None


def test_values_of_half_precision_are_told_of(bundle: Bundle) -> None:
    run = ask(bundle, lambda rows: [{"y": row["y"].astype(np.float16).astype(np.float32)} for row in rows])
    assert "output 'y' holds only values of half precision" in run.notes[0]


def test_half_of_the_samples_fail_unless_the_device_says_that_it_stopped(bundle: Bundle) -> None:
    assert f"came back for {COUNT // 2} of {COUNT}" in ask(bundle, lambda rows: rows[: COUNT // 2]).failures[0]
    run = ask(bundle, lambda rows: rows[: COUNT // 2], stopped_early=True)
    assert run.samples == COUNT // 2
    assert f"it stopped after {COUNT // 2} of {COUNT} samples" in run.notes[0]


def test_what_is_right_on_golden_samples_only_fails_on_others(bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    known = list(ask_outputs(bundle))
    source = load_model(folder / "network.onnx")
    assert ask(bundle, lambda _: known).passed
    rows = [
        {"x": np.random.default_rng(9 + index).normal(size=(1, 3, 12, 12)).astype(np.float32)} for index in range(8)
    ]
    golden = make_golden(source, listed(rows), tmp_path)
    (run,) = verify_bundle(bundle, [InProcess(lie=lambda rows: known[: len(rows)])], golden=golden).runs
    assert not run.passed


def ask_outputs(bundle: Bundle) -> list[Tensors]:
    kept: list[Tensors] = []

    def keep(rows: list[Tensors]) -> list[Tensors]:
        kept.extend(rows)
        return rows

    ask(bundle, keep)
    return kept


def test_two_outputs_that_are_swapped_fail() -> None:
    rng = np.random.default_rng(2)
    rows = [{"a": rng.normal(size=(1, 8)), "b": rng.normal(size=(1, 8)) + 5.0} for _ in range(6)]
    reports = compare_device_outputs(listed(rows), listed([{"a": row["b"], "b": row["a"]} for row in rows]))
    assert all(report.sqnr_db is not None and report.sqnr_db < 5.0 for report in reports)


@pytest.mark.parametrize("size", [4, 24, 2000])
@pytest.mark.parametrize(("level", "is_told"), [(1.0, True), (100.0, False)])
def test_outputs_that_do_not_follow_their_inputs_are_told(size: int, level: float, is_told: bool) -> None:
    rng = np.random.default_rng(4)
    rows, others = ([{"y": rng.normal(scale=0.2, size=(1, size)) + level} for _ in range(12)] for _ in range(2))
    noisy = [{"y": row["y"] + rng.normal(scale=0.1, size=(1, size))} for row in rows]
    (right,), (wrong,) = (compare_device_outputs(listed(rows), listed(found)) for found in (noisy, others))
    assert right.mismatch is None
    assert wrong.sqnr_db is not None
    assert wrong.sqnr_db > 8.0
    assert ("does not follow its inputs" in str(wrong.mismatch)) is is_told


def rows_of(rows: Sequence[Array] | Array) -> Samples:
    return Samples(source="x", count=len(rows), read=lambda: ({"y": row} for row in rows))


def test_two_values_are_a_grid_and_three_may_be_none() -> None:
    wanted = [np.random.default_rng(0).normal(size=16).astype(np.float32)]
    two, three = np.array([0.25, 0.75] * 8, np.float32), np.array([0.0, 2.0**-10, 0.75, 0.5] * 4, np.float32)
    assert not find_half_values(rows_of(wanted), rows_of([two]))
    assert find_half_values(rows_of(wanted), rows_of([three]))


def test_outputs_that_did_not_come_back_are_no_half_precision() -> None:
    rows: list[Tensors] = [{"y": np.random.default_rng(0).normal(size=16).astype(np.float32), "z": np.ones(16)}]
    found: list[Tensors] = [{"y": rows[0]["y"].astype(np.float16).astype(np.float32), "other": np.ones(16)}]
    (note,) = find_half_values(listed(rows), listed(found))
    assert "output 'y'" in note


@pytest.mark.parametrize(("spread", "words"), [(1.0, "is the same for every sample"), (1e-3, "None")])
def test_a_constant_output_is_told_unless_the_reference_hardly_moves(spread: float, words: str) -> None:
    rng = np.random.default_rng(0)
    rows: list[Tensors] = [{"y": 10.0 + spread * rng.normal(size=(1, 8))} for _ in range(8)]
    same: list[Tensors] = [{"y": np.full((1, 8), 10.0)} for _ in range(8)]
    (report,) = compare_device_outputs(listed(rows), listed(same))
    assert words in str(report.mismatch)


def test_few_values_of_a_quantized_softmax_are_no_half_precision() -> None:
    """What an honest device gave of eight photos (vww of the zoo, NNAPI): no two of the 256 values side by side."""
    first = np.array([[255], [255], [224], [181], [248], [231], [120], [241]], np.float32)
    found = np.concatenate([first, 256 - first], axis=1) / 256
    wanted = found + np.float32(1e-3)
    assert not find_half_values(rows_of(wanted), rows_of(found))
    # As many values of half precision that lie on no such grid are told of.
    drawn = np.random.default_rng(0).random((8, 2)).astype(np.float16).astype(np.float32)
    assert find_half_values(rows_of(wanted), rows_of(drawn))


def test_values_on_an_integer_grid_are_no_half_precision() -> None:
    rng = np.random.default_rng(0)
    wanted = [rng.random((1, 64), dtype=np.float32) for _ in range(4)]

    def note(rows: list[np.ndarray]) -> tuple[str, ...]:
        return find_half_values(rows_of(wanted), rows_of(rows))

    assert not note([np.rint(row * 256).clip(0, 255).astype(np.float32) / 256 for row in wanted])
    assert note([row.astype(np.float16).astype(np.float32) for row in wanted])


def test_samples_that_all_give_the_same_are_told() -> None:
    row = np.ones((1, 4), np.float32)
    assert "for all 9 samples" in find_sameness(rows_of([row] * 9))[0]
    assert not find_sameness(rows_of([*[row] * 8, row + 1]))
    assert not find_sameness(rows_of([row]))


SPREAD = np.random.default_rng(0).uniform(-0.9, 0.9, (8, 6))


@pytest.mark.parametrize(
    ("reference", "got", "words"),
    [
        (SPREAD, np.zeros((8, 6)), None),  # a grid with steps of 2 makes all of it zero
        (SPREAD + 3, np.zeros((8, 6)) + 3, "is the same for every sample"),
        (SPREAD / 10 + 9, np.zeros((8, 6)) + 9, None),  # so steady that a constant answers it
        (SPREAD + 3, np.vstack([SPREAD[:1], SPREAD[:-1]]) + 3, "follows the sample before, not its own"),
        (SPREAD + 3, SPREAD[[1, 0, 3, 2, *range(4, 8)]] + 3, "came back for other samples"),
        (SPREAD, 0.7 * SPREAD, None),
    ],
)
def test_an_output_must_follow_its_own_sample(reference: Array, got: Array, words: str | None) -> None:
    sides = (rows_of(list(side.astype(np.float32))) for side in (reference, got))
    (report,) = compare_device_outputs(*sides)
    assert report.mismatch is None if words is None else words in str(report.mismatch)


ROWS = np.random.default_rng(3).normal(size=(12, 16))


@pytest.mark.parametrize(
    ("places", "share", "words"),
    [
        ([0, 1, 2, 3], 1.0, None),
        ([1, 0, 2, 3], 1.0, "that of sample 0 belongs to sample 1"),
        ([0, 1, 3, 2], 1.0, "that of sample 2 belongs to sample 3"),
        ([1, 2, 3, 0], 1.0, "that of sample 0 belongs to sample 1"),
        ([1, 2, 3, 3], 1.0, None),  # all in one direction: no cycle
        ([0, 0, 0, 0], 1.0, None),
        ([1, 0, 2, 3], 0.9, "that of sample 0 belongs to sample 1"),
        ([1, 0, 2, 3], 0.66, None),  # the other's is not four times nearer
    ],
)
def test_only_closed_cycles_of_samples_that_clearly_moved_are_another_order(
    places: list[int], share: float, words: str | None
) -> None:
    found = find_permutation(ROWS, share * ROWS[[*places, *range(4, 12)]] + (1.0 - share) * ROWS)
    assert found is None if words is None else words in str(found)
    assert find_permutation(ROWS[:1], ROWS[:1]) is None
    assert find_permutation(ROWS[:1], ROWS[:1] + 9.0) is None
    assert find_permutation(ROWS, ROWS[:5]) is None


def test_few_samples_cannot_prove_a_swap() -> None:
    assert find_permutation(ROWS[:6], ROWS[[1, 0, 2, 3, 4, 5]]) is None
    assert find_permutation(ROWS[:6], ROWS[[1, 2, 3, 4, 5, 0]]) is not None


def test_on_a_line_a_swap_of_two_is_chance_and_the_reverse_of_many_is_not() -> None:
    line = np.arange(16.0)[:, None] ** 1.5 * np.ones(16)
    assert count_dimensions(line) == pytest.approx(1.0)
    assert find_permutation(line, line[[1, 0, *range(2, 16)]] + 0.1) is None
    assert find_permutation(line, line[::-1] + 0.01) is not None


COUNT_OF_LINE = 64
CENTRED = np.arange(COUNT_OF_LINE) - (COUNT_OF_LINE - 1) / 2
ACROSS = np.abs(CENTRED) - np.abs(CENTRED).mean()
"""What varies over the samples, and what varies otherwise: their product is 0."""
VARYING = float((CENTRED**2).sum())


def correlated(by: float) -> Array:
    return np.asarray(by * CENTRED / VARYING**0.5 + (1 - by**2) ** 0.5 * ACROSS / (ACROSS**2).sum() ** 0.5)


@pytest.mark.parametrize(
    ("found", "energy", "words"),
    [
        (CENTRED, 100.0, None),
        (-CENTRED, 100.0, "correlates by -1.00 only"),
        (correlated(0.31), 100.0, None),
        (correlated(0.29) + 7.0, 100.0, "correlates by 0.29 only"),
        (correlated(0.29), VARYING * 300 - 1, "correlates by 0.29 only"),
        (correlated(0.29), VARYING * 300 + 1, None),  # too steady to tell
        (np.ones(COUNT_OF_LINE), 100.0, None),
    ],
)
def test_what_varies_must_follow_the_inputs(found: Array, energy: float, words: str | None) -> None:
    rows, others = (np.stack([values, np.ones(COUNT_OF_LINE)], axis=1) for values in (CENTRED + 3.0, found))
    found_words = find_independence(rows, others, energy)
    assert found_words is None if words is None else words in str(found_words)
    assert find_independence(rows[30:34], others[30:34], energy) is None  # four values say nothing
    assert find_independence(rows, others[:5], energy) is None
    assert find_independence(rows[:1], others[:1], energy) is None


@pytest.mark.parametrize(
    ("reference", "got", "elements", "rounded"),
    [
        ([0.4, 0.6, 3.1], [0.0, 1.0, 3.0], 2, True),
        ([0.6, 0.6, 3.1], [0.0, 1.0, 3.0], 2, False),
        ([0.4, 0.6, 30.0], [0.0, 1.0, 3.0], 2, False),
        ([0.4, 0.6, 30.0], [0.0, 1.0, 3.0], 1, True),
        ([-9.0, 0.6, 3.1], [0.0, 1.0, 3.0], 1, True),
        ([0.9, 0.6, 3.1], [0.0, 1.0, 3.0], BUCKETS, False),
        ([0.9, 0.6, 3.1], [0.0, 1.0, 3.0], BUCKETS + 1, True),
        ([0.4, 9.0, 5.0], [0.0, 0.0, 0.0], 2, True),
        ([1.4, 1.6, 1.0], [1.0, 1.000001, 1.0], 2, False),
        ([1.4, 1.5, 1.0], [1.0, 1.000001, 1.0], 2, True),
    ],
)
def test_rounding_moves_a_value_by_half_a_step(
    reference: list[float], got: list[float], elements: int, rounded: bool
) -> None:
    assert may_be_rounded(np.array(reference)[:, None], np.array(got)[:, None], elements) is rounded


def halves(rows: list[np.ndarray]) -> list[np.ndarray]:
    return [row.astype(np.float16).astype(np.float32) for row in rows]


@pytest.mark.parametrize(("values", "count", "exact_from", "told"), [
    (16, 1, 1, True), (15, 1, 1, False), (8, 2, 2, True), (16, 9, 8, True), (16, 9, 7, False),
])  # fmt: skip
def test_half_precision_is_told_from_sixteen_values_of_the_first_eight_samples(
    values: int, count: int, exact_from: int, *, told: bool
) -> None:
    wanted = [np.random.default_rng(index).normal(size=(1, values)).astype(np.float32) for index in range(count)]
    found = halves(wanted[:exact_from]) + wanted[exact_from:]
    assert bool(find_half_values(rows_of(wanted), rows_of(found))) is told
    assert not find_half_values(rows_of(halves(wanted)), rows_of(halves(wanted)))
    mixed = halves(wanted[1:]) + wanted[:1]
    assert bool(find_half_values(rows_of(mixed), rows_of(halves(mixed)))) is (
        values * min(count, 8) >= 16 and count < 9
    )
    assert not find_half_values(rows_of(wanted), rows_of([row.astype(np.float64) for row in halves(wanted)]))


@pytest.mark.parametrize(
    ("step", "most", "told"), [(1, 255, False), (1, 256, True), (4, 255, False), (5, 255, False), (5, 256, True)]
)
def test_a_grid_has_at_most_256_steps_whatever_the_least_distance(step: int, most: int, *, told: bool) -> None:
    places = np.array([0, step, 100, 101 + step, most * 1.0] * 4, np.float32)
    wanted = np.random.default_rng(0).normal(size=(1, 20)).astype(np.float32)
    assert bool(find_half_values(rows_of([wanted]), rows_of([places[None] / 64]))) is told
