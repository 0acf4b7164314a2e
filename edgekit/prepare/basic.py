"""ONNX Runtime's basic graph optimizations, without what only suits its CPU provider.

The CPU provider has few fp16 kernels. Around a node without a kernel ONNX Runtime puts casts
(`insert_cast_transformer.cc`), and it replaces a node that ONNX defines as a function by the function's body. Providers
of other devices have these kernels, so both changes are undone here.
"""

import re
from collections.abc import Collection, MutableSequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, defs, helper

from edgekit._ort import CpuSession, Level, SessionSettings, external_config, optimize_graph
from edgekit.errors import RuntimeRefusal
from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.model.model import Model, iterate_graphs, iterate_nodes, keep_used_opsets, refill, rename_tensors
from edgekit.prepare.constants import OPTIMIZER
from edgekit.prepare.external import gather_data
from edgekit.prepare.shapes import infer_types
from edgekit.prepare.stripped import put_stand_ins, restore_nodes

# Small changes that keep what a model computes: names, domains, order, metadata.

_MADE = ".prepared"


def merge_domains(proto: onnx.ModelProto) -> None:
    """Writes the domain "ai.onnx" as "" everywhere, in place: both mean the same, and files mix them."""
    for node in iterate_nodes(proto.graph):
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    for entry in proto.opset_import:
        entry.domain = "" if entry.domain == "ai.onnx" else entry.domain


def import_contrib(proto: onnx.ModelProto) -> None:
    """Adds the opset import of ONNX Runtime's contrib operators where a graph uses them, in place."""
    used = any(node.domain == ORT_DOMAIN for node in iterate_nodes(proto.graph))
    if used and all(entry.domain != ORT_DOMAIN for entry in proto.opset_import):
        proto.opset_import.add(domain=ORT_DOMAIN, version=1)


def drop_initializer_inputs(graph: onnx.GraphProto) -> None:
    """Removes initializers from the list of inputs, so that they count as constants, in place.

    IR version 3 wanted each initializer among the inputs, where a caller could replace it.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    refill(graph.input, [value for value in graph.input if value.name not in initializers])


def name_nodes(graph: onnx.GraphProto) -> None:
    """Gives every node, in bodies too, a name of its own, in place; names that are unique already stay.

    A node without a name is called after its operator and its first output, so that the name does not depend on what
    stands before it.
    """
    nodes = list(iterate_nodes(graph))
    taken = {node.name for node in nodes}
    seen: set[str] = set()
    # The next free number is remembered for each name: thousands of nodes may share one.
    counts: dict[str, int] = {}
    for node in nodes:
        if not node.name or node.name in seen:
            # Not a running number: a node inserted at the front would rename all later ones, and reports of two
            # versions could not be compared.
            stem = node.name or f"{node.op_type}_{next(filter(None, node.output), '')}"
            name = stem
            while name in taken:
                counts[stem] = counts.get(stem, 0) + 1
                name = f"{stem}_{counts[stem]}"
            node.name = name
            taken.add(node.name)
        seen.add(node.name)


def rename_made(graph: onnx.GraphProto, given: Collection[str]) -> None:
    """Renames the initializers that ONNX Runtime added (those not in `given`), in place.

    A session that optimizes the graph again makes constants of the same names, and ONNX Runtime 1.31 fails on two that
    are alike ("Attempt to replace the existing tensor").
    """
    made = {tensor.name: f"{tensor.name}{_MADE}" for tensor in graph.initializer if tensor.name not in given}
    rename_tensors(graph, made)


def restore_stamps(proto: onnx.ModelProto, origin: onnx.ModelProto) -> None:
    """Restores the metadata of the original model, and drops opset imports that no node needs, in place."""
    keep_used_opsets(proto)
    refill(proto.metadata_props, origin.metadata_props)
    proto.producer_name = origin.producer_name
    proto.producer_version = origin.producer_version
    proto.doc_string = origin.doc_string
    proto.graph.name = origin.graph.name or "graph"


def sort_values(graph: onnx.GraphProto) -> None:
    """Sorts initializers and value infos by name, in place: ONNX Runtime writes them in the order of a hash table."""
    for part in iterate_graphs(graph):
        part.initializer.sort(key=lambda tensor: tensor.name)
        part.value_info.sort(key=lambda value: value.name)


# How the names of inserted casts, and of the values between them, begin: ONNX Runtime's and ours.
_INSERTED = re.compile(r"^(InsertedPrecisionFreeCast_|EdgekitGuard\d+_)+")


def guard_half(proto: onnx.ModelProto) -> None:
    """Inserts casts around fp16 function operators, in place, so that ONNX Runtime does not inline them."""
    if not _has_half(proto.graph):
        return
    types = infer_types(proto)
    nodes: list[onnx.NodeProto] = []
    for count, node in enumerate(proto.graph.node):
        if _is_function(node) and any(types.get(name) == TensorProto.FLOAT16 for name in node.input):
            nodes.extend(_guard_node(node, types, f"EdgekitGuard{count}_"))
        else:
            nodes.append(node)
    refill(proto.graph.node, nodes)


def strip_casts(graph: onnx.GraphProto) -> bool:
    """Removes the casts that edgekit and ONNX Runtime inserted, and restores the names of the values, in place.

    Returns True if there was one. Where ONNX Runtime merged them with casts of the model, the types no longer fit.
    """
    stripped = False
    for part in iterate_graphs(graph):
        kept = [node for node in part.node if not _INSERTED.match(node.name)]
        stripped |= len(kept) < len(part.node)
        refill(part.node, kept)
        refill(part.value_info, [value for value in part.value_info if not _INSERTED.match(value.name)])
        for node in part.node:
            _strip_prefix(node.input)
            _strip_prefix(node.output)
    return stripped


def _has_half(graph: onnx.GraphProto) -> bool:
    return any(tensor.data_type == TensorProto.FLOAT16 for tensor in graph.initializer) or any(
        value.type.tensor_type.elem_type == TensorProto.FLOAT16 for value in graph.input
    )


def _is_function(node: onnx.NodeProto) -> bool:
    if node.domain or not defs.has(node.op_type):
        return False
    schema: Any = defs.get_schema(node.op_type)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _guard_node(node: onnx.NodeProto, types: dict[str, int], prefix: str) -> list[onnx.NodeProto]:
    halves = list(dict.fromkeys(name for name in node.input if types.get(name) == TensorProto.FLOAT16))
    outputs = [name for name in node.output if types.get(name) == TensorProto.FLOAT16]
    inside = onnx.NodeProto()
    inside.CopyFrom(node)
    inside.input[:] = [f"{prefix}{name}" if name in halves else name for name in node.input]
    inside.output[:] = [f"{prefix}{name}" if name in outputs else name for name in node.output]
    before = [_cast(name, f"{prefix}{name}", TensorProto.FLOAT) for name in halves]
    return [*before, inside, *(_cast(f"{prefix}{name}", name, TensorProto.FLOAT16) for name in outputs)]


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    name = source if _INSERTED.match(source) else result
    return helper.make_node("Cast", [source], [result], name=f"{name}/cast", to=to)


def _strip_prefix(names: MutableSequence[str]) -> None:
    names[:] = [_INSERTED.sub("", name) for name in names]


EXTERNAL_FROM_BYTES = 1 << 30
"""A model of this size or more keeps its weights in a file beside it: protobuf ends at 2 GB, and copies cost memory."""

OUTSIDE_FROM_BYTES = 1 << 26
"""Weights of a model of this size or more lie in files while its graph is worked on, so that no copy is in memory."""

# These optimizers move or drop Q and DQ nodes. A provider groups Q and DQ into units, and must see them where the
# quantizer put them.
_QDQ_CHANGERS = ("DoubleQDQPairsRemover", "QDQPropagationTransformer", OPTIMIZER)
_EXTERNAL = "session.optimized_model_external_initializers"


def keeps_external(model: Model) -> bool:
    """Returns True if the weights of a model stay outside the protobuf."""
    return model.size_bytes >= EXTERNAL_FROM_BYTES


def works_outside(model: Model) -> bool:
    """Returns True if the weights of a model lie in files while its graph is worked on."""
    return model.size_bytes >= OUTSIDE_FROM_BYTES


def optimize_basic(proto: onnx.ModelProto, model: Model, path: Path, folder: Path) -> onnx.ModelProto:
    """Returns the graph that ONNX Runtime shows to a provider; `path` is where ONNX Runtime writes it.

    External weights are read from `folder`; those of a large model are written to `path` + ".data". Where a change that
    only suits the CPU provider cannot be undone, the graph is returned without optimization.

    Raises:
        RuntimeRefusal: ONNX Runtime cannot load the model.
    """
    name_nodes(proto.graph)
    nodes = onnx.GraphProto(node=proto.graph.node).node
    # Both come before the session sees the graph: at any level it replaces operators that it has no kernel for.
    guard_half(proto)
    replaced = put_stand_ins(proto.graph)
    serialized = proto.SerializeToString(deterministic=True)
    optimize_graph(serialized, path, _settings(proto, model, path, folder), subject=str(model.path))
    optimized = onnx.load(str(path), load_external_data=False)
    stripped = strip_casts(optimized.graph)
    whole = restore_nodes(optimized.graph, replaced)
    # Casts that ONNX Runtime merged with the model's own cannot be taken out again; whether that happened shows only
    # when the stripped graph is loaded.
    if whole and (not stripped or _loads(optimized, model, path)):
        return optimized
    refill(proto.graph.node, nodes)
    if works_outside(model):
        gather_data(proto, folder, path.with_name(f"{path.name}.data"))
    return proto


def _settings(proto: onnx.ModelProto, model: Model, path: Path, folder: Path) -> SessionSettings:
    # Prepacked copies of all weights would double the memory, for a session that never runs.
    config = external_config(folder) | {"session.disable_prepacking": "1"}
    if works_outside(model):
        config |= {f"{_EXTERNAL}_file_name": f"{path.name}.data", f"{_EXTERNAL}_min_size_in_bytes": "1024"}
    quantized = any(node.op_type == "DequantizeLinear" for node in proto.graph.node)
    return SessionSettings(
        level=Level.BASIC,
        config=config,
        disabled_optimizers=_QDQ_CHANGERS if quantized else (),
        threads=1,
        libraries=model.custom_ops,
    )


def _loads(proto: onnx.ModelProto, model: Model, path: Path) -> bool:
    try:
        config = external_config(path.parent)
        settings = SessionSettings(level=Level.DISABLED, config=config, libraries=model.custom_ops)
        CpuSession(proto.SerializeToString(deterministic=True), settings)
    except RuntimeRefusal:
        return False
    return True
