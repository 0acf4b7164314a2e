"""One target's bundle from the prepared model: quantized or halved, checked, converted, written.

A model is shipped only if the target is expected to start it. If the best model would not start, the next best is made:
for example without the rewrites for the target, with some nodes in float, or at last all of it in float.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from edgekit.bundle.describe import Contents
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden import read_inputs, read_outputs
from edgekit.bundle.manifest import Ancestry, Buckets, encode_json
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.convert.convert import ConvertedModel, read_stamp
from edgekit.data.samples import select_samples, spread_indices
from edgekit.errors import FAILURES, DataError, EdgekitError, ModelError, quote_error
from edgekit.graph.graph import read_graph
from edgekit.jobs.build_inputs import BuildInputs, BuildJob, fix_inputs
from edgekit.jobs.check import list_versions
from edgekit.jobs.forms import Deployed, Made, deploy_model, make_sizes, warn_of_halves
from edgekit.machine import release_memory
from edgekit.model.model import Model, load_model
from edgekit.model.state import find_fed_back
from edgekit.prepare.fix import fix_quantized
from edgekit.prepare.rewrites import activations, layout, products, recurrent
from edgekit.quantize import Calibration, QuantizedModel, QuantPlan
from edgekit.quantize.accuracy.output_kinds import KIND_SAMPLES, read_output_kinds
from edgekit.quantize.calibration.calibrate import open_float_graph
from edgekit.quantize.mixed_precision.goal_search import find_plan, write_chosen
from edgekit.quantize.mixed_precision.plan_search import SAME_SHARE, Search, Searched
from edgekit.quantize.plan import FloatNode, NarrowConstants, draft_plan
from edgekit.recipe import choose_precision
from edgekit.report.tables import describe_narrow, describe_prediction
from edgekit.target import INTEGERS, Precision, Target
from edgekit.verify.layers.comparison import compare_with_float
from edgekit.verify.metrics.compare import read_list
from edgekit.verify.report import Step

# Keeping one node in float may make another one stop the session. Each turn applies and checks the plan once: 1.5 s for
# YOLOv8n, which needs five turns.
_MOST_KEPT = 12
# What a rewrite of a model that was quantized before did.
_SAID = {
    products.UNSIGNED_WEIGHTS: "int8 weights of Gemm and MatMul are stored as uint8, the same values",
    activations.flatten_softplus.id: "Softplus of 16 bits has three axes, because QNN's kernel for four is wrong",
    recurrent.split_lstm.id: "an LSTM is written step by step, because Sigmoid and Tanh in QNN's own are coarse",
    layout.cast_by_int32.id: "uint8 becomes float by way of int32, because QNN's kernel makes each number but 0 a 1",
    activations.part_silu.id: "x * Sigmoid(x) of 16 bits is not fused, because QNN's kernel for it is wrong",
}


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to make the model of a target; `ready_bundles` tries several, the best first.

    The nodes in `kept` stay float, because in integers they would stop the session. The plan "best" is the one that
    planning chose; "wide" is that with its constants in 32 bits; "plain" has exact ranges and each weight rounded to
    the nearest point.
    """

    precision: Precision
    is_rewritten: bool = True
    kept: tuple[str, ...] = ()
    plan: Literal["best", "wide", "plain"] = "best"


class ReadyBundle(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into a bundle before its layers are compared, the models it was made from, and its `folder`."""

    contents: Contents
    prepared: Model
    converted: ConvertedModel
    quantized: QuantizedModel | None
    notes: tuple[str, ...]
    folder: Path


class BuiltBundle(ReadyBundle, frozen=True, kw_only=True):
    """A bundle as it was written, with the models that it was made from, step by step."""

    bundle: Bundle
    models: dict[Step, Model]


class _Planned(msgspec.Struct, frozen=True, kw_only=True):
    search: Search
    plan: QuantPlan
    searched: Searched | None
    notes: tuple[str, ...]


class _NoSessionError(ModelError):
    """The rules expect that the provider makes no session, because of the `stopping` nodes; it takes none of `left`."""

    def __init__(self, way: Way, target: Target, check: CheckReport, *, hint: str) -> None:
        nodes = [node for node in check.node_list if node.fatal]
        # The Q and DQ nodes of its unit are as fatal as a node, and say no more.
        nodes = [node for node in nodes if not node.is_quantizer] or nodes
        first = next((node for node in nodes if node.reasons), nodes[0])
        why = first.reasons[0] if first.reasons else "it is part of what the provider refuses"
        super().__init__(
            f"no session of the {way.precision} model starts on {target.name}, {len(nodes)} nodes stop it:"
            f" {first.op} '{first.name}': {why}",
            hint=hint,
        )
        self.stopping = {node.name for node in nodes}
        self.left = {node.name for node in check.node_list if not node.taken}


def ready_bundles(inputs: BuildInputs, target: Target, job: BuildJob, work: Path) -> Generator[ReadyBundle, str]:
    """Yields what goes into the bundle of one target: the best that is expected to start, by the target's rules.

    Where a device makes no session of it, send why: then the next best comes. First the rewrites for the target go,
    then nodes that stop the session stay in float, in the other order if the target takes more of the work by the
    rewrites; then all goes that only improves a plan. Last comes the next precision, unless the user named one. A note
    tells what was given up, and the first reason.

    Raises:
        EdgekitError: nothing that starts can be made for this target.
    """
    work.mkdir()
    ladder = _Ladder(inputs, target, job, work)
    first, why = None, ""
    for turn, way in enumerate(ladder.ways()):
        first = first or way
        try:
            ready = ladder.make(way, work / str(turn))
        except FAILURES as error:
            ladder.failed = error
            why = why or (error.message if isinstance(error, EdgekitError) else quote_error(error))
            continue
        told = (f"{_describe_loss(first, way)}, because {why}",) if why else ()
        refused = yield msgspec.structs.replace(ready, notes=(*told, *ready.notes))
        ladder.failed = ModelError(
            f"'{target.name}' makes no session of the {way.precision} model: {refused}",
            hint="edgekit check --observe MODEL asks the provider about each node",
        )
        why = why or ladder.failed.message
    if isinstance(ladder.failed, EdgekitError):
        raise ladder.failed
    raise ModelError(f"no model can be made for '{target.name}': {why}", hint="take its fallback") from ladder.failed


def _describe_loss(first: Way, way: Way) -> str:
    """Returns in words what `way` gives up in comparison with the `first` one."""
    lost = [f"built as {way.precision}"] if way.precision != first.precision else []
    lost += ["left as it is"] if first.is_rewritten and not way.is_rewritten else []
    if way.kept:
        lost.append(f"{len(way.kept)} nodes stay in float ({', '.join(way.kept[:3])})")
    plans = {"wide": "constants keep 32 bits", "plain": "quantized with exact ranges and plain rounding"}
    return ", ".join([*lost, *([plans[way.plan]] if way.plan in plans else [])])


class _Ladder:
    """The ways to make a target's model, the best first, and what they share; `failed` is why the last way failed."""

    def __init__(self, inputs: BuildInputs, target: Target, job: BuildJob, work: Path) -> None:
        self._inputs, self._target, self._job, self._work = inputs, target, job, work
        self._fixed: dict[bool, BuildInputs] = {}
        self._plans: dict[bool, _Planned] = {}
        self.failed: Exception | None = None

    def ways(self) -> Iterator[Way]:
        """Yields the ways; which one comes next depends on why the last one failed."""
        for precision in self._list_precisions():
            way = Way(precision=precision)
            yield way
            stop = self.failed
            takes_plans = precision in INTEGERS and not self._inputs.is_quantized
            fixed = self._fixed.get(precision not in INTEGERS, self._inputs)
            unrewritten = [] if fixed is self._inputs else [Way(precision=precision, is_rewritten=False)]
            # A few nodes in float cost less than rewrites by which the target takes more of the work.
            is_last = bool(unrewritten) and self._takes_more(fixed)
            yield from () if is_last else unrewritten
            planned = self._plans.get(way.is_rewritten)
            for _ in range(_MOST_KEPT if takes_plans else 0):
                more = self._keep_more(way, stop) if isinstance(stop, _NoSessionError) else ()
                if not more:
                    break
                way = msgspec.structs.replace(way, kept=(*way.kept, *more))
                yield way
                stop = self.failed
            yield from unrewritten if is_last else ()
            if not takes_plans or planned is None or isinstance(self.failed, _NoSessionError):
                continue
            if planned.plan.narrow.bits:
                yield msgspec.structs.replace(way, plan="wide")
            yield msgspec.structs.replace(way, plan="plain")

    def make(self, way: Way, work: Path) -> ReadyBundle:
        """Returns what one way leads to.

        Raises:
            EdgekitError: it leads to nothing, or to what makes no session.
        """
        target, job = self._target, self._job
        work.mkdir()
        inputs = self._fix(way)
        notes = [inputs.gain] if inputs.gain else []
        made = self._make_model(way, inputs, work, notes)
        # The rules of a model in half precision are asked of what is halved.
        if way.precision != "fp16":
            self._refuse(way, made.check)
        deployed = deploy_model(made, inputs, job, work, notes)
        self._refuse(way, deployed.check)
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
        # A precision that the user asked for is never exchanged for another.
        lower: list[Precision] = [each for each in target.precisions if each not in INTEGERS and each != wanted]
        return (wanted, *lower) if self._job.recipe.precision == "auto" else (wanted,)

    def _keep_more(self, way: Way, stop: _NoSessionError) -> tuple[str, ...]:
        """Returns further nodes to keep in float, so that no quantized node unit is left around what stops the session.

        A node unit (DQ, operator, Q) needs all its inputs quantized, so one neighbour in float is enough to break it
        up. Neighbours that the provider leaves to the CPU anyway are tried first.
        """
        graph = read_graph(self._fix(way).prepared)
        floats = {node.name for node in self._plans[way.is_rewritten].plan.float_nodes}
        ring = [node for node in graph.nodes if node.name in stop.stopping]
        # ONNX Runtime moves Q and DQ past operators that only move elements, so the pair may lie several nodes away.
        while True:
            names = {node.name for node in ring}
            makers = {graph.producers[name].name for node in ring for name in node.input if name in graph.producers}
            readers = {node.name for each in ring for name in each.output for node in graph.readers(name)}
            for wider in (names | makers & stop.left, names | makers, names | makers | readers):
                more = wider - floats - {*way.kept}
                if more:
                    return tuple(node.name for node in graph.nodes if node.name in more)
            if wider == names:
                return ()
            ring = [node for node in graph.nodes if node.name in wider]

    def _takes_more(self, fixed: BuildInputs) -> bool:
        """Returns True if the target takes more of the work of a rewritten model than of the model as it is."""
        models = fixed.prepared, self._inputs.prepared
        one, two = (check_model(model, self._target, advises=False).taken_macs for model in models)
        return one > two + SAME_SHARE

    def _refuse(self, way: Way, check: CheckReport) -> None:
        if not check.is_refused:
            return
        hint = f"edgekit check --target {self._target.name} lists the nodes"
        if self._inputs.is_quantized:
            hint = "give the float model: what would stop the session stays in float then"
        elif self._job.recipe.precision != "auto":
            hint = f"leave --precision out, and one that starts is chosen; {hint}"
        raise _NoSessionError(way, self._target, check, hint=hint)

    def _fix(self, way: Way) -> BuildInputs:
        stays_float = way.precision not in INTEGERS
        if not way.is_rewritten:
            return self._inputs
        if stays_float not in self._fixed:
            folder = self._work / ("fixed-float" if stays_float else "fixed")
            rewrite = partial(fix_inputs, self._inputs, self._target, self._job, folder, stays_float=stays_float)
            fixed = self._job.memo.budget.attempt(f"rewrites for {self._target.name}", rewrite)
            self._fixed[stays_float] = self._inputs if fixed is None else fixed
        return self._fixed[stays_float]

    def _make_model(self, way: Way, inputs: BuildInputs, work: Path, notes: list[str]) -> Made:
        """Returns the model in integers where the way has these, else as it was prepared."""
        target, model, quantized, plan = self._target, inputs.prepared, None, None
        if inputs.is_quantized:
            notes.append("the model is quantized already: taken as it is")
            fixed = fix_quantized(model, target, work / "fixed.onnx")
            if fixed.fixes:
                model = fixed.model
                notes += [f"{_SAID[fix.id]}: {len(fix.nodes)} nodes" for fix in fixed.fixes]
        elif target.name in inputs.floats:
            notes.append(f"built as fp32: {inputs.floats[target.name]}")
        elif way.precision in INTEGERS:
            planned = self._plan(way, inputs)
            plan = change_plan(planned.plan, way, inputs.prepared, inputs.calibration, target)
            quantized = write_chosen(planned.search, plan, planned.searched, work / "quantized.onnx")
            model = quantized.model
            notes += [
                *planned.notes,
                *(f"left out, since it failed: {step} ({why})" for step, why in self._job.memo.budget.failed.items()),
            ]
            notes += [f"large constants in float: {describe_narrow(plan.narrow)}"] if plan.narrow.bits else []
            floats = [node.name for node in plan.float_nodes]
            warning = warn_of_halves(inputs.prepared, floats, target, read_inputs(inputs.golden))
            notes += [warning] if warning else []
        return Made(
            model=model,
            target=target,
            precision=way.precision if plan is None else plan.precision,
            check=check_model(model, target),
            is_rewritten=inputs is not self._inputs,
            plan=plan,
            quantized=quantized,
        )

    def _plan(self, way: Way, inputs: BuildInputs) -> _Planned:
        """Returns the plan for the model of a way; ways with the same graph share it."""
        if way.is_rewritten in self._plans:
            return self._plans[way.is_rewritten]
        if not isinstance(inputs.calibration, Calibration):
            raise inputs.calibration or DataError("there is no calibration", hint="give --data")
        recipe, memo, notes = self._job.recipe, self._job.memo, list[str]()
        work = self._work / ("plans" if way.is_rewritten else "plans-unrewritten")
        work.mkdir()
        search = Search(
            model=inputs.prepared,
            calibration=inputs.calibration,
            target=self._target,
            precision=way.precision,
            measure=inputs.reference.predict_drop,
            compare=inputs.reference.compare,
            look=inputs.reference.look,
            work=work,
            memo=memo,
            progress=self._job.progress,
            may_widen=recipe.precision == "auto",
            feeds=find_fed_back(inputs.state),
        )
        max_drop = recipe.max_drop
        goal = None if max_drop is None else max_drop / 100
        plan, searched = find_plan(search, max_drop=goal, narrow=recipe.float_constants == "auto")
        if searched is not None:
            if max_drop is not None and not searched.met:
                notes.append(f"no plan is expected to drop at most {max_drop:g} points; this is the best")
            if searched.advice:
                notes += [f"expected: {describe_prediction(searched.chosen.prediction)}", searched.advice]
        if memo.budget.left_out:
            notes.append(f"the time budget ended before {', '.join(memo.budget.left_out)} were tried")
        self._plans[way.is_rewritten] = _Planned(search=search, plan=plan, searched=searched, notes=tuple(notes))
        return self._plans[way.is_rewritten]


def change_plan(
    plan: QuantPlan, way: Way, prepared: Model, calibration: Calibration | ModelError | None, target: Target
) -> QuantPlan:
    """Returns the plan that a way asks for: its `kept` nodes in float, and less optimization than in the best plan."""
    if way.plan != "best":
        plan = msgspec.structs.replace(plan, narrow=NarrowConstants())
    if way.plan == "plain" and isinstance(calibration, Calibration):
        # Drafted again: equalization renames weights that layers share, and channels and bits are planned by name.
        draft = draft_plan(prepared, open_float_graph(prepared, calibration), calibration, target, plan.precision)
        plan = msgspec.structs.replace(draft, float_nodes=plan.float_nodes, wide=plan.wide)
    floats = {node.name: node for node in plan.float_nodes}
    for node in read_graph(prepared).nodes if way.kept else ():
        if node.name in way.kept:
            reason = "in integers it would stop the session"
            floats.setdefault(node.name, FloatNode(name=node.name, op=node.op_type, reason=reason))
    return msgspec.structs.replace(plan, float_nodes=tuple(floats.values()))


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
    # Comparing layers takes the most memory of a build, while emulators run: memory freed by planning goes back first.
    release_memory()
    layers = encode_json(compare_with_float(ready.prepared, deployed, contents.golden))
    release_memory()
    bundle = write_bundle(msgspec.structs.replace(contents, layers=layers), ready.folder)
    notes = list(ready.notes)
    if sizes := bundle.manifest.open_dims:
        known = "; ".join(f"'{name}' {', '.join(map(str, each))}" for name, each in sizes.items())
        notes.append(f"any size may be passed where a dimension stays open; golden samples have: {known}")
    return BuiltBundle(**{**msgspec.structs.asdict(ready), "bundle": bundle, "models": models, "notes": tuple(notes)})


def _collect(
    inputs: BuildInputs, deployed: Deployed, job: BuildJob, sized: tuple[tuple[Path, ...], Buckets] | None
) -> Contents:
    target, converted, quantized, check = deployed.target, deployed.converted, deployed.quantized, deployed.check
    listed = read_list(inputs.golden)
    rows = spread_indices(inputs.golden.samples, KIND_SAMPLES)
    outputs = list(select_samples(read_outputs(inputs.golden), rows))
    files = {form: tuple(converted.folder / name for name in names) for form, names in converted.files.items()}
    if sized is not None:
        files = {"onnx": sized[0]}
    if files.get("onnx"):
        # The check is that of the ONNX file that is shipped; one that is stamped as the checked one has its graph.
        shipped = load_model(files["onnx"][0], custom_ops=inputs.source.custom_ops)
        if read_stamp(shipped) != check.sha256:
            check = check_model(shipped, target)
        check = msgspec.structs.replace(check, model=shipped.path.name, sha256=shipped.sha256)
    return Contents(
        source=inputs.source,
        target=target,
        precision=deployed.precision,
        files=files,
        golden=inputs.golden,
        check=check,
        buckets=None if sized is None else sized[1],
        unpadded=None if inputs.buckets is None else inputs.buckets.unpadded,
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
        readings=read_output_kinds(read_graph(inputs.prepared), outputs, inputs.outputs),
    )
