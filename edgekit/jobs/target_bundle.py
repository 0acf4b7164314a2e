"""One target's bundle from the prepared model: quantized or halved, checked, converted, written."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit.bundle.describe import Contents
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.manifest.manifest import Ancestry
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.convert.convert import ConvertedModel
from edgekit.errors import DataError, ModelError
from edgekit.jobs.build_inputs import BuildInputs, BuildJob, fix_inputs
from edgekit.jobs.forms.deploy import Deployed, deploy_model, fall_back
from edgekit.jobs.forms.sizes import Making, make_sizes
from edgekit.jobs.prepare import list_versions
from edgekit.machine import release_memory
from edgekit.model.model import Model, load_model
from edgekit.prepare.fix import fix_model
from edgekit.prepare.rewrites import unsigned_weights
from edgekit.quantize import Calibration, QuantizedModel, QuantPlan
from edgekit.quantize.mixed_precision.goal_search import Search, plan_sparingly, search_quantization, write_chosen
from edgekit.quantize.mixed_precision.narrow import store_narrow
from edgekit.recipe import choose_precision
from edgekit.report.quantization_text import describe_narrow
from edgekit.target import INTEGERS, Precision, Target
from edgekit.verify.layers.evidence import compare_with_float, encode_evidence
from edgekit.verify.metrics.listed import read_list
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


class ReadyBundle(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into a bundle, all but its layers, and the models that it was made from; `folder` is where it goes."""

    contents: Contents
    prepared: Model
    converted: ConvertedModel
    quantized: QuantizedModel | None
    notes: tuple[str, ...]
    folder: Path


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """A model for a target, before it is halved or converted; `quantized` and `plan` say how it was quantized."""

    precision: Precision
    model: Model
    quantized: QuantizedModel | None
    plan: QuantPlan | None
    check: CheckReport
    notes: tuple[str, ...]


def ready_bundle(inputs: BuildInputs, target: Target, job: BuildJob, work: Path) -> ReadyBundle:
    """Makes what goes into the bundle of one target.

    Raises:
        EdgekitError: the model cannot be made for this target.
    """
    work.mkdir()
    given, (inputs, made) = inputs, _make_model(inputs, target, job, work)
    notes, quantized = [*made.notes], made.quantized
    deployed = deploy_model(made.model, made.precision, made.check, inputs, target, job, work, notes)
    making = Making(
        precision=made.precision,
        is_rewritten=inputs is not given,
        stays_float=not job.plans_for(target, inputs.floats),
        plan=made.plan,
    )
    sized = make_sizes(deployed, making, inputs, job, work, notes)
    contents = _collect(inputs, deployed, quantized, job)
    if sized is not None and inputs.buckets is not None:
        unpadded = inputs.buckets.unpadded
        contents = msgspec.structs.replace(
            contents, files={"onnx": sized.files}, buckets=sized.buckets, unpadded=unpadded
        )
    return ReadyBundle(
        contents=contents,
        prepared=inputs.prepared,
        converted=deployed.converted,
        quantized=quantized,
        notes=tuple(notes),
        folder=job.staging / f"{inputs.source.name}-{target.name}",
    )


def write_ready(ready: ReadyBundle) -> BuiltBundle:
    """Compares the layers of a bundle with the float model's, and writes it.

    Raises:
        EdgekitError: it cannot be written.
    """
    models: dict[Step, Model] = {"prepare": ready.prepared}
    if ready.quantized is not None:
        models["quantize"] = ready.quantized.model
    bundle = write_bundle(msgspec.structs.replace(ready.contents, layers=_compare_layers(ready)), ready.folder)
    return BuiltBundle(
        bundle=bundle,
        target=ready.contents.target,
        check=ready.contents.check,
        models=models,
        converted=ready.converted,
        quantized=ready.quantized,
        notes=(*ready.notes, *_tell_open(bundle.manifest.open_dims or {})),
    )


def _tell_open(sizes: Mapping[str, Sequence[int]]) -> Sequence[str]:
    """Returns which dimensions stay open, and at which sizes the bundle can be verified."""
    if not sizes:
        return ()
    known = "; ".join(f"'{name}' {', '.join(map(str, each))}" for name, each in sizes.items())
    return (f"any size may be passed where a dimension stays open; golden samples have: {known}",)


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
    model, quantized, plan = inputs.prepared, None, None
    if inputs.is_quantized:
        precision = "int8"
        notes.append("the model is quantized already: taken as it is")
        model = _store_unsigned(model, target, work / "unsigned.onnx", notes)
    elif target.name in inputs.floats:
        precision = "fp32"
        notes.append(f"built as fp32: {inputs.floats[target.name]}")
    elif precision in INTEGERS:
        try:
            quantized, plan = _quantize(inputs, target, precision, job, notes)
            model = quantized.model
        except ModelError as error:
            precision = fall_back(error, target, job, notes)
    check = check_model(model, target)
    return _Made(precision=precision, model=model, quantized=quantized, plan=plan, check=check, notes=tuple(notes))


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


def _collect(inputs: BuildInputs, deployed: Deployed, quantized: QuantizedModel | None, job: BuildJob) -> Contents:
    target, converted, listed = deployed.target, deployed.converted, read_list(inputs.golden)
    return Contents(
        source=inputs.source,
        target=target,
        precision=deployed.precision,
        files={form: tuple(converted.folder / name for name in names) for form, names in converted.files.items()},
        golden=inputs.golden,
        check=deployed.check,
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
        # What is stated of an output is what it is.
        listed=None if listed is None or listed.outputs & inputs.outputs.keys() else listed.columns,
    )


def _compare_layers(ready: ReadyBundle) -> bytes:
    names, prepared = ready.converted.files.get("onnx"), ready.prepared
    deployed = None if ready.quantized is None else ready.quantized.model
    if names:
        deployed = load_model(ready.converted.folder / names[0], custom_ops=prepared.custom_ops)
    # Layers take the most memory of a build, while emulators run: what planning has freed goes back first.
    release_memory()
    evidence = encode_evidence(compare_with_float(prepared, deployed, ready.contents.golden))
    release_memory()
    return evidence


def _quantize(
    inputs: BuildInputs, target: Target, precision: Precision, job: BuildJob, notes: list[str]
) -> tuple[QuantizedModel, QuantPlan]:
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
    return write_chosen(search, plan, searched, work / "quantized.onnx"), plan
