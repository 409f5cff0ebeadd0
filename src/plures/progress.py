"""Progress of training: one line that is written again and again on a terminal, and plain lines elsewhere."""

import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from plures.errors import visible
from plures.stage import Step

PAUSE = 1.0  # the least seconds between plain lines: short epochs would flood a log file
CLEAR = "\r\x1b[K"  # to the start of the line, and erase it


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """Show what each stage has reached, and the time that is left.

        with ProgressLine(ensemble.plan(), epochs, quiet=False) as display:
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
        self._live = sys.stderr.isatty()
        self._messages = logging.Handler(logging.INFO)
        self._messages.emit = lambda record: self.say(record.getMessage())  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        self._logger = logging.getLogger("plures")
        self._level = self._logger.level
        if not self._quiet:
            self._logger.setLevel(min(self._logger.getEffectiveLevel(), logging.INFO))
            self._logger.addHandler(self._messages)
        return self

    def __exit__(self, *reason: object) -> None:
        self._logger.removeHandler(self._messages)
        self._logger.setLevel(self._level)

    def say(self, text: str) -> None:
        """Show one message."""
        self._write(f"{visible(text)}\n")

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
        parts.append(f"{duration(left * self._seconds / self._seen)} left")
        parts.append(f"{record['images_per_second']:,.0f} images/s")  # the last: a narrow terminal cuts it
        line = "  ".join(parts)
        ended = record["epoch"] == record["epochs"]
        if ended or (not self._live and time.monotonic() - self._last_line >= PAUSE):
            self._last_line = time.monotonic()
            self.say(line)
        elif self._live:
            self._write(line[: shutil.get_terminal_size().columns - 1])

    def _write(self, text: str) -> None:
        if not self._quiet:
            print(CLEAR * self._live + text, end="", file=sys.stderr, flush=True)


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
