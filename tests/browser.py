"""A headless Chromium, for the pages that plures makes; tests that need it are skipped if there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--window-size=1200,900",
]
needed = [
    pytest.mark.skipif(not (PROGRAM and DRIVER), reason="chromium and chromedriver are not installed"),
    pytest.mark.slow,
]

Browser = Any  # selenium brings no types for what it answers


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """Start a browser that logs what it prints and what it loads."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(PROGRAM)
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # A named driver, so that selenium looks for none, which it would do in the network.
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()
