"""The site builds without a warning, and its pages fetch nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

_FETCHED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?https?://[^>]*>|@import|url\(\"?https?://")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is missing: pip install -r tools/lock/docs.txt")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(site): path.read_text() for path in site.rglob("*.html")}
    assert len(pages) > 40
    assert not [(name, found[0]) for name, text in pages.items() if (found := _FETCHED.search(text))]


def test_the_colours_are_those_of_the_system_until_the_reader_chooses(site: Path) -> None:
    media = re.findall(r'data-md-color-media="(.*?)"', (site / "index.html").read_text())
    assert media[0] == "(prefers-color-scheme)"


def test_the_picture_and_the_reference_are_in_it(site: Path) -> None:
    assert '<svg class="picture"' in (site / "concepts" / "pipeline.html").read_text()
    assert "edgekit runner build" in (site / "reference" / "commands.html").read_text()
    assert "QNNExecutionProvider" in (site / "targets" / "qnn.html").read_text()
