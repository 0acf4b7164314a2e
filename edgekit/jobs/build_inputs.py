"""The inputs of a build: the prepared model with its samples, once for all targets, and rewritten for a target."""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from edgekit._files import digest_bytes, list_below
from edgekit.bundle.expected import Recorded, adopt_outputs, adopt_reference
from edgekit.bundle.golden import OUTPUTS, Golden, KnownOutputs, make_golden, plan_sequences, read_outputs
from edgekit.bundle.manifest import UNPADDED, list_open, open_specs
from edgekit.bundle.multi import open_recorded
from edgekit.check.check import check_model
from edgekit.check.report import VERDICTS
from edgekit.data.data_check import accept_pixels, find_missing
from edgekit.data.images import Preprocess
from edgekit.data.padding import free_axes, pad_samples
from edgekit.data.samples import Samples
from edgekit.data.sets import SampleSets, read_sample_sets
from edgekit.errors import FAILURES, DataError, ModelError, UsageError, quote_error
from edgekit.graph.graph import read_graph
from edgekit.graph.spatial import takes_raw_pixels
from edgekit.jobs.check import (
    check_shipped,
    describe_share,
    explain_no_gain_built,
    gain_on_target,
    list_versions,
    make_float_form,
    prefer_float_form,
)
from edgekit.machine import describe_machine
from edgekit.model.model import Model, find_integer_ops, read_proto
from edgekit.model.state import State
from edgekit.model.tensors import Array, StatedOutput, check_outputs
from edgekit.prepare import ready_model
from edgekit.prepare.clean import make_runnable
from edgekit.prepare.fix import BucketModels, Fix, choose_dims, prepare_buckets
from edgekit.prepare.shapes import proposing_sizes
from edgekit.progress import Budget, Progress, Stopwatch
from edgekit.quantize import Calibration
from edgekit.quantize.accuracy.loss import measure_powers, ratio_db
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.calibration.calibrate import calibrate_for
from edgekit.quantize.calibration.passes import CalibrationOptions
from edgekit.quantize.calibration.store import CacheSettings, open_cache
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.recipe import Data, Recipe, choose_precision, refuse_profiles, takes_any_size
from edgekit.report.tables import format_sqnr
from edgekit.target import INTEGERS, Target, TaskLimit
from edgekit.verify.task_metrics import find_metric
from edgekit.verify.task_scores import check_class_labels

# A thousand classes of 10,000 samples, and fields of scores of a few hundred.
_MAX_KEPT_BYTES = 64 << 20
# Below 10 dB the outputs of a quantized model differ from those of its float form by more than a tenth of their power:
# then the ranges of its integers are taken for a part of the network. A choice.
_ALIKE_DB = 10.0


class BuildCache(msgspec.Struct, frozen=True, kw_only=True):
    """Intermediate results that several builds of one model share; bundles are the same without it.

    `folder` keeps calibrations, also for later runs; None keeps none. `memo` has the plans that were judged, `known`
    the outputs for golden samples by the sha256 of the model. `inputs` are prepared models by a digest of everything
    that they depend on, with their files in the folder `work`; without `work` each build prepares its own.
    """

    folder: Path | None = None
    work: Path | None = None
    memo: Memo = msgspec.field(default_factory=Memo)
    known: dict[str, KnownOutputs] = {}
    inputs: dict[str, "BuildInputs"] = {}

    def find_outputs(self, sha256: str, *, stays: bool) -> KnownOutputs:
        """Returns the store of the outputs of a model, by its sha256; a new store is kept only if it `stays`."""
        return self.known.setdefault(sha256, KnownOutputs()) if stays else KnownOutputs()


class BuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a build and its folders: `work` is removed afterwards, `staging` becomes the result.

    `end` is when planning and verifying must end, by `time.monotonic()`. `origin` is the sha256 of the model file as it
    was given. The `watch` measures the time of each stage. `memo` is that of `cache`, with the time budget of this
    build.
    """

    recipe: Recipe
    targets: tuple[Target, ...]
    work: Path
    staging: Path
    cache: BuildCache
    progress: Progress
    origin: str
    memo: Memo
    end: float = math.inf
    watch: Stopwatch = msgspec.field(default_factory=Stopwatch)

    def begin(self, stage: str, words: str) -> None:
        """Begins a stage that all targets share, and reports it as a step."""
        self.watch.begin(stage)
        self.progress(words)

    def seconds_left(self, targets: int) -> float:
        """Returns the seconds of the next target: the time that is left, divided by the number of targets left."""
        return max(0.0, self.end - time.monotonic()) / targets

    def limit_planning(self, seconds: float) -> "BuildJob":
        """Returns the job with so many seconds for the plan of the next target."""
        # Judged plans are shared between targets, and so are the steps that failed.
        budget = Budget(end=time.monotonic() + seconds, progress=self.progress, failed=self.memo.budget.failed)
        return msgspec.structs.replace(self, memo=msgspec.structs.replace(self.memo, budget=budget))

    def plans_for(self, target: Target, floats: Container[str]) -> bool:
        """Returns True if a target is to be quantized; `floats` names the targets that are not."""
        return target.name not in floats and choose_precision(target, self.recipe.precision) in INTEGERS


class BucketInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The models of several sizes, and the golden samples before padding (`given`) with their `lengths`.

    `unpadded` is the file with the float model's outputs for the unpadded samples.
    """

    models: BucketModels
    given: Samples
    lengths: tuple[int, ...]
    unpadded: Path


class BuildInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The prepared model, its samples (split for calibration and verification), and the float model's outputs.

    `calibration` is None until a target is to be quantized, and an error if no node can be quantized. Plans are judged
    against `reference`. `floats` says, for each target that is not quantized, why integers would gain nothing. `gain`
    describes the rewrites for one target that `prepared` has, "" for none. All files are in `folder`.

    Of a model that is quantized already, `read_float_form` returns the inputs of its float form, or None if there is
    none; `replanned` says for which targets that is built, and why. `distance` says, of a float form, how far its
    outputs are from those of the quantized model, such as "differs from it by 20.0 dB"; it is "" of any other model.
    """

    folder: Path
    source: Model
    prepared: Model
    fixes: tuple[Fix, ...]
    is_quantized: bool
    outputs: dict[str, StatedOutput]
    state: State
    samples: SampleSets
    golden: Golden
    calibration: Calibration | ModelError | None
    reference: FloatReference
    preprocess: Preprocess | None
    recorded: Mapping[str, Recorded]
    floats: Mapping[str, str]
    buckets: BucketInputs | None = None
    gain: str = ""
    read_float_form: "Callable[[], BuildInputs | None]" = lambda: None
    replanned: Mapping[str, str] = {}
    distance: str = ""

    def choose_form(self, target: Target) -> "BuildInputs":
        """Returns the inputs from which a target's bundle is made."""
        form = self.read_float_form() if target.name in self.replanned else None
        return self if form is None else msgspec.structs.replace(form, replanned=self.replanned)


def read_build_inputs(given: Model, data: Data, job: BuildJob) -> BuildInputs:
    """Prepares a model, reads its samples, and runs the float model.

    If an earlier build kept the inputs for the same model and data, these are returned; they may be calibrated already.

    Raises:
        EdgekitError: the model, the data or the recipe is wrong.
    """
    # Missing labels are reported before anything runs.
    metric = next((target.thresholds.task for target in job.targets if target.thresholds.task), None)
    if metric is not None and (data.labels is None or data.evaluation is None):
        words = f"metric '{metric.name}' needs labels"
        raise UsageError(words, hint="give --eval DATA with --labels FILE, in an edgekit.toml evaluation and labels")
    if data.labels is not None and data.evaluation is None:
        words = f"--labels '{data.labels}' say what --eval samples are, and there is no --eval"
        raise UsageError(words, hint="add --eval DATA, the samples that the labels belong to")
    key = _find_key(given, data, metric, job)
    if (inputs := job.cache.inputs.get(key)) is None:
        folder = job.work if job.cache.work is None or not key else job.cache.work / key
        inputs = _read_inputs(given, data, metric, job, folder)
        if key:
            job.cache.inputs[key] = inputs
    else:
        refuse_profiles(job.targets, inputs.source.inputs)
    floats: dict[str, str] = {}
    graph = read_graph(inputs.prepared)
    for target in () if inputs.is_quantized else job.targets:
        precision, work = choose_precision(target, job.recipe.precision), job.work / f"{target.name}-float"
        reason = explain_no_gain_built(inputs.prepared, graph, target, precision, work, fix=job.recipe.fix)
        if reason is not None and "fp32" in target.precisions:
            job.progress(reason)
            # A precision that the user asked for is never replaced.
            floats |= {target.name: reason} if job.recipe.precision == "auto" else {}
    inputs = msgspec.structs.replace(inputs, floats=floats)
    if not inputs.is_quantized:
        return inputs
    if job.recipe.fix:
        read_float_form = functools.cache(partial(_read_float_form, inputs, given, data, job))
        inputs = msgspec.structs.replace(inputs, read_float_form=read_float_form)
    return msgspec.structs.replace(inputs, replanned=_list_replanned(inputs, job))


def _read_float_form(
    inputs: BuildInputs, given: Model, data: Data, job: BuildJob, *, keeps_ranges: bool = False
) -> BuildInputs | None:
    """Returns the inputs of the float form of a quantized model, or None if it has none.

    If its outputs are far from the given ones, the form that keeps the ranges of the integers (`keeps_ranges`) is read.
    """
    # Another build may find these inputs in the cache: their source stays as long as they do.
    name, kept = "float-form-clipped" if keeps_ranges else "float-form", job.cache.work or job.work
    job.progress("compute the float form of the quantized model")
    try:
        floating = make_float_form(given, kept / f"{name}-{given.sha256}" / given.path.name, keeps_ranges=keeps_ranges)
        form = read_build_inputs(floating, data, msgspec.structs.replace(job, work=job.work / name))
    except FAILURES as error:
        job.progress(f"the quantized model has no float form: {quote_error(error)}")
        return None
    rounding = _measure_rounding(inputs, form)
    if rounding is not None and rounding < _ALIKE_DB and not keeps_ranges:
        return _read_float_form(inputs, given, data, job, keeps_ranges=True)
    words = format_sqnr(rounding)
    said = {"equal": "equals it", "-": "has no output that can be compared with it"}
    return msgspec.structs.replace(form, distance=said.get(words, f"differs from it by {words}"))


def _list_replanned(inputs: BuildInputs, job: BuildJob) -> dict[str, str]:
    """Returns the targets for which the float form of a quantized model is built, and why: the verdict on it is better.

    Raises:
        ModelError: the recipe wants another precision than int8, and there is no float form.
    """
    wanted, replanned = job.recipe.precision, dict[str, str]()
    if wanted not in {"auto", "int8"}:
        if inputs.read_float_form() is None:
            words = f"'{inputs.source.name}' is quantized already, and no float form of it can be built as {wanted}"
            raise ModelError(words, hint="give the float model, or leave --precision out")
        return {target.name: f"--precision {wanted} is asked for" for target in job.targets}
    for target in job.targets if job.recipe.fix else ():
        work = job.work / f"{target.name}-forms"
        before, _ = check_shipped(check_model(inputs.prepared, target), inputs.prepared, target, work)
        if before.verdict == VERDICTS[-1] or (form := inputs.read_float_form()) is None:
            continue
        precision = choose_precision(target, job.recipe.precision)
        if (found := prefer_float_form(before, form.prepared, target, precision, work / "float")) is not None:
            shares = f"{describe_share(found.after)}, {describe_share(before)} of the model as it is"
            replanned[target.name] = f"of the float form it takes {shares}"
    return replanned


def _measure_rounding(quantized: BuildInputs, floating: BuildInputs) -> float | None:
    """Returns by how many dB the worst output of a quantized model differs from its float form on golden samples."""
    powers = defaultdict[str, Array](lambda: np.zeros(2))
    for rounded, wanted in zip(read_outputs(quantized.golden), read_outputs(floating.golden), strict=True):
        for name, value in wanted.items():
            if value.dtype.kind in "fiub":
                powers[name] += measure_powers(value, rounded[name])
    return min((ratio_db(*each) for each in powers.values()), default=None)


def _find_key(given: Model, data: Data, metric: TaskLimit | None, job: BuildJob) -> str:
    """Returns a digest of everything that the inputs depend on, "" if none are kept or that is not known."""
    places = [Path(place) for place in (data.source, data.evaluation, data.labels) if place is not None]
    # A function may return other samples each time, and a golden build has a reference for each target.
    if job.cache.work is None or data.golden is not None or not all(place.exists() for place in places):
        return ""
    recipe = job.recipe
    facts = (
        (given.sha256, data, metric, takes_any_size(job.targets)),
        (recipe.dims, recipe.buckets, recipe.pad, recipe.freeze, recipe.samples, recipe.outputs, recipe.state),
        [(path, (known := path.stat()).st_size, known.st_mtime_ns) for place in places for path in list_below(place)],
    )
    return digest_bytes(msgspec.json.encode(facts, enc_hook=str, order="sorted"))


def _read_inputs(given: Model, data: Data, metric: TaskLimit | None, job: BuildJob, folder: Path) -> BuildInputs:
    folder.mkdir(exist_ok=True)
    recipe = job.recipe
    source = make_runnable(given, folder, recipe.freeze)
    job.progress("prepare the model")
    refuse_profiles(job.targets, source.inputs)
    dims = choose_dims(recipe.dims, recipe.buckets, recipe.pad)
    with proposing_sizes(source.inputs, data.source, data.preprocess):
        fixed = ready_model(source, folder, dims, may_stay_open=not recipe.buckets and takes_any_size(job.targets))
    prepared = fixed.model
    buckets = prepare_buckets(source, prepared, dims, recipe.buckets, recipe.pad, folder)
    outputs = check_outputs(recipe.outputs, prepared.outputs, prepared.path.name)
    sequences = plan_sequences(source, recipe.state, prepared.inputs, prepared.outputs, folder)
    if buckets is not None:
        if sequences.state.steps > 1:
            raise UsageError("a model with state cannot step through buckets", hint="give each dimension one size")
        sequences = msgspec.structs.replace(
            sequences, unroll=lambda samples, _: pad_samples(buckets.padding, samples, buckets.largest)
        )
    job.begin("samples", "read the samples")
    graph = read_graph(prepared)
    samples = read_sample_sets(
        prepared.inputs if buckets is None else free_axes(buckets.padding.inputs, prepared.inputs),
        data.source,
        evaluation=data.evaluation,
        labels=None if data.labels is None else (data.labels, find_metric(metric).labels if metric else "class"),
        preprocess=data.preprocess,
        most=recipe.samples,
        idle=recipe.freeze,
        sequences=msgspec.structs.replace(sequences, missing=find_missing(graph)),
    )
    facts = accept_pixels(samples.facts, partial(takes_raw_pixels, graph))
    samples = msgspec.structs.replace(samples, facts=facts)
    job.begin("float model", "run the float model")
    # The reference is the model before preparation, so that errors of the preparation are seen.
    golden = _run_float(source, samples, job, folder / "golden")
    check_class_labels(golden)
    if not all(spec.is_static for spec in prepared.inputs):
        # A dimension that the model leaves open stays open, even if all samples have the same size.
        names = {name for name, _, _ in list_open(prepared.inputs)}
        inputs = tuple(open_specs(golden.inputs, prepared.inputs, names))
        outputs_golden = tuple(open_specs(golden.outputs, prepared.outputs, names))
        golden = msgspec.structs.replace(golden, inputs=inputs, outputs=outputs_golden)
    recorded: dict[str, Recorded] = {}
    if data.golden is not None:
        recorded = open_recorded(data.golden, source.name, [target.name for target in job.targets])
        for bundle in recorded.values():
            adopt_reference(golden, bundle)
    return BuildInputs(
        folder=folder,
        source=source,
        prepared=prepared,
        fixes=fixed.fixes,
        is_quantized=bool(find_integer_ops(read_proto(prepared, weights=False))),
        outputs=outputs,
        state=sequences.state,
        samples=samples,
        golden=golden,
        calibration=None,
        reference=FloatReference(prepared, samples.calibration, outputs, state=sequences.state, work=folder),
        preprocess=data.preprocess,
        recorded=recorded,
        floats={},
        buckets=None if buckets is None else _run_unpadded(source, buckets, samples, recorded, folder),
    )


def calibrate_inputs(inputs: BuildInputs, job: BuildJob) -> BuildInputs:
    """Returns the inputs with a calibration, unless they have one or the model is quantized already.

    All targets share it, because ranges and statistics are those of the float model.

    Raises:
        EdgekitError: the model cannot be calibrated with these samples.
    """
    if inputs.is_quantized or inputs.calibration is not None:
        return inputs
    job.watch.begin("calibrate")
    inputs = msgspec.structs.replace(inputs, calibration=_calibrate(inputs, job, inputs.folder / "calibration"))
    if inputs.folder.name in job.cache.inputs:
        job.cache.inputs[inputs.folder.name] = inputs
    return inputs


def _run_unpadded(
    source: Model, buckets: BucketModels, samples: SampleSets, recorded: Mapping[str, Recorded], folder: Path
) -> BucketInputs:
    """Returns the golden samples before padding, with the float model's outputs at their own lengths.

    Raises:
        DataError: no golden sample fits into the smallest bucket.
    """
    lengths = tuple(buckets.padding.measure(sample) for sample in samples.given)
    if min(lengths) > buckets.sizes[0]:
        words = f"no golden sample fits into {buckets.padding.dim}={buckets.sizes[0]}: the shortest has {min(lengths)}"
        raise DataError(words, hint="give shorter samples too, or leave the bucket out")
    golden = make_golden(source, samples.given, folder / "unpadded", ragged=True)
    for bundle in recorded.values():
        adopt_outputs(golden, bundle, bundle.folder / UNPADDED)
    return BucketInputs(models=buckets, given=samples.given, lengths=lengths, unpadded=golden.folder / OUTPUTS)


def _run_float(source: Model, samples: SampleSets, job: BuildJob, folder: Path) -> Golden:
    """Returns the golden samples; with a cache folder, outputs of the float model from earlier builds are used."""
    # Custom operators may depend on more than their file.
    if job.cache.folder is None or source.custom_ops:
        return make_golden(source, samples.evaluation, folder, labels=samples.labels, ragged=True)
    # Sums depend on the CPU and on the number of cores.
    facts = source.sha256, list_versions(), describe_machine()
    key = digest_bytes(msgspec.json.encode(facts, order="sorted"))
    with open_cache(CacheSettings(folder=job.cache.folder, digests=()), key, job.progress, "golden") as cache:
        stored, outputs = cache.load(OUTPUTS, None, 2 * _MAX_KEPT_BYTES), dict[bytes, dict[str, Array]]()
        if stored is not None:
            try:
                for label, value in stored.arrays.items():
                    number, name = label.split(" ", 1)
                    outputs.setdefault(stored.seen[int(number)], {})[name] = value
            except (LookupError, ValueError):
                outputs.clear()
            if len(outputs) < len(stored.seen) or len({frozenset(each) for each in outputs.values()}) != 1:
                cache.note(f"what is kept as '{OUTPUTS}' is not used: it does not fit this model")
                outputs = {}
        known = KnownOutputs(outputs={**outputs}, room_bytes=_MAX_KEPT_BYTES)
        golden = make_golden(source, samples.evaluation, folder, labels=samples.labels, ragged=True, known=known)
        if not known.ran:
            job.progress(f"what the float model gives for {golden.samples} samples is read from the cache")
        elif known.outputs:
            each = enumerate(known.outputs.values())
            arrays = {f"{number} {name}": value for number, gave in each for name, value in gave.items()}
            cache.save(OUTPUTS, dict(enumerate(known.outputs)), arrays, now=True)
    return golden


def _calibrate(inputs: BuildInputs, job: BuildJob, work: Path) -> Calibration | ModelError:
    cache, samples = None, inputs.samples
    if job.cache.folder is not None:
        cache = CacheSettings(folder=job.cache.folder, digests=samples.facts.digests)
    try:
        outputs, keep = inputs.outputs, inputs.reference.keep
        options = CalibrationOptions(
            work=work, cache=cache, outputs=outputs, progress=job.progress, keep=keep, steps=inputs.state.steps
        )
        return calibrate_for(inputs.prepared, samples.calibration, options)
    except ModelError as error:
        return error


def fix_inputs(inputs: BuildInputs, target: Target, job: BuildJob, folder: Path, *, stays_float: bool) -> BuildInputs:
    """Returns the inputs with the rewrites with which a target takes more, if there are any; `gain` describes them.

    Unless it `stays_float` or is quantized already, the rewritten model is calibrated again. It is written into
    `folder`.

    Raises:
        EdgekitError: the rewritten model cannot be calibrated.
    """
    if not job.recipe.fix:
        return inputs
    known = {fix.id for fix in inputs.fixes}
    rewritten = gain_on_target(inputs.prepared, folder, target, stays_float=stays_float, known=known)
    if rewritten is None:
        return inputs
    fixed, gain = rewritten
    fixes, samples, outputs = (*inputs.fixes, *fixed.fixes), inputs.samples.calibration, inputs.outputs
    inputs = msgspec.structs.replace(inputs, prepared=fixed.model, fixes=fixes, gain=gain)
    if inputs.is_quantized:
        return inputs
    reference = FloatReference(fixed.model, samples, outputs, state=inputs.state, work=folder)
    inputs = msgspec.structs.replace(inputs, reference=reference)
    if stays_float:
        return inputs
    return msgspec.structs.replace(inputs, calibration=_calibrate(inputs, job, folder / "calibration"))
