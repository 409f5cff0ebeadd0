"""Times are measured in turn. No time is ever asserted."""

from plures.lab.timing.harness import timed


def test_what_is_short_is_repeated_and_timed_once_per_round() -> None:
    ticks = iter(range(100))
    runs: list[int] = []
    (found,) = timed([lambda: runs.append(1)], rounds=2, clock=lambda: float(next(ticks)), shortest=4.0)
    assert len(runs) == 1 + 1 + 2 * 4, "to warm up, to see how short it is, and four times in each round"
    assert found == [0.25, 0.25]
