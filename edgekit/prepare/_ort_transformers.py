"""The adapter to onnxruntime's transformer optimizer, the only module that imports it."""

import importlib
import logging
from pathlib import Path
from typing import Any, cast

import onnx

from edgekit.errors import ModelError

_FAILURES = (ValueError, TypeError, AssertionError, KeyError, IndexError, AttributeError, RuntimeError)


def list_families() -> tuple[str, ...]:
    """Returns the families of transformers that it has fusions for."""
    return tuple(sorted(_load_optimizer().MODEL_TYPES))


def fuse_nodes(path: Path, model_type: str, heads: int, hidden: int) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Returns a model with its transformer patterns fused, and how many nodes of each fused operator it has now.

    `heads` and `hidden` of 0 are found out from the graph.

    Raises:
        ModelError: the optimizer cannot handle the model.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    optimize = _load_optimizer().optimize_model
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


def _load_optimizer() -> Any:
    """Returns the module when it is needed: with sympy it takes half a second, which most commands need not wait."""
    return importlib.import_module("onnxruntime.transformers.optimizer")
