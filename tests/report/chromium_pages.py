"""Pages in Chromium, for tests."""

import json
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.remote.webelement import WebElement

# The elements beyond the right edge of the page, except in a drawing, which can be scrolled.
_CUT_OFF = """
const edge = document.documentElement.clientWidth + 1;
document.querySelectorAll("details").forEach((closed) => closed.open = true);
return [...document.querySelectorAll("body *")].filter((part) => !part.closest(".drawing"))
  .filter((part) => part.getBoundingClientRect().right > edge).map((part) => part.outerHTML.slice(0, 200));
"""


class Browser:
    """A Chromium that opens pages from files in a folder; elements are found by CSS selectors."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self._driver, self._place = driver, folder / "page.html"

    def open(self, page: str) -> None:
        """Opens a page that must not write a word on the console."""
        assert self.read_log(page) == []

    def read_log(self, page: str) -> list[str]:
        """Opens a page, and returns the messages of the console."""
        self._place.write_text(page)
        self._driver.get(self._place.as_uri())
        return [json.dumps(entry) for entry in self._driver.get_log("browser")]

    def find(self, selector: str) -> list[WebElement]:
        return list(self._driver.find_elements("css selector", selector))

    def find_one(self, selector: str) -> WebElement:
        return self._driver.find_element("css selector", selector)

    def run(self, script: str, *values: object) -> Any:
        return self._driver.execute_script(script, *values)

    def ask(self, command: str, **values: object) -> Any:
        """Sends a command of Chrome's DevTools protocol."""
        return self._driver.execute_cdp_cmd(command, values)

    def point_at(self, element: WebElement, x: int = 0, y: int = 0) -> None:
        """Moves the pointer onto an element, by default its middle."""
        webdriver.ActionChains(self._driver).move_to_element_with_offset(element, x, y).perform()

    def set_scheme(self, scheme: str, media: str = "screen") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def find_cut_off(self, page: str) -> list[tuple[int, str]]:
        """Opens a page in windows of three widths; returns what is beyond their right edges."""
        self.open(page)
        return [(width, part) for width in (380, 800, 1400) for part in self._find_beyond(width)]

    def _find_beyond(self, width: int) -> list[str]:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        return list(self.run(_CUT_OFF))
