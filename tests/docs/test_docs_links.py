"""Links lead somewhere, and files of the repository that a page names are there."""

import re

import pytest
from doc_pages import ALL_PAGES, ROOT

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#[\w-]+)?\)")
_HEADING = re.compile(r"^#+ (.*?)(?: \{#[\w-]+\})?$", re.MULTILINE)
_ID = re.compile(r"(?:\{#|id=\")([\w-]+)")
_FILE = re.compile(r"`(?:python |\.\./)?((?:edgekit|targets|tools|tests|docs)/[\w./-]+)")
_GENERATED = re.compile(
    r"reference/(commands|messages|files|reports|python)\.md|targets/\w+-notes\.md|^\w+-notes\.md|^(files|reports|messages)\.md"
)


@pytest.mark.parametrize("name", ALL_PAGES)
def test_links_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    for link in _LINK.findall(ALL_PAGES[name]):
        if link and not link.startswith("http") and not _GENERATED.search(link):
            assert (folder / link).exists(), link


_ANCHORED = re.compile(r"\]\(([^)#\s]*)#([\w-]+)\)")


@pytest.mark.parametrize("name", ALL_PAGES)
def test_headings_that_are_linked_are_there(name: str) -> None:
    for link, anchor in _ANCHORED.findall(ALL_PAGES[name]):
        if link.startswith("http") or _GENERATED.search(link):
            continue
        page = ((ROOT / name).parent / link).resolve() if link else ROOT / name
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        # As Python-Markdown's toc makes them.
        words = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in _HEADING.findall(text))
        slugs = {re.sub(r"[-\s]+", "-", each) for each in words}
        assert anchor in slugs | set(_ID.findall(text)), f"{link}#{anchor}"


@pytest.mark.parametrize("name", ALL_PAGES)
def test_files_that_are_named_are_there(name: str) -> None:
    for path in _FILE.findall(ALL_PAGES[name]):
        if "NAME" not in path:
            assert (ROOT / path).exists(), path


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
