"""What a build starts from: the model with its samples, made ready once, and for a target where that pays."""

import math
import time
from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes
from edgekit.bundle.expected import Recorded, adopt_outputs, adopt_reference
from edgekit.bundle.golden import OUTPUTS, Golden, KnownOutputs, make_golden, plan_sequences
from edgekit.bundle.manifest import UNPADDED, list_open, open_specs
from edgekit.bundle.multi import open_recorded
from edgekit.check.check import check_model
from edgekit.check.recommend import explain_no_gain
from edgekit.data.data_check import accept_pixels
from edgekit.data.images import Preprocess
from edgekit.data.padding import free_axes, pad_samples
from edgekit.data.samples import Samples
from edgekit.data.split import SampleSets, read_sample_sets
from edgekit.errors import DataError, ModelError, UsageError
from edgekit.graph.graph import read_graph
from edgekit.graph.pixels import takes_raw_pixels
from edgekit.jobs.check import gain_on_target, list_versions
from edgekit.machine import describe_machine
from edgekit.model.model import Model, find_integer_ops, read_proto
from edgekit.model.outputs import StatedOutput, check_outputs
from edgekit.model.state import State
from edgekit.model.tensors import Array
from edgekit.prepare import ready_model
from edgekit.prepare.clean import freeze_model
from edgekit.prepare.fix import BucketModels, Fix, choose_dims, prepare_buckets
from edgekit.prepare.opset import lower_model
from edgekit.prepare.shapes import proposing_sizes
from edgekit.progress import Budget, Progress, Stopwatch
from edgekit.quantize import Calibration
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.calibration.calibrate import CalibrationOptions, calibrate_for
from edgekit.quantize.calibration.store import CacheSettings, open_cache
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.recipe import Data, Recipe, choose_precision, refuse_profiles, takes_any_size
from edgekit.target import INTEGERS, Target, TaskLimit
from edgekit.verify.task_metrics import find_metric
from edgekit.verify.task_scores import check_class_labels

# A thousand classes of 10,000 samples, and fields of scores of a few hundred.
_MOST_KEPT_BYTES = 64 << 20


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What builds of one model keep for the next, perhaps for another target: a bundle is the same without it.

    In `folder`, if there is one, lie calibrations, also for later runs. `memo` has the plans that were judged, `known`
    what models gave for golden samples, by their sha256. `inputs` are models made ready, by what they depend on, whose
    files lie in the folder `work`; without it each build makes its own.
    """

    folder: Path | None = None
    work: Path | None = None
    memo: Memo = msgspec.field(default_factory=Memo)
    known: dict[str, KnownOutputs] = {}
    inputs: dict[str, "BuildInputs"] = {}

    def know(self, sha256: str, *, stays: bool) -> KnownOutputs:
        """Returns what the model of this digest gave before, to which more is added; it is kept where it `stays`."""
        new = KnownOutputs(room_bytes=_MOST_KEPT_BYTES // 2)
        return self.known.setdefault(sha256, new) if stays else new


class BuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a build was asked for, and where it works: `work` is gone afterwards, `staging` becomes the result.

    `end` is when planning and verifying end, by `time.monotonic()`. `origin` is the sha256 of the model file as it was
    given. The `watch` tells what each stage takes. `memo` is that of `kept`, with the time of this build.
    """

    recipe: Recipe
    targets: tuple[Target, ...]
    work: Path
    staging: Path
    kept: Kept
    progress: Progress
    origin: str
    memo: Memo
    end: float = math.inf
    watch: Stopwatch = msgspec.field(default_factory=Stopwatch)

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
        budget = Budget(end=time.monotonic() + seconds, progress=self.progress, failed=self.memo.budget.failed)
        return msgspec.structs.replace(self, memo=msgspec.structs.replace(self.memo, budget=budget))

    def plans_for(self, target: Target, floats: Container[str]) -> bool:
        """Returns True if a target is to be quantized."""
        return target.name not in floats and choose_precision(target, self.recipe.precision) in INTEGERS


class BucketInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The models of several sizes, and the golden samples before padding: as `given`, with their `lengths`.

    `unpadded` is the file with the float model's outputs for them at these lengths.
    """

    models: BucketModels
    given: Samples
    lengths: tuple[int, ...]
    unpadded: Path


class BuildInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The prepared model, its samples (split for calibration and verification), and the float model's outputs.

    `calibration` is None until a target is to be quantized, and an error where no node can be quantized. Plans are
    judged against `reference`. `floats` says for each target that is not quantized why integers would gain nothing.
    `gain` describes the rewrites for one target, where `prepared` has any. All files lie in `folder`.
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


def read_build_inputs(given: Model, data: Data, job: BuildJob) -> BuildInputs:
    """Returns a model made ready, its samples, and what the float model gives; it may be calibrated already.

    What an earlier build kept of the same model and data is taken as it is.

    Raises:
        EdgekitError: the model, the data or the recipe is wrong.
    """
    # Before anything runs: a build of an hour must not end in a missing file of labels.
    metric = next((target.thresholds.task for target in job.targets if target.thresholds.task), None)
    if metric is not None and (data.labels is None or data.evaluation is None):
        raise UsageError(
            f"metric '{metric.name}' needs labels",
            hint="give --eval DATA with --labels FILE, in an edgekit.toml evaluation and labels",
        )
    if data.labels is not None and data.evaluation is None:
        raise UsageError(
            f"--labels '{data.labels}' say what --eval samples are, and there is no --eval",
            hint="add --eval DATA, the samples that the labels belong to",
        )
    key = _find_key(given, data, metric, job)
    inputs = job.kept.inputs.get(key)
    if inputs is None:
        folder = job.work if job.kept.work is None or not key else job.kept.work / key
        inputs = _read_inputs(given, data, metric, job, folder)
        if key:
            job.kept.inputs[key] = inputs
    else:
        refuse_profiles(job.targets, inputs.source.inputs)
    floats: dict[str, str] = {}
    graph = read_graph(inputs.prepared)
    for target in () if inputs.is_quantized else job.targets:
        precision = choose_precision(target, job.recipe.precision)
        reason = explain_no_gain(graph, target, precision, partial(check_model, inputs.prepared, target))
        if reason is not None and "fp32" in target.precisions:
            # Told before the work begins.
            job.progress(reason)
            # A precision that the user asked for is never exchanged for another.
            floats |= {target.name: reason} if job.recipe.precision == "auto" else {}
    return msgspec.structs.replace(inputs, floats=floats)


def _find_key(given: Model, data: Data, metric: TaskLimit | None, job: BuildJob) -> str:
    """Returns a digest of all that inputs depend on, "" where none are kept or what they depend on is not known."""
    places = [Path(place) for place in (data.source, data.evaluation, data.labels) if place is not None]
    # A function may give other samples each time, and the reference of an earlier build is one of each target.
    if job.kept.work is None or data.golden is not None or not all(place.exists() for place in places):
        return ""
    files = [path for place in places for path in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    recipe = job.recipe
    facts = (
        (given.sha256, data, metric, takes_any_size(job.targets)),
        (recipe.dims, recipe.buckets, recipe.pad, recipe.freeze, recipe.samples, recipe.outputs, recipe.state),
        [(path, (known := path.stat()).st_size, known.st_mtime_ns) for path in files],
    )
    return digest_bytes(msgspec.json.encode(facts, enc_hook=str, order="sorted"))


def _read_inputs(given: Model, data: Data, metric: TaskLimit | None, job: BuildJob, folder: Path) -> BuildInputs:
    folder.mkdir(exist_ok=True)
    recipe = job.recipe
    source = freeze_model(lower_model(given, folder / "lowered"), folder / "frozen", recipe.freeze)
    job.progress("prepare the model")
    refuse_profiles(job.targets, source.inputs)
    dims = choose_dims(recipe.dims, recipe.buckets, recipe.pad)
    with proposing_sizes(source.inputs, data.source, data.preprocess):
        fixed = ready_model(source, folder, dims, may_stay_open=not recipe.buckets and takes_any_size(job.targets))
    prepared = fixed.model
    sized = prepare_buckets(source, prepared, dims, recipe.buckets, recipe.pad, folder)
    outputs = check_outputs(recipe.outputs, prepared)
    sequences = plan_sequences(source, recipe.state, prepared.inputs, prepared.outputs, folder)
    if sized is not None:
        if sequences.state.steps > 1:
            raise UsageError("a model with state cannot step through buckets", hint="give each dimension one size")

        def fill(samples: Samples, _: str) -> Samples:
            return pad_samples(sized.padding, samples, sized.largest)

        sequences = msgspec.structs.replace(sequences, unroll=fill)
    job.begin("samples", "read the samples")
    samples = read_sample_sets(
        prepared.inputs if sized is None else free_axes(sized.padding.inputs, prepared.inputs),
        data.source,
        evaluation=data.evaluation,
        labels=None if data.labels is None else (data.labels, find_metric(metric).labels if metric else "class"),
        preprocess=data.preprocess,
        most=recipe.samples,
        idle=recipe.freeze,
        sequences=sequences,
    )
    facts = accept_pixels(samples.facts, partial(takes_raw_pixels, read_graph(prepared)))
    samples = msgspec.structs.replace(samples, facts=facts)
    job.begin("float model", "run the float model")
    # Of the model as it was given, not as it was prepared: errors of the preparation count as well.
    golden = _run_float(source, samples, job, folder / "golden")
    check_class_labels(golden)
    if not all(spec.is_static for spec in prepared.inputs):
        # Every dimension is open that the model leaves open, whatever sizes the samples have.
        names = {name for name, _, _ in list_open(prepared.inputs)}
        golden = msgspec.structs.replace(
            golden,
            inputs=tuple(open_specs(golden.inputs, prepared.inputs, names)),
            outputs=tuple(open_specs(golden.outputs, prepared.outputs, names)),
        )
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
        buckets=None if sized is None else _run_unpadded(source, sized, samples, recorded, folder),
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
    inputs = msgspec.structs.replace(inputs, calibration=_calibrate(inputs, job, inputs.folder / "calibration"))
    if inputs.folder.name in job.kept.inputs:
        job.kept.inputs[inputs.folder.name] = inputs
    return inputs


def _run_unpadded(
    source: Model, sized: BucketModels, samples: SampleSets, recorded: Mapping[str, Recorded], folder: Path
) -> BucketInputs:
    """Returns the golden samples before padding, with the float model's outputs at their own lengths.

    Raises:
        DataError: a bucket has no golden sample that it takes.
    """
    lengths = tuple(sized.padding.measure(sample) for sample in samples.given)
    if min(lengths) > sized.sizes[0]:
        raise DataError(
            f"no golden sample fits into {sized.padding.dim}={sized.sizes[0]}: the shortest has {min(lengths)}",
            hint="give shorter samples too, or leave the bucket out",
        )
    golden = make_golden(source, samples.given, folder / "unpadded", ragged=True)
    for bundle in recorded.values():
        adopt_outputs(golden, bundle, bundle.folder / UNPADDED)
    return BucketInputs(models=sized, given=samples.given, lengths=lengths, unpadded=golden.folder / OUTPUTS)


def _run_float(source: Model, samples: SampleSets, job: BuildJob, place: Path) -> Golden:
    """Returns the golden samples; with a cache the float model runs once for all builds of it on this machine."""
    # Operators of one's own may depend on more than their file.
    if job.kept.folder is None or source.custom_ops:
        return make_golden(source, samples.evaluation, place, labels=samples.labels, ragged=True)
    # Other CPUs, and other numbers of cores, sum up in another order.
    facts = source.sha256, list_versions(), describe_machine()
    key = digest_bytes(msgspec.json.encode(facts, order="sorted"))
    with open_cache(CacheSettings(folder=job.kept.folder, digests=()), key, job.progress, "golden") as cache:
        found, outputs = cache.load(OUTPUTS, None, 2 * _MOST_KEPT_BYTES), dict[bytes, dict[str, Array]]()
        if found is not None:
            try:
                for label, value in found.arrays.items():
                    number, name = label.split(" ", 1)
                    outputs.setdefault(found.seen[int(number)], {})[name] = value
            except (LookupError, ValueError):
                outputs.clear()
            if len(outputs) < len(found.seen) or len({frozenset(each) for each in outputs.values()}) != 1:
                cache.note(f"what is kept as '{OUTPUTS}' is not used: it does not fit this model")
                outputs = {}
        known = KnownOutputs(outputs={**outputs}, room_bytes=_MOST_KEPT_BYTES)
        golden = make_golden(source, samples.evaluation, place, labels=samples.labels, ragged=True, known=known)
        if not known.ran:
            job.progress(f"what the float model gives for {golden.samples} samples is read from the cache")
        elif known.outputs:
            each = enumerate(known.outputs.values())
            arrays = {f"{number} {name}": value for number, gave in each for name, value in gave.items()}
            cache.save(OUTPUTS, dict(enumerate(known.outputs)), lambda: arrays, now=True)
    return golden


def _calibrate(inputs: BuildInputs, job: BuildJob, work: Path) -> Calibration | ModelError:
    cache, samples = None, inputs.samples
    if job.kept.folder is not None:
        cache = CacheSettings(folder=job.kept.folder, digests=samples.facts.digests)
    try:
        options = CalibrationOptions(
            work=work, cache=cache, outputs=inputs.outputs, progress=job.progress, keep=inputs.reference.keep
        )
        return calibrate_for(inputs.prepared, samples.calibration, options)
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
    samples, outputs = inputs.samples.calibration, inputs.outputs
    inputs = msgspec.structs.replace(
        inputs,
        prepared=better.model,
        fixes=(*inputs.fixes, *better.fixes),
        reference=FloatReference(better.model, samples, outputs, state=inputs.state, work=folder),
        gain=gain,
    )
    if stays_float:
        return inputs
    return msgspec.structs.replace(inputs, calibration=_calibrate(inputs, job, folder / "calibration"))
