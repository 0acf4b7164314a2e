"""What stands behind NNAPI: a process that computes the networks which ONNX Runtime's own builder makes."""

import contextlib
import importlib.util
from collections.abc import Generator
from pathlib import Path

import msgspec

from edgekit.devices.android.nnapi.compute import Facts
from edgekit.devices.release.serving import serving

# What NNAPI says it can since Android 12L, where it no longer counts as Android does (NeuralNetworksTypes.h).
_FEATURE_LEVELS = {32: 1_000_006, 33: 1_000_007}
_LAST_FEATURE_LEVEL = 1_000_008


class Service(msgspec.Struct, kw_only=True):
    """The process that computes: `pipes` is where the driver reaches it, `facts` what it did, known at its end."""

    pipes: Path | None = None
    facts: Facts | None = None


def find_feature_level(api: int) -> int:
    """Returns the feature level of NNAPI on a phone with that API level of Android, all its updates installed."""
    return api if api < min(_FEATURE_LEVELS) else _FEATURE_LEVELS.get(api, _LAST_FEATURE_LEVEL)


def can_compute() -> bool:
    """Returns True if TFLite's kernels are here, in the wheel ai-edge-litert."""
    return importlib.util.find_spec("ai_edge_litert") is not None


@contextlib.contextmanager
def computing(folder: Path, timeout_s: float) -> Generator[Service]:
    """Yields the process that computes for the driver, which ends with the block.

    Where nothing can compute, networks are built and not run.
    """
    service = Service()
    if not can_compute():
        yield service
        return
    with serving(folder, "edgekit.devices.android.nnapi.compute", timeout_s) as served:
        service.pipes = folder
        yield service
    with contextlib.suppress(msgspec.DecodeError):
        service.facts = msgspec.json.decode(served.said, type=Facts)
