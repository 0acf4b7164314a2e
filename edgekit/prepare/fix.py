"""The automatic rewrites. Each keeps every result bit for bit, or changes last bits only and says by how much."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import onnx

from edgekit.data.padding import Padding, find_padding
from edgekit.errors import UsageError
from edgekit.graph.inference import infer_model
from edgekit.graph.rewrite import Rewrite
from edgekit.model.external import point_into
from edgekit.model.model import MOST_INLINE_BYTES, Model, iterate_graphs, read_proto, refill
from edgekit.prepare.basic import import_contrib, merge_domains, name_nodes, works_outside
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.external import save_graph
from edgekit.prepare.interface import drop_idle_nodes
from edgekit.prepare.opset import read_opset
from edgekit.prepare.rewrites import (
    activations,
    halves,
    idle,
    join_attention,
    layout,
    norms,
    planes,
    products,
    recurrent,
    split_attention,
    stored,
)
from edgekit.target import INTEGERS, Target


def _by_id(*rewrites: Rewrite) -> Mapping[str, Rewrite]:
    return {rewrite.id: rewrite for rewrite in rewrites}


FIXES = _by_id(
    idle.drop_nan_guard,
    idle.drop_idle_add,
    idle.drop_copies,
    products.sum_to_add,
    products.flat_bias,
    idle.leave_out_empty_inputs,
    idle.drop_trailing_inputs,
    idle.drop_default_activations,
    idle.drop_idle_relus,
    activations.clip_to_relu,
    activations.plain_softmax,
    layout.flatten_to_reshape,
    layout.plain_reshape,
    layout.gather_to_reshape,
    layout.gather_from_start,
    norms.join_layer_norm,
    norms.join_rms_norm,
    activations.join_gelu,
    activations.join_softmax,
)
"""Rewrites that help or do no harm on every provider."""

JOINS = frozenset({norms.join_layer_norm.id, norms.join_rms_norm.id, activations.join_gelu.id})
"""Those of them that another rewrite undoes for a target that lacks the operator they write."""

_SHAPED = (
    activations.plain_softmax, idle.drop_idle_add, idle.drop_nan_guard, activations.join_softmax,
    layout.gather_to_reshape, layout.gather_from_start, norms.join_layer_norm, norms.join_rms_norm,
)  # fmt: skip
_SHAPELESS = FIXES.keys() - {rewrite.id for rewrite in _SHAPED}

SPELLINGS = _by_id(
    # First, so that the others see float32.
    halves.compute_in_float,
    stored.store_float_weights,
    layout.narrow_indices,
    layout.plain_gather,
    layout.unsqueeze_arg,
    layout.pad_reflect,
    products.plain_gemm,
    products.matmul_to_2d,
    activations.plain_slope,
    activations.join_hard_swish,
    activations.split_hard_swish,
    layout.flatten_expand,
    # After the rewrite to few axes: a Concat has as many axes as the Expand that it replaces.
    layout.expand_to_concat,
    products.neg_to_mul,
    # First the operators that ONNX Runtime's optimizers fuse, then what these are rewritten to.
    norms.split_embed_norm,
    split_attention.split_attention,
    activations.split_bias_gelu,
    split_attention.split_grouped_attention,
    norms.split_skip_norm,
    norms.split_layer_norm,
    norms.split_rms_norm,
    # Before the formula with Tanh or Erf: a provider that takes an exact Gelu needs no parts.
    activations.write_exact_gelu,
    activations.split_gelu,
    activations.split_tanh_gelu,
    activations.clip_to_min_max,
    # After those of activations, which may lie between two layers.
    planes.conv_to_planes,
    products.write_unsigned_weights,
)
"""Rewrites that help some providers only.

For a target, those are applied by which the check finds that it takes more.
"""

ASKED = _by_id(
    products.gemm_to_matmul, join_attention.join_rotary, join_attention.join_attention, activations.part_silu,
    activations.flatten_softplus, layout.cast_by_int32, recurrent.split_lstm
)  # fmt: skip
"""Rewrites that gain no node but that a target needs all the same: in a float model (`list_asked`), or in integers
(`fix_quantized`)."""

REWRITES: Mapping[str, Rewrite] = {**FIXES, **SPELLINGS, **ASKED}
"""Each changes a graph in place and returns the names of the nodes it changed; they run in this order."""


# Around kernels of QNN's HTP that are wrong or coarse.
_AROUND_QNN = (
    activations.part_silu.id, activations.flatten_softplus.id, layout.cast_by_int32.id, recurrent.split_lstm.id,
)  # fmt: skip


def list_asked(target: Target, *, stays_float: bool = False) -> tuple[str, ...]:
    """Returns the rewrites that a target needs, whatever the check finds of the float model.

    Some are needed by the way the target is quantized: what computes in float16 is not, and gets no ranges. Others fuse
    patterns that quantizing would need in parts, so they are only for a model that `stays_float`.
    """
    # A product keeps its weights in blocks in three dimensions alone.
    blocks = any(types.weight_block for types in target.quantization.precisions.values())
    takes_integers = any(precision in INTEGERS for precision in target.precisions)
    own = target.float_rewrites if stays_float else (halves.HALF_TO_FLOAT,) if takes_integers else ()
    return (*((products.gemm_to_matmul.id,) if blocks else ()), *own)


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """A rewrite that was applied, by the id that advice has for it, and the nodes it changed."""

    id: str
    nodes: tuple[str, ...]


class FixedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model after the automatic rewrites, and those that changed something."""

    model: Model
    fixes: tuple[Fix, ...]


def ready_model(source: Model, folder: Path, dims: Mapping[str, int], *, may_stay_open: bool = False) -> FixedModel:
    """Writes the model that every build starts from: prepared, with the rewrites for every provider.

    A dimension without a number stays open where it `may_stay_open`.

    Raises:
        UsageError: a dimension that does not exist, or a dynamic dimension that got no number.
        ModelError: the opset cannot be changed.
        RuntimeRefusal: ONNX Runtime cannot load the model.
        OutputError: `folder` cannot be written.
    """
    prepared = prepare_model(source, folder / "prepared" / f"{source.name}.onnx", dims, may_stay_open=may_stay_open)
    return fix_model(prepared, folder / "fixed" / f"{source.name}.onnx")


def fix_model(model: Model, out: Path, ids: Collection[str] = tuple(FIXES)) -> FixedModel:
    """Writes a model to `out` with the rewrites of these ids applied: those for every provider, if none are named.

    Raises:
        OutputError: `out` cannot be written.
    """
    # Two rewrites look at the numbers of weights; half-to-float reads them below, only where it has something to do.
    outside = works_outside(model) and not model.external_files and products.UNSIGNED_WEIGHTS not in ids
    proto = point_into(model.path) if outside else read_proto(model, weights=False)
    if halves.HALF_TO_FLOAT in ids and halves.computes_in_half(proto.graph):
        # In float32 the weights take twice the bytes, and stand in the file.
        if 2 * model.size_bytes > MOST_INLINE_BYTES:
            ids = set(ids) - {halves.HALF_TO_FLOAT}
        else:
            proto = read_proto(model)
    merge_domains(proto)
    name_nodes(proto.graph)
    fixes = apply_rewrites(proto, ids)
    name_nodes(proto.graph)
    return FixedModel(model=save_graph(proto, model, out), fixes=fixes)


def fix_quantized(model: Model, target: Target, out: Path) -> FixedModel:
    """Writes a model that is quantized already to `out`, with the rewrites of integers that a target needs.

    Raises:
        OutputError: `out` cannot be written.
    """
    rules = target.quantization
    ids = [
        *([products.UNSIGNED_WEIGHTS] if rules.unsigned_ops else ()),
        *(_AROUND_QNN if rules.scheme == "qnn" else ()),
    ]
    return fix_model(model, out, ids) if ids else FixedModel(model=model, fixes=())


def apply_rewrites(proto: onnx.ModelProto, ids: Collection[str]) -> tuple[Fix, ...]:
    """Applies the rewrites of these ids in place, and returns those that found something to do."""
    known = {value.name for value in proto.graph.value_info}
    opset, is_inferred = read_opset(proto), False
    fixes: list[Fix] = []
    for name, rewrite in REWRITES.items():
        if name not in ids:
            continue
        if name not in _SHAPELESS and not is_inferred:
            # Shapes after the rewrites before it.
            inferred = infer_model(proto).graph.value_info
            refill(proto.graph.value_info, [value for value in inferred if value.type.HasField("tensor_type")])
            is_inferred = True
        nodes = tuple(node for graph in iterate_graphs(proto.graph) for node in rewrite(graph, opset))
        if nodes:
            fixes.append(Fix(id=name, nodes=nodes))
            is_inferred = False
            # Where one node replaces several, the others are idle now. ONNX Runtime would keep them, and the next
            # rewrite see them.
            drop_idle_nodes(proto.graph)
    if fixes:
        import_contrib(proto)
    kept = known & {output for node in proto.graph.node for output in node.output}
    refill(proto.graph.value_info, [value for value in proto.graph.value_info if value.name in kept])
    return tuple(fixes)


# Buckets: one model prepared for several sizes of one dimension, such as 64, 128 and 256 tokens.


class BucketModels(msgspec.Struct, frozen=True, kw_only=True):
    """The prepared model of each size but the `largest`, and how samples are filled up to a size."""

    padding: Padding
    smaller: dict[int, Model]
    largest: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, the smallest first."""
        return (*self.smaller, self.largest)


def choose_dims(
    dims: Mapping[str, int], buckets: Mapping[str, Sequence[int]], values: Mapping[str, float]
) -> dict[str, int]:
    """Returns a number for each dimension that has one, or several: of those the largest.

    Raises:
        UsageError: more than one dimension has several sizes, they do not rise, one is no size, or `values` say what
            fills inputs, and there is nothing to fill.
    """
    if not buckets:
        if values:
            raise UsageError(
                f"input '{next(iter(values))}' is to be filled, and no dimension has several sizes",
                hint="give buckets: --dim NAME=64,128,256",
            )
        return dict(dims)
    if len(buckets) > 1:
        names = "' and '".join(buckets)
        raise UsageError(f"'{names}' have several sizes", hint="one dimension can: give the others one size each")
    ((name, sizes),) = buckets.items()
    given = ",".join(map(str, sizes))
    rising = sorted({size for size in sizes if size > 0})
    if list(sizes) != rising or len(sizes) < 2:
        example = ",".join(map(str, rising if len(rising) > 1 else (64, 128, 256)))
        raise UsageError(
            f"the buckets '{name}={given}' do not rise from 1 or more",
            hint=f"each size once, the smallest first: --dim {name}={example}",
        )
    if name in dims:
        raise UsageError(f"'{name}' is given both {dims[name]} and {given}", hint="leave one of them out")
    return {**dims, name: sizes[-1]}


def prepare_buckets(
    source: Model,
    prepared: Model,
    dims: Mapping[str, int],
    buckets: Mapping[str, Sequence[int]],
    values: Mapping[str, float],
    work: Path,
) -> BucketModels | None:
    """Prepares a model for each bucket but the largest, which `prepared` is of; returns None where there are none.

    Raises:
        UsageError: a size contradicts the model, or the dimension cannot be filled; see `find_padding`.
        ModelError: the model is another at another size.
    """
    if not buckets:
        return None
    ((name, sizes),) = buckets.items()
    smaller = {size: ready_model(source, work / f"size-{size}", {**dims, name: size}).model for size in sizes[:-1]}
    at = {**smaller, sizes[-1]: prepared}
    padding = find_padding(
        name,
        {size: model.inputs for size, model in at.items()},
        {size: model.outputs for size, model in at.items()},
        values,
    )
    return BucketModels(padding=padding, smaller=smaller, largest=sizes[-1])
