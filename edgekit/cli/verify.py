"""`edgekit verify`."""

from pathlib import Path

import click

from edgekit.bundle.folder import open_bundle
from edgekit.cli import options
from edgekit.cli.main import NO, YES
from edgekit.cli.terminal import show_json, show_verify, showing_progress
from edgekit.pipeline import verify_on


@click.command(short_help="Run a bundle on devices and compare with the float model.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--on", "names", multiple=True, metavar="DEVICE", help="A device; else those that the target names.")
@options.JSON
@options.verbosity
def command(bundle: Path, names: tuple[str, ...], as_json: bool, volume: int) -> int:
    """Run BUNDLE on devices and compare with the float model; the result goes into its verify.json.

    \b
    Example:
      edgekit verify bundles/model-qnn --on qnn-htp-sim

    Exit code 0: at least one device ran and each that ran passed. 1: not so. 2: the bundle is damaged.
    """
    opened = open_bundle(bundle)
    with showing_progress(volume) as progress:
        report = verify_on(opened, names, progress)
    show_json(report) if as_json else show_verify(report)
    return YES if report.passed else NO
