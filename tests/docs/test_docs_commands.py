"""Commands in the pages: those that are marked run, all others are at least commands of edgekit with their options."""

import re
import shutil
from pathlib import Path

import click
import pytest
from doc_pages import ALL_PAGES, PAGES, list_commands, run_page

from edgekit.cli.main import group

_TUTORIAL = "docs/tutorial.md"
_LONG = {
    *(f"docs/how-to/{name}.md" for name in ("ci", "failing-build", "groups", "ort-format", "package", "profile")),
    *(f"docs/how-to/{name}.md" for name in ("resume", "same-bytes", "time", "tune", "which-files")),
    *("docs/concepts/evidence.md", "docs/how-to/forecast.md"),
    *("docs/reference/guides.md", "docs/reference/metrics.md"),
}
_RUN = [name for name, text in PAGES.items() if name != _TUTORIAL and any(c.is_run for c in list_commands(text))]


@pytest.mark.long
def test_the_tutorial_ends_with_verified_bundles(tutorial: Path) -> None:
    assert (tutorial / "bundles" / "model-nnapi" / "verify.json").is_file()
    assert (tutorial / "model.tar").is_file()


@pytest.mark.parametrize("name", [name for name in _RUN if name not in _LONG])
def test_what_a_page_says_runs(name: str, work: Path, tmp_path: Path) -> None:
    assert list(run_page(PAGES[name], shutil.copytree(work, tmp_path / "work"))) == []


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(_LONG))
def test_what_a_page_says_runs_behind_the_tutorial(name: str, tutorial: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tutorial, tmp_path / "work")
    (folder / "model.tar").unlink()
    assert list(run_page(PAGES[name], folder)) == []


_COMMANDS = [(name, command) for name, page in ALL_PAGES.items() for command in list_commands(page)]


def test_every_command_runs_or_its_block_says_why_not() -> None:
    assert len(_COMMANDS) > 100
    assert [(name, each.line) for name, each in _COMMANDS if not each.is_run and not each.why] == []


def test_a_command_that_nobody_runs_is_found() -> None:
    (silent, told) = list_commands("```sh\nedgekit a\n```\n<!-- not run: it needs a phone -->\n```sh\nedgekit b\n```\n")
    assert (silent.is_run, silent.why, told.why) == (False, "", "it needs a phone")


def test_every_command_of_a_page_has_these_options() -> None:
    for _, command in _COMMANDS:
        _parse(group, "edgekit", list(command.arguments))


def _parse(command: click.Command, name: str, arguments: list[str]) -> None:
    if not isinstance(command, click.Group):
        command.make_context(name, arguments)
    elif arguments:
        found = command.get_command(click.Context(command), arguments[0])
        assert found is not None, f"{name} {arguments[0]}"
        _parse(found, f"{name} {arguments[0]}", arguments[1:])


def _unknown(text: str) -> list[str]:
    """What sentences and tables of a page name, in backticks, that is no command or has no such option."""
    return [line for line in re.findall(r"(?<!`)`(edgekit [a-z][^`]*)`", text) if not _is_known(line)]


def _is_known(line: str) -> bool:
    command: click.Command = group
    for word in line.split()[1:]:
        if isinstance(command, click.Group) and word.islower() and not word.startswith("-"):
            inner = command.get_command(click.Context(command), word)
            if inner is None:
                return False
            command = inner
    options = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help", "--version"}
    return all(option in options for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line))


def test_commands_named_in_sentences_and_tables_are_there() -> None:
    assert {name: lines for name, page in ALL_PAGES.items() if (lines := _unknown(page))} == {}


def test_a_sentence_with_a_command_that_is_not_there_is_found() -> None:
    text = "`edgekit bild model.onnx`, `edgekit build --tagret nnapi` and `edgekit build MODEL --target nnapi`"
    assert _unknown(text) == ["edgekit bild model.onnx", "edgekit build --tagret nnapi"]


@pytest.mark.parametrize(
    "line", ["edgekit bild model.onnx", "edgekit build model.onnx --out x --data y --tagret nnapi"]
)
def test_a_command_that_is_not_there_is_found(line: str) -> None:
    (command,) = list_commands(f"```sh\n{line}\n```\n")
    with pytest.raises((AssertionError, click.UsageError)):
        _parse(group, "edgekit", list(command.arguments))
