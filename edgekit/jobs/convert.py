"""One conversion, from a model as the user has it: it is prepared, changed where that is wanted, and converted."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import staged_entries, work_folder
from edgekit._ort import VERSION, Level
from edgekit.convert.context import DEFAULT_CONTEXT, ContextOptions
from edgekit.convert.convert import ConvertedFiles, ConvertedModel, convert_model, convert_styles
from edgekit.convert.equality import Equality, compare_onnx
from edgekit.convert.forms import ORT_FILES, find_needed_ort
from edgekit.convert.levels import LevelModel
from edgekit.convert.ort_form import OrtOptions, Style, refuse_size
from edgekit.data.samples import Samples, load_samples
from edgekit.devices.packages import CoreMlFiles, write_coreml
from edgekit.devices.register import choose_here
from edgekit.errors import ModelError, UsageError
from edgekit.jobs.formats import optimize_levels
from edgekit.model.model import (
    READS,
    Model,
    QuantizedForm,
    find_quantized_form,
    load_model,
    measure_files,
    read_proto,
    save_proto,
)
from edgekit.prepare.clean import freeze_model, prepare_model
from edgekit.prepare.opset import lower_model
from edgekit.prepare.shapes import fix_dims
from edgekit.prepare.transformer import FuseOptions, fuse_transformer
from edgekit.progress import Progress, say_nothing
from edgekit.quantize.qdq import write_qoperator
from edgekit.quantize.weight_only.convert import WeightForm, WeightOnlyOptions, compress_weights
from edgekit.recipe import Data, Recipe, load_targets, takes_any_size
from edgekit.target import Form, Target, read_version

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


class Fusion(msgspec.Struct, frozen=True, kw_only=True):
    """What the fusion of transformer patterns came to, and how the fused model compares with the one before."""

    model_type: str
    fused: dict[str, int]
    nodes_before: int
    nodes_after: int
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
        # For GPUs all fusions that there are.
        for_cpu = all(target.name == "cpu" for target in targets)
        fuse = None if options.fuse is None else msgspec.structs.replace(options.fuse, for_cpu=for_cpu)
        floating, fusion = _fuse(source, prepared, fuse, samples, prepare, work)
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
            converted = convert_styles(
                current, staging, options.ort, forms, origin=source, samples=samples, checked=options.checked
            )
        coreml = _write_coreml(converted, targets, options.coreml, progress)
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
    if runtime and read_version(needs[most] or READS[0].since) > read_version(runtime):
        raise UsageError(
            f"{most} needs ONNX Runtime {needs[most] or READS[0].since}, and --ort says {runtime}",
            hint="give --onnx with a --level for the ONNX form alone, or a newer ONNX Runtime",
        )
    return needs[most]


def _write_coreml(
    converted: ConvertedModel, targets: Sequence[Target], options: CoreMlOptions, progress: Progress
) -> CoreMlFiles | None:
    """Returns what the Core ML provider wrote beside the files, None where it was not asked to."""
    if not (options.packages or options.cache):
        return None
    if [target.name for target in targets] != ["coreml"]:
        raise UsageError("packages and a cache of Core ML are for the target 'coreml'", hint="name it as the target")
    progress("ask the Core ML provider")
    model = load_model(converted.folder / converted.files["onnx"][0])
    return write_coreml(model, targets[0], converted.folder, packages=options.packages, cache=options.cache)


def _fuse(
    source: Model,
    prepared: Model,
    options: FuseOptions | None,
    samples: Samples | None,
    prepare: Callable[[Model, Path], Model],
    work: Path,
) -> tuple[Model, Fusion | None]:
    """Returns the prepared model with its transformer patterns fused, where that is wanted, and what that came to."""
    if options is None:
        return prepared, None
    fused = fuse_transformer(source, options, work / "fused.onnx", prepare)
    equality = compare_onnx(prepared, fused.model, samples)
    # Fusions go by pattern: whether the model still computes the same is measured.
    if not equality.passed:
        raise ModelError(
            f"fusing changes the results: error {equality.error:.2g}, at most {equality.tolerance:g} is allowed",
            hint="name another --model-type, or leave --fuse out",
        )
    fusion = Fusion(
        model_type=fused.model_type,
        fused=fused.fused,
        nodes_before=fused.nodes_before,
        nodes_after=fused.nodes_after,
        equality=equality,
    )
    return fused.model, fusion


def _refuse_large(model: Path, targets: Sequence[Target], options: ConvertOptions) -> None:
    """Refuses at once, before gigabytes are read, what the ORT format cannot hold, however small the weights become."""
    forms = targets[0].conversion.forms if targets else options.styles
    form = None if options.weights is None else options.weights.form
    # Files in ORT format that are for a target are made of the float model where weights are halved.
    share = 1.0 if form is None or (targets and form == "fp16") else _LEAST_SHARES[form]
    if set(forms) & set(ORT_FILES):
        having = "has" if share == 1 else f"with {form} weights has at least"
        refuse_size(model, int(share * measure_files(model)), having)
