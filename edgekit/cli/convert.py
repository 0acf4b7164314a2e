"""`edgekit convert`."""

from pathlib import Path

import click

from edgekit.cli import convert_options, options
from edgekit.cli.convert_options import FormOptions
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_conversion, show_json, showing_progress
from edgekit.convert.context import ContextOptions
from edgekit.jobs.convert import ConvertOptions, CoreMlOptions, convert_for
from edgekit.prepare.transformer import FuseOptions
from edgekit.quantize.weight_only.convert import WeightOnlyOptions
from edgekit.recipe import Recipe


@click.command(short_help="Write the files that a runtime loads: ORT format, full or runtime style.")
@options.MODEL
@click.option("--target", metavar="NAME", help="Write what this target loads; it settles style, level and CPU.")
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
        context=context,
        coreml=coreml,
        fuse=fuse,
        weights=weights,
        qoperator=qoperator,
        custom_ops=custom_ops,
        data=options.parse_data(data, preprocess),
        checked=checked,
    )
    with showing_progress(volume) as progress:
        report = convert_for(model, out, recipe, wanted, progress)
    show_json(report) if as_json else show_conversion(report)
    return YES
