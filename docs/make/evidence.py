"""Make the tables that take many hours: run by run, on any machine.

    python docs/make/evidence.py --data-dir data                           # what is missing, the most important first
    python docs/make/evidence.py --data-dir data --only table3             # only the runs of some tables
    python docs/make/evidence.py --data-dir data --folder ensemble/seed-1  # only runs whose folders contain this
    python docs/make/evidence.py --tables                                  # make no run; tables of what there is

`WANTED` lists the runs. The figures of a finished run are kept in docs/results/runs, in the layout of run folders:
another machine continues where this one stopped. Interrupted runs are resumed. `--tables --data-dir data` also keeps
the figures of runs that have finished while others continue. Figures of another recipe or of other options do not
count, and a folder with such a run is refused; so is one of `plures compare` without `--precision no`. The tables go to
docs/results; `make docs` puts them into the pages.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

import classifiers
import store
from plures.errors import PluresError
from plures.lab.compare import Comparison, Job, Variant, table, unique
from plures.lab.compare.compare import is_done, make_runs
from plures.lab.compare.rows import Finished, Row
from plures.lab.figures import draw
from plures.lab.paper import AS_PUBLISHED, PAPER, TARGETS, paper_data
from plures.progress import duration

HERE = str(Path(__file__).parent)
SINGLE, PACKED, SPLIT, DEEP, BATCH = map(
    Variant, ("deterministic", "packed-ensemble", "orthogonal-dropout", "deep-ensemble", "batch-ensemble")
)
MEAN = Variant("packed-ensemble", ("reduction=mean",), label="packed-ensemble, mean of the losses")
# All members in one training run; twice the epochs take about as long as the deep ensemble.
TOGETHER = tuple(Variant("orthogonal-dropout", ("schedule=together",), longer=longer) for longer in (2.0, 1.0, 3.0))
# Figure 2 of the paper: quality against the number of members, here of those that train together.
COUNTS = (2, 5, 8, 10, 16)
MEMBERS = tuple(
    replace(one, members=count, label=f"{name} {count}")
    for name, one in {"orthogonal-dropout, together": TOGETHER[0], "deep-ensemble": DEEP}.items()
    for count in COUNTS
)
METHODS = (*TARGETS["table1"].variants, MEAN)
ABLATION = TARGETS["table3"].variants
FIGURE1 = "table1-cifar10-cpu"  # the table whose runs figure 1 shows: the accuracy of each member
KERNELS = next(one for one in ABLATION if one.settings == ("classifier=fixed",) and one.method == "orthogonal-dropout")


@dataclass(frozen=True)
class Wanted:
    """Runs that a table of test images needs."""

    table: str
    recipe: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0,)
    images: ClassVar[store.Images] = "metrics"

    def jobs(self, runs: Path) -> list[Job]:
        """Return the runs."""
        return Comparison(self.recipe, store.recipe_of(self.recipe), self.variants, self.seeds).jobs(runs)

    def write(self) -> int:
        """Write the table of all runs that were kept for it, and return their number."""
        return write(self.table)


@dataclass(frozen=True)
class HeldOut:
    """Runs that a table of held-out images needs; all of its rows, if none is named."""

    recipe: str
    seeds: tuple[int, ...] = (0,)
    rows: tuple[str, ...] = ()
    images: ClassVar[store.Images] = "held_out"

    @property
    def table(self) -> str:
        """The name of the table."""
        return f"classifiers-{self.recipe}"

    def jobs(self, runs: Path) -> list[Job]:
        """Return the runs."""
        every = classifiers.jobs_of(self.recipe, self.seeds, runs)
        return [job for row in self.rows or every for job in every[row]]

    def write(self) -> int:
        """Write the table of all runs that were kept for it, and return their number."""
        seeds = {seed for one in WANTED if one.table == self.table for seed in one.seeds}
        return classifiers.write(self.recipe, sorted(seeds))


# The most important first: the claim itself with three seeds, whether it holds elsewhere, what the parts contribute.
WANTED: tuple[Wanted | HeldOut, ...] = (
    Wanted("together-cifar10-cpu", "cifar10-cpu", TOGETHER[:1], (0, 1, 2)),
    Wanted("together-cifar10-cpu", "cifar10-cpu", (*TOGETHER, SPLIT, DEEP, SINGLE), (0, 1, 2)),
    Wanted("members-digits-resnet", "digits-resnet", MEMBERS, (0, 1, 2)),
    Wanted("table1-cifar100-cpu", "cifar100-cpu", TOGETHER[:1]),
    Wanted("table1-tiny-imagenet-cpu", "tiny-imagenet-cpu", TOGETHER[:1]),
    Wanted("table1-cub200-cpu", "cub200-cpu", TOGETHER[:1]),
    HeldOut("digits", (0, 1)),
    HeldOut("digits-resnet", (0, 1, 2)),
    Wanted("table1-cifar10-cpu", "cifar10-cpu", (SPLIT, DEEP, SINGLE), (0, 1, 2)),
    Wanted("table1-cifar100-cpu", "cifar100-cpu", (SINGLE, DEEP, PACKED, AS_PUBLISHED)),
    Wanted("table1-tiny-imagenet-cpu", "tiny-imagenet-cpu", (SINGLE, DEEP, PACKED, AS_PUBLISHED)),
    Wanted("table1-cub200-cpu", "cub200-cpu", (SINGLE, DEEP, PACKED, AS_PUBLISHED)),
    Wanted("table3-cifar10-cpu", "cifar10-cpu", ABLATION),
    # Orthogonal dropout takes about two hours on one core. On two, before all others:
    # plures train cifar10-half-cpu --precision no --run runs/cifar10-half-cpu/orthogonal-dropout/seed-0 --data-dir data
    Wanted("width-cifar10-half-cpu", "cifar10-half-cpu", (SINGLE, SPLIT, DEEP)),
    Wanted("table1-cifar10-cpu", "cifar10-cpu", (PACKED, AS_PUBLISHED), (0, 1, 2)),
    Wanted("table1-cifar10-cpu", "cifar10-cpu", (BATCH,), (0, 1, 2)),
    Wanted("table1-cifar10-cpu", "cifar10-cpu", METHODS),
    HeldOut("cifar10-cpu"),
    HeldOut("cifar100-cpu"),
    HeldOut("cifar100-cpu", (1,), ("split", "private")),  # which is the better default for large layers
    # Beside "as published": kernels and single weights, with everything else alike.
    Wanted("table3-cifar10-cpu", "cifar10-cpu", (KERNELS,), (0, 1, 2)),
    Wanted("table1-cifar100-cpu", "cifar100-cpu", (SPLIT,)),
    Wanted("table1-tiny-imagenet-cpu", "tiny-imagenet-cpu", (SPLIT,)),
    Wanted("table1-cub200-cpu", "cub200-cpu", (SPLIT,)),
)


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, keep their figures, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TABLE", help="tables whose names begin like this")
    parser.add_argument("--folder", nargs="+", default=[""], metavar="PART", help="runs whose folders contain this")
    parser.add_argument("--tables", action="store_true", help="make no run")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of the runs")
    parser.add_argument("--data-dir", type=Path, help="the folder of the data sets")
    parser.add_argument("--jobs", type=int, help="runs at a time; one per core if not given")
    asked = parser.parse_args(words)
    wanted = chosen(asked.only)
    if not wanted:
        parser.error(f"--only takes the beginnings of {', '.join(dict.fromkeys(one.table for one in WANTED))}")
    jobs = [(job, one.images) for one in wanted for job in one.jobs(asked.runs)]
    missing = unique(job for job, images in jobs if store.read(job, images) is None)
    missing = [job for job in missing if any(part in str(job.run.relative_to(asked.runs)) for part in asked.folder)]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # the processes of runs find the networks of this folder
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [HERE, *known])))
    failures: dict[Path, str] = {}
    try:
        if missing and not asked.tables:
            failures |= make_runs(missing, asked.jobs, asked.data_dir)
    finally:  # also if it was interrupted
        for job in filter(is_done, missing):
            with noted(failures, job):
                store.keep(job, asked.data_dir)
    for job in {job.run: job for job, images in jobs if images == "metrics" and store.read(job, images)}.values():
        with noted(failures, job):
            store.keep_costs(job)
    for name, one in {one.table: one for one in wanted}.items():
        if count := one.write():
            print(f"{name}: {count} runs")
        else:
            store.remove(name)
    if failures:
        sys.exit("\n".join(f"{run}: {reason}" for run, reason in failures.items()))


def chosen(names: Sequence[str]) -> list[Wanted | HeldOut]:
    """Return what is wanted for tables whose names begin with one of these, or are one of these."""
    exact = {one.table for one in WANTED} & set(names)
    others = tuple(name for name in names if name not in exact)
    return [one for one in WANTED if one.table in exact or one.table.startswith(others)]


@contextmanager
def noted(failures: dict[Path, str], job: Job) -> Iterator[None]:
    """Note why something failed for a run, and go on with the next one."""
    try:
        yield
    except PluresError as error:
        failures[job.run] = str(error)


class Kept(Finished):
    """A run of which only the figures were kept."""

    @property
    def method(self) -> str:
        """The method, as on the command line."""
        return str(self.config["method"])


def write(name: str) -> int:
    """Write a table of all runs on test images that were kept for it, and return their number."""
    wanted = [one for one in WANTED if isinstance(one, Wanted) and one.table == name]
    recipe, target = wanted[0].recipe, TARGETS.get(name.partition("-")[0], TARGETS["table1"])
    data = paper_data(store.recipe_of(recipe).data)
    order = target.variants if name.startswith("table") else wanted[0].variants
    rows: list[Row] = []
    documents: list[store.Kept] = []
    firsts: list[Job] = []
    for variant in dict.fromkeys((*order, *(variant for one in wanted for variant in one.variants))):
        (first,) = Wanted(name, recipe, (variant,)).jobs(Path())
        jobs = Wanted(name, recipe, (variant,), store.seeds_of(first)).jobs(Path())
        found = {job.recipe.seed: one for job in jobs if (one := store.read(job, "metrics"))}
        documents += found.values()
        runs = [
            Kept(Path(), {"recipe": {"seed": seed}, "method": variant.method}, one["metrics"])
            for seed, one in found.items()
        ]
        if runs:
            published = target.paper.get(data, {}).get(variant.name)
            rows.append(Row(variant.name, tuple(runs), store.kept_costs(first), published))
            firsts.append(first)
    store.refuse_other_data(name, documents)
    if rows:
        notes = about(name, rows) | {"machines": store.machines(documents)} | measured_on(rows, firsts)
        notes |= {"paper": PAPER} | dict(target.notes)
        table.write(store.RESULTS / name, rows, notes)
    panel = Comparison(recipe, store.recipe_of(recipe), ())
    if rows and name.startswith("members"):
        draw("figure2", [(panel, rows)], store.RESULTS / name, None)
    if rows and name == FIGURE1:
        figure = TARGETS["figure1"]
        shown = {one.name: figure.paper[data].get(one.name) for one in figure.variants}
        drawn = [replace(row, paper=shown[row.name]) for row in rows if row.name in shown]
        draw("figure1", [(panel, drawn)], store.RESULTS / "figure1-cpu", None)
    return len(documents)


def measured_on(rows: Sequence[Row], jobs: Sequence[Job]) -> dict[str, str]:
    """Return on which machines the costs of which rows were measured."""
    found: dict[str, list[str]] = {}
    for row, job in zip(rows, jobs, strict=True):
        if about_costs := store.costs_document(job):
            found.setdefault(about_costs["machine"], []).append(row.name)
    return {"costs measured on": "; ".join(f"{where} ({', '.join(names)})" for where, names in found.items())}


def about(name: str, rows: Sequence[Row]) -> dict[str, str]:
    """Return how the rows were made, and which have fewer seeds than others."""
    most = max(len(row.runs) for row in rows)
    fewer = [f"{row.name} ({', '.join(str(run.seed) for run in row.runs)})" for row in rows if len(row.runs) < most]
    return {
        **({"fewer seeds": "; ".join(fewer)} if fewer else {}),
        "command": f"python docs/make/evidence.py --only {name} --data-dir DATA",
        "training time of all runs, one core each": duration(sum(sum(row.values("seconds")) for row in rows)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)  # as the runs have: beside one of them, two threads take many times as long as one
    main()
