"""The page of `plures serve` as a browser shows it; skipped if no Chromium is installed."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from browser import Browser, needed, opened
from plures.lab.serving import Limits
from served import png, serving

pytestmark = needed

RUN = Path(__file__).parent / "data/v0.1/runs/orthogonal-dropout"
DROP = """
const [bytes, name, kind] = arguments;
const file = new File([new Uint8Array(bytes)], name, {type: "image/png"}), data = new DataTransfer();
data.items.add(file);
document.dispatchEvent(kind === "paste" ? new ClipboardEvent("paste", {clipboardData: data}) :
  new DragEvent("drop", {dataTransfer: data, cancelable: true}));
"""
SURE = """
const slider = document.getElementById("below");
slider.value = arguments[0];
slider.dispatchEvent(new Event("input"));
"""


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    with serving(RUN, Limits()) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


def image(seed: int) -> bytes:
    return png(np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8))


def cards(browser: Browser, count: int) -> list[str]:
    """Wait until this many images are answered, and read the answers."""
    WebDriverWait(browser, 600).until(lambda b: len(b.find_elements(By.CSS_SELECTOR, ".card .label")) >= count)
    return [card.text for card in browser.find_elements(By.CLASS_NAME, "card")]


def looks(browser: Browser, width: int, height: int, scheme: str) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": width < 500})
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def test_images_are_dropped_pasted_chosen_and_answered(browser, page, tmp_path):
    looks(browser, 1200, 900, "light")
    browser.get(page)
    browser.execute_script(DROP, list(image(0)), "dropped.png", "drop")
    browser.execute_script(DROP, list(image(1)), "pasted.png", "paste")
    (tmp_path / "chosen.png").write_bytes(image(2))
    browser.find_element(By.ID, "files").send_keys(str(tmp_path / "chosen.png"))
    shown = cards(browser, 3)
    assert {name for name in ("dropped.png", "pasted.png", "chosen.png") if any(name in text for text in shown)} == {
        "dropped.png",
        "pasted.png",
        "chosen.png",
    }
    assert all("% confident" in text and re.search(r"\d: \d of 3", text) for text in shown)
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_it_says_that_it_does_not_know_and_why_a_file_has_no_answer(browser, page):
    browser.get(page)
    browser.execute_script(DROP, list(image(3)), "unsure.png", "drop")
    (sure,) = cards(browser, 1)
    assert "I do not know" not in sure
    browser.execute_script(SURE, 99)  # answers that are there follow the slider
    (unsure,) = cards(browser, 1)
    assert "I do not know" in unsure
    assert "99 % asked for" in unsure
    browser.execute_script(DROP, [1, 2, 3], "text.png", "drop")
    assert "text.png is damaged or not an image" in cards(browser, 2)[0]


def test_it_tells_what_it_knows_before_the_first_image_and_has_an_example(browser, page):
    browser.get(page)
    knows = browser.find_element(By.ID, "knows").text
    assert knows.startswith("It tells 10 classes apart: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9. 3 members vote")
    assert "Its confidence is not calibrated" in knows
    browser.find_element(By.ID, "example").click()
    (answer,) = cards(browser, 1)
    assert "a drawn 3" in answer


def test_nothing_is_loaded_from_elsewhere(browser, page):
    browser.get(page)
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert all(name.startswith(page) for name in loaded)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1200, 900), (390, 844)])
def test_the_page_fits_and_is_readable(browser, page, width, height, scheme):
    looks(browser, width, height, scheme)
    browser.get(page)
    browser.execute_script(DROP, list(image(0)), "a-rather-long-name-of-an-image-of-a-wren.png", "drop")
    (text,) = cards(browser, 1)
    confidence = float(re.search(r"([\d.]+) % confident", text)[1])
    assert re.search(r"Next: \d [\d.]+ %, \d [\d.]+ %, \d [\d.]+ %", text)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.find_element(By.ID, "camera").is_displayed() == (width < 500)
    share = browser.execute_script(
        "const i = document.querySelector('.bar i'); return i.clientWidth / i.parentNode.clientWidth"
    )
    assert f"{100 * share:.0f}" in {f"{confidence + off:.0f}" for off in (-1, 0, 1)}
    ink, back = browser.execute_script(
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
    )
    assert contrast(ink, back) > 7
    for kind in (".small", ".label"):
        colour = browser.execute_script(f"return getComputedStyle(document.querySelector('{kind}')).color")
        assert contrast(colour, back) > 4.5


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted([luminance(first), luminance(second)], reverse=True)
    return (high + 0.05) / (low + 0.05)
