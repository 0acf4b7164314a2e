"""`edgekit targets`."""

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_json, show_target, show_targets
from edgekit.target import load_target, target_names


@click.command(short_help="List the targets, or show one.")
@click.argument("name", required=False)
@options.SET
@options.JSON
def command(name: str | None, settings: tuple[str, ...], as_json: bool) -> int:
    """List the targets, or show the one called NAME with its parameters.

    \b
    Example:
      edgekit targets qnn
    """
    if name is None:
        targets = [load_target(known) for known in target_names()]
        show_json({"targets": targets}) if as_json else show_targets(targets)
        return YES
    target = load_target(name, options.parse_assignments(settings, "--set"))
    show_json(target) if as_json else show_target(target)
    return YES
