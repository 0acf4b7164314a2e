"""Attention and rotary embeddings become one node each for the CPU, and guards and masks that do nothing go."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import STYLES, draw_inputs
from prepare_models import CASES, assert_same, make_inputs, make_model, op_names, rewrite, run_model

from edgekit.graph.graph import read_graph
from edgekit.graph.match import count_huge_terms
from edgekit.jobs.check import fix_for_target
from edgekit.model.model import Model
from edgekit.prepare.fix import fix_model
from edgekit.target import load_target

ATTENTION, ROTARY = (CASES[id_].spellings[0] for id_ in ("join-attention", "join-rotary"))
PLAIN, GUARDED = ATTENTION.list_found()[0], ATTENTION.list_found()[-1]


def test_attention_whose_chances_are_read_twice_stays(tmp_path: Path) -> None:
    text = PLAIN.replace("=> (float[1,5,8] y)", "=> (float[1,5,8] y, float[1,2,5,3] x2)")
    text = text.replace("o = MatMul", "x2 = Identity(p) o = MatMul")
    assert rewrite(tmp_path, text, "join-attention").fixes == ()


def test_attention_of_doubles_and_keys_that_several_texts_share_stay_apart(tmp_path: Path) -> None:
    texts = PLAIN.replace("[1,5,8]", "[2,5,8]").replace("{1,5,8}", "{2,5,8}").replace("Reshape(q, s)", "Reshape(q, e)")
    texts = texts.replace("int64[4] s =", "int64[4] e = {2,5,2,4}, int64[4] s =")
    for other in (PLAIN.replace("float", "double"), texts):
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


def make_guarded(body: str, path: Path) -> Model:
    model = make_model(GUARD.replace("BODY", body), path)
    proto = onnx.load(str(path))
    for tensor in proto.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(np.where(value == -1000, -np.inf, value).astype(np.float32), tensor.name)
        )
    onnx.save(proto, str(path))
    return model


@pytest.mark.parametrize(("cases", "goes"), [(IDLE, True), (NEEDED, False)])
def test_a_guard_goes_where_no_row_can_be_hidden_whole(tmp_path: Path, cases: dict[str, str], goes: bool) -> None:
    for case, body in cases.items():
        model = make_guarded(body, tmp_path / "m.onnx")
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
    for old, new in (
        ("Where(n, z, c)", "Where(n, u, c)"),
        ("Where(n, z, c)", "Where(n, z, x)"),
        ("IsNaN(c)", "IsInf(c)"),
    ):
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
