"""Renders the reference pages of the documentation from the code: commands, files, reports and the Python interface.

`tools/docs_hook.py` adds them to the site when it is built, so that none of them can be out of date.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import click
import msgspec
from docs_types import describe_default, describe_type, find_structs, list_properties, type_hints

import edgekit
from edgekit.app.config import AppTable
from edgekit.bench.bench import BenchReport
from edgekit.bundle.group import GroupManifest
from edgekit.bundle.manifest import Manifest
from edgekit.bundle.sign import Statement
from edgekit.check.report import CheckReport
from edgekit.cli.main import group
from edgekit.data.images import Preprocess
from edgekit.devices.android.network import Driver
from edgekit.devices.find import ListedDevice
from edgekit.inspect.diff import Delta
from edgekit.jobs.check import PrepareReport
from edgekit.jobs.convert import ConvertReport
from edgekit.jobs.group import GroupFile
from edgekit.profile.report import ProfileReport
from edgekit.quantize.plan import QuantPlan
from edgekit.recipe import Recipe
from edgekit.report.summary import BuildReport, QuantizeReport
from edgekit.report.tables import GroupBuild
from edgekit.serialize import clean_schema
from edgekit.target import Target, TaskLimit
from edgekit.tune.tune import TuneReport
from edgekit.verify.on_devices import GroupReport
from edgekit.verify.report import VerifyReport
from edgekit.verify.two_models import ModelComparison

WRITTEN: Mapping[str, tuple[type, str]] = {
    "edgekit.toml": (AppTable, "`edgekit run FILE`: an app. See [One file for an app](../how-to/app.md)."),
    "recipe.toml": (
        Recipe,
        "`build --recipe FILE`, `quantize --recipe FILE`: the options of a build, to keep in the repository.",
    ),
    "group.toml": (GroupFile, "`edgekit group build FILE`: see [several models](../how-to/groups.md)."),
    "preprocess.toml": (Preprocess, "`--preprocess FILE`: how the model wants images. An app must do the same."),
    "metric.toml": (TaskLimit, "`--metric FILE.toml`, and `[metric]` of a recipe."),
    "devices.toml": (ListedDevice, "`--on-file FILE`: one `[[device]]` each, with these keys."),
    "driver.toml": (Driver, "`--set driver=FILE` of `verify` and `bench`: an NNAPI driver, for the device `android`."),
    "target.toml": (Target, "A target of your own: `--target FOLDER`. See [Add a target](../how-to/new-target.md)."),
    "plan.json": (QuantPlan, "`edgekit quantize --plan-only` prints it; edited, it comes back with `--plan FILE`."),
}
"""Files that a user writes or edits, with their content and the option that takes each."""

SCHEMAS = (
    "edgekit.toml", "recipe.toml", "group.toml", "preprocess.toml", "metric.toml", "devices.toml", "driver.toml",
    "plan.json",
)  # fmt: skip
"""Those for which there is a JSON Schema; a target.toml has keys that are set while it is read."""

REPORTS: Mapping[str, tuple[type, str]] = {
    "manifest.json": (Manifest, "In every bundle. `manifest.schema.json` in the package is its JSON Schema."),
    "signature.json": (
        Statement,
        "What `edgekit sign` signs, an in-toto statement; in the file it is the payload of a DSSE envelope, in base64.",
    ),
    "group.json": (GroupManifest, "In the folder of a group, beside the manifests of its members."),
    "edgekit build": (BuildReport, "Also `report.json` beside the bundles."),
    "edgekit group build": (GroupBuild, "Also `report.json` beside the folders."),
    "edgekit group verify": (GroupReport, "Also `verify.json` in the folder of a group."),
    "edgekit prepare": (PrepareReport, ""),
    "edgekit check": (CheckReport, "One of these a target, in `targets`; also `check.json` of a bundle."),
    "edgekit quantize": (QuantizeReport, ""),
    "edgekit convert": (ConvertReport, ""),
    "edgekit verify": (VerifyReport, "Also `verify.json` of a bundle."),
    "edgekit compare": (ModelComparison, ""),
    "edgekit bench": (BenchReport, ""),
    "edgekit profile": (ProfileReport, ""),
    "edgekit tune": (TuneReport, ""),
    "edgekit diff": (Delta, ""),
}
"""Values that edgekit prints with `--json` or writes, and the files in which they are."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_HEAD = "<!-- made by tools/docs_reference.py -->\n"
_COMMANDS = """# Commands

Every command has `--help`. Its exit code is its verdict:

| code | meaning |
|---|---|
| 0 | yes, or done |
| 1 | the answer is no: a bundle failed, a target takes too little, two files differ |
| 2 | an option, a file or a value is wrong; one line names it and says what to do, and nothing was written |
| 3 | not proven: nothing speaks against it, but what was asked for could not be shown; `--accept-unproven` makes it 0 |
| 130 | interrupted; nothing half-written is left |

`--json` prints one JSON object on stdout and nothing else there; progress goes to stderr. `-q` silences it.
What the objects hold: [Files that edgekit writes](reports.md).
"""
_FILES = """# Files that you write

All are read strictly: an unknown or missing key is an error that names it. Keys without a default must be given.
Most have a JSON Schema, by which an editor can complete and check it; `#:schema PATH` in its first line tells Taplo.
"""
_REPORTS = """# Files that edgekit writes

These keys are a contract: new ones are added, none are renamed. Keys marked "computed" follow from the others.
A number that JSON cannot hold (NaN, infinity) is `null`.
"""
_PYTHON = """# Python

`import edgekit as ek` gives these names and no others. Each stage is one function from one frozen value to the next;
`ek.to_json` prints any of them. Every error is an `ek.EdgekitError` with a `message` and a `hint`.
"""


def render_reference() -> dict[str, str]:
    """Returns the text of each generated page by its path in `docs/`."""
    return {
        "reference/commands.md": _HEAD + _COMMANDS + "\n".join(_render_commands(group)),
        "reference/files.md": _HEAD + _FILES + "\n".join(_render_structs(WRITTEN)),
        "reference/reports.md": _HEAD + _REPORTS + "\n".join(_render_structs(REPORTS, computed=True)),
        "reference/python.md": _HEAD + _PYTHON + "\n".join(_render_python()),
        **{
            f"reference/{title}.schema.json": render_schema(title, kind)
            for title, (kind, _) in WRITTEN.items()
            if title in SCHEMAS
        },
    }


def render_schema(title: str, kind: Any) -> str:
    """Returns the JSON Schema of a file that a user writes, with which editors check TOML and JSON."""
    whole = dict[Literal["device"], tuple[kind, ...]] if title == "devices.toml" else kind
    schema = msgspec.json.schema(whole)
    text = msgspec.json.encode({"$schema": _DIALECT, "title": title, **clean_schema(schema)})
    return msgspec.json.format(text, indent=2).decode() + "\n"


def list_commands(root: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Yields each command with its full name, groups before their commands."""
    context = click.Context(root)
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        if command is None:
            continue
        yield f"edgekit {name}", command
        if isinstance(command, click.Group):
            yield from ((f"edgekit {name} {sub}", inner) for sub, inner in command.commands.items())


def _render_commands(root: click.Group) -> Iterator[str]:
    for name, command in list_commands(root):
        yield f"\n## {name}\n"
        yield _render_help(command.help or "")
        if isinstance(command, click.Group):
            continue
        context = click.Context(command, info_name=name)
        yield "\n```text\n" + " ".join([name, *command.collect_usage_pieces(context)]) + "\n```\n"
        records = [found for one in command.params if (found := one.get_help_record(context))]
        yield render_table(
            ("option", "what it does"), [(f"`{given}`", _escape(text)) for given, text in records if text]
        )


def _render_help(text: str) -> str:
    """Returns a help text of click as Markdown; its examples become code."""
    parts: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            lines = [line.strip() for line in paragraph.splitlines()[2:]]
            parts.append("```sh\n" + "\n".join(lines) + "\n```")
        else:
            parts.append(_escape(" ".join(paragraph.split())))
    return "\n\n".join(parts)


def _render_structs(roots: Mapping[str, tuple[type, str]], *, computed: bool = False) -> Iterator[str]:
    found = find_structs([kind for kind, _ in roots.values()], computed=computed)
    known = {kind.__name__: kind for kind in found}
    for title, (kind, about) in roots.items():
        del known[kind.__name__]
        schema = f" ([JSON Schema]({title}.schema.json))" if title in SCHEMAS else ""
        yield f"\n## {title} {{: #{kind.__name__.lower()} }}\n\n{about}{schema}\n"
        yield _render_struct(kind, computed=computed)
    yield "\n## Parts of them\n"
    for name, kind in sorted(known.items()):
        yield f"\n### {name}\n"
        yield _render_struct(kind, computed=computed)


def _render_struct(kind: type, *, computed: bool, links: bool = True) -> str:
    hints = type_hints(kind)
    rows = [
        (f"`{field.encode_name}`", describe_type(hints[field.name], links=links), describe_default(field))
        for field in msgspec.structs.fields(kind)
    ]
    if computed:
        rows += [
            (f"`{name}`", describe_type(hint, links=links), "computed") for name, hint in list_properties(kind).items()
        ]
    # Keys that several structs share are explained by the base that declares them.
    bases = (base for base in kind.__mro__[1:] if getattr(base, "__struct_fields__", ()))
    text = "\n\n".join(map(_render_doc, (kind, *bases)))
    return f"{text}\n\n{render_table(('key', 'value', 'default'), rows)}"


def _render_python() -> Iterator[str]:
    names = sorted(dir(edgekit), key=str.lower)
    values = [(name, getattr(edgekit, name)) for name in names]
    yield "\n## Functions\n"
    for name, value in values:
        if inspect.isfunction(value):
            yield f"\n### {name}\n\n```python\n{_render_signature(name, value)}\n```\n\n{_render_doc(value)}\n"
    yield "\n## Values\n"
    for name, value in values:
        if inspect.isfunction(value):
            continue
        yield f"\n### {name}\n"
        is_struct = isinstance(value, type) and issubclass(value, msgspec.Struct)
        yield _render_struct(value, computed=False, links=False) if is_struct else _render_doc(value)
        yield "\n".join(_render_methods(value))


def _render_methods(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        if not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member)):
            function = member.fget if isinstance(member, property) else member
            first = (inspect.getdoc(function) or "").split("\n")[0]
            called = f"`.{name}`" if isinstance(member, property) else f"`.{_render_signature(name, function)}`"
            yield f"\n- {called}: {_escape(first)}"


def _render_signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    kept = [one for key, one in signature.parameters.items() if key != "self"]
    text = str(signature.replace(parameters=kept))
    text = re.sub(r"<function (\S+) at 0x\w+>", r"\1", text).replace("<lambda>", "...")
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", text)
    return f"{name}{text}" if len(text) < 90 else f"{name}{_wrap(text)}"


def _wrap(signature: str) -> str:
    inner, _, result = signature[1:].rpartition(") -> ")
    parts = re.split(r", (?=(?:\w+:|\*,|\*\w))", inner)
    return "(\n" + "".join(f"    {part},\n" for part in parts).replace("*,,", "*,") + f") -> {result}"


def _render_doc(value: object) -> str:
    """Returns a Google docstring as Markdown: its sections become lists."""
    text = inspect.getdoc(value) or ""
    lines = [re.sub(r"^(Args|Returns|Raises|Attributes|Source):$", r"**\1**\n", line) for line in text.splitlines()]
    return _escape("\n".join(re.sub(r"^    (\w[\w.]*): ", r"- `\1`: ", line) for line in lines), cell=False)


def render_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, nothing without rows."""
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _escape(text: str, *, cell: bool = True) -> str:
    """Returns prose with the characters escaped that Markdown would read as HTML, or in a table cell as emphasis."""
    text = text.replace("<", "&lt;")
    return text.replace("*", r"\*") if cell else text
