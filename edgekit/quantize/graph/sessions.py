"""Opens sessions for graphs in memory."""

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

import msgspec
import onnx

from edgekit._ort import CpuSession, SessionSettings, external_config
from edgekit.errors import RuntimeRefusal
from edgekit.machine import VNNI, read_cpu_flags, trim_heap
from edgekit.model.external import move_weight
from edgekit.model.model import copy_without_weights, count_weight_bytes
from edgekit.prepare.constants import LAYOUT, OPTIMIZER, find_cubics

EXACT_PRODUCTS: Mapping[str, str] = {"session.qdq_matmulnbits_accuracy_level": "1"}
"""Keeps the products of a MatMul with 8-bit weights and float activations exact.

ONNX Runtime 1.32 turns it into a MatMulNBits, which by default rounds the activations to 8 bits; no target with 16-bit
activations does that.
"""
# Without VNNI, x64 adds pairs of u8 x s8 products in 16 bits, which saturate; sessions that judge plans must not. With
# VNNI all sums have 32 bits, and this setting would only make products slower: the runs of ViT-S by 1.4 times.
_UNSATURATED: Mapping[str, str] = {"session.x64quantprecision": "1"}
# From this many bytes on, weights are mapped from a file: inside the protobuf they would be in memory three times while
# a session is made. Chosen by hand.
_LARGE_BYTES = 4 << 20


def open_graph(
    proto: onnx.ModelProto, folder: Path, *, keep_float_weights: bool, large_bytes: int = _LARGE_BYTES
) -> CpuSession:
    """Returns a session for a graph in memory, whose external weights lie in `folder`.

    If its own weights take `large_bytes` or more, they are written to a file there for the session.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses the graph.
        OSError: the folder cannot be written.
    """
    disabled = (*((OPTIMIZER,) if keep_float_weights else ()), *((LAYOUT,) if find_cubics(proto.graph) else ()))
    # Memory that quantization freed is still in the heap, between memory in use.
    trim_heap()
    if count_weight_bytes(proto) < large_bytes:
        return _open(proto.SerializeToString(), folder, disabled)
    with _weights_outside(proto, folder) as source:
        return _open(source, folder, disabled)


def _open(source: bytes, folder: Path, disabled: tuple[str, ...]) -> CpuSession:
    config = {**EXACT_PRODUCTS, **external_config(folder)}
    settings = SessionSettings(threads=1, one_block=False, in_order=True, config=config, disabled_optimizers=disabled)
    if not VNNI.search(read_cpu_flags()):
        # With `session.x64quantprecision` ONNX Runtime 1.31 fails if weights share a zero point.
        with contextlib.suppress(RuntimeRefusal):
            return CpuSession(source, msgspec.structs.replace(settings, config={**_UNSATURATED, **config}))
    return CpuSession(source, settings)


@contextlib.contextmanager
def _weights_outside(proto: onnx.ModelProto, folder: Path) -> Generator[bytes]:
    """Yields the bytes of a model whose large weights lie in a file in `folder`, which is removed afterwards."""
    copy = copy_without_weights(proto)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="session-", suffix=".data", delete=False) as out:
        path = Path(out.name)
        for tensor in proto.graph.initializer:
            moved = onnx.TensorProto()  # of its own: the model would keep the memory of cleared fields
            moved.CopyFrom(tensor)
            if moved.data_location != onnx.TensorProto.EXTERNAL:
                move_weight(moved, folder, out)
            copy.graph.initializer.append(moved)
    try:
        yield copy.SerializeToString()
    finally:
        # Windows cannot remove a file that a session has mapped: it is removed with the work folder.
        with contextlib.suppress(PermissionError):
            path.unlink()
