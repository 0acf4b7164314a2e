"""Messages that the troubleshooting page quotes are those of the code, word for word."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT

from edgekit.prepare.fix import REWRITES

_QUOTED = re.findall(r"^\| `(.+?)` \|", PAGES["docs/troubleshooting.md"], re.MULTILINE)


def _list_texts(file: Path) -> set[str]:
    """Returns the texts of a module, with `…` for each value that is put into them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(re.sub(r"\{\w+\}", "…", node.value))
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.add("".join(str(part) for part in parts))
    return found


@pytest.fixture(scope="module")
def texts() -> set[str]:
    return {text for file in (ROOT / "edgekit").rglob("*.py") for text in _list_texts(file)}


def test_the_page_quotes_messages() -> None:
    assert len(_QUOTED) > 50
    assert len(set(_QUOTED)) == len(_QUOTED)


@pytest.mark.parametrize("message", _QUOTED)
def test_a_quoted_message_is_one_of_the_code(message: str, texts: set[str]) -> None:
    assert any(message in text for text in texts)


def test_a_message_that_was_reworded_is_found(texts: set[str]) -> None:
    assert not any("there is no such model file '…'" in text for text in texts)


def _list_ids(file: Path) -> Iterator[str]:
    """Yields the ids that calls in a module name, with `…` for a value that is put into one."""
    for node in ast.walk(ast.parse(file.read_text())):
        given = node.value if isinstance(node, ast.keyword) and node.arg == "id" else None
        if isinstance(given, ast.Constant):
            yield str(given.value)
        elif isinstance(given, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in given.values)


def test_every_id_of_advice_and_of_a_cause_has_a_row() -> None:
    ids = {id_ for name in ("check/advice.py", "profile/causes.py") for id_ in _list_ids(ROOT / "edgekit" / name)}
    assert {"no-builder", "one-thread", "…-activations"} <= ids
    assert ids - set(_QUOTED) == set()
    rewrites = PAGES["docs/reference/rewrites.md"]
    assert [name for name in REWRITES if f"`{name}`" not in rewrites] == []
