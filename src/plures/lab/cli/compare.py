"""plures compare: methods side by side on one recipe."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tyro.conf import Positional, Suppress, arg

from plures.errors import PluresError
from plures.lab.cli.shared import DataDir, Given, Settings, Switch, print_json

if TYPE_CHECKING:  # --help answers without torch
    from plures.lab.compare.rows import Row


@dataclass(frozen=True)
class Compare:
    """Run methods side by side on one recipe, in one table.

    Examples:
      plures compare digits --seeds 3
      plures compare cifar10-cpu --methods deterministic deep-ensemble
      plures compare cifar10-cpu --methods orthogonal-dropout
        orthogonal-dropout:granularity=kernel mymethods:TwoHeads
      plures compare cifar10-cpu --shift --ood svhn
      plures compare digits --epochs.train 10 --runs runs/short --on ray

    What happens:
      Missing runs are made, finished ones skipped, interrupted ones resumed, in
      RUNS/RECIPE/METHOD/seed-N. Each takes one core (or one GPU); several are
      made at a time. The table goes to RUNS/RECIPE as results.md, results.csv
      and results.json. Numbers of the recipe can be overridden as for
      `plures train`; methods that need longer still get longer. The table
      holds the methods of this command; `plures report RUNS/RECIPE` shows all
      finished runs.
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """Where all numbers come from, unless given below; `plures recipes` lists them."""
    methods: Annotated[tuple[str, ...], arg(metavar="METHOD[:NAME=VALUE,...]")] = ()
    """Which methods, each with its options where they differ from the usual ones; all if none is named."""
    seeds: Annotated[int, arg(metavar="N")] = 1
    """How often to run every method, with the seeds 0, 1, ..."""
    runs: Annotated[Path, arg(metavar="FOLDER")] = Path("runs")
    """The folder of all runs."""
    jobs: Annotated[int | None, arg(metavar="N")] = None
    """How many runs to make at a time; if not given, one per GPU or core."""
    on: Literal["here", "ray"] = "here"
    """Where runs are made: here, or by the workers of a Ray cluster that sees the same folders."""
    data_dir: DataDir = None
    """Where data sets are looked up by name; if not given, the environment's PLURES_DATA."""
    shift: Switch = False
    """Measure under corruptions, too: columns, and charts in the report."""
    ood: Annotated[str | None, arg(metavar="DATA")] = None
    """Measure how well other data are told apart, too: a name, a folder or a hub id."""
    json: Switch = False
    """Print the results as JSON."""
    settings: Annotated[Settings, arg(name="")] = field(default_factory=Settings)
    given: Given = ()
    method: Annotated[str, Suppress] = "deterministic"  # each changes the recipe by itself: here it is as it stands

    after_interrupt: ClassVar[str] = "the same command resumes, and repeats no finished run"

    def __call__(self) -> int:
        """Run what is missing, and show the table."""
        from plures.lab.compare.jobs import Comparison, variants

        if self.seeds < 1:
            raise PluresError(f"--seeds {self.seeds}: at least one is needed")
        seeds = tuple(range(self.settings.seed, self.settings.seed + self.seeds))
        members = self.settings.members if "members" in self.given else None
        comparison = Comparison(self.recipe, self.settings.recipe(), variants(self.methods), seeds, members=members)

        from plures.lab.compare import table as write  # only now: to say that a method is misspelt needs no torch
        from plures.lab.compare.compare import compare

        folder = write.writable(self.runs / self.recipe)
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
        paths = write.write(folder, "results", rows, chosen, write.about(rows))
        tell_failures(rows)
        if self.json:
            print_json(write.document(rows, write.about(rows)))
        else:
            title = f"{self.recipe}: {self.settings.data}, {self.settings.model}"
            write.show(title, rows, chosen, f"written: {', '.join(map(str, paths))}")
        return 2 if any(row.failures for row in rows) else 0


def tell_failures(rows: "Sequence[Row]") -> None:
    """Say which runs failed, and why."""
    for row in rows:
        for failure in row.failures:
            print(f"plures: {row.name} failed with {failure}", file=sys.stderr)
