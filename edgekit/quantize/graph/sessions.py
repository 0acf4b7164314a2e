"""Sessions of graphs that are in memory."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import onnx

from edgekit._ort import CpuSession, SessionSettings, external_config
from edgekit.errors import RuntimeRefusal
from edgekit.prepare.weights.float_weights import OPTIMIZER

# Pairs of u8 x s8 products are added in 16 bits on x64 without VNNI, where they saturate: the judge must not.
_PRECISE: Mapping[str, str] = {"session.x64quantprecision": "1"}


def open_graph(proto: onnx.ModelProto, folder: Path, *, keep_float_weights: bool) -> CpuSession:
    """Returns a session for a graph in memory, whose external weights lie in `folder`."""
    source, config = proto.SerializeToString(), external_config(folder)
    disabled = (OPTIMIZER,) if keep_float_weights else ()
    settings = SessionSettings(threads=1, one_block=False, config={**_PRECISE, **config}, disabled_optimizers=disabled)
    try:
        return CpuSession(source, settings)
    except RuntimeRefusal:
        # ONNX Runtime 1.31 trips over weights that share a zero point when the key is set.
        return CpuSession(source, msgspec.structs.replace(settings, config=config))
