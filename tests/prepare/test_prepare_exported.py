"""What exporters write of transformers is brought into the operators that providers take whole."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import EXPORTED, STYLES, draw_inputs, export_genai
from fixture_types import present
from prepare_models import make_model, run_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.check.recommend import explain_no_gain
from edgekit.errors import ModelError, UsageError
from edgekit.graph.graph import read_graph
from edgekit.jobs.check import fix_for_target
from edgekit.jobs.convert import ConvertOptions, convert_for
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare.fix import FuseOptions, fuse_transformer, ready_model
from edgekit.recipe import Recipe
from edgekit.target import Precision, load_target

Loader = Callable[[str, str], tuple[Model, Model]]
WHOLE = {
    "bert": {"LayerNormalization": 3, "Gelu": 1},
    "bert_tanh": {"LayerNormalization": 3, "FastGelu": 1},
    "llama": {"SimplifiedLayerNormalization": 3},
}
WHOLE_23 = {
    "bert": {"LayerNormalization": 3, "Gelu": 1},
    "bert_tanh": {"LayerNormalization": 3, "Gelu": 1},
    "llama": {"RMSNormalization": 3},
}
PARTS = {"Erf", "Sqrt", "ReduceMean", "Pow", "Reciprocal"}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", EXPORTED)
def test_norms_and_gelu_become_whole_for_qnn(exported: Loader, tmp_path: Path, name: str, style: str) -> None:
    model, ready = exported(name, style)
    counts = Counter(node.op_type for node in onnx.load(str(ready.path)).graph.node)
    wanted = (WHOLE_23 if style == "dynamo23" else WHOLE)[name]
    assert {op: counts[op] for op in wanted} == wanted
    assert PARTS.isdisjoint(counts)
    inputs = draw_inputs(model)
    expected, got = (next(iter(run_model(path, inputs).values())) for path in (model.path, ready.path))
    assert np.allclose(expected, got, rtol=0, atol=2e-6 * float(np.abs(expected).max()))
    fixed = fix_for_target(ready, tmp_path / "fixed.onnx", load_target("qnn"))
    report = check_model(fixed.model, load_target("qnn"))
    assert [node.name for node in report.node_list if not node.taken] == []


@pytest.mark.parametrize("style", ["torchscript", pytest.param("dynamo23", marks=pytest.mark.long)])
def test_coreml_and_nnapi_take_a_decoder_in_one_part(exported: Loader, tmp_path: Path, style: str) -> None:
    _, ready = exported("llama", style)
    for name, left in (("coreml", set[str]()), ("nnapi", {"Gather"})):
        target = load_target(name)
        report = check_model(fix_for_target(ready, tmp_path / f"{name}.onnx", target).model, target)
        # NNAPI wants constant indices: embeddings stay with the CPU.
        assert {node.op for node in report.node_list if not node.taken} == left
        assert report.partitions == 1


def explain(model: Model, name: str, precision: Precision) -> str | None:
    target = load_target(name)
    return explain_no_gain(read_graph(model), target, precision, partial(check_model, model, target))


def test_xnnpack_gains_from_integers_in_a_conv_net_and_in_no_transformer(exported: Loader, tmp_path: Path) -> None:
    _, model = exported("bert", "dynamo")
    reason = present(explain(model, "xnnpack", "int8"))
    assert reason.startswith("xnnpack takes at most 0% of this model's work in int8, and 9")
    assert explain(model, "xnnpack", "fp32") is None
    assert explain(model, "qnn", "int8") is None
    text = "g (float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y) { y = Conv(x, w) }"
    assert explain(make_model(text, tmp_path / "m.onnx"), "xnnpack", "int8") is None


def test_what_comes_before_a_tree_is_not_quantized_unless_it_multiplies_matrices(tmp_path: Path) -> None:
    text = """g (float[1,3] x, float[3,3] w) => (float[1,3] y) {{
        a = Add(x, x) b = ai.onnx.ml.Normalizer<norm = "MAX">(a) y = {last} }}"""
    model = make_model(text.format(last="Mul(a, b)"), tmp_path / "m.onnx")
    reason = "the work of this model is in Normalizer, which cpu does not quantize"
    assert (explain(model, "cpu", "int8"), explain(model, "cpu", "fp32")) == (reason, None)
    assert explain(make_model(text.format(last="MatMul(b, w)"), tmp_path / "n.onnx"), "cpu", "int8") is None


def test_a_generated_int4_model_is_judged_as_qnn_places_it(tmp_path: Path) -> None:
    # 26 of 32 nodes in the simulator (onnxruntime-qnn 2.7.0, SoC 69), the same six left.
    ready = ready_model(export_genai(tmp_path / "m.onnx"), tmp_path, {}).model
    report = check_model(ready, load_target("qnn"))
    left = Counter(node.op for node in report.node_list if not node.taken)
    assert left == {"GroupQueryAttention": 2, "SkipSimplifiedLayerNormalization": 4}
    assert len(report.node_list) == 32
    graph = read_graph(ready)
    unknown = {name for node in graph.nodes for name in node.output if name and graph.static_shape(name) is None}
    assert unknown == {f"present.{layer}.{part}" for layer in range(2) for part in ("key", "value")}


def make_block(path: Path) -> Model:
    """Writes half a transformer layer as exporters do: GELU by Erf, a residual, layer normalisation."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "w1": rng.standard_normal((16, 32)).astype(np.float32) / 4, "b1": rng.standard_normal(32).astype(np.float32),
        "w2": rng.standard_normal((32, 16)).astype(np.float32) / 6, "b2": rng.standard_normal(16).astype(np.float32),
        "root2": np.array(2**0.5, np.float32), "one": np.array(1, np.float32), "half": np.array(0.5, np.float32),
        "gain": rng.uniform(0.5, 2, 16).astype(np.float32), "shift": rng.standard_normal(16).astype(np.float32),
    }  # fmt: skip
    text = """g (float[batch,4,16] x) => (float[batch,4,16] y) {
      [up] m1 = MatMul(x, w1) [up_bias] a1 = Add(m1, b1) [div] d = Div(a1, root2) [erf] e = Erf(d)
      [plus] p = Add(e, one) [times] t = Mul(a1, p) [gelu] g = Mul(t, half) [down] m2 = MatMul(g, w2)
      [down_bias] a2 = Add(m2, b2) [residual] r = Add(a2, x) [norm] y = LayerNormalization<axis=-1>(r, gain, shift) }"""
    return make_model(text, path, weights=weights)


def keep(model: Model, _: Path) -> Model:
    return model


def test_patterns_of_a_transformer_are_fused_and_counted(tmp_path: Path) -> None:
    model = make_block(tmp_path / "m.onnx")
    fused = fuse_transformer(model, FuseOptions(for_cpu=False), tmp_path / "f.onnx", keep)
    assert fused.fused == {"BiasGelu": 1, "SkipLayerNormalization": 1}
    assert (fused.nodes_before, fused.nodes_after) == (11, 4)
    sample = {"x": np.random.default_rng(1).standard_normal((2, 4, 16)).astype(np.float32)}
    plain = SessionSettings(level=Level.DISABLED)
    wanted, got = (CpuSession(item.path, plain).run(sample)["y"] for item in (model, fused.model))
    assert np.allclose(wanted, got, atol=1e-5)
    again = fuse_transformer(model, FuseOptions(for_cpu=False), tmp_path / "g.onnx", keep)
    assert again.model.sha256 == fused.model.sha256


def test_convert_fuses_patterns_and_compares_the_results(tmp_path: Path) -> None:
    make_block(tmp_path / "m.onnx")
    options = ConvertOptions(fuse=FuseOptions())
    report = convert_for(tmp_path / "m.onnx", tmp_path / "out", Recipe(targets=(), dims={"batch": 1}), options)
    # On the CPU the fused normalisation takes longer than its parts.
    assert present(report.fusion).fused == {"Gelu": 1}
    assert present(report.fusion).equality.passed
    assert report.census["full"]["Gelu"] == 1
    assert all(found.passed for found in report.equality.values())


def test_nothing_to_fuse_and_an_unknown_family_are_refused(tmp_path: Path) -> None:
    model = make_block(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=r"no --model-type 'brt'.*bert"):
        fuse_transformer(model, FuseOptions(model_type="brt"), tmp_path / "f.onnx", keep)
    proto = onnx.load(str(model.path))
    del proto.graph.node[2:]
    proto.graph.output[0].name = "a1"
    onnx.save(proto, str(tmp_path / "n.onnx"))
    with pytest.raises(ModelError, match="no pattern of 'bert' was found"):
        fuse_transformer(load_model(tmp_path / "n.onnx"), FuseOptions(), tmp_path / "f.onnx", keep)
