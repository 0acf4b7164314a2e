"""Weights that are never in memory, or left out of a sketch: what is made is what a whole model would give."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from prepare_models import ZOO, make_model, op_names, run_model

from edgekit.check.check import check_model
from edgekit.model.external import point_into
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare import clean
from edgekit.prepare.clean import prepare_model, sketch_model
from edgekit.prepare.external import write_inline
from edgekit.prepare.fix import fix_model
from edgekit.target import find_group, load_target


def make_layers(path: Path, *, external: bool = False) -> Model:
    """Writes hidden layers whose weights are larger than what skimming leaves inside, with a GELU in parts."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "up": rng.standard_normal((64, 1024)).astype(np.float32) / 8,
        "down": rng.standard_normal((1024, 64)).astype(np.float32) / 32,
        "bias": rng.standard_normal(1024).astype(np.float32),
        "root": np.array(2**0.5, np.float32), "one": np.array(1, np.float32), "half": np.array(0.5, np.float32),
    }  # fmt: skip
    text = """g (float[n,64] x) => (float[n,64] y) { a = MatMul(x, up) b = Add(a, bias) c = Div(b, root) d = Erf(c)
      e = Add(d, one) f = Mul(b, e) g = Mul(f, half) y = MatMul(g, down) }"""
    return make_model(text, path, weights=weights, external=external)


def test_weights_are_written_inside_byte_for_byte(tmp_path: Path) -> None:
    model = make_layers(tmp_path / "m.onnx")
    whole = onnx.load(str(model.path)).SerializeToString(deterministic=True)
    pointing = point_into(model.path)
    assert len(pointing.SerializeToString()) < len(whole) / 10
    write_inline(pointing, tmp_path, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == whole


def test_a_weight_that_is_cut_off_is_not_written(tmp_path: Path) -> None:
    model = make_layers(tmp_path / "m.onnx", external=True)
    proto = onnx.load(str(model.path), load_external_data=False)
    data = tmp_path / "m.onnx.data"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(OSError, match="ends within a weight"):
        write_inline(proto, tmp_path, tmp_path / "again.onnx")


@pytest.mark.parametrize("external", [False, True])
def test_a_model_worked_on_outside_of_memory_becomes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    model = make_layers(tmp_path / "m.onnx", external=external)
    made: list[Path] = []
    for at_least in (1 << 40, 0):
        monkeypatch.setattr(clean, "LARGE_BYTES", at_least)
        folder = tmp_path / str(at_least)
        prepared = prepare_model(model, folder / "p.onnx", {"n": 2})
        fixed = fix_model(prepared, folder / "f.onnx")
        assert [fix.id for fix in fixed.fixes] == ["join-gelu"]
        assert fix_model(prepared, prepared.path).model.path.read_bytes() == fixed.model.path.read_bytes()
        sketched = sketch_model(model, folder / "s.onnx", {"n": 2})
        assert sorted(path.name for path in folder.iterdir()) == ["f.onnx", "p.onnx", "s.onnx"]
        assert sketched.node_count == prepared.node_count
        made.append(fixed.model.path)
    inputs = {"x": np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)}
    first, second = (run_model(path, inputs)["y"] for path in made)
    assert np.array_equal(first, second)
    one, other = (onnx.load(str(path)).graph for path in made)
    assert list(one.node) == list(other.node)
    stored = [sorted(graph.initializer, key=lambda tensor: tensor.name) for graph in (one, other)]
    assert stored[0] == stored[1]


MATRIX = """g (float[2,256] x) => (float[2,256] y) <int64[2] s = {256, 256}>
    { [made] w = ConstantOfShape<value = float[1] {0.5}>(s) [mm] a = MatMul(x, w) [act] y = Relu(a) }"""
TWINS = """g (float[2,256] x) => (float[2,256] y) <int64[2] s = {256, 256}, int64[2] t = {256, 256}>
    { v = ConstantOfShape(s) w = ConstantOfShape(t) a = MatMul(x, v) b = MatMul(x, w) c = Neg(a) y = Add(c, b) }"""


def _with_weights(path: Path, *, normalised: bool) -> Model:
    """Writes a convolution with 150 kB of weights, followed by a BatchNormalization or a Relu."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(64, 64, 3, 3)), **{name: np.ones(64) for name in "smbv"}}
    follower = "BatchNormalization(c, s, b, m, v)" if normalised else "Relu(c)"
    shape = "float[1,64,8,8]"
    text = f"g ({shape} x) => ({shape} y) {{ [conv] c = Conv<pads=[1,1,1,1]>(x, w) [next] y = {follower} }}"
    return make_model(text, path, weights={name: array.astype(np.float32) for name, array in weights.items()})


def _judge_both(model: Model, folder: Path) -> tuple[Model, Model]:
    whole = prepare_model(model, folder / "whole/m.onnx", {})
    sketch = sketch_model(model, folder / "sketch/m.onnx", {})
    for name in find_group("all"):
        target = load_target(name)
        assert check_model(whole, target).node_list == check_model(sketch, target).node_list
    return whole, sketch


@pytest.mark.parametrize(("normalised", "share"), [(False, 0.1), (True, 1.1)])
def test_a_weight_is_left_out_unless_it_is_folded(tmp_path: Path, *, normalised: bool, share: float) -> None:
    whole, sketch = _judge_both(_with_weights(tmp_path / "m.onnx", normalised=normalised), tmp_path)
    assert op_names(sketch.path) == op_names(whole.path) == (["Conv"] if normalised else ["Conv", "Relu"])
    assert sketch.size_bytes < share * whole.size_bytes
    assert [64, 64, 3, 3] in [list(tensor.dims) for tensor in onnx.load(str(sketch.path)).graph.initializer]


def test_a_weight_that_a_node_would_make_is_never_made(tmp_path: Path) -> None:
    whole, sketch = _judge_both(make_model(MATRIX, tmp_path / "m.onnx"), tmp_path)
    assert whole.size_bytes > 256 * 256 * 4 > 100 * sketch.size_bytes
    assert sketch.inputs == whole.inputs


def test_equal_made_weights_are_one(tmp_path: Path) -> None:
    whole, sketch = _judge_both(make_model(TWINS, tmp_path / "m.onnx"), tmp_path)
    assert op_names(sketch.path) == op_names(whole.path) == ["MatMul", "Neg", "Add"]


def test_a_weight_beside_the_file_is_not_read(tmp_path: Path) -> None:
    model = _with_weights(tmp_path / "m.onnx", normalised=False)
    proto = onnx.load(str(model.path))
    onnx.save(proto, str(model.path), save_as_external_data=True, location="w.bin", size_threshold=1024)
    external = load_model(model.path)
    sketch = sketch_model(external, tmp_path / "sketch/m.onnx", {})
    assert sketch.external_files == ()
    assert sketch.size_bytes < 2000


@pytest.mark.skipif(not ZOO.exists(), reason="needs ../shared/zoo")
@pytest.mark.parametrize("name", ["squeezenet1.1_fp32", "magika_v3_3", "vww_96_float_ext", "superres_core_224"])
def test_a_sketch_of_a_real_model_is_judged_as_the_whole(tmp_path: Path, name: str) -> None:
    model = load_model(ZOO / f"models/{name}.onnx")
    dims = {str(dim): 1 for spec in model.inputs for dim in spec.shape or () if isinstance(dim, str)}
    dims |= {f"{spec.name}:{at}": 1 for spec in model.inputs for at, dim in enumerate(spec.shape or ()) if dim is None}
    whole, sketch = (make(model, tmp_path / make.__name__, dims) for make in (prepare_model, sketch_model))
    assert check_model(whole, load_target("qnn")).node_list == check_model(sketch, load_target("qnn")).node_list
    assert sketch.size_bytes < whole.size_bytes
