from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from fixture_types import present
from quantize_models import make_model, make_samples

from edgekit.model.model import Model
from edgekit.model.tensors import Array, StatedOutput, Tensors
from edgekit.quantize.accuracy import heads
from edgekit.quantize.accuracy.detections import estimate_drop, record_detections
from edgekit.quantize.accuracy.head_search import find_head, find_image, may_be_head
from edgekit.quantize.accuracy.likeness import AP, EXTRA_VALUES, MASKS, POINTS, read_head
from edgekit.quantize.accuracy.loss import Loss
from edgekit.quantize.accuracy.predict import SILENT, FloatReference

SIDE, KINDS = 64, 3


def draw_places(seed: int) -> tuple[Array, Array]:
    """Returns for each of 80 cells of 8 and 16 pixels the box that it shows [80,4] and its classes' chances [80,3]."""
    rng = np.random.default_rng(seed)
    grids = [(np.mgrid[: SIDE // cell, : SIDE // cell] + 0.5) * cell for cell in (8, 16)]
    middles = np.concatenate([np.stack([grid[1].ravel(), grid[0].ravel()], 1) for grid in grids])
    middle, size = middles + rng.normal(0, 3, (80, 2)), rng.uniform(6, 30, (80, 2))
    chances = rng.uniform(0, 0.05, (80, KINDS))
    for _ in range(2):
        at, extent, kind = rng.uniform(16, 48, 2), rng.uniform(12, 24, 2), rng.integers(KINDS)
        near = np.abs(middles - at).max(axis=1) < 7
        middle[near] = at + rng.normal(0, 0.4, (near.sum(), 2))
        size[near], chances[near, kind] = (
            extent + rng.normal(0, 0.4, (near.sum(), 2)),
            rng.uniform(0.6, 0.95, near.sum()),
        )
    return np.concatenate([middle, size], 1), chances


def cells() -> tuple[Array, Array]:
    sides = [(SIDE // cell, cell) for cell in (8, 16)]
    corners = [np.argwhere(np.ones((side, side)))[:, ::-1] for side, _ in sides]
    return np.concatenate(corners), np.concatenate([np.full((side**2, 1), cell) for side, cell in sides])


def as_corners(boxes: Array) -> Array:
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)


def code_joined(boxes: Array, chances: Array) -> Tensors:
    return {"y": np.concatenate([boxes, chances], 1).T[None]}


def code_objects(boxes: Array, chances: Array) -> Tensors:
    there = chances.max(axis=1, keepdims=True)
    return {"y": np.concatenate([boxes, there, chances / chances.max(axis=1, keepdims=True) * 0.9], 1)[None]}


def code_ssd(boxes: Array, chances: Array) -> Tensors:
    scores = np.concatenate([np.maximum(1 - chances.sum(axis=1, keepdims=True), 0.01), chances], 1)
    return {"s": (scores / scores.sum(axis=1, keepdims=True))[None], "b": as_corners(boxes)[None] / SIDE}


def code_yolox(boxes: Array, chances: Array) -> Tensors:
    corner, cell = cells()
    there = chances.max(axis=1, keepdims=True)
    values = [boxes[:, :2] / cell - corner, np.log(boxes[:, 2:] / cell), there, chances / there * 0.9]
    return {"y": np.concatenate(values, 1)[None]}


def code_offsets(boxes: Array, chances: Array) -> Tensors:
    corner, cell = cells()
    raw = np.concatenate([boxes[:, :2] - (corner + 0.5) * cell, boxes[:, 2:], np.zeros((80, 6))], 1)
    return {"b": raw[None], "s": np.log(chances / (1 - chances)).max(axis=1).reshape(1, 80, 1)}


CODES = {
    "middle and size": code_joined,
    "with objectness": code_objects,
    "corners": code_ssd,
    "yolox": code_yolox,
    "offsets": code_offsets,
}


def make_outputs(code: str, seed: int = 0, count: int = 24) -> list[Tensors]:
    return [
        {name: value.astype(np.float32) for name, value in CODES[code](*draw_places(seed + index)).items()}
        for index in range(count)
    ]


def estimate(rows: Sequence[Tensors], others: Sequence[Tensors]) -> Loss:
    """What a detector loses that gives other outputs for the same samples."""
    head = present(find_head(rows, (SIDE, SIDE)))
    records = [record_detections(head, one, two) for one, two in zip(rows, others, strict=True)]
    return estimate_drop(records, centred=head.centred)


@pytest.mark.parametrize("code", CODES)
def test_a_head_is_decoded_to_the_boxes_that_it_codes(code: str) -> None:
    outputs = make_outputs(code)
    head = present(find_head(outputs, (SIDE, SIDE)))
    assert head.code == ("middle and size" if code == "with objectness" else code)
    assert (head.objectness is not None) == (code in {"with objectness", "yolox"})
    boxes, chances = head.decode(outputs[0])
    wanted, shown = draw_places(0)
    scale = SIDE if code == "corners" else 1
    np.testing.assert_allclose(boxes * scale, as_corners(wanted), atol=1e-3)
    assert (chances.max(axis=1) > 0.4).tolist() == (shown.max(axis=1) > 0.4).tolist()


@pytest.mark.parametrize("code", ["offsets", "yolox"])
def test_levels_in_outputs_of_their_own_are_one_head(code: str) -> None:
    joined, levels = make_outputs(code), list[Tensors]()
    places: tuple[tuple[int, int, int], ...] = ((8, 0, 64), (16, 64, 80))
    for row in joined:
        parts = row if code == "offsets" else {"b": row["y"][..., :4], "o": row["y"][..., 4:5], "c": row["y"][..., 5:]}
        level: Tensors = {f"{name}_{at}": each[:, a:z] for at, a, z in places for name, each in parts.items()}
        levels.append(level)
    head, whole = present(find_head(levels, (SIDE, SIDE))), present(find_head(joined, (SIDE, SIDE)))
    assert (head.code, head.grid, head.objectness is None) == (code, whole.grid, whole.objectness is None)
    for found, wanted in zip(head.decode(levels[0]), whole.decode(joined[0]), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("code", heads.CODES)
def test_boxes_of_chosen_rows_are_those_of_all_rows_and_no_rows_give_none(code: str) -> None:
    grid = heads.Grid(levels=(heads.Level(anchors=3, height=2, width=2),) * 3, image=(SIDE, SIDE))
    values = np.ones((36, 4 * 8 if code == "binned distances" else 4))
    whole = heads.decode_boxes(code, values, grid)
    some, none = np.array([35, 3]), np.array([], np.int64)
    assert np.array_equal(heads.decode_boxes(code, values[some], grid, some), whole[some])
    assert heads.decode_boxes(code, values[none], grid, none).shape == (0, 4)


def test_a_background_is_no_class() -> None:
    head = present(find_head(make_outputs("corners"), (SIDE, SIDE)))
    assert (head.background, head.scores.count) == (0, KINDS + 1)
    assert head.decode(make_outputs("corners")[0])[1].shape == (80, KINDS)


def noise(shape: tuple[int, ...], *, positive: bool) -> list[Tensors]:
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=shape).astype(np.float32) for _ in range(16)]
    return [{"y": np.abs(row) if positive else row} for row in rows]


def heatmaps() -> list[Tensors]:
    rng, grid = np.random.default_rng(0), np.mgrid[:16, :16]
    found: list[Tensors] = []
    for _ in range(16):
        places = rng.uniform(2, 14, (9, 2, 1, 1))
        found.append({"y": np.exp(-((grid - places) ** 2).sum(axis=1) / 3).astype(np.float32)[None]})
    return found


@pytest.mark.parametrize(
    "outputs",
    [
        noise((1, 80, 9), positive=False),
        noise((1, 80, 9), positive=True),
        noise((1, 85, 8, 8), positive=False),
        heatmaps(),
        [{"y": np.zeros((1, 80, 9), np.float32)}] * 16,
        [{"y": np.full((1, 80, 9), np.nan, np.float32)}] * 16,
        [{"y": np.ones((1, 10), np.float32)}] * 16,
    ],
)
def test_what_shows_no_objects_is_no_head(outputs: list[Tensors]) -> None:
    assert find_head(outputs, (SIDE, SIDE)) is None


def test_boxes_that_belong_to_others_are_no_boxes() -> None:
    rng = np.random.default_rng(0)
    outputs = [{"y": row["y"].copy()} for row in make_outputs("middle and size")]
    for row in outputs:
        row["y"][0, :4] = row["y"][0, :4, rng.permutation(80)].T
    assert find_head(outputs, (SIDE, SIDE)) is None


def draw_scores(seed: int, side: int) -> Array:
    """Returns scores of nine classes at side x side places, alike at neighbouring places, which show one object."""
    rng, places = np.random.default_rng(seed), np.mgrid[:side, :side].reshape(2, -1).T / side
    scores = rng.uniform(0, 0.02, (side * side, 9))
    for middle in rng.uniform(0.2, 0.8, (3, 2)):
        near = np.abs(places - middle).max(axis=1) < 0.1
        scores[near] = rng.uniform(0.3, 0.9, 9) + rng.normal(0, 0.01, (int(near.sum()), 9))
    return np.asarray(scores[None], np.float32)


def test_scores_of_a_head_with_several_levels_are_no_boxes_though_they_resemble_them() -> None:
    one = [{"fine": draw_scores(seed, 16)} for seed in range(16)]
    assert find_head(one, (SIDE, SIDE)) is not None
    levels = [{**row, "coarse": draw_scores(seed, 8)} for seed, row in enumerate(one)]
    assert find_head(levels, (SIDE, SIDE)) is None


@pytest.mark.parametrize(("noise", "code"), [(2, "middle and size"), (4, None)])
def test_boxes_that_overlap_when_mixed_too_are_told_from_noise(noise: float, code: str | None) -> None:
    rng = np.random.default_rng(0)
    outputs = [{"y": row["y"].copy()} for row in make_outputs("middle and size")]
    for row in outputs:
        # All objects lie near the middle of the image.
        row["y"][0, :2] = 32 + 0.4 * (row["y"][0, :2] - 32)
        row["y"][0, :4] += rng.normal(0, noise, (4, 80))
        row["y"][0, 2:4] = np.maximum(row["y"][0, 2:4], 4)
    head = find_head(outputs, (SIDE, SIDE))
    assert (head and head.code) == code


def draw_centres(seed: int, *, scale: float = 1.0) -> tuple[Tensors, Array]:
    """Returns maps of 16 x 16 cells as of CenterNet, with sizes in cells times `scale`, and the two boxes shown."""
    rng, grid = np.random.default_rng(seed), np.mgrid[:16, :16][::-1]
    maps = {"a": rng.uniform(0.02, 0.06, (1, KINDS, 16, 16)), "b": rng.uniform(0, 1, (1, 2, 16, 16))}
    maps["c"] = rng.uniform(0.5, 9, (1, 2, 16, 16))
    middles = np.stack([rng.uniform([2, 2], [6, 14]), rng.uniform([9, 2], [14, 14])])
    sizes = rng.uniform(2, 8, (2, 2))
    for middle, size, kind in zip(middles, sizes, rng.integers(KINDS, size=2), strict=True):
        apart = grid - np.floor(middle)[:, None, None]
        near = np.abs(apart).max(axis=0) <= 1
        bump = 0.4 * np.exp(-(apart**2).sum(axis=0) / 4)
        maps["a"][0, kind] = np.maximum(maps["a"][0, kind], bump)
        maps["b"][0][:, near] = (middle % 1)[:, None] + rng.normal(0, 0.02, (2, near.sum()))
        maps["c"][0][:, near] = scale * (size[:, None] + rng.normal(0, 0.1, (2, near.sum())))
    return {name: value.astype(np.float32) for name, value in maps.items()}, 4 * as_corners(np.hstack([middles, sizes]))


@pytest.mark.parametrize(("scale", "code"), [(1.0, "centres"), (4.0, "centres and pixels")])
@pytest.mark.parametrize("channels_last", [False, True])
def test_maps_of_middles_are_read_at_their_peaks(scale: float, code: str, *, channels_last: bool) -> None:
    outputs = [draw_centres(seed, scale=scale)[0] for seed in range(16)]
    if channels_last:
        outputs = [{name: np.moveaxis(value, 1, -1) for name, value in row.items()} for row in outputs]
    head = present(find_head(outputs, (SIDE, SIDE)))
    assert (head.code, head.peaks, head.scores.outputs) == (code, (16, 16), ("a",))
    boxes, chances = head.decode(outputs[0])
    found = boxes[chances.max(axis=1) > 0.3]
    wanted = draw_centres(0)[1]
    assert len(found) == 2
    np.testing.assert_allclose(found[np.argsort(found[:, 0])], wanted[np.argsort(wanted[:, 0])], atol=1.5)


@pytest.mark.parametrize("broken", ["b", "c"])
def test_maps_of_other_numbers_are_no_shifts_and_sizes(broken: str) -> None:
    rng, rows = np.random.default_rng(0), [draw_centres(seed)[0] for seed in range(16)]
    outputs: list[Tensors] = [{**row, broken: rng.normal(0, 3, (1, 2, 16, 16)).astype(np.float32)} for row in rows]
    assert find_head(outputs, (SIDE, SIDE)) is None


@pytest.mark.parametrize(("others", "is_head"), [(17, True), (98, False)])
def test_a_cache_of_many_outputs_is_no_head(others: int, *, is_head: bool) -> None:
    cache = {f"present.{index}": np.zeros((1, 2, 16, 16), np.float32) for index in range(others)}
    outputs = [{**draw_centres(seed)[0], **cache} for seed in range(2)]
    assert may_be_head(outputs[0]) == is_head
    if not is_head:
        assert find_head(outputs, (SIDE, SIDE)) is None


def test_sizes_that_are_off_cost_detections_and_a_lower_map_of_middles_does_not() -> None:
    rows = [draw_centres(seed)[0] for seed in range(24)]

    def drop(**factors: float) -> float:
        others = [{name: value * np.float32(factors.get(name, 1)) for name, value in row.items()} for row in rows]
        return estimate(rows, others).estimate

    assert drop(a=0.9) == 0
    assert drop(c=1.5) > drop(c=1.1) > 0.005


def test_a_peak_that_moved_is_held_against_the_box_where_it_was() -> None:
    rows = [draw_centres(seed)[0] for seed in range(16)]
    head, row = present(find_head(rows, (SIDE, SIDE))), rows[0]
    kind, y, x = np.unravel_index(int(row["a"].argmax()), row["a"].shape[1:])
    row["b"][0, :, y, x + 1] = row["b"][0, :, y, x] - (1, 0)
    row["c"][0, :, y, x + 1] = 1.2 * row["c"][0, :, y, x]
    moved = {**row, "a": row["a"].copy()}
    moved["a"][0, kind, y, x + 1] = 0.41
    surest = max(record_detections(head, row, moved), key=lambda one: float(one[3]))
    assert surest[1:4] == pytest.approx([row["a"].max(), row["a"].max(), 0.41])
    assert surest[4] == pytest.approx(1 - 1 / 1.2**2, abs=1e-4)


def test_of_a_map_of_middles_no_object_is_taken_to_be_missed() -> None:
    # Below the highest, which is 1, and with a level of 0, both laws say the same of a score.
    table = np.array([[0, chance, max(chance, 0.1), 0, 0] for chance in (1.0, 0.7, 0.5, 0, 0, 0, 0)])
    whole, part = (estimate_drop([table] * 20, centred=centred).estimate for centred in (True, False))
    assert part == pytest.approx(0.6 * whole)


@pytest.mark.parametrize(("shape", "image"), [((1, 3, 8, 9), (8, 9)), ((1, 8, 9, 3), (8, 9)), ((1, 40), None)])
def test_the_image_is_the_input_with_channels(shape: tuple[int, ...], image: tuple[int, int] | None) -> None:
    assert find_image({"x": np.zeros(shape, np.float32)}) == image


@pytest.mark.parametrize(
    ("moved", "chance", "classes", "least", "most"),
    [
        (0, 1, [4, 5, 6], 0, 0),
        (0.3, 1, [4, 5, 6], 1e-4, 0.008),
        (1.5, 1, [4, 5, 6], 0.05, 0.075),
        (6, 1, [4, 5, 6], 0.075, 1),
        (0, 0.001, [4, 5, 6], 0.2, 1),
        (0, 0.8, [4, 5, 6], -0.01, 0.01),
        (0, 1, [5, 6, 4], 0.2, 1),
    ],
    ids=["same", "moved a little", "moved", "moved far", "gone", "all shrunk", "taken for another class"],
)
def test_a_detector_loses_by_boxes(moved: float, chance: float, classes: list[int], least: float, most: float) -> None:
    rows, rng = make_outputs("middle and size", count=20), np.random.default_rng(1)
    others = [{"y": row["y"][:, [0, 1, 2, 3, *classes]]} for row in rows]
    for row in others:
        row["y"][0, :4] += rng.normal(0, moved, (4, 80)).astype(np.float32)
        row["y"][0, 4:] *= chance
    found = estimate(rows, others)
    assert least <= found.estimate <= most
    assert found.interval[0] <= found.estimate <= found.interval[1]


TEXT = """g (float[1,3,64,64] image, float[1,7,80] x) => (float[1,7,80] y)
  <float[1,7,1] off = {OFF}, float[1,7,1] scale = {SCALE}>
  { s = Mul(x, scale)  y = Add(s, off) }"""
IMAGE = np.zeros((1, 3, SIDE, SIDE), np.float32)


def shift_boxes(folder: Path, by: str, scale: str = "1, 1, 1") -> Model:
    text = TEXT.replace("OFF", f"{by}, 0, 0, 0").replace("SCALE", f"1, 1, 1, 1, {scale}")
    return make_model(text, folder / f"{by} {scale}.onnx")


def test_a_detector_that_detects_nothing_is_said_to_be_judged_by_nothing(tmp_path: Path) -> None:
    """Scores of 0.03 and less are rounded away beside boxes of 64 pixels, and no figure of the samples shows it."""
    faint = np.array([1.0] * 4 + [0.03] * KINDS, np.float32).reshape(1, -1, 1)
    model, found = shift_boxes(tmp_path, "0, 0, 0, 0"), list[str]()
    for scale in (np.ones_like(faint), faint):
        rows = [{"image": IMAGE, "x": (row["y"] * scale).astype(np.float32)} for row in make_outputs("middle and size")]
        found.append(FloatReference(model, make_samples(rows)).predict_drop(model).measure)
    assert found == [AP, SILENT]


@pytest.mark.slow
def test_a_detector_is_judged_by_its_detections_unless_it_is_stated_otherwise(tmp_path: Path) -> None:
    samples = make_samples([{"image": IMAGE, "x": row["y"]} for row in make_outputs("middle and size", count=40)])
    same, near, far = (shift_boxes(tmp_path, by) for by in ("0, 0, 0, 0", "0.2, 0, 0, 0.2", "9, 9, 0, 0"))
    lost = shift_boxes(tmp_path, "0, 0, 0, 0", "0, 0, 0")
    little, much, all_ = (FloatReference(same, samples).predict_drop(other) for other in (near, far, lost))
    assert {little.measure, much.measure, all_.measure} == {AP}
    assert little.source == "the float model's detections"
    assert little.meets(0.005)
    assert not much.meets(0.005)
    assert (all_.drop_estimate or 0) > (much.drop_estimate or 0) > 0.1
    stated = {"y": StatedOutput(kind="values")}
    assert FloatReference(same, samples, stated).predict_drop(near).measure == "spread of the values (R2)"


def code_masks(boxes: Array, chances: Array) -> Tensors:
    """Four maps are the quarters of the image: an object's mask is the quarter in which its middle lies, and others."""
    quarters = np.zeros((1, 4, 16, 16), np.float32)
    for number, (top, left) in enumerate(np.ndindex(2, 2)):
        quarters[0, number, 8 * top : 8 * top + 8, 8 * left : 8 * left + 8] = 1
    own = 2 * (boxes[:, 1] > SIDE / 2) + (boxes[:, 0] > SIDE / 2)
    coefficients = np.where(np.arange(4) == own[:, None], 2.0, -1.5)
    return {"y": np.concatenate([boxes, chances, coefficients], 1).T[None], "p": quarters}


def code_points(boxes: Array, chances: Array) -> Tensors:
    """Two points of each object: the middle, and a corner that is hardly seen."""
    seen = np.full((len(boxes), 1), 0.9)
    points = [boxes[:, :2], seen, boxes[:, :2] + boxes[:, 2:] / 2, seen / 30]
    return {"y": np.concatenate([boxes, chances, *points], 1).T[None]}


def code_angles(boxes: Array, chances: Array) -> Tensors:
    angles = np.random.default_rng(3).uniform(-1, 1, (len(boxes), 1))
    return {"y": np.concatenate([boxes, chances, angles], 1).T[None]}


@pytest.mark.parametrize(
    ("code", "kind", "measure"),
    [(code_masks, "masks", MASKS), (code_points, "points", POINTS), (code_angles, "values", EXTRA_VALUES)],
)
def test_what_lies_behind_scores_is_none(code: Callable[[Array, Array], Tensors], kind: str, measure: str) -> None:
    rows = [code(*draw_places(seed)) for seed in range(6)]
    head = present(find_head(rows, (SIDE, SIDE)))
    (extra,) = head.extras
    assert (head.scores.start, head.scores.stop, extra.kind) == (4, 4 + KINDS, kind)
    assert head.outputs == rows[0].keys()
    detections, part = read_head(head, {name: value.shape for name, value in rows[0].items()})
    assert part.measure.name == measure

    def lose(by: float, where: str) -> tuple[Loss, float]:
        """Returns the loss and the movement if numbers are off where objects are, or elsewhere."""
        records = list[Array]()
        for row in rows:
            is_object = row["y"][0, 4 : 4 + KINDS].max(axis=0) > 0.3
            columns = np.arange(row["y"].shape[1])[:, None]
            changed = (columns >= 4 + KINDS) & (columns % 3 < 2 if kind == "points" else columns > 0)
            off = by * changed * (is_object == (where == "objects"))
            moved: Tensors = {**row, "y": row["y"] + off}
            records.append(part.record(row, moved))
            assert np.allclose(detections.record(row, moved)[:, 4], 0, atol=1e-6)
        return part.measure.judge(records), float(part.measure.distances(records).mean())

    if kind != "values":
        # Nothing is found in this sample.
        silent = {**rows[0], "y": rows[0]["y"] * np.repeat([[1.0], [0.0]], [4, rows[0]["y"].shape[1] - 4], axis=0)}
        assert part.record(silent, silent).tolist() == [0, 0]
    nothing, little, much = (lose(by, "objects") for by in (0.0, 0.05, 4.0))
    assert nothing[0].estimate == nothing[1] == 0
    assert nothing[0].estimate <= little[0].estimate < much[0].estimate
    assert much[0].estimate > 0.1
    assert much[1] > 0.1
    assert lose(0.5, "background")[0].estimate < 0.1 * much[0].estimate
    assert little[0].interval[0] <= little[0].estimate <= little[0].interval[1]


def test_points_that_are_not_seen_do_not_count() -> None:
    rows = [code_points(*draw_places(seed)) for seed in range(6)]
    _, part = read_head(present(find_head(rows, (SIDE, SIDE))), {"y": rows[0]["y"].shape})

    def lose(point: int) -> float:
        off = np.zeros((rows[0]["y"].shape[1], 1))
        off[4 + KINDS + 3 * point] = 6
        return part.measure.judge([part.record(row, {"y": row["y"] + off}) for row in rows]).estimate

    assert lose(0) > 5 * lose(1) > 0
