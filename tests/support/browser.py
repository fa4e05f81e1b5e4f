"""A real browser without a network, in which tests look at pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Headless Chromium. Where it is missing the test is skipped, in CI it fails."""
    missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        missing("Chromium is missing: make chromium installs it")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is missing: pip install 'tasp-lab[dev]'")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
