"""The prepared model, on which every later stage works: static shapes and the optimized graph that a provider sees.

The graph is that of ONNX Runtime's basic optimizations, without what only suits its CPU provider, which has few fp16
kernels. ONNX Runtime puts casts around a node without a kernel (`insert_cast_transformer.cc`), and replaces a node that
ONNX defines as a function by the function's body. Providers of other devices have these kernels, so both changes are
prevented or undone here.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

from edgekit._files import AnyPath, as_path, replacing_file
from edgekit._ort import VERSION, Level, SessionSettings, external_config, makes_session, optimize_graph, tells_refusal
from edgekit.graph.constants import MOVES, ORT_DOMAIN, read_array, read_dequantized, write_dense
from edgekit.graph.graph import Node
from edgekit.graph.inference import infer_model, open_negative, refuse_empty_windows
from edgekit.graph.match import known, made_by, need
from edgekit.graph.rewrite import Writer, node_rewrite
from edgekit.model import model as models
from edgekit.model.external import point_into, skim_model
from edgekit.model.soundness import read_opsets
from edgekit.prepare import external
from edgekit.prepare.constants import OPTIMIZER
from edgekit.prepare.interface import drop_idle_nodes, freeze_inputs, keep_inputs, keep_outputs, name_nodes
from edgekit.prepare.opset import MAX_OPSET, choose_opset, convert_opset, lower_ir_version, lower_model, read_opset
from edgekit.prepare.rewrites.fused import FUSED, renew_softmax, split_fused
from edgekit.prepare.rewrites.planes import squeeze_late
from edgekit.prepare.shapes import fix_dims, infer_outputs

_AXES_AS_INPUT = 13  # since this opset Unsqueeze reads its axes
_ERF = 9  # since this opset ONNX has Erf
_BROADCASTING = 7  # since this opset Sub and Mul take a constant with fewer axes


def merge_domains(proto: onnx.ModelProto) -> None:
    """Writes the domain "ai.onnx" as "" everywhere, and the last import of each domain, which counts, in place."""
    for node in models.iterate_nodes(proto.graph):
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    models.refill(proto.opset_import, [helper.make_opsetid(*each) for each in read_opsets(proto.opset_import).items()])


def import_contrib(proto: onnx.ModelProto) -> None:
    """Adds the opset import of ONNX Runtime's contrib operators if a graph uses them, in place."""
    used = any(node.domain == ORT_DOMAIN for node in models.iterate_nodes(proto.graph))
    if used and all(entry.domain != ORT_DOMAIN for entry in proto.opset_import):
        proto.opset_import.add(domain=ORT_DOMAIN, version=1)


@node_rewrite("plain-scaler", {"Scaler"}, since=_BROADCASTING)
def write_scalers(writer: Writer) -> None:
    """Replaces a Scaler of scikit-learn, (x - offset) * scale in float32, by Sub and Mul.

    ONNX Runtime does not infer the shape of a Scaler, so its optimizer and the providers would skip what follows.
    """
    name, attributes = writer.x, writer.node.attributes
    need({"offset", "scale"} <= attributes.keys())
    if writer.dtype != "float32":
        name = writer.add("Cast", [name], "float", to=TensorProto.FLOAT)
    offset, scale = writer.constants({part: attributes[part] for part in ("offset", "scale")}, "float32")
    writer.add("Mul", [writer.add("Sub", [name, offset], "centred"), scale])


@node_rewrite("plain-features", {"ArrayFeatureExtractor"}, since=_BROADCASTING)
def write_features(writer: Writer) -> None:
    """Replaces an ArrayFeatureExtractor, by which scikit-learn names the class, by Gather along the last axis.

    ONNX Runtime does not infer what it makes of data with one axis: QNN takes that for a scalar.
    """
    name, rank = writer.x, len(known(writer.graph.value(writer.x).shape))
    if rank == 1:
        name = writer.reshape(name, "row_shape", [1, -1], "row")
    indices = writer.reshape(writer.node.input[1], "list_shape", [-1], "list")
    writer.add("Gather", [name, indices], axis=max(1, rank - 1))


@node_rewrite("shaped-labels", {"LabelEncoder"}, since=_BROADCASTING)
def state_shapes_of_labels(writer: Writer) -> None:
    """Gives what a LabelEncoder of ai.onnx.ml 1 makes the shape of its input, by a Reshape.

    ONNX infers this shape since version 2 alone, and no provider takes nodes whose shapes are unknown.
    """
    node, graph = writer.node, writer.graph
    need("classes_strings" in node.attributes)
    need(node.output[0] in graph.outputs or any(each.op_type != "Reshape" for each in graph.readers(node.output[0])))
    labels = writer.add(node.op_type, [writer.x], "labels", domain=node.domain, **node.attributes)
    writer.add("Reshape", [labels, writer.add("Shape", [writer.x], "shape")])


@node_rewrite("spread-scalar", {"Add", "Mul"}, since=_BROADCASTING)
def spread_scalars(writer: Writer) -> None:
    """Writes a number that scales or shifts the result of a Conv as one number for each channel.

    ONNX Runtime folds Mul and Add into weights and bias if their constant comes second and has the shape [C, 1, 1], but
    not [1]. PaddleOCR's networks scale and shift after each convolution; quantized, each step would be rounded again.
    """
    graph, node = writer.graph, writer.node
    for name, number in permutations(node.input):
        conv, read = made_by(graph, name, "Conv", "Mul"), [name]
        if conv is not None and conv.op_type == "Mul":
            read += [each for each in conv.input if graph.number(each) is None]
            conv = made_by(graph, read[1], "Conv") if len(read) == 2 else None
        is_only = all(len(graph.readers(each)) == 1 and each not in graph.outputs for each in read)
        weight = graph.constants.get(conv.input[1]) if conv is not None and conv.op_type == "Conv" else None
        value = graph.number(number)
        if weight is not None and is_only and value is not None:
            channels, *axes = weight.dims[:-1]
            dtype = helper.tensor_dtype_to_np_dtype(weight.data_type).name
            each = writer.constant("channels", np.full((channels, *(1 for _ in axes)), value), dtype)
            writer.add(node.op_type, [name, each])
            return


@node_rewrite("plain-erfc", {"Erfc"}, since=_ERF)
def write_erfc(writer: Writer) -> None:
    """Writes TensorFlow's Erfc(x), which tf2onnx leaves of Keras's exact GELU though ONNX has none, as 1 + Erf(-x).

    GELU has Erfc(-x * 0.7), perhaps turned by a Transpose: there the Neg goes, and the Transpose comes first, so that
    `join-gelu` knows the pattern.
    """
    graph, name, steps = writer.graph, writer.x, list[Node]()
    need(not writer.node.domain)
    while (node := made_by(graph, name, "Div", "Mul", "Transpose")) is not None and (
        node.op_type == "Transpose" or graph.number(node.input[1]) is not None
    ):
        steps.append(node)
        name = node.input[0]
    if (node := made_by(graph, name, "Neg")) is None:
        name = writer.add("Neg", [writer.x], "negated")
    else:
        name = node.input[0]
        steps.reverse()
        for at, step in enumerate(sorted(steps, key=lambda step: step.op_type != "Transpose")):
            name = writer.add(step.op_type, [name, *step.input[1:]], f"step-{at}", **step.attributes)
    one = writer.constant("one", 1, writer.dtype or "float32")
    writer.add("Add", [writer.add("Erf", [name], "erf"), one])


@node_rewrite("plain-lists", {"ConcatFromSequence", "OptionalGetElement", "SequenceAt"}, since=_AXES_AS_INPUT)
def write_lists(writer: Writer) -> None:
    """Reads tensors past the list or the Optional that was made of them: no provider has either.

    PyTorch's exporters write a list of Python so. Files in ORT format cannot hold an Optional.
    """
    node = writer.node
    maker = known(writer.graph.producers.get(writer.x))
    need(maker.op_type == ("Optional" if node.op_type == "OptionalGetElement" else "SequenceConstruct"))
    parts = maker.reads
    if node.op_type == "ConcatFromSequence":
        axis = node.integer("axis", 0)
        if node.integer("new_axis", 0):
            axes = writer.ints("axes", [axis])
            parts = (*(writer.add("Unsqueeze", [each, axes], f"part-{at}") for at, each in enumerate(parts)),)
        writer.add("Concat", parts, axis=axis)
        return
    index = int(writer.number(1)) if node.op_type == "SequenceAt" else 0
    need(-len(parts) <= index < len(parts))
    writer.add("Identity", [parts[index]])


@node_rewrite("list-axes", {"Unsqueeze"}, since=_AXES_AS_INPUT)
def list_axes(writer: Writer) -> None:
    """Writes an axis that is a number as a list of one: ONNX Runtime crashes where its Core ML provider reads it."""
    data, axes = writer.node.input
    need(not known(writer.graph.constants.get(axes)).dims)
    writer.add("Unsqueeze", [data, writer.reshaped("axes", axes, [1])])


@node_rewrite("stated-zeros", {"DequantizeLinear", "QuantizeLinear"})
def state_zeros(writer: Writer) -> None:
    """Gives a Q or DQ without a zero point the zeros that ONNX defines for it.

    ONNX Runtime writes them into the fusions that it saves (`SetOptionalZeroPoint` of qdq_util.cc), but does not count
    them as inputs, and refuses its own graph: "The sum of input arg count is not equal to size of input defs".
    """
    node, graph, dtype = writer.node, writer.graph, writer.dtype
    scales, maker = known(graph.constants.get(node.input[1])), node
    while maker.op_type in {"DequantizeLinear", *MOVES} and not dtype:
        maker = known(graph.producers.get(maker.input[0]))
    if maker.op_type == "QuantizeLinear":
        need("output_dtype" not in maker.attributes)
        dtype = known(graph.value(maker.input[2]).dtype) if maker.has_input(2) else "uint8"
    need(not node.has_input(2) and dtype in {"int8", "uint8", "int16", "uint16", "int32"})
    writer.copy(node).input[2:] = [writer.constant("zero", np.zeros(tuple(scales.dims)), dtype)]


@node_rewrite("folded-quantizers", {"QuantizeLinear"})
def fold_quantizers(writer: Writer) -> None:
    """Lets a Q read in float the constant that a DQ dequantizes: ONNX Runtime folds Q nodes, but no DQ.

    A quantizer writes both for weights that were quantized before, and for those that two layers share.
    """
    graph, name = writer.graph, writer.x
    while (same := made_by(graph, name, "Identity")) is not None:
        name = same.input[0]
    source = known(made_by(graph, name, "DequantizeLinear"))
    values = read_dequantized(source.proto, lambda read: known(graph.inline(read)))
    writer.copy(writer.node).input[0] = writer.constant("float", values, values.dtype.name)


CLEANING = (
    write_scalers, write_features, state_shapes_of_labels, squeeze_late, spread_scalars, write_erfc, write_lists,
    list_axes, state_zeros, fold_quantizers,
)  # fmt: skip
"""What every model gets, whatever the target."""


def drop_initializer_inputs(graph: onnx.GraphProto) -> None:
    """Removes initializers from the list of inputs, so that they count as constants, in place.

    IR version 3 required each initializer among the inputs, where a caller could replace it.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    models.refill(graph.input, [value for value in graph.input if value.name not in initializers])


def restore_metadata(proto: onnx.ModelProto, origin: onnx.ModelProto) -> None:
    """Copies the metadata of the original model, and drops unused opset imports, in place."""
    models.keep_used_opsets(proto)
    models.refill(proto.metadata_props, origin.metadata_props)
    proto.producer_name = origin.producer_name
    proto.producer_version = origin.producer_version
    proto.doc_string = origin.doc_string
    proto.graph.name = origin.graph.name or "graph"


def sort_values(graph: onnx.GraphProto) -> None:
    """Sorts initializers and value infos by name, in place: ONNX Runtime writes them in varying order."""
    for part in models.iterate_graphs(graph):
        part.initializer.sort(key=lambda tensor: tensor.name)
        part.value_info.sort(key=lambda value: value.name)


# The prefixes of inserted casts and of the values between them: ONNX Runtime's and ours.
_INSERTED = re.compile(r"^(InsertedPrecisionFreeCast_|EdgekitGuard\d+_)+")


def guard_half(proto: onnx.ModelProto) -> dict[str, int]:
    """Inserts casts to float32 around fp16 function operators, in place, so that ONNX Runtime does not inline them.

    Returns the element types of the values of a model that computes in fp16, {} for another one.
    """
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    if TensorProto.FLOAT16 not in types.values():
        return {}
    inferred = infer_model(proto).graph
    types |= {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
    nodes: list[onnx.NodeProto] = []
    for count, node in enumerate(proto.graph.node):
        schema: Any = defs.get_schema(node.op_type) if not node.domain and defs.has(node.op_type) else None
        half_inputs = [name for name in dict.fromkeys(node.input) if types.get(name) == TensorProto.FLOAT16]
        if schema is None or not (schema.has_function or schema.has_context_dependent_function):
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
    models.refill(proto.graph.node, nodes)
    return types


def restore_types(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto], types: Mapping[str, int]) -> None:
    """Adds the casts again that ONNX Runtime merged with casts of its own, in place.

    Inputs and outputs of a node get the types that they had before the optimization: `nodes` are the nodes as they were
    then, `types` the types of tensors by name.
    """
    originals = {node.name: node for node in nodes}
    pair, made = {TensorProto.FLOAT, TensorProto.FLOAT16}, dict[tuple[str, int], str]()
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        original, after = originals.get(node.name, node), list[onnx.NodeProto]()
        for place, (name, before) in enumerate(zip(node.input, original.input, strict=False)):
            kind = types.get(before, TensorProto.UNDEFINED)
            if {types.get(name), kind} == pair:
                if (name, kind) not in made:
                    made[name, kind] = f"{name}/{TensorProto.DataType.Name(kind)}"
                    kept.append(_cast(name, made[name, kind], kind))
                node.input[place] = made[name, kind]
        for place, (name, before) in enumerate(zip(node.output, original.output, strict=False)):
            if {types.get(name), types.get(before)} == pair:
                node.output[place] = f"{name}/{TensorProto.DataType.Name(types[before])}"
                after.append(_cast(node.output[place], name, types[name]))
        kept += [node, *after]
    models.refill(graph.node, kept)
    # ONNX Runtime states the type that a value had between its casts.
    stated = [(value, value.type.tensor_type.elem_type) for value in graph.value_info]
    models.refill(graph.value_info, [value for value, kind in stated if types.get(value.name, kind) == kind])


def strip_casts(graph: onnx.GraphProto, folder: Path = Path()) -> bool:
    """Removes the casts that edgekit and ONNX Runtime inserted, and restores the names of the values, in place.

    Returns True if there was one. If ONNX Runtime merged them with casts of the model, the types do not match any more.
    """
    stripped = False
    for part in models.iterate_graphs(graph):
        kept = [node for node in part.node if not _INSERTED.match(node.name)]
        # ONNX Runtime computes the cast of a constant: in half precision it is the constant again, without loss.
        folded = {_INSERTED.sub("", each.name): each for each in part.initializer if _INSERTED.match(each.name)}
        stripped |= len(kept) < len(part.node) or bool(folded)
        plain = {each.name: each for each in part.initializer if not _INSERTED.match(each.name)}
        halves = {name: read_array(each, folder).astype(np.float16) for name, each in folded.items()}
        again = {name: numpy_helper.from_array(half, name) for name, half in halves.items()}
        models.refill(part.initializer, [*(again | plain).values()])
        models.refill(part.node, kept)
        models.refill(part.value_info, [value for value in part.value_info if not _INSERTED.match(value.name)])
        for node in part.node:
            node.input[:] = [_INSERTED.sub("", name) for name in node.input]
            node.output[:] = [_INSERTED.sub("", name) for name in node.output]
    return stripped


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    name = source if _INSERTED.match(source) else result
    return helper.make_node("Cast", [source], [result], name=f"{name}/cast", to=to)


# These optimizers move or drop Q and DQ nodes, which a provider must see where the quantizer put them.
_QDQ_CHANGERS = ("DoubleQDQPairsRemover", "QDQPropagationTransformer", OPTIMIZER)
_EXTERNAL = "session.optimized_model_external_initializers"


def keeps_weights_on_disk(model: models.Model) -> bool:
    """Returns True if the graph of a model is edited with its weights on disk, so that no copy is in memory."""
    return model.size_bytes >= models.LARGE_BYTES


def optimize_basic(proto: onnx.ModelProto, model: models.Model, path: Path, folder: Path) -> onnx.ModelProto:
    """Returns the graph that ONNX Runtime shows to a provider, after its basic optimizations; it is written to `path`.

    External weights are read from `folder`; those of a large model are written to `path` + ".data". If a change for the
    CPU provider cannot be undone, the graph is returned without optimization.

    Raises:
        ModelError: an input is too small for a window.
        RuntimeRefusal: ONNX Runtime cannot load the model.
    """
    name_nodes(proto.graph)
    refuse_empty_windows(proto)
    nodes = onnx.GraphProto(node=proto.graph.node).node
    # At any level, a session replaces operators without a kernel: they are hidden from it.
    types = guard_half(proto)
    replaced = external.replace_unsupported(proto.graph)
    # Prepacked copies of all weights would double the memory, for a session that never runs.
    config = external_config(folder) | {"session.disable_prepacking": "1"}
    if keeps_weights_on_disk(model):
        config |= {f"{_EXTERNAL}_file_name": f"{path.name}.data", f"{_EXTERNAL}_min_size_in_bytes": "1024"}
    settings = SessionSettings(
        level=Level.BASIC, config=config, disabled_optimizers=_QDQ_CHANGERS, threads=1, libraries=model.custom_ops
    )
    optimize_graph(proto.SerializeToString(deterministic=True), path, settings, subject=str(model.path))
    optimized = onnx.load(str(path), load_external_data=False)
    stripped = strip_casts(optimized.graph, path.parent)
    restore_types(optimized.graph, nodes, types)
    # It writes the defaults of its own operators, of which an older runtime refuses those that it does not know.
    given = {node.name: {each.name for each in node.attribute} for node in nodes if node.domain == ORT_DOMAIN}
    for node in optimized.graph.node:
        if node.domain == ORT_DOMAIN and node.name in given:
            models.refill(node.attribute, [each for each in node.attribute if each.name in given[node.name]])
    whole = external.restore_nodes(optimized.graph, replaced)
    # Casts that ONNX Runtime merged with the model's own cannot be removed: then the stripped graph does not load.
    as_is = SessionSettings(level=Level.DISABLED, config=external_config(path.parent), libraries=model.custom_ops)
    if whole and (not stripped or makes_session(optimized.SerializeToString(deterministic=True), as_is)):
        return optimized
    models.refill(proto.graph.node, nodes)
    if keeps_weights_on_disk(model):
        external.gather_data(proto, folder, path.with_name(f"{path.name}.data"))
    return proto


def _needs_two_passes(proto: onnx.ModelProto, opset: int) -> bool:
    """Returns True if a graph must be optimized before it is converted to an opset, and again after.

    Constant folding removes operators that onnx's converter cannot lower. A GroupNormalization or CastLike, for which
    ONNX Runtime has no kernel, is replaced by its function body, whose constants only the next session folds; the scale
    of a GroupNormalization is per group before opset 21, and per channel since.
    """
    own = read_opset(proto)
    is_parted = any(node.op_type in {"GroupNormalization", "CastLike"} for node in models.iterate_nodes(proto.graph))
    return own <= MAX_OPSET and (opset < own or is_parted)


# Since this IR version, an initializer that is also an input is a default value; before, all had to be inputs.
_OVERRIDING = 4
# A model of this size or more keeps its weights as external data: a protobuf has at most 2 GB, and copies cost memory.
_EXTERNAL_FROM_BYTES = 1 << 30
# The suffix of constants that ONNX Runtime computed.
_MADE = ".prepared"


@tells_refusal
def prepare_model(
    model: models.Model,
    out: AnyPath,
    dims: Mapping[str, int] = MappingProxyType({}),
    *,
    opset: int | None = None,
    inputs: Collection[str] = (),
    outputs: Collection[str] = (),
    constants: Mapping[str, float] = MappingProxyType({}),
    may_stay_open: bool = False,
) -> models.Model:
    """Writes a model with static inputs and a clean graph to `out`, and returns it.

    Inputs and outputs keep their names and order. Nodes get unique names, constants are folded and no-ops removed (ONNX
    Runtime's basic level: the graph that it shows to a provider). Initializers are no inputs any more. An opset below
    13 becomes 17. Q and DQ nodes stay. Weights of 1 GiB and more go into `out` + ".data". A branch of an If that is
    never taken need not fit the dimensions.

    Args:
        model: any ONNX model.
        out: the path of the new file.
        dims: a number for each dynamic dimension of the inputs, by its name or as `INPUT:AXIS`.
        opset: the opset to convert to, higher or lower.
        outputs: the outputs to keep, or values that become outputs; all outputs if none is named.
        inputs: the inputs to keep, or values of the prepared graph that become inputs; all inputs if none is named.
        constants: inputs that become constants, by name, with the number that fills them.
        may_stay_open: if True, dimensions without a number stay dynamic.

    Raises:
        UsageError: a dimension, output or input that does not exist, or a dynamic dimension that got no number.
        ModelError: the opset cannot be changed, or an input is too small for a window.
        RuntimeRefusal: ONNX Runtime cannot load the model.
        OutputError: `out` cannot be written.
    """
    out = as_path(out)
    proto, folder = _read_graph(model), model.path.parent
    _clean_interface(proto, outputs, constants)
    if not (folds_first := bool(constants) or _has_branches(proto)):
        fix_dims(proto.graph, dims, may_stay_open=may_stay_open)
    origin, given, chosen = _copy_texts(proto), models.list_names(proto.graph), choose_opset(proto, opset)
    lower_ir_version(proto, chosen)
    with replacing_file(out) as temporary:
        if folds_first or _needs_two_passes(proto, chosen):
            proto = optimize_basic(proto, model, temporary.with_name("first.onnx"), folder)
            folder = temporary.parent
        if folds_first:
            fix_dims(proto.graph, dims, may_stay_open=may_stay_open)
        proto = optimize_basic(_split_fused(convert_opset(proto, chosen)), model, temporary, folder)
        keep_inputs(proto, inputs)
        # A session that optimizes the graph again computes constants of the same names, on which ONNX Runtime 1.31
        # fails ("Attempt to replace the existing tensor").
        made = {tensor.name for tensor in proto.graph.initializer} - given
        models.rename_tensors(proto.graph, {name: f"{name}{_MADE}" for name in made})
        _write(proto, model, temporary, out, origin)
    return models.load_model(out, custom_ops=model.custom_ops)


def _has_branches(proto: onnx.ModelProto) -> bool:
    """Returns True if branches must be folded before dimensions are fixed.

    ONNX Runtime refuses a branch that does not fit the dimensions, or crashes.
    """
    return any(node.op_type == "If" for node in proto.graph.node)


def make_runnable(
    model: models.Model, folder: Path, constants: Mapping[str, float] = MappingProxyType({}), runtime: str = VERSION
) -> models.Model:
    """Returns a model that was given as one that ONNX Runtime can open; what must be changed is written to `folder`.

    It has an IR version and opset that this version of ONNX Runtime reads (`lower_model`), constants in place of some
    inputs (`freeze_model`), no Erfc, and no window that ends the process.

    Raises:
        UsageError: a name that is no input, or a number that its type cannot hold.
        ModelError: an operator cannot be converted to an older opset, or an input is too small for a window.
        OutputError: `folder` cannot be written.
    """
    opened = freeze_model(lower_model(model, folder / "lowered", runtime), folder / "frozen", constants)
    seen = skim_model(opened.path)
    refuse_empty_windows(seen)
    # ONNX Runtime has no Erfc.
    if all(node.op_type != "Erfc" or node.domain for node in models.iterate_nodes(seen.graph)):
        return opened
    proto = models.read_proto(opened)
    name_nodes(proto.graph)
    for part in models.iterate_graphs(proto.graph):
        write_erfc(part, read_opset(proto))
    written = models.save_proto(proto, folder / "written" / model.path.name)
    return msgspec.structs.replace(written, name=model.name, custom_ops=model.custom_ops)


def freeze_model(model: models.Model, folder: Path, constants: Mapping[str, float]) -> models.Model:
    """Writes a model to `folder` in which some inputs are constants filled with one number; without any, returns it.

    Raises:
        UsageError: a name that is no input, or a number that its type cannot hold.
        OutputError: `folder` cannot be written.
    """
    if not constants:
        return model
    proto = models.read_proto(model)
    freeze_inputs(proto.graph, constants)
    frozen = models.save_proto(proto, folder / model.path.name)
    return msgspec.structs.replace(frozen, name=model.name, custom_ops=model.custom_ops)


def sketch_model(
    model: models.Model, out: Path, dims: Mapping[str, int], *, may_stay_open: bool = False
) -> models.Model:
    """Writes what `prepare_model` writes, but without the values of large weights: for a check, not to run.

    Weights whose values a rewrite reads keep them.

    Raises:
        UsageError: a dimension that does not exist, or a dynamic dimension that got no number.
        ModelError: the opset cannot be changed, or an input is too small for a window.
        RuntimeRefusal: ONNX Runtime cannot load the model.
        OutputError: `out` cannot be written.
    """
    proto = external.skim_weights(model) or _read_graph(model)
    if _has_branches(proto):
        return prepare_model(model, out, dims, may_stay_open=may_stay_open)
    _clean_interface(proto, (), {})
    fix_dims(proto.graph, dims, may_stay_open=may_stay_open)
    origin, chosen = _copy_texts(proto), choose_opset(proto, None)
    lower_ir_version(proto, chosen)
    return _write_sketch(proto, model, out, origin, chosen, splits=True)


def show_model(model: models.Model, out: Path) -> models.Model:
    """Writes the graph that a provider sees when an app opens the user's file as it is, without large weights.

    Only ONNX Runtime's basic level changes it: inputs, dynamic dimensions and the opset stay, and an initializer that
    is also an input is no constant.

    Raises:
        RuntimeRefusal: ONNX Runtime cannot load the model.
        OutputError: `out` cannot be written.
    """
    proto = external.skim_weights(model) or _read_graph(model)
    if proto.ir_version < _OVERRIDING:
        drop_initializer_inputs(proto.graph)
        proto.ir_version = _OVERRIDING
    # A caller may override these, so a session treats them as inputs.
    fed = {value.name for value in proto.graph.input}
    models.refill(proto.graph.initializer, [tensor for tensor in proto.graph.initializer if tensor.name not in fed])
    return _write_sketch(proto, model, out, _copy_texts(proto), read_opset(proto))


def _write_sketch(
    proto: onnx.ModelProto, model: models.Model, out: Path, origin: onnx.ModelProto, opset: int, *, splits: bool = False
) -> models.Model:
    """Writes the optimized graph of a model in this opset, without the values of large weights."""
    shells, folder = external.strip_weights(proto), model.path.parent
    with replacing_file(out) as temporary:
        if _needs_two_passes(proto, opset):
            proto, folder = optimize_basic(proto, model, temporary.with_name("first.onnx"), folder), temporary.parent
        proto = convert_opset(proto, opset)
        proto = optimize_basic(_split_fused(proto) if splits else proto, model, temporary, folder)
        external.put_weights(proto.graph, shells)
        _write(proto, model, temporary, out, origin)
    return models.load_model(out, custom_ops=model.custom_ops)


def sketch_unloaded(model: models.Model, out: Path, dims: Mapping[str, int]) -> models.Model:
    """Writes the graph of a model that ONNX Runtime cannot load, without large weights and without optimization.

    Dimensions without a number stay open.

    Raises:
        UsageError: there is no such dimension.
        OutputError: `out` cannot be written.
    """
    proto = skim_model(model.path)
    _clean_interface(proto, (), {})
    fix_dims(proto.graph, dims, may_stay_open=True)
    for tensor in proto.graph.initializer:
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    with replacing_file(out) as temporary:
        _write(proto, model, temporary, out)
    return models.load_model(out)


def _read_graph(model: models.Model) -> onnx.ModelProto:
    """Returns the graph of a model, with its weights unless they are large."""
    if keeps_weights_on_disk(model) and not model.external_files:
        # Weights inside the file become external data in this file.
        return point_into(model.path)
    return models.read_proto(model, weights=not keeps_weights_on_disk(model))


def _clean_interface(proto: onnx.ModelProto, outputs: Collection[str], constants: Mapping[str, float]) -> None:
    merge_domains(proto)
    # ONNX Runtime needs no import of its own operators; onnx's converter does.
    import_contrib(proto)
    for part in models.iterate_graphs(proto.graph):
        # ONNX Runtime leaves initializers sparse, and its quantizer does not find these.
        write_dense(part)
    # ONNX Runtime takes nodes in any order; what follows, and onnx's converter, do not.
    models.refill(proto.graph.node, models.order_nodes(proto.graph))
    name_nodes(proto.graph)
    open_negative(proto.graph)
    drop_initializer_inputs(proto.graph)
    keep_outputs(proto, outputs)
    freeze_inputs(proto.graph, constants)
    for rewrite in CLEANING:
        rewrite(proto.graph, read_opset(proto))
    drop_idle_nodes(proto.graph)


def _split_fused(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Splits what ONNX Runtime's optimizers fused, in place, and returns the model."""
    if any(node.op_type in {*FUSED, "QLinearSoftmax"} for node in models.iterate_nodes(proto.graph)):
        # Element types and ranks decide into what.
        typed = infer_model(proto)
        for part, view in zip(models.iterate_graphs(proto.graph), models.iterate_graphs(typed.graph), strict=True):
            known = list(part.value_info)
            models.refill(part.value_info, view.value_info)
            for rewrite in (split_fused, renew_softmax):
                rewrite(part, read_opset(proto))
            models.refill(part.value_info, known)
    return proto


def _write(
    proto: onnx.ModelProto, model: models.Model, temporary: Path, out: Path, origin: onnx.ModelProto | None = None
) -> None:
    """Writes the graph of a model; an optimized graph gets the texts of its `origin` again, and a fixed order."""
    if origin is not None:
        name_nodes(proto.graph)
        restore_metadata(proto, origin)
        infer_outputs(proto)
        sort_values(proto.graph)
    if keeps_weights_on_disk(model) and model.size_bytes < _EXTERNAL_FROM_BYTES:
        external.write_inline(proto, temporary.parent, temporary)
        return
    temporary.write_bytes(proto.SerializeToString(deterministic=True))
    models.move_data(temporary, out)


def _copy_texts(proto: onnx.ModelProto) -> onnx.ModelProto:
    texts = onnx.ModelProto(graph=onnx.GraphProto(name=proto.graph.name))
    models.copy_fields(proto, texts, {"graph"})
    return texts
