"""`edgekit convert`."""

from collections.abc import Iterator
from pathlib import Path

import click

from edgekit._ort import Level
from edgekit.cli import convert_options, options
from edgekit.cli.convert_options import FormOptions
from edgekit.cli.main import YES
from edgekit.cli.screen import print_table, show_json, show_line, showing_progress
from edgekit.convert.context import ContextOptions
from edgekit.convert.equality import Equality
from edgekit.convert.levels import LevelModel
from edgekit.devices.packages import CoreMlFiles
from edgekit.jobs.convert import ConvertOptions, ConvertReport, CoreMlOptions, convert_for
from edgekit.prepare.transformer import FuseOptions
from edgekit.quantize.weight_only.convert import WeightOnlyOptions
from edgekit.recipe import Recipe
from edgekit.report.tables import format_bytes, make_table
from edgekit.target import Form

_FEW_PARTS = 4
# Operators whose fate tells nothing by itself.
_PLUMBING = frozenset({"QuantizeLinear", "DequantizeLinear", "Constant"})


@click.command(short_help="Write the files that a runtime loads: ORT format, full or runtime style.")
@options.MODEL
@click.option(
    "--target", metavar="NAME", help="Write what this target loads; it settles style, level and CPU. Or auto."
)
@options.SET
@options.DIM
@convert_options.forms
@convert_options.context
@convert_options.coreml
@convert_options.fuse
@convert_options.weights
@click.option("--qoperator", is_flag=True, help="Write QLinear operators in place of Q and DQ nodes.")
@options.CUSTOM_OPS
@click.option(
    "--data", metavar="DATA", help="Inputs to run each file on, and to learn roundings from. Default: drawn at random."
)
@options.PREPROCESS
@click.option(
    "--ort", "runtime", default="", metavar="1.22.0", help="The oldest ONNX Runtime that will load it; lower or refuse."
)
@click.option("--check/--no-check", "checked", default=True, help="Run each .ort file against its source.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where the files go.")
@options.JSON
@options.verbosity
def command(
    model: Path,
    target: str | None,
    settings: tuple[str, ...],
    dims: tuple[str, ...],
    forms: FormOptions,
    context: ContextOptions,
    coreml: CoreMlOptions,
    fuse: FuseOptions | None,
    weights: WeightOnlyOptions | None,
    qoperator: bool,
    custom_ops: tuple[Path, ...],
    data: str | None,
    preprocess: Path | None,
    runtime: str,
    checked: bool,
    out: Path,
    as_json: bool,
    volume: int,
) -> int:
    """Write the files of MODEL that a runtime loads, in canonical bytes.

    \b
    Example:
      edgekit convert model.onnx --target nnapi --out converted
      edgekit convert model.onnx --target coreml --mlpackage --cache --out converted
      edgekit convert model.onnx --onnx --level basic --level extended --out levels
    """
    recipe = Recipe(
        targets=() if target is None else (target,),
        settings=options.parse_assignments(settings, "--set"),
        dims=options.parse_dims(dims),
    )
    wanted = ConvertOptions(
        ort=forms.ort,
        styles=forms.styles,
        with_onnx=forms.with_onnx,
        levels=forms.levels,
        context=context,
        coreml=coreml,
        fuse=fuse,
        weights=weights,
        qoperator=qoperator,
        custom_ops=custom_ops,
        data=options.parse_data(data, preprocess),
        checked=checked,
        runtime=options.read_release(runtime),
    )
    with showing_progress(volume) as progress:
        report = convert_for(model, out, recipe, wanted, progress)
    show_json(report) if as_json else _show_conversion(report)
    return YES


def _show_conversion(report: ConvertReport) -> None:
    """Prints the files of a conversion, why these, and what is known of each."""
    for form in report.files:
        _show_form(report, form)
    if report.fusion is not None:
        fused = ", ".join(f"{count} {op}" for op, count in report.fusion.fused.items())
        nodes = f"{report.fusion.nodes_before} nodes became {report.fusion.nodes_after}"
        show_line(f"fused: {fused}; {nodes}; {_describe_equality(report.fusion.equality)}")
    if report.weights is not None:
        sizes = f"{format_bytes(report.weights.size_before)} -> {format_bytes(report.weights.size_after)}"
        show_line(f"{report.weights.form}: the weights of {len(report.weights.changed)} nodes, {sizes}")
        for note in report.weights.notes:
            show_line(f"- {note}")
    if report.levels:
        _show_levels(report)
    if report.quantized:
        show_line(f"quantized already ({report.quantized}): taken as it is")
    if report.coreml is not None:
        _show_coreml(report.coreml, report.out)
    if report.compatibility:
        show_line(f"compatibility: {report.compatibility}")
    if report.minimum_ort:
        show_line(f"loads from ONNX Runtime {report.minimum_ort} on")
    show_line(f"why: {report.reason}")


def _show_levels(report: ConvertReport) -> None:
    """Prints what each level makes of the model, beside the model without optimization."""
    table = make_table("level", "nodes", "fusions and casts that went", "size", "load", "p50", "time of none's")
    for row in report.levels:
        interval = "" if row.interval is None else f" (95 %: {row.interval[0]:.2f} to {row.interval[1]:.2f})"
        table.add_row(
            "none" if row.level == Level.DISABLED else row.level.value,
            str(row.nodes),
            ", ".join(_describe_fusions(row)) or "-",
            format_bytes(row.size_bytes),
            "-" if row.load_ms is None else f"{row.load_ms:.1f} ms",
            "-" if row.median_ms is None else f"{row.median_ms:.3g} ms",
            "-" if row.ratio is None else f"{row.ratio:.2f}{interval}",
        )
    print_table(table)
    for row in report.levels:
        if (report.out / row.file).is_file():
            equality = "" if row.equality is None else f": {_describe_equality(row.equality)}"
            show_line(f"{report.out / row.file}{equality}")
            if row.warning:
                show_line(f"- {row.level.value}: {row.warning}")


def _describe_fusions(row: LevelModel) -> Iterator[str]:
    for kind in row.kinds:
        # Short patterns are known by their parts, long ones by what they became: LayerNormalization, Gelu.
        parts = "+".join(kind.ops)
        pattern = f"{parts} -> {kind.into}" if len(kind.ops) <= _FEW_PARTS else f"{kind.into} of {len(kind.ops)} nodes"
        yield f"{kind.count} {pattern}"
    if row.casts_gone:
        yield f"{abs(row.casts_gone)} Cast {'gone' if row.casts_gone > 0 else 'more'}"


def _show_coreml(files: CoreMlFiles, out: Path) -> None:
    for package in files.packages:
        operations = ", ".join(f"{count} {kind}" for kind, count in package.operations.items()) or "a neural network"
        show_line(f"Core ML: {out / package.name}, {format_bytes(package.size_bytes)}: {operations}")
    if files.cache is not None:
        where, size = out / files.cache.folder, format_bytes(files.cache.size_bytes)
        show_line(f"Core ML's cache: {where}, {size}, key {files.cache.key}")
        releases = ", ".join(map(str, files.cache.releases))
        show_line(f"  the same partitions on iOS {releases}; what it saves on a phone was not measured")


def _describe_equality(found: Equality) -> str:
    """Returns in words how a file compares with its source."""
    if found.skipped:
        return f"not compared with its source: {found.skipped}"
    if found.bit_equal:
        return f"bit-equal to its source on {found.samples} samples"
    return f"error {found.error:.1g} of {found.tolerance:g} allowed against its source on {found.samples} samples"


def _show_form(report: ConvertReport, form: Form) -> None:
    names = report.files[form]
    size = format_bytes(sum(report.size_bytes[name] for name in names))
    show_line(f"{form}: {' + '.join(str(report.out / name) for name in names)}, {size}")
    for fate in report.fates.get(form, ()):
        # Only what changed: operators that all became themselves tell nothing.
        if fate.op not in _PLUMBING and fate.became != {fate.op: fate.count}:
            show_line(f"  {fate.sentence}")
    for node in report.unfused.get(form, ()):
        show_line(f"  '{node.name}' ({node.op}) keeps a float {node.activation}")
    if form in report.equality:
        show_line(f"  {_describe_equality(report.equality[form])}")
    for trait in report.host_traits.get(form, ()):
        show_line(f"  other bytes on another kind of CPU: {trait}")
