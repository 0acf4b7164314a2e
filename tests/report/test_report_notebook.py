"""A report in a notebook: its page in a frame, and nothing of a stranger's text outside of it."""

import html
import re

from test_report_junit import GOOD, _hostile, _report

import edgekit as ek
from edgekit.report.pages.html import render_verify


def test_a_cell_that_ends_with_a_report_shows_its_page() -> None:
    shown = ek.show(_report(GOOD), height=300)._repr_html_()
    (page,) = re.findall(r'srcdoc="([^"]*)"></iframe>', shown)
    assert html.unescape(page) == render_verify(_report(GOOD))
    assert 'sandbox="allow-scripts"' in shown
    assert "height: 300px" in shown


def test_names_of_models_stay_in_the_frame() -> None:
    shown = ek.show(_hostile())._repr_html_()
    assert shown.count("<") == 2
    assert shown.count(">") == 2
