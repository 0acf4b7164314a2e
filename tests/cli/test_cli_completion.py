"""`edgekit completion`: what it prints is a shell's own, and completes."""

import re
from pathlib import Path

import pytest
from fixture_types import Shown

from edgekit.cli.main import run_command

PAGES = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_each_shell_gets_its_script(shell: str, shown: Shown) -> None:
    assert f"_EDGEKIT_COMPLETE={shell}_complete" in shown(["completion", shell])


@pytest.mark.parametrize(("words", "wanted"), [("edgekit qu", "quantize"), ("edgekit build --prec", "--precision")])
def test_the_script_asks_the_command(
    words: str, wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_EDGEKIT_COMPLETE": "bash_complete"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run_command([])
    assert f"plain,{wanted}" in capsys.readouterr().out.splitlines()


def test_the_list_for_agents_leads_to_pages() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (PAGES / "llms.txt").read_text())
    assert len(links) > 5
    assert all((PAGES / link).is_file() for link in links)
