"""The system's Chromium, without a screen, for tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that is closed at the end. Without one the test fails: scripts/test installs it."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "no browser: install Chromium, for example with apt-get install chromium"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=list(QUIET))
        try:
            yield browser
        finally:
            browser.close()
