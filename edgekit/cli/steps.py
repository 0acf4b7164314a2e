"""Commands for one step of a build: prepare, quantize and convert."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import click

from edgekit._files import write_file
from edgekit._ort import Level
from edgekit.check.report import count_of
from edgekit.cli import options
from edgekit.cli.declare import Answer, Option, as_command
from edgekit.cli.options import name_values, split_names
from edgekit.cli.screen import print_table, show_json, show_line, show_lines, show_remarks
from edgekit.convert.context import ContextOptions
from edgekit.convert.ort_form import Cpu, Equality, OrtOptions, Style
from edgekit.data.images import load_preprocess
from edgekit.devices.find import load_target_here
from edgekit.errors import UsageError, look_up
from edgekit.jobs.check import PrepareOptions, PrepareReport, prepare_for
from edgekit.jobs.convert import ConvertOptions, ConvertReport, CoreMlOptions, convert_for
from edgekit.jobs.quantize import QuantizeOptions, plan_for, quantize_for
from edgekit.model.model import ORT_FORMATS, load_model
from edgekit.prepare.fix import FuseOptions
from edgekit.prepare.interface import LAYOUTS, InterfaceChanges, Layout
from edgekit.progress import Progress
from edgekit.quantize.ranges import RANGE_METHODS
from edgekit.quantize.weight_only import BlockRounding, WeightForm, WeightOnlyOptions
from edgekit.recipe import INTEGER_PRECISIONS, PrecisionChoice, Recipe, load_metric
from edgekit.report.tables import describe_quantization, format_bytes, format_times, make_table
from edgekit.target import Target, read_version


def _read_layout(option: str, name: str, value: str) -> Layout:
    return look_up(LAYOUTS, value, f"{option} {name}={value}: there is no layout '{value}'")


@as_command
def prepare_command(
    model: options.ModelFile,
    dims: options.Sizes,
    opset: Annotated[int | None, Option("Convert to this opset, up or down.", "N")],
    inputs: Annotated[
        str | None,
        Option(
            "Keep these inputs; a value inside the graph becomes an input, and the nodes before it are removed.", "A,B"
        ),
    ],
    outputs: Annotated[
        str | None, Option("Keep these outputs, or values inside the graph, and what they need.", "A,B")
    ],
    freeze: options.Freeze,
    renames: Annotated[dict[str, str], name_values("Rename an input or an output.", "OLD=NEW", "--rename")],
    layouts: Annotated[
        dict[str, Layout],
        name_values("Layout in which the app passes an input.", "INPUT=nhwc", "--layout", _read_layout),
    ],
    embedded: Annotated[
        str | None,
        Option(
            "Take uint8 images: the normalisation of this preprocessing moves into the model.",
            "[INPUT=]FILE.toml",
            "--embed-preprocess",
        ),
    ],
    external: Annotated[
        bool | None,
        Option(
            "Weights in a file beside the model, or in it. Default: beside from 1 GiB on.",
            words="--external-data/--inline-data",
            default=None,
        ),
    ],
    custom_ops: options.CustomOps,
    dequantize: Annotated[bool, Option("Make a quantized model float, for targets that do not take its form.")],
    fix: Annotated[
        bool,
        Option("Apply the rewrites that check calls automatic (the default).", words="--fix/--no-fix", default=True),
    ],
    target: Annotated[str | None, Option("Also apply the rewrites with which this target takes more nodes.", "NAME")],
    settings: options.Settings,
    out: Annotated[Path, Option("The prepared model (.onnx).", "FILE")],
    progress: Progress,
) -> Answer:
    """Fix the shapes of MODEL and clean its graph, as a provider will see it.

    \b
    Example:
      edgekit prepare model.onnx --dim batch=1 --outputs scores,boxes --out prepared.onnx
      edgekit prepare model.onnx --fix --target nnapi --set api_level=31 --out prepared.onnx
    """
    options.require_suffix(out, ".onnx")
    source = load_model(model, custom_ops=custom_ops)
    image_input, preprocess = "", None
    if embedded is not None:
        name, equals, file = embedded.rpartition("=")
        # A path may contain "=".
        image_input, file = (name, file) if equals and not Path(embedded).exists() else ("", embedded)
        preprocess = load_preprocess(Path(file))
    prepare_options = PrepareOptions(
        dims=dims,
        opset=opset,
        inputs=split_names(inputs),
        outputs=split_names(outputs),
        constants=freeze,
        changes=InterfaceChanges(preprocess=preprocess, image_input=image_input, layouts=layouts, renames=renames),
        dequantize=dequantize,
        fix=fix,
        external=external,
        target=None if target is None else load_target_here(target, settings),
    )
    report = prepare_for(source, out, prepare_options, progress)
    return Answer(report, lambda: _show_prepared(report, out))


def _show_prepared(report: PrepareReport, out: Path) -> None:
    """Prints the prepared model, the rewrites and their gain, and the images that an app passes to it."""
    show_line(f"{out}: {count_of(report.model.node_count, 'node')}, opset {report.model.opsets.get('ai.onnx')}")
    show_remarks((*report.model.inputs, *report.model.outputs) if report.is_refaced else ())
    for fix in report.fixes:
        show_line(f"- {fix.id}: {count_of(len(fix.nodes), 'node')}")
    if report.gain is not None:
        for when, share in (("before", report.gain.before), ("after", report.gain.after)):
            taken = f"{share.taken}/{share.nodes} nodes, {share.taken_macs:.0%} of MACs"
            show_line(
                f"{when}: {report.gain.target}: {share.verdict}; {taken} in {count_of(share.partitions, 'partition')}"
            )
    if report.preprocess is not None:
        left = report.preprocess
        show_line(f"an app gives {left.color} images of {left.size[0]} x {left.size[1]} as uint8, not normalised")


@as_command
def quantize_command(
    model: options.ModelFile,
    data: options.DataSource,
    preprocess: options.PreprocessFile,
    target: options.TargetName,
    settings: options.Settings,
    dims: options.Sizes,
    freeze: options.Freeze,
    samples: options.SampleCount,
    steps: options.Steps,
    precision: Annotated[
        PrecisionChoice | None, Option("Default: auto.", type=click.Choice(INTEGER_PRECISIONS, case_sensitive=False))
    ],
    method: Annotated[
        str,
        Option(
            f"auto, best (a search until nothing is lost), or a range method: {', '.join(RANGE_METHODS)}.",
            "NAME",
            default="auto",
        ),
    ],
    max_drop: Annotated[float | None, options.max_drop("Search for a plan that drops by at most this percentage.")],
    labels: Annotated[Path | None, Option("The label of each sample of DATA.", "FILE")],
    metric: options.Metric,
    recipe: Annotated[Path | None, Option("Options in a .toml file, such as [outputs].", "FILE")],
    state: Annotated[Path | None, Option("Keep the search in FILE: an interrupted one continues from it.", "FILE")],
    cache: options.CacheFolder,
    time_budget: Annotated[
        float | None, options.time_budget("Limit planning to this time; calibrating and writing come on top")
    ],
    plan_only: Annotated[bool, Option("Print the plan as JSON and write no model.")],
    plan: Annotated[Path | None, Option("Apply a plan that --plan-only printed.", "FILE")],
    html: Annotated[Path | None, Option("A page with a chart of every layer.", "FILE")],
    out: Annotated[Path | None, Option("The QDQ model (.onnx).", "FILE")],
    progress: Progress,
) -> Answer:
    """Make a static INT8 model (QDQ) of MODEL for a target. Exit code 1: no plan met --max-drop, the best is written.

    With --labels the drop is measured, by top1 or --metric; without, it is estimated.

    \b
    Example:
      edgekit quantize model.onnx --data samples.npz --target nnapi --out model.int8.onnx
      edgekit quantize model.onnx --data samples.npz --labels masks.npy --metric miou --target qnn --out q.onnx
    """
    if metric is not None and labels is None:
        raise UsageError("--metric needs labels", hint="give --labels FILE")
    limit = None if metric is None else load_metric(metric)
    tables = {"dims": dims, "freeze": freeze, "settings": settings}
    values = {"precision": precision, "samples": samples, "max_drop": max_drop, "metric": limit}
    chosen = options.choose_recipe(recipe, tables, {**values, "targets": (target,), "thresholds": {}}, steps)
    source = options.read_data(data, preprocess, labels=labels)
    # Options that would have no effect are errors.
    if chosen.max_drop is not None:
        options.refuse_unused("--method --plan --plan-only", "--max-drop plans by itself")
    elif state is not None and method != "best":
        raise UsageError("--state keeps what a search tries", hint="add --max-drop PCT or --method best")
    if plan is not None:
        options.refuse_unused("--method --plan-only --time-budget", "--plan is applied as it stands")
    if plan_only:
        options.refuse_unused("--out --html --labels", "--plan-only writes no model and measures none")
    options.require_places((out, html, state), (model, Path(data), labels, plan, preprocess, recipe))
    options.require_suffix(out, ".onnx")
    layers = html is not None
    quantize_options = QuantizeOptions(
        method=method, plan=plan, state=state, cache=cache, layers=layers, time_budget_s=time_budget
    )
    if plan_only:
        planned = plan_for(model, source, chosen, quantize_options, progress)
        return Answer(planned, lambda: show_json(planned))
    if out is None:
        raise UsageError("Missing option '--out'", hint="name the file to write, or give --plan-only")
    report = quantize_for(model, source, out, chosen, quantize_options, progress)
    if html is not None:
        # Imported only if needed: the import takes as long as quantizing a small network.
        pages = importlib.import_module("edgekit.report.html")
        write_file(html, pages.render_page(report).encode())
    return Answer(report, lambda: show_lines(describe_quantization(report)), report.met is not False)


_STYLES: dict[str, tuple[Style, ...]] = {"full": ("full",), "runtime": ("runtime",), "both": ("full", "runtime")}
_MAX_PARTS = 4
# Operators whose changes are not listed.
_UNINFORMATIVE_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", "Constant"})


@as_command
def convert_command(
    model: options.ModelFile,
    target: Annotated[
        str | None,
        Option("Write the forms that this target loads; it sets style, level and CPU. auto: this machine's.", "NAME"),
    ],
    settings: options.Settings,
    dims: options.Sizes,
    freeze: options.Freeze,
    style: Annotated[Literal["both", "full", "runtime"] | None, Option("Default: both.")],
    levels: Annotated[
        tuple[str, ...],
        Option(
            "Default: all. With --onnx, several: the optimized model of each.",
            words="--level",
            type=click.Choice([level.value for level in Level]),
        ),
    ],
    cpu: Annotated[Cpu | None, Option("The CPU whose kernels the file is for. Default: arm.")],
    with_onnx: Annotated[bool, Option("Write the ONNX model too; with --level, the optimized one.", words="--onnx")],
    socs: Annotated[str | None, Option("Qualcomm SoCs, all in one QNN context; for --target qnn.", "43,69", "--soc")],
    archs: Annotated[str | None, Option("Or: Hexagon versions, all in one QNN context.", "73,79", "--htp-arch")],
    embedded: Annotated[bool, Option("Put the QNN context inside the ONNX file.", words="--embed-context")],
    mlpackage: Annotated[bool, Option("Write the .mlpackage that Core ML would load too; for --target coreml.")],
    cache: Annotated[bool, Option("Write the Core ML provider's cache, for an app to ship.")],
    fuse: Annotated[Literal["transformer"] | None, Option("Fuse patterns into ONNX Runtime's own operators.")],
    model_type: Annotated[str | None, Option("The family of the transformer. Default: bert.", "NAME")],
    heads: Annotated[int, Option("Its attention heads. Default: detected.", "N", default=0)],
    hidden_size: Annotated[int, Option("Its hidden size. Default: detected.", "N", default=0)],
    weights: Annotated[WeightForm | None, Option("Make weights smaller; activations stay float.")],
    keep: Annotated[str | None, Option("Nodes whose weights stay in float.", "A,B")],
    block: Annotated[int | None, Option("Weights that share a scale in int8 and int4. Default: 32.", "N")],
    rounding: Annotated[BlockRounding | None, Option("How int4 weights are rounded; gptq needs --data.")],
    accuracy: Annotated[
        int | None, Option("The accuracy_level of MatMulNBits; 4 multiplies in int8.", "0-4", "--accuracy-level")
    ],
    lpbq: Annotated[bool, Option("Write int4 scales in the form that Qualcomm's HTP supports (LPBQ).")],
    qoperator: Annotated[bool, Option("Write QLinear operators in place of Q and DQ nodes.")],
    custom_ops: options.CustomOps,
    data: Annotated[
        str | None,
        Option("Inputs to compare each file with its source on, and for --rounding gptq. Default: random.", "DATA"),
    ],
    preprocess: options.PreprocessFile,
    runtime: Annotated[
        str,
        Option(
            "The oldest ONNX Runtime that will load the files: the opset is lowered for it, or the model refused.",
            "1.22.0",
            "--ort",
            default="",
        ),
    ],
    checked: Annotated[bool, Option("Run .ort files against their source.", words="--check/--no-check", default=True)],
    out: Annotated[Path, Option("Where the files go.", "DIR")],
    progress: Progress,
) -> Answer:
    """Write the files of MODEL that a runtime loads, in canonical bytes.

    \b
    Example:
      edgekit convert model.onnx --target nnapi --out converted
      edgekit convert model.onnx --target coreml --mlpackage --cache --out converted
      edgekit convert model.onnx --onnx --level basic --level extended --out levels
    """
    options.require_suffix(out)
    given = options.list_given()
    options.require_with(
        ("--model-type --heads --hidden-size", "--fuse transformer"),
        ("--keep --block --rounding --lpbq --accuracy-level", "--weights int8"),
        ("--preprocess", "--data FOLDER"),
        ("--soc --htp-arch --embed-context", "--target qnn"),
    )
    oldest = ORT_FORMATS[0].since
    if runtime and (not re.fullmatch(r"\d+(\.\d+){1,2}", runtime) or read_version(runtime) < read_version(oldest)):
        raise UsageError(f"--ort '{runtime}' is no ONNX Runtime that was tried", hint=f"give --ort {oldest}, or newer")
    if (mlpackage or cache) and target != "coreml":
        raise UsageError("--mlpackage and --cache are for Core ML", hint="add --target coreml")
    fixed_options = [option for option in ("--style", "--level", "--cpu") if option in given]
    if target is not None and (fixed_options or with_onnx):
        styles = _STYLES[style] if style else ()
        _refuse_fixed_options(load_target_here(target), fixed_options, styles, with_onnx=with_onnx)
    if len(levels) > 1 and (style or not with_onnx):
        words = "a file in ORT format has one level, and several were given"
        raise UsageError(words, hint="give one --level, or leave --style out and add --onnx")
    weight_options = WeightOnlyOptions(
        form=weights or "int8",
        kept=split_names(keep),
        block=block or 32,
        accuracy_level=accuracy or 0,
        rounding=rounding or "nearest",
        lpbq=lpbq,
    )
    recipe = Recipe(targets=() if target is None else (target,), settings=settings, dims=dims, freeze=freeze)
    convert_options = ConvertOptions(
        # Without a target: in ORT format, in ONNX, or of each level.
        ort=OrtOptions(style="full", cpu=cpu or "arm", level=Level(levels[0] if levels else "all")),
        styles=() if levels and with_onnx and not style else _STYLES[style or "both"],
        with_onnx=with_onnx and not levels,
        levels=tuple(map(Level, levels)) if with_onnx else (),
        context=ContextOptions(socs=split_names(socs), archs=split_names(archs), embedded=embedded),
        coreml=CoreMlOptions(packages=mlpackage, cache=cache),
        fuse=FuseOptions(model_type=model_type or "bert", heads=heads, hidden=hidden_size) if fuse else None,
        weights=weight_options if weights else None,
        qoperator=qoperator,
        custom_ops=custom_ops,
        data=None if data is None else options.read_data(data, preprocess),
        checked=checked,
        runtime=runtime,
    )
    report = convert_for(model, out, recipe, convert_options, progress)
    return Answer(report, lambda: _show_conversion(report))


def _refuse_fixed_options(target: Target, given: Sequence[str], styles: tuple[Style, ...], *, with_onnx: bool) -> None:
    """Checks that no option contradicts the target, which sets style, level and CPU.

    Raises:
        UsageError: one does; only --onnx is allowed, for a target that loads ONNX files.
    """
    forms = ", ".join(target.conversion.forms)
    for style in styles:
        if style in target.conversion.unusable:
            words = f"{target.provider} cannot use a file of {style} style: {target.conversion.unusable[style]}"
            raise UsageError(words, hint=f"'{target.name}' loads {forms}: leave --style out")
    if given:
        words = f"target '{target.name}' sets style, level and CPU: {' and '.join(given)} would have no effect"
        raise UsageError(words, hint=f"leave them out ('{target.name}' loads {forms}), or leave --target out")
    if with_onnx and "onnx" not in target.conversion.forms:
        words = f"target '{target.name}' loads no ONNX file: that of --onnx would not be used"
        raise UsageError(words, hint=f"leave --onnx out ('{target.name}' loads {forms}), or leave --target out")


def _show_conversion(report: ConvertReport) -> None:
    """Prints the files of a conversion, with their sizes and what changed in them, and why these were written."""
    for form, names in report.files.items():
        size = format_bytes(sum(report.size_bytes[name] for name in names))
        show_line(f"{form}: {' + '.join(str(report.out / name) for name in names)}, {size}")
        for fate in report.fates.get(form, ()):
            # Operators that did not change are not listed.
            if fate.op not in _UNINFORMATIVE_OPS and fate.became != {fate.op: fate.count}:
                show_line(f"  {fate.sentence}")
        for node in report.unfused.get(form, ()):
            show_line(f"  {node.sentence}")
        if form in report.equality:
            show_line(f"  {_describe_equality(report.equality[form])}")
        for trait in report.host_traits.get(form, ()):
            show_line(f"  other bytes on another kind of CPU: {trait}")
    if report.fusion is not None:
        fused = ", ".join(f"{count} {op}" for op, count in report.fusion.fused.items())
        nodes = f"{report.fusion.nodes_before} nodes became {report.fusion.nodes_after}"
        show_line(f"fused: {fused}; {nodes}; {_describe_equality(report.fusion.equality)}")
    if report.weights is not None:
        sizes = f"{format_bytes(report.weights.size_before)} -> {format_bytes(report.weights.size_after)}"
        show_line(f"{report.weights.form}: the weights of {count_of(len(report.weights.changed), 'node')}, {sizes}")
    if report.levels:
        _show_levels(report)
    if report.quantized:
        show_line(f"quantized already ({report.quantized}): taken as it is")
    for package in report.coreml.packages if report.coreml is not None else ():
        operations = ", ".join(f"{count} {kind}" for kind, count in package.operations.items()) or "a neural network"
        size = format_bytes(package.size_bytes)
        show_line(f"Core ML: {report.out / package.name}, {size}: {operations}")
    if report.coreml is not None and (cache := report.coreml.cache) is not None:
        where, size = report.out / cache.folder, format_bytes(cache.size_bytes)
        show_line(f"Core ML's cache: {where}, {size}, key {cache.key}")
        releases = ", ".join(map(str, cache.releases))
        show_line(f"  the same partitions on iOS {releases}; what it saves on a phone was not measured")
    if report.compatibility:
        show_line(f"compatibility: {report.compatibility}")
    if report.minimum_ort:
        show_line(f"loads from ONNX Runtime {report.minimum_ort} on")
    show_line(f"why: {report.reason}")


def _show_levels(report: ConvertReport) -> None:
    """Prints the optimized model of each level, compared with the model without optimization."""
    table = make_table("level", "nodes", "fusions and casts that went", "size", "load", "p50", "time of none's")
    for row in report.levels:
        level = "none" if row.level == Level.DISABLED else row.level.value
        fusions: list[str] = []
        for kind in row.kinds:
            # Short patterns are named by their operators, long ones by the result, such as LayerNormalization or Gelu.
            parts, count = "+".join(kind.ops), len(kind.ops)
            pattern = f"{parts} -> {kind.into}" if count <= _MAX_PARTS else f"{kind.into} of {count} nodes"
            fusions.append(f"{kind.count} {pattern}")
        if row.casts_gone:
            fusions.append(f"{abs(row.casts_gone)} Cast {'gone' if row.casts_gone > 0 else 'more'}")
        table.add_row(
            level, str(row.nodes), ", ".join(fusions) or "-", format_bytes(row.size_bytes), *format_times(row)
        )
    print_table(table)
    for row in report.levels:
        if (report.out / row.file).is_file():
            equality = "" if row.equality is None else f": {_describe_equality(row.equality)}"
            show_line(f"{report.out / row.file}{equality}")
            if row.warning:
                show_line(f"- {row.level.value}: {row.warning}")


def _describe_equality(found: Equality) -> str:
    """Returns in words how a file compares with its source."""
    if found.skipped:
        return f"not compared with its source: {found.skipped}"
    samples = count_of(found.samples, "sample")
    if found.bit_equal:
        return f"bit-equal to its source on {samples}"
    return f"error {found.error:.1g} of {found.tolerance:g} allowed against its source on {samples}"
