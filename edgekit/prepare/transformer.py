"""Fusion of attention, LayerNormalization, GELU and embeddings by ONNX Runtime's transformer optimizer."""

import importlib
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import onnx

from edgekit.errors import ModelError, UsageError, suggest_name
from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.model.model import Model, iterate_nodes, read_proto, save_proto
from edgekit.prepare.fix import fix_model
from edgekit.prepare.opset import lower_ir_version, read_opset
from edgekit.prepare.rewrites import idle, join_attention

_FAILURES = (ValueError, TypeError, AssertionError, KeyError, IndexError, AttributeError, RuntimeError)


# Slower on the CPU than their parts, and less exact (docs/reference/measured.md). Attention is fused by our rewrite.
_SLOW_ON_CPU = ("enable_attention", "enable_skip_layer_norm", "enable_bias_skip_layer_norm", "enable_bias_gelu")


# The optimizer finds attention as exporters wrote it some years ago, but not as PyTorch 2.15 does.
_PARTS_OF_ATTENTION = tuple(
    rewrite.id
    for rewrite in (
        idle.drop_nan_guard,
        idle.drop_idle_add,
        idle.drop_copies,
        join_attention.join_rotary,
        join_attention.join_attention,
    )
)


class FuseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The family of the transformer, its attention heads and its hidden size; 0 means to read them from the graph.

    `for_cpu` does not fuse what the CPU provider computes faster in parts.
    """

    model_type: str = "bert"
    heads: int = 0
    hidden: int = 0
    for_cpu: bool = True


class FusedOps(msgspec.Struct, frozen=True, kw_only=True):
    """The number of new nodes of each fused operator, and of all nodes before and after fusion."""

    model_type: str
    fused: dict[str, int]
    nodes_before: int
    nodes_after: int


class FusedModel(FusedOps, frozen=True, kw_only=True):
    """A model with its transformer patterns fused."""

    model: Model


def fuse_transformer(
    model: Model, options: FuseOptions, out: Path, prepare: Callable[[Model, Path], Model]
) -> FusedModel:
    """Writes a model to `out` with transformer patterns fused into operators of `com.microsoft`, and prepared.

    ONNX Runtime's optimizer fuses the patterns of the family in the exported model; attention that it does not find is
    fused after `prepare` by edgekit's rewrite. Only ONNX Runtime's CPU, CUDA and WebGPU providers have these operators:
    do not fuse for a phone's accelerator.

    Raises:
        UsageError: there is no such family.
        ModelError: the optimizer cannot handle the model, or nothing was found to fuse.
    """
    # Imported only here: with sympy it takes half a second.
    optimizer: Any = importlib.import_module("onnxruntime.transformers.optimizer")
    families = tuple(sorted(optimizer.MODEL_TYPES))
    if options.model_type not in families:
        hint = suggest_name(options.model_type, families)
        raise UsageError(f"there is no --model-type '{options.model_type}'", hint=hint)
    before = read_proto(model, weights=False)
    chosen = optimizer.FusionOptions(options.model_type)
    for name in _SLOW_ON_CPU if options.for_cpu else ():
        setattr(chosen, name, False)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        asked = (options.model_type, options.heads, options.hidden, chosen)
        fused: onnx.ModelProto = optimizer.optimize_model(str(model.path), *asked, opt_level=0).model
    except _FAILURES as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"ONNX Runtime's transformer optimizer fails on '{model.path.name}': {first[:300]}",
            hint="name another --model-type, or leave --fuse out",
        ) from error
    finally:
        logging.disable(disabled)
    lower_ir_version(fused, read_opset(fused))
    written = save_proto(fused, out.with_name(f"{out.stem}-exported.onnx"))
    prepared = prepare(
        msgspec.structs.replace(written, custom_ops=model.custom_ops), out.with_name(f"{out.stem}-prepared.onnx")
    )
    joined = fix_model(prepared, out, _PARTS_OF_ATTENTION).model
    counts = [
        Counter(node.op_type for node in iterate_nodes(proto.graph) if node.domain == ORT_DOMAIN)
        for proto in (read_proto(joined, weights=False), before)
    ]
    new = counts[0] - counts[1]
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
