"""`edgekit targets`."""

from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Argument, as_command
from edgekit.cli.main import YES
from edgekit.cli.screen import print_table, show_json, show_line
from edgekit.report import text
from edgekit.target import load_target, target_names


@as_command
def command(
    name: Annotated[str | None, Argument()],
    settings: options.Settings,
    as_json: options.Json,
) -> int:
    """List the targets, or show the one called NAME with its parameters.

    \b
    Example:
      edgekit targets qnn
    """
    if name is None:
        targets = [load_target(known) for known in target_names()]
        show_json({"targets": targets}) if as_json else print_table(text.table_targets(targets))
        return YES
    target = load_target(name, settings)
    if as_json:
        show_json(target)
        return YES
    show_line(f"{target.name}: {target.title}\n{target.precision}: {target.precision_reason}")
    print_table(text.table_parameters(target))
    return YES
