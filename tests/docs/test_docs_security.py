"""What the security page promises is held by tests that exist, and what it says of signatures works as it stands."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, run_page

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
