"""Changes to a model's inputs and outputs: which there are, constants for inputs, pixels, layout, and names."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit.data.images import Preprocess
from edgekit.errors import UsageError, look_up, require_known
from edgekit.graph.inference import infer_model
from edgekit.model.model import Model, drop_unread, iterate_nodes, list_names, read_proto, refill, rename_tensors
from edgekit.model.soundness import iterate_reads
from edgekit.prepare.external import save_graph


def keep_outputs(proto: onnx.ModelProto, names: Collection[str]) -> None:
    """Keeps the named outputs, in place; without names all stay.

    A named value inside the graph becomes an output after them, so that an app computes what follows.

    Raises:
        UsageError: a name that is no tensor of the graph, or a tensor whose type is unknown.
    """
    graph = proto.graph
    # ONNX Runtime accepts an output that is listed twice, and returns it twice under one name.
    refill(graph.output, {value.name: value for value in graph.output}.values())
    shown = [value.name for value in graph.output]
    made = {name for node in graph.node for name in node.output if name}
    for name in names:
        require_known(name, {*shown, *made}, f"the model has no output '{name}', nor a value of this name")
    inner = [name for name in dict.fromkeys(names) if name not in shown]
    if names:
        refill(graph.output, [value for value in graph.output if value.name in names])
    typed = {value.name: value for value in infer_model(proto).graph.value_info} if inner else {}
    for name in inner:
        if name not in typed:
            raise UsageError(f"the type of '{name}' is unknown", hint="name another value of the graph")
        graph.output.append(typed[name])


def keep_inputs(proto: onnx.ModelProto, names: Collection[str]) -> None:
    """Keeps the named inputs, in place; without names all stay.

    A named value inside the graph becomes an input, so that an app computes what precedes it. Its shape must be known.

    Raises:
        UsageError: a name that is no tensor of the graph, a tensor that is an output too or whose shape is unknown, or
            an input that is not named and that the outputs still need.
    """
    graph = proto.graph
    given = {value.name: value for value in graph.input}
    made = {name for node in graph.node for name in node.output if name}
    inner = made.intersection(names)
    for name in names:
        require_known(name, {*given, *made}, f"the prepared model has no input '{name}', nor a value of this name")
    if not names:
        return
    known = given | {value.name: value for value in infer_model(proto).graph.value_info if value.name in inner}
    shown = [value.name for value in graph.output]
    for name in (name for name in names if name in inner):
        if name in shown:
            others = ",".join(each for each in shown if each not in names)
            hint = f"keep the others: --outputs {others}" if others else "name a value before it"
            raise UsageError(f"'{name}' is an output, and cannot be an input too", hint=hint)
        tensor = known[name].type.tensor_type if name in known else onnx.TypeProto.Tensor()
        if not (tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)):
            raise UsageError(f"the shape of '{name}' is unknown", hint="name another value of the graph")
    for node in graph.node:
        # The node that computed the value is removed below, unless another of its outputs is needed.
        node.output[:] = [f"{name}{_INNER}" if name in inner else name for name in node.output]
    refill(graph.input, [known[name] for name in dict.fromkeys(names)])
    drop_idle_nodes(graph)
    read = {name for node in graph.node for name in iterate_reads(node)}
    if lost := sorted(read & given.keys() - {*names}):
        hint = f"name it too, or values behind it: --inputs {','.join([*names, lost[0]])}"
        raise UsageError(f"the outputs still need the input '{lost[0]}'", hint=hint)


def drop_idle_nodes(graph: onnx.GraphProto) -> None:
    """Removes the nodes and the initializers on which no output depends, in place; ONNX Runtime keeps such nodes."""
    needed = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed.update(iterate_reads(node))
    refill(graph.node, reversed(kept))
    drop_unread(graph)


def freeze_inputs(graph: onnx.GraphProto, values: Mapping[str, float]) -> None:
    """Turns inputs into constants filled with one number, in place; their shapes must be known.

    Raises:
        UsageError: a name that is no input, an input that is not numeric, or a number that its type cannot hold.
    """
    inputs = {value.name: value for value in graph.input}
    for name, number in values.items():
        given = look_up(inputs, name, f"the model has no input '{name}'").type
        tensor = given.tensor_type
        if not given.HasField("tensor_type") or tensor.elem_type == onnx.TensorProto.STRING:
            raise UsageError(f"input '{name}' holds no numbers", hint="freeze inputs of numbers only")
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        with np.errstate(over="ignore", invalid="ignore"):
            filled = np.full([dim.dim_value for dim in tensor.shape.dim], number).astype(dtype)
        if dtype.kind in "iub" and not np.all(filled == number):
            raise UsageError(f"input '{name}' of {dtype} cannot hold {number}", hint="give a number of its type")
        graph.initializer.append(numpy_helper.from_array(filled, name))
    refill(graph.input, [value for value in graph.input if value.name not in values])


Layout = Literal["nchw", "nhwc"]
LAYOUTS: Mapping[str, Layout] = {"nchw": "nchw", "nhwc": "nhwc"}
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
_CHANNELS = frozenset({1, 3, 4})
# The suffix of the tensor that replaces an input inside the graph.
_INNER = "/edgekit"


class InterfaceChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of inputs and outputs that an app wants, by the names in the model.

    `preprocess` moves the normalisation of images into the model: (v * scale - mean) / std, from uint8. `image_input`
    names the input, "" for the only one that can be an image. `layouts` holds the layout in which the app has an input.
    `renames` are made last.
    """

    preprocess: Preprocess | None = None
    image_input: str = ""
    layouts: Mapping[str, Layout] = {}
    renames: Mapping[str, str] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing is to be changed."""
        return self.preprocess is None and not self.layouts and not self.renames


def change_interface(model: Model, out: Path, changes: InterfaceChanges) -> Model:
    """Writes a prepared model to `out` with the inputs and names that an app wants, and returns it.

    Raises:
        UsageError: a name does not exist or is taken, or an input cannot be changed so.
        OutputError: `out` cannot be written.
    """
    if changes.is_empty and model.path == out:
        return model
    proto = read_proto(model, weights=False)
    inputs = [value.name for value in proto.graph.input]
    both = [*inputs, *(value.name for value in proto.graph.output)]
    for names, known, what in (
        ((*changes.layouts, *filter(None, [changes.image_input])), inputs, "input"),
        (changes.renames, both, "input or output"),
    ):
        for name in names:
            require_known(name, known, f"the model has no {what} '{name}'")
    if changes.preprocess is not None:
        _embed_preprocess(proto.graph, changes.preprocess, changes.image_input)
    for name, layout in changes.layouts.items():
        _change_layout(proto.graph, name, layout)
    taken, new_names = list_names(proto.graph) - changes.renames.keys(), list(changes.renames.values())
    for old, new in changes.renames.items():
        if new in taken or not new or new_names.count(new) > 1:
            raise UsageError(f"'{old}' cannot be called '{new}', a name that is taken", hint="choose another name")
    rename_tensors(proto.graph, changes.renames)
    name_nodes(proto.graph)
    return save_graph(proto, model, out)


def remaining_preprocess(preprocess: Preprocess) -> Preprocess:
    """Returns the preprocessing that is left to the app when the model contains the normalisation."""
    return msgspec.structs.replace(preprocess, scale=1.0, mean=(0.0,), std=(1.0,), dtype="uint8")


def _embed_preprocess(graph: onnx.GraphProto, preprocess: Preprocess, name: str) -> None:
    types = {value.name: value.type.tensor_type for value in graph.input if name in {"", value.name}}
    images = [each for each, kind in types.items() if kind.elem_type in _FLOATS and len(kind.shape.dim) == 4]
    if len(images) != 1:
        listed = ", ".join(f"'{each}'" for each in images or (value.name for value in graph.input))
        found = "has several inputs that can be an image" if images else "has no float input of rank 4 for an image"
        raise UsageError(f"the model {found}: {listed}", hint="name it: --embed-preprocess INPUT=FILE.toml")
    value = next(value for value in graph.input if value.name == images[0])
    elem_type = value.type.tensor_type.elem_type
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    axis = 1 if preprocess.layout == "NCHW" else len(shape) - 1
    channels = 1 if preprocess.color == "L" else 3
    if shape[axis] != channels:
        words = f"input '{value.name}' has {shape[axis]} channels on axis {axis}, the preprocessing {channels}"
        raise UsageError(words, hint="mend layout and color in the preprocessing file")
    if preprocess.dtype not in {"float32", "float16"}:
        raise UsageError(f"a preprocessing to {preprocess.dtype} normalises nothing", hint="embed one to float32")
    value.type.tensor_type.elem_type = TensorProto.UINT8
    steps: list[tuple[str, tuple[float, ...]]] = [
        ("Mul", (preprocess.scale,)), ("Sub", preprocess.mean), ("Div", preprocess.std),
    ]  # fmt: skip
    kept = [(op, numbers) for op, numbers in steps if any(number != (op != "Sub") for number in numbers)]
    inner = _rename_for_readers(graph, value.name)
    names = [f"{inner}/{op.lower()}" for op in ("Cast", *(op for op, _ in kept))]
    ends = [*names[:-1], inner]
    nodes = [helper.make_node("Cast", [value.name], [ends[0]], name=names[0], to=TensorProto.FLOAT)]
    for index, (op, numbers) in enumerate(kept, start=1):
        constant = np.asarray(numbers, np.float32).reshape([-1] + [1] * (len(shape) - 1 - axis))
        graph.initializer.append(numpy_helper.from_array(constant, f"{names[index]}/by"))
        nodes.append(helper.make_node(op, [ends[index - 1], f"{names[index]}/by"], [ends[index]], name=names[index]))
    if elem_type == TensorProto.FLOAT16:
        nodes[-1].output[0] = f"{inner}/float32"
        nodes.append(helper.make_node("Cast", [f"{inner}/float32"], [inner], name=f"{inner}/half", to=elem_type))
    refill(graph.node, [*nodes, *graph.node])


def _change_layout(graph: onnx.GraphProto, name: str, layout: Layout) -> None:
    """Changes an input to channels last ("nhwc") or channels second ("nchw"), by a Transpose to the other layout."""
    value = next(value for value in graph.input if value.name == name)
    dims = list(value.type.tensor_type.shape.dim)
    rank = len(dims)
    if not value.type.HasField("tensor_type") or rank < 3:
        raise UsageError(f"input '{name}' has rank {rank}, too few axes for a layout", hint="rank 3 or more")
    has, other = (dims[-1], dims[1]) if layout == "nhwc" else (dims[1], dims[-1])
    if has.dim_value in _CHANNELS and other.dim_value not in _CHANNELS:
        sizes = [dim.dim_value for dim in dims]
        raise UsageError(f"input '{name}' of shape {sizes} is {layout} already", hint="leave --layout out for it")
    last = [0, *range(2, rank), 1]
    first = [0, rank - 1, *range(1, rank - 1)]
    given = [onnx.TensorShapeProto.Dimension() for _ in dims]
    for place, axis in enumerate(last if layout == "nhwc" else first):
        given[place].CopyFrom(dims[axis])
    inner = _rename_for_readers(graph, name)
    refill(value.type.tensor_type.shape.dim, given)
    back = first if layout == "nhwc" else last
    turned = helper.make_node("Transpose", [name], [inner], name=f"{inner}/transpose", perm=back)
    refill(graph.node, [turned, *graph.node])


def _rename_for_readers(graph: onnx.GraphProto, name: str) -> str:
    """Makes all readers of an input read a new name, and returns it; the caller adds a node that computes it."""
    taken = list_names(graph)
    inner = next(free for count in range(len(taken) + 1) if (free := f"{name}{_INNER}{count or ''}") not in taken)
    rename_tensors(graph, {name: inner}, skip_inputs=True)
    return inner


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
