"""What ONNX Runtime's optimizers and its GenAI builder fuse is written in operators of ONNX, with the same results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from exported_models import export_genai, export_optimized
from onnx import helper, numpy_helper
from prepare_models import op_names, run_model

from edgekit.check.check import check_model
from edgekit.jobs.check import fix_for_target
from edgekit.model.model import load_model
from edgekit.model.tensors import Array
from edgekit.prepare.fix import fix_model, ready_model
from edgekit.target import load_target

HEADS, KEYS, SIZE = 4, 2, 16
REWRITES = {"GroupQueryAttention": "split-grouped-attention", "RotaryEmbedding": "split-rotary"}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A node of ONNX Runtime: inputs by name, "" for none; those in `stored` are constants, `made` the outputs."""

    op: str
    given: dict[str, Array]
    names: Sequence[str]
    stored: dict[str, Array] = {}
    made: Sequence[str] = ("y",)
    attributes: dict[str, Any] = {}
    opset: int = 0
    """Of ONNX's own domain, if the node is in it."""


def rewrite(case: Case, folder: Path) -> tuple[list[dict[str, Array]], Sequence[str]]:
    """Returns the outputs of the node and of what was written for it, and the operators of that."""
    paths, ops = write_and_fix(case, folder)
    return [run_model(path, case.given) for path in paths], ops


def write_and_fix(case: Case, folder: Path) -> tuple[tuple[Path, Path], Sequence[str]]:
    """Returns the files of the node and of what was written for it, and the operators of that."""
    domain = "" if case.opset else "com.microsoft"
    node = helper.make_node(case.op, case.names, case.made, name="n", domain=domain, **case.attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in case.given.items()
    ]
    kind = helper.np_dtype_to_tensor_dtype(next(iter(case.given.values())).dtype)
    outputs = [helper.make_tensor_value_info(name, kind, None) for name in case.made if name]
    stored = [numpy_helper.from_array(value, name) for name, value in case.stored.items()]
    imports = [helper.make_opsetid("", case.opset or 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", inputs, outputs, stored)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), str(folder / "m.onnx"))
    id_ = REWRITES.get(case.op, "split-attention")
    fixed = fix_model(load_model(folder / "m.onnx"), folder / "fixed.onnx", [id_]).model.path
    return (folder / "m.onnx", fixed), op_names(fixed)


def draw(seed: int = 0, /, **shapes: Sequence[int]) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def assert_close(results: Sequence[dict[str, Array]], *names: str) -> None:
    for name in names or results[0]:
        expected, got = (result[name] for result in results)
        assert expected.shape == got.shape
        assert np.abs(expected - got).max() <= 1e-5 * np.abs(expected).max()


def grouped(
    tokens: int, past: int, total: int, length: int, *, window: int = -1, packed: bool = False, turned: int = 0,
    places: bool = False, bias: bool = False, keys: int = KEYS, batch: int = 1, **attributes: Any,
) -> Case:  # fmt: skip
    """Returns a GroupQueryAttention of so many tokens behind `past` rows, of which `length` tokens in all are text."""
    widths = [HEADS * SIZE, keys * SIZE, keys * SIZE]
    shapes = {"q": [sum(widths)]} if packed else dict(zip("qkv", ([width] for width in widths), strict=True))
    given = draw(**{name: (batch, tokens, *shape) for name, shape in shapes.items()})
    given |= draw(1, past_key=(batch, keys, past, SIZE), past_value=(batch, keys, past, SIZE))
    given["lengths"] = np.full(batch, length - 1, np.int32) - np.arange(batch, dtype=np.int32)
    stored = {"total": np.array(total, np.int32)}
    names = ["q", *(["", ""] if packed else ["k", "v"]), "past_key", "past_value", "lengths", "total"]
    if turned:
        stored |= draw(2, cos=(32, turned // 2), sin=(32, turned // 2))
        names += ["cos", "sin"]
    if places:
        given["places"] = 5 + np.arange(tokens)[None]
        names += ["places"]
    if bias:
        given |= draw(3, bias=(batch, 1, tokens, total))
        names += [""] * (10 - len(names)) + ["bias"]
    return Case(
        op="GroupQueryAttention", given=given, names=names, stored=stored, made=("y", "present_key", "present_value"),
        attributes={
            "num_heads": HEADS, "kv_num_heads": keys, "local_window_size": window, "do_rotary": int(bool(turned)),
        } | attributes,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(grouped(1, 4, 5, 5), id="token"),
        pytest.param(grouped(1, 4, 5, 3, turned=SIZE), id="cache that is not full"),
        pytest.param(grouped(1, 6, 5, 4), id="cache with room"),
        pytest.param(grouped(1, 4, 5, 4, turned=SIZE, batch=2), id="two texts"),
        pytest.param(grouped(1, 4, 5, 5, window=2), id="window"),
        pytest.param(grouped(1, 4, 5, 5, bias=True, keys=HEADS), id="bias, each head its key"),
        pytest.param(grouped(1, 4, 5, 4, turned=SIZE, places=True, scale=0.3), id="places are told"),
        pytest.param(grouped(2, 4, 6, 5, turned=SIZE), id="several tokens"),
        pytest.param(grouped(2, 4, 6, 6, window=2), id="several in a window"),
        pytest.param(grouped(3, 0, 3, 3, turned=SIZE, packed=True), id="prompt, packed"),
        pytest.param(grouped(3, 4, 3, 3), id="prompt into a cache"),
        pytest.param(grouped(3, 0, 3, 2, turned=SIZE, batch=2), id="prompts that are filled up"),
    ],
)
def test_grouped_attention_gives_the_same_as_onnx_runtime(tmp_path: Path, case: Case) -> None:
    results, ops = rewrite(case, tmp_path)
    assert "Softmax" in ops
    assert_close(results, "y")
    for name in ("present_key", "present_value"):
        for text, last in enumerate(case.given["lengths"]):
            # What lies behind the text is nobody's.
            expected, got = (result[name][text, :, : last + 1] for result in results)
            assert np.abs(expected - got).max() <= 1e-5


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(grouped(1, 4, 5, 5, smooth_softmax=1), id="another softmax"),
        pytest.param(grouped(1, 4, 5, 5, softcap=2.0), id="capped"),
        pytest.param(grouped(1, 4, 5, 5, turned=SIZE, rotary_interleaved=1), id="neighbours turned"),
    ],
)
def test_grouped_attention_that_is_more_than_that_stays(tmp_path: Path, case: Case) -> None:
    results, ops = rewrite(case, tmp_path)
    assert ops == ["GroupQueryAttention"]
    assert_close(results)


def packed(*, mask: Array | None = None, sizes: tuple[int, ...] = (), **attributes: Any) -> Case:
    """Returns an Attention of 2 texts of 5 tokens."""
    width = sum(sizes) or 3 * 32
    given, stored = draw(x=(2, 5, 24)), draw(1, weight=(24, width), shift=(width,))
    # Without a shift ONNX Runtime 1.31 crashes on the CPU.
    names = ["x", "weight", "shift"]
    if mask is not None:
        given["mask"] = mask
        names += ["mask"]
    attributes |= {"qkv_hidden_sizes": sizes} if sizes else {}
    return Case(op="Attention", given=given, stored=stored, names=names, attributes={"num_heads": HEADS} | attributes)


ROWS = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]], np.int32)


def multi(rows: int = 5, *, past: int = 0, mask: bool = False, bias: bool = True, in_heads: bool = False) -> Case:
    """Returns a MultiHeadAttention of 5 tokens that ask so many rows, behind a cache or not."""
    shape = (2, HEADS, rows, 8) if in_heads else (2, rows, 32)
    given, stored = draw(q=(2, 5, 32), k=shape, v=shape), draw(1, shift=(96,)) if bias else dict[str, Array]()
    names, made = ["q", "k", "v", "shift" if bias else ""], ["y"]
    names += ["mask"] if mask else [""]
    if mask:
        given["mask"] = ROWS
    if past:
        given |= draw(2, past_key=(2, HEADS, past, 8), past_value=(2, HEADS, past, 8))
        names, made = [*names, "", "past_key", "past_value"], ["y", "present_key", "present_value"]
    return Case(
        op="MultiHeadAttention", given=given, names=names, stored=stored, made=made, attributes={"num_heads": HEADS}
    )


def own(
    shape: Sequence[int] = (2, HEADS, 5, 8), rows: int = 5, *, keys: int = HEADS, width: int = 8, past: int = 0,
    mask: Array | None = None, stores: bool = False, opset: int = 23, **attributes: Any,
) -> Case:  # fmt: skip
    """Returns ONNX's Attention with queries of a shape, in heads or not, that ask so many new rows behind a cache."""
    is_flat = len(shape) == 3
    widths = (8 if is_flat else shape[3], width)
    rest = [(2, rows, keys * each) if is_flat else (2, keys, rows, each) for each in widths]
    given, stored = draw(q=shape, k=rest[0], v=rest[1]), dict[str, Array]()
    names, made = ["q", "k", "v", "" if mask is None else "mask"], ["y"]
    if mask is not None:
        (stored if stores else given)["mask"] = mask
    if past:
        given |= draw(2, past_key=(2, keys, past, 8), past_value=(2, keys, past, width))
        names, made = [*names, "past_key", "past_value"], ["y", "present_key", "present_value"]
    counts = {"q_num_heads": HEADS, "kv_num_heads": keys} if is_flat else {}
    attributes = counts | attributes
    return Case(op="Attention", given=given, stored=stored, names=names, made=made, attributes=attributes, opset=opset)


SEEN = np.random.default_rng(3).random((2, HEADS, 5, 7)) < 0.6
SEEN[..., 0] = True


def rotary(
    shape: Sequence[int] = (2, HEADS, 5, 8), turned: int = 8, *, places: bool = True, is_own: bool = True, **given: Any
) -> Case:
    """Returns a RotaryEmbedding of ONNX or of ONNX Runtime, with or without the places of the tokens."""
    tables = draw(1, cos=(9, turned // 2), sin=(9, turned // 2))
    values = draw(x=shape)
    if places:
        values["places"] = np.array([[3, 1, 4, 1, 5], [0, 2, 4, 6, 8]])
    else:
        tables = draw(1, cos=(2, 5, turned // 2), sin=(2, 5, turned // 2))
    names = ["x", "cos", "sin", "places"][: 3 + places] if is_own else ["x", "places", "cos", "sin"]
    given = ({} if turned == 8 else {"rotary_embedding_dim": turned}) | given
    return Case(
        op="RotaryEmbedding", given=values, stored=tables, names=names, opset=23 if is_own else 0, attributes=given
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(packed(), id="plain"),
        pytest.param(packed(mask=ROWS, mask_filter_value=-3.4e38), id="mask of rows"),
        pytest.param(packed(mask=np.array([3, 5], np.int32)), id="lengths"),
        pytest.param(packed(unidirectional=1, sizes=(32, 32, 16), scale=0.2), id="causal, narrow values"),
        pytest.param(multi(mask=True), id="keys, mask"),
        pytest.param(multi(7), id="keys, other rows"),
        pytest.param(multi(past=3, bias=False), id="keys, cache"),
        pytest.param(multi(7, in_heads=True, bias=False), id="keys in heads"),
        pytest.param(own(), id="heads"),
        pytest.param(own((2, 5, 32), scale=0.2), id="flat, scale"),
        pytest.param(own((2, 5, 32), 7, keys=2, width=4), id="flat, shared keys, narrow values"),
        pytest.param(own(rows=7, keys=2, width=4), id="shared keys in heads"),
        pytest.param(own(rows=7, is_causal=1, opset=24), id="causal, opset 24"),
        pytest.param(own((2, 5, 32), 5, past=2, keys=2, is_causal=1), id="flat, cache, causal"),
        pytest.param(own(rows=4, past=3, mask=SEEN[0, 0]), id="cache, computed mask"),
        pytest.param(own((2, 5, 32), 7, mask=SEEN[:, :1]), id="mask of each text"),
        pytest.param(own(rows=7, mask=SEEN, stores=True), id="constant mask of each head"),
        pytest.param(own(rows=7, mask=SEEN[0, 0].astype(np.float32), is_causal=1), id="bias and causal"),
        pytest.param(rotary(), id="places"),
        pytest.param(rotary(places=False), id="tables of each token"),
        pytest.param(rotary((2, 5, 32), 6, num_heads=4), id="flat, a part of each head"),
        pytest.param(rotary(is_own=False), id="ONNX Runtime's"),
        pytest.param(rotary((2, 5, 32), is_own=False), id="ONNX Runtime's, flat"),
        pytest.param(rotary((2, 5, 32), 6, num_heads=4, is_own=False), id="ONNX Runtime's, a part of each head"),
    ],
)
def test_attention_and_rotary_embeddings_give_the_same_as_onnx_runtime(tmp_path: Path, case: Case) -> None:
    results, ops = rewrite(case, tmp_path)
    assert ({"Split", "Concat"} if case.op == "RotaryEmbedding" else {"Softmax"}) <= set(ops)
    assert_close(results)
    if case.op == "Attention" and case.opset:
        assert ("Where" in ops) == ("mask" in case.given and case.given["mask"].dtype == np.bool_)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(own(softcap=2.0), id="capped"),
        pytest.param(own(softmax_precision=1), id="another precision"),
        pytest.param(own(rows=7, mask=SEEN[..., :6]), id="mask of fewer keys"),
        pytest.param(own((2, 5, 32), q_num_heads=0), id="no heads"),
        pytest.param(own((2, 5, 32), q_num_heads=5), id="heads of no whole size"),
        pytest.param(own(keys=3), id="keys that do not fit"),
        pytest.param(own((2, HEADS, 1 << 14, 1), 1 << 14, keys=1, width=1, is_causal=1), id="too many scores"),
        pytest.param(msgspec.structs.replace(own(), made=("y", "k2", "v2")), id="keys that pass through"),
        pytest.param(msgspec.structs.replace(own(), made=("y", "", "", "s")), id="scores"),
        pytest.param(msgspec.structs.replace(own(past=2), names=["q", "k", "v", "", "past_key"]), id="half a cache"),
        pytest.param(own(rows=7, mask=SEEN[:, 0]), id="mask of texts in the place of heads"),
        pytest.param(own(rows=7, mask=SEEN.astype(np.int32)), id="mask of integers"),
        pytest.param(rotary(interleaved=1), id="neighbours turned"),
        pytest.param(rotary(is_own=False, scale=0.5), id="scaled"),
        pytest.param(rotary(is_own=False, is_packed_batching=1), id="packed"),
        pytest.param(rotary(rotary_embedding_dim=4), id="tables of another size"),
        pytest.param(rotary(turned=12), id="tables wider than a head"),
        pytest.param(rotary((2, 5, 32)), id="no heads"),
        pytest.param(rotary((2, HEADS, 6, 8)), id="other places"),
        pytest.param(rotary((2, HEADS, 6, 8), places=False), id="tables of other tokens"),
        pytest.param(rotary((2, 5, 32), num_heads=-4), id="fewer heads than none"),
        pytest.param(msgspec.structs.replace(rotary(), names=["x", "cos", "x", "places"]), id="unlike tables"),
        pytest.param(packed(qkv_hidden_sizes=["a", "b", "c"]), id="sizes that are words"),
        pytest.param(packed(num_heads=0), id="no heads"),
        pytest.param(packed(num_heads=5), id="heads of no whole size"),
        pytest.param(grouped(1, 4, 5, 5, kv_num_heads=3), id="keys that do not fit"),
        pytest.param(grouped(1, 4, 1 << 30, 5), id="a text without end"),
        pytest.param(
            msgspec.structs.replace(grouped(1, 4, 5, 5), stored={"total": np.float32(np.inf)}),
            id="no number of rows",
        ),
        pytest.param(
            msgspec.structs.replace(grouped(1, 4, 5, 5), names=["q", "k", "v", "lengths", "", "lengths", "total"]),
            id="a cache that is none",
        ),
    ],
)
def test_a_node_that_is_more_than_that_or_cannot_be_stays_as_it_is(tmp_path: Path, case: Case) -> None:
    assert list(write_and_fix(case, tmp_path)[1]) == [case.op]


@pytest.mark.parametrize("opset", [14, 17])
def test_qnn_takes_an_optimized_bert_whole_and_the_cpu_keeps_it_fused(tmp_path: Path, opset: int) -> None:
    model = export_optimized(tmp_path / "m.onnx", opset)
    ready = ready_model(model, tmp_path, {}).model
    assert {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "BiasGelu"} <= set(op_names(ready.path))
    assert [advice.id for advice in check_model(ready, load_target("cpu")).advice] == []
    fixed = fix_for_target(ready, tmp_path / "fixed.onnx", load_target("qnn"))
    # The simulator takes all of them (onnxruntime-qnn 2.7.0, SoC 69).
    assert fixed.after.taken == fixed.after.nodes
    mask = np.ones((1, 8), np.int32)
    mask[:, 6:] = 0
    rng = np.random.default_rng(0)
    inputs = {"input_ids": rng.integers(0, 50, (1, 8)).astype(np.int32), "attention_mask": mask}
    inputs["token_type_ids"] = np.zeros((1, 8), np.int32)
    results = [run_model(path, inputs) for path in (model.path, fixed.model.path)]
    # FastGelu became the exact one.
    assert np.abs(results[0]["logits"] - results[1]["logits"]).max() <= 1e-3 * np.abs(results[0]["logits"]).max()


def test_qnn_takes_a_generated_model_whole(tmp_path: Path) -> None:
    # 117 of 117 nodes in the simulator, after fusions of its own.
    ready = ready_model(export_genai(tmp_path / "m.onnx"), tmp_path, {}).model
    fixed = fix_for_target(ready, tmp_path / "fixed.onnx", load_target("qnn"))
    assert {fix.id for fix in fixed.fixes} == {"split-grouped-attention", "split-skip-norm"}
    assert (fixed.after.taken, fixed.after.verdict) == (fixed.after.nodes, "yes")
    rng = np.random.default_rng(0)
    shapes = {f"past_key_values.{layer}.{part}": (1, 1, 4, 16) for layer in range(2) for part in ("key", "value")}
    inputs = {**draw(**shapes), "input_ids": rng.integers(0, 50, (1, 1)), "attention_mask": np.ones((1, 5), np.int64)}
    assert_close([run_model(path, inputs) for path in (ready.path, fixed.model.path)])
