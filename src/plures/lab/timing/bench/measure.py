"""Ratios measured side by side in one run: the machine's mood cancels out."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Action = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Keep one measured ratio, with the spread over the rounds and the bar that it should not pass.

        >>> str(Ratio("masked step / plain step", "ResNet18", 1.02, 1.01, 1.04, bar=1.05))
        'masked step / plain step (ResNet18): 1.02, 1.01 to 1.04; bar 1.05'

    `value` is the median of the rounds' ratios, `low` and `high` are the least and the largest.
    """

    name: str
    setting: str
    value: float
    low: float
    high: float
    bar: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Tell whether the bar is met, or None where there is none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def __str__(self) -> str:
        bar = "" if self.bar is None else f"; bar {self.bar:g}"
        return f"{self.name} ({self.setting}): {self.value:.3g}, {self.low:.3g} to {self.high:.3g}{bar}"


@dataclass(frozen=True)
class LeftOut:
    """Keep what was not measured, and why.

    >>> str(LeftOut("prediction", "WRN28-10, batch 128, float32", "a pass would take 70 s"))
    'prediction (WRN28-10, batch 128, float32): left out, a pass would take 70 s'
    """

    name: str
    setting: str
    why: str
    met: None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.setting}): left out, {self.why}"


def ratio(name: str, setting: str, samples: list[float], bar: float | None = None, at_least: bool = False) -> Ratio:
    """Make a ratio of the samples of several rounds.

    ratio("file / plain file", "ResNet18", [1.083])
    """
    return Ratio(name, setting, statistics.median(samples), min(samples), max(samples), bar, at_least)


def race(
    setting: str,
    baseline: Action,
    rivals: Mapping[str, Action],
    rounds: int,
    bars: Mapping[str, float] | None = None,
    *,
    warm_up: bool = True,
) -> Iterator[Ratio]:
    """Time rivals against one baseline, round by round, and give the median of the rounds' ratios.

        race("ResNet18, batch 64", plain_step, {"masked step / plain step": masked_step}, rounds=5)

    In every round the baseline runs before and after each rival, and the rival is divided by the mean of the two: a
    machine that grows slower or faster meanwhile does so for both. What takes many seconds needs no `warm_up`.
    """
    for action in (baseline, *rivals.values()) if warm_up else ():
        action()
    samples: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        before = seconds(baseline)
        for name, rival in rivals.items():
            taken, after = seconds(rival), seconds(baseline)
            samples[name].append(2 * taken / (before + after))
            before = after
    for name, found in samples.items():
        yield ratio(name, setting, found, (bars or {}).get(name))


def seconds(action: Action) -> float:
    """Time one run of an action.

    least = min(seconds(step) for _ in range(3))
    """
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
