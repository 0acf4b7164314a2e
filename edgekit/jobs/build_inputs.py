"""What a build starts from: the model with its samples, made ready once, and for a target where that pays."""

import math
import time
from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes
from edgekit.bundle.expected import Recorded, adopt_reference, adopt_unpadded
from edgekit.bundle.golden import OUTPUTS, Golden, KnownOutputs, make_golden, plan_sequences
from edgekit.bundle.manifest import list_open, open_specs
from edgekit.bundle.multi import open_recorded
from edgekit.check.check import check_model
from edgekit.check.recommend import explain_no_gain
from edgekit.data.images import Preprocess
from edgekit.data.padding import free_axes, pad_samples
from edgekit.data.samples import Samples
from edgekit.data.split import SampleSets, Sequences, read_sample_sets
from edgekit.errors import DataError, ModelError, UsageError
from edgekit.graph.graph import read_graph
from edgekit.jobs.check import gain_on_target
from edgekit.jobs.prepare import list_versions
from edgekit.machine import describe_machine
from edgekit.model.model import Model, find_integer_ops, read_proto
from edgekit.model.outputs import StatedOutput, check_outputs
from edgekit.model.state import State
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare import ready_model
from edgekit.prepare.fix import BucketModels, Fix, FixedModel, choose_dims, prepare_buckets
from edgekit.progress import Budget, Progress, Stopwatch
from edgekit.quantize import Calibration, calibrate_model
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.calibration.store import CacheSettings, CalibrationCache, Checkpoint, open_cache
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.recipe import Data, Recipe, choose_precision, refuse_profiles, takes_any_size
from edgekit.target import INTEGERS, Target, TaskLimit
from edgekit.verify.task_metrics import find_metric
from edgekit.verify.task_scores import check_class_labels

# A thousand classes of 10,000 samples, and fields of scores of a few hundred.
_MOST_KEPT_BYTES = 64 << 20


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What builds of one model keep for the next, perhaps for another target: a bundle is the same without it.

    In `folder`, if there is one, lie calibrations. `memo` has the plans that were judged, `known` what models gave for
    golden samples, by their sha256.
    """

    folder: Path | None = None
    memo: Memo = msgspec.field(default_factory=Memo)
    known: dict[str, KnownOutputs] = {}


class BuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a build was asked for, and where it works: `work` is gone afterwards, `staging` becomes the result.

    `end` is when planning and verifying end, by `time.monotonic()`. `origin` is the sha256 of the model file as it was
    given. The `watch` tells what each stage takes; `cache`, `memo` and `known` are those of `Kept`.
    """

    recipe: Recipe
    targets: tuple[Target, ...]
    work: Path
    staging: Path
    cache: Path | None
    progress: Progress
    origin: str
    memo: Memo = msgspec.field(default_factory=Memo)
    end: float = math.inf
    watch: Stopwatch = msgspec.field(default_factory=Stopwatch)
    known: dict[str, KnownOutputs] = {}

    def begin(self, stage: str, words: str) -> None:
        """Begins a stage that all targets share, and says so."""
        self.watch.begin(stage)
        self.progress(words)

    def seconds_left(self, targets: int) -> float:
        """Returns the time of the next target: what is left, by the number of targets left."""
        return max(0.0, self.end - time.monotonic()) / targets

    def limit_planning(self, seconds: float) -> "BuildJob":
        """Returns the job with so much time for the plan of the next target."""
        # What was judged is shared between targets, and so is what of it failed.
        failed = self.memo.budget.failed
        budget = Budget(end=time.monotonic() + seconds, progress=self.progress, failed=failed)
        return msgspec.structs.replace(self, memo=msgspec.structs.replace(self.memo, budget=budget))

    def plans_for(self, target: Target, floats: Container[str]) -> bool:
        """Returns True if a target is to be quantized."""
        return target.name not in floats and choose_precision(target, self.recipe.precision) in INTEGERS


class BucketInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The models of several sizes, the golden samples as they were `given` with their `lengths`, and the float results.

    `unpadded` is the file with what the float model gives for them as long as they are.
    """

    models: BucketModels
    given: Samples
    lengths: tuple[int, ...]
    unpadded: Path


class BuildInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The model made ready, its samples split, and what the float model makes of the golden ones.

    `calibration` is None until a target is to be quantized, and an error where no node can be quantized. By the
    `reference` plans are judged. `floats` says for each target that takes more of the model in float why it is not
    quantized. `gain` tells of the rewrites for a target, where `prepared` has any.
    """

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


def read_build_inputs(source: Model, data: Data, job: BuildJob) -> BuildInputs:
    """Returns a model made ready, its samples, and what the float model gives; nothing is calibrated yet.

    Raises:
        EdgekitError: the model, the data or the recipe is wrong.
    """
    # Before anything runs: a build of an hour must not end in a missing file of labels.
    metric = _find_metric(data, job)
    fixed, sized = _prepare(source, job)
    prepared = fixed.model
    outputs = check_outputs(job.recipe.outputs, prepared)
    sequences = plan_sequences(source, job.recipe.state, prepared.inputs, prepared.outputs, job.work)
    is_quantized = bool(find_integer_ops(read_proto(prepared, weights=False)))
    floats = {} if is_quantized else _find_floats(prepared, job)
    job.begin("samples", "read the samples")
    samples = read_sample_sets(
        prepared.inputs if sized is None else free_axes(sized.padding.inputs, prepared.inputs),
        data.source,
        evaluation=data.evaluation,
        labels=None if data.labels is None else (data.labels, find_metric(metric).labels if metric else "class"),
        preprocess=data.preprocess,
        most=job.recipe.samples,
        idle=job.recipe.freeze,
        sequences=_filling(sequences, sized),
    )
    job.begin("float model", "run the float model")
    # Of the model as it was given, not as it was prepared: errors of the preparation count as well.
    golden = _make_golden(source, prepared, samples, job)
    recorded = _open_recorded(data, golden, source, job)
    buckets = None if sized is None else _run_unpadded(source, sized, samples, recorded, job)
    return BuildInputs(
        source=source,
        prepared=prepared,
        fixes=fixed.fixes,
        is_quantized=is_quantized,
        outputs=outputs,
        state=sequences.state,
        samples=samples,
        golden=golden,
        calibration=None,
        reference=FloatReference(prepared, samples.calibration, outputs),
        preprocess=data.preprocess,
        recorded=recorded,
        floats=floats,
        buckets=buckets,
    )


def calibrate_inputs(inputs: BuildInputs, job: BuildJob) -> BuildInputs:
    """Returns the inputs with a calibration, unless that is known or the model is in integers already.

    Once for all targets: ranges and statistics are of the float model, whatever is made of them.

    Raises:
        EdgekitError: the model cannot be calibrated with these samples.
    """
    if inputs.is_quantized or inputs.calibration is not None:
        return inputs
    job.watch.begin("calibrate")
    calibration = _calibrate(inputs.prepared, inputs.samples, inputs.outputs, job, job.work / "calibration")
    return msgspec.structs.replace(inputs, calibration=calibration)


def _prepare(source: Model, job: BuildJob) -> tuple[FixedModel, BucketModels | None]:
    job.progress("prepare the model")
    recipe = job.recipe
    refuse_profiles(job.targets, source.inputs)
    dims = choose_dims(recipe.dims, recipe.buckets, recipe.pad)
    is_free = not recipe.buckets and takes_any_size(job.targets)
    fixed = ready_model(source, job.work, dims, may_stay_open=is_free)
    return fixed, prepare_buckets(source, fixed.model, dims, recipe.buckets, recipe.pad, job.work)


def _make_golden(source: Model, prepared: Model, samples: SampleSets, job: BuildJob) -> Golden:
    """Returns the golden samples, with every dimension open that the model leaves open, whatever sizes they have."""
    golden = _run_float(source, samples, job)
    check_class_labels(golden)
    if all(spec.is_static for spec in prepared.inputs):
        return golden
    names = {name for name, _, _ in list_open(prepared.inputs)}
    inputs, outputs = (
        tuple(open_specs(known, stated, names))
        for known, stated in ((golden.inputs, prepared.inputs), (golden.outputs, prepared.outputs))
    )
    return msgspec.structs.replace(golden, inputs=inputs, outputs=outputs)


def _filling(sequences: Sequences, sized: BucketModels | None) -> Sequences:
    """Returns sequences whose samples are filled up to the largest size, where there are several.

    Raises:
        UsageError: the model has state.
    """
    if sized is None:
        return sequences
    if sequences.state.steps > 1:
        raise UsageError("a model with state cannot step through buckets", hint="give each dimension one size")

    def fill(samples: Samples, _: str) -> Samples:
        return pad_samples(sized.padding, samples, sized.largest)

    return msgspec.structs.replace(sequences, unroll=fill)


def _run_unpadded(
    source: Model, sized: BucketModels, samples: SampleSets, recorded: Mapping[str, Recorded], job: BuildJob
) -> BucketInputs:
    """Returns what the float model makes of the golden samples as long as they are.

    Raises:
        DataError: a bucket has no golden sample that it takes.
    """
    lengths = tuple(sized.padding.measure(sample) for sample in samples.given)
    if min(lengths) > sized.sizes[0]:
        raise DataError(
            f"no golden sample fits into {sized.padding.dim}={sized.sizes[0]}: the shortest has {min(lengths)}",
            hint="give shorter samples too, or leave the bucket out",
        )
    golden = make_golden(source, samples.given, job.work / "unpadded", ragged=True)
    for bundle in recorded.values():
        adopt_unpadded(golden, bundle)
    return BucketInputs(models=sized, given=samples.given, lengths=lengths, unpadded=golden.folder / OUTPUTS)


def _run_float(source: Model, samples: SampleSets, job: BuildJob) -> Golden:
    """Returns the golden samples; with a cache the float model runs once for all builds of it on this machine."""
    place = job.work / "golden"
    # Operators of one's own may depend on more than their file.
    if job.cache is None or source.custom_ops:
        return make_golden(source, samples.evaluation, place, labels=samples.labels, ragged=True)
    # Other CPUs, and other numbers of cores, sum up in another order.
    facts = source.sha256, list_versions(), describe_machine()
    key = digest_bytes(msgspec.json.encode(facts, order="sorted"))
    with open_cache(CacheSettings(folder=job.cache, digests=()), key, job.progress, "golden") as cache:
        found = cache.load(OUTPUTS, None, 2 * _MOST_KEPT_BYTES)
        outputs = {} if found is None else _split_outputs(found, cache)
        known = KnownOutputs(outputs=outputs, room_bytes=_MOST_KEPT_BYTES)
        golden = make_golden(source, samples.evaluation, place, labels=samples.labels, ragged=True, known=known)
        if not known.ran:
            job.progress(f"what the float model gives for {golden.samples} samples is read from the cache")
        elif outputs:
            cache.save(OUTPUTS, dict(enumerate(outputs)), lambda: _join_outputs(outputs), now=True)
    return golden


def _join_outputs(known: Mapping[bytes, Tensors]) -> dict[str, Array]:
    return {f"{place} {name}": value for place, each in enumerate(known.values()) for name, value in each.items()}


def _split_outputs(found: Checkpoint, cache: CalibrationCache) -> dict[bytes, Tensors]:
    """Returns outputs by the digest of their sample, nothing where they do not belong together."""
    known: dict[bytes, dict[str, Array]] = {digest: {} for digest in found.seen.values()}
    try:
        for key, value in found.arrays.items():
            place, name = key.split(" ", 1)
            known[found.seen[int(place)]][name] = value
    except (LookupError, ValueError):
        known.clear()
    if len({frozenset(each) for each in known.values()}) == 1:
        return dict(known)
    cache.note(f"what is kept as '{OUTPUTS}' is not used: it does not fit this model")
    return {}


def _open_recorded(data: Data, golden: Golden, source: Model, job: BuildJob) -> dict[str, Recorded]:
    """Returns what is known of bundles built before, and takes their reference over."""
    if data.golden is None:
        return {}
    recorded = open_recorded(data.golden, source.name, [target.name for target in job.targets])
    for bundle in recorded.values():
        adopt_reference(golden, bundle)
    return recorded


def _find_floats(prepared: Model, job: BuildJob) -> dict[str, str]:
    """Returns why targets gain nothing from integers, and says so: before the work, not after it."""
    found: dict[str, str] = {}
    graph = read_graph(prepared)
    for target in job.targets:
        precision = choose_precision(target, job.recipe.precision)
        reason = explain_no_gain(graph, target, precision, partial(check_model, prepared, target))
        if reason is not None and "fp32" in target.precisions:
            job.progress(reason)
            # A precision that the user asked for is never exchanged for another.
            found |= {target.name: reason} if job.recipe.precision == "auto" else {}
    return found


def _find_metric(data: Data, job: BuildJob) -> TaskLimit | None:
    metric = next((target.thresholds.task for target in job.targets if target.thresholds.task), None)
    if metric is not None and (data.labels is None or data.evaluation is None):
        raise UsageError(f"metric '{metric.name}' needs labels", hint="give --eval DATA with --labels FILE")
    if data.labels is not None and data.evaluation is None:
        raise UsageError(
            f"--labels '{data.labels}' say what --eval samples are, and there is no --eval",
            hint="add --eval DATA, the samples that the labels belong to",
        )
    return metric


def _calibrate(
    prepared: Model, samples: SampleSets, outputs: dict[str, StatedOutput], job: BuildJob, work: Path
) -> Calibration | ModelError:
    cache = None
    if job.cache is not None:
        cache = CacheSettings(folder=job.cache, digests=samples.facts.digests)
    try:
        return calibrate_model(
            prepared, samples.calibration, work=work, cache=cache, outputs=outputs, progress=job.progress
        )
    except ModelError as error:
        return error


def fix_inputs(inputs: BuildInputs, target: Target, job: BuildJob, folder: Path, *, stays_float: bool) -> BuildInputs:
    """Returns the inputs with the rewrites by which a target takes more, if there are any; `gain` tells of them.

    What does not stay float is calibrated anew. The rewritten model goes into `folder`.

    Raises:
        EdgekitError: the rewritten model cannot be calibrated.
    """
    if inputs.is_quantized or not job.recipe.fix:
        return inputs
    known = {fix.id for fix in inputs.fixes}
    found = gain_on_target(inputs.prepared, folder, target, stays_float=stays_float, known=known)
    if found is None:
        return inputs
    better, gain = found
    calibration = inputs.calibration
    if not stays_float:
        calibration = _calibrate(better.model, inputs.samples, inputs.outputs, job, folder / "calibration")
    reference = FloatReference(better.model, inputs.samples.calibration, inputs.outputs)
    return msgspec.structs.replace(
        inputs,
        prepared=better.model,
        fixes=(*inputs.fixes, *better.fixes),
        calibration=calibration,
        reference=reference,
        gain=gain,
    )
