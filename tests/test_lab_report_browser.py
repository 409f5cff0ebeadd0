"""The page of `plures report` as a browser shows it; skipped if no Chromium is installed."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from browser import Browser, needed, opened
from plures.lab.compare.rows import Row, rows_of
from plures.lab.costs import Costs
from plures.lab.recipes import Epochs, get_recipe
from plures.lab.report import write_report
from plures.lab.training.train import train

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = needed

SECTIONS = ["table", "reliability", "members", "uncertain", "mistakes", "training", "reproduce"]
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("report")
    epochs = Epochs(pretrain=2, prune=1, finetune=2, train=2)
    recipe = replace(get_recipe("digits"), width=32, limit=200, validation=50, members=3, epochs=epochs)
    for method in ("orthogonal-dropout", "deterministic"):
        train(recipe, method, folder / "runs" / method)
    return rows_of([folder / "runs"])


@pytest.fixture(scope="module")
def page(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(rows, out, data_dir=None, command="plures report runs").as_uri()


@pytest.fixture(scope="module")
def crowded(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> str:
    """All columns that a table can have, and two seeds."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    full = [replace(row, runs=(row.runs[0],) * 2, costs=Costs(1.083, 29.8, 1312.0)) for row in rows]
    return write_report(full, out, data_dir=None, command="plures report runs").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture(autouse=True)
def _opened(browser: Browser, page: str) -> Iterator[None]:
    browser.get_log("browser"), browser.get_log("performance")  # forget what other tests left
    browser.get(page)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def scheme(browser: Browser, name: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": name}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})


def luminance(browser: Browser, selector: str, quality: str) -> float:
    """Return how bright a colour of an element is, from 0 to 1, as WCAG defines it."""
    script = f"return getComputedStyle(document.querySelector({selector!r})).getPropertyValue({quality!r})"
    numbers = [float(one) / 255 for one in browser.execute_script(script).partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in numbers]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


FIRST = "#table .scroll:first-of-type table"


def overflow(browser: Browser) -> int:
    script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    return int(browser.execute_script(script))


def column(browser: Browser, place: int) -> list[str]:
    cells = browser.find_elements(By.CSS_SELECTOR, f"{FIRST} tbody tr > :nth-child({place})")
    return [cell.text for cell in cells]


def test_every_section_is_seen(browser: Browser) -> None:
    shown = [one for one in browser.find_elements(By.TAG_NAME, "section") if one.is_displayed()]
    assert [one.get_attribute("id") for one in shown] == SECTIONS
    assert all(one.find_element(By.TAG_NAME, "h2").text for one in shown)
    assert all(one.size["height"] > 40 and one.size["width"] > 100 for one in browser.find_elements(By.TAG_NAME, "svg"))
    loaded = "return [...document.images].every(image => image.complete && image.naturalWidth > 0)"
    assert browser.execute_script(loaded)


def test_no_error_and_no_request_to_the_outside(browser: Browser, page: str) -> None:
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    addresses = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert page in addresses
    assert all(address.startswith(("file:", "data:")) for address in addresses)


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    assert browser.execute_script("return innerWidth") == 390
    assert overflow(browser) == 0
    box = browser.find_element(By.CSS_SELECTOR, "#table .scroll")  # the wide table scrolls in its own box
    assert browser.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", box)
    browser.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
    long_names = "document.querySelectorAll('.image b').forEach(one => { one.textContent = 'Nuthatch'.repeat(9) })"
    browser.execute_script(long_names)
    assert overflow(browser) == 0


def test_a_full_table_fits_a_laptop(browser: Browser, crowded: str) -> None:
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(crowded)
    assert len(browser.find_elements(By.CSS_SELECTOR, "table.sortable thead th")) == 13
    for box in browser.find_elements(By.CSS_SELECTOR, "#table .scroll"):
        assert browser.execute_script("return arguments[0].scrollWidth <= arguments[0].clientWidth", box)
    assert overflow(browser) == 0


def test_headings_break_between_words_only(browser: Browser) -> None:
    heights = "return [...document.querySelectorAll('.sortable thead th')].map(one => one.offsetHeight)"
    three_lines = 6 * browser.execute_script("return parseFloat(getComputedStyle(document.body).fontSize)")
    assert max(browser.execute_script(heights)) < three_lines


def test_a_click_on_a_heading_sorts(browser: Browser) -> None:
    names = column(browser, 1)
    assert names == ["deterministic", "orthogonal-dropout"]
    heading = browser.find_element(By.CSS_SELECTOR, "table.sortable thead th")
    button = heading.find_element(By.TAG_NAME, "button")
    button.click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert column(browser, 1) == names
    button.click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(browser, 1) == names[::-1]


def test_the_keyboard_sorts_by_numbers_best_first(browser: Browser) -> None:
    headings = browser.find_elements(By.CSS_SELECTOR, f"{FIRST} thead th")
    titles = [heading.text for heading in headings]
    for title, falling in (("accuracy", True), ("NLL", False)):
        place = next(number for number, one in enumerate(titles) if one.startswith(title))
        headings[place].find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        values = [float(text) for text in column(browser, place + 1)]
        assert values == sorted(values, reverse=falling)
        assert headings[place].get_attribute("aria-sort") == ("descending" if falling else "ascending")
        assert [one for one in headings if one.get_attribute("aria-sort")] == [headings[place]]


def test_rows_without_a_value_come_last_both_ways(browser: Browser) -> None:
    headings = browser.find_elements(By.CSS_SELECTOR, f"{FIRST} thead th")
    place = next(number for number, heading in enumerate(headings) if heading.text.startswith("agreement"))
    for _ in range(2):
        headings[place].find_element(By.TAG_NAME, "button").click()
        assert column(browser, place + 1)[-1] == "-"


def test_dark_and_light_are_both_readable(browser: Browser) -> None:
    found = {}
    for name in ("light", "dark"):
        scheme(browser, name)
        paper = found[name] = luminance(browser, "body", "background-color")
        for selector in ("body", ".reading", "figcaption", "svg text"):
            quality = "fill" if selector == "svg text" else "color"
            lighter, darker = sorted([paper, luminance(browser, selector, quality)], reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (name, selector)
    assert found["light"] > 0.8
    assert found["dark"] < 0.05


def test_print_is_black_on_white_and_unfolded(browser: Browser) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_script("document.querySelectorAll('details').forEach(one => { one.open = false })")
    image = browser.find_element(By.CSS_SELECTOR, "#mistakes img")
    assert not image.is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    assert luminance(browser, "body", "background-color") == pytest.approx(1)
    assert luminance(browser, "body", "color") < 0.05
    assert not browser.find_element(By.TAG_NAME, "nav").is_displayed()
    assert browser.execute_script("return arguments[0].getBoundingClientRect().height", image) > 20


def test_it_can_be_read_without_scripts(browser: Browser, page: str) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get(page)
    assert browser.find_elements(By.CSS_SELECTOR, "thead button") == []  # no script has run
    shown = [one.get_attribute("id") for one in browser.find_elements(By.TAG_NAME, "section") if one.is_displayed()]
    assert shown == SECTIONS
    assert column(browser, 1) == ["deterministic", "orthogonal-dropout"]
