"""One real Chromium for all pages of a worker, which is reset after each test."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium_pages import Browser
from selenium import webdriver


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs Chromium and its driver: sudo tools/install_system_packages.sh")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1600"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome, tmp_path: Path) -> Iterator[Browser]:
    yield Browser(chromium, tmp_path)
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    chromium.get("about:blank")
    chromium.get_log("browser")  # type: ignore[no-untyped-call]
