"""One target's bundle from the prepared model: quantized or halved, checked, converted, written."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from edgekit.bundle.describe import Contents
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden.golden import read_inputs
from edgekit.bundle.manifest.manifest import Ancestry
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.convert.convert import ConvertedModel, convert_model
from edgekit.errors import DataError, EdgekitError, MissingExtraError, ModelError, RuntimeRefusal
from edgekit.jobs.build_inputs import BuildInputs, BuildJob, fix_inputs
from edgekit.jobs.half_model import halve_model
from edgekit.jobs.prepare import list_versions
from edgekit.model.model import Model, load_model, read_proto
from edgekit.prepare.fix import fix_model
from edgekit.prepare.rewrites import unsigned_weights
from edgekit.prepare.weights.float_weights import keep_float_weights
from edgekit.quantize import Calibration, QuantizedModel
from edgekit.quantize.mixed_precision.goal_search import Search, plan_sparingly, search_quantization, write_chosen
from edgekit.quantize.mixed_precision.narrow import store_narrow
from edgekit.recipe import choose_precision
from edgekit.report.quantization_text import describe_narrow
from edgekit.target import INTEGERS, Precision, Target
from edgekit.verify.layers.evidence import compare_with_float, encode_evidence
from edgekit.verify.report import Step


class BuiltBundle(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle as it was written, with the models that it was made from, step by step."""

    bundle: Bundle
    target: Target
    check: CheckReport
    models: dict[Step, Model]
    converted: ConvertedModel
    quantized: QuantizedModel | None
    notes: tuple[str, ...]


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """A model for a target, before it is halved or converted; `quantized` says how it was quantized here."""

    precision: Precision
    model: Model
    quantized: QuantizedModel | None
    check: CheckReport
    notes: tuple[str, ...]


def make_bundle(inputs: BuildInputs, target: Target, job: BuildJob, work: Path) -> BuiltBundle:
    """Makes and writes the bundle of one target.

    Raises:
        EdgekitError: the model cannot be made for this target.
    """
    work.mkdir()
    inputs, made = _make_model(inputs, target, job, work)
    precision, notes, model, check, quantized = made.precision, [*made.notes], made.model, made.check, made.quantized
    ort_source: Model | None = None
    if precision == "fp16":
        try:
            # Files in ORT format are made of the float model: around each node of a half one ONNX Runtime bakes casts.
            ort_source, model = model, halve_model(model, check, target, inputs.golden, work / "half.onnx", notes)
            check = check_model(model, target)
        except (ModelError, RuntimeRefusal) as error:
            precision = _fall_back(error, target, job, notes)
    target, told = keep_float_weights(target, read_proto(model, weights=False).graph)
    notes += told
    job.watch.begin("convert", target.name)
    converted = _convert(_converter(model, ort_source, inputs, work / "converted"), target, notes)
    job.watch.begin("write", target.name)
    contents = _collect(inputs, target, precision, quantized, converted, check, job)
    contents = msgspec.structs.replace(contents, layers=_compare_layers(inputs, converted, quantized))
    models: dict[Step, Model] = {"prepare": inputs.prepared}
    if quantized is not None:
        models["quantize"] = quantized.model
    return BuiltBundle(
        bundle=write_bundle(contents, job.staging / f"{inputs.source.name}-{target.name}"),
        target=target,
        check=check,
        models=models,
        converted=converted,
        quantized=quantized,
        notes=tuple(notes),
    )


def _make_model(inputs: BuildInputs, target: Target, job: BuildJob, work: Path) -> tuple[BuildInputs, _Made]:
    """Returns the model for a target, and what it was made of: the graph rewritten for it, unless that is refused."""
    gained = list[str]()
    fixed = fix_inputs(inputs, target, job, gained)
    made = _quantize_inputs(fixed, target, job, work)
    # What the float graph gains may end in a quantized one that makes no session.
    if fixed is not inputs and _is_refused(made.check):
        plain = _quantize_inputs(inputs, target, job, work)
        if not _is_refused(plain.check):
            gained, fixed, made = ["left as it is: rewritten for it, it would make no session"], inputs, plain
    return fixed, msgspec.structs.replace(made, notes=(*gained, *made.notes, *_tell_refusal(made.check)))


def _tell_refusal(check: CheckReport) -> Sequence[str]:
    """Returns why no session of the model is expected, in words that ONNX Runtime's refusal lacks."""
    fatal = [node for node in check.node_list if node.fatal and not node.is_quantizer and node.reasons]
    if not fatal:
        return ()
    first = f"{fatal[0].op} '{fatal[0].name}': {fatal[0].reasons[0]}"
    return (f"no session of it is expected, {len(fatal)} nodes stop it: {first}",)


def _is_refused(check: CheckReport) -> bool:
    return any(node.fatal for node in check.node_list)


def _quantize_inputs(inputs: BuildInputs, target: Target, job: BuildJob, work: Path) -> _Made:
    """Returns the model in integers where the target wants these, else as it was prepared."""
    precision, notes = choose_precision(target, job.recipe.precision), list[str]()
    model, quantized = inputs.prepared, None
    if inputs.is_quantized:
        precision = "int8"
        notes.append("the model is quantized already: taken as it is")
        model = _store_unsigned(model, target, work / "unsigned.onnx", notes)
    elif target.name in inputs.floats:
        precision = "fp32"
        notes.append(f"built as fp32: {inputs.floats[target.name]}")
    elif precision in INTEGERS:
        try:
            quantized = _quantize(inputs, target, precision, job, notes)
            model = quantized.model
        except ModelError as error:
            precision = _fall_back(error, target, job, notes)
    return _Made(
        precision=precision, model=model, quantized=quantized, check=check_model(model, target), notes=tuple(notes)
    )


def _store_unsigned(model: Model, target: Target, out: Path, notes: list[str]) -> Model:
    """Returns a quantized model with its weights in the types that the target takes, the same values."""
    if not target.quantization.unsigned_ops:
        return model
    fixed = fix_model(model, out, [unsigned_weights.FIX_ID])
    count = sum(len(fix.nodes) for fix in fixed.fixes)
    if not count:
        return model
    notes.append(f"int8 weights of Gemm and MatMul are stored as uint8, the same values: {count} nodes")
    return fixed.model


def _collect(
    inputs: BuildInputs,
    target: Target,
    precision: Precision,
    quantized: QuantizedModel | None,
    converted: ConvertedModel,
    check: CheckReport,
    job: BuildJob,
) -> Contents:
    return Contents(
        source=inputs.source,
        target=target,
        precision=precision,
        files={form: tuple(converted.folder / name for name in names) for form, names in converted.files.items()},
        golden=inputs.golden,
        check=check,
        ancestry=Ancestry(
            source=job.origin,
            prepared=inputs.prepared.sha256,
            quantized=None if quantized is None else quantized.model.sha256,
            # A float model does not depend on the samples: with them its bundle would change for nothing.
            data=None if quantized is None else inputs.samples.facts.sha256,
        ),
        versions={**list_versions(), **converted.versions},
        recipe=job.recipe,
        state=inputs.state,
        preprocess=inputs.preprocess,
        recorded=inputs.recorded.get(target.name),
    )


def _compare_layers(inputs: BuildInputs, converted: ConvertedModel, quantized: QuantizedModel | None) -> bytes:
    names, prepared = converted.files.get("onnx"), inputs.prepared
    deployed = None if quantized is None else quantized.model
    if names:
        deployed = load_model(converted.folder / names[0], custom_ops=prepared.custom_ops)
    return encode_evidence(compare_with_float(prepared, deployed, inputs.golden))


def _fall_back(error: EdgekitError, target: Target, job: BuildJob, notes: list[str]) -> Precision:
    """Returns fp32 where the precision was left to edgekit, and says why in `notes`; raises the error otherwise."""
    # A precision that the user asked for is never exchanged for another.
    if job.recipe.precision != "auto" or "fp32" not in target.precisions:
        raise error
    notes.append(f"built as fp32, because {error.message}")
    return "fp32"


def _quantize(
    inputs: BuildInputs, target: Target, precision: Precision, job: BuildJob, notes: list[str]
) -> QuantizedModel:
    if not isinstance(inputs.calibration, Calibration):
        raise inputs.calibration or DataError("there is no calibration", hint="give --data")
    work, max_drop = job.work / target.name, job.recipe.max_drop
    search = Search(
        model=inputs.prepared,
        calibration=inputs.calibration,
        target=target,
        precision=precision,
        measure=inputs.reference.predict_drop,
        work=work,
        memo=job.memo,
        progress=job.progress,
    )
    if max_drop is None:
        plan, searched = plan_sparingly(search)
    else:
        searched = search_quantization(search, max_drop / 100)
        plan = searched.chosen.plan
        if not searched.met:
            notes.append(f"no plan is expected to drop at most {max_drop:g} points; this is the best")
    if job.memo.budget.left_out:
        notes.append(f"the time budget ended before {', '.join(job.memo.budget.left_out)} were tried")
    if job.recipe.float_constants == "auto":
        reached = None if searched is None else searched.chosen.prediction.sqnr_db
        plan = store_narrow(search.model, plan, search.calibration, reached)
        notes += [f"large constants in float: {describe_narrow(plan.narrow)}"] if plan.narrow.bits else []
    return write_chosen(search, plan, searched, work / "quantized.onnx")


def _converter(model: Model, ort_source: Model | None, inputs: BuildInputs, out: Path) -> Callable[..., ConvertedModel]:
    golden = read_inputs(inputs.golden)
    return partial(convert_model, model, out=out, ort_source=ort_source, origin=inputs.source, samples=golden)


def _convert(convert: Callable[..., ConvertedModel], target: Target, notes: list[str]) -> ConvertedModel:
    """Converts to every form, or to those that need no absent extra: then `notes` says what is missing."""
    try:
        return convert(target=target)
    except MissingExtraError as error:
        # A context needs the vendor's compiler; without it the other forms of the bundle are still good.
        forms = tuple(form for form in target.conversion.forms if form != "context")
        if not forms:
            raise
        notes.append(f"no context model: {error}")
        conversion = msgspec.structs.replace(target.conversion, forms=forms)
        return convert(target=msgspec.structs.replace(target, conversion=conversion))
