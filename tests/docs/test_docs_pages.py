"""Pages: links lead somewhere, the site builds without a warning, and tests hold what the security page promises."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import ALL_PAGES, PAGES, ROOT, run_page

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#[\w-]+)?\)")
_HEADING = re.compile(r"^#+ (.*?)(?: \{#[\w-]+\})?$", re.MULTILINE)
_ID = re.compile(r"(?:\{#|id=\")([\w-]+)")
_FILE = re.compile(r"`(?:python |\.\./)?((?:edgekit|targets|tools|tests|docs)/[\w./-]+)")
_GENERATED = re.compile(
    r"reference/(commands|messages|files|reports|python)\.md|targets/\w+-notes\.md|^\w+-notes\.md|^(files|reports|messages)\.md"
)


def test_links_lead_somewhere() -> None:
    links = [(name, link) for name, page in ALL_PAGES.items() for link in _LINK.findall(page) if link]
    own = [(name, link) for name, link in links if not link.startswith("http") and not _GENERATED.search(link)]
    assert len(own) > 100
    assert [(name, link) for name, link in own if not ((ROOT / name).parent / link).exists()] == []


_ANCHORED = re.compile(r"\]\(([^)#\s]*)#([\w-]+)\)")


def test_headings_that_are_linked_are_there() -> None:
    found = [(name, *each) for name, text in ALL_PAGES.items() for each in _ANCHORED.findall(text)]
    own = [each for each in found if not each[1].startswith("http") and not _GENERATED.search(each[1])]
    assert len(own) > 10
    for name, link, anchor in own:
        page = ((ROOT / name).parent / link).resolve() if link else ROOT / name
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        # As Python-Markdown's toc makes them.
        words = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in _HEADING.findall(text))
        slugs = {re.sub(r"[-\s]+", "-", each) for each in words}
        assert anchor in slugs | set(_ID.findall(text)), f"{name}: {link}#{anchor}"


def test_files_that_are_named_are_there() -> None:
    named = [(name, path) for name, page in ALL_PAGES.items() for path in _FILE.findall(page) if "NAME" not in path]
    assert len(named) > 100
    assert [(name, path) for name, path in named if not (ROOT / path).exists()] == []


# CONTRIBUTING.md has a line for each room of the package, and none for one that is gone.

_ROOMS = re.findall(
    r"^\| `(edgekit/[\w/]+)/` \| \S.+ \|$", ALL_PAGES["CONTRIBUTING.md"].partition("## The rooms")[2], re.MULTILINE
)


def test_the_map_has_each_room_once() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "edgekit").rglob("__init__.py")}
    rooms = sorted(folder for folder in folders if folder != "edgekit" and "/standalone" not in folder)
    assert sorted(room for room in _ROOMS if "/standalone" not in room) == rooms


_PLACES = re.findall(
    r"^\| [^|]+ \| `([\w/.]+)` \| `([^`]+)` \|$", ALL_PAGES["CONTRIBUTING.md"].partition("## Where is")[2], re.MULTILINE
)


def test_what_is_looked_for_is_where_the_map_says() -> None:
    assert len(_PLACES) > 10
    assert [path for path, words in _PLACES if words not in (ROOT / path).read_text()] == []


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


_PAGE, _SIGN = PAGES["docs/concepts/security.md"], PAGES["docs/how-to/sign.md"]
_NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def list_rows(page: str) -> Iterator[tuple[str, str]]:
    """Yields each row of a page's tables, with its last cell."""
    for line in page.splitlines():
        if line.startswith("| ") and not line.endswith("| tests |"):
            yield line, line.rstrip(" |").rpartition("|")[2]


def find_test(file: str, name: str) -> bool:
    return any(f"\ndef {name}(" in path.read_text() for path in (ROOT / "tests").rglob(file))


@pytest.mark.parametrize(("row", "cell"), list(list_rows(_PAGE)))
def test_each_row_names_tests_that_exist(row: str, cell: str) -> None:
    named = _NAMED.findall(cell)
    assert named, row
    assert [name for file, name in named if not find_test(file, name)] == []
    assert re.sub(_NAMED, "", cell).strip(" ,") == ""


def test_the_page_has_its_tables() -> None:
    assert _PAGE.count("| tests |") >= 4
    assert len(list(list_rows(_PAGE))) >= 20


def test_a_test_that_is_gone_is_found() -> None:
    assert not find_test("test_bundle_trust.py", "test_that_never_was")


def test_a_signature_is_checked_without_edgekit_as_the_page_says(work: Path, tmp_path: Path) -> None:
    pytest.importorskip("securesystemslib")
    shutil.copytree(work, tmp_path / "work")
    assert list(run_page(_SIGN, tmp_path / "work")) == []
    (code,) = re.findall(r"```python\n(.*?)```", _SIGN, re.DOTALL)
    with contextlib.chdir(tmp_path / "work"):
        exec(compile(code, "sign.md", "exec"), {})  # noqa: S102 - what the page says
        with (tmp_path / "work" / "bundles" / "model-nnapi" / "check.json").open("ab") as file:
            file.write(b" ")
        with pytest.raises(AssertionError):
            exec(compile(code, "sign.md", "exec"), {})  # noqa: S102
