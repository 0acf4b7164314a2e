"""`edgekit completion`."""

from typing import Annotated

import click
from click.shell_completion import get_completion_class

from edgekit.cli.declare import Argument, as_command
from edgekit.cli.main import YES, group
from edgekit.cli.screen import show_line

SHELLS = ("bash", "fish", "zsh")


@as_command
def command(
    shell: Annotated[str, Argument(type=click.Choice(SHELLS))],
) -> int:
    """Print what SHELL needs to complete edgekit's commands, options and their values.

    \b
    Example:
      edgekit completion bash > ~/.local/share/bash-completion/completions/edgekit
      edgekit completion zsh > ~/.zfunc/_edgekit
      edgekit completion fish > ~/.config/fish/completions/edgekit.fish
    """
    made = get_completion_class(shell)
    # The choice above names shells that click knows.
    if made is not None:
        show_line(made(group, {}, "edgekit", "_EDGEKIT_COMPLETE").source())
    return YES
