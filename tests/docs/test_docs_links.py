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
