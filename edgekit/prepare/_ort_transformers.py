"""The adapter to onnxruntime's transformer optimizer, the only module that imports it."""

import logging
from pathlib import Path
from typing import Any, cast

import onnx
from onnxruntime.transformers import optimizer

from edgekit.errors import ModelError

MODEL_TYPES: tuple[str, ...] = tuple(sorted(cast("dict[str, Any]", optimizer.MODEL_TYPES)))
"""The families of transformers that it has fusions for."""

_FAILURES = (ValueError, TypeError, AssertionError, KeyError, IndexError, AttributeError, RuntimeError)


def fuse_nodes(path: Path, model_type: str, heads: int, hidden: int) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Returns a model with its transformer patterns fused, and how many nodes of each fused operator it has now.

    `heads` and `hidden` of 0 are found out from the graph.

    Raises:
        ModelError: the optimizer cannot handle the model.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    optimize = cast("Any", optimizer.optimize_model)
    try:
        fused: Any = optimize(str(path), model_type, num_heads=heads, hidden_size=hidden, opt_level=0)
        counts = {str(name): int(count) for name, count in fused.get_fused_operator_statistics().items() if count}
        return cast("onnx.ModelProto", fused.model), counts
    except _FAILURES as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"ONNX Runtime's transformer optimizer fails on '{path.name}': {first[:300]}",
            hint="name another --model-type, or leave --fuse out",
        ) from error
    finally:
        logging.disable(disabled)
