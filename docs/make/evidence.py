"""Make the tables at the cpu scale, which take many hours: run by run, on any machine.

    python docs/make/evidence.py --data-dir data                 # make what is missing, the most important runs first
    python docs/make/evidence.py --data-dir data --only table3   # only the runs of some tables
    python docs/make/evidence.py --tables                        # make no run; tables of what there is

`WANTED` lists the runs. The figures of a finished run are kept in docs/results/runs, in the layout of run folders:
another machine continues where this one stopped. Interrupted runs are resumed. `--tables` also keeps the figures of
runs that have finished while others continue. To measure a run again, delete its file; a run of a recipe that has
changed since is made again. The tables go to docs/results; `make docs` puts them into docs/results.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from plures import files
from plures.ensemble import Ensemble
from plures.errors import PluresError
from plures.lab.compare import table
from plures.lab.compare.compare import make_runs, refuse_others
from plures.lab.compare.jobs import Comparison, Job, Variant
from plures.lab.compare.pool import is_done
from plures.lab.compare.rows import Finished, Row
from plures.lab.data import DataInfo
from plures.lab.paper.published import TABLE1, paper_data
from plures.lab.paper.targets import AS_PUBLISHED, TARGETS
from plures.lab.recipes import get_recipe
from plures.lab.runs.open import data_for, described, ensemble_for, network_for
from plures.lab.timing.costs import Costs, costs_of
from plures.lab.timing.machine import machine
from plures.lab.training.progress import duration

RESULTS = Path(__file__).parent.parent / "results"
SINGLE, PACKED, SPLIT, DEEP, BATCH = map(
    Variant, ("deterministic", "packed-ensemble", "orthogonal-dropout", "deep-ensemble", "batch-ensemble")
)
MEAN = Variant("packed-ensemble", ("reduction=mean",), label="packed-ensemble, mean of the losses")
METHODS = (*TARGETS["table1"].variants("cifar10-cpu"), MEAN)


@dataclass(frozen=True)
class Wanted:
    """Runs that a table needs."""

    table: str
    recipe: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0,)

    def jobs(self, runs: Path) -> list[Job]:
        """List the runs."""
        return Comparison(self.recipe, get_recipe(self.recipe), self.variants, self.seeds).jobs(runs)


# The most important first: the claim itself with three seeds, whether it holds elsewhere, what the parts contribute.
WANTED = (
    Wanted("table1-cifar10-cpu", "cifar10-cpu", (SPLIT, DEEP, SINGLE), (0, 1, 2)),
    Wanted("table1-cifar100-cpu", "cifar100-cpu", (SINGLE, DEEP, PACKED, AS_PUBLISHED)),
    Wanted("table1-tiny-imagenet-cpu", "tiny-imagenet-cpu", (SINGLE, DEEP, PACKED, AS_PUBLISHED)),
    Wanted("table1-cub200-cpu", "cub200-cpu", (SINGLE, DEEP, PACKED, AS_PUBLISHED)),
    Wanted("width-cifar10-half-cpu", "cifar10-half-cpu", (SINGLE, SPLIT, DEEP)),
    Wanted("table3-cifar10-cpu", "cifar10-cpu", TARGETS["table3"].variants("cifar10-cpu")),
    Wanted("table1-cifar10-cpu", "cifar10-cpu", (PACKED, AS_PUBLISHED, BATCH), (0, 1, 2)),
    Wanted("table1-cifar10-cpu", "cifar10-cpu", METHODS),
    Wanted("table1-cifar100-cpu", "cifar100-cpu", (SPLIT,)),
    Wanted("table1-tiny-imagenet-cpu", "tiny-imagenet-cpu", (SPLIT,)),
    Wanted("table1-cub200-cpu", "cub200-cpu", (SPLIT,)),
)


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, keep their figures, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TABLE", help="tables whose names begin like this")
    parser.add_argument("--tables", action="store_true", help="make no run, and measure nothing")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of the runs")
    parser.add_argument("--data-dir", type=Path, help="the folder of the data sets")
    parser.add_argument("--jobs", type=int, help="runs at a time; one per core if not given")
    asked = parser.parse_args(words)
    wanted = [one for one in WANTED if one.table.startswith(tuple(asked.only))]
    if not wanted:
        parser.error(f"--only takes the beginnings of {', '.join(dict.fromkeys(one.table for one in WANTED))}")
    jobs = {kept_path(job): job for one in wanted for job in one.jobs(asked.runs)}
    missing, failures = [job for job in jobs.values() if kept(job) is None], {}
    try:
        if missing and not asked.tables:
            failures = make_runs(missing, asked.jobs, asked.data_dir, "here")
    finally:  # even if somebody lost patience
        for job in filter(is_done, missing):
            keep(job)
    if not asked.tables:
        for job in {job.run.parent: job for job in jobs.values() if kept(job) is not None}.values():
            keep_costs(job, asked.data_dir)
    for name in dict.fromkeys(one.table for one in wanted):
        write(name)
    if failures:
        sys.exit("\n".join(f"{run}: {reason}" for run, reason in failures.items()))


def kept_path(job: Job) -> Path:
    """Say where the figures of a run are kept."""
    return RESULTS / "runs" / job.recipe_name / job.variant.folder / f"seed-{job.recipe.seed}.json"


def keep(job: Job) -> None:
    """Keep the figures of a finished run; one that was made with other settings is refused."""
    refuse_others(job)
    path, run = kept_path(job), Finished.read(job.run)
    ensemble, _ = untrained(job, described(run.config, job.run)[1])
    if json.loads(json.dumps(ensemble.options())) != run.config["options"]:  # with other defaults, perhaps
        raise PluresError(f"the run in {job.run} was made with other options than {job.variant.name} has: delete it")
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "recipe": run.config["recipe"],
        "precision": run.config["environment"]["precision"],
        "machine": described_machine(),
        "metrics": {key: run.metrics[key] for key in (*table.FILED, "member_accuracies") if key in run.metrics},
    }
    files.write_json(path, document)


def keep_costs(job: Job, data_dir: Path | None) -> None:
    """Measure what a method costs, if that was not done yet: best on an idle machine. It depends on no seed."""
    path = kept_path(job).with_name("costs.json")
    if path.is_file():
        return
    info = data_for(job.recipe, data_dir).info
    files.write_json(path, {"machine": described_machine(), **vars(costs_of(*untrained(job, info), job.recipe, info))})


def untrained(job: Job, info: DataInfo) -> tuple[Ensemble, nn.Module]:
    """Build the ensemble of a run, and the network that it is made of."""
    network = network_for(job.recipe, len(info.classes), info.channels, info.size)
    return ensemble_for(job.recipe, job.variant.method, job.variant.settings, network), network


def described_machine() -> str:
    """Describe this machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine().items())


def kept(job: Job) -> Any | None:
    """Read what was kept of a run; None if it was not made, or with another recipe."""
    path = kept_path(job)
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return found if found["recipe"] == json.loads(json.dumps(job.recipe.as_json())) else None


def kept_seeds(recipe: str, variant: Variant) -> dict[int, Any]:
    """Read what was kept of a method, by seed."""
    folder = RESULTS / "runs" / recipe / variant.folder
    seeds = tuple(sorted(int(path.stem.removeprefix("seed-")) for path in folder.glob("seed-*.json")))
    jobs = Comparison(recipe, get_recipe(recipe), (variant,), seeds).jobs(Path())
    return {job.recipe.seed: found for job in jobs if (found := kept(job)) is not None}


class Kept(Finished):
    """A run of which only the figures were kept."""

    @property
    def method(self) -> str:
        """The method, as on the command line."""
        return str(self.config["method"])


def write(name: str) -> None:
    """Write a table of all runs that were kept for it."""
    wanted = [one for one in WANTED if one.table == name]
    recipe, target = wanted[0].recipe, TARGETS.get(name.partition("-")[0], TARGETS["table1"])
    paper = (target.paper or TABLE1).get(paper_data(get_recipe(recipe).data), {})
    order = target.variants(recipe) if name.startswith("table") else wanted[0].variants
    rows, machines = [], []
    for variant in dict.fromkeys((*order, *(variant for one in wanted for variant in one.variants))):
        found = kept_seeds(recipe, variant)
        machines += [f"{one['machine']}, precision {one['precision']}" for one in found.values()]
        runs = [
            Kept(Path(), {"recipe": {"seed": seed}, "method": variant.method}, one["metrics"])
            for seed, one in found.items()
        ]
        published = paper.get(variant.name) if target.paper else paper.get(paper_name(variant))
        if runs:
            rows.append(Row(variant.name, tuple(runs), kept_costs(recipe, variant), published))
    if rows:
        notes = about(name, rows) | {"machines": "; ".join(dict.fromkeys(machines))} | target.notes
        table.write(RESULTS, name, rows, target.columns(rows), notes)
        print(f"{name}: {sum(len(row.runs) for row in rows)} runs in {len(rows)} rows")


def kept_costs(recipe: str, variant: Variant) -> Costs | None:
    """Read what was measured of a method's costs."""
    path = RESULTS / "runs" / recipe / variant.folder / "costs.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return Costs(**{one.name: found[one.name] for one in fields(Costs)})


def paper_name(variant: Variant) -> str:
    """Say which row of the paper's table 1 has the same form; our own default has none."""
    if variant == AS_PUBLISHED:
        return variant.method
    return "" if variant.settings or variant.method == AS_PUBLISHED.method else variant.method


def about(name: str, rows: Sequence[Row]) -> dict[str, str]:
    """Say how the rows came about, and which have fewer seeds than others."""
    most = max(len(row.runs) for row in rows)
    fewer = [f"{row.name} ({', '.join(str(run.seed) for run in row.runs)})" for row in rows if len(row.runs) < most]
    return {
        **({"fewer seeds": "; ".join(fewer)} if fewer else {}),
        "command": f"python docs/make/evidence.py --only {name} --data-dir DATA",
        "training time of all runs, one core each": duration(sum(sum(row.values("seconds")) for row in rows)),
    }


if __name__ == "__main__":
    main()
