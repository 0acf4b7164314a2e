"""CONTRIBUTING.md has a line for each room of the package, and none for one that is gone."""

import re

from doc_pages import ALL_PAGES, ROOT

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
