"""plures reproduce: the tables and figures of the paper."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

from plures.checks import unknown
from plures.lab.cli.compare import tell_failures
from plures.lab.cli.shared import DataDir, Switch, print_json

if TYPE_CHECKING:  # --help answers without torch
    from plures.lab.compare import Comparison


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a table or figure of the paper, at full or small scale.

    Examples:
      plures reproduce table3 --scale digits
      plures reproduce table1 --scale cpu --data-dir data
        --recipes cifar10-cpu
      plures reproduce table1 --scale paper --dry-run    only the plan
      plures reproduce figure2 --scale digits

    Targets:
      table1   all methods on four data sets
      table2   the same with wide ResNets
      table3   the contribution of each part
      figure1  accuracy of each member
      figure2  quality against the number of members
      figure3  the same with MIMO

    Files:
      Runs are in RUNS/RECIPE/METHOD/seed-N. Tables, figures and
      `plures compare` share them. Tables are written to OUT as Markdown, CSV
      and JSON, figures as PDF, PNG and SVG.
    """

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """table1, table2, table3, figure1, figure2 or figure3."""
    scale: Literal["paper", "cpu", "digits"] = "digits"
    """The settings of the paper, small versions for two cores, or embedded digits."""
    recipes: Annotated[tuple[str, ...], arg(metavar="RECIPE", help_behavior_hint="")] = ()
    """The recipes; by default, all of the scale."""
    seeds: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many runs to train per method; by default, 3 at the scale paper, 1 at cpu, 2 at digits."""
    dry_run: Switch = False
    """Only print the plan: runs, stages, epochs."""
    runs: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    """The folder for all runs."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    """The folder for tables and figures."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many runs to train at a time; by default, one per GPU or core."""
    on: Literal["here", "ray"] = "here"
    """Where to train: on this machine, or on the workers of a Ray cluster that can access the same folders."""
    data_dir: DataDir = None
    """The folder of data sets; by default, the environment variable PLURES_DATA."""
    json: Switch = False
    """Print the results as JSON."""

    after_interrupt: ClassVar[str] = "the same command resumes, and repeats no finished run"

    def __call__(self) -> int:
        """Train the missing runs, and write the table or draw the figure."""
        from plures.lab.paper.targets import TARGETS

        if self.target not in TARGETS:
            raise unknown("table or figure", self.target, TARGETS)
        comparisons = TARGETS[self.target].comparisons(self.scale, self.seeds, self.recipes)
        return self._plan(comparisons) if self.dry_run else self._make(comparisons)

    def _plan(self, comparisons: "Sequence[Comparison]") -> int:
        from plures.lab import terminal
        from plures.lab.compare.compare import planned
        from plures.lab.recipes import RECIPES

        lines = [line for comparison in comparisons for line in planned(comparison, self.runs)]
        if self.json:
            print_json({"target": self.target, "scale": self.scale, "plan": lines})
        else:
            about = [f"{comparison.name}: {RECIPES[comparison.name].about}" for comparison in comparisons]
            keys = ("runs", "done", "stages", "epochs")
            rows = [[line["recipe"], line["variant"], *(f"{line[key]:,}" for key in keys)] for line in lines]
            rows.append(["total", "", *(f"{sum(line[key] for line in lines):,}" for key in keys)])
            headings = ["recipe", "method", "runs", "done", "stages to train", "epochs to train"]
            title = f"{self.target} at the scale {self.scale}"
            terminal.show(terminal.table(title, headings, rows, words=["recipe", "method"]), *about)
        return 0

    def _make(self, comparisons: "Sequence[Comparison]") -> int:
        from plures.lab.compare import table as write
        from plures.lab.compare.compare import compare
        from plures.lab.paper import PAPER
        from plures.lab.paper.targets import TARGETS, draw

        folder = write.writable(self.out)
        found = compare(comparisons, self.runs, at_once=self.jobs, data_dir=self.data_dir, on=self.on)
        target = TARGETS[self.target]
        documents = {}
        for comparison, rows in zip(comparisons, found, strict=True):
            chosen = target.columns(rows)
            about = write.about(rows) | {"paper": PAPER} | dict(target.notes)
            paths = write.write(folder, f"{self.target}-{comparison.name}", rows, chosen, about)
            documents[comparison.name] = write.document(rows, about)
            tell_failures(rows)
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
