"""The contents of a model, before anything is done to it, and where the bytes of a model or a bundle are."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import onnx
from onnx import helper

from edgekit._files import digest_bytes
from edgekit._ort import Level, SessionSettings, makes_session
from edgekit.bundle.checks import iterate_files
from edgekit.bundle.folder import Bundle
from edgekit.bundle.multi import MultiBundle, opened_any
from edgekit.check.macs import assume_sizes, choose_sizes, count_macs, count_unsized, value_bytes
from edgekit.convert.fusions import as_nodes
from edgekit.convert.ort_form import RANDOM_OPS
from edgekit.convert.ort_format.report import OrtFileReport, OrtNode, inspect_ort, read_nodes
from edgekit.convert.ort_format.tables import iterate_graphs as iterate_ort_graphs
from edgekit.convert.ort_format.tables import open_tables, records, table, text
from edgekit.graph.constants import MAIN_DOMAINS, ML_DOMAIN, NCHWC_DOMAIN, ORT_DOMAIN, list_constants, read_constant
from edgekit.graph.graph import Graph, read_graph, view_model
from edgekit.graph.inference import find_empty_window, infer_model
from edgekit.model import model as models
from edgekit.model.external import skim_model
from edgekit.model.model import iterate_graphs, load_model, read_proto
from edgekit.model.tensors import TensorSpec
from edgekit.prepare.interface import freeze_inputs
from edgekit.prepare.shapes import fix_dims
from edgekit.serialize import fill

_KNOWN_DOMAINS = frozenset({*MAIN_DOMAINS, ML_DOMAIN, ORT_DOMAIN, NCHWC_DOMAIN})


class OnnxReport(models.ModelFacts, frozen=True, kw_only=True):
    """The contents of an ONNX file.

    `nodes`, `ops`, `macs` and `unsized_nodes` include the subgraphs of control flow. `macs` are the
    multiply-accumulates of one inference, with the sizes in `counted_at` assumed for open dimensions, as `check` does.
    Both branches of an If count, and the body of a loop once. `unsized_nodes` counts the multiplying nodes whose
    dimensions are unknown even so, each of which counts as size one. `weight_bytes` is by element type.
    `activation_bytes` is the peak of live values when nodes run in their order and each value is freed after its last
    use; inputs are live from the start, and a subgraph runs while its node does. An unknown dimension counts as 1, a
    value of unknown rank as nothing. `quantized` says how the model is quantized, empty for a float one. `custom_ops`
    are operators that neither ONNX nor ONNX Runtime defines, as `domain.operator`. `runs` says whether ONNX Runtime
    loads the model with the given custom operator libraries, None if none were given.
    `fixed_axes` lists the axes that the exporter fixed and an app may want open, with the way to open them.
    """

    producer: str
    nodes: int
    ops: dict[str, int]
    parameters: int
    weight_bytes: dict[str, int]
    macs: int
    counted_at: dict[str, int]
    unsized_nodes: int
    activation_bytes: int
    is_static: bool
    is_quantized: bool
    quantized: models.QuantizedForm
    custom_ops: tuple[str, ...]
    runs: bool | None
    has_control_flow: bool
    metadata: dict[str, str]
    fixed_axes: tuple[str, ...] = ()


# The exporter's argument that keeps an axis dynamic, by a part of the file's producer name; `{axes}` is a dict.
_DYNAMIC_AXES_ARGUMENTS = {
    "pytorch": "torch.onnx.export(..., dynamic_axes={axes}), or dynamic_shapes={axes} with dynamo=True",
    "tf2onnx": "a tf.TensorSpec in input_signature with None in these places: {axes}",
    "skl2onnx": "initial_types with None in these places: {axes}",
}


def warn_if_random(model: models.Model) -> tuple[str, ...]:
    """Returns a warning if nodes of the main graph draw random numbers: then the outputs differ from run to run."""
    graph = skim_model(model.path).graph
    drawn = [node.output[0] for node in graph.node if node.op_type in RANDOM_OPS]
    names = shlex.quote(",".join([*(value.name for value in graph.input), *drawn]))
    harm = "its outputs differ from run to run, so that no comparison of them is right"
    remedy = f"make the numbers inputs: edgekit prepare --inputs {names}"
    return (f"the model draws random numbers ({', '.join(drawn[:4])}): {harm}; {remedy}",) if drawn else ()


def list_fixed_axes(inputs: Sequence[TensorSpec], producer: str) -> tuple[str, ...]:
    """Returns a line for each input whose batch or sequence the exporter fixed, with the argument that opens it.

    A first axis of size 1 is the single row of the exporter's example, if the input has further axes. The second axis
    of an integer input of rank 2 (tokens) has the length of that example. Phones want fixed sizes; servers do not.
    """
    known = (how for name, how in _DYNAMIC_AXES_ARGUMENTS.items() if name in producer.lower())
    argument = next(known, "its exporter's dynamic axes, {axes}")
    lines: list[str] = []
    for spec in inputs:
        shape = spec.shape or ()
        axes = {0: "batch"} if len(shape) > 1 and shape[0] == 1 else {}
        if len(shape) == 2 and spec.dtype in {"int32", "int64"} and isinstance(shape[1], int) and shape[1] > 1:
            axes[1] = "sequence"
        if axes:
            fixed = " and ".join(f"axis {axis} ({name}) at {shape[axis]}" for axis, name in axes.items())
            how = argument.replace("{axes}", repr({spec.name: axes}))
            lines.append(f"input '{spec.name}' has {fixed}, fixed by the export: {how} leaves it open")
    return tuple(lines)


def inspect_model(
    path: Path,
    *,
    custom_ops: Sequence[Path] = (),
    dims: Mapping[str, int] | None = None,
    freeze: Mapping[str, float] | None = None,
) -> OnnxReport | OrtFileReport:
    """Returns the contents of an ONNX or ORT-format file; weights in external files are not read.

    Args:
        path: the file.
        custom_ops: libraries with custom operators; if any are given, ONNX Runtime tries to load the ONNX file.
        dims: sizes of the dynamic dimensions of an ONNX model, to compute shapes and work; all of them, or none.
        freeze: values of inputs that become constants, to compute shapes and work.

    Raises:
        ModelError: the file cannot be read.
        UsageError: a library is missing, or a size fits no dimension.
    """
    if path.suffix == ".ort":
        return inspect_ort(path)
    model = models.load_model(path, custom_ops=custom_ops)
    proto = models.read_proto(model, weights=False)
    graphs = list(models.iterate_graphs(proto.graph))
    nodes = [node for graph in graphs for node in graph.node]
    ops = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in nodes)
    weights, weight_bytes = [tensor for graph in graphs for tensor in list_constants(graph).values()], Counter[str]()
    for tensor in weights:
        kind = models.tensor_dtype(tensor.data_type)
        itemsize = 0 if kind == "undefined" else helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        weight_bytes[kind] += math.prod(tensor.dims) * itemsize
    if dims or freeze:
        sized = skim_model(model.path)
        freeze_inputs(sized.graph, freeze or {})
        if dims:
            fix_dims(sized.graph, dims)
        graph = view_model(infer_model(sized), model.path.parent)
    else:
        graph = read_graph(model)
    sizes = choose_sizes(graph)
    graph = assume_sizes(graph, sizes)
    # Only loading is tested, not speed: without optimisation the answer comes soonest.
    unoptimized = SessionSettings(level=Level.DISABLED, libraries=model.custom_ops)
    return fill(
        OnnxReport,
        model,
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        nodes=len(nodes),
        # By count, then by name: the dict keeps this order, so that two runs print the same.
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        parameters=sum(math.prod(tensor.dims) for tensor in weights),
        weight_bytes=dict(sorted(weight_bytes.items())),
        macs=sum(count_macs(each, node) for each in graph.iterate() for node in each.nodes),
        counted_at=sizes,
        unsized_nodes=count_unsized(graph),
        activation_bytes=_peak_activation_bytes(graph),
        is_quantized=bool(form := models.find_quantized_form(proto)),
        quantized=form,
        custom_ops=tuple(sorted(op for op in ops if op.rpartition(".")[0] not in _KNOWN_DOMAINS)),
        runs=(find_empty_window(proto) is None and makes_session(model.path, unoptimized)) if custom_ops else None,
        has_control_flow=len(graphs) > 1,
        metadata={entry.key: entry.value for entry in proto.metadata_props},
        fixed_axes=list_fixed_axes(model.inputs, proto.producer_name),
    )


def _peak_activation_bytes(graph: Graph) -> int:
    """Returns the largest sum of the bytes of values that are live at the same time."""
    last = {name: readers[-1].index for name, readers in graph.consumers.items()}
    # An output stays alive to the end, though no node reads it.
    last |= dict.fromkeys(graph.outputs, len(graph.nodes))
    last_read_by: dict[int, list[str]] = {}
    for name, index in last.items():
        last_read_by.setdefault(index, []).append(name)
    live = {name: value_bytes(graph.value(name)) for name in graph.inputs if name not in graph.constants}
    total = peak = sum(live.values())
    for node in graph.nodes:
        names = [name for name in dict.fromkeys((*node.input, *node.output)) if name and name not in graph.constants]
        created = {name: value_bytes(graph.value(name)) for name in names if name not in live}
        live |= created
        total += sum(created.values())
        # Inputs and outputs of a node are alive together while it runs, so the peak is taken before anything is freed.
        peak = max(peak, total + max(map(_peak_activation_bytes, node.bodies), default=0))
        unread = [name for name in names if name not in last]
        total -= sum(live.pop(name, 0) for name in (*last_read_by.get(node.index, ()), *unread))
    return peak


MODEL_SUFFIXES = frozenset({".onnx", ".ort"})


class FileSize(msgspec.Struct, frozen=True, kw_only=True):
    """A file and its size."""

    name: str
    size_bytes: int


class LayerSize(msgspec.Struct, frozen=True, kw_only=True):
    """A node, and the bytes of the weights that it is the first to compute with.

    A node that reads only constants, such as a weight's Transpose, passes them on to the next. `macs` are the
    multiply-accumulates of one inference, None if the file has no shapes (ORT format). `sha256` covers the weights.
    """

    name: str
    op: str
    weight_bytes: int
    macs: int | None
    sha256: str


class SizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a bundle or model, and the layers of `model`, largest first; `model` is "" if no file shows layers.

    `other_bytes` is what the model's file holds besides weights: the graph, names, saved optimisations.
    """

    subject: str
    files: tuple[FileSize, ...]
    model: str
    layers: tuple[LayerSize, ...]
    other_bytes: int

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size_bytes for file in self.files)


_Weight = tuple[int, str]
"""The bytes of a weight, and the digest of its content."""


def measure_sizes(path: Path) -> SizeReport:
    """Returns the sizes of a model, or of a bundle as folder or archive.

    Raises:
        ModelError: the model cannot be read.
        BundleError: the bundle is damaged or not safe to open.
    """
    if path.suffix in MODEL_SUFFIXES:
        return _report(str(path), _model_files(path), path)
    with opened_any(path) as found:
        files = [FileSize(name=name, size_bytes=file.lstat().st_size) for name, file in iterate_files(found.folder)]
        return _report(str(path), files, find_shown_model(found))


def measure_layers(path: Path) -> tuple[LayerSize, ...]:
    """Returns the layers of an ONNX or ORT-format file in graph order, those without weights included.

    Raises:
        ModelError: the file cannot be read.
    """
    if path.suffix == ".ort":
        weights: dict[str, _Weight] = {}
        with open_tables(path) as file:
            parts = list(iterate_ort_graphs(table(table(file.root, "model"), "graph")))
            for tensor in (tensor for part in parts for tensor in records(part, "initializers")):
                data = bytes(tensor.get("raw_data", b""))  # type: ignore[arg-type]
                weights[text(tensor, "name")] = (len(data), digest_bytes(data))
            return _assign_weights([node for part in parts for node in read_nodes(part)], weights, None)
    model = load_model(path)
    graph, graphs = assume_sizes(read_graph(model)), list(iterate_graphs(read_proto(model).graph))
    weights = {}
    for name, constant in (pair for part in graphs for pair in list_constants(part).items()):
        if not (data := constant.raw_data):
            bare = onnx.TensorProto()
            bare.CopyFrom(constant)
            # Names change with every export; only a change of the content makes it another layer.
            bare.ClearField("name")
            data = bare.SerializeToString(deterministic=True)
        weights[name] = (len(data), digest_bytes(data))
    pairs = (pair for part in graphs for pair in zip(as_nodes(part), part.node, strict=True))
    nodes = [node for node, proto in pairs if read_constant(proto) is None]
    # Identified by output: nodes need not have names.
    return _assign_weights(nodes, weights, {node.output[0]: count_macs(graph, node) for node in graph.nodes})


def _report(subject: str, files: Sequence[FileSize], model: Path | None) -> SizeReport:
    layers = () if model is None else measure_layers(model)
    total = 0 if model is None else sum(file.size_bytes for file in _model_files(model))
    return SizeReport(
        subject=subject,
        files=tuple(sorted(files, key=lambda file: -file.size_bytes)),
        model="" if model is None else model.name,
        layers=tuple(sorted(layers, key=lambda layer: -layer.weight_bytes)),
        other_bytes=max(0, total - sum(layer.weight_bytes for layer in layers)),
    )


def find_shown_model(found: Bundle | MultiBundle) -> Path | None:
    """Returns the model file whose layers are shown: the one to load, else ONNX; None for several targets."""
    if isinstance(found, MultiBundle):
        return None
    names = (found.manifest.model_file, *found.manifest.forms.get("onnx", ()))
    return next((found.folder / name for name in names if Path(name).suffix in MODEL_SUFFIXES), None)


def _model_files(path: Path) -> list[FileSize]:
    external = load_model(path).external_files if path.suffix == ".onnx" else ()
    return [FileSize(name=name, size_bytes=(path.parent / name).stat().st_size) for name in (path.name, *external)]


def _assign_weights(
    nodes: Sequence[OrtNode], weights: Mapping[str, _Weight], macs: Mapping[str, int] | None
) -> tuple[LayerSize, ...]:
    """Assigns each weight to the first node that computes with it."""
    # A DQ of a weight, a Transpose or a Cast reads only constants: its weights belong to the operator after it.
    constant, unassigned, layers = set(weights), {name: [weight] for name, weight in weights.items()}, list[LayerSize]()
    for node in nodes:
        # Removed, so that a weight which several nodes share counts once.
        own = [weight for name in node.inputs for weight in unassigned.pop(name, ())]
        read = [name for name in node.inputs if name]
        if read and constant.issuperset(read):
            constant.update(node.outputs)
            unassigned[node.outputs[0]] = own
            continue
        first = node.outputs[0] if node.outputs else ""
        layers.append(
            LayerSize(
                name=node.name or first,
                op=node.op,
                weight_bytes=sum(size for size, _ in own),
                macs=None if macs is None else macs.get(first, 0),
                sha256=digest_bytes("".join(digest for _, digest in own).encode()),
            )
        )
    return tuple(layers)
