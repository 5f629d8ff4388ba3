"""Finds the Chromium of tests/browser. `python -m tests.browser.chromium` prints its path, or shows how to get one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO_GET = (
    "No Chromium found, so the page is not tested: install it (Debian: sudo apt install chromium-headless-shell, which "
    "needs a third less CPU time than chromium; elsewhere: .venv/bin/playwright install chromium), or name one in "
    "CPPBATCH_CHROMIUM."
)


class NoChromiumError(Exception):
    """No usable Chromium. The text is one line for the user."""


def find_chromium() -> Path:
    """CPPBATCH_CHROMIUM, else the first of `NAMES` on the PATH, else the one that `playwright install` fetched.

    Raises `NoChromiumError`.
    """
    if named := os.environ.get("CPPBATCH_CHROMIUM"):
        if found := shutil.which(named):
            return Path(found)
        raise NoChromiumError(f"CPPBATCH_CHROMIUM={named} is no program that can be run: name another Chromium in it.")
    for name in NAMES:
        if found := shutil.which(name):
            return Path(found)
    if (own := of_playwright()) and own.exists():
        return own
    raise NoChromiumError(HOW_TO_GET)


def of_playwright() -> Path | None:
    """Where `playwright install chromium` puts its browser, None without playwright."""
    if importlib.util.find_spec("playwright") is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return Path(playwright.chromium.executable_path)


def main() -> None:
    try:
        print(find_chromium())
    except NoChromiumError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
