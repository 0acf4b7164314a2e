"""Values that are not finite inside a model: which of them are meant so, as masks are."""

import numpy as np

from edgekit.model.tensors import Array

HALF_MAX = 65504.0
"""The largest finite number of half precision (IEEE 754 binary16)."""
# Attention masks are minus infinity, the lowest float, or minus a thousand million: a softmax makes zero of all.
_MASK = -1e8


def settle_infinities(wanted: Array, got: Array) -> tuple[Array, Array]:
    """Returns both with zeros where neither is a number and they agree, and where both are a mask.

    What is left is not finite by mistake.
    """
    masked = (_widen(wanted) < _MASK) & (got <= -HALF_MAX)
    if not masked.any() and bool(np.isfinite(got).all()) and bool(np.isfinite(wanted).all()):
        return wanted, got
    both = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    meant = masked | (~np.isfinite(got) & both)
    return np.where(meant, wanted.dtype.type(0), wanted), np.where(meant, got.dtype.type(0), got)


def measure_largest(value: Array) -> float:
    """Returns the largest absolute value that is finite and no mask."""
    wide = _widen(value)
    kept = np.abs(wide[np.isfinite(wide) & (wide > _MASK)].astype(np.float64))
    return float(kept.max(initial=0.0))


def measure_rms(value: Array) -> float:
    """Returns the root of the mean square of what is finite and no mask."""
    wide = _widen(value)
    kept = wide[np.isfinite(wide) & (wide > _MASK)].astype(np.float64)
    return float(np.sqrt(np.einsum("i,i->", kept, kept) / max(1, kept.size)))


def _widen(value: Array) -> Array:
    """Returns float32 for half precision, which cannot hold the mask's value: numpy warns of comparing them."""
    return value.astype(np.float32) if value.dtype == np.float16 else value
