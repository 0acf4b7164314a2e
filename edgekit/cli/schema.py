"""The options of commands as data: defaults in an `edgekit.toml`, the JSON Schema of it, and completion for shells.

`[commands.NAME]` of an `edgekit.toml` gives the options of a command their defaults.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import click
from click.shell_completion import get_completion_class

from edgekit.app.config import KeyPath, Source, describe_schema
from edgekit.cli.declare import Answer, Argument, as_command
from edgekit.cli.main import COMMANDS, group
from edgekit.cli.screen import show_json, show_line
from edgekit.errors import suggest_name
from edgekit.serialize import read_toml

SECTION = "commands"
_SCALARS = (bool, int, float, str)


def read_defaults(path: Path) -> dict[str, Any]:
    """Returns the tables `[commands.NAME]` of a file, by command.

    Raises:
        UsageError: it cannot be read or is malformed.
    """
    hint = "it gives options their defaults"
    found = read_toml(path, dict[str, Any], hint=hint, keys="the message names the place").get(SECTION, {})
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {SECTION: found}


def map_defaults(path: Path, name: str, table: object, command: click.Command) -> dict[str, Any]:
    """Checks a table `[commands.NAME]`, and returns it as click's `default_map`: values by the names of parameters.

    Raises:
        UsageError: there is no such option, or it does not take such a value; with line and column.
    """
    source = Source(path, path.read_text())
    if not isinstance(table, dict):
        raise source.refuse((SECTION, name), "it is no table", hint=f"for example [{SECTION}.{name}]")
    options_by_key, found = _name_options(command), dict[str, Any]()
    for key, value in cast("dict[str, object]", table).items():
        key_path = (SECTION, name, key)
        if key not in options_by_key:
            raise source.refuse(key_path, f"{name} has no such option", hint=suggest_name(key, options_by_key))
        found |= _read(options_by_key[key], value, key_path, source)
    return found


def check_defaults(path: Path) -> None:
    """Checks every table `[commands.NAME]` of a file.

    Raises:
        UsageError: there is no such command or option, or it does not take such a value; with line and column.
    """
    context = click.Context(group, info_name="edgekit")
    for name, table in read_defaults(path).items():
        if (command := group.get_command(context, name)) is None:
            hint = suggest_name(name, COMMANDS)
            raise Source(path, path.read_text()).refuse((SECTION, name), "there is no such command", hint=hint)
        map_defaults(path, name, table, command)


def _name_options(command: click.Command) -> dict[str, click.Option]:
    """Returns each option by its key in the file: its long word with `_`."""
    return {_key(option): option for option in command.params if isinstance(option, click.Option)}


def _key(option: click.Option) -> str:
    return max(option.opts, key=len).removeprefix("--").replace("-", "_")


def _read(option: click.Option, value: object, key_path: KeyPath, source: Source) -> dict[str, Any]:
    name = option.name or ""
    if option.is_flag:
        if not isinstance(value, bool):
            raise source.refuse(key_path, "it is on or off", hint="true or false")
        # Of options that are words for one value (-q, -v), the one that is true counts.
        return {name: value} if option.is_bool_flag else {name: option.flag_value} if value else {}
    if option.multiple and isinstance(value, Mapping):
        pairs = {key: _join(each) for key, each in cast("Mapping[str, object]", value).items()}
        words = [None if word is None else f"{key}={word}" for key, word in pairs.items()]
    else:
        is_list = option.multiple and isinstance(value, list)
        words = [_join(each) for each in (cast("list[object]", value) if is_list else [value])]
    if None in words:
        many = "a text, a list of texts, or a table of names" if option.multiple else "a text or a number"
        raise source.refuse(key_path, f"it takes {many}", hint=f"for example {_example(option)}")
    for word in words:
        try:
            option.type.convert(word, option, None)
        except click.BadParameter as error:
            raise source.refuse(key_path, error.message, hint=f"for example {_example(option)}") from error
    return {name: words if option.multiple else words[0]}


def _join(value: object) -> str | None:
    """Returns a value as on the command line, a list with commas; None if it is no scalar or list of scalars."""
    if isinstance(value, list):
        items = [_join(item) for item in cast("list[object]", value)]
        return None if None in items else ",".join(item for item in items if item is not None)
    return str(value) if isinstance(value, _SCALARS) and not isinstance(value, bool) else None


def _example(option: click.Option) -> str:
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    shown = f'"{next(iter(choices), option.metavar or "...")}"'
    numbers = (click.types.IntParamType, click.types.FloatParamType)
    return f"{_key(option)} = {1 if isinstance(option.type, numbers) else shown}"


def _describe(option: click.Option) -> dict[str, Any]:
    if option.is_flag:
        kind: dict[str, Any] = {"type": "boolean"}
    elif isinstance(option.type, click.Choice):
        kind = {"enum": list(option.type.choices)}
    elif isinstance(option.type, click.types.IntParamType):
        kind = {"type": "integer"}
    elif isinstance(option.type, click.types.FloatParamType):
        kind = {"type": "number"}
    else:
        kind = {"type": ["string", "number", "array"]}
    if option.multiple:
        scalar = {"type": ["string", "number", "array"]}
        kind = {"anyOf": [kind, {"type": "array", "items": kind}, {"type": "object", "additionalProperties": scalar}]}
    return {**kind, "description": option.help or ""}


@as_command
def schema_command() -> Answer:
    """Print the JSON Schema of edgekit.toml for editors; with --json also every command and option, for agents.

    \b
    Example:
      edgekit schema > edgekit.schema.json
      edgekit schema --json
    """
    schema, commands = describe_file(), dict[str, Any]()
    for name, command in _list_commands().items():
        parameters = [
            {
                "name": each.name,
                "words": [*each.opts, *each.secondary_opts],
                "help": getattr(each, "help", None),
                "required": each.required,
                "many": each.multiple or each.nargs == -1,
                "choices": list(each.type.choices) if isinstance(each.type, click.Choice) else None,
            }
            for each in command.params
        ]
        commands[name] = {"help": COMMANDS[name], "parameters": parameters}
    value = {"schema_version": 1, "edgekit.toml": schema, "commands": commands}
    return Answer(value, lambda: show_json(schema))


def describe_file() -> dict[str, Any]:
    """Returns the JSON Schema of `edgekit.toml`, with every option of every command."""
    schema, tables = describe_schema(), dict[str, Any]()
    for name, command in _list_commands().items():
        properties = {key: _describe(option) for key, option in _name_options(command).items()}
        tables[name] = {"type": "object", "additionalProperties": False, "properties": properties}
    schema["$defs"]["AppTable"]["properties"][SECTION] |= {"properties": tables, "additionalProperties": False}
    return schema


def _list_commands() -> dict[str, click.Command]:
    context = click.Context(group, info_name="edgekit")
    found = {name: group.get_command(context, name) for name in sorted(COMMANDS)}
    return {name: command for name, command in found.items() if command is not None}


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
