"""Makes one target's bundle from the prepared model: quantized or in half precision, checked, converted, written.

A model is shipped only if a session of it is expected to start on the target. Otherwise the next best is made: for
example without the rewrites for the target, with some nodes in float, and finally all of it in float.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from edgekit.bundle.describe import Contents
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden import KnownOutputs, read_inputs, read_outputs
from edgekit.bundle.manifest import Ancestry, Buckets, encode_json
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport, count_of, count_staying, find_stopping
from edgekit.convert.convert import ConvertedModel, read_stamp
from edgekit.data.samples import select_samples, spread_indices
from edgekit.errors import FAILURES, DataError, EdgekitError, ModelError, RuntimeRefusal, quote_error
from edgekit.graph.graph import read_graph
from edgekit.jobs.build_inputs import BuildInputs, BuildJob, calibrate_inputs, fix_inputs
from edgekit.jobs.check import describe_loss, list_versions
from edgekit.jobs.forms import Deployed, ModelForTarget, deploy_model, make_sizes, warn_of_fp16_loss
from edgekit.machine import release_memory
from edgekit.model.model import Model, load_model
from edgekit.prepare.fix import QNN_NOTES, fix_quantized
from edgekit.quantize import Calibration, QuantizedModel, QuantPlan
from edgekit.quantize.accuracy.output_kinds import KIND_SAMPLES, read_output_kinds
from edgekit.quantize.calibration.calibrate import open_float_graph
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.placement import FLOAT_ONLY, STOPPING
from edgekit.quantize.mixed_precision.plan_search import Search, Searched, has_no_gain, write_chosen
from edgekit.quantize.plan import NarrowConstants, draft_plan
from edgekit.recipe import choose_precision
from edgekit.report.tables import describe_answers, describe_narrow, describe_prediction, list_large
from edgekit.serialize import fill
from edgekit.target import INTEGERS, Precision, Target
from edgekit.verify.layers.comparison import compare_with_float
from edgekit.verify.metrics.compare import read_list
from edgekit.verify.report import Step

_LOST = {"wide": "constants keep 32 bits", "plain": "quantized with exact ranges and plain rounding"}


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """A way to make the model of a target; `ready_bundles` tries several, the best first.

    The plan "best" is the one that planning chose; "wide" is that with float constants in 32 bits; "plain" has min-max
    ranges, and weights rounded to nearest.
    """

    precision: Precision
    is_rewritten: bool = True
    plan: Literal["best", "wide", "plain"] = "best"


class ReadyBundle(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a bundle before its layers are compared, the models it was made from, and its `folder`."""

    contents: Contents
    prepared: Model
    converted: ConvertedModel
    quantized: QuantizedModel | None
    notes: tuple[str, ...]
    folder: Path


class BuiltBundle(ReadyBundle, frozen=True, kw_only=True):
    """A bundle that was written, the model after each step, and `outputs` of its ONNX file for golden samples."""

    bundle: Bundle
    outputs: KnownOutputs
    models: dict[Step, Model]


class _Planned(msgspec.Struct, frozen=True, kw_only=True):
    search: Search
    plan: QuantPlan
    searched: Searched | None
    notes: tuple[str, ...]


class _NoSessionError(ModelError):
    """By the rules the provider makes no session."""

    def __init__(self, strategy: Strategy, target: Target, check: CheckReport, *, hint: str) -> None:
        cause = find_stopping(check)[1]
        super().__init__(f"no session of the {strategy.precision} model starts on {target.name} {cause}", hint=hint)


class _NoGainError(ModelError):
    """The best plan multiplies nothing in integers: the float model is more accurate, without Q and DQ nodes."""

    def __init__(self, precision: Precision, searched: Searched) -> None:
        lost = describe_prediction(searched.trials[0].prediction)
        words = f"the best plan that was found leaves no work in {precision}; with all of it there: {lost}"
        super().__init__(words, hint="calibrate with more data like the app's")


def ready_bundles(inputs: BuildInputs, target: Target, job: BuildJob, work: Path) -> Generator[ReadyBundle, str]:
    """Yields the contents of the bundle of one target: the best that is expected to start, by the target's rules.

    If a device makes no session of it, send the reason: then the next best is yielded. These are given up, in
    this order:

    1. the rewrites for the target;
    2. constants of float nodes stored as integers, then the ranges and the rounding that the plan chose;
    3. the precision, unless the user named one; at once if the best plan multiplies nothing in integers;
    4. the integers of a model that was quantized already: its float form is planned in the same order.

    A note says what was given up, and the first reason.

    Raises:
        EdgekitError: no model that starts can be made for this target. It is the first error of the last precision:
            the forms of a model that are tried later fail for the same reason, or for want of the rewrites.
    """
    work.mkdir()
    strategies = _Strategies(inputs, target, job, work)
    first, first_reason, errors = None, "", dict[Precision, Exception]()
    for number, strategy in enumerate(strategies.iterate()):
        first = first or strategy
        if strategies.is_hopeless(strategy):
            continue
        try:
            ready = strategies.make(strategy, work / str(number))
            lost = [f"built as {strategy.precision}"] if strategy.precision != first.precision else []
            lost += ["left as it is"] if first.is_rewritten and not strategy.is_rewritten else []
            lost += [_LOST[strategy.plan]] if strategy.plan in _LOST else []
            loss_note = (f"{', '.join(lost)}, because {first_reason}",) if first_reason else ()
            refusal = yield msgspec.structs.replace(ready, notes=(*loss_note, *ready.notes))
            words = f"'{target.name}' makes no session of the {strategy.precision} model: {refusal}"
            raise ModelError(words, hint="edgekit check --observe MODEL shows which nodes the provider takes")
        except FAILURES as error:
            strategies.failed = error
            errors.setdefault(strategy.precision, error)
            first_reason = first_reason or (error.message if isinstance(error, EdgekitError) else quote_error(error))
    failed = list(errors.values())[-1]
    if inputs.is_quantized and (form := inputs.read_float_form()) is not None:
        form = msgspec.structs.replace(form, replanned={target.name: f"the model as it is fails: {first_reason}"})
        with suppress(EdgekitError):
            form = calibrate_inputs(form, job) if job.plans_for(target, form.floats) else form
            yield from ready_bundles(form, target, job, work / "float-form")
            return
    if isinstance(failed, EdgekitError):
        # A check may say where to cut the model, or which interface the provider would take.
        found = check_model(inputs.prepared, target).advice
        ends = [advice.message for advice in found if advice.id in {"cut-end", "cut-start", "float-interface"}]
        raise ModelError(failed.message, hint="; ".join((*ends, failed.hint))) if ends else failed
    words = f"no model can be made for '{target.name}': {first_reason}"
    raise ModelError(words, hint="take its fallback") from failed


class _Strategies:
    """The strategies for a target's model, the best first, and their common results.

    `failed` is the error of the last strategy.
    """

    def __init__(self, inputs: BuildInputs, target: Target, job: BuildJob, work: Path) -> None:
        self._inputs, self._target, self._job, self._work = inputs, target, job, work
        self._fixed: dict[bool, BuildInputs] = {}
        self._plans: dict[bool, _Planned] = {}
        self.failed: Exception | None = None

    def iterate(self) -> Iterator[Strategy]:
        """Yields the strategies; the next one depends on the error of the last one."""
        for precision in self._list_precisions():
            strategy = Strategy(precision=precision)
            yield strategy
            if isinstance(self.failed, _NoGainError):
                continue
            takes_plans = precision in INTEGERS and not self._inputs.is_quantized
            fixed = self._fixed.get(precision not in INTEGERS, self._inputs)
            unrewritten = [] if fixed is self._inputs else [Strategy(precision=precision, is_rewritten=False)]
            yield from unrewritten
            planned = self._plans.get(strategy.is_rewritten)
            if not takes_plans or planned is None or isinstance(self.failed, _NoSessionError):
                continue
            if planned.plan.narrow.bits:
                yield msgspec.structs.replace(strategy, plan="wide")
            yield msgspec.structs.replace(strategy, plan="plain")

    def is_hopeless(self, strategy: Strategy) -> bool:
        """Returns whether a compiler of whole models would refuse a node again, as planning and compiling take long.

        It refused the node for an earlier strategy, and by the rules the provider does not take its float form either.
        """
        refused = self.failed.nodes if isinstance(self.failed, RuntimeRefusal) else ()
        if not refused:
            return False
        check = check_model(self._fix(strategy).prepared, self._target, advises=False)
        return any(node.name in refused and not node.taken for node in check.node_list)

    def make(self, strategy: Strategy, work: Path) -> ReadyBundle:
        """Makes the bundle's contents with one strategy.

        Raises:
            EdgekitError: that is not possible, or no session of the model would start.
        """
        target, job = self._target, self._job
        work.mkdir()
        inputs = self._fix(strategy)
        made_from = f"made from the float form of the quantized model, which {inputs.distance}"
        notes = [f"{made_from}: {inputs.replanned[target.name]}"] if inputs.distance else []
        notes += [inputs.gain] if inputs.gain else []
        made = self._make_model(strategy, inputs, work, notes)
        # A model in half precision is checked after its conversion.
        if strategy.precision != "fp16":
            self._refuse(strategy, made.check)
        deployed = deploy_model(made, inputs, job, work, notes)
        self._refuse(strategy, deployed.check)
        return ReadyBundle(
            contents=_collect(inputs, deployed, job, make_sizes(deployed, inputs, job, work, notes)),
            prepared=inputs.prepared,
            converted=deployed.converted,
            quantized=made.quantized,
            notes=tuple(notes),
            folder=job.staging / f"{inputs.source.name}-{target.name}",
        )

    def _list_precisions(self) -> Sequence[Precision]:
        """Returns the precisions that may be built, in the order in which they are tried."""
        target, wanted = self._target, choose_precision(self._target, self._job.recipe.precision)
        if self._inputs.is_quantized:
            return ("int8",)
        if target.name in self._inputs.floats:
            return ("fp32",)
        # A precision that the user asked for is never replaced.
        lower: list[Precision] = [each for each in target.precisions if each not in INTEGERS and each != wanted]
        return (wanted, *lower) if self._job.recipe.precision == "auto" else (wanted,)

    def _refuse(self, strategy: Strategy, check: CheckReport) -> None:
        if not check.is_refused:
            return
        hint = f"edgekit check --target {self._target.name} lists the nodes"
        if self._inputs.is_quantized:
            hint = "give the float model: then nodes that would stop the session stay in float"
        elif self._job.recipe.precision != "auto":
            hint = f"leave --precision out, and one that starts is chosen; {hint}"
        raise _NoSessionError(strategy, self._target, check, hint=hint)

    def _fix(self, strategy: Strategy) -> BuildInputs:
        stays_float = strategy.precision not in INTEGERS
        if not strategy.is_rewritten:
            return self._inputs
        if stays_float not in self._fixed:
            folder = self._work / ("fixed-float" if stays_float else "fixed")
            attempt, step = self._job.memo.budget.attempt, f"rewrites for {self._target.name}"
            fixed = attempt(step, fix_inputs, self._inputs, self._target, self._job, folder, stays_float=stays_float)
            self._fixed[stays_float] = self._inputs if fixed is None else fixed
        return self._fixed[stays_float]

    def _make_model(self, strategy: Strategy, inputs: BuildInputs, work: Path, notes: list[str]) -> ModelForTarget:
        """Returns the model, quantized if the strategy's precision is an integer one, else as it was prepared."""
        target, model, quantized, plan = self._target, inputs.prepared, None, None
        if inputs.is_quantized:
            form = inputs.read_float_form()
            differs = "" if form is None else f"; its float form {form.distance}"
            notes.append(f"the model is quantized already: taken as it is{differs}")
            fixed = fix_quantized(model, target, work / "fixed.onnx")
            if fixed.fixes:
                model = fixed.model
                for fix in fixed.fixes:
                    text = QNN_NOTES[fix.id] or f"{fix.id} avoids a kernel of QNN that is wrong"
                    notes.append(f"{text}: {count_of(len(fix.nodes), 'node')}")
        elif target.name in inputs.floats:
            notes.append(f"built as fp32: {inputs.floats[target.name]}")
        elif strategy.precision in INTEGERS:
            planned = self._plan(strategy, inputs)
            searched = planned.searched
            may_be_float = self._list_precisions()[-1] not in INTEGERS
            if searched is not None and may_be_float and has_no_gain(planned.search, searched):
                raise _NoGainError(strategy.precision, searched)
            plan = change_plan(planned.plan, strategy, inputs.prepared, inputs.calibration, target)
            quantized = write_chosen(planned.search, plan, planned.searched, work / "quantized.onnx")
            model = quantized.model
            failed = self._job.memo.budget.failed.items()
            notes += [*planned.notes, *(f"left out, since it failed: {step} ({why})" for step, why in failed)]
            notes += [f"large constants in float: {describe_narrow(plan.narrow)}"] if plan.narrow.bits else []
            for reason in (STOPPING, FLOAT_ONLY):
                names = [node.name for node in plan.float_nodes if node.reason == reason]
                notes += [f"{count_staying(len(names))} in float ({', '.join(names[:3])}): {reason}"] if names else []
            notes += list_large("in 16 bits, which 8 bits do not hold", quantized.wide_constants)
        check = check_model(model, target)
        if not inputs.is_quantized:
            floats = plan.float_nodes if plan is not None else [node for node in check.node_list if node.taken]
            names = [node.name for node in floats]
            warning = warn_of_fp16_loss(inputs.prepared, names, target, read_inputs(inputs.golden))
            notes += [warning] if warning else []
        if plan is not None and check.verdict != "yes":
            before = check_model(inputs.prepared, target, advises=False)
            notes += [f"as {plan.precision} it is {describe_loss(check, target)}"] if before.verdict == "yes" else []
        return ModelForTarget(
            model=model,
            target=target,
            precision=strategy.precision if plan is None else plan.precision,
            check=check,
            is_rewritten=inputs is not self._inputs,
            plan=plan,
            quantized=quantized,
        )

    def _plan(self, strategy: Strategy, inputs: BuildInputs) -> _Planned:
        """Returns the plan for the model of a strategy; strategies with the same graph share it."""
        if strategy.is_rewritten in self._plans:
            return self._plans[strategy.is_rewritten]
        if not isinstance(inputs.calibration, Calibration):
            raise inputs.calibration or DataError("there is no calibration", hint="give --data")
        recipe, memo, notes = self._job.recipe, self._job.memo, list[str]()
        work = self._work / ("plans" if strategy.is_rewritten else "plans-unrewritten")
        work.mkdir()
        search = Search(
            model=inputs.prepared,
            calibration=inputs.calibration,
            target=self._target,
            precision=strategy.precision,
            measure=inputs.reference.predict_drop,
            compare=inputs.reference.compare,
            look=inputs.reference.look,
            is_noise=inputs.samples.facts.is_noise,
            work=work,
            memo=memo,
            progress=self._job.progress,
            may_widen=recipe.precision == "auto",
        )
        max_drop = recipe.max_drop
        goal = None if max_drop is None else max_drop / 100
        plan, searched = find_plan(search, max_drop=goal, narrow=recipe.float_constants == "auto")
        if searched is not None:
            if max_drop is not None and not searched.met:
                notes.append(f"no plan is expected to drop at most {max_drop:g} points; this is the best")
            if searched.advice:
                notes += [f"expected: {describe_prediction(searched.chosen.prediction)}", searched.advice]
            notes += describe_answers(searched.chosen.prediction)
        if memo.budget.left_out:
            notes.append(f"the time budget ended before {', '.join(memo.budget.left_out)} were tried")
        self._plans[strategy.is_rewritten] = _Planned(search=search, plan=plan, searched=searched, notes=tuple(notes))
        return self._plans[strategy.is_rewritten]


def change_plan(
    plan: QuantPlan, strategy: Strategy, prepared: Model, calibration: Calibration | ModelError | None, target: Target
) -> QuantPlan:
    """Returns a plan simplified for a strategy: see "wide" and "plain" there."""
    if strategy.plan != "best":
        plan = msgspec.structs.replace(plan, narrow=NarrowConstants())
    if strategy.plan == "plain" and isinstance(calibration, Calibration):
        # A new draft is needed, because equalization renames shared weights, and a plan refers to names.
        draft = draft_plan(prepared, open_float_graph(prepared, calibration), calibration, target, plan.precision)
        plan = msgspec.structs.replace(draft, float_nodes=plan.float_nodes, wide=plan.wide)
    return plan


def write_ready(ready: ReadyBundle) -> BuiltBundle:
    """Compares the layers of a bundle with the float model's, and writes it.

    Raises:
        EdgekitError: it cannot be written.
    """
    contents, names = ready.contents, ready.converted.files.get("onnx")
    models: dict[Step, Model] = {"prepare": ready.prepared}
    if ready.quantized is not None:
        models["quantize"] = ready.quantized.model
    deployed = models.get("quantize")
    if names:
        deployed = load_model(ready.converted.folder / names[0], custom_ops=ready.prepared.custom_ops)
    # Comparing layers takes the most memory of a build, while emulators run: freed memory is given back first.
    release_memory()
    layers = encode_json(compare_with_float(ready.prepared, deployed, contents.golden))
    release_memory()
    outputs = KnownOutputs()
    bundle = write_bundle(msgspec.structs.replace(contents, layers=layers), ready.folder, outputs if names else None)
    notes = list(ready.notes)
    if sizes := bundle.manifest.open_dims:
        known = "; ".join(f"'{name}' {', '.join(map(str, each))}" for name, each in sizes.items())
        notes.append(f"any size may be passed where a dimension stays open; golden samples have: {known}")
    return fill(BuiltBundle, ready, bundle=bundle, outputs=outputs, models=models, notes=tuple(notes))


def _collect(
    inputs: BuildInputs, deployed: Deployed, job: BuildJob, bucket_files: tuple[tuple[Path, ...], Buckets] | None
) -> Contents:
    target, converted, quantized, check = deployed.target, deployed.converted, deployed.quantized, deployed.check
    listed = read_list(inputs.golden)
    rows = spread_indices(inputs.golden.samples, KIND_SAMPLES)
    outputs = list(select_samples(read_outputs(inputs.golden), rows))
    files = {form: tuple(converted.folder / name for name in names) for form, names in converted.files.items()}
    if bucket_files is not None:
        files = {"onnx": bucket_files[0]}
    if files.get("onnx"):
        # The check must be that of the shipped ONNX file. A stamp in it names the checked model, if the graph is the
        # same.
        shipped = load_model(files["onnx"][0], custom_ops=inputs.source.custom_ops)
        if read_stamp(shipped) != check.sha256:
            check = check_model(shipped, target)
        check = msgspec.structs.replace(check, model=shipped.path.name, sha256=shipped.sha256)
    return fill(
        Contents,
        deployed,
        inputs,
        files=files,
        check=check,
        buckets=None if bucket_files is None else bucket_files[1],
        unpadded=None if inputs.buckets is None else inputs.buckets.unpadded,
        ancestry=Ancestry(
            source=job.origin,
            prepared=inputs.prepared.sha256,
            quantized=None if quantized is None else quantized.model.sha256,
            # A float model does not depend on the samples, so its bundle must not either.
            data=None if quantized is None else inputs.samples.facts.sha256,
        ),
        versions={**list_versions(), **converted.versions},
        recipe=job.recipe,
        recorded=inputs.recorded.get(target.name),
        # The recipe's statement about an output has priority.
        listed=None if listed is None or listed.outputs & inputs.outputs.keys() else listed.columns,
        readings=read_output_kinds(read_graph(inputs.prepared), outputs, inputs.outputs),
    )
