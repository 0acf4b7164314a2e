"""Links lead somewhere, and files of the repository that a page names are there."""

import re

from doc_pages import ALL_PAGES, ROOT

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
