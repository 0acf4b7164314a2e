"""Weights that are never in memory, or left out of a sketch: what is made is what a whole model would give."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from prepare_models import ZOO, make_model, op_names, run_model

from edgekit.check.check import check_model
from edgekit.errors import RuntimeRefusal
from edgekit.model import model as models
from edgekit.model.external import point_into
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
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
def test_a_model_outside_memory_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool) -> None:
    model = make_layers(tmp_path / "m.onnx", external=external)
    made: list[Path] = []
    for at_least in (1 << 40, 0):
        monkeypatch.setattr(models, "LARGE_BYTES", at_least)
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
    assert np.allclose(first, run_model(model.path, inputs)["y"], atol=1e-4)
    one, other = (onnx.load(str(path)).graph for path in made)
    assert list(one.node) == list(other.node)
    stored = [sorted(graph.initializer, key=lambda tensor: tensor.name) for graph in (one, other)]
    assert stored[0] == stored[1]


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


def test_a_weight_beside_the_file_is_not_read(tmp_path: Path) -> None:
    model = _with_weights(tmp_path / "m.onnx", normalised=False)
    proto = onnx.load(str(model.path))
    onnx.save(proto, str(model.path), save_as_external_data=True, location="w.bin", size_threshold=1024)
    sketch = sketch_model(load_model(model.path), tmp_path / "sketch/m.onnx", {})
    assert sketch.external_files == ()
    assert sketch.size_bytes < 2000


def _make_trees(path: Path, dtype: str = "float32", *, broken: bool = False) -> Model:
    """Writes two ensembles of 4,000 trees with two leaves each, of the same input and with other weights."""
    trees = range(4000)
    ids = [index for _ in trees for index in (0, 1, 2)]
    lists: dict[str, Any] = {
        "nodes_treeids": [tree for tree in trees for _ in range(3)], "nodes_nodeids": ids,
        "nodes_featureids": [0] * len(ids), "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * len(trees),
        "nodes_truenodeids": [1, 0, 0] * len(trees), "nodes_falsenodeids": [5 if broken else 2, 0, 0] * len(trees),
        "target_treeids": [tree for tree in trees for _ in range(2)], "target_nodeids": [1, 2] * len(trees),
        "target_ids": [0, 0] * len(trees), "n_targets": 1,
    }  # fmt: skip
    values, tensor = np.zeros(len(ids)), dtype == "float64"
    nodes: list[onnx.NodeProto] = []
    for output, weight in (("y", 1.0), ("z", 2.0)):
        own = {"nodes_values": values, "target_weights": np.full(2 * len(trees), weight)}
        for name, array in own.items():
            lists[f"{name}_as_tensor" if tensor else name] = numpy_helper.from_array(array) if tensor else list(array)
        nodes.append(helper.make_node("TreeEnsembleRegressor", ["x"], [output], output, domain="ai.onnx.ml", **lists))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [1, 2])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "yz"],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return load_model(path)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_leaf_of_each_ensemble_is_left(tmp_path: Path, dtype: str) -> None:
    whole, sketch = _judge_both(_make_trees(tmp_path / "m.onnx", dtype), tmp_path)
    assert sketch.size_bytes < 2000 < whole.size_bytes / 100
    values = [run_model(sketch.path, {"x": np.zeros((1, 2), dtype)})[name].item() for name in "yz"]
    assert values == [0, 1]


def test_trees_that_onnx_runtime_refuses_are_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeRefusal, match=r"m\.onnx"):
        sketch_model(_make_trees(tmp_path / "m.onnx", broken=True), tmp_path / "s.onnx", {})


def test_trees_of_the_newer_operator_stay(tmp_path: Path) -> None:
    """Its lists and tensors refer to each other, and `tree_roots` to them. Here one list is so long that it is cut."""
    places = np.arange(1, 2**16 - 1).reshape(2, -1, order="F")
    count, is_leaf = 2**15 - 1, places >= 2**15 - 1
    children = np.where(is_leaf, places - count, places)
    node = helper.make_node(
        "TreeEnsemble", ["x"], ["y"], "trees", domain="ai.onnx.ml", n_targets=1, tree_roots=[0],
        nodes_featureids=[0] * count, nodes_splits=numpy_helper.from_array(np.zeros(count, np.float32)),
        nodes_modes=numpy_helper.from_array(np.zeros(count, np.uint8)),
        nodes_truenodeids=children[0].tolist(), nodes_trueleafs=is_leaf[0].astype(int).tolist(),
        nodes_falsenodeids=children[1].tolist(), nodes_falseleafs=is_leaf[1].astype(int).tolist(),
        leaf_targetids=[0] * (count + 1),
        leaf_weights=numpy_helper.from_array(np.zeros(count + 1, np.float32)),
    )  # fmt: skip
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 5)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(tmp_path / "m.onnx"))
    whole, sketch = _judge_both(load_model(tmp_path / "m.onnx"), tmp_path)
    assert onnx.load(str(sketch.path)) == onnx.load(str(whole.path))


# GroupNormalization takes two passes of optimization.
@pytest.mark.parametrize("middle", ["n = Relu(x)", "n = GroupNormalization<num_groups = 2>(x, s, b)"])
@pytest.mark.parametrize("external", [False, True])
def test_needed_weights_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool, middle: str) -> None:
    monkeypatch.setattr(models, "LARGE_BYTES", 0)
    weights = {"table": np.ones((1000, 64), np.float32), "up": np.ones((64, 1024), np.float32)}
    text = f"""g (int64[4,2] i) => (float[4,2,1024] y) <float[2] s = {{1,1}}, float[2] b = {{0,0}}>
        {{ x = Gather(table, i) {middle} y = MatMul(n, up) }}"""
    model = make_model(text, tmp_path / "m.onnx", weights=weights, external=external, opset=21, ir_version=10)
    whole, sketch = _judge_both(model, tmp_path)
    assert weights["table"].nbytes < sketch.size_bytes < whole.size_bytes - weights["up"].nbytes


def test_what_a_conv_takes_in_is_folded_in_a_sketch_too(tmp_path: Path) -> None:
    """A bias behind the Squeeze of tf2onnx's Conv1D is brought to the Conv, and becomes a part of it."""
    text = """g (float[1,512,1,3] x) => (float[1,512,3] y) <int64[1] a = {2}>
        { c = Conv(x, w) d = Squeeze(c, a) e = Add(d, b) y = Relu(e) }"""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(512, 512, 1, 1)), "b": rng.normal(size=(1, 512, 1))}
    given = {name: value.astype(np.float32) for name, value in weights.items()}
    _, sketch = _judge_both(make_model(text, tmp_path / "m.onnx", weights=given), tmp_path)
    assert [node.op_type for node in onnx.load(str(sketch.path)).graph.node] == ["Conv", "Relu", "Squeeze"]


@pytest.mark.skipif(not ZOO.exists(), reason="needs ../shared/zoo")
@pytest.mark.parametrize("name", ["squeezenet1.1_fp32", "magika_v3_3", "vww_96_float_ext", "superres_core_224"])
def test_a_sketch_of_a_real_model_is_judged_as_the_whole(tmp_path: Path, name: str) -> None:
    model = load_model(ZOO / f"models/{name}.onnx")
    dims = {str(dim): 1 for spec in model.inputs for dim in spec.shape or () if isinstance(dim, str)}
    dims |= {f"{spec.name}:{at}": 1 for spec in model.inputs for at, dim in enumerate(spec.shape or ()) if dim is None}
    whole, sketch = (make(model, tmp_path / make.__name__, dims) for make in (prepare_model, sketch_model))
    assert check_model(whole, load_target("qnn")).node_list == check_model(sketch, load_target("qnn")).node_list
    assert sketch.size_bytes < whole.size_bytes
