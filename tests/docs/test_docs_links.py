"""Links lead somewhere, and files of the repository that a page names are there."""

import re

import pytest
from doc_pages import ALL_PAGES, ROOT

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#[\w-]+)?\)")
_FILE = re.compile(r"`(?:python |\.\./)?((?:edgekit|targets|tools|tests|docs)/[\w./-]+)")
_GENERATED = re.compile(
    r"reference/(commands|files|reports|python)\.md|targets/\w+-notes\.md|^\w+-notes\.md|^(files|reports)\.md"
)


@pytest.mark.parametrize("name", ALL_PAGES)
def test_links_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    for link in _LINK.findall(ALL_PAGES[name]):
        if link and not link.startswith("http") and not _GENERATED.search(link):
            assert (folder / link).exists(), link


@pytest.mark.parametrize("name", ALL_PAGES)
def test_files_that_are_named_are_there(name: str) -> None:
    for path in _FILE.findall(ALL_PAGES[name]):
        if "NAME" not in path:
            assert (ROOT / path).exists(), path
