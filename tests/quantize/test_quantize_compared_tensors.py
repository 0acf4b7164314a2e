from pathlib import Path

import msgspec
import numpy as np
import pytest
from onnx import numpy_helper, parser
from quantize_models import make_model, make_samples, sqnr_db
from tiny_models import save_net

from edgekit.data.data_check import check_samples
from edgekit.model.external import DataPlace, point_to
from edgekit.model.file_arrays import ArrayFile
from edgekit.model.tensors import Tensors
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.loss import join_ratios, ratio_db
from edgekit.quantize.calibration import held_out
from edgekit.quantize.calibration.held_out import HeldOut, read_held_out, save_held_out
from edgekit.quantize.calibration.store import CacheSettings
from edgekit.quantize.graph.compared_tensors import ComparedTensor, find_compared_tensors
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.score import has_held_out, judge_candidate
from edgekit.quantize.objective import measure_loss
from edgekit.target import load_target


def test_logits_are_judged_not_probabilities(tmp_path: Path) -> None:
    text = """g (float[1,64] x) => (float[1,40] y, int64[1,1] k) {
      h = Relu(x) z = MatMul(h, w) y = Softmax(z) k = ArgMax<axis=1>(y) }"""
    points = find_compared_tensors(read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (64, 40)})))
    assert points == (ComparedTensor(tensor="z", reader="n2_Softmax", centred=True),)


@pytest.mark.parametrize(
    "body",
    [
        "(float[1,4] x) => (float[1,4] y, int64[1,4] i) { y = Relu(x) c = Cast<to=7>(x) i = Neg(c) }",
        "(float[1,4] x) => (float[1,4] y) { y = Relu(x) }",
        "(float[1,64] x) => (float[1,4] y) { y = MatMul(x, w) }",
        "(float[1,64] x, bool[64] c) => (float[N] y) { h = Relu(x) m = MatMul(h, v) y = Compress(m, c) }",
        "(float[1,64] x) => (float[1,4] y) { d = Cast<to=11>(x) u = Cast<to=11>(w) m = Gemm(d, u) y = Cast<to=1>(m) }",
    ],
    ids=[
        "beside whole numbers",
        "no layer",
        "a layer of the input",
        "nobody knows how many",
        "a layer in double precision",
    ],
)
def test_outputs_without_features_of_their_own_are_judged_alone(tmp_path: Path, body: str) -> None:
    graph = read_float_graph(make_model(f"g {body}", tmp_path / "m.onnx", {"w": (64, 4), "v": (64, 64)}))
    (point,) = find_compared_tensors(graph)
    assert (point.tensor, point.reader) == ("y", "")


def parts_of(folder: Path, text: str) -> list[tuple[str, tuple[int, int, int] | None]]:
    graph = read_float_graph(make_model(f"g {text}", folder / "m.onnx"))
    return [(point.tensor, point.part) for point in find_compared_tensors(graph)]


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
        (
            f"(float[1,4,50] a, float[1,2,50] b, float[1,4,20] c, float[1,2,20] d) {LEVELS}",
            [(1, 0, 4), (1, 4, 6)],
        ),
        (
            f"(float[1,4,50] a, float[1,2,50] b, float[1,3,20] c, float[1,3,20] d) {LEVELS}",
            [(2, 0, 50), (2, 50, 70)],
        ),
        ("(float[1,8] a) => (float[1,64] y) { y = Concat<axis=1>(a, a, a, a, a, a, a, a) }", 8),
        ("(float[1,8] a) => (float[1,72] y) { y = Concat<axis=1>(a, a, a, a, a, a, a, a, a) }", [None]),
    ],
)
def test_a_tensor_that_is_put_together_is_judged_part_by_part(
    tmp_path: Path, text: str, parts: list[tuple[int, int, int] | None] | int
) -> None:
    eight = [(1, 8 * index, 8 * index + 8) for index in range(8)]
    assert [part for _, part in parts_of(tmp_path, text)] == (eight if parts == 8 else parts)


@pytest.mark.parametrize(
    ("nodes", "tensor", "reader", "centred"),
    [
        ("y = LogSoftmax(z)", "z", "n1_LogSoftmax", True),
        ("y = Sigmoid(z)", "z", "n1_Sigmoid", False),
        ("s = Softmax(z) y = Identity(s)", "z", "n1_Softmax", True),
        ("y = Tanh(z)", "y", "", False),
        ("k = ArgMax<axis=1>(z) y = Cast<to=1>(k)", "z", "n1_ArgMax", False),
        ("y, k = TopK<axis=1>(z, n)", "z", "n1_TopK", False),
    ],
)
def test_what_a_graph_squashes_or_picks_from_is_judged(
    tmp_path: Path, nodes: str, tensor: str, reader: str, centred: bool
) -> None:
    text = f"(float[1,40] x) => (float[A,B] y) <int64[1] n = {{3}}> {{ z = Neg(x) {nodes} }}"
    graph = read_float_graph(make_model(f"g {text}", tmp_path / "m.onnx"))
    assert find_compared_tensors(graph) == (ComparedTensor(tensor=tensor, reader=reader, centred=centred),)


@pytest.mark.parametrize(("size", "features"), [(31, ["y", "h"]), (32, ["y"])])
def test_outputs_of_less_than_32_values_are_judged_with_what_their_layer_reads(
    tmp_path: Path, size: int, features: list[str]
) -> None:
    text = f"g (float[1,64] x) => (float[1,{size}] y) {{ h = Relu(x) m = MatMul(h, w) y = Neg(m) }}"
    points = find_compared_tensors(read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (64, size)})))
    assert [(point.tensor, point.reader) for point in points] == [("y", ""), ("h", "n1_MatMul")][: len(features)]


def test_the_loss_of_a_part_leaves_out_the_other_parts() -> None:
    wanted, found = np.array([[3.0, 4.0, 100.0]]), np.array([3.0, 6.0, 0.0])
    point = ComparedTensor(tensor="y", reader="", centred=False, part=(1, 0, 2))
    assert measure_loss(point, wanted, found).tolist() == [25.0, 4.0]
    whole = msgspec.structs.replace(point, part=None)
    assert measure_loss(whole, wanted, found).tolist() == [10025.0, 10004.0]
    assert measure_loss(whole, wanted, found[:2]).tolist() == [1.0, np.inf]
    centred = msgspec.structs.replace(whole, centred=True)
    assert measure_loss(centred, np.array([[1.0, 3.0]]), np.array([0.0, 6.0])).tolist() == [2.0, 8.0]
    rows = np.array([[1.0, 3.0], [10.0, 20.0]])
    assert measure_loss(centred, rows, rows + np.array([[5.0], [7.0]])).tolist() == [52.0, 0.0]


def test_an_error_of_a_tenth_is_20_db() -> None:
    point, ones = ComparedTensor(tensor="y", reader="", centred=False), np.ones(10)
    assert ratio_db(*measure_loss(point, ones, ones * 1.1)) == pytest.approx(20)
    assert ratio_db(*measure_loss(point, ones, ones)) == 80
    assert ratio_db(*measure_loss(point, ones, ones * np.nan)) == -20


def test_what_is_silent_or_empty_in_both_has_lost_nothing() -> None:
    point = ComparedTensor(tensor="y", reader="", centred=False)
    for same in (np.zeros(10), np.zeros((2, 0))):
        assert ratio_db(*measure_loss(point, same, same)) == 80
    assert ratio_db(*measure_loss(point, np.zeros(10), np.ones(10))) == -20


def test_several_ratios_stand_for_their_mean_noise() -> None:
    assert join_ratios([20.0, 20.0]) == pytest.approx(20)
    assert join_ratios([10.0, 80.0]) == pytest.approx(10 + 10 * np.log10(2), abs=1e-5)
    assert join_ratios([-20.0, 80.0, 80.0, 80.0]) == pytest.approx(-20 + 10 * np.log10(4), abs=1e-5)


@pytest.mark.parametrize(("keep", "least", "most"), [(True, 30.0, 60.0), (False, -20.0, 5.0)])
def test_a_candidate_with_float_weights_is_judged_as_it_is_only_if_they_are_kept(
    tmp_path: Path, keep: bool, least: float, most: float
) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y)
      <float s = {0.02}, uint8 z = {128}, float t = {0.05}> {
      xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) h = Gemm(xd, w)
      hq = QuantizeLinear(h, t, z) y = DequantizeLinear(hq, t, z) }"""
    weight, rng = np.eye(4, dtype=np.float32), np.random.default_rng(0)
    weight[0] = 1000  # what reads an input that is always 0: one step of 8 bits is 8 then, and the others are nothing
    proto = parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    rows = [np.append(0, rng.uniform(-2, 2, 3))[None].astype(np.float32) for _ in range(9)]
    held = HeldOut(9, {"y"}, ArrayFile(tmp_path / "arrays"))
    for index, row in enumerate(rows):
        held.offer(index, {"x": row}, {"y": row @ weight})
    save_held_out(tmp_path, held)
    point = ComparedTensor(tensor="y", reader="", centred=False)
    told = {"keep_float_weights": True} if keep else {}
    assert least <= judge_candidate(proto, (point,), tmp_path, **told) <= most
    # Weights that were set aside lie in the same folder.
    (tmp_path / "w.data").write_bytes(weight.tobytes())
    point_to(proto.graph.initializer[-1], DataPlace("w.data", 0, weight.nbytes))
    assert least <= judge_candidate(proto, (point,), tmp_path, **told) <= most
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
    plan = plan_quantization(model, calibration, load_target("cpu"), "int8")
    quantized = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model
    assert plan.judged
    assert sqnr_db(model, quantized, rows) > 30


@pytest.mark.parametrize(("count", "dtype", "why"), [(7, np.int8, "8 are needed"), (48, complex, "no plain numbers")])
def test_that_no_sample_judges_is_told(count: int, dtype: type, why: str, tmp_path: Path) -> None:
    held = HeldOut(count, {"y"}, ArrayFile(tmp_path / "arrays"))
    for index in range(count):
        held.offer(index, {"x": np.zeros(1, dtype)}, {})
    assert not held.positions()
    assert why in "".join(held.describe_loss())
