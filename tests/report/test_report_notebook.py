"""A report in a notebook: its page in a frame, and nothing of a stranger's text outside of it."""

import html
import re
from pathlib import Path
from typing import Any

import pytest
from test_report_junit import GOOD, _hostile, _report

import edgekit as ek
from edgekit.report.html import render_verify

EXAMPLE = Path(__file__).parents[2] / "docs" / "first_steps.ipynb"


def test_a_cell_that_ends_with_a_report_shows_its_page() -> None:
    shown = ek.show(_report(GOOD), height=300)._repr_html_()
    (page,) = re.findall(r'srcdoc="([^"]*)"></iframe>', shown)
    assert html.unescape(page) == render_verify(_report(GOOD))
    assert 'sandbox="allow-scripts"' in shown
    assert "height: 300px" in shown
    # And a report shows itself.
    (page,) = re.findall(r'srcdoc="([^"]*)"></iframe>', _report(GOOD)._repr_html_())
    assert html.unescape(page) == render_verify(_report(GOOD))


@pytest.mark.long
@pytest.mark.slow
def test_the_example_runs_and_shows_its_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLE.parents[1])}}).execute()
    outputs: list[list[Any]] = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    shown = [cell[-1].data.get("text/html", "") for cell in outputs if cell]
    assert [len(re.findall("<iframe", page)) for page in shown] == [1, 1, 1]
    # Placement, layers and loss, sizes.
    for page, word in zip(shown, ("partition", "kB", "emulated"), strict=True):
        assert word in html.unescape(page)
    # The line of progress was renewed to its last step.
    assert outputs[2][0].data["text/plain"] not in {"", "''"}


def test_names_of_models_stay_in_the_frame() -> None:
    shown = ek.show(_hostile())._repr_html_()
    assert shown.count("<") == 2
    assert shown.count(">") == 2
