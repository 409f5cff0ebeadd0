"""Progress of many runs: a live list on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plures.errors import visible
from plures.lab.compare.jobs import Job
from plures.lab.runs.folder import RunFolder
from plures.lab.runs.schemas import RECORD, parse_object
from plures.lab.training.progress import duration

PAUSE = 60.0  # seconds between plain lines about the runs in progress
SHOWN = 12  # runs that the live list has room for
BAR = 12  # columns of the bar of one run
PADDING = 2


class Watch(AbstractContextManager["Watch"]):
    """Show how far the runs are.

        with Watch(jobs, {job.run: 150 for job in jobs}) as watch:
            watch.ended(job, reason=None)

    `epochs` says how many each run has in all. Where they are is read from their logs, so that it does not matter which
    process or machine makes them.
    """

    def __init__(self, jobs: Sequence[Job], epochs: Mapping[Path, int]) -> None:
        self.jobs = list(jobs)
        self.epochs = epochs
        self.console = Console(stderr=True, highlight=False)
        self.before = {job.run: _records(job) for job in jobs}  # what earlier sessions did says nothing about the speed
        self.begun: set[Path] = set()
        self.results: dict[Path, str | None] = {}
        self._started = self._last_line = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal and self.jobs:
            self._live = Live(get_renderable=self._table, console=self.console, refresh_per_second=1)
            self._live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, job: Job) -> None:
        """Show that a run begins."""
        self.begun.add(job.run)

    def ended(self, job: Job, reason: str | None) -> None:
        """Show that a run came to its end."""
        self.results[job.run] = reason
        number = f"[{len(self.results)}/{len(self.jobs)}]"
        self.console.print(Text(visible(f"{number} {job.name}: {self._result(job)}")), soft_wrap=True)

    def tick(self) -> None:
        """Show, now and then, where the others are."""
        if self._live is None and time.monotonic() - self._last_line >= PAUSE:
            self._last_line = time.monotonic()
            for job in self._running():
                self.console.print(Text(visible(f"{job.name}: {self._position(job)}")), soft_wrap=True)
            self.console.print(Text(self._left()), soft_wrap=True)

    def _running(self) -> list[Job]:
        return [job for job in self.jobs if job.run in self.begun and job.run not in self.results]

    def _result(self, job: Job) -> str:
        reason = self.results[job.run]
        if reason is not None:
            return f"failed: {reason}"
        found = RunFolder(job.run).metrics()
        took = duration(found["seconds"])
        return f"accuracy {found['accuracy']:.1%}, NLL {found['nll']:.3f}, trained in {took}"

    def _position(self, job: Job) -> str:
        last = _last(job)
        if last is None:
            return "starting"
        return f"{last['stage']}, epoch {_records(job)} of {self.epochs[job.run]}, loss {last['loss']:.3f}"

    def _done(self) -> tuple[int, int]:
        """Count the epochs made here, and those that were to be made."""
        # What failed was neither made nor is it to be waited for.
        made = {job.run: _records(job) for job in self.jobs if self.results.get(job.run) is None}
        return (
            sum(made[run] - self.before[run] for run in made),
            sum(self.epochs[run] - self.before[run] for run in made),
        )

    def _left(self) -> str:
        made, total = self._done()
        if not made:
            return f"{total:,} epochs to go"
        seconds = (time.monotonic() - self._started) * (total - made) / made
        return f"{made:,} of {total:,} epochs, about {duration(seconds)} left"

    def _table(self) -> RenderableType:
        """Show a line for each run in progress, or two where one would not fit."""
        shown = [
            (
                Text(visible(job.name), overflow="fold"),
                ProgressBar(total=self.epochs[job.run], completed=_records(job), width=BAR),
                Text(visible(self._position(job)), "dim", overflow="fold"),
            )
            for job in self._running()[:SHOWN]
        ]
        if any(len(name) + len(where) + BAR + 2 * PADDING > self.console.width for name, _, where in shown):
            lines: list[RenderableType] = [line for name, bar, where in shown for line in (name, _grid((bar, where)))]
        else:
            lines = [_grid(*shown)]
        made, total = self._done()
        return Group(*lines, ProgressBar(total=max(total, 1), completed=made, width=60), Text(self._left()))


def _grid(*rows: Sequence[RenderableType]) -> Table:
    table = Table.grid(padding=(0, PADDING))
    for row in rows:
        table.add_row(*row)
    return table


def _records(job: Job) -> int:
    log = RunFolder(job.run).log
    return log.read_bytes().count(b"\n") if log.is_file() else 0


def _last(job: Job) -> Mapping[str, Any] | None:
    """Read the last record; a line that is just being written does not count."""
    log = RunFolder(job.run).log
    lines = log.read_bytes().split(b"\n")[:-1] if log.is_file() else []
    with contextlib.suppress(ValueError):
        return parse_object(lines[-1], RECORD) if lines else None
    return None
