"""Checks a model for targets, rewrites it for one of them, and prepares it."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import move_file, require_apart, work_folder
from edgekit._ort import CPU_PROVIDER, VERSION
from edgekit.check.check import check_model, check_models
from edgekit.check.macs import assume_sizes, choose_sizes
from edgekit.check.recommend import Recommendation, ask_ort_checker, explain_no_gain, recommend_target
from edgekit.check.report import (
    VERDICTS,
    Advice,
    CheckReport,
    PlacedNodes,
    Verdict,
    add_model_nodes,
    count_of,
    trace_model,
)
from edgekit.data.images import Preprocess
from edgekit.devices.find import choose_here
from edgekit.devices.observe import Observed, observe_target
from edgekit.errors import ModelError, RuntimeRefusal, UsageError
from edgekit.graph.graph import Graph, read_graph
from edgekit.inspect.inspect import list_fixed_axes
from edgekit.jobs.forecast import forecast_goal
from edgekit.model.external import skim_model
from edgekit.model.model import MOST_INLINE_BYTES, Model, find_integer_ops, find_reader, load_model
from edgekit.prepare.clean import freeze_model, prepare_model, show_model, sketch_model, sketch_unloaded
from edgekit.prepare.dequantize import dequantize_model
from edgekit.prepare.external import place_weights, refuse_inline
from edgekit.prepare.fix import FIXES, FUSIONS, TARGET_REWRITES, FixedModel, apply_rewrites, fix_model, list_required
from edgekit.prepare.interface import InterfaceChanges, change_interface, remaining_preprocess
from edgekit.progress import Progress, say_nothing
from edgekit.quantize.qdq import place_unmeasured
from edgekit.recipe import Recipe, load_targets, refuse_profiles
from edgekit.report.checked import CheckedTarget, CheckSummary, describe_recommendation
from edgekit.serialize import fill, ready_type, to_builtins
from edgekit.target import INTEGERS, Precision, Target, read_version

# Two rewrites could undo each other forever. The rounds also end as soon as one changes nothing.
_FIX_ROUNDS = 4
# Assumed sizes are halved until the largest is not above this one: five more tries for the sides of an image.
_LEAST_LENGTH = 8


class TargetShare(PlacedNodes, frozen=True, kw_only=True):
    """How much of a model a target takes; the fields are those of `CheckReport`."""

    taken_macs: float
    taken_bytes: float
    verdict: Verdict


class TargetGain(msgspec.Struct, frozen=True):
    """What a target takes of a model before and after the rewrites for it."""

    target: str
    before: TargetShare
    after: TargetShare


class TargetModel(FixedModel, frozen=True, kw_only=True):
    """A model after the rewrites for a target, and what the target takes of it before and after."""

    before: CheckReport
    after: CheckReport

    def gain(self) -> TargetGain:
        """Returns the shares that the target takes."""
        return TargetGain(self.before.target, read_share(self.before), read_share(self.after))


def read_share(report: CheckReport) -> TargetShare:
    """Returns how much of a model a target takes."""
    return msgspec.convert(report, ready_type(TargetShare), from_attributes=True)


def check_targets(
    model: Path, recipe: Recipe, progress: Progress = say_nothing, *, observe: bool = False, compare_ort: bool = False
) -> CheckSummary:
    """Prepares a model and returns what each target of the recipe would take of it.

    With `observe` the real provider of each target runs as well, if it can run here; the evidence of such a report is
    that of the device. With `compare_ort` ONNX Runtime's own checker checks the model as it is given.

    The summary also says what a target takes of the unchanged file (`as_is`): with its opset and open dimensions, and
    without the recipe's `freeze`. For a target whose verdict is not "yes" it also says what the target takes of the
    model that `build` ships (`built`): with sizes for all dimensions, after the automatic rewrites.

    Dimensions without a size stay open: a target whose rules demand sizes takes no node that depends on them. A model
    that ONNX Runtime cannot load is checked without optimizations, and the summary has the `refusal`.

    Raises:
        EdgekitError: the model or the recipe is wrong.
    """
    recipe = choose_here(recipe)
    targets, source = load_targets(recipe), load_model(model)
    refuse_profiles(targets, source.inputs)
    found: dict[str, CheckedTarget] = {}
    models: dict[str, Model] = {}
    with work_folder() as work:
        progress("prepare the model")
        unchanged = None
        # The graph that a session of the unchanged file would show to a provider; there may be none.
        with suppress(ModelError, RuntimeRefusal):
            unchanged = show_model(source, work / "shown.onnx")
        source = freeze_model(source, work / "frozen", recipe.freeze)
        prepared, refused_by = _prepare(source, work, recipe, observe=observe)
        graph = read_graph(prepared)
        # The same for all targets.
        traced, sizes = trace_model(source, prepared, recipe.dims), choose_sizes(graph)
        graph = assume_sizes(graph, sizes)
        progress(f"check {', '.join(target.name for target in targets)}")
        shown = () if unchanged is None else check_models(unchanged, targets, advises=False)
        as_is = {each.target: each.placed for each in shown}
        reader = find_reader(prepared.ir_version, prepared.opsets.get("ai.onnx", 1)) or VERSION
        for target, plain in zip(targets, check_models(prepared, targets), strict=True):
            name, report, seen = target.name, add_model_nodes(plain, traced), None
            if observe:
                progress(f"observe {name}")
                seen = observe_target(prepared, target)
                if isinstance(seen, Observed):
                    report = msgspec.structs.replace(report, evidence=seen.evidence.value)
            oldest = max(target.minimum_ort, reader, key=read_version)
            found[name] = CheckedTarget(report=report, minimum_ort=oldest, as_is=as_is.get(name), observed=seen)
        less = [target for target in targets if found[target.name].report.verdict != "yes"]
        assumed = sizes if less else {}
        sized, assumed = _assume_sizes(source, prepared, recipe.dims, assumed, work / "sized.onnx")
        is_same = sized.sha256 == prepared.sha256
        befores = [found[each.name].report for each in less] if is_same else check_models(sized, less)
        floating = cache(partial(_sketch_float_form, source, {**recipe.dims, **assumed}, work / "float"))
        forms = dict.fromkeys(found, (sized, graph if is_same else read_graph(sized)))
        for target, before in zip(less, befores, strict=True):
            shipped, models[target.name] = check_shipped(before, sized, target, work / target.name)
            report = found[target.name].report
            folder, form = work / f"{target.name}-float", None if shipped.verdict == VERDICTS[-1] else floating()
            if form and (better := prefer_float_form(shipped, form, target, target.precision, folder)):
                advice = (_advise_float_form(shipped, better.after), *report.advice)
                report = msgspec.structs.replace(report, advice=advice)
                shipped, models[target.name] = better.after, better.model
                forms[target.name] = form, read_graph(form)
            built = None if read_share(shipped) == read_share(report) else shipped
            if shipped.taken == shipped.nodes:
                # A build brings every node: there is nothing left for the user to change.
                left = tuple(advice for advice in report.advice if advice.fix == "automatic")
                report = msgspec.structs.replace(report, advice=left)
            found[target.name] = msgspec.structs.replace(found[target.name], report=report, built=built)
        floats = {
            it.name: reason
            for it in targets
            if (reason := explain_no_gain_built(*forms[it.name], it, it.precision, work / f"{it.name}-built"))
        }
        refused = [name for name, each in found.items() if each.is_refused]
        ships, named = {name: each.shipped for name, each in found.items()}, {target.name: target for target in targets}
        chosen = recommend_target(ships, named, refused, floats)
        if refused_by is not None:
            why = f"no session of the model as it is can be made: {refused_by.hint}"
            chosen = Recommendation(target=None, reasons=(why,), rest=tuple(found))
        best = named.get(chosen.target or "")
        if best is not None and chosen.precision in INTEGERS and ships[best.name].verdict == "yes":
            loss = _explain_loss(models.get(best.name, prepared), best, chosen.precision, work / "rewritten.onnx")
            chosen = msgspec.structs.replace(chosen, loss=loss)
    return CheckSummary(
        model=source.name,
        sha256=source.sha256,
        targets=found,
        recommended=chosen,
        assumed=assumed,
        ort=ask_ort_checker(model) if compare_ort else None,
        refusal=None if refused_by is None else refused_by.message,
        fixed_axes=find_fixed_axes(source, targets),
        forecast=forecast_goal(model, recipe, targets),
    )


def explain_no_gain_built(
    prepared: Model, graph: Graph, target: Target, precision: Precision, work: Path, *, fix: bool = True
) -> str | None:
    """Returns why integers gain nothing on a target as a model is built for it, or None: see `explain_no_gain`.

    `graph` is that of the prepared model. The rewrites for the target (none without `fix`) may bring layers that can
    be quantized, so the reason must hold before and after them. They are made, in the folder `work`, only if the graph
    as it is has nothing to gain.

    Raises:
        OutputError: `work` cannot be written.
        TargetError: the target's rules are missing or malformed.
    """
    if not fix:
        return explain_no_gain(graph, target, precision, partial(check_model, prepared, target))
    out = work / prepared.path.name
    rewrite = cache(partial(fix_for_target, prepared, out, target, stays_float=True))
    if explain_no_gain(graph, target, precision, lambda: rewrite().after) is None:
        return None
    return explain_no_gain(read_graph(rewrite().model), target, precision, lambda: rewrite().after)


def find_fixed_axes(source: Model, targets: Sequence[Target]) -> tuple[str, ...]:
    """Returns a line for each input whose batch or sequence the export fixed; none if a target is for phones only."""
    if any(each.is_for_phones and each.provider != CPU_PROVIDER for each in targets):
        return ()
    return list_fixed_axes(source.inputs, skim_model(source.path).producer_name)


def _prepare(
    source: Model, work: Path, recipe: Recipe, *, observe: bool
) -> tuple[Model, ModelError | RuntimeRefusal | None]:
    """Returns the graph that a provider would see and None, or if ONNX Runtime refuses the model, the model and why."""
    out = work / f"{source.name}.onnx"
    # A real provider needs the weights; the rules do not.
    write = prepare_model if observe else sketch_model
    try:
        return write(source, out, recipe.dims, may_stay_open=True), None
    except (ModelError, RuntimeRefusal) as error:
        return sketch_unloaded(source, out, recipe.dims), error


def _assume_sizes(
    source: Model, prepared: Model, dims: Mapping[str, int], sizes: dict[str, int], out: Path
) -> tuple[Model, dict[str, int]]:
    """Returns the model prepared with assumed `sizes` too, and these; the `prepared` one if there are none or none fit.

    Sizes that do not fit are halved: a model may have fewer positions.
    """
    while sizes:
        with suppress(ModelError, RuntimeRefusal, UsageError):
            return sketch_model(source, out, {**dims, **sizes}), sizes
        goes_on = max(sizes.values()) > _LEAST_LENGTH
        sizes = {name: (size + 1) // 2 for name, size in sizes.items()} if goes_on else {}
    return prepared, {}


def _gains_by_rewrites(report: CheckReport) -> bool:
    """Returns True if the check advises a rewrite that a build makes for every provider, or because a target gains."""
    return any(advice.id in FIXES or advice.id in TARGET_REWRITES for advice in report.advice)


def check_shipped(before: CheckReport, sized: Model, target: Target, work: Path) -> tuple[CheckReport, Model]:
    """Returns a model with sizes for all dimensions after the rewrites from which a target gains, and its check."""
    if not _gains_by_rewrites(before):
        return before, sized
    out, stays_float = work / sized.path.name, target.precision not in INTEGERS
    fixed = fix_for_target(sized, out, target, stays_float=stays_float, before=before)
    return fixed.after, fixed.model


def prefer_float_form(
    quantized: CheckReport, floating: Model, target: Target, precision: Precision, work: Path
) -> TargetModel | None:
    """Returns the float form of a quantized model rewritten for a target, if its verdict is better, else None.

    `quantized` is the check of the quantized model after its own rewrites. The rewrites are those for a `precision`. A
    plan for integers leaves nodes in float that the target takes in float only.

    Raises:
        OutputError: `work` cannot be written.
    """
    out = work / floating.path.name
    rewritten = fix_for_target(floating, out, target, stays_float=precision not in INTEGERS)
    return rewritten if VERDICTS.index(rewritten.after.verdict) > VERDICTS.index(quantized.verdict) else None


def make_float_form(source: Model, out: Path, *, keeps_ranges: bool = False) -> Model:
    """Writes the float form of a quantized model to `out`, as `dequantize_model`, if it needs no second file.

    Raises:
        ModelError: it has none, or its weights might take more than 2 GB: the memory for them is asked for by a user.
        OutputError: `out` cannot be written.
    """
    # From 8 bits to 32.
    if 4 * source.size_bytes > MOST_INLINE_BYTES:
        words = f"the float form of '{source.path.name}' may take more than 2 GB"
        raise ModelError(words, hint="make it, and give that: edgekit prepare MODEL --dequantize --out FILE")
    return dequantize_model(source, out, keeps_ranges=keeps_ranges)


def _sketch_float_form(source: Model, dims: Mapping[str, int], folder: Path) -> Model | None:
    """Returns the float form of a quantized model, prepared without weights, or None if there is none."""
    if not find_integer_ops(skim_model(source.path)):
        return None
    with suppress(ModelError, RuntimeRefusal, UsageError):
        floating = make_float_form(source, folder / source.path.name)
        return sketch_model(floating, folder / "prepared" / source.path.name, dims, may_stay_open=True)
    return None


def _advise_float_form(quantized: CheckReport, floating: CheckReport) -> Advice:
    work = [sum(node.macs for node in each.node_list if node.taken) for each in (quantized, floating)]
    return Advice(
        id="float-form",
        subject="quantization",
        message="build takes the float form, whose weights are the integers times their scales (edgekit prepare"
        " --dequantize), and quantizes it anew with your samples",
        fix="automatic",
        gain_nodes=floating.taken - quantized.taken,
        gain_macs=work[1] - work[0],
    )


def _explain_loss(model: Model, target: Target, precision: Precision, out: Path) -> str:
    """Returns what a target whose verdict in float is "yes" takes in integers; "" if the verdict stays, or is unknown.

    Where no session of the integers would start, `build` leaves more nodes in float: the verdict is unknown.
    """
    rewritten = fix_model(model, out, {*FIXES, *list_required(target)}).model
    # A model may be quantized already, or have no node that can be.
    with suppress(ModelError):
        found = check_model(place_unmeasured(rewritten, target, precision), target, advises=False)
        if found.verdict != "yes" and not found.is_refused:
            return f"as {precision} it would be {describe_loss(found, target)}"
    return ""


def fix_for_target(
    prepared: Model, out: Path, target: Target, *, stays_float: bool = False, before: CheckReport | None = None
) -> TargetModel:
    """Writes a prepared model to `out` with all rewrites that are useful for a target.

    These are the rewrites for every provider, those that the target requires (some only if the model `stays_float`),
    and those that the check of the model advises. After each round the model is checked again, because one rewrite can
    make the next one possible. In a model that is quantized already it can also make the next one needless: there each
    round applies the one that gains most. `before` is the check of the prepared model, if it is known.

    Raises:
        OutputError: `out` cannot be written.
        TargetError: the target's rules are missing or malformed.
    """
    after = before = before or check_model(prepared, target)
    rounds: list[FixedModel] = []
    is_quantized = bool(find_integer_ops(skim_model(prepared.path)))
    required = () if is_quantized else list_required(target, stays_float=stays_float)
    for turn in range(_FIX_ROUNDS):
        # Patterns are fused only in the first round: a rewrite for this target may split them again.
        general = FIXES.keys() - FUSIONS if turn else FIXES
        advised = [advice.id for advice in after.advice if advice.id in TARGET_REWRITES][: 1 if is_quantized else None]
        fixed = fix_model(prepared, out, {*general, *required, *advised})
        prepared = fixed.model
        rounds.append(fixed)
        if not fixed.fixes:
            break
        after = check_model(prepared, target)
    fixes = tuple(fix for each in rounds for fix in each.fixes)
    return TargetModel(model=prepared, fixes=fixes, before=before, after=after)


def gain_on_target(
    prepared: Model, folder: Path, target: Target, *, stays_float: bool, known: Collection[str]
) -> tuple[FixedModel, str] | None:
    """Writes a prepared model into `folder`, rewritten so that a target takes more of it; returns it with a note.

    Returns None if the rewrites whose ids are not in `known` gain nothing.

    Raises:
        OutputError: `folder` cannot be written.
        TargetError: the target's rules are missing or malformed.
    """
    # First without weights: most models have nothing to gain. What is quantized needs no change before quantization.
    sketch = skim_model(prepared.path)
    required = () if find_integer_ops(sketch) else list_required(target, stays_float=stays_float)
    matches = required and apply_rewrites(sketch, required)
    before = check_model(prepared, target)
    if not matches and not _gains_by_rewrites(before):
        return None
    rewritten = fix_for_target(prepared, folder / prepared.path.name, target, stays_float=stays_float, before=before)
    gain, fixes = rewritten.gain(), tuple(fix for fix in rewritten.fixes if fix.id not in known)
    if not fixes or (gain.after == gain.before and not {fix.id for fix in fixes} & {*required}):
        return None
    rewrites = ", ".join(f"{fix.id} ({count_of(len(fix.nodes), 'node')})" for fix in fixes)
    note = f"rewritten for it: {rewrites}; {describe_share(gain.before)} before, {describe_share(gain.after)} now"
    return FixedModel(model=rewritten.model, fixes=fixes), note


def describe_loss(report: CheckReport, target: Target) -> str:
    """Returns the verdict of a model in integers, the reason, and the precision with which the verdict is "yes"."""
    lower = next((each for each in target.precisions if each not in INTEGERS), None)
    remedy = f"; --precision {lower} keeps it yes" if lower else ""
    risk = f", risk: {report.risks[0]}" if report.risks else ""
    shares = f"{describe_share(report)}, the largest with {report.main_share:.0%} of the work"
    return f"{report.verdict}: {shares}{risk}{remedy}"


def describe_share(share: TargetShare | CheckReport) -> str:
    """Returns how much of a model a target takes, in words."""
    return f"{share.taken} of {share.nodes} nodes in {count_of(share.partitions, 'partition')}"


def describe_checks(summary: CheckSummary) -> dict[str, Any]:
    """Returns the JSON document of a check, in which the facts about a target are in the target's object."""
    targets: dict[str, Any] = {}
    for name, found in summary.targets.items():
        built = None if found.built is None else read_share(found.built)
        known = {"minimum_ort": found.minimum_ort, "as_is": found.as_is, "built": built, "observed": found.observed}
        targets[name] = to_builtins(found.report)
        targets[name] |= {key: to_builtins(value) for key, value in known.items() if value is not None}
        if isinstance(found.observed, str):
            targets[name] |= {"observed": None, "not_observed": found.observed}
    document = {
        "model": summary.model,
        "sha256": summary.sha256,
        "targets": targets,
        "recommendation": describe_recommendation(summary),
        "recommended": to_builtins(summary.recommended),
        "refusal": summary.refusal,
        "fixed_axes": list(summary.fixed_axes),
        "assumed": summary.assumed,
        "forecast": to_builtins(summary.forecast),
    }
    return document if summary.ort is None else {**document, "ort_checker": to_builtins(summary.ort)}


class PrepareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to prepare a model; see `prepare_model`, `change_interface` and `fix_model`.

    With `dequantize` a quantized source is made float first. `external` says whether weights are in a file
    beside the model; None decides by size. With a `target` the rewrites with which it takes more are applied too.
    """

    dims: dict[str, int] = {}
    opset: int | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    constants: dict[str, float] = {}
    changes: InterfaceChanges = InterfaceChanges()
    dequantize: bool = False
    fix: bool = True
    external: bool | None = None
    target: Target | None = None


class PrepareReport(FixedModel, frozen=True, kw_only=True):
    """A prepared model and the rewrites that were applied.

    `is_refaced` says whether inputs or outputs changed. `preprocess` is the preprocessing that remains for the app,
    None if none was embedded. `gain` is what a target takes before and after the rewrites, if one was named.
    """

    is_refaced: bool
    preprocess: Preprocess | None
    gain: TargetGain | None = None


def prepare_for(source: Model, out: Path, options: PrepareOptions, progress: Progress = say_nothing) -> PrepareReport:
    """Writes the prepared form of a model to `out`.

    Raises:
        EdgekitError: the model or an option is wrong.
    """
    changes = options.changes
    require_apart([out], [source.path, *(source.path.parent / name for name in source.external_files)])
    if options.external is False:
        refuse_inline(source)
    progress("prepare the model")
    # In the same file system as the result, so that moving it is a rename.
    with work_folder(out.parent) as work:
        staged = work / out.name
        if options.dequantize:
            source = dequantize_model(source, work / "float" / source.path.name)
        prepared = prepare_model(
            source,
            staged,
            options.dims,
            opset=options.opset,
            inputs=options.inputs,
            outputs=options.outputs,
            constants=options.constants,
        )
        prepared = change_interface(prepared, staged, changes)
        fixed, gain = FixedModel(model=prepared, fixes=()), None
        if options.fix and options.target is not None:
            rewritten = fix_for_target(prepared, staged, options.target)
            fixed, gain = rewritten, rewritten.gain()
        elif options.fix:
            fixed = fix_model(prepared, staged)
        prepared = fixed.model
        if options.external is not None:
            prepared = place_weights(prepared, external=options.external)
        # Weights are moved first, so that the model is never there without them.
        for name in (*prepared.external_files, out.name):
            move_file(work / name, out.with_name(name))
    prepared = msgspec.structs.replace(prepared, path=out)
    remaining = None if changes.preprocess is None else remaining_preprocess(changes.preprocess)
    is_refaced = not changes.is_empty
    return fill(PrepareReport, fixed, model=prepared, is_refaced=is_refaced, preprocess=remaining, gain=gain)


def list_versions() -> dict[str, str]:
    """Returns the versions of edgekit, onnxruntime and onnx."""
    return {"edgekit": metadata.version("edgekit-onnx"), "onnxruntime": VERSION, "onnx": metadata.version("onnx")}
