"""A model file and the facts read from it; large weights stay in their files."""

import functools
import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from operator import le
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import onnx
from google.protobuf.message import DecodeError

from edgekit._files import AnyPath, as_path, digest_file, move_file, safe_join, writing
from edgekit.errors import BundleError, ModelError, UsageError, reraised
from edgekit.model import external, soundness
from edgekit.model.tensors import TensorSpec, name_dim
from edgekit.target import read_version

_T = TypeVar("_T")


class OrtFormats(NamedTuple):
    """The newest IR version, opset of ai.onnx and version of the ORT format that an ONNX Runtime loads.

    It refuses anything newer at load. ORT formats below 5, of ONNX Runtime up to 1.12, are read by full builds only.
    """

    since: str
    ir_version: int
    opset: int
    ort_format: int


# Measured 2026-11-22 and 2026-11-23 with the wheels 1.15.1, 1.16.0, 1.16.3, 1.17.3, 1.18.0, 1.19.2, 1.20.1, 1.22.1,
# 1.23.2, 1.24.4, 1.26.0, 1.28.0 to 1.30.0, 1.31.1 and 1.32.0: a model of one Relu, and one file of each version of the
# ORT format. Each writes the newest version that it reads. The sources of 1.15 call its version 6, but 1.15.1 refuses
# 6.
ORT_FORMATS = (
    OrtFormats("1.15.0", 9, 19, 5),
    OrtFormats("1.16.0", 9, 19, 6),
    OrtFormats("1.17.0", 9, 20, 6),
    OrtFormats("1.18.0", 10, 21, 6),
    OrtFormats("1.22.0", 10, 22, 6),
    OrtFormats("1.23.0", 11, 23, 6),
    OrtFormats("1.24.0", 13, 25, 6),
    OrtFormats("1.26.0", 13, 26, 6),
    OrtFormats("1.32.0", 14, 28, 6),
)


def formats_of(version: str) -> OrtFormats:
    """Returns the row of the newest listed ONNX Runtime up to this version, the first row for older ones."""
    known = [row for row in ORT_FORMATS if read_version(row.since) <= read_version(version)]
    return known[-1] if known else ORT_FORMATS[0]


def find_reader(ir_version: int, opset: int, ort_format: int = 0) -> str | None:
    """Returns the oldest ONNX Runtime that loads all of these versions, None if no measured one does.

    `ort_format` is the version of a file in ORT format, 0 if there is none.
    """
    needed = (ir_version, opset, ort_format)
    return next((row.since for row in ORT_FORMATS if all(map(le, needed, row[1:]))), None)


QuantizedForm = Literal["", "qdq", "qoperator", "dynamic", "weights"]
# Sizes in protobuf are signed 32-bit numbers (https://protobuf.dev/programming-guides/proto-limits).
MAX_PROTOBUF_BYTES = 2**31 - 1
MOST_INLINE_BYTES = MAX_PROTOBUF_BYTES - (64 << 20)
"""Weights up to this size are written into the protobuf; the rest of 2 GB is for the graph."""
LARGE_BYTES = 64 << 20
"""Models from this size on are read weight by weight; the limit was chosen by hand."""
_MAIN_DOMAIN = "ai.onnx"
_INTEGER_OPS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"})


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an ONNX file without a look at its nodes.

    `external_files` are the files that the model refers to, sorted: external data, and the compiled contexts of
    EPContext nodes. `sha256` and `size_bytes` cover them too. `opsets` maps domains to versions ("ai.onnx" is ONNX's
    own). `inputs` leaves out initializers.
    """

    name: str
    sha256: str
    size_bytes: int
    ir_version: int
    opsets: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    external_files: tuple[str, ...]


class Model(ModelFacts, frozen=True, kw_only=True):
    """An ONNX file, its digest, and the facts that every stage needs.

    `node_count` counts the nodes of the main graph. `custom_ops` are the shared libraries with its custom operators.
    """

    path: Path
    node_count: int
    custom_ops: tuple[Path, ...] = ()

    @property
    def is_static(self) -> bool:
        """True if every input has only known dimensions."""
        return all(spec.is_static for spec in self.inputs)


def load_model(path: AnyPath, *, custom_ops: Sequence[AnyPath] = ()) -> Model:
    """Reads the facts of an ONNX model; weights are hashed, not loaded. `custom_ops` are libraries it needs to run.

    Raises:
        UsageError: a library is missing.
        ModelError: the file is missing, empty, truncated, no ONNX model, too new, breaks ONNX's rules, or refers to
            external data that is missing or outside its folder; or has no node.
    """
    path, libraries = as_path(path), [as_path(library) for library in custom_ops]
    for library in libraries:
        if not library.is_file():
            raise UsageError(f"there is no custom-op library '{library}'", hint="give the path of a .so file")
    proto = _parse(path)
    # Before the other rules, which expect names to be text: protobuf returns those that are no UTF-8 as bytes.
    if (strange := soundness.find_invalid_text(proto)) is not None:
        raise ModelError(f"'{path}' has the name {strange[:80]!r}, which is no UTF-8", hint="export the model again")
    if flaw := next(soundness.find_flaws(proto), None):
        raise ModelError(f"'{path}' is no valid ONNX model: {flaw}", hint="export it again")
    # The file may be one that folding emptied, in a folder for work.
    if not proto.graph.node:
        words = f"no node of '{path.name}' computes anything from its inputs"
        raise ModelError(words, hint="export the network that you want to run")
    files = _find_external(path, proto)
    for place in filter(None, map(external.read_place, iterate_tensors(proto.graph))):
        end, has = place.offset + place.length, (path.parent / place.file).stat().st_size
        if end > has:
            words = f"'{path}' needs {end} bytes of external data '{place.file}', which has {has}: it is cut off"
            raise ModelError(words, hint="copy or download both files again")
    opsets = {entry.domain or _MAIN_DOMAIN: entry.version for entry in proto.opset_import}
    opset, newest, last = opsets.get(_MAIN_DOMAIN, 1), onnx.defs.onnx_opset_version(), ORT_FORMATS[-1]
    if opset > newest:
        words = f"'{path}' has opset {opset}, newer than {newest}, the newest that onnx {onnx.__version__} knows"
        hint = f"export it with opset {last.opset} or lower, which ONNX Runtime {last.since} reads"
        raise ModelError(words, hint=hint)
    if proto.ir_version > onnx.IR_VERSION:
        words = f"'{path}' has IR version {proto.ir_version}, newer than {onnx.IR_VERSION}, the newest that onnx knows"
        raise ModelError(words, hint=f"save it with ir_version={last.ir_version} or lower")
    return Model(
        path=path,
        name=path.name.removesuffix(".onnx"),
        sha256=_digest(path, files),
        size_bytes=sum(file.stat().st_size for file in (path, *(path.parent / name for name in files))),
        ir_version=proto.ir_version,
        opsets=opsets,
        inputs=read_inputs(proto.graph),
        outputs=tuple(read_spec(value) for value in proto.graph.output),
        node_count=len(proto.graph.node),
        external_files=files,
        custom_ops=tuple(library.absolute() for library in libraries),
    )


def list_model_files(model: Path) -> dict[str, Path]:
    """Returns the model file and its external data files, by their names relative to the model's folder.

    Raises:
        ModelError: the file is no model, or names a file that is missing or outside its folder.
    """
    files = list_external(model) if model.suffix == ".onnx" else ()
    return {name: model.parent / name for name in (model.name, *files)}


def list_external(path: Path) -> tuple[str, ...]:
    """Returns the external files of an ONNX model, relative to its folder and sorted, without reading them.

    Raises:
        ModelError: the file cannot be read, or refers to a file that is missing or outside its folder.
    """
    return _find_external(path, _parse(path))


def read_proto(model: Model, *, weights: bool = True) -> onnx.ModelProto:
    """Returns the protobuf of a model, with external weights loaded unless `weights` is False.

    Raises:
        ModelError: onnx refuses the external data as unsafe, such as a hard link, or weights are cut off.
    """
    try:
        if model.external_files or model.size_bytes < LARGE_BYTES:
            proto = onnx.load(str(model.path), load_external_data=weights)
        else:
            # Weight by weight: parsing the file at once would hold all weights twice.
            proto = external.point_into(model.path)
            for graph in iterate_graphs(proto.graph):
                external.load_external(graph, model.path.parent)
    except (onnx.checker.ValidationError, DecodeError, OSError, ValueError) as error:
        words = f"cannot read the weights of '{model.path}': {str(error)[-300:]}"
        raise ModelError(words, hint="copy the file to a place of its own") from error
    for tensor in proto.graph.initializer:
        if tensor.HasField("raw_data") and tensor.data_location != onnx.TensorProto.EXTERNAL:
            has, wanted = len(tensor.raw_data), external.count_bytes(tensor)
            if wanted not in {None, has}:
                words = f"initializer '{tensor.name}' has {has} bytes, its type and shape want {wanted}"
                raise ModelError(f"'{model.path}' is damaged: {words}", hint="export it again")
    return proto


def save_proto(proto: onnx.ModelProto, path: Path) -> Model:
    """Writes a protobuf like `write_proto` and returns the `Model` of the new file.

    Raises:
        OutputError: `path` cannot be written.
    """
    write_proto(proto, path)
    return load_model(path)


def write_proto(proto: onnx.ModelProto, path: Path) -> None:
    """Writes a protobuf, and makes its folder; weights of more than `MOST_INLINE_BYTES` become `NAME.onnx.data`.

    Raises:
        OutputError: `path` cannot be written.
    """
    is_large = count_weight_bytes(proto) > MOST_INLINE_BYTES
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # All weights in one file, named after the model: apps and bundles then have two files of known names.
        onnx.save(proto, str(path), save_as_external_data=is_large, location=f"{path.name}.data")


def count_weight_bytes(proto: onnx.ModelProto) -> int:
    """Returns the bytes of raw data in the main graph's initializers; protobuf's own count fails beyond 2 GB."""
    return sum(len(tensor.raw_data) for tensor in proto.graph.initializer)


def move_data(path: Path, out: Path) -> None:
    """Moves the external data that `write_proto` wrote for `path`, if any, into the folder of `out`; the name stays.

    Raises:
        OutputError: the folder cannot be written.
    """
    data = path.with_name(f"{path.name}.data")
    if data.exists():
        move_file(data, out.with_name(data.name))


def list_names(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of all tensors of a graph, subgraphs included."""
    names: set[str] = set()
    for part in iterate_graphs(graph):
        names |= {value.name for value in (*part.input, *part.output, *part.value_info)}
        names |= {tensor.name for tensor in part.initializer}
        names |= {name for node in part.node for name in (*node.input, *node.output)}
    return names - {""}


def rename_tensors(graph: onnx.GraphProto, names: Mapping[str, str], *, skip_inputs: bool = False) -> None:
    """Renames tensors in place, subgraphs included.

    With `skip_inputs` only what nodes read is renamed: inputs, outputs and computed tensors keep their names.
    """
    for part in iterate_graphs(graph):
        for node in part.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            if not skip_inputs:
                node.output[:] = [names.get(name, name) for name in node.output]
        values = [] if skip_inputs and part is graph else [*part.output, *part.value_info]
        values += [] if skip_inputs else list(part.input)
        for value in values:
            value.name = names.get(value.name, value.name)
        for tensor in part.initializer:
            tensor.name = names.get(tensor.name, tensor.name)


def iterate_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields a graph and, depth first, the subgraphs of its control-flow nodes."""
    yield graph
    for body in (body for node in graph.node for body in soundness.list_bodies(node)):
        yield from iterate_graphs(body)


def keep_used_opsets(proto: onnx.ModelProto) -> None:
    """Drops, in place, the opset imports of domains that no node uses, and sorts the rest; "ai.onnx" becomes "".

    ONNX Runtime writes every domain that its process knows into a model that it optimizes: its own, and those of custom
    operators that any earlier session of the process loaded.
    """
    used = {"", *(node.domain for node in iterate_nodes(proto.graph))}
    # ONNX's own domain must be imported; where the model does not, none of its nodes use it, and any version will do.
    opsets = {"": 17, **soundness.read_opsets(proto.opset_import)}
    refill(proto.opset_import, (onnx.helper.make_opsetid(name, opsets[name]) for name in sorted(used & set(opsets))))


def refill(field: MutableSequence[_T], values: Iterable[_T]) -> None:
    """Replaces the entries of a repeated protobuf field in place; `values` may contain entries of the field."""
    kept = list(values)
    # Each message would be copied, and the nodes of trees are hundreds of megabytes.
    if len(kept) == len(field) and all(new is old for new, old in zip(kept, field, strict=True)):
        return
    del field[:]
    field.extend(kept)


def copy_fields(source: Any, target: Any, skipped: Collection[str]) -> None:
    """Copies the set fields of a protobuf message into `target`, except those named in `skipped`."""
    for field, value in source.ListFields():
        if field.name in skipped:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def copy_without_weights(proto: onnx.ModelProto, *, lists: bool = True) -> onnx.ModelProto:
    """Returns a copy of a model without the initializers of its main graph.

    It is built anew: a copy of the whole would hold all weights once more before they could be dropped. Without
    `lists`, very long lists of trees are empty.
    """
    copy = onnx.ModelProto()
    copy_fields(proto, copy, {"graph"})
    copy_fields(proto.graph, copy.graph, {"initializer"} if lists else {"initializer", "node"})
    for node in () if lists else proto.graph.node:
        light = copy.graph.node.add()
        copy_fields(node, light, {"attribute"})
        for attribute in node.attribute:
            if attribute.name.startswith(external.LISTS_OF_TREES) and is_long_list(attribute):
                light.attribute.add(name=attribute.name, type=attribute.type)
            else:
                light.attribute.add().CopyFrom(attribute)
    return copy


# A list in an attribute that is longer is not read, as no rule looks at it.
_MOST_ENTRIES = 1 << 16


def is_long_list(attribute: onnx.AttributeProto) -> bool:
    """Returns True for an attribute that is a very long list of numbers or texts."""
    return max(len(attribute.floats), len(attribute.ints), len(attribute.strings)) > _MOST_ENTRIES


def iterate_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of a graph and, graph by graph, of the subgraphs of its control-flow nodes."""
    return (node for part in iterate_graphs(graph) for node in part.node)


def iterate_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yields the initializers and the attributes' tensors of a graph and, graph by graph, of its subgraphs."""
    for part in iterate_graphs(graph):
        yield from part.initializer
        for node in part.node:
            yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def list_element_types(graph: onnx.GraphProto) -> set[int]:
    """Returns the element types (TensorProto.DataType) of a graph's tensors and values, and of its `to` attributes."""
    kinds = {tensor.data_type for tensor in iterate_tensors(graph)}
    for part in iterate_graphs(graph):
        kinds |= {value.type.tensor_type.elem_type for value in (*part.input, *part.output, *part.value_info)}
        kinds |= {item.i for node in part.node for item in node.attribute if item.name == "to"}
    return kinds


def order_nodes(graph: onnx.GraphProto) -> tuple[onnx.NodeProto, ...]:
    """Returns the nodes in topological order, counting what their subgraphs read; otherwise the order stays.

    ONNX Runtime's quantizer appends its nodes out of order. Nodes of a cycle, which no runtime accepts, come in any
    order.
    """
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    needs = [[makers[name] for name in soundness.iterate_reads(node) if name in makers] for node in graph.node]
    opened: set[int] = set()
    ordered: dict[int, onnx.NodeProto] = {}
    for start in range(len(graph.node)):
        stack = [start]
        while stack:
            index = stack[-1]
            # An explicit stack: chains of thousands of nodes exceed Python's recursion limit.
            waiting = [] if index in opened else [maker for maker in needs[index] if maker not in opened]
            opened.add(index)
            stack.extend(reversed(waiting))
            if not waiting:
                # A node may be on the stack twice; its place is where it first comes off.
                ordered.setdefault(stack.pop(), graph.node[index])
    return tuple(ordered.values())


def find_reads(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of all tensors that the nodes of a graph and their subgraphs read, and of its outputs."""
    read = {name for node in graph.node for name in soundness.iterate_reads(node)}
    return read | {value.name for value in graph.output}


def drop_unread(graph: onnx.GraphProto, ops: Collection[str] = ()) -> None:
    """Removes unread initializers from a graph, in place; before that, the nodes of `ops` whose outputs are unread."""
    read = find_reads(graph)
    if any(node.op_type in ops and read.isdisjoint(node.output) for node in graph.node):
        refill(graph.node, [node for node in graph.node if node.op_type not in ops or not read.isdisjoint(node.output)])
        read = find_reads(graph)
    # One by one: `refill` would copy each weight that stays.
    for at in reversed(range(len(graph.initializer))):
        if graph.initializer[at].name not in read:
            del graph.initializer[at]


def find_integer_ops(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Returns the operators of a model that quantize or compute with integers, sorted; none for a float model.

    DequantizeLinear alone is none of them: a model that only stores its weights in 8 bits computes in float.
    """
    ops = {node.op_type for node in iterate_nodes(proto.graph)}
    return tuple(sorted(op for op in ops if op in _INTEGER_OPS or op.startswith("QLinear")))


def find_quantized_form(proto: onnx.ModelProto) -> QuantizedForm:
    """Returns how a model is quantized: "" for a float model, "weights" if only weights are quantized."""
    ops = {node.op_type for node in iterate_nodes(proto.graph)}
    # Checked before Q and DQ nodes: a QOperator model has those too, at its edges.
    if any(op.startswith("QLinear") for op in ops):
        return "qoperator"
    if ops & {"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "DynamicQuantizeMatMul"}:
        return "dynamic"
    if "QuantizeLinear" in ops:
        return "qdq"
    return "weights" if ops & {"DequantizeLinear", "MatMulNBits", "GatherBlockQuantized"} else ""


@functools.cache
def tensor_dtype(elem_type: int) -> str:
    """Returns numpy's name of an ONNX element type, ONNX's own name where numpy has none, or "undefined"."""
    if elem_type not in onnx.TensorProto.DataType.values():
        return "undefined"
    name = onnx.TensorProto.DataType.Name(elem_type).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _parse(path: Path) -> onnx.ModelProto:
    if path.suffix == ".ort":
        raise ModelError(f"'{path}' is in ORT format, which is final", hint="give the .onnx model it was made from")
    proto = external.skim_model(path)
    if not proto.graph.node and not proto.graph.output:
        raise ModelError(f"'{path}' holds no ONNX graph", hint="give the path of an .onnx file")
    return proto


def _find_external(path: Path, proto: onnx.ModelProto) -> tuple[str, ...]:
    files: set[str] = set()
    bodies = (onnx.GraphProto(node=function.node) for function in proto.functions)
    for graph in itertools.chain.from_iterable(map(iterate_graphs, (proto.graph, *bodies))):
        files.update(external.list_files(graph.initializer))
        files.update(
            external.list_files(part for each in graph.sparse_initializer for part in (each.values, each.indices))
        )
        for node in graph.node:
            values = {attribute.name: attribute for attribute in node.attribute}
            files.update(name for item in node.attribute for name in external.list_files((item.t, *item.tensors)))
            # A provider's compiled context (onnxruntime.ai/docs/execution-providers/EP-Context-Design.html): with
            # embed_mode 1, the default, it is in the node itself, with 0 in the file that the node names.
            if node.op_type == "EPContext" and "embed_mode" in values and values["embed_mode"].i == 0:
                named = values["ep_cache_context"].s if "ep_cache_context" in values else b""
                # Bytes that are no UTF-8 become a name with backslashes, which is refused like any other unsafe name.
                files.add(named.decode(errors="backslashreplace"))
    for name in sorted(files):
        outside = f"'{path}' refers to external data {name[:200]!r} outside its folder"
        with reraised(BundleError, ModelError(outside, hint="do not trust this model")):
            file = safe_join(path.parent, name)
        if not file.is_file():
            raise ModelError(f"'{path}' needs external data '{name}', which is missing", hint=f"put it at '{file}'")
    return tuple(sorted(files))


def _digest(path: Path, files: tuple[str, ...]) -> str:
    if not files:
        return digest_file(path)
    # The protobuf refers to the weights by file, offset and length, so the digest must cover both. It hashes the files'
    # digests: their length is fixed, so that no other split of the same bytes into files has the same digest.
    digest = hashlib.sha256(digest_file(path).encode())
    for name in files:
        digest.update(digest_file(path.parent / name).encode())
    return digest.hexdigest()


def read_inputs(graph: onnx.GraphProto) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a graph that are no initializers."""
    initializers = {tensor.name for tensor in graph.initializer}
    return tuple(read_spec(value) for value in graph.input if value.name not in initializers)


def read_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """Returns name, type and shape of an input or output as its protobuf states them."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorSpec(name=value.name, dtype=(kind or "unknown").removesuffix("_type"), shape=None)
    tensor = value.type.tensor_type
    shape = tuple(
        # Some models write -1 for a dimension that is not known.
        (dim.dim_value if dim.dim_value >= 0 else None) if dim.HasField("dim_value") else name_dim(dim.dim_param)
        for dim in tensor.shape.dim
    )
    has_shape = tensor.HasField("shape")
    return TensorSpec(name=value.name, dtype=tensor_dtype(tensor.elem_type), shape=shape if has_shape else None)


def read_with_weights_on_disk(model: Model) -> onnx.ModelProto:
    """Returns the protobuf of a model with its large weights as external data, in its own file or in external files.

    Raises:
        ModelError: the file is gone or unreadable, or weights are cut off.
    """
    is_inside = has_large_weights_inside(model.path) and not model.external_files
    return external.point_into(model.path) if is_inside else read_proto(model, weights=False)


def has_large_weights_inside(path: Path) -> bool:
    """Returns True for an ONNX file so large that most of it must be weights inside the file."""
    return path.suffix == ".onnx" and path.is_file() and path.stat().st_size >= LARGE_BYTES
