"""Times are measured in turn; estimates are stored. No time is ever asserted."""

import itertools
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from plures.lab.recipes import get_recipe
from plures.lab.timing import estimates
from plures.lab.timing.harness import timed


def test_what_is_short_is_repeated_and_timed_once_per_round() -> None:
    ticks = iter(range(100))
    runs: list[int] = []
    (found,) = timed([lambda: runs.append(1)], rounds=2, clock=lambda: float(next(ticks)), shortest=4.0)
    assert len(runs) == 1 + 1 + 2 * 4, "to warm up, to see how short it is, and four times in each round"
    assert found == [0.25, 0.25]


def test_an_estimate_is_made_once_and_listed_without_measuring(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path))
    recipe = get_recipe("digits")
    assert estimates.kept_estimate(recipe) is None
    first = estimates.estimate(recipe)
    assert first is not None
    assert first.epochs == 5 * (30 + 30) + 4 * 3
    assert first.seconds > 0
    monkeypatch.setattr(estimates, "_measure", lambda *_: pytest.fail("measured again"))
    assert estimates.estimate(replace(recipe, seed=7)) == first
    assert estimates.kept_estimate(recipe) == first
    assert estimates.kept_estimate(recipe, "deep-ensemble") is None
    assert estimates.kept_estimate(replace(recipe, width=8)) is None
    monkeypatch.setattr(estimates, "processor", lambda: "another one")
    assert estimates.kept_estimate(recipe) is None


def test_an_estimate_that_cannot_be_kept_or_read_is_made_all_the_same(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "estimates.json").write_text("[broken")
    found = estimates.Estimate(epochs=1, seconds=2.0, bytes=3)
    monkeypatch.setattr(estimates, "_measure", lambda *_: found)
    for cache in (tmp_path / "file", tmp_path):
        monkeypatch.setenv("PLURES_CACHE", str(cache))
        assert estimates.estimate(get_recipe("digits")) == found
    assert estimates.kept_estimate(get_recipe("digits")) == found
    assert estimates.estimate(replace(get_recipe("digits"), data="mine")) is None


def test_a_busy_machine_does_not_make_an_estimate_longer(monkeypatch) -> None:
    """Other processes take 1,000 s of the clock on the wall at every step, and one step in two is slow by itself."""
    wall, work = itertools.count(0.0, 1000.0), itertools.cycle([1e-3, 5.0])
    worked = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "process_time", lambda: worked[0])

    class Stage(nn.Module):
        engine = None

        def parameter_groups(self, weight_decay: float) -> list[nn.Parameter]:
            return [self.weight]

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            worked[0] += next(work)
            return self.weight.sum()

    recipe = replace(get_recipe("digits"), batch_size=16)
    assert estimates.seconds_per_step(Stage(), recipe, channels=1, size=8) == pytest.approx(1e-3)


def test_kept_estimates_are_read_without_torch() -> None:
    code = "import sys; from plures.lab.timing.estimates import kept_estimate; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
