"""What experiments would take on this machine, before anybody waits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from plures.lab import tables
from plures.lab.compare.jobs import Comparison
from plures.lab.compare.pool import is_done
from plures.lab.timing.estimates import estimate

START = 4.0  # seconds until the process of a run has imported everything, and to measure it in the end


@dataclass(frozen=True)
class Planned:
    """What the runs of one variant take on this machine.

    Planned("cifar10-cpu", "mimo", runs=3, done=1, epochs=60, seconds=1200.0, bytes=3_000_000)
    """

    recipe: str
    variant: str
    runs: int
    done: int
    epochs: int  # of the runs that are missing
    seconds: float | None  # of these
    bytes: int | None


def planned(comparison: Comparison, runs: Path) -> Iterator[Planned]:
    """Say what a comparison would take, from a few steps of each method on random images.

    for line in planned(TARGETS["table1"].comparisons("cpu")[0], Path("runs")): print(line)
    """
    jobs = comparison.jobs(runs)
    for variant in comparison.variants:
        own = [job for job in jobs if job.variant == variant]
        missing = [job for job in own if not is_done(job)]
        found = estimate(own[0].recipe, variant.method, variant.settings)  # on one core, as each run has
        yield Planned(
            comparison.name,
            variant.name,
            len(own),
            len(own) - len(missing),
            found.epochs * len(missing) if found else 0,
            (found.seconds + START) * len(missing) if found else None,
            found.bytes * len(own) if found else None,
        )


def plan_table(title: str, lines: Sequence[Planned], at_once: int) -> Table:
    """Show a plan with its sums; `at_once` runs are made at a time.

    tables.show(plan_table("table1 at the scale cpu", lines, at_once=2))
    """
    headings = ["recipe", "method", "runs", "done", "epochs", "time here", "disk"]
    rows = [
        [
            line.recipe,
            line.variant,
            str(line.runs),
            str(line.done),
            f"{line.epochs:,}",
            tables.roughly(line.seconds),
            _megabytes(line.bytes),
        ]
        for line in lines
    ]
    sums = [
        f"together, {at_once} at a time",
        "",
        str(sum(line.runs for line in lines)),
        str(sum(line.done for line in lines)),
        f"{sum(line.epochs for line in lines):,}",
        tables.roughly(sum(line.seconds or 0 for line in lines) / at_once),
        _megabytes(sum(line.bytes or 0 for line in lines)),
    ]
    return tables.table(title, headings, [*rows, sums], words=["recipe", "method"])


def _megabytes(size: int | None) -> str:
    return tables.UNKNOWN if size is None else f"{size / 1e6:,.1f} MB"
