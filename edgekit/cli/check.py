"""`edgekit check`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import NO, YES
from edgekit.cli.terminal import show_checks, show_json, showing_progress
from edgekit.recipe import Recipe
from edgekit.steps import check_targets


@click.command(short_help="Say node by node what each target would take, why not, and what to do.")
@options.MODEL
@options.TARGETS
@options.SET
@options.DIM
@options.JSON
@options.verbosity
def command(
    model: Path, targets: tuple[str, ...], settings: tuple[str, ...], dims: tuple[str, ...], as_json: bool, volume: int
) -> int:
    """Say node by node what each target would take of MODEL, why not, and what to do.

    \b
    Example:
      edgekit check model.onnx --target nnapi --set api_level=31 --dim batch=1

    Exit code 0: no target's verdict is "no". 1: one is.
    """
    recipe = Recipe(
        targets=targets, settings=options.parse_assignments(settings, "--set"), dims=options.parse_dims(dims)
    )
    with showing_progress(volume) as progress:
        report = check_targets(model, recipe, progress)
    show_json(report) if as_json else show_checks(list(report.targets.values()))
    return NO if any(check.verdict == "no" for check in report.targets.values()) else YES
