"""Functions for tests of HTML pages in Chromium."""

import json
from pathlib import Path
from typing import Any

from selenium import webdriver

# The elements beyond the right edge of the page, except in a drawing, which can be scrolled.
CUT_OFF = """
const edge = document.documentElement.clientWidth + 1;
document.querySelectorAll("details").forEach((closed) => closed.open = true);
return [...document.querySelectorAll("body *")].filter((part) => !part.closest(".drawing"))
  .filter((part) => part.getBoundingClientRect().right > edge).map((part) => part.outerHTML.slice(0, 200));
"""


def open_page(browser: webdriver.Chrome, page: str, place: Path) -> list[str]:
    """Opens a page from a file, and returns the messages of the console."""
    place.write_text(page)
    browser.get(place.as_uri())
    log: list[dict[str, Any]] = browser.get_log("browser")
    return [json.dumps(entry) for entry in log]
