"""The page of a check in a real Chromium: nothing fails to load, folds fold, pointing at a node tells its reasons."""

import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.remote.webelement import WebElement

from edgekit.check.recommend import recommend_target
from edgekit.check.report import CheckedNode, CheckReport
from edgekit.cli.main import run_command
from edgekit.report.checked import CheckSummary, draw_blocks, render_check
from edgekit.target import find_group


def _node(at: int, *, taken: bool = True, reasons: tuple[str, ...] = (), **fields: Any) -> CheckedNode:
    return CheckedNode(
        name=f"n{at}", op="Conv", domain="ai.onnx", taken=taken, reasons=reasons, macs=10, bytes=10,
        partition=0 if taken else None, reads=(f"n{at - 1}",) if at else (), **fields,
    )  # fmt: skip


def _write_page(path: Path, *nodes: CheckedNode) -> Path:
    report = CheckReport(
        target="t", model="m", sha256="0", evidence="predicted", settings={}, node_list=nodes, advice=()
    )
    recommended = recommend_target({"t": report}, {})
    page = render_check(CheckSummary(model="m", sha256="0", targets={"t": report}, recommended=recommended))
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page
    path.write_text(page)
    return path


def _open(browser: webdriver.Chrome, page: Path) -> None:
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []


def _find(browser: webdriver.Chrome, selector: str) -> list[WebElement]:
    return list(browser.find_elements("css selector", selector))


def test_a_node_tells_its_reasons_when_it_is_pointed_at(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = _write_page(tmp_path / "p.html", _node(0), _node(1, taken=False, reasons=("too <odd>",)), _node(2))
    _open(browser, page)
    (chip,) = _find(browser, ".chip.left")
    (tip,) = _find(browser, ".chip.left .tip")
    assert not tip.is_displayed()
    webdriver.ActionChains(browser).move_to_element(chip).perform()
    assert tip.is_displayed()
    assert "too <odd>" in tip.text
    assert "Conv n1" in tip.text


def test_a_block_folds(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = _write_page(tmp_path / "p.html", *(_node(at) for at in range(8)))
    _open(browser, page)
    assert [block.is_displayed() for block in _find(browser, ".chip")] == [True] * 8
    _find(browser, ".block > summary")[0].click()
    assert not any(chip.is_displayed() for chip in _find(browser, ".chip"))
    _find(browser, ".block > summary")[0].click()
    assert all(chip.is_displayed() for chip in _find(browser, ".chip"))


def test_taken_left_and_fatal_have_colours_of_their_own(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = _write_page(tmp_path / "p.html", _node(0), _node(1, taken=False), _node(2, taken=False, fatal=True))
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        _open(browser, page)
        colours = [chip.value_of_css_property("background-color") for chip in _find(browser, ".chip")]
        assert len(set(colours)) == 3
        ink = _find(browser, ".chip")[0].value_of_css_property("color")
        assert ink != colours[0]


def test_a_thousand_nodes_open_quickly(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = _write_page(tmp_path / "p.html", *(_node(at, taken=at % 50 != 49) for at in range(1000)))
    start = time.monotonic()
    _open(browser, page)
    for block in _find(browser, ".block:not([open]) > summary"):
        block.click()
    assert len(_find(browser, ".chip")) == 1000
    assert time.monotonic() - start < 10


def test_the_page_of_the_command_loads_nothing_from_elsewhere(browser: webdriver.Chrome, tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "edgekit/demo/digits_mobilenet.onnx"
    page = tmp_path / "check.html"
    assert run_command(["check", str(model), "--compare-ort", "--html", str(page)]) == 0
    _open(browser, page)
    assert "ONNX Runtime's own checker" in _find(browser, "body")[0].text
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert len(_find(browser, "details.graph")) == len(find_group("all"))


def test_blocks_follow_the_places_and_rows_the_depth() -> None:
    nodes = (_node(0), _node(1), _node(2, taken=False), _node(3))
    report = CheckReport(
        target="t", model="m", sha256="0", evidence="predicted", settings={}, node_list=nodes, advice=()
    )
    blocks = list(draw_blocks(report))
    assert [(block.place, len(block.chips)) for block in blocks] == [("taken", 2), ("left", 1), ("taken", 1)]
    first, second = blocks[0].chips
    assert first.x == second.x
    assert first.y < second.y
    assert blocks[0].edges.startswith("M")
    assert "2 nodes, 50.0% of MACs (2 Conv)" in blocks[0].summary
