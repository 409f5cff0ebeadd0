"""Progress of training: a line for each stage, and a live bar on a terminal."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
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
        self.epochs = epochs
        self._left = {step.name: epochs[step.name] for step in plan if not step.committed}
        self._quiet = quiet
        self._seconds = 0.0  # of the epochs seen so far, from which the time left is estimated
        self._seen = 0
        self._last_line = -PAUSE
        console = Console(stderr=True, highlight=False, quiet=quiet)
        self._live = console.is_terminal and bool(self._left)
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False, table_column=Column()))
        self._bar = Progress(*columns, console=console, refresh_per_second=REFRESH, disable=quiet or not self._live)
        self._task = self._bar.add_task("starting", total=sum(epochs.values()))
        self._messages = logging.Handler(logging.INFO)
        self._messages.emit = lambda record: self.say(record.getMessage())  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        self._logger = logging.getLogger("plures")
        self._level = self._logger.level
        if not self._quiet:
            self._logger.setLevel(min(self._logger.getEffectiveLevel(), logging.INFO))
            self._logger.addHandler(self._messages)
        self._bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._bar.stop()
        self._logger.removeHandler(self._messages)
        self._logger.setLevel(self._level)

    def say(self, text: str) -> None:
        """Show one message."""
        self._bar.console.print(Text(visible(text)), soft_wrap=True)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Show the record of an epoch."""
        self._left[record["stage"]] = record["epochs"] - record["epoch"]
        self._seconds += record["seconds"]
        self._seen += 1
        left = sum(self._left.values())
        parts = [f"[{[*self.epochs].index(record['stage']) + 1}/{len(self.epochs)}] {record['stage']}"]
        parts += [f"epoch {record['epoch']}/{record['epochs']}", f"loss {record['loss']:.3f}"]
        if record["validation_accuracy"] is not None:
            parts.append(f"validation {record['validation_accuracy']:.1%}")
        parts.append(f"{record['images_per_second']:,.0f} images/s")
        parts.append(f"{duration(left * self._seconds / self._seen)} left")
        line = "  ".join(parts)
        self._bar.update(self._task, completed=sum(self.epochs.values()) - left, description=line)
        due = not self._live and time.monotonic() - self._last_line >= PAUSE
        if due or record["epoch"] == record["epochs"]:
            self._last_line = time.monotonic()
            self.say(line)


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
