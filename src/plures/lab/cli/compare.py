"""plures compare: several methods on one recipe."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tyro.conf import Positional, Suppress, arg

from plures.errors import PluresError, visible
from plures.lab.cli.shared import DataDir, Given, Settings, Switch, print_json

if TYPE_CHECKING:  # --help answers without torch
    from plures.lab.compare.rows import Row


@dataclass(frozen=True)
class Compare:
    """Train several methods on one recipe and print one table.

    Examples:
      plures compare digits --seeds 3
      plures compare cifar10-cpu --methods deterministic deep-ensemble
      plures compare cifar10-cpu --methods orthogonal-dropout
        orthogonal-dropout:granularity=weight mymethods:TwoHeads
      plures compare cifar10-cpu --shift --ood svhn
      plures compare digits --epochs.train 10 --runs runs/short --on ray

    What happens:
      Missing runs are trained, finished runs are skipped, and interrupted
      runs are resumed, in RUNS/RECIPE/METHOD/seed-N. Each is a process of
      `plures train` with one core or GPU, and prints to output.txt there. The
      table is written to RUNS/RECIPE as results.md, results.csv and
      results.json, or to OUT as compare-RECIPE. Settings of the recipe can be
      overridden as in `plures train`; methods that train for more epochs
      still do. The table has only the methods of this command; `plures report
      RUNS/RECIPE` shows all finished runs.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """The recipe: it sets the defaults of all options below. `plures recipes` lists them."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD[:NAME=VALUE,...]", help_behavior_hint="")] = ()
    """The methods, each with options that differ from the defaults; by default, all methods."""
    seeds: Annotated[int, arg(metavar="N")] = 1
    """How many runs to train per method, with the seeds 0, 1, ..."""
    runs: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    """The folder for all runs."""
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The folder for the table, written as compare-RECIPE; by default RUNS/RECIPE, as results."""
    jobs: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many runs to train at a time; by default, one per GPU or core."""
    on: Literal["here", "ray"] = "here"
    """Where to train: on this machine, or on the workers of a Ray cluster that can access the same folders."""
    data_dir: DataDir = None
    """The folder of data sets; by default, the environment variable PLURES_DATA."""
    shift: Switch = False
    """Also measure on corrupted images: adds columns, and charts in the report."""
    ood: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="")] = None
    """Also measure on out-of-distribution data: a name, a folder or a hub id."""
    json: Switch = False
    """Print the results as JSON."""
    settings: Annotated[Settings, arg(name="")] = field(default_factory=Settings)
    given: Given = ()
    method: Annotated[str, Suppress] = "deterministic"  # each method changes the recipe itself; this one does not

    after_interrupt: ClassVar[str] = "the same command resumes, and repeats no finished run"

    def __call__(self) -> int:
        """Train the missing runs, and show the table."""
        from plures.lab.compare import Comparison, variants

        if self.seeds < 1:
            raise PluresError(f"--seeds {self.seeds}: at least one is needed")
        seeds = tuple(range(self.settings.seed, self.settings.seed + self.seeds))
        members = self.settings.members if "members" in self.given else None
        comparison = Comparison(self.recipe, self.settings.recipe(), variants(self.methods), seeds, members=members)

        from plures.lab.compare import table as write  # only now: reporting a misspelt method needs no torch
        from plures.lab.compare.compare import compare

        name = "results" if self.out is None else f"compare-{self.recipe}"
        folder = write.writable(self.out or self.runs / self.recipe)
        (rows,) = compare(
            [comparison],
            self.runs,
            at_once=self.jobs,
            data_dir=self.data_dir,
            on=self.on,
            shift=self.shift,
            ood=self.ood,
        )
        chosen = write.columns(rows)
        paths = write.write(folder, name, rows, chosen, write.about(rows))
        tell_failures(rows)
        if self.json:
            print_json(write.document(rows, write.about(rows)))
        else:
            title = f"{self.recipe}: {self.settings.data}, {self.settings.model}"
            write.show(title, rows, chosen, f"written: {', '.join(map(str, paths))}")
        return 2 if any(row.failures for row in rows) else 0


def tell_failures(rows: "Sequence[Row]") -> None:
    """Print which runs failed, and why."""
    for row in rows:
        for failure in row.failures:
            print(visible(f"plures: {row.name} failed with {failure}"), file=sys.stderr)
