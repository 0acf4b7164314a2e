"""Makes the forms of a model that its target loads: in half precision, converted, and in each of several sizes.

In a bundle with buckets, the model of each size is made in the same way as the largest one. Only the plan is shared:
the nodes that stay in float32 in half precision are found for each size.
"""

import contextlib
import math
import shlex
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import move_file, replace_file
from edgekit.bundle.golden import Golden, make_golden, read_inputs
from edgekit.bundle.group import share_models
from edgekit.bundle.manifest import Bucket, Buckets
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport, count_of, count_staying
from edgekit.convert.convert import ConvertedModel, convert_model
from edgekit.data.padding import pad_samples
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.errors import MissingExtraError, RuntimeRefusal
from edgekit.graph.graph import read_graph
from edgekit.jobs.build_inputs import BucketInputs, BuildInputs, BuildJob
from edgekit.jobs.check import fix_for_target
from edgekit.model.model import Model, load_model, read_proto
from edgekit.model.soundness import iterate_reads
from edgekit.prepare.constants import disable_harmful
from edgekit.prepare.fix import fix_quantized
from edgekit.quantize import Calibration, QuantizedModel, QuantPlan, quantize_model
from edgekit.quantize.accuracy.loss import GOOD_DB
from edgekit.quantize.weight_only import convert_to_fp16
from edgekit.serialize import fill
from edgekit.target import Precision, Target
from edgekit.verify.layers.comparison import choose_layer_samples
from edgekit.verify.layers.overflows import HALF_MAX, find_half_loss, find_lossy, find_overflows

# Enough samples to see the largest values; each one takes a run of the float model without optimizations.
_SAMPLES = 8


def convert_to_half(
    prepared: Model, check: CheckReport, target: Target, golden: Golden, out: Path, notes: list[str]
) -> Model:
    """Returns the model in fp16; nodes that run on the CPU, overflow or lose too much precision stay in float32.

    Notes about nodes that stay in float32 because of their values are added to `notes`.

    Raises:
        ModelError: the model cannot be converted.
        RuntimeRefusal: ONNX Runtime does not load the result.
    """
    kept = [node.name for node in check.node_list if not node.taken]
    # Where a provider computes all floats in half precision, float32 in the file would save nothing.
    if target.float_bits > 16:
        keeps_all = "--precision fp32 keeps all of them"
        taken = [node.name for node in check.node_list if node.taken]
        overflowing: dict[str, float] = {}
        # If the run is refused, the comparison of layers fails too, and the bundle says so.
        with contextlib.suppress(RuntimeRefusal):
            largest_values = find_overflows(prepared, choose_layer_samples(golden))
            overflowing = {name: reach for name, reach in largest_values.items() if name in taken}
        if overflowing:
            worst = max(overflowing, key=overflowing.__getitem__)
            why = "values there come close to 65504, the largest of half precision, or exceed it"
            names = f"{', '.join(list(overflowing)[:5])}; the largest is {overflowing[worst]:.3g} at '{worst}'"
            notes.append(f"{count_staying(len(overflowing))} in float32, because {why}: {names}; {keeps_all}")
        half_nodes = [name for name in taken if name not in overflowing]
        lossy, least_db = None, target.thresholds.min_sqnr_db
        with contextlib.suppress(RuntimeRefusal):
            lossy = find_lossy(prepared, half_nodes, choose_layer_samples(golden, _SAMPLES), least_db)
        if lossy is not None:
            ends = f"'{lossy.nodes[0]}'" + (f" to '{lossy.nodes[-1]}'" if len(lossy.nodes) > 1 else "")
            lost = f"the outputs keep {lossy.sqnr_db:.1f} dB of the {least_db:g} that the target asks for"
            if not math.isfinite(lossy.sqnr_db):
                lost = "an output is NaN or infinite"
            expected = f"at least {lossy.kept_db:.1f} dB are expected"
            words = f"in float32, {ends}: in half precision {lost}; now {expected}; {keeps_all}"
            notes.append(f"{count_staying(len(lossy.nodes))} {words}")
        kept += (*overflowing, *(lossy.nodes if lossy is not None else ()))
    converted = convert_to_fp16(prepared, kept, out)
    if converted.clamped:
        notes.append(f"weights beyond 65504 were clamped to fp16's range in {', '.join(converted.clamped[:5])}")
    if converted.raised:
        names = ", ".join(converted.raised[:5])
        what = f"the epsilon of {count_of(len(converted.raised), 'node')}"
        notes.append(f"{what} is 1e-7, because fp16 makes a smaller one 0: {names}")
    return converted.model


def warn_of_fp16_loss(prepared: Model, floats: Collection[str], target: Target, samples: Samples) -> str:
    """Returns a warning if a target computes floats in half precision, and values of float nodes do not fit into it.

    `floats` are the nodes that the provider computes in float. The warning is "" if nothing is lost.
    """
    if target.float_bits != 16 or not floats:
        return ""
    found = None
    with contextlib.suppress(RuntimeRefusal):
        few = select_samples(samples, spread_indices(samples.count, _SAMPLES))
        found = find_half_loss(prepared, floats, few, GOOD_DB)
    if found is None:
        return ""
    problem = f"'{found.name}' stays float, which {target.name} computes in fp16 (from 6e-8 to 65504): "
    if found.share:
        ends = f"down to {found.low:.1e}" if found.high <= HALF_MAX else f"up to {found.high:.3g}"
        problem += f"{found.share:.1%} of its values, {ends}, do not fit"
    else:
        problem += "its values need more digits"
    remedy = "scale it, raise what is added before a logarithm or root, or let the app compute it before the model"
    # An app may compute the float nodes behind the value: then the model ends where the other nodes read.
    graph = read_graph(prepared)
    reached, removed = {found.name}, set[str]()
    for node in graph.nodes:
        if node.name in floats and not reached.isdisjoint({*node.input, *node.output}):
            reached.update(node.output)
            removed.add(node.name)
    needed = set(reached)
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.output):
            removed.add(node.name)
            needed.update(iterate_reads(node.proto))
    read_by_rest = {read for node in graph.nodes if node.name not in removed for read in iterate_reads(node.proto)}
    outputs = [each for node in graph.nodes if node.name in removed for each in node.output]
    start = ",".join([each for each in (*graph.inputs, *outputs) if each in read_by_rest])
    command = f": edgekit prepare --inputs {shlex.quote(start)}" if start else ""
    return f"{problem}; the outputs keep {max(found.sqnr_db, 0.0):.0f} dB: {remedy}{command}"


class ModelForTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A model made for a target: whether it was rewritten for it, and the plan with which it was quantized, if any."""

    model: Model
    target: Target
    precision: Precision
    check: CheckReport
    is_rewritten: bool
    plan: QuantPlan | None = None
    quantized: QuantizedModel | None = None


class Deployed(ModelForTarget, frozen=True, kw_only=True):
    """A model in the forms that its target loads; target and check may have changed since."""

    converted: ConvertedModel


def deploy_model(made: ModelForTarget, inputs: BuildInputs, job: BuildJob, work: Path, notes: list[str]) -> Deployed:
    """Converts a model to the forms that its target loads, and before that to half precision if it is an fp16 model.

    Notes about changes are added to `notes`.

    Raises:
        EdgekitError: the model cannot be converted.
    """
    model, target, check = made.model, made.target, made.check
    ort_source: Model | None = None
    if made.precision == "fp16":
        # Files in ORT format are made from the float model: for an fp16 one ONNX Runtime adds casts around each node.
        ort_source, model = model, convert_to_half(model, check, target, inputs.golden, work / "half.onnx", notes)
        check = check_model(model, target)
    target, harmful_notes = disable_harmful(target, read_proto(model, weights=False).graph)
    notes += harmful_notes
    job.watch.begin("convert", target.name)
    # QNN's compiler may take minutes, and gigabytes.
    job.progress(f"{target.name}: write as {', '.join(target.conversion.forms)}")
    golden, out = read_inputs(inputs.golden), work / "converted"
    convert = partial(convert_model, model, out=out, ort_source=ort_source, origin=inputs.source, samples=golden)
    try:
        converted = convert(target=target)
    except MissingExtraError as error:
        # A context needs the vendor's compiler; the other forms do not.
        if not (forms := tuple(form for form in target.conversion.forms if form != "context")):
            raise
        notes.append(f"no context model: {error}")
        conversion = msgspec.structs.replace(target.conversion, forms=forms)
        converted = convert(target=msgspec.structs.replace(target, conversion=conversion))
    return fill(Deployed, made, target=target, check=check, converted=converted)


def make_sizes(
    deployed: Deployed, inputs: BuildInputs, job: BuildJob, work: Path, notes: list[str]
) -> tuple[tuple[Path, ...], Buckets] | None:
    """Returns the model files of all buckets, and their description for the manifest; None if there are no buckets.

    `deployed` is the largest model, whose files come first. All sizes have its scales, ranges and roundings, which were
    found on samples of all lengths.

    Raises:
        EdgekitError: a model cannot be made at a smaller size.
    """
    if (buckets := inputs.buckets) is None:
        return None
    models = {buckets.models.largest: _load(deployed, inputs)}
    for size, prepared in buckets.models.smaller.items():
        folder = work / f"size-{size}"
        size_notes = list[str]()
        # Some of the golden samples that fit into this size, padded to it.
        fitting_rows = [row for row, length in enumerate(buckets.lengths) if length <= size]
        rows = [fitting_rows[place] for place in spread_indices(len(fitting_rows), _SAMPLES)]
        samples = pad_samples(buckets.models.padding, select_samples(buckets.given, rows), size)
        golden = make_golden(inputs.source, samples, folder / "golden")
        size_inputs = msgspec.structs.replace(inputs, prepared=prepared, golden=golden)
        model = _remake(size_inputs, deployed, folder)
        at_size = msgspec.structs.replace(deployed, model=model, check=check_model(model, deployed.target))
        deployed_size = deploy_model(at_size, size_inputs, job, folder, size_notes)
        notes += [f"{buckets.models.padding.dim}={size}: {line}" for line in size_notes if line not in notes]
        models[size] = _load(deployed_size, inputs)
    return _share(models, buckets, inputs.source.name, work / "shared", notes)


def _load(deployed: Deployed, inputs: BuildInputs) -> Model:
    converted = deployed.converted
    return load_model(converted.folder / converted.files["onnx"][0], custom_ops=inputs.prepared.custom_ops)


def _remake(inputs: BuildInputs, made: ModelForTarget, work: Path) -> Model:
    """Returns a prepared model of another size, rewritten and quantized like the largest."""
    model, target = inputs.prepared, made.target
    if made.is_rewritten:
        model = fix_for_target(model, work / "rewritten" / model.path.name, target, stays_float=made.plan is None).model
    if inputs.is_quantized:
        return fix_quantized(model, target, work / "fixed.onnx").model
    if made.plan is None or not isinstance(inputs.calibration, Calibration):
        return model
    plan = msgspec.structs.replace(made.plan, model_sha256=model.sha256)
    return quantize_model(model, plan, inputs.calibration, work / "quantized.onnx").model


def _share(
    models: Mapping[int, Model], sized: BucketInputs, name: str, work: Path, notes: list[str]
) -> tuple[tuple[Path, ...], Buckets]:
    largest, folder = sized.models.largest, work / "together"
    names = {size: name if size == largest else f"{name}-{size}" for size in models}
    shared, _ = share_models({names[size]: model for size, model in models.items()}, work)
    folder.mkdir(parents=True, exist_ok=True)

    def gather(path: Path, file: str) -> Path:
        """Puts a file into the folder unless it is there: a file in `work` is moved, any other is copied."""
        place = folder / file
        if not place.exists():
            (move_file if path.is_relative_to(work) else replace_file)(path, place)
        return place

    # One folder, as in the bundle, because a model loads weights from its own folder. Each file has a name of its own.
    files_by_size: dict[int, tuple[Path, ...]] = {}
    for size, model in models.items():
        own_files = (model.path, *(model.path.parent / file for file in model.external_files))
        first, *others = shared.get(names[size], own_files)
        files_by_size[size] = gather(first, f"{names[size]}.onnx"), *(gather(path, path.name) for path in others)
    files = tuple(dict.fromkeys(path for paths in files_by_size.values() for path in paths))
    shared_bytes = sum(path.stat().st_size for path in files)
    separate_bytes = sum(path.stat().st_size for paths in files_by_size.values() for path in paths)
    sizes = ", ".join(str(size) for size in sized.models.sizes)
    together = f"{shared_bytes} bytes together, {separate_bytes} if they shared no weights"
    why = "only in ONNX form, because files in ORT format and contexts cannot share any"
    notes.append(f"a model for each {sized.models.padding.dim} of {sizes}: {together}; {why}")
    buckets = tuple(Bucket(size=size, file=files_by_size[size][0].name) for size in sized.models.sizes)
    return files, Buckets(padding=sized.models.padding, sizes=buckets, lengths=sized.lengths)
