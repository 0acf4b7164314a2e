"""`edgekit convert`."""

from pathlib import Path
from typing import Literal

import click

from edgekit._ort import Level
from edgekit.cli import convert_options, options
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_conversion, show_json, showing_progress
from edgekit.convert.context import ContextOptions
from edgekit.convert.ort_form import Cpu, OrtOptions, Style
from edgekit.errors import UsageError
from edgekit.jobs.convert import ConvertOptions, convert_for
from edgekit.prepare.transformer import FuseOptions
from edgekit.quantize.weight_only.convert import WeightOnlyOptions
from edgekit.recipe import Recipe
from edgekit.target import Target, load_target

_STYLES: dict[str, tuple[Style, ...]] = {"full": ("full",), "runtime": ("runtime",), "both": ("full", "runtime")}


@click.command(short_help="Write the files that a runtime loads: ORT format, full or runtime style.")
@options.MODEL
@click.option("--target", metavar="NAME", help="Write what this target loads; it settles style, level and CPU.")
@options.SET
@options.DIM
@click.option("--style", type=click.Choice(sorted(_STYLES)), help="Default: both.")
@click.option("--level", type=click.Choice([level.value for level in Level]), help="Default: all.")
@click.option("--cpu", type=click.Choice(["arm", "x64"]), help="The CPU whose kernels the file is for. Default: arm.")
@click.option("--onnx", "with_onnx", is_flag=True, help="Write the ONNX model too.")
@convert_options.context
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
    style: Literal["full", "runtime", "both"] | None,
    level: str | None,
    cpu: Cpu | None,
    with_onnx: bool,
    context: ContextOptions,
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
    """
    if target is not None and (style or level or cpu or with_onnx):
        raise _explain_conflict(load_target(target), _STYLES[style] if style else ())
    recipe = Recipe(
        targets=() if target is None else (target,),
        settings=options.parse_assignments(settings, "--set"),
        dims=options.parse_dims(dims),
    )
    wanted = ConvertOptions(
        ort=OrtOptions(style="full", cpu=cpu or "arm", level=Level(level or "all")),
        styles=_STYLES[style or "both"],
        with_onnx=with_onnx,
        context=context,
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


def _explain_conflict(target: Target, styles: tuple[Style, ...]) -> UsageError:
    for style in styles:
        if style in target.conversion.unusable:
            return UsageError(
                f"{target.provider} cannot use a file of {style} style: {target.conversion.unusable[style]}",
                hint=f"'{target.name}' loads {', '.join(target.conversion.forms)}: leave --style out",
            )
    return UsageError(f"target '{target.name}' settles style, level and CPU", hint="give either --target or the others")
