"""Commands for many runs: compare, reproduce, report."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

from plures.checks import unknown
from plures.errors import PluresError
from plures.lab.cli.shared import DataDir, Settings, Switch, print_json
from plures.lab.recipes import get_recipe

if TYPE_CHECKING:  # --help answers without torch
    from plures.lab.compare.jobs import Comparison
    from plures.lab.compare.rows import Row


@dataclass(frozen=True)
class Compare:
    """Run methods side by side on one recipe and put them into one table, with the paper's figures beside ours.

    Examples:
      plures compare digits --seeds 3
      plures compare cifar10-cpu --methods deterministic orthogonal-dropout deep-ensemble --data-dir data
      plures compare cifar10-cpu --methods orthogonal-dropout orthogonal-dropout:granularity=kernel
      plures compare digits --epochs.train 10 --runs runs/short --on ray

    Runs that are missing are made, finished ones skipped, cut ones resumed, in RUNS/RECIPE/METHOD/seed-N. The table
    goes to RUNS/RECIPE as results.md, results.csv and results.json. Each run takes one core (or one GPU), several go on
    at a time. Numbers of the recipe can be overridden as for `plures train`; methods that need longer still get longer.
    The table holds the methods of this command; `plures report RUNS/RECIPE` shows all finished runs.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """Where all numbers come from, unless given below; `plures recipes` lists them."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD[:NAME=VALUE,...]")] = ()
    """Which methods, each with its options if it needs others than usual; all if none is named."""
    seeds: Annotated[int, arg(metavar="N")] = 1
    """Run every method so many times, with the seeds 0, 1, ..."""
    runs: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    """The folder of all runs."""
    jobs: Annotated[int | None, arg(metavar="N")] = None
    """How many runs go on at a time; if not given, one per GPU or core."""
    on: Literal["here", "ray"] = "here"
    """Where runs are made: here, or by the workers of a Ray cluster that sees the same folders."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    json: Switch = False
    """Print the results as JSON."""
    settings: Annotated[Settings, arg(name="")] = field(default_factory=Settings)

    after_interrupt: ClassVar[str] = "the same command goes on, and repeats no finished run"

    def __call__(self) -> int:
        """Run what is missing, and show the table."""
        from plures.lab.compare.jobs import Comparison, variants

        if self.seeds < 1:
            raise PluresError(f"--seeds {self.seeds}: at least one is needed")
        seeds = tuple(range(self.settings.seed, self.settings.seed + self.seeds))
        members = self.settings.members if self.settings.members != get_recipe(self.recipe).members else None
        comparison = Comparison(self.recipe, self.settings, variants(self.methods), seeds, members=members)

        from plures.lab.compare import table as write  # only now: to say that a method is misspelt needs no torch
        from plures.lab.compare.compare import compare

        folder = write.writable(self.runs / self.recipe)
        (rows,) = compare([comparison], self.runs, at_once=self.jobs, data_dir=self.data_dir, on=self.on)
        chosen = write.columns(rows)
        paths = write.write(folder, "results", rows, chosen, write.about(rows))
        _tell_failures(rows)
        if self.json:
            print_json(write.document(rows, write.about(rows)))
        else:
            title = f"{self.recipe}: {self.settings.data}, {self.settings.model}"
            write.show(title, rows, chosen, f"written: {', '.join(map(str, paths))}")
        return 2 if any(row.failures for row in rows) else 0


@dataclass(frozen=True)
class Reproduce:
    """Make a table or figure of the paper: at full scale for GPUs, or at one that two cores finish.

    Examples:
      plures reproduce table3 --scale digits
      plures reproduce table1 --scale cpu --data-dir data --recipes cifar10-cpu
      plures reproduce table1 --scale paper --dry-run       what it would take here, without running it
      plures reproduce figure2 --scale digits

    table1: all methods on four data sets; table2: the same with wide ResNets; table3: what each part contributes;
    figure1: the accuracy of each member; figure2: quality against the number of members; figure3: the same with MIMO.
    Runs live in RUNS/RECIPE/METHOD/seed-N: tables and figures share them, and `plures compare` does, too. Tables are
    written to OUT as Markdown, CSV and JSON, figures as PDF, PNG and SVG.
    """

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """table1, table2, table3, figure1, figure2 or figure3."""
    scale: Literal["paper", "cpu", "digits"] = "digits"
    """The paper's settings, small versions for two cores, or embedded digits."""
    recipes: Annotated[tuple[str, ...], arg(metavar="RECIPE")] = ()
    """Only these of the recipes that the scale has."""
    seeds: Annotated[int | None, arg(metavar="N")] = None
    """Run every method so many times; if not given, 3 at the scale paper, 1 at cpu, 2 at digits."""
    dry_run: Switch = False
    """Only print the plan: runs, epochs, estimated time here, disk."""
    runs: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    """The folder of all runs."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    """Where tables and figures are written."""
    jobs: Annotated[int | None, arg(metavar="N")] = None
    """How many runs go on at a time; if not given, one per GPU or core."""
    on: Literal["here", "ray"] = "here"
    """Where runs are made: here, or by the workers of a Ray cluster that sees the same folders."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    json: Switch = False
    """Print the results as JSON."""

    after_interrupt: ClassVar[str] = "the same command goes on, and repeats no finished run"

    def __call__(self) -> int:
        """Run what is missing, and write the table or draw the figure."""
        from plures.lab.paper.targets import TARGETS

        if self.target not in TARGETS:
            raise unknown("table or figure", self.target, TARGETS)
        comparisons = TARGETS[self.target].comparisons(self.scale, self.seeds, self.recipes)
        return self._plan(comparisons) if self.dry_run else self._make(comparisons)

    def _plan(self, comparisons: "Sequence[Comparison]") -> int:
        from plures.lab import tables
        from plures.lab.compare.plan import plan_table, planned
        from plures.lab.compare.pool import default_jobs

        lines = []
        for comparison in comparisons:
            print(f"measuring {comparison.name}", file=sys.stderr)
            lines += list(planned(comparison, self.runs))
        at_once = self.jobs or default_jobs()
        if self.json:
            print_json({"target": self.target, "scale": self.scale, "plan": [asdict(line) for line in lines]})
        else:
            tables.show(plan_table(f"{self.target} at the scale {self.scale}", lines, at_once))
        return 0

    def _make(self, comparisons: "Sequence[Comparison]") -> int:
        from plures.lab.compare import table as write
        from plures.lab.compare.compare import compare
        from plures.lab.paper.draw import draw
        from plures.lab.paper.targets import TARGETS

        folder = write.writable(self.out)
        found = compare(comparisons, self.runs, at_once=self.jobs, data_dir=self.data_dir, on=self.on)
        target = TARGETS[self.target]
        documents = {}
        for comparison, rows in zip(comparisons, found, strict=True):
            chosen = target.columns(rows)
            about = write.about(rows) | target.notes
            paths = write.write(folder, f"{self.target}-{comparison.name}", rows, chosen, about)
            documents[comparison.name] = write.document(rows, about)
            _tell_failures(rows)
            if not self.json:
                title = f"{self.target}, {comparison.name}"
                write.show(title, rows, chosen, f"written: {', '.join(map(str, paths))}")
        if self.json:
            print_json({"target": self.target, "scale": self.scale, "tables": documents})
        if self.target.startswith("figure"):
            pairs = list(zip(comparisons, found, strict=True))
            drawn = draw(self.target, pairs, self.out / f"{self.target}-{self.scale}", self.data_dir)
            print(f"drawn: {', '.join(map(str, drawn))}", file=sys.stderr)
        return 2 if any(row.failures for rows in found for row in rows) else 0


@dataclass(frozen=True)
class Report:
    """Make one self-contained HTML page of finished runs: tables, calibration, members, doubtful images, mistakes.

    Examples:
      plures report runs/digits
      plures report runs/cifar10-cpu/deep-ensemble/seed-0 runs/cifar10-cpu/orthogonal-dropout/seed-0 --out report.html

    Folders are run folders or hold them at any depth. Runs that differ in their seed only are one row; details show
    the first of them. The page needs no network and no script, and can be sent to anybody.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
    """Run folders, or folders that hold them."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("report.html")
    """Where the page is written."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""

    after_interrupt: ClassVar[str] = "nothing was written"

    def __call__(self) -> int:
        """Write the page, and say where."""
        from plures.lab.compare.rows import rows_of, with_costs
        from plures.lab.report import write_report

        if not self.runs:
            raise PluresError("there are no runs to report on: name run folders, or folders that hold them")
        rows = with_costs(rows_of(self.runs))
        words = " ".join(shlex.quote(str(run)) for run in self.runs)
        print(write_report(rows, self.out, data_dir=self.data_dir, command=f"plures report {words}"))
        return 0


def _tell_failures(rows: "Sequence[Row]") -> None:
    for row in rows:
        for failure in row.failures:
            print(f"plures: {row.name} failed with {failure}", file=sys.stderr)
