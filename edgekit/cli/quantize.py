"""`edgekit quantize`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_json, show_line, showing_progress
from edgekit.images import load_preprocess
from edgekit.quantize.ranges import METHODS
from edgekit.recipe import Data, PrecisionChoice, Recipe
from edgekit.steps import quantize_for


@click.command(short_help="Make a static INT8 model for a target.")
@options.MODEL
@options.DATA
@options.PREPROCESS
@options.TARGET
@options.SET
@options.DIM
@options.SAMPLES
@click.option("--precision", type=click.Choice(["auto", "int8", "int16"]), default="auto", help="Default: auto.")
@click.option("--method", default="auto", metavar="NAME", help=f"{', '.join(METHODS)}.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The QDQ model.")
@options.JSON
@options.verbosity
def command(
    model: Path,
    data: str,
    preprocess: Path | None,
    target: str,
    settings: tuple[str, ...],
    dims: tuple[str, ...],
    samples: int | None,
    precision: PrecisionChoice,
    method: str,
    out: Path,
    as_json: bool,
    volume: int,
) -> int:
    """Make a static INT8 model (QDQ) of MODEL for a target.

    \b
    Example:
      edgekit quantize model.onnx --data samples.npz --target nnapi --out model.int8.onnx
    """
    recipe = Recipe(
        targets=(target,),
        settings=options.parse_assignments(settings, "--set"),
        dims=options.parse_dims(dims),
        precision=precision,
        samples=samples,
    )
    source = Data(source=data, preprocess=load_preprocess(preprocess) if preprocess else None)
    with showing_progress(volume) as progress:
        report = quantize_for(model, source, out, recipe, method=method, progress=progress)
    if as_json:
        show_json(report)
    else:
        show_line(f"{out}: {report.quantized_nodes} nodes are {report.precision}, {len(report.float_nodes)} stay float")
        for warning in report.data_warnings:
            show_line(f"warning: {warning}")
        for tried in report.steps:
            show_line(f"- {tried.method}, {tried.rounding}: {tried.sqnr_db:.1f} dB on held-out samples")
    return YES
