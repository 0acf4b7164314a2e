"""`edgekit convert`."""

from pathlib import Path
from typing import Literal

import click

from edgekit._ort import Level
from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_json, show_line, showing_progress
from edgekit.convert.ort_form import Cpu, OrtOptions, Style
from edgekit.errors import UsageError
from edgekit.recipe import Recipe
from edgekit.steps import convert_for

_STYLES: dict[str, tuple[Style, ...]] = {"full": ("full",), "runtime": ("runtime",), "both": ("full", "runtime")}


@click.command(short_help="Write the files that a runtime loads: ORT format, full or runtime style.")
@options.MODEL
@click.option("--target", metavar="NAME", help="Write what this target loads; it settles style, level and CPU.")
@options.SET
@options.DIM
@click.option("--style", type=click.Choice(sorted(_STYLES)), help="Default: both.")
@click.option("--level", type=click.Choice([level.value for level in Level]), help="Default: all.")
@click.option("--cpu", type=click.Choice(["arm", "x64"]), help="The CPU whose kernels the file is for. Default: arm.")
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
    out: Path,
    as_json: bool,
    volume: int,
) -> int:
    """Write the files of MODEL that a runtime loads, in canonical bytes.

    \b
    Example:
      edgekit convert model.onnx --target nnapi --out converted
    """
    if target is not None and (style or level or cpu):
        raise UsageError(f"target '{target}' settles style, level and CPU", hint="give either --target or the others")
    recipe = Recipe(
        targets=() if target is None else (target,),
        settings=options.parse_assignments(settings, "--set"),
        dims=options.parse_dims(dims),
    )
    wanted = OrtOptions(style="full", cpu=cpu or "arm", level=Level(level or "all"))
    with showing_progress(volume):
        report = convert_for(model, out, recipe, wanted, _STYLES[style or "both"])
    if as_json:
        show_json(report)
    else:
        for form, names in report.files.items():
            show_line(f"{form}: {' + '.join(str(out / name) for name in names)}")
    return YES
