"""One conversion, from a model as the user has it; optimization levels and quantization formats side by side.

A model is prepared, changed where that is wanted, and converted. What each level or format costs in accuracy, and what
it brings in time and size, stands in one table.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from edgekit._files import staged_entries, work_folder
from edgekit._ort import VERSION, CpuSession, Level, SessionSettings
from edgekit.bench.latency import compare_rounds
from edgekit.convert.context import DEFAULT_CONTEXT, ContextOptions
from edgekit.convert.convert import ORT_FILES, ConvertedFiles, Source, convert_forms, convert_model, find_needed_ort
from edgekit.convert.equality import Equality, choose_samples, compare_onnx
from edgekit.convert.levels import LevelModel, write_level
from edgekit.convert.ort_form import Cpu, OrtOptions, Style, refuse_size
from edgekit.data.samples import Samples, limit_samples, load_samples, select_samples
from edgekit.devices.packages import CoreMlFiles, write_coreml
from edgekit.devices.register import choose_here
from edgekit.errors import EdgekitError, ModelError, RuntimeRefusal, UsageError
from edgekit.model.model import (
    ORT_FORMATS,
    Model,
    QuantizedForm,
    find_quantized_form,
    load_model,
    measure_files,
    read_proto,
    save_proto,
)
from edgekit.model.tensors import Tensors
from edgekit.prepare.clean import freeze_model, prepare_model
from edgekit.prepare.opset import lower_model
from edgekit.prepare.shapes import fix_dims
from edgekit.prepare.transformer import FusedOps, FuseOptions, fuse_transformer
from edgekit.progress import Progress, say_nothing
from edgekit.quantize._ort_quantizer import quantize_dynamically
from edgekit.quantize.apply import quantize_model
from edgekit.quantize.calibration.calibrate import calibrate_model, open_float_graph
from edgekit.quantize.plan import draft_plan
from edgekit.quantize.qdq import write_qoperator
from edgekit.quantize.weight_only.convert import WeightForm, WeightOnlyOptions, compress_weights
from edgekit.recipe import Data, Recipe, load_targets, takes_any_size
from edgekit.target import Form, Target, load_target, read_version
from edgekit.verify.metrics.compare import compare_outputs

# What weights of a form have at least of the size of float ones; what is written is judged when it is.
_LEAST_SHARES: dict[WeightForm, float] = {"fp16": 1 / 2, "dynamic-int8": 1 / 4, "int8": 1 / 4, "int4": 1 / 8}


class CoreMlOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the Core ML provider is asked to write of the ONNX form: the packages of its partitions, and its cache."""

    packages: bool = False
    cache: bool = False


class ConvertOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to convert. Without a target, `styles` are written as `ort` says, and the ONNX form too `with_onnx`.

    For each of the `levels` the model that ONNX Runtime makes at it is written, in ONNX.
    Transformer patterns are fused first as `fuse` says, then weights are made smaller as `weights` says; with
    `qoperator` a QDQ model gets integer operators in place of Q and DQ nodes.
    `data` holds the inputs on which each file runs against its source, which it does not unless `checked`. `runtime` is
    the oldest ONNX Runtime that is to load the files, "" for any that can.
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
    """What fusing made of the model, and how near its results stayed."""

    equality: Equality


class SmallWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Which nodes have weights of another form now, which were to keep theirs, and the sizes of the ONNX model.

    `notes` name blocks that look wrong: of zeros alone, or clipped.
    """

    form: WeightForm
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    size_before: int
    size_after: int
    notes: tuple[str, ...]


class ConvertReport(ConvertedFiles, frozen=True, kw_only=True):
    """The files written from a model into a folder.

    `quantized` is how the model was quantized before, empty for a float one: its integers pass through as they are.
    `levels` has the model at each level that was asked for, behind the one without optimization.
    `coreml` is what the Core ML provider wrote, where it was asked to. `minimum_ort` is the oldest ONNX Runtime that
    reads the files, "" where the oldest that was tried does.
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
    """Writes a model into the folder `out`: for the one target of the recipe, or without one in the styles asked for.

    Raises:
        EdgekitError: the model or the recipe is wrong, ONNX Runtime refuses the model, or a file gives other results
            than its source.
    """
    targets = load_targets(choose_here(recipe, alone=True))
    if (options.coreml.packages or options.coreml.cache) and [target.name for target in targets] != ["coreml"]:
        raise UsageError("packages and a cache of Core ML are for the target 'coreml'", hint="name it as the target")
    _refuse_large(model, targets, options)
    source = load_model(model, custom_ops=options.custom_ops)
    with work_folder() as work, staged_entries(out) as staging:
        source = lower_model(source, work / "lowered", options.runtime or VERSION)
        source = freeze_model(source, work / "frozen", recipe.freeze)
        progress("prepare the model")
        # A file without a target is for ONNX Runtime's own provider.
        prepare = partial(prepare_model, dims=recipe.dims, may_stay_open=takes_any_size(targets))
        prepared = prepare(source, work / "prepared.onnx")
        samples = None
        if options.data is not None:
            data = options.data
            samples = load_samples(data.source, prepared.inputs, data.preprocess, idle=recipe.freeze)
        floating, fusion = prepared, None
        if options.fuse is not None:
            # For GPUs all fusions that there are.
            fuse = msgspec.structs.replace(options.fuse, for_cpu=all(target.name == "cpu" for target in targets))
            fused = fuse_transformer(source, fuse, work / "fused.onnx", prepare)
            floating, equality = fused.model, compare_onnx(prepared, fused.model, samples)
            # Fusions go by pattern: whether the model still computes the same is measured.
            if not equality.passed:
                most = f"at most {equality.tolerance:g} is allowed"
                raise ModelError(
                    f"fusing changes the results: error {equality.error:.2g}, {most}",
                    hint="name another --model-type, or leave --fuse out",
                )
            fusion = Fusion(equality=equality, **{name: getattr(fused, name) for name in FusedOps.__struct_fields__})
        small = None
        if options.weights is not None:
            small = compress_weights(floating, options.weights, work / "light.onnx", samples)
        current = floating if small is None else small.model
        if options.qoperator:
            current = write_qoperator(current, work / "qoperator.onnx", options.ort.cpu).model
        progress("convert and compare")
        if targets:
            # As in a build: files in ORT format are made of the float model.
            halved = floating if small is not None and small.form == "fp16" else None
            converted = convert_model(
                current, targets[0], staging, ort_source=halved, origin=source, samples=samples,
                checked=options.checked, context=options.context,
            )  # fmt: skip
        else:
            forms: Sequence[Form] = (*options.styles, "onnx") if options.with_onnx else options.styles
            kinds: dict[Form, OrtOptions] = {
                style: msgspec.structs.replace(options.ort, style=style) for style in ORT_FILES
            }
            made_of = Source(model=current, origin=source, samples=samples, checked=options.checked)
            converted = convert_forms(current, made_of, forms, kinds, staging)
        coreml, wanted = None, options.coreml
        if wanted.packages or wanted.cache:
            progress("ask the Core ML provider")
            onnx = load_model(staging / converted.files["onnx"][0])
            coreml = write_coreml(onnx, targets[0], staging, packages=wanted.packages, cache=wanted.cache)
        levels: tuple[LevelModel, ...] = ()
        if options.levels:
            progress("optimize and time each level")
            # As an app would give it to a session: what preparing does is part of what the levels do.
            given = source if current is prepared else current
            if current is prepared and recipe.dims:
                proto = read_proto(source)
                fix_dims(proto.graph, recipe.dims, may_stay_open=True)
                given = msgspec.structs.replace(save_proto(proto, work / "given.onnx"), custom_ops=source.custom_ops)
            levels = optimize_levels(
                given, options.levels, options.ort.cpu, staging, work, samples, checked=options.checked
            )
        # The row of no optimization stands beside those that were asked for, without a file of its own.
        written = [row.file for row in levels if (staging / row.file).exists()]
        files = {str(form): names for form, names in converted.files.items()} | {file: (file,) for file in written}
        minimum_ort = _find_minimum(staging, files, targets, options.runtime)
        form = find_quantized_form(read_proto(source, weights=False))
    return ConvertReport(
        model=source.name,
        out=out,
        quantized=form,
        levels=levels,
        fusion=fusion,
        weights=None if small is None else msgspec.convert(small, SmallWeights, from_attributes=True),
        coreml=coreml,
        minimum_ort=minimum_ort,
        **{name: getattr(converted, name) for name in ConvertedFiles.__struct_fields__},
    )


def _find_minimum(folder: Path, files: Mapping[str, Sequence[str]], targets: Sequence[Target], runtime: str) -> str:
    """Returns the oldest ONNX Runtime that reads the files, and of which the target's provider is known.

    Raises:
        UsageError: it is newer than `runtime`.
    """
    models = {
        form: [folder / name for name in names if name.endswith((".onnx", ".ort"))] for form, names in files.items()
    }
    needs = {form: find_needed_ort(paths) for form, paths in models.items()}
    needs |= {f"target '{target.name}'": target.minimum_ort for target in targets}
    most = max(needs, key=lambda name: read_version(needs[name]))
    if runtime and read_version(needs[most] or ORT_FORMATS[0].since) > read_version(runtime):
        raise UsageError(
            f"{most} needs ONNX Runtime {needs[most] or ORT_FORMATS[0].since}, and --ort says {runtime}",
            hint="give --onnx with a --level for the ONNX form alone, or a newer ONNX Runtime",
        )
    return needs[most]


def _refuse_large(model: Path, targets: Sequence[Target], options: ConvertOptions) -> None:
    """Refuses at once, before gigabytes are read, what the ORT format cannot hold, however small the weights become."""
    forms = targets[0].conversion.forms if targets else options.styles
    form = None if options.weights is None else options.weights.form
    # Files in ORT format that are for a target are made of the float model where weights are halved.
    share = 1.0 if form is None or (targets and form == "fp16") else _LEAST_SHARES[form]
    if set(forms) & set(ORT_FILES):
        having = "has" if share == 1 else f"with {form} weights has at least"
        refuse_size(model, int(share * measure_files(model)), having)


# Seven degrees of freedom: Student's quantile is then 2.36, against 12.7 for two rounds.
_ROUNDS = 8
# A round of a session is that long, and has a run at least.
_ROUND_S = 0.02
MOST_TIMED_BYTES = 300_000_000
"""All files are held at once, to be timed in turns."""


class TimedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What loading a file and a run of it take in ms, and the time of a run over that of the first file, with 95 %."""

    load_ms: float
    median_ms: float
    ratio: float | None
    interval: tuple[float, float] | None


def optimize_levels(
    model: Model, levels: Sequence[Level], cpu: Cpu, out: Path, work: Path, samples: Samples | None, *, checked: bool
) -> tuple[LevelModel, ...]:
    """Returns a model at the levels asked for, written to `out`, behind the one without optimization.

    Raises:
        ModelError: the model is too large, or a file gives other results than the model.
        RuntimeRefusal: ONNX Runtime refuses the model.
    """
    # The file without optimization is what the others are compared with.
    wanted = tuple(dict.fromkeys((Level.DISABLED, *levels)))
    folders = {level: out if level in levels else work for level in wanted}
    rows = [write_level(model, level, cpu, folders[level], samples, checked=checked) for level in wanted]
    chosen = choose_samples(model, samples)
    if chosen is None or model.size_bytes > MOST_TIMED_BYTES:
        return tuple(rows)
    # The files are what they are: a session must not optimize them further.
    settings = SessionSettings(level=Level.DISABLED, threads=1, libraries=model.custom_ops)
    paths = {row.level.value: folders[row.level] / row.file for row in rows}
    try:
        times = time_in_turns(paths, settings, next(iter(chosen)))
    except RuntimeRefusal:
        # A model may refuse inputs that were drawn at random.
        return tuple(rows)
    return tuple(msgspec.structs.replace(row, **msgspec.structs.asdict(times[row.level.value])) for row in rows)


def time_in_turns(paths: Mapping[str, Path], settings: SessionSettings, sample: Tensors) -> dict[str, TimedFile]:
    """Returns load and run times of each file, in rounds of alternating order, so that disturbances hit all alike.

    Raises:
        RuntimeRefusal: ONNX Runtime does not load or run a file.
    """
    sessions, load_ms, counts = dict[str, CpuSession](), dict[str, float](), dict[str, int]()
    for name, path in paths.items():
        began = time.perf_counter()
        sessions[name] = CpuSession(path, settings)
        load_ms[name] = 1e3 * (time.perf_counter() - began)
        sessions[name].run(sample)
        counts[name] = max(1, int(_ROUND_S / max(1e-6, _time_runs(sessions[name], sample, 1))))
    rounds: list[dict[str, float]] = []
    for number in range(_ROUNDS):
        order = list(sessions)[:: -1 if number % 2 else 1]
        rounds.append({name: _time_runs(sessions[name], sample, counts[name]) for name in order})
    first, *others = paths
    ratios = {name: compare_rounds([(times[first], times[name]) for times in rounds]) for name in others}
    return {
        name: TimedFile(
            load_ms=load_ms[name],
            median_ms=1e3 * median(times[name] for times in rounds),
            ratio=ratios[name].value if name in ratios else None,
            interval=ratios[name].interval if name in ratios else None,
        )
        for name in paths
    }


def _time_runs(session: CpuSession, sample: Tensors, count: int) -> float:
    """Returns the seconds that a run takes, the median of so many."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        session.run(sample)
        times.append(time.perf_counter() - began)
    return median(times)


# From so many samples on those that judge are others than those that calibrate.
_FEW = 8
_FLOAT = "float"


class FormatRow(msgspec.Struct, frozen=True, kw_only=True):
    """A format: its size, what it loses beside the float model, and what a run takes on this machine with one thread.

    `sqnr_db` is that of the output that lies farthest, `agreement` the least share of samples on which the largest
    entry of an output stays where it was, None where no output lists classes. `ratio` is the time over the float
    model's, with 95 % confidence. `note` says why there is no such format of the model, "" where there is.
    """

    name: str
    size_bytes: int = 0
    sqnr_db: float | None = None
    agreement: float | None = None
    load_ms: float | None = None
    median_ms: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""


class FormatReport(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of a model, the float one first; `judged` samples say what is lost, `calibrated` set the ranges.

    They are `apart` where there are enough: what judges has set no range.
    """

    model: str
    cpu: Cpu
    calibrated: int
    judged: int
    apart: bool
    rows: tuple[FormatRow, ...]


def compare_formats(model: Path, data: Data, recipe: Recipe, cpu: Cpu, progress: Progress) -> FormatReport:
    """Quantizes a float model in each format and compares the results.

    The formats are QDQ and QOperator, static and dynamic, per tensor and per channel. All use min-max ranges, so that
    they differ in nothing else.

    Raises:
        EdgekitError: the model or the data is wrong, or ONNX Runtime refuses the float model.
    """
    with work_folder() as work:
        source = freeze_model(load_model(model), work / "frozen", recipe.freeze)
        prepared = prepare_model(source, work / "prepared.onnx", recipe.dims, may_stay_open=True)
        given = load_samples(data.source, prepared.inputs, data.preprocess, idle=recipe.freeze)
        every = limit_samples(given, recipe.samples)
        # Where there are enough, each second one judges, and the others calibrate.
        apart = every.count >= _FEW
        calibrating = select_samples(every, range(0, every.count, 2)) if apart else every
        judging = select_samples(every, range(1, every.count, 2)) if apart else every
        progress("calibrate")
        calibration = calibrate_model(prepared, calibrating, work=work / "calibration", methods=("minmax",))
        plan = draft_plan(prepared, open_float_graph(prepared, calibration), calibration, load_target("cpu"), "int8")
        files, notes = {_FLOAT: prepared.path}, dict[str, str]()

        def attempt(name: str, write: Callable[[Path], object]) -> Path:
            """Writes a format; one that this model cannot have is a note."""
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
        apart=apart,
        rows=(*rows, *(FormatRow(name=name, note=note) for name, note in notes.items())),
    )


def _write_operators(qdq: Path, cpu: Cpu, out: Path) -> None:
    write_qoperator(load_model(qdq), out, cpu)


def _write_dynamic(model: Model, out: Path, *, per_channel: bool) -> None:
    proto = read_proto(model)
    written = save_proto(quantize_dynamically(proto, (), model.path.name, per_channel=per_channel), out)
    if len(read_proto(written, weights=False).graph.node) == len(proto.graph.node):
        raise ModelError(
            f"'{model.name}' has no MatMul, LSTM, Attention or Gather with weights, and ONNX Runtime's CPU provider"
            " runs no other operator with int8 weights dynamically",
            hint="the static formats, QDQ and QOperator, take it",
        )


def _measure(files: Mapping[str, Path], model: Model, samples: Samples) -> list[FormatRow]:
    # As an app would run them: Q and DQ nodes become integer kernels.
    settings = SessionSettings(threads=1, libraries=model.custom_ops)
    rows: list[FormatRow] = []
    wanted: Samples | None = None
    for name, path in files.items():
        outputs = list(map(CpuSession(path, settings).run, samples))
        got = Samples(source=path.name, count=len(outputs), read=partial(iter, outputs))
        wanted = wanted or got
        reports = compare_outputs(wanted, got)
        ratios = [report.sqnr_db for report in reports if report.sqnr_db is not None]
        shares = [report.top1_agreement for report in reports if report.top1_agreement is not None]
        sqnr_db, agreement = min(ratios, default=None), min(shares, default=None)
        rows.append(FormatRow(name=name, size_bytes=path.stat().st_size, sqnr_db=sqnr_db, agreement=agreement))
    if model.size_bytes > MOST_TIMED_BYTES:
        return rows
    times = time_in_turns(files, settings, next(iter(samples)))
    return [msgspec.structs.replace(row, **msgspec.structs.asdict(times[row.name])) for row in rows]
