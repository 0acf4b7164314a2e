"""What exporters write of transformers becomes operators that providers take whole, and attention becomes one node."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import EXPORTED, STYLES, draw_inputs, export_genai
from fixture_types import present
from prepare_models import CASES, assert_same, make_inputs, make_model, op_names, rewrite, run_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.check.recommend import explain_no_gain
from edgekit.errors import ModelError, UsageError
from edgekit.graph.graph import read_graph
from edgekit.graph.match import count_huge_terms
from edgekit.jobs.check import fix_for_target
from edgekit.jobs.convert import ConvertOptions, convert_for
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare.fix import FuseOptions, fix_model, fuse_transformer, ready_model
from edgekit.recipe import Recipe
from edgekit.target import Precision, load_target

Loader = Callable[[str, str], tuple[Model, Model]]
WHOLE = {
    "bert": {"LayerNormalization": 3, "Gelu": 1},
    "bert_tanh": {"LayerNormalization": 3, "FastGelu": 1},
    "llama": {"SimplifiedLayerNormalization": 3},
}
OF_ONNX_23 = {"FastGelu": "Gelu", "SimplifiedLayerNormalization": "RMSNormalization"}
PARTS = {"Erf", "Sqrt", "ReduceMean", "Pow", "Reciprocal"}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", EXPORTED)
def test_norms_and_gelu_become_whole_for_qnn(exported: Loader, tmp_path: Path, name: str, style: str) -> None:
    model, ready = exported(name, style)
    counts = Counter(node.op_type for node in onnx.load(str(ready.path)).graph.node)
    names = OF_ONNX_23 if style == "dynamo23" else {}
    wanted = {names.get(op, op): count for op, count in WHOLE[name].items()}
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


def test_a_cpu_computes_recurrent_layers_in_float(tmp_path: Path) -> None:
    text = """g (float[4,1,8] x, float[1,64,8] w, float[1,64,16] r, float[16,{0}] v) => (float[4,1,1,{0}] y)
        {{ h = LSTM<hidden_size=16>(x, w, r) y = MatMul(h, v) }}"""
    small, large = (make_model(text.format(size), tmp_path / f"{size}.onnx") for size in (4, 400))
    reason = "cpu takes at most 4% of this model's work in int8, and 100% in float"
    assert (explain(small, "cpu", "int8"), explain(large, "cpu", "int8")) == (reason, None)


def test_what_comes_before_a_tree_is_not_quantized_unless_it_multiplies_matrices(tmp_path: Path) -> None:
    text = """g (float[1,3] x, float[3,3] w) => (float[1,3] y) {{
        a = Add(x, x) b = ai.onnx.ml.Normalizer<norm = "MAX">(a) y = {last} }}"""
    model = make_model(text.format(last="Mul(a, b)"), tmp_path / "m.onnx")
    reason = "the work of this model is in Normalizer, which cpu does not quantize"
    assert (explain(model, "cpu", "int8"), explain(model, "cpu", "fp32")) == (reason, None)
    last = text.format(last="MatMul(b, w)")
    # Also where no shape is known of what it multiplies.
    for body in (last, last.replace("float[1,3] y", "y")):
        assert explain(make_model(body, tmp_path / "n.onnx"), "cpu", "int8") is None


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


ATTENTION, ROTARY = (CASES[id_].spellings[0] for id_ in ("join-attention", "join-rotary"))
PLAIN, GUARDED = ATTENTION.list_found()[0], ATTENTION.list_found()[-1]


def test_attention_stays_of_doubles_of_keys_that_texts_share_and_of_chances_that_are_read_twice(tmp_path: Path) -> None:
    twice = PLAIN.replace("=> (float[1,5,8] y)", "=> (float[1,5,8] y, float[1,2,5,3] x2)")
    twice = twice.replace("o = MatMul", "x2 = Identity(p) o = MatMul")
    texts = PLAIN.replace("[1,5,8]", "[2,5,8]").replace("{1,5,8}", "{2,5,8}").replace("Reshape(q, s)", "Reshape(q, e)")
    texts = texts.replace("int64[4] s =", "int64[4] e = {2,5,2,4}, int64[4] s =")
    for other in (PLAIN.replace("float", "double"), texts, twice):
        assert rewrite(tmp_path, other, "join-attention").fixes == ()


def test_rows_that_a_mask_hides_whole_stay_zero(tmp_path: Path) -> None:
    text = GUARDED.replace("float[1,5,8] q,", "float[1,5,8] q, float[1,1,5,3] f,")
    model = make_model(text.replace("Add(s1, m)", "Add(s1, f)"), tmp_path / "m.onnx")
    fixed = fix_model(model, tmp_path / "out.onnx", ["join-attention"])
    inputs = make_inputs(model, 1)
    inputs["f"][0, 0, 2] = -np.inf
    expected, got = (run_model(path, inputs)["y"] for path in (model.path, fixed.model.path))
    assert not got[0, 2].any()
    assert np.allclose(expected, got, atol=1e-5)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_cpu_gets_the_attention_of_exporters_whole_where_it_stays_float(
    exported: Callable[[str, str], tuple[Model, Model]], tmp_path: Path, name: str, style: str
) -> None:
    (model, ready), target = exported(name, style), load_target("cpu")
    fixed = fix_for_target(ready, tmp_path / "float.onnx", target, stays_float=True)
    assert op_names(fixed.model.path).count("MultiHeadAttention") == 1
    assert "Softmax" not in op_names(fixed.model.path)
    assert op_names(fixed.model.path).count("RotaryEmbedding") == (2 if name == "llama" else 0)
    # BERT's mask could be fed as minus infinity: its guard goes behind the attention.
    assert ("IsNaN" in op_names(fixed.model.path)) == (name == "bert" and style.startswith("dynamo"))
    assert "Softmax" in op_names(fix_for_target(ready, tmp_path / "int8.onnx", target).model.path)
    inputs = draw_inputs(model)
    expected, got = (next(iter(run_model(path, inputs).values())) for path in (model.path, fixed.model.path))
    assert np.allclose(expected, got, rtol=0, atol=1e-5 * float(np.abs(expected).max()))


# -1000 stands for minus infinity, for which the text of a graph has no word.
GUARD = """g (float[2,3] x, bool[2,3] k, float[2,3] f) => (float[2,3] y) <float z = {0}, float l = {-3.4e38},
    float u = {100}, float[3,3] x1 = {1,0,0,0,1,0,0,0,1}, float none = {-1000},
    float[2,3] some = {0,-1000,0,0,0,-1000}, float[2,3] whole = {0,-1000,0,-1000,-1000,-1000}>
    { BODY c = Softmax<axis=-1>(s) n = IsNaN(c) y = Where(n, z, c) }"""
IDLE = {
    "no mask": "s = MatMul(x, x1)",
    "the lowest number by a mask": "m = Where(k, z, l) a = MatMul(x, x1) s = Add(a, m)",
    "a product of a flag and a small number": "b = Cast<to=1>(k) m = Mul(b, u) a = MatMul(x, x1) s = Add(m, a)",
    "some places": "a = MatMul(x, x1) s = Add(a, some)",
}
NEEDED = {
    "what is fed": "a = MatMul(x, x1) s = Add(a, f)",
    "the lowest number twice": "m = Where(k, z, l) a = Add(m, m) b = MatMul(x, x1) s = Add(a, b)",
    "minus infinity by a mask": "m = Where(k, z, none) a = MatMul(x, x1) s = Add(a, m)",
    "a product of a flag and the lowest": "b = Cast<to=1>(k) m = Mul(b, l) a = MatMul(x, x1) s = Add(a, m)",
    "a whole row": "a = MatMul(x, x1) s = Add(a, whole)",
    "a logarithm": "a = MatMul(x, x1) s = Log(a)",
}


def write_infinity(proto: onnx.ModelProto) -> None:
    for tensor in proto.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        value = np.where(value == -1000, -np.inf, value).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))


@pytest.mark.parametrize(("cases", "goes"), [(IDLE, True), (NEEDED, False)])
def test_a_guard_goes_where_no_row_can_be_hidden_whole(tmp_path: Path, cases: dict[str, str], goes: bool) -> None:
    for case, body in cases.items():
        model = make_model(GUARD.replace("BODY", body), tmp_path / "m.onnx", edit=write_infinity)
        fixed = fix_model(model, tmp_path / "out.onnx", ["idle-nan-guard"])
        assert ("IsNaN" not in op_names(fixed.model.path)) == goes, case
        inputs = make_inputs(model, 2)
        expected, got = (run_model(path, inputs)["y"] for path in (model.path, fixed.model.path))
        assert np.array_equal(expected, got), case


def test_two_lowest_numbers_of_float16_are_infinite_together(tmp_path: Path) -> None:
    text = """g (float16[2] x, bool[2] m) => (float16[2] y) <float16[1] c = {64511}, float16[1] z = {0}> {
      a = Where(m, c, z) b = Add(a, a) y = Add(b, x) }"""
    graph = read_graph(make_model(text, tmp_path / "m.onnx"))
    assert [count_huge_terms(graph, name) for name in "acb"] == [1, 1, 2]


def test_a_guard_with_another_value_or_condition_stays(tmp_path: Path) -> None:
    where = "Where(n, z, c)"
    for old, new in ((where, "Where(n, u, c)"), (where, "Where(n, z, x)"), ("IsNaN(c)", "IsInf(c)")):
        text = GUARD.replace("BODY", "s = MatMul(x, x1)").replace(old, new)
        assert rewrite(tmp_path, text, "idle-nan-guard").fixes == ()


@pytest.mark.parametrize(
    ("zeros", "goes"),
    [
        ("float[1,3] o = {0,0,0}", True),
        ("float o = {0}", True),
        ("float[1,3] o = {0,0,1}", False),
        ("float[3] o = {0,0,0}", False),
        ("float[1,2,3] o = {0,0,0,0,0,0}", False),
        ("float[2,1] o = {0,0}", True),
    ],
)
def test_an_add_of_zeros_goes_unless_it_is_a_bias_or_widens(tmp_path: Path, zeros: str, goes: bool) -> None:
    shape = "float[1,2,3]" if "[1,2,3]" in zeros else "float[2,3]"
    fixed = rewrite(tmp_path, f"g (float[2,3] x) => ({shape} y) <{zeros}> {{ a = Neg(x) y = Add(o, a) }}", "idle-add")
    assert ("Add" not in op_names(fixed.model.path)) == goes
    assert_same(tmp_path, fixed, 0)


def test_tables_of_rotary_embeddings_are_cut_once(tmp_path: Path) -> None:
    # The table that is computed, for another rotation too.
    body = f"{ROTARY.found[-1]} x3 = Slice(y, a, h, d) x4 = Slice(y, h, e, d) n2 = Neg(x4) r2 = Concat<axis=-1>(n2, x3)"
    body += " u2 = Mul(y, c1) v2 = Mul(r2, s1) y2 = Add(u2, v2)"
    text = ROTARY.graph.replace("BODY", body).replace("=> (float[1,2,3,4] y)", "=> (float[1,2,3,4] y2)")
    fixed = rewrite(tmp_path, text, "join-rotary")
    assert Counter(op_names(fixed.model.path))["RotaryEmbedding"] == Counter(op_names(fixed.model.path))["Slice"] == 2
