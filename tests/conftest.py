"""What tests do less often than users: a few examples of each property, and costs measured once.

In `make test` hypothesis always draws the same few examples, in `make attack` many new ones.
"""

import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# No example fails because the machine is busy.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("test", patient, derandomize=True, database=None, max_examples=20)
settings.register_profile("attack", patient, max_examples=500, print_blob=True)
settings.load_profile("test")


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts of a page out, where a test is about something else: they take nearly all the time of a page."""
    monkeypatch.setattr("plures.lab.report.sections.chart", lambda *_, **__: "")


@pytest.fixture(autouse=True, scope="session")
def _quick_costs() -> Iterator[None]:
    """Measure the costs of runs once, not in nine rounds: no test judges them."""
    with pytest.MonkeyPatch.context() as patch:
        if costs := sys.modules.get("plures.lab.costs"):
            patch.setattr(costs, "ROUNDS", 1)
            patch.setattr(costs, "SHORTEST", 0.0)
        yield


@pytest.fixture(autouse=True)
def _threads_of_torch() -> Iterator[None]:
    """Leave torch's number of threads as it was: the last bits of matrix products depend on it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
