"""The pages in a real Chromium: they open offline without a word on the console, sort, filter, and print."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from test_report_junit import BAD, DEAD, GOOD, _hostile, _report
from test_report_render import HOSTILE
from test_report_render import _report as _build

from edgekit.report.charts import Picture, draw_image, place_bars
from edgekit.report.html import render_build, render_verify
from edgekit.verify.attribute import share_loss
from edgekit.verify.layers import LayerReport
from edgekit.verify.report import AttributionStep, VerifyReport

STEPS = share_loss(
    [
        AttributionStep(step="prepare", sqnr_db=120.0, top1_agreement=1.0, accuracy=0.9),
        AttributionStep(step="quantize", sqnr_db=25.0, top1_agreement=0.95, accuracy=0.85),
        AttributionStep(step="provider", sqnr_db=27.0, top1_agreement=0.9, accuracy=0.87),
    ],
    0.9,
)
LAYERS = tuple(
    LayerReport(
        name=f"conv{index}", op="Conv", tensor=f"c{index}", sqnr_db=60.0 - index, max_abs=0.1,
        own_sqnr_db=10.0 if index == 7 else 50.0, own_bias=0.0, arithmetic="int8", offset_steps=0.0,
        channel_steps=(28.0 if index == 7 else 0.4, 0.3),
    )
    for index in range(30)
)  # fmt: skip


def _full() -> VerifyReport:
    report = _report(GOOD, BAD, DEAD)
    return msgspec.structs.replace(report, attribution=STEPS, layers=LAYERS, attributed_device="emulated")


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and its driver: sudo tools/install_system_packages.sh")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1600"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def _open(browser: webdriver.Chrome, page: str, place: Path) -> list[str]:
    """Opens a page from a file, and returns what the console says."""
    place.write_text(page)
    browser.get(place.as_uri())
    log: list[dict[str, Any]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [json.dumps(entry) for entry in log]


def _column(browser: webdriver.Chrome, name: str) -> list[str]:
    heads = [head.text.rstrip(" ↑↓") for head in browser.find_elements(By.CSS_SELECTOR, "table.filtered thead th")]
    place = heads.index(name) + 1
    cells = browser.find_elements(By.CSS_SELECTOR, f"table.filtered tbody tr:not([hidden]) td:nth-child({place})")
    return [cell.text for cell in cells]


def test_a_page_sorts_and_filters_without_a_word_on_the_console(browser: webdriver.Chrome, tmp_path: Path) -> None:
    runs = (msgspec.structs.replace(GOOD, device="b", samples=12), msgspec.structs.replace(BAD, device="a", samples=9))
    assert _open(browser, render_verify(_report(*runs, DEAD)), tmp_path / "v.html") == []
    assert _column(browser, "device") == ["b", "a", "phone"]
    head = browser.find_element(By.CSS_SELECTOR, "table.filtered thead th")
    head.click()
    assert _column(browser, "device") == ["a", "b", "phone"]
    head.send_keys(Keys.ENTER)
    assert _column(browser, "device") == ["phone", "b", "a"]
    numbers = browser.find_elements(By.CSS_SELECTOR, "table.filtered thead th")[4]
    numbers.click()
    assert _column(browser, "samples")[-1] == "12"
    browser.find_element(By.ID, "failing").click()
    assert sorted(_column(browser, "device")) == ["a", "phone"]
    browser.find_element(By.ID, "filter").send_keys("PHONE")
    assert _column(browser, "device") == ["phone"]


def test_the_chart_names_the_layer_under_the_pointer(browser: webdriver.Chrome, tmp_path: Path) -> None:
    assert _open(browser, render_verify(_full()), tmp_path / "v.html") == []
    dot = browser.find_element(By.CSS_SELECTOR, ".chart circle.bad")
    webdriver.ActionChains(browser).move_to_element(dot).perform()
    assert browser.find_element(By.CSS_SELECTOR, ".chart .note").text == "conv7 (Conv): 53.0 dB so far, 10.0 dB own"
    assert len(browser.find_elements(By.CSS_SELECTOR, ".chart circle")) == len(LAYERS)


def test_names_of_models_run_nothing(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = render_verify(_hostile())
    assert _open(browser, page, tmp_path / "v.html") == []
    assert _open(browser, render_build(_build()), tmp_path / "b.html") == []
    assert HOSTILE not in page
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 1
    smuggled = page.replace("</body>", "<script>document.title = 'run'</script></body>")
    assert any("Content Security Policy" in line for line in _open(browser, smuggled, tmp_path / "s.html"))
    assert browser.title != "run"


def test_a_page_follows_light_and_dark_and_prints_light(browser: webdriver.Chrome, tmp_path: Path) -> None:
    _open(browser, render_verify(_full()), tmp_path / "v.html")
    seen: dict[str, str] = {}
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        script = "return getComputedStyle(document.body).backgroundColor"
        seen[f"{scheme} {media}"] = browser.execute_script(script)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert seen["light screen"] == seen["dark print"] == "rgb(255, 255, 255)"
    assert seen["dark screen"] != seen["light screen"]
    printed: dict[str, str] = browser.execute_cdp_cmd("Page.printToPDF", {})
    assert len(printed["data"]) > 10_000


def test_worst_samples_are_shown_as_pictures(browser: webdriver.Chrome, tmp_path: Path) -> None:
    image = np.random.default_rng(0).normal(size=(1, 3, 40, 60)).astype(np.float32)
    uri = draw_image(image)
    assert uri is not None
    page = render_verify(_full(), [Picture(sample=3, caption="sample 3", uri=uri)])
    assert _open(browser, page, tmp_path / "v.html") == []
    shown = browser.find_element(By.CSS_SELECTOR, "figure img")
    assert browser.execute_script("return arguments[0].naturalWidth", shown) == 60
    assert draw_image(np.moveaxis(image, 1, 3)) == uri
    for other in (image[0], image[:, :2], np.full_like(image, np.nan), np.zeros((1, 3, 2, 2), np.float32)):
        assert draw_image(other) is None
    assert draw_image(np.zeros((1, 1, 28, 28), np.uint8)) is not None


def test_a_page_of_the_largest_build_stays_small_and_whole() -> None:
    many = msgspec.structs.replace(_full(), layers=LAYERS * 40)
    bundles = tuple(msgspec.structs.replace(_build().bundles[0], target=f"t{index}", verify=many) for index in range(4))
    page = render_build(_build(bundles=bundles))
    assert len(page.encode()) < 2_000_000
    assert "http:" not in page
    assert "https:" not in page


def test_the_waterfall_begins_where_the_step_before_ended() -> None:
    bars = place_bars(STEPS)
    assert [bar.falls for bar in bars] == [False, False, True]
    assert bars[2].left + bars[2].width == pytest.approx(bars[1].left + bars[1].width)
    assert max(bar.left + bar.width for bar in bars) <= 100.1
