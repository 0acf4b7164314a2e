"""The rewrites that advice calls automatic: each leaves every result as it is, or moves its last bits as it says."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec
import onnx

from edgekit.model.model import Model, iterate_graphs, read_proto
from edgekit.model.skim import point_into
from edgekit.prepare.basic import works_outside
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.interface import drop_idle_nodes
from edgekit.prepare.opset import read_opset
from edgekit.prepare.rewrites import (
    clip_to_min_max,
    clip_to_relu,
    copies,
    exact_gelu,
    expand_to_concat,
    flat_expand,
    flatten_to_reshape,
    gemm_to_matmul,
    hard_swish,
    idle_add,
    idle_nan_guard,
    idle_relu,
    index_to_int32,
    join_attention,
    join_gelu,
    join_rms_norm,
    join_rotary,
    matmul_to_2d,
    neg_to_mul,
    pad_reflect,
    plain_gather,
    plain_gemm,
    plain_reshape,
    resize_inputs,
    split_attention,
    split_bias_gelu,
    split_embed_norm,
    split_gelu,
    split_grouped_attention,
    split_layer_norm,
    split_skip_norm,
    sum_to_add,
    trailing_inputs,
    unsigned_weights,
)
from edgekit.prepare.shapes.infer import infer_values
from edgekit.prepare.tidy import import_contrib, merge_domains, name_nodes
from edgekit.prepare.weights.external import save_graph
from edgekit.target import Target

Rewrite = Callable[[onnx.GraphProto, int], tuple[str, ...]]

FIXES: Mapping[str, Rewrite] = {
    idle_nan_guard.FIX_ID: idle_nan_guard.drop_nan_guards,
    idle_add.FIX_ID: idle_add.drop_idle_adds,
    copies.FIX_ID: copies.drop_copies,
    sum_to_add.FIX_ID: sum_to_add.rewrite_sums,
    resize_inputs.FIX_ID: resize_inputs.leave_out_empty_inputs,
    trailing_inputs.FIX_ID: trailing_inputs.drop_trailing_inputs,
    idle_relu.FIX_ID: idle_relu.drop_idle_relus,
    clip_to_relu.FIX_ID: clip_to_relu.write_relus,
    flatten_to_reshape.FIX_ID: flatten_to_reshape.write_flattens,
    plain_reshape.FIX_ID: plain_reshape.write_plain_reshapes,
    join_rms_norm.FIX_ID: join_rms_norm.join_rms_norms,
    join_gelu.FIX_ID: join_gelu.join_gelus,
}
"""Rewrites that every provider is well served by."""

JOINS = frozenset({join_rms_norm.FIX_ID, join_gelu.FIX_ID})
"""Those of them that other rewrites undo for a target which lacks what they write."""

_SHAPELESS = FIXES.keys() - {idle_add.FIX_ID, idle_nan_guard.FIX_ID}

SPELLINGS: Mapping[str, Rewrite] = {
    index_to_int32.FIX_ID: index_to_int32.narrow_indices,
    plain_gather.FIX_ID: plain_gather.write_plain_gathers,
    pad_reflect.FIX_ID: pad_reflect.write_mirrors,
    plain_gemm.FIX_ID: plain_gemm.write_plain_gemms,
    matmul_to_2d.FIX_ID: matmul_to_2d.flatten_matmuls,
    hard_swish.JOIN_ID: hard_swish.join_hard_swishes,
    hard_swish.SPLIT_ID: hard_swish.split_hard_swishes,
    flat_expand.FIX_ID: flat_expand.flatten_expands,
    # Of few axes: a Concat has as many as the Expand that it stands for.
    expand_to_concat.FIX_ID: expand_to_concat.write_concats,
    neg_to_mul.FIX_ID: neg_to_mul.write_products,
    # What ONNX Runtime's optimizers fuse, before what that becomes.
    split_embed_norm.FIX_ID: split_embed_norm.split_embed_norms,
    split_attention.FIX_ID: split_attention.split_attentions,
    split_bias_gelu.FIX_ID: split_bias_gelu.split_bias_gelus,
    split_grouped_attention.FIX_ID: split_grouped_attention.split_grouped_attentions,
    split_skip_norm.FIX_ID: split_skip_norm.split_skip_norms,
    split_layer_norm.FIX_ID: split_layer_norm.split_layer_norms,
    split_layer_norm.RMS_ID: split_layer_norm.split_rms_norms,
    # Before the formula is: who takes an exact Gelu needs no parts.
    exact_gelu.FIX_ID: exact_gelu.write_exact_gelus,
    split_gelu.FIX_ID: split_gelu.split_gelus,
    split_gelu.TANH_ID: split_gelu.split_tanh_gelus,
    clip_to_min_max.FIX_ID: clip_to_min_max.write_min_max,
    unsigned_weights.FIX_ID: unsigned_weights.write_unsigned_weights,
}
"""Rewrites that some providers are served by and others not: for a target, those that check finds a gain in."""

ASKED: Mapping[str, Rewrite] = {
    gemm_to_matmul.FIX_ID: gemm_to_matmul.write_matmuls,
    join_rotary.FIX_ID: join_rotary.join_rotaries,
    join_attention.FIX_ID: join_attention.join_attentions,
}
"""Rewrites that gain no node, and that a target asks for (`list_asked`)."""

REWRITES: Mapping[str, Rewrite] = {**FIXES, **SPELLINGS, **ASKED}
"""Each changes a graph in place and returns the names of the nodes it changed; they run in this order."""


def list_asked(target: Target, *, stays_float: bool = False) -> tuple[str, ...]:
    """Returns the rewrites that a target asks for, whatever check finds of the float model.

    A way of quantizing asks for some; others join what would be quantized in parts, so they are for a model that
    `stays_float`.
    """
    blocks = any(types.weight_block for types in target.quantization.precisions.values())
    # A product keeps its weights in blocks in three dimensions alone.
    return (*((gemm_to_matmul.FIX_ID,) if blocks else ()), *(target.float_rewrites if stays_float else ()))


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """A rewrite that was applied, by the id that advice has for it, and the nodes it changed."""

    id: str
    nodes: tuple[str, ...]


class FixedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model after the automatic rewrites, and which of them found something to do."""

    model: Model
    fixes: tuple[Fix, ...]


def ready_model(source: Model, folder: Path, dims: Mapping[str, int], *, may_stay_open: bool = False) -> FixedModel:
    """Writes into a folder what every build starts from: a model prepared, with the rewrites for every provider.

    A dimension without a number stays open where it `may_stay_open`.

    Raises:
        UsageError: a dimension that does not exist, or a dynamic dimension that got no number.
        ModelError: the opset cannot be changed.
        RuntimeRefusal: ONNX Runtime cannot load the model.
        OutputError: `folder` cannot be written.
    """
    out = folder / "prepared" / f"{source.name}.onnx"
    prepared = prepare_model(source, out, dims, may_stay_open=may_stay_open)
    return fix_model(prepared, folder / "fixed" / f"{source.name}.onnx")


def fix_model(model: Model, out: Path, ids: Collection[str] = tuple(FIXES)) -> FixedModel:
    """Writes a model to `out` with the rewrites of these ids applied: those for every provider, if none are named.

    Raises:
        OutputError: `out` cannot be written.
    """
    # One rewrite alone looks at the numbers of weights.
    outside = works_outside(model) and not model.external_files and unsigned_weights.FIX_ID not in ids
    proto = point_into(model.path) if outside else read_proto(model, weights=False)
    merge_domains(proto)
    name_nodes(proto.graph)
    fixes = apply_rewrites(proto, ids)
    name_nodes(proto.graph)
    return FixedModel(model=save_graph(proto, model, out), fixes=fixes)


def apply_rewrites(proto: onnx.ModelProto, ids: Collection[str]) -> tuple[Fix, ...]:
    """Applies the rewrites of these ids in place, and returns those that found something to do."""
    known = {value.name for value in proto.graph.value_info}
    opset = read_opset(proto)
    fixes: list[Fix] = []
    for name, rewrite in REWRITES.items():
        if name not in ids:
            continue
        if name not in _SHAPELESS:
            infer_values(proto)
        nodes = tuple(node for graph in iterate_graphs(proto.graph) for node in rewrite(graph, opset))
        if nodes:
            fixes.append(Fix(id=name, nodes=nodes))
            # What a node written for several leaves behind, ONNX Runtime would keep, and the next rewrite would see.
            drop_idle_nodes(proto.graph)
    if fixes:
        import_contrib(proto)
    made = {output for node in proto.graph.node for output in node.output}
    kept = [value for value in proto.graph.value_info if value.name in known and value.name in made]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(kept)
    return tuple(fixes)
