"""Machine-readable descriptions of the command line: schema for editors and agents, completion for shells."""

from typing import Annotated, Any

import click
from click.shell_completion import get_completion_class

from edgekit.app.config import describe_schema
from edgekit.cli.declare import Answer, Argument, as_command
from edgekit.cli.defaults import SECTION, describe_options
from edgekit.cli.main import COMMANDS, group
from edgekit.cli.screen import show_json, show_line


@as_command
def schema_command() -> Answer:
    """Print the JSON Schema of edgekit.toml for editors; with --json also every command and option, for agents.

    \b
    Example:
      edgekit schema > edgekit.schema.json
      edgekit schema --json
    """
    schema = describe_file()
    parameters = {name: list(map(_describe, command.params)) for name, command in _list_commands().items()}
    commands = {name: {"help": COMMANDS[name], "parameters": each} for name, each in parameters.items()}
    value = {"schema_version": 1, "edgekit.toml": schema, "commands": commands}
    return Answer(value, lambda: show_json(schema))


def describe_file() -> dict[str, Any]:
    """Returns the JSON Schema of `edgekit.toml`, with every option of every command."""
    schema = describe_schema()
    tables = {name: describe_options(command) for name, command in _list_commands().items()}
    schema["$defs"]["AppTable"]["properties"][SECTION] |= {"properties": tables, "additionalProperties": False}
    return schema


def _list_commands() -> dict[str, click.Command]:
    context = click.Context(group, info_name="edgekit")
    found = {name: group.get_command(context, name) for name in sorted(COMMANDS)}
    return {name: command for name, command in found.items() if command is not None}


def _describe(parameter: click.Parameter) -> dict[str, Any]:
    words = [*parameter.opts, *parameter.secondary_opts]
    return {
        "name": parameter.name,
        "words": words,
        "help": getattr(parameter, "help", None),
        "required": parameter.required,
        "many": parameter.multiple or parameter.nargs == -1,
        "choices": list(parameter.type.choices) if isinstance(parameter.type, click.Choice) else None,
    }


SHELLS = ("bash", "fish", "zsh")


@as_command
def completion_command(shell: Annotated[str, Argument(type=click.Choice(SHELLS))]) -> None:
    """Print the script with which SHELL completes edgekit's commands, options and values.

    \b
    Example:
      edgekit completion bash > ~/.local/share/bash-completion/completions/edgekit
      edgekit completion zsh > ~/.zfunc/_edgekit
      edgekit completion fish > ~/.config/fish/completions/edgekit.fish
    """
    if (made := get_completion_class(shell)) is not None:
        show_line(made(group, {}, "edgekit", "_EDGEKIT_COMPLETE").source())
