"""ONNX Runtime's basic optimisation of a graph, kept from what only suits its CPU provider."""

from pathlib import Path

import onnx

from edgekit._ort import CpuSession, Level, SessionSettings, optimize_graph
from edgekit.errors import RuntimeRefusal
from edgekit.graph.rewrite import set_nodes
from edgekit.model.model import Model
from edgekit.prepare.half import guard_half, strip_casts
from edgekit.prepare.tidy import name_nodes
from edgekit.prepare.weights.external import gather_data
from edgekit.prepare.weights.float_weights import OPTIMIZER
from edgekit.prepare.weights.stand_in import put_stand_ins, restore_nodes

EXTERNAL_FROM_BYTES = 1 << 30
"""A model of this size or more keeps its weights in a file beside it: protobuf ends at 2 GB, and copies cost memory."""

OUTSIDE_FROM_BYTES = 1 << 26
"""Weights of a model of this size or more lie in files while its graph is worked on, so that no copy is in memory."""

# These move or drop Q and DQ nodes, which a provider groups into units: it must see them where the quantizer put them.
_QDQ_CHANGERS = ("DoubleQDQPairsRemover", "QDQPropagationTransformer", OPTIMIZER)
_EXTERNAL = "session.optimized_model_external_initializers"


def keeps_external(model: Model) -> bool:
    """Returns True if the weights of a model stay outside the protobuf."""
    return model.size_bytes >= EXTERNAL_FROM_BYTES


def works_outside(model: Model) -> bool:
    """Returns True if the weights of a model lie in files while its graph is worked on."""
    return model.size_bytes >= OUTSIDE_FROM_BYTES


def optimize_basic(proto: onnx.ModelProto, model: Model, path: Path, folder: Path) -> onnx.ModelProto:
    """Returns the graph that ONNX Runtime shows to a provider; what it writes on the way goes to `path`.

    External weights are read from `folder`; those of a model that is not small end up in `path` + ".data". Where the
    graph cannot be kept from what only suits the CPU provider, it is returned as it is.

    Raises:
        RuntimeRefusal: ONNX Runtime cannot load the model.
    """
    name_nodes(proto.graph)
    nodes = onnx.GraphProto(node=proto.graph.node).node
    # Both before the session sees the graph: it replaces what it has no kernel for while it partitions, at any level.
    guard_half(proto)
    replaced = put_stand_ins(proto.graph)
    config = _read_from(folder) | _write_to(path, model)
    optimize_graph(_serialize(proto), path, _settings(proto, model, config), subject=str(model.path))
    optimized = onnx.load(str(path), load_external_data=False)
    stripped = strip_casts(optimized.graph)
    whole = restore_nodes(optimized.graph, replaced)
    # Casts that ONNX Runtime merged with the model's own cannot be taken out again; whether that happened shows only
    # when the stripped graph is loaded.
    if whole and (not stripped or _loads(optimized, model, path)):
        return optimized
    set_nodes(proto.graph, nodes)
    if works_outside(model):
        gather_data(proto, folder, path.with_name(f"{path.name}.data"))
    return proto


def _serialize(proto: onnx.ModelProto) -> bytes:
    return proto.SerializeToString(deterministic=True)


def _settings(proto: onnx.ModelProto, model: Model, config: dict[str, str]) -> SessionSettings:
    quantized = any(node.op_type == "DequantizeLinear" for node in proto.graph.node)
    disabled = _QDQ_CHANGERS if quantized else ()
    return SessionSettings(
        level=Level.BASIC,
        # Prepacked copies of all weights would double the memory, for a session that never runs.
        config=config | {"session.disable_prepacking": "1"},
        disabled_optimizers=disabled,
        threads=1,
        libraries=model.custom_ops,
    )


def _read_from(folder: Path) -> dict[str, str]:
    return {"session.model_external_initializers_file_folder_path": str(folder.absolute())}


def _write_to(path: Path, model: Model) -> dict[str, str]:
    if not works_outside(model):
        return {}
    return {f"{_EXTERNAL}_file_name": f"{path.name}.data", f"{_EXTERNAL}_min_size_in_bytes": "1024"}


def _loads(proto: onnx.ModelProto, model: Model, path: Path) -> bool:
    try:
        settings = SessionSettings(level=Level.DISABLED, config=_read_from(path.parent), libraries=model.custom_ops)
        CpuSession(_serialize(proto), settings)
    except RuntimeRefusal:
        return False
    return True
