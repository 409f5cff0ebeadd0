"""Progress of training: a line for each stage, and a live bar on a terminal."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from plures.errors import visible
from plures.stage import Step

PAUSE = 1.0  # the least seconds between plain lines: short epochs would flood a log file
REFRESH = 2.0  # redraws a second: they take time from the training


class Display(AbstractContextManager["Display"]):
    """Show what each stage has reached, and the time that is left.

        with Display(ensemble.plan(), epochs, quiet=False) as display:
            display.epoch(record)

    `epochs` has the number of epochs of each step of the plan. Messages of the logger "plures" are shown as well.
    """

    def __init__(self, plan: Sequence[Step], epochs: Mapping[str, int], *, quiet: bool) -> None:
        self.plan = list(plan)
        self.epochs = epochs
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False)
        self.reached = {step.name: epochs[step.name] if step.committed else 0 for step in plan}
        self.last: Mapping[str, Any] | None = None
        self._seconds = 0.0  # of the epochs seen so far, from which the time left is estimated
        self._seen = 0
        self._last_line = -PAUSE
        self._live: Live | None = None
        self._messages = _Messages(self)
        self._level = logging.NOTSET

    def __enter__(self) -> Self:
        if not self.quiet:
            logger = logging.getLogger("plures")
            self._level = logger.level
            logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
            logger.addHandler(self._messages)
            if self.console.is_terminal and not all(step.committed for step in self.plan):
                self._live = Live(
                    get_renderable=self._bar, console=self.console, refresh_per_second=REFRESH, transient=False
                )
                self._live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._live is not None:
            self._live.stop()
        if not self.quiet:
            logger = logging.getLogger("plures")
            logger.removeHandler(self._messages)
            logger.setLevel(self._level)

    def say(self, text: str) -> None:
        """Show one message."""
        if not self.quiet:
            self.console.print(Text(visible(text)), soft_wrap=True)

    def stage(self, step: Step, epoch: int) -> None:
        """Show that a stage resumes at an epoch."""
        self.reached[step.name] = epoch

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Show the record of an epoch."""
        self.last = record
        self.reached[record["stage"]] = record["epoch"]
        self._seconds += record["seconds"]
        self._seen += 1
        due = self._live is None and time.monotonic() - self._last_line >= PAUSE
        if due or record["epoch"] == record["epochs"]:
            self._last_line = time.monotonic()
            self.say(self._line(record))

    def _line(self, record: Mapping[str, Any]) -> str:
        number = [step.name for step in self.plan].index(record["stage"]) + 1
        parts = [f"[{number}/{len(self.plan)}] {record['stage']}", f"epoch {record['epoch']}/{record['epochs']}"]
        parts.append(f"loss {record['loss']:.3f}")
        if record["validation_accuracy"] is not None:
            parts.append(f"validation {record['validation_accuracy']:.1%}")
        parts.append(f"{record['images_per_second']:,.0f} images/s")
        parts.append(f"{duration(self._time_left())} left")
        return "  ".join(parts)

    def _time_left(self) -> float:
        ahead = sum(self.epochs[step.name] - self.reached[step.name] for step in self.plan)
        return ahead * self._seconds / max(self._seen, 1)

    def _bar(self) -> RenderableType:
        total = max(sum(self.epochs.values()), 1)
        bar = ProgressBar(total=total, completed=sum(self.reached.values()), width=60)
        return Group(bar, Text("starting" if self.last is None else self._line(self.last)))


def duration(seconds: float) -> str:
    """Return a time span in words.

    >>> duration(75)
    '1:15 min'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


class _Messages(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        self.display.say(record.getMessage())
