"""A model in the forms that its target loads: halved, converted, and for each of several sizes.

In a bundle with buckets, the model of each size is made in the same way as that of the largest. Which nodes stay float
in half precision is found out once, for the largest.
"""

import contextlib
import shlex
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import copy_file, move_file
from edgekit.bundle.golden import Golden, make_golden, read_inputs
from edgekit.bundle.group.group import share_models
from edgekit.bundle.manifest import Bucket, Buckets
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.convert.convert import ConvertedModel, convert_model
from edgekit.data.padding import pad_samples
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.errors import MissingExtraError, RuntimeRefusal
from edgekit.graph.graph import Graph, read_graph
from edgekit.jobs.build_inputs import BucketInputs, BuildInputs, BuildJob
from edgekit.jobs.check import fix_for_target
from edgekit.model.model import Model, load_model, read_proto
from edgekit.model.soundness import iterate_reads
from edgekit.prepare.constants import disable_harmful
from edgekit.prepare.fix import fix_quantized
from edgekit.quantize import Calibration, QuantizedModel, QuantPlan, quantize_model
from edgekit.quantize.accuracy.loss import GOOD_DB
from edgekit.quantize.weight_only.convert import convert_to_fp16
from edgekit.target import Precision, Target
from edgekit.verify.layers.comparison import choose_layer_samples
from edgekit.verify.layers.overflows import HALF_MAX, find_half_loss, find_lossy, find_overflows

# Enough samples to see the largest values; each one costs a run of the float model without optimizations.
_SAMPLES = 8


def halve_model(
    prepared: Model, check: CheckReport, target: Target, golden: Golden, out: Path, notes: list[str]
) -> Model:
    """Returns the model in fp16; nodes that run on the CPU, overflow or lose too much precision stay in float32.

    `notes` says which nodes stay in float32 because of their values.

    Raises:
        ModelError: the model cannot be converted.
        RuntimeRefusal: ONNX Runtime does not load the result.
    """
    left = [node.name for node in check.node_list if not node.taken]
    beyond: dict[str, float] = {}
    # Where a run is refused the layers cannot be compared either, and what they say of it goes into the bundle.
    with contextlib.suppress(RuntimeRefusal):
        reaches = find_overflows(prepared, choose_layer_samples(golden))
        beyond = {name: reach for name, reach in reaches.items() if name not in left}
    if beyond:
        worst = max(beyond, key=beyond.__getitem__)
        notes.append(
            f"{len(beyond)} nodes stay in float32, because values there come near to 65504, where half precision ends,"
            f" or lie beyond it: {', '.join(list(beyond)[:5])}; the largest is {beyond[worst]:.3g} at '{worst}';"
            " --precision fp32 keeps all of them"
        )
    halved = [node.name for node in check.node_list if node.taken and node.name not in beyond]
    lossy, least_db = None, target.thresholds.min_sqnr_db
    with contextlib.suppress(RuntimeRefusal):
        lossy = find_lossy(prepared, halved, choose_layer_samples(golden, _SAMPLES), least_db)
    if lossy is not None:
        notes.append(
            f"{len(lossy.nodes)} nodes from '{lossy.nodes[0]}' to '{lossy.nodes[-1]}' stay in float32: in half"
            f" precision the outputs keep {lossy.sqnr_db:.1f} dB of the {least_db:g} that the target asks for, so"
            f" {lossy.kept_db:.1f} dB are expected; --precision fp32 keeps all of them"
        )
    converted = convert_to_fp16(prepared, [*left, *beyond, *(lossy.nodes if lossy else ())], out)
    if converted.clamped:
        notes.append(f"weights beyond 65504 were clamped to fp16's range in {', '.join(converted.clamped[:5])}")
    return converted.model


def warn_of_halves(prepared: Model, floats: Collection[str], target: Target, samples: Samples) -> str:
    """Returns a warning if a target computes floats in half precision that the values of some nodes need more than.

    `floats` are the nodes that stay float in a quantized model. The result is "" if nothing is lost.
    """
    if target.float_bits != 16 or not floats:
        return ""
    found = None
    with contextlib.suppress(RuntimeRefusal):
        few = select_samples(samples, spread_indices(samples.count, _SAMPLES))
        found = find_half_loss(prepared, floats, few, GOOD_DB)
    if found is None:
        return ""
    what = f"'{found.name}' stays float, which {target.name} computes in fp16 (from 6e-8 to 65504): "
    if found.share:
        ends = f"down to {found.low:.1e}" if found.high <= HALF_MAX else f"up to {found.high:.3g}"
        what += f"{found.share:.1%} of its values, {ends}, do not fit"
    else:
        what += "its values need more digits"
    todo = "scale it, raise what is added before a logarithm or root, or let the app compute it before the model"
    start = ",".join(_find_start(read_graph(prepared), found.name, floats))
    command = f": edgekit prepare --inputs {shlex.quote(start)}" if start else ""
    return f"{what}; the outputs keep {max(found.sqnr_db, 0.0):.0f} dB: {todo}{command}"


def _find_start(graph: Graph, name: str, floats: Collection[str]) -> list[str]:
    """Returns the inputs of the model without the float nodes that a value reaches, and without all before them."""
    reached, front = {name}, set[str]()
    for node in graph.nodes:
        if node.name in floats and not reached.isdisjoint({*node.input, *node.output}):
            reached.update(node.output)
            front.add(node.name)
    needed = set(reached)
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.output):
            front.add(node.name)
            needed.update(iterate_reads(node.proto))
    behind = {read for node in graph.nodes if node.name not in front for read in iterate_reads(node.proto)}
    made = [each for node in graph.nodes if node.name in front for each in node.output]
    return [each for each in (*graph.inputs, *made) if each in behind]


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A model for a target, and how it was made: rewritten for the target or not, quantized by a plan or not."""

    model: Model
    target: Target
    precision: Precision
    check: CheckReport
    is_rewritten: bool
    plan: QuantPlan | None = None
    quantized: QuantizedModel | None = None


class Deployed(Made, frozen=True, kw_only=True):
    """A model in the forms that its target loads; target and check are as they became on the way."""

    converted: ConvertedModel


def deploy_model(made: Made, inputs: BuildInputs, job: BuildJob, work: Path, notes: list[str]) -> Deployed:
    """Halves a model where its precision is fp16, and converts it to the forms that the target loads.

    `notes` says what was done on the way.

    Raises:
        EdgekitError: the model cannot be halved or converted.
    """
    model, target, check = made.model, made.target, made.check
    ort_source: Model | None = None
    if made.precision == "fp16":
        # Files in ORT format are made of the float model: around each node of a half one ONNX Runtime bakes casts.
        ort_source, model = model, halve_model(model, check, target, inputs.golden, work / "half.onnx", notes)
        check = check_model(model, target)
    target, told = disable_harmful(target, read_proto(model, weights=False).graph)
    notes += told
    job.watch.begin("convert", target.name)
    golden, out = read_inputs(inputs.golden), work / "converted"
    convert = partial(convert_model, model, out=out, ort_source=ort_source, origin=inputs.source, samples=golden)
    try:
        converted = convert(target=target)
    except MissingExtraError as error:
        # A context needs the vendor's compiler; without it the other forms of the bundle are still good.
        forms = tuple(form for form in target.conversion.forms if form != "context")
        if not forms:
            raise
        notes.append(f"no context model: {error}")
        conversion = msgspec.structs.replace(target.conversion, forms=forms)
        converted = convert(target=msgspec.structs.replace(target, conversion=conversion))
    return Deployed(**{**msgspec.structs.asdict(made), "target": target, "check": check, "converted": converted})


def make_sizes(
    deployed: Deployed, inputs: BuildInputs, job: BuildJob, work: Path, notes: list[str]
) -> tuple[tuple[Path, ...], Buckets] | None:
    """Returns the model files of all buckets, and what a manifest says of them; None where there are no buckets.

    `deployed` is the largest model, whose files come first. Scales, ranges and rounding of all are its own: they were
    found on samples that reach into all sizes.

    Raises:
        EdgekitError: a model cannot be made at a smaller size.
    """
    sized = inputs.buckets
    if sized is None:
        return None
    models = {sized.models.largest: _load(deployed, inputs)}
    for size, prepared in sized.models.smaller.items():
        folder = work / f"size-{size}"
        told = list[str]()
        # Some of the golden samples that fit into a size, filled up to it.
        fitting = [row for row, length in enumerate(sized.lengths) if length <= size]
        rows = [fitting[place] for place in spread_indices(len(fitting), _SAMPLES)]
        samples = pad_samples(sized.models.padding, select_samples(sized.given, rows), size)
        golden = make_golden(inputs.source, samples, folder / "golden")
        mine = msgspec.structs.replace(inputs, prepared=prepared, golden=golden)
        model = _remake(mine, deployed, folder)
        same = msgspec.structs.replace(deployed, model=model, check=check_model(model, deployed.target))
        made = deploy_model(same, mine, job, folder, told)
        notes += [f"{sized.models.padding.dim}={size}: {line}" for line in told if line not in notes]
        models[size] = _load(made, inputs)
    return _share(models, sized, inputs.source.name, work / "shared", notes)


def _load(deployed: Deployed, inputs: BuildInputs) -> Model:
    converted = deployed.converted
    return load_model(converted.folder / converted.files["onnx"][0], custom_ops=inputs.prepared.custom_ops)


def _remake(inputs: BuildInputs, made: Made, work: Path) -> Model:
    """Returns a prepared model of another size as the largest was made."""
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
        """Puts a file into the folder, once: a file that was made in `work` is moved, any other is copied."""
        place = folder / file
        if not place.exists():
            (move_file if path.is_relative_to(work) else copy_file)(path, place)
        return place

    # In one folder, as in the bundle: a model loads where its weights lie beside it. Each has a name of its own, also
    # where it shares no weight.
    of_each: dict[int, tuple[Path, ...]] = {}
    for size, model in models.items():
        alone = (model.path, *(model.path.parent / file for file in model.external_files))
        first, *others = shared.get(names[size], alone)
        of_each[size] = gather(first, f"{names[size]}.onnx"), *(gather(path, path.name) for path in others)
    files = tuple(dict.fromkeys(path for paths in of_each.values() for path in paths))
    whole = sum(path.stat().st_size for path in files)
    apart = sum(path.stat().st_size for paths in of_each.values() for path in paths)
    sizes = ", ".join(str(size) for size in sized.models.sizes)
    notes.append(
        f"a model for each {sized.models.padding.dim} of {sizes}: {whole} bytes together, {apart} without the weights"
        f" that they share; in ONNX form alone, since files in ORT format and contexts have weights of their own"
    )
    buckets = Buckets(
        padding=sized.models.padding,
        sizes=tuple(Bucket(size=size, file=of_each[size][0].name) for size in sized.models.sizes),
        lengths=sized.lengths,
    )
    return files, buckets
