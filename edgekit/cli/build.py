"""`edgekit build`."""

from functools import partial
from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.screen import show_json, showing_progress
from edgekit.cli.terminal import show_build
from edgekit.jobs.build import build
from edgekit.recipe import PRECISIONS, PrecisionChoice


@click.command(short_help="Make a verified bundle of a model for each target.")
@options.MODEL
@options.DATA
@options.PREPROCESS
@click.option("--eval", "evaluation", metavar="DATA", help="Samples to verify with; else some of --data are kept back.")
@click.option("--labels", type=click.Path(path_type=Path), metavar="FILE", help="The class of each --eval sample.")
@click.option(
    "--golden", type=click.Path(path_type=Path), metavar="DIR", help="An earlier build: take its float reference."
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME",
    help="A target, its folder, all (the default), pc, or auto: what this machine runs.",
)
@options.SET
@options.DIM_OR_BUCKETS
@options.SHAPE
@options.FREEZE
@options.PAD
@click.option("--precision", type=click.Choice(PRECISIONS, case_sensitive=False), help="Default: auto.")
@options.samples_and_steps
@click.option("--fix/--no-fix", default=None, help="Rewrite the graph where a target then takes more (the default).")
@options.max_drop("Answers that may change, in percent.")
@click.option("--recipe", type=click.Path(path_type=Path), metavar="FILE", help="These options in a .toml file.")
@options.CACHE
@options.time_budget("Plan and verify no longer; what must be done (calibrate, convert, start devices) comes on top")
@click.option("--verify/--no-verify", default=True, help="Run each bundle on what imitates its device here.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where the bundles go.")
@options.ACCEPT_UNPROVEN
@options.JSON
@options.verbosity
def command(
    model: Path,
    data: str,
    preprocess: Path | None,
    evaluation: str | None,
    labels: Path | None,
    golden: Path | None,
    targets: tuple[str, ...],
    settings: dict[str, str],
    dims: tuple[str, ...],
    shapes: tuple[str, ...],
    freeze: dict[str, float],
    pad: dict[str, float],
    precision: PrecisionChoice | None,
    samples: int | None,
    steps: int | None,
    fix: bool | None,
    max_drop: float | None,
    recipe: Path | None,
    cache: Path | None,
    time_budget: float | None,
    verify: bool,
    out: Path,
    accept_unproven: bool,
    as_json: bool,
    volume: int,
) -> int:
    """Make a verified bundle of MODEL for each target.

    \b
    Example:
      edgekit build model.onnx --data samples.npz --target nnapi --target qnn --dim batch=1 --out bundles

    Exit code 0: every bundle passed. 1: one failed. 2: an input is wrong, nothing was written. 3: one is not proven.
    """
    tables = {
        **options.parse_buckets(dims, shapes, model),
        "pad": pad,
        "freeze": freeze,
        "settings": settings,
    }
    given = {"targets": targets, "precision": precision, "samples": samples, "max_drop": max_drop, "fix": fix}
    chosen = options.choose_recipe(recipe, tables, given, steps)
    samples_from = options.read_data(data, preprocess, evaluation=evaluation, labels=labels, golden=golden)
    run = partial(build, model, samples_from, out, chosen, verify=verify, cache=cache, time_budget_s=time_budget)
    with showing_progress(volume) as progress:
        report = run(progress=progress)
    show_json(report) if as_json else show_build(report)
    return options.exit_code(report.verdict, accept_unproven=accept_unproven)
