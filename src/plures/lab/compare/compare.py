"""Train the runs of comparisons, skip finished ones, and collect the results into rows."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from plures.errors import PluresError, visible
from plures.lab.compare.jobs import Comparison, Job, unique
from plures.lab.compare.pool import OnRay, Pool, Processes, default_jobs, is_done, run_all
from plures.lab.compare.progress import Watch
from plures.lab.compare.rows import Finished, Row, make_rows, with_costs, with_trust
from plures.lab.data import Data
from plures.lab.method_names import method_class
from plures.lab.recipes import Recipe
from plures.lab.runs.config import differences
from plures.lab.runs.folder import RunFolder, other_settings
from plures.lab.runs.open import data_for, ensemble_for, network_for

Where = Literal["here", "ray"]
STAND_IN = 64  # channels of the network that stages are counted with


def compare(
    comparisons: Sequence[Comparison],
    runs: Path,
    *,
    at_once: int | None = None,
    data_dir: Path | None = None,
    on: Where = "here",
    shift: bool = False,
    ood: str | None = None,
) -> list[list[Row]]:
    """Make what is missing of some comparisons and return the rows of each.

        rows, = compare([Comparison("digits", get_recipe("digits"), variants([]))], Path("runs"))

    Finished runs are not made again, interrupted ones are resumed. Missing data is reported before anything is made. A
    run that fails does not stop the others: its row gives the reason. With `shift` and
    `ood`, runs are also measured on corrupted and on other images; the results are kept in the run folders.
    """
    failures = make_runs(unique(job for one in comparisons for job in one.jobs(runs)), at_once, data_dir, on)
    tables = [_rows(one, runs, failures) for one in comparisons]
    if any(row.runs and row.costs is None for rows in tables for row in rows):
        print("measuring sizes and speeds", file=sys.stderr)
    tables = [with_costs(rows, trust_code=True) for rows in tables]  # code in them was named in the command
    if shift or ood:
        print("measuring under shift and among other data", file=sys.stderr)
        tables = [with_trust(rows, data_dir, shift=shift, ood=ood) for rows in tables]
    return tables


def make_runs(jobs: Sequence[Job], at_once: int | None, data_dir: Path | None, on: Where) -> dict[Path, str]:
    """Make the runs that are missing, and return the reasons of those that failed, by run folder."""
    if at_once is not None and at_once < 1:
        raise PluresError(f"--jobs {at_once}: at least one is needed")
    failures: dict[Path, str] = {}
    epochs: dict[Path, int] = {}
    for job in jobs:
        method_class(job.variant.method)  # one outside the package may not be there
        refuse_others(job)
    wanted = [job for job in jobs if not is_done(job)]
    for job in wanted:
        # Decoded here, once, before several processes ask for them. Data that are missing stop everything: it is better
        # to hear of them now than after hours.
        data = data_for(job.recipe, data_dir)
        try:
            known = next((epochs[one] for one in epochs if one.parent == job.run.parent), None)  # with another seed
            epochs[job.run] = count_epochs(job, data) if known is None else known
        except PluresError as error:
            failures[job.run] = str(error)
            print(visible(f"{job.name}: failed: {error}"), file=sys.stderr)
    missing = [job for job in wanted if job.run in epochs]
    begun = sum(RunFolder(job.run).log.is_file() for job in missing)
    going_on = f" ({begun} of them started before)" if begun else ""
    done = len(jobs) - len(wanted)
    print(f"{len(jobs)} runs: {done} done before, {len(missing)} to make{going_on}", file=sys.stderr)
    if not missing:
        return failures
    with _pool(on, at_once, data_dir) as pool, Watch(missing, epochs) as watch:
        return failures | run_all(missing, pool, watch)


@dataclass(frozen=True)
class Planned:
    """The runs of one variant: how many there are, how many are done, and the work of those that are missing."""

    recipe: str
    variant: str
    runs: int
    done: int
    stages: int
    epochs: int


def planned(comparison: Comparison, runs: Path) -> Iterator[Planned]:
    """Count the runs, stages and epochs of a comparison; nothing is trained or measured."""
    jobs = comparison.jobs(runs)
    for variant in comparison.variants:
        own = [job for job in jobs if job.variant == variant]
        missing = sum(not is_done(job) for job in own)
        recipe = own[0].recipe
        phases = _phases(variant.method, variant.settings, recipe.members)
        epochs = sum(map(recipe.epochs.of, phases))
        yield Planned(
            comparison.name, variant.name, len(own), len(own) - missing, len(phases) * missing, epochs * missing
        )


@cache
def _phases(method: str, settings: tuple[str, ...], members: int) -> list[str]:
    """List the phases of all stages: they follow from the method and its members, so the network may be a small one."""
    recipe = Recipe(model="resnet8", width=STAND_IN, members=members)
    network = network_for(recipe, classes=2, channels=1, size=8)
    return [step.phase for step in ensemble_for(recipe, method, settings, network).plan()]


def refuse_others(job: Job) -> None:
    """Refuse to continue where a run folder has a run with other settings."""
    if not (job.run / "config.json").is_file():
        return
    before = RunFolder(job.run).config()
    now = {"recipe": json.loads(json.dumps(job.recipe.as_json())), "method": job.variant.class_name}
    if differing := differences({key: before.get(key) for key in now}, now):
        raise other_settings(job.run, differing, "choose another folder with --runs, or the old settings")


def count_epochs(job: Job, data: Data) -> int:
    """See to it that a run can be made of some data, and return how many epochs it has."""
    network = network_for(job.recipe, len(data.classes), data.channels, data.size)
    ensemble = ensemble_for(job.recipe, job.variant.method, job.variant.settings, network)
    return sum(job.recipe.epochs.of(step.phase) for step in ensemble.plan())


def _pool(on: Where, at_once: int | None, data_dir: Path | None) -> "AbstractContextManager[Pool]":
    return OnRay(at_once, data_dir) if on == "ray" else Processes(at_once or default_jobs(), data_dir)


def _rows(comparison: Comparison, runs: Path, failures: Mapping[Path, str]) -> list[Row]:
    rows = []
    jobs = comparison.jobs(runs)
    for variant in comparison.variants:
        own = [job for job in jobs if job.variant == variant]
        finished = tuple(Finished.read(job.run) for job in own if job.run not in failures)
        failed = tuple(f"seed {job.recipe.seed}: {failures[job.run]}" for job in own if job.run in failures)
        rows.append(Row(variant.name, finished, failures=failed))
    if not any(row.runs for row in rows):
        raise PluresError(f"all runs of {comparison.name} failed: {next(iter(rows[0].failures), 'there is none')}")
    return make_rows(rows, comparison.paper)
