"""Progress of training: a live table on a terminal, plain lines elsewhere."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plures.errors import visible
from plures.stage import Step

PAUSE = 1.0  # seconds between plain lines at least: short epochs would flood a log file
REFRESH = 2.0  # redraws a second: they take time from the training


class Display(AbstractContextManager["Display"]):
    """Show the stages of the members, what they have reached, and the time that is left.

        with Display(ensemble.plan(), epochs, quiet=False) as display:
            display.epoch(record)

    `epochs` says how many each step of the plan has. Messages of the library (logger "plures") are shown as well.
    """

    def __init__(self, plan: Sequence[Step], epochs: Mapping[str, int], *, quiet: bool) -> None:
        self.plan = list(plan)
        self.epochs = epochs
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False)
        self.reached = {step.name: epochs[step.name] if step.committed else 0 for step in plan}
        self.latest: dict[str, Mapping[str, Any]] = {}  # the last record of each stage
        self.last: Mapping[str, Any] | None = None
        self.current = ""
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
                    get_renderable=self._table, console=self.console, refresh_per_second=REFRESH, transient=False
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
        self.current = step.name
        self.reached[step.name] = epoch

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Show the record of an epoch."""
        self.latest[record["stage"]] = self.last = record
        self.reached[record["stage"]] = record["epoch"]
        self._seconds += record["seconds"]
        self._seen += 1
        due = record["epoch"] == record["epochs"] or time.monotonic() - self._last_line >= PAUSE
        if not self.quiet and self._live is None and due:
            self._last_line = time.monotonic()
            number = [step.name for step in self.plan].index(record["stage"]) + 1
            self.console.print(
                Text(f"[{number}/{len(self.plan)}] {record['stage']}  {self._line(record)}"), soft_wrap=True
            )

    def _line(self, record: Mapping[str, Any]) -> str:
        parts = [f"epoch {record['epoch']}/{record['epochs']}", f"loss {record['loss']:.3f}"]
        if record["validation_accuracy"] is not None:
            parts.append(f"validation {record['validation_accuracy']:.1%}")
        parts.append(f"{record['images_per_second']:,.0f} images/s")
        parts.append(f"{duration(self._time_left())} left")
        return "  ".join(parts)

    def _time_left(self) -> float:
        ahead = sum(self.epochs[step.name] - self.reached[step.name] for step in self.plan)
        return ahead * self._seconds / max(self._seen, 1)

    def _table(self) -> RenderableType:
        phases = list(dict.fromkeys(step.phase for step in self.plan))
        table = Table("", *phases, box=None, padding=(0, 2))
        for member in dict.fromkeys(step.member for step in self.plan):
            cells = {step.phase: self._cell(step) for step in self.plan if step.member == member}
            table.add_row("all" if member is None else f"member {member}", *(cells.get(one, "-") for one in phases))
        below = Table.grid()
        total = max(sum(self.epochs.values()), 1)
        below.add_row(ProgressBar(total=total, completed=sum(self.reached.values()), width=60))
        below.add_row("starting" if self.last is None else self._line(self.last))
        return Group(table, below)

    def _cell(self, step: Step) -> RenderableType:
        reached, epochs = self.reached[step.name], self.epochs[step.name]
        record = self.latest.get(step.name)
        if step.name == self.current and reached < epochs:
            return Text(f"{reached}/{epochs}", style="bold")
        if reached < epochs or record is None:
            return Text("done" if step.committed else "", style="dim")
        accuracy = record["validation_accuracy"]
        return Text("done" if accuracy is None else f"{accuracy:.1%}", style="green")


def duration(seconds: float) -> str:
    """Word a time span for people.

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
