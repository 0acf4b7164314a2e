"""Where the bytes are: by file, and within a model by layer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import onnx

from edgekit._files import digest_bytes
from edgekit.bundle.checks import iterate_files
from edgekit.bundle.folder import Bundle
from edgekit.bundle.multi import MultiBundle, opened_any
from edgekit.check.macs import assume_sizes, count_macs
from edgekit.convert.fusions import as_nodes
from edgekit.convert.ort_format.report import OrtNode, read_nodes
from edgekit.convert.ort_format.tables import iterate_graphs as iterate_ort_graphs
from edgekit.convert.ort_format.tables import open_tables, records, table, text
from edgekit.graph.constants import list_constants, read_constant
from edgekit.graph.graph import read_graph
from edgekit.model.model import iterate_graphs, load_model, read_proto

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


class _Weight(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    sha256: str


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
                weights[text(tensor, "name")] = _Weight(size_bytes=len(data), sha256=digest_bytes(data))
            return _assign_weights([node for part in parts for node in read_nodes(part)], weights, None)
    model = load_model(path)
    graph, graphs = assume_sizes(read_graph(model)), list(iterate_graphs(read_proto(model).graph))
    weights = {name: _measure_weight(tensor) for part in graphs for name, tensor in list_constants(part).items()}
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
                weight_bytes=sum(weight.size_bytes for weight in own),
                macs=None if macs is None else macs.get(first, 0),
                sha256=digest_bytes("".join(weight.sha256 for weight in own).encode()),
            )
        )
    return tuple(layers)


def _measure_weight(tensor: onnx.TensorProto) -> _Weight:
    if not (data := tensor.raw_data):
        bare = onnx.TensorProto()
        bare.CopyFrom(tensor)
        # Names change with every export; only a change of the content makes it another layer.
        bare.ClearField("name")
        data = bare.SerializeToString(deterministic=True)
    return _Weight(size_bytes=len(data), sha256=digest_bytes(data))
