"""Large weights, and what rounding found, lie in files while a model is quantized, and what comes out is the same."""

from itertools import count, pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from fixture_types import present
from quantize_models import make_model, plan_model, quantize

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import RuntimeRefusal
from edgekit.model.external import read_place
from edgekit.model.model import Model, read_proto
from edgekit.quantize import _ort_quantizer as door
from edgekit.quantize.calibration.augment import augment_graph
from edgekit.quantize.calibration.calibrate import open_float_graph
from edgekit.quantize.equalize import equalize_graph
from edgekit.quantize.graph.float_graph import read_float_graph, store_float_graph
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.qdq import place_plan
from edgekit.quantize.rounding import recall_rounded

# A table that is looked up, two layers with a bias, and a weight transposed in a Gemm whose bias is computed.
NET = """g (float[4,256] u) => (float[4,256] y) <int64[4] ids = {3, 1, 4, 1}>
{
  rows = Gather(table, ids)
  x = Add(rows, u)
  h = Gemm(x, w1, b1)
  r = Relu(h)
  y = Gemm<transB=1>(r, w2, x)
}
"""
SHAPES = {"table": (400, 256), "w1": (256, 256), "b1": (256,), "w2": (256, 256)}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(NET, tmp_path / "m.onnx", SHAPES)


def _quantize(model: Model, folder: Path) -> bytes:
    return quantize(model, folder).model.path.read_bytes()


def test_weights_inside_are_never_read_whole(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_weight = _quantize(model, tmp_path / "plain"), read_float_graph(model).weight("w1")
    monkeypatch.setattr("edgekit.model.model.LARGE_BYTES", 0)
    graph = read_float_graph(model)
    places = [place for tensor in graph.proto.initializer if (place := read_place(tensor))]
    # The transposed one was made anew.
    assert [place.file for place in places] == ["m.onnx"] * 2
    assert np.array_equal(graph.weight("w1"), plain_weight)
    assert _quantize(model, tmp_path / "outside") == plain


def test_a_large_bias_outside_is_read(tmp_path: Path) -> None:
    """Keras's LayerNormalization, written by tf2onnx, has a BatchNormalization with a channel for each row."""
    text = "g (float[1,40000,2] x) => (float[1,40000,2] y) { y = BatchNormalization(x, s, b, m, v) }"
    rows = np.random.default_rng(0).uniform(0.5, 1, 40000).astype(np.float32)
    made = quantize(make_model(text, tmp_path / "m.onnx", constants=dict.fromkeys("sbmv", rows)), tmp_path, "qnn")
    stored = read_proto(made.model).graph.initializer
    assert (onnx.TensorProto.INT32, [40000]) in [(tensor.data_type, list(tensor.dims)) for tensor in stored]


def test_a_session_with_weights_in_a_file_gives_the_same(model: Model, tmp_path: Path) -> None:
    graph = read_float_graph(model)
    sample = {"u": np.random.default_rng(3).standard_normal((4, 256), np.float32)}
    found = [
        open_graph(graph.model, tmp_path, keep_float_weights=True, large_bytes=most).run(sample)["y"]
        for most in (0, 1 << 30)
    ]
    assert np.array_equal(found[0], found[1])
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_products_do_not_saturate_on_any_cpu(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration, plan = plan_model(model, tmp_path, "cpu")
    qdq = place_plan(open_float_graph(model, calibration), plan, "m")
    sample = {"u": np.random.default_rng(3).standard_normal((4, 256), np.float32)}
    found = open_graph(qdq, tmp_path / "work", keep_float_weights=False).run(sample)["y"]
    monkeypatch.setattr("edgekit.machine.read_cpu_flags", str)
    assert np.array_equal(open_graph(qdq, tmp_path / "work", keep_float_weights=False).run(sample)["y"], found)


@pytest.mark.parametrize("in_file", [False, True])
def test_products_of_shared_weights_do_not_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_file: bool
) -> None:
    """ONNX Runtime 1.31 cannot make weights unsigned that two layers share, such as those of query and key."""
    text = """g (float[1,64] u, float[1,64] v) => (float[1,8] y, float[1,8] z)
      <float s = {0.01}, uint8 zero = {0}, int8 middle = {0}, float wide = {1}> {
      w = DequantizeLinear(k, s, middle)
      qu = QuantizeLinear(u, s, zero) du = DequantizeLinear(qu, s, zero) a = MatMul(du, w)
      qa = QuantizeLinear(a, wide, zero) y = DequantizeLinear(qa, wide, zero)
      qv = QuantizeLinear(v, s, zero) dv = DequantizeLinear(qv, s, zero) b = MatMul(dv, w)
      qb = QuantizeLinear(b, wide, zero) z = DequantizeLinear(qb, wide, zero) }"""
    weights = np.full((64, 8), 127, np.int8)
    path = make_model(text, tmp_path / "m.onnx", constants={"k": weights}).path
    monkeypatch.setattr("edgekit.machine.read_cpu_flags", str)
    session = CpuSession(path if in_file else path.read_bytes(), SessionSettings())
    found = session.run({name: np.full((1, 64), 2.55, np.float32) for name in "uv"})
    assert {float(value) for each in found.values() for value in each.ravel()} == {207.0}


def test_scaled_weights_are_written_beside_those_set_aside_once_and_are_the_same(tmp_path: Path) -> None:
    text = """g (float[1,4,256] x) => (float[1,4,256] z) {
      n = LayerNormalization<axis=-1>(x, gain, shift) a = MatMul(n, w1) r = Relu(a) y = MatMul(r, w2) z = Add(y, x) }"""
    model = make_model(text, tmp_path / "m.onnx", {"gain": (256,), "shift": (256,), "w1": (256, 256), "w2": (256, 256)})
    inline, work = read_float_graph(model), tmp_path / "work"
    work.mkdir()
    aside = store_float_graph(read_float_graph(model), work)
    factors = {"n": tuple((2.0 ** np.random.default_rng(0).integers(-6, 6, 256)).tolist()), "r": (0.5, 4.0) * 128}
    plain, written, again = (equalize_graph(each, factors, work) for each in (inline, aside, aside))
    files = sorted(path.name for path in work.glob("scaled-*"))
    assert sorted(Path(name).suffix for name in files) == [".data", ".onnx"]
    names = [tensor.name for tensor in plain.proto.initializer]
    assert [tensor.name for tensor in written.proto.initializer] == names
    for name in names:
        assert np.array_equal(plain.weight(name), written.weight(name))
        assert np.array_equal(plain.weight(name), again.weight(name))
    places = {place.file for tensor in written.proto.initializer if (place := read_place(tensor))}
    assert len(places) == 1
    assert places <= set(files)
    assert not any(read_place(tensor) for tensor in plain.proto.initializer)


def test_an_activation_is_measured_before_the_next_but_one_is_computed(net: Model) -> None:
    graph = read_float_graph(net)
    nodes = augment_graph(graph, picked=8, patch_samples=4).proto.graph.node
    own = {node.name for node in graph.proto.node}
    made = dict.fromkeys((*graph.inputs, *(tensor.name for tensor in graph.proto.initializer)), -1)
    made |= {name: at for at, node in enumerate(nodes) for name in node.output}
    places = [at for at, node in enumerate(nodes) if node.name in own]
    for at, node in enumerate(nodes):
        assert all(made.get(name, -1) < at for name in node.input)
        read = [made[name] for name in node.input if made.get(name, -1) in places]
        if node.name not in own and read:
            assert not [first for first, _ in pairwise(places) if max(read) < first < at]


def test_a_large_model_in_a_session_gives_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = {"u": np.ones((4, 256), np.float32)}
    plain = CpuSession(model.path, SessionSettings()).run(sample)["y"]
    monkeypatch.setattr("edgekit.model.model.LARGE_BYTES", 0)
    assert np.array_equal(CpuSession(model.path, SessionSettings()).run(sample)["y"], plain)
    with model.path.open("ab") as file:
        file.truncate(model.path.stat().st_size - 1)
    with pytest.raises(RuntimeRefusal, match=r"m\.onnx"):
        CpuSession(model.path, SessionSettings())


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_weights_are_rounded_part_by_part_as_at_once(axis: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).normal(size=(37, 5)).astype(np.float32)
    scale = np.float32(0.01) if axis is None else np.linspace(0.01, 0.02, weight.shape[axis], dtype=np.float32)
    zero = np.asarray(np.zeros(np.shape(scale)), np.int8)
    whole = door._round_weight(weight, np.asarray(scale), zero, axis or 0)
    monkeypatch.setattr(door, "_ROUNDED_AT_ONCE", 10)
    assert np.array_equal(door._round_weight(weight, np.asarray(scale), zero, axis or 0), whole)
    shape = () if axis is None else [-1 if each == axis else 1 for each in range(2)]
    assert np.array_equal(whole, np.clip(np.rint(weight / np.asarray(scale).reshape(shape)), -128, 127))
    assert door._round_weight(np.float32(2) * np.ones(()), np.asarray(np.float32(0.5)), np.asarray(np.int8(0)), 0) == 4


def test_what_was_rounded_is_found_under_its_key_alone_unless_it_is_damaged(tmp_path: Path) -> None:
    counts = count()

    def recall(key: str) -> float:
        found = present(recall_rounded(tmp_path, key, lambda: {"scale": np.full(100, float(next(counts)))}))
        assert found["scale"].shape == (100,)
        return float(found["scale"][0])

    assert [recall(key) for key in "aaba"] == [0, 0, 1, 0]
    path = tmp_path / "rounded" / "a.bin"
    path.write_bytes(path.read_bytes()[:150])
    assert [recall(key) for key in "aba"] == [2, 1, 2]
    assert recall_rounded(tmp_path, "c", lambda: None) is None
    assert not (tmp_path / "rounded" / "c.bin").exists()
