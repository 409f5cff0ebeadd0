"""Progress of many runs: a live list on a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from plures.errors import visible
from plures.lab.compare.jobs import Job
from plures.lab.runs.folder import RunFolder
from plures.lab.training.progress import duration

PAUSE = 60.0  # seconds between plain lines about the runs in progress
OUTPUT = "output.txt"  # what the process of a run printed, in its run folder
LONGEST = 1 << 14  # bytes at the end of the output that are looked at
SHOWN = 12  # runs that the live list has room for


class Started(Protocol):
    """A run that is being trained somewhere."""

    def poll(self) -> int | str | None:
        """Return None while it is being trained, then its exit code, or why there is none."""

    def end(self) -> None:
        """End it, and wait until it has ended."""


@dataclass(frozen=True)
class Attempt:
    """One run in progress: its process, and what it has printed since it was started."""

    job: Job
    process: Started
    offset: int  # bytes of the output that earlier attempts have written

    @property
    def line(self) -> str:
        """The last line that was printed; empty if there is none."""
        with suppress(OSError), (self.job.run / OUTPUT).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self.offset, end - LONGEST))
            lines = file.read().decode(errors="replace").splitlines()
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


class RunsDisplay(AbstractContextManager["RunsDisplay"]):
    """Show how far the runs are: the last line that each has printed.

    with RunsDisplay(len(jobs)) as display:
        display.ended(job, reason=None)
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._console = Console(stderr=True, highlight=False)
        self._running: Sequence[Attempt] = ()
        self._ended = 0
        self._last_line = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self.lines, console=self._console, refresh_per_second=1, transient=True)
            self._live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, running: Sequence[Attempt]) -> None:
        """Show the runs in progress: on a terminal always, elsewhere once a minute."""
        self._running = tuple(running)
        if self._live is None and running and time.monotonic() - self._last_line >= PAUSE:
            self._last_line = time.monotonic()
            for one in running:
                self._print(f"{one.job.name}: {one.line or 'starting'}")

    def ended(self, job: Job, reason: str | None) -> None:
        """Show the result of a run, or why it failed."""
        self._ended += 1
        result = _result(job) if reason is None else f"failed: {reason}"
        self._print(f"[{self._ended}/{self._count}] {job.name}: {result}")

    def lines(self) -> RenderableType:
        """Return the live list: two lines for each run in progress, and how many are done."""
        shown = [
            Text(visible(line), style, overflow="fold")
            for one in self._running[:SHOWN]
            for line, style in ((one.job.name, ""), (f"  {one.line or 'starting'}", "dim"))
        ]
        return Group(*shown, Text(f"{self._ended} of {self._count} runs are done"))

    def _print(self, words: str) -> None:
        self._console.print(Text(visible(words)), soft_wrap=True)


def _result(job: Job) -> str:
    found = RunFolder(job.run).metrics()
    return f"accuracy {found['accuracy']:.1%}, NLL {found['nll']:.3f}, trained in {duration(found['seconds'])}"
