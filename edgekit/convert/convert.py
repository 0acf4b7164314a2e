"""Converts a model into every file that its target loads."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnx

from edgekit._files import AnyPath, as_path, digest_file, move_file, work_folder
from edgekit._ort import VERSION, Level, SessionSettings, optimize_graph
from edgekit.convert.context import DEFAULT_CONTEXT, ContextOptions, compile_context, require_compiler, shorten_name
from edgekit.convert.fusions import OpFusion, trace_fusions
from edgekit.convert.ort_form import Equality, OrtOptions, Style, compare_with_source, refuse_size, write_ort
from edgekit.convert.ort_format import report as ort_files
from edgekit.convert.ort_format.canonical import CANONICAL_VERSION
from edgekit.data.samples import Samples
from edgekit.errors import ModelError
from edgekit.model.external import skim_model
from edgekit.model.model import ORT_FORMATS, Model, find_reader, iterate_graphs, list_element_types, read_proto
from edgekit.prepare.external import write_with_weights
from edgekit.prepare.opset import read_opset
from edgekit.prepare.rewrites.signs import FOUR_BITS, write_eight_bits
from edgekit.serialize import fill
from edgekit.target import Form, Target, read_version


def find_needed_ort(files: Iterable[Path]) -> str:
    """Returns the oldest ONNX Runtime that reads all of these files, "" if that is the oldest of `ORT_FORMATS`.

    Raises:
        ModelError: a file is damaged.
    """
    needed: list[str] = []
    for path in files:
        if path.suffix == ".ort":
            report = ort_files.inspect_ort(path)
            reader = find_reader(report.ir_version, report.opsets.get("ai.onnx", 0), int(report.format_version))
        else:
            model = skim_model(path)
            opset = max((entry.version for entry in model.opset_import if not entry.domain), default=0)
            reader = find_reader(model.ir_version, opset)
        # For versions beyond the table: the ONNX Runtime that wrote the file.
        needed.append(reader or VERSION)
    newest = max(needed, key=read_version, default="")
    return "" if newest == ORT_FORMATS[0].since else newest


_INTEGER = re.compile(r"QLinear|QGemm|MatMulInteger|ConvInteger|DynamicQuantize")
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")


def find_integer_nodes(model: Model, *, signed: bool) -> dict[str, bool]:
    """Returns for each node of the optimized graph, except Q and DQ nodes, whether it computes on integers.

    With `signed` the graph is optimized for Arm's kernels, which take signed activations, else for x64's; any machine
    can make either graph. A node that only moves values counts as integer if no input comes from a DQ node.

    Raises:
        RuntimeRefusal: ONNX Runtime makes no session of the model.
    """
    settings = SessionSettings(
        level=Level.EXTENDED, config={"session.qdqisint8allowed": "1" if signed else "0"}, threads=1,
        libraries=model.custom_ops,
    )  # fmt: skip
    with work_folder() as work:
        optimize_graph(model.path, work / "optimized.onnx", settings)
        graph = onnx.load(str(work / "optimized.onnx"), load_external_data=False).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    return {
        node.name: bool(_INTEGER.match(node.op_type))
        or not any(makers.get(name) == "DequantizeLinear" for name in node.input)
        for node in graph.node
        if node.op_type not in _QUANTIZERS
    }


ONNX_FILE = "model.onnx"
STAMP = "edgekit.source_sha256"
"""The key of a file's metadata that holds the sha256 of the model from which the file was made."""


def write_stamped(model: Model, folder: Path, *, widens: bool = False) -> Model:
    """Writes a model into a folder with the sha256 of its source in the metadata, and returns it.

    If it `widens`, constants of 4 bits get 8: the ORT format has no others (ort.fbs).

    The sha256 is also Core ML's cache key: that provider stores compiled models under the key and never compares them
    with the file (ORT's `coreml_execution_provider`, `ModelCacheDirectory`).
    """
    proto = read_proto(model, weights=widens)
    if widens:
        write_eight_bits(proto.graph, read_opset(proto))
    stamps = {entry.key: entry.value for entry in proto.metadata_props}
    stamps |= {STAMP: model.sha256, "COREML_CACHE_KEY": model.sha256[:32]}
    onnx.helper.set_model_props(proto, dict(sorted(stamps.items())))
    return write_with_weights(proto, model, folder / ONNX_FILE)


def read_stamp(model: Model) -> str:
    """Returns the sha256 of the model from which a file was made, as `write_stamped` stored it, else ""."""
    entries = read_proto(model, weights=False).metadata_props
    return next((entry.value for entry in entries if entry.key == STAMP), "")


# Operators with the same result to the bit on every machine: they move data, compare, or do arithmetic of IEEE 754.
_EXACT_OPS = frozenset({
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat", "Constant",
    "ConstantOfShape", "DepthToSpace", "DequantizeLinear", "Div", "Equal", "Expand", "EyeLike", "Flatten", "Floor",
    "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max",
    "Min", "Mul", "Neg", "NonZero", "Not", "OneHot", "Or", "Pad", "QuantizeLinear", "Range", "Reciprocal", "Relu",
    "Reshape", "Round", "Scatter", "ScatterElements", "ScatterND", "Shape", "Sign", "Size", "Slice", "SpaceToDepth",
    "Split", "Sqrt", "Squeeze", "Sub", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
})  # fmt: skip


def describe_traits(source: onnx.GraphProto, nodes: Sequence[ort_files.OrtNode]) -> tuple[str, ...]:
    """Returns a sentence for each reason why another kind of CPU could write other bytes; empty if there is none.

    `source` is the model before its constants were folded, `nodes` are those of the converted file.
    """
    ops = {node.op for node in nodes}
    traits: list[str] = []
    constants, folded = set[str](), set[str]()
    for graph in iterate_graphs(source):
        constants |= {tensor.name for tensor in graph.initializer}
        for node in graph.node:
            if all(name in constants for name in node.input if name) and not node.domain:
                # Nodes that read only constants are folded when the file is written, with this CPU's kernels.
                constants |= set(node.output)
                if node.op_type not in _EXACT_OPS and any(node.input):
                    folded.add(node.op_type)
    if folded:
        traits.append(f"constants were computed by this CPU's float kernels: {', '.join(sorted(folded))}")
    if onnx.TensorProto.FLOAT16 in list_element_types(source):
        traits.append("fp16 nodes: which casts are baked in depends on the fp16 kernels of this ONNX Runtime build")
    if any(op.startswith("com.microsoft.nchwc.") for op in ops):
        traits.append("blocked layouts (NCHWc) exist on x64 only")
    if "com.microsoft.NhwcFusedConv" in ops:
        traits.append("NhwcFusedConv is made, and loads, on an Arm CPU with SME only")
    return tuple(traits)


ORT_FILES: Mapping[Style, str] = {"full": "model.ort", "runtime": "model.runtime.ort"}
"""The file name of each style."""

_NAMED_NODES = 10
# At these levels, which are for debugging, Q and DQ nodes are not fused: float nodes are then expected.
_WITHOUT_FUSION = frozenset({Level.DISABLED, Level.BASIC})


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A form on disk: its files, with the one that an app loads first, and the facts about them.

    `census` counts the nodes that will run, by operator; `fates` says what each node of the source became. `unfused`
    are quantized nodes that run in float: because of an activation before their Q node, or of their types. `equality`
    is None if the form was not run. `host_traits` says what another kind of CPU would write differently.
    `compatibility` says which devices a context fits; it is "" for other forms.
    """

    files: tuple[str, ...]
    census: dict[str, int] = {}
    fates: tuple[OpFusion, ...] = ()
    unfused: tuple[ort_files.UnfusedNode, ...] = ()
    equality: Equality | None = None
    host_traits: tuple[str, ...] = ()
    compatibility: str = ""
    versions: Mapping[str, str] = {}


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The source of a form: the model, and the samples to compare results on.

    Without `checked` they are not compared. `origin` is the model before its constants were folded.
    """

    model: Model
    origin: Model
    samples: Samples | None = None
    checked: bool = True


def write_ort_form(source: Source, folder: Path, options: OrtOptions) -> Written:
    """Writes a model in ORT format into a folder, counts its nodes, and compares its results with those of the source.

    Raises:
        ModelError: no quantized layer would run in integers, or the file's results differ from its source's.
        RuntimeRefusal: ONNX Runtime cannot load or convert the model.
    """
    path = folder / ORT_FILES[options.style]
    write_ort(source.model, path, options, subject=str(source.origin.path))
    graph = ort_files.read_graph(path)
    nodes = ort_files.replay_saved(graph)
    unfused = ort_files.find_unfused(nodes, graph.outputs)
    stuck = [node for node in unfused if not node.activation and options.level not in _WITHOUT_FUSION]
    # Another tool's quantizer may give single layers types that no kernel has: they run in float, as `unfused` tells.
    if stuck and not any(_INTEGER.search(node.op) for node in nodes):
        names = ", ".join(f"'{shorten_name(node.name)}' ({node.op})" for node in stuck[:_NAMED_NODES])
        words = f"INT8 did not stick: {len(stuck)} nodes of '{path.name}' would run in float on {options.cpu}: {names}"
        arch = "arm64" if options.cpu == "arm" else "x64"
        hint = f"quantize for its kernels: edgekit quantize MODEL --target cpu --set arch={arch}"
        raise ModelError(words, hint=hint)
    # Only a run finds a fusion that is wrong for this model.
    equality = compare_with_source(source.model, path, options, source.samples) if source.checked else None
    if equality is not None and not equality.passed:
        place = f"first in node '{shorten_name(equality.first_bad)}'" if equality.first_bad else "in its outputs only"
        words = f"'{path.name}' gives other results than its source, {place}: error {equality.error:.2g}, at most"
        hint = "convert with --level basic, and report the model to ONNX Runtime"
        raise ModelError(f"{words} {equality.tolerance:g} is allowed", hint=hint)
    return Written(
        files=(path.name,),
        census=ort_files.count_ops(nodes),
        fates=trace_fusions(skim_model(source.model.path).graph, nodes).fates,
        unfused=unfused,
        equality=equality,
        host_traits=describe_traits(skim_model(source.origin.path).graph, graph.nodes),
    )


class ConvertedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a converted model, and the facts about them.

    `files` has for each form, in the target's order, the file names in the folder, the one to load first; `reason` says
    why these forms. `census`, `fates`, `unfused`, `equality` and `host_traits` are those of `Written`, for each `.ort`
    form. `sha256` and `size_bytes` are by file name. `versions` names what wrote the files: onnxruntime, the version of
    the canonical form, and for a context onnxruntime-qnn and qairt. `target` is "" if forms were chosen without a
    target.
    """

    target: str
    reason: str
    files: dict[Form, tuple[str, ...]]
    census: dict[Form, dict[str, int]]
    fates: dict[Form, tuple[OpFusion, ...]]
    unfused: dict[Form, tuple[ort_files.UnfusedNode, ...]]
    equality: dict[Form, Equality]
    host_traits: dict[Form, tuple[str, ...]]
    sha256: dict[str, str]
    size_bytes: dict[str, int]
    versions: dict[str, str]
    compatibility: str


class ConvertedModel(ConvertedFiles, frozen=True, kw_only=True):
    """The files of a converted model, in a folder."""

    source_sha256: str
    folder: Path
    canonical_version: int


def convert_model(
    model: Model,
    target: Target,
    out: AnyPath,
    *,
    ort_source: Model | None = None,
    origin: Model | None = None,
    samples: Samples | None = None,
    checked: bool = True,
    context: ContextOptions = DEFAULT_CONTEXT,
) -> ConvertedModel:
    """Writes every form that the target loads into the folder `out`: each file whole or not at all.

    Args:
        model: a prepared model, quantized or not.
        target: its `conversion.forms` are written, in its order of preference.
        out: the folder; existing files with other names stay.
        ort_source: the source of the `.ort` forms, if it is another model: the float32 form of an fp16 model, around
            whose every node ONNX Runtime's CPU provider would put casts.
        origin: the model before it was prepared, to see which constants were folded.
        samples: the inputs on which each `.ort` form is compared with its source; drawn at random if there are none.
        checked: whether they are compared.
        context: the options of a QNN context.

    Raises:
        ModelError: the ORT format cannot hold the model, quantized nodes would run in float, or an `.ort` form gives
            other results than its source.
        RuntimeRefusal: ONNX Runtime, or QNN for a context, refuses the model.
        MissingExtraError: a context is wanted and onnxruntime-qnn is not installed.
        DeviceError: QNN's compiler crashed or ran out of time.
        OutputError: `out` cannot be written.
    """
    cpu, saves = target.conversion.cpu, target.conversion.saves_fusions
    options: dict[Form, OrtOptions] = {
        "full": OrtOptions(style="full", cpu=cpu),
        "runtime": OrtOptions(style="runtime", cpu=cpu, level=Level.ALL if saves else Level.BASIC),
    }
    source = Source(model=ort_source or model, origin=origin or ort_source or model, samples=samples, checked=checked)
    return convert_forms(model, source, target.conversion.forms, options, as_path(out), target, context)


def convert_forms(
    model: Model,
    source: Source,
    forms: Sequence[Form],
    options: Mapping[Form, OrtOptions],
    out: Path,
    target: Target | None = None,
    context: ContextOptions = DEFAULT_CONTEXT,
) -> ConvertedModel:
    """Writes the forms of a prepared model: ONNX and context of `model`, ORT format of `source`.

    A context needs a target.

    Raises:
        ModelError: the ORT format cannot hold the model, quantized nodes would run in float, or a file gives other
            results than its source.
        RuntimeRefusal: ONNX Runtime refuses the model.
        OutputError: `out` cannot be written.
    """
    if options.keys() & set(forms):
        refuse_size(source.model.path, source.model.size_bytes)
    if "context" in forms:
        require_compiler()
    with work_folder(out) as work:
        (work / "ort").mkdir()
        stamped = write_stamped(model, work)
        stored = skim_model(source.model.path).graph.initializer if options.keys() & set(forms) else ()
        widens = any(tensor.data_type in FOUR_BITS for tensor in stored)
        is_same = source.model is model and not widens
        ort_stamped = stamped if is_same else write_stamped(source.model, work / "ort", widens=widens)
        source = msgspec.structs.replace(source, model=ort_stamped)

        def write(form: Form) -> Written:
            if form in options:
                return write_ort_form(source, work, options[form])
            if form == "context" and target is not None:
                return fill(Written, compile_context(stamped.path.name, target, work, context))
            return Written(files=(stamped.path.name, *stamped.external_files))

        written = {form: write(form) for form in forms}
        names = [name for form in written.values() for name in form.files]
        sha256 = {name: digest_file(work / name) for name in names}
        sizes = {name: (work / name).stat().st_size for name in names}
        # The file to load comes last.
        for name in reversed(names):
            move_file(work / name, out / name)
    versions = {"onnxruntime": VERSION, "ort-canonical-form": str(CANONICAL_VERSION)}
    # The fields of `Written` that the result has by form.
    by_form: dict[str, Any] = {
        name: {form: found for form, item in written.items() if (found := getattr(item, name))}
        for name in ("files", "census", "fates", "unfused", "equality", "host_traits")
    }
    return ConvertedModel(
        **by_form,
        source_sha256=model.sha256,
        target="" if target is None else target.name,
        folder=out,
        sha256=sha256,
        size_bytes=sizes,
        canonical_version=CANONICAL_VERSION,
        versions=versions | {key: value for item in written.values() for key, value in item.versions.items()},
        compatibility="".join(item.compatibility for item in written.values()),
        reason="the style, the level and the CPU were asked for" if target is None else target.conversion.reason,
    )
