"""The README's commands and its Python run as they stand."""

import re
import shlex
from pathlib import Path

import pytest

from edgekit.cli.main import run_command

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
    monkeypatch.chdir(ROOT)
    exec(_block("tests run this"), {"Path": Path, "work": tmp_path})  # noqa: S102 - our own README
    assert capsys.readouterr().out.startswith("yes ")


def test_every_command_stands_in_the_readme_or_its_help() -> None:
    assert all(
        word in README for word in ("make demo", "make test", "edgekit build", "edgekit check", "edgekit verify")
    )


def test_links_to_files_lead_somewhere() -> None:
    for name in re.findall(r"`((?:edgekit|targets|tools)/[\w./]+)`", README):
        assert (ROOT / name).exists() or (ROOT / name.split("<")[0]).exists(), name
