"""ONNX Runtime's basic graph optimizations, without what only suits its CPU provider.

The CPU provider has few fp16 kernels. ONNX Runtime puts casts around a node without a kernel
(`insert_cast_transformer.cc`), and replaces a node that ONNX defines as a function by the function's body. Providers of
other devices have these kernels, so both changes are prevented or undone here.
"""

import re
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, defs, helper

from edgekit._ort import Level, SessionSettings, external_config, makes_session, optimize_graph
from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.graph.inference import infer_model
from edgekit.graph.rewrite import Writer, replace_nodes
from edgekit.model.model import Model, iterate_graphs, iterate_nodes, keep_used_opsets, refill
from edgekit.prepare.constants import OPTIMIZER
from edgekit.prepare.external import gather_data
from edgekit.prepare.opset import read_opset
from edgekit.prepare.stripped import replace_unsupported, restore_nodes

_BROADCASTING = 7  # since this opset Sub and Mul take a constant with fewer axes


def merge_domains(proto: onnx.ModelProto) -> None:
    """Writes the domain "ai.onnx" as "" everywhere, in place: both mean the same."""
    for node in iterate_nodes(proto.graph):
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    for entry in proto.opset_import:
        entry.domain = "" if entry.domain == "ai.onnx" else entry.domain


def import_contrib(proto: onnx.ModelProto) -> None:
    """Adds the opset import of ONNX Runtime's contrib operators if a graph uses them, in place."""
    used = any(node.domain == ORT_DOMAIN for node in iterate_nodes(proto.graph))
    if used and all(entry.domain != ORT_DOMAIN for entry in proto.opset_import):
        proto.opset_import.add(domain=ORT_DOMAIN, version=1)


def write_scalers(proto: onnx.ModelProto) -> None:
    """Replaces each Scaler of scikit-learn, (x - offset) * scale in float32, by Sub and Mul, in place.

    ONNX Runtime does not infer the shape of a Scaler, so its optimizer and the providers would skip what follows.
    """
    replace_nodes(proto.graph, read_opset(proto), {"Scaler"}, _write_scaler)


def _write_scaler(writer: Writer) -> None:
    name, attributes = writer.node.input[0], writer.node.attributes
    if writer.opset < _BROADCASTING or not {"offset", "scale"} <= attributes.keys():
        return
    if writer.dtype != "float32":
        name = writer.add("Cast", [name], "float", to=TensorProto.FLOAT)
    offset, scale = (writer.constant(part, attributes[part], "float32") for part in ("offset", "scale"))
    writer.add("Mul", [writer.add("Sub", [name, offset], "centred"), scale])


def drop_initializer_inputs(graph: onnx.GraphProto) -> None:
    """Removes initializers from the list of inputs, so that they count as constants, in place.

    IR version 3 required each initializer among the inputs, where a caller could replace it.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    refill(graph.input, [value for value in graph.input if value.name not in initializers])


def name_nodes(graph: onnx.GraphProto) -> None:
    """Gives every node, in subgraphs too, a unique name, in place; names that are unique already stay.

    A node without a name is named after its operator and its first output, so that the name does not depend on other
    nodes.
    """
    nodes = list(iterate_nodes(graph))
    taken = {node.name for node in nodes}
    seen: set[str] = set()
    # The next free number is remembered for each name: thousands of nodes may share one.
    counts: dict[str, int] = {}
    for node in nodes:
        if not node.name or node.name in seen:
            # With running numbers, an inserted node would rename all later ones, and reports could not be compared.
            stem = node.name or f"{node.op_type}_{next(filter(None, node.output), '')}"
            name = stem
            while name in taken:
                counts[stem] = counts.get(stem, 0) + 1
                name = f"{stem}_{counts[stem]}"
            node.name = name
            taken.add(node.name)
        seen.add(node.name)


def restore_metadata(proto: onnx.ModelProto, origin: onnx.ModelProto) -> None:
    """Copies the metadata of the original model, and drops unused opset imports, in place."""
    keep_used_opsets(proto)
    refill(proto.metadata_props, origin.metadata_props)
    proto.producer_name = origin.producer_name
    proto.producer_version = origin.producer_version
    proto.doc_string = origin.doc_string
    proto.graph.name = origin.graph.name or "graph"


def sort_values(graph: onnx.GraphProto) -> None:
    """Sorts initializers and value infos by name, in place: ONNX Runtime writes them in varying order."""
    for part in iterate_graphs(graph):
        part.initializer.sort(key=lambda tensor: tensor.name)
        part.value_info.sort(key=lambda value: value.name)


# The prefixes of inserted casts and of the values between them: ONNX Runtime's and ours.
_INSERTED = re.compile(r"^(InsertedPrecisionFreeCast_|EdgekitGuard\d+_)+")


def guard_half(proto: onnx.ModelProto) -> None:
    """Inserts casts to float32 around fp16 function operators, in place, so that ONNX Runtime does not inline them."""
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    if TensorProto.FLOAT16 not in types.values():
        return
    inferred = infer_model(proto).graph
    types |= {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    nodes: list[onnx.NodeProto] = []
    for count, node in enumerate(proto.graph.node):
        schema: Any = defs.get_schema(node.op_type) if not node.domain and defs.has(node.op_type) else None
        half_inputs = [name for name in dict.fromkeys(node.input) if types.get(name) == TensorProto.FLOAT16]
        if schema is None or not half_inputs or not (schema.has_function or schema.has_context_dependent_function):
            nodes.append(node)
            continue
        prefix = f"EdgekitGuard{count}_"
        outputs = [name for name in node.output if types.get(name) == TensorProto.FLOAT16]
        inside = onnx.NodeProto()
        inside.CopyFrom(node)
        inside.input[:] = [f"{prefix}{name}" if name in half_inputs else name for name in node.input]
        inside.output[:] = [f"{prefix}{name}" if name in outputs else name for name in node.output]
        before = [_cast(name, f"{prefix}{name}", TensorProto.FLOAT) for name in half_inputs]
        nodes += [*before, inside, *(_cast(f"{prefix}{name}", name, TensorProto.FLOAT16) for name in outputs)]
    refill(proto.graph.node, nodes)


def strip_casts(graph: onnx.GraphProto) -> bool:
    """Removes the casts that edgekit and ONNX Runtime inserted, and restores the names of the values, in place.

    Returns True if there was one. If ONNX Runtime merged them with casts of the model, the types do not match any more.
    """
    stripped = False
    for part in iterate_graphs(graph):
        kept = [node for node in part.node if not _INSERTED.match(node.name)]
        stripped |= len(kept) < len(part.node)
        refill(part.node, kept)
        refill(part.value_info, [value for value in part.value_info if not _INSERTED.match(value.name)])
        for node in part.node:
            node.input[:] = [_INSERTED.sub("", name) for name in node.input]
            node.output[:] = [_INSERTED.sub("", name) for name in node.output]
    return stripped


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    name = source if _INSERTED.match(source) else result
    return helper.make_node("Cast", [source], [result], name=f"{name}/cast", to=to)


ON_DISK_FROM_BYTES = 1 << 26
"""The graph of a model of this size or more is edited with its weights on disk, so that no copy is in memory."""

# These optimizers move or drop Q and DQ nodes, which a provider must see where the quantizer put them.
_QDQ_CHANGERS = ("DoubleQDQPairsRemover", "QDQPropagationTransformer", OPTIMIZER)
_EXTERNAL = "session.optimized_model_external_initializers"


def keeps_weights_on_disk(model: Model) -> bool:
    """Returns True if the graph of a model is edited with its weights on disk."""
    return model.size_bytes >= ON_DISK_FROM_BYTES


def optimize_basic(proto: onnx.ModelProto, model: Model, path: Path, folder: Path) -> onnx.ModelProto:
    """Returns the graph that ONNX Runtime shows to a provider, after its basic optimizations; it is written to `path`.

    External weights are read from `folder`; those of a large model are written to `path` + ".data". If a change for the
    CPU provider cannot be undone, the graph is returned without optimization.

    Raises:
        RuntimeRefusal: ONNX Runtime cannot load the model.
    """
    name_nodes(proto.graph)
    nodes = onnx.GraphProto(node=proto.graph.node).node
    # At any level, a session replaces operators without a kernel: they are hidden from it.
    guard_half(proto)
    replaced = replace_unsupported(proto.graph)
    # Prepacked copies of all weights would double the memory, for a session that never runs.
    config = external_config(folder) | {"session.disable_prepacking": "1"}
    if keeps_weights_on_disk(model):
        config |= {f"{_EXTERNAL}_file_name": f"{path.name}.data", f"{_EXTERNAL}_min_size_in_bytes": "1024"}
    settings = SessionSettings(
        level=Level.BASIC,
        config=config,
        disabled_optimizers=_QDQ_CHANGERS,
        threads=1,
        libraries=model.custom_ops,
    )
    optimize_graph(proto.SerializeToString(deterministic=True), path, settings, subject=str(model.path))
    optimized = onnx.load(str(path), load_external_data=False)
    stripped = strip_casts(optimized.graph)
    whole = restore_nodes(optimized.graph, replaced)
    # Casts that ONNX Runtime merged with the model's own cannot be removed: then the stripped graph does not load.
    as_is = SessionSettings(level=Level.DISABLED, config=external_config(path.parent), libraries=model.custom_ops)
    if whole and (not stripped or makes_session(optimized.SerializeToString(deterministic=True), as_is)):
        return optimized
    refill(proto.graph.node, nodes)
    if keeps_weights_on_disk(model):
        gather_data(proto, folder, path.with_name(f"{path.name}.data"))
    return proto
