"""The pages of the documentation, and the commands in them."""

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgekit.cli.main import run_command

ROOT = Path(__file__).parents[2]
MARK = "<!-- tests run these commands -->"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
ALL_PAGES = {**PAGES, **{name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}}
_BLOCK = re.compile(rf"({MARK}\n)?(?:^ *<!-- not run: (.+?) -->\n)?^ *```sh\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_ENDS = {">", "|", "&&"}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A line `edgekit ...  # exit code N` of a page.

    `is_run` is True if its block has the mark; otherwise `why` says why no test can run it.
    """

    line: str
    arguments: tuple[str, ...]
    exit_code: int
    is_run: bool
    why: str


def list_commands(text: str) -> Iterator[Command]:
    """Yields the commands of edgekit in the blocks of a page, without what follows for the shell, such as a pipe."""
    for mark, why, block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["edgekit"]:
                continue
            code = re.search(r"# exit code (\d)", line)
            end = next((index for index, word in enumerate(words) if word in _ENDS), len(words))
            yield Command(
                line=line,
                arguments=tuple(words[1:end]),
                exit_code=int(code[1]) if code else 0,
                is_run=bool(mark),
                why=why,
            )


def run_page(text: str, folder: Path) -> Iterator[str]:
    """Runs the marked commands of a page in a folder; yields a line for each with an unexpected exit code."""
    with contextlib.chdir(folder):
        for command in list_commands(text):
            if command.is_run and (code := run_command(list(command.arguments))) != command.exit_code:
                yield f"exit code {code}: {command.line}"
