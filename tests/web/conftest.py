"""A headless browser: the system's Chromium, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    api = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.exit("the tests of pages need a browser: apt install chromium, or CHROMIUM=/path/to/it", returncode=1)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
