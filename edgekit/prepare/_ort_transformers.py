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


# Slower on the CPU than their parts, and less exact (docs/reference/measured.md). Attention is joined elsewhere.
_SLOW_ON_CPU = ("enable_attention", "enable_skip_layer_norm", "enable_bias_skip_layer_norm", "enable_bias_gelu")


def fuse_nodes(path: Path, model_type: str, heads: int, hidden: int, *, for_cpu: bool) -> onnx.ModelProto:
    """Returns a model with its transformer patterns fused.

    `heads` and `hidden` of 0 are found out from the graph. What the CPU provider has slow kernels for is left out
    where it is `for_cpu`.

    Raises:
        ModelError: the optimizer cannot handle the model.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    optimizer = _load_optimizer()
    chosen = optimizer.FusionOptions(model_type)
    for name in _SLOW_ON_CPU if for_cpu else ():
        setattr(chosen, name, False)
    try:
        fused: Any = optimizer.optimize_model(str(path), model_type, heads, hidden, chosen, opt_level=0)
        return cast("onnx.ModelProto", fused.model)
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
