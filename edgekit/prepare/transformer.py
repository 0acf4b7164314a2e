"""Fusing what transformers are made of: attention, layer normalisation, GELU, embeddings."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx

from edgekit.errors import ModelError, UsageError, suggest_name
from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.model.model import Model, iterate_graphs, read_proto, save_proto
from edgekit.prepare._ort_transformers import fuse_nodes, list_families
from edgekit.prepare.fix import fix_model
from edgekit.prepare.opset import lower_ir_version, read_opset
from edgekit.prepare.rewrites import copies, idle_add, idle_nan_guard, join_attention, join_rotary

# The optimizer knows attention as exporters wrote it some years ago, and finds none in what PyTorch 2.15 writes.
_PARTS_OF_ATTENTION = (idle_nan_guard.FIX_ID, idle_add.FIX_ID, copies.FIX_ID, join_rotary.FIX_ID, join_attention.FIX_ID)


class FuseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The family of the transformer, its attention heads and its hidden size; 0 where they are to be found out.

    `for_cpu` leaves out what the CPU provider computes slower fused than in parts.
    """

    model_type: str = "bert"
    heads: int = 0
    hidden: int = 0
    for_cpu: bool = True


class FusedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with its transformer patterns fused: how many nodes of each fused operator, and of all nodes."""

    model: Model
    model_type: str
    fused: dict[str, int]
    nodes_before: int
    nodes_after: int


def fuse_transformer(
    model: Model, options: FuseOptions, out: Path, prepare: Callable[[Model, Path], Model]
) -> FusedModel:
    """Writes a model with transformer patterns fused into operators of `com.microsoft` to `out`, prepared.

    ONNX Runtime's optimizer fuses what its family has, in the model as it was exported; what it leaves of attention is
    joined after `prepare`, by what is computed. Only ONNX Runtime's CPU, CUDA and WebGPU providers have these
    operators: for a phone's accelerator, do not fuse.

    Raises:
        UsageError: there is no such family.
        ModelError: the optimizer cannot handle the model, or nothing was found to fuse.
    """
    families = list_families()
    if options.model_type not in families:
        hint = suggest_name(options.model_type, families)
        raise UsageError(f"there is no --model-type '{options.model_type}'", hint=hint)
    before = read_proto(model, weights=False)
    fused = fuse_nodes(model.path, options.model_type, options.heads, options.hidden, for_cpu=options.for_cpu)
    lower_ir_version(fused, read_opset(fused))
    written = save_proto(fused, out.with_name(f"{out.stem}-exported.onnx"))
    prepared = prepare(
        msgspec.structs.replace(written, custom_ops=model.custom_ops), out.with_name(f"{out.stem}-prepared.onnx")
    )
    joined = fix_model(prepared, out, _PARTS_OF_ATTENTION).model
    new = _count_contrib(read_proto(joined, weights=False)) - _count_contrib(before)
    if not new:
        raise ModelError(
            f"no pattern of '{options.model_type}' was found in '{model.name}'",
            hint=f"another --model-type ({', '.join(families)}), or leave --fuse out",
        )
    return FusedModel(
        model=joined,
        model_type=options.model_type,
        fused=dict(sorted(new.items())),
        nodes_before=model.node_count,
        nodes_after=joined.node_count,
    )


def _count_contrib(proto: onnx.ModelProto) -> Counter[str]:
    nodes = (node for graph in iterate_graphs(proto.graph) for node in graph.node)
    return Counter(node.op_type for node in nodes if node.domain == ORT_DOMAIN)
