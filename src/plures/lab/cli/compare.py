"""Commands that train many runs and show them in one table: compare, reproduce."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tyro.conf import Positional, Suppress, arg

from plures.checks import unknown, whole_number
from plures.errors import visible
from plures.files import check_place
from plures.lab.cli.shared import Command, DataDir, Given, Switch
from plures.lab.compare import Comparison, variants
from plures.lab.paper import PAPER, TARGETS
from plures.lab.recipes import RECIPES, Recipe

if TYPE_CHECKING:  # --help answers without torch
    from plures.lab.compare.rows import Row

Runs = Annotated[Path, arg(metavar="FOLDER", help="The folder for all runs.")]
Jobs = Annotated[
    int | None,
    arg(metavar="N", help_behavior_hint="", help="How many runs to train at a time; by default, one per GPU or core."),
]
AFTER_INTERRUPT = "the same command resumes, and repeats no finished run"


def tell(title: str, stem: Path, rows: "Sequence[Row]", notes: Mapping[str, str]) -> None:
    """Write a table to files, print it, and print which runs failed."""
    from plures.lab.compare import table

    paths = table.write(stem, rows, {**table.about(rows), **notes})
    for row in rows:
        for failure in row.failures:
            print(visible(f"plures: {row.name} failed with {failure}"), file=sys.stderr)
    table.show(title, rows, f"written: {', '.join(map(str, paths))}")


@dataclass(frozen=True)
class Compare(Command):
    """Train several methods on one recipe and print one table.

    Examples:
      plures compare digits --seeds 3
      plures compare cifar10-cpu --methods deterministic deep-ensemble
      plures compare cifar10-cpu --methods orthogonal-dropout
        orthogonal-dropout:granularity=weight mymethods:TwoHeads
      plures compare digits --epochs.train 10 --runs runs/short

    What happens:
      Missing runs are trained, finished runs are skipped, and interrupted
      runs are resumed, in RUNS/RECIPE/METHOD/seed-N. Each is a process of
      `plures train` with one core or GPU, and prints to output.txt there. The
      table is written to RUNS/RECIPE as results.md and results.json. Settings
      of the recipe can be overridden as in `plures train`; methods that train
      for more epochs still do. The table has only the methods of this command;
      `plures report RUNS/RECIPE` shows all finished runs.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """The recipe: it sets the defaults of all options below. `plures recipes` lists them."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD[:NAME=VALUE,...]", help_behavior_hint="")] = ()
    """The methods, each with options that differ from the defaults; by default, all methods."""
    seeds: Annotated[int, arg(metavar="N")] = 1
    """How many runs to train per method, with the seeds 0, 1, ..."""
    runs: Runs = Path("runs")
    jobs: Jobs = None
    data_dir: DataDir = None
    settings: Annotated[Recipe, arg(name="")] = field(default_factory=Recipe)
    given: Given = ()
    method: Annotated[str, Suppress] = "deterministic"  # each method changes the recipe itself; this one does not

    after_interrupt: ClassVar[str] = AFTER_INTERRUPT

    def __call__(self) -> int:
        """Train the missing runs, and show the table."""
        whole_number("--seeds", self.seeds)
        seeds = tuple(range(self.settings.seed, self.settings.seed + self.seeds))
        members = self.settings.members if "members" in self.given else None
        comparison = Comparison(self.recipe, self.settings, variants(self.methods), seeds, members=members)

        from plures.lab.compare.compare import compare  # only now: reporting a misspelt method needs no torch

        stem = self.runs / self.recipe / "results"
        check_place(Path(f"{stem}.md"))  # before hours of training, not after
        (rows,) = compare([comparison], self.runs, at_once=self.jobs, data_dir=self.data_dir)
        tell(f"{self.recipe}: {self.settings.data}, {self.settings.model}", stem, rows, {})
        return 2 if any(row.failures for row in rows) else 0


@dataclass(frozen=True)
class Reproduce(Command):
    """Reproduce a table or figure of the paper, at full or small scale.

    Examples:
      plures reproduce table3 --scale digits
      plures reproduce figure2 --scale digits --seeds 3
      plures reproduce table1 --scale cpu --data-dir data
        --recipes cifar10-cpu
      plures reproduce table1 --scale paper --dry-run    only the plan
      plures reproduce all --scale smoke

    Targets:
      table1   all methods on four data sets
      table2   the same with wide ResNets
      table3   the contribution of each part
      figure1  the accuracy of each member
      figure2  quality against the number of members
      figure3  the same, with MIMO
      all      all of them; runs that they share are trained once

    Costs:
      It first prints how much is left to train, with a time estimated from a
      measured step. SIGTERM, which rented machines get, loses at most one
      epoch of each run in progress; the same command continues.

    Files:
      Runs are in RUNS/RECIPE/METHOD/seed-N. Tables and `plures compare`
      share them. Tables are written to OUT as Markdown and JSON, figures
      also as PDF and SVG.
    """

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """table1 to table3, figure1 to figure3, or all."""
    scale: Literal["paper", "cpu", "digits", "smoke"] = "digits"
    """The settings of the paper, small versions for two cores, embedded digits, or 64 of them for one epoch."""
    recipes: Annotated[tuple[str, ...], arg(metavar="RECIPE", help_behavior_hint="")] = ()
    """The recipes; by default, all of the scale."""
    seeds: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many runs to train per method; by default, 3 at the scale paper, 2 at digits, 1 at cpu and smoke."""
    dry_run: Switch = False
    """Only print the plan: runs, stages, epochs."""
    runs: Runs = Path("runs")
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    """The folder for tables and figures."""
    jobs: Jobs = None
    data_dir: DataDir = None

    after_interrupt: ClassVar[str] = AFTER_INTERRUPT

    def __call__(self) -> int:
        """Train the missing runs, write the tables and draw the figures."""
        names = tuple(TARGETS) if self.target == "all" else (self.target,)
        if names[0] not in TARGETS:
            raise unknown("table or figure", self.target, [*TARGETS, "all"])
        asked = {name: TARGETS[name].comparisons(self.scale, self.seeds, self.recipes) for name in names}
        return self._plan(list(chain(*asked.values()))) if self.dry_run else self._make(asked)

    def _plan(self, comparisons: Sequence[Comparison]) -> int:
        from plures.lab import terminal
        from plures.lab.compare.compare import planned

        lines = planned(comparisons, self.runs)
        about = dict.fromkeys(f"{comparison.name}: {RECIPES[comparison.name].about}" for comparison in comparisons)
        keys = ("runs", "done", "stages", "epochs")
        rows = [[line["recipe"], line["variant"], *(f"{line[key]:,}" for key in keys)] for line in lines]
        rows.append(["total", "", *(f"{sum(line[key] for line in lines):,}" for key in keys)])
        headings = ["recipe", "method", "runs", "done", "stages to train", "epochs to train"]
        title = f"{self.target} at the scale {self.scale}"
        terminal.show(terminal.table(title, headings, rows, words=["recipe", "method"]), *about)
        return 0

    def _make(self, asked: Mapping[str, Sequence[Comparison]]) -> int:
        from plures.lab.compare.compare import compare, costs_before

        for target in asked:
            check_place(self.out / f"{target}.md")
        every = [comparison for comparisons in asked.values() for comparison in comparisons]
        for line in costs_before(every, self.runs, self.data_dir):
            print(line, file=sys.stderr)
        found = compare(every, self.runs, at_once=self.jobs, data_dir=self.data_dir)
        targets = [target for target, comparisons in asked.items() for _ in comparisons]
        for target, comparison, rows in zip(targets, every, found, strict=True):
            title, notes = f"{target}, {comparison.name}", {"paper": PAPER, **TARGETS[target].notes}
            tell(title, self.out / f"{target}-{comparison.name}", rows, notes)
        for figure in (target for target in asked if target.startswith("figure")):
            from plures.lab.figures import draw

            tables = [(one, rows) for target, one, rows in zip(targets, every, found, strict=True) if target == figure]
            paths = draw(figure, tables, self.out / f"{figure}-{self.scale}", self.data_dir)
            print("drawn:", *paths, file=sys.stderr)
        return 2 if any(row.failures for rows in found for row in rows) else 0
