"""Large weights: in external files, and left out of a model while its graph is optimized.

They move between the model file and external files without being loaded. Tools copy the whole model, so large weights
are replaced by inputs while they run, or not read at all if nothing needs their values; of large tree ensembles, one
leaf is left. Operators without a kernel in ONNX Runtime's CPU provider are replaced by others while it optimizes.
"""

import math
import shutil
from pathlib import Path

import onnx
from google.protobuf.message import Message
from onnx import helper

from edgekit._files import move_file, replacing_file, work_folder, write_file
from edgekit._ort import Level, SessionSettings, external_config, makes_session
from edgekit.errors import ModelError
from edgekit.graph.graph import Node, view_part
from edgekit.model import external as data
from edgekit.model import model as models

_LENGTH_DELIMITED = 2
# Field numbers of onnx.proto.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9


def write_inline(proto: onnx.ModelProto, folder: Path, path: Path) -> None:
    """Writes a model to `path` with all weights inside; external data are copied from files of `folder`.

    The bytes are those of `SerializeToString(deterministic=True)`: fields in the order of their numbers.
    """
    graph = proto.graph
    head, tail = _split(graph, _INITIALIZER)
    # For each tensor the bytes before its data, the place of its external data, and the bytes after them.
    tensors: list[tuple[bytes, data.DataPlace | None, bytes]] = []
    length = len(head) + len(tail)
    for tensor in graph.initializer:
        place = data.read_place(tensor)
        before, after = b"", tensor.SerializeToString(deterministic=True)
        if place is not None:
            bare = onnx.TensorProto()
            # ONNX Runtime gives tensors with external data alone an empty `doc_string`.
            skipped = {"external_data", "data_location", *(() if tensor.doc_string else ("doc_string",))}
            models.copy_fields(tensor, bare, skipped)
            before, after = _split(bare, _RAW_DATA)
            before += _frame(_RAW_DATA, place.length)
        size = len(before) + len(after) + (place.length if place is not None else 0)
        tensors.append((_frame(_INITIALIZER, size) + before, place, after))
        length += len(tensors[-1][0]) + size - len(before)
    first, last = _split(proto, _GRAPH)
    with path.open("wb") as out:
        out.write(first + _frame(_GRAPH, length) + head)
        for before, place, after in tensors:
            out.write(before)
            if place is not None:
                data.copy_data(folder, place, out)
            out.write(after)
        out.write(tail + last)


def _split(message: Message, field: int) -> tuple[bytes, bytes]:
    """Returns the serialized fields of a message before a field number, and those after it."""
    before, after = type(message)(), type(message)()
    numbers = {each.name: each.number for each, _ in message.ListFields()}
    models.copy_fields(message, before, {name for name, number in numbers.items() if number >= field})
    models.copy_fields(message, after, {name for name, number in numbers.items() if number <= field})
    return before.SerializeToString(deterministic=True), after.SerializeToString(deterministic=True)


def _frame(field: int, length: int) -> bytes:
    return data.write_varint(field << 3 | _LENGTH_DELIMITED) + data.write_varint(length)


def write_with_weights(proto: onnx.ModelProto, source: models.Model, path: Path) -> models.Model:
    """Writes a graph with external weights in the files of `source`, copies these too, and returns it."""
    if points_into(proto, source):
        write_inline(proto, source.path.parent, path)
        return models.load_model(path, custom_ops=source.custom_ops)
    if source.external_files:
        gather_data(proto, source.path.parent, path.with_name(f"{path.name}.data"))
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return models.load_model(path, custom_ops=source.custom_ops)


def save_graph(proto: onnx.ModelProto, source: models.Model, out: Path) -> models.Model:
    """Writes a graph to `out` and its external weights next to it, and returns it.

    If `out` is the file of `source`, its external files stay.

    Raises:
        OutputError: `out` cannot be written.
    """
    if out.exists() and out.samefile(source.path) and not points_into(proto, source):
        write_file(out, proto.SerializeToString(deterministic=True))
    else:
        with work_folder(out.parent) as work:
            write_with_weights(proto, source, work / out.name)
            for path in sorted(work.iterdir(), key=lambda path: path.name == out.name):
                move_file(path, out.with_name(path.name))
    return models.load_model(out, custom_ops=source.custom_ops)


def points_into(proto: onnx.ModelProto, source: models.Model) -> bool:
    """Returns True if external data of a graph lie inside the model file `source`, as after `point_into`."""
    return any(
        data.read_external_entries(tensor).get("location") == source.path.name for tensor in proto.graph.initializer
    )


def refuse_inline(model: models.Model) -> None:
    """Refuses a model whose weights one protobuf cannot hold.

    Raises:
        ModelError: the model has 2 GB or more.
    """
    if model.size_bytes > models.MOST_INLINE_BYTES:
        words = f"'{model.path}' has {model.size_bytes / 1e9:.1f} GB, and a file with its weights inside ends at 2 GB"
        raise ModelError(words, hint="leave --inline-data out")


def place_weights(model: models.Model, *, external: bool) -> models.Model:
    """Moves the weights of a model into external data in `NAME.onnx.data`, or back, and returns it.

    Raises:
        ModelError: the weights are to be inside, and have 2 GB or more.
        OutputError: the folder cannot be written.
    """
    path, beside = model.path, model.path.with_name(f"{model.path.name}.data")
    if external == bool(model.external_files):
        return model
    proto = models.read_proto(model)
    if external:
        with replacing_file(beside) as temporary, temporary.open("wb") as out:
            for tensor in proto.graph.initializer:
                data.move_weight(tensor, path.parent, out, most=data.LEAST_BYTES)
        write_file(path, proto.SerializeToString(deterministic=True))
    else:
        refuse_inline(model)
        write_file(path, proto.SerializeToString(deterministic=True))
        for name in model.external_files:
            (path.parent / name).unlink()
    return models.load_model(path, custom_ops=model.custom_ops)


def gather_data(proto: onnx.ModelProto, folder: Path, path: Path) -> None:
    """Copies the external files of a graph from `folder` into the one file `path`, and points to it, in place."""
    places = [(tensor, place) for tensor in models.iterate_tensors(proto.graph) if (place := data.read_place(tensor))]
    starts: dict[str, int] = {}
    with path.open("wb") as out:
        for name in sorted({place.file for _, place in places}):
            starts[name] = data.begin_page(out)
            with (folder / name).open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    for tensor, place in places:
        data.point_to(tensor, data.DataPlace(path.name, starts[place.file] + place.offset, place.length))


def put_weights(graph: onnx.GraphProto, weights: list[onnx.TensorProto]) -> None:
    """Replaces inputs by the initializers of their names, in place."""
    names = {tensor.name for tensor in weights}
    models.refill(graph.input, [value for value in graph.input if value.name not in names])
    graph.initializer.extend(weights)


_LEAST_ELEMENTS = 1 << 15
_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# Also a Squeeze: `squeeze-late` brings what follows it to the Conv.
_FOLDED_INTO = frozenset({"BatchNormalization", "Add", "Mul", "Sub", "Div", "Pad", "Squeeze"})


def skim_weights(model: models.Model) -> onnx.ModelProto | None:
    """Returns a model without its large weights, or None if a rewrite may need the values of one.

    A large tree ensemble has one leaf; None too if ONNX Runtime refuses the model with its trees.
    """
    proto = data.skim_model(model.path)
    cut = [node for node in models.iterate_nodes(proto.graph) if any(map(_is_cut, node.attribute))]
    if cut and not (all(node.op_type in _ENSEMBLES for node in cut) and _loads(model)):
        return None
    kinds = onnx.AttributeProto
    for index, node in enumerate(cut):
        # One leaf, with a value of its own: nodes with different values are not merged.
        leaf = {kinds.INTS: [0], kinds.FLOATS: [float(index)], kinds.STRINGS: ["LEAF"]}
        for at, old in enumerate(node.attribute):
            if old.name.startswith(data.LISTS_OF_TREES):
                one = leaf.get(old.type) or helper.make_tensor(old.t.name, old.t.data_type, [1], [float(index)])
                node.attribute[at].CopyFrom(helper.make_attribute(old.name, one))
    absent = {tensor.name for tensor in proto.graph.initializer if is_absent(tensor)}
    is_inner = sum(map(is_absent, models.iterate_tensors(proto.graph))) > len(absent)
    return proto if not is_inner and absent <= set(_find_weights(proto.graph)) else None


# Types and shapes of their outputs do not depend on the trees.
_ENSEMBLES = frozenset({"TreeEnsembleClassifier", "TreeEnsembleRegressor"})


def _is_cut(attribute: onnx.AttributeProto) -> bool:
    has_entries = attribute.ints or attribute.floats or attribute.strings or not is_absent(attribute.t)
    return attribute.name.startswith(data.LISTS_OF_TREES) and not has_entries


# By digest: loading large trees takes seconds, and several sketches are made of a model.
_loaded: dict[str, bool] = {}


def _loads(model: models.Model) -> bool:
    """Returns True if ONNX Runtime loads a model; only then does it judge the trees."""
    if model.sha256 not in _loaded:
        config = external_config(model.path.parent)
        settings = SessionSettings(level=Level.DISABLED, config=config, libraries=model.custom_ops)
        # Bytes, because `CpuSession` would parse a large file to map its weights.
        _loaded[model.sha256] = makes_session(model.path.read_bytes(), settings)
    return _loaded[model.sha256]


def strip_weights(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Replaces large weights by inputs, in place, and returns them as tensors without data."""
    graph = proto.graph
    found = _find_weights(graph).values()
    shells = [onnx.TensorProto(name=each.name, data_type=each.data_type, dims=each.dims) for each in found]
    names = {shell.name for shell in shells}
    models.refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in names])
    graph.input.extend(helper.make_tensor_value_info(shell.name, shell.data_type, shell.dims) for shell in shells)
    return shells


def _find_weights(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Returns by name the large weights whose values no rewrite reads."""
    view = view_part(graph)
    hidden = view.outputs | view.captured

    def only_multiplies(node: Node, name: str) -> bool:
        # A rewrite may read the values of a first operand or a bias.
        if node.op_type not in _WEIGHTED or node.domain or node.input.index(name) != 1 or name in node.input[2:]:
            return False
        convolves = node.op_type in {"Conv", "ConvTranspose"}
        return not convolves or all(reader.op_type not in _FOLDED_INTO for reader in view.readers(node.output[0]))

    return {
        name: tensor
        for name, tensor in ((tensor.name, tensor) for tensor in graph.initializer)
        if math.prod(tensor.dims) >= _LEAST_ELEMENTS and name not in hidden and view.readers(name)
        if all(only_multiplies(node, name) for node in view.readers(name))
    }


def is_absent(tensor: onnx.TensorProto) -> bool:
    """Returns True if a tensor has no data, or external data."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return True
    fields = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
    return math.prod(tensor.dims) > 0 and not any(getattr(tensor, field) for field in fields)


# Elementwise operators, with the alpha of their substitutes: those of different operators must not be merged.
_ALPHAS = {"HardSwish": 2.0, "Mish": 3.0, "Swish": 4.0}
# The substitute has a kernel, keeps type and shape, and no basic optimizer changes it.
_STAND_IN = "Celu"


def replace_unsupported(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Replaces each node of `_ALPHAS` by its substitute, in place, and returns the originals by their unique names."""
    replaced: dict[str, onnx.NodeProto] = {}
    for node in models.iterate_nodes(graph):
        if node.op_type in _ALPHAS and not node.domain:
            replaced[node.name] = onnx.NodeProto()
            replaced[node.name].CopyFrom(node)
            models.refill(node.attribute, [helper.make_attribute("alpha", _ALPHAS[node.op_type])])
            node.op_type = _STAND_IN
    return replaced


def restore_nodes(graph: onnx.GraphProto, replaced: dict[str, onnx.NodeProto]) -> bool:
    """Restores the replaced nodes, in place; returns False if a substitute was folded or merged."""
    restored = 0
    for node in models.iterate_nodes(graph):
        if node.op_type == _STAND_IN and node.name in replaced:
            node.op_type = replaced[node.name].op_type
            models.refill(node.attribute, replaced[node.name].attribute)
            restored += 1
    return restored == len(replaced)
