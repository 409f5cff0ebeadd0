"""The figure of the method page, as a browser shows it; skipped if no Chromium is installed."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from browser import Browser, needed, opened

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By

pytestmark = needed
FIGURE = Path(__file__).parent.parent / "docs/interactive/method.html"
INPUT = [1, -0.5, 0.8, 0.3, -1, 0.6]
STEPS = {"sequential": 10, "together": 6}
# All that a step shows, in one call: owners, the stage, and of each member its weights and outputs.
SEEN = """
const cells = part => [...part.querySelectorAll('.cell')], value = one => 'value' in one.dataset ? Number(one.dataset.value) : null;
const part = name => document.querySelector(`[data-part=${name}]`);
return {owners: cells(part('owners')).map(value), stage: cells(part('stage')).map(value), open: cells(part('stage')).map(one => one.classList.contains('open')),
        members: [...part('members').querySelectorAll('.member')].map(one => [cells(one).map(value), [...one.querySelectorAll('.bar')].map(value)])};
"""  # noqa: E501


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.mark.parametrize("way", STEPS)
def test_every_step_keeps_the_rules_of_the_method(browser: Browser, way: str) -> None:
    browser.get(FIGURE.as_uri())
    browser.find_element(By.CSS_SELECTOR, f"[data-way={way}]").click()
    after = browser.find_element(By.CLASS_NAME, "next")
    steps = [browser.execute_script(SEEN)]
    while after.is_enabled():
        after.click()
        steps.append(browser.execute_script(SEEN))
    assert len(steps) == STEPS[way]
    for before, step in pairwise(steps):
        kept = [cell for cell, owner in enumerate(before["owners"]) if owner is not None]
        assert all(step["owners"][cell] == before["owners"][cell] for cell in kept), "owners do not change"
        if way == "sequential":
            assert not any(step["open"][cell] for cell in kept), "what has an owner trains in no later stage"
        for member, (weights, outputs) in enumerate(step["members"][:3]):
            own = [weight is not None for weight in weights]
            assert own == [owner == member for owner in step["owners"]]
            if outputs:
                rows = [weights[row : row + 6] for row in range(0, 36, 6)]
                expected = [sum(x * (w or 0) for x, w in zip(INPUT, row, strict=True)) for row in rows]
                assert outputs == pytest.approx(expected)
    last = steps[-1]
    assert Counter(last["owners"]) == {0: 12, 1: 12, 2: 12}
    answers = [outputs for _, outputs in last["members"][:3]]
    assert last["members"][3][1] == pytest.approx([sum(each) / 3 for each in zip(*answers, strict=True)])
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors
    browser.find_element(By.CLASS_NAME, "back").click()
    assert browser.execute_script(SEEN) == steps[-2]


def test_it_loads_nothing() -> None:
    text = FIGURE.read_text()
    assert "http" not in text
    assert "src=" not in text
