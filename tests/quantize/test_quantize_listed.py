from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from fixture_types import present
from onnx import numpy_helper
from quantize_models import make_model, make_samples, plan_model, random_samples

from edgekit.model.model import Model
from edgekit.model.tensors import Tensors
from edgekit.quantize import quantize_model
from edgekit.quantize.accuracy.detections import estimate_drop, record_detections
from edgekit.quantize.accuracy.head_search import find_list
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.graph.compared_tensors import ComparedTensor, find_compared_tensors
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.float_regions import find_float_regions

SIDE, KINDS, ROWS = 64, 4, 20
LAYOUTS = ("joined", "apart", "with the batch")


def list_rows(seed: int, layout: str = "joined") -> Tensors:
    """Returns 20 boxes with falling scores and their classes."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 40, (ROWS, 2))
    boxes, kinds = np.concatenate([low, low + rng.uniform(6, 24, (ROWS, 2))], 1), rng.integers(KINDS, size=ROWS)
    scores = -np.sort(-(rng.uniform(0, 1, ROWS) ** 3))
    if layout == "apart":
        return {"b": boxes[None].astype(np.float32), "s": scores[None].astype(np.float32), "k": kinds[None]}
    columns = [kinds[:, None], scores[:, None], boxes]
    columns = columns[::-1] if layout == "joined" else [np.zeros((ROWS, 1)), *columns]
    return {"y": np.concatenate(columns, 1).astype(np.float32)[None]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lists_of_detections_are_found_and_their_columns_read(layout: str) -> None:
    rows = [list_rows(seed, layout) for seed in range(8)]
    boxes, chances = present(find_list(rows, (SIDE, SIDE))).decode(rows[0])
    wanted = list_rows(0)["y"][0]
    assert boxes == pytest.approx(wanted[:, :4])
    assert chances.max(axis=1) == pytest.approx(wanted[:, 4])
    assert (chances.argmax(axis=1) == wanted[:, 5]).all()


@pytest.mark.parametrize("spoiled", ["order", "boxes", "scores", "no box", "shapes"])
def test_tables_that_list_no_detections_are_not_read_as_lists(spoiled: str) -> None:
    rng, tables = np.random.default_rng(0), [list_rows(seed)["y"] for seed in range(8)]
    for table in tables:
        if spoiled == "order":
            table[0] = table[0, rng.permutation(ROWS)]
        elif spoiled == "boxes":
            table[..., :4] = rng.normal(size=(1, ROWS, 4))
        elif spoiled == "scores":
            table[..., 4] *= 2
    if spoiled == "shapes":
        tables[0] = tables[0][:, :-1]
    start = 2 if spoiled == "no box" else 0
    assert find_list([{"y": table[..., start:]} for table in tables], (SIDE, SIDE)) is None


def drop_of(rows: Sequence[Tensors], others: Sequence[Tensors]) -> float:
    found = present(find_list(rows, (SIDE, SIDE)))
    return estimate_drop(
        [record_detections(found, row, other) for row, other in zip(rows, others, strict=True)]
    ).estimate


def test_rows_that_change_places_cost_nothing_and_boxes_that_move_do() -> None:
    rows = [list_rows(seed) for seed in range(16)]
    order = np.array([0, 1, 3, 2, *range(4, ROWS)])
    swapped: list[Tensors] = []
    for row in rows:
        table = row["y"][:, order]
        table[..., 4] = row["y"][..., 4]
        swapped.append({"y": table})
    moved: list[Tensors] = [{"y": row["y"] + np.array([3, 3, 3, 3, 0, 0], np.float32)} for row in rows]
    assert abs(drop_of(rows, swapped)) < 0.005
    assert drop_of(rows, moved) > 0.05


TAIL = """h = Sigmoid(z) f = Reshape(h, s) v, i = TopK(f, k) c = Cast<to=1>(i) u = Unsqueeze(v, two)
  d = Unsqueeze(c, two) j = Concat<axis=2>(u, d)"""
ENDS = {"a list": "y = Identity(j)", "a layer": "y = MatMul(j, m)"}


def rank_places(folder: Path, end: str) -> Model:
    text = f"""g (float[1,3,8,8] x) => (float[1,5,2] y)
      <int64[1] k = {{5}}, int64[2] s = {{1,64}}, int64[1] two = {{2}}> {{ z = Conv(x, w) {TAIL} {ENDS[end]} }}"""
    return make_model(text, folder / "m.onnx", {"w": (1, 3, 1, 1), **({"m": (2, 2)} if end == "a layer" else {})})


def test_what_lists_ranked_places_stays_float_and_is_judged_by_what_was_ranked(tmp_path: Path) -> None:
    graph = read_float_graph(rank_places(tmp_path, "a list"))
    ops = [node.op_type for node in graph.nodes if "lists what" in find_float_regions(graph).get(node.name, "")]
    assert ops == ["Cast", "Unsqueeze", "Unsqueeze", "Concat", "Identity"]
    assert find_compared_tensors(graph) == (ComparedTensor(tensor="z", reader="n1_Sigmoid", centred=False),)


def test_where_layers_go_on_with_ranked_places_nothing_is_a_list(tmp_path: Path) -> None:
    graph = read_float_graph(rank_places(tmp_path, "a layer"))
    assert not find_float_regions(graph)
    assert next(point.tensor for point in find_compared_tensors(graph)) == "y"


def test_a_sigmoid_in_16_bits_has_the_grid_that_qnn_requires(tmp_path: Path) -> None:
    model = rank_places(tmp_path, "a list")
    calibration, plan = plan_model(model, tmp_path, "qnn", random_samples(model, count=4))
    wide = msgspec.structs.replace(plan, wide={"h": plan.ranges["h"]})
    proto = onnx.load(str(quantize_model(model, wide, calibration, tmp_path / "q.onnx").model.path))
    stored = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    grids = [node.input[1:] for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    assert 1 / 65536 in {float(stored[scale]) for scale, zero in grids if stored[zero].dtype == np.uint16}


def test_a_list_is_found_where_the_first_sample_shows_one_object(tmp_path: Path) -> None:
    """One box says nothing about where boxes lie: all samples that are looked at do."""
    model = make_model(
        "g (float[1,3,64,64] image, float[1,20,6] t) => (float[1,20,6] y) { y = Identity(t) }", tmp_path / "m.onnx"
    )
    rows = [list_rows(seed)["y"] for seed in range(16)]
    rows[0][0, 1:, 4] = 0.001 * rows[0][0, 1:, 4] / rows[0][0, 1, 4]
    pixels = np.random.default_rng(0).uniform(size=(16, 1, 3, SIDE, SIDE)).astype(np.float32)
    samples = make_samples([{"image": image, "t": row} for image, row in zip(pixels, rows, strict=True)])
    (part,) = FloatReference(model, samples).parts
    assert "mean AP" in part.measure
