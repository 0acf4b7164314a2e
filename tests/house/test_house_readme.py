"""The README's commands and its Python run as they stand."""

import re
import shlex
from pathlib import Path

import pytest

from edgekit.cli.main import run_command
from edgekit.evidence import Evidence
from edgekit.target import target_names

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _block(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edgekit").symlink_to(ROOT / "edgekit")
    for line in _block("tests run these commands").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "edgekit"
        assert run_command(arguments) == 0, line


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As it is copied: with no name and no folder but those of a clone.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edgekit").symlink_to(ROOT / "edgekit")
    exec(_block("tests run this"), {})  # noqa: S102 - our own README
    assert capsys.readouterr().out.startswith("yes ")


def test_every_command_stands_in_the_readme_or_its_help() -> None:
    assert all(
        word in README for word in ("make demo", "make test", "edgekit build", "edgekit check", "edgekit verify")
    )


def test_no_paragraph_is_longer_than_five_lines() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    paragraphs = [part.strip() for part in prose.split("\n\n") if not part.strip().startswith(("|", "#"))]
    # As a page shows them: five lines of 160 letters, however the source is broken.
    long = [part for part in paragraphs if len(part.splitlines()) > 5 or len(part) > 5 * 160]
    assert not long


def test_one_picture_and_one_table_of_what_is_proved() -> None:
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", README)
    assert (ROOT / picture).is_file()
    (proved,) = re.findall(r"## What is proved, and how\n\n(\|.*?)\n\n", README, re.DOTALL)
    named = set(re.findall(r"^\| `(\w+)` \|", proved, re.MULTILINE))
    assert named == set(target_names())
    kinds = {word for row in proved.splitlines()[2:] for word in re.findall(r"`([\w-]+)`", row.rsplit("|", 2)[1])}
    assert kinds <= {kind.value for kind in Evidence}
    assert README.count("## What is proved") == 1


def test_links_to_files_lead_somewhere() -> None:
    for name in re.findall(r"`((?:edgekit|targets|tools)/[\w./]+)`", README):
        assert (ROOT / name).exists() or (ROOT / name.split("<")[0]).exists(), name
