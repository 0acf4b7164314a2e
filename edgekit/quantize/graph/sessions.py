"""Sessions of graphs that are in memory."""

from collections.abc import Mapping
from pathlib import Path

import onnx

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import RuntimeRefusal
from edgekit.model.model import MAX_PROTOBUF_BYTES, count_weight_bytes, save_proto
from edgekit.prepare.weights.float_weights import OPTIMIZER

# Pairs of u8 x s8 products are added in 16 bits on x64 without VNNI, where they saturate: the judge must not.
_PRECISE: Mapping[str, str] = {"session.x64quantprecision": "1"}


def open_graph(proto: onnx.ModelProto, path: Path, *, keep_float_weights: bool) -> CpuSession:
    """Returns a session for a graph in memory; `path` is used where that is too big for one protobuf."""
    fits = count_weight_bytes(proto) < MAX_PROTOBUF_BYTES // 2
    if not fits:
        save_proto(proto, path)
    source = proto.SerializeToString() if fits else path
    disabled = (OPTIMIZER,) if keep_float_weights else ()
    try:
        return CpuSession(source, SessionSettings(threads=1, config=dict(_PRECISE), disabled_optimizers=disabled))
    except RuntimeRefusal:
        # ONNX Runtime 1.31 trips over weights that share a zero point when the key is set.
        return CpuSession(source, SessionSettings(threads=1, disabled_optimizers=disabled))
