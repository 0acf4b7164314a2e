from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fixture_types import present
from quantize_models import Units, choose_plan, make_model, make_samples, plan_model, random_samples, sqnr_db
from tiny_models import parse_net, save_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.data_check import check_samples
from edgekit.model.external import ArrayFile, DataPlace, point_to
from edgekit.model.model import Model
from edgekit.model.tensors import Array, StatedOutput, Tensors
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.detections import estimate_drop, record_detections
from edgekit.quantize.accuracy.head_search import find_list
from edgekit.quantize.accuracy.loss import join_ratios, ratio_db
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.calibration import held_out
from edgekit.quantize.calibration.held_out import HELD_OUT, HeldOut, read_held_out
from edgekit.quantize.calibration.store import CacheSettings, save_arrays
from edgekit.quantize.graph.compared_tensors import ComparedTensor, find_compared_tensors
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.float_regions import find_float_regions
from edgekit.quantize.mixed_precision.score import has_held_out, open_judge
from edgekit.quantize.objective import find_enlarged, find_objective, measure_classes, measure_loss, measure_scores
from edgekit.target import load_target

ONE = "(float[1,40] x) => (float[A,B] y) <int64[1] n = {3}> { z = Neg(x) "
LAST = "(float[1,64] x) => (float[1,SIZE] y) { h = Relu(x) m = MatMul(h, w) y = Neg(m) }"


@pytest.mark.parametrize(
    ("text", "columns", "points"),
    [
        ("(float[1,64] x) => (float[1,40] y, int64[1,1] k) { z = MatMul(x, w) y = Softmax(z) k = ArgMax<axis=1>(y) }",
         40, ["z n1_Softmax centred"]),
        # What a graph squashes or picks from.
        (ONE + "y = LogSoftmax(z) }", 0, ["z n1_LogSoftmax centred"]),
        (ONE + "y = Sigmoid(z) }", 0, ["z n1_Sigmoid"]),
        (ONE + "s = Softmax(z) y = Identity(s) }", 0, ["z n1_Softmax centred"]),
        (ONE + "y = Tanh(z) }", 0, ["y "]),
        (ONE + "k = ArgMax<axis=1>(z) y = Cast<to=1>(k) }", 0, ["z n1_ArgMax"]),
        (ONE + "y, k = TopK<axis=1>(z, n) }", 0, ["z n1_TopK"]),
        # Few values are judged with what their layer reads, if there is such a layer.
        (LAST.replace("SIZE", "31"), 31, ["y ", "h n1_MatMul"]),
        (LAST.replace("SIZE", "32"), 32, ["y "]),
        ("(float[1,4] x) => (float[1,4] y, int64[1,4] i) { y = Relu(x) c = Cast<to=7>(x) i = Neg(c) }", 0, ["y "]),
        ("(float[1,4] x) => (float[1,4] y) { y = Relu(x) }", 0, ["y "]),
        ("(float[1,64] x) => (float[1,4] y) { y = MatMul(x, w) }", 4, ["y "]),
        ("(float[1,64] x, bool[4] c) => (float[N] y) { h = Relu(x) m = MatMul(h, w) y = Compress(m, c) }", 4, ["y "]),
        ("(float[1,64] x) => (float[1,4] y) { d = Cast<to=11>(x) u = Cast<to=11>(w) m = Gemm(d, u) y = Cast<to=1>(m) }",
         4, ["y "]),
    ],
)  # fmt: skip
def test_what_is_compared_for_an_output(text: str, columns: int, points: list[str], tmp_path: Path) -> None:
    graph = read_float_graph(make_model(f"g {text}", tmp_path / "m.onnx", {"w": (64, columns)} if columns else None))
    found = find_compared_tensors(graph)
    assert [f"{each.tensor} {each.reader}{' centred' * each.centred}" for each in found] == points
    assert {(each.part, each.family) for each in found} == {(None, "")}


TWO = "(float[1,4,50] a, float[1,2,50] b)"
LEVELS = "=> (float[1,6,70] y) { e = Concat<axis=1>(a, b) f = Concat<axis=1>(c, d) y = Concat<axis=2>(e, f) }"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{TWO} => (float[1,6,50] y) {{ y = Concat<axis=1>(a, b) }}", [(1, 0, 4), (1, 4, 6)]),
        (f"{TWO} => (float[1,6,50] y) {{ y = Concat<axis=-2>(a, b) }}", [(1, 0, 4), (1, 4, 6)]),
        (
            f"{TWO} => (float[1,50,6] y) {{ c = Concat<axis=1>(a, b) y = Transpose<perm=[0,2,1]>(c) }}",
            [(2, 0, 4), (2, 4, 6)],
        ),
        (f"{TWO} => (float[50,6,1] y) {{ c = Concat<axis=1>(a, b) y = Transpose(c) }}", [(1, 0, 4), (1, 4, 6)]),
        (
            f"{TWO} => (float[1,6,5,10] y) <int64[4] s = {{1,6,5,10}}> {{ c = Concat<axis=1>(a,b) y = Reshape(c,s) }}",
            [(1, 0, 4), (1, 4, 6)],
        ),
        (f"{TWO} => (float[1,300] y) {{ c = Concat<axis=1>(a, b) y = Flatten(c) }}", [None]),
        (f"{TWO} => (float[1,6,50] y) {{ c = Concat<axis=1>(a, b) y = Neg(c) }}", [None]),
        (f"(float[1,4,50] a, float[1,2,50] b, float[1,4,20] c, float[1,2,20] d) {LEVELS}", [(1, 0, 4), (1, 4, 6)]),
        (f"(float[1,4,50] a, float[1,2,50] b, float[1,3,20] c, float[1,3,20] d) {LEVELS}", [(2, 0, 50), (2, 50, 70)]),
        ("(float[1,8] a) => (float[1,64] y) { y = Concat<axis=1>(a, a, a, a, a, a, a, a) }", 8),
        ("(float[1,8] a) => (float[1,72] y) { y = Concat<axis=1>(a, a, a, a, a, a, a, a, a) }", [None]),
    ],
)
def test_a_concat_is_judged_by_part(tmp_path: Path, text: str, parts: list[tuple[int, int, int] | None] | int) -> None:
    eight = [(1, 8 * index, 8 * index + 8) for index in range(8)]
    found = find_compared_tensors(read_float_graph(make_model(f"g {text}", tmp_path / "m.onnx")))
    assert [point.part for point in found] == (eight if parts == 8 else parts)


def test_the_loss_of_a_part_leaves_out_the_other_parts() -> None:
    wanted, found = np.array([[3.0, 4.0, 100.0]]), np.array([3.0, 6.0, 0.0])
    point = ComparedTensor(tensor="y", reader="", centred=False, part=(1, 0, 2))
    assert measure_loss(point, wanted)(found).tolist() == [25.0, 4.0]
    whole = msgspec.structs.replace(point, part=None)
    assert measure_loss(whole, wanted)(found).tolist() == [10025.0, 10004.0]
    assert measure_loss(whole, wanted)(found[:2]).tolist() == [1.0, np.inf]
    centred = msgspec.structs.replace(whole, centred=True)
    assert measure_loss(centred, np.array([[1.0, 3.0]]))(np.array([0.0, 6.0])).tolist() == [2.0, 8.0]
    rows = np.array([[1.0, 3.0], [10.0, 20.0]])
    assert measure_loss(centred, rows)(rows + np.array([[5.0], [7.0]])).tolist() == [52.0, 0.0]


def test_an_error_of_a_tenth_is_20_db() -> None:
    point, ones = ComparedTensor(tensor="y", reader="", centred=False), np.ones(10)
    assert ratio_db(*measure_loss(point, ones)(ones * 1.1)) == pytest.approx(20)
    assert ratio_db(*measure_loss(point, ones)(ones)) == 80
    assert ratio_db(*measure_loss(point, ones)(ones * np.nan)) == -20


def test_what_is_silent_or_empty_in_both_has_lost_nothing() -> None:
    point = ComparedTensor(tensor="y", reader="", centred=False)
    for same in (np.zeros(10), np.zeros((2, 0))):
        assert ratio_db(*measure_loss(point, same)(same)) == 80
    assert ratio_db(*measure_loss(point, np.zeros(10))(np.ones(10))) == -20


def test_several_ratios_stand_for_their_mean_noise() -> None:
    assert join_ratios([20.0, 20.0]) == pytest.approx(20)
    assert join_ratios([10.0, 80.0]) == pytest.approx(10 + 10 * np.log10(2), abs=1e-5)
    assert join_ratios([-20.0, 80.0, 80.0, 80.0]) == pytest.approx(-20 + 10 * np.log10(4), abs=1e-5)


@pytest.mark.parametrize(("keep", "least", "most"), [(True, 30.0, 60.0), (False, -20.0, 5.0)])
def test_float_weights_are_judged_if_they_are_kept(tmp_path: Path, keep: bool, least: float, most: float) -> None:
    text = """(float[1,4] x) => (float[1,4] y) <float s = {0.02}, uint8 z = {128}, float t = {0.05}> {
      xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) h = Gemm(xd, w)
      hq = QuantizeLinear(h, t, z) y = DequantizeLinear(hq, t, z) }"""
    weight, rng = np.eye(4, dtype=np.float32), np.random.default_rng(0)
    weight[0] = 1000  # what reads an input that is always 0: one step of 8 bits is 8 then, and the others are nothing
    proto = parse_net(text, {"w": weight})
    rows = [np.append(0, rng.uniform(-2, 2, 3))[None].astype(np.float32) for _ in range(9)]
    held = HeldOut(9, {"y"}, ArrayFile(tmp_path / "arrays"))
    for index, row in enumerate(rows):
        held.offer(index, {"x": row}, {"y": row @ weight})
    save_arrays(tmp_path / HELD_OUT, held.arrays.items())
    point = ComparedTensor(tensor="y", reader="", centred=False)
    assert least <= open_judge(proto, (point,), tmp_path, keep_float_weights=keep)() <= most
    # Weights that were set aside lie in the same folder.
    (tmp_path / "w.data").write_bytes(weight.tobytes())
    point_to(proto.graph.initializer[-1], DataPlace("w.data", 0, weight.nbytes))
    assert least <= open_judge(proto, (point,), tmp_path, keep_float_weights=keep)() <= most
    assert has_held_out(tmp_path)


@pytest.mark.parametrize(
    ("each", "most", "kept", "told"),
    [(1, 1 << 30, 4, "4 of 16 held-out samples"), (2, 5, 2, "2 of 16"), (9, 5, 1, "1 of 16"), (0, 5, 16, "")],
)
def test_large_samples_judge_too_and_that_few_do_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, each: int, most: int, kept: int, told: str
) -> None:
    monkeypatch.setattr(held_out, "MOST_BYTES", 3)
    monkeypatch.setattr(held_out, "LEAST_BYTES", most)
    held = HeldOut(48, {"y"}, ArrayFile(tmp_path / "arrays"))
    for index in range(48):
        held.offer(index, {"past": np.zeros(each, np.int8)}, {})
    assert len(held.positions()) == kept
    assert told in "".join(held.describe_loss())
    assert bool(told) == bool(held.describe_loss())
    again = HeldOut(48, {"y"}, ArrayFile(tmp_path / "again"))
    assert again.restore(held.arrays)
    assert again.positions() == held.positions()


def test_texts_among_the_inputs_do_not_hinder_the_choice_of_a_plan(tmp_path: Path) -> None:
    """Of two inputs of a million and of one, a network with a table of texts computed nothing right."""
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 2]>
      g (string[1] s, float[1,2] x) => (float[1,3] y) <float[2] f = {0.000001, 1}, float[2,2] t = {0,1,1,0}> {
      [i] i = ai.onnx.ml.LabelEncoder<keys_strings=["cat","dog"], values_int64s=[0,1]>(s) [e] e = Gather(t, i)
      [m] m = Mul(x, f) [a] a = Add(m, e) [y] y = MatMul(a, w) }"""
    w = np.array([[1, -1, 0.5], [0.3, 1, -1]], np.float32)
    model = save_net(text, tmp_path / "m.onnx", w=w)
    rng = np.random.default_rng(0)
    rows: list[Tensors] = [
        {"s": np.array([word], object), "x": (rng.normal(size=(1, 2)) * [1e6, 1]).astype(np.float32)}
        for word in rng.choice(["cat", "dog"], 48)
    ]
    samples, work = make_samples(rows), tmp_path / "work"
    cache = CacheSettings(folder=tmp_path / "cache", digests=check_samples(samples).digests)
    calibration = calibrate_model(model, samples, work=work, cache=cache)
    held = [row["s"].item() for row, _ in read_held_out(work)]
    assert (len(held), {*held}) == (16, {"cat", "dog"})
    assert calibrate_model(model, samples, work=tmp_path / "again", cache=cache).notes == calibration.notes == ()
    plan = choose_plan((model, calibration), samples, load_target("cpu"), tmp_path)
    quantized = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model
    assert plan.judged
    assert sqnr_db(model, quantized, rows) > 30


@pytest.mark.parametrize(("count", "dtype", "why"), [(7, np.int8, "8 are needed"), (48, complex, "no plain numbers")])
def test_that_no_sample_judges_is_told(count: int, dtype: type, why: str, tmp_path: Path) -> None:
    held = HeldOut(count, {"y"}, ArrayFile(tmp_path / "arrays"))
    for index in range(count):
        held.offer(index, {"x": np.zeros(1, dtype)}, {})
    assert not held.positions()
    assert f"{why}; 'auto' and 'best' begin with minmax then" in "".join(held.describe_loss())


# The objective: what outputs decide counts, not the power of their errors; the surest classes do not tie.


def test_however_sure_a_model_is_a_decision_lost_is_one_decision() -> None:
    for margin in (20.0, 500.0):
        told, lost = measure_classes(np.array([[margin, 0.0], [0.0, margin]]))(np.array([[0.0, margin], [0.0, margin]]))
        assert told == pytest.approx(1.0, rel=1e-3)
        assert lost.tolist() == pytest.approx([2.0, 0.0], rel=1e-3)


def test_sure_places_tolerate_errors_but_no_ties() -> None:
    sure = np.array([[30.0, 10.0, 0.0]] * 8 + [[0.0, 10.0, 30.0]] * 8)
    _, moved = measure_classes(sure)(sure * 0.8)
    _, tied = measure_classes(sure)(np.minimum(sure, 10.0))
    assert moved.max() < 1e-4
    assert tied.min() == pytest.approx(2 - 2**0.5, rel=1e-3)


def test_scores_far_below_zero_lose_nothing_and_what_is_shown_does() -> None:
    scores = np.array([[-300.0]] * 60 + [[2.0]] * 4)
    told, lost = measure_scores(scores)(np.where(scores < 0, -12.0, scores))
    assert lost.sum() < 1e-3 * told
    _, lost = measure_scores(scores)(np.minimum(scores, 0.0))
    assert lost.sum() > 0.05 * told


def test_temperature_takes_divergence_to_the_ratio_of_logits() -> None:
    # The limit of a high temperature is the ratio of logits less their mean, by which single decisions are judged.
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 5))
    others = logits + 0.1 * rng.normal(size=logits.shape)
    told, lost = measure_classes(logits / 100)(others / 100)
    centred = ComparedTensor(tensor="y", reader="", centred=True)
    assert ratio_db(told, lost.sum()) == pytest.approx(ratio_db(*measure_loss(centred, logits)(others)), abs=0.05)


@pytest.fixture
def rejected(tmp_path: Path) -> tuple[Model, Calibration]:
    """Logits of places with small margins; a few places are sure that they are not of one class."""
    head = "g (float[1,5,16,16] x) => (float[1,5,16,16] y)"
    eye = np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1)
    model = make_model(head + " { l = Conv(x, w) y = Identity(l) }", tmp_path / "m.onnx", constants={"w": eye})
    rows = np.random.default_rng(5).normal(0, 1, (32, 1, 5, 16, 16)).astype(np.float32)
    rows[:, 0, 2:] -= 4
    rows[::2, 0, 4, 0, 0] = -120
    outputs = {"y": StatedOutput(kind="map", axis=1)}
    samples = make_samples([{"x": row} for row in rows])
    return model, calibrate_model(model, samples, work=tmp_path / "work", outputs=outputs)


def test_decisions_win_over_power(rejected: tuple[Model, Calibration], tmp_path: Path) -> None:
    model, calibration = rejected
    target = load_target("cpu")
    plan = plan_quantization(model, calibration, target, "int8")
    by_power = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    other = plan_quantization(model, by_power, target, "int8")
    assert (plan.method.split("-")[0], other.method) == ("percentile", "mse")

    def changed(chosen: QuantPlan) -> float:
        path = quantize_model(model, chosen, calibration, tmp_path / "q.onnx").model.path
        one, two = (
            np.stack([CpuSession(each, SessionSettings()).run(sample)["y"] for sample in scenes]).argmax(axis=2)
            for each in (model.path, path)
        )
        return float((one != two).mean())

    scenes = [{"x": np.random.default_rng(9).normal(0, 1, (1, 5, 16, 16)).astype(np.float32)}]
    assert changed(plan) < changed(other) / 2


HEAD = "g (float[1,5,16,16] x)"


def draw_scenes(count: int = 24) -> list[Array]:
    """Returns logits of places that are sure of a class, a few of them of a rare one that is surer by far."""
    rng = np.random.default_rng(3)
    found = rng.normal(0, 0.5, (count, 1, 5, 16, 16)).astype(np.float32)
    kinds = rng.integers(0, 4, (count, 16, 16))
    for index, image in enumerate(found):
        np.put_along_axis(image[0], kinds[index][None], 6.0 + 0.1 * kinds[index][None], axis=0)
        if index % 6 == 0:
            image[0, 3, 0, 0], image[0, 4, 0, 0] = 13.0, 14.0
    return list(found)


RESIZED = """ => (float[1,5,32,32] y) { l = Conv(x, w) r = Resize<mode = "MODE">(l, n, s) y = Identity(r) }"""
ENLARGED = {
    "map": HEAD + RESIZED,
    "softmax": HEAD + RESIZED.replace("Identity", "Softmax<axis = 1>"),
    "labels": HEAD + RESIZED.replace("Identity", "ArgMax<axis = 1>").replace("float[1,5,", "int64[1,1,"),
}


@pytest.mark.parametrize(("tail", "mode", "kind", "found"), [
    ("map", "linear", "", True), ("map", "cubic", "", True), ("map", "nearest", "", False),
    ("map", "linear", "values", False), ("softmax", "linear", "", True), ("labels", "linear", "", True),
    ("labels", "nearest", "", False),
])  # fmt: skip
def test_interpolated_maps_are_not_rounded_again(tail: str, mode: str, kind: str, found: bool, tmp_path: Path) -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    constants = {"w": np.eye(5, dtype=np.float32).reshape(5, 5, 1, 1), "s": scales, "n": np.zeros(0, np.float32)}
    model = make_model(ENLARGED[tail].replace("MODE", mode), tmp_path / "m.onnx", constants=constants)
    samples = make_samples([{"x": image} for image in draw_scenes()])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    if kind:
        calibration = msgspec.structs.replace(calibration, outputs={"y": StatedOutput(kind="values")})
    assert bool(find_enlarged(read_float_graph(model), calibration)) == found
    qnn, nnapi = (plan_quantization(model, calibration, load_target(name), "int8") for name in ("qnn", "nnapi"))
    assert bool(qnn.wide) == found
    assert "l" not in qnn.wide
    fine = plan_quantization(model, calibration, load_target("qnn"), "int16")
    assert (fine.wide, "Resize" in {node.op for node in fine.float_nodes}) == ({}, False)
    assert ("Resize" in {node.op for node in nnapi.float_nodes}) == found
    assert "Conv" not in {node.op for node in nnapi.float_nodes}


@pytest.mark.parametrize(
    ("shape", "tail", "family"),
    [
        ("1,1,1,1", "Sigmoid(l)", ""), ("1,5,1,1", "Softmax<axis=1>(l)", ""),
        ("1,1,1,2", "Sigmoid(l)", "scores"), ("1,5,1,2", "Softmax<axis=1>(l)", "classes"),
        ("1,5", "Sigmoid(l)", ""), ("1,5", "Softmax<axis=1>(l)", ""),
        ("7,5", "Sigmoid(l)", "scores"), ("7,5", "Softmax<axis=1>(l)", "classes"),
    ],
)  # fmt: skip
def test_several_decisions_a_sample_are_a_map(shape: str, tail: str, family: str, tmp_path: Path) -> None:
    """Around their mean the decisions of a sample have no power if it makes only one: every plan seemed to collapse."""
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ l = Neg(x) y = {tail} }}"
    model, rng = make_model(text, tmp_path / "m.onnx"), np.random.default_rng(0)
    sizes = tuple(map(int, shape.split(",")))
    samples = make_samples([{"x": rng.normal(size=sizes).astype(np.float32)} for _ in range(16)])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    (compared,) = find_objective(read_float_graph(model), calibration)
    assert (compared.tensor, compared.family) == ("l", family)


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
    units = Units(quantize_model(model, wide, calibration, tmp_path / "q.onnx").model)
    grids = ([units.stored[name] for name in node.input[1:]] for node in units.rounders.values())
    assert 1 / 65536 in {float(scale) for scale, zero in grids if zero.dtype == np.uint16}


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
    assert "mean AP" in part.measure.name
