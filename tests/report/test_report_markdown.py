"""A verification as Markdown: verdicts, figures, and names that stay in their place."""

from test_report_junit import BAD, DEAD, GOOD, HOSTILE, _hostile, _report

from edgekit.report.markdown import render_markdown


def test_each_output_is_a_row_and_each_reason_a_line() -> None:
    text = render_markdown((_report(GOOD, BAD, DEAD),))
    assert text.startswith("### \N{CROSS MARK} m-t: fail\n")
    assert "| emulated | emulated | y | 0.99900 | 30.0 | 100.0% | pass |" in text
    assert "| arm64 | emulated | y | 0.99900 | 30.0 | 100.0% | **fail** |" in text
    assert "- phone: the device failed: the cable fell out" in text
    assert "- coreml skipped: no Mac; to run it: buy one" in text


def test_several_verifications_are_one_page() -> None:
    assert render_markdown((_report(GOOD), _report(GOOD))).count("pass\n") == 2
    assert "nothing ran" in render_markdown((_report(),))


def test_names_stay_in_their_place() -> None:
    text = render_markdown((_hostile(),))
    assert HOSTILE not in text
    assert "<script" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == 8 for line in rows)
