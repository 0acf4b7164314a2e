"""Converts a model to the files that a target loads; compares optimization levels and quantization formats.

A comparison is a table of accuracy, time and size.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from edgekit._files import staged_entries, work_folder
from edgekit._ort import VERSION, CpuSession, Level, SessionSettings
from edgekit.bench.bench import ROUNDS
from edgekit.bench.latency import compare_rounds, measure_round
from edgekit.convert import ort_form
from edgekit.convert.context import DEFAULT_CONTEXT, ContextOptions
from edgekit.convert.convert import ORT_FILES, ConvertedFiles, Source, convert_forms, convert_model, find_needed_ort
from edgekit.convert.ort_form import Cpu, Equality, LevelModel, OrtOptions, Style, TimedFile
from edgekit.data.samples import Samples, limit_samples, list_samples, load_samples, select_samples
from edgekit.devices.find import choose_here
from edgekit.devices.packages import CoreMlFiles, write_coreml
from edgekit.errors import EdgekitError, ModelError, RuntimeRefusal, UsageError
from edgekit.model import model as models
from edgekit.model.model import Model, QuantizedForm
from edgekit.model.tensors import Tensors
from edgekit.prepare.clean import make_runnable, prepare_model
from edgekit.prepare.fix import FusedOps, FuseOptions, fuse_transformer
from edgekit.prepare.shapes import fix_dims
from edgekit.progress import Progress, say_nothing
from edgekit.quantize._ort_quantizer import quantize_dynamically
from edgekit.quantize.apply import quantize_model
from edgekit.quantize.calibration.calibrate import calibrate_model, open_float_graph
from edgekit.quantize.plan import draft_plan
from edgekit.quantize.qdq import write_qoperator
from edgekit.quantize.weight_only import SmallWeights, WeightForm, WeightOnlyOptions, compress_weights
from edgekit.recipe import Data, Recipe, load_targets, takes_any_size
from edgekit.serialize import fill
from edgekit.target import Form, Target, load_target, read_version
from edgekit.verify.metrics.compare import compare_outputs

# A lower bound of the size of weights in a form, as a share of that of float weights.
_MIN_SIZE_SHARES: dict[WeightForm, float] = {"fp16": 1 / 2, "dynamic-int8": 1 / 4, "int8": 1 / 4, "int4": 1 / 8}


class CoreMlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the Core ML provider writes for the ONNX form: the .mlpackage of each partition, and its cache."""

    packages: bool = False
    cache: bool = False


class ConvertOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to convert a model.

    Without a target, files in ORT format of these `styles` are written with the options `ort`, and with `with_onnx` an
    ONNX file. For each of the `levels`, the model that ONNX Runtime optimizes at this level is written as ONNX. `fuse`
    fuses transformer patterns first, then `weights` compresses weights; with `qoperator` a QDQ model gets integer
    operators in place of Q and DQ nodes. If `checked`, each file is compared with its source on the inputs of `data`
    (default: random). `runtime` is the oldest ONNX Runtime that must load the files, "" for no requirement.
    """

    ort: OrtOptions = OrtOptions(style="full", cpu="arm", level=Level.ALL)
    styles: tuple[Style, ...] = ("full", "runtime")
    with_onnx: bool = False
    levels: tuple[Level, ...] = ()
    context: ContextOptions = DEFAULT_CONTEXT
    coreml: CoreMlOptions = CoreMlOptions()
    fuse: FuseOptions | None = None
    weights: WeightOnlyOptions | None = None
    qoperator: bool = False
    custom_ops: tuple[Path, ...] = ()
    data: Data | None = None
    checked: bool = True
    runtime: str = ""


class Fusion(FusedOps, frozen=True, kw_only=True):
    """The fused operators, and the comparison of the fused model with its source."""

    equality: Equality


class ConvertReport(ConvertedFiles, frozen=True, kw_only=True):
    """The files written from a model into a folder.

    `quantized` says how the model was quantized before, empty for a float one: its integers are not changed. `levels`
    has the model without optimization, then that of each requested level. `coreml` is what the Core ML provider wrote,
    None if that was not requested. `minimum_ort` is the oldest ONNX Runtime that reads the files, "" if the oldest
    tested one does.
    """

    model: str
    out: Path
    quantized: QuantizedForm
    levels: tuple[LevelModel, ...]
    fusion: Fusion | None
    weights: SmallWeights | None
    coreml: CoreMlFiles | None
    minimum_ort: str


def convert_for(
    model: Path, out: Path, recipe: Recipe, options: ConvertOptions, progress: Progress = say_nothing
) -> ConvertReport:
    """Writes a model into the folder `out`: for the one target of the recipe, or without one in the requested styles.

    Raises:
        EdgekitError: the model or the recipe is wrong, ONNX Runtime refuses the model, or a file gives other results
            than its source.
    """
    targets = load_targets(choose_here(recipe, alone=True))
    if (options.coreml.packages or options.coreml.cache) and [target.name for target in targets] != ["coreml"]:
        raise UsageError("packages and a cache of Core ML are for the target 'coreml'", hint="name it as the target")
    _refuse_large(model, targets, options)
    source = models.load_model(model, custom_ops=options.custom_ops)
    with work_folder() as work, staged_entries(out) as staging:
        source = make_runnable(source, work, recipe.freeze, options.runtime or VERSION)
        progress("prepare the model")
        # A file without a target is for ONNX Runtime's own provider.
        prepare = partial(prepare_model, dims=recipe.dims, may_stay_open=takes_any_size(targets))
        prepared = prepare(source, work / "prepared" / f"{source.name}.onnx")
        samples = None
        if options.data is not None:
            data = options.data
            samples = load_samples(data.source, prepared.inputs, data.preprocess, idle=recipe.freeze)
        float_model, fusion = prepared, None
        if options.fuse is not None:
            # Other providers than the CPU's get all fusions.
            fuse = msgspec.structs.replace(options.fuse, for_cpu=all(target.name == "cpu" for target in targets))
            fused = fuse_transformer(source, fuse, work / "fused.onnx", prepare)
            float_model, equality = fused.model, ort_form.compare_onnx(prepared, fused.model, samples)
            # Fusions match patterns of nodes: whether the model still computes the same must be measured.
            if not equality.passed:
                most = f"at most {equality.tolerance:g} is allowed"
                words = f"fusing changes the results: error {equality.error:.2g}, {most}"
                raise ModelError(words, hint="name another --model-type, or leave --fuse out")
            fusion = fill(Fusion, fused, equality=equality)
        compressed = None
        if options.weights is not None:
            compressed = compress_weights(float_model, options.weights, work / "light.onnx", samples)
        current = float_model if compressed is None else compressed.model
        if options.qoperator:
            current = write_qoperator(current, work / "qoperator.onnx", options.ort.cpu).model
        progress("convert and compare")
        if targets:
            # As in a build, files in ORT format are made from the float model if the weights are fp16.
            ort_source = float_model if compressed is not None and compressed.form == "fp16" else None
            converted = convert_model(
                current, targets[0], staging, ort_source=ort_source, origin=source, samples=samples,
                checked=options.checked, context=options.context,
            )  # fmt: skip
        else:
            forms: Sequence[Form] = (*options.styles, "onnx") if options.with_onnx else options.styles
            kinds: dict[Form, OrtOptions] = {it: msgspec.structs.replace(options.ort, style=it) for it in ORT_FILES}
            conversion_source = Source(model=current, origin=source, samples=samples, checked=options.checked)
            converted = convert_forms(current, conversion_source, forms, kinds, staging)
        coreml, wanted = None, options.coreml
        if wanted.packages or wanted.cache:
            progress("ask the Core ML provider")
            onnx = models.load_model(staging / converted.files["onnx"][0])
            coreml = write_coreml(onnx, targets[0], staging, packages=wanted.packages, cache=wanted.cache)
        levels: tuple[LevelModel, ...] = ()
        if options.levels:
            progress("optimize and time each level")
            # The model as an app would load it: preparing it does a part of what the levels do.
            session_model = source if current is prepared else current
            if current is prepared and recipe.dims:
                proto = models.read_proto(source)
                fix_dims(proto.graph, recipe.dims, may_stay_open=True)
                sized = models.save_proto(proto, work / "given.onnx")
                session_model = msgspec.structs.replace(sized, custom_ops=source.custom_ops)
            levels = optimize_levels(
                session_model, options.levels, options.ort.cpu, staging, work, samples, checked=options.checked
            )
        # The model without optimization has a file only if it was requested.
        written = [row.file for row in levels if (staging / row.file).exists()]
        files = {str(form): names for form, names in converted.files.items()} | {file: (file,) for file in written}
        minimum_ort = _find_minimum(staging, files, targets, options.runtime)
        form = models.find_quantized_form(models.read_proto(source, weights=False))
    return fill(
        ConvertReport,
        converted,
        model=source.name,
        out=out,
        quantized=form,
        levels=levels,
        fusion=fusion,
        weights=compressed and fill(SmallWeights, compressed),
        coreml=coreml,
        minimum_ort=minimum_ort,
    )


def _find_minimum(folder: Path, files: Mapping[str, Sequence[str]], targets: Sequence[Target], runtime: str) -> str:
    """Returns the oldest ONNX Runtime that reads the files and has the targets' providers.

    Raises:
        UsageError: it is newer than `runtime`.
    """
    paths = {form: [folder / it for it in names if it.endswith((".onnx", ".ort"))] for form, names in files.items()}
    needs = {form: find_needed_ort(each) for form, each in paths.items()}
    needs |= {f"target '{target.name}'": target.minimum_ort for target in targets}
    newest = max(needs, key=lambda name: read_version(needs[name]))
    if runtime and read_version(needs[newest] or models.ORT_FORMATS[0].since) > read_version(runtime):
        words = f"{newest} needs ONNX Runtime {needs[newest] or models.ORT_FORMATS[0].since}, and --ort says {runtime}"
        raise UsageError(words, hint="give --onnx with a --level for the ONNX form alone, or a newer ONNX Runtime")
    return needs[newest]


def _refuse_large(model: Path, targets: Sequence[Target], options: ConvertOptions) -> None:
    """Checks, before gigabytes are read, that the weights fit into the ORT format, if that is to be written.

    Raises:
        ModelError: they are too large.
    """
    forms = targets[0].conversion.forms if targets else options.styles
    form = None if options.weights is None else options.weights.form
    # For a target with fp16 weights, files in ORT format are made from the float model.
    share = 1.0 if form is None or (targets and form == "fp16") else _MIN_SIZE_SHARES[form]
    if set(forms) & set(ORT_FILES):
        having = "has" if share == 1 else f"with {form} weights has at least"
        size = sum((model.parent / name).stat().st_size for name in (model.name, *models.list_external(model)))
        ort_form.refuse_size(model, int(share * size), having)


# The length of a round; it has at least one run.
_ROUND_S = 0.02
MAX_TIMED_BYTES = 300_000_000
"""Larger models are not timed, because the sessions of all files are in memory at once."""


def optimize_levels(
    model: Model, levels: Sequence[Level], cpu: Cpu, out: Path, work: Path, samples: Samples | None, *, checked: bool
) -> tuple[LevelModel, ...]:
    """Writes a model at the requested levels to `out`; returns the model without optimization first, then these.

    Raises:
        ModelError: the model is too large, or a file gives other results than the model.
        RuntimeRefusal: ONNX Runtime refuses the model.
    """
    # The other files are compared with the one without optimization.
    all_levels = tuple(dict.fromkeys((Level.DISABLED, *levels)))
    folders = {level: out if level in levels else work for level in all_levels}
    rows = [ort_form.write_level(model, level, cpu, folders[level], samples, checked=checked) for level in all_levels]
    inputs = ort_form.choose_samples(model, samples)
    if inputs is None or model.size_bytes > MAX_TIMED_BYTES:
        return tuple(rows)
    # A session must not optimize the files further.
    settings = SessionSettings(level=Level.DISABLED, threads=1, libraries=model.custom_ops)
    paths = {row.level.value: folders[row.level] / row.file for row in rows}
    try:
        times = time_in_turns(paths, settings, next(iter(inputs)))
    except RuntimeRefusal:
        # A model may refuse random inputs.
        return tuple(rows)
    return tuple(msgspec.structs.replace(row, **msgspec.structs.asdict(times[row.level.value])) for row in rows)


def time_in_turns(paths: Mapping[str, Path], settings: SessionSettings, sample: Tensors) -> dict[str, TimedFile]:
    """Returns load and run times of each file, measured in interleaved rounds.

    Raises:
        RuntimeRefusal: ONNX Runtime does not load or run a file.
    """
    sessions, load_ms, counts = dict[str, CpuSession](), dict[str, float](), dict[str, int]()
    for name, path in paths.items():
        start = time.perf_counter()
        sessions[name] = CpuSession(path, settings)
        load_ms[name] = 1e3 * (time.perf_counter() - start)
        sessions[name].run(sample)
        counts[name] = max(1, int(_ROUND_S / max(1e-6, _time_runs(sessions[name], sample, 1))))

    def measure(name: str) -> float:
        return _time_runs(sessions[name], sample, counts[name])

    rounds = [measure_round(number, [*paths], measure) for number in range(ROUNDS)]
    times = dict(zip(paths, zip(*rounds, strict=True), strict=True))
    first, *others = times
    ratios = {name: compare_rounds(list(zip(times[first], times[name], strict=True))) for name in others}
    return {
        name: TimedFile(
            load_ms=load_ms[name],
            median_ms=1e3 * median(each),
            ratio=ratios[name].value if name in ratios else None,
            interval=ratios[name].interval if name in ratios else None,
        )
        for name, each in times.items()
    }


def _time_runs(session: CpuSession, sample: Tensors, count: int) -> float:
    """Returns the median time of `count` runs, in seconds."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        session.run(sample)
        times.append(time.perf_counter() - start)
    return median(times)


# From this many samples on, different samples are used to calibrate and to judge.
_MIN_TO_SPLIT = 8
_FLOAT = "float"


class FormatRow(TimedFile, frozen=True, kw_only=True):
    """A format: its size, its agreement with the float model, and its times.

    `sqnr_db` is the lowest SQNR of an output, `agreement` the lowest top-1 agreement, None if no output lists classes.
    The `ratio` is to the float model. `note` says why there is no such format of the model, "" if there is.
    """

    name: str
    size_bytes: int = 0
    sqnr_db: float | None = None
    agreement: float | None = None
    note: str = ""


class FormatReport(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of a model, the float one first; `calibrated` samples set the ranges, `judged` measure the loss.

    With enough samples they are `apart`: no sample is used for both.
    """

    model: str
    cpu: Cpu
    calibrated: int
    judged: int
    apart: bool
    rows: tuple[FormatRow, ...]


def compare_formats(model: Path, data: Data, recipe: Recipe, cpu: Cpu, progress: Progress) -> FormatReport:
    """Quantizes a float model in each format and compares the results.

    The formats are QDQ and QOperator, static and dynamic, per tensor and per channel, all with min-max ranges.

    Raises:
        EdgekitError: the model or the data is wrong, or ONNX Runtime refuses the float model.
    """
    with work_folder() as work:
        source = make_runnable(models.load_model(model), work, recipe.freeze)
        prepared = prepare_model(source, work / "prepared" / f"{source.name}.onnx", recipe.dims, may_stay_open=True)
        given = load_samples(data.source, prepared.inputs, data.preprocess, idle=recipe.freeze)
        all_samples = limit_samples(given, recipe.samples)
        # With enough samples, every second one judges, and the others calibrate.
        is_split = all_samples.count >= _MIN_TO_SPLIT
        calibrating = select_samples(all_samples, range(0, all_samples.count, 2)) if is_split else all_samples
        judging = select_samples(all_samples, range(1, all_samples.count, 2)) if is_split else all_samples
        progress("calibrate")
        calibration = calibrate_model(prepared, calibrating, work=work / "calibration", methods=("minmax",))
        plan = draft_plan(prepared, open_float_graph(prepared, calibration), calibration, load_target("cpu"), "int8")
        files, notes = {_FLOAT: prepared.path}, dict[str, str]()

        def attempt(name: str, write: Callable[[Path], object]) -> Path:
            """Writes a format and returns its path; an error becomes a note."""
            progress(f"write {name}")
            path = work / f"{name.replace(', ', '-').replace(' ', '-')}.onnx"
            try:
                write(path)
                files[name] = path
            except EdgekitError as error:
                notes[name] = error.message
            return path

        for grain, chosen in (("per channel", plan), ("per tensor", msgspec.structs.replace(plan, axes={}, bits={}))):
            qdq = attempt(f"QDQ, static, {grain}", partial(quantize_model, prepared, chosen, calibration))
            attempt(f"QOperator, static, {grain}", partial(_write_operators, qdq, cpu))
            attempt(f"QOperator, dynamic, {grain}", partial(_write_dynamic, prepared, per_channel=chosen is plan))
        progress("run and time each")
        rows = _measure(files, prepared, judging)
    return FormatReport(
        model=prepared.name,
        cpu=cpu,
        calibrated=calibrating.count,
        judged=judging.count,
        apart=is_split,
        rows=(*rows, *(FormatRow(name=name, note=note) for name, note in notes.items())),
    )


def _write_operators(qdq: Path, cpu: Cpu, out: Path) -> None:
    write_qoperator(models.load_model(qdq), out, cpu)


def _write_dynamic(model: Model, out: Path, *, per_channel: bool) -> None:
    proto = models.read_proto(model)
    written = models.save_proto(quantize_dynamically(proto, (), model.path.name, per_channel=per_channel), out)
    if len(models.read_proto(written, weights=False).graph.node) == len(proto.graph.node):
        words = f"'{model.name}' has no MatMul, LSTM, Attention or Gather with weights"
        why = "ONNX Runtime's CPU provider runs no other operator with int8 weights dynamically"
        raise ModelError(f"{words}, and {why}", hint="the static formats, QDQ and QOperator, take it")


def _measure(files: Mapping[str, Path], model: Model, samples: Samples) -> list[FormatRow]:
    # Optimized, as in an app: Q and DQ nodes become integer kernels.
    settings = SessionSettings(threads=1, libraries=model.custom_ops)
    rows: list[FormatRow] = []
    reference: Samples | None = None
    for name, path in files.items():
        outputs_of_format = list_samples([*map(CpuSession(path, settings).run, samples)], path.name)
        reference = reference or outputs_of_format
        reports = compare_outputs(reference, outputs_of_format)
        ratios = [report.sqnr_db for report in reports if report.sqnr_db is not None]
        shares = [report.top1_agreement for report in reports if report.top1_agreement is not None]
        sqnr_db, agreement = min(ratios, default=None), min(shares, default=None)
        rows.append(FormatRow(name=name, size_bytes=path.stat().st_size, sqnr_db=sqnr_db, agreement=agreement))
    if model.size_bytes > MAX_TIMED_BYTES:
        return rows
    times = time_in_turns(files, settings, next(iter(samples)))
    return [msgspec.structs.replace(row, **msgspec.structs.asdict(times[row.name])) for row in rows]
